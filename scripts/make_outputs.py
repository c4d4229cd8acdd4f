"""Write what the commands of the documentation print into its pages.

python scripts/make_outputs.py [PAGE...]

The `console` blocks of each page run in order, in an empty folder that has the traces of the project;
without arguments, those of all pages. `tests/test_install.py` compares the pages with the output of
an installed profharness. The page of a command that measures shows the figures of this machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Their output on stderr is a part of the example.
WITH_STDERR = ("profharness capture", "profharness ingest")


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def run(command: str, folder: Path) -> str:
    """Return what a command prints, with stderr if it is shown or if stdout goes to a file."""
    shown = command.startswith(WITH_STDERR) or " > " in command
    dropped = {"COLUMNS", "NO_COLOR"}
    environment = {name: text for name, text in os.environ.items() if name not in dropped}
    environment |= {"PYTHONPATH": str(ROOT), "PATH": f"{folder}:{environment['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment | {"CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if shown else subprocess.DEVNULL,
        text=True,
        check=False,
    )
    return done.stdout


def write_outputs(page: Path, folder: Path) -> None:
    """Replace the output of each command of a page."""

    def replaced(block: re.Match[str]) -> str:
        commands = [line[2:] for line in block[1].splitlines() if line.startswith("$ ")]
        parts = (f"$ {command}\n{run(command, folder)}" for command in commands)
        return f"```console\n{''.join(parts)}```"

    page.write_text(BLOCK.sub(replaced, page.read_text(encoding="utf-8")), encoding="utf-8")


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = folder / "profharness"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m profharness "$@"\n')
        command.chmod(0o755)
        for path in (ROOT / "traces" / "models", *(ROOT / "traces").glob("h200-*")):
            shutil.copytree(path, folder / "traces" / path.name)
        for page in [Path(each).resolve() for each in names] or pages():
            write_outputs(page, folder)


if __name__ == "__main__":
    main(sys.argv[1:])
