"""Determine the role of each kernel in a cell, such as `softmax`.

The role follows from the family and the op stack of the kernel, and from the order of the kernels.
In a foreign trace, kernels outside of attention are named after their ops.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from profharness.rows import KernelRow

# The roles in the order in which a diff lists them. Fused attention kernels come first, then
# kernels that compute only one operation of attention, then auxiliary kernels.
ROLES = (
    *("attention", "attention_bwd", "combine", "bwd_preprocess", "bwd_postprocess"),
    *("qk", "softmax", "softmax_guard", "pv", "qk+pv", "mask", "scale", "dropout"),
    *("dV", "dP", "dV+dP", "softmax_bwd", "dK", "dQ", "dK+dQ", "gemm_bwd"),
    *("mask_bwd", "scale_bwd", "dropout_bwd", "cast", "cast_bwd", "copy", "copy_bwd"),
    *("reduce_bwd", "bwd_init", "grad_init", "grad_accumulate", "memory", "memory_bwd"),
    *("helper", "helper_bwd"),
)
FUSED_ROLES = ("attention", "attention_bwd")
SCORE_ROLES = ("softmax", "qk", "pv", "qk+pv")
GEMMS = ("qk", "pv", "qk+pv", "dV", "dP", "dV+dP", "dK", "dQ", "dK+dQ", "gemm_bwd")
MATH_OP = "aten::_scaled_dot_product_attention_math"


_GEMM_OPS = frozenset({"aten::bmm", "aten::mm", "aten::addmm", "aten::baddbmm"})
_FUSED = frozenset(
    {
        *("flash", "flash_splitkv", "efficient", "cudnn", "flex", "triton", "fmha"),
        *("aotriton", "ck", "aiter"),
    }
)
_FUSED_BWD = frozenset(
    ("flash_bwd", "efficient_bwd", "cudnn_bwd", "fmha_bwd", "aotriton_bwd", "ck_bwd", "aiter_bwd")
)
_COMBINE = frozenset({"flash_combine", "fmha_combine", "ck_combine", "aiter_combine"})
AUTOGRAD = "autograd::engine::evaluate_function"
_FRONT = "aten::scaled_dot_product_attention"
_SPLIT_K = re.compile(r"splitKreduce")


# Ops in an op stack that show that a kernel of a foreign trace may belong to attention. Batched
# matrix products are included, because a program may compute attention with separate ops. Other
# matrix products belong to linear layers.
_ATTENTION_PART = re.compile(
    r"^aten::(_?scaled_dot_product|_?softmax|_safe_softmax)|ScaledDot|Softmax"
)
_PRODUCT_OF_ATTENTION = re.compile(
    r"^aten::(_?scaled_dot_product|baddbmm|bmm)|ScaledDot|BmmBackward"
)
_ATTENTION_NAME = re.compile(r"attn|attention|flash|fmha|sdpa", re.IGNORECASE)
_NODE = re.compile(r"(\w+?)Backward\d*")
_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


# The fields that identify a kernel and its launch configuration within a cell.
_SAME_LAUNCH = (
    *("run", "cell", "profiler", "range", "device", "kernel", "kernel_kind", "grid", "block"),
    *("registers_per_thread", "static_shared_bytes", "dynamic_shared_bytes", "shared_bytes"),
)

_Table = tuple[tuple[str, re.Pattern[str]], ...]


def _compiled(*rows: tuple[str, str]) -> _Table:
    return tuple((role, re.compile(pattern)) for role, pattern in rows)


# Roles by patterns of kernel names, which are unambiguous regardless of the op stack. The first
# match decides.
_NAMED = _compiled(
    ("combine", r"splitkv_combine|FlashAttnFwdCombine|cudnn::fusion::lean_reduction"),
    ("combine", r"\bcombine_splits\b"),
    ("bwd_preprocess", r"dot_do_o|FlashAttnBwdPreprocess|flash_bwd_preprocess"),
    ("bwd_preprocess", r"^flash_backward_delta$|^bwd_preprocess|FmhaBwdOGradDotO|fmha_bwd_\w*odo_"),
    ("bwd_postprocess", r"^bwd_postprocess|FmhaBwdConvertQGrad|fmha_bwd_\w*dq_convert"),
    ("helper", r"^debug_(?:fill_dropout_rng|simulate_encoded_softmax)"),
    ("bwd_postprocess", r"convert_dq|convert_dkv|FlashAttnBwdPostprocess|flash_bwd_postprocess"),
    ("bwd_postprocess", r"fmha_reduce_head"),
    ("softmax_bwd", r"^triton_\w*softmax_backward"),
    ("softmax", r"^triton_\w*softmax"),
    ("helper", r"prepare_varlen|^triton_(poi|red|per|for)_"),
    ("attention_bwd", r"^aten::_scaled_dot_product_\w+_backward$|^aten::_\w+_attention_backward"),
    ("attention", r"^aten::_scaled_dot_product_(flash|efficient|cudnn|fused)\w*$"),
    ("attention", r"^aten::_(flash|efficient|cudnn)_attention_forward"),
    ("softmax_bwd", r"softmax_warp_backward|SoftMaxBackward|^aten::_softmax_backward_data"),
    ("softmax", r"softmax_warp_forward|SoftMaxForward|^aten::_softmax$"),
    ("mask", r"triu_tril_kernel|^aten::(tril|triu)"),
)
_BACKWARD_NAME = re.compile(r"bwd|backward|bprop|cutlassB_|_dk_?dv|_dq\b", re.IGNORECASE)


# Roles by the op that the attention op calls directly, or by the autograd node.
_OP_ROLES = _compiled(
    ("softmax_guard", r"aten::_safe_softmax|SafeSoftmaxBackward\d+"),
    ("softmax", r"aten::softmax|aten::_softmax|SoftmaxBackward\d+"),
    ("dropout", r"aten::(native_)?dropout|aten::bernoulli_?|(Native)?DropoutBackward\d+"),
    (
        "mask",
        r"aten::(ones|tril|triu|where|masked_fill_?|logical_not|scalar_tensor|add_?|full)"
        r"|aten::(zeros_like|full_like|new_full)|(Add|Where|MaskedFill)Backward\d+",
    ),
    ("scale", r"aten::(mul|div)_?|(Mul|Div)Backward\d+"),
    ("cast", r"aten::(to|_to_copy)|ToCopyBackward\d+"),
    (
        "copy",
        r"aten::(repeat_interleave|contiguous|clone|copy_|pad|constant_pad_nd|expand|slice)"
        r"|CloneBackward\d+|(ConstantPadNd|Slice)Backward\d+",
    ),
    ("reduce", r"(Expand|RepeatInterleave|IndexSelect|Repeat)Backward\d+|aten::sum"),
)
# Roles by patterns of kernel names, for profilers that record no op stack (nsys, ncu).
_BARE = _compiled(
    ("softmax_guard", r"isneginf|ReduceOp<bool"),
    ("mask", r"where_kernel|masked_fill|logical_not"),
    ("scale", r"MulFunctor"),
    ("dropout", r"fused_dropout|bernoulli"),
    ("cast", r"float16_copy|bfloat16_copy|LoadWithCast|float32_copy"),
    ("copy", r"direct_copy_kernel"),
)
_FILLS = ("aten::fill_", "aten::zero_", "aten::ones_like", "aten::zeros", "aten::ones")


def role(row: KernelRow) -> str:
    """Return the role of a kernel, regardless of the other kernels of the cell.

    The role of a matrix product is `qk`, or `gemm_bwd` in a backward pass, until `assign_roles`
    determines which product it is.
    """
    if row.kernel_kind in ("memcpy", "memset"):
        return "memory_bwd" if _is_backward(row) else "memory"
    if named := _first(_NAMED, row.kernel):
        return named
    if row.family in _COMBINE:
        return "combine"
    if row.family in _FUSED_BWD:
        return "attention_bwd"
    if row.family in _FUSED:
        backward = _is_backward(row) or _BACKWARD_NAME.search(row.kernel)
        return "attention_bwd" if backward else "attention"
    if _is_gemm(row):
        return "gemm_bwd" if _is_backward(row) else "qk"
    return _helper_role(row)


def assign_roles(rows: Iterable[KernelRow]) -> list[tuple[str, KernelRow]]:
    """Return (role, row) pairs, sorted by `first_ns`.

    All rows must be from one profiler, and from one cell or one range of a foreign trace.
    """
    # Rows that start at the same time need a fixed order, because roles depend on the order.
    ordered = sorted(rows, key=lambda row: (row.first_ns, row.kernel, row.op_path or ""))
    roles = [
        _neutral_role(row) if row.cell is None and not _shows_attention(row) else role(row)
        for row in ordered
    ]
    _number_gemms(ordered, roles)
    _written_out(ordered, roles)
    _own_kernel(ordered, roles)
    return list(zip(roles, ordered, strict=True))


def _shows_attention(row: KernelRow) -> bool:
    """Return whether a row of a foreign trace may belong to attention."""
    if row.family == "triton":
        if _ATTENTION_NAME.search(row.kernel):
            return True
    elif row.family in _FUSED_BWD | _FUSED | _COMBINE:
        return True
    named = _first(_NAMED, row.kernel)
    if named not in (None, "helper", "mask"):
        return True
    path = _path(row)
    if _is_gemm(row):
        return not path or any(_PRODUCT_OF_ATTENTION.search(part) for part in path)
    return any(_ATTENTION_PART.search(part) for part in path)


def _neutral_role(row: KernelRow) -> str:
    """Return the op that launched a kernel outside of attention, such as `linear`.

    If the op is unknown, return the family of the kernel.
    """
    parts = [part.removeprefix(f"{AUTOGRAD}: ") for part in _path(row)]
    if not parts:
        return row.family
    if any("AccumulateGrad" in part for part in parts):
        return "grad_accumulate"
    node = _NODE.fullmatch(parts[0])
    if node is None:
        return parts[0].rpartition("::")[2].strip("_") or row.family
    return _CAPITAL.sub("_", node[1]).lower() + "_bwd"


def score_dtype(inputs: str, kernels: Sequence[tuple[str, str | None]]) -> str | None:
    """Return the dtype of the score matrices in memory, or None if fused kernels do not store them.

    `inputs` is the dtype of the inputs. `kernels` contains pairs of a role and the dtype in the
    name of the kernel. If there is a cast, the scores are fp32 unless the name of a matrix product
    contains another dtype.
    """
    roles = {role for role, _ in kernels}
    if not roles & set(SCORE_ROLES) or roles & set(FUSED_ROLES):
        return None
    named = {dtype for role, dtype in kernels if role in GEMMS}
    return "fp32" if "cast" in roles and named <= {"fp32", "tf32", None} else inputs


def by_role(rows: Iterable[KernelRow]) -> dict[str, list[KernelRow]]:
    """Group the rows of one cell and one profiler by role, in the order of their first launches."""
    groups: dict[str, list[KernelRow]] = {}
    for name, row in assign_roles(rows):
        groups.setdefault(name, []).append(row)
    return groups


def split_passes(rows: Sequence[KernelRow], by_op: Iterable[KernelRow]) -> list[KernelRow]:
    """Replace each row with launches in both passes by its rows per op path.

    The forward and the backward pass may launch the same kernel with the same grid. `by_op` contains
    the same launches as `rows`, with one row per op path.
    """
    parts: dict[tuple[object, ...], list[KernelRow]] = {}
    for row in by_op:
        parts.setdefault(tuple(getattr(row, name) for name in _SAME_LAUNCH), []).append(row)
    both = {key: own for key, own in parts.items() if len(set(map(_is_backward, own))) == 2}
    kept = (row for row in rows if tuple(getattr(row, name) for name in _SAME_LAUNCH) not in both)
    return [*kept, *(row for own in both.values() for row in own)]


def launches_per_call(row: KernelRow, calls: int) -> float:
    """Return the launches of a row per call.

    If this number was not recorded, divide the number of all launches by `calls`.
    """
    return row.launches_per_call or row.launches / max(1, calls)


def call_ns(row: KernelRow, calls: int) -> float | None:
    """Return the time of a row's launches in one call, or None if the time was not measured."""
    if row.total_ns is None:
        return None
    return row.total_ns / row.launches * launches_per_call(row, calls)


