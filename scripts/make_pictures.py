"""Make the pictures of the documentation from real output.

python scripts/make_pictures.py terminal OUT.svg [--width N] [--lines N] -- layers traces/models/llama_eager.json.gz
python scripts/make_pictures.py page OUT.png RUN_OR_FILE... [--dark] [--width N] [--height N]
python scripts/make_pictures.py all FOLDER

`terminal` runs a command in a pseudo-terminal and draws what it prints to stdout. `page` draws the
report in a headless Chromium, which needs selenium and chromedriver. `all` draws the pages of the
committed traces: at 1,280 pixels, dark, and on a phone. Commands use a store of their own.
"""

from __future__ import annotations

import argparse
import base64
import fcntl
import os
import pty
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from profharness.files import STORE_VARIABLE

ROOT = Path(__file__).resolve().parents[1]
PHONE = 390  # width in pixels below which the browser acts as a phone
CELL, LINE, SIZE, MARGIN = 8.4, 19, 14, 16  # of the terminal's characters, in pixels
INK, PAPER, EDGE = "#d7dae0", "#1d2025", "#484d56"
# The eight standard colours of terminals in order, in shades that are readable on PAPER.
COLORS = ("#8b919c", "#ff8a80", "#8fd694", "#f2c55c", "#82b1ff", "#d9a5f0", "#6fd3e0", INK)
WORDS = re.compile(r"\S+(?: \S+)*")
PAGES = {
    "training": ("traces/models/llama_train.json.gz",),
    "eager": ("traces/models/llama_eager.json.gz",),
    "generate": ("traces/models/llama_generate",),
    "capture": ("traces/h200-torch2.11",),
    "diff": ("traces/models/llama_eager.json.gz", "traces/models/llama_prefill.json.gz"),
}
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")


def run_in_terminal(argv: Sequence[str], width: int, store: Path) -> str:
    """Return what a command of profharness prints to a terminal of this width, with escape codes."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    environment = os.environ | {
        "COLUMNS": str(width),
        "TERM": "xterm-256color",
        STORE_VARIABLE: str(store),
    }
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(
        [sys.executable, "-m", "profharness", *argv],
        stdin=subprocess.DEVNULL, stdout=follower, stderr=subprocess.PIPE, env=environment,
    ) as process:  # fmt: skip
        os.close(follower)
        printed = b"".join(_chunks(leader))
        assert process.stderr is not None
        errors = process.stderr.read().decode()
    if process.returncode not in (0, 3):  # 3: a gate was not met
        raise SystemExit(f"profharness {shlex.join(argv)} failed:\n{errors}")
    return printed.decode().replace("\r\n", "\n")


def _chunks(leader: int) -> Iterator[bytes]:
    while True:
        try:
            chunk = os.read(leader, 65536)
        except OSError:  # Linux reports the end of a pseudo-terminal as an input/output error
            chunk = b""
        if not chunk:
            os.close(leader)
            return
        yield chunk


def draw_terminal(printed: str, command: str, width: int) -> str:
    """Return an SVG of a terminal after a command. It uses only fonts of the reader's system."""
    console = Console(width=width)
    prompt = Text.assemble(("$ ", "green"), (command, "bold"))
    prompt.truncate(width, overflow="ellipsis")
    rows, lines = [], [prompt]
    for line in Text.from_ansi(printed.strip("\n")).split("\n", allow_blank=True):
        line.rstrip()
        lines += line.divide(range(width, len(line), width))  # as a terminal wraps
    for number, line in enumerate(lines):
        column, spans = 0, []
        for segment in line.render(console):
            # A viewer may merge blanks, so each part has a position. Its length keeps the columns
            # aligned in a font of another width.
            for part in WORDS.finditer(segment.text):
                at = (column + cell_len(segment.text[: part.start()])) * CELL
                length = cell_len(part[0]) * CELL
                spans.append(
                    f'<tspan x="{at:.1f}" textLength="{length:.1f}"{_style(segment.style)}>'
                    f"{escape(part[0], quote=False)}</tspan>"
                )
            column += cell_len(segment.text)
        if spans:
            rows.append(f'<text y="{(number + 1) * LINE - 5}">{"".join(spans)}</text>')
    wide, high = width * CELL + 2 * MARGIN, len(lines) * LINE + 2 * MARGIN
    body = "\n".join(rows)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {high}" '
        f'width="{wide:.0f}" height="{high}" role="img" aria-label="{escape(command)}">\n'
        f'<rect x=".5" y=".5" width="{wide - 1:.0f}" height="{high - 1}" rx="8" fill="{PAPER}" '
        f'stroke="{EDGE}"/>\n<g transform="translate({MARGIN} {MARGIN})" fill="{INK}" '
        f'font-size="{SIZE}" font-family="ui-monospace, SFMono-Regular, '
        f"Menlo, Consolas, 'Liberation Mono', 'DejaVu Sans Mono', monospace\">\n{body}\n</g>\n</svg>\n"
    )


