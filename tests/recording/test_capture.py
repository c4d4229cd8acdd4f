"""Captures with real worker processes: results, refusals, and dying workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from changed_workers import changed_worker, run_changed, statuses
from waiting import HANG, PATIENCE_S, alive, until

from profharness.attention.config import expand_configs
from profharness.errors import CaptureError, NotFoundError, TraceFormatError, UsageError
from profharness.files import hold_lock_file
from profharness.jobs.into_store import capture_into_store, find_run_folder
from profharness.measurements.agreement import disagreements, with_predictions
from profharness.recording.capture import LOCK_FILE, capture, plan_capture, resume, write_folder
from profharness.recording.supervise import run_cells
from profharness.run import (
    JOURNAL_FILE,
    RUN_FILE,
    CaptureOptions,
    Cell,
    Protocol,
    Run,
    read_run,
    run_times,
)
from profharness.store import open_store

QUICK = Protocol(iterations=2, warmup=1, samples=5, timeout_s=PATIENCE_S, device="cpu")


def quick(out: Path, protocol: Protocol = QUICK) -> CaptureOptions:
    return CaptureOptions(("torch",), out, protocol)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """Run one CPU capture for several tests."""
    out = tmp_path_factory.mktemp("runs")
    configs = expand_configs("1,2,32,16,bwd,causal") + expand_configs(
        "1,4,8,16,bf16,kv_heads=2,mask=bool,layout=bshd,scale=0.5"
    )
    folder = capture(configs, ["auto", "flash", "cudnn", "math", "all-disabled"], quick(out))
    return folder, read_run(folder)


def by_backend(run: Run, config: int) -> dict[str, Cell]:
    labels = list(dict.fromkeys(cell.config.label for cell in run.cells))
    return {cell.backend: cell for cell in run.cells if cell.config.label == labels[config]}


def test_cells_have_samples_choice_and_traces(run: tuple[Path, Run]) -> None:
    folder, record = run
    cells = by_backend(record, 0)
    assert cells["auto"].config.label == "b1-h2-s32-d16-fp32-causal-bwd"
    assert {name: cell.status for name, cell in cells.items()} == {
        "auto": "ok",
        "flash": "ok",
        "cudnn": "refused",
        "math": "ok",
        "all-disabled": "refused",
    }
    assert len(cells["flash"].samples["wall"]) == 5
    assert min(cells["flash"].samples["wall"]) > 0
    assert cells["math"].choice == "math"
    assert {trace.path for trace in record.traces} == {path.name for path in folder.glob("*.gz")}


def test_math_refuses_causal_with_a_mask_in_every_source(tmp_path: Path) -> None:
    store = tmp_path / "s.db"
    configs = expand_configs("1,2,16,16,causal,mask=bool")
    capture_into_store(configs, ["auto", "flash", "math"], store, quick(tmp_path / "runs"))
    with open_store(store) as opened:
        cells = with_predictions(opened, opened.cells())
    assert [cell.status for cell in cells] == ["ok", "ok", "refused"]
    assert [cell.predicted for cell in cells] == ["flash", "eligible", "refused"]
    (refusal,) = cells[2].refusals
    assert refusal.code == "causal_mask"
    assert refusal.message.endswith("Explicit attn_mask should not be set when is_causal=True")
    assert [disagreements(cell, []) for cell in cells] == [[], [], []]


def test_refusals_have_a_code_and_the_text(run: tuple[Path, Run]) -> None:
    refused = by_backend(run[1], 0)["all-disabled"].refusals
    assert [refusal.code for refusal in refused] == ["runtime_disabled"]
    assert "No viable backend" in refused[0].message


def test_environment_has_software_versions_but_nothing_private(run: tuple[Path, Run]) -> None:
    environment = run[1].environment
    assert environment["device_type"] == "cpu"
    assert environment["torch"].split(".")[0] == "2"
    text = (run[0] / RUN_FILE).read_text()
    for private in (os.uname().nodename, str(Path.home()), str(run[0].parent)):
        assert private not in text or len(private) < 5


def test_finished_folder_is_tidy_and_does_not_change(run: tuple[Path, Run]) -> None:
    folder, record = run
    assert not (folder / JOURNAL_FILE).exists()
    assert not (folder / LOCK_FILE).exists()
    before = (folder / RUN_FILE).read_bytes()
    with pytest.raises(
        UsageError, match=rf"run {record.run} is finished, because all \d+ of its cells"
    ):
        resume(folder)
    assert (folder / RUN_FILE).read_bytes() == before
    assert not (folder / LOCK_FILE).exists()


def test_unknown_names_are_usage_errors(tmp_path: Path) -> None:
    configs = expand_configs("1,1,1,1")
    with pytest.raises(UsageError, match=r"flsh.*did you mean flash\?"):
        capture(configs, ["flsh"], quick(tmp_path))
    with pytest.raises(UsageError, match=r"perf.*choose from torch"):
        capture(configs, ["flash"], CaptureOptions(("perf",), tmp_path))
    with pytest.raises(UsageError, match="no config"):
        capture([], ["flash"], quick(tmp_path))
    assert not list(tmp_path.iterdir())


def test_error_of_an_unwritable_folder_has_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CaptureError, match="--out"):
        capture(expand_configs("1,1,1,1"), ["math"], quick(tmp_path / "file"))


def test_too_large_cell_is_oom_and_the_next_one_runs(tmp_path: Path) -> None:
    configs = expand_configs("64,1024,1000000,1024") + expand_configs("1,1,16,16")
    record = read_run(capture(configs, ["math"], quick(tmp_path)))
    assert [cell.status for cell in record.cells] == ["oom", "ok"]


SABOTAGE = changed_worker(f"""
from profharness.recording.worker import failures as failing
stage("sabotage")
seq = job.config.seq_len_q
if seq == 3: os.kill(os.getpid(), 9)
if seq == 4: os.abort()
if seq == 5: {HANG}
if seq == 6:
    os.fork() or time.sleep(3600)
    sys.stderr.write("the last output\\n"); sys.stderr.flush(); os._exit(3)
