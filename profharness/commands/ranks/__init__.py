"""`profharness ranks`: compare the ranks of a distributed job."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Annotated, Any

from profharness import stats
from profharness.attention.config import split_names
from profharness.columns import pick
from profharness.commands._command import command, declaration_of, document, gate
from profharness.commands._help import legend
from profharness.commands._options import Option, one_of
from profharness.commands._types import (
    Runs,
    Store,
    complete_names,
    store_path,
    threshold_option,
)
from profharness.commands.ranks.answer import LABELS_SHOWN, ranks_answer
from profharness.commands.ranks.comparison import CODES, RankComparison, RankFigures
from profharness.errors import GateResult, counted, join_few
from profharness.render.document import (
    Block,
    Document,
    Heading,
    More,
    Note,
    Table,
    field_names,
    filled_columns,
    record,
)
from profharness.store import frame, open_store
from profharness.units import share_text

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = "profharness.ranks/1"
SHARES = ("idle_share", "collective_share", "exposed_share")
FIELDS = (*field_names(RankFigures), *SHARES)
COLUMNS = pick(
    RankFigures,
    *(
        "label",
        "name",
        "device",
        "ratio",
        "compute_ns",
        "span_ns",
        *SHARES,
        "attention",
        "findings",
    ),
)
# Maximum number of rows without --full. Ranks with findings are chosen first.
ROWS_SHOWN = 32
ANY = "any"

Threshold = Annotated[
    float,
    threshold_option(
        "Report a GPU as slow if its kernel time exceeds that of the other GPUs by more than this "
        "fraction."
    ),
]
FailOn = Annotated[
    tuple[str, ...],
    Option(
        ("--fail-on",),
        complete=complete_names(lambda: (*CODES, ANY)),
        multiple=True,
        metavar="FINDING",
        check=one_of((*CODES, ANY), "--fail-on"),
        help="Exit with code 3 if any rank has this finding, such as slow-gpu or other-attention. "
        "`any` means every finding. Separate several values by commas, or repeat the option.",
    ),
]
Full = Annotated[
    bool, Option(("--full",), help="Show every rank of a large job, not only the outliers.")
]


def _to_frame(answer: RankComparison) -> pd.DataFrame:
    rows = frame([_line(row) for row in answer.rows], list(FIELDS))
    rows.attrs["findings"] = [record(finding) for finding in answer.findings]
    return rows


@command(
    "ranks",
    frame=_to_frame,
    fill={"codes": legend(CODES)},
)
def ranks(
    *runs: Runs, threshold: Threshold = stats.THRESHOLD, store: Store = None
) -> RankComparison:
    """Compare the ranks of a job to find slow GPUs, and ranks that did different work.

    Kernels are compared across ranks only if they have the same name, run in the same range and use
    the same grid. Collectives are excluded, because all ranks spend time in them while they wait
    for a slow GPU. RUN is a folder of traces, a trace file or a stored run. If RUN is a single run,
    all ranks of its job are compared. A job consists of all traces in one folder that record the
    same number of ranks. Without RUN, the newest job is compared.

    {codes}

    \b
    Examples:
      profharness ranks step100
      profharness ranks step100 --fail-on slow-gpu,other-attention
    """
    # imported here because it imports numpy, which --help does not need
    from profharness.commands.ranks.outliers import compare_ranks

    with open_store(store_path(store)) as opened:
        return compare_ranks(opened, [str(run) for run in runs], threshold)


@document(ranks)
def show(answer: RankComparison, *, full: Full = False) -> Document:
    """Return a document with the findings and one row per rank.

    If the job is large, the document contains all ranks only if `full` is set.
    """
    lines = [_line(row) for row in answer.rows]
    apart = [line for line in lines if line["findings"]]
    others = [line for line in lines if not line["findings"]]
    shown = lines if full or len(lines) <= ROWS_SHOWN else [*apart, *others][:ROWS_SHOWN]
    columns = [
        column
        for column in filled_columns(COLUMNS, lines)
        if column.key != "device" or len({line["device"] for line in lines}) > 1
    ]
    blocks: list[Block] = [Heading("Ranks", _summary(answer)), Table.of(columns, shown)]
    for finding in answer.findings:
        labels = join_few(finding.ranks, LABELS_SHOWN)
        label = f"{finding.code}: {labels}" if labels else finding.code
        blocks.append(Note(finding.sentence, label, "warning"))
    if left_out := len(lines) - len(shown):
        blocks.append(More(f"{counted(left_out, 'rank')} without findings"))
    blocks += [Note(text, "", "warning") for text in answer.caveats]
    names = ("world_size", "hosts", "spread", "threshold", "caveats")
    findings = [record(finding) for finding in answer.findings]
    extra = {"findings": findings, "codes": CODES, **record(answer, names)}
    found = ranks_answer(answer)
    return Document(SCHEMA, "Ranks", tuple(blocks), FIELDS, tuple(lines), extra, answer=found)


def _line(row: RankFigures) -> dict[str, Any]:
    return record(row) | {name: getattr(row, name) for name in SHARES}


def _summary(answer: RankComparison) -> str:
    """Return a line on the ranks and their median shares.

    For example, `8 of 8 ranks on 2 hosts; the GPUs are idle for a median of 4 % of their spans`.
    """
    of = f" of {answer.world_size}" if answer.world_size else ""
    where = f" on {answer.hosts} hosts" if answer.hosts and answer.hosts > 1 else ""
    parts = [f"{len(answer.rows)}{of} ranks{where}"]
    middles: list[float | None] = []
    for name in SHARES:
        known = [part for row in answer.rows if (part := getattr(row, name)) is not None]
        middles.append(statistics.median(known) if known else None)
    idle, collectives, exposed = middles
    if idle is not None:
        parts.append(f"the GPUs are idle for a median of {share_text(idle)} of their spans")
    if collectives:
        alone = f" ({share_text(exposed)} exposed)" if exposed is not None else ""
        parts.append(f"collectives run for {share_text(collectives)}{alone}")
    return "; ".join(parts)


@gate(ranks)
def check(answer: RankComparison, *, fail_on: FailOn = ()) -> list[GateResult]:
    """Return the result of each gate."""
    return [
        GateResult(
            f"--fail-on {name}",
            counted(len(answer.rows), "rank"),
            tuple(
                f"{'' if each.code == name else f'{each.code}: '}{', '.join(each.ranks)}: "
                f"{each.sentence}"
                for each in answer.findings
                if name in (each.code, ANY)
            ),
            f"{counted(len(answer.rows), 'rank')} checked, none has this finding",
        )
        for name in split_names(fail_on)
    ]


DECLARATION = declaration_of(ranks)
