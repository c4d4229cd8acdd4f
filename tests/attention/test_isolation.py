"""Backends that change their process, close its descriptors or end it affect only their own cells,
and the change is recorded there.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from waiting import PATIENCE_S

from profharness.attention.backends import find_backend, fingerprints
from profharness.attention.backends.sources import NESTED
from profharness.attention.cases import VerificationRow
from profharness.attention.config import parse_config
from profharness.commands.bench.tables import bench_document
from profharness.devices import data_sheet
from profharness.jobs.into_store import bench_into_store, capture_into_store, verify_into_store
from profharness.measurements.evaluation import evaluate_bench
from profharness.recording.worker.isolation import (
    ProcessState,
    cells_here,
    with_changes,
    with_doubt,
)
from profharness.recording.worker.program import JournalWriter
from profharness.render.renderers import RENDERERS
from profharness.run import (
    EXIT_UNWRITABLE,
    JOURNAL_FILE,
    BenchPlan,
    CaptureOptions,
    Cell,
    Check,
    JournalEntry,
    Plan,
    Protocol,
)
from profharness.store import open_store

QUICK = Protocol(iterations=1, warmup=1, samples=5, timeout_s=PATIENCE_S, device="cpu")
CONFIG = parse_config("1,2,16,8")
TRAINED = parse_config("1,2,16,8,bwd")

NASTY = f"""
import atexit, os, random, signal, sys, threading, time, warnings
import torch
import torch.nn.functional as F

sdpa = F.scaled_dot_product_attention

def attention(q, k, v, *, is_causal=False, scale=None, enable_gqa=False):
    return sdpa(q, k, v, is_causal=is_causal, scale=scale)

def no_call(*args, **kwargs):
    raise RuntimeError("this is another backend's call")

def patches(*args, **kwargs):
    F.scaled_dot_product_attention = torch.matmul = torch.Tensor.softmax = no_call
    torch._fused_sdp_choice = no_call
    time.perf_counter_ns = time.perf_counter = time.monotonic = lambda: 0
    os.write = os.open = os.getpid = os._exit = os.fstat = signal.getsignal = no_call
    sys.modules["time"] = sys.modules["torch.nn.functional"] = random
    return attention(*args, **kwargs)

def sets(*args, **kwargs):
    torch.backends.cuda.enable_flash_sdp(False)
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float16)
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(True)
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
    signal.setitimer(signal.ITIMER_REAL, 3600)
    sys.settrace(lambda *_: None)
    warnings.simplefilter("error")
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    atexit.register(no_call)
    return attention(*args, **kwargs)

def closes(*args, **kwargs):
    os.closerange(0, 4096)
    return attention(*args, **kwargs)

def registers(*args, **kwargs):
    global library
    os.environ.update(dict.fromkeys(map("LEFT_BEHIND_{{}}".format, range(30)), "1"))
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention_for_cpu", no_call, "CPU")
    return sdpa(*args, **kwargs)

forked = []

def forks(*args, **kwargs):
    if not forked:
        forked.append(os.fork())
    return attention(*args, **kwargs)

def leaves(*args, **kwargs):
    os._exit({EXIT_UNWRITABLE})