def _style(style: object) -> str:
    """Return the attributes of a text in a style of rich."""
    color = getattr(style, "color", None)
    fill = ""
    if color is not None and color.number is not None and color.number < 16:
        fill = COLORS[color.number % 8]
    elif color is not None and not color.is_default:
        fill = color.get_truecolor().hex
    return (
        (f' fill="{fill}"' if fill and fill != INK else "")
        + (' font-weight="bold"' if getattr(style, "bold", None) else "")
        + (' fill-opacity=".7"' if getattr(style, "dim", None) else "")
        + (' font-style="italic"' if getattr(style, "italic", None) else "")
    )


def make_terminal(
    out: Path, argv: Sequence[str], width: int, store: Path, lines: int | None = None
) -> None:
    """Draw a command of profharness and its output, up to `lines` lines."""
    printed = run_in_terminal(argv, width, store).strip("\n").split("\n")
    if lines is not None and len(printed) > lines:
        printed = [*printed[:lines], "…"]
    command = shlex.join(["profharness", *argv])
    out.write_text(draw_terminal("\n".join(printed), command, width), encoding="utf-8")


def write_report(page: Path, refs: Sequence[str], store: Path) -> None:
    """Write the report on runs or files."""
    argv = [sys.executable, "-m", "profharness", "report", *refs, "-o", str(page), "--force"]
    environment = os.environ | {STORE_VARIABLE: str(store)}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"profharness report {shlex.join(refs)} failed:\n{done.stderr}")


def draw_page(page: Path, out: Path, width: int, *, height: int | None, dark: bool) -> None:
    """Draw a page as a headless Chromium shows it, down to its end or to `height` pixels."""
    from selenium import webdriver

    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    options = webdriver.ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, names)), "")
    for flag in FLAGS:
        options.add_argument(flag)
    browser = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(shutil.which("chromedriver"))
    )
    try:
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [theme]})
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width <= PHONE}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(page.absolute().as_uri())
        whole = browser.execute_script("return document.documentElement.scrollHeight")
        size["height"] = min(height or whole, whole)
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
        out.write_bytes(base64.b64decode(shot["data"]))
    finally:
        browser.quit()


def make_all(folder: Path, scratch: Path) -> None:
    """Draw the pages of the committed traces into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, refs in PAGES.items():
        page = folder / f"{name}.html"
        write_report(page, [str(ROOT / ref) for ref in refs], scratch / f"{name}.db")
        for suffix, width, dark in (
            ("", 1280, False),
            ("-dark", 1280, True),
            ("-phone", PHONE, False),
        ):
            draw_page(page, folder / f"{name}{suffix}.png", width, height=None, dark=dark)


def main() -> None:
    """Parse the arguments and make the pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    terminal = kinds.add_parser("terminal")
    terminal.add_argument("out", type=Path)
    terminal.add_argument("--width", type=int, default=100, help="columns of the terminal")
    terminal.add_argument("--lines", type=int, help="maximum number of lines of output")
    terminal.add_argument("argv", nargs="+", help="arguments of profharness, after --")
    page = kinds.add_parser("page")
    page.add_argument("out", type=Path)
    page.add_argument("refs", nargs="+", help="runs or files")
    page.add_argument("--dark", action="store_true")
    page.add_argument("--width", type=int, default=1280, help="width in pixels; 390 is a phone")
    page.add_argument("--height", type=int, help="draw only this many pixels from the top")
    everything = kinds.add_parser("all")
    everything.add_argument("folder", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        if args.kind == "terminal":
            make_terminal(args.out, args.argv, args.width, _store(scratch), args.lines)
        elif args.kind == "page":
            write_report(scratch / "page.html", args.refs, _store(scratch))
            draw_page(
                scratch / "page.html", args.out, args.width, height=args.height, dark=args.dark
            )
        else:
            make_all(args.folder, scratch)


def _store(scratch: Path) -> Path:
    """Return the store of the environment, if there is one, so that its runs can be drawn."""
    return Path(os.environ.get(STORE_VARIABLE) or scratch / "store.db")


if __name__ == "__main__":
    main()
