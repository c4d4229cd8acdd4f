"""`profharness analyze`: find the bottleneck of each backend, with evidence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from profharness.attention.config import split_names
from profharness.commands._command import command, declaration_of, document
from profharness.commands._options import Option
from profharness.commands._runs import run_text
from profharness.commands._types import (
    Backends,
    Configs,
    RunOrConfigs,
    Store,
    config_list,
    store_path,
)
from profharness.commands.analyze.cells import (
    ANALYZED,
    analyze_program,
    analyze_rows,
    prepare_peaks,
    selected_program,
)
from profharness.commands.analyze.figures import FIELDS, Analyses, analyze_record
from profharness.commands.analyze.tables import analyze_document
from profharness.commands.kernels import find_rows, select
from profharness.devices import DATA_SHEET
from profharness.errors import NotFoundError
from profharness.render.document import Document
from profharness.store import frame

if TYPE_CHECKING:
    import pandas as pd

Peaks = Annotated[
    Literal["measure", "data-sheet"] | None,
    Option(
        ("--peaks",),
        help=(
            "Measure the device's peak rates on this machine and store them (measure), or take "
            "the rates from the built-in table (data-sheet). [default: the stored rates; if no "
            "rates are stored, measure if the cells ran on this machine's GPU model, otherwise "
            "data-sheet]"
        ),
    ),
]
Full = Annotated[bool, Option(("--full",), help="Show every finding, with its evidence.")]


def _to_frame(found: Analyses) -> pd.DataFrame:
    made = frame(list(map(analyze_record, found.cells)), list(FIELDS))
    made.attrs["analyses"] = list(found.cells)
    made.attrs["caveats"] = list(found.caveats)
    return made


@command("analyze", frame=_to_frame)
def analyze(
    configs: Configs = None,
    backends: Backends = None,
    *,
    run: RunOrConfigs = None,
    peaks: Peaks = None,
    store: Store = None,
) -> Analyses:
    """Find the bottleneck of each backend, with evidence.

    RUN is a trace file, a run folder or a stored run. Without RUN, analyze the latest run. Without
    CONFIG, analyze every config of the run. If CONFIG is given without RUN, use the latest run that
    has the configs; if no run has them, capture the configs first. If the run has ncu counters,
    they are used.

    For a program's trace, analyze each group of identical attention calls whose config is known.
    The time of a call is the time of its kernels, including the backward pass if the trace contains
    one. If `layers` advises a change to the calls, `analyze` gives this change as the first remedy.
    For a captured run, the first remedy is the change that `explain` advises.

    Each finding is either measured (by a counter or a timing) or derived (from a formula or a
    launch configuration). TFLOP/s is calculated from the exact FLOPs, and GB/s from the compulsory
    bytes. The heading names the measurement on which TFLOP/s and GB/s are based. A finding that
    several cells share is printed once. If there are many cells, only the most frequent findings
    are printed. --full explains every cell: it shows the phases, the counters, and the figures and
    sources behind each finding. --full also names the best backend for training, prefill, decoding
    and low memory, describes the device, and adds a table for each sweep (a set of configs that
    differ in one number).

    \b
    Examples:
      profharness analyze 2,8,512,64
      profharness analyze '1,4,64,{512,2048,4096,8192},fp32' --peaks measure
      profharness analyze trace.json.gz

    In Python, nothing is captured, and nothing is measured unless `peaks` is "measure". The result has
    one row per cell, with the keys of the JSON. `findings` and `remedies` are lists of dicts;
    `frame.explode("findings")` has one finding per row. The analyses are in `attrs["analyses"]`,
    and sentences on what they assume or leave out are in `attrs["caveats"]`.
    """
    path = store_path(store)
    selection = select(run_text(run), config_list(configs), split_names(backends))
    program = selected_program(path, selection)
    source = DATA_SHEET if peaks == "data-sheet" else None
    if program is not None:
        prepare_peaks(path, [program], peaks)
        return analyze_program(path, program, selection, source)
    rows, cells = find_rows(path, selection, needs=ANALYZED)
    if not cells:
        raise NotFoundError(
            "analyze requires a captured run, or a trace of attention calls that was recorded with "
            "record_shapes=True; for any other trace, use `profharness kernels`"
        )
    prepare_peaks(path, [cell.run for cell in cells], peaks)
    return Analyses(analyze_rows(path, cells, rows, source))


@document(analyze)
def show(found: Analyses, *, full: Full = False) -> Document:
    """Return the document that shows the analyses, with every finding if `full` is set."""
    return analyze_document(found.cells, found.caveats, found.launch_limit, full=full)


DECLARATION = declaration_of(analyze)
