"""`profharness diff`: compare two backends of a run, or two runs, kernel by kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from profharness import stats
from profharness.attention.config import split_names, without_strides
from profharness.columns import Column, columns_of, pick
from profharness.commands._answers import on_configs
from profharness.commands._command import command, declaration_of, document, gate
from profharness.commands._options import Option, one_of
from profharness.commands._output import chosen_format, hint
from profharness.commands._types import (
    SIDE_OPTION,
    ConfigOrRunArguments,
    Format,
    OutputFile,
    PathLike,
    RunOfBackends,
    Store,
    complete_names,
    config_list,
    store_path,
    threshold_option,
)
from profharness.commands.diff.answer import (
    MEASURED_BY,
    compared_calls,
    diff_answer,
    diff_caveats,
    diff_record,
    noun_of,
    outcome,
    whole_calls,
)
from profharness.commands.diff.compare import (
    BACKEND_CHANGED,
    COMBINED,
    COSTS,
    LAUNCHES,
    MEMORY,
    OF_TIMES,
    REFUSED,
    UNFUSED,
    Cost,
    Diff,
    DiffRow,
    PhaseDiff,
    Side,
    backends_of,
    diff_cells,
    find_sides,
    nothing_compared,
)
from profharness.commands.kernels.tables import full_name_notes, longer_names
from profharness.errors import GateResult, NotFoundError, counted, join_few
from profharness.measurements.measurements import busy_text
from profharness.program.changes import VERDICTS, EnvChange, with_short_devices
from profharness.program.layer_map import LayerRow
from profharness.program.matching import (
    LayerDiff,
    LayerSide,
    layer_labels,
    layer_names,
    phases_distinguish,
    ran_text,
)
from profharness.program.phases import PhaseRow, phases_detail, shown_attention, shown_phase
from profharness.render.document import (
    FORMATS,
    MISSING,
    Block,
    Document,
    Heading,
    More,
    Note,
    Table,
    field_names,
    filled_columns,
    merged_notes,
    record,
    shown_note,
    status_note,
)
from profharness.rows import CALL_MEASUREMENTS, KernelRow
from profharness.store import frame, open_store
from profharness.units import time_text

if TYPE_CHECKING:
    import pandas as pd

FIELDS = field_names(DiffRow)
SIDES = ("baseline", "candidate")
SIDE = Column("side", "side", importance="key", repeat=False)  # of the phases, one of SIDES
FEW_CONFIGS = (
    3  # if more configs are compared, the kernels of those without a difference need --full
)
SCREEN = 40  # if the kernels of several configs take more lines, they need --full
LABELS_SHOWN = 3  # maximum number of names in the label of a note
# Verdicts that the table explains.
CLEAR = frozenset({"same", "faster", "slower", "added", "removed"})
OF_A_KERNEL = ("grid", "shared_bytes", "registers_per_thread", "launches_per_call")
# Narrow tables hide these columns before they cut the names of kernels much, the first one last.
LAUNCH = tuple(
    replace(each, importance="detail", spare=spare)
    for each, spare in zip(pick(KernelRow, *OF_A_KERNEL), (0, 3, 2, 1), strict=True)
)
TIME = columns_of(KernelRow)["duration_ns"]
CALL_TIME = "median time of a call or, for kernels, of their launches in a call"
REMOVED, ADDED, ALIKE = MARKS = ("-", "+", "=")  # before the names of kernels, as in a unified diff
CONFIG = Column("config", "config", importance="key", shrink=True)
BACKEND = Column("backend", "backend", importance="key", shrink=True)
PART = Column(
    "part",
    "role, kernel",
    shrink=True,
    meaning="the role, followed by its kernels: `-` marks a kernel of the baseline, `+` a kernel of "
    "the candidate, and `=` a kernel that both sides launch in the same way",
)
OF_A_ROLE = dict.fromkeys(OF_A_KERNEL, "")  # values that only kernels have
OF_ONE_KERNEL = dict.fromkeys(("speedup", "verdict"), "")  # values that only roles have

SIDE_TEXTS: dict[str, Callable[[Any], str]] = {
    "calls": "{:g}".format,
    "program_calls": "{:,}".format,
    "asked": str,
    "ran": str,
    "roofline_share": lambda share: f"{100 * share:.1f}",
}
"""Maps a field of LayerSide to a function that formats it for the table of layers."""
SIDE_TIMES = ("forward_ns", "backward_ns")
LAYER_COLUMNS = (
    *pick(LayerDiff, "name"),
    *pick(LayerRow, "attention", "phase"),
    *(
        replace(each, importance="answer") if each.key in SIDE_TIMES else each
        for each in pick(
            LayerSide, "calls", "program_calls", "asked", "ran", *SIDE_TIMES, "roofline_share"
        )
    ),
    *pick(LayerDiff, "speedup", "verdict"),
)
# These names must differ from the names of roles, because both are labels of notes.
COST_NAMES = {MEMORY: "peak memory", LAUNCHES: "launches"}
COMPOSITE = {
    UNFUSED: "The time of a fused kernel is compared with the total time of the unfused kernels.",
    COMBINED: f"{COMBINED[0].upper()}{COMBINED[1:]}.",
}
"""Maps the reason why the kernels of a role are compared as a whole to its note."""


def diff_document(
    diff: Diff,
    *,
    full: bool = False,
    changed_first: bool = False,
    folded: bool = False,
    busy: str | None = None,
) -> Document:
    """Return the document of `diff`.

    Kernels that only differ in their times share a row. If `full` is set, show all rows and the full
    names of the kernels. If `changed_first` is set, list configs without differences
    at the end, one per line. If `folded` is set, leave out the kernels of several configs if they
    take more than a screen. `busy` is a warning that the times are unreliable.
    """
    counts = _counts(diff)
    hidden = bool(diff.layers) and not full
    title = " → ".join(diff.names)
    blocks: list[Block] = [Heading(title, "" if hidden else counts)]
    blocks += _phase_blocks(diff.phases)
    # Show the share of the GPU's limit only if the GPUs differ.
    gpus = any(change.key == "gpu" for change in diff.environment)
    blocks += _layer_blocks(_ordered_layers(diff), full, shares=gpus)
    if diff.environment:
        blocks.append(Table.of(pick(EnvChange), map(with_short_devices, diff.environment)))
    groups = {key: list(rows) for key, rows in groupby(diff.rows, attrgetter("call"))}
    kernels = [kernel for row in diff.rows for kernel in (*row.baseline, *row.candidate)]
    names = longer_names(kernels)
    costs: dict[tuple[str, str | None, str | None], list[Cost]] = {}
    for cost in diff.costs:
        # The row `status` already shows a refusal.
        if cost.verdict != "same" and cost.what != REFUSED:
            costs.setdefault(cost.call, []).append(cost)
    same = [
        key
        for key, rows in groups.items()
        if all(row.verdict == "same" and not row.changed for row in rows) and key not in costs
    ]
    shown = {} if hidden else groups
    if changed_first:
        shown = {key: rows for key, rows in shown.items() if key not in same}
    details = [
        block
        for key, rows in shown.items()
        for block in _config_blocks(rows, costs.get(key, ()), full, names)
    ]
    calls = [] if diff.layers else [row for row in whole_calls(diff) if row.call in shown]
    if len(calls) > 1:
        blocks.append(_calls_table(calls))
    if folded and len(calls) > 1 and _height(details) > SCREEN:
        blocks += _call_notes(calls)
        blocks.append(More(f"the kernels of each {noun_of(calls)}"))
    elif not hidden:
        blocks += details
        if not full and any(map(_ran_on_one_side, groups.values())):
            blocks.append(More("the kernels of configs that only one side runs"))
        # With --full, the notes of the configs contain this text.
        used = () if full else {row.reasons[0] for row in diff.rows if row.composite}
        blocks += (Note(text) for reason, text in COMPOSITE.items() if reason in used)
    elif diff.rows:
        blocks.append(More(f"a comparison of all kernels of the traces ({counts})"))
    if full:
        blocks += full_name_notes(kernels, names)
    if changed_first and same and not hidden:
        ended = {key for key, rows in groups.items() if any(row.role == "status" for row in rows)}
        alike_ended = sum(key in ended for key in same)
        of_ran = (
            f"{len(same) - alike_ended} of the {counted(len(groups) - len(ended), 'cell')} that ran"
        )
        others = f", and {counted(alike_ended, 'cell')} that did not run" if alike_ended else ""
        title = "Cells without any difference in kernels"
        blocks.append(Heading(title, f"{of_ran}{others}"))
        alike: dict[str, list[str]] = {}
        for config, *backends in same:
            alike.setdefault(config, []).append(_backends(*backends))
        blocks += [Note(", ".join(texts), config) for config, texts in alike.items()]
        blocks.append(More("a comparison of the kernels of configs that show no difference"))
    blocks += map(Note, diff_caveats(diff))
    plain = diff_record(diff)
    return Document(
        answer=diff_answer(diff, busy),
        schema=plain["schema"],
        title=title,
        blocks=tuple(blocks),
        fields=FIELDS,
        records=tuple(plain["rows"]),
        extra={key: value for key, value in plain.items() if key not in ("schema", "rows")},
    )


def _calls_table(calls: Sequence[DiffRow]) -> Table:
    """Return a table with the times of each call on both sides."""
    several = noun_of(calls) == "cell"
    bases = {row.basis for row in calls if row.basis}
    columns = (
        CONFIG,
        *((BACKEND,) if several else ()),
        *(pick(DiffRow, "basis") if len(bases) > 1 else ()),
        replace(TIME, title="median µs/call", meaning=CALL_TIME),
        *pick(DiffRow, "speedup", "verdict"),
    )
    lines = []
    for row in calls:
        ended = [status for _, status, _ in _endings(row)]
        lines.append(
            {
                "backend": _backends(row.backend_baseline, row.backend_candidate),
                "duration_ns": (row.baseline_ns, row.candidate_ns),
                # Both sides may have refused the config.
                "verdict": ended[0] if ended and len({*ended}) == 1 else outcome(row),
            }
        )
    return Table.of(columns, zip(lines, calls, strict=True))


def _call_notes(calls: Sequence[DiffRow]) -> Iterator[Note]:
    """Yield why calls did not run, and why their times cannot be compared, each with the configs."""
    ended: dict[tuple[str, str, str], dict[str, None]] = {}
    doubts: dict[str, dict[str, None]] = {}
    for row in calls:
        for label, status, reason in _endings_by_backend(row):
            if status != "ok":
                ended.setdefault((status, reason, label), {})[row.config] = None
        if row.role != "status" and row.verdict not in CLEAR:
            doubts.setdefault("; ".join(row.reasons), {})[row.config] = None
    every = len({row.config for row in calls})
    for key, found in ended.items():
        yield status_note(*key, where=on_configs(found, every))
    for text, found in doubts.items():
        yield Note(shown_note(Note(text)).text, join_few(list(found), LABELS_SHOWN), "warning")


def _height(blocks: Sequence[Block]) -> int:
    """Return the number of lines that blocks take at least. A heading has a blank line above it."""
    heights = {Heading: 2, Note: 1}
    return sum(
        len(block.rows) if isinstance(block, Table) else heights.get(type(block), 0)
        for block in blocks
    )


def _counts(diff: Diff) -> str:
    """Return the number of configs with each verdict, or of roles if no whole calls are compared."""
    calls = compared_calls(diff)
    noun = f"{noun_of(calls)}s" if calls else "roles"
    counts = Counter(map(outcome, calls or diff.rows)).most_common()
    return f"{noun}: {', '.join(f'{count:,} {name}' for name, count in counts)}" if counts else ""


def cost_text(cost: Cost) -> str:
    """Format a cost as both values and its verdict, such as `5.09 → 76.0 MiB (more)`."""
    if cost.what == REFUSED:
        return f"{cost.baseline} → {cost.candidate} ({cost.verdict})"
    kind, unit = ("mib", " MiB") if cost.what == MEMORY else ("count", " per call")
    before, after = (FORMATS[kind](value) for value in (cost.baseline, cost.candidate))
    return f"{before} → {after}{unit} ({cost.verdict})"


def layer_text(row: LayerDiff) -> str:
    """Format a layer as its verdict, the verdict on its times, and the backends that ran."""
    return f"{_verdicts(row)}: {_both(row, 'ran') or 'the backend is unknown'}"


def _step_ns(row: LayerDiff) -> float:
    """Return the time of a layer's calls in a step, on the side that takes longer."""
    sides = filter(None, row.sides)
    return max((each.forward_step_ns or 0) + (each.backward_step_ns or 0) for each in sides)


