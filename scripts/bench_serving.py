"""Measure paged decode, prefill and latent attention on the serving backends of this GPU.

Prints one line per config: the median time of a CUDA graph replay on each backend, the data-sheet
floor of the config, and the ratio of the fastest backend to it. Writes all rows as JSON.

    python scripts/bench_serving.py out.json [--seconds 240] [--backend flex-paged --only page=64]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import profharness
from profharness.attention.config import Config, parse_config
from profharness.attention.costs import compulsory_bytes, flops
from profharness.devices import data_sheet, roofline_ns

BACKENDS = "flashinfer-fa2,flashinfer-fa3,flashinfer-cudnn"
CHUNK = 10  # configs per call of bench, which starts one worker process
MOST_TOKENS = 1 << 23  # tokens of all requests together, 32 GiB of keys and values, stored twice
HEADS = "32,1,128,bf16,kv_heads=8"


def configs() -> list[str]:
    """Return decode with batches of 1 to 256 and 1k to 128k tokens, prefill and latent attention."""
    decode = [
        f"{batch},{HEADS},seq_kv={length},page={page}"
        for length in (1024, 8192, 32768, 131072)
        for batch in (1, 8, 32, 128, 256)
        for page in (16, 64)
        if batch * length <= MOST_TOKENS
    ]
    prefill = [
        f"{batch},32,{length},128,bf16,kv_heads=8,page=16,causal"
        for batch, length in ((1, 1024), (1, 8192), (8, 1024), (1, 32768))
    ]
    mixed = ["32,32,1,128,bf16,kv_heads=8,lens=512x16+2048x8+8192x6+32768x2,page=16"]
    chunked = ["4,32,512,128,bf16,kv_heads=8,seq_kv=16384,page=16,causal"]
    latent = [
        f"{batch},128,1,576,bf16,seq_kv={length},page=64,mla=512+64"
        for batch, length in ((1, 4096), (16, 2048), (64, 4096), (128, 8192))
    ]
    return [*mixed, *chunked, *latent, *prefill, *decode]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--backend", default=BACKENDS, help="backends, separated by commas")
    parser.add_argument("--only", default="", help="only the configs that contain this text")
    arguments = parser.parse_args()
    store = arguments.output.with_suffix(".db")
    begin, rows = time.monotonic(), []
    import torch

    name = torch.cuda.get_device_name()
    print(f"{name}: median of a CUDA graph replay in µs; floor of the data sheet", flush=True)
    waiting = [config for config in configs() if arguments.only in config]
    while waiting and time.monotonic() - begin < arguments.seconds:
        chunk, waiting = waiting[:CHUNK], waiting[CHUNK:]
        frame = profharness.bench(
            configs=chunk,
            backends=arguments.backend.split(","),
            measurements=["graph"],
            processes=1,
            max_time_s=0.3,
            out=arguments.output.with_suffix(".runs"),
            store=store,
        )
        for config in map(parse_config, chunk):
            own = frame[(frame["config"] == config.label) & frame["median_ns"].notna()]
            times = {row.backend: row.median_ns / 1e3 for row in own.itertuples()}
            floor = floor_us(config, name)
            rows.append({"config": config.label, "gpu": name, "floor_us": floor, "graph_us": times})
            shown = "  ".join(f"{backend} {us:,.1f}" for backend, us in times.items()) or "refused"
            least = min(times.values(), default=None)
            ratio = f"{least / floor:.2f} times" if least and floor else "-"
            print(f"{config.label}: {shown}  floor {floor or 0:,.1f}  {ratio}", flush=True)
        arguments.output.write_text(json.dumps(rows, indent=1))
    if waiting:
        print(f"the time is up; {len(waiting)} configs were skipped")


def floor_us(config: Config, gpu: str) -> float | None:
    """Return the least time of a config on a GPU in µs, or None if its data sheet is unknown."""
    least = roofline_ns(data_sheet(gpu), config.dtype, flops(config), compulsory_bytes(config))
    return None if least is None else least / 1e3


if __name__ == "__main__":
    main()
