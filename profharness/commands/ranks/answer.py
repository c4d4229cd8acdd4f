"""Name the ranks of a job that are slow or ran something else."""

from __future__ import annotations

from collections.abc import Iterator

from profharness.commands.ranks.comparison import (
    MISSING,
    OTHER_KERNELS,
    SLOW_GPU,
    SLOW_KERNELS,
    RankComparison,
    RankFigures,
    usual_ranks,
)
from profharness.errors import counted, join_and, join_few
from profharness.units import as_long, share_text

LABELS_SHOWN = 8
OF_PACE = (SLOW_GPU, SLOW_KERNELS)
CLAUSES = {
    "other-attention": "ran other attention kernels",
    "other-kernels": "launched other kernels",
    "other-software": "ran other software",
    "other-gpu": "ran on another GPU model",
    "waits": "left the GPU idle for longer",
    "late": "arrived late at collectives, so that the other ranks had to wait",
}
"""Maps the code of a finding to what the ranks did, compared with most ranks."""


def ranks_answer(answer: RankComparison) -> tuple[str, ...]:
    """Return sentences about the ranks that are slow, and the ranks that ran something else."""
    return tuple(_sentences(answer))


def _sentences(answer: RankComparison) -> Iterator[str]:
    slow = [row for row in answer.rows if set(row.findings) & set(OF_PACE)]
    even = [row for row in answer.rows if row not in slow]
    if slow:
        row = max(slow, key=lambda row: row.ratio or 0)
        ratio = max(row.ratio or 1, 1)
        # a label without a rank is the name of a file, whose case must not change
        label = row.label if row.rank is None else f"{row.label[0].upper()}{row.label[1:]}"
        rest = f"; {_agreement(even, 'other ')}" if len(even) > 1 else ""
        count = len(slow) - 1
        also = f", {counted(count, 'other rank is', 'other ranks are')} slow too" if count else ""
        longer = f"its kernels take {as_long(ratio)} as on the other ranks"
        if SLOW_GPU not in row.findings:
            longer = (
                "some of its kernels take longer than on the other ranks, "
                f"and all together {as_long(ratio)}"
            )
        yield f"{label} is slow: {longer}{also}{rest}."
    elif agreement := _agreement(answer.rows):
        yield f"{agreement[0].upper()}{agreement[1:]}; no rank is slow."
    else:
        differ = any(finding.code == OTHER_KERNELS for finding in answer.findings)
        why = ", because they ran different kernels" if differ else ""
        yield f"The times of these ranks cannot be compared{why}."
    others: dict[str, set[str]] = {}  # labels of ranks by code
    for finding in answer.findings:
        if finding.code in CLAUSES:
            others.setdefault(finding.code, set()).update(finding.ranks)
    order = [row.label for row in answer.rows]
    did: dict[tuple[str, ...], list[str]] = {}  # what these ranks did
    for code, labels in others.items():
        did.setdefault(tuple(sorted(labels, key=order.index)), []).append(CLAUSES[code])
    clauses = [
        f"{join_few(labels, LABELS_SHOWN)} {join_and(texts)}" for labels, texts in did.items()
    ]
    if len(order) > 2 and 2 * len(set().union(*did)) > len(order):
        # If most ranks deviate, there is no majority with which to compare the others.
        yield f"Most ranks differ from each other: {'; '.join(clauses)}."
    elif clauses:
        single = all(len(texts) == 1 for texts in did.values())
        yield f"Unlike {usual_ranks(order)}, {join_and(clauses) if single else '; '.join(clauses)}."
    elif len(even) > 1 and not slow and all(each.code != MISSING for each in answer.findings):
        yield "All ranks ran the same kernels and used the same software."


def _agreement(rows: tuple[RankFigures, ...] | list[RankFigures], other: str = "") -> str:
    """Return a clause such as `all 8 ranks agree within 1 %`, or nothing without two ratios."""
    ratios = [row.ratio for row in rows if row.ratio]
    if len(ratios) < 2:
        return ""
    which = "both" if len(ratios) == 2 and not other else f"all {len(ratios):,}"
    return f"{which} {other}ranks agree within {share_text(max(ratios) / min(ratios) - 1)}"
