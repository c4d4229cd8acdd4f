"""Which run the commands answer from, what they say of one without kernels, and gates that compare
nothing.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from profharness.attention.config import Config, parse_config
from profharness.cli import find_command
from profharness.errors import CaptureError, GateError, NotFoundError, StoreError
from profharness.run import Cell, Protocol, Run, write_run
from profharness.store import ingest_path, open_store

TRACES = Path(__file__).parents[2] / "traces"
CONFIG = parse_config("2,8,512,64,fp16")
TIMED, ELSEWHERE = "20990102-timed", "20990103-elsewhere"
SAMPLES = {"event": [13400, 13410, 13420, 13430, 13440, 13450]}


def timed_run(root: Path, name: str, config: Config, samples: dict[str, list[int]]) -> Path:
    """A run folder of two cells that no profiler watched."""
    cells = tuple(
        Cell(f"c{place}", config, backend, "ok", iterations=5, samples=samples)
        for place, backend in enumerate(("flash", "math"))
    )
    folder = root / name
    folder.mkdir()
    created = f"{name[:4]}-01-0{name[7]}T00:00:00+00:00"
    write_run(folder, Run(name, created, ("events",), Protocol(), cells))
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A captured run with kernels, and two newer ones with times alone."""
    root = tmp_path_factory.mktemp("runs")
    ingest_path(root / "s.db", TRACES / "h200-torch2.11")
    ingest_path(root / "s.db", timed_run(root, TIMED, CONFIG, SAMPLES))
    other = parse_config("1,1,64,64,fp16")
    ingest_path(root / "s.db", timed_run(root, ELSEWHERE, other, SAMPLES))
    return root / "s.db"


@pytest.fixture(scope="module")
def captured(made: Path) -> str:
    with open_store(made) as store:
        return store.runs()[-1].run


def invoke(name: str, store: Path, *arguments: str) -> Result:
    command = find_command(name.replace("_", "-"))
    return CliRunner().invoke(command, [*arguments, "--store", str(store)])


@pytest.mark.parametrize("name", ["kernels", "analyze"])
def test_the_heading_of_a_config_names_the_device_and_the_run(
    made: Path, captured: str, name: str
) -> None:
    """Bug: several runs may have the config, and no text said which of them was shown."""
    arguments = ("--config", "2,8,512,64,fp16", "--run", captured)
    with open_store(made) as store:
        run = store.run_name(captured)
    brief = invoke(name, made, *arguments).stdout
    assert f"  H200, torch 2.11.0, run {run}" in " ".join(brief.split("\n"))
    full = " ".join(invoke(name, made, *arguments, "--full").stdout.split("\n"))
    assert f"  H200, torch 2.11.0+cu130, run {run}" in full


def test_analyze_names_the_device_of_a_trace(tmp_path: Path) -> None:
    trace = TRACES / "models" / "whisper.json.gz"
    text = invoke("analyze", tmp_path / "s.db", str(trace)).stdout
    assert "Bottlenecks  H200, run whisper.json.gz, rates of kernel times" in text


@pytest.mark.parametrize(
    "arguments",
    [
        ("--config", CONFIG.label),
        ("--config", "2,8,512,64", "--backend", "flash", "--expect", "flash"),
        ("--run", "latest"),
        ("--backend", "flash,math"),
        (),
    ],
)
@pytest.mark.parametrize("name", ["kernels", "analyze"])
def test_answers_come_from_the_run_with_kernels(
    made: Path, captured: str, name: str, arguments: tuple[str, ...]
) -> None:
    if name == "analyze" and "--expect" in arguments:
        arguments = arguments[:-2]
    done = invoke(name, made, *arguments, "--format", "json")
    assert done.exit_code == 0, done.output
    assert {row["run"] for row in json.loads(done.stdout)["rows"]} == {captured}


@pytest.mark.parametrize("name", ["kernels", "analyze", "bench"])
def test_latest_is_not_replaced_by_an_older_run_with_the_backend(
    made: Path, captured: str, name: str
) -> None:
    """Bug: `analyze latest --backend cudnn` silently showed an older run on another machine."""
    latest = ELSEWHERE if name == "bench" else captured
    refused = invoke(name, made, "latest", "--backend", "xformers")
    named = invoke(name, made, latest, "--backend", "xformers")
    assert isinstance(refused.exception, NotFoundError), refused.output
    assert str(refused.exception) == str(named.exception)
    elsewhere = invoke("bench", made, "latest", "2,8,512,64")
    assert f"run {ELSEWHERE} has no cell for config b2-h8-s512-d64" in str(elsewhere.exception)


