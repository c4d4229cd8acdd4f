"""The reference compared with torch's autograd in fp64, the poison, the cases, and later checks of
a stored run.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from profharness.attention.cases import CASES, derive_cases, values_of
from profharness.attention.config import Config, parse_config
from profharness.errors import UsageError
from profharness.recording.worker.attention import make_inputs
from profharness.recording.worker.verify import (
    GRADIENTS,
    NAN_BYTE,
    OTHER_BYTE,
    Variant,
    attend,
    poison_value,
    poisoned,
)
from profharness.run import Cell, Check, Protocol, Run, write_run
from profharness.store import ingest_path, open_store


def torch_in_fp64(config: Config, inputs: object) -> list[torch.Tensor]:
    query, key, value = (
        getattr(inputs, name).detach().double().requires_grad_() for name in GRADIENTS.values()
    )
    mask = inputs.mask  # type: ignore[attr-defined]
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
        out = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask if mask is None or mask.dtype == torch.bool else mask.detach().double(),
            is_causal=config.causal,
            scale=config.scale,
            enable_gqa=True,
        )
    grads = torch.autograd.grad(out, (query, key, value), inputs.grad.double())  # type: ignore[attr-defined]
    return [out.detach(), *grads]


@settings(max_examples=40)
@given(
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    seq_q=st.integers(1, 9),
    seq_kv=st.integers(1, 9),
    mask=st.sampled_from(["none", "bool", "float_bh"]),
    layout=st.sampled_from(["contiguous", "bshd", "strided_last", "broadcast_batch"]),
    scale=st.sampled_from([None, 0.7]),
    causal=st.booleans(),
)
def test_the_reference_is_torchs_math_in_fp64(
    kv_heads: int,
    group: int,
    seq_q: int,
    seq_kv: int,
    mask: str,
    layout: str,
    scale: float | None,
    causal: bool,
) -> None:
    shape = (2, kv_heads * group, kv_heads, seq_q, seq_kv, 5)
    config = Config(
        *shape, "fp32", causal and mask == "none", mask, 0.0, scale, layout, bwd=True, head_dim_v=3
    )
    inputs = make_inputs(config, "cpu", 1)
    found = attend(config, inputs, torch.float64)[0]
    for name, wanted in zip(("out", *GRADIENTS), torch_in_fp64(config, inputs), strict=True):
        torch.testing.assert_close(found[name], wanted, rtol=1e-11, atol=1e-11, msg=name)


@pytest.mark.parametrize(
    "text",
    [
        "3,2,7,5,kv_batch=1",
        "1,2,7,5,kv_batch=3,kv_heads=1",
        "2,4,7,5,mask=bool,mask_shape=b1qk",
        "2,4,7,5,mask=bool,mask_shape=b1qk,mask_strides=7x0x0x1",
        "2,4,7,5,mask=float,mask_shape=h1k",
        "2,4,7,5,q_strides=420x5x60x1,k_strides=0x35x5x1",
    ],
)
def test_unequal_batches_mask_shapes_and_strides(text: str) -> None:
    config = parse_config(f"{text},bwd,fp32")
    inputs = make_inputs(config, "cpu", 1)
    assert inputs.query.stride() == (config.q_strides or inputs.query.contiguous().stride())
    assert inputs.key.stride() == (config.k_strides or inputs.key.contiguous().stride())
    if inputs.mask is not None:
        assert tuple(inputs.mask.shape) == config.mask_dims
        assert config.mask_strides in (None, inputs.mask.stride())
    found = attend(config, inputs, torch.float64)[0]
    for name, wanted in zip(("out", *GRADIENTS), torch_in_fp64(config, inputs), strict=True):
        torch.testing.assert_close(found[name], wanted, rtol=1e-11, atol=1e-11, msg=name)


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_config("1,4,33,8,fp32,kv_heads=2,causal,bwd")
    inputs = make_inputs(config, "cpu", 0)
    whole = attend(config, inputs, torch.float64)[0]
    monkeypatch.setattr("profharness.recording.worker.verify.MAX_SCORES", 100)
    for name, tensor in attend(config, inputs, torch.float64)[0].items():
        torch.testing.assert_close(tensor, whole[name], rtol=1e-12, atol=1e-13)


def test_a_variant_is_not_the_reference() -> None:
    config = parse_config("1,4,16,8,fp32,kv_heads=2,causal,scale=0.5")
    inputs = make_inputs(config, "cpu", 0)
    right = attend(config, inputs, torch.float64)[0]["out"]
    for variant in (
        Variant(scale=1.0),
        Variant(causal=False),
        Variant(diagonal=1),
        Variant(interleaved=True),
        Variant(keys=15),
    ):
        other = attend(config, inputs, torch.float64, variant=variant)[0]["out"]
        assert not torch.allclose(right, other)
    config = replace(config, window=5)
    right = attend(config, inputs, torch.float64)[0]["out"]
    for window in (0, 4, 6):
        other = attend(config, inputs, torch.float64, variant=Variant(window=window))[0]["out"]
        assert not torch.allclose(right, other)


THREAD_CACHED = 1032 // 4  # floats in the largest block that glibc's thread cache reuses
LINKS = 16 // 4  # floats at the head of such a block that contain the cache's links


@pytest.mark.parametrize("numel", [100, 5000, 400_000, 40_000_000])
def test_memory_comes_poisoned(numel: int) -> None:
    like = [torch.empty(numel)]
    skipped = LINKS if numel <= THREAD_CACHED else 0
    with poisoned(NAN_BYTE, like, "cpu"):
        assert torch.empty(numel)[skipped:].isnan().all()
    with poisoned(OTHER_BYTE, like, "cpu"):
        fresh = torch.empty(numel)[skipped:]
        assert (fresh == poison_value(OTHER_BYTE, torch.float32)).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_one_pattern_is_nan_and_the_other_is_not(dtype: torch.dtype) -> None:
    assert math.isnan(poison_value(NAN_BYTE, dtype))
    assert math.isfinite(poison_value(OTHER_BYTE, dtype))


def test_cases_are_derived_and_each_problem_comes_once() -> None:
    config = parse_config("4,16,512,64,fp16,kv_heads=4,dropout=0.1,mask=bool")
    cases = derive_cases(config, ["standard"])
    shapes = dict(cases)
    assert set(shapes) == set(CASES) - {"window_1", "window_67"}
    windowed = dict(derive_cases(parse_config("1,2,512,64,causal,window=128"), ["standard"]))
    assert set(windowed) == set(CASES) - {"masked_row"}
    assert (windowed["window_67"].window, windowed["seq_7"].window) == (67, 128)
    assert all(derived.dropout == 0 for derived in shapes.values())
    assert all(derived.batch <= 2 for _, derived in cases[1:])
    assert len({(derived, values_of(name)) for name, derived in cases}) == len(cases)
    assert shapes["seq_1000"].num_heads // shapes["seq_1000"].num_kv_heads == 4
    assert shapes["head_dim_odd"].head_dim == 61
    assert [name for name, _ in derive_cases(config, ["none"])] == ["as_given"]
    names = [name for name, _ in derive_cases(config, ["large", "seq_1"])]
    assert names == ["as_given", "seq_1", "large"]
    with pytest.raises(UsageError, match="lagre"):
        derive_cases(config, ["lagre"])


@settings(max_examples=60)
@given(
    shape=st.tuples(*[st.integers(1, 40)] * 3, st.integers(1, 300)),
    group=st.integers(1, 12),
    causal=st.booleans(),
)
def test_every_derived_case_is_a_config(
    shape: tuple[int, int, int, int], group: int, causal: bool
) -> None:
    batch, kv_heads, seq, head_dim = shape
    config = Config(batch, kv_heads * group, kv_heads, seq, seq, head_dim, "fp16", causal)
    for _, derived in derive_cases(config, ["standard"]):
        assert parse_config(derived.label) == derived


ENVIRONMENT = {"torch": "2.13.0", "gpu": "H200", "device_type": "cuda"}


def stored(
    folder: Path, number: int, cells: list[Cell], environment: dict[str, object], *, bench: bool
) -> str:
    """Ingest a run of `verify` or `bench`, and return its id."""
    name = f"run-{number}"
    (folder / name).mkdir()
    profilers = ("events",) if bench else ()
    created = f"2026-01-01T00:00:{number:02d}+00:00"
    run = Run(name, created, profilers, Protocol(), tuple(cells), environment)
    write_run(folder / name, run)
    ingest_path(folder / "store.db", folder / name)
    return name


def checked(what: str, passed: bool | None, label: str = "b1-h1-s16-d16-fp16") -> Cell:
    config = replace(parse_config(label), bwd=True)
    return Cell(
        "v00001", config, "mine", "ok", case="seq_1", asked=label, checks=(Check(what, passed),)
    )


def test_the_latest_check_of_the_same_code_counts(tmp_path: Path) -> None:
    code = {"backend_code": {"mine": "sha256:1"}}
    here, newer = ENVIRONMENT | code, ENVIRONMENT | {"backend_code": {"mine": "sha256:2"}}
    cells = [
        Cell("c0001", parse_config("b1-h1-s16-d16-fp16"), "mine", "ok"),
        Cell("c0002", parse_config("b1-h1-s16-d16-fp16-bwd"), "mine", "ok"),
        Cell("c0003", parse_config("b1-h1-s32-d16-fp16"), "mine", "ok"),
    ]
    forward, backward = [(cell.config.label, "mine") for cell in cells[:2]]
    bench = stored(tmp_path, 1, cells, here, bench=True)
    after = stored(tmp_path, 2, cells, newer, bench=True)

    def wrong(run: str) -> set[tuple[str, str]]:
        with open_store(tmp_path / "store.db") as store:
            return store.wrong(run)

    def right(run: str) -> set[tuple[str, str]]:
        with open_store(tmp_path / "store.db") as store:
            return {place for place, verdict in store.verdicts(run).items() if verdict}

    assert wrong(bench) == right(bench) == set()
    stored(tmp_path, 3, [checked("dk", False)], here, bench=False)
    assert wrong(bench) == {backward}
    stored(tmp_path, 4, [checked("out", False)], here, bench=False)
    assert wrong(bench) == {forward, backward}
    assert wrong(after) == set()
    stored(tmp_path, 5, [checked("out", None)], here, bench=False)
    assert wrong(bench) == {forward, backward}
    stored(tmp_path, 6, [checked("out", True)], here, bench=False)
    assert (wrong(bench), right(bench)) == ({backward}, {forward})
    assert right(after) == set()
    stored(tmp_path, 7, [checked("out", False)], here | {"gpu": "L4"}, bench=False)
    assert wrong(bench) == {backward}
    with open_store(tmp_path / "store.db", write=True) as store:
        assert store.resolve("latest") == after
        store.delete_run("run-3")
        assert store.connection.execute("SELECT count(*) FROM verifications").fetchone() == (4,)
    assert wrong(bench) == set()
