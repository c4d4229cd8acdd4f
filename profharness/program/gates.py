"""Gates that check the map of a program's attention: `--fail-on`, and `--expect
flash@'model.layers.*'`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from profharness.attention.config import AUTO, SDPA_BACKENDS, parse_config, split_names
from profharness.errors import GateError, UsageError
from profharness.measurements.agreement import FAMILY_BACKENDS
from profharness.program.layer_map import (
    NO_MASK_EFFECT,
    LayerMap,
    LayerRow,
    any_length,
)

THROUGH_SDPA = ("sdpa", "inner")  # kinds of calls for which PyTorch chooses the backend
BACKENDS = tuple(dict.fromkeys([*SDPA_BACKENDS, *FAMILY_BACKENDS.values(), "eager"]))


@dataclass(frozen=True, slots=True)
class Expectation:
    """The requirement that one of the backends computes every call of the modules that match a glob
    pattern.
    """

    text: str  # the expectation as the user wrote it
    backends: tuple[str, ...]
    modules: str


@dataclass(frozen=True, slots=True)
class Gates:
    """The gates that the user requested. The object is false if there are none."""

    fail_on: tuple[str, ...] = ()
    expected: tuple[Expectation, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.fail_on or self.expected)


def parse_gates(fail_on: Sequence[str], expect: Sequence[str]) -> Gates:
    """Parse the gates. Raise UsageError for an unknown gate or backend."""
    names = split_names(fail_on)
    for name in names:
        if name not in GATES:
            raise UsageError(f"--fail-on {name!r}: not one of {', '.join(GATES)}")
    return Gates(names, tuple(map(_expectation, expect)))


def _expectation(text: str) -> Expectation:
    """Parse an expectation: `flash`, `flash@GLOB` or `flash,cudnn@GLOB`."""
    before, at, glob = text.partition("@")
    backends = split_names(before)
    for name in backends:
        if name not in BACKENDS:
            raise UsageError(f"--expect {text!r}: {name!r} is not one of {', '.join(BACKENDS)}")
    if not backends or (at and not glob):
        raise UsageError(f"--expect {text!r}: write a backend and modules: flash@'model.layers.*'")
    return Expectation(text, backends, glob or "*")


def require_recorded(layers: LayerMap, gates: Gates) -> None:
    """Raise UsageError if a gate needs something that the run does not record."""
    for name in gates.fail_on:
        if why := _why_missing(name, layers):
            raise UsageError(f"--fail-on {name}: run {layers.run} does not tell it, {why}")


def check_gates(layers: LayerMap, gates: Gates) -> None:
    """Raise GateError if a gate fails. The error lists all failures, and what the run does not
    record. A gate that checks what ran also fails if this is unknown for every call.
    """
    lines: list[str] = []
    blind = OF_WHAT_RAN if all(row.ran is None for row in layers.rows) else ()
    for name in gates.fail_on:
        if why := _why_missing(name, layers):
            faults = [f"not told, {why}"]
        elif name in blind:
            faults = ["nothing to judge, what ran is told of no call"]
        else:
            faults = [*GATES[name](layers.rows), *_missing(name, layers)]
        lines += [f"{name}: {line}" for line in faults]
    lines += [line for wanted in gates.expected for line in _unmet(wanted, layers.rows)]
    if lines:
        raise GateError(f"gates of run {layers.run} are not met:\n  " + "\n  ".join(lines))


def _why_missing(gate: str, layers: LayerMap) -> str | None:
    """Return why a run records nothing that a gate can check. Return None if the run records it for
    at least one call.
    """
    if gate == "eager-attention" and all(row.calls is None for row in layers.rows):
        return "which a recorded step alone shows, and none was recorded"
    has_answer = _HAS_ANSWER.get(gate)
    # for an observed program, each call that lacks the information is listed instead
    if has_answer is None or layers.processes or any(map(has_answer, layers.rows)):
        return None
    return "a trace alone cannot; run the program with `profharness observe`"


def _missing(gate: str, layers: LayerMap) -> Iterator[str]:
    """Yield a line for each call of an observed program that lacks the information that a gate
    needs.
    """
    for row in layers.rows:
        seen = row.calls is None or row.site is not None
        because = f" ({row.reasons[0]})" if row.calls is None and row.reasons else ""
        if gate in ("math-fallback", "backend-changed") and seen and row.ran is None:
            yield f"{_place(row)}: what ran is not told{because}"
        elif gate == "asked-not-ran" and row.kind in THROUGH_SDPA and not (row.asked and row.ran):
            missing = "what was asked for" if row.ran else "what ran"
            yield f"{_place(row)}: {missing} is not told{because}"
        elif gate == "noop-mask" and row.mask is None and row.kind not in ("flex", "custom"):
            yield f"{_place(row)}: what its mask does is not told{because}"


def _unmet(wanted: Expectation, rows: Sequence[LayerRow]) -> Iterator[str]:
    matching = [row for row in rows if _matches(row, wanted.modules)]
    for row in matching:
        parts = _parts(row)
        if not parts or not parts <= set(wanted.backends):
            what = f"{row.ran} ran" if row.ran else "what ran is not told"
            yield f"--expect {wanted.text}: {_place(row)}: {what}"
    if not matching:
        named = list(dict.fromkeys(name for row in rows for name in row.names))
        some = ", ".join(named[:3]) or "no modules, for the trace has none (with_stack=True)"
        yield f"--expect {wanted.text}: matches no call; there are {some}"


def _parts(row: LayerRow) -> set[str]:
    """Return the backends that computed the calls of a row."""
    return set(row.ran.split(" and ")) if row.ran else set()


def _matches(row: LayerRow, glob: str) -> bool:
    """Return whether a glob pattern matches the full name of one of the row's modules, or the last
    part of such a name. A call without a module is matched by `*` only.
    """
    names = [part for name in row.names for part in (name, name.rpartition(".")[2])]
    return any(fnmatchcase(name, glob) for name in names or [""])


def _place(row: LayerRow) -> str:
    parts = [row.module, row.config] if row.module else [row.config or row.kind]
    direction = "" if row.direction == "forward" else f" ({row.direction})"
    return " ".join(filter(None, parts)) + direction


def _math(rows: Sequence[LayerRow]) -> Iterator[str]:
    """Yield the calls that ran as math, unless math was the only backend that the program
    requested.
    """
    for row in rows:
        if "math" in _parts(row) and row.asked != "math":
            reasons = "; ".join(row.reasons)
            yield f"{_place(row)}{f': {reasons}' if reasons else ''}"


def _eager(rows: Sequence[LayerRow]) -> Iterator[str]:
    """Yield the calls whose attention is computed by separate products, which includes
    flex_attention without torch.compile.
    """
    unfused = "flex", "eager"
    return (_place(row) for row in rows if row.kind == "eager" or (row.kind, row.mode) == unfused)


def _noop(rows: Sequence[LayerRow]) -> Iterator[str]:
    return (f"{_place(row)}: its mask hides nothing" for row in rows if row.mask == NO_MASK_EFFECT)


def _not_ran(rows: Sequence[LayerRow]) -> Iterator[str]:
    """Yield the calls that ran on a backend that the program did not allow, or that PyTorch did not
    choose.
    """
    for row in rows:
        if not row.ran or not row.asked:
            continue
        if row.asked != AUTO and row.ran not in split_names(row.asked):
            yield f"{_place(row)}: asked for {row.asked}, {row.ran} ran"
        elif row.choice and row.choice != row.ran:
            yield f"{_place(row)}: PyTorch chose {row.choice}, {row.ran} ran"


def _changed(rows: Sequence[LayerRow]) -> Iterator[str]:
    """Yield the modules whose equal calls ran on different backends. Calls without a module are
    compared with all other such calls.
    """
    alike: dict[object, list[tuple[str, LayerRow]]] = defaultdict(list)
    for row in rows:
        if row.config is not None and row.ran:
            config = any_length(parse_config(row.config), row.phase)
            for name in row.names or ("",):
                alike[name, replace(config, bwd=False), row.phase, row.direction].append(
                    (name, row)
                )
    changes: dict[str, None] = {}
    for group in alike.values():
        # the iteration order of a set differs from run to run
        ran = sorted({str(row.ran) for _, row in group})
        if len(ran) > 1:
            name, row = group[0]
            changes[f"{name or row.config}: {' and '.join(ran)} ran for like calls"] = None
    return iter(changes)


def _unseen(rows: Sequence[LayerRow]) -> Iterator[str]:
    return (f"{_place(row)}: what ran is not told" for row in rows if row.ran is None)


GATES: dict[str, Callable[[Sequence[LayerRow]], Iterator[str]]] = {
    "math-fallback": _math,
    "eager-attention": _eager,
    "noop-mask": _noop,
    "asked-not-ran": _not_ran,
    "backend-changed": _changed,
    "unseen": _unseen,
}
OF_WHAT_RAN = ("math-fallback", "asked-not-ran", "backend-changed")
# The values that a gate needs from at least one row, if a trace alone does not record them.
_HAS_ANSWER: dict[str, Callable[[LayerRow], bool]] = {
    "noop-mask": lambda row: row.mask is not None,
    "asked-not-ran": lambda row: row.asked is not None,
}
