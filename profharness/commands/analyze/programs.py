"""Analyze a traced program: groups of equal attention calls as cells, with the kernels of one call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from profharness.attention.config import Config, parse_config
from profharness.commands.analyze.cells import (
    ANALYZED,
    MEASURE,
    SOURCES,
    analyze_cell,
    analyze_stored,
    measure_here,
    peaks_source,
)
from profharness.commands.analyze.figures import CellAnalysis, RunMachine, run_machine
from profharness.devices import Device, occupancy
from profharness.errors import NotFoundError
from profharness.files import shell_command
from profharness.program.layer_map import (
    actual_backend,
    group_calls,
    median_config,
    merge_numbered,
    module_names,
)
from profharness.program.roles import AUTOGRAD
from profharness.rows import TORCH, CallKernel, CallRow, CellRow, KernelRow
from profharness.store import ALL_RUNS, Selection, open_store

PROFILER = TORCH  # its traces contain calls; nsys would give the same figures


def selected_program(path: Path, selection: Selection) -> str | None:
    """Return the selected run if it is a program with attention calls, traced or counted, and no
    capture. None also for configs without a run, which refer to captures. Raise NotFoundError.
    """
    if selection.run == ALL_RUNS or (selection.run is None and selection.configs):
        return None
    with open_store(path) as store:
        run = store.find_run(replace(selection, configs=()), *ANALYZED)
        foreign = not store.cells(run) and store.has(run, "attention calls")
    return run if foreign else None


def analyze_selected(
    path: Path, selection: Selection, peaks: str | None, say: Callable[[str], None]
) -> list[CellAnalysis]:
    """Analyze like `analyze_stored`, for programs as well."""
    program = selected_program(path, selection)
    if program is None or peaks not in (None, *SOURCES):
        return analyze_stored(path, selection, peaks)
    if peaks == MEASURE:
        measure_here(path, [program])
    return analyze_program(path, program, selection, peaks, say)


def analyze_program(
    path: Path,
    run: str,
    selection: Selection,
    peaks: str | None,
    say: Callable[[str], None],
) -> list[CellAnalysis]:
    """Analyze groups of a program's calls that match the selected configs and backends. `peaks` as
    in `analyze_stored`. Call `say` with the reason if some calls have no figures. Raise
    NotFoundError if none have.
    """
    configs, backends = selection.configs, selection.backends
    with open_store(path) as store:
        devices, roofs = store.devices(run), store.peaks(run, peaks_source(peaks))
        machine = run_machine(store.environment(run), devices, roofs)
        groups = group_calls(store.calls(run))
    if not groups:
        raise NotFoundError(
            f"run {run} has no recorded step, so its calls have no kernels and times to analyze; "
            "record one with `profharness observe --profiler torch --warmup 0 -- PROGRAM`; what was "
            f"counted: {shell_command('layers', run, store=path)}"
        )
    analyses, left_out = [], []
    for number, group in enumerate(groups, start=1):
        config = median_config([parse_config(call.config) for call in group if call.config])
        if configs and not (config and any(wanted.matches(config) for wanted in configs)):
            continue
        if backends and actual_backend(group[0]) not in backends:
            continue
        module = merge_numbered(module_names(group))
        own = [call for call in group if config and call.config == config.label and call.kernels]
        why = _unknown(group[0], config, own)
        if why or config is None:
            left_out.append(f"{module or group[0].op} has no figures: {why}")
            continue
        analyses.append(_analysis(f"calls-{number}", config, module, own, machine))
    if not analyses:
        named = [*(config.label for config in configs), *backends]
        criteria = f" of {', '.join(named)}" if named else ""
        why = "; ".join(left_out) or "`profharness layers` lists those there are"
        raise NotFoundError(f"run {run} has no attention call{criteria} to analyze: {why}")
    for text in left_out:
        say(text)
    return analyses


def _unknown(call: CallRow, config: Config | None, own: Sequence[CallRow]) -> str | None:
    """Return why the FLOPs or the time of calls are unknown. Eager attention computes masked scores
    too.
    """
    if config is None or (call.reason and call.kind != "eager"):
        return call.reason or "no config says what was computed"
    return None if own else "no kernel of these calls is in the trace"


def _analysis(
    cell: str, config: Config, module: str | None, calls: Sequence[CallRow], machine: RunMachine
) -> CellAnalysis:
    """Return the analysis of calls of one config, by the median time of one call."""
    first = calls[0]
    backward = all(any(k.direction == "backward" for k in call.kernels) for call in calls)
    config = replace(config, bwd=config.bwd and backward)
    kept = [
        replace(call, kernels=tuple(k for k in call.kernels if _counts(k, config)))
        for call in calls
    ]
    name = actual_backend(first) or first.kind
    rows = _kernel_rows(cell, config, name, kept, machine.device)
    times = tuple(sum(kernel.total_ns for kernel in call.kernels) for call in kept)
    row = CellRow(
        run=first.run,
        cell=cell,
        config=config.label,
        backend=name,
        status="ok",
        message=None,
        choice=None,
        sdpa_op=first.sdpa_op,
        iterations=len(kept),
        refusals=(),
        warnings=(),
        samples={"kernel": (round(median(times)),)},
    )
    analysis = analyze_cell(row, rows, machine, written_out=first.kind == "eager")
    return replace(analysis, module=module)


def _counts(kernel: CallKernel, config: Config) -> bool:
    """Return whether a kernel belongs to the work that the config describes."""
    return config.bwd or kernel.direction != "backward"


def _kernel_rows(
    cell: str, config: Config, backend: str, calls: Sequence[CallRow], device: Device | None
) -> list[KernelRow]:
    """Return the calls' kernels in launch order, one row per launch configuration and direction."""
    groups: dict[CallKernel, list[CallKernel]] = {}
    for kernel in (kernel for call in calls for kernel in call.kernels):
        groups.setdefault(kernel._replace(launches=0, total_ns=0), []).append(kernel)
    whole = sum(kernel.total_ns for group in groups.values() for kernel in group)
    return [
        _kernel_row(calls[0].run, cell, config, backend, group, len(calls), whole, place, device)
        for place, group in enumerate(groups.values())
    ]