def _verdicts(row: LayerDiff) -> str:
    return f"{row.verdict}, {row.speed}" if row.changed else row.verdict


def _both(row: LayerDiff, name: str) -> str | None:
    """Return the values of a field on both sides as `before → after`.

    Return a single value if both values are equal, and None if both are unknown.
    """
    values = (getattr(side, name, None) for side in row.sides)
    return _change(*(None if each is None else SIDE_TEXTS[name](each) for each in values))


def _change(before: str | None, after: str | None) -> str | None:
    return before if before == after else f"{before or MISSING} → {after or MISSING}"


def _phase_blocks(phases: Sequence[PhaseDiff]) -> Iterator[Block]:
    if not phases:
        return
    lines = [
        (mark, row)
        for each in phases
        for mark, row in ((SIDES[0], each.baseline), (SIDES[1], each.candidate))
        if row
    ]
    yield Heading("Phases", phases_detail(row for _, row in lines), 3)
    yield Table.of((SIDE, *pick(PhaseRow)), [{"side": mark} | record(row) for mark, row in lines])


def _difference(reason: str) -> str:
    """Shorten a difference such as `config: b2-h8 → b2-h8-causal` to `config: b2-h8 → …-causal`.

    Omit the strides of configs unless only the strides differ. Shorten modules to their last name.
    Show `-` as the mode of a call that is neither compiled nor in a graph.
    """
    what, _, change = reason.partition(": ")
    before, arrow, after = change.partition(" → ")
    if not arrow:
        return reason
    if what == "config":
        short = without_strides(before), without_strides(after)
        before, after = (before, after) if short[0] == short[1] else short
        after = f"…{after.removeprefix(before)}" if after.startswith(f"{before}-") else after
    elif what == "module":
        last = [f"…{name.rpartition('.')[2]}" if "." in name else name for name in (before, after)]
        before, after = (before, after) if last[0] == last[1] else last
    elif what == "mode":
        before, after = (MISSING if mode == "eager" else mode for mode in (before, after))
    return f"{what}: {before} → {after}"


