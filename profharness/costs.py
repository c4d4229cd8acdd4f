"""FLOPs, compulsory bytes and phases of one attention config, from its shapes alone.

Conventions and their sources stand in docs/measuring.md, "FLOPs and bytes".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from profharness.errors import UsageError

if TYPE_CHECKING:
    from profharness.config import Config


CONVENTIONS = ("exact", "flash-attention")
EXECUTIONS = ("fused", "unfused")
ITEM_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
STATISTIC_BYTES = 4  # log-sum-exp and delta are fp32, one a query row
MATH_BYTES = 4  # PyTorch's math computes 16-bit inputs in fp32
SOFTMAX_OPS = 5  # a score: scale, compare, subtract and exponentiate, add, divide
SOFTMAX_BWD_OPS = 4  # a score: multiply with the probability, subtract delta, multiply, scale


@dataclass(frozen=True, slots=True)
class Phase:
    """One step of attention: its operations, and the bytes that it moves to and from memory.

    matmul: a matrix product, which the FLOPs of a config count; the operations of softmax and
    the like are never counted there. A fused phase that works on registers alone moves 0 bytes.
    """

    name: str
    flops: int
    bytes: int
    matmul: bool = True

    @property
    def intensity(self) -> float | None:
        """FLOPs over bytes; None where the phase moves no bytes."""
        return self.flops / self.bytes if self.bytes else None


def score_count(config: Config) -> int:
    """Scores that one head must compute: with `causal` those that torch's is_causal keeps (aligned
    top left, query row i sees the keys up to i), else all. What a mask tensor hides is not known
    from the config and counts as computed.
    """
    rows, columns = config.seq_len_q, config.seq_len_kv
    if not config.causal:
        return rows * columns
    full = min(rows, columns)
    return full * (full + 1) // 2 + (rows - full) * columns


def flops(config: Config, convention: str = "exact") -> int:
    """FLOPs of the matrix products of one call, a multiply-add counted as two.

    `exact`: 2 products over the scores that are needed, and with bwd 5 more (QK^T once again, dV,
    dP, dQ, dK). `flash-attention`: as that project's benchmarks count, causal as half of a square
    (aligned bottom right where the lengths differ), backward as 2.5 times the forward. Query heads
    count, key-value heads do not. Raises UsageError for an unknown convention.
    """
    if convention == "exact":
        scores = 2 * _heads(config) * score_count(config)
        key_products, value_products = (4, 3) if config.bwd else (1, 1)
        return scores * (key_products * config.head_dim + value_products * config.value_dim)
    if convention != "flash-attention":
        raise UsageError(
            f"FLOP convention {convention!r} is not known; there are {', '.join(CONVENTIONS)}"
        )
    rows, columns = config.seq_len_q, config.seq_len_kv
    seen_twice = max(0, columns - rows) + columns if config.causal else 2 * columns
    forward = _heads(config) * rows * seen_twice * (config.head_dim + config.value_dim)
    return forward * 7 // 2 if config.bwd else forward


def compulsory_bytes(config: Config) -> int:
    """Bytes that a call must move if every input is read once and every output written once.

    Forward: Q, K, V and mask in, output out. With bwd also the log-sum-exp out and in, Q, K, V,
    mask, output and its gradient in, and the gradients of Q, K, V (and of a float_grad mask) out.
    With `causal` only keys that a query sees count; a dimension with stride 0 counts once. Raises
    UsageError for a config without a dtype.
    """
    if not config.bwd:
        return _forward_bytes(config)
    return working_set_bytes(config) + _forward_bytes(config) + _statistic_bytes(config)


def working_set_bytes(config: Config) -> int:
    """Bytes of all tensors that a call must touch, each once however often it is read: what has
    to fit in a cache for a repeated call to stay in it.
    """
    if not config.bwd:
        return _forward_bytes(config)
    gradients = output_bytes(config) + _gradient_bytes(config)
    return _forward_bytes(config) + gradients + _statistic_bytes(config)


def query_bytes(config: Config) -> int:
    """Bytes of Q as stored."""
    return _stored(config, config.num_heads, config.seq_len_q, config.head_dim)


def key_bytes(config: Config) -> int:
    """Bytes of the rows of K that some query sees."""
    return _stored(config, config.num_kv_heads, _seen_keys(config), config.head_dim)


def value_bytes(config: Config) -> int:
    """Bytes of the rows of V that some query sees."""
    return _stored(config, config.num_kv_heads, _seen_keys(config), config.value_dim)


def output_bytes(config: Config) -> int:
    """Bytes of the output, which never has a stride of 0."""
    return _heads(config) * config.seq_len_q * config.value_dim * _item(config)


def mask_bytes(config: Config) -> int:
    """Bytes of the mask as stored: one a score for bool masks, the dtype's for float ones."""
    if config.mask == "none":
        return 0
    heads = _heads(config) if config.mask == "float_bh" else 1
    item = _item(config) if config.mask.startswith("float") else 1
    return heads * config.seq_len_q * config.seq_len_kv * item