def test_a_hint_names_the_older_run_that_is_shown(made: Path) -> None:
    """Bug: nothing said that `latest` was not the newest run."""
    done = invoke("kernels", made, "--format", "json")
    assert done.stderr.startswith(
        "Using h200-torch2.11, the latest run that has kernels, not the newest run, "
        f"{ELSEWHERE} (capture).\n"
    )
    assert json.loads(done.stdout)["rows"]
    # any one of the profilers is enough
    for profilers, condition in (("all", ""), ("torch,nsys", " under torch or nsys")):
        done = invoke("kernels", made, "--profiler", profilers, "--format", "json")
        what = f"the latest run that has kernels{condition}, not the newest run"
        assert done.stderr.startswith(f"Using h200-torch2.11, {what}, {ELSEWHERE} (capture).\n")
        assert json.loads(done.stdout)["rows"]
    newest = invoke("bench", made, "latest", "--format", "json")
    assert "Using" not in newest.stderr


def test_the_gate_on_all_runs_judges_those_that_can_know(made: Path) -> None:
    arguments = ("--run", "all", "--backend", "flash", "--config", CONFIG.label)
    assert invoke("kernels", made, *arguments, "--expect", "flash").exit_code == 0
    assert invoke("kernels", made, *arguments, "--expect", "math").exit_code == 1


@pytest.mark.parametrize("run", ["all", "latest~99999999999999999999", "latest~²"])
@pytest.mark.parametrize(
    "command", ["report", "layers", "ranks", "export", "bench --run", "diff math", "repro --run"]
)
def test_a_name_of_no_single_run_is_refused(made: Path, command: str, run: str) -> None:
    name, *arguments = command.split()
    done = invoke(name, made, *arguments, run)
    if name == "repro" and run == "all":
        return  # --config and --backend may leave one cell of all runs
    assert isinstance(done.exception, NotFoundError), done
    assert f"no run '{run}' in {made}; choose from {ELSEWHERE}" in str(done.exception)


def test_a_named_run_is_itself_and_says_what_it_lacks(made: Path) -> None:
    done = invoke("kernels", made, "--run", TIMED)
    assert done.exit_code == 0, done.output
    told = f"run {TIMED} (capture --profiler events) has no kernels; to see it, use: profharness"
    assert f"{told} bench {TIMED} --store {made}\n" in done.stderr
    gate = invoke("kernels", made, "--run", TIMED, "--expect", "flash")
    assert isinstance(gate.exception, GateError)
    shown = invoke("bench", made, "--run", TIMED, "--format", "json")
    assert json.loads(shown.stdout)["rows"][0]["median_ns"] == 13425


def test_an_export_has_launches_or_is_none(made: Path, tmp_path: Path) -> None:
    done = invoke("export", made, "latest", "-o", str(tmp_path / "t.json"))
    assert done.exit_code == 0, done.output
    assert "launches of run h200-torch2.11" in done.stderr
    for arguments in ((TIMED,), (TIMED, "--profiler", "all"), (TIMED, "--profiler", "torch")):
        refused = invoke("export", made, *arguments, "-o", str(tmp_path / "no.json"))
        assert isinstance(refused.exception, NotFoundError)
        assert f"profharness bench {TIMED}" in str(refused.exception)
    assert not (tmp_path / "no.json").exists()


def test_a_diff_of_backends_is_of_the_run_that_has_both(made: Path, captured: str) -> None:
    done = invoke("diff", made, "flash", "math", "--format", "json")
    assert json.loads(done.stdout)["baseline"] == f"{captured}:flash"
    apart = invoke("diff", made, "flash", "no-such")
    assert "no-such" in str(apart.exception)


def test_runs_without_a_common_config_are_not_said_to_lack_kernels(made: Path) -> None:
    """Bug: the error about two benchmarks of different configs said `without kernels`."""
    said = str(invoke("diff", made, TIMED, ELSEWHERE).exception)
    assert said == (
        f"nothing to compare: no config in common; {TIMED} has {CONFIG}; "
        f"{ELSEWHERE} has b1-h1-s64-d64-fp16"
    )


