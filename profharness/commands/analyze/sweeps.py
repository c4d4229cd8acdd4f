"""Sweeps: cells of one backend whose configs differ in one number, and where the rate drops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

from profharness.attention.config import Config
from profharness.commands.analyze.figures import CellAnalysis

SWEPT = ("head_dim", "seq_len_kv", "batch", "num_heads")
DROP = 1.5  # smallest ratio of neighbouring rates that is a drop
MANY_DIMS = 3  # number of head dims from which configs look like a sweep


def sweep(analyses: Sequence[CellAnalysis]) -> list[tuple[str, list[CellAnalysis]]]:
    """Return groups of cells of one backend whose configs differ in one number, by its name and in
    its order.
    """
    sweeps: list[tuple[str, list[CellAnalysis]]] = []
    done = [analysis for analysis in analyses if analysis.figures is not None]
    for name in SWEPT:
        groups: dict[tuple[object, ...], list[CellAnalysis]] = {}
        for analysis in done:
            groups.setdefault(_sweep_key(analysis, name), []).append(analysis)
        for group in groups.values():
            values = {getattr(analysis.config, name) for analysis in group}
            if len(group) > 1 and len(values) == len(group):
                group.sort(key=lambda analysis: getattr(analysis.config, name))
                sweeps.append((name, group))
    return sweeps


def _sweep_key(analysis: CellAnalysis, name: str) -> tuple[object, ...]:
    """Return what the cells of one sweep have in common."""
    config = analysis.config
    same_length = config.seq_len_q == config.seq_len_kv
    same_heads = config.num_heads == config.num_kv_heads
    left_out = {name}
    # with equal lengths, both are swept as one number
    if name == "seq_len_kv" and same_length:
        left_out.add("seq_len_q")
    if name == "num_heads" and same_heads:
        left_out.add("num_kv_heads")
    values = [getattr(config, field.name) for field in fields(Config) if field.name not in left_out]
    return (analysis.run, analysis.backend, same_length, same_heads, *values)


@dataclass(frozen=True, slots=True)
class Drop:
    """A fall of the rate of a sweep from one value to the next."""

    before: int
    after: int
    factor: float


def drops(name: str, group: Sequence[CellAnalysis]) -> list[Drop]:
    """Return the drops of the FLOP rate over one sweep, in its order."""
    found: list[Drop] = []
    for one, other in pairwise(group):
        before, after = (each.figures and each.figures.flops_per_s for each in (one, other))
        if before and after and before >= DROP * after:
            values = getattr(one.config, name), getattr(other.config, name)
            found.append(Drop(*values, before / after))
    return found


@dataclass(frozen=True, slots=True)
class ChangedProblem:
    """Configs of one backend that differ in head dim and in their number of scores. A change of the
    rate over them is not due to head_dim alone.
    """

    backend: str
    head_dims: tuple[int, ...]
    scores: tuple[int, ...]


def changed_problems(analyses: Sequence[CellAnalysis]) -> list[ChangedProblem]:
    """Return the configs that look like a sweep over head_dim but are not, by backend."""
    groups: dict[tuple[object, ...], list[Config]] = {}
    for analysis in analyses:
        config = analysis.config
        if analysis.figures is not None:
            key = (analysis.run, analysis.backend, config.dtype, config.bwd, config.causal)
            groups.setdefault(key, []).append(config)
    changed = []
    for place, configs in groups.items():
        by_dim = {config.head_dim: _scores(config) for config in sorted(configs, key=_head_dim)}
        several = len(by_dim) == len(configs) >= MANY_DIMS
        if several and len(set(by_dim.values())) > 1:
            changed.append(ChangedProblem(str(place[1]), tuple(by_dim), tuple(by_dim.values())))
    return changed


def _head_dim(config: Config) -> int:
    return config.head_dim


def _scores(config: Config) -> int:
    """Return how many scores a call computes: its parallel work, whatever head_dim is."""
    return config.batch * config.num_heads * config.seq_len_q * config.seq_len_kv
