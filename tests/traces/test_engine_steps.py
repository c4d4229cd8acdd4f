"""The annotations of serving engines, and the work that follows from their sums of lengths."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from profharness.program.phases import HeadShape, part_work, step_title
from profharness.traces.engine_steps import BatchPart, is_engine_step, parse_engine_step

Lengths = Sequence[tuple[int, int]]
"""The numbers of new tokens and of all tokens of each request."""


def sums(lengths: Lengths) -> list[int]:
    return [
        sum(q for q, _ in lengths),
        sum(k for _, k in lengths),
        sum(q * q for q, _ in lengths),
        sum(q * k for q, k in lengths),
    ]


def vllm(prefill: Lengths, decode: Lengths) -> str:
    text = f"execute_{sum(q for q, _ in (*prefill, *decode))}"
    for name, part in (("context", prefill), ("generation", decode)):
        queries, keys, squares, products = sums(part)
        text += f"_{name}_{len(part)}(sq{queries}sk{keys}sqsq{squares}sqsk{products})"
    return text


def sglang(prefill: Lengths, decode: Lengths) -> str:
    if prefill and decode:
        head = f"MIXED bs={len(prefill) + len(decode)} c={len(prefill)} g={len(decode)}"
    elif prefill:
        head = f"EXTEND bs={len(prefill)} toks={sum(q for q, _ in prefill)}"
    else:
        head = f"DECODE bs={len(decode)}"
    for prefix, part in (("c", prefill), ("g", decode)):
        for key, value in zip(("sq", "sk", "sqsq", "sqsk"), sums(part), strict=True):
            head += f" {prefix}_{key}={value}" if part else ""
    return f"step[{head}]"


def counted_scores(lengths: Lengths) -> int:
    """Count the pairs of a new token and a token that it sees, one by one."""
    return sum(
        position <= k - q + row for q, k in lengths for row in range(q) for position in range(k)
    )


def drawn(seed: int) -> tuple[Lengths, Lengths]:
    """Return prefilled requests, some with cached tokens, and decoded requests, some drafted."""
    draw = random.Random(seed)
    drafted = draw.choice((1, 1, 4))
    prefill = [
        (q, q + draw.choice((0, draw.randrange(40)))) for q in draw.choices(range(1, 60), k=3)
    ]
    decode = [(drafted, drafted + draw.randrange(90)) for _ in range(draw.randrange(1, 6))]
    kept = draw.choice(("both", "prefill", "decode"))
    return ([] if kept == "decode" else prefill), ([] if kept == "prefill" else decode)


@pytest.mark.parametrize("annotate", [vllm, sglang])
@pytest.mark.parametrize("seed", range(40))
def test_scores_and_bytes_from_sums_equal_a_count(
    seed: int, annotate: Callable[[Lengths, Lengths], str]
) -> None:
    lengths = drawn(seed)
    step = parse_engine_step(annotate(*lengths))
    assert step is not None
    assert step.requests == sum(map(len, lengths))
    assert step.new_tokens == sum(q for part in lengths for q, _ in part)
    shape = HeadShape(8, 2, 64, 32, 2, 1)
    for part, requests in zip((step.prefill, step.decode), lengths, strict=True):
        assert (part is None) == (not requests)
        if part is None:
            continue
        scores = counted_scores(requests)
        assert part.scores == scores
        work = part_work(part, shape)
        assert work.flops == 8 * scores * 2 * (64 + 32)
        q_and_output = sum(q for q, _ in requests) * 8 * (64 + 32) * 2
        assert work.bytes == q_and_output + sum(k for _, k in requests) * 2 * (64 + 32) * 1


@pytest.mark.parametrize(
    ("name", "phase", "prefill", "decode"),
    [
        ("execute_context_2(6144)_generation_3(3)", "mixed", (2, 6144), (3, 3)),
        ("execute_context_1(888_788544)_generation_0(0)", "prefill", (1, 888), None),
        ("context_0(0)_generation_64(64)", "decode", None, (64, 64)),
        ("execute_context_0(0)_generation_32(128)", "verify", None, (32, 128)),
        ("execute_context_0(0)_generation_0(0)", "idle", None, None),
        ("execute_new_2_cached_0", "prefill", (2, None), None),
        ("[Executor] _forward_step 7: 1 ctx reqs, 4 gen reqs", "mixed", (1, None), (4, None)),
        ("step[DECODE bs=32]", "decode", None, (32, 32)),
        ("step[DECODE bs=64 g_sq=128 g_sqsq=256 g_sqsk=2 g_sk=1]", "verify", None, (64, 128)),
        ("step[EXTEND bs=15 toks=15360]", "prefill", (15, 15360), None),
        ("step[MIXED bs=2]", "mixed", (2, None), None),
        ("step[TARGET_VERIFY bs=4]", "verify", None, (4, None)),
        ("step[DRAFT_EXTEND_V2 bs=4]", "draft", None, (4, None)),
        ("step[IDLE bs=0]", "idle", None, None),
        ("decode[bs=117/128 tok=117 d=117]", "decode", None, (117, 117)),
        ("prefill[bs=2 tok=14721 ctx=[7803, 6918]]", "prefill", (2, 14721), None),
        ("execute_diffusion_1_1024x1024", "diffusion", (1, None), None),
    ],
)
def test_every_form_of_an_annotation(
    name: str,
    phase: str,
    prefill: tuple[int, int | None] | None,
    decode: tuple[int, int | None] | None,
) -> None:
    step = parse_engine_step(name)
    assert step is not None
    assert is_engine_step(name)
    parts = [part and (part.requests, part.queries) for part in (step.prefill, step.decode)]
    assert (step.phase, *parts) == (phase, prefill, decode)


@pytest.mark.parametrize(
    "name", ["ProfilerStep#3", "capture_32_FULL", "step", "prefill", "execute"]
)
def test_other_ranges_are_no_steps_of_an_engine(name: str) -> None:
    assert not is_engine_step(name)


def test_a_step_without_sums_has_no_scores() -> None:
    part = BatchPart(32, 32)
    assert part.scores is None
    with pytest.raises(ValueError, match="unknown"):
        part_work(part, HeadShape(8, 2, 64, 64, 2, 2))


def test_the_title_of_a_step_is_short() -> None:
    assert step_title("step[DECODE bs=1]") == "decode step of 1 request and 1 new token"
    assert step_title("step[MIXED bs=2]") == "mixed step of 2 requests"
    assert step_title("LlamaForCausalLM_0") == "LlamaForCausalLM_0"
