"""Compare the dispatch rules with measured choices. Print the agreement per backend and every
mismatch. Exit with 1 if it is below 99.5 %.

    python scripts/check_dispatch.py FILE.jsonl[.gz] [--gpu H200] [--torch 2.11] [--cudnn 9.19.0]

Each line of FILE is {"config": {...}, "can": {backend: [bool, ...]}, "choice": name}. A line
with another shape is an error with its number.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from profharness.attention.config import Config
from profharness.attention.dispatch.machine import (
    AttentionParams,
    Machine,
    from_config,
    machine_for,
)
from profharness.attention.dispatch.predict import predict
from profharness.errors import ProfharnessError, UsageError

BAR = 0.995
ASKED = ("choice", "flash", "efficient", "cudnn")


class Mismatch(NamedTuple):
    """A mismatch: the line, the backend or choice, both answers, the config."""

    line: int
    asked: str
    measured: object
    predicted: object
    config: dict[str, Any]


def rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number and row of a JSON-lines file, compressed or plain. Raise UsageError for
    an invalid line.
    """
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
    with gzip.open(path, "rt") if packed else path.open() as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                (
                    row["config"],
                    row.setdefault("choice", None),
                    [row["can"][name][0] for name in ASKED[1:]],
                )
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise UsageError(f"{path}, line {number}: not a measured row ({error!r})") from None
            yield number, row


def params_of(measured: dict[str, Any], device: str = "cuda") -> AttentionParams:
    """Return the parameters of a measured config. The dtype may be one that configs lack (fp64),
    and enable_gqa is given separately from the heads.
    """
    made = from_config(
        Config(
            batch=measured["batch"],
            num_heads=measured["heads"],
            num_kv_heads=measured["kv_heads"],
            seq_len_q=measured["seq_q"],
            seq_len_kv=measured["seq_kv"],
            head_dim=measured["head_dim"],
            head_dim_v=measured["head_dim_v"],
            dtype=measured["dtype"],
            causal=measured["causal"],
            mask=measured["mask"],
            dropout=measured["dropout"],
            layout=measured["layout"],
            bwd=measured["grad"],
            deterministic=measured["deterministic"],
        ),
        device,
    )
    return replace(made, enable_gqa=measured["gqa"])


def compare(path: Path, machine: Machine) -> tuple[int, list[Mismatch]]:
    """Return the number of rows of the file, and every mismatch."""
    count, wrong = 0, []
    for number, row in rows(path):
        count += 1
        prediction = predict(params_of(row["config"]), machine)
        # choice is null or absent if PyTorch raised
        answers: dict[str, tuple[object, object]] = {
            "choice": (row["choice"] or "none", prediction.choice)
        }
        for name in ASKED[1:]:
            answers[name] = (row["can"][name][0], prediction.backends[name].eligible)
        wrong += [
            Mismatch(number, name, measured, predicted, row["config"])
            for name, (measured, predicted) in answers.items()
            if measured != predicted
        ]
    return count, wrong


def main() -> int:
    """Print the agreement. Return 0 if every figure reaches the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--torch", default="2.11")
    parser.add_argument("--cudnn", default=None, help="runtime version, by default the wheel's")
    options = parser.parse_args()
    try:
        machine = machine_for(options.gpu, options.torch, options.cudnn)
        count, wrong = compare(options.file, machine)
    except (ProfharnessError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    if not count:
        print(f"Error: {options.file} has no rows", file=sys.stderr)
        return 1
    for item in wrong:
        print(
            f"line {item.line}: {item.asked} measured {item.measured}, predicted {item.predicted}: "
            f"{json.dumps(item.config)}"
        )
    shares = {name: 1 - sum(item.asked == name for item in wrong) / count for name in ASKED}
    print(f"{count} configs: " + ", ".join(f"{name} {share:.2%}" for name, share in shares.items()))
    return 0 if min(shares.values()) >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