if seq == 7: raise failing.DeadContextError(failing.failure(job, bench, [], RuntimeError("CUDA error: dead")))
""")


@pytest.mark.usefixtures("hanging")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_cell_that_kills_its_process_costs_no_other_cell(tmp_path: Path) -> None:
    ends, _ = run_changed(tmp_path, expand_configs("1,1,1:8:+1,8,fp32"), QUICK, SABOTAGE)
    crashes = dict.fromkeys(("c0003", "c0004", "c0006"), "crashed")
    assert statuses(ends) == dict.fromkeys(ends, "ok") | crashes | {
        "c0005": "timeout",
        "c0007": "error",
    }
    assert len(ends) == 8
    assert "SIGKILL" in str(ends["c0003"].message)
    assert "during sabotage" in str(ends["c0003"].message)
    assert "SIGABRT" in str(ends["c0004"].message)
    assert "--timeout" in str(ends["c0005"].message)
    assert "the last output" in str(ends["c0006"].message)
    left = [
        int(path.name)
        for path in Path("/proc").iterdir()
        if path.name.isdigit() and str(tmp_path).encode() in _command_line(path)
    ]
    assert not [pid for pid in left if alive(pid)]


def _command_line(path: Path) -> bytes:
    try:
        return (path / "cmdline").read_bytes()
    except OSError:
        return b""


def test_error_of_a_worker_that_cannot_start_quotes_its_output(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "raise SystemExit('no torch here')"]
    with pytest.raises(CaptureError, match=r"no torch here.*doctor"):
        run_changed(tmp_path, expand_configs("1,1,1,8"), QUICK, lambda _: argv)


UP_AND_GONE = """
import sys
with open(sys.argv[1] + "/journal.jsonl", "a") as journal:
    journal.write('{"event": "environment", "environment": {"device_type": "cpu"}}\\n')
