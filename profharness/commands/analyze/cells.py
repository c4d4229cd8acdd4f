"""Analyze rows of the store: one cell, all cells of a run, or a sweep over one number."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from profharness import stats
from profharness.attention.config import parse_config, pytorch_chooses
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
from profharness.devices import DATA_SHEET
from profharness.devices import MEASURED as MEASURED_PEAKS
from profharness.environment import gpu_name
from profharness.errors import CaptureError, NotFoundError, UsageError
from profharness.measurements.agreement import is_another
from profharness.rows import CALL_MEASUREMENTS, CellRow, KernelRow
from profharness.store import Need, Selection, open_store

FASTER = 1.1  # smallest ratio of medians that is reported
ANALYZED: tuple[Need, ...] = (
    "kernels of configs",
    "times",
    "traced attention calls",
    "attention calls",
)  # the first of these that a cell has


def analyze_cell(
    cell: CellRow,
    rows: Sequence[KernelRow],
    machine: RunMachine,
    others: Sequence[CellRow] = (),
    *,
    written_out: bool = False,
) -> CellAnalysis:
    """Analyze one cell from its kernel rows of all profilers. `others` are the cells of the same
    config and run that may be ranked. With `written_out`, products and softmax are those of a
    program, not of PyTorch's math backend.
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
    """Analyze the selected cells without capturing anything. `peaks` is one of SOURCES. None uses
    measured peaks if the store has them, else the data sheet. Raise NotFoundError, or UsageError
    for unknown peaks or a device that the cells did not run on.
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
    """Analyze cells of any runs with their kernel rows. `peaks` as in `analyze_stored`."""
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
    """Return the source of peaks to query from the store. None prefers measured peaks."""
    return DATA_SHEET if peaks == TABLE else None


def analyze_here(
    path: Path,
    cells: Sequence[CellRow],
    rows: Sequence[KernelRow],
    peaks: str | None,
    say: Callable[[str], None],
) -> list[CellAnalysis]:
    """Analyze like `analyze_rows`, but with `peaks` None measure this machine's device once if the
    cells ran on the same GPU model. Call `say` with a message before a long measurement. Raise
    NotFoundError without cells.
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
    """Store this device's measured peaks. Raise UsageError for runs on another device."""
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
    # opened again, as the measurement took seconds
    with open_store(path, write=True) as store:
        store.add_peaks(measured.peaks, measured.created, measured.environment)