def test_kernels_without_a_record_are_unknown(made: Path, captured: str) -> None:
    sides = (captured, TIMED, "--config", CONFIG.label)
    done = invoke("diff", made, *sides, "--format", "json")
    rows = json.loads(done.stdout)["rows"]
    paired = [row for row in rows if row["backend_baseline"] and row["backend_candidate"]]
    assert {row["backend_baseline"] for row in paired} == {"flash", "math"}
    kernels = [row for row in paired if row["role"] != "call"]
    assert {row["verdict"] for row in kernels} == {"unknown"}
    assert {tuple(row["reasons"]) for row in kernels} == {
        ("no profiler recorded the kernels of the candidate",)
    }
    gate = invoke("diff", made, *sides, "--fail-on", "changed,slower")
    assert isinstance(gate.exception, GateError)
    assert "nothing to compare for changed" in str(gate.exception)
    assert f"{TIMED} has {CONFIG.label}, without kernels" in str(gate.exception)
    assert invoke("diff", made, *sides, "--fail-on", "slower").exit_code == 0
    memory = str(invoke("diff", made, *sides, "--fail-on", "memory").exception)
    assert (
        "nothing to compare for memory: no config has a recorded peak memory on both sides"
        in memory
    )
    both = str(invoke("diff", made, *sides, "--fail-on", "changed,faster").exception)
    assert "--fail-on " in both and "nothing to compare for changed" in both


def test_a_gate_on_runs_with_nothing_in_common_is_not_met(made: Path) -> None:
    for arguments in ((TIMED, ELSEWHERE), (f"{TIMED}:math", f"{ELSEWHERE}:math")):
        gate = invoke("diff", made, *arguments, "--fail-on", "slower")
        assert isinstance(gate.exception, GateError)
        said = str(gate.exception)
        assert said.startswith("--fail-on slower in ") and ":\n  nothing to compare: " in said
        assert CONFIG.label in said and "b1-h1-s64-d64-fp16" in said
        error = invoke("diff", made, *arguments).exception
        assert isinstance(error, NotFoundError) and "nothing to compare: " in str(error)


def test_two_timed_runs_compare_by_their_times(tmp_path: Path) -> None:
    slow = {"event": [2 * value for value in SAMPLES["event"]]}
    store = tmp_path / "s.db"
    for name, samples in (("20990101-a", SAMPLES), ("20990102-b", slow)):
        ingest_path(store, timed_run(tmp_path, name, CONFIG, samples))
    gate = invoke("diff", store, "latest~1", "latest", "--fail-on", "slower")
    assert isinstance(gate.exception, GateError)
    assert str(gate.exception).startswith("--fail-on slower in ")


def test_a_store_that_cannot_take_the_run_is_told_before_anything_runs(tmp_path: Path) -> None:
    bad = tmp_path / "bad.db"
    bad.write_text("no store at all" * 20)
    arguments = ("--config", "1,1,8,8", "--out", str(tmp_path / "runs"))
    for store in (bad, tmp_path / "none" / "s.db"):
        for name in ("capture", "bench", "verify"):
            done = invoke(name, store, *arguments)
            assert isinstance(done.exception, StoreError)
            assert "--store" in str(done.exception)
    assert not (tmp_path / "runs").exists()


def test_a_copy_beside_a_run_does_not_make_its_id_ambiguous(tmp_path: Path) -> None:
    folder = timed_run(tmp_path, TIMED, CONFIG, SAMPLES)
    shutil.copytree(folder, tmp_path / f"{TIMED}-scrubbed")
    done = invoke("capture", tmp_path / "s.db", "--resume", TIMED, "--out", str(tmp_path))
    assert not isinstance(done.exception, CaptureError | NotFoundError)
    assert f"run {TIMED} is finished" in str(done.exception)


def test_an_unknown_run_is_answered_with_few_names_and_the_command_that_lists_all(
    tmp_path: Path,
) -> None:
    """Bug: the message listed eight ids of runs."""
    store = tmp_path / "s.db"
    for day in range(1, 6):
        ingest_path(store, timed_run(tmp_path, f"2099010{day}-timed", CONFIG, SAMPLES))
    done = invoke("analyze", store, "traces/nope")
    assert str(done.exception) == (
        f"traces/nope: no such file or folder; no run 'traces/nope' in {store}; choose from "
        "20990105-timed, 20990104-timed, 20990103-timed and 2 more; to list all runs, use: "
        f"profharness runs --store {store}"
    )


def test_explain_latest_may_be_a_capture(tmp_path: Path) -> None:
    """Bug: `explain latest` said that no stored run has attention calls."""
    path = tmp_path / "s.db"
    ingest_path(path, TRACES / "models" / "vit.json.gz")
    ingest_path(path, TRACES / "h200-torch2.11")
    with open_store(path) as store:
        newest, *older = store.runs()
    for run, ref in ((newest, "latest"), (older[0], "latest~1")):
        told, named = (
            json.loads(invoke("explain", path, each, "--format", "json").stdout)["rows"]
            for each in (ref, run.run)
        )
        assert told == named
        assert len(named) == (4 if run.source == "capture" else 1)
