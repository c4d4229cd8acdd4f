"""Capture random configs on `auto`, and compare four sources for each: the prediction of the rules,
PyTorch's answer, the op in the trace, and the families of the kernels.

python scripts/check_witnesses.py OUT.jsonl.gz [--configs 500] [--seed 0] [--device cuda]
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from profharness.attention.config import Config
from profharness.jobs.into_store import capture_into_store
from profharness.measurements.agreement import disagreements, with_predictions, witnesses
from profharness.rows import CellRow, KernelRow
from profharness.run import CaptureOptions, Protocol
from profharness.store import open_store

MAX_SCORES = 1 << 27  # batch * heads * rows * keys: math stores all of them in fp32
HEAD_DIMS = (1, 8, 32, 40, 64, 64, 72, 80, 96, 100, 128, 128, 160, 192, 200, 224, 256, 264, 512)
LENGTHS = (1, 2, 7, 16, 64, 100, 128, 257, 512, 1024, 2048)
LAYOUTS = ("contiguous",) * 6 + ("bshd", "bshd", "strided_last", "broadcast_batch")
MASKS = ("none",) * 6 + ("bool", "float", "bool_2d", "float_bh", "float_grad")


def random_config(draw: random.Random) -> Config:
    """Return a random config. Common properties are more likely than rare ones."""
    kv_heads = draw.choice((1, 2, 4, 8))
    rows = draw.choice(LENGTHS)
    head_dim = draw.choice(HEAD_DIMS)
    mask = draw.choice(MASKS)
    return Config(
        batch=draw.choice((1, 2, 3, 4)),
        num_heads=kv_heads * draw.choice((1, 1, 1, 2, 4)),
        num_kv_heads=kv_heads,
        seq_len_q=rows,
        seq_len_kv=rows if draw.random() < 0.7 else draw.choice(LENGTHS),
        head_dim=head_dim,
        dtype=draw.choice(("fp16", "bf16", "bf16", "fp16", "fp32")),
        causal=mask == "none" and draw.random() < 0.4,
        mask=mask,
        dropout=draw.choice((0.0,) * 8 + (0.1, 0.125)),
        layout=draw.choice(LAYOUTS),
        bwd=draw.random() < 0.3,
        head_dim_v=draw.choice((32, 64, 128)) if draw.random() < 0.1 else None,
        deterministic=draw.random() < 0.05,
    )


def sample(count: int, seed: int) -> list[Config]:
    """Return distinct configs that fit into memory with math too."""
    draw = random.Random(seed)
    found: dict[Config, None] = {}
    while len(found) < count:
        config = random_config(draw)
        if config.head_dim_v == config.head_dim:
            config = replace(config, head_dim_v=None)
        scores = config.batch * config.num_heads * config.seq_len_q * config.seq_len_kv
        if scores <= MAX_SCORES:
            found[config] = None
    return list(found)


def evidence(store: Path) -> list[dict[str, Any]]:
    """Return one record per cell: the answer of each source, and the disagreements of the
    sources.
    """
    with open_store(store) as opened:
        cells = with_predictions(opened, opened.cells("latest"))
        by_cell: dict[str | None, list[KernelRow]] = {}
        for row in opened.kernels("latest"):
            by_cell.setdefault(row.cell, []).append(row)
    return [record_of(cell, by_cell.get(cell.cell, [])) for cell in cells]


def record_of(cell: CellRow, rows: list[KernelRow]) -> dict[str, Any]:
    """Return the record of one cell and its kernels."""
    kernels = [each.backends for each in witnesses(cell, rows) if each.name == "kernels"]
    return {
        "config": cell.config,
        "status": cell.status,
        "predicted": cell.predicted,
        "choice": cell.choice,
        "op": cell.sdpa_op,
        "kernels": sorted({name for backends in kernels for name in backends}),
        "disagreements": disagreements(cell, rows),
        "message": cell.message.splitlines()[0] if cell.message else None,
    }


def main() -> None:
    """Capture, compare, write the records and print the disagreements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--configs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    start = time.perf_counter()
    protocol = Protocol(iterations=1, warmup=0, samples=0, device=asked.device)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store.db"
        options = CaptureOptions(("torch",), Path(folder), protocol)
        run = capture_into_store(sample(asked.configs, asked.seed), ["auto"], store, options).run
        records = evidence(store)
    text = "".join(json.dumps(record) + "\n" for record in records)
    asked.output.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    machine = run.environment.get("gpu") or run.environment.get("cpu")
    print(f"{len(records)} configs on {machine}, torch {run.environment.get('torch')}")
    print(f"{time.perf_counter() - start:.0f} s; {dict(Counter(r['status'] for r in records))}")
    print(f"chosen: {dict(Counter(str(r['choice']) for r in records))}")
    odd = [record for record in records if record["disagreements"]]
    print(f"{len(records) - len(odd)} of {len(records)} without a disagreement")
    for record in odd:
        print(f"{record['config']}: {'; '.join(record['disagreements'])}")


if __name__ == "__main__":
    main()
