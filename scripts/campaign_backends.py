"""Trials of the fault campaign with backends: files that change their process, end it, hang or
close its descriptors, next to PyTorch's own backends, which must not be affected.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from campaign_trials import Bench, Outcome, until

OWN = ("math", "auto")
FILES = 4  # per capture
SLOWER = 20.0  # factor allowed over a capture without the files; other programs use the same cores
TIMEOUT_S = 30
QUICK = ("--device", "cpu", "--samples", "20", "--iterations", "1", "--warmup", "1")
# A change by a backend, and the words by which its row reports it. Empty if it leaves nothing to report.
CHANGES = {
    "F.scaled_dot_product_attention = torch.matmul = broken": "torch.matmul",
    "torch.Tensor.softmax = torch.Tensor.__matmul__ = broken": "torch.Tensor.softmax",
    "time.perf_counter_ns = time.perf_counter = time.monotonic_ns = lambda: 0": "time.perf_count",
    "time.time = time.monotonic = time.sleep = broken": "time.sleep",
    "os.write = os.open = os.fstat = os._exit = broken": "os.write",
    "builtins.print = builtins.sorted = broken": "builtins.print",
    "sys.modules['torch'] = sys.modules['time'] = random": "sys.modules['torch']",
    "torch.backends.cuda.enable_flash_sdp(False)": "flash_sdp_enabled() to False",
    "torch.backends.cuda.enable_math_sdp(False)": "math_sdp_enabled() to False",
    "torch.set_default_dtype(torch.float64)": "get_default_dtype() to torch.float64",
    "torch.set_default_device('meta')": "get_default_device() to meta",
    "torch.set_grad_enabled(False)": "is_grad_enabled() to False",
    "torch.set_autocast_enabled('cpu', True)": "torch.is_autocast_enabled('cpu') to True",
    "torch.use_deterministic_algorithms(True)": "deterministic",
    "torch.set_float32_matmul_precision('medium')": "float32_matmul_precision",
    "torch.set_num_threads(3)": "get_num_threads() to 3",
    "torch.manual_seed(3); random.seed(3)": "torch.initial_seed() to 3",
    "register('_scaled_dot_product_flash_attention_for_cpu')": "registered another kernel",
    "register('bmm')": "registered another kernel",
    "torch.nn.modules.module.register_module_forward_hook(broken)": "PyTorch's global module hooks",
    "torch.overrides.BaseTorchFunctionMode().__enter__()": "_len_torch_function_stack()",
    "sys.settrace(lambda *_: None); sys.setprofile(lambda *_: None)": "sys.gettrace()",
    "sys.setrecursionlimit(60)": "",
    "gc.disable(); gc.set_threshold(1)": "gc.isenabled() to False",
    "warnings.simplefilter('error')": "",
    "os.environ['OMP_NUM_THREADS'] = '1'; os.environ.clear()": "$",
    "os.chdir('/')": "os.getcwd()",
    "os.umask(0o777)": "",
    "os.nice(5)": "the priority of the process",
    "os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])": "",
    "signal.signal(signal.SIGTERM, broken); signal.signal(signal.SIGCHLD, broken)": "SIGTERM",
    "signal.setitimer(signal.ITIMER_REAL, 3600)": "the timers of the process",
    "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())": "",
    "resource.setrlimit(resource.RLIMIT_NOFILE, (1, 1))": "",
    "resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))": "",
    "atexit.register(broken)": "",
    "threading.Thread(target=busy, daemon=True).start()": " running",
    "threading.Timer(1.5, os.kill, (os.getpid(), 9)).start()": "",
    "subprocess.Popen(['sleep', '600'])": "",
    "os.closerange(0, 4096)": "",
    "os.close(1); os.close(2); open(os.devnull); open(os.devnull)": "",
    "kept or kept.append(os.fork())": "",
    "ctypes.CDLL(None).mallopt(-6, 0x155)": "",
}
MOMENTS = ("import", "first call", "each call")
ENDS = {
    "returns": "return real(q, k, v, is_causal=is_causal, scale=scale)",
    "raises": "raise ValueError('a bad day')",
    "leaves": "leave({code})",
    "dies": "kill(os.getpid(), {signal})",
    "hangs": "pause(3600)",
}
FILE = """
import atexit, builtins, ctypes, gc, os, random, resource, signal, subprocess, sys, threading, time
import warnings
import torch
import torch.nn.functional as F

real, leave, kill, pause = F.scaled_dot_product_attention, os._exit, os.kill, time.sleep
calls = []
kept = []

def broken(*args, **kwargs):
    raise RuntimeError("this was changed by another backend")

def busy():
    while True:
        pass

def register(name):
    kept.append(torch.library.Library("aten", "IMPL"))
    kept[-1].impl(name, broken, "CPU")

