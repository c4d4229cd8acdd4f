"""Record traces of a small engine on this GPU: prefill and decode with FlashInfer's paged attention.

The engine annotates its steps as SGLang does, with the sums of the lengths. The script writes four
traces into a folder. Two traces show eager steps, without and with an op that has the shapes of
attention. The other traces show the capture of a CUDA graph, and replays of that graph. The file
expected.json contains the lengths of each step and the time of its attention, measured with CUDA
events.

    python scripts/record_serving.py FOLDER
    profharness layers FOLDER/eager.json.gz
    profharness layers FOLDER/graph/decode.json.gz
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from profharness.attention.backends import BACKENDS
from profharness.attention.backends.serving import fill_pages, packed_queries, page_table
from profharness.attention.config import Config, parse_config
from profharness.recording.worker.attention import make_forward, make_inputs
from profharness.traces.engine_steps import BatchPart

BACKEND = "flashinfer-fa2"
LAYERS, HIDDEN = 6, 4096
PREFILL = "4,32,600,128,bf16,kv_heads=8,lens=100+300+450+600,page=16,causal"
DECODE = "4,32,1,128,bf16,kv_heads=8,lens=101+301+451+601,page=16"
STEPS = 5


CALLS: list[Callable[[], Any]] = []  # the prepared attention call of each layer


@torch.library.custom_op("sgl_kernel::paged_attention", mutates_args=())
def paged_attention(
    query: Tensor,  # noqa: ARG001  only its shape matters, in the trace
    keys: Tensor,  # noqa: ARG001
    values: Tensor,  # noqa: ARG001
    layer: int,
) -> Tensor:
    """Run a layer's prepared call as an op, so that a trace records its shapes, as with engines."""
    out: Tensor = CALLS[layer]()
    return out


class RadixAttention(nn.Module):
    """Runs a prepared attention call, which has its own queries and cache.

    `tensors` are the queries [tokens, heads, dim] and a cache [pages, page, heads, dim] of the
    call. If `tensors` is set, the call is an op. Otherwise, the call has no op, as in engines that
    call FlashInfer directly.
    """

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.tensors: tuple[Tensor, Tensor] | None = None
        self.call: Callable[[], Any] | None = None
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.call is not None
        if self.events is None and self.tensors is not None:
            query, cache = self.tensors
            out = torch.ops.sgl_kernel.paged_attention(query, cache, cache, self.layer)
        elif self.events is None:
            out = self.call()
        else:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            out = self.call()
            end.record()
            self.events.append((begin, end))
        return hidden + out.reshape(out.shape[0], -1)


class DecoderLayer(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.attn = RadixAttention(layer)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.out(self.attn(self.qkv(hidden)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(DecoderLayer, range(LAYERS)))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

    def use(
        self, calls: list[Callable[[], Any]], tensors: tuple[Tensor, Tensor] | None = None
    ) -> None:
        CALLS[:] = calls
        for layer, call in zip(self.layers, calls, strict=True):
            layer.attn.call, layer.attn.tensors = call, tensors


def sums(config: Config) -> BatchPart:
    pairs = list(zip(config.new_tokens, config.lengths, strict=True))
    return BatchPart(
        len(pairs),
        sum(q for q, _ in pairs),
        sum(k for _, k in pairs),
        sum(q * q for q, _ in pairs),
        sum(q * k for q, k in pairs),
    )


def tensors_of(config: Config) -> tuple[Tensor, Tensor]:
    """Return the queries and the paged keys that the prepared calls of a config use."""
    inputs = make_inputs(config, "cuda", 0)
    assert config.page is not None
    table = page_table(config.lengths, config.page, "cuda")
    cache = fill_pages(inputs.key, config.lengths, config.page, table)
    return packed_queries(config, inputs.query), cache


def annotation(config: Config) -> str:
    part, decodes = sums(config), config.seq_len_q == 1
    prefix = "g" if decodes else "c"
    head = (
        f"DECODE bs={part.requests}"
        if decodes
        else f"EXTEND bs={part.requests} toks={part.queries}"
    )
    values = {"sq": part.queries, "sk": part.keys, "sqsq": part.squares, "sqsk": part.products}
    return f"step[{head} {' '.join(f'{prefix}_{key}={value}' for key, value in values.items())}]"


@contextlib.contextmanager
def recorded(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
        record_shapes=True,
        with_stack=True,
    ) as profiler:
        yield
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    load = BACKENDS[BACKEND].load
    assert load is not None
    model = Model().to("cuda", torch.bfloat16)
    steps = {}
    for text in (PREFILL, DECODE):
        config = parse_config(text)
        calls = [
            make_forward(config, make_inputs(config, "cuda", at), load()) for at in range(LAYERS)
        ]
        hidden = torch.randn(sum(config.new_tokens), HIDDEN, device="cuda", dtype=torch.bfloat16)
        steps[text] = config, calls, hidden
    expected: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "layers": LAYERS, "steps": {}}
    with torch.no_grad():
        for config, calls, hidden in steps.values():
            model.use(calls)
            for _ in range(3):
                model(hidden)
            for layer in model.layers:
                layer.attn.events = []
            for _ in range(20):
                model(hidden)
            torch.cuda.synchronize()
            times = [
                [1e3 * begin.elapsed_time(end) for begin, end in layer.attn.events]
                for layer in model.layers
            ]
            for layer in model.layers:
                layer.attn.events = None
            expected["steps"][annotation(config)] = {
                "config": config.label,
                "attention_us_per_layer": median(median(own) for own in times),
            }
        for name, shaped in (("eager", False), ("shapes", True)):
            sized = {
                text: tensors_of(config) if shaped else None for text, (config, *_) in steps.items()
            }
            with recorded(folder / f"{name}.json.gz"):
                for text in (PREFILL, *[DECODE] * STEPS):
                    config, calls, hidden = steps[text]
                    model.use(calls, sized[text])
                    with record_function(annotation(config)):
                        model(hidden)
        config, calls, hidden = steps[DECODE]
        model.use(calls)
        graph = torch.cuda.CUDAGraph()
        capture = folder / "graph" / "capture_traces" / "graph_capture_bs_4.json.gz"
        with recorded(capture), record_function("capture_4_DECODE"), torch.cuda.graph(graph):
            model(hidden)
        graph.replay()
        torch.cuda.synchronize()
        with recorded(folder / "graph" / "decode.json.gz"):
            for _ in range(STEPS):
                with record_function(annotation(config)):
                    graph.replay()
    (folder / "expected.json").write_text(json.dumps(expected, indent=1))


if __name__ == "__main__":
    main()
