"""tiled without a GPU: right in the emulator for every way to cut a problem, with the shared memory that
its plan says and no more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from emulator import COMPILER, EmulatorError
from tiled_emulated import KERNELS, Plan, Problem, choose_plan, instance, run, tiled

from profharness.backends import find_backend
from profharness.config import expand_configs

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
TOLERANCE = {FP32: 5e-7, FP16: 4e-4, BF16: 3e-3}
"""Of the whole output, relative to its norm."""

emulated = pytest.mark.skipif(COMPILER is None, reason="needs g++")


@dataclass(frozen=True)
class Case:
    """A plan and a problem for it; shape is batch, heads, kv_heads, rows, keys, head_dim."""

    plan: str
    shape: tuple[int, int, int, int, int, int]
    causal: bool = False
    layout: str = "bhsd"


def _plan(
    size: int, rows: int, keys: int, slice_: int, chunk: int, columns: int, **more: Any
) -> Plan:
    stages, values, parts = more.pop("stages", 3), more.pop("values", 2), more.pop("parts")
    return Plan(size, rows, keys, slice_, chunk, columns, stages, values, parts, **more)


PLANS: dict[str, tuple[torch.dtype, Plan]] = {
    # one key tile, partners in a cluster
    "one16": (FP32, _plan(4, 16, 16, 32, 128, 64, parts=3)),
    "one32": (FP16, _plan(2, 32, 32, 64, 128, 128, parts=2, values=3)),
    "one128": (BF16, _plan(2, 128, 128, 64, 128, 64, parts=2, values=5)),
    # one key tile, partners in a grid; more partners than rows
    "grid16": (FP32, _plan(4, 16, 64, 32, 64, 64, parts=20, grid=True, values=5)),
    "grid64": (FP16, _plan(2, 64, 64, 64, 64, 64, parts=5, grid=True, stages=2)),
    # blocks of other sizes
    "wide64": (FP16, _plan(2, 64, 64, 64, 128, 128, parts=3, grid=True)),
    "wide128": (FP32, _plan(4, 128, 32, 32, 64, 64, parts=2)),
    "narrow16": (FP32, _plan(4, 16, 16, 32, 64, 64, parts=2, one=False, splits=2)),
    # many key tiles
    "many16": (BF16, _plan(2, 16, 16, 64, 128, 128, parts=2, one=False, values=3)),
    "many64": (FP32, _plan(4, 64, 32, 32, 64, 64, parts=2, one=False, values=4)),
    "manygrid": (FP16, _plan(2, 32, 64, 64, 64, 64, parts=3, one=False, grid=True)),
    # keys split over blocks
    "split64": (FP16, _plan(2, 64, 64, 64, 64, 64, parts=2, one=False, splits=2)),
    "split16": (FP32, _plan(4, 16, 16, 32, 64, 64, parts=1, one=False, splits=3, stages=2)),
}
# what choose_plan gives, for a GPU of 8 SMs so that the emulator has little to do
CHOSEN = [
    (FP32, (1, 1, 1, 5, 11, 500)),
    (FP16, (1, 2, 1, 33, 64, 600)),
    (BF16, (2, 2, 1, 40, 90, 1030)),
    (FP32, (1, 2, 1, 20, 300, 700)),
    (FP16, (1, 2, 2, 70, 200, 65)),
    (BF16, (1, 1, 1, 1, 500, 576)),
]


def chosen(dtype: torch.dtype, shape: tuple[int, ...]) -> Plan:
    batch, heads, _, rows, keys, head_dim = shape
    return choose_plan(Problem(batch * heads, rows, keys, head_dim, dtype.itemsize), 24)


TOGETHER = [instance(dtype, plan) for dtype, plan in PLANS.values()]
TOGETHER += [instance(dtype, chosen(dtype, shape)) for dtype, shape in CHOSEN]
TOGETHER += [f"combine_splits<{each}>" for each in tiled.TYPES.values()]

CASES = [
    Case("one16", (1, 1, 1, 16, 16, 384)),
    Case("one16", (2, 2, 1, 5, 7, 257), causal=True),
    Case("one16", (1, 2, 2, 40, 3, 300), causal=True, layout="bshd"),
    Case("one16", (1, 1, 1, 1, 1, 260)),
    Case("one32", (1, 1, 1, 32, 32, 256)),
    Case("one32", (1, 4, 2, 50, 20, 200), causal=True, layout="bshd"),
    Case("one32", (2, 1, 1, 33, 32, 131), layout="offset"),
    Case("one128", (1, 1, 1, 128, 128, 256)),
    Case("one128", (1, 2, 1, 130, 100, 200), causal=True),
    Case("grid16", (1, 1, 1, 16, 64, 1280)),
    Case("grid16", (1, 2, 1, 20, 50, 1250), causal=True, layout="bshd"),
    Case("grid64", (1, 1, 1, 64, 64, 320)),
    Case("grid64", (2, 2, 1, 65, 33, 300), causal=True, layout="bshd"),
    Case("wide64", (1, 2, 1, 70, 50, 300), causal=True, layout="bshd"),
    Case("wide128", (1, 2, 1, 140, 30, 99), causal=True),
    Case("narrow16", (1, 2, 1, 35, 70, 100), causal=True, layout="bshd"),
    Case("many16", (1, 1, 1, 16, 64, 256)),
    Case("many16", (1, 2, 1, 19, 75, 200), causal=True, layout="bshd"),
    Case("many16", (1, 1, 1, 33, 17, 140), causal=True),
    Case("many64", (1, 1, 1, 64, 192, 128)),
    Case("many64", (1, 2, 2, 70, 150, 99), causal=True),
    Case("many64", (2, 2, 1, 5, 65, 72), layout="bshd"),
    Case("manygrid", (1, 1, 1, 32, 128, 192)),
    Case("manygrid", (1, 2, 1, 50, 200, 180), causal=True, layout="bshd"),
    Case("split64", (1, 1, 1, 64, 256, 128)),
    Case("split64", (1, 2, 1, 70, 250, 100), causal=True),
    Case("split64", (2, 1, 1, 3, 129, 128), layout="bshd"),
    Case("split16", (1, 1, 1, 16, 96, 64)),
    Case("split16", (1, 2, 1, 35, 70, 37), causal=True),
    Case("split16", (2, 2, 2, 1, 40, 64), layout="bshd"),
]


def tensors(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v as the layout says: `bshd` lies [B, S, H, D], `offset` starts at an odd address."""
    batch, heads, kv_heads, rows, keys, head_dim = case.shape
    made = []
    torch.manual_seed(sum(case.shape))
    for count, length in ((heads, rows), (kv_heads, keys), (kv_heads, keys)):
        if case.layout == "bshd":
            tensor = torch.randn(batch, length, count, head_dim).to(dtype).transpose(1, 2)
        elif case.layout == "offset":
            tensor = torch.randn(batch, count, length, head_dim + 3).to(dtype)[..., 3:]
        else:
            tensor = torch.randn(batch, count, length, head_dim).to(dtype)
        made.append(tensor)
    return made


