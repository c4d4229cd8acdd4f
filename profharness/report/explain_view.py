"""Answers of `explain` as a Document: a verdict line, the backends with all reasons, advice with
code, and what casts doubt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from profharness.explanation import SCHEMA, Advice, BackendAnswer, Explanation
from profharness.record import Refusal
from profharness.report.document import Block, Code, Column, Document, Heading, Note, Table

FIELDS = (
    *("config", "source", "environment", "priority_order", "predicted", "choice", "observed"),
    *("agree", "backends", "caveats", "error"),
)
COLUMNS = (
    Column("backend", "backend", repeat=False),
    Column("eligible", "eligible", repeat=False),
    Column("first", ""),
    Column("code", "reason"),
    Column("source", "source"),
    Column("message", "what it says", shrink=True),
)
FIRST = "first"  # marks the reason that PyTorch stops at
_STATES = {True: "yes", False: "no", None: "unknown"}
_NO_CHOICE = ("none", "error")


def explanation_record(answer: Explanation) -> dict[str, Any]:
    """The JSON record of one answer, keys as in FIELDS."""
    return {
        "config": answer.config,
        "source": answer.source,
        "environment": dict(answer.environment),
        "priority_order": list(answer.priority_order),
        "predicted": answer.predicted,
        "choice": answer.choice,
        "observed": answer.observed,
        "agree": answer.agree,
        "backends": [_backend_record(side) for side in answer.backends],
        "caveats": list(answer.caveats),
        "error": answer.error,
    }


def _backend_record(side: BackendAnswer) -> dict[str, Any]:
    reasons = [
        {"code": each.code, "message": each.message, "source": each.source} for each in side.reasons
    ]
    names = ("change", "code", "config", "verified", "choice", "gain")
    advice = [{name: getattr(each, name) for name in names} for each in side.advice]
    return {
        "backend": side.backend,
        "eligible": side.eligible,
        "reasons": reasons,
        "advice": advice,
    }


def flat_record(answer: Explanation) -> dict[str, Any]:
    """One flat row for a data frame: no nested values, `<backend>_eligible` and `<backend>_reasons`
    (codes, the first one first) for each backend.
    """
    told = answer.environment
    row: dict[str, Any] = {"config": answer.config, "source": answer.source}
    row |= {key: told.get(key) for key in ("torch", "device_type", "gpu", "capability", "cudnn")}
    row["priority_order"] = " > ".join(answer.priority_order) or None
    row |= {key: getattr(answer, key) for key in ("predicted", "choice", "observed", "agree")}
    for side in answer.backends:
        row[f"{side.backend}_eligible"] = side.eligible
        row[f"{side.backend}_reasons"] = "; ".join(each.code for each in side.reasons)
    return row | {"error": answer.error}


def explain_document(
    answers: Sequence[Explanation], *, full: bool = False, named: Sequence[str] = ()
) -> Document:
    """The answer of `profharness explain` for configs one by one. full shows messages whole, named
    are the backends that were asked about.
    """
    blocks = [block for each in answers for block in answer_blocks(each, full=full, named=named)]
    return Document(
        schema=SCHEMA,
        title="Why this kernel",
        blocks=tuple(blocks),
        fields=FIELDS,
        records=tuple(explanation_record(answer) for answer in answers),
    )


def answer_blocks(
    answer: Explanation, *, full: bool = False, named: Sequence[str] = ()
) -> list[Block]:
    """Heading, verdict, table, advice and doubts of one config. Advice on a backend that takes the
    config anyhow is shown where it is named, or where its gain is known.
    """
    blocks: list[Block] = [Heading(answer.config, environment_text(answer)), Note(verdict(answer))]
    if answer.error:
        blocks.append(Note(answer.error, "error", "error"))
    if answer.backends:
        blocks.append(_table(answer.backends))
    blocks += _witnesses(answer)
    if full:
        blocks += [
            Note(f"{reason.code}: {reason.message}", side.backend)
            for side in answer.backends
            for reason in side.reasons
        ]
    for side in answer.backends:
        for advice in side.advice:
            if full or side.eligible is not True or side.backend in named or advice.gain:
                blocks += _advice(side.backend, advice)
    blocks += [Note(text, "caveat", "warning") for text in answer.caveats]
    return blocks


def environment_text(answer: Explanation) -> str:
    """`torch 2.8.0, RTX A6000, cuDNN 91002, by rule`."""
    told = answer.environment
    parts = [f"torch {told['torch']}"] if told.get("torch") else []
    device = told.get("gpu") or {"cpu": "CPU"}.get(str(told.get("device_type")))
    parts += [str(device)] if device else []
    parts += [f"cuDNN {told['cudnn']}"] if told.get("cudnn") else []
    return ", ".join([*parts, "by rule" if answer.source == "rules" else "live"])


def chosen(answer: Explanation) -> str:
    """What `auto` takes: PyTorch's own answer, or the rules' where those were asked; `unknown` where
    PyTorch was asked and gave none.
    """
    told = answer.predicted if answer.source == "rules" else answer.choice
    return told or "unknown"


def verdict(answer: Explanation) -> str:
    """One sentence: what `auto` runs, why, and why not each of the others."""
    choice = chosen(answer)
    if choice == "unknown":
        lead = "what auto runs is not known"
    elif choice in _NO_CHOICE:
        lead = "auto raises, because no backend takes this config"
    else:
        lead = f"auto runs {choice}, because {_because(choice, answer)}"
    tried = answer.priority_order or [side.backend for side in answer.backends]
    others = [
        f"{side.backend} would be refused: {_first_text(side)}"
        for side in answer.backends
        if side.backend != choice and side.eligible is False and side.backend in tried
    ]
    later = [side.backend for side in answer.backends if side.backend != choice and side.eligible]
    if later and choice not in ("unknown", *_NO_CHOICE):
        verb = "takes" if len(later) == 1 else "take"
        others.append(f"{_and(later)} {verb} it too, but {_come(later)} later in the order")
    others += [
        f"whether {side.backend} takes it is not known"
        for side in answer.backends
        if side.eligible is None
    ]
    return "; ".join([lead, *others]) + "."


def _because(choice: str, answer: Explanation) -> str:
    order = answer.priority_order
    if choice not in order:
        return "it takes this config"
    place = order.index(choice)
    if place == 0:
        return "it comes first in the priority order and takes this config"
    refused = {side.backend for side in answer.backends if side.eligible is False}
    before = [name for name in order[:place] if name in refused]
    if len(before) < place:
        return "PyTorch says so"
    is_are = "is" if len(before) == 1 else "are"
    comes = "comes" if len(before) == 1 else "come"
    return f"{_and(before)}, which {comes} before it in the priority order, {is_are} refused"


def _first_text(side: BackendAnswer) -> str:
    if not side.reasons:
        return "no reason given"
    return side.reasons[0].message.rstrip(".")


def _and(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _come(names: Sequence[str]) -> str:
    return "comes" if len(names) == 1 else "come"


def _table(backends: Sequence[BackendAnswer]) -> Table:
    rows: list[tuple[Any, ...]] = []
    for side in backends:
        state = _STATES[side.eligible]
        if not side.reasons:
            rows.append((side.backend, state, "", "", "", ""))
        for index, reason in enumerate(side.reasons):
            mark = FIRST if index == 0 and side.eligible is False else ""
            rows.append((side.backend, state, mark, *_reason(reason)))
    return Table(COLUMNS, tuple(rows))


def _reason(reason: Refusal) -> tuple[str, str, str]:
    return reason.code, reason.source, reason.message


def _witnesses(answer: Explanation) -> list[Block]:
    """What rules, PyTorch and a stored run say, where at least two say something."""
    if answer.agree is None:
        return []
    told = (
        ("the rules predict", answer.predicted),
        ("PyTorch says", answer.choice),
        ("a stored run shows", answer.observed),
    )
    text = ", ".join(f"{what} {name}" for what, name in told if name)
    if answer.agree:
        return [Note(text, "agree")]
    return [Note(f"mismatch: {text}", "agree", "warning")]


def _advice(backend: str, advice: Advice) -> list[Block]:
    parts = [advice.change.rstrip(".")]
    if advice.verified:
        parts.append("asked again: eligible")
    elif advice.verified is False:
        parts.append("asked again: still refused")
    if advice.choice:
        parts.append(f"auto then runs {advice.choice}")
    if advice.gain is not None:
        much = advice.gain if advice.gain >= 1 else 1 / advice.gain
        word = "faster" if advice.gain >= 1 else "slower"
        parts.append(f"measured {much:.2f}x {word} (the call alone, not what prepares its inputs)")
    note = Note("; ".join(parts), f"for {backend}")
    return [note, Code(advice.code)] if advice.code else [note]
