"""The smallest change that makes a backend take a config: a search over changes, in which every
answer comes from the oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from profharness.dispatch.changes import CHANGES, Change
from profharness.dispatch.perturb import Answer, Choose, Oracle
from profharness.dispatch.rewrite import SDP_BACKENDS, call_code

if TYPE_CHECKING:
    from profharness.config import Config

MOST = 3
DEEPEST = 6

FLEX = """\
import torch
from torch.nn.attention.flex_attention import flex_attention

bias = attn_mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])

def score_mod(score, b, h, i, j):
    return {score}

out = torch.compile(flex_attention)(q, k, v, score_mod=score_mod{arguments})"""


@dataclass(frozen=True)
class Advice:
    """One way for a backend to take a config: a sentence and code. config is the changed config's
    label, None where the grammar cannot say it. verified: asked again, with the change, the backend
    was eligible (None: could not be asked). choice: what `auto` takes then. steps: the names of the
    changes.
    """

    change: str
    code: str
    config: str | None = None
    verified: bool | None = None
    choice: str | None = None
    steps: tuple[str, ...] = ()


@dataclass(frozen=True)
class _State:
    config: Config
    answer: Answer
    steps: tuple[Change, ...] = ()
    sentences: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """The reason that stands in the way first."""
        return self.answer.reasons[0].code if self.answer.reasons else "no_text"


def advise(config: Config, backend: str, oracle: Oracle, choose: Choose) -> tuple[Advice, ...]:
    """At most three ways, of as few changes as there are; none where the backend runs anyhow, where
    nothing is known, or where no change helps.

    config's dtype must be filled in. Ways outside of the grammar have verified None and come last.
    """
    answer = oracle(config, backend)
    if answer.eligible is None:
        return ()
    if answer.eligible:
        return () if choose(config) == backend else (_name_it(config, backend),)
    start = _State(config, answer)
    ways = [
        _told(start.config, state, backend, choose) for state in _search(start, backend, oracle)
    ]
    return (*ways, *_outside(start, backend))[:MOST]


def _search(start: _State, backend: str, oracle: Oracle) -> list[_State]:
    """Breadth first, so that the fewest changes come first. Only the reason that PyTorch stops at
    has to be removed: without that, nothing else can help.
    """
    seen = {start.config}
    level = [start]
    for _ in range(DEEPEST):
        following = [
            state for before in level for state in _steps_from(before, backend, oracle, seen)
        ]
        found = [state for state in following if state.answer.eligible]
        if found:
            return found
        level = [state for state in following if state.answer.eligible is False]
    return []


def _steps_from(before: _State, backend: str, oracle: Oracle, seen: set[Config]) -> list[_State]:
    states: list[_State] = []
    served: set[str] = set()  # groups of which one change has removed the reason
    for change in CHANGES:
        if before.code not in change.codes or change.group in served:
            continue
        config = change.apply(before.config)
        if config is None or config in seen:
            continue
        seen.add(config)
        sentence = change.sentence(before.config, config)
        state = _State(
            config,
            oracle(config, backend),
            (*before.steps, change),
            (*before.sentences, sentence),
        )
        if change.group and (state.answer.eligible or state.code != before.code):
            served.add(change.group)
        states.append(state)
    return states


def _told(config: Config, state: _State, backend: str, choose: Choose) -> Advice:
    """Where auto takes another backend even then, the code also names the wanted one."""
    choice = choose(state.config)
    named = None if choice == backend else backend
    sentences = list(state.sentences)
    if named:
        sentences.append(f"then name {backend} with sdpa_kernel, since auto takes {choice}")
    return Advice(
        change="; ".join(sentences),
        code=call_code(config, state.config, named),
        config=state.config.label,
        verified=True,
        choice=choice,
        steps=tuple(change.name for change in state.steps),
    )


def _name_it(config: Config, backend: str) -> Advice:
    """Eligible, but not what auto takes. The one verified way: asked under sdpa_kernel it is."""
    name = SDP_BACKENDS[backend]
    return Advice(
        change=f"nothing to change: {backend} can take it, but auto prefers another; allow {backend} alone with "
        "sdpa_kernel (PyTorch 2.8 and newer: or put it first and keep the others as a fallback, with "
        f"sdpa_kernel([SDPBackend.{name}, SDPBackend.MATH], set_priority=True))",
        code=call_code(config, config, backend),
        config=config.label,
        verified=True,
        choice=backend,
        steps=("name it",),
    )


def _flex(config: Config, _: str) -> tuple[str, str]:
    boolean = config.mask.startswith("bool")
    score = (
        'torch.where(bias[b, h, i, j], score, -float("inf"))'
        if boolean
        else "score + bias[b, h, i, j]"
    )
    arguments = "" if config.scale is None else f", scale={config.scale!r}"
    arguments += ", enable_gqa=True" if config.num_kv_heads != config.num_heads else ""
    return (
        "keep the mask and call flex_attention, which takes any mask (its own kernels, not those of flash)",
        FLEX.format(score=score, arguments=arguments),
    )


def _switch(_: Config, backend: str) -> tuple[str, str]:
    name = {"efficient": "mem_efficient"}.get(backend, backend)
    code = f"import torch\n\ntorch.backends.cuda.enable_{name}_sdp(True)"
    return f"{backend} is switched off in this process; switch it on", code


def _four_d(config: Config, _: str) -> tuple[str, str]:
    lines = call_code(config, config).split("\n")
    lines.insert(3, "q, k, v = (each.unsqueeze(0) for each in (q, k, v))")
    return "give 3-D inputs a batch dimension", "\n".join([*lines, "out = out.squeeze(0)"])


# Reasons with a way that no config can say.
OUTSIDE: dict[str, Callable[[Config, str], tuple[str, str]]] = {
    "mask": _flex,
    "runtime_disabled": _switch,
    "not_4d": _four_d,
}


def _outside(state: _State, backend: str) -> tuple[Advice, ...]:
    make = OUTSIDE.get(state.code)
    if make is None or (make is _flex and (state.config.causal or state.config.dropout)):
        return ()
    sentence, code = make(state.config, backend)
    return (Advice(sentence, code, steps=(make.__name__.strip("_"),)),)