def _ordered_layers(diff: Diff) -> list[LayerDiff]:
    """Return the layers in the order of the phases, and by time within a phase."""
    order = {each.phase: place for place, each in enumerate(diff.phases)}
    return sorted(
        diff.layers,
        key=lambda row: (order.get(str(row.first.step_phase), len(order)), -_step_ns(row)),
    )


def _layer_blocks(layers: Sequence[LayerDiff], full: bool, *, shares: bool) -> Iterator[Block]:
    if not layers:
        return
    names, labels = layer_names(layers, full=full), layer_labels(layers, full=full)
    phases = phases_distinguish(layers, names)
    lines: list[dict[str, Any]] = []
    notes: dict[str, list[str]] = {}  # labels of layers by reason
    severe: set[str] = set()
    kinds = shown_attention(row.first.config if phases else None for row in layers)
    for row, name, label, kind in zip(layers, names, labels, kinds, strict=True):
        texts: dict[str, Any] = {key: _both(row, key) for key in SIDE_TEXTS}
        texts |= {
            key: tuple(getattr(each, key, None) for each in row.sides)
            if any(getattr(each, key, None) is not None for each in row.sides)
            else None
            for key in SIDE_TIMES
        }
        texts["ran"] = _change(*(ran_text(each) if each else None for each in row.sides))
        texts["attention"] = kind
        texts["phase"] = shown_phase(row.phase) if phases else None
        if not shares:
            texts["roofline_share"] = None
        lines.append(texts | {"name": name, "speedup": row.speedup, "verdict": _verdicts(row)})
        if row.verdict != "same" or len(row.reasons) > 1:
            clear = not full and row.speed in OF_TIMES
            for reason in row.reasons:
                if clear and " calls: " in reason:
                    continue  # the table shows the times and the verdict
                if not full and row.direction == "recompute":
                    continue  # the answer says which side computes a forward again
                text = reason if full else _difference(reason)
                notes.setdefault(text, []).append(label)
                if {row.verdict, row.speed} & {"slower", "removed", "added"}:
                    severe.add(text)
    counts = Counter(row.verdict for row in layers).most_common()
    yield Heading("Attention by layer", ", ".join(f"{count} {name}" for name, count in counts))
    yield Table.of(filled_columns(LAYER_COLUMNS, lines), lines)
    if shares:
        yield Note("to compare GPUs, pass both runs to `profharness layers`", level="hint")
    shared: dict[tuple[tuple[str, ...], str], list[str]] = {}  # reasons by layers and level
    for reason, of in notes.items():
        level = "warning" if reason in severe else "note"
        shared.setdefault((tuple(of), level), []).append(reason)
    for (labels_of, level), reasons in shared.items():
        label = "" if len(labels_of) == len(lines) else join_few(labels_of, LABELS_SHOWN)
        # Put short differences first, so that several differences fit on one line.
        joined = reasons if full else ["; ".join(sorted(reasons, key=len))]
        yield from (Note(reason, label, level) for reason in joined)


