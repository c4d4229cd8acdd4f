"""Compare layers with the sizes of well-known models, measured on a GPU, with the predictions of
`layers --gpu`.

python scripts/check_forecast.py trace FOLDER [--device cpu] [--only NAME,…]   trace each model on this GPU
python scripts/check_forecast.py compare FOLDER|ARCHIVE --gpu H200 [--all]     compare traces with predictions
python scripts/check_forecast.py run NAME [--device meta]                      run one model, as a program for `observe`

A model is three blocks of norm, attention and MLP with random weights, so other kernels run
between its attention calls, as in a real model. `compare` prints one line per regime; with
--all, one per row of the maps.
"""

from __future__ import annotations

import argparse
import statistics
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCKS, WARMUP = 3, 3
HEADER = (
    "| regime | rows | backend right | kernels right | with a time | measured / predicted, median | "
    "10th to 90th percentile | within the interval |"
)


@dataclass(frozen=True)
class Model:
    """The attention sizes of one model. `cached` means that queries attend to a cache of keys."""

    batch: int
    heads: int
    head_dim: int
    queries: int
    keys: int = 0
    kv_heads: int = 0
    causal: bool = False
    train: bool = False
    cached: bool = False
    dtype: str = "bfloat16"


def _decoder(heads: int, kv_heads: int, dim: int, *sizes: tuple[int, int]) -> Iterator[Model]:
    for batch, length in sizes:
        yield Model(batch, heads, dim, length, kv_heads=kv_heads, causal=True)


def _cached(heads: int, kv_heads: int, dim: int, *sizes: tuple[int, int]) -> Iterator[Model]:
    for batch, length in sizes:
        yield Model(batch, heads, dim, 1, length, kv_heads, cached=True)


FAMILIES: dict[str, list[Model]] = {
    "llama-8b": [*_decoder(32, 8, 128, (1, 512), (4, 2048), (1, 8192), (2, 16384))],
    "llama-8b-decode": [*_cached(32, 8, 128, (1, 1024), (8, 4096), (64, 1024), (16, 16384))],
    "llama-70b-tp8": [*_decoder(8, 1, 128, (1, 4096)), *_cached(8, 1, 128, (32, 4096))],
    "qwen-7b": [*_decoder(28, 4, 128, (2, 3000)), *_cached(28, 4, 128, (4, 9000))],
    "gemma-2b": [*_decoder(8, 1, 256, (2, 2048)), *_cached(8, 1, 256, (8, 2048))],
    "phi-3b": [*_decoder(32, 32, 96, (2, 2048)), *_cached(32, 32, 96, (4, 2048))],
    "gpt-2": [*_decoder(12, 12, 64, (8, 1024)), *_cached(12, 12, 64, (16, 700))],
    "bert-large": [Model(32, 16, 64, 512, dtype="float16"), Model(4, 16, 64, 128)],
    "vit-l": [Model(32, 16, 64, 197), Model(8, 16, 64, 577, dtype="float16")],
    "vit-h": [Model(16, 16, 80, 257)],
    "dino-g": [Model(4, 24, 64, 1370)],
    "whisper-l": [Model(4, 20, 64, 1500, dtype="float16"), Model(4, 20, 64, 448, 1500, dtype="float16")],
    "sdxl": [
        Model(2, 10, 64, 4096, dtype="float16"), Model(2, 10, 64, 4096, 77, dtype="float16"),
        Model(2, 20, 64, 1024, dtype="float16"), Model(2, 20, 64, 1024, 77, dtype="float16"),
    ],
    "flux": [Model(1, 24, 128, 4608)],
    "video": [Model(1, 24, 128, 12288)],
    "fp32": [Model(4, 16, 64, 512, dtype="float32")],
    "llama-8b-train": [Model(1, 32, 128, 4096, kv_heads=8, causal=True, train=True)],
    "gpt-2-train": [Model(16, 12, 64, 1024, causal=True, train=True)],
    "bert-train": [Model(32, 16, 64, 512, train=True, dtype="float16")],
    "vit-train": [Model(64, 16, 64, 197, train=True)],
    "phi-train": [Model(2, 32, 96, 2048, causal=True, train=True)],
}  # fmt: skip
MODELS = {
    f"{name}-{number}": model
    for name, models in FAMILIES.items()
    for number, model in enumerate(models)
}