def error(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any
) -> float:
    """Against naive in fp64, relative to the norm; NaN and infinity count as infinite."""
    naive = find_backend(str(KERNELS / "naive.py")).load()
    wanted = naive(q.double(), k.double(), v.double(), enable_gqa=True, **more)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert out.is_contiguous()
    told = float((out.double() - wanted).norm() / wanted.norm())
    return told if bool(out.isfinite().all()) else float("inf")


def case_id(case: Case) -> str:
    return "-".join([case.plan, *map(str, case.shape), *["causal"] * case.causal, case.layout])


@emulated
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_it_is_right_in_the_emulator(case: Case) -> None:
    dtype, plan = PLANS[case.plan]
    q, k, v = tensors(case, dtype)
    for seed in range(4):
        out = run(plan, q, k, v, is_causal=case.causal, together=TOGETHER, seed=seed)
        assert error(out, q, k, v, is_causal=case.causal) < TOLERANCE[dtype], f"seed {seed}"


@emulated
@pytest.mark.parametrize(("dtype", "shape"), CHOSEN, ids=str)
def test_the_chosen_plan_is_right_in_the_emulator(
    dtype: torch.dtype, shape: tuple[int, int, int, int, int, int]
) -> None:
    q, k, v = tensors(Case("", shape), dtype)
    for causal in (False, True):
        out = run(chosen(dtype, shape), q, k, v, is_causal=causal, together=TOGETHER, seed=1)
        assert error(out, q, k, v, is_causal=causal) < TOLERANCE[dtype]


@emulated
@pytest.mark.parametrize("name", ["one16", "grid16", "many64", "split64"])
@pytest.mark.parametrize("scale", [0.0, 0.3, -1.0, 5.0])
def test_the_scale_is_taken(name: str, scale: float) -> None:
    dtype, plan = PLANS[name]
    q, k, v = tensors(Case(name, (1, 1, 1, 9, 16, 64 * plan.parts)), dtype)
    q = (q / math.sqrt(q.shape[-1])).to(dtype)
    out = run(plan, q, k, v, scale=scale, together=TOGETHER)
    assert error(out, q, k, v, scale=scale) < TOLERANCE[dtype]


