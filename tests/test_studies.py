"""scripts/make_studies.py: what it asks of the command line can be asked, and runs on this CPU become a
page.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from profharness.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
TINY = "1,2,16,16,fp32"


@pytest.fixture(scope="module")
def studies() -> Iterator[ModuleType]:
    """The script, importable beside its own folder as it is when it runs."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        yield importlib.import_module("make_studies")
    finally:
        sys.path.remove(str(ROOT / "scripts"))


def test_every_command_line_can_be_read(studies: ModuleType) -> None:
    """Options and choices are checked by the commands themselves; nothing is run."""
    names = []
    for study in studies.STUDY_LIST:
        runs = dict.fromkeys(study.measure, "20260101-000000-aaaa")
        answers = [[word.format(**runs) for word in each.words] for each in study.answer]
        for name, *rest in [*study.measure.values(), *answers]:
            command = import_module(COMMANDS[name][0]).command
            assert command.make_context(name, rest).params
            names.append(name)
    assert set(names) == {"capture", "bench", "kernels", "analyze", "diff"}


def test_every_step_is_measured_and_told(studies: ModuleType) -> None:
    path = studies.large_head_dim
    measured = path.capture_words()[path.capture_words().index("--backend") + 1].split(",")
    told = {word for section in path.sections() for word in section.words}
    for step in path.PATH:
        assert step.backend in measured
        assert step.backend in told
        assert len(step.heading) > 0
    timed = path.bench_words()[path.bench_words().index("--backend") + 1].split(",")
    assert set(timed) >= set(measured)


def test_real_runs_become_a_page(
    studies: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path of two steps, the second a function of a file, captured and benched here."""
    path = studies.large_head_dim
    monkeypatch.setattr(path, "SHAPE", TINY)
    monkeypatch.setattr(path, "SEEN", ("auto", "math"))
    monkeypatch.setattr(studies, "STUDIES", tmp_path / "docs")
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "large-head-dim.md"
    page.write_text(f"# Title\n\nKept.\n\n{studies.MARK}\nthrown away\n")
    steps = (
        path.Step("math", "The first way", "Said of it."),
        path.Step("kernels/naive.py:attention", "The second way", "Said of that."),
    )
    backends = ("--backend", "math,kernels/naive.py:attention,auto")
    quick = (
        "--config",
        TINY,
        *backends,
        "--device",
        "cpu",
        "--iterations",
        "5",
        "--processes",
        "1",
    )
    study = studies.Study(
        path.NAME,
        {"capture": ("capture", *quick), "bench": ("bench", *quick)},
        tuple(path.sections(steps)[number] for number in (0, 3, 4, 6)),
    )
    (tmp_path / "runs").mkdir()
    store = ("--store", str(tmp_path / "runs" / "store.db"))
    for run, words in study.measure.items():
        studies.profharness(*words, *store, "--out", str(study.place(tmp_path / "runs", run)))
    studies.write(tmp_path / "runs", [study])
    text = page.read_text()
    assert text.startswith(
        f"# Title\n\nKept.\n\n{studies.MARK}\n## 1. The first way\n\nSaid of it."
    )
    assert "thrown away" not in text
    lines = text.splitlines()
    headings = [line for line in lines if line.startswith("#")]
    assert ("## 1. The first way" in headings, "## All steps and peers" in headings) == (True, True)
    assert headings.count("# Title") == 1
    assert not [line for line in headings[1:] if line.startswith("# ")]
    for inside in ("Against step 1:", "### Kernels", "### Analysis"):
        assert inside in lines
    assert any("aten::bmm" in line or "| bmm" in line for line in lines)
    assert not list((tmp_path / "docs").glob("*-report.md"))


def test_code_keeps_its_hash_signs(studies: ModuleType) -> None:
    text = "# One\n\n```python\n# a comment\n```\n\n## Two\n"
    assert studies.lowered(text, 2) == "### One\n\n```python\n# a comment\n```\n\n#### Two\n"
