"""Check the texts of explanations: verdict, witnesses, advice, map letters, and unchanged code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profharness.attention.config import NUMERIC, Config, expand_configs, parse_config
from profharness.attention.dispatch.advice import Advice, BackendAnswer, PredictedTimes
from profharness.attention.dispatch.by_rule import (
    FIELDS,
    Explanation,
    choices_by_rule,
    chosen,
    explanation_record,
    flat_record,
    named_platforms,
)
from profharness.commands.explain.answer import (
    Way,
    explain_answer,
    ranked_ways,
    saving_texts,
)
from profharness.commands.explain.maps import (
    ALL_OF,
    Bisection,
    bisect_all,
    bisect_one,
    draw_maps,
    first_indices,
    get,
    numeric_name,
    put,
    varying,
)
from profharness.commands.explain.tables import (
    answer_blocks,
    bisect_document,
    explain_document,
)
from profharness.errors import UsageError
from profharness.render.document import Code, Document, Note, Table, formatted_rows
from profharness.render.renderers import render_markdown
from profharness.render.terminal import render_table
from profharness.rows import Refusal

ORDER = ("cudnn", "flash", "efficient", "math")
NO_MASK = Refusal("mask", "Flash Attention does not support non-null attn_mask.", "live")
PADDED = ("pad head_dim",)
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
        (answer(), "PyTorch 2.11 runs cudnn on an H200, its first choice."),
        (
            answer("flash", ("cudnn",)),
            "PyTorch 2.11 runs flash on an H200.",
        ),
        (
            answer("efficient", ("cudnn", "flash")),
            "PyTorch 2.11 runs efficient on an H200.",
        ),
        (answer("flash"), "PyTorch 2.11 runs flash on an H200."),
        (answer("none", ORDER), "PyTorch 2.11 raises on an H200: no backend supports this config."),
        (answer("unknown"), "The backend that PyTorch 2.11 runs on an H200 is unknown."),
        (answer("math", priority_order=()), "PyTorch 2.11 runs math on an H200."),
    ],
)
def test_an_answer_begins_with_the_choice(made: Explanation, starts: str) -> None:
    assert explain_answer(made)[0] == starts


def test_an_answer_mentions_each_other_backend() -> None:
    assert explain_answer(answer("cudnn", ("flash",)))[1] == (
        "efficient and math could also run; PyTorch refuses flash (attn_mask is not supported)."
    )
    unknown = answer(backends=(BackendAnswer("flash", None),))
    assert explain_answer(unknown)[1] == "whether flash could run is unknown."
    assert explain_answer(answer("math", ("cudnn", "flash", "efficient")))[1].startswith(
        "PyTorch refuses cudnn, flash and efficient ("  # a common reason is given once
    )


def test_an_answer_omits_backends_outside_the_order() -> None:
    made = answer("flash", ("cudnn", "efficient"), priority_order=("flash", "math"))
    assert "cudnn" not in " ".join(explain_answer(made))
    assert "cudnn" in render_table(explain_document([made]))


def test_disagreeing_witness_is_a_warning() -> None:
    made = answer(predicted="flash", agree=False, observed="cudnn")
    (note,) = [b for b in answer_blocks(made) if isinstance(b, Note)]
    assert (note.label, note.level) == ("mismatch", "warning")
    assert note.text == (
        "the rules predict flash, PyTorch chooses cudnn and a stored run shows cudnn"
    )
    assert not [b for b in answer_blocks(answer(agree=None)) if isinstance(b, Note)]


def test_agreement_is_only_in_the_full_answer() -> None:
    assert not [b for b in answer_blocks(answer()) if isinstance(b, Note)]
    (note,) = [b for b in answer_blocks(answer(), full=True) if isinstance(b, Note)]
    assert note.text == "The rules and PyTorch agree: cudnn."


@pytest.mark.parametrize(
    ("gain", "text"),
    [
        (1.5, "The measured call is 1.50 times as fast"),
        (0.5, "The measured call takes 2.00 times as long"),
    ],
)
def test_advice_shows_what_was_checked_and_measured(gain: float, text: str) -> None:
    advice = Advice(
        *("pad it.", CODE, None, True, "cudnn", gain, "cold median in run a"), steps=PADDED
    )
    side = BackendAnswer("cudnn", False, (NO_MASK,), (advice,))
    made = answer("flash", backends=(side,))
    said = " ".join(render_table(explain_document([made], named=["cudnn"])).split())
    assert said.count(text) == 1  # in the answer, which the advice does not repeat
    assert (
        "to run cudnn The following code makes the advised change:" in said
        and "Checked" not in said
    )
    full = " ".join(render_table(explain_document([made], full=True)).split())
    assert f"Pad it. Checked: cudnn accepts this. auto then runs cudnn. {text}" in full
    assert explain_answer(made, ["cudnn"])[-2:] == (
        "To run cudnn: pad it (code below).",
        f"{text} (cold median in run a), without the time to prepare the inputs.",
    )


@pytest.mark.parametrize(
    ("times", "text"),
    [
        (
            PredictedTimes(2000, 1000, 2.0, True, "model"),
            "Predicted: cudnn takes 1.00 µs instead of 2.00 µs per call (2.00 times as fast)",
        ),
        (
            PredictedTimes(2000, 1800, 2000 / 1800, False, "model"),
            "Predicted: cudnn takes 1.80 µs instead of 2.00 µs per call (1.11 times as fast, but the "
            "intervals overlap)",
        ),
        (
            PredictedTimes(3000, 2000, 1.5, True, "measured"),
            "According to the atlas: cudnn takes 2.00 µs instead of 3.00 µs per call (1.50 times as "
            "fast)",
        ),
        (
            PredictedTimes(None, 2000, None, None, "model"),
            "Predicted: cudnn takes 2.00 µs per call",
        ),
    ],
)
def test_a_predicted_saving_says_what_it_is(times: PredictedTimes, text: str) -> None:
    advice = Advice("drop it", CODE, None, True, "cudnn", predicted=times)
    side = BackendAnswer("cudnn", False, (NO_MASK,), (advice,))
    made = answer("flash", backends=(side,))
    assert explain_answer(made)[-1] == f"{text}."
    padded = replace(side, advice=(replace(advice, steps=PADDED),))
    (told,) = explain_answer(answer("flash", backends=(padded,)))[-1:]
    assert "µs plus the time to prepare the inputs" in told and "times as fast" not in told
    assert ("(the intervals overlap)" in told) is (times.certain is False)
    measured = replace(advice, gain=1.5, gain_source="cold median in run a")
    first, second = saving_texts(Way(side, measured))
    assert first.startswith("The measured call is 1.50 times as fast") and second == f"{text}."


def test_the_answer_recommends_no_change_that_makes_the_call_slower() -> None:
    advice = Advice(
        "pad it",
        CODE,
        None,
        True,
        "cudnn",
        predicted=PredictedTimes(1000, 2000, 0.5, True, "model"),
    )
    made = answer("flash", backends=(BackendAnswer("cudnn", False, (NO_MASK,), (advice,)),))
    assert "To run cudnn" not in " ".join(explain_answer(made))
    assert "To run cudnn: pad it (code below)." in explain_answer(made, ["cudnn"])
    said = render_table(explain_document([made]))
    assert "Pad it" not in said and "sdpa_kernel" not in said
    assert (
        "cudnn could run after a change, but is predicted to be slower.\n--full also shows how to run cudnn."
        in said
    )
    assert "Pad it" in render_table(explain_document([made], full=True))


def test_the_best_advice_comes_first() -> None:
    def advised(backend: str, speed_up: float, *steps: str) -> BackendAnswer:
        times = PredictedTimes(1000, round(1000 / speed_up), speed_up, True, "model")
        advice = Advice(
            f"change for {backend}", CODE, None, True, backend, None, None, times, steps
        )
        return BackendAnswer(backend, False, (NO_MASK,), (advice,))

    def order(*sides: BackendAnswer) -> list[str]:
        return [way.backend for way in ranked_ways(answer("math", backends=sides))]

    assert order(advised("cudnn", 2, "bf16"), advised("flash", 3, "bf16")) == ["flash", "cudnn"]
    # fewer changes, and changes that keep the output, come before a larger saving
    assert order(advised("flash", 9, "no mask", "bf16"), advised("cudnn", 2, "bf16"))[0] == "cudnn"
    assert order(advised("flash", 9, "bf16"), advised("cudnn", 2, "pad head_dim"))[0] == "cudnn"
    assert order(advised("cudnn", 0.5, "pad head_dim"), advised("flash", 2, "bf16"))[0] == "flash"


def test_each_refused_backend_has_all_its_reasons() -> None:
    dtype = Refusal("dtype", "Expected a half dtype. Got float.", "rule")
    multiple = Refusal("head_dim_multiple", "head_dim should be a multiple of 8", "rule")
    sides = (
        BackendAnswer("cudnn", False, (dtype,)),
        BackendAnswer("flash", False, (NO_MASK, dtype, multiple)),
        BackendAnswer("efficient", False, (multiple,)),
    )
    made = replace(answer("math", backends=sides), config="b2-h8-s512-d100-fp16")
    assert explain_answer(made)[1] == (
        "PyTorch refuses cudnn (fp16 is not supported), flash (attn_mask and fp16 are not supported, "
        "and head_dim=100 is not a multiple of 8) and efficient (head_dim=100 is not a multiple of 8)."
    )


def test_a_named_backend_without_advice_is_mentioned() -> None:
    made = answer("math", backends=(BackendAnswer("flash", False, (NO_MASK,)),))
    told = (
        "No advice is available for flash: no known change to the call would prevent the refusal."
    )
    assert explain_answer(made, ["flash"])[-1] == told
    assert told not in explain_answer(made) and told not in explain_answer(made, ["cudnn"])
    assert told in render_table(explain_document([made], named=["flash"]))


def test_advice_for_a_backend_that_auto_does_not_take_does_not_promise_it() -> None:
    change = (
        "leave attn_mask out; then select flash with sdpa_kernel, because auto would choose cudnn"
    )
    advice = Advice(change, CODE, None, True, "cudnn")
    side = BackendAnswer("flash", False, (NO_MASK,), (advice,))
    said = " ".join(render_table(explain_document([answer(backends=(side,))], full=True)).split())
    assert (
        "Leave attn_mask out. Checked: flash accepts this. Without sdpa_kernel PyTorch still picks cudnn."
    ) in said
    assert "auto then runs" not in said


def test_advice_on_an_eligible_backend_is_shown_if_named() -> None:
    side = BackendAnswer("flash", True, (), (Advice("name it", "", None, True, "flash"),))
    made = answer(backends=(side,))
    for named, shown in (((), False), (("flash",), True)):
        said = render_table(explain_document([made], named=named))
        assert ("Name it" in said) is shown
        assert ("--full also shows how to run flash." in said) is not shown


def test_conditions_of_advice_are_said_once() -> None:
    bf16 = "compute in bf16: 8 bits"

    def advised(backend: str, change: str, after: int, config: str) -> BackendAnswer:
        times = PredictedTimes(1000, after, 1000 / after, True, "model")
        advice = Advice(change, f"{backend}()", config, True, backend, predicted=times)
        return BackendAnswer(backend, False, (NO_MASK,), (advice,))

    sides = (
        advised("cudnn", bf16, 100, "a"),
        advised("flash", f"drop it; {bf16}", 200, "b"),
        advised("efficient", bf16, 400, "a"),  # the same change, but slower than cudnn
    )
    said = " ".join(render_table(explain_document([answer("math", backends=sides)])).split())
    assert said.count("8 bits") == 1
    assert (
        "to run flash Drop it; compute in bf16. Predicted: flash takes 0.200 µs instead of" in said
    )
    assert "cudnn()" in said and "flash()" not in said and "efficient()" not in said
    assert "efficient could run after a change, but is predicted to be slower than cudnn" in said


def test_a_hint_tells_backends_that_need_a_change_from_those_that_do_not() -> None:
    """Bug: "flash and efficient could run after a change too", but flash needed no change."""

    def slower(backend: str, *, eligible: bool) -> BackendAnswer:
        times = PredictedTimes(1000, 2000, 0.5, True, "model")
        advice = Advice("change it", CODE, None, True, backend, predicted=times)
        return BackendAnswer(backend, eligible, () if eligible else (NO_MASK,), (advice,))

    made = answer(backends=(slower("flash", eligible=True), slower("efficient", eligible=False)))
    said = " ".join(render_table(explain_document([made])).split())
    assert (
        "flash could also run, and efficient could run after a change, but are predicted to be slower"
    ) in said


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
        "predicted_ns": None,
    }
    flat = flat_record(made)
    assert (flat["cudnn_eligible"], flat["cudnn_reasons"]) == (False, "mask")
    assert not [value for value in flat.values() if isinstance(value, list | dict | tuple)]


def test_error_is_shown() -> None:
    lost = answer(choice=None, agree=None, error="PyTorch gave no answer: it died")
    said = render_table(explain_document([lost]))
    assert "PyTorch gave no answer: it died" in said
    assert "The backend that PyTorch 2.11 runs on an H200 is unknown." in said
    assert chosen(lost) == "unknown"
    assert chosen(replace(lost, source="rules")) == "cudnn"


BASE = parse_config("2,8,512,64,fp16")
(H200,) = named_platforms("2.11", "H200")


def by_value(name: str, answer: Callable[[int], str]) -> Callable[[Sequence[Config]], list[str]]:
    return lambda configs: [answer(int(str(get(each, name)))) for each in configs]


def holds(found: Bisection, answer: Callable[[int], str]) -> None:
    """Check that stretches leave no gap and are true at every evaluated value."""
    for one, other in zip(found.stretches, found.stretches[1:], strict=False):
        assert other.first == one.last + 1
        assert one.choice != other.choice
    for stretch in found.stretches:
        assert {stretch.first, stretch.last} <= set(found.asked)
        for value in found.asked:
            if stretch.first <= value <= stretch.last:
                assert answer(value) == stretch.choice


@given(st.integers(2, 65_536))
@settings(max_examples=60)
def test_one_threshold_is_found_exactly(threshold: int) -> None:
    def answer(value: int) -> str:
        return "cudnn" if value < threshold else "flash"

    found = bisect_one(BASE, "seq_q", (1, 65_536), by_value("seq_q", answer))
    holds(found, answer)
    assert found.flips == ((threshold - 1, threshold),)
    assert len(found.asked) < 4000


@given(st.lists(st.integers(1, 5000), max_size=6), st.integers(1, 4000), st.integers(0, 4000))
@settings(max_examples=40)
def test_bisection_is_true_of_any_function(cuts: list[int], low: int, width: int) -> None:
    def answer(value: int) -> str:
        return ("flash", "cudnn", "efficient")[sum(value >= cut for cut in cuts) % 3]

    found = bisect_one(BASE, "head_dim", (low, low + width), by_value("head_dim", answer))
    holds(found, answer)
    assert found.stretches[0].first == low
    assert found.stretches[-1].last == low + width
    assert found.possible == width + 1


def test_head_dims_that_are_not_multiples_of_8_are_found_on_an_h200() -> None:
    """Compare with every single value: the choice is not monotonic."""
    (found,) = bisect_all(
        expand_configs("2,8,512,1:1024:*1024,fp16"), "head_dim", lambda c: choices_by_rule(c, H200)
    )
    assert found.possible == 1024
    every = choices_by_rule([replace(BASE, head_dim=n) for n in range(1, 1025)], H200)
    for stretch in found.stretches:
        assert set(every[stretch.first - 1 : stretch.last]) == {stretch.choice}


def told_in_lines(found: Bisection) -> list[tuple[str, ...]]:
    document = bisect_document([found], where="here")
    (table,) = [block for block in document.blocks if isinstance(block, Table)]
    assert len(document.records) == len(found.stretches)
    return [tuple(row) for row in formatted_rows(table)]


def test_rule_modulo_128_is_found_and_printed_in_few_lines() -> None:
    """cuDNN before 9.26 on SM90 refuses lengths of 64 modulo 128 in training with 2.15."""
    (place,) = named_platforms("2.15", "H200", cudnn="9.25")
    config = parse_config("2,8,512,64,bf16,bwd")
    (found,) = bisect_all([config], "seq_kv", lambda many: choices_by_rule(many, place))
    odd = [each for each in found.stretches if each.choice == "flash" and each.first > 1]
    assert [each.first for each in odd] == list(range(64, 65_537, 128))
    assert all(each.first == each.last for each in odd)
    lines = told_in_lines(found)
    assert len(lines) < 8
    assert ("flash", "every 128 up to 65,344") in [row[2:] for row in lines]


def test_multiples_of_8_are_evaluated_to_the_end() -> None:
    def answer(value: int) -> str:
        return "efficient" if value % 8 == 0 else "math"

    found = bisect_one(BASE, "head_dim", (1, 20_000), by_value("head_dim", answer))
    assert {each.first for each in found.stretches if each.choice == "efficient"} == set(
        range(8, 20_001, 8)
    )
    assert told_in_lines(found) == [
        ("1", "7", "math", "every 8 up to 19,999"),
        ("8", "8", "efficient", "every 8 up to 20,000"),
    ]


def test_range_defaults_to_1_to_65536() -> None:
    def choose(configs: Sequence[Config]) -> list[str]:
        return ["flash"] * len(configs)

    (ranged,) = bisect_all(expand_configs("2,8,{64,4096},64"), "seq", choose)
    assert (ranged.asked[0], ranged.asked[-1]) == (64, 4096)
    (single,) = bisect_all([BASE], "seq", choose)
    assert (single.asked[0], single.asked[-1], single.possible) == (1, 65_536, 65_536)
    several = bisect_all(expand_configs("2,8,{64,128},{64,80},{fp16,bf16}"), "seq", choose)
    assert len(several) == 4


def test_only_heads_divisible_by_kv_heads_are_evaluated() -> None:
    asked: list[Config] = []

    def choose(configs: Sequence[Config]) -> list[str]:
        asked.extend(configs)
        return ["flash"] * len(configs)

    grouped = expand_configs("1,{8,64},128,64,kv_heads=8")
    (found,) = bisect_all(grouped, "heads", choose)
    assert found.asked == (8, 16, 24, 32, 40, 48, 56, 64)
    assert {each.num_kv_heads for each in asked} == {8}
    (divisors,) = bisect_all([parse_config("1,12,128,64")], "kv_heads", choose)
    assert divisors.asked == (1, 2, 3, 4, 6, 12)


def test_what_cannot_be_bisected_is_an_error() -> None:
    for name, text in (("dtype", "is not a numeric property"), ("sequence", "is not a property")):
        with pytest.raises(UsageError, match=text):
            numeric_name(name)
    names = {"seq_len": "seq", "num_kv_heads": "kv_heads", "seq_len_q": "seq_q"}
    assert {text: numeric_name(text) for text in names} == names
    unlike = [parse_config("1,2,64,64,seq_q=1")]
    with pytest.raises(UsageError, match="different lengths"):
        bisect_all(unlike, "seq", lambda configs: ["flash"] * len(configs))


def test_short_range_is_evaluated_completely() -> None:
    assert first_indices(range(1, ALL_OF + 1)) == list(range(ALL_OF))
    assert len(first_indices(range(1, 65_537))) < 4000


@given(st.sampled_from(NUMERIC), st.integers(1, 4096))
def test_property_that_is_set_is_returned(name: str, value: int) -> None:
    config = put(parse_config("2,8,512,64,head_dim_v=32"), name, value)
    if config is None:
        assert (name == "kv_heads" and 8 % value) or (name == "kv_batch" and value not in (1, 2))
    else:
        assert get(config, name) == value
        assert parse_config(config.label) == config


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("2,8,{64,128},{64,80}", ["seq", "head_dim"]),
        ("2,{4,8},64,64", ["heads"]),
        ("2,8,64,64,kv_heads={1,2}", ["kv_heads"]),
        ("2,8,64,64,seq_q={1,64},{fp16,bf16}", ["seq_q", "dtype"]),
        ("2,8,64,64", []),
    ],
)
def test_varying_properties(text: str, names: list[str]) -> None:
    assert varying(expand_configs(text)) == names


def test_map_has_every_config_once_and_its_edges() -> None:
    configs = expand_configs("2,8,{64,512},{64,96,100,128},{fp16,bf16},mask={none,bool}")
    choices = choices_by_rule(configs, H200)
    maps = draw_maps(configs, choices)
    assert [each.fixed for each in maps] == [
        (("dtype", dtype), ("mask", mask))
        for dtype in ("fp16", "bf16")
        for mask in ("none", "bool")
    ]
    assert sum(len(each.cells) for each in maps) == len(configs)
    for config, choice in zip(configs, choices, strict=True):
        (own,) = [m for m in maps if m.fixed == (("dtype", config.dtype), ("mask", config.mask))]
        assert own.cells[config.seq_len_q, config.head_dim] == choice
    (down, up) = maps[0].edges
    assert (down.along, down.before, down.after) == ("head_dim", 96, 100)
    assert (down.choice_before, down.choice_after) == ("cudnn", "flash")
    assert down.everywhere
    assert (up.before, up.after, up.choice_after) == (100, 128, "cudnn")


def test_map_shows_what_all_its_configs_share() -> None:
    configs = expand_configs("2,8,{64,512},{64,100},bf16,causal,kv_heads={8,4}")
    maps = draw_maps(configs, ["flash"] * len(configs))
    shared = "batch=2, heads=8, dtype=bf16, causal=yes"
    assert [each.title for each in maps] == [f"head_dim={n}, {shared}" for n in (64, 100)]


def test_one_property_makes_one_row_and_a_partial_edge_shows_where() -> None:
    configs = expand_configs("2,8,512,{64,100}")
    (row,) = draw_maps(configs, ["cudnn", "flash"])
    assert (row.rows, row.columns, len(row.row_values)) == ("", "head_dim", 1)
    square = expand_configs("2,8,{64,128},{64,100}")
    (each,) = draw_maps(square, ["cudnn", "cudnn", "cudnn", "flash"])
    assert {(edge.along, edge.at, edge.everywhere) for edge in each.edges} == {
        ("seq", (100,), False),
        ("head_dim", (128,), False),
    }


def test_missing_combinations_make_no_edge() -> None:
    configs = [parse_config(text) for text in ("2,8,64,64", "2,8,128,100")]
    (each,) = draw_maps(configs, ["cudnn", "flash"])
    assert each.edges == ()
    assert len(each.cells) == 2