def score_bytes(config: Config, item: int = MATH_BYTES) -> int:
    """Bytes of one whole score matrix of all heads, as unfused attention keeps it."""
    return _heads(config) * config.seq_len_q * config.seq_len_kv * item


def phases(config: Config, execution: str = "fused") -> tuple[Phase, ...]:
    """The steps of one call in order.

    `fused`: scores stay on the chip, so QK^T moves Q and K, PV moves V and the output, and only
    scores that are needed are computed. The mask is read by the softmax phase. `unfused`, as
    PyTorch's math: each step reads and writes whole score matrices in fp32, causal saves nothing,
    K and V of grouped heads are repeated,
    and 16-bit inputs are cast first. Raises UsageError for an unknown execution or no dtype.
    """
    if execution == "fused":
        return _fused(config)
    if execution == "unfused":
        return _unfused(config)
    raise UsageError(f"execution {execution!r} is not known; there are {', '.join(EXECUTIONS)}")


def _fused(config: Config) -> tuple[Phase, ...]:
    query, key = query_bytes(config), key_bytes(config)
    value, output = value_bytes(config), output_bytes(config)
    scores = _heads(config) * score_count(config)
    statistics = _statistic_bytes(config) if config.bwd else 0
    per_key, per_value = 2 * scores * config.head_dim, 2 * scores * config.value_dim
    forward = (
        Phase("QK^T", per_key, query + key),
        Phase("softmax", SOFTMAX_OPS * scores, mask_bytes(config) + statistics, matmul=False),
        Phase("PV", per_value, value + output),
    )
    if not config.bwd:
        return forward
    gradients = _gradient_bytes(config) - query - key - value
    return (
        *forward,
        Phase("delta", 2 * output // _item(config), 2 * output, matmul=False),
        Phase("QK^T again", per_key, query + key),
        Phase(
            "softmax backward",
            SOFTMAX_BWD_OPS * scores,
            mask_bytes(config) + statistics + gradients,
            matmul=False,
        ),
        Phase("dV", per_value, value),
        Phase("dP", per_value, value),
        Phase("dQ", per_key, query),
        Phase("dK", per_key, key),
    )


def _unfused(config: Config) -> tuple[Phase, ...]:
    scores = _heads(config) * config.seq_len_q * config.seq_len_kv
    matrix = score_bytes(config)
    widen = MATH_BYTES // _item(config)
    shared = config.num_kv_heads != config.num_heads
    key, value = (_whole(config, columns) for columns in (config.head_dim, config.value_dim))
    repeated = config.num_heads // config.num_kv_heads if shared else 1
    moved_by_repeat = (key + value) * (1 + repeated)
    query, key = query_bytes(config) * widen, key * repeated * widen
    value, output = value * repeated * widen, output_bytes(config) * widen
    per_key, per_value = 2 * scores * config.head_dim, 2 * scores * config.value_dim
    steps = []
    if shared:
        steps.append(Phase("repeat K and V", 0, moved_by_repeat, matmul=False))
    if widen > 1:
        narrow = query + key + value + output
        steps.append(Phase("casts", 0, narrow + narrow // widen, matmul=False))
    steps.append(Phase("QK^T", per_key, query + key + matrix))
    if config.causal or config.mask != "none":
        hidden = mask_bytes(config) or config.seq_len_q * config.seq_len_kv
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


def _forward_bytes(config: Config) -> int:
    inputs = query_bytes(config) + key_bytes(config) + value_bytes(config) + mask_bytes(config)
    return inputs + output_bytes(config)


def _statistic_bytes(config: Config) -> int:
    """One log-sum-exp a query row."""
    return STATISTIC_BYTES * _heads(config) * config.seq_len_q


def _gradient_bytes(config: Config) -> int:
    """dQ, dK, dV, and that of a mask with a gradient; written whole, whatever a query sees."""
    item = _item(config)
    keys = config.batch * config.num_kv_heads * config.seq_len_kv * item
    queries = _heads(config) * config.seq_len_q * config.head_dim * item
    mask = mask_bytes(config) if config.mask == "float_grad" else 0
    return queries + keys * (config.head_dim + config.value_dim) + mask


def _heads(config: Config) -> int:
    return config.batch * config.num_heads


def _seen_keys(config: Config) -> int:
    return min(config.seq_len_q, config.seq_len_kv) if config.causal else config.seq_len_kv


def _whole(config: Config, columns: int) -> int:
    return _stored(config, config.num_kv_heads, config.seq_len_kv, columns)


def _stored(config: Config, heads: int, rows: int, columns: int) -> int:
    batch = 1 if config.layout == "broadcast_batch" else config.batch
    return batch * heads * rows * columns * _item(config)


def _item(config: Config) -> int:
    if config.dtype is None:
        raise UsageError(
            f"config {config}: bytes depend on the dtype and it has none; add fp16, bf16 or fp32"
        )
    return ITEM_BYTES[config.dtype]
