"""The process of `make_atlas.py` that measures: batches come in on stdin and go out on stdout, a line
of JSON each. It ends with its parent, and at the end of its input.

    {"batch": 3, "trace": PATH, "cells": [CELL, …]}  ->  {"environment": {…}} first, then
    {"stage": "graph", "cell": 5} before each step, and {"batch": 3, "cells": [RESULT, …]}
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.profiler import profile, record_function

from profharness.backends import find_backend
from profharness.config import Config, parse_config
from profharness.trace import WARMUP_RANGE, cell_range
from profharness.worker.environment import backend_name, collect
from profharness.worker.failures import (
    context_is_dead,
    is_oom,
    is_refusal,
    recorded_warnings,
    refusals,
)
from profharness.worker.inputs import DTYPES, Inputs, fused_choice, make_call, output_shape
from profharness.worker.program import EXIT_DEAD_CONTEXT, end_with
from profharness.worker.timing import elapsed_ms

ENVIRONMENT = (
    "gpu", "torch", "torch_cuda", "cudnn", "driver", "capability", "num_sms", "gpu_memory_bytes",
    "l2_bytes", "device_type", "profharness", "python", "triton", "env", "sdp_flash",
    "sdp_efficient", "sdp_math", "sdp_cudnn", "priority_order", "flash_attention_impl",
    "fp16_reduction_math", "tf32",
)  # fmt: skip
POOL_BYTES = 7 << 30  # of each dtype on a GPU, all inputs of the largest config
ALIGNED = 256  # bytes; where each tensor begins, as the allocator would place it
GRAPH_MS = 0.2  # a replay takes at least this, or has GRAPH_CALLS calls
GRAPH_CALLS = 100
REPLAYS = 5
LONG_MS = 2.0  # calls that take longer are made fewer times
RESERVED_BYTES = 60 << 30  # beyond this the allocator's memory is given back between two cells
MAX_TEXT = 240


@dataclass
class Pool:
    """Memory that inputs are views of, filled once: small normal values, and booleans with three
    quarters True.
    """

    device: str
    flats: dict[Any, Any] = field(default_factory=dict)
    taken: dict[Any, int] = field(default_factory=dict)

    def empty(self) -> None:
        """Begin again at the start; what was taken before will be shared."""
        self.taken.clear()

    def take(self, dtype: Any, *shape: int) -> Any:
        """A contiguous tensor."""
        begin, count = self.taken.get(dtype, 0), math.prod(shape)
        item = torch.empty(0, dtype=dtype).element_size()
        end = begin + count
        self.taken[dtype] = end + -end % (ALIGNED // item)
        flat = self.flats.get(dtype)
        if flat is None or flat.numel() < end:
            flat = self.flats[dtype] = None
            flat = self.flats[dtype] = self._filled(dtype, item, end)
        return flat[begin:end].view(shape)

    def _filled(self, dtype: Any, item: int, needed: int) -> Any:
        least = POOL_BYTES // item if self.device == "cuda" else 1 << 16
        flat = torch.empty(max(needed, least), dtype=dtype, device=self.device)
        return flat.bernoulli_(0.75) if dtype == torch.bool else flat.normal_()

    def inputs(self, config: Config) -> Inputs:
        """The tensors of a contiguous config, as `make_inputs` lays them out."""
        self.empty()
        dtype = DTYPES[str(config.dtype)]

        def leaf(*shape: int) -> Any:
            return self.take(dtype, *shape).requires_grad_(config.bwd)

        rows = (config.key_batch, config.num_kv_heads, config.seq_len_kv)
        query = leaf(config.batch, config.num_heads, config.seq_len_q, config.head_dim)
        key, value = leaf(*rows, config.head_dim), leaf(*rows, config.value_dim)
        grad = self.take(dtype, *output_shape(config)) if config.bwd else None
        mask = None
        if config.mask.startswith("bool"):
            mask = self.take(torch.bool, *config.mask_dims)
            mask[..., 0] = True  # a row with nothing to attend to would be NaN by definition
        elif config.mask != "none":
            mask = self.take(dtype, *config.mask_dims)
        return Inputs(query, key, value, mask, grad)


class Graphs:
    """Captures calls into CUDA graphs, all in one pool of memory that a first graph keeps alive."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.open()

    def open(self) -> None:
        """A new pool; the memory of the one before is given back."""
        self.keeper: Any = None
        torch.cuda.empty_cache()
        self.handle = torch.cuda.graph_pool_handle()
        self.keeper = self.capture(lambda: torch.empty(1, device="cuda").zero_(), 1)

    def capture(self, call: Callable[[], Any], calls: int) -> Any:
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.handle)
            try:
                for _ in range(calls):
                    call()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self.stream)
        return graph

    def time_us(self, call: Callable[[], Any], eager_ms: float) -> float:
        """The median time of a call in replays of one graph. eager_ms, of a call outside of a graph,
        may be mostly the CPU's.
        """
        calls = max(1, min(GRAPH_CALLS, math.ceil(GRAPH_MS / eager_ms)))
        while True:
            graph = self.capture(call, calls)
            graph.replay()
            once = elapsed_ms(graph.replay)
            if once >= GRAPH_MS or calls == GRAPH_CALLS:
                break
            calls = min(GRAPH_CALLS, math.ceil(1.3 * calls * GRAPH_MS / max(once, 1e-3)))
        replays = REPLAYS if once < LONG_MS else 2
        times = [once, *(elapsed_ms(graph.replay) for _ in range(replays))]
        return statistics.median(times) * 1e3 / calls


