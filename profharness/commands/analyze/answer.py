"""Report what limits attention and what to change first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, islice

from profharness.attention.config import ALL_DISABLED, AUTO, OWN_CHOICE, pytorch_chooses
from profharness.commands._output import sentences
from profharness.commands.analyze.figures import (
    FASTER,
    PREDICTED,
    CellAnalysis,
    Remedy,
)
from profharness.commands.analyze.several import separate, where
from profharness.errors import counted, join_and
from profharness.measurements.measurements import AGAIN, basis_text, compared_by
from profharness.program.layer_map import short_module
from profharness.rows import shared_measurement
from profharness.units import as_fast, time_text

LIMITS = {
    "launch": "the overhead of launching kernels",
    "memory": "memory bandwidth",
    "compute": "compute throughput",
    "latency": "latency, with neither compute nor memory near its peak",
    "unfused ops": "unfused ops outside of the matrix products",
    "input copies": "copying the inputs",
    "few blocks": "too few thread blocks to fill the GPU",
    "combine": "combining the partial results of a split",
    "K and V traffic": "repeated reads of K and V",
}
"""Maps the short name of a bottleneck to the phrase that describes it in a sentence."""
MANY = 3  # With at least this many configs, the answer summarizes all of them.


def analyze_answer(analyses: Sequence[CellAnalysis]) -> tuple[str, ...]:
    """Return sentences on the bottleneck and the first remedy.

    They describe the cell that matters most. If there are many configs, they describe most cells.
    The second sentence says if the machine was too busy for reliable times.
    """
    right = [each for each in analyses if each.status == "ok" and each.figures and not each.wrong]
    usable = [each for each in right if not each.busy]
    busy = _busy(analyses, [each for each in right if each.busy], right)
    ran = separate(usable)
    if not ran and len(usable) < len(right):
        return busy
    if not ran:
        nothing = "Nothing to analyze: no backend produced usable results for these configs."
        return (nothing, *busy)
    first, *others = _statements(ran, usable)
    return (first, *busy, *others)


def _statements(ran: Sequence[CellAnalysis], usable: Sequence[CellAnalysis]) -> list[str]:
    if ran[0].module is not None:
        # analyze_program returns the longest calls first.
        return [*_of_one(ran[0], None, ran)]
    configs = dict.fromkeys(each.config for each in ran)
    if len(configs) >= MANY:
        without = "" if len(ran) == len(usable) else f", without {ALL_DISABLED}"
        return [*_of_all(ran, without)]
    of_each = [[each for each in ran if each.config == config] for config in configs]
    texts = chain.from_iterable(_of_one(*_fastest(own), own) for own in of_each)
    return [*dict.fromkeys(texts)]


def _busy(
    analyses: Sequence[CellAnalysis], busy: Sequence[CellAnalysis], ran: Sequence[CellAnalysis]
) -> tuple[str, ...]:
    """Return sentences on a busy machine and on the cells with unusable times."""
    warnings = dict.fromkeys(each.machine.busy for each in analyses if each.machine.busy)
    texts = [sentences(text) for text in warnings]
    if not busy:
        return tuple(texts)
    names = join_and([*dict.fromkeys(each.backend for each in busy)])
    if len({each.config for each in ran}) > 1:
        names = f"{len(busy)} of {counted(len(ran), 'cell')}"
    if texts:
        return (*texts, f"The times of {names} cannot be used.")
    return (f"The machine was busy, so the times of {names} cannot be used. {sentences(AGAIN)}",)


def _fastest(own: Sequence[CellAnalysis]) -> tuple[CellAnalysis, str | None]:
    """Return the fastest backend of a config, and the measurement that all backends have.

    A setting such as `auto` is the fastest only if the backend that it ran has no cell.
    """
    basis = shared_measurement([each.figures.time_of for each in own if each.figures])

    def time(each: CellAnalysis) -> float:
        return (each.figures and basis and each.figures.time_of(basis)) or math.inf

    named = [each for each in own if not pytorch_chooses(each.backend)] or own
    first, best = min(own, key=time), min(named, key=time)
    return (first if time(first) * FASTER < time(best) else best), basis


def _of_one(cell: CellAnalysis, basis: str | None, own: Sequence[CellAnalysis]) -> Iterator[str]:
    """Yield sentences on the bottleneck of one of several cells, and its first remedy.

    `basis` is the measurement by which the cell is the fastest.
    """
    figures, name = cell.figures, cell.backend
    time = figures and (figures.time_of(basis) if basis else figures.duration_ns)
    took = f" ({time_text(time)} per call)" if time else ""
    if cell.module is not None:
        subject = f"{short_module(cell.module)} on {name}{took}"
    elif basis and len({each.backend for each in own}.difference(OWN_CHOICE)) > 1:
        subject = f"{name}, the fastest backend of {cell.config.label} {compared_by(basis)}{took},"
    else:
        subject = f"{name} on {cell.config.label}{took}"
    subject = subject[0].upper() + subject[1:] if subject.startswith("the ") else subject
    if cell.bottleneck:
        yield f"{subject} is limited by {_limit(cell.bottleneck)}{_without_graph(cell)}."
    else:
        yield f"These measurements show no bottleneck for {subject.removesuffix(',')}."
    # The change to the costliest call that has one, as in `layers`.
    changes = [each for one in own for each in one.remedies if each.grade == PREDICTED]
    others = [each for each in cell.remedies if each.grade != PREDICTED]
    for remedy in (*changes[:1], *others[:1]):
        yield _remedy([remedy])


def _without_graph(cell: CellAnalysis) -> str:
    """Return a clause with the time that the launches take part in, which a graph would save."""
    figures = cell.figures
    time = figures and (figures.eager_ns or figures.event_ns)
    if cell.bottleneck != "launch" or not time:
        return ""
    return f" if no CUDA graph is used; a call then takes {time_text(time)}"


def limits_text(fastest: Sequence[CellAnalysis]) -> str:
    """Return a sentence on the bottlenecks of the fastest backends, which has one cell per config.

    Return "" if no bottleneck is known.
    """
    limits = Counter(each.bottleneck for each in fastest if each.bottleneck)
    if not limits:
        return ""
    if len(fastest) == 1:
        return f"{fastest[0].backend} is limited by {_limit(fastest[0].bottleneck)}."
    (first, count), *others = limits.most_common()
    text = f"On {counted(count, 'config')}, the fastest backend is limited by {_limit(first)}"
    rest = [f"on {counted(count, 'config')}, by {_limit(name)}" for name, count in others]
    return f"{'; '.join([text, *rest])}."


def _limit(bottleneck: str | None) -> str:
    return LIMITS.get(bottleneck or "", bottleneck or "")


def _limits(bottlenecks: Sequence[str]) -> str:
    return join_and([_limit(each) for each in bottlenecks])


def _by_count(limits: Counter[str]) -> list[tuple[int, list[str]]]:
    """Return each count, the highest first, with the bottlenecks that occur so often."""
    groups: dict[int, list[str]] = {}
    for name, count in limits.most_common():
        groups.setdefault(count, []).append(name)
    return [*groups.items()]


def _of_all(ran: Sequence[CellAnalysis], without: str) -> Iterator[str]:
    limits = Counter(each.bottleneck for each in ran if each.bottleneck)
    if not limits:
        yield "These measurements show no bottleneck."
    else:
        (most, first), *others = _by_count(limits)
        subject = "bottleneck is" if len(first) == 1 else "bottlenecks are"
        per_limit = "" if len(first) == 1 else " each"
        next_ones = ""
        if others:
            count, tied = others[0]
            next_ones = f", followed by {_limits(tied)} ({count}{' each' if tied[1:] else ''})"
        yield (
            f"The most frequent {subject} {_limits(first)} ({most}{per_limit} of the {len(ran)} "
            f"cells that ran{without}){next_ones}."
        )
    changes = [each for one in ran for each in one.remedies if each.grade == PREDICTED]
    if changes:
        yield _remedy([max(changes, key=lambda each: each.factor or 0)])
    remedies: dict[str, list[tuple[CellAnalysis, Remedy]]] = {}
    as_fast_on_auto = {
        (each.run, each.config)
        for each in ran
        if each.backend == AUTO and not each.finding("faster_backend")
    }
    limited = [each for each in ran if limits and each.bottleneck in _by_count(limits)[0][1]]
    for each in limited:
        # A faster backend than the requested one is no news if `auto` is as fast.
        advised = (
            remedy
            for remedy in each.remedies
            if remedy.grade != PREDICTED
            and not (remedy.measured and (each.run, each.config) in as_fast_on_auto)
        )
        for remedy in islice(advised, 1):
            remedies.setdefault(remedy.text, []).append((each, remedy))
    if remedies:
        alike = max(remedies.values(), key=len)
        text = _remedy([remedy for _, remedy in alike])
        if len(alike) > 1:
            configs = {cell.config.label for cell, _ in alike}
            names = dict.fromkeys(cell.backend for cell, _ in alike)
            cells = where(alike) if len(configs) > 1 else f"{join_and(names)} on {configs.pop()}"
            limit = " or ".join(_by_count(limits)[0][1])
            text = (
                f"In {len(alike)} of the {counted(len(limited), 'cell')} limited by {limit} "
                f"({cells}), {text[0].lower()}{text[1:]}"
            )
        yield text


def _remedy(alike: Sequence[Remedy]) -> str:
    text, gain = alike[0].text.removesuffix("."), gain_text(alike)
    return f"{text}: {gain}." if gain else f"{text}."


def gain_text(alike: Sequence[Remedy]) -> str:
    """Return the gain of equal remedies: `measured 1.37 to 3.37 times as fast (cold calls)`.

    Return "" if the gain is unknown, or if the texts contain it. An upper bound of several cells is
    the largest one.
    """
    if alike[0].grade == PREDICTED:
        return ""
    factors = sorted(remedy.factor for remedy in alike if remedy.factor)
    if not factors:
        return ""
    low, high = factors[0], factors[-1]
    if not all(remedy.measured for remedy in alike):
        return f"at most {as_fast(high)}"
    bases = join_and([*dict.fromkeys(basis_text(remedy.basis) for remedy in alike)])
    return f"measured {as_fast(low, most=high)} ({bases})"
