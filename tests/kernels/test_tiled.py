"""tiled without a GPU: correct in the emulator for every partition of a problem, with exactly the
shared memory of its plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from emulator import COMPILER, EmulatorError
from tiled_emulated import KERNELS, Plan, Problem, call, choose_plan, instance, run, tiled

from profharness.attention.backends import find_backend

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
TOLERANCE = {FP32: 5e-7, FP16: 4e-4, BF16: 3e-3}
"""For the whole output, relative to its norm."""

emulated = pytest.mark.skipif(COMPILER is None, reason="needs g++")


@dataclass(frozen=True)
class Case:
    """A plan and a problem for it. `shape` is batch, heads, kv_heads, rows, keys, head_dim."""

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
    "one16": (FP32, _plan(4, 16, 16, 64, 128, 64, parts=3)),
    "one32": (FP16, _plan(2, 32, 32, 64, 128, 128, parts=2, values=3)),
    "one128": (FP32, _plan(4, 128, 32, 32, 64, 64, parts=2)),
    # one key tile, partners in a grid; more partners than rows
    "grid16": (FP32, _plan(4, 16, 64, 32, 64, 64, parts=20, grid=True, values=5)),
    "grid64": (FP16, _plan(2, 64, 64, 64, 64, 64, parts=5, grid=True, stages=2)),
    # many key tiles
    "many16": (BF16, _plan(2, 16, 16, 64, 128, 128, parts=2, one=False, values=3)),
    "many64": (FP32, _plan(4, 64, 32, 32, 64, 64, parts=2, one=False, values=4)),
    "manygrid": (FP16, _plan(2, 32, 64, 64, 64, 64, parts=3, one=False, grid=True)),
    # keys split over blocks
    "split64": (FP16, _plan(2, 64, 64, 64, 64, 64, parts=2, one=False, splits=2)),
    "split16": (FP32, _plan(4, 16, 16, 64, 64, 64, parts=1, one=False, splits=3, stages=2)),
    # wgmma: all widths of scores and output, one pass and two, each exchange
    "wide": (BF16, _plan(2, 128, 128, 64, 128, 64, parts=2, values=5)),
    "wide64": (FP16, _plan(2, 128, 64, 64, 128, 128, parts=2)),
    "widegrid": (BF16, _plan(2, 128, 128, 64, 128, 128, parts=3, grid=True, stages=2)),
    "widemany": (FP16, _plan(2, 128, 64, 64, 128, 128, parts=1, one=False)),
    "widemany64": (BF16, _plan(2, 128, 128, 64, 64, 64, parts=2, one=False, values=3)),
    "widesplit": (BF16, _plan(2, 128, 64, 64, 128, 128, parts=1, one=False, splits=2)),
}
# plans from choose_plan, with few SMs to keep the emulator fast
MULTIPROCESSORS = 24
CHOSEN = [
    (FP32, (1, 1, 1, 5, 11, 500)),
    (FP16, (1, 2, 1, 33, 64, 600)),
    (BF16, (2, 2, 1, 40, 90, 1030)),
    (FP32, (1, 2, 1, 20, 300, 700)),
    (FP16, (1, 2, 2, 70, 200, 65)),
    (BF16, (1, 1, 1, 1, 500, 576)),
]
STEPS = [
    (FP32, (1, 2, 1, 20, 30, 200)),
    (BF16, (1, 2, 2, 128, 100, 130)),
]
"""Problems for one_block and one_cluster."""


def chosen(dtype: torch.dtype, shape: tuple[int, ...], exchange: str | None = None) -> Plan:
    batch, heads, _, rows, keys, head_dim = shape
    problem = Problem(batch * heads, rows, keys, head_dim, dtype.itemsize)
    return choose_plan(problem, MULTIPROCESSORS, exchange)


TOGETHER = [instance(dtype, plan) for dtype, plan in PLANS.values()]
TOGETHER += [instance(dtype, chosen(dtype, shape)) for dtype, shape in CHOSEN]
TOGETHER += [
    instance(dtype, chosen(dtype, shape, exchange))
    for dtype, shape in STEPS
    for exchange in ("block", "cluster")
]
TOGETHER += [f"combine_splits<{each}>" for each in tiled.TYPES.values()]

CASES = [
    Case("one16", (1, 1, 1, 16, 16, 384)),
    Case("one16", (2, 2, 1, 5, 7, 257), causal=True),
    Case("one16", (1, 2, 2, 40, 3, 300), causal=True, layout="bshd"),
    Case("one16", (1, 1, 1, 1, 1, 260)),
    Case("one32", (1, 1, 1, 32, 32, 256)),
    Case("one32", (1, 4, 2, 50, 20, 200), causal=True, layout="bshd"),
    Case("one32", (2, 1, 1, 33, 32, 131), layout="offset"),
    Case("one128", (1, 2, 1, 140, 30, 99), causal=True),
    Case("grid16", (1, 1, 1, 16, 64, 1280)),
    Case("grid16", (1, 2, 1, 20, 50, 1250), causal=True, layout="bshd"),
    Case("grid64", (1, 1, 1, 64, 64, 320)),
    Case("grid64", (2, 2, 1, 65, 33, 300), causal=True, layout="bshd"),
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
    Case("wide", (1, 1, 1, 128, 128, 256)),
    Case("wide", (1, 2, 1, 130, 100, 200), causal=True),
    Case("wide64", (1, 2, 1, 70, 50, 200), causal=True, layout="bshd"),
    Case("widegrid", (1, 1, 1, 128, 128, 384)),
    Case("widegrid", (1, 2, 1, 140, 70, 290), causal=True, layout="bshd"),
    Case("widemany", (1, 1, 1, 128, 256, 128)),
    Case("widemany", (1, 2, 1, 150, 200, 100), causal=True),
    Case("widemany", (2, 2, 2, 66, 330, 77), layout="bshd"),
    Case("widemany64", (1, 2, 1, 200, 300, 120), causal=True, layout="bshd"),
    Case("widesplit", (1, 1, 1, 128, 256, 128)),
    Case("widesplit", (1, 2, 1, 130, 250, 90), causal=True),
]


def tensors(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return q, k, v in a layout: `bshd` is a transposed [B, S, H, D], `offset` starts at an odd address."""
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
    """Return the error against naive in fp64, relative to the norm. NaN and infinity count as infinite."""
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
    for seed in (1, 2, 3):
        out = run(plan, q, k, v, is_causal=case.causal, together=TOGETHER, seed=seed)
        assert error(out, q, k, v, is_causal=case.causal) < TOLERANCE[dtype], f"seed {seed}"


