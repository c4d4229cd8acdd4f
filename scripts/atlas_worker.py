"""The measuring process of `make_atlas.py`. The worker reads batches from stdin and writes results
to stdout, as one line of JSON each. The worker exits when its parent exits, and at the end of its
input.

    {"batch": 3, "trace": PATH, "cells": [CELL, …]}  ->  first {"environment": {…}}, then
    {"stage": "graph", "cell": 5} before each step, and {"batch": 3, "cells": [RESULT, …]}
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
import os
import re
import statistics
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import profile, record_function

from profharness.attention.backends import find_backend
from profharness.attention.backends.base import Inputs, build_inputs
from profharness.attention.config import Config, parse_config
from profharness.dtypes import CONFIG_DTYPES
from profharness.recording.worker.attention import fused_choice, make_call, torch_dtype
from profharness.recording.worker.environment import backend_name, collect
from profharness.recording.worker.failures import (
    context_is_dead,
    is_oom,
    is_refusal,
    recorded_warnings,
    refusals,
)
from profharness.recording.worker.program import EXIT_DEAD_CONTEXT, end_with
from profharness.recording.worker.timing import elapsed_ms
from profharness.trace import WARMUP_RANGE, cell_range

ENVIRONMENT = (
    "gpu", "torch", "torch_cuda", "cudnn", "driver", "capability", "num_sms", "gpu_memory_bytes",
    "l2_bytes", "device_type", "profharness", "python", "triton", "env", "sdp_flash",
    "sdp_efficient", "sdp_math", "sdp_cudnn", "priority_order", "flash_attention_impl",
    "fp16_reduction_math", "tf32",
)  # fmt: skip
POOL_BYTES = 1 << 28  # initial size of a dtype's pool, which doubles
POOL_MOST = 3 << 30  # up to this size
ALIGNED = 256  # bytes; alignment of each tensor, as by the allocator
GRAPH_MS = 0.2  # a replay takes at least this, or has GRAPH_CALLS calls
GRAPH_CALLS = 100
REPLAYS = 5
CAPTURE = "captur"  # in errors that affect the graph but not the context
UNREADY = 5  # after this many failures, a backend's calls are captured only after their first call
LONG_MS = 2.0  # longer calls are repeated less often
KEPT_SHARE = 0.75  # share of the GPU's memory above which the allocators free memory between cells
MAX_TEXT = 240


@dataclass
class Pool:
    """Memory for inputs, filled once with small normal values, or with booleans. Three quarters of
    the booleans are True. Inputs are views of it.
    """

    device: str
    flats: dict[Any, Any] = field(default_factory=dict)
    taken: dict[Any, int] = field(default_factory=dict)

    def empty(self) -> None:
        """Start again at the beginning of the memory. Tensors returned earlier will share memory
        with new ones.
        """
        self.taken.clear()

    def take(self, dtype: Any, *shape: int) -> Any:
        """Return a contiguous tensor."""
        begin, count = self.taken.get(dtype, 0), math.prod(shape)
        item = torch.empty(0, dtype=dtype).element_size()
        end = begin + count
        self.taken[dtype] = end + -end % (ALIGNED // item)
        flat = self.flats.get(dtype)
        if flat is None or flat.numel() < end:
            least = POOL_BYTES // item if self.device == "cuda" else 1 << 16
            double = 0 if flat is None else min(2 * flat.numel(), POOL_MOST // item)
            enough = max(end, least, double)
            flat = self.flats[dtype] = self._filled(dtype, enough)
        return flat[begin:end].view(shape)

    def _filled(self, dtype: Any, elements: int) -> Any:
        flat = torch.empty(elements, dtype=dtype, device=self.device)
        return flat.bernoulli_(0.75) if dtype == torch.bool else flat.normal_()

    def inputs(self, config: Config) -> Inputs:
        """Return the tensors of a config."""
        self.empty()
        dtype = torch_dtype(str(config.dtype))
        return build_inputs(config, partial(self.take, dtype), partial(self.take, torch.bool))


class Graphs:
    """Captures calls into CUDA graphs, all in one memory pool that a first graph keeps alive."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.open()

    def open(self) -> None:
        """Create a new pool, and free the memory of the previous one."""
        self.keeper: Any = None
        torch.cuda.empty_cache()
        self.handle = torch.cuda.graph_pool_handle()
        self.keeper = self.capture(lambda: torch.empty(1, device="cuda").zero_(), 1)

    def capture(self, call: Callable[[], Any], calls: int) -> Any:
        """Capture calls without launching anything. The mode is relaxed, since a first call may
        load kernels.
        """
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.handle, capture_error_mode="relaxed")
            try:
                for _ in range(calls):
                    call()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self.stream)
        return graph


