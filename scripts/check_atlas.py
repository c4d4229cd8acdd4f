"""Holds the model of an atlas against measured cells, best ones that the atlas has not: the choice, the
kernels, the times with their intervals, and the backend that is named best.

    python scripts/check_atlas.py FILE [--gpu H200] [--torch 2.11] [--json]

FILE has a cell a line, {"config": …, "backend": …, "choice": …, "status": …, "kernel_us": …, "kernels": [[name,
grid, block, registers, shared_bytes], …]}; a shard, an archive or a folder of scripts/make_atlas.py will do. The model
alone is asked. Cells that the atlas has are counted apart. Exits with 1 where a figure misses its limit.
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

from profharness.answers.atlas.data import (
    NOTHING,
    Atlas,
    AtlasCell,
    cell_of,
    find_atlas,
    shard_lines,
)
from profharness.answers.atlas.model import Estimate, estimate, model_of
from profharness.config import AUTO, SDPA_BACKENDS, Config
from profharness.errors import ProfharnessError, UsageError

FEW_QUERIES = 8  # a decode
SMALL_US, LARGE_US = 20.0, 200.0
BEST = 1.03  # the backend named best may take so many times what the best one takes
SPEED_CONFIGS = 10_000
# figure -> (limit, whether it is a least), shares and errors as fractions
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
    """A measured cell and the model's answer."""

    cell: AtlasCell
    told: Estimate
    known: bool

    @property
    def is_chosen(self) -> bool:
        """Whether the choice, or the refusal, is as measured."""
        if self.cell.status != "ok":
            return self.told.status == self.cell.status
        return self.told.status == "ok" and self.told.choice == self.cell.choice

    @property
    def has_names(self) -> bool:
        return [each.kernel for each in self.told.launches] == [
            each.kernel for each in self.cell.launches
        ]

    @property
    def has_launches(self) -> bool:
        """Whether names and launch configurations are right."""
        return [each[:5] for each in self.told.launches] == [
            each[:5] for each in self.cell.launches
        ]

    @property
    def error(self) -> float:
        """Of the time, relative to what was measured."""
        assert self.told.kernel_us and self.cell.kernel_us
        return self.told.kernel_us / self.cell.kernel_us - 1

    @property
    def is_inside(self) -> bool:
        assert self.told.low_us and self.told.high_us and self.cell.kernel_us
        return self.told.low_us <= self.cell.kernel_us <= self.told.high_us

    @property
    def regimes(self) -> tuple[str, ...]:
        """The rows of the table that the cell counts in."""
        config, us = self.cell.config, self.cell.kernel_us or 0
        size = "small" if us < SMALL_US else "large" if us >= LARGE_US else "middle"
        decode = ("decode",) if config.seq_len_q <= FEW_QUERIES and not config.bwd else ()
        backward = ("backward",) if config.bwd else ()
        masked = ("masked",) if config.mask != "none" else ()
        return (size, *decode, *backward, *masked, f"on {self.told.choice}")


def pairs_of(path: Path, atlas: Atlas, gpu: str, torch: str) -> list[Pair]:
    """The cells of a file that ran or were refused, each with the model's answer."""
    cells = [cell_of(row) for row in shard_lines(path) if row.get("status") in ("ok", "refused")]
    if not cells:
        raise UsageError(f"{path}: no cell that ran or was refused")
    told: dict[tuple[Config, str], Estimate] = {}
    for backend in (AUTO, *SDPA_BACKENDS):
        configs = list({cell.config: None for cell in cells if cell.backend == backend})
        answers = estimate(atlas, configs, [backend], gpu, torch, measured=False)
        told |= {(config, backend): each for config, each in zip(configs, answers, strict=True)}
    return [
        Pair(
            cell,
            told[cell.config, cell.backend],
            atlas.rows([cell.config], [cell.backend])[0] != NOTHING,
        )
        for cell in cells
        if cell.backend in (AUTO, *SDPA_BACKENDS)
    ]


def share(pairs: Sequence[Pair], is_right: Callable[[Pair], bool]) -> float:
    return sum(map(is_right, pairs)) / len(pairs) if pairs else float("nan")


def timed(pairs: Sequence[Pair]) -> list[Pair]:
    """Those with a time on both sides."""
    return [each for each in pairs if each.told.kernel_us and each.cell.kernel_us]


def best_share(pairs: Sequence[Pair]) -> float:
    """Of the configs with several timed backends, how often the one named best is, or nearly."""
    by_config: dict[Config, list[Pair]] = {}
    for each in timed(pairs):
        if each.cell.backend != AUTO:
            by_config.setdefault(each.cell.config, []).append(each)
    judged = []
    for some in by_config.values():
        if len(some) > 1:
            named = min(some, key=lambda pair: pair.told.kernel_us or 0)
            true = min(pair.cell.kernel_us or 0 for pair in some)
            judged.append((named.cell.kernel_us or 0) <= BEST * true)
    return sum(judged) / len(judged) if judged else float("nan")


def figures(pairs: Sequence[Pair]) -> dict[str, float]:
    """The figures of some cells, by the names of LIMITS."""
    ran = [each for each in pairs if each.cell.launches and each.told.launches]
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
    """How long loading and answering take, in CPU time: other programs do not count."""
    gc.collect()  # what the answers before have left is no part of loading
    model_of.cache_clear()
    begun = time.process_time()
    atlas = find_atlas(gpu, torch)
    assert atlas is not None
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
    limit, is_least = LIMITS[name]
    return value >= limit if is_least else value <= limit


def table(pairs: Sequence[Pair]) -> list[str]:
    """The figures by regime."""
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
        if atlas is None:
            raise UsageError(f"no atlas of {options.gpu} with torch {options.torch}")
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
    floors = sum(each.told.source == "floor" for each in apart)
    print(
        f"{len(apart)} cells that the atlas has not ({floors} outside of its space); {len(known)} that it has\n"
    )
    for name, value in results.items():
        limit, is_least = LIMITS[name]
        bound = f"{'at least' if is_least else 'at most'} {shown(name, limit)}"
        print(
            f"{name:40}{shown(name, value):>10}   {bound:18}{'' if keeps(name, value) else 'MISSED'}"
        )
    print("\n" + "\n".join(table(apart or known)))
    if apart and known:
        told = ", ".join(f"{name} {shown(name, value)}" for name, value in figures(known).items())
        print(f"\nthe model alone on cells of the atlas: {told}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
