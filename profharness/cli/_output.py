"""Where results go: stdout or a file, whole or not at all; hints go to stderr."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from profharness.files import atomic_file, check_output

if TYPE_CHECKING:
    from profharness.views.document import Chart, Document


SUFFIX_FORMATS = {
    **{f".{name}": name for name in ("json", "jsonl", "csv", "md", "html")},
    ".htm": "html",
}
DEFAULT_WIDTH = 100


def hint(text: str) -> None:
    """One line to stderr, which never is part of the result."""
    with contextlib.suppress(BrokenPipeError):
        click.echo(text, err=True)


def emit(
    document: Document,
    format_: str | None,
    output: Path | None = None,
    *,
    force: bool = False,
    images: str = "svg",
) -> None:
    """Render the document to the file, else to stdout. Without a format, the file's suffix
    decides, else `table`. images: what the charts beside a Markdown file are, `svg` or `png`."""
    from profharness.views.renderers import RENDERERS

    if format_ is None:
        format_ = SUFFIX_FORMATS.get(output.suffix.lower(), "table") if output else "table"
    if format_ == "md" and output is not None:
        _write_markdown(document, output, images, force=force)
        return
    options: dict[str, Any] = {}
    if format_ == "table":
        options = {"width": _width(), "color": output is None and _wants_color()}
    text = RENDERERS[format_](document, **options)
    if output is not None:
        with atomic_file(output, force=force) as file:
            file.write(text.encode())
        hint(f"wrote {output}")
        return
    encoding = (getattr(sys.stdout, "encoding", None) or "utf-8") if format_ == "table" else "utf-8"
    with quiet_stdout() as stream:
        stream.write(text.encode(encoding, "replace"))


def _write_markdown(document: Document, output: Path, images: str, *, force: bool) -> None:
    """The page and, beside it, a picture for each of its charts."""
    from profharness.views.document import Chart
    from profharness.views.renderers import render_markdown

    charts = [block for block in document.blocks if isinstance(block, Chart)]
    paths = [
        output.with_name(f"{output.stem}-{number}.{images}") for number in range(1, len(charts) + 1)
    ]
    for path in paths:
        check_output(path, force=force)
    for number, (path, chart) in enumerate(zip(paths, charts, strict=True), start=1):
        content = _picture(chart, number, images)
        with atomic_file(path, force=force) as file:
            file.write(content)
    with atomic_file(output, force=force) as file:
        file.write(render_markdown(document, images=[path.name for path in paths]).encode())
    hint(f"wrote {output}" + (f" and {len(paths)} charts beside it" if paths else ""))


def _picture(chart: Chart, number: int, kind: str) -> bytes:
    from profharness.views.charts import draw_png, draw_svg

    return draw_png(chart) if kind == "png" else draw_svg(chart, number, alone=True).encode()


def _wants_color() -> bool:
    return (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def _width() -> int:
    return shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns


@contextlib.contextmanager
def quiet_stdout() -> Iterator[IO[bytes]]:
    """Binary stdout for a result; a reader that goes away early (`| head`) ends the writing
    without a complaint."""
    sys.stdout.flush()
    stream = sys.stdout.buffer
    try:
        yield stream
        stream.flush()
    except BrokenPipeError:
        # What is still buffered would raise once more when the interpreter closes stdout.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