@emulated
@pytest.mark.parametrize(("dtype", "shape"), CHOSEN, ids=str)
def test_the_chosen_plan_is_right_in_the_emulator(
    dtype: torch.dtype, shape: tuple[int, int, int, int, int, int]
) -> None:
    planned = {"multiprocessors": MULTIPROCESSORS, "together": TOGETHER, "enable_gqa": True}
    q, k, v = tensors(Case("", shape), dtype)
    for causal in (False, True):
        out = call(tiled.attention, q, k, v, is_causal=causal, seed=1, **planned)
        assert error(out, q, k, v, is_causal=causal) < TOLERANCE[dtype]
        # a plan does not depend on causal, so both use one compiled kernel
        assert tiled.tuning() == chosen(dtype, shape).described()


@emulated
@pytest.mark.parametrize("exchange", ["block", "cluster"])
@pytest.mark.parametrize(("dtype", "shape"), STEPS, ids=str)
def test_one_block_and_one_cluster_are_right_in_the_emulator(
    dtype: torch.dtype, shape: tuple[int, int, int, int, int, int], exchange: str
) -> None:
    function = {"block": tiled.one_block, "cluster": tiled.one_cluster}[exchange]
    planned = {"multiprocessors": MULTIPROCESSORS, "together": TOGETHER, "enable_gqa": True}
    q, k, v = tensors(Case("", shape), dtype)
    for causal in (False, True):
        out = call(function, q, k, v, is_causal=causal, scale=0.1, seed=2, **planned)
        assert error(out, q, k, v, is_causal=causal, scale=0.1) < TOLERANCE[dtype]
        told = tiled.tuning()
        assert told is not None and told["exchange"] == exchange


@emulated
@pytest.mark.parametrize("name", ["one16", "grid16", "many64", "split64", "wide64"])
@pytest.mark.parametrize("scale", [0.0, 0.3, -1.0, 5.0])
def test_the_scale_is_applied(name: str, scale: float) -> None:
    dtype, plan = PLANS[name]
    q, k, v = tensors(Case(name, (1, 1, 1, 9, 16, 64 * plan.parts)), dtype)
    q = (q / math.sqrt(q.shape[-1])).to(dtype)
    out = run(plan, q, k, v, scale=scale, together=TOGETHER)
    assert error(out, q, k, v, scale=scale) < TOLERANCE[dtype]


@emulated
@pytest.mark.parametrize(
    "name", ["many16", "many64", "manygrid", "split64", "split16", "widemany64"]
)
@pytest.mark.parametrize("order", ["rising", "falling"])
def test_the_maximum_may_move_from_tile_to_tile(name: str, order: str) -> None:
    dtype, plan = PLANS[name]
    q, k, v = tensors(Case(name, (1, 1, 1, 20, 5 * plan.keys - 3, 64)), dtype)
    last = k.shape[2] - 1
    # the scores of a row point in one direction, up to 300 times log2 e
    strength = torch.arange(last + 1) / last * 300
    k = k * 0.01
    k[..., 0] = strength if order == "rising" else strength.flip(0)
    q[..., 0] = 1
    q, k = q.to(dtype), k.to(dtype)
    out = run(plan, q, k, v, scale=1.0, together=TOGETHER, seed=2)
    # 16-bit weights: a single key has almost all of the weight
    assert error(out, q, k, v, scale=1.0) < 2 * max(TOLERANCE[dtype], 2e-5)


@emulated
@pytest.mark.parametrize("name", PLANS)
def test_memory_outside_the_tensors_is_not_used(name: str) -> None:
    """Keys and values are the front of a cache that contains NaN behind them, in all dimensions."""
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
def test_the_shared_memory_is_that_of_the_plan(name: str) -> None:
    dtype, plan = PLANS[name]
    case = Case(name, (1, 2, 1, plan.rows, plan.keys, 64 * plan.parts))
    q, k, v = tensors(case, dtype)
    run(plan, q, k, v, together=TOGETHER)
    # the plan assumes padded rows of weights; wgmma reads them without padding
    spare = 16 * plan.rows if name.startswith("wide") else 0
    with pytest.raises(EmulatorError, match="shared memory"):
        run(plan, q, k, v, together=TOGETHER, bytes_short=spare + 4)


@emulated
def test_heads_may_be_innermost_with_padded_rows() -> None:
    dtype, plan = PLANS["many64"]
    q, k, v = (torch.randn(1, 20, 33, 2).permute(0, 3, 1, 2) for _ in range(3))
    out = run(plan, q, k, v, together=TOGETHER)
    assert error(out, q, k, v) < TOLERANCE[dtype]