def calls_for(call_ms: float) -> int:
    """Return how many calls of this duration a graph contains."""
    return max(1, min(GRAPH_CALLS, math.ceil(GRAPH_MS / max(call_ms, 1e-3))))


@dataclass
class Trial:
    """A cell in progress: its call and its results so far."""

    name: str
    backend: str
    config: Config
    call: Callable[[], Any]
    result: dict[str, Any]
    estimate_ms: float = 0.0
    eager_ms: float = 0.0
    graph: Any = None  # with this many calls
    calls: int = 0
    failure: str = ""  # why it has no graph


@dataclass
class Bench:
    """Measures batches. `say` writes a line for the parent."""

    device: str
    say: Callable[[dict[str, Any]], None]
    lock: Path
    workers: int = 1
    pool: Pool = field(init=False)
    graphs: Graphs | None = None
    unready: Counter[str] = field(default_factory=Counter)  # failed captures by backend

    def __post_init__(self) -> None:
        self.pool = Pool(self.device)
        if self.device == "cuda":
            self.graphs = Graphs()
            self.open_libraries(self.graphs)

    def open_libraries(self, graphs: Graphs) -> None:
        """Create the handles and workspaces of cuBLAS and cuDNN, so that no capture creates them."""
        for dtype, name in itertools.product(CONFIG_DTYPES, ("math", "cudnn", "math")):
            config = parse_config(f"2,2,64,64,{dtype},bwd")
            with contextlib.suppress(RuntimeError), find_backend(name).context():
                call = make_call(config, self.pool.inputs(config))
                call()
                with torch.cuda.stream(graphs.stream):
                    call()
        torch.cuda.synchronize()

    @contextlib.contextmanager
    def turn(self, stage: str, number: int) -> Iterator[None]:
        """Hold the GPU's lock. The GPU is idle before and afterwards."""
        self.say({"stage": "wait", "cell": number})
        with self.lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.say({"stage": stage, "cell": number})
            yield
            if self.graphs is not None:
                torch.cuda.synchronize()

    def measure(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the results of a batch. Its trace is written to the path given in the batch."""
        trials = []
        for number, cell in enumerate(batch["cells"]):
            trial = self.begin(number, cell)
            trials.append(trial)
            graphed = self.graphs is not None and cell.get("graph", True)
            early = trial.result["choice"] is not None and self.unready[trial.backend] < UNREADY
            if graphed and early:
                # plans and kernels are made and loaded here, while another process uses the GPU
                self.say({"stage": "graph", "cell": number})
                self.attempt(trial, self.capture)
            with self.turn("call", number):
                self.attempt(trial, self.first)
            if graphed and trial.result["status"] == "ok":
                self.graph(trial, number)
            trial.graph = None
        self.profile(trials, batch["trace"])
        return [trial.result for trial in trials]

    def graph(self, trial: Trial, number: int) -> None:
        """Time the graph. If it is too short or could not be captured, capture it once more."""
        for last in (False, True):
            if trial.graph is None:
                self.say({"stage": "graph", "cell": number})
                self.attempt(trial, self.capture)
            if trial.graph is None:
                trial.result["message"] = trial.failure
                return
            with self.turn("replay", number):
                self.attempt(trial, self.replay)
            us = trial.result["graph_us"]
            if us is None:
                trial.result["message"] = trial.failure
                return
            if last or us * trial.calls > 500 * GRAPH_MS or trial.calls == GRAPH_CALLS:
                return
            trial.estimate_ms, trial.graph = us / 1e3, None

    def begin(self, number: int, cell: dict[str, Any]) -> Trial:
        """Prepare the cell's call on views of the pool. Only the first column of the mask is
        launched.
        """
        config = parse_config(cell["config"])
        result = {"status": "ok", "choice": None, "graph_us": None, "peak_bytes": None}
        trial = Trial(f"c{number:04}", cell["backend"], config, lambda: None, result)
        trial.estimate_ms = cell["estimate_us"] / 1e3
        self.say({"stage": "inputs", "cell": number})
        self.attempt(trial, self.prepare)
        return trial

    def prepare(self, trial: Trial, _: list[str]) -> None:
        inputs = self.pool.inputs(trial.config)
        with contextlib.suppress(RuntimeError):
            choice = backend_name(fused_choice(trial.config, inputs))
            trial.result["choice"] = None if choice == "error" else choice
        trial.call = make_call(trial.config, inputs)

    def only(self, trial: Trial) -> contextlib.AbstractContextManager[None]:
        return find_backend(trial.backend).context()

    def attempt(self, trial: Trial, step: Callable[[Trial, list[str]], None]) -> None:
        """Run a step of a cell; if memory runs out, free caches and run it once more. An exception
        becomes the cell's status. A lost CUDA context ends the process.
        """
        for retry in (True, False):
            texts: list[str] = []
            try:
                with recorded_warnings(texts), self.only(trial):
                    step(trial, texts)
                return
            except Exception as error:
                if context_is_dead(error) and not (step == self.capture and CAPTURE in str(error)):
                    print(
                        f"{trial.config} on {trial.backend}: {error}", file=sys.stderr, flush=True
                    )
                    os._exit(EXIT_DEAD_CONTEXT)
                if not retry or not is_oom(error):
                    self.fail(trial, step, texts, error)
                    return
            self.give_back()  # here, where no traceback keeps tensors alive

    def fail(
        self, trial: Trial, step: Callable[..., None], texts: list[str], error: Exception
    ) -> None:
        if trial.result["status"] != "ok":
            return
        if step in (self.capture, self.replay):  # the cell itself may be intact
            trial.failure = f"no graph: {text_of(str(error))}"
            if step == self.capture:
                self.unready[trial.backend] += 1
                self.give_back()  # the allocator may still be in capture mode
            return
        if is_refusal(error):
            reasons = refusals(trial.backend, texts, error)
            trial.result["status"] = "refused"
            trial.result["message"] = "; ".join(text_of(reason.message) for reason in reasons)
            return
        trial.result["status"] = "oom" if is_oom(error) else "error"
        trial.result["message"] = text_of(f"{type(error).__name__}: {error}")

    def first(self, trial: Trial, _: list[str]) -> None:
        """Run the first calls, to measure memory and a rough time. They include autotuning and
        caching.
        """
        if trial.result["status"] != "ok":
            return
        if self.graphs is None:
            trial.call()
            return
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trial.call()
        torch.cuda.synchronize()
        trial.result["peak_bytes"] = torch.cuda.max_memory_allocated() - before
        trial.eager_ms = max(1e-3, elapsed_ms(trial.call))

    def capture(self, trial: Trial, _: list[str]) -> None:
        assert self.graphs is not None
        self.limit_memory()
        trial.calls = calls_for(trial.estimate_ms)
        trial.graph = self.graphs.capture(trial.call, trial.calls)

    def replay(self, trial: Trial, _: list[str]) -> None:
        trial.graph.replay()
        once = elapsed_ms(trial.graph.replay)
        replays = REPLAYS if once < LONG_MS else 2
        times = [once, *(elapsed_ms(trial.graph.replay) for _ in range(replays))]
        trial.result["graph_us"] = round(statistics.median(times) * 1e3 / trial.calls, 3)

    def limit_memory(self) -> None:
        """Free cached memory beyond this process's share."""
        whole = torch.cuda.get_device_properties(0).total_memory
        if torch.cuda.memory_reserved() > KEPT_SHARE * whole / self.workers:
            self.give_back()

    def give_back(self) -> None:
        if self.graphs is not None:
            self.graphs.open()

    def profile(self, trials: list[Trial], path: str) -> None:
        """Profile the cells that ran in one session. Each cell is called once before the calls that
        count, so that L2 and clocks are in its state.
        """
        device = "cuda" if self.graphs is not None else None
        with profile(use_kineto=True, use_device=device) as session:
            for number, trial in enumerate(trials):
                if trial.result["status"] == "ok":
                    with self.turn("profile", number):
                        self.attempt(trial, self.in_ranges)
        self.say({"stage": "export", "cell": None})
        if any(trial.result["status"] == "ok" for trial in trials):
            session.export_chrome_trace(path)

    def in_ranges(self, trial: Trial, _: list[str]) -> None:
        with record_function(WARMUP_RANGE):
            trial.call()
        for _call in range(4 if trial.eager_ms < LONG_MS else 3):
            with record_function(cell_range(trial.name)):
                trial.call()
        if self.graphs is not None:
            torch.cuda.synchronize()  # so that an error belongs to this cell


def text_of(text: str) -> str:
    """Return the first line, shortened and without paths."""
    line = next(iter(text.strip().splitlines()), "")
    return re.sub(r"(?<![\w.])/[\w./+-]+", "…", line)[:MAX_TEXT]


def batches() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def main() -> None:
    """Run the worker. Arguments: the device, the parent's process id, the lock file, the number of
    workers.
    """
    device, parent, lock, workers = (
        sys.argv[1],
        int(sys.argv[2]),
        Path(sys.argv[3]),
        int(sys.argv[4]),
    )
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # redirect any other output

    def say(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    keys = collect(device)
    say({"environment": {name: keys[name] for name in ENVIRONMENT if name in keys}})
    bench = Bench(device, say, lock, workers)
    for batch in batches():
        say({"batch": batch["batch"], "cells": bench.measure(batch)})
    os._exit(0)


if __name__ == "__main__":
    main()