sys.exit("gone again")
"""


def test_workers_that_reach_no_cell_are_not_restarted_forever(tmp_path: Path) -> None:
    """Each worker reports its environment, like one whose program cannot be imported."""
    cells, entries = [Cell("c0001", *expand_configs("1,1,16,8"), "math")], []
    with pytest.raises(CaptureError, match=r"did not start \(exit code 1\): gone again"):
        run_cells(
            tmp_path,
            cells,
            QUICK,
            (),
            entries.append,
            command=lambda folder: [sys.executable, "-c", UP_AND_GONE, str(folder)],
        )
    assert [entry.event for entry in entries] == ["environment"] * 3


@pytest.mark.skipif(sys.platform != "linux", reason="signals a process group")
def test_interrupted_capture_can_be_resumed(tmp_path: Path) -> None:
    argv = [
        *(sys.executable, "-m", "profharness", "capture", "--config", "1,4,{512:1280:+96},64"),
        *("--backend", "math", "--device", "cpu", "--out", str(tmp_path), "--samples", "5"),
        *("--store", str(tmp_path / "store.db")),
    ]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    journals = lambda: tmp_path.glob("*/journal.jsonl")  # noqa: E731
    until(lambda: any(b'"end"' in path.read_bytes() for path in journals()), process)
    folder = find_run_folder("latest", tmp_path)
    with pytest.raises(CaptureError, match=f"process {process.pid} is working on this run"):
        resume(folder)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "--resume" in errors
    stopped = read_run(folder)
    done = {cell.cell for cell in stopped.cells if cell.status == "ok"}
    assert done
    assert len(done) < len(stopped.cells)
    resumed = resume(folder)
    finished = read_run(resumed.folder)
    assert resumed.run == finished
    assert {cell.status for cell in finished.cells} == {"ok"}
    assert len(stopped.periods) == 1 and len(finished.periods) == 2
    assert finished.periods[0] == stopped.periods[0]
    times = run_times(finished)
    assert times.ended is not None and times.ended >= finished.created
    assert times.duration_ns == sum(round(1e9 * each.seconds) for each in finished.periods)
    for name in done:
        assert _cell(finished, name) == _cell(stopped, name)
    with pytest.raises(NotFoundError, match=f"can be resumed; the newest: run {stopped.run} is"):
        find_run_folder("latest", tmp_path)


def test_lock_ends_with_its_process(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from profharness.files import hold_lock_file\n"
        "with hold_lock_file(Path(sys.argv[1])) as holder:\n"
        "    print(holder, flush=True); sys.stdin.read()"
    )
    argv = [sys.executable, "-c", code, str(tmp_path / "lock")]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "None\n"
    with hold_lock_file(tmp_path / "lock") as holder:
        assert holder == f"process {process.pid}"
    process.kill()
    process.communicate()
    with hold_lock_file(tmp_path / "lock") as holder:
        assert holder is None


def _cell(run: Run, name: str) -> Cell:
    return next(cell for cell in run.cells if cell.cell == name)


def test_worker_ends_with_its_killed_parent(tmp_path: Path) -> None:
    code = (
        "from profharness.recording.capture import capture;"
        "from profharness.attention.config import expand_configs; from pathlib import Path;"
        "from profharness.run import CaptureOptions;"
        f"capture(expand_configs('8,8,2048,64'), ['math'], CaptureOptions(out=Path({str(tmp_path)!r})))"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    until(lambda: list(tmp_path.glob("*/journal.jsonl")), process)
    process.kill()
    process.wait()
    mark = str(tmp_path).encode()
    until(lambda: all(mark not in _command_line(path) for path in Path("/proc").glob("[0-9]*")))


def test_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceFormatError, match=r"no run\.json"):
        read_run(tmp_path)
    (tmp_path / RUN_FILE).write_text('{"run": 1}')
    with pytest.raises(TraceFormatError, match="not a run record"):
        read_run(tmp_path)


def test_invalid_options_create_no_store(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nope"):
        capture_into_store(expand_configs("1,1,1,1"), ["nope"], tmp_path / "s.db", quick(tmp_path))
    assert not list(tmp_path.iterdir())


def test_failing_call_keeps_the_choice(tmp_path: Path) -> None:
    body = "def fail(*_): raise RuntimeError('no luck')\ncell.make_call = lambda *_: fail"
    ends, _ = run_changed(tmp_path, expand_configs("1,2,16,16"), QUICK, changed_worker(body))
    assert (ends["c0001"].status, ends["c0001"].choice) == ("error", "math")
    assert "no luck" in str(ends["c0001"].message)


def test_interrupt_while_the_folder_is_written_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[write_folder.__module__]
    write_sources = module.write_sources

    def interrupted(*arguments: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        write_sources(*arguments)

    monkeypatch.setattr(module, "write_sources", interrupted)
    run, _ = plan_capture(expand_configs("1,2,64,64"), ("math",), CaptureOptions(()))
    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path, run, ("math",))
    assert not list(tmp_path.iterdir())