def _backends(*backends: str | None) -> str:
    return " → ".join(dict.fromkeys(filter(None, backends)))


def _config_blocks(
    rows: list[DiffRow], costs: Sequence[Cost], full: bool, names: Mapping[str, str]
) -> Iterator[Block]:
    first = rows[0]
    yield Heading(first.config, _backends(first.backend_baseline, first.backend_candidate))
    if first.role == "status" and not full:
        yield from merged_notes(_ending_notes(first))
    else:
        of_calls = _times_are_of_calls(rows)
        lines = [line for row in rows for line in _lines(row, of_calls, names)]
        yield Table.of(_columns(of_calls), lines)
        yield from _reason_notes(rows, full)
    for cost in costs:
        level = "warning" if cost.verdict == "more" else "note"
        yield Note(cost_text(cost), COST_NAMES[cost.what], level)


def _ran_on_one_side(rows: Sequence[DiffRow]) -> bool:
    """Return whether a config has kernels, although its call did not run on both sides."""
    return rows[0].role == "status" and len(rows) > 1


def _ending_notes(row: DiffRow) -> Iterator[Note]:
    """Yield why a call did not run on a side, and its time on the side on which it ran."""
    times = row.baseline_ns, row.candidate_ns
    for (label, status, reason), time_ns in zip(_endings(row), times, strict=True):
        if status != "ok":
            yield status_note(status, reason, label)
        elif time_ns is not None:
            measured = MEASURED_BY.get(row.basis or "", "")
            yield Note(f"{time_text(time_ns)} per call{measured}", label)


