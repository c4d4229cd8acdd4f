"""scripts/check_intervals.py on run folders whose samples have a known spread."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from profharness.config import expand_configs, parse_config
from profharness.run import Cell, Protocol, Run, write_run

SCRIPTS = Path(__file__).parents[2] / "scripts"
L4 = {"device_type": "cuda", "gpu": "NVIDIA L4", "torch": "2.8.0"}
BACKENDS = ("flash", "math", "/somewhere/repeats.py:flash", "/somewhere/repeats.py:math")


@pytest.fixture(scope="module")
def check() -> Iterator[ModuleType]:
    sys.path.insert(0, str(SCRIPTS))
    try:
        yield importlib.import_module("check_intervals")
    finally:
        sys.path.remove(str(SCRIPTS))


def write_runs(folder: Path, process: float, counts: dict[str, int]) -> None:
    """Runs whose processes differ by that standard deviation; repeats.py takes 5 % more in slower."""
    rng = np.random.default_rng(4)
    for kind, count in counts.items():
        for number in range(count):
            cells = []
            for place, backend in enumerate(BACKENDS):
                more = 1.05 if kind == "slower" and "repeats" in backend else 1.0
                samples: list[int] = []
                for shift in rng.normal(0, process, 3):
                    samples += map(int, 1e6 * more * (1 + shift + rng.normal(0, 0.004, 24)))
                turns = [(each // 3, each % 3, 8) for each in range(9)]
                config = parse_config("2,8,512,64,fp16")
                named = {"samples": {"graph": samples}, "turns": {"graph": turns}}
                cells.append(Cell(f"c{place}", config, backend, "ok", **named))  # type: ignore[arg-type]
            name = f"20260101-0000{number:02d}-{kind[:4]}"
            run = Run(name, "2026-01-01", ("events",), Protocol(), tuple(cells), L4)
            (folder / kind / name).mkdir(parents=True)
            write_run(folder / kind / name, run)


def test_the_figures_are_those_of_the_runs(
    check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_runs(tmp_path, 0.003, {"alike": 5, "slower": 1})
    runs = check.read(tmp_path, tmp_path / "s.db")
    check.report([runs])
    text = capsys.readouterr().out
    assert "5 like runs, 10 pairs of them; 1 slower runs" in text
    assert "of 40, " in text  # ten pairs of four cells
    assert "false alarms of --fail-on slower 0.00% of 80 cells: reached" in text
    assert "slow-downs of 5 % found 100.00% of 10 cells: reached" in text
    (share, total, half) = check.overlaps([runs])["graph"]
    assert share >= 0.95 * total and 0 < half < 0.03


def test_one_run_says_nothing(check: ModuleType, tmp_path: Path) -> None:
    write_runs(tmp_path, 0.0, {"alike": 1})
    with pytest.raises(SystemExit, match="two like runs are needed"):
        check.report([check.read(tmp_path, tmp_path / "s.db")])


def test_what_a_gpu_records_can_be_asked(check: ModuleType) -> None:
    """At least thirty cells, of which some may be refused."""
    configs = [config for text in check.CONFIGS["cuda"] for config in expand_configs(text)]
    assert len(configs) == len({config.label for config in configs}) == len(check.CONFIGS["cuda"])
    assert len(configs) * (len(check.BACKENDS["cuda"]) + len(check.REPEATING["cuda"])) >= 35
    for kind, repeats in check.REPEATS.items():
        source = check.SOURCE.format(repeats=repeats)
        assert f"REPEATS = {repeats}" in source, kind
        compile(source, "repeats.py", "exec")
