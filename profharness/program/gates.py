"""Check the options `--fail-on` and `--expect` on the layer map of a program.

For example, `--expect flash@'model.layers.*'` requires the backend flash in these modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from profharness.attention.config import AUTO, SDPA_BACKENDS, parse_config, split_names
from profharness.errors import (
    GateResult,
    UsageError,
    choose_from,
    counted,
    require_passed,
)
from profharness.measurements.agreement import EAGER, FAMILY_BACKENDS
from profharness.program.layer_map import (
    NO_MASK_EFFECT,
    THROUGH_SDPA,
    LayerMap,
    LayerRow,
    any_length,
    join_numbered,
)

BACKENDS = tuple(dict.fromkeys([*SDPA_BACKENDS, *FAMILY_BACKENDS.values(), EAGER]))
GATES = (
    *("math-fallback", "eager-attention", "noop-mask", "requested-not-run", "backend-changed"),
    "unseen",
)
PASSED = {
    "math-fallback": "none ran on math",
    "eager-attention": "none computes attention eagerly",
    "noop-mask": "none has a mask without effect",
    "requested-not-run": "none ran on a backend that the program did not allow",
    "backend-changed": "none changed its backend",
    "unseen": "none has an unknown backend",
}
"""Maps each `--fail-on` gate to what it did not find if it passed."""
OLD_GATES = {"asked-not-ran": "requested-not-run"}  # earlier names, which keep working
OF_WHAT_RAN = ("math-fallback", "requested-not-run", "backend-changed")


@dataclass(frozen=True, slots=True)
class Gates:
    """The gates that the user requested. The object is false if there are none."""

    fail_on: tuple[str, ...] = ()
    # Maps the text of an expectation to the backends that may compute the calls, and to a glob
    # pattern for the names of the modules.
    expected: dict[str, tuple[tuple[str, ...], str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.fail_on or self.expected)


def parse_gates(fail_on: Sequence[str], expect: Sequence[str]) -> Gates:
    """Parse the values of `--fail-on` and `--expect`, such as `flash,cudnn@GLOB`.

    Without a glob, an expectation applies to all modules.

    Raise UsageError for unknown names.
    """
    names = tuple(OLD_GATES.get(name, name) for name in split_names(fail_on))
    for name in names:
        if name not in GATES:
            raise UsageError(f"unknown --fail-on {name!r}; {choose_from(name, tuple(GATES))}")
    expected = {}
    for text in expect:
        before, at, glob = text.partition("@")
        backends = split_names(before)
        for name in backends:
            if name not in BACKENDS:
                raise UsageError(
                    f"--expect {text!r}: unknown backend {name!r}; "
                    f"{choose_from(name, tuple(BACKENDS))}"
                )
        if not backends or (at and not glob):
            raise UsageError(
                f"--expect {text!r}: name a backend and a pattern of modules, as in "
                "flash@'model.layers.*'"
            )
        expected[text] = backends, glob or "*"
    return Gates(names, expected)


def require_recorded(layers: LayerMap, gates: Gates) -> None:
    """Raise UsageError if a gate of `--fail-on` needs data that the run does not contain."""
    for name in gates.fail_on:
        if why := _why_missing(name, layers):
            raise UsageError(f"cannot check --fail-on {name} in run {layers.name}: {why}")


def check_gates(layers: LayerMap, gates: Gates) -> list[str]:
    """Return a line for each gate. Raise GateError if a gate fails."""
    return require_passed(gate_results(layers, gates))


def gate_results(layers: LayerMap, gates: Gates) -> list[GateResult]:
    """Return the result of each gate.

    A gate that checks which backend ran also fails if this backend is unknown.
    """
    rows = layers.rows
    results = [
        GateResult(
            f"--fail-on {name}",
            layers.name,
            tuple(_faults(name, layers)),
            f"{_checked(rows)}, {_passed(name, layers, gates)}",
        )
        for name in gates.fail_on
    ]
    for text, (backends, glob) in gates.expected.items():
        found = [row for row in rows if _matches(row, glob)]
        passed = f"{_checked(found)}, none ran on a backend other than {' or '.join(backends)}"
        unmet = tuple(_unmet(backends, glob, rows))
        results.append(GateResult(f"--expect {text}", layers.name, unmet, passed))
    return results


def _checked(rows: Sequence[LayerRow]) -> str:
    calls = sum(row.program_calls or round((row.calls or 0) * (row.steps or 0)) for row in rows)
    return f"{counted(calls, 'call') if calls else counted(len(rows), 'layer')} checked"


def _faults(name: str, layers: LayerMap) -> list[str]:
    """Return the findings of a gate of `--fail-on`, one text for each."""
    if why := _why_missing(name, layers):
        return [f"the result is unknown, because {why}"]
    rows = layers.rows
    if name in OF_WHAT_RAN and all(row.ran is None for row in rows):
        return ["the result is unknown, because no call shows which backend ran"]
    found = [(row, _fault(name, row)) for row in rows]
    found += [(row, _missing(name, row)) for row in rows]
    changed = _changes(rows) if name == "backend-changed" else ()
    return [*changed, *(_at(row, text) for row, text in found if text is not None)]


def _passed(name: str, layers: LayerMap, gates: Gates) -> str:
    """Return what a gate of `--fail-on` that passed did not find."""
    text, rows = PASSED[name], layers.rows
    if name != "math-fallback":
        return text
    if any("math" in _backends(row) for row in rows):
        text += " where the program allows another backend"
    eager = [row for row in rows if is_unfused(row)]
    if eager and "eager-attention" not in gates.fail_on:
        where = join_numbered(name for row in eager for name in row.names)
        text += (
            f", but {where or 'the program'} computes attention eagerly, without "
            "scaled_dot_product_attention; to fail on this, add --fail-on eager-attention"
        )
    return text


def falls_back(row: LayerRow) -> bool:
    """Return whether math computed the calls although the program allowed other backends."""
    return "math" in _backends(row) and row.asked != "math"


def is_unfused(row: LayerRow) -> bool:
    """Return whether separate kernels computed the calls without scaled_dot_product_attention.

    flex_attention without torch.compile also runs separate matrix products.
    """
    return row.kind == "eager" or (row.kind, row.mode) == ("flex", "eager")


def _why_missing(gate: str, layers: LayerMap) -> str | None:
    """Return the reason why a run lacks the data that a gate checks. Return None if a call has the
    data, or if the gate needs no such data.
    """
    if gate == "eager-attention" and all(row.calls is None for row in layers.rows):
        return "this gate requires a recorded step, but no step was recorded"
    needed = {"noop-mask": "mask", "requested-not-run": "asked"}.get(gate)
    # In an observed program, each call without this information fails on its own.
    if needed is None or layers.processes:
        return None
    if any(getattr(row, needed) is not None for row in layers.rows):
        return None
    return "traces do not contain the required data; run the program with `profharness observe`"


def _fault(gate: str, row: LayerRow) -> str | None:
    """Return the reason why a row fails a gate, or None if the row passes. The reason may be
    empty.
    """
    if gate == "math-fallback" and falls_back(row):
        return "; ".join(row.reasons)
    if gate == "eager-attention":
        return "" if is_unfused(row) else None
    if gate == "noop-mask" and row.mask == NO_MASK_EFFECT:
        return "the mask hides nothing"
    if gate == "unseen" and row.ran is None:
        return "the backend that ran is unknown"
    if gate == "requested-not-run" and row.ran and row.asked:
        if row.asked != AUTO and row.ran not in split_names(row.asked):
            return f"the program allowed {row.asked}, but {row.ran} ran"
        if row.choice and row.choice != row.ran:
            return f"PyTorch chose {row.choice}, but {row.ran} ran"
    return None


def _missing(gate: str, row: LayerRow) -> str | None:
    missing = None
    seen = row.calls is None or row.site is not None
    if gate in ("math-fallback", "backend-changed") and seen and row.ran is None:
        missing = "the backend that ran is unknown"
    elif gate == "requested-not-run" and row.kind in THROUGH_SDPA and not (row.asked and row.ran):
        missing = f"the backend that {'was allowed' if row.ran else 'ran'} is unknown"
    elif gate == "noop-mask" and row.mask is None and row.kind not in ("flex", "custom"):
        missing = "the effect of the mask is unknown"
    because = f" ({row.reasons[0]})" if row.calls is None and row.reasons else ""
    return missing and f"{missing}{because}"


def _unmet(backends: Sequence[str], glob: str, rows: Sequence[LayerRow]) -> Iterator[str]:
    matching = [row for row in rows if _matches(row, glob)]
    for row in matching:
        if not row.ran:
            yield _at(row, "the backend that ran is unknown")
        elif not _backends(row) <= set(backends):
            yield _at(row, f"{row.ran} ran")
    if not matching:
        named = list(dict.fromkeys(name for row in rows for name in row.names))
        some = ", ".join(named[:3])
        there = (
            f"the run has modules such as {some}"
            if named
            else "the trace has no modules (record the trace with with_stack=True)"
        )
        yield f"the pattern matches no call; {there}"


def _backends(row: LayerRow) -> set[str]:
    return set(row.ran.split(" and ")) if row.ran else set()


def _matches(row: LayerRow, glob: str) -> bool:
    """Return whether a pattern matches a module of the row by its full name or its last part.

    `*` also matches a row without modules.
    """
    names = [part for name in row.names for part in (name, name.rpartition(".")[2])]
    return any(fnmatchcase(name, glob) for name in names or [""])


def _at(row: LayerRow, text: str) -> str:
    parts = [row.module, row.config] if row.module else [row.config or row.kind]
    direction = "" if row.direction == "forward" else f" ({row.direction})"
    return f"{' '.join(filter(None, parts))}{direction}{f': {text}' if text else ''}"


def _changes(rows: Sequence[LayerRow]) -> list[str]:
    """Return a line for each module whose equal calls ran on different backends."""
    alike: dict[object, list[tuple[str, str]]] = {}
    for row in rows:
        if row.config is not None and row.ran:
            config = replace(any_length(parse_config(row.config), row.phase), bwd=False)
            for name in row.names or ("",):
                group = alike.setdefault((name, config, row.phase, row.direction), [])
                group.append((name or row.config, row.ran))
    changes = []
    for group in alike.values():
        ran = sorted({backend for _, backend in group})
        if len(ran) > 1:
            changes.append(f"{group[0][0]}: {' and '.join(ran)} ran for equal calls")
    return list(dict.fromkeys(changes))