def _is_backward(row: KernelRow) -> bool:
    return row.family.endswith("_bwd") or any(part.startswith(AUTOGRAD) for part in _path(row))


def _is_gemm(row: KernelRow) -> bool:
    """Return whether a kernel computes a matrix product or the reduction of a split-K product."""
    if row.kernel_kind == "op":
        return row.kernel in _GEMM_OPS
    return row.family in ("gemm", "gemv") or _SPLIT_K.search(row.kernel) is not None


def role_order(name: str) -> int:
    """Return the position of a role in the order of a diff. Unknown roles come last."""
    return ROLES.index(name) if name in ROLES else len(ROLES)


def _path(row: KernelRow) -> list[str]:
    return row.op_path.split(";") if row.op_path else []


def _helper_role(row: KernelRow) -> str:
    """Return the role of an elementwise, copy, fill or reduction kernel.

    The role is derived from the op stack, or from the kernel's name if there is no op stack.
    """
    path = _path(row)
    if not path:
        return _first(_BARE, row.kernel) or "helper"
    if any("AccumulateGrad" in part for part in path):
        return "grad_accumulate"
    if _is_backward(row):
        return _backward_helper_role(path)
    inside = [
        n for n, part in enumerate(path) if part == _FRONT or part.startswith("aten::_scaled_dot")
    ]
    if not inside:
        return "grad_init" if path[-1] in _FILLS else "helper"
    below = path[inside[-1] :][:2]  # the attention op, and the op that it calls
    return _op_role(below[-1]) or "helper"