@emulated
@pytest.mark.parametrize("name", ["many16", "many64", "manygrid", "split64", "split16"])
@pytest.mark.parametrize("order", ["rising", "falling"])
def test_the_maximum_may_move_from_tile_to_tile(name: str, order: str) -> None:
    dtype, plan = PLANS[name]
    q, k, v = tensors(Case(name, (1, 1, 1, 20, 5 * plan.keys - 3, 64)), dtype)
    last = k.shape[2] - 1
    # scores of a row are along one direction, up to 300 times log2 e
    strength = torch.arange(last + 1) / last * 300
    k = k * 0.01
    k[..., 0] = strength if order == "rising" else strength.flip(0)
    q[..., 0] = 1
    q, k = q.to(dtype), k.to(dtype)
    out = run(plan, q, k, v, scale=1.0, together=TOGETHER, seed=2)
    # weights of 16 bits: a single key has almost all of them
    assert error(out, q, k, v, scale=1.0) < 2 * max(TOLERANCE[dtype], 2e-5)


@emulated
@pytest.mark.parametrize("name", PLANS)
def test_memory_beside_the_tensors_is_not_used(name: str) -> None:
    """Keys and values are the front of a cache that holds NaN behind them, in all dimensions."""
    dtype, plan = PLANS[name]
    head_dim = 64 * plan.parts - 16
    keys = plan.keys - 3 if plan.one else 2 * plan.keys + 5
    made = []
    for rows in (plan.rows + 2, keys, keys):
        memory = torch.full((2, 3, rows + 40, head_dim + 32), math.nan, dtype=dtype)
        memory[:1, :2, :rows, :head_dim] = torch.randn(1, 2, rows, head_dim).to(dtype)
        made.append(memory[:1, :2, :rows, :head_dim])
    q, k, v = made
    out = run(plan, q, k, v, is_causal=True, together=TOGETHER, seed=3)
    assert error(out, q, k, v, is_causal=True) < TOLERANCE[dtype]


@emulated
@pytest.mark.parametrize("name", PLANS)
def test_the_shared_memory_is_what_the_plan_says(name: str) -> None:
    dtype, plan = PLANS[name]
    case = Case(name, (1, 2, 1, plan.rows, plan.keys, 64 * plan.parts))
    q, k, v = tensors(case, dtype)
    run(plan, q, k, v, together=TOGETHER)
    with pytest.raises(EmulatorError, match="shared memory"):
        run(plan, q, k, v, together=TOGETHER, bytes_short=4)


@emulated
def test_heads_may_lie_innermost_where_rows_are_padded() -> None:
    dtype, plan = PLANS["many64"]
    q, k, v = (torch.randn(1, 20, 33, 2).permute(0, 3, 1, 2) for _ in range(3))
    out = run(plan, q, k, v, together=TOGETHER)
    assert error(out, q, k, v) < TOLERANCE[dtype]


def test_barriers_are_handed_out_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.arange(tiled.COUNTERS)[:, None].repeat(1, 32)
    monkeypatch.setitem(tiled._counters, 3, (memory, 0))
    handed: list[int] = []
    while len(handed) + 7 <= tiled.COUNTERS:
        words = tiled._next_counters(3, 7)
        assert words.shape == (7, 32) and words.is_contiguous()
        handed += words[:, 0].tolist()
    assert len(set(handed)) == len(handed)
    assert tiled._next_counters(3, 7)[:, 0].tolist() == list(range(7))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("1,4,64,8192,fp32", None),
        ("1,8,1,576,bf16,kv_heads=1,seq_kv=100000", None),
        ("2,8,512,64,fp16,causal", None),
        ("2,8,512,64,fp16,bwd", "no backward"),
        ("2,8,512,64,fp16,head_dim_v=32", "one head_dim"),
        ("1,1,16,8200,fp16", "up to 8192"),
    ],
)
def test_supports(config: str, reason: str | None) -> None:
    (parsed,) = expand_configs(config)
    told = find_backend(str(KERNELS / "tiled.py")).supports(parsed)
    assert told is None if reason is None else reason in str(told)


def test_a_cpu_is_refused_with_a_reason() -> None:
    attention = find_backend(str(KERNELS / "tiled.py")).load()
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match=r"on a GPU, not torch\.float32 on cpu"):
        attention(q, q, q, is_causal=False, scale=None, enable_gqa=False)
    with pytest.raises(ValueError, match="2 query heads and 1 key heads need enable_gqa"):
        attention(q, q[:, :1], q[:, :1], is_causal=False, scale=None, enable_gqa=False)