def _kernel_row(
    run: str,
    cell: str,
    config: Config,
    backend: str,
    group: Iterable[CallKernel],
    calls: int,
    whole_ns: int,
    place: int,
    device: Device | None,
) -> KernelRow:
    """Return one kernel row. Calls store sums over launches, so its time is a mean. Any kernel that
    autograd launched is a backward kernel, whichever op launched it.
    """
    same = list(group)
    first = same[0]
    launches, total = sum(k.launches for k in same), sum(k.total_ns for k in same)
    fit = None
    if device and first.block and None not in (first.registers_per_thread, first.shared_bytes):
        threads = math.prod(first.block)
        fit = occupancy(threads, first.registers_per_thread or 0, first.shared_bytes or 0, device)
    mean = round(total / launches) if launches else None
    return KernelRow(
        run=run,
        config=config.label,
        backend=backend,
        cell=cell,
        profiler=PROFILER,
        status="ok",
        range=None,
        kernel=first.kernel,
        kernel_short=first.kernel_short,
        kernel_kind=first.kernel_kind,
        family=first.family,
        grid=first.grid,
        block=first.block,
        registers_per_thread=first.registers_per_thread,
        static_shared_bytes=None,
        dynamic_shared_bytes=None,
        shared_bytes=first.shared_bytes,
        launches=launches,
        launches_per_call=launches / calls,
        duration_ns=mean,
        total_ns=total,
        min_ns=mean,
        max_ns=mean,
        share=total / whole_ns if whole_ns else None,
        first_ns=place,
        op_path=AUTOGRAD if first.direction == "backward" else None,
        sdpa_op=None,
        occupancy=fit.fraction if fit else None,
        occupancy_limiter=fit.limiter if fit else None,
        shared_share=fit.shared_share if fit else None,
        device=0,
    )
