"""Find the attention calls of a run whose backends PyTorch chose, and explain the choices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from profharness.atlas.predictions import assumed_release
from profharness.attention.config import Config, parse_config
from profharness.attention.dispatch.by_rule import Explanation, Platform, explain_by_rule, settle
from profharness.errors import NotFoundError
from profharness.program.layer_map import (
    NO_CHOICE,
    LayerMap,
    LayerRow,
    allowed_setting,
    find_layers,
    is_explained,
    short_module,
)
from profharness.store import Selection, open_store


@dataclass(frozen=True)
class Call:
    """Equal attention calls of a program, and the backend that ran."""

    config: Config
    ran: str
    asked: str
    """`auto`, or the set of backends that the program allowed."""
    modules: tuple[str, ...]


@dataclass(frozen=True)
class ProgramCalls:
    """The attention calls of a run whose backends PyTorch chose."""

    run: str
    name: str
    calls: tuple[Call, ...]
    gpu: str | None
    platform: Platform | None
    """The GPU and the release of the program, or None if one of them is unknown."""
    assumed: str = ""
    """A sentence about the release of the platform, if the run does not record it."""
    left_out: tuple[str, ...] = ()
    """The reasons why other calls are not explained."""

    def explain(
        self, platform: Platform, backends: Sequence[str] = (), *, advice: bool = True
    ) -> list[Explanation]:
        """Return an explanation per call, with the backend that ran."""
        return [
            settle(
                replace(
                    explain_by_rule(
                        call.config, platform, backends=backends, advice=advice, asked=call.asked
                    ),
                    observed=call.ran,
                )
            )
            for call in self.calls
        ]


def find_calls(store: Path, run: str) -> ProgramCalls:
    """Return the attention calls of a run.

    Raise NotFoundError if the run has no attention, or if PyTorch chose none of its backends.
    """
    with open_store(store) as opened:
        name = opened.find_run(Selection(run), "attention calls")
        layers = find_layers(opened, name, assume=assumed_release)
    modules: dict[tuple[str, str, str], dict[str, None]] = {}
    for row in layers.rows:
        if is_explained(row) and (asked := allowed_setting(row.asked)):
            key = (str(row.config), str(row.ran), asked)
            modules.setdefault(key, {})[short_module(row.module) or ""] = None
    left_out = tuple(_left_out(layers))
    if not modules:
        raise NotFoundError(
            f"the dispatch rules explain no call of run {layers.name}: {'; '.join(left_out)}; show its "
            "attention with: "
            f"{layers.command('layers')}"
        )
    calls = (
        Call(parse_config(config), ran, asked, tuple(filter(None, names)))
        for (config, ran, asked), names in modules.items()
    )
    return ProgramCalls(
        layers.run, layers.name, tuple(calls), layers.gpu, layers.platform, layers.assumed, left_out
    )


def _left_out(layers: LayerMap) -> Iterator[str]:
    rows = [row for row in layers.rows if not is_explained(row)]
    yield from dict.fromkeys(map(_why_not, rows))


def _why_not(row: LayerRow) -> str:
    if row.ran == "none":
        return "a call raised an error"
    return NO_CHOICE.get(row.kind) or "; ".join(row.reasons[:1]) or "the backend is unknown"
