"""Edge cases of the Python functions: wrong arguments, empty answers, whole numbers, progress."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import profharness
from profharness.attention.config import parse_config
from profharness.commands._output import progress_line
from profharness.errors import NotFoundError, StoreError, UsageError
from profharness.processes import PrewarmedWorker
from profharness.recording.supervise import Step
from profharness.run import Cell
from profharness.store import open_store, to_frame

ROOT = Path(__file__).resolve().parents[1]
THREE = ROOT / "traces" / "h200-torch-nsys-ncu"
CONFIG = "1,1,16,16,fp32"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with a run recorded by torch, nsys and ncu."""
    path = tmp_path_factory.mktemp("edges") / "s.db"
    profharness.ingest(THREE, store=path)
    return path


def attention(q: Any, k: Any, v: Any) -> Any:
    """An implementation given as a function, which no worker can load."""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"iterations": -5}, "iterations=-5 is not a whole number from 1 to 10,000"),
        ({"iterations": 0}, "iterations=0 "),
        ({"iterations": 2.5}, "iterations=2.5 "),
        ({"samples": -3}, "samples=-3 is not a whole number from 0"),
        ({"warmup": -1}, "warmup=-1 "),
        ({"warmup": True}, "warmup=True "),
        ({"device": "tpu"}, "unknown device 'tpu'; choose from auto, cuda, cpu"),
        ({"seed": "x"}, "seed='x' "),
        ({"seed": 2**64}, "seed=18446744073709551616 "),
        ({"timeout_s": 0}, "timeout_s=0 is not a number from 0.1"),
        ({"timeout_s": float("inf")}, "timeout_s=inf "),
        ({"timeout_s": float("nan")}, "timeout_s=nan "),
        ({"backends": [attention]}, "is not a name; .* file.py:function"),
        ({"backends": attention}, "is not a name"),
        ({"configs": 5}, "5 is not a config"),
        ({"configs": ["1,1,8,8", None]}, "None is not a config"),
        ({"configs": []}, "configs is empty"),
        ({"configs": iter(())}, "configs is empty"),
        ({"backends": ()}, "backends is empty"),
        ({"profilers": []}, "profilers is empty"),
        ({"profilers": "perf"}, "'perf'"),
    ],
)
def test_invalid_arguments_are_refused_before_anything_is_created(
    arguments: dict[str, Any], text: str, tmp_path: Path
) -> None:
    asked = {"configs": CONFIG, "backends": "math", "store": tmp_path / "s.db", "out": tmp_path}
    with pytest.raises(UsageError, match=text):
        profharness.capture(**(asked | arguments))
    if arguments.keys() & {"device", "seed", "timeout_s", "backends", "configs"}:
        with pytest.raises(UsageError, match=text):
            profharness.verify(**(asked | arguments))
    assert list(tmp_path.iterdir()) == []


def refused_worker() -> None:
    raise AssertionError("a worker was started")


def test_a_capture_of_nothing_starts_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrewarmedWorker, "start", refused_worker)
    for arguments in ({"configs": ()}, {"configs": 5}, {"iterations": 0}, {"resume": "latest"}):
        asked: dict[str, Any] = {"configs": CONFIG, "store": tmp_path / "s.db", "out": tmp_path}
        with pytest.raises(UsageError):
            profharness.capture(**(asked | arguments))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        (
            "report",
            {"format": "bad"},
            "unknown format 'bad'; choose from table, json, jsonl, csv, md, html",
        ),
        ("report", {"path": "out.pdf"}, "unknown report format 'pdf'"),
        ("analyze", {"peaks": "guess"}, "unknown peaks 'guess'; choose from measure, data-sheet"),
        ("analyze", {"configs": ()}, "configs is empty"),
        ("export", {"run": "latest", "profiler": "perf"}, "unknown profiler 'perf'"),
        ("kernels", {"profilers": "perf"}, "unknown profiler 'perf'"),
        ("kernels", {"backends": []}, "backends is empty"),
        ("launches", {"profiler": "perf"}, "unknown profiler 'perf'"),
        ("cells", {"backends": ()}, "backends is empty"),
        ("cells", {"configs": ()}, "configs is empty"),
        (
            "bench",
            {"run": "latest", "convention": "loose"},
            "unknown convention 'loose'; choose from",
        ),
        (
            "repro",
            {"run": "latest", "device": "tpu"},
            "unknown device 'tpu'; choose from auto, cuda, cpu",
        ),
        ("layers", {"step": -1}, "step=-1 is not a whole number of at least 0"),
        (
            "diff",
            {"baseline": "a", "candidate": "b", "threshold": 0},
            "threshold=0 is not a number",
        ),
        ("ranks", {"threshold": float("inf")}, "threshold=inf is not a number above 0"),
    ],
)
def test_a_function_refuses_a_value_before_it_reads_the_store(
    name: str, arguments: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=text):
        getattr(profharness, name)(**arguments, store=tmp_path / "none.db")


