"""Programs with threads, forks and unusual ends behave the same under `profharness observe`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from programs import Seen, observe, write

from profharness.cli import cli

ATTENTION = ("layers.0.attn", "layers.1.attn")


def counts(seen: Seen) -> set[int]:
    """Return how often each layer was called, over all processes."""
    found = seen.counts()
    assert tuple(sorted(map(str, found))) == ATTENTION, seen.stderr
    return set(found.values())


THREADS = """
import threading
sys.setswitchinterval(1e-6)
begin = threading.Barrier(12)
models = [Model() for _ in range(12)]

def go(model):
    begin.wait()
    train(8, model)
    infer(8, model)
    sys.exit(3)

threads = [threading.Thread(target=go, args=(model,)) for model in models]
for thread in threads: thread.start()
for thread in threads: thread.join()
print("done", file=sys.stderr)
"""


def test_threads_are_counted_without_a_profiler_in_them(tmp_path: Path) -> None:
    seen = observe(tmp_path, write(tmp_path, THREADS), options=("--warmup", "0"))
    assert (seen.code, seen.stdout) == (0, ""), seen.stderr
    assert seen.stderr.splitlines()[0] == "done"
    assert counts(seen) == {12 * 16}
    (problem,) = seen.record["problems"]
    assert problem["code"] == "no_step"
    assert "ran in other threads" in problem["message"]
    assert f"{problem['message']} [no_step]" in seen.stderr
    store = str(tmp_path / "profharness.db")
    shown = CliRunner().invoke(cli, ["layers", "--store", store, "--format", "json"])
    assert f"{problem['message']}; {problem['remedy']}" in json.loads(shown.stdout)["caveats"]


def test_threads_share_the_kinds_of_their_calls(tmp_path: Path) -> None:
    body = THREADS.replace("[Model() for _ in range(12)]", "[Model()] * 12")
    body = body.replace("train(8, model)", "infer(8, model)")
    seen = observe(tmp_path, write(tmp_path, body))
    assert [call.count for call in seen.calls] == [12 * 16] * 2


WINDOW_AND_THREADS = """
import threading
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for step in range(10):
    thread = threading.Thread(target=infer, args=(1, model))
    thread.start()
    thread.join()
    model(torch.randn(2, 16, 32)).sum().backward()
    optimizer.step()
"""


def test_the_main_thread_is_recorded_with_other_threads_running(tmp_path: Path) -> None:
    seen = observe(tmp_path, write(tmp_path, WINDOW_AND_THREADS), options=())
    assert seen.code == 0, seen.stderr
    assert counts(seen) == {20}
    closed = seen.windows()[-1]
    assert (closed["state"], closed["steps"], closed["elsewhere"]) == ("closed", 3, 3 * 2)
    (problem,) = seen.record["problems"]
    assert problem["code"] == "threads_not_recorded"
    assert problem["message"].startswith("6 calls ran in other threads")


FORKS = """
import ctypes, os, signal
ends = [lambda: os._exit(5), lambda: sys.exit(4), lambda: os.kill(os.getpid(), signal.SIGKILL)]
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for step in range(14):
    if step in (2, 5, 13):
        child = os.fork()
        if not child:
            infer(3)
            ctypes.CDLL(None).puts(b"of a buffer of C's")
            ends[0]()
        print("child", os.waitpid(child, 0)[1], flush=True)
        ends.pop(0)
    model(torch.randn(2, 16, 32)).sum().backward()
    optimizer.step()
"""


def test_children_forked_in_the_window_and_after_it_end(tmp_path: Path) -> None:
    buffered = {"PYTHONUNBUFFERED": None}
    seen = observe(tmp_path, write(tmp_path, FORKS), options=(), environment=buffered)
    assert seen.code == 0, seen.stderr
    children = [f"child {5 << 8}", "of a buffer of C's", f"child {4 << 8}", "child 9"]
    assert seen.stdout.splitlines() == children
    assert counts(seen) == {14 + 3 * 3}
    states = [(row["state"], row.get("why")) for row in seen.windows()]
    lost = ("lost", "the program forked")
    assert states == [("open", None), lost, ("open", None), ("closed", None)]


OWN = """
import threading
def counted(profiler):
    return sum(event.name == "aten::scaled_dot_product_attention" for event in profiler.events())
def go():
    with torch.profiler.profile() as profiler:
        infer(3, own)
    print(counted(profiler))
model, own = Model(), Model()
infer(6, model)
{act}
infer(12, model)
"""


@pytest.mark.parametrize(
    "act", ["go()", "thread = threading.Thread(target=go); thread.start(); thread.join()"]
)
def test_the_window_gives_way_to_a_profiler_that_the_program_starts(
    act: str, tmp_path: Path
) -> None:
    seen = observe(tmp_path, write(tmp_path, OWN.format(act=act)), options=())
    assert (seen.code, seen.stdout) == (0, "6\n"), seen.stderr
    states = [(row["state"], row.get("why")) for row in seen.windows()]
    lost = ("lost", "the program ran its own profiler")
    assert [state for state in states if state[0] != "waiting"] == [
        ("open", None), lost, ("open", None), ("closed", None)
    ]  # fmt: skip


ENDS = """
import concurrent.futures, multiprocessing, os, threading
if __name__ == "__main__":
    infer(1)
    if sys.argv[1:] != ["again"]:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            pool.map(infer, [3, 4, 5])
        os.execv(sys.executable, [sys.executable, __file__, "again"])
    threading.Thread(target=lambda: (infer(6), os._exit(7))).start()
    threading.Event().wait()
"""


def test_calls_are_counted_however_a_process_ends(tmp_path: Path) -> None:
    """A pool that is terminated, os.execv, which keeps the process id, and os._exit."""
    seen = observe(tmp_path, write(tmp_path, ENDS), options=())
    assert seen.code == 7, seen.stderr
    assert counts(seen) == {1 + 3 + 4 + 5 + 1 + 6}
    assert "warning" not in seen.stderr


def test_the_window_imports_nothing_and_keeps_no_file_open(tmp_path: Path) -> None:
    """An import may fail if another thread imports at the same time, and a program may close all
    its files.
    """
    body = """
import os
model = Model()
infer(1, model)
files = os.listdir("/proc/self/fd")
infer(9, model)
assert "torch._inductor" not in sys.modules
assert sorted(os.listdir("/proc/self/fd")) == sorted(files)
os.closerange(3, 1000)
kept = [os.open("mine", os.O_WRONLY | os.O_CREAT) for _ in range(20)]
infer(1, Model(1))
os.write(kept[0], b"mine")
"""
    seen = observe(tmp_path, write(tmp_path, body), options=())
    assert seen.code == 0, seen.stderr
    assert (tmp_path / "mine").read_text() == "mine"
    assert seen.record["traces"]
    assert seen.counts() == {"layers.0.attn": 11, "layers.1.attn": 10}
