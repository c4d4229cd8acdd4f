"""From rows of the store to analyses: one cell, all cells of a run, and sweeps over one number."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from profharness import stats
from profharness.answers.agreement import is_another
from profharness.answers.analyze.figures import (
    MEASURED,
    SEVERITIES,
    CellAnalysis,
    Evidence,
    Facts,
    Finding,
    Machine,
    cell_figures,
    kernel_figures,
    machine_of,
    main_kernel,
    phase_figures,
    us,
)
from profharness.answers.analyze.remedies import bottleneck, remedies
from profharness.answers.analyze.rules import OF_EAGER, RULES, kv_places
from profharness.config import leaves_choice, parse_config
from profharness.devices import DATA_SHEET
from profharness.devices import MEASURED as MEASURED_PEAKS
from profharness.environment import gpu_name
from profharness.errors import CaptureError, NotFoundError, UsageError
from profharness.rows import CALL_MEASUREMENTS, CellRow, KernelRow
from profharness.store import Need, Selection, open_store

FASTER = 1.1  # a ratio of medians below this is not worth a word
ANALYZED: tuple[Need, ...] = (
    "kernels of configs",
    "times",
    "traced attention calls",
    "attention calls",
)  # the first there is


def analyze(
    cell: CellRow,
    rows: Sequence[KernelRow],
    machine: Machine,
    others: Sequence[CellRow] = (),
    *,
    written_out: bool = False,
) -> CellAnalysis:
    """One cell from its kernel rows of any profilers. others are the cells of its config and run
    that may be ranked. written_out: a program's own products and softmax, not PyTorch's math.
    """
    config = parse_config(cell.config).resolve("cuda" if machine.device else "cpu")
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
    # reversed: of several with one code the first counts
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
    machine: Machine,
    wrong: Collection[tuple[str, str]] = (),
    rivals: Sequence[CellRow] | None = None,
) -> list[CellAnalysis]:
    """All cells of one run, in order. wrong (config label, backend) are never named as the faster
    choice; rivals are all cells of the run.
    """
    by_cell: dict[str | None, list[KernelRow]] = {}
    for row in rows:
        by_cell.setdefault(row.cell, []).append(row)
    ranked = [
        cell
        for cell in (cells if rivals is None else rivals)
        if cell.status == "ok"
        and not leaves_choice(cell.backend)
        and (cell.config, cell.backend) not in wrong
    ]
    analyses = []
    for cell in cells:
        others = [each for each in ranked if (each.config, each.run) == (cell.config, cell.run)]
        analysis = analyze(cell, by_cell.get(cell.cell, []), machine, others)
        analyses.append(replace(analysis, wrong=(cell.config, cell.backend) in wrong))
    return analyses


def _faster(cell: CellRow, others: Sequence[CellRow]) -> list[Finding]:
    """The fastest other backend by the same measurement, if the samples show it to be clearly faster
    and it is not what ran in the cell.
    """
    rivals = [rival for rival in others if rival.backend != cell.backend]
    everyone = (cell, *rivals)
    # one measurement for all: an eager time says nothing against a graph's
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
    """The analyses of the selected cells; nothing is captured. peaks: one of SOURCES, None: what
    the store has measured, else the table. Raises NotFoundError, or UsageError for other peaks or a
    device that the cells did not run on.
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
    """The analyses of cells of any runs with their kernels; peaks as for `analyze_stored`."""
    source = peaks_source(peaks)
    analyses: list[CellAnalysis] = []
    with open_store(path) as store:
        for run in dict.fromkeys(cell.run for cell in cells):
            own = [cell for cell in cells if cell.run == run]
            mine = [row for row in rows if row.run == run]
            environment, roofs = store.environment(run), store.peaks(run, source)
            machine = machine_of(environment, store.devices(run), roofs, own)
            analyses += analyze_all(own, mine, machine, store.wrong(run), store.cells(run))
    return analyses


def peaks_source(peaks: str | None) -> str | None:
    """Which of a device's peaks the store is asked for; None: what was measured, else the table."""
    return DATA_SHEET if peaks == TABLE else None


def analyze_here(
    path: Path,
    cells: Sequence[CellRow],
    rows: Sequence[KernelRow],
    peaks: str | None,
    say: Callable[[str], None],
) -> list[CellAnalysis]:
    """As `analyze_rows`, but None measures this machine's device once if the cells ran on a GPU
    like it. say takes what the user has to wait for. Raises NotFoundError without cells.
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
    """Measure this machine's device where that is asked for, or once if the runs' GPU is like it."""
    if peaks == MEASURE or (peaks is None and _lacks_peaks(path, runs)):
        say("measuring copy bandwidth and matrix rates, some seconds")
        try:
            measure_here(path, runs)
        except CaptureError as error:
            # where nobody asked for a measurement, the data sheet does
            if peaks == MEASURE:
                raise
            say(f"{error}; going on with the data sheet")


def _lacks_peaks(path: Path, runs: Sequence[str]) -> bool:
    """Whether runs were on a GPU like this machine's for which the store has no measured peaks."""
    with open_store(path) as store:
        devices = {
            store.device_name(run)
            for run in dict.fromkeys(runs)
            if store.peaks(run, MEASURED_PEAKS) is None
        } - {None}
    return bool(devices) and gpu_name() in devices


def measure_here(path: Path, runs: Sequence[str]) -> None:
    """Store this device's measured peaks. Raises UsageError for runs of another device."""
    # loads what starts workers, which stored peaks make needless
    from profharness.runner.probe import measure_peaks

    with open_store(path) as store:
        devices = {store.device_name(run) for run in dict.fromkeys(runs)}
    measured = measure_peaks()
    if devices and measured.peaks.device not in devices:
        there = ", ".join(sorted(str(name) for name in devices))
        raise UsageError(
            f"peaks {MEASURE}: this machine has {measured.peaks.device}, the cells ran on {there}; "
            f"measure there, or take the {TABLE}"
        )
    # opened anew: the measurement between took seconds
    with open_store(path, write=True) as store:
        store.add_peaks(measured.peaks, measured.created, measured.environment)
