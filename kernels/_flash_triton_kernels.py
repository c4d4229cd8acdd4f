"""Triton kernels of flash_triton: one for the forward pass and three for the backward pass.

The softmax uses powers of 2 instead of e, so `qk_scale` is the scale times log2(e). Tensors have
the shape [B, H, S, D] and any strides. A block computes one tile of queries or keys. BLOCK_D is D
rounded up to a power of two. Column n is visible to row m if n < skv and, with CAUSAL, also n <= m.
"""

# ruff: noqa: ANN001, ANN202, ARG001
# Values in a Triton kernel have no Python type, and only the autotuner uses `span`.

from __future__ import annotations

import triton
import triton.language as tl

# Whether bf16 tiles are converted to fp32. The interpreter needs this, because it stores bf16
# values as integers, and its dot product would multiply these integers.
WIDEN: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))

# Arguments that Triton must not specialize on. Otherwise, it would compile separate kernels for
# lengths that are divisible by 16 and lengths that are not.
SIZES = ["heads", "group", "sq", "skv", "span"]


@triton.jit
def _load(
    base, desc, stride_s, stride_d, batch, head, first, length,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Load the tile [BLOCK, BLOCK_D] that begins at row `first` of a head.

    Elements outside of the head are 0. If TAIL is set, rows of the tile may be beyond `length`.
    """
    if TMA:
        tile = desc.load([batch, head, first, 0]).reshape([BLOCK, BLOCK_D])
    else:
        rows = tl.arange(0, BLOCK)
        columns = tl.arange(0, BLOCK_D)
        # the offset of the first row has 64 bits, and offsets within the tile fit into 32 bits
        start = base + tl.cast(first, tl.int64) * stride_s
        places = start + (rows[:, None] * stride_s + columns[None, :] * stride_d)
        if TAIL and D != BLOCK_D:
            inside = (rows[:, None] < length - first) & (columns[None, :] < D)
            tile = tl.load(places, mask=inside, other=0.0)
        elif TAIL:
            tile = tl.load(places, mask=rows[:, None] < length - first, other=0.0)
        elif D != BLOCK_D:
            tile = tl.load(places, mask=columns[None, :] < D, other=0.0)
        else:
            tile = tl.load(places)
    if WIDEN and tile.dtype == tl.bfloat16:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _store(
    base, stride_s, stride_d, first, length, tile,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_D)
    start = base + tl.cast(first, tl.int64) * stride_s
    places = start + (rows[:, None] * stride_s + columns[None, :] * stride_d)
    inside = (rows[:, None] < length - first) & (columns[None, :] < D)
    tl.store(places, tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _head(base, batch, head, stride_b, stride_h):
    """Return the address of a head. Offsets have 64 bits, because tensors may be very large."""
    return base + tl.cast(batch, tl.int64) * stride_b + tl.cast(head, tl.int64) * stride_h


@triton.jit
def _attend(
    acc, sums, tops, q_tile, k, v, k_desc, v_desc, k_s, k_d, v_s, v_d, batch, kv_head,
    begin, end, first_row, skv, qk_scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Apply the online softmax to the columns [begin, end).

    `tops` contains the maximum score of each row so far, and `sums` the sum of 2**(score - tops).
    """
    for n in tl.range(begin, end, BLOCK_N):
        n = tl.multiple_of(n, BLOCK_N)
        k_tile = _load(
            k, k_desc, k_s, k_d, batch, kv_head, n, skv, D, BLOCK_N, BLOCK_D, MASKED, TMA
        )
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        if MASKED:
            columns = n + tl.arange(0, BLOCK_N)
            visible = columns[None, :] < skv
            if CAUSAL:
                rows = first_row + tl.arange(0, BLOCK_M)
                visible = visible & (columns[None, :] <= rows[:, None])
            scores = tl.where(visible, scores * qk_scale, float("-inf"))
            higher = tl.maximum(tops, tl.max(scores, 1))
            weights = tl.math.exp2(scores - higher[:, None])
        else:
            higher = tl.maximum(tops, tl.max(scores, 1) * qk_scale)
            weights = tl.math.exp2(scores * qk_scale - higher[:, None])
        shrink = tl.math.exp2(tops - higher)
        sums = sums * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        v_tile = _load(
            v, v_desc, v_s, v_d, batch, kv_head, n, skv, D, BLOCK_N, BLOCK_D, MASKED, TMA
        )
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
        tops = higher
    return acc, sums, tops


@triton.jit(do_not_specialize=SIZES)
def flash_forward(
    q, k, v, out, lse,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, o_b, o_h, o_s, o_d,
    heads, group, sq, skv, padded, qk_scale, span, q_desc, k_desc, v_desc,
    D: tl.constexpr, CAUSAL: tl.constexpr, SAVE: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Compute the output of a tile of queries of one head.

    The grid has tiles * B * H blocks. The tiles of a head are next to each other, so that the keys
    of the head stay in L2. If SAVE is set, write `lse` [B, H, padded], the log2 of the sum of
    2**score in each row. The autotuner selects a tile for each value of `span`.
    """
    tiles = tl.cdiv(sq, BLOCK_M)
    tile = tl.program_id(0) % tiles
    place = tl.program_id(0) // tiles
    if CAUSAL:
        tile = tiles - 1 - tile  # tiles that see the most columns come first
    batch = place // heads
    head = place % heads
    kv_head = head // group
    first = tile * BLOCK_M
    k = _head(k, batch, kv_head, k_b, k_h)
    v = _head(v, batch, kv_head, v_b, v_h)
    q = _head(q, batch, head, q_b, q_h)
    q_tile = _load(q, q_desc, q_s, q_d, batch, head, first, sq, D, BLOCK_M, BLOCK_D, True, TMA)

    tops = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    end = skv
    whole = skv
    if CAUSAL:
        end = tl.minimum(skv, first + BLOCK_M)
        whole = tl.minimum(skv, first + 1)
    whole = whole // BLOCK_N * BLOCK_N  # every row sees all columns before this one
    acc, sums, tops = _attend(
        acc, sums, tops, q_tile, k, v, k_desc, v_desc, k_s, k_d, v_s, v_d, batch, kv_head,
        0, whole, first, skv, qk_scale,
        CAUSAL, False, D, BLOCK_M, BLOCK_N, BLOCK_D, TMA,
    )  # fmt: skip
    acc, sums, tops = _attend(
        acc, sums, tops, q_tile, k, v, k_desc, v_desc, k_s, k_d, v_s, v_d, batch, kv_head,
        whole, end, first, skv, qk_scale,
        CAUSAL, True, D, BLOCK_M, BLOCK_N, BLOCK_D, TMA,
    )  # fmt: skip
    out = _head(out, batch, head, o_b, o_h)
    _store(out, o_s, o_d, first, sq, acc / sums[:, None], D, BLOCK_M, BLOCK_D)
    if SAVE:
        rows = first + tl.arange(0, BLOCK_M)
        places = lse + tl.cast(place, tl.int64) * padded + rows
        tl.store(places, tops + tl.math.log2(sums), mask=rows < sq)


@triton.jit
def flash_backward_delta(
    out, grad, lse, delta, o_b, o_h, o_s, o_d, g_b, g_h, g_s, g_d, heads, sq, padded,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Compute `delta` [B, H, padded], the sum of out * grad over head_dim for each row.

    The grid has tiles * B * H blocks. Rows beyond sq become 0 in `delta` and `lse`, so that the
    other kernels need no mask for these rows.
    """
    tiles = padded // BLOCK_M
    first = tl.program_id(0) % tiles * BLOCK_M
    place = tl.program_id(0) // tiles
    batch = place // heads
    head = place % heads
    out = _head(out, batch, head, o_b, o_h)
    grad = _head(grad, batch, head, g_b, g_h)
    o_tile = _load(out, None, o_s, o_d, 0, 0, first, sq, D, BLOCK_M, BLOCK_D, True, False)
    g_tile = _load(grad, None, g_s, g_d, 0, 0, first, sq, D, BLOCK_M, BLOCK_D, True, False)
    rows = first + tl.arange(0, BLOCK_M)
    sums = tl.sum(o_tile.to(tl.float32) * g_tile.to(tl.float32), 1)
    at = tl.cast(place, tl.int64) * padded + rows
    tl.store(delta + at, sums)
    tl.store(lse + at, tl.zeros([BLOCK_M], tl.float32), mask=rows >= sq)


@triton.jit
def _gather(
    dk, dv, k_tile, v_tile, q, grad, q_desc, grad_desc, lse, delta, q_s, q_d, g_s, g_d, batch, head,
    begin, end, first_column, sq, qk_scale,
    MASKED: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Add the contributions of the rows [begin, end) of one head to dk and dv of a tile of keys.

    Rows beyond sq contribute nothing, because their queries and gradients are zeros.
    """
    for m in tl.range(begin, end, BLOCK_M):
        m = tl.multiple_of(m, BLOCK_M)
        rows = m + tl.arange(0, BLOCK_M)
        q_tile = _load(q, q_desc, q_s, q_d, batch, head, m, sq, D, BLOCK_M, BLOCK_D, True, TMA)
        tops = tl.load(lse + rows)
        scores = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")
        weights = tl.math.exp2(scores * qk_scale - tops[None, :])
        if MASKED:
            columns = first_column + tl.arange(0, BLOCK_N)
            weights = tl.where(columns[:, None] <= rows[None, :], weights, 0.0)
        g_tile = _load(
            grad, grad_desc, g_s, g_d, batch, head, m, sq, D, BLOCK_M, BLOCK_D, True, TMA
        )
        dv = tl.dot(weights.to(g_tile.dtype), g_tile, dv, input_precision="ieee")
        means = tl.load(delta + rows)
        slopes = tl.dot(v_tile, tl.trans(g_tile), input_precision="ieee")
        slopes = weights * (slopes - means[None, :])
        dk = tl.dot(slopes.to(q_tile.dtype), q_tile, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def flash_backward_dkdv(
    q, k, v, grad, lse, delta, dk, dv,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, g_b, g_h, g_s, g_d,
    dk_b, dk_h, dk_s, dk_d, dv_b, dv_h, dv_s, dv_d,
    heads, group, sq, skv, padded, qk_scale, scale, span, q_desc, k_desc, v_desc, grad_desc,
    D: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of a tile of keys, summed over the query heads that share the key head.

    The grid has tiles * B * Hkv blocks. With CAUSAL, tiles that are visible to more rows come
    first.
    """
    tiles = tl.cdiv(skv, BLOCK_N)
    first = tl.program_id(0) % tiles * BLOCK_N
    place = tl.program_id(0) // tiles
    kv_heads = heads // group
    batch = place // kv_heads
    kv_head = place % kv_heads
    k = _head(k, batch, kv_head, k_b, k_h)
    v = _head(v, batch, kv_head, v_b, v_h)
    k_tile = _load(k, k_desc, k_s, k_d, batch, kv_head, first, skv, D, BLOCK_N, BLOCK_D, True, TMA)
    v_tile = _load(v, v_desc, v_s, v_d, batch, kv_head, first, skv, D, BLOCK_N, BLOCK_D, True, TMA)
    dk_tile = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_tile = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    begin = 0
    whole = 0
    if CAUSAL:
        rows = tl.cdiv(sq, BLOCK_M) * BLOCK_M
        begin = tl.minimum(first // BLOCK_M * BLOCK_M, rows)
        whole = tl.minimum(tl.cdiv(first + BLOCK_N - 1, BLOCK_M) * BLOCK_M, rows)
    for head in range(kv_head * group, (kv_head + 1) * group):
        q_at = _head(q, batch, head, q_b, q_h)
        g_at = _head(grad, batch, head, g_b, g_h)
        at = (tl.cast(batch, tl.int64) * heads + head) * padded
        if CAUSAL:
            dk_tile, dv_tile = _gather(
                dk_tile, dv_tile, k_tile, v_tile, q_at, g_at, q_desc, grad_desc, lse + at,
                delta + at, q_s, q_d, g_s, g_d, batch, head, begin, whole, first, sq, qk_scale,
                True, D, BLOCK_M, BLOCK_N, BLOCK_D, TMA,
            )  # fmt: skip
        dk_tile, dv_tile = _gather(
            dk_tile, dv_tile, k_tile, v_tile, q_at, g_at, q_desc, grad_desc, lse + at,
            delta + at, q_s, q_d, g_s, g_d, batch, head, whole, sq, first, sq, qk_scale,
            False, D, BLOCK_M, BLOCK_N, BLOCK_D, TMA,
        )  # fmt: skip
    dk = _head(dk, batch, kv_head, dk_b, dk_h)
    dv = _head(dv, batch, kv_head, dv_b, dv_h)
    _store(dk, dk_s, dk_d, first, skv, dk_tile * scale, D, BLOCK_N, BLOCK_D)
    _store(dv, dv_s, dv_d, first, skv, dv_tile, D, BLOCK_N, BLOCK_D)


@triton.jit
def _descend(
    dq, q_tile, g_tile, tops, means, k, v, k_desc, v_desc, k_s, k_d, v_s, v_d, batch, kv_head,
    begin, end, first_row, skv, qk_scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Add the contributions of the columns [begin, end) to dq of a tile of queries."""
    for n in tl.range(begin, end, BLOCK_N):
        n = tl.multiple_of(n, BLOCK_N)
        k_tile = _load(
            k, k_desc, k_s, k_d, batch, kv_head, n, skv, D, BLOCK_N, BLOCK_D, MASKED, TMA
        )
        v_tile = _load(
            v, v_desc, v_s, v_d, batch, kv_head, n, skv, D, BLOCK_N, BLOCK_D, MASKED, TMA
        )
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        weights = tl.math.exp2(scores * qk_scale - tops[:, None])
        if MASKED:
            columns = n + tl.arange(0, BLOCK_N)
            visible = columns[None, :] < skv
            if CAUSAL:
                rows = first_row + tl.arange(0, BLOCK_M)
                visible = visible & (columns[None, :] <= rows[:, None])
            weights = tl.where(visible, weights, 0.0)
        slopes = tl.dot(g_tile, tl.trans(v_tile), input_precision="ieee")
        slopes = weights * (slopes - means[:, None])
        dq = tl.dot(slopes.to(k_tile.dtype), k_tile, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=SIZES)
def flash_backward_dq(
    q, k, v, grad, lse, delta, dq,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, g_b, g_h, g_s, g_d,
    dq_b, dq_h, dq_s, dq_d, heads, group, sq, skv, padded, qk_scale, scale, span,
    q_desc, k_desc, v_desc, grad_desc,
    D: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Compute dq of a tile of queries of one head. The grid has tiles * B * H blocks."""
    tiles = tl.cdiv(sq, BLOCK_M)
    tile = tl.program_id(0) % tiles
    place = tl.program_id(0) // tiles
    if CAUSAL:
        tile = tiles - 1 - tile
    first = tile * BLOCK_M
    batch = place // heads
    head = place % heads
    kv_head = head // group
    k = _head(k, batch, kv_head, k_b, k_h)
    v = _head(v, batch, kv_head, v_b, v_h)
    q = _head(q, batch, head, q_b, q_h)
    grad = _head(grad, batch, head, g_b, g_h)
    q_tile = _load(q, q_desc, q_s, q_d, batch, head, first, sq, D, BLOCK_M, BLOCK_D, True, TMA)
    g_tile = _load(
        grad, grad_desc, g_s, g_d, batch, head, first, sq, D, BLOCK_M, BLOCK_D, True, TMA
    )
    rows = first + tl.arange(0, BLOCK_M)
    at = tl.cast(place, tl.int64) * padded + rows
    tops = tl.load(lse + at)
    means = tl.load(delta + at)
    end = skv
    whole = skv
    if CAUSAL:
        end = tl.minimum(skv, first + BLOCK_M)
        whole = tl.minimum(skv, first + 1)
    whole = whole // BLOCK_N * BLOCK_N
    dq_tile = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dq_tile = _descend(
        dq_tile, q_tile, g_tile, tops, means, k, v, k_desc, v_desc, k_s, k_d, v_s, v_d, batch, kv_head,
        0, whole, first, skv, qk_scale, CAUSAL, False, D, BLOCK_M, BLOCK_N, BLOCK_D, TMA,
    )  # fmt: skip
    dq_tile = _descend(
        dq_tile, q_tile, g_tile, tops, means, k, v, k_desc, v_desc, k_s, k_d, v_s, v_d, batch, kv_head,
        whole, end, first, skv, qk_scale, CAUSAL, True, D, BLOCK_M, BLOCK_N, BLOCK_D, TMA,
    )  # fmt: skip
    dq = _head(dq, batch, head, dq_b, dq_h)
    _store(dq, dq_s, dq_d, first, sq, dq_tile * scale, D, BLOCK_M, BLOCK_D)


PASSES = {
    "forward": flash_forward,
    "backward_delta": flash_backward_delta,
    "backward_kv": flash_backward_dkdv,
    "backward_q": flash_backward_dq,
}
"""Maps the name of each pass to its kernel.

The tables of tiles and `tuning` use the names of passes. Profilers show the names of kernels.
"""
