"""Analyze stored measurements: one cell, cells of runs, or the attention calls of a program."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from profharness import stats
from profharness.atlas.predictions import assumed_release
from profharness.attention.config import nearest_config, parse_config, pytorch_chooses
from profharness.attention.dispatch.by_rule import short_reason
from profharness.commands._output import hint, is_command_line
from profharness.commands.analyze.changes import (
    config_changes,
    launch_limit,
    program_changes,
    with_change,
)
from profharness.commands.analyze.figures import (
    FASTER,
    SEVERITIES,
    Analyses,
    CellAnalysis,
    Evidence,
    Finding,
    RunMachine,
    cell_figures,
    kernel_figures,
    main_kernel,
    phase_figures,
    run_machine,
)
from profharness.commands.analyze.remedies import bottleneck, remedies
from profharness.commands.analyze.rules import EAGER_RULES, RULES, kv_places, measured, us
from profharness.commands.explain.calls import run_configs
from profharness.device_types import CPU, CUDA
from profharness.devices import MEASURED, Device, launch_occupancy
from profharness.environment import gpu_name
from profharness.errors import (
    CaptureError,
    NotFoundError,
    UsageError,
    did_you_mean,
    with_clause,
)
from profharness.files import shell_command
from profharness.measurements.agreement import backend_that_ran, is_another, times_of_auto
from profharness.measurements.measurements import (
    basis_text,
    busy_text,
    is_disturbed,
    usable_times,
)
from profharness.program.layer_map import (
    actual_backend,
    find_layers,
    group_calls,
    median_config,
    merge_numbered,
    module_names,
)
from profharness.program.phases import Work, described_calls, mean_work
from profharness.program.roles import AUTOGRAD, split_passes
from profharness.rows import (
    TORCH,
    CallKernel,
    CallRow,
    CellRow,
    KernelRow,
    shared_measurement,
)
from profharness.store import ALL_RUNS, Need, Selection, open_store
from profharness.units import as_long, time_text

MEASURE = "measure"
ANALYZED: tuple[Need, ...] = (
    "kernels of configs",
    "times",
    "traced attention calls",
    "attention calls",
)  # the kinds of data to look for when a run is selected, best first


MEAN_LENGTHS = (
    "The configs contain the mean lengths of the engine's steps. The rates are calculated from these "
    "lengths, so they are approximate."
)
EXACT_RATES = (
    "The configs contain the mean lengths of the engine's steps. The rates are calculated from the "
    "exact lengths."
)


def analyze_cell(
    cell: CellRow,
    rows: Sequence[KernelRow],
    machine: RunMachine,
    others: Sequence[CellRow] = (),
    *,
    eager: bool = False,
    exact: tuple[int, int] | None = None,
) -> CellAnalysis:
    """Analyze one cell, given its kernel rows from all profilers.

    `others` contains the cells of the same config and run that may be recommended as faster.
    Set `eager` for attention that a program implements in Python. Its matrix products and softmax
    use the same kernels as PyTorch's math backend. `exact` is that of `cell_figures`. A cell whose
    times are all unusable has no findings. If the machine was busy while the cell was timed, no
    other cell is recommended as faster.
    """
    config = parse_config(cell.config).resolve(CUDA if machine.device else CPU)
    analysis = CellAnalysis(
        *(cell.run, cell.cell, config, cell.backend, cell.status, cell.reason),
        machine=machine,
        short_reason=short_reason(cell.config, cell.refusals),
    )
    if cell.status != "ok":
        return analysis
    kernels = kernel_figures(rows, machine, cell.iterations)
    usable = usable_times(cell)
    figures = cell_figures(usable, config, kernels, machine, exact)
    busy = figures.basis is None and usable is not cell
    phases = () if eager else phase_figures(config, kernels, figures.ridge)
    analysis = replace(
        analysis,
        figures=figures,
        kernels=kernels,
        phases=phases,
        main=main_kernel(kernels),
        busy=busy,
    )
    if busy:
        return analysis
    rules = EAGER_RULES if eager else RULES
    findings = [finding for rule in rules for finding in rule(analysis, figures)]
    if not is_disturbed(rows, cell):
        findings += _faster(usable, others)
    # Reversed, because a dict keeps the last value of a key, and the first finding should win.
    by_code = {finding.code: finding for finding in reversed(findings)}
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    named = bottleneck(analysis, figures, by_code)
    return replace(
        analysis,
        findings=(named[1], *findings) if named else tuple(findings),
        remedies=remedies(analysis, by_code),
        bottleneck=named[0] if named else None,
        kv_places=kv_places(analysis, figures),
    )


def analyze_all(
    cells: Sequence[CellRow],
    rows: Sequence[KernelRow],
    machine: RunMachine,
    wrong: Collection[tuple[str, str]] = (),
    rivals: Sequence[CellRow] | None = None,
) -> list[CellAnalysis]:
    """Analyze cells of one run, in order.

    `wrong` contains pairs (config label, backend) whose results are wrong, so they are never
    recommended. `rivals` contains the cells that may be recommended. By default, these are `cells`.
    Cells that ran while the machine was busy are not recommended.
    """
    by_cell: dict[str | None, list[KernelRow]] = {}
    for row in rows:
        by_cell.setdefault(row.cell, []).append(row)
    ranked: dict[str, list[CellRow]] = {}
    for cell in cells if rivals is None else rivals:
        excluded = pytorch_chooses(cell.backend) or (cell.config, cell.backend) in wrong
        disturbed = is_disturbed(by_cell.get(cell.cell, []), cell)
        if cell.status == "ok" and not excluded and not disturbed:
            ranked.setdefault(cell.config, []).append(usable_times(cell))
    return [
        replace(
            analyze_cell(
                cell,
                by_cell.get(cell.cell, []),
                machine,
                ranked.get(cell.config, []),
            ),
            wrong=(cell.config, cell.backend) in wrong,
        )
        for cell in cells
    ]


def _faster(cell: CellRow, others: Sequence[CellRow]) -> list[Finding]:
    """Return a finding that recommends the fastest other backend.

    The gain is the ratio of two medians of the first measurement that all backends have. The list
    is empty if the samples do not show that this backend is faster, or if the cell already ran it.
    """
    rivals = [rival for rival in others if rival.backend != cell.backend and rival.samples]
    # All backends must be compared by one measurement, because an eager call includes CPU time that
    # the replay of a CUDA graph does not.
    basis = shared_measurement([each.samples.get for each in (cell, *rivals)])
    if basis is None or not rivals:
        return []
    times = {each.backend: median(each.samples[basis]) for each in (cell, *rivals)}
    best = min(rivals, key=lambda rival: times[rival.backend])
    mine, least = times[cell.backend], times[best.backend]
    if least * FASTER >= mine or least <= 0 or not is_another(best.backend, cell):
        return []
    if stats.compare(best.samples[basis], cell.samples[basis]).verdict != "slower":
        return []
    factor, source = mine / least, f"medians of {basis_text(basis)}"
    return [
        measured(
            "faster_backend",
            f"{best.backend} takes {time_text(least)} for the same config, and {cell.backend} takes "
            f"{as_long(factor)} ({source}).",
            "major" if factor >= 1.5 else "minor",
            Evidence("fastest backend", best.backend, "", f"{basis} times of this run"),
            us(f"{best.backend} {basis} time", least, source),
            us(f"{cell.backend} {basis} time", mine, source),
            factor=factor,
            basis=basis,
        )
    ]


def analyze_rows(
    path: Path, cells: Sequence[CellRow], rows: Sequence[KernelRow], source: str | None
) -> list[CellAnalysis]:
    """Analyze cells of any number of runs.

    `source` is the source of the peak rates. If it is None, measured peaks are preferred.
    """
    analyses: list[CellAnalysis] = []
    with open_store(path) as store:
        for run in dict.fromkeys(cell.run for cell in cells):
            own = [cell for cell in cells if cell.run == run]
            kernels = [row for row in rows if row.run == run]
            machine = run_machine(store, run, source, own)
            machine = replace(machine, busy=busy_text(kernels, own))
            rivals = store.cells(run)
            if len(rivals) > len(own):  # a backend that is not selected may be the faster one
                kernels = store.kernels(run)
            changes = config_changes(
                run_configs(
                    run,
                    [cell.config for cell in own],
                    store.environment(run),
                    times_of_auto(rivals, kernels),
                )
            )
            # The roles and the shares of a kernel that runs in both passes differ between them.
            kernels = split_passes(kernels, store.kernels(run, by_op=True))
            analyses += [
                with_change(analysis, changes.get((cell.config, backend_that_ran(cell))))
                for cell, analysis in zip(
                    own, analyze_all(own, kernels, machine, store.wrong(run), rivals), strict=True
                )
            ]
    return analyses


def prepare_peaks(path: Path, runs: Sequence[str], peaks: str | None) -> None:
    """Measure and store the peak rates of this machine's device, if necessary.

    They are measured if `peaks` is "measure". On the command line, they are also measured if
    `peaks` is None, the runs used this GPU model, and the store has no measured peaks of it. Raise
    UsageError if `peaks` is "measure" and the runs used another device.
    """
    if peaks != MEASURE and not (peaks is None and is_command_line() and _lacks_peaks(path, runs)):
        return
    hint("measuring copy bandwidth and matrix rates; this takes a few seconds")
    try:
        _measure_peaks(path, runs)
    except CaptureError as error:
        if peaks == MEASURE:
            raise
        hint(f"{error}; using the data sheet instead")


def _lacks_peaks(path: Path, runs: Sequence[str]) -> bool:
    with open_store(path) as store:
        devices = {
            store.device_name(run)
            for run in dict.fromkeys(runs)
            if store.peaks(run, MEASURED) is None
        } - {None}
    return bool(devices) and gpu_name() in devices


def _measure_peaks(path: Path, runs: Sequence[str]) -> None:
    # Imported here because it loads the code of the worker, which is needed only to measure.
    from profharness.recording.probe import measure_peaks

    with open_store(path) as store:
        devices = {store.device_name(run) for run in dict.fromkeys(runs)}
    # Measure while the store is closed, because the measurement takes seconds.
    measurement = measure_peaks()
    if devices and measurement.peaks.device not in devices:
        there = ", ".join(sorted(name or "an unknown device" for name in devices))
        raise UsageError(
            f"--peaks {MEASURE}: this machine has {measurement.peaks.device}, but the cells ran "
            f"on {there}; run the command there, or use --peaks data-sheet"
        )
    with open_store(path, write=True) as store:
        store.add_peaks(measurement.peaks, measurement.created, measurement.environment)


def selected_program(path: Path, selection: Selection) -> str | None:
    """Return the selected run if it is the run of a program that made attention calls.

    Return None if the run was made by `capture`. Also return None if only configs are selected,
    because a config without a run selects a run of `capture`. Raise NotFoundError if the run does
    not exist.
    """
    if selection.run == ALL_RUNS or (selection.run is None and selection.configs):
        return None
    with open_store(path) as store:
        run = store.find_run(replace(selection, configs=()), *ANALYZED)
        foreign = not store.cells(run) and store.has(run, "attention calls")
    return run if foreign else None


def analyze_program(
    path: Path,
    run: str,
    selection: Selection,
    source: str | None,
) -> Analyses:
    """Analyze the groups of a program's calls that match the selected configs and backends.

    `source` is the source of the peak rates. If it is None, measured peaks are preferred. The
    caveats name the groups that cannot be analyzed. Raise NotFoundError if no group can be analyzed.
    """
    configs, backends = selection.configs, selection.backends
    with open_store(path) as store:
        machine = run_machine(store, run, source)
        recorded = store.calls(run)
        steps = store.steps(run)
        described = described_calls(recorded, steps)
        of_steps = {id(new) for new, old in zip(described, recorded, strict=True) if new is not old}
        groups = group_calls(described)
        layers = find_layers(store, run, assume=assumed_release) if groups else None
        name, reference = store.run_name(run), store.run_reference(run)
    if not groups:
        raise NotFoundError(
            f"run {name} has no recorded step, so there are no kernels and times to analyze; "
            "record a step with `profharness observe --profiler torch --warmup 0 -- PROGRAM`; "
            f"to see the counted calls, use: {shell_command('layers', reference, store=path)}"
        )
    changes = program_changes(layers) if layers else {}
    analyses, left_out, spent = [], [], {}
    for number, group in enumerate(groups, start=1):
        config = median_config([parse_config(call.config) for call in group if call.config])
        if configs and not (config and any(wanted.matches(config) for wanted in configs)):
            continue
        if backends and actual_backend(group[0]) not in backends:
            continue
        module = merge_numbered(module_names(group))
        calls = [call for call in group if config and call.config == config.label and call.kernels]
        why = None
        # Eager attention also computes the masked scores, so its FLOPs are known for any mask.
        if config is None or (group[0].reason and group[0].kind != "eager"):
            why = group[0].reason or "the shapes of the call are unknown"
        elif not calls:
            why = "the trace contains no kernels for these calls"
        if why:
            left_out.append(f"{module or group[0].op} cannot be analyzed: {why}")
        else:
            of_engine = id(calls[0]) in of_steps
            work = mean_work(calls, steps) if of_engine else None
            analysis = _analyze_calls(f"calls-{number}", calls, machine, work)
            if of_engine:
                analysis = replace(analysis, lengths=MEAN_LENGTHS if work is None else EXACT_RATES)
            change = changes.get((calls[0].config, actual_backend(group[0])))
            analyses.append(with_change(replace(analysis, module=module), change))
            spent[analysis.cell] = sum(kernel.total_ns for call in group for kernel in call.kernels)
    analyses.sort(key=lambda analysis: -spent[analysis.cell])
    if not analyses:
        named = [*(config.label for config in configs), *backends]
        criteria = f" of {', '.join(named)}" if named else ""
        show = shell_command("layers", reference, store=path)
        remedy = f"to see its attention calls, use: {show}"
        why = "; ".join([*left_out, remedy])
        held = list(dict.fromkeys(call.config for call in described if call.config))
        if near := next(filter(None, (nearest_config(each, held) for each in configs)), []):
            why = with_clause(did_you_mean(near), why)
        raise NotFoundError(f"run {name} has no attention call{criteria} to analyze: {why}")
    if layers and any(change.assumes_release for change in changes.values()):
        assumed = layers.assumed.partition(";")[0]
        left_out.append(
            f"{assumed}; to see the code of the change, use: {layers.command('explain')}"
        )
    left_out += dict.fromkeys(each.assumes for each in changes.values() if each.assumes)
    return Analyses(analyses, tuple(left_out), launch_limit(layers, analyses) if layers else "")


def _analyze_calls(
    cell: str, calls: Sequence[CallRow], machine: RunMachine, work: Work | None
) -> CellAnalysis:
    """Analyze calls of one config as one cell whose time is the median time of a call.

    `work` is the exact work of a call if the config contains only its mean lengths.
    """
    first, config = calls[0], parse_config(calls[0].config or "")
    backward = all(any(k.direction == "backward" for k in call.kernels) for call in calls)
    config = replace(config, bwd=config.bwd and backward)
    kernels = [
        [k for k in call.kernels if config.bwd or k.direction != "backward"] for call in calls
    ]
    row = CellRow(
        run=first.run,
        cell=cell,
        config=config.label,
        backend=actual_backend(first) or first.kind,
        status="ok",
        message=None,
        choice=None,
        sdpa_op=first.sdpa_op,
        iterations=len(calls),
        refusals=(),
        warnings=(),
        samples={"kernel": (round(median(sum(k.total_ns for k in own) for own in kernels)),)},
    )
    rows = list(_kernel_rows(row, kernels, machine.device))
    exact = (work.flops, work.bytes) if work and work.bytes else None
    return analyze_cell(row, rows, machine, eager=first.kind == "eager", exact=exact)


def _kernel_rows(
    cell: CellRow, calls: Sequence[Sequence[CallKernel]], device: Device | None
) -> Iterator[KernelRow]:
    """Yield the kernels of calls in launch order, one row per launch configuration and direction.

    `calls` contains the kernels of each call. The time in a row is the mean time of a launch,
    because the store has only sums over launches.
    """
    groups: dict[CallKernel, list[CallKernel]] = {}
    for kernel in (kernel for call in calls for kernel in call):
        groups.setdefault(kernel._replace(launches=0, total_ns=0), []).append(kernel)
    whole = sum(kernel.total_ns for group in groups.values() for kernel in group)
    for place, (kind, same) in enumerate(groups.items()):
        launches, total = sum(k.launches for k in same), sum(k.total_ns for k in same)
        mean = round(total / launches) if launches else None
        threads = math.prod(kind.block) if kind.block else None
        fit = launch_occupancy(threads, kind, device)
        same_fields = kind._asdict() | {"launches": launches, "total_ns": total}
        del same_fields["direction"]
        yield KernelRow(
            **same_fields,
            run=cell.run,
            config=cell.config,
            backend=cell.backend,
            cell=cell.cell,
            profiler=TORCH,
            status="ok",
            range=None,
            static_shared_bytes=None,
            dynamic_shared_bytes=None,
            launches_per_call=launches / len(calls),
            duration_ns=mean,
            min_ns=mean,
            max_ns=mean,
            share=total / whole if whole else None,
            first_ns=place,
            op_path=AUTOGRAD if kind.direction == "backward" else None,
            sdpa_op=None,
            occupancy=fit.fraction if fit else None,
            occupancy_limiter=fit.limiter if fit else None,
            shared_share=fit.shared_share if fit else None,
            device=0,
        )
