"""The plans of tiled: valid for every problem, with the size that the kernel computes, compiled
without a GPU.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from emulator import COMPILER, emulate
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiled_emulated import (
    KERNELS,
    MAX_CLUSTER,
    SHARED_BYTES,
    SOURCE,
    THREADS,
    Plan,
    Problem,
    choose_plan,
    instance,
)  # fmt: skip

from profharness.attention.backends.cuda_source import CudaSource

MULTIPROCESSORS = 132
"""Of an H100 SXM and an H200."""


def _tune_tiled() -> Any:
    path = KERNELS.parent / "scripts" / "tune_tiled.py"
    spec = importlib.util.spec_from_file_location("tune_tiled", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tune_tiled = _tune_tiled()
TUNED = [tune_tiled.problem_of(shape)[0] for shape in tune_tiled.TABLE]
GENERAL = [
    Problem(8, 1000, 1000, 64, 2), Problem(32, 1, 4096, 128, 2), Problem(2, 3, 7, 33, 4),
    Problem(4, 300, 500, 1000, 4), Problem(64, 512, 512, 512, 2),
]  # fmt: skip

lengths = st.integers(1, 300) | st.integers(1, 200_000)
problems = st.builds(
    Problem,
    heads=st.integers(1, 64) | st.integers(1, 4096),
    rows=lengths,
    keys=st.integers(1, 140) | lengths,
    head_dim=st.integers(1, 300) | st.integers(1, 8192) | st.sampled_from([512, 2048, 4096, 8192]),
    element_bytes=st.sampled_from([2, 4]),
)


def power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def is_wide(plan: Plan) -> bool:
    """Return whether the kernel multiplies with wgmma on Hopper: tile_of in tiled_memory.cuh."""
    wide = plan.rows == 128 and plan.slice == 64 and plan.keys in (64, 128)
    return plan.element_bytes == 2 and wide


def check_tile(plan: Plan) -> None:
    """Check what the kernel asserts at compile time and what it assumes."""
    size = plan.element_bytes
    assert all(map(power_of_two, (plan.rows, plan.keys)))
    assert 16 <= plan.rows <= 128 and 16 <= plan.keys <= 128
    assert plan.chunk % plan.slice == 0 and plan.chunk % plan.columns == 0
    assert plan.keys % plan.value_keys == 0 and plan.units >= 1
    assert plan.stages >= 2 and plan.value_stages >= 2
    assert plan.one or plan.columns == plan.chunk
    assert not (plan.one and plan.splits > 1)
    for row in (plan.slice, plan.columns):  # whole threads copy a row
        assert THREADS % (row * size // 16) == 0
    # the output of a thread has at most 128 registers
    assert plan.rows * plan.columns <= 128 * THREADS
    if size == 4:
        assert plan.slice % 32 == 0 and plan.slice // 4 >= plan._groups >= 1
        area = plan.rows * plan.columns // THREADS
        width = 16 if area >= 128 else 8 if area >= 32 else 4
        height = area // width
        assert height >= 1 and (plan.rows // height) * (plan.columns // width) == THREADS
        assert plan.rows // height % 4 == 0
    elif is_wide(plan):
        assert plan.columns in (64, 128)
    else:
        assert plan.slice % 64 == 0 and plan.columns % 64 == 0


def check_fit(plan: Plan, problem: Problem, multiprocessors: int) -> None:
    """Check that the plan covers head_dim, and that its blocks fit on the GPU."""
    assert plan.element_bytes == problem.element_bytes
    assert plan.shared_bytes <= SHARED_BYTES
    assert plan.parts * plan.chunk >= problem.head_dim > (plan.parts - 1) * plan.chunk
    row_tiles = math.ceil(problem.rows / plan.rows)
    assert row_tiles <= 65535 and plan.splits <= 65535  # y and z of a grid
    blocks = problem.heads * row_tiles * plan.splits * plan.parts
    if plan.grid:
        assert plan.parts > 1 and blocks <= multiprocessors  # all are resident together
    else:
        assert plan.parts <= MAX_CLUSTER


@given(problems, st.sampled_from([132, 114, 144, 78, 60, 26]))
@settings(max_examples=300)
def test_a_plan_is_valid_for_every_problem(problem: Problem, multiprocessors: int) -> None:
    plan = choose_plan(problem, multiprocessors)
    check_tile(plan)
    check_fit(plan, problem, multiprocessors)
    if plan.one:
        assert problem.keys <= plan.keys and plan.splits == 1
    tiles = math.ceil(problem.keys / plan.keys)
    assert 1 <= plan.splits <= max(1, tiles)
    each = math.ceil(tiles / plan.splits)
    assert each * (plan.splits - 1) < tiles  # no split without keys


@given(problems, st.sampled_from(["block", "cluster", "grid"]))
@settings(max_examples=100)
def test_a_plan_has_the_requested_exchange(problem: Problem, exchange: str) -> None:
    assume(problem.keys <= 128)
    try:
        plan = choose_plan(problem, MULTIPROCESSORS, exchange)
    except NotImplementedError as error:
        assert exchange != "block" and f"through a {exchange}" in str(error)
        return
    assert plan.exchange == exchange
    check_tile(plan)
    check_fit(plan, problem, MULTIPROCESSORS)


@pytest.mark.parametrize(
    ("problem", "multiprocessors"),
    [
        (Problem(4096, 128, 16, 64, 2), 132),  # wgmma supports only 64 or 128 keys
        (Problem(4096, 128, 32, 64, 2), 132),
        (Problem(14, 17, 1, 1, 4), 26),  # 16 groups of threads for 8 times 4 columns
    ],
    ids=str,
)
def test_a_plan_for_few_keys_compiles(problem: Problem, multiprocessors: int) -> None:
    check_tile(choose_plan(problem, multiprocessors))


@pytest.mark.parametrize(("head_dim", "multiprocessors"), [(768, 16), (1024, 16), (1024, 20)])
def test_a_gpu_with_few_multiprocessors_gets_an_efficient_plan(
    head_dim: int, multiprocessors: int
) -> None:
    """A seventh of an H100 has 16 SMs. With 4096 tiles, splitting a tile over more blocks than
    needed does not help.
    """
    problem = Problem(4096, 16, 16, head_dim, 2)
    assert choose_plan(problem, multiprocessors).parts < 12


@pytest.mark.parametrize("exchange", ["block", "cluster", "grid"])
def test_an_impossible_exchange_is_refused(exchange: str) -> None:
    head_dim = 64 if exchange != "block" else 1024
    with pytest.raises(NotImplementedError, match=exchange):
        choose_plan(Problem(1, 16, 129, head_dim, 4), MULTIPROCESSORS, exchange)


@given(problems)
@settings(max_examples=50)
def test_a_plan_describes_itself(problem: Problem) -> None:
    plan = choose_plan(problem, MULTIPROCESSORS)
    told = json.loads(json.dumps(plan.described()))
    assert told["tile"] == f"{plan.rows}x{plan.keys}"
    assert told["exchange"] in ("grid", "cluster", "block")
    assert (told["exchange"] == "block") == (plan.parts == 1)
    assert told["shared_bytes"] == plan.shared_bytes


@pytest.mark.parametrize("problem", TUNED, ids=str)
def test_plans_tried_on_a_gpu_are_valid(problem: Problem) -> None:
    tried = set(tune_tiled.candidates(problem, MULTIPROCESSORS))
    assert len(tried) >= 4
    assert {plan.grid for plan in tried} == {False, True}
    for plan in tried:
        check_tile(plan)
        check_fit(plan, problem, MULTIPROCESSORS)


def test_a_shape_is_parsed() -> None:
    told = tune_tiled.problem_of("2,4,64,512,bf16")
    assert told == (Problem(8, 64, 64, 512, 2), torch.bfloat16, (2, 4, 64, 512))


LAYOUT = """
#include "tiled.cu"
// with wgmma and without it
template <bool WITH, class T, int BM, int BN, int BK, int CHUNK, int PC, int STAGES, int VALUE_STAGES,
          bool ONE, bool GRID, bool SPLIT, int PER_SM>