def _endings(row: DiffRow) -> Iterator[tuple[str, str, str]]:
    """Yield the backend or the side, the status and the reason of both sides of a call.

    Yield nothing if the call ran on both sides.
    """
    backends = row.backend_baseline, row.backend_candidate
    labels = SIDES if backends[0] == backends[1] else map(str, backends)
    for label, text in zip(labels, row.endings, strict=bool(row.endings)):
        _, status, *reason = text.split(": ", 2)
        yield label, status, "".join(reason)


def _endings_by_backend(row: DiffRow) -> Iterator[tuple[str, str, str]]:
    """Yield what `_endings` yields, but name the backend if both sides have the same backend."""
    endings, backend = list(_endings(row)), row.backend_baseline
    if backend != row.backend_candidate:
        yield from endings
    elif len({ending[1:] for ending in endings}) == 1:
        yield (str(backend), *endings[0][1:])
    else:
        for label, status, reason in endings:
            yield f"{backend} of the {label}", status, reason


def _reason_notes(rows: Sequence[DiffRow], full: bool) -> Iterator[Note]:
    """Yield the reasons for verdicts, each with the roles to which it applies."""
    notes: dict[str, list[DiffRow]] = {}
    for row in rows:
        # Unless `full` is set, a verdict that needs no explanation has no note.
        if row.reasons and (full or row.verdict not in CLEAR):
            notes.setdefault("; ".join(_reasons(row, full=full)), []).append(row)
    for text, alike in notes.items():
        level = "warning" if {row.verdict for row in alike} & {"slower", "unknown"} else "note"
        if alike[0].role != "status":
            text = shown_note(Note(text)).text
        yield Note(text, join_few([row.role for row in alike], LABELS_SHOWN), level)


