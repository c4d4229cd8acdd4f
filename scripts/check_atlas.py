"""Compare the model of an atlas with measured cells: the choice, the kernels, the times with their
intervals, and the best backend.

    python scripts/check_atlas.py FILE [--gpu H200] [--torch 2.11] [--json]

FILE has one cell per line, {"config": …, "backend": …, "choice": …, "status": …, "kernel_us": …, "kernels": [[name,
grid, block, registers, shared_bytes], …]}, or is a shard, an archive or a folder of scripts/make_atlas.py. Only the
model is used. Cells of the atlas itself are counted separately. Exits with 1 if a figure misses its limit.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from profharness.atlas.data import (
    NOTHING,
    Atlas,
    AtlasCell,
    packaged_atlases,
    read_atlas,
)
from profharness.atlas.model import Estimate, estimate, model_of
from profharness.atlas.predictions import PACKAGE, Entry, find_place
from profharness.atlas.shards import parse_cell, shard_lines
from profharness.attention.config import AUTO, SDPA_BACKENDS, Config
from profharness.errors import ProfharnessError, UsageError

FEW_QUERIES = 8  # a decode
SMALL_US, LARGE_US = 20.0, 200.0
BEST = 1.03  # the predicted best backend may be slower than the best one by this factor
SPEED_CONFIGS = 10_000
# figure -> (limit, whether it is a minimum); shares and errors are fractions
LIMITS: dict[str, tuple[float, bool]] = {
    "choice": (0.999, True),
    "names of kernels in order": (0.97, True),
    "grid, block, registers, shared memory": (0.95, True),
    "median error of kernel time": (0.04, False),
    "90th percentile of the error": (0.15, False),
    "inside the 90 % interval": (0.88, True),
    "best backend within 3 %": (0.97, True),
    "load time, ms of CPU": (100, False),
    "configs a second of CPU": (10_000, True),
}


@dataclass(frozen=True)
class Pair:
    """A measured cell and the model's prediction."""

    cell: AtlasCell
    estimate: Estimate
    known: bool

    @property
    def is_chosen(self) -> bool:
        """Whether the choice, or the refusal, is right."""
        if self.cell.status != "ok":
            return self.estimate.status == self.cell.status
        return self.estimate.status == "ok" and self.estimate.choice == self.cell.choice

    @property
    def has_names(self) -> bool:
        return [each.kernel for each in self.estimate.launches] == [
            each.kernel for each in self.cell.launches
        ]

    @property
    def has_launches(self) -> bool:
        """Whether names and launch configurations are right."""
        return [each[:5] for each in self.estimate.launches] == [
            each[:5] for each in self.cell.launches
        ]

    @property
    def error(self) -> float:
        """The relative error of the time."""
        assert self.estimate.kernel_us and self.cell.kernel_us
        return self.estimate.kernel_us / self.cell.kernel_us - 1

    @property
    def is_inside(self) -> bool:
        assert self.estimate.low_us and self.estimate.high_us and self.cell.kernel_us
        return self.estimate.low_us <= self.cell.kernel_us <= self.estimate.high_us

    @property
    def regimes(self) -> tuple[str, ...]:
        """The rows of the table to which the cell belongs."""
        config, us = self.cell.config, self.cell.kernel_us or 0
        size = "small" if us < SMALL_US else "large" if us >= LARGE_US else "middle"
        decode = ("decode",) if config.seq_len_q <= FEW_QUERIES and not config.bwd else ()
        backward = ("backward",) if config.bwd else ()
        masked = ("masked",) if config.mask != "none" else ()
        return (size, *decode, *backward, *masked, f"on {self.estimate.choice}")


def find_atlas(gpu: str, torch: str) -> Atlas:
    """Return the packaged atlas of a GPU and a release. Raise UsageError without one."""
    entries = [Entry(path, PACKAGE, read_atlas(path)) for path in packaged_atlases()]
    atlas = find_place(entries, gpu, torch)[0].atlas
    if atlas is None:
        raise UsageError(f"no atlas of {gpu} with torch {torch}")
    return atlas


def pairs_of(path: Path, atlas: Atlas, gpu: str, torch: str) -> list[Pair]:
    """Return the cells of a file that ran or were refused, each with the model's prediction."""
    cells = [parse_cell(row) for row in shard_lines(path) if row.get("status") in ("ok", "refused")]
    if not cells:
        raise UsageError(f"{path}: no cell that ran or was refused")
    found: dict[tuple[Config, str], Estimate] = {}
    for backend in (AUTO, *SDPA_BACKENDS):
        configs = list({cell.config: None for cell in cells if cell.backend == backend})
        answers = estimate(atlas, configs, [backend], gpu, torch, measured=False)
        found |= {(config, backend): each for config, each in zip(configs, answers, strict=True)}
    return [
        Pair(
            cell,
            found[cell.config, cell.backend],
            atlas.rows([cell.config], [cell.backend])[0] != NOTHING,
        )
        for cell in cells
        if cell.backend in (AUTO, *SDPA_BACKENDS)
    ]


def share(pairs: Sequence[Pair], is_right: Callable[[Pair], bool]) -> float:
    return sum(map(is_right, pairs)) / len(pairs) if pairs else float("nan")


