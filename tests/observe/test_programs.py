"""Programs of many kinds under `profharness observe`: each behaves as before, and its calls are counted."""

from __future__ import annotations

import gzip
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from programs import observe, run_unobserved, write
from waiting import until

from profharness.store import Selection, open_store

LAYERS = {"layers.0.attn": 3, "layers.1.attn": 3}


def test_a_script_keeps_its_streams_arguments_and_exit_code(tmp_path: Path) -> None:
    body = (
        "infer(3); print('out', sys.argv[1:], input()); print('err', file=sys.stderr); sys.exit(7)"
    )
    seen = observe(tmp_path, write(tmp_path, body), "a", "--steps", text="in\n")
    assert (seen.code, seen.stdout) == (7, "out ['a', '--steps'] in\n")
    assert "warning" not in seen.stderr
    assert seen.stderr.splitlines()[0] == "err"
    assert seen.counts() == LAYERS
    assert seen.record["kind"] == "observe"
    assert seen.record["cells"] == []
    assert {seen.record["protocol"][name] for name in ("iterations", "warmup", "samples")} == {0}


def test_a_call_has_its_location_tensors_and_backend(tmp_path: Path) -> None:
    seen = observe(tmp_path, write(tmp_path, "train(2)"))
    call = seen.calls[0]
    assert (call.call.path, call.file, call.function) == (
        "layers.0.attn",
        "model.py",
        "Attention.forward",
    )
    assert (call.count, call.ran, call.choice, call.call.backward) == (2, "flash", "flash", True)
    assert call.call.modules == ("Model", "Block", "Attention")
    assert call.lengths == (((2, 16, 16), 2),)
    assert call.enabled[:3] == ("flash", "efficient", "math")
    assert str(call.call.config).startswith("b2-h4-s16-d8-fp32-causal")


def test_the_contents_of_a_mask_are_recorded(tmp_path: Path) -> None:
    masks = {
        "torch.ones(16, 16, dtype=torch.bool)": "nothing",
        "torch.zeros(1, 1, 16, 16)": "nothing",
        "torch.ones(16, 16, dtype=torch.bool).tril()": "causal",
        "(torch.arange(16) < 9).expand(2, 1, 16, 16)": "key_padding",
        "torch.ones(16, 16, dtype=torch.bool).tril().triu(-3)": "window",
        "torch.randn(4, 16, 16)": "bias",
        "torch.full((16, 16), float('-inf')).triu(1)": "causal",
        "torch.rand(16, 16) < 0.5": "other",
    }
    body = "\n".join(f"infer(1, Model(1), mask={mask})" for mask in masks)
    seen = observe(tmp_path, write(tmp_path, body))
    assert [call.mask for call in seen.calls] == list(masks.values())


def test_a_mask_is_read_while_the_profiler_records(tmp_path: Path) -> None:
    """With --warmup 0 the profiler starts before the first call."""
    body = "infer(4, Model(1), mask=torch.zeros(1, 1, 16, 16))"
    options = ("--warmup", "0", "--fail-on", "noop-mask")
    seen = observe(tmp_path, write(tmp_path, body), options=options)
    assert [call.mask for call in seen.calls] == ["nothing"]
    assert seen.code == 3 and "the mask hides nothing" in seen.stderr
    trace = gzip.decompress(next(seen.folder.glob("*.torch.json.gz")).read_bytes())
    assert b"aten::isneginf" not in trace and b"aten::arange" not in trace
    # _classify calls `mean`, and the model does not
    assert b"aten::linear" in trace and b"aten::mean" not in trace


def test_a_program_without_a_whole_step_says_what_to_type(tmp_path: Path) -> None:
    """The profiler starts after the last step, or never because passes have gradients."""
    last = "the program ended just after the profiler had started"
    graded = "with gradients enabled, passes count as steps only after an optimizer has stepped"
    model = "model = Model(1)\nfor _ in range(8): model(torch.randn(2, 16, 32))"
    for name, body, why in (("a", "train(4)", last), ("b", model, graded)):
        (tmp_path / name).mkdir()
        seen = observe(tmp_path / name, write(tmp_path / name, body), options=())
        assert seen.code == 0 and seen.folder is not None
        assert why in seen.stderr and "profharness observe --warmup 0 -- PROGRAM" in seen.stderr
        assert "record no work" not in seen.stderr
        assert not list(seen.folder.glob("*.torch.json.gz"))


