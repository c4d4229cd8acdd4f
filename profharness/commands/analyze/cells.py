"""Analyze rows of the store: one cell, all cells of a run, or a sweep over one number."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from profharness import stats
from profharness.attention.config import Config, parse_config, pytorch_chooses
from profharness.commands.analyze.figures import (
    MEASURED,
    SEVERITIES,
    CellAnalysis,
    Evidence,
    Facts,
    Finding,
    RunMachine,
    cell_figures,
    kernel_figures,
    main_kernel,
    phase_figures,
    run_machine,
    us,
)
from profharness.commands.analyze.finding_rules import OF_EAGER, RULES, kv_places
from profharness.commands.analyze.remedies import bottleneck, remedies
from profharness.device_types import CPU, CUDA
from profharness.devices import DATA_SHEET, Device, occupancy
from profharness.devices import MEASURED as MEASURED_PEAKS
from profharness.environment import gpu_name
from profharness.errors import CaptureError, NotFoundError, UsageError
from profharness.files import shell_command
from profharness.measurements.agreement import is_another
from profharness.program.layer_map import (
    actual_backend,
    group_calls,
    median_config,
    merge_numbered,
    module_names,
)
from profharness.program.roles import AUTOGRAD
from profharness.rows import CALL_MEASUREMENTS, TORCH, CallKernel, CallRow, CellRow, KernelRow
from profharness.store import ALL_RUNS, Need, Selection, open_store

FASTER = 1.1  # smallest ratio of medians that is reported
ANALYZED: tuple[Need, ...] = (
    "kernels of configs",
    "times",
    "traced attention calls",
    "attention calls",
)  # backends are compared by the first of these measurements that a cell has


def analyze_cell(
    cell: CellRow,
    rows: Sequence[KernelRow],
    machine: RunMachine,
    others: Sequence[CellRow] = (),
    *,
    written_out: bool = False,
) -> CellAnalysis:
    """Analyze one cell from its kernel rows of all profilers. `others` contains the cells of the same
    config and run that may be ranked. If `written_out` is set, the kernels for products and softmax
    belong to attention that a program writes in Python, not to PyTorch's math backend.
    """
    config = parse_config(cell.config).resolve(CUDA if machine.device else CPU)
    empty = CellAnalysis(cell.run, cell.cell, config, cell.backend, cell.status, cell.reason)
    if cell.status != "ok":
        return replace(empty, machine=machine)
    kernels = kernel_figures(rows, machine, cell.iterations)
    figures = cell_figures(cell, config, kernels, machine)
    phases = () if written_out else phase_figures(config, kernels, figures.ridge)
    main = main_kernel(kernels)
    facts = Facts(config, cell.backend, machine, figures, kernels, phases, main)
    rules = OF_EAGER if written_out else RULES
    findings = [finding for rule in rules for finding in rule(facts)]
    findings += _faster(cell, others)
    # reversed, so that the first of several findings with one code remains
    by_code = {finding.code: finding for finding in reversed(findings)}
    word = bottleneck(facts, by_code)
    if word is not None:
        findings.insert(0, word[1])
    findings.sort(
        key=lambda finding: (finding.code != "bottleneck", SEVERITIES.index(finding.severity))
    )
    return replace(
        empty,
        figures=figures,
        kernels=kernels,
        phases=phases,
        findings=tuple(findings),
        remedies=remedies(config, cell.backend, by_code),
        bottleneck=word[0] if word else None,
        machine=machine,
        main=main,
        kv_places=kv_places(facts),
    )


def analyze_all(
    cells: Sequence[CellRow],
    rows: Sequence[KernelRow],
    machine: RunMachine,
    wrong: Collection[tuple[str, str]] = (),
    rivals: Sequence[CellRow] | None = None,
) -> list[CellAnalysis]:
    """Analyze all cells of one run, in order. `wrong` contains pairs (config label, backend) that
    are never recommended. `rivals` are all cells of the run.
    """
    by_cell: dict[str | None, list[KernelRow]] = {}
    for row in rows:
        by_cell.setdefault(row.cell, []).append(row)
    ranked = [
        cell
        for cell in (cells if rivals is None else rivals)
        if cell.status == "ok"
        and not pytorch_chooses(cell.backend)
        and (cell.config, cell.backend) not in wrong
    ]
    analyses = []
    for cell in cells:
        others = [each for each in ranked if (each.config, each.run) == (cell.config, cell.run)]
        analysis = analyze_cell(cell, by_cell.get(cell.cell, []), machine, others)
        analyses.append(replace(analysis, wrong=(cell.config, cell.backend) in wrong))
    return analyses


def _faster(cell: CellRow, others: Sequence[CellRow]) -> list[Finding]:
    """Return a finding that names the fastest other backend by the same measurement, if the samples
    show that it is faster and the cell did not run it.
    """
    rivals = [rival for rival in others if rival.backend != cell.backend]
    everyone = (cell, *rivals)
    # compare by one measurement: an eager time is no evidence against the time of a graph
    common = (
        name
        for name in CALL_MEASUREMENTS
        if all(analysis.samples.get(name) for analysis in everyone)
    )
    name = next(common, None)
    if name is None or not rivals:
        return []
    mine = median(cell.samples[name])
    times = {rival.backend: median(rival.samples[name]) for rival in rivals}
    best = min(times, key=lambda backend: times[backend])
    if times[best] * FASTER >= mine or times[best] <= 0 or not is_another(best, cell):
        return []
    fastest = next(rival for rival in rivals if rival.backend == best)
    if stats.compare(fastest.samples[name], cell.samples[name]).verdict != "slower":
        return []
    factor = mine / times[best]
    evidence = (
        Evidence("fastest backend", best, "", f"{name} samples of this run"),
        us(f"{best} {name} time", times[best], "median"),
        us(f"{cell.backend} {name} time", mine, "median"),
    )
    text = (
        f"{best} takes {times[best] / 1e3:.1f} µs for the same config, {factor:.2f} times faster "
        f"than {cell.backend} ({name} samples)."
    )
    severity = "major" if factor >= 1.5 else "minor"
    return [Finding("faster_backend", text, severity, MEASURED, evidence, factor)]


MEASURE, TABLE = "measure", "data-sheet"
SOURCES = (MEASURE, TABLE)


def analyze_stored(
    path: Path, selection: Selection, peaks: str | None = None
) -> list[CellAnalysis]:
    """Analyze the selected cells without capturing anything. `peaks` is one of SOURCES. If it is None,
    use the measured peaks in the store, or else the data sheet. Raise NotFoundError if no
    such cell exists. Raise UsageError if `peaks` is unknown, or if it requests a measurement and the
    cells ran on another device.
    """
    if peaks not in (None, *SOURCES):
        raise UsageError(f"no peaks {peaks!r}; known are {', '.join(SOURCES)}")
    with open_store(path) as store:
        rows, cells = store.rows(selection, needs=ANALYZED)
        if not cells:
            selected = [*(config.label for config in selection.configs), *selection.backends]
            raise NotFoundError(
                f"run {store.find_runs(selection, *ANALYZED)} has none of: "
                f"{', '.join(selected) or 'captured cells'}; profharness.capture(…) makes them"
            )
    if peaks == MEASURE:
        measure_here(path, [cell.run for cell in cells])
    return analyze_rows(path, cells, rows, peaks)


def analyze_rows(
    path: Path, cells: Sequence[CellRow], rows: Sequence[KernelRow], peaks: str | None
) -> list[CellAnalysis]:
    """Analyze cells of any runs. `peaks` has the same meaning as in `analyze_stored`."""
    source = peaks_source(peaks)
    analyses: list[CellAnalysis] = []
    with open_store(path) as store:
        for run in dict.fromkeys(cell.run for cell in cells):
            own = [cell for cell in cells if cell.run == run]
            mine = [row for row in rows if row.run == run]
            environment, roofs = store.environment(run), store.peaks(run, source)
            machine = run_machine(environment, store.devices(run), roofs, own)
            analyses += analyze_all(own, mine, machine, store.wrong(run), store.cells(run))
    return analyses


def peaks_source(peaks: str | None) -> str | None:
    """Return which peaks to query from the store. None means that measured peaks are preferred."""
    return DATA_SHEET if peaks == TABLE else None


def analyze_here(
    path: Path,
    cells: Sequence[CellRow],
    rows: Sequence[KernelRow],
    peaks: str | None,
    say: Callable[[str], None],
) -> list[CellAnalysis]:
    """Analyze like `analyze_rows`. If `peaks` is None and the cells ran on this machine's GPU model,
    measure the peaks of its device once. Call `say` with a message before a long measurement. Raise
    NotFoundError if there are no cells.
    """
    if not cells:
        raise NotFoundError(
            "analyze needs configs: a captured run, or a trace with attention calls, recorded with "
            "record_shapes=True; `profharness kernels` shows the kernels of any other"
        )
    prepare_peaks(path, [cell.run for cell in cells], peaks, say)
    return analyze_rows(path, cells, rows, peaks)


def prepare_peaks(
    path: Path, runs: Sequence[str], peaks: str | None, say: Callable[[str], None]
) -> None:
    """Measure this machine's device on request, or once if the runs used the same GPU model."""
    if peaks == MEASURE or (peaks is None and _lacks_peaks(path, runs)):
        say("measuring copy bandwidth and matrix rates, some seconds")
        try:
            measure_here(path, runs)
        except CaptureError as error:
            # without a request for a measurement, use the data sheet
            if peaks == MEASURE:
                raise
            say(f"{error}; going on with the data sheet")