def timed(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs with both times."""
    return [each for each in pairs if each.estimate.kernel_us and each.cell.kernel_us]


def best_share(pairs: Sequence[Pair]) -> float:
    """Return how often the backend predicted to be the best of several timed ones is the best, or
    nearly the best.
    """
    by_config: dict[Config, list[Pair]] = {}
    for each in timed(pairs):
        if each.cell.backend != AUTO:
            by_config.setdefault(each.cell.config, []).append(each)
    judged = []
    for some in by_config.values():
        if len(some) > 1:
            named = min(some, key=lambda pair: pair.estimate.kernel_us or 0)
            true = min(pair.cell.kernel_us or 0 for pair in some)
            judged.append((named.cell.kernel_us or 0) <= BEST * true)
    return sum(judged) / len(judged) if judged else float("nan")


def figures(pairs: Sequence[Pair]) -> dict[str, float]:
    """Return the figures of some cells by the names of LIMITS."""
    ran = [each for each in pairs if each.cell.launches and each.estimate.launches]
    errors = np.abs([each.error for each in timed(pairs)])
    return {
        "choice": share(pairs, lambda each: each.is_chosen),
        "names of kernels in order": share(ran, lambda each: each.has_names),
        "grid, block, registers, shared memory": share(ran, lambda each: each.has_launches),
        "median error of kernel time": float(np.median(errors)) if len(errors) else float("nan"),
        "90th percentile of the error": float(np.quantile(errors, 0.9))
        if len(errors)
        else float("nan"),
        "inside the 90 % interval": share(timed(pairs), lambda each: each.is_inside),
        "best backend within 3 %": best_share(pairs),
    }


def speeds(pairs: Sequence[Pair], gpu: str, torch: str) -> dict[str, float]:
    """Measure loading and predicting in CPU time."""
    gc.collect()  # garbage of earlier answers does not count as loading
    model_of.cache_clear()
    begun = time.process_time()
    atlas = find_atlas(gpu, torch)
    model_of(atlas.machine.name)
    loaded = time.process_time()
    known = list({each.cell.config: None for each in pairs})
    configs = [
        replace(
            known[index % len(known)],
            batch=1 + (index // len(known) + known[index % len(known)].batch) % 64,
        )
        for index in range(SPEED_CONFIGS)
    ]
    estimate(atlas, configs[:10], [AUTO], gpu, torch)
    asked = time.process_time()
    estimate(atlas, configs, [AUTO], gpu, torch)
    return {
        "load time, ms of CPU": 1e3 * (loaded - begun),
        "configs a second of CPU": SPEED_CONFIGS / (time.process_time() - asked),
    }


def shown(name: str, value: float) -> str:
    return (
        f"{value:,.0f}"
        if name in ("load time, ms of CPU", "configs a second of CPU")
        else f"{value:.2%}"
    )


def keeps(name: str, value: float) -> bool:
    limit, is_minimum = LIMITS[name]
    return value >= limit if is_minimum else value <= limit


def table(pairs: Sequence[Pair]) -> list[str]:
    """Return the figures by regime as lines."""
    lines = [f"{'':14}{'cells':>7}{'names':>8}{'launch':>8}{'median':>8}{'p90':>8}{'inside':>8}"]
    regimes: dict[str, list[Pair]] = {}
    for each in pairs:
        if each.cell.kernel_us:
            for regime in each.regimes:
                regimes.setdefault(regime, []).append(each)
    for regime, some in sorted(regimes.items()):
        values = list(figures(some).values())[1:6]
        lines.append(f"{regime:14}{len(some):7}" + "".join(f"{value:8.1%}" for value in values))
    return lines


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--torch", default="2.11")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(words)
    try:
        atlas = find_atlas(options.gpu, options.torch)
        pairs = pairs_of(options.file, atlas, options.gpu, options.torch)
    except (ProfharnessError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    apart, known = (
        [each for each in pairs if not each.known],
        [each for each in pairs if each.known],
    )
    results = figures(apart or known) | speeds(pairs, options.gpu, options.torch)
    missed = [name for name, value in results.items() if not keeps(name, value)]
    if options.json:
        record: dict[str, Any] = {"cells": len(apart), "in_the_atlas": len(known), "missed": missed}
        print(json.dumps(record | {"figures": results}))
        return 1 if missed else 0
    floors = sum(each.estimate.source == "floor" for each in apart)
    print(
        f"{len(apart)} cells outside of the atlas ({floors} outside of its bounds); {len(known)} inside\n"
    )
    for name, value in results.items():
        limit, is_minimum = LIMITS[name]
        bound = f"{'at least' if is_minimum else 'at most'} {shown(name, limit)}"
        print(
            f"{name:40}{shown(name, value):>10}   {bound:18}{'' if keeps(name, value) else 'MISSED'}"
        )
    print("\n" + "\n".join(table(apart or known)))
    if apart and known:
        texts = ", ".join(f"{name} {shown(name, value)}" for name, value in figures(known).items())
        print(f"\nthe model alone on cells of the atlas: {texts}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