def built(model: Model, device: str) -> Any:
    """Return a step of the model. Only this function imports torch, so `compare` does not need it."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    width, kv_heads = model.heads * model.head_dim, model.kv_heads or model.heads
    dtype = getattr(torch, model.dtype)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
            self.k, self.v = (nn.Linear(width, kv_heads * model.head_dim) for _ in range(2))
            shape = (model.batch, kv_heads, model.keys if model.cached else 0, model.head_dim)
            self.cache = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)]

        def forward(self, x: Any, y: Any) -> Any:
            q, k, v = (
                made.unflatten(-1, (-1, model.head_dim)).transpose(1, 2)
                for made in (self.q(x), self.k(y), self.v(y))
            )
            if model.cached:
                for kept, new in zip(self.cache, (k, v), strict=True):
                    kept[:, :, -1:] = new
                k, v = self.cache
            grouped = kv_heads != model.heads
            seen = F.scaled_dot_product_attention(
                q, k, v, is_causal=model.causal, enable_gqa=grouped
            )
            return self.o(seen.transpose(1, 2).flatten(2))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention()
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
            self.mlp = nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
            )

        def forward(self, x: Any, y: Any) -> Any:
            z = self.norms[0](x)
            x = x + self.attention(z, z if y is None else y)
            return x + self.mlp(self.norms[1](x))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

        def forward(self, x: Any, y: Any) -> Any:
            for block in self.blocks:
                x = block(x, y)
            return x

    with torch.device(device):
        net = Net().to(dtype)
        x = torch.randn(model.batch, model.queries, width, dtype=dtype)
        crossed = model.keys and not model.cached
        y = torch.randn(model.batch, model.keys, width, dtype=dtype) if crossed else None

    def step() -> None:
        with torch.set_grad_enabled(model.train):
            z = net(x, y)
            if model.train:
                z.float().sum().backward()

    return step


def trace(folder: Path, device: str, names: list[str]) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile

    folder.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if device == "cuda" else []
    for name in names:
        torch.manual_seed(0)
        step = built(MODELS[name], device)
        for _ in range(WARMUP):
            step()
        with profile(activities=activities, record_shapes=True, with_stack=True) as seen:
            with torch.profiler.record_function("step"):
                step()
            if device == "cuda":
                torch.cuda.synchronize()
        seen.export_chrome_trace(str(folder / f"{name}.json.gz"))
        print(name, flush=True)
        del step
        if device == "cuda":
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class Row:
    """A row of a map: measured and predicted nanoseconds of a call, with the interval of the
    prediction.
    """

    name: str
    config: str
    ran: str
    takes: str
    source: str
    measured: float
    predicted: float | None
    low: float | None
    high: float | None
    kernels_right: bool

    @property
    def ratio(self) -> float | None:
        return self.measured / self.predicted if self.predicted else None


def compared(folder: Path, gpu: str) -> Iterator[Row]:
    """Yield the rows of all traces in a folder whose calls have kernels and a config."""
    from profharness.atlas.predictions import find_place, known_atlases
    from profharness.commands.layers.forecast_map import forecast_map
    from profharness.errors import NotFoundError
    from profharness.program.layer_map import THROUGH_SDPA, find_layers
    from profharness.store import ingest_path, open_store

    place, doubt = find_place(known_atlases(), gpu, None)
    with tempfile.TemporaryDirectory() as made:
        for path in sorted(folder.iterdir()):
            store = Path(made) / f"{path.name}.db"
            (result,) = ingest_path(store, path)
            with open_store(store) as opened:
                layers = find_layers(opened, result.run)
            try:
                (forecast,) = forecast_map(layers, place, doubt).forecasts
            except NotFoundError:
                continue  # eager attention, for example
            for row, told in zip(layers.rows, forecast.rows if forecast else (), strict=True):
                spent = (row.forward_ns or 0) + (row.backward_ns or 0)
                if row.kind in THROUGH_SDPA and row.config and row.calls and spent:
                    yield Row(
                        path.name.split(".json")[0], row.config, row.ran or "-",
                        told.predicted_backend or "-", told.predicted_source or "-", spent / row.calls,
                        told.predicted_ns, told.predicted_low_ns, told.predicted_high_ns,
                        tuple(dict.fromkeys(told.predicted_kernels)) == row.kernels,
                    )  # fmt: skip


def regime(row: Row) -> str:
    from profharness.attention.config import parse_config

    config = parse_config(row.config)
    if config.bwd:
        return "training"
    if config.seq_len_q == 1:
        return "decode"
    if config.seq_len_q != config.seq_len_kv:
        return "cross"
    return "under 50 µs" if row.measured < 50_000 else "50 µs and more"


def summary(name: str, rows: list[Row]) -> str:
    told = [row for row in rows if row.ratio is not None]
    right = sum(row.ran == row.takes for row in rows)
    kernels = sum(row.kernels_right for row in told)
    parts = [name, f"{len(rows)}", f"{right}", f"{kernels}", f"{len(told)}"]
    if told:
        ratios = sorted(row.ratio or 0 for row in told)
        low, high = ratios[round((len(ratios) - 1) * 0.1)], ratios[round((len(ratios) - 1) * 0.9)]
        inside = sum((row.low or 0) <= row.measured <= (row.high or 0) for row in told)
        parts += [
            f"{statistics.median(ratios):.2f}",
            f"{low:.2f} to {high:.2f}",
            f"{inside} of {len(told)}",
        ]
    return f"| {' | '.join(parts)} |"


def compare(source: Path, gpu: str, every: bool) -> None:
    with tempfile.TemporaryDirectory() as made:
        if source.is_file():
            with tarfile.open(source) as archive:
                archive.extractall(made, filter="data")
            source = Path(made)
        rows = list(compared(source, gpu))
    if every:
        for row in rows:
            predicted = f"{row.predicted / 1e3:.2f}" if row.predicted else "-"
            ratio = f"{row.ratio:.2f}" if row.ratio else "-"
            print(row.name, row.config, row.ran, row.takes, row.kernels_right, row.source, f"{row.measured / 1e3:.2f}",
                  predicted, ratio, sep="\t")  # fmt: skip
    print(HEADER)
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name in dict.fromkeys(sorted(map(regime, rows))):
        print(summary(name, [row for row in rows if regime(row) == name]))
    print(summary("all", rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["trace", "compare", "run"])
    parser.add_argument("place", help="the folder, the archive, or the model's name")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--all", action="store_true")
    given = parser.parse_args()
    if given.what == "trace":
        trace(Path(given.place), given.device, given.only)
    elif given.what == "compare":
        compare(Path(given.place), given.gpu, given.all)
    else:
        built(MODELS[given.place], given.device)()


if __name__ == "__main__":
    main()
