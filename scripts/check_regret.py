"""Compare the prediction of `layers --savings` with the real saving. The script forces a model's
attention to a backend, records a trace and computes the regret. The script then switches the model
to the advised backend. Both backends are timed in turns without a profiler.

python scripts/check_regret.py --model llama                      # transformers' Llama, on a GPU
python scripts/check_regret.py --forced efficient --kv-heads 32   # a model of this script
python scripts/check_regret.py --device cpu --tiny
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
PHASES = ("prefill", "train")
WARMUP = 3  # steps


@dataclass(frozen=True)
class Size:
    """The sizes of the model and its batch."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    batch: int
    length: int


class Layer(torch.nn.Module):
    """Causal grouped attention and an MLP, each with a residual connection."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.dim = size.hidden // size.heads
        self.widths = [size.hidden, size.kv_heads * self.dim, size.kv_heads * self.dim]
        self.norm = torch.nn.LayerNorm(size.hidden)
        self.qkv = torch.nn.Linear(size.hidden, sum(self.widths), bias=False)
        self.out = torch.nn.Linear(size.hidden, size.hidden, bias=False)
        self.up = torch.nn.Linear(size.hidden, 4 * size.hidden, bias=False)
        self.down = torch.nn.Linear(4 * size.hidden, size.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm(x)).split(self.widths, -1)
        q, k, v = (part.unflatten(-1, (-1, self.dim)).transpose(1, 2) for part in parts)
        grouped = {"enable_gqa": True} if k.shape[1] < q.shape[1] else {}
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, **grouped)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(x)))


def build(name: str, size: Size) -> tuple[torch.nn.Module, Callable[[], Any]]:
    """Return a model with random weights, and its forward pass on one batch."""
    if name == "own":
        model: Any = torch.nn.Sequential(*(Layer(size) for _ in range(size.layers)))
        x = torch.randn(size.batch, size.length, size.hidden)
        return model, lambda: model(x)
    try:
        from transformers import LlamaConfig, LlamaModel
    except ImportError:
        raise SystemExit(
            "--model llama needs transformers; omit it to use this script's own layers"
        ) from None
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=size.hidden,
        intermediate_size=4 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=size.length,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = LlamaModel(config)
    tokens = torch.randint(0, 1024, (size.batch, size.length))
    return model, lambda: model(tokens, use_cache=False).last_hidden_state


def make_step(phase: str, model: torch.nn.Module, forward: Callable[[], Any]) -> Callable[[], None]:
    """Return a forward pass, or one with its backward pass."""

    def prefill() -> None:
        with torch.no_grad():
            forward()

    def train() -> None:
        model.zero_grad(set_to_none=True)
        forward().float().square().mean().backward()

    return train if phase == "train" else prefill


def record(step: Callable[[], None], backend: str, device: str, path: Path) -> None:
    """Record the trace of one step on a backend, after a warm-up."""
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with sdpa_kernel(BACKENDS[backend]):
        for _ in range(WARMUP):
            step()
        synchronize(device)
        with profile(activities=activities, record_shapes=True, with_stack=True) as seen:
            step()
            synchronize(device)
    seen.export_chrome_trace(str(path))


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def in_turns(
    step: Callable[[], None], names: tuple[str, str], device: str, rounds: int
) -> dict[str, list[float]]:
    """Return the ns of unprofiled steps on each backend. On a GPU, steps run back to back, with
    CUDA events between them.
    """
    for name in names:
        with sdpa_kernel(BACKENDS[name]):
            for _ in range(WARMUP):
                step()
    synchronize(device)
    spans: dict[str, list[Any]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names if turn % 2 else reversed(names):
            with sdpa_kernel(BACKENDS[name]):
                step()  # the first step after switching may be slower
                begin = stamp(device)
                step()
                spans[name].append((begin, stamp(device)))
    synchronize(device)
    return {
        name: [
            begin.elapsed_time(end) * 1e6 if device == "cuda" else (end - begin) * 1e9
            for begin, end in pairs
        ]
        for name, pairs in spans.items()
    }


def stamp(device: str) -> Any:
    if device != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def profharness(*words: str) -> str:
    """Return what the command printed. Exit with its output if it fails."""
    argv = [sys.executable, "-m", "profharness", *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def ask(trace: Path, max_time: str) -> dict[str, Any]:
    """Return the JSON of `layers --savings` for a trace."""
    store = ("--store", str(trace.with_suffix(".db")))
    profharness("ingest", str(trace), *store)
    runs = ("--out", str(trace.parent / "runs"))
    words = ("--savings", "--max-time", max_time, *runs, "--format", "json")
    answer: dict[str, Any] = json.loads(profharness("layers", *words, *store))
    return answer


def check(phase: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the figures of a phase in ns. `real_ns` is None if nothing is advised."""
    size = Size(*(getattr(options, name) for name in Size.__dataclass_fields__))
    torch.manual_seed(0)
    torch.set_default_device(options.device)
    torch.set_default_dtype(torch.float32 if options.device == "cpu" else torch.bfloat16)
    model, forward = build(options.model, size)
    model.train(phase == "train")
    step = make_step(phase, model, forward)
    trace = folder / f"{phase}.json"
    record(step, options.forced, options.device, trace)
    if options.device == "cuda":
        torch.cuda.empty_cache()  # for the bench, which runs in another process
    answer = ask(trace, options.max_time)
    rows = [row for row in answer["rows"] if row["saves_ns"]]
    attention = sum((row["forward_ns"] or 0) + (row["backward_ns"] or 0) for row in answer["rows"])
    row = max(rows, key=lambda row: row["saves_ns"], default=None)
    figures: dict[str, Any] = {
        "phase": phase,
        "model": options.model,
        "forced": options.forced,
        "advised": row and row["best"],
        "attention_ns": attention,
        "predicted_ns": sum(row["saves_ns"] for row in rows),
        "real_ns": None,
        "launch_bound": answer["regret"]["launch_bound"],
        "conclusions": answer["regret"]["conclusions"],
    }
    if row is None:
        return figures
    times = in_turns(step, (options.forced, row["best"]), options.device, options.rounds)
    before, after = (statistics.median(times[name]) for name in (options.forced, row["best"]))
    real = before - after
    off = abs(figures["predicted_ns"] - real) / attention
    return figures | {"before_ns": before, "after_ns": after, "real_ns": real, "off": off}


