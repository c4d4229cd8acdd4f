"""The cases that `verify` derives from a config, and the row that records one check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from profharness.attention.config import Config
from profharness.columns import column
from profharness.errors import UsageError

AS_GIVEN = "as_given"
STANDARD = "standard"
NO_CASES = "none"
MAX_BATCH = 2  # maximum batch size of a derived case, which is enough to expose a fault
MAX_HEADS = 8


@dataclass(frozen=True, slots=True)
class VerificationRow:
    """The result of checking one tensor of one case on one backend."""

    run: Annotated[str, column(meaning="id of the run")]
    asked: Annotated[str, column(meaning="label of the config that the case was derived from")]
    config: Annotated[str, column(meaning="label of the case's config")]
    case: Annotated[str, column("case", importance="key", meaning="name of the case")]
    backend: Annotated[
        str, column("backend", importance="key", meaning="the backend that was checked")
    ]
    what: Annotated[
        str,
        column(
            "what",
            importance="answer",
            meaning="the checked tensor (`out`, `dq`, `dk` or `dv`), or `inputs` for the check that "
            "the inputs do not change",
        ),
    ]
    error: Annotated[
        float | None,
        column(
            "error",
            "short",
            importance="answer",
            meaning="largest absolute difference from the fp64 reference; null if it is not finite",
        ),
    ]
    allowance: Annotated[float | None, column("allowance", "short", meaning="the allowed error")]
    relative_error: Annotated[
        float | None,
        column(
            "relative",
            "short",
            importance="detail",
            meaning="Frobenius norm of the difference divided by the norm of the reference; null "
            "if it is not finite",
        ),
    ]
    relative_allowance: Annotated[
        float | None,
        column("allowance", "short", importance="detail", meaning="the allowed relative error"),
    ]
    passed: Annotated[
        bool | None,
        column(
            "verdict",
            importance="answer",
            meaning="whether the tensor passed the check; null if nothing was checked, for example "
            "because the backend refused the config",
        ),
    ]
    message: Annotated[str | None, column(meaning="what is wrong, or why nothing was checked")]
    status: Annotated[str, column(meaning="`ok`, `refused`, or the kind of failure")]


def _small(config: Config, **changes: Any) -> Config:
    """Return a small variant of the config, with few batch elements and heads and no explicit
    strides.

    The number of query heads per key head does not change. `changes` are applied last.
    """
    group = config.num_heads // config.num_kv_heads
    kv_heads = max(1, min(config.num_kv_heads, MAX_HEADS // group))
    small = replace(
        replace(config.contiguous(), layout=config.layout),
        batch=min(config.batch, MAX_BATCH),
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        kv_batch=None,
        mask_strides=None,
    )
    small = replace(small, **changes)
    if not config.is_served:
        return small
    longest, shortest = small.seq_len_kv, -(-small.seq_len_kv // 3)
    lens = ((shortest, 1), (longest, 1)) if shortest < longest else None
    return replace(small, batch=MAX_BATCH, lens=lens)


Derive = Callable[[Config], Config | None]


def _sized(rows: int, columns: int) -> Derive:
    return lambda config: _small(config, seq_len_q=rows, seq_len_kv=columns)


def _grouped(divisor: int | None) -> Derive:
    """Return a function that derives a config with `divisor` query heads per key head. If `divisor`
    is None, all query heads share one key head.
    """

    def derive(config: Config) -> Config | None:
        heads = min(config.num_heads, MAX_HEADS)
        heads = heads if heads % 4 == 0 else 4
        kv_heads = 1 if divisor is None else heads // divisor
        if config.num_kv_heads == kv_heads == 1:
            return None
        return _small(config, num_heads=heads, num_kv_heads=kv_heads)

    return derive


def _laid_out(layout: str) -> Derive:
    return lambda config: _small(config, layout=layout, batch=MAX_BATCH)


def _narrower(change: int) -> Derive:
    def derive(config: Config) -> Config | None:
        head_dim, value_dim = config.head_dim - change, config.value_dim - change
        if min(head_dim, value_dim) < 1:
            return None
        own = None if head_dim == value_dim else value_dim
        return _small(config, head_dim=head_dim, head_dim_v=own)

    return derive


def _windowed(window: int) -> Derive:
    """Return a function that derives a config with a window of another size.

    The function applies only to configs with a window.
    """
    return lambda config: None if config.window is None else _small(config, window=window)


def _plain(config: Config) -> Config:
    return _small(config, layout="contiguous")


# Functions that derive the config of a case. A function returns None if the case does not apply.
_DERIVED: dict[str, Derive] = {
    "seq_1": _sized(1, 1),
    "seq_7": _sized(7, 7),
    "seq_127": _sized(127, 127),
    "seq_129": _sized(129, 129),
    "seq_1000": _sized(1000, 1000),
    "fewer_queries": _sized(33, 200),
    "more_queries": _sized(200, 33),
    "window_1": _windowed(1),
    "window_67": _windowed(67),
    "gqa": _grouped(2),
    "mqa": _grouped(None),
    "batch_stride_0": _laid_out("broadcast_batch"),
    "transposed": _laid_out("bshd"),
    "large_offset": _plain,
    "head_dim_less_8": _narrower(8),
    "head_dim_odd": _narrower(3),
    "large": _plain,
    "equal": _plain,
    "masked_row": lambda config: _plain(config) if config.mask != "none" else None,
}
CASES = (AS_GIVEN, *_DERIVED)
# the cases that apply to configs of serving engines, whose caches have only one layout
SERVED = ("seq_1", "seq_129", "fewer_queries", "window_1", "window_67", "large", "equal")
VALUES = {
    "large_offset": "tensors that start at element 1,048,576 of their storage",
    "large": "scores beyond the range of exp",
    "equal": "the same score for every key",
    "masked_row": "a query row that cannot attend to any key",
}
"""Cases with special inputs, and descriptions of these inputs. The inputs of all other cases are
normally distributed.
"""


def derive_cases(config: Config, names: Sequence[str]) -> list[tuple[str, Config]]:
    """Return the name and the config of each case. The first case is the config itself.

    `names` contains names of cases, `standard` (all cases) or `none` (only the config itself).
    Cases that do not apply to the config and duplicates are left out. Dropout is off in all cases
    because it makes the output random. Raise UsageError for an unknown name.
    """
    unknown = sorted(set(names) - {*CASES, STANDARD, NO_CASES})
    if unknown:
        raise UsageError(
            f"unknown case {unknown[0]!r}; choose from {STANDARD}, {NO_CASES}, {', '.join(CASES)}"
        )
    config = replace(config, dropout=0.0)
    cases = {(config, "normal"): AS_GIVEN}
    for name, derive in _DERIVED.items():
        if config.is_served and name not in SERVED:
            continue
        derived = derive(config) if STANDARD in names or name in names else None
        if derived is not None:
            cases.setdefault((derived, values_of(name)), name)
    return [(name, derived) for (derived, _), name in cases.items()]


def values_of(case: str) -> str:
    """Return the kind of inputs of a case, which is a key of VALUES or `normal`."""
    return case if case in VALUES else "normal"


def by_case(
    rows: Iterable[VerificationRow],
) -> dict[tuple[str, str, str, str], list[VerificationRow]]:
    """Group the checks by case: one case of a config on one backend in one run."""
    cases: dict[tuple[str, str, str, str], list[VerificationRow]] = {}
    for row in rows:
        cases.setdefault((row.run, row.asked, row.case, row.backend), []).append(row)
    return cases


def case_verdict(checks: Iterable[VerificationRow]) -> bool | None:
    """Return whether a case passed all its checks, or None if nothing was checked."""
    verdicts = {row.passed for row in checks} - {None}
    return all(verdicts) if verdicts else None


def failures(rows: Iterable[VerificationRow]) -> list[VerificationRow]:
    """Return the rows whose check failed. A backend counts as wrong if any of its checks failed."""
    return [row for row in rows if row.passed is False]
