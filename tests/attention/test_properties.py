"""Invariants of predictions for arbitrary calls and machines, and of the tables."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from profharness.attention.config import SDPA_BACKENDS
from profharness.attention.dispatch.machine import RELEASES, AttentionParams, Machine, Mask
from profharness.attention.dispatch.predict import (
    TABLES,
    code,
    judge,
    predict,
    raises_later,
)
from profharness.devices import GPUS


def test_every_rule_applies_to_some_release() -> None:
    for rules in TABLES.values():
        for rule in rules:
            active = [rule.since <= release < rule.until for release in RELEASES]
            # The span of a rule may be empty on purpose.
            assert any(active) or rule.since >= rule.until, rule


dims = st.sampled_from([1, 8, 63, 64, 128, 136, 192, 200, 224, 256, 264])
masks = st.none() | st.builds(
    Mask,
    st.sampled_from([(7, 64), (1, 1, 7, 64), (2, 8, 7, 64), (3, 7, 64), (7, 63), (4, 4, 7, 64)]),
    st.just("float"),
    st.booleans(),
    st.sampled_from([1, 2]),
)
calls = st.builds(
    AttentionParams,
    batch=st.sampled_from([1, 2, 65536]),
    heads=st.sampled_from([1, 8, 65536]),
    kv_heads=st.sampled_from([1, 2, 3, 8]),
    kv_heads_v=st.none() | st.sampled_from([1, 4]),
    batch_kv=st.none() | st.just(3),
    seq_q=st.sampled_from([0, 1, 7, 512]),
    seq_kv=st.sampled_from([0, 1, 64, 192]),
    head_dim=dims,
    head_dim_v=st.none() | dims,
    dtype=st.sampled_from(["fp16", "bf16", "fp32", "fp64", "fp8_e4m3"]),
    device=st.sampled_from(["cuda", "cuda", "cpu"]),
    ndim=st.sampled_from([3, 4, 4, 5]),
    enable_gqa=st.booleans(),
    is_causal=st.booleans(),
    mask=masks,
    dropout=st.sampled_from([0.0, 0.1, 0.5]),
    requires_grad=st.booleans(),
    last_stride=st.sampled_from([1, 2]),
    storage_offset_bytes=st.sampled_from([0, 2, 16]),
    deterministic=st.sampled_from(["off", "error", "warn_only"]),
    enabled=st.frozensets(st.sampled_from(SDPA_BACKENDS), min_size=2),
    flash_impl=st.sampled_from(["FA2", "FA3", "FA4"]),
)
machines = st.builds(
    Machine,
    torch=st.sampled_from([*RELEASES, (2, 0, 0), (3, 0, 0)]),
    capability=st.sampled_from(sorted({gpu.capability for gpu in GPUS} | {(10, 7), (11, 0)})),
    cudnn=st.none() | st.sampled_from([90100, 91002, 91300, 91900, 92401, 92500, 92600]),
    cuda=st.sampled_from([None, "12.8", "13.0"]),
    cudnn_compiled=st.sampled_from([None, 90800, 91900]),
)


@settings(max_examples=400)
@given(calls, machines)
def test_reasons_eligibility_and_choice_agree(params: AttentionParams, machine: Machine) -> None:
    prediction = predict(params, machine)
    for backend, verdict in prediction.backends.items():
        assert (not verdict.reasons) == (verdict.eligible is True)
        assert bool(verdict.certain) == (verdict.eligible is False)
        assert [reason for reason in verdict.reasons if reason in verdict.certain] == [
            *verdict.certain
        ]
        assert judge(backend, params, machine) == verdict
        for reason in verdict.reasons:
            assert "{p." not in reason.message
            # `capture` derives the same code from PyTorch's text.
            assert code(reason.message) in ({reason.code} if machine.known else {"unknown"})
    if prediction.choice in SDPA_BACKENDS and prediction.priority_order:
        order = prediction.priority_order
        before = order[: order.index(prediction.choice)]
        assert all(prediction.backends[backend].eligible is False for backend in before)
        assert prediction.backends[prediction.choice].eligible
    if prediction.choice == "none":
        order = prediction.priority_order
        if raises_later(prediction.backends["math"]) and "math" in order:
            order = order[: order.index("math")]  # PyTorch checks no backend after it.
        assert not any(prediction.backends[backend].eligible for backend in order)


@settings(max_examples=200)
@given(calls, machines.filter(lambda machine: machine.cudnn is not None))
def test_an_unknown_cudnn_version_never_contradicts_a_known_one(
    params: AttentionParams, machine: Machine
) -> None:
    blind = replace(machine, cudnn=None)
    for backend in SDPA_BACKENDS:
        seen, guess = judge(backend, params, machine), judge(backend, params, blind)
        assert guess.eligible in (None, seen.eligible)
    assert predict(params, blind).choice in ("unknown", predict(params, machine).choice)
