"""Compute the FLOPs, compulsory bytes and phases of a config from its shapes.

The section "FLOPs and bytes" of docs/measuring.md explains the conventions and their sources.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from profharness.attention.config import Config
from profharness.dtypes import DTYPES
from profharness.errors import UsageError

CONVENTIONS = ("exact", "flash-attention")
CASTS = "casts"  # name of the phase that casts inputs to the wider dtype of the scores
# name of the phase in which unfused attention copies K and V for each query head of a group
REPEAT = "repeat K and V"
SOFTMAX_OPS = 5  # operations per score: scale, compare, subtract and exponentiate, add, divide
# operations per score: multiply by the probability, subtract delta, multiply, scale
SOFTMAX_BWD_OPS = 4


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """The bytes that each tensor of a call occupies in memory.

    If an input has the batch stride 0, its batch is counted once. Rows of the key and the value are
    counted only if at least one query attends to them.
    """

    query: int
    key: int
    value: int
    mask: int
    output: int
    statistics: int
    """The log-sum-exp of each query row, in fp32."""
    gradients: int
    """The gradients of Q, K and V, and of the mask if it requires a gradient. This includes keys
    that no query attends to.
    """

    @property
    def forward(self) -> int:
        """The bytes of the inputs and the output."""
        return self.query + self.key + self.value + self.mask + self.output


def tensor_bytes(config: Config) -> TensorBytes:
    """Return the sizes of the tensors of a call. Raise UsageError if the config has no dtype."""
    if config.dtype is None:
        text = "the number of bytes depends on the dtype; add fp16, bf16 or fp32"
        raise UsageError(f"config {config}: {text}")
    if config.is_served:
        return _served_bytes(config, DTYPES[config.dtype].bytes)
    item = DTYPES[config.dtype].bytes
    rows, columns, dims = config.seq_len_q, config.seq_len_kv, config.head_dim + config.value_dim
    seen = seen_keys(config)
    heads = config.output_batch * config.num_heads
    query, key, value = (
        # a batch with stride 0 is stored once
        1 if config.layout == "broadcast_batch" or (strides and strides[0] == 0) else count
        for count, strides in (
            (config.batch, config.q_strides),
            (config.key_batch, config.k_strides),
            (config.key_batch, config.v_strides),
        )
    )
    mask = math.prod(config.mask_dims) if config.mask != "none" else 0
    mask *= item if config.mask.startswith("float") else 1  # a bool mask has one byte per element
    gradients = item * config.batch * config.num_heads * rows * config.head_dim
    gradients += item * config.key_batch * config.num_kv_heads * columns * dims
    return TensorBytes(
        query=query * config.num_heads * rows * config.head_dim * item,
        key=key * config.num_kv_heads * seen * config.head_dim * item,
        value=value * config.num_kv_heads * seen * config.value_dim * item,
        mask=mask,
        output=heads * rows * config.value_dim * item,
        statistics=4 * heads * rows,
        gradients=gradients + (mask if config.mask == "float_grad" else 0),
    )


def _served_bytes(config: Config, item: int) -> TensorBytes:
    """Return the sizes of the tensors of a call on a cache.

    Each element of a query takes `item` bytes. Latent attention reads one vector per token as key
    and value. This vector is counted as the key.
    """
    queries = sum(queries * count for queries, _, count in config.requests)
    seen = sum(seen_keys(config, *request) * count for *request, count in config.requests)
    cached = seen * config.num_kv_heads * DTYPES[config.kv_dtype or str(config.dtype)].bytes
    return TensorBytes(
        query=queries * config.num_heads * config.head_dim * item,
        key=cached * config.head_dim,
        value=0 if config.mla else cached * config.value_dim,
        mask=0,
        output=queries * config.num_heads * config.value_dim * item,
        statistics=4 * queries * config.num_heads,
        gradients=0,
    )


def matrix_bytes(config: Config, dtype: str) -> int:
    """Return the bytes of the score matrices of all heads, which unfused attention stores in
    `dtype`. Masked scores are included.
    """
    heads = config.output_batch * config.num_heads
    return heads * config.seq_len_q * config.seq_len_kv * DTYPES[dtype].bytes


def _growth(config: Config, dtype: str) -> tuple[int, int]:
    """Return how many times wider `dtype` is than the dtype of the inputs, and the number of query
    heads per key head.
    """
    widen = DTYPES[dtype].bytes // DTYPES[str(config.dtype)].bytes
    return widen, config.num_heads // config.num_kv_heads


def copy_bytes(config: Config, dtype: str) -> int:
    """Return the bytes of the copies that unfused attention makes before it computes in `dtype`.

    If heads are grouped, K and V are copied for each query head. If `dtype` is wider than the dtype
    of the inputs, Q, K and V are copied.
    """
    # a causal mask or a window does not reduce the copies
    tensors = tensor_bytes(replace(config, causal=False, window=None))
    widen, repeated = _growth(config, dtype)
    grown = repeated * widen
    keys = (tensors.key + tensors.value) * grown if grown > 1 else 0
    return keys + (tensors.query * widen if widen > 1 else 0)


@dataclass(frozen=True, slots=True)
class Phase:
    """One step of an attention call, such as `QK^T`, and the work that it requires."""

    name: str
    flops: int
    bytes: int
    """The bytes moved to and from memory. They are 0 for a fused phase that uses only registers."""
    matmul: bool = True
    """Whether the phase is a matrix product, which counts towards the FLOPs of a config."""

    @property
    def intensity(self) -> float | None:
        """The FLOPs per byte. None if the phase moves no bytes."""
        return self.flops / self.bytes if self.bytes else None


def score_count(config: Config) -> int:
    """Count the scores of one head that a call must compute for the whole batch.

    The causal mask is aligned to the top left, so query row i attends to the keys 0 to i. If a
    request of a serving engine has more keys than queries, the mask is aligned to the bottom right,
    because its queries are the last tokens. A window is aligned in the same way. Scores that a mask
    tensor hides are counted, because a config does not contain the values of the mask.
    """
    return sum(
        count * _scores_in_band(config, queries, keys, keys - queries if config.is_served else 0)
        for queries, keys, count in config.requests
    )


def _scores_in_band(config: Config, rows: int, columns: int, shift: int) -> int:
    """Count the scores of a matrix [rows, columns] that `causal` and `window` do not mask.

    The causal mask and the window are shifted right by `shift` keys.
    """
    first, last = -rows, columns  # the diagonals j - i that are computed, first < j - i <= last
    if config.window is not None:
        first, last = shift - config.window, shift + config.window - 1
    if config.causal:
        last = shift
    return _scores_up_to(last, rows, columns) - _scores_up_to(first, rows, columns)


def _scores_up_to(diagonal: int, rows: int, columns: int) -> int:
    """Count the pairs of a row i and a column j with j <= i + diagonal."""

    def total(row: int) -> int:
        """Return the sum of min(n, columns) for n from 1 to the length of a row."""
        length = max(0, row + diagonal + 1)
        short = min(length, columns)
        return short * (short + 1) // 2 + (length - short) * columns

    return total(rows - 1) - total(-1)


def seen_keys(config: Config, queries: int | None = None, keys: int | None = None) -> int:
    """Return the number of keys to which at least one query attends. These are the first keys.

    In a request of a serving engine, they are the last keys. `queries` and `keys` are the lengths
    of a request if the lengths differ from the lengths of the config.
    """
    rows = config.seq_len_q if queries is None else queries
    columns = config.seq_len_kv if keys is None else keys
    if config.causal and not config.is_served:
        return min(rows, columns)
    return columns if config.window is None else min(rows + config.window - 1, columns)


def flops(config: Config, convention: str = "exact") -> int:
    """Return the FLOPs of the matrix products of one call. A multiply-add counts as two operations.
    Raise UsageError for an unknown convention.

    `exact` counts the products QK^T and PV over the required scores. With bwd, it also counts the
    products QK^T, dV, dP, dQ and dK of the backward pass.

    `flash-attention` is the convention of the benchmarks of the flash-attention project. A causal
    call counts half of the scores if the lengths are equal, and aligns the mask to the bottom right
    if there are more keys than queries. A window is aligned to the bottom right too, and all of its
    scores are counted. The backward pass counts 2.5 times the forward pass.

    Both conventions multiply by the number of query heads, not of key heads.
    """
    if convention == "exact":
        scores = 2 * config.num_heads * score_count(config)
        key_products, value_products = (4, 3) if config.bwd else (1, 1)
        return scores * (key_products * config.head_dim + value_products * config.value_dim)
    if convention != "flash-attention":
        raise UsageError(
            f"unknown FLOP convention {convention!r}; choose from {', '.join(CONVENTIONS)}"
        )
    rows, columns = config.seq_len_q, config.seq_len_kv
    scores_twice = rows * (max(0, columns - rows) + columns if config.causal else 2 * columns)
    if config.window is not None:
        scores_twice = 2 * _scores_in_band(config, rows, columns, columns - rows)
    dims = config.head_dim + config.value_dim
    forward = config.output_batch * config.num_heads * scores_twice * dims
    return forward * 7 // 2 if config.bwd else forward


def compulsory_bytes(config: Config) -> int:
    """Return the bytes that a call must move if every input is read once and every output is
    written once. Raise UsageError if the config has no dtype.

    With bwd, the forward pass also writes the log-sum-exp. The backward pass reads the log-sum-exp,
    Q, K, V, the mask, the output and the gradient of the output. The backward pass writes the
    gradients of Q, K, V and of a float_grad mask.
    """
    tensors = tensor_bytes(config)
    again = tensors.forward + tensors.statistics if config.bwd else 0
    return working_set_bytes(config) + again


def working_set_bytes(config: Config) -> int:
    """Return the bytes of all tensors of a call, each counted once."""
    tensors = tensor_bytes(config)
    backward = tensors.output + tensors.gradients + tensors.statistics
    return tensors.forward + (backward if config.bwd else 0)


def phases(config: Config, score_dtype: str | None = None) -> tuple[Phase, ...]:
    """Return the steps of one call in order. Raise UsageError if the config has no dtype.

    If `score_dtype` is None, attention is fused. The scores stay on the chip, and only the required
    scores are computed. QK^T moves Q and K, the softmax phase reads the mask, and PV moves V and
    the output.

    If `score_dtype` is given, attention is unfused. Each step reads and writes whole score matrices
    in this dtype, even if a causal mask or a window hides scores. K and V are copied for each query
    head of a group. Narrower inputs are cast first, as PyTorch's math backend casts 16-bit inputs to
    fp32.
    """
    return _fused(config) if score_dtype is None else _unfused(config, score_dtype)


def _fused(config: Config) -> tuple[Phase, ...]:
    tensors = tensor_bytes(config)
    query, key, value, output = tensors.query, tensors.key, tensors.value, tensors.output
    heads = config.output_batch * config.num_heads
    scores = config.num_heads * score_count(config)
    softmax = tensors.mask + (tensors.statistics if config.bwd else 0)
    per_key, per_value = 2 * scores * config.head_dim, 2 * scores * config.value_dim
    forward = (
        Phase("QK^T", per_key, query + key),
        Phase("softmax", SOFTMAX_OPS * scores, softmax, matmul=False),
        Phase("PV", per_value, value + output),
    )
    if not config.bwd:
        return forward
    # the phases dV, dQ and dK count gradients of the size of Q, K and V, so count the rest here
    gradients = tensors.gradients - query - key - value
    delta = 2 * heads * config.seq_len_q * config.value_dim
    return (
        *forward,
        Phase("delta", delta, 2 * output, matmul=False),
        Phase("QK^T again", per_key, query + key),
        Phase("softmax backward", SOFTMAX_BWD_OPS * scores, softmax + gradients, matmul=False),
        Phase("dV", per_value, value),
        Phase("dP", per_value, value),
        Phase("dQ", per_key, query),
        Phase("dK", per_key, key),
    )


def _unfused(config: Config, dtype: str) -> tuple[Phase, ...]:
    tensors = tensor_bytes(config)
    # a causal mask or a window does not reduce the bytes
    whole = tensor_bytes(replace(config, causal=False, window=None))
    key, value, matrix = whole.key, whole.value, matrix_bytes(config, dtype)
    widen, repeated = _growth(config, dtype)
    scores = matrix // DTYPES[dtype].bytes
    per_key, per_value = 2 * scores * config.head_dim, 2 * scores * config.value_dim
    steps = []
    if repeated > 1:
        steps.append(Phase(REPEAT, 0, (key + value) * (1 + repeated), matmul=False))
    query, output = tensors.query * widen, tensors.output * widen
    key, value = key * repeated * widen, value * repeated * widen
    if widen > 1:
        wide = query + key + value + output
        steps.append(Phase(CASTS, 0, wide + wide // widen, matmul=False))
    steps.append(Phase("QK^T", per_key, query + key + matrix))
    if config.causal or config.window or config.mask != "none":
        hidden = tensors.mask or config.seq_len_q * config.seq_len_kv
        steps.append(Phase("mask", scores, 2 * matrix + hidden, matmul=False))
    steps.append(Phase("softmax", SOFTMAX_OPS * scores, 2 * matrix, matmul=False))
    if config.dropout:
        steps.append(Phase("dropout", scores, 2 * matrix + scores, matmul=False))
    steps.append(Phase("PV", per_value, matrix + value + output))
    if config.bwd:
        steps += [
            Phase("dV", per_value, matrix + output + value),
            Phase("dP", per_value, output + value + matrix),
            Phase("softmax backward", SOFTMAX_BWD_OPS * scores, 3 * matrix, matmul=False),
            Phase("dQ", per_key, matrix + key + query),
            Phase("dK", per_key, matrix + query + key),
        ]
    return tuple(steps)