def _backward_helper_role(path: Sequence[str]) -> str:
    nodes = [part for part in path if not part.startswith(AUTOGRAD)]
    name = _op_role(nodes[0]) if nodes else None
    if name is None and path[-1] in _FILLS:
        return "bwd_init"
    if name is None:  # a fused op may call ops that make gradients contiguous
        inner = [part for part in path if part.startswith("aten::") and "attention" not in part]
        name = _op_role(inner[0]) if inner else None
    if name == "softmax_guard":
        return "softmax_bwd"
    return f"{name or 'helper'}_bwd"


def _first(table: _Table, text: str) -> str | None:
    return next((name for name, pattern in table if pattern.search(text)), None)


def _op_role(op: str) -> str | None:
    return next((name for name, pattern in _OP_ROLES if pattern.fullmatch(op)), None)


def _number_gemms(rows: Sequence[KernelRow], roles: list[str]) -> None:
    products = [n for n, row in enumerate(rows) if roles[n] in ("qk", "gemm_bwd")]
    softmax = _index(roles, "softmax")
    under_math = any(MATH_OP in _path(rows[n]) for n in products)
    if softmax is None and "softmax_bwd" not in roles and not under_math:
        for n in products:
            outside = "helper_bwd" if roles[n] == "gemm_bwd" else "helper"
            roles[n] = outside if rows[n].cell is not None else _neutral_role(rows[n])
        return
    forward = [n for n in products if roles[n] == "qk"]
    backward = [n for n in products if roles[n] == "gemm_bwd"]
    if softmax is not None and not any(rows[n].op_path for n in products):
        forward, backward = _split_bare(rows, roles, forward, softmax)
    calls = _calls(rows, roles)
    _name_phase(rows, roles, forward, softmax, (("qk",), ("pv",)), calls)
    # For each product, autograd computes the gradient of the second factor first.
    names = (("dV", "dP"), ("dK", "dQ"))
    _name_phase(rows, roles, backward, _index(roles, "softmax_bwd"), names, calls)


