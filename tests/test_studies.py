"""docs/studies/: every page agrees with its runs, including the prose. Runs made here can be
packed, read and queried.
"""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from string import Template
from types import ModuleType

import msgspec
import pytest

from profharness.cli import COMMANDS, find_command
from profharness.devices import Peaks
from profharness.render import charts
from profharness.run import read_run

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "studies"
NOT_STUDIES = ("README", "items")
NAMES = sorted(path.stem for path in PAGES.glob("*.md") if path.stem not in NOT_STUDIES)
pytestmark = pytest.mark.xdist_group("studies")  # unpacking and storing the runs takes seconds


@pytest.fixture(scope="module")
def studies() -> Iterator[ModuleType]:
    """Yield the script, importable from its own folder as when it runs."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        yield importlib.import_module("make_studies")
    finally:
        sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture(scope="module")
def runs(studies: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("studies")
    studies.unpack(folder)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_page_agrees_with_its_runs(
    name: str,
    studies: ModuleType,
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compares text, figures in it, and the list of pictures. `python scripts/make_studies.py
    write` creates them again. The contents of pictures are not compared; tests/render/test_charts.py
    covers drawing.
    """
    monkeypatch.setattr(charts, "draw_svg", lambda *_, **__: "<svg/>")
    (study,) = (study for study in studies.STUDIES if study.name == name)
    (page,) = studies.pages(runs, tmp_path, [study])
    committed = PAGES / f"{name}.md"
    assert page.read_text(encoding="utf-8") == committed.read_text(encoding="utf-8")
    pictures = {path.name for path in tmp_path.glob("*.svg")}
    assert pictures == {path.name for path in PAGES.glob(f"{name}-[0-9]*.svg")}


def test_every_study_has_a_page_and_a_line(studies: ModuleType) -> None:
    assert sorted(study.name for study in studies.STUDIES) == NAMES
    index = (PAGES / "README.md").read_text(encoding="utf-8")
    assert all(f"({name}.md)" in index for name in NAMES)


def test_every_picture_is_used() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES.glob("*.md"))
    assert [path.name for path in PAGES.glob("*.svg") if f"<{path.name}>" not in pages] == []


