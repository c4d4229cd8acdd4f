"""Check the texts of explanations: verdict, witnesses, advice, map letters, and unchanged code."""

from __future__ import annotations

from dataclasses import replace

import pytest

from profharness.attention.dispatch.advice import Advice, BackendAnswer
from profharness.attention.dispatch.by_rule import (
    FIELDS,
    Explanation,
    chosen,
    explanation_record,
    flat_record,
)
from profharness.commands.explain.tables import answer_blocks, explain_document, verdict
from profharness.render.document import Code, Document, Note
from profharness.render.renderers import render_markdown
from profharness.render.terminal import render_table
from profharness.rows import Refusal

ORDER = ("cudnn", "flash", "efficient", "math")
NO_MASK = Refusal("mask", "Flash Attention does not support non-null attn_mask.", "live")
CODE = "with sdpa_kernel([X]):\n    out = call(\n        " + "q, " * 60 + "\n    )"


def answer(took: str = "cudnn", refused: tuple[str, ...] = (), **changes: object) -> Explanation:
    """Return an explanation in which each refused backend has one reason."""
    sides = tuple(
        BackendAnswer(name, name not in refused, (NO_MASK,) if name in refused else ())
        for name in ORDER
    )
    told = {"torch": "2.11.0", "gpu": "H200", "cudnn": 91900, "device_type": "cuda"}
    made = Explanation(
        config="b2-h8-s512-d64-fp16",
        source="live",
        environment=told,
        priority_order=ORDER,
        predicted=took,
        choice=took,
        agree=True,
        backends=sides,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("made", "starts"),
    [
        (answer(), "auto runs cudnn, because it comes first in the priority order and takes"),
        (
            answer("flash", ("cudnn",)),
            "auto runs flash, because cudnn, which comes before it in the priority order, is refused",
        ),
        (
            answer("efficient", ("cudnn", "flash")),
            "auto runs efficient, because cudnn and flash, which come before it in the priority "
            "order, are refused",
        ),
        (answer("flash"), "auto runs flash, because PyTorch says so"),
        (answer("none", ORDER), "auto raises, because no backend takes this config"),
        (answer("unknown"), "what auto runs is not known"),
        (answer("math", priority_order=()), "auto runs math, because it takes this config"),
    ],
)
def test_verdict_has_choice_and_reason(made: Explanation, starts: str) -> None:
    assert verdict(made).startswith(starts)


def test_verdict_mentions_each_other_backend() -> None:
    said = verdict(answer("cudnn", ("flash",)))
    assert "flash would be refused: Flash Attention does not support non-null attn_mask;" in said
    assert "efficient and math take it too, but come later" in said
    unknown = answer(backends=(BackendAnswer("flash", None),))
    assert "whether flash takes it is not known" in verdict(unknown)


def test_verdict_omits_backends_outside_the_order() -> None:
    made = answer("flash", ("cudnn", "efficient"), priority_order=("flash", "math"))
    assert "cudnn" not in verdict(made)
    assert "cudnn" in render_table(explain_document([made]))


def test_disagreeing_witness_is_a_warning() -> None:
    made = answer(predicted="flash", agree=False, observed="cudnn")
    (note,) = [b for b in answer_blocks(made) if isinstance(b, Note) and b.label == "agree"]
    assert note.level == "warning"
    assert note.text == (
        "mismatch: the rules predict flash, PyTorch says cudnn, a stored run shows cudnn"
    )
    assert not [
        b for b in answer_blocks(answer(agree=None)) if isinstance(b, Note) and b.label == "agree"
    ]


@pytest.mark.parametrize(
    ("gain", "text"), [(1.5, "measured 1.50x faster"), (0.5, "measured 2.00x slower")]
)
def test_advice_shows_what_was_checked_and_measured(gain: float, text: str) -> None:
    advice = Advice("pad it.", CODE, None, True, "cudnn", gain)
    side = BackendAnswer("cudnn", False, (NO_MASK,), (advice,))
    said = render_table(explain_document([answer("flash", backends=(side,))]))
    assert text in " ".join(said.split())
    assert "pad it; asked again: eligible; auto then runs cudnn" in " ".join(said.split())


def test_advice_on_an_eligible_backend_is_shown_if_named() -> None:
    side = BackendAnswer("flash", True, (), (Advice("name it", "", None, True, "flash"),))
    made = answer(backends=(side,))
    for named, shown in (((), False), (("flash",), True)):
        assert ("name it" in render_table(explain_document([made], named=named))) is shown


def test_code_is_neither_wrapped_nor_escaped() -> None:
    document = Document("x/1", "x", (Code(CODE),), ("a",), ())
    for line in CODE.splitlines():
        assert f"    {line}".rstrip() in render_table(document, width=40).splitlines()
    assert f"```python\n{CODE}\n```" in render_markdown(document)
    brackets = Document("x/1", "x", (Code("a[bold] = 1"),), ("a",), ())
    assert "a[bold] = 1" in render_table(brackets, color=True)


def test_records_have_the_promised_keys() -> None:
    made = answer("flash", ("cudnn",))
    assert tuple(explanation_record(made)) == FIELDS
    assert explanation_record(made)["backends"][0] == {
        "backend": "cudnn",
        "eligible": False,
        "reasons": [{"code": "mask", "message": NO_MASK.message, "source": "live"}],
        "advice": [],
    }
    flat = flat_record(made)
    assert (flat["cudnn_eligible"], flat["cudnn_reasons"]) == (False, "mask")
    assert not [value for value in flat.values() if isinstance(value, list | dict | tuple)]


def test_error_is_shown() -> None:
    lost = answer(choice=None, agree=None, error="PyTorch could not be asked: it died")
    said = render_table(explain_document([lost]))
    assert "PyTorch could not be asked: it died" in said
    assert "what auto runs is not known" in said
    assert chosen(lost) == "unknown"
    assert chosen(replace(lost, source="rules")) == "cudnn"
