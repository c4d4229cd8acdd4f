"""Roles of the kernels launched on an H200, of CPU ops, and of kernels without an op stack."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from h200_rows import kernel_rows, rows_of

from profharness.program.roles import ROLES, assign_roles, role
from profharness.rows import KernelRow

SQUARE, WIDE = "b2h8s512d64-fp16", "b1h1s16d8192-fp32"
TRAIN = "b2h8s1024d64-fp16-causal-bwd"
BACKWARD = "bwd_preprocess attention_bwd bwd_postprocess grad_accumulate"
DECODE = "b1h32kv8sq1s4096d128-bf16"
CELLS = sorted({(row.config or "", row.backend or "") for row in kernel_rows()})


def roles_of(config: str, backend: str) -> list[str]:
    return [name for name, _ in assign_roles(rows_of(config, backend))]


@pytest.mark.parametrize(
    ("config", "backend", "expected"),
    [
        (SQUARE, "cudnn", "memory attention"),
        (SQUARE, "flash", "attention combine"),
        (SQUARE, "efficient", "attention"),
        (WIDE, "efficient", "attention"),
        (DECODE, "cudnn", "attention combine"),
        (DECODE, "flash", "attention combine"),
        (WIDE, "math", f"scale qk qk softmax {'softmax_guard ' * 4}pv"),
        (TRAIN, "flash", f"attention grad_init copy_bwd {BACKWARD}"),
        (TRAIN, "cudnn", f"memory attention grad_init memory_bwd {BACKWARD}"),
        (TRAIN, "efficient", "attention grad_init bwd_init attention_bwd grad_accumulate"),
    ],
)
def test_cells_of_the_h200(config: str, backend: str, expected: str) -> None:
    assert roles_of(config, backend) == expected.split()


def test_decode_by_math_repeats_keys_and_values() -> None:
    found = Counter(roles_of(DECODE, "math"))
    assert found["copy"] == 1
    assert (found["qk"], found["softmax"], found["pv"], found["scale"]) == (1, 1, 1, 2)
    assert found["helper"] == 0


def test_backward_of_math_names_each_product() -> None:
    found = assign_roles(rows_of(TRAIN, "math"))
    grids = {name: row.grid for name, row in found}
    # tiles of 64x64 over [1024, 64], of 128x64 over [1024, 1024], and dK as its transpose
    assert grids["dV"] == (16, 1, 16)
    assert grids["dP"] == (8, 16, 16)
    assert grids["dK"] == (1, 16, 16)
    assert grids["dQ"] == (16, 1, 16)
    count = Counter(name for name, _ in found)
    assert (count["mask"], count["softmax_bwd"]) == (6, 2)
    assert not {"helper", "helper_bwd"} & set(count)
    assert {"scale_bwd", "cast_bwd", "grad_init", "grad_accumulate"} <= set(count)


def test_products_without_an_op_stack_are_distinguished_by_order() -> None:
    rows = rows_of(TRAIN, "math")
    bare = assign_roles(replace(row, op_path=None) for row in rows)
    products = {"qk", "pv", "dV", "dP", "dK", "dQ", "softmax"}
    full = {(name, row.kernel, row.grid) for name, row in assign_roles(rows) if name in products}
    found = {(name, row.kernel, row.grid) for name, row in bare if name in products}
    assert found == full


@pytest.mark.parametrize(("config", "backend"), CELLS)
def test_every_row_has_one_known_role(config: str, backend: str) -> None:
    rows = rows_of(config, backend)
    found = assign_roles(reversed(rows))
    assert {name for name, _ in found} <= set(ROLES)
    assert Counter(row for _, row in found) == Counter(rows)
    assert [row.first_ns for _, row in found] == sorted(row.first_ns for row in rows)


def op(name: str, path: str, launches_per_call: float, first_ns: int) -> KernelRow:
    return replace(
        kernel_rows()[0], kernel=name, kernel_kind="op", family="other",
        op_path=f"{path};{name}" if path else name, launches_per_call=launches_per_call,
        first_ns=first_ns, grid=None, block=None,
    )  # fmt: skip


FRONT = "aten::scaled_dot_product_attention"
MATH = f"{FRONT};aten::_scaled_dot_product_attention_math"
NODE = "autograd::engine::evaluate_function: "


def test_cpu_flash() -> None:
    flash = "aten::_scaled_dot_product_flash_attention_for_cpu"
    node = f"{NODE}ScaledDotProductFlashAttentionForCpuBackward0"
    assert role(op(flash, FRONT, 1, 0)) == "attention"
    assert role(op(f"{flash}_backward", node, 1, 0)) == "attention_bwd"
    below = f"{node};ScaledDotProductFlashAttentionForCpuBackward0;{flash}_backward"
    assert role(op("aten::zero_", f"{below};aten::zeros", 3, 0)) == "bwd_init"
    assert role(op("aten::copy_", f"{below};aten::contiguous;aten::clone", 1, 0)) == "copy_bwd"
    assert role(op("aten::where", FRONT, 1, 0)) == "mask"


def test_cpu_math_where_one_row_holds_several_products() -> None:
    rows = [
        op("aten::mul", f"{MATH};aten::mul", 2, 0),
        op("aten::bmm", f"{MATH};aten::matmul", 2, 1),
        op("aten::_softmax", f"{MATH};aten::_safe_softmax;aten::softmax", 1, 2),
        op("aten::bernoulli_", f"{MATH};aten::dropout", 1, 3),
        op("aten::copy_", f"{MATH};aten::dropout;aten::div_;aten::div_;aten::to", 1, 4),
        op("aten::bmm", f"{NODE}BmmBackward0;BmmBackward0", 4, 6),
        op("aten::mul", f"{NODE}MulBackward0;MulBackward0", 1, 7),
        op("aten::_softmax_backward_data", f"{NODE}SafeSoftmaxBackward0", 1, 8),
    ]
    assert [name for name, _ in assign_roles(rows)] == (
        ["scale", "qk+pv", "softmax", "dropout", "dropout", "gemm_bwd", "scale_bwd", "softmax_bwd"]
    )


def foreign(rows: list[KernelRow]) -> list[str]:
    """Return the roles of rows in a trace that profharness did not record."""
    outside = [
        replace(row, cell=None, config=None, backend=None, launches_per_call=None, launches=4)
        for row in rows
    ]
    return [name for name, _ in assign_roles(outside)]


def test_the_layers_around_attention_have_their_own_names() -> None:
    """Use one training step of a transformer layer on math, as recorded by Kineto."""
    node = f"{NODE}AddmmBackward0;AddmmBackward0"
    rows = [
        op("aten::mm", "aten::linear;aten::matmul", 1, 0),
        op("aten::bmm", f"{MATH};aten::matmul", 1, 1),
        op("aten::_softmax", f"{MATH};aten::_safe_softmax;aten::softmax", 1, 2),
        op("aten::bmm", f"{MATH};aten::matmul", 1, 3),
        op("aten::clone", "aten::reshape", 1, 4),
        op("aten::addmm", "aten::linear", 1, 5),
        op("aten::bernoulli_", "aten::dropout", 1, 6),
        op("aten::native_layer_norm", "aten::layer_norm", 1, 7),
        op("aten::mm", node, 1, 8),
        op("NativeLayerNormBackward0", f"{NODE}NativeLayerNormBackward0", 1, 9),
        op("aten::_softmax_backward_data", f"{NODE}SafeSoftmaxBackward0", 1, 10),
    ]
    assert foreign(rows) == [
        *("linear", "qk", "softmax", "pv", "reshape", "linear", "dropout", "layer_norm"),
        *("addmm_bwd", "native_layer_norm_bwd", "softmax_bwd"),
    ]


def test_eager_attention_is_recognized_by_its_batched_products() -> None:
    rows = [
        op("aten::bmm", "aten::matmul", 1, 1),
        op("aten::_softmax", "aten::softmax", 1, 2),
        op("aten::bmm", "aten::matmul", 1, 3),
    ]
    assert foreign(rows) == ["qk", "softmax", "pv"]
    more = [*rows, op("aten::bmm", "aten::einsum", 1, 4)]
    assert foreign(more) == ["matmul", "softmax", "matmul", "einsum"]


def test_kernels_of_a_foreign_trace_without_a_stack_have_their_family() -> None:
    product, *_ = bare("gemm", "ampere_sgemm_128x64_tn")
    rows = [
        replace(product, first_ns=0),
        *bare("elementwise", "void at::native::vectorized_elementwise_kernel<MulFunctor>"),
        *bare("other", "void my_fused_thing(float*)"),
        *bare("triton", "layer_norm_kernel"),
    ]
    rows = [replace(row, first_ns=at) for at, row in enumerate(rows)]
    assert foreign(rows) == ["gemm", "elementwise", "other", "triton"]
    assert foreign(bare("triton", "my_attn_fwd")) == ["attention"]


def test_attention_of_serving_libraries_is_attention_in_a_foreign_trace() -> None:
    names = {"fmha": "attention", "fmha_combine": "combine", "fmha_bwd": "attention_bwd"}
    rows = [
        replace(row, cell=None, op_path=None)
        for family in [*names, "rope", "moe"]
        for row in bare(family, f"{family}_kernel")
    ]
    found = {row.family: role for role, row in assign_roles(rows)}
    assert found == names | {"rope": "rope", "moe": "moe"}


def test_own_kernel_outside_of_pytorch() -> None:
    row = rows_of(SQUARE, "flash")[0]
    own = replace(row, kernel="my_attention(float*)", family="other", op_path=None, first_ns=0)
    small = replace(own, kernel="my_setup(int*)", total_ns=10, first_ns=1)
    assert [name for name, _ in assign_roles([own, small])] == ["attention", "helper"]
    backward = replace(own, kernel="my_attention_backward(float*)", first_ns=2)
    assert [n for n, _ in assign_roles([own, backward])] == ["attention", "attention_bwd"]


def test_products_outside_of_attention_are_helpers() -> None:
    row = next(r for r in kernel_rows() if r.family == "gemm")
    linear = replace(row, op_path="aten::linear;aten::addmm")
    assert [name for name, _ in assign_roles([linear])] == ["helper"]


def bare(family: str, *names: str) -> list[KernelRow]:
    """Return kernels in this order with equal times, as recorded by profilers without op stacks."""
    row = replace(rows_of(SQUARE, "flash")[0], op_path=None, family=family)
    return [replace(row, kernel=name, first_ns=at) for at, name in enumerate(names)]


def test_kernels_of_the_implementations_that_come_with_profharness() -> None:
    passes = ("forward", "backward_delta", "backward_dkdv", "backward_dq")
    flash = assign_roles(bare("triton", *(f"flash_{name}" for name in passes)))
    expected = ["attention", "bwd_preprocess", "attention_bwd", "attention_bwd"]
    assert [name for name, _ in flash] == expected
    tiled = bare("other", "void tiled_attention<fp16>(int)", "void combine_splits<fp16>(int)")
    assert [name for name, _ in assign_roles(tiled)] == ["attention", "combine"]


def test_softmax_of_inductor_distinguishes_the_products() -> None:
    (product,) = bare("gemm", "sm90_xmma_gemm_f16f16")
    (softmax,) = bare("triton", "triton_per_fused__softmax_mul_0")
    rows = [product, softmax, replace(product, kernel="sm90_xmma_gemm_bf16")]
    rows = [replace(row, first_ns=at, launches_per_call=1.0) for at, row in enumerate(rows)]
    assert [name for name, _ in assign_roles(rows)] == ["qk", "softmax", "pv"]
    assert (
        role(replace(softmax, kernel="triton_red_fused__softmax_backward_data_1")) == "softmax_bwd"
    )
    assert role(replace(softmax, kernel="triton_poi_fused_mul_0")) == "helper"


def test_steps_of_a_plain_backend_are_recognized_by_their_ops() -> None:
    """Use the ops of kernels/naive.py with grouped heads and causal."""
    first = rows_of(SQUARE, "flash")[0]
    launches = (
        ("copy", "copy", "aten::repeat_interleave;aten::clone;aten::copy_"),
        ("qk", "gemm", "aten::matmul;aten::bmm"),
        ("scale", "elementwise", "aten::mul"),
        ("mask", "elementwise", "aten::ones;aten::fill_"),
        ("mask", "elementwise", "aten::masked_fill;aten::masked_fill_"),
        ("softmax", "softmax", "aten::softmax;aten::_softmax"),
        ("pv", "gemm", "aten::matmul;aten::bmm"),
    )
    rows = [
        replace(
            first, kernel=f"softmax_warp_forward{at}" if role == "softmax" else f"k{at}",
            family=family, op_path=path, first_ns=at, launches=1, launches_per_call=1.0,
        )
        for at, (role, family, path) in enumerate(launches)
    ]  # fmt: skip
    assert [name for name, _ in assign_roles(rows)] == [role for role, *_ in launches]