def test_lengths_are_a_histogram_of_one_kind(tmp_path: Path) -> None:
    body = "model = Model()\nfor rows in range(3, 40): infer(2, model, rows=rows)"
    seen = observe(tmp_path, write(tmp_path, body))
    assert [call.count for call in seen.calls] == [74, 74]
    assert dict(seen.calls[0].lengths) == {(2, rows, rows): 2 for rows in range(3, 40)}


CHILDREN = """
import multiprocessing, os, subprocess
if __name__ == "__main__":
    pid = os.fork()
    infer(3)
    if not pid:
        sys.exit()
    os.wait()
    for how in ("fork", "spawn"):
        child = multiprocessing.get_context(how).Process(target=infer, args=(3,))
        child.start()
        child.join()
    subprocess.run([sys.executable, "-m", "child"], check=True)
"""


def test_children_are_watched(tmp_path: Path) -> None:
    write(tmp_path, "infer(3)", "child.py")
    seen = observe(tmp_path, write(tmp_path, CHILDREN))
    assert seen.code == 0, seen.stderr
    calls: dict[int, dict[str, int]] = {}
    for call in seen.calls:
        calls.setdefault(call.pid, {})[call.call.path] = call.count
    assert list(calls.values()) == [LAYERS] * 5  # itself, os.fork, fork, spawn, subprocess