def _lacks_peaks(path: Path, runs: Sequence[str]) -> bool:
    """Return whether runs used this machine's GPU model and the store has no measured peaks of it."""
    with open_store(path) as store:
        devices = {
            store.device_name(run)
            for run in dict.fromkeys(runs)
            if store.peaks(run, MEASURED_PEAKS) is None
        } - {None}
    return bool(devices) and gpu_name() in devices


def measure_here(path: Path, runs: Sequence[str]) -> None:
    """Measure and store this device's peaks. Raise UsageError if a run used another device."""
    # imported here, as it loads worker code that stored peaks do not need
    from profharness.recording.probe import measure_peaks

    with open_store(path) as store:
        devices = {store.device_name(run) for run in dict.fromkeys(runs)}
    measured = measure_peaks()
    if devices and measured.peaks.device not in devices:
        there = ", ".join(sorted(str(name) for name in devices))
        raise UsageError(
            f"peaks {MEASURE}: this machine has {measured.peaks.device}, the cells ran on {there}; "
            f"measure there, or take the {TABLE}"
        )
    # Open the store again, so that it is not kept open during the measurement.
    with open_store(path, write=True) as store:
        store.add_peaks(measured.peaks, measured.created, measured.environment)


PROFILER = TORCH  # its traces contain calls; nsys would give the same figures