def change():
{change}

if {at_import}:
    change()

def attention(q, k, v, *, is_causal=False, scale=None, enable_gqa=False):
    calls.append(1)
    if {at_call}:
        change()
    {end}
"""


@dataclass(frozen=True)
class Nasty:
    """The file of a backend: what it changes, when, and how its calls end."""

    changes: tuple[str, ...]
    moment: str
    end: str
    text: str

    @classmethod
    def drawn(cls, random: Random) -> Nasty:
        """Return one of all combinations."""
        changes = tuple(random.sample(list(CHANGES), random.choice((1, 1, 2))))
        moment = random.choice(MOMENTS)
        end = random.choices(list(ENDS), (12, 3, 3, 2, 1))[0]
        last = ENDS[end].format(code=random.randrange(256), signal=random.choice((6, 9, 11, 15)))
        text = FILE.format(
            change="\n".join(f"    {change}" for change in changes),
            at_import=moment == "import",
            at_call={"first call": "len(calls) == 1", "each call": "True"}.get(moment, "False"),
            end=last,
        )
        return cls(changes, moment, end, text)

    def fault(self, cell: dict[str, Any]) -> str:
        """Return what is wrong with its row."""
        status, message = cell["status"], cell.get("message") or ""
        if status not in ("ok", "refused", "error", "crashed", "timeout", "oom"):
            return f"a nasty backend ended as {status}"
        if "No space left" in message or "Traceback" in message:
            return f"a nasty backend's reason: {message.splitlines()[0][:60]}"
        if status == "ok" and self.end != "returns":
            return f"a backend that {self.end} is ok"
        if status == "ok" and min(cell["samples"]["wall"]) < 1000:
            return "an impossible time"
        told = " ".join(cell.get("warnings", ()))
        left_out = [text for text in map(CHANGES.get, self.changes) if str(text) not in told]
        return f"its row does not report: {left_out[0]}" if status == "ok" and left_out else ""


def backends(bench: Bench, deadline: float) -> Iterator[Outcome]:
    """Capture misbehaving backends with PyTorch's own, and compare the results of these with a
    capture without the former.
    """
    bench.extra = {
        "OMP_NUM_THREADS": "1"
    }  # with several threads, waiting for each other dominates on busy cores
    alone, code, told = captured(bench, [])
    if code != 0:
        yield Outcome("capture", "a capture without nasty backends fails", told)
        return
    for _ in until(deadline, 1):
        files = [Nasty.drawn(bench.random) for _ in range(FILES)]
        cells, code, told = captured(bench, files)
        what = "\n".join(f"{file.moment}, {file.end}: {'; '.join(file.changes)}" for file in files)
        wrong = bench.fault(["capture"], code, told, (0, 1)).failure or spread(alone, cells)
        for number, file in enumerate(files):
            row = cells.get(f"n{number}.py")
            fault = wrong or (file.fault(row) if row else "a row is missing")
            yield Outcome(what, fault, f"{file.text}\n{json.dumps(row)}\n{told[-3000:]}")


def captured(bench: Bench, files: list[Nasty]) -> tuple[dict[str, dict[str, Any]], int, str]:
    """Return the cells of a capture by backend, its exit code, and its output."""
    place = bench.place()
    names = [f"n{number}.py" for number in range(len(files))]
    for name, file in zip(names, files, strict=True):
        (place / name).write_text(file.text)
    named = [*names, *OWN]
    words = ["capture", "--config", "1,2,32,16,fp32", "--backend", ",".join(named), *QUICK]
    words += ["--profiler", "events", "--timeout", str(TIMEOUT_S)]
    code, told = bench.run(place, *words, "--store", "s.db", "--out", "runs")
    records = list((place / "runs").glob("*/run.json")) if (place / "runs").is_dir() else []
    cells = [cell for path in records for cell in json.loads(path.read_bytes())["cells"]]
    shutil.rmtree(place)
    return {Path(cell["backend"]).name: cell for cell in cells}, code, told


def spread(alone: dict[str, dict[str, Any]], beside: dict[str, dict[str, Any]]) -> str:
    """Return where PyTorch's own backends differ from a capture without the others."""
    for name in OWN:
        cell = beside.get(name, {})
        for key in ("status", "choice", "message", "warnings", "refusals"):
            if cell.get(key) != alone[name].get(key):
                return f"{name} has another {key}"
        ratio = fastest(cell) / fastest(alone[name])
        if not 1 / SLOWER < ratio < SLOWER:
            return f"{name} takes {ratio:.2g} times as long"
    return ""


def fastest(cell: dict[str, Any]) -> float:
    """Return the shortest call, which other programs disturb least."""
    return float(min(cell["samples"]["wall"]))