int total() {
    using Chosen = decltype(tile_of<T, BM, BN, BK, PC>());
    using Tile = std::conditional_t<WITH || sizeof(T) == 4, Chosen, HalfTile<T, BM, BN, BK, PC>>;
    constexpr int UNITS = BN / Tile::VK * (CHUNK / PC);
    return Layout<Tile, BM, BN, smaller(STAGES, CHUNK / BK), smaller(VALUE_STAGES, UNITS)>::TOTAL;
}
__global__ void totals(int* out, int* plain) {
"""


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
def test_the_shared_memory_of_a_plan_equals_the_kernels(tmp_path: Path) -> None:
    cases = [
        Problem(4, n, n, d, size)
        for d in (1, 100, 64, 512, 1822, 4555, 8192)
        for n in (9, 30, 64, 128, 300)
        for size in (2, 4)
    ]
    cases += [Problem(64, 128, 100, 64, 2), Problem(64, 128, 64, 128, 2), *TUNED, *GENERAL]
    plans = list(dict.fromkeys(choose_plan(each, MULTIPROCESSORS) for each in cases))
    assert {is_wide(plan) for plan in plans} == {False, True}
    lines = [
        f"{out}[{i}] = total<{wgmma}, {_type(p)}, {p.template}>();"
        for i, p in enumerate(plans)
        for out, wgmma in (("out", "true"), ("plain", "false"))
    ]
    source = tmp_path / "totals.cu"
    source.write_text(LAYOUT + "\n".join(lines) + "\n}\n")
    out, plain = torch.zeros((2, len(plans)), dtype=torch.int32)
    emulate(source, "totals", 1, 1, [out, plain])
    assert plain.tolist() == [plan.shared_bytes for plan in plans]
    for plan, total in zip(plans, out.tolist(), strict=True):
        # wgmma needs weights without padding, 16 bytes less per row
        assert plan.shared_bytes - (16 * plan.rows if is_wide(plan) else 0) <= total
        assert total <= plan.shared_bytes and (is_wide(plan) or total == plan.shared_bytes), plan


@pytest.fixture(scope="module")
def resources() -> dict[Problem, str]:
    """Return cuobjdump's output for the plan of each problem, compiled for sm_90a."""
    pytest.importorskip("cuda.core", reason="needs cuda-core: pip install 'profharness[kernels]'")
    source = CudaSource(SOURCE)
    made = {}
    for problem in TUNED + GENERAL:
        plan = choose_plan(problem, MULTIPROCESSORS)
        made[problem] = source.cubin([instance(_dtype(plan), plan)], "sm_90a")
    return {problem: _resources(each.cubin) for problem, each in made.items()}


def test_the_plans_compile_for_hopper_without_a_gpu(resources: dict[Problem, str]) -> None:
    for problem, told in resources.items():
        found = re.search(r"REG:(\d+)", told)
        assert found is None or 16 <= int(found[1]) <= 255, f"{problem}: {told}"


STACK = {TUNED[tune_tiled.TABLE.index("4,4,128,4096,fp32")]: 64}
"""Stack bytes that are allowed. This plan keeps a few addresses there, written before the loops and
read after them. It was measured to be as fast as without them.
"""


@pytest.mark.parametrize("problem", TUNED, ids=str)
def test_the_tuned_shapes_use_no_local_memory(
    resources: dict[Problem, str], problem: Problem
) -> None:
    told = resources[problem]
    found = re.search(r"STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", told)
    if found is None:
        pytest.skip("there is no cuobjdump")
    assert int(found[1]) <= STACK.get(problem, 0) and found[2] == "0", told


def test_the_other_kernels_compile_too() -> None:
    pytest.importorskip("cuda.core", reason="needs cuda-core: pip install 'profharness[kernels]'")
    names = [f"combine_splits<{each}>" for each in ("float", "fp16", "bf16")]
    plan = choose_plan(TUNED[1], MULTIPROCESSORS)
    names += [instance(torch.bfloat16, plan)]
    assert set(CudaSource(SOURCE).cubin(names, "sm_90a").names) == set(names)


def _resources(cubin: bytes) -> str:
    """Return cuobjdump's output, empty without cuobjdump. Triton contains one."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return ""
    tool = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.is_file():
        return ""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        words = [str(tool), "--dump-resource-usage", file.name]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def _dtype(plan: Plan) -> torch.dtype:
    return torch.float32 if plan.element_bytes == 4 else torch.float16


def _type(plan: Plan) -> str:
    return "float" if plan.element_bytes == 4 else "fp16"
