"""Compare the analyses of several cells: shared findings, the best backends, and sweeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Annotated, TypeVar

from profharness.attention.config import Config, pytorch_chooses
from profharness.columns import column
from profharness.commands._answers import NUMBER, merged_text
from profharness.commands.analyze.figures import (
    CellAnalysis,
    Figures,
    Finding,
    Remedy,
)
from profharness.errors import counted, join_and
from profharness.measurements.measurements import contenders
from profharness.rows import shared_measurement
from profharness.units import memory_text, time_text

SEVERAL = 2  # A finding is printed once for all its configs if there are at least this many.


Item = TypeVar("Item", Finding, Remedy)
Members = list[tuple[CellAnalysis, Item]]


def separate(analyses: Sequence[CellAnalysis]) -> list[CellAnalysis]:
    """Return the cells without those of `all-disabled`, which runs what `auto` runs.

    Return all cells if there are no others.
    """
    names = contenders({each.backend for each in analyses})
    return [each for each in analyses if each.backend in names]


def where(members: Members[Item]) -> str:
    """Return a text that says where a finding was made, such as `flash and math on 4 configs each`."""
    configs: dict[str, set[tuple[str, Config]]] = {}
    for analysis, _ in members:
        configs.setdefault(analysis.backend, set()).add((analysis.run, analysis.config))
    backends: dict[int, list[str]] = {}
    for backend, seen in configs.items():
        backends.setdefault(len(seen), []).append(backend)
    return "; ".join(
        f"{join_and(names)} on {counted(count, 'config')}{' each' if names[1:] else ''}"
        for count, names in backends.items()
    )


def common_findings(
    pairs: Iterable[tuple[CellAnalysis, Finding]],
) -> Iterator[tuple[Finding, Members[Finding]]]:
    """Yield each finding that cells of several configs share, with these cells.

    Figures that differ between the cells become ranges such as `1.2 to 3.4`.
    """

    def form(finding: Finding) -> tuple[object, ...]:
        """Return a key that is equal for findings that differ only in their figures."""
        sentence = NUMBER.sub("#", finding.sentence)
        return (finding.code, finding.severity, finding.grade, sentence)

    for members in _common(pairs, form):
        sentence = merged_text([finding.sentence for _, finding in members])
        yield replace(members[0][1], sentence=sentence), members


def common_remedies(
    pairs: Iterable[tuple[CellAnalysis, Remedy]],
) -> Iterator[Members[Remedy]]:
    """Yield the cells and remedies for each remedy that cells of several configs share."""
    yield from _common(pairs, lambda remedy: (remedy.text, remedy.findings))


def _common(
    pairs: Iterable[tuple[CellAnalysis, Item]], form: Callable[[Item], tuple[object, ...]]
) -> Iterator[Members[Item]]:
    groups: dict[tuple[object, ...], Members[Item]] = {}
    for analysis, item in pairs:
        groups.setdefault(form(item), []).append((analysis, item))
    for group in groups.values():
        if len({analysis.config for analysis, _ in group}) >= SEVERAL:
            yield group


TIE = 1.03  # Two backends tie if the ratio of their medians is below this value.
FEW_QUERIES = 4  # A config is a decoding step if it has at least this many keys per query.
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
"""Maps a use of attention to a function and a config.