def test_check_lists_what_write_would_change(
    studies: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page or picture that differs, is missing, or is not used any more."""
    study = studies.Study("tiny", {})
    new = {"tiny.md": "page", "tiny-1-1.svg": "picture", "tiny-1-2.svg": "another"}
    old = new | {"tiny-1-1.svg": "earlier", "tiny-2-1.svg": "unused", "tiny-note.md": "other"}
    del old["tiny-1-2.svg"]
    for name, text in old.items():
        (tmp_path / name).write_text(text)

    def write(_: object, target: Path) -> None:
        for name, text in new.items():
            (target / name).write_text(text)

    monkeypatch.setattr(studies, "write", write)
    changed = ["tiny-1-1.svg", "tiny-1-2.svg", "tiny-2-1.svg"]
    assert studies.outdated([study], tmp_path) == changed
    write(None, tmp_path)
    (tmp_path / "tiny-2-1.svg").unlink()
    assert studies.outdated([study], tmp_path) == []


def test_the_archive_is_small_and_contains_only_runs(studies: ModuleType, runs: Path) -> None:
    assert studies.PACKED.stat().st_size < 3_000_000
    for study in studies.STUDIES:
        for name in study.runs:
            (first, *_) = sorted((runs / "runs" / study.name / name).glob("*/run.json"))
            run = read_run(first.parent)
            assert bool(run.traces) == (name in study.traced)
            assert not {cell.status for cell in run.cells} - {"ok", "refused"}


def test_every_command_line_can_be_parsed(studies: ModuleType) -> None:
    """The commands check options and choices themselves. Nothing is run."""
    for study in studies.STUDIES:
        for name, *rest in study.runs.values():
            assert find_command(name).make_context(name, rest).params
        for script, *_ in study.printed.values():
            assert (ROOT / "scripts" / script).is_file()


def test_every_item_has_a_verdict_and_valid_commands(runs: Path) -> None:
    """Each named run is committed. Only `no` and `partly` have a reason."""
    text = (PAGES / "items.md").read_text(encoding="utf-8")
    names = dict(re.findall(r"\b([A-Z]+)=(\d{8}-\d{6}-[0-9a-f]{4})\b", text))
    stored = {path.parent.name for path in runs.glob("runs/*/*/*/run.json")}
    assert set(names.values()) <= stored
    rows = re.findall(r"^\| (\d+) \| (.+) \| (.+) \| (.+) \|$", text, re.MULTILINE)
    studies = [count for (count, *_), (after, *_) in pairwise([*rows, "1"]) if after == "1"]
    assert studies == ["12", "26", "19", "13", "17"]
    verdicts = Counter(verdict.partition(": ")[0] for *_, verdict in rows)
    covered = "{yes} items are covered fully, {partly} are covered partly, and {no} are not covered"
    assert covered.format_map(verdicts) in text
    assert all((verdict == "yes") == (": " not in verdict) for *_, verdict in rows)
    for said in re.findall(r"`([^`]+)`", " ".join(answer for _, _, answer, _ in rows)):
        name, *rest = shlex.split(Template(said).substitute(names))
        if name in COMMANDS:
            find_command(name).make_context(name, rest)


def test_a_page_that_contradicts_its_data_is_not_written(
    studies: ModuleType, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = replace(studies.STUDIES[0], name="backend-investigation")
    monkeypatch.setattr(studies, "TEMPLATES", tmp_path)
    template = tmp_path / "backend-investigation.md"
    tiny = '"1,1,16,8192,fp32"'
    template.write_text(
        f'{{{{ claim(us({tiny}, "naive") < us({tiny}, "auto"), "It is faster") }}}}\n'
    )
    (page,) = studies.pages(runs, tmp_path / "..", [study])
    assert page.read_text().startswith("It is faster\n\n## Words\n")
    page.unlink()
    template.write_text(
        f'{{{{ claim(us({tiny}, "naive") > us({tiny}, "auto"), "It is slower") }}}}\n'
    )
    with pytest.raises(SystemExit, match="contradict this: It is slower"):
        list(studies.pages(runs, tmp_path / "..", [study]))
    template.write_text(f'{{{{ us({tiny}, "flash") }}}}\n')
    with pytest.raises(SystemExit, match="0 rows of"):
        list(studies.pages(runs, tmp_path / "..", [study]))


def test_runs_made_here_are_packed_and_queried(studies: ModuleType, tmp_path: Path) -> None:
    """One run keeps its traces, the other only its samples."""
    tiny, quick = ("--config", "1,2,16,16,fp32"), ("--device", "cpu", "--backend", "auto,math")
    bench = ("bench", *tiny, *quick, "--iterations", "5", "--processes", "1")
    study = studies.Study(
        "tiny", {"look": ("capture", *tiny, *quick), "bench": bench}, {}, ("look",)
    )
    measured, store = tmp_path / "measured", ("--store", str(tmp_path / "scratch.db"))
    for name, words in study.runs.items():
        studies.command(*words, *store, "--out", str(measured / "runs" / "tiny" / name))
    peaks = Peaks("A processor", "measured", 1e11, {"fp32": 1e12}, None, None, "a test")
    record = studies.Measured(peaks, {"cpu": "A processor"}, "2026-01-01T00:00:00+00:00")
    (measured / "peaks.json").write_bytes(msgspec.json.encode(record))
    studies.pack(measured, tmp_path / "packed.tar.xz", [study])
    studies.unpack(tmp_path / "again", tmp_path / "packed.tar.xz")
    figures = studies.Figures(study, tmp_path / "again", tmp_path)
    (before,) = (measured / "runs" / "tiny" / "bench").glob("*/run.json")
    assert figures.run("bench") == read_run(before.parent).run
    samples = sorted(read_run(before.parent).cells[0].samples["wall"])
    row = figures.row("bench --run {bench}", config="1,2,16,16,fp32", backend="auto")
    assert row["median_ns"] == samples[2]
    assert figures.us("1,2,16,16,fp32", "auto", "wall") == samples[2] / 1000
    assert {row["backend"] for row in figures.rows("kernels --run {look}")} == {"auto", "math"}
    assert figures.answer("bench --run {bench}").startswith("### Bench of run")
    assert not list(tmp_path.glob("tiny-*.md"))


def test_numbers_have_three_digits(studies: ModuleType) -> None:
    given = (357.31, 8.2888, 0.87123, 1201.4, 15, 0.5)
    assert [studies.digits(value) for value in given] == [
        "357",
        "8.29",
        "0.871",
        "1,201",
        "15.0",
        "0.500",
    ]


def test_code_keeps_its_hash_signs(studies: ModuleType) -> None:
    text = "# One\n\n```python\n# a comment\n```\n\n## Two\n"
    assert studies.lowered(text, 2) == "### One\n\n```python\n# a comment\n```\n\n#### Two\n"
