"""Update the command output in the pages of the documentation, and draw its pictures.

python scripts/make_outputs.py            # README.md, docs/*.md and docs/pictures
python scripts/make_outputs.py PAGE...    # only these pages

The `console` blocks of each page run in order, in an empty folder that has the traces of the project.
`tests/test_install.py` compares the pages with the output of an installed profharness. Run this
script on an idle machine: the examples that measure show the figures of this machine.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Their output on stderr is a part of the example.
WITH_STDERR = ("profharness capture", "profharness ingest")
# Their output is that of a terminal with 100 columns, because the full table is wider than a page.
IN_TERMINAL = ("profharness layers traces/models/bert_fp32.json.gz --torch 2.11",)
PICTURES = (  # arguments of scripts/make_pictures.py
    (
        "terminal",
        "layers.svg",
        "--width",
        "100",
        "--",
        "layers",
        "traces/models/llama_eager.json.gz",
    ),
    ("page", "report.png", "traces/models/llama_train.json.gz", "--height", "830"),
)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def in_terminal(command: str) -> str:
    """Return a command that runs another one in a terminal of 100 columns, without its stderr."""
    inner = f"stty cols 100; {command} 2>/dev/null"
    return f"script -qec {shlex.quote(inner)} /dev/null | tr -d '\\r'"


def run(command: str, folder: Path) -> str:
    """Return what a command prints, with stderr if it is shown or if stdout goes to a file."""
    shown = command.startswith(WITH_STDERR) or " > " in command
    environment = {name: text for name, text in os.environ.items() if name != "COLUMNS"}
    environment |= {
        "NO_COLOR": "1",
        "PYTHONPATH": str(ROOT),
        "PATH": f"{folder}:{environment['PATH']}",
    }
    done = subprocess.run(
        ["bash", "-c", in_terminal(command) if command in IN_TERMINAL else command],
        cwd=folder,
        env=environment | {"CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if shown else subprocess.DEVNULL,
        text=True,
        check=False,
    )
    if " > " in command:  # a trace is read only once, which depends on the pages before
        return re.sub(r"^reading .*\n", "", done.stdout, flags=re.MULTILINE)
    return re.sub(r", about .* left$", "", done.stdout, flags=re.MULTILINE)  # of a slow machine


def write_outputs(page: Path, folder: Path) -> None:
    """Replace the output of each command of a page."""

    def replaced(block: re.Match[str]) -> str:
        commands = [line[2:] for line in block[1].splitlines() if line.startswith("$ ")]
        parts = (f"$ {command}\n{run(command, folder)}" for command in commands)
        return f"```console\n{''.join(parts)}```"

    page.write_text(BLOCK.sub(replaced, page.read_text(encoding="utf-8")), encoding="utf-8")


def draw_pictures() -> None:
    for kind, name, *arguments in PICTURES:
        out = str(ROOT / "docs" / "pictures" / name)
        script = str(ROOT / "scripts" / "make_pictures.py")
        subprocess.run([sys.executable, script, kind, out, *arguments], cwd=ROOT, check=True)


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = folder / "profharness"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m profharness "$@"\n')
        command.chmod(0o755)
        for path in (ROOT / "traces").iterdir():
            if path.is_dir() and path.name != "runs":
                shutil.copytree(path, folder / "traces" / path.name)
        for page in [Path(each).resolve() for each in names] or pages():
            write_outputs(page, folder)
    if not names:
        draw_pictures()


if __name__ == "__main__":
    main(sys.argv[1:])