The function returns whether a config is an example of the use. The config can be captured if no
stored config is an example.
"""
LITTLE_MEMORY = "little memory"


def _decodes(config: Config) -> bool:
    return config.seq_len_q * FEW_QUERIES <= config.seq_len_kv


@dataclass(frozen=True, slots=True)
class ScenarioChoice:
    """The best backends for one config in a scenario such as `training`."""

    scenario: Annotated[str, column("for", repeat=False, meaning="use of attention")]
    run: str
    config: Annotated[Config, column("config", importance="key", meaning="attention problem")]
    measurement: Annotated[
        str, column("of", meaning="the measurement by which all backends are compared")
    ]
    best: Annotated[
        tuple[str, ...],
        column(
            "best",
            "names",
            importance="answer",
            meaning="the best backend, and all backends that tie with it",
        ),
    ]
    value: float  # the value of the best backend, in ns or bytes
    runner_up: Annotated[
        str | None, column("next", meaning="the best backend that does not tie with `best`")
    ]
    factor: Annotated[
        float | None,
        column(
            "next / best", "ratio", meaning="time or memory of `next`, divided by that of `best`"
        ),
    ]

    @property
    def median(
        self,
    ) -> Annotated[
        str, column("median", importance="answer", right=True, meaning="time or memory")
    ]:
        """The time or memory of the best backend, formatted with its unit."""
        if self.scenario == LITTLE_MEMORY:
            return memory_text(self.value)
        return time_text(self.value)


def choices(analyses: Sequence[CellAnalysis]) -> list[ScenarioChoice]:
    """Return the best backends for every config that ran on several backends, by scenario."""
    groups: dict[tuple[str, Config], dict[str, Figures]] = {}
    for each in analyses:
        # Skip `auto`, because the backend that PyTorch chooses has a cell of its own.
        excluded = each.module is not None or each.wrong or pytorch_chooses(each.backend)
        if each.figures and not excluded:
            groups.setdefault((each.run, each.config), {})[each.backend] = each.figures
    made: list[ScenarioChoice] = []
    for scenario, (holds, _) in SCENARIOS.items():
        for (run, config), group in groups.items():
            if holds(config):
                timed = {name: figures for name, figures in group.items() if figures.basis}
                if basis := shared_measurement([each.time_of for each in timed.values()]):
                    times = {name: each.time_of(basis) or 0 for name, each in timed.items()}
                    made += _choice(scenario, run, config, basis, times)
    for (run, config), group in groups.items():
        peaks = _values(group, "peak_memory_bytes")
        made += _choice(LITTLE_MEMORY, run, config, "peak memory", peaks)
    return made


def _values(group: Mapping[str, Figures], name: str) -> dict[str, float]:
    values = {backend: getattr(figures, name) for backend, figures in group.items()}
    return {backend: float(value) for backend, value in values.items() if value}


def missing_scenarios(analyses: Sequence[CellAnalysis]) -> dict[str, str]:
    """Return an example config for each scenario to which no analyzed config belongs."""
    configs = {analysis.config for analysis in analyses}
    return {
        scenario: example
        for scenario, (holds, example) in SCENARIOS.items()
        if not any(map(holds, configs))
    }


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


SWEPT = ("head_dim", "seq_len_kv", "batch", "num_heads")
DROP = 1.5  # A drop is a fall of the rate by at least this factor between neighbouring configs.
MANY_DIMS = (
    3  # Configs look like a sweep over head_dim if they have at least this many values of head_dim.
)


def sweep(analyses: Sequence[CellAnalysis]) -> list[tuple[str, list[CellAnalysis]]]:
    """Return groups of cells of one backend whose configs differ in only one property.

    Each group comes with the name of the property, such as `head_dim`, and is sorted by its value.
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
    """Return a key that is equal for cells that differ only in the property `name`."""
    config = analysis.config
    same_length = config.seq_len_q == config.seq_len_kv
    same_heads = config.num_heads == config.num_kv_heads
    left_out = {name}
    # If seq_len_q equals seq_len_kv, both change together in a sweep. The same holds for heads.
    if name == "seq_len_kv" and same_length:
        left_out.add("seq_len_q")
    if name == "num_heads" and same_heads:
        left_out.add("num_kv_heads")
    values = [getattr(config, field.name) for field in fields(Config) if field.name not in left_out]
    return (analysis.run, analysis.backend, same_length, same_heads, *values)


def drops(name: str, group: Sequence[CellAnalysis]) -> Iterator[tuple[int, int, float]]:
    """Yield (value before, value after, factor) for each drop of the FLOP rate in one sweep."""
    for one, other in pairwise(group):
        before, after = (each.figures and each.figures.flops_per_s for each in (one, other))
        if before and after and before >= DROP * after:
            yield getattr(one.config, name), getattr(other.config, name), before / after


def changed_problems(analyses: Sequence[CellAnalysis]) -> Iterator[tuple[str, dict[int, int]]]:
    """Yield (backend, number of scores by head_dim) for configs that only look like a sweep.

    The configs differ not only in head_dim, but also in the number of scores, so head_dim alone does
    not explain a change in the FLOP rate.
    """
    groups: dict[tuple[object, ...], list[Config]] = {}
    for analysis in analyses:
        config = analysis.config
        if analysis.figures is not None:
            key = (
                analysis.backend,
                analysis.run,
                config.dtype,
                config.bwd,
                config.causal,
                config.window,
            )
            groups.setdefault(key, []).append(config)
    for (backend, *_), configs in groups.items():
        scores = {
            config.head_dim: config.batch * config.num_heads * config.seq_len_q * config.seq_len_kv
            for config in sorted(configs, key=lambda config: config.head_dim)
        }
        if len(scores) == len(configs) >= MANY_DIMS and len(set(scores.values())) > 1:
            yield str(backend), scores
