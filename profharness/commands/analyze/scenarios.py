"""The best backend for each use of attention: training, prefill, decoding, little memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from profharness.attention.config import Config, pytorch_chooses
from profharness.commands.analyze.figures import CellAnalysis, Figures
from profharness.rows import COLD, EAGER, EVENT, GRAPH, WALL

TIE = 1.03  # a ratio of medians below which two backends tie
FEW_QUERIES = 4  # keys per query from which a call is a decoding step
SCENARIOS: dict[str, tuple[Callable[[Config], bool], str]] = {
    "training": (lambda config: config.bwd, "2,8,1024,64,causal,bwd"),
    "prefill": (
        lambda config: not config.bwd and not _decodes(config),
        "2,8,1024,64,causal",
    ),
    "decode": (
        lambda config: not config.bwd and _decodes(config),
        "1,32,1,128,bf16,kv_heads=8,seq_kv=4096",
    ),
}
"""Whether a config belongs to the scenario, and a config to capture if a store has none."""
LITTLE_MEMORY = "little memory"
_TIMES: dict[str, Callable[[Figures], float | None]] = {
    GRAPH: lambda figures: figures.graph_ns,
    COLD: lambda figures: figures.cold_ns,
    EVENT: lambda figures: figures.event_ns,
    EAGER: lambda figures: figures.eager_ns,
    WALL: lambda figures: figures.wall_ns,
}


def _decodes(config: Config) -> bool:
    return config.seq_len_q * FEW_QUERIES <= config.seq_len_kv


@dataclass(frozen=True, slots=True)
class ScenarioChoice:
    """The best backends of one config for a scenario, among those with the same measurement."""

    scenario: str
    run: str
    config: Config
    measurement: str
    best: tuple[str, ...]
    value: float  # of the best backend, in ns or bytes
    runner_up: str | None
    factor: float | None  # runner_up over value; None if all tie


def choices(analyses: Sequence[CellAnalysis]) -> list[ScenarioChoice]:
    """Return the best backends of every config with several backends, by scenario."""
    groups: dict[tuple[str, Config], list[CellAnalysis]] = {}
    for analysis in analyses:
        # skip `auto`: the backend that it chose has its own cell
        if not analysis.figures or analysis.module is not None or analysis.wrong:
            continue
        if not pytorch_chooses(analysis.backend):
            groups.setdefault((analysis.run, analysis.config), []).append(analysis)
    made: list[ScenarioChoice] = []
    for scenario, (holds, _) in SCENARIOS.items():
        for (run, config), group in groups.items():
            if holds(config) and (common := _common_times(group)):
                made += _choice(scenario, run, config, *common)
    for (run, config), group in groups.items():
        peaks = {each.backend: each.figures and each.figures.peak_memory_bytes for each in group}
        known = {backend: float(peak) for backend, peak in peaks.items() if peak}
        made += _choice(LITTLE_MEMORY, run, config, "peak memory", known)
    return made


def missing_scenarios(analyses: Sequence[CellAnalysis]) -> dict[str, str]:
    """Return the scenarios without a config, each with an example config."""
    configs = {analysis.config for analysis in analyses}
    return {
        scenario: example
        for scenario, (holds, example) in SCENARIOS.items()
        if not any(map(holds, configs))
    }


def _common_times(group: Sequence[CellAnalysis]) -> tuple[str, dict[str, float]] | None:
    """Return the first measurement that all cells have, with their medians."""
    for name, time in _TIMES.items():
        times = {each.backend: each.figures and time(each.figures) for each in group}
        if all(times.values()):
            return name, {backend: float(value) for backend, value in times.items() if value}
    return None


def _choice(
    scenario: str, run: str, config: Config, measurement: str, values: dict[str, float]
) -> list[ScenarioChoice]:
    if len(values) < 2:
        return []
    ranked = sorted(values, key=lambda backend: values[backend])
    least = values[ranked[0]]
    best = tuple(backend for backend in ranked if values[backend] < TIE * least)
    behind = next((backend for backend in ranked if backend not in best), None)
    factor = values[behind] / least if behind else None
    return [ScenarioChoice(scenario, run, config, measurement, best, least, behind, factor)]