def print_figures(figures: dict[str, Any]) -> None:
    ms = {name[:-3]: (value or 0) / 1e6 for name, value in figures.items() if name.endswith("_ns")}
    print(f"\n{figures['phase']} ({figures['model']}), {figures['forced']} forced:", flush=True)
    for text in figures["conclusions"]:
        print(f"  {text}")
    if figures["real_ns"] is None:
        print("  nothing is advised, so there is nothing to switch to")
        return
    print(f"  advised            {figures['advised']:>10}")
    print(f"  attention of step  {ms['attention']:10.3f} ms, in the trace")
    print(f"  step before, after {ms['before']:10.3f} ms, {ms['after']:.3f} ms, without a profiler")
    print(f"  predicted saving   {ms['predicted']:10.3f} ms")
    print(f"  real saving        {ms['real']:10.3f} ms")
    print(f"  off by             {figures['off']:10.1%} of the step's attention")


def options_of(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("own", "llama"), default="own")
    parser.add_argument("--forced", choices=tuple(BACKENDS), default="math")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--phases", default=",".join(PHASES), help="prefill,train")
    parser.add_argument(
        "--tiny", action="store_true", help="use sizes for a CPU, and ignore other sizes"
    )
    for name, value in (("layers", 3), ("hidden", 2048), ("heads", 32), ("kv-heads", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=20, help="steps on each backend")
    parser.add_argument("--max-time", default="1s", help="time limit of `layers --savings`")
    parser.add_argument(
        "--within",
        type=float,
        help="exit 1 if the prediction is off by more, as a share of attention",
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(words)
    if options.tiny:
        tiny = Size(layers=2, hidden=64, heads=4, kv_heads=4, batch=2, length=64)
        vars(options).update(vars(tiny) | {"rounds": 3, "max_time": "50ms"})
    unknown = set(options.phases.split(",")) - set(PHASES)
    if unknown:
        parser.error(f"--phases {', '.join(sorted(unknown))}: known are {', '.join(PHASES)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no GPU; --device cpu --tiny shows that the script works")
    return options


def main(words: list[str] | None = None) -> int:
    options = options_of(words)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for phase in options.phases.split(","):
            found.append(check(phase, options, Path(folder)))
            print_figures(found[-1])
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    off = [figures["off"] for figures in found if figures["real_ns"] is not None]
    return int(options.within is not None and (not off or max(off) > options.within))


if __name__ == "__main__":
    raise SystemExit(main())
