"""Find every property of a config that prevents a backend from computing it.

PyTorch stops at its first failing check. Therefore each property is tried alone, on a config whose
other properties are accepted by every backend. Then pairs and larger sets of properties are tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from profharness.attention.config import Config, SdpaSetting
from profharness.attention.dispatch.machine import AttentionParams, Machine, from_config, permitted
from profharness.attention.dispatch.predict import Eligibility, judge, predict
from profharness.device_types import CUDA
from profharness.rows import Refusal

EASY_DIM = 64
EASY_LENGTH = 32  # a multiple of 8 that is greater than 1 and not 64 modulo 128
EASY_HEADS = 8
EASY_GROUP = 4
LARGEST_SET = 3
Oracle = Callable[[Config, str], Eligibility]
"""A function that returns whether a backend accepts a config. PyTorch's first reason against the
backend comes first. An oracle queries either PyTorch or the rules.
"""
ChoiceFunction = Callable[[Config], str]
"""A function that returns the backend that `auto` selects for a config, `none` (PyTorch raises) or
`unknown`.
"""


@dataclass(frozen=True)
class Blocker:
    """A set of properties that together prevent a backend. The set is empty if the backend refuses
    even the easy config, because then no change of the config can help.
    """

    properties: tuple[str, ...]
    reason: Refusal


def rounded_up(number: int, multiple: int = 8) -> int:
    """Round a number up to a multiple, for example 100 to 104."""
    return -(-number // multiple) * multiple


def with_dims(config: Config, head_dim: int, value_dim: int) -> Config:
    """Return the config with these head dims. If they are equal, head_dim_v is None, as in a parsed
    config.
    """
    return replace(
        config, head_dim=head_dim, head_dim_v=None if value_dim == head_dim else value_dim
    )


def _easy_remainder(config: Config) -> Config:
    head_dim = rounded_up(config.head_dim)
    return with_dims(config, head_dim, head_dim if config.head_dim_v is None else config.value_dim)


def _easy_size(config: Config) -> Config:
    """Return the config with a head_dim of 57 to 64, or of 121 to 128 if head_dim_v is 64. The
    remainder of head_dim modulo 8 is kept.
    """
    easy = EASY_DIM * (2 if config.head_dim_v == EASY_DIM else 1)
    head_dim = easy - (-config.head_dim % 8)
    return with_dims(config, head_dim, config.head_dim_v or head_dim)


def _easy_heads(config: Config) -> Config:
    """Return the config with at most 8 heads. Grouped heads stay grouped."""
    if config.num_heads <= EASY_HEADS:
        return config
    kv_heads = min(config.num_kv_heads, 2)
    group = min(config.num_heads // config.num_kv_heads, EASY_GROUP)
    return replace(config, num_heads=kv_heads * group, num_kv_heads=kv_heads)


# The order is that in which a config is made easy: the remainder of head_dim is read before its
# size is changed. The order also decides which of several reasons comes first.
PROPERTIES: dict[str, Callable[[Config], Config]] = {
    "dtype": lambda c: replace(c, dtype="fp16"),
    "mask": lambda c: replace(c, mask="none", mask_shape=None, mask_strides=None),
    "dropout": lambda c: replace(c, dropout=0.0),
    "causal": lambda c: replace(c, causal=False),
    "deterministic": lambda c: replace(c, deterministic=False),
    "bwd": lambda c: replace(c, bwd=False),
    "layout": Config.contiguous,
    "kv_batch": lambda c: replace(c, kv_batch=None),
    "kv_heads": lambda c: replace(c, num_kv_heads=c.num_heads),
    "heads": _easy_heads,
    "head_dim_v": lambda c: replace(c, head_dim_v=None),
    "head_dim remainder": _easy_remainder,
    "head_dim": _easy_size,
    "lengths": lambda c: replace(c, seq_len_q=EASY_LENGTH, seq_len_kv=EASY_LENGTH),
    "batch": lambda c: replace(c, batch=min(c.batch, 2)),
}
"""Functions that set one property to a value that every backend accepts."""


def make_easy(config: Config, names: Collection[str]) -> Config:
    """Return the config with each of these properties set to its easy value."""
    for name, ease in PROPERTIES.items():
        if name in names:
            config = ease(config)
    return config


def keep_only(config: Config, names: Collection[str]) -> Config:
    """Return the config with all properties except these set to their easy values."""
    return make_easy(config, PROPERTIES.keys() - set(names))


def difficult_properties(config: Config) -> tuple[str, ...]:
    """Return the properties in which a config differs from an easy one."""
    return tuple(name for name, ease in PROPERTIES.items() if ease(config) != config)


def blockers(config: Config, backend: str, oracle: Oracle) -> tuple[Blocker, ...]:
    """Return everything that prevents `backend`, starting with PyTorch's first reason. If all of
    these properties are made easy, the backend accepts the config.

    The reason of each blocker is the one that applies if the properties of all other blockers are
    made easy. Return nothing if the backend is eligible, or if its eligibility is unknown.
    """
    verdict = oracle(config, backend)
    if verdict.eligible is not False:
        return ()
    easy = oracle(keep_only(config, ()), backend)
    if easy.eligible is not True:
        return (Blocker((), _first(easy if easy.eligible is False else verdict)),)

    def refusal(changed: Config) -> Refusal | None:
        answer = oracle(changed, backend)
        return _first(answer) if answer.eligible is False else None

    # A set is kept only if the backend still refuses the config after the properties of all other
    # sets are made easy. For example, a reason against an fp16 config may not exist in fp32.
    sets = _alone(config, refusal)
    involved = {name for names in sets for name in names}
    standing_blockers = [
        Blocker(names, reason)
        for names in sets
        if (reason := refusal(make_easy(config, involved - set(names)))) is not None
    ]
    standing_blockers += _left_over(
        config, {name for item in standing_blockers for name in item.properties}, refusal
    )
    first = _first(verdict)
    for index, blocker in enumerate(standing_blockers):
        if blocker.reason.code == first.code:
            return (
                replace(blocker, reason=first),
                *standing_blockers[:index],
                *standing_blockers[index + 1 :],
            )
    return tuple(standing_blockers)


def _first(answer: Eligibility) -> Refusal:
    if answer.reasons:
        return answer.reasons[0]
    return Refusal("no_text", "PyTorch gave no reason.", "inferred")


_Ask = Callable[[Config], Refusal | None]
"""A function that returns why the backend refuses a config. It returns None if the backend accepts
the config or if its eligibility is unknown.
"""


def _alone(config: Config, refusal: _Ask) -> list[tuple[str, ...]]:
    """Return the minimal sets of properties with which an easy config is refused."""
    names = difficult_properties(config)
    sets: list[tuple[str, ...]] = [(name,) for name in names if refusal(keep_only(config, (name,)))]
    rest = [name for name in names if (name,) not in sets]
    for size in range(2, LARGEST_SET + 1):
        if not refusal(keep_only(config, rest)):
            break
        for group in itertools.combinations(rest, size):
            if any(set(smaller) <= set(group) for smaller in sets):
                continue
            if refusal(keep_only(config, group)):
                sets.append(group)
    return sets


def _left_over(config: Config, gone: set[str], refusal: _Ask) -> Iterator[Blocker]:
    """Yield the reasons that remain after the properties found so far are made easy. To find the
    cause of a reason, make the other properties easy one by one, as long as the backend still
    refuses the config.
    """
    while (reason := refusal(make_easy(config, gone))) is not None:
        needed = [name for name in difficult_properties(config) if name not in gone]
        without = set(gone)
        for name in list(needed):
            if refusal(make_easy(config, without | {name})):
                without.add(name)
                needed.remove(name)
        if not needed:
            return
        yield Blocker(tuple(needed), refusal(make_easy(config, without)) or reason)
        gone = gone | set(needed)


def rule_oracle(
    machine: Machine,
    device: str = CUDA,
    adjust: Callable[[AttentionParams], AttentionParams] = lambda params: params,
) -> Oracle:
    """Return an oracle that applies the rules. `adjust` can set parameters that a config does not
    contain, such as runtime flags.
    """

    def ask(config: Config, backend: str) -> Eligibility:
        verdict = judge(backend, adjust(from_config(config, device)), machine)
        return Eligibility(verdict.eligible, verdict.certain or verdict.reasons, verdict.certain)

    return ask


def rule_choice(
    machine: Machine, device: str = CUDA, setting: SdpaSetting | None = None
) -> ChoiceFunction:
    """Return a function that predicts which backend PyTorch selects under `auto`, or under
    `setting` if it is given.
    """
    return lambda config: predict(permitted(from_config(config, device), setting), machine).choice