def _reasons(row: DiffRow, *, full: bool = False) -> tuple[str, ...]:
    """Return the reasons for a verdict, in PyTorch's own words if `full` is set."""
    return row.reasons if full else row.endings or row.reasons


def _times_are_of_calls(rows: Sequence[DiffRow]) -> bool:
    """Return whether the launches per call of all kernels are known."""
    kernels = (kernel for row in rows for kernel in (*row.baseline, *row.candidate))
    return all(kernel.launches_per_call for kernel in kernels)


def _columns(of_calls: bool) -> tuple[Column, ...]:
    """Return the columns of a table of kernels. Its times are per call or per launch."""
    time = replace(TIME, title="median µs/call", meaning=CALL_TIME) if of_calls else TIME
    return (PART, *LAUNCH, time, *pick(DiffRow, "speedup", "verdict"))


def _lines(row: DiffRow, of_calls: bool, names: Mapping[str, str]) -> Iterator[tuple[Any, ...]]:
    """Yield a line for the role, and then a line for each kernel, which begins with its mark.

    The line of the role has the times of all its kernels if the times of the table are per call.
    `names` maps kernels with ambiguous short names to distinct names.
    """
    basis = f" ({row.basis})" if row.basis in CALL_MEASUREMENTS else ""
    times = (row.baseline_ns, row.candidate_ns) if of_calls else ""
    whole = {"part": f"{row.role}{basis}", "duration_ns": times, "verdict": outcome(row)}
    yield OF_A_ROLE | whole, row
    for mark, kernels in _marked(row):
        name = names.get(kernels[0].kernel, kernels[0].kernel_short)
        own = [_kernel_ns(kernel, of_calls) for kernel in kernels]
        sides = (own[0], None) if mark == REMOVED else (None, own[0]) if mark == ADDED else own
        values = {"part": f"{mark} {name}", "duration_ns": tuple(sides)}
        yield OF_ONE_KERNEL | values, kernels[0]


def _marked(row: DiffRow) -> Iterator[tuple[str, tuple[KernelRow, ...]]]:
    """Yield each kernel with its mark.

    A kernel that both sides launch in the same way comes with its rows of both sides.
    """
    added: dict[tuple[Any, ...], list[KernelRow]] = {}
    for kernel in row.candidate:
        added.setdefault(_launch(kernel), []).append(kernel)
    for kernel in row.baseline:
        alike = added.get(_launch(kernel))
        yield (ALIKE, (kernel, alike.pop(0))) if alike else (REMOVED, (kernel,))
    yield from ((ADDED, (kernel,)) for rest in added.values() for kernel in rest)