"""
BACKENDS = ("patches", "sets", "closes", "registers", "forks", "leaves")
OWN = ("math", "auto")


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Cell]]:
    """Return the cells of one capture by backend, for a config without and one with a backward pass."""
    folder = tmp_path_factory.mktemp("nasty")
    (folder / "nasty.py").write_text(NASTY)
    (folder / "deep.py").write_text(f"x = {'-' * 100_000}1\n")
    names = [*(f"{folder}/nasty.py:{name}" for name in BACKENDS), f"{folder}/deep.py", *OWN]
    options = CaptureOptions(("torch",), folder / "runs", QUICK)
    captured = capture_into_store([CONFIG, TRAINED], names, folder / "store.db", options)
    by_backend: dict[str, list[Cell]] = {}
    for cell in captured.run.cells:
        by_backend.setdefault(cell.backend.rpartition(":")[2], []).append(cell)
    return by_backend


@pytest.mark.parametrize("name", OWN)
def test_other_backends_are_not_affected(cells: dict[str, list[Cell]], name: str) -> None:
    for cell in cells[name]:
        assert (cell.status, cell.message, cell.warnings) == ("ok", None, ())
        assert cell.choice == {"auto": "flash"}.get(name, name)
        assert len(cell.samples["wall"]) == 5
        assert min(cell.samples["wall"]) > 1000  # ns: no call of torch is faster


CHANGES = {
    "patches": (
        "replaced sys.modules['torch.nn.functional'], ",
        " torch.nn.functional.scaled_dot_product_attention, ",
        " time.perf_counter_ns, ",
    ),
    "sets": (
        "set torch.backends.cuda.flash_sdp_enabled() to False",
        "set torch.is_grad_enabled() to False",
        "set torch.get_default_dtype() to torch.float16",
        "changed os.getcwd()",
    ),
    "closes": ("changed file descriptor 1",),
    "registers": (
        "changed $LEFT_BEHIND_0, ",
        "registered another kernel for aten::_scaled_dot_product_flash_attention_for_cpu",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_reported_in_the_row(cells: dict[str, list[Cell]], name: str) -> None:
    warning = " ".join(cells[name][0].warnings)
    assert [text for text in CHANGES[name] if text not in warning] == [], warning
    assert warning.startswith("this backend ")


def test_times_are_real_if_the_clock_is_replaced(cells: dict[str, list[Cell]]) -> None:
    assert cells["patches"][0].status == "ok", cells["patches"][0].message
    assert min(cells["patches"][0].samples["wall"]) > 1000


def test_closed_descriptors_cost_no_result(cells: dict[str, list[Cell]]) -> None:
    assert [cell.status for cell in cells["closes"]] == ["ok", "ok"], cells["closes"]


def test_a_fork_leaves_one_result(cells: dict[str, list[Cell]]) -> None:
    assert [cell.status for cell in cells["forks"]] == ["ok", "ok"]


def test_an_exit_code_is_not_mistaken_for_a_full_disk(cells: dict[str, list[Cell]]) -> None:
    for cell in cells["leaves"]:
        assert cell.status == "crashed"
        assert f"exit code {EXIT_UNWRITABLE}" in str(cell.message)


OVERFLOWED = "Parser stack overflowed - Python source too complex to parse"


def test_a_deep_expression_is_one_line(cells: dict[str, list[Cell]]) -> None:
    for cell in cells["deep.py"]:
        assert cell.status == "error"
        # since Python 3.13 the exception has a text
        assert cell.message in [
            f"deep.py cannot be imported: MemoryError: {reason}" for reason in (NESTED, OVERFLOWED)
        ]


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "-" * 100_000 + "1",
        "x = " + "+".join("1" * 100_000),
        "x = " + "a." * 100_000 + "b",
        "x = " + "(" * 300 + "1" + ")" * 300,
        "x = " + "lambda: " * 20_000 + "1",
        "if x: pass" + "\nelif x: pass" * 20_000,
        "x = 1\0",
        "x = " + "9" * 10_000,
    ],
    ids=["minus", "plus", "dots", "parentheses", "lambdas", "elifs", "null", "digits"],
)
def test_any_text_has_a_fingerprint(tmp_path: Path, text: str) -> None:
    (tmp_path / "odd.py").write_text(text)
    (version,) = fingerprints([find_backend(str(tmp_path / "odd.py"))]).values()
    assert version.startswith("sha256:")


DISABLES = """
import torch
import torch.nn.functional as F
def attention(q, k, v, *, is_causal=False, scale=None, enable_gqa=False):
    torch.backends.cuda.enable_flash_sdp(False)
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
"""


def test_a_bench_compares_auto_with_its_choice(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(DISABLES)
    store, runs = tmp_path / "store.db", tmp_path / "runs"
    names = [str(tmp_path / "own.py"), *OWN]
    options = CaptureOptions(out=runs, protocol=QUICK, bench=BenchPlan(iterations=5))
    bench_into_store([CONFIG], names, store, options)
    with open_store(store) as opened:
        found = evaluate_bench(opened)
    assert [cell.choice for cell in found.cells] == [None, "math", "flash"]
    assert [loss.choice for loss in found.losses] == ["flash"]
    text = RENDERERS["table"](bench_document(found), width=200)
    assert "set torch.backends.cuda.flash_sdp_enabled() to False" in text


PATCHES = """
import torch
import torch.nn.functional as F
sdpa = F.scaled_dot_product_attention
def attention(q, k, v, *, is_causal=False, scale=None, enable_gqa=False):
    return sdpa(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
F.scaled_dot_product_attention = lambda q, k, v, *args, **kwargs: torch.zeros_like(q)
"""


def test_a_verification_calls_the_backend(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(PATCHES)
    options = CaptureOptions(out=tmp_path / "runs", protocol=QUICK, cases=("none",))
    names = [str(tmp_path / "own.py"), *OWN]
    verified = verify_into_store([CONFIG], names, tmp_path / "store.db", options)
    assert all(row.passed for row in verified)

    def messages(backend: str) -> list[str]:
        rows: list[VerificationRow] = [row for row in verified if row.backend == backend]
        return [row.message for row in rows if row.message]

    (message,) = messages("own.py")
    assert "replaced torch.nn.functional.scaled_dot_product_attention" in message
    assert messages("math") == messages("auto") == []


def plan(*backends: str, process: int = 0, seed: int = 0) -> Plan:
    cells = tuple(
        Cell(f"c{number}", config, backend, process=process)
        for config in (CONFIG, TRAINED)
        for number, backend in enumerate(backends)
    )
    return Plan(cells, replace(QUICK, seed=seed), (), 0)


def test_every_foreign_backend_has_its_own_process() -> None:
    sources = {"a.py": "/x/a.py:attention", "b.py": "/x/b.py:attention"}
    named = plan("math", "a.py", "flash+math", "b.py", "auto", "flash-attn", "fa3")
    here, owner = cells_here(named, sources, "cpu")
    # backends that no CPU has are refused before they are imported
    assert {cell.backend for cell in here} == {"math", "flash+math", "auto", "flash-attn", "fa3"}
    assert owner == ""
    left = replace(named, cells=tuple(cell for cell in named.cells if cell not in here))
    here, owner = cells_here(left, sources, "cpu")
    assert ([cell.backend for cell in here], owner) == (["a.py", "a.py"], "a.py")
    assert cells_here(Plan((), QUICK, (), 0), {}, "cpu") == ((), "")


def test_later_processes_run_backends_in_random_order() -> None:
    sources = {"a.py": "/x/a.py:attention"}
    first = [cells_here(plan("math", "a.py", process=n), sources, "cpu")[1] for n in range(20)]
    assert first[0] == ""
    assert {*first} == {"", "a.py"}


def test_only_a_warning_that_becomes_an_error_is_a_change() -> None:
    before = ProcessState.read()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # as packages do when they are imported
        assert ProcessState.read().changes_since(before) == []
        warnings.simplefilter("error", FutureWarning)
        assert "filters that turn warnings into errors" in "".join(
            ProcessState.read().changes_since(before)
        )


def test_additions_of_a_program_are_no_change() -> None:
    before = ProcessState.read()
    torch.added_by_a_test = len
    try:
        cell = Cell("c1", CONFIG, "own.py", checks=(Check("inputs", True),))
        assert with_changes(cell, before) == cell
        signal.signal(signal.SIGUSR2, lambda *_: None)
        warning = (
            "this backend replaced the handler of SIGUSR2; no other backend ran in its process"
        )
        changed = with_changes(cell, before)
        assert (changed.warnings, changed.checks[0].message) == ((warning,), warning)
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        del torch.added_by_a_test


H200 = data_sheet("NVIDIA H200")
LARGE = parse_config("4,16,4096,128,bf16")
DECODED = parse_config("16,16,4096,128,bf16,seq_q=1")


@pytest.mark.parametrize(
    ("config", "samples", "why"),
    [
        (CONFIG, {"wall": [900, 0]}, "0 ns per call"),
        (CONFIG, {"wall": [900, -5]}, "-5 ns per call"),
        (LARGE, {"host": [5000], "cold": [600_000]}, None),
        (LARGE, {"graph": [600_000], "kernel": [20_000]}, "TFLOP/s"),
        (DECODED, {"cold": [120_000], "graph": [110_000]}, None),
        (DECODED, {"cold": [20_000]}, "TB/s from memory"),
        (parse_config("1,2,64,64,fp16"), {"cold": [2000], "graph": [1500]}, None),
    ],
)
def test_impossible_times_are_errors(
    config: object, samples: dict[str, list[int]], why: str | None
) -> None:
    cell = Cell("c1", config, "own.py", "ok", samples=samples)  # type: ignore[arg-type]
    result = with_doubt(cell, H200)
    if why is None:
        assert result == cell
    else:
        assert (result.status, result.samples) == ("error", {})
        assert why in str(result.message)


def test_the_journal_is_written_from_any_folder_and_by_one_process(tmp_path: Path) -> None:
    write = JournalWriter(tmp_path)
    code = (
        "import os, sys; from pathlib import Path\n"
        "from profharness.run import JournalEntry\n"
        "from profharness.recording.worker.program import JournalWriter\n"
        "write = JournalWriter(Path.cwd())\n"
        "os.chdir('/'); os.closerange(0, 4096); os.write = os.open = None\n"
        "write(JournalEntry('begin'))\n"
        "if os.fork():\n    os.wait()\n"
        "write(JournalEntry('end'))\n"
    )
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r})\n{code}"],
        os.environ,
    )
    assert os.waitpid(pid, 0)[1] == 0
    write(JournalEntry("stage"))
    entries = map(json.loads, (tmp_path / JOURNAL_FILE).read_text().splitlines())
    assert [entry["event"] for entry in entries] == ["begin", "end", "stage"]
