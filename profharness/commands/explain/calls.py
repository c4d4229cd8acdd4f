"""Find the attention calls of a run whose backends PyTorch chose, or its configs, and explain them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from profharness.atlas.predictions import assumed_release
from profharness.attention.config import AUTO, Config, held_configs_text, parse_config
from profharness.attention.dispatch.advice import IN_BF16
from profharness.attention.dispatch.by_rule import Explanation, Platform, explain_by_rule, settle
from profharness.attention.dispatch.machine import machine_of, rules_know
from profharness.commands.explain.savings import main_change, matters
from profharness.errors import NotFoundError
from profharness.measurements.agreement import backend_seen, times_of_auto
from profharness.program.layer_map import (
    AUTOCAST_CODE,
    FP32_PRODUCTS,
    LayerMap,
    LayerRow,
    allowed_setting,
    find_layers,
    is_explained,
    no_choice,
    short_module,
)
from profharness.rows import CellRow, KernelRow, preferred_profiler_rows
from profharness.store import Selection, open_store
from profharness.units import share_text

LENGTH_SPREAD = 0.1
"""Calls have one mean time if the longest is at most this much longer than the shortest."""
WITHOUT_CHOICE = ("eager", "flex", "custom", "fast_path")
"""Kinds of calls for which PyTorch chooses no backend."""


@dataclass(frozen=True)
class Call:
    """Equal attention calls of a program, and the backend that ran."""

    config: Config
    ran: str
    asked: str
    """`auto`, or the set of backends that the program allowed."""
    modules: tuple[str, ...]
    mean_ns: float | None = None
    """The mean kernel time of a call. None if the run does not contain the kernels."""
    doubt: str | None = None
    """The reason why the config does not fully describe the calls. None if it does."""

    def explain(self, platform: Platform, backends: Sequence[str], *, advice: bool) -> Explanation:
        """Return the explanation of the config, with the backend that ran and its time.

        If the config does not fully describe the calls, the rules decide their backend only if they
        predict the one that ran.
        """
        answer = replace(
            explain_by_rule(
                self.config, platform, backends=backends, advice=advice, asked=self.asked
            ),
            observed=self.ran,
            observed_ns=self.mean_ns,
        )
        if self.doubt is not None and answer.predicted != self.ran:
            doubt = f"The config does not fully describe the calls: {self.doubt}."
            answer = replace(answer, predicted="unknown", caveats=(*answer.caveats, doubt))
        return settle(answer)


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
    change: str = ""
    """The change after which PyTorch chooses the backends of calls that are not explained."""
    assumes: str = ""
    """A sentence on what the saving in `change` assumes, or ""."""
    code: str = ""
    """The code of the change."""
    shown_by: str = ""
    """The command that shows the attention of the run."""
    autocast: bool = False
    """Whether the program has matrix products that bf16 would speed up like its attention."""
    captured: RunConfigs | None = None
    """The configs of a run of `capture` or of a similar command, or None for a program."""

    def explain(
        self, platform: Platform, backends: Sequence[str] = (), *, advice: bool = True
    ) -> list[Explanation]:
        """Return an explanation per call, with the backend that ran."""
        answers = [call.explain(platform, backends, advice=advice) for call in self.calls]
        return list(map(_with_autocast, answers)) if self.autocast else answers


@dataclass(frozen=True)
class RunConfigs:
    """The configs of a run of `capture` or of a similar command, and where they ran."""

    name: str
    configs: tuple[Config, ...]
    gpu: str | None
    platform: Platform | None
    """The GPU and the release of the run, or None if the rules do not cover them."""
    times_of_auto: Mapping[str, float] = field(default_factory=dict)
    """The measured kernel times of `auto` by config, in ns, for configs where they are known."""


def find_calls(
    store: Path, run: str | None, configs: Sequence[Config] = ()
) -> ProgramCalls | RunConfigs:
    """Return the attention calls of a program or of `auto`, or the configs of a run without them.

    If `configs` are given, return only calls of these configs. If PyTorch chose none of the
    backends, the result has no calls, but the reasons. Raise NotFoundError if the run has no
    attention or lacks one of `configs`, or if it is unknown what PyTorch chose from.
    """
    with open_store(store) as opened:
        name = opened.find_run(Selection(run), "attention calls or configs")
        if not opened.has(name, "attention calls") and (cells := opened.cells(name)):
            opened.require_cells(name, configs)
            cells = [cell for cell in cells if _is_named(parse_config(cell.config), configs)]
            kernels = opened.kernels(name)
            own = run_configs(
                opened.run_name(name),
                [cell.config for cell in cells],
                opened.environment(name),
                times_of_auto(cells, kernels),
            )
            calls = _captured_calls(cells, kernels, own.times_of_auto)
            if len(calls) < len(own.configs):
                return own
            return ProgramCalls(name, own.name, calls, own.gpu, own.platform, captured=own)
        layers = find_layers(opened, name, assume=assumed_release)
    program = program_calls(layers)
    if not program.calls and (change := main_change(layers)):
        saves, assumes = f", {change.saving}" if change.saves else "", change.assumes
        if not matters(layers):
            share = share_text(layers.attention_ns / layers.gpu_ns)
            saves = f"; it would save little, because attention takes {share} of the GPU time"
            assumes = ""
        text = ". ".join(filter(None, [f"{change.text}{saves}", change.then]))
        return replace(program, change=text, assumes=assumes, code=change.code)
    if not program.calls and not all(row.kind in WITHOUT_CHOICE for row in layers.rows):
        raise NotFoundError(
            f"the dispatch rules explain no call of run {layers.name}: {'; '.join(program.left_out)}; "
            f"to show its attention, use: {layers.command('layers')}"
        )
    return _of_configs(program, configs)


def _of_configs(program: ProgramCalls, configs: Sequence[Config]) -> ProgramCalls:
    """Return only the calls of `configs`, or all calls if it is empty.

    Raise NotFoundError if one of `configs` has no call.
    """
    held = list(dict.fromkeys(call.config for call in program.calls))
    for config in configs:
        if held and not any(map(config.matches, held)):
            labels = held_configs_text(config, [each.label for each in held])
            raise NotFoundError(f"run {program.name} has no attention call of {config}; {labels}")
    calls = tuple(call for call in program.calls if _is_named(call.config, configs))
    return replace(program, calls=calls)


def _is_named(config: Config, configs: Sequence[Config]) -> bool:
    """Return whether a config is one of `configs`, or whether `configs` is empty."""
    return not configs or any(wanted.matches(config) for wanted in configs)


def _captured_calls(
    cells: Sequence[CellRow], rows: Sequence[KernelRow], times: Mapping[str, float]
) -> tuple[Call, ...]:
    """Return the calls that `auto` computed in a run of `capture`. `times` are those of their kernels."""
    calls: dict[str, Call] = {}
    rows_of: dict[str | None, list[KernelRow]] = {}
    for row in preferred_profiler_rows(rows):
        rows_of.setdefault(row.cell, []).append(row)
    for cell in cells:
        ran = backend_seen(cell, rows_of.get(cell.cell, [])) if cell.backend == AUTO else None
        if ran is not None:
            config = parse_config(cell.config)
            calls.setdefault(cell.config, Call(config, ran, AUTO, (), times.get(cell.config)))
    return tuple(calls.values())


def program_calls(layers: LayerMap) -> ProgramCalls:
    """Return the attention calls of a layer map whose backends PyTorch chose."""
    rows_of: dict[tuple[str, str, str], list[LayerRow]] = {}
    for row in layers.rows:
        if is_explained(row) and (asked := allowed_setting(row.asked)):
            key = (str(row.config), str(row.ran), asked)
            rows_of.setdefault(key, []).append(row)
    calls = (
        Call(
            parse_config(config),
            ran,
            asked,
            tuple(dict.fromkeys(filter(None, (short_module(row.module) for row in rows)))),
            mean_ns(rows),
            next(filter(None, map(_doubt, rows)), None),
        )
        for (config, ran, asked), rows in rows_of.items()
    )
    return ProgramCalls(
        layers.run,
        layers.name,
        tuple(calls),
        layers.gpu,
        layers.platform,
        layers.assumed,
        tuple(_left_out(layers)),
        shown_by=layers.command("layers"),
        autocast=any(work.kind == FP32_PRODUCTS for work in layers.notable_work),
    )


def _with_autocast(answer: Explanation) -> Explanation:
    """Return an explanation that advises torch.autocast if only the dtype prevents a backend.

    Casting the inputs of attention alone would leave the rest of the model in fp32.
    """
    sides = (
        replace(
            side,
            advice=tuple(
                replace(advice, code=AUTOCAST_CODE)
                if advice.steps == IN_BF16 and advice.choice == side.backend
                else advice
                for advice in side.advice
            ),
        )
        for side in answer.backends
    )
    return replace(answer, backends=tuple(sides))


def mean_ns(rows: Sequence[LayerRow]) -> float | None:
    """Return the mean kernel time of a call, in the forward and the backward pass.

    Forward passes that checkpointing repeats are no calls of their own. Return None if the time is
    unknown, or if the lengths of the calls differ by more than LENGTH_SPREAD, because the config
    describes only the call with the median length.
    """
    rows = [row for row in rows if row.direction != "recompute"]
    lengths = [row.lengths for row in rows if row.lengths is not None]
    if len(lengths) < len(rows):
        return None
    if any(longest > (1 + LENGTH_SPREAD) * shortest for shortest, longest in lengths):
        return None
    if not rows or any(row.forward_ns is None or not row.calls for row in rows):
        return None
    # The times and the calls of a row are means per step of its phase.
    total = sum(((row.forward_ns or 0) + (row.backward_ns or 0)) * (row.steps or 1) for row in rows)
    return total / sum((row.calls or 0) * (row.steps or 1) for row in rows)


def _doubt(row: LayerRow) -> str | None:
    """Return the reason why the config of a row does not fully describe its calls, or None."""
    if row.replayable:
        return None
    reasons = [reason for reason in row.reasons if reason != row.why]
    return reasons[0] if reasons else "some calls differ from the config"


def run_configs(
    name: str,
    labels: Sequence[str],
    environment: Mapping[str, Any],
    times: Mapping[str, float],
) -> RunConfigs:
    """Return the distinct configs of a run, and the platform that its environment describes.

    `times` are the measured kernel times of `auto` by config, in ns.
    """
    configs = tuple(parse_config(label) for label in dict.fromkeys(labels))
    gpu = environment.get("gpu")
    if not rules_know(environment):
        return RunConfigs(name, configs, gpu, None, times)
    device = str(environment["device_type"])
    # pinned is false, because the environment records the actual version of cuDNN
    platform = Platform(machine_of(environment), device, gpu, pinned=False)
    return RunConfigs(name, configs, gpu, platform, times)


def _left_out(layers: LayerMap) -> Iterator[str]:
    rows = [row for row in layers.rows if not is_explained(row)]
    yield from dict.fromkeys(map(_why_not, rows))


def _why_not(row: LayerRow) -> str:
    if row.ran == "none":
        return "a call raised an error"
    return no_choice(row) or "; ".join(row.reasons[:1]) or "the backend is unknown"
