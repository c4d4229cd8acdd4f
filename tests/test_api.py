"""The Python interface on a real capture."""

from __future__ import annotations

import inspect
import pydoc
import re
from pathlib import Path

import pandas as pd
import pytest

import profharness
from profharness.attention.config import parse_config
from profharness.errors import NotFoundError, UsageError
from profharness.recording.profilers import PROFILERS as REGISTRY
from profharness.rows import ROCPROFV3, TRACE_PROFILERS
from profharness.run import read_run

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "1,2,64,32,fp32"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with one small CPU run."""
    folder = tmp_path_factory.mktemp("api")
    cells = profharness.capture(
        CONFIG, "flash,math,cudnn", store=folder / "s.db", out=folder, device="cpu", samples=8
    )
    assert list(cells["status"]) == ["ok", "ok", "refused"]
    assert list(cells["backend"]) == ["flash", "math", "cudnn"]
    return folder / "s.db"


def test_kernels_of_a_config(store: Path) -> None:
    rows = profharness.kernels(CONFIG, store=store)
    assert isinstance(rows, pd.DataFrame)
    assert set(rows["backend"]) == {"flash", "math"}
    assert "softmax" in set(rows["family"])
    same = profharness.kernels([parse_config(CONFIG)], backends=["math"], store=store)
    assert set(same["backend"]) == {"math"}


def test_profilers_are_named_as_on_the_command_line(store: Path) -> None:
    every = profharness.kernels(CONFIG, profilers="all", store=store)
    assert len(every) > 0
    pd.testing.assert_frame_equal(every, profharness.kernels(CONFIG, store=store))
    pd.testing.assert_frame_equal(
        every, profharness.kernels(run="latest", profilers=["nsys", "all"], store=store)
    )
    assert profharness.kernels(CONFIG, profilers="nsys", store=store).empty
    for bad in ("bogus", "torch,bogus", "events"):
        with pytest.raises(
            UsageError, match="choose from torch, nsys, ncu, rocprofv3, rpd, rocprof, all"
        ):
            profharness.kernels(CONFIG, profilers=bad, store=store)
    with pytest.raises(UsageError, match="'bogus'"):
        profharness.launches(profiler="bogus", store=store)
    assert len(profharness.launches(profiler="all", store=store)) > 0


def test_layers_of_a_trace_file(tmp_path: Path) -> None:
    trace = ROOT / "traces" / "models" / "llama_eager.json.gz"
    frame = profharness.layers(trace, store=tmp_path / "s.db")
    assert isinstance(frame, pd.DataFrame)
    assert set(frame["kind"]) == {"eager"}
    assert (frame["calls"] > 0).all()
    (own,) = frame.attrs["layers"]
    assert [row.module for row in own.rows] == list(frame["module"])


def test_help_tells_what_a_caller_gets_and_nothing_shadows_a_function() -> None:
    for name in ("layers", "kernels", "predict", "verify"):
        function = getattr(profharness, name)
        assert inspect.signature(function).return_annotation == "pd.DataFrame"
    package = Path(str(profharness.__file__)).parent
    folders = {path.stem for path in package.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert not folders & set(profharness.__all__)


def test_profiler_names_are_those_with_traces() -> None:
    named = [one.name for one in REGISTRY.values() if one.suffix]
    assert named == [*TRACE_PROFILERS, ROCPROFV3]


def test_analyze_has_a_row_per_cell_with_its_findings(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    profharness.ingest(ROOT / "traces" / "h200-torch-nsys-ncu", store=path)
    frame = profharness.analyze("2,8,512,64,fp16", ["flash", "math"], store=path)
    assert list(frame["backend"]) == ["flash", "math"]
    assert list(frame["bottleneck"]) == ["latency", "unfused ops"]
    assert frame["against"].unique().tolist() == ["data sheet"]
    found = frame.explode("findings").set_index("backend")["findings"].loc["math"]
    codes = [finding["code"] for finding in found]
    assert codes[0] == "bottleneck" and "score_traffic" in codes
    assert [each.backend for each in frame.attrs["analyses"]] == ["flash", "math"]
    same = profharness.analyze("2,8,512,64,fp16", "flash", peaks="data-sheet", store=path)
    assert same["flops_share"][0] == frame["flops_share"][0]
    every = profharness.analyze(store=path)
    assert len(every) == len(profharness.cells(store=path))
    with pytest.raises(UsageError, match="choose from measure, data-sheet"):
        profharness.analyze(peaks="guess", store=path)
    with pytest.raises(NotFoundError, match="no stored run has"):
        profharness.analyze("9,9,9,9", store=path)
    with pytest.raises(NotFoundError, match=r"no stored run has kernels .*on fa3"):
        profharness.analyze(backends="fa3", store=path)
    with pytest.raises(UsageError, match="unknown backend 'mine'"):
        profharness.analyze(backends="mine", store=path)


def test_capture_passes_options_to_ncu(tmp_path: Path) -> None:
    profharness.capture(
        "1,1,16,16,fp32",
        "math",
        profilers="events",
        metrics="dram__bytes_read.sum, smsp__cycles_active.avg",
        sections=["SpeedOfLight"],
        samples=1,
        device="cpu",
        store=tmp_path / "s.db",
        out=tmp_path,
    )
    (folder,) = [path.parent for path in tmp_path.glob("*/run.json")]
    protocol = read_run(folder).protocol
    assert protocol.metrics == ("dram__bytes_read.sum", "smsp__cycles_active.avg")
    assert protocol.sections == ("SpeedOfLight",)


def test_all_and_kernels_mean_the_same_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "mine.py").write_text((ROOT / "kernels" / "naive.py").read_text())
    common = {"device": "cpu", "store": tmp_path / "s.db", "out": tmp_path / "runs"}
    quick = {"iterations": 2, "warmup": 0, "max_time_s": 0.2, "processes": 1}
    usual = {"auto", "flash", "math"}
    own = {"mine", *(path.stem for path in (ROOT / "kernels").glob("[!_]*.py"))}
    config = "1,1,16,16,fp32"
    # Each kernel has a process of its own, so few combinations are tried.
    for words, wanted in ((None, usual), ("all", usual), ("kernels", own)):
        timed = profharness.bench(config, words, **quick, **common)
        assert set(timed["backend"]) == wanted, words
    for words, wanted in ((None, usual | own), ("all", usual)):
        checked = profharness.verify(config, words, cases="none", **common)
        assert set(checked["backend"]) == wanted, words


def test_own_times_of_ops_add_up_to_the_call(store: Path) -> None:
    launches = profharness.launches(cell="c0002", store=store)
    ranges = profharness.query(
        "SELECT ranges.duration_ns FROM ranges JOIN cells ON cells.id = cell_id WHERE cell = 'c0002'",
        store=store,
    )
    assert len(ranges) == 5
    # the rest of the range is host time, which other work on the machine lengthens
    assert 0 < launches["duration_ns"].sum() <= ranges["duration_ns"].sum()


def test_diff_has_a_verdict_per_row(store: Path) -> None:
    rows = profharness.diff("flash", "math", configs=CONFIG, store=store)
    assert {"role", "verdict", "ratio"} <= set(rows.columns)
    assert "attention" in set(rows["role"])
    assert rows.attrs["environment"] == []
    assert {cost["what"] for cost in rows.attrs["costs"]} >= {"launches", "refused"}


def test_ingest_again_changes_nothing(store: Path) -> None:
    before = profharness.runs(store=store)
    folder = next(store.parent.glob("*/run.json")).parent
    assert list(profharness.ingest(folder, store=store)["status"]) == ["unchanged"]
    pd.testing.assert_frame_equal(profharness.runs(store=store), before)


def test_export_writes_a_trace_and_no_second_one(store: Path, tmp_path: Path) -> None:
    target = tmp_path / "t.json.gz"
    assert profharness.export("latest", target, store=store) > 0
    assert target.read_bytes()[:2] == b"\x1f\x8b"
    with pytest.raises(UsageError, match="already exists"):
        profharness.export("latest", target, store=store)


def test_errors_name_what_is_missing(store: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="b9-h9-s9-d9"):
        profharness.kernels("9,9,9,9", store=store)
    with pytest.raises(NotFoundError):
        profharness.runs(store=tmp_path / "none.db")
    with pytest.raises(UsageError, match="'x'"):
        profharness.kernels("2,8,512,x", store=store)
    with pytest.raises(AttributeError):
        _ = profharness.nothing


def test_configs_may_come_from_a_generator_and_lists_stay_lists(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    profharness.ingest(ROOT / "traces" / "h200-torch2.11", store=path)
    config = "2,8,512,64,fp16"
    rows = profharness.diff("flash", "cudnn", configs=config, store=path)
    same = profharness.diff("flash", "cudnn", configs=(text for text in [config]), store=path)
    assert len(rows) == len(same)
    assert {type(value) for value in rows["reasons"]} == {list}
    answer = profharness.bench(run="latest", store=path).attrs["answer"]
    assert None not in {cell.predicted for cell in answer.cells if cell.backend == "auto"}


def test_a_trace_has_no_timed_cells_and_an_empty_name_is_no_run(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    profharness.ingest(ROOT / "tests" / "data" / "kineto_h200.json.gz", store=path)
    with pytest.raises(NotFoundError, match="has no cells"):
        profharness.bench(run="latest", store=path)
    for ask in (profharness.kernels, profharness.analyze):
        with pytest.raises(NotFoundError, match="no run ''"):
            ask(run="", store=path)


def test_the_stub_lists_the_functions_and_help_shows_their_signatures() -> None:
    stub = (ROOT / "profharness" / "__init__.pyi").read_text()
    named = re.findall(r"^from profharness\.commands\.\w+ import (\w+) as \1$", stub, re.MULTILINE)
    assert sorted(named) == sorted(set(profharness.__all__) - {"__version__"})
    text = pydoc.render_doc(profharness.diff, renderer=pydoc.plaintext)
    # Python 3.13 breaks a long signature into lines
    assert (
        "baseline: 'Baseline', candidate: 'Candidate', *, configs: 'ConfigOrRunArguments'"
        in " ".join(text.split())
    )
