"""Run a seeded part of the fault campaign, and check that the campaign detects faults."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]
READERS = (
    "kineto",
    "ncu-csv",
    "nsys",
    "ncu-rep",
    "run-folder",
    "grammar",
    "store",
    "atlas",
    "scrub-nsys",
    "scrub-ncu",
)
TRIALS = ("scanner", "kill-ingest", "disks", "secrets", "writers", "pages")

pytestmark = pytest.mark.xdist_group("campaign")


def campaign(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "campaign.py"), "--out", str(out), *words],
        cwd=out.parent,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.parametrize("kind", [*READERS, *TRIALS])
def test_a_part_of_the_campaign_finds_nothing(kind: str, tmp_path: Path) -> None:
    words = ("--only", kind, "--seed", "1", "--seconds", "1", "--engine", "seeded")
    done = campaign(tmp_path / "out", *words, "--format", "json")
    (row,) = json.loads(done.stdout)
    if row["tried"] == "0":
        pytest.skip(row["how"])
    kept = "\n".join(path.read_text() for path in (tmp_path / "out").rglob("*.txt"))
    assert (done.returncode, row["failed"]) == (0, "0"), f"{row}\n{kept[:6000]}"


BROKEN = {
    "import os; os.abort()": "signal SIGABRT",
    "return {}['nothing']": "KeyError in ncu_csv.py",
}


@pytest.mark.parametrize("line", BROKEN)
def test_faults_of_a_reader_are_found_and_kept(line: str, tmp_path: Path) -> None:
    """Uses a copy of the package whose CSV reader has a fault."""
    root = tmp_path / "broken"
    shutil.copytree(ROOT / "profharness", root / "profharness")
    (reader,) = root.glob("profharness/traces/ncu_csv.py")
    broken = f"\n\ndef read_csv_text(*_, **__):\n    {line}\n"
    text = reader.read_text()
    assert "\ndef read_csv_text(" in text
    reader.write_text(text + broken)
    out = tmp_path / "out"
    words = ("--only", "ncu-csv", "--root", str(root), "--engine", "seeded", "--failures", "1")
    done = campaign(out, *words)
    assert done.returncode == 1
    assert BROKEN[line] in done.stdout, done.stdout + done.stderr
    first = next((out / "ncu-csv").glob("*.bin"))
    again = campaign(out, "--root", str(root), "--repeat", str(first))
    assert again.returncode != 0
    ballast = b"x" * 420_000_000  # the memory of the tests does not count as the reader's
    good = campaign(out, "--repeat", str(first))
    assert (good.returncode, len(ballast)) == (0, 420_000_000), good.stdout


def test_the_table_can_be_markdown(tmp_path: Path) -> None:
    done = campaign(tmp_path / "out", "--only", "grammar", "--seconds", "1", "--format", "md")
    header, rule, row = done.stdout.splitlines()
    assert header == "| kind | tried | failed | slowest CPU s | peak MB | how |"
    assert rule.count("|") == header.count("|") == row.count("|")
    assert campaign(tmp_path / "out", "--only", "grammer").returncode == 2


def test_read_beyond_text_of_scanner_is_found(tmp_path: Path) -> None:
    """Uses a copy of the package whose scanner reads past the end of its text."""
    find = ("cc", "-print-file-name=libasan.so")
    if (
        shutil.which("cc") is None
        or not Path(subprocess.check_output(find, text=True)).is_absolute()
    ):
        pytest.skip("no C compiler with the address sanitizer")
    root = tmp_path / "broken"
    shutil.copytree(ROOT / "profharness", root / "profharness")
    source = root / "profharness" / "traces" / "scanner.c"
    text, right = source.read_text(), "stop = begin + last;"
    assert text.count(right) == 1
    source.write_text(text.replace(right, "stop = begin + last + 1;"))
    out = tmp_path / "out"
    done = campaign(out, "--only", "scanner", "--seconds", "1", "--root", str(root))
    assert (done.returncode, done.stdout.count("ends its process")) == (1, 1), done.stdout
    (kept,) = (out / "scanner").glob("*.txt")
    assert "heap-buffer-overflow" in kept.read_text()
