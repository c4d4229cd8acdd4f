"""What `verify` checks: the cases derived from a config, what came of each check as a row, and
which rows make a backend wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from profharness.config import Config
from profharness.errors import UsageError

AS_GIVEN = "as_given"
STANDARD = "standard"
NONE = "none"
VALUES = ("normal", "large", "equal", "large_offset", "masked_row")


MAX_BATCH = 2  # in derived cases: what goes wrong with a shape shows in two of a batch
MAX_HEADS = 8


@dataclass(frozen=True)
class Case:
    """One problem to verify. values says how the inputs differ from normally distributed ones:
    `large` has scores far beyond what exp can take, `equal` the same score for every key,
    `large_offset` tensors that begin 1 MiB elements into their storage, `masked_row` a query row
    that may attend to no key.
    """

    name: str
    config: Config
    values: str = "normal"


@dataclass(frozen=True, slots=True)
class VerificationRow:
    """One check of one case on one backend.

    asked is the label of the config that the case was derived from, config its own. what is `out`
    `dq` `dk` `dv` or `inputs` (they come back unchanged). error is the largest absolute difference
    from the fp64 reference, relative_error the Frobenius norm of the difference over that of the
    reference; None where it is not a finite number. passed is None where nothing was checked (a
    refusal, too little memory), with the reason in message.
    """

    run: str
    asked: str
    config: str
    case: str
    backend: str
    what: str
    error: float | None
    allowance: float | None
    relative_error: float | None
    relative_allowance: float | None
    passed: bool | None
    message: str | None
    status: str


def _small(config: Config) -> Config:
    """The config with no more batch and heads than show a mistake; heads per key head are kept."""
    group = config.num_heads // config.num_kv_heads
    kv_heads = max(1, min(config.num_kv_heads, MAX_HEADS // group))
    return replace(
        config,
        batch=min(config.batch, MAX_BATCH),
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
    )


def _seq(rows: int, columns: int) -> Callable[[Config], Config]:
    return lambda config: replace(_small(config), seq_len_q=rows, seq_len_kv=columns)


def _kv_heads(divisor: int | None) -> Callable[[Config], Config | None]:
    """Query heads over that many key heads each; None: over a single one."""

    def derive(config: Config) -> Config | None:
        heads = min(config.num_heads, MAX_HEADS)
        heads = heads if heads % 4 == 0 else 4
        kv_heads = 1 if divisor is None else heads // divisor
        small = replace(_small(config), num_heads=heads, num_kv_heads=kv_heads)
        return None if config.num_kv_heads == kv_heads == 1 else small

    return derive


def _layout(layout: str) -> Callable[[Config], Config]:
    return lambda config: replace(_small(config), layout=layout, batch=max(2, _small(config).batch))


def _head_dim(change: int) -> Callable[[Config], Config | None]:
    def derive(config: Config) -> Config | None:
        head_dim, value_dim = config.head_dim - change, config.value_dim - change
        if min(head_dim, value_dim) < 1:
            return None
        same = head_dim == value_dim
        return replace(_small(config), head_dim=head_dim, head_dim_v=None if same else value_dim)

    return derive


def _plain(config: Config) -> Config:
    return replace(_small(config), layout="contiguous")


def _with_mask(config: Config) -> Config | None:
    return _plain(config) if config.mask != "none" else None


_DERIVED: dict[str, tuple[Callable[[Config], Config | None], str]] = {
    "seq_1": (_seq(1, 1), "normal"),
    "seq_7": (_seq(7, 7), "normal"),
    "seq_127": (_seq(127, 127), "normal"),
    "seq_129": (_seq(129, 129), "normal"),
    "seq_1000": (_seq(1000, 1000), "normal"),
    "fewer_queries": (_seq(33, 200), "normal"),
    "more_queries": (_seq(200, 33), "normal"),
    "gqa": (_kv_heads(2), "normal"),
    "mqa": (_kv_heads(None), "normal"),
    "batch_stride_0": (_layout("broadcast_batch"), "normal"),
    "transposed": (_layout("bshd"), "normal"),
    "large_offset": (_plain, "large_offset"),
    "head_dim_less_8": (_head_dim(8), "normal"),
    "head_dim_odd": (_head_dim(3), "normal"),
    "large": (_plain, "large"),
    "equal": (_plain, "equal"),
    "masked_row": (_with_mask, "masked_row"),
}
CASES = (AS_GIVEN, *_DERIVED)


def derive_cases(config: Config, names: Sequence[str]) -> tuple[Case, ...]:
    """The cases of a config: itself, then those of the names that apply to it; each problem once.

    names are case names, `standard` for all, `none` for the config alone. Dropout is off in all of
    them: nothing could be expected of it. Raises UsageError for an unknown name.
    """
    unknown = sorted(set(names) - {*CASES, STANDARD, NONE})
    if unknown:
        raise UsageError(
            f"no case {unknown[0]!r}; known are {STANDARD}, {NONE}, {', '.join(CASES)}"
        )
    config = replace(config, dropout=0.0)
    found = [Case(AS_GIVEN, config)]
    for name, (derive, values) in _DERIVED.items():
        derived = derive(config) if STANDARD in names or name in names else None
        if derived is not None:
            found.append(Case(name, derived, values))
    seen: dict[tuple[Config, str], Case] = {}
    for case in found:
        seen.setdefault((case.config, case.values), case)
    return tuple(seen.values())


def values_of(case: str) -> str:
    """How the inputs of a case of that name are made."""
    return _DERIVED[case][1] if case in _DERIVED else "normal"


def failures(rows: Iterable[VerificationRow]) -> list[VerificationRow]:
    """The rows that make a backend wrong."""
    return [row for row in rows if row.passed is False]