def marked_names(names: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    """Return a map from shortened to full names for shortened names with marks."""
    return {f"{mark} {short}": full for short, full in names.items() for mark in MARKS}


def _launch(kernel: KernelRow) -> tuple[Any, ...]:
    """Return what two kernels that are launched in the same way have in common."""
    return (kernel.kernel, *(getattr(kernel, name) for name in OF_A_KERNEL))


def _kernel_ns(kernel: KernelRow, of_calls: bool) -> float | None:
    """Return the median time of a kernel's launches in a call, or of one launch."""
    if kernel.duration_ns is None or not of_calls:
        return kernel.duration_ns
    return kernel.duration_ns * (kernel.launches_per_call or 1)


Baseline = Annotated[
    PathLike,
    replace(
        SIDE_OPTION,
        tool="A run (RUN) or one backend of a run (RUN:BACKEND). A backend without a "
        "run is taken from the latest run that contains all the named backends.",
        tool_examples=("latest~1", "latest:flash", "flash"),
    ),
]
Candidate = Annotated[
    PathLike,
    replace(
        SIDE_OPTION,
        tool="The run or backend to compare with the baseline, given in the same form as the "
        "baseline.",
        tool_examples=("latest", "math"),
    ),
]
THRESHOLD_HELP = "The smallest relative change in time that counts as a difference."
Threshold = Annotated[float | None, threshold_option(THRESHOLD_HELP, THRESHOLD_HELP)]
FailOn = Annotated[
    tuple[str, ...],
    Option(
        ("--fail-on",),
        complete=complete_names(lambda: (*VERDICTS, *COSTS, BACKEND_CHANGED)),
        multiple=True,
        metavar="VERDICT",
        check=one_of((*VERDICTS, *COSTS, BACKEND_CHANGED), "--fail-on"),
        help=(
            "Exit with code 3 if a row has this verdict, such as slower, changed or removed. For "
            "programs, the rows are the layers; with --full, also the kernels of the traces. For "
            "configs, the times of calls are judged; with --full, also those of their kernels. The "
            "`memory` gate fails if the candidate uses more memory. The `launches` gate fails if "
            "the candidate launches more kernels. The `refused` gate fails if the candidate "
            "refuses a config that the baseline runs. The `backend-changed` gate fails if a layer "
            "of a program runs on one backend in the baseline and on another in the candidate. "
            "Separate several values by commas, or repeat the option."
        ),
    ),
]
PASSED = {
    MEMORY: "none needs more memory",
    LAUNCHES: "none launches more kernels",
    REFUSED: "none is newly refused",
    BACKEND_CHANGED: "none changed its backend",
}
"""Maps each gate that is not a verdict to what it did not find if it passed."""
Full = Annotated[
    bool,
    Option(
        ("--full",),
        help="Show every column, the full names of the kernels, and the reasons for all verdicts. "
        "For programs, also show kernels outside attention.",
    ),
]


Comparison = tuple[Diff, tuple[Side, Side]]
"""A diff, together with its baseline and its candidate."""


def to_frame(comparison: Comparison) -> pd.DataFrame:
    """Return the rows of a diff as a data frame. Store the other parts of the diff in `attrs`."""
    record = comparison[0].to_json()
    rows = frame(list(record["rows"]), list(FIELDS))
    rows.attrs |= {name: list(record.get(name, ())) for name in ("environment", "layers", "costs")}
    return rows


@command(
    "diff",
    frame=to_frame,
    tool="Use this tool to find out what changed between two runs, or which of two backends is "
    "faster on the measured configs.",
)
def diff(
    baseline: Baseline,
    candidate: Candidate,
    *,
    configs: ConfigOrRunArguments = None,
    threshold: Threshold = stats.THRESHOLD,
    run: RunOfBackends = None,
    store: Store = None,
) -> Comparison:
    """Compare two backends of a run, or two runs.

    BASELINE and CANDIDATE can each be a trace file, a run folder, a stored run (latest, latest~1,
    an id or the beginning of an id), RUN:BACKEND, or a backend. A backend named without RUN is
    taken from the latest run that has all named backends. To compare two backends of another run,
    name this run too; RUN may come before or after the backends. If CONFIG is given, only these
    configs are compared.

    Two kernels are paired if they compute the same thing. In the table of kernels, `-` marks a kernel
    of the baseline, `+` a kernel of the candidate, and `=` a kernel that both sides launch in the
    same way. The speed-up is the time of the baseline divided by the time of the candidate, so above
    1 if the candidate is faster. A gate (--fail-on) also fails if there is nothing to compare. Traces
    of two programs are also compared layer by layer. To write a page on both runs, with charts, advice
    and timelines, use `profharness report BASELINE CANDIDATE -o report.html`.

    \b
    Examples:
      profharness diff before.json.gz after.json.gz
      profharness diff flash math 2,8,512,64 --fail-on slower
      profharness diff flash math traces/h200-torch2.11
      profharness diff latest~1 latest --fail-on memory,launches,refused
      profharness diff latest~1 latest --fail-on backend-changed

    In Python the result contains the paired rows. `attrs["environment"]` contains the differences between
    the environments, and `attrs["layers"]` contains the layers of two traced programs. `attrs["costs"]`
    contains peak memory, launches and refusals of both sides.
    """
    with open_store(store_path(store)) as opened:
        names = (str(baseline), str(candidate))
        if run is not None:
            names = backends_of(opened, str(run), names)
        sides = find_sides(opened, *names, config_list(configs))
    if sides[0].label == sides[1].label:
        hint(f"warning: both sides have the same content: {sides[0].name or sides[0].label}")
    threshold = stats.THRESHOLD if threshold is None else threshold
    return diff_cells(*sides, threshold=threshold), sides


@document(diff)
def show(
    comparison: Comparison,
    *,
    fail_on: FailOn = (),
    full: Full = False,
    format: Format = None,
    output: OutputFile = None,
) -> Document:
    """Return the document that shows the diff. Only a table leaves out kernels.

    Raise NotFoundError if nothing could be compared and no gate is set.
    """
    found, sides = comparison
    if not fail_on and (reason := nothing_compared(found, sides)):
        raise NotFoundError(reason)
    many = len({row.config for row in found.rows}) > FEW_CONFIGS
    short = not full and chosen_format(format, None if output is None else Path(output)) == "table"
    first = many and not full
    return diff_document(
        found, full=full, changed_first=first, folded=short, busy=busy_sides(sides)
    )


def busy_sides(sides: Sequence[Side]) -> str | None:
    """Return a warning that the times of the sides are unreliable because the CPU was busy."""
    rows = [row for side in sides for row in side.kernels]
    cells = [each for side in sides for each in side.cells if side.backend in (None, each.backend)]
    return busy_text(rows, cells)


@gate(diff)
def check(comparison: Comparison, *, fail_on: FailOn = (), full: Full = False) -> list[GateResult]:
    """Return the result of each gate.

    A gate failed if a row, cost or layer has its verdict, or if a side lacks the data for it. For
    programs, check the layers, and the kernels of the whole traces only if `full` is set.
    """
    found, sides = comparison
    if found.layers and not full:  # the document does not show the other kernels either
        found = replace(found, rows=())
    place = " → ".join(side.name or side.label for side in sides)
    counts = [
        counted(count, noun)
        for count, noun in (
            (len({row.config for row in found.rows}), "config" if found.costs else "range"),
            (len(found.layers), "layer"),
        )
        if count
    ]
    checked = f"{' and '.join(counts)} checked"
    return [
        GateResult(
            f"--fail-on {name}",
            place,
            tuple(_findings(found, sides, name, full=full)),
            f"{checked}, {PASSED.get(name, f'none is {name}')}",
        )
        for name in dict.fromkeys(split_names(fail_on))
    ]


def _findings(found: Diff, sides: tuple[Side, Side], verdict: str, *, full: bool) -> Iterator[str]:
    on = frozenset([verdict])
    # A kernel may be slower although the call is faster.
    timed = {row.call for row in found.rows if row.role == "call" and row.ratio is not None}
    for row in found.fails(on):
        if verdict in OF_TIMES and not full and row.role != "call" and row.call in timed:
            continue
        yield f"{row.config} {row.role}: {'; '.join((row.verdict, *_reasons(row)))}"
    for cost in found.failing_costs(on):
        yield f"{cost.config} {cost.backend_candidate or ''} {cost.what}: {cost_text(cost)}"
    for layer in found.failing_layers(on):
        yield f"{layer.name}: {'; '.join((layer_text(layer), *layer.reasons))}"
    if empty := nothing_compared(found, sides, on):
        yield empty


DECLARATION = declaration_of(diff)