def _split_bare(
    rows: Sequence[KernelRow], roles: list[str], products: Sequence[int], softmax: int
) -> tuple[list[int], list[int]]:
    """Separate forward from backward matrix products by the order of the kernels.

    Other kernels after the first backward product also get roles of the backward pass.
    """
    after = [n for n in products if n > softmax]
    cut = next((n for n in after[1:] if not _SPLIT_K.search(rows[n].kernel)), len(rows))
    for n in range(cut, len(rows)):
        if roles[n] in ("cast", "copy", "scale", "mask", "dropout"):
            roles[n] = f"{roles[n]}_bwd"
    return [n for n in products if n < cut], [n for n in products if n >= cut]


def _name_phase(
    rows: Sequence[KernelRow],
    roles: list[str],
    products: Sequence[int],
    softmax: int | None,
    names: tuple[tuple[str, ...], tuple[str, ...]],
    calls: int | None,
) -> None:
    main = [n for n in products if not _SPLIT_K.search(rows[n].kernel)]
    forward = len(names[0]) == 1
    fallback = "qk+pv" if forward else "gemm_bwd"
    counts = {
        n: round(rows[n].launches_per_call or (rows[n].launches / calls if calls else 1))
        for n in main
    }
    # A matrix product of a foreign trace that does not run in every call is outside of attention,
    # such as that of rotary embeddings.
    rare = [n for n in main if rows[n].cell is None and not counts[n]]
    for n in rare:
        roles[n] = _neutral_role(rows[n])
        del counts[n]
    main = [n for n in main if n not in rare]
    products = [n for n in products if n not in rare]
    # In a foreign trace, matrix products belong to attention only if there are as many as expected.
    unlike = sum(counts.values()) != sum(map(len, names))
    for n in products:
        foreign = rows[n].cell is None and MATH_OP not in _path(rows[n])
        roles[n] = _neutral_role(rows[n]) if foreign and unlike else fallback
    if unlike:
        return
    early = [n for n in main if softmax is not None and n < softmax]
    if softmax is None:
        early = main[: len(names[0])]
    halves = (early, [n for n in main if n not in early])
    for half, slots in zip(halves, names, strict=True):
        if sum(counts[n] for n in half) != len(slots):
            return
    for half, slots in zip(halves, names, strict=True):
        for slot, n in enumerate(half):
            roles[n] = slots[slot] if len(half) == len(slots) else "+".join(slots)
    for n in products:  # a split-K reduction completes the product before it
        if n not in counts:
            roles[n] = next((roles[m] for m in reversed(main) if m < n), fallback)