def selected_program(path: Path, selection: Selection) -> str | None:
    """Return the selected run if it is a program with attention calls, traced or counted, and no
    capture. Return None also for configs without a run, which refer to captures. Raise NotFoundError
    if the run does not exist.
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
    """Analyze like `analyze_stored`, but also accept runs of programs."""
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
    """Analyze the calls of one config. Rates are computed from the median time of one call."""
    first = calls[0]
    backward = all(any(k.direction == "backward" for k in call.kernels) for call in calls)
    config = replace(config, bwd=config.bwd and backward)
    kept = [
        replace(
            call,
            kernels=tuple(k for k in call.kernels if config.bwd or k.direction != "backward"),
        )
        for call in calls
    ]
    times = tuple(sum(kernel.total_ns for kernel in call.kernels) for call in kept)
    row = CellRow(
        run=first.run,
        cell=cell,
        config=config.label,
        backend=actual_backend(first) or first.kind,
        status="ok",
        message=None,
        choice=None,
        sdpa_op=first.sdpa_op,
        iterations=len(kept),
        refusals=(),
        warnings=(),
        samples={"kernel": (round(median(times)),)},
    )
    rows = list(_kernel_rows(row, kept, machine.device))
    analysis = analyze_cell(row, rows, machine, written_out=first.kind == "eager")
    return replace(analysis, module=module)


def _kernel_rows(
    cell: CellRow, calls: Sequence[CallRow], device: Device | None
) -> Iterator[KernelRow]:
    """Yield the calls' kernels in launch order, one row per launch configuration and direction.

    Calls store sums over launches, so a time is a mean. Any kernel that autograd launched is a
    backward kernel, whichever op launched it.
    """
    groups: dict[CallKernel, list[CallKernel]] = {}
    for kernel in (kernel for call in calls for kernel in call.kernels):
        groups.setdefault(kernel._replace(launches=0, total_ns=0), []).append(kernel)
    whole = sum(kernel.total_ns for group in groups.values() for kernel in group)
    for place, (kind, same) in enumerate(groups.items()):
        launches, total = sum(k.launches for k in same), sum(k.total_ns for k in same)
        mean = round(total / launches) if launches else None
        fit = None
        if device and kind.block and None not in (kind.registers_per_thread, kind.shared_bytes):
            threads = math.prod(kind.block)
            fit = occupancy(threads, kind.registers_per_thread or 0, kind.shared_bytes or 0, device)
        yield KernelRow(
            run=cell.run,
            config=cell.config,
            backend=cell.backend,
            cell=cell.cell,
            profiler=PROFILER,
            status="ok",
            range=None,
            kernel=kind.kernel,
            kernel_short=kind.kernel_short,
            kernel_kind=kind.kernel_kind,
            family=kind.family,
            grid=kind.grid,
            block=kind.block,
            registers_per_thread=kind.registers_per_thread,
            static_shared_bytes=None,
            dynamic_shared_bytes=None,
            shared_bytes=kind.shared_bytes,
            launches=launches,
            launches_per_call=launches / len(calls),
            duration_ns=mean,
            total_ns=total,
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