def test_a_module_and_pytest_are_watched(tmp_path: Path) -> None:
    write(tmp_path, "def test_it():\n    infer(3)", "test_it.py")
    seen = observe(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py")
    assert seen.code == 0
    assert "1 passed" in seen.stdout
    assert seen.counts() == LAYERS


def test_ranks_of_torchrun_are_separate(tmp_path: Path) -> None:
    body = (
        "import torch.distributed as d\nd.init_process_group('gloo')\n"
        "infer(3, nn.parallel.DistributedDataParallel(Model()))\nd.destroy_process_group()"
    )
    arguments = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    seen = observe(tmp_path, *arguments, write(tmp_path, body))
    if "rendezvous" in seen.stderr.lower() and seen.code:
        pytest.skip("torchrun finds no host name here")
    assert seen.code == 0, seen.stderr
    assert {call.rank for call in seen.calls} == {0, 1}
    assert seen.counts() == {path: 2 * count for path, count in LAYERS.items()}


def test_the_recorded_steps_show_layers(tmp_path: Path) -> None:
    seen = observe(tmp_path, write(tmp_path, "train(8)"), options=())
    assert seen.code == 0
    assert [trace["profiler"] for trace in seen.record["traces"]] == ["torch"]
    assert seen.record["environment"]["torch"]
    with open_store(tmp_path / "profharness.db") as store:
        run = store.find_run(Selection(None), "attention calls")
        assert run == seen.record["run"]
        rows = store.connection.execute(
            "SELECT path, count(*), max(step) FROM calls GROUP BY path ORDER BY path"
        ).fetchall()
    assert rows == [("layers.0.attn", 3, 2), ("layers.1.attn", 3, 2)]


def test_passes_are_steps_without_training(tmp_path: Path) -> None:
    seen = observe(tmp_path, write(tmp_path, "infer(9)"), options=("--steps", "2"))
    (trace,) = seen.record["traces"]
    windows = seen.windows()
    assert [(row["state"], row.get("steps")) for row in windows] == [("open", None), ("closed", 2)]
    assert windows[-1]["trace"] == trace["path"]


def test_a_short_program_is_recorded_from_its_first_call(tmp_path: Path) -> None:
    program = write(tmp_path, "infer(2)")
    early = observe(tmp_path, program, options=())
    assert early.record["traces"] == []
    assert "--warmup 0" in early.stderr
    assert observe(tmp_path, program, options=("--warmup", "0")).record["traces"]


def test_passes_with_gradients_and_no_optimizer_become_steps(tmp_path: Path) -> None:
    body = "model = Model()\nfor _ in range(30): model(torch.randn(2, 16, 32))"
    assert observe(tmp_path, write(tmp_path, body), options=()).record["traces"]


def test_a_profiler_of_the_program_wins(tmp_path: Path) -> None:
    body = (
        "with torch.profiler.profile() as own:\n    train(8)\n"
        "print(sum('scaled_dot' in e.name for e in own.events()) > 0)"
    )
    seen = observe(tmp_path, write(tmp_path, body), options=())
    assert (seen.code, seen.stdout.splitlines()[-1]) == (0, "True")
    assert "ran its own profiler" in seen.stderr
    assert seen.record["traces"] == []


@pytest.mark.parametrize(
    ("options", "body", "why", "code"),
    [
        (["-I"], "", "-I, -E or -S", 1),
        (["-E"], "raise SystemExit(5)", "-I, -E or -S", 5),
        (["-S"], "pass", "-I, -E or -S", 1),
        ([], "print()", "imported torch", 0),
        ([], "import torch; raise SystemExit(4)", "never called", 4),
    ],
)
def test_no_calls_are_reported_with_the_cause_and_leave_nothing(
    options: list[str], body: str, why: str, code: int, tmp_path: Path
) -> None:
    seen = observe(tmp_path, *options, "-c", body)
    assert seen.code == code
    assert why in seen.stderr
    assert seen.stderr.startswith("error: ") == ("-I" in why)
    assert not (tmp_path / "traces").exists()


def test_a_program_that_does_not_start_leaves_nothing(tmp_path: Path) -> None:
    done = run_unobserved("-m", "profharness", "observe", "--", "./nothing-here", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "error: ./nothing-here: cannot be started: No such file or directory\n"
    assert not (tmp_path / "traces").exists()


def test_a_program_that_does_not_start_leaves_other_runs(tmp_path: Path) -> None:
    runs = tmp_path / "traces" / "runs"
    runs.mkdir(parents=True)
    run_unobserved("-m", "profharness", "observe", "--", "./nothing-here", folder=tmp_path)
    assert list(tmp_path.rglob("*")) == [runs.parent, runs]


def test_signals_are_forwarded_to_the_program(tmp_path: Path) -> None:
    body = (
        "import signal, time\ninfer(3)\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
        "open('ready', 'w').close()\nwhile True: time.sleep(0.05)"
    )
    program = write(tmp_path, body)
    command = [sys.executable, "-m", "profharness", "observe", "--profiler", "none", "--"]
    process = subprocess.Popen([*command, sys.executable, str(program)], cwd=tmp_path)
    until((tmp_path / "ready").exists, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 9


def test_a_program_that_is_killed_has_the_code_of_a_shell(tmp_path: Path) -> None:
    seen = observe(tmp_path, write(tmp_path, "infer(3)\nimport os\nos.kill(os.getpid(), 9)"))
    assert seen.code == 137
    assert seen.counts() == LAYERS
    assert "warning" not in seen.stderr


def test_a_failure_of_the_observer_is_printed_once_and_the_program_continues(
    tmp_path: Path,
) -> None:
    body = (
        "infer(1)\nfrom profharness.recording.observer import recorder\n"
        "recorder.Recorder.note = None\ninfer(3)\nprint('done')"
    )
    seen = observe(tmp_path, write(tmp_path, body))
    assert (seen.code, seen.stdout) == (0, "done\n")
    assert seen.stderr.count("no longer recorded") == 1


def test_a_sitecustomize_of_the_user_still_runs(tmp_path: Path) -> None:
    place = tmp_path / "site"
    place.mkdir()
    (place / "sitecustomize.py").write_text("import builtins\nbuiltins.mine = __name__\n")
    program = write(tmp_path, "infer(3)\nprint(mine, [p for p in sys.path if 'observer' in p])")
    seen = observe(tmp_path, program, environment={"PYTHONPATH": str(place)})
    assert seen.stdout == "sitecustomize []\n"
    assert seen.counts() == LAYERS