def _calls(rows: Sequence[KernelRow], roles: Sequence[str]) -> int | None:
    """Return the number of calls, which is the number of softmax launches.

    Return None if there is no softmax, or if the launches per call are recorded.
    """
    for name in ("softmax", "softmax_bwd"):
        n = _index(roles, name)
        if n is not None and not rows[n].launches_per_call:
            return rows[n].launches
    return None


def _written_out(rows: Sequence[KernelRow], roles: list[str]) -> None:
    """Derive the roles of helpers from their outermost ops if attention consists of separate ops."""
    if "softmax" not in roles or set(roles) & set(FUSED_ROLES):
        return
    for n, row in enumerate(rows):
        path = _path(row)
        if row.cell is not None and path and roles[n] in ("helper", "grad_init"):
            roles[n] = _op_role(path[0]) or roles[n]


def _own_kernel(rows: Sequence[KernelRow], roles: list[str]) -> None:
    """Assign the role `attention` to the longest kernel that no ATen op launched.

    Such a kernel belongs to a backend outside of PyTorch. Do nothing if another kernel has the role.
    """
    if set(roles) & {"attention", "attention_bwd", "qk", "qk+pv"}:
        return
    if any(row.cell is None for row in rows):
        return  # a foreign trace may contain no attention
    own = [
        n
        for n, row in enumerate(rows)
        if row.kernel_kind == "kernel"
        and roles[n] == "helper"
        and "at::native::" not in row.kernel
        and not any(part.startswith("aten::") for part in _path(row))
    ]
    for name, backward in (("attention", False), ("attention_bwd", True)):
        side = [n for n in own if bool(_BACKWARD_NAME.search(rows[n].kernel)) is backward]
        if side:
            roles[max(side, key=lambda n: rows[n].total_ns or 0)] = name


def _index(roles: Sequence[str], name: str) -> int | None:
    return roles.index(name) if name in roles else None