def test_a_step_of_numpy_is_a_number(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="the store does not exist"):
        profharness.layers(step=np.int64(0), store=tmp_path / "none.db")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"configs": ()}, "configs is empty"),
        ({"backends": []}, "backends is empty"),
        ({"measurements": ()}, "measurements is empty"),
        ({"max_time_s": -1}, "max_time_s=-1 is not a number"),
        ({"max_time_s": 0}, "max_time_s=0 "),
        ({"precision": "x"}, "precision: 'x' is not a fraction; write 3% or 0.03"),
        ({"precision": 0}, "precision=0 "),
        ({"precision": 1.5}, "precision=1.5 "),
        ({"iterations": 0}, "iterations=0 is not a whole number of at least 1"),
        ({"warmup": -2}, "warmup=-2 "),
        ({"seed": "x"}, "seed='x' "),
        ({"processes": 0, "iterations": 3}, "processes=0 is not a whole number from 1 to 100"),
        ({"device": "tpu"}, "'tpu'"),
        ({"convention": "loose"}, "'loose'"),
        ({"measurements": "hours"}, "'hours'"),
        ({"dtypes": [16]}, "16 is not a name"),
    ],
)
def test_an_invalid_bench_measures_nothing(
    arguments: dict[str, Any], text: str, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {"configs": CONFIG, "backends": "math", "device": "cpu"}
    with pytest.raises(UsageError, match=text):
        profharness.bench(**(asked | arguments), store=tmp_path / "s.db", out=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_explain_requires_a_config_and_a_device() -> None:
    with pytest.raises(UsageError, match="configs is empty"):
        profharness.explain([])
    with pytest.raises(UsageError, match="no config given"):
        profharness.explain(None)
    with pytest.raises(UsageError, match="'tpu'"):
        profharness.explain(CONFIG, device="tpu")


def test_kernels_are_those_of_one_profiler_as_on_the_command_line(store: Path) -> None:
    rows = profharness.kernels(run="latest", store=store)
    assert set(rows["profiler"]) == {"torch"}
    assert set(profharness.launches(store=store)["profiler"]) == {"torch"}
    every = profharness.kernels(run="latest", profilers="all", store=store)
    assert set(every["profiler"]) == {"torch", "nsys", "ncu"}
    assert set(profharness.launches(profiler="all", store=store)["profiler"]) == {
        *("torch", "nsys", "ncu")
    }
    assert len(profharness.kernels(profilers="nsys", run="latest", store=store)) < len(every)


def test_the_useful_columns_come_first(store: Path) -> None:
    shown = repr(profharness.kernels(run="latest", store=store))
    with pd.option_context("display.width", 250, "display.max_columns", 20):
        shown = repr(profharness.kernels(run="latest", store=store))
    header = shown.splitlines()[0]
    for name in ("config", "backend", "kernel_short", "duration_ns", "total_ns", "share"):
        assert name in header


def test_whole_numbers_stay_whole(store: Path) -> None:
    rows = profharness.kernels(run="latest", profilers="all", store=store)
    for name in (
        "grid_x",
        "block_x",
        "registers_per_thread",
        "duration_ns",
        "dynamic_shared_bytes",
    ):
        assert pd.api.types.is_integer_dtype(rows[name].dtype), name
    assert str(rows["grid_x"].dtype) == "Int64" and rows["grid_x"].isna().any()
    with open_store(store) as opened:
        launches = list(opened.launches(profiler="torch"))
        raw = [launch.graph_node for launch in launches]
    assert to_frame(launches)["start_ns"].tolist() == [launch.start_ns for launch in launches]
    frame = profharness.launches(profiler="torch", store=store)
    assert set(raw) == {None} and str(frame["graph_node"].dtype) == "Int64"
    assert frame["bytes"].dropna().tolist() == [each.bytes for each in launches if each.bytes]


def test_large_numbers_in_a_column_with_gaps_keep_their_last_digit(store: Path) -> None:
    large = 2**62 + 1
    frame = profharness.query(f"SELECT {large} AS n UNION ALL SELECT NULL ORDER BY 1", store=store)
    assert frame["n"].dropna().tolist() == [large]


def test_an_empty_answer_has_its_columns_or_is_not_found(store: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="flex"):
        profharness.kernels(run="latest", backends="flex", store=store)
    for empty, full in (
        (
            profharness.launches(cell="c9999", store=store),
            profharness.launches(store=store),
        ),
        (
            profharness.kernels(run="latest", backends="cudnn", profilers="ncu", store=store)[:0],
            profharness.kernels(run="latest", profilers="ncu", backends="cudnn", store=store),
        ),
    ):
        assert len(empty) == 0
        assert list(empty.columns) == list(full.columns)
    with open_store(tmp_path / "new.db", write=True):
        pass
    assert "launches" in profharness.runs(store=tmp_path / "new.db").columns
    cells = profharness.cells(backends="nosuch", store=store)
    assert len(cells) == 0 and {"status", "config", "reason"} - {*cells.columns} == {"reason"}


@pytest.mark.parametrize(
    "sql",
    [
        "ATTACH DATABASE '{}' AS x",
        "DELETE FROM runs",
        "SELECT 1; SELECT 2",
        "SELECT nothing FROM nowhere",
        "PRAGMA user_version = 3",
    ],
)
def test_other_sql_than_a_select_is_refused_and_makes_no_file(
    sql: str, store: Path, tmp_path: Path
) -> None:
    file = tmp_path / "new.db"
    before = store.read_bytes()
    try:
        profharness.query(sql.format(file), store=store)
    except UsageError as error:
        assert "only SELECT statements are allowed" in str(error)
    else:
        assert sql.startswith("PRAGMA")  # SQLite ignores it silently
    assert not file.exists()
    assert store.read_bytes() == before


class Terminal(io.StringIO):
    """A stream that reports to be a terminal."""

    def isatty(self) -> bool:
        return True


STEPS = (
    Step(0, 2, Cell("c1", parse_config("1,1,8,8,fp32"), "flash"), "profile"),
    Step(1, 2, Cell("c2", parse_config("1,1,8,8,fp32"), "math"), "ok"),
)


@pytest.mark.parametrize(
    ("stream", "wanted", "speaks"),
    [(Terminal, None, True), (io.StringIO, None, False), (Terminal, False, False)],
)
def test_progress_is_one_line_in_a_terminal(
    stream: type[io.StringIO], wanted: bool | None, speaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream())
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    with progress_line(wanted) as show:
        for step in STEPS if show is not None else ():
            show(step)
    written = sys.stderr.getvalue()  # type: ignore[attr-defined]
    if not speaks:
        assert written == ""
        return
    first, second, spaces, rest = written.strip("\n").removeprefix("\r").split("\r")
    assert first == "[0/2] b1-h1-s8-d8-fp32 flash: profile"
    assert second.rstrip() == "[1/2] b1-h1-s8-d8-fp32 math: ok"
    assert len(second) >= len(first)  # the first line is overwritten
    # Bug: the last line stayed above the answer.
    assert spaces == " " * len(second.rstrip()) and rest == "" and "\n" not in written


def test_progress_in_a_notebook_goes_to_its_cell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Shell:
        kernel = object()

    class IPython:
        get_ipython = staticmethod(Shell)

    monkeypatch.setitem(sys.modules, "IPython", IPython)  # type: ignore[arg-type]
    with progress_line(None) as show:
        assert show is not None
        show(STEPS[1])
    out, err = capsys.readouterr()
    line = "[1/2] b1-h1-s8-d8-fp32 math: ok"
    assert (out, err) == (f"\r{line}\r{' ' * len(line)}\r", "")


def test_a_capture_reports_progress_and_an_interrupted_one_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = {"store": tmp_path / "s.db", "out": tmp_path / "runs"}
    done = profharness.capture(
        CONFIG, "math", profilers="events", device="cpu", samples=1, progress=True, **common
    )
    assert "[1/1] b1-h1-s16-d16-fp32 math: ok" in capsys.readouterr().err
    with pytest.raises(NotFoundError, match="cannot find the run folder 'nosuch'"):
        profharness.resume("nosuch", **common)
    assert list(done["status"]) == ["ok"]


def test_reports_are_texts_and_files(store: Path, tmp_path: Path) -> None:
    text = profharness.report("latest", format="md", store=store)
    assert text.startswith("# ")
    path = tmp_path / "out.json"
    written = profharness.report(path=path, store=store)
    assert path.read_text() == written and '"profharness.report/1"' in written
    with pytest.raises(UsageError, match="already exists"):
        profharness.report(path=path, store=store)
    with pytest.raises(UsageError, match="unknown report format 'pdf'"):
        profharness.report(path=tmp_path / "out.pdf", store=store)
    with pytest.raises(NotFoundError):
        profharness.report("nosuch", format="md", store=store)


def test_the_other_commands_are_functions_too(tmp_path: Path) -> None:
    checks = profharness.run_doctor(store=tmp_path / "s.db")
    assert {"torch", "python"} <= {name.lower() for name in checks["name"]}
    copy = profharness.scrub_run(THREE, tmp_path / "copy")
    assert copy == tmp_path / "copy" and (copy / "run.json").exists()
    for name in ("list_backends", "resume", "report", "run_doctor", "scrub_run"):
        assert name in dir(profharness) and callable(getattr(profharness, name))


def test_explain_kernel_and_repro_are_functions_too(tmp_path: Path) -> None:
    short = "flash_fwd_splitkv_kernel<64,64x256,w4>"
    frame = profharness.explain_kernel([short, "nobody_knows"])
    assert list(frame["library"])[1] == "unknown" and frame["head_dim"][0] == 64
    assert profharness.explain_kernel(short)["name"][0] == short
    with pytest.raises(UsageError, match="NAME is empty"):
        profharness.explain_kernel([" "])
    path = tmp_path / "repro.py"
    text = profharness.repro("1,2,8,16,fp32", "math", seed=7, device="cpu", output=path)
    assert path.read_text() == text and "SEED = 7" in text and 'DEVICE = "cpu"' in text
    for wrong in ({"configs": ["1,1,8,8", "1,1,9,8"]}, {}, {"configs": "1,1,8,8", "device": "tpu"}):
        with pytest.raises(UsageError):
            profharness.repro(**wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        profharness.repro("1,2,8,16", output=path)
