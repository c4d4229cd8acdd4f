"""`profharness ranks`: compare the ranks of a distributed job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from profharness import stats
from profharness.attention.config import split_names
from profharness.commands._command import command, declaration_of, document, gate
from profharness.commands._options import Option, one_of
from profharness.commands._types import (
    PathLike,
    Store,
    complete_runs,
    store_path,
    threshold_option,
)
from profharness.commands.ranks.comparison import CODES, RankComparison
from profharness.commands.ranks.tables import ranks_document
from profharness.errors import GateError
from profharness.render.document import Document
from profharness.store import frame, open_store

if TYPE_CHECKING:
    import pandas as pd

ANY = "any"
_WIDTH = max(map(len, CODES))

RankRuns = Annotated[PathLike, Option(metavar="[RUN_OR_FOLDER]...", complete=complete_runs)]
Threshold = Annotated[
    float, threshold_option("The relative excess of kernel time at which a GPU counts as slow.")
]
FailOn = Annotated[
    tuple[str, ...],
    Option(
        ("--fail-on",),
        multiple=True,
        metavar="FINDING",
        check=one_of((*CODES, ANY), "--fail-on"),
        help="Exit 3 on a finding: slow-gpu, other-attention, … or any. Repeatable, or separated by commas.",
    ),
]
Full = Annotated[
    bool, Option(("--full",), help="Show every rank of a large job, not only the outliers.")
]


def _to_frame(answer: RankComparison) -> pd.DataFrame:
    made = ranks_document(answer)
    rows = frame(list(made.records), list(made.fields))
    rows.attrs["findings"] = made.extra["findings"]
    return rows


@command(
    "ranks",
    frame=_to_frame,
    fill={"codes": "\n    ".join(f"{code:{_WIDTH}}  {text}" for code, text in CODES.items())},
)
def ranks(
    *runs: RankRuns, threshold: Threshold = stats.THRESHOLD, store: Store = None
) -> RankComparison:
    """Compare the ranks of a job: find slow GPUs and ranks that ran something else.

    Each kernel is compared with the same kernel, grid and range on the other ranks. Collectives are
    excluded: when all ranks wait for one GPU, only its own kernels show that it is slow. A run
    selects its whole job: the traces in the same folder, with the same number of ranks. Without a run,
    the newest job is compared.

    \b
    {codes}

    \b
    Examples:
      profharness ingest traces/step100 --scheduler local && profharness ranks
      profharness ranks traces/step100 --fail-on slow-gpu,other-attention
    """
    # imports numpy, which no other reading command needs
    from profharness.commands.ranks.outliers import compare_ranks

    with open_store(store_path(store)) as opened:
        return compare_ranks(opened, [str(run) for run in runs], threshold)


@document(ranks)
def show(answer: RankComparison, *, full: Full = False) -> Document:
    """Return the document."""
    return ranks_document(answer, full=full)


@gate(ranks)
def check(answer: RankComparison, *, fail_on: FailOn = ()) -> None:
    """Raise GateError if there are findings named by --fail-on."""
    gates = split_names(fail_on)
    met = [each for each in answer.findings if each.code in gates or ANY in gates]
    if met:
        lines = [f"{each.code}: {', '.join(each.ranks)}: {each.sentence}" for each in met]
        raise GateError(f"--fail-on {','.join(gates)} is met: " + "\n  ".join(lines))


DECLARATION = declaration_of(ranks)
