"""Run scripts/check_intervals.py on run folders whose samples have a known spread."""

from __future__ import annotations

import importlib
import itertools
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from profharness.attention.config import expand_configs, parse_config
from profharness.run import Cell, Protocol, Run, read_run, write_run

SCRIPTS, TRACES = (Path(__file__).parents[2] / name for name in ("scripts", "traces"))
PACKED = TRACES / "intervals.tar.xz"
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
    """Write runs whose processes differ by that standard deviation. repeats.py takes 5 % longer in
    slower.
    """
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
    assert "5 equal runs in 10 pairs; 1 slower runs" in text
    assert "of 40, " in text  # ten pairs of four cells
    assert "false alarms of --fail-on slower 0.00% of 80 cells: reached" in text
    assert "slow-downs of 5 % found 100.00% of 10 cells: reached" in text
    (share, total, half) = check.overlaps([runs])["graph"]
    assert share >= 0.95 * total and 0 < half < 0.03


def test_the_limits_hold_on_runs_of_two_gpus(
    check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compare the first equal runs of each GPU and the slower one. The script compares all of them,
    and takes a minute.
    """
    folders = check.unpacked(PACKED, tmp_path)
    runs = [sorted((folder / "alike").iterdir()) for folder in folders]
    assert math.comb(sum(map(len, runs)), 2) >= 100 and len(folders) == 2
    for further in itertools.chain(*(own[3:] for own in runs)):
        shutil.rmtree(further)
    few = check.read_all(folders, tmp_path)
    assert {len(run.samples) for own in few for run in own} == {31}
    check.report(few)
    text = capsys.readouterr().out
    assert text.count("reached") == 6 and "MISSED" not in text
    assert text.count(f"of {6 * 31},") == 4  # six pairs by four measurements
    assert "of 60 cells: reached" in text  # ten cells that are slower


def test_what_is_packed_keeps_the_samples_and_no_traces(check: ModuleType, tmp_path: Path) -> None:
    """Use a run of an older version, whose kernel times are only in its traces, and a run that was
    cut short.
    """
    source = tmp_path / "gpu" / "alike"
    run = read_run(TRACES / "h200-torch2.11")
    run = replace(run, cells=run.cells[:2], traces=run.traces[:2])
    for name in ("whole", "cut"):
        (source / name).mkdir(parents=True)
    write_run(source / "whole", run)
    for trace in run.traces:
        shutil.copy(TRACES / "h200-torch2.11" / trace.path, source / "whole")
    write_run(source / "cut", replace(run, cells=(replace(run.cells[0], status="pending"),)))
    check.pack([tmp_path / "gpu"], tmp_path / "runs.tar.xz")
    ((packed,),) = check.read_all([tmp_path / "runs.tar.xz"], tmp_path / "there")
    ((whole,),) = check.read_all([tmp_path / "gpu"], tmp_path)
    assert packed.samples == whole.samples and packed.kind == "alike"
    assert all(told["kernel"] for told in packed.samples.values()) and not packed.side.kernels


def test_one_run_says_nothing(check: ModuleType, tmp_path: Path) -> None:
    write_runs(tmp_path, 0.0, {"alike": 1})
    with pytest.raises(SystemExit, match="two equal runs are needed"):
        check.report([check.read(tmp_path, tmp_path / "s.db")])


def test_what_a_gpu_records_can_be_asked(check: ModuleType) -> None:
    """There are at least thirty cells, of which some may be refused."""
    configs = [config for text in check.CONFIGS["cuda"] for config in expand_configs(text)]
    assert len(configs) == len({config.label for config in configs}) == len(check.CONFIGS["cuda"])
    assert len(configs) * (len(check.BACKENDS["cuda"]) + len(check.REPEATING["cuda"])) >= 35
    for kind, repeats in check.REPEATS.items():
        source = check.SOURCE.format(repeats=repeats)
        assert f"REPEATS = {repeats}" in source, kind
        compile(source, "repeats.py", "exec")