@dataclass
class Trial:
    """A cell on its way: its call, and what is known of it."""

    name: str
    backend: str
    config: Config
    call: Callable[[], Any]
    result: dict[str, Any]
    eager_ms: float = 0.0


@dataclass
class Bench:
    """Measures batches. say writes a line for the parent."""

    device: str
    say: Callable[[dict[str, Any]], None]
    pool: Pool = field(init=False)
    graphs: Graphs | None = None

    def __post_init__(self) -> None:
        self.pool = Pool(self.device)
        if self.device == "cuda":
            self.graphs = Graphs()

    def measure(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        """The results of a batch; its trace lies under the path it names."""
        trials = []
        for number, cell in enumerate(batch["cells"]):
            self.say({"stage": "call", "cell": number})
            trial = self.begin(f"c{number:04}", cell)
            self.attempt(trial, self.first)
            graphed = self.graphs is not None and cell.get("graph", True)
            if trial.result["status"] == "ok" and graphed:
                self.say({"stage": "graph", "cell": number})
                self.attempt(trial, self.graph)
            trials.append(trial)
        self.profile(trials, batch["trace"])
        return [trial.result for trial in trials]

    def begin(self, name: str, cell: dict[str, Any]) -> Trial:
        """The cell's call on views of the pool; nothing is launched but the mask's first column."""
        config = parse_config(cell["config"])
        result = {"status": "ok", "choice": None, "graph_us": None, "peak_bytes": None}
        trial = Trial(name, cell["backend"], config, lambda: None, result)
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
        """Do a step of a cell, once more with empty caches where memory lacks. What it raises becomes
        the cell's status; a lost CUDA context ends the process.
        """
        for retry in (True, False):
            texts: list[str] = []
            try:
                with recorded_warnings(texts), self.only(trial):
                    step(trial, texts)
                return
            except Exception as error:
                if context_is_dead(error):
                    print(
                        f"{trial.config} on {trial.backend}: {error}", file=sys.stderr, flush=True
                    )
                    os._exit(EXIT_DEAD_CONTEXT)
                if not retry or not is_oom(error):
                    self.fail(trial, step, texts, error)
                    return
            self.give_back()  # here, where no traceback keeps tensors

    def fail(
        self, trial: Trial, step: Callable[..., None], texts: list[str], error: Exception
    ) -> None:
        if trial.result["status"] != "ok":
            return
        if self.graphs is not None and step == self.graph:  # the cell itself is fine
            trial.result["message"] = f"no graph: {text_of(str(error))}"
            return
        if is_refusal(error):
            reasons = refusals(trial.backend, texts, error)
            trial.result["status"] = "refused"
            trial.result["message"] = "; ".join(text_of(reason.message) for reason in reasons)
            return
        trial.result["status"] = "oom" if is_oom(error) else "error"
        trial.result["message"] = text_of(f"{type(error).__name__}: {error}")

    def first(self, trial: Trial, _: list[str]) -> None:
        """The first calls: memory, and a rough time. Autotuning and caches are over after them."""
        if trial.result["status"] != "ok":
            return
        if self.graphs is None:
            trial.call()
            return
        if torch.cuda.memory_reserved() > RESERVED_BYTES:
            self.give_back()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trial.call()
        torch.cuda.synchronize()
        trial.result["peak_bytes"] = torch.cuda.max_memory_allocated() - before
        trial.eager_ms = max(1e-3, elapsed_ms(trial.call))

    def graph(self, trial: Trial, _: list[str]) -> None:
        assert self.graphs is not None
        trial.result["graph_us"] = round(self.graphs.time_us(trial.call, trial.eager_ms), 3)

    def give_back(self) -> None:
        if self.graphs is not None:
            self.graphs.open()

    def profile(self, trials: list[Trial], path: str) -> None:
        """One session over the cells that ran. Before the calls that count each cell is called once,
        so that the L2 and the clocks are its own.
        """
        device = "cuda" if self.graphs is not None else None
        with profile(use_kineto=True, use_device=device) as session:
            for number, trial in enumerate(trials):
                if trial.result["status"] == "ok":
                    self.say({"stage": "profile", "cell": number})
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
            torch.cuda.synchronize()  # the launch queue is empty again, and an error is this cell's


def text_of(text: str) -> str:
    """The first line, without paths and not too long."""
    line = next(iter(text.strip().splitlines()), "")
    return re.sub(r"(?<![\w.])/[\w./+-]+", "…", line)[:MAX_TEXT]


def batches() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def main() -> None:
    """argv: the device, and the process id of the parent."""
    device, parent = sys.argv[1], int(sys.argv[2])
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints

    def say(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    keys = collect(device)
    say({"environment": {name: keys[name] for name in ENVIRONMENT if name in keys}})
    bench = Bench(device, say)
    for batch in batches():
        say({"batch": batch["batch"], "cells": bench.measure(batch)})
    os._exit(0)


if __name__ == "__main__":
    main()
