"""The rules of 2.0.1 to 2.4.1, a table per backend and span of releases, in the order of PyTorch.

Sources: the checks' order and conditions in the binaries of the PyPI wheels, the texts in their
strings (those cut short are given as far as they were read), and a public copy of the source for
the alignment of head_dim and for cuDNN in 2.4. Nothing here was run on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

from profharness.dispatch import checks as c
from profharness.dispatch.machine import AttentionParams, Machine, Release
from profharness.dispatch.rules import (
    CAUSAL_MASK,
    CPU_FLASH,
    EFFICIENT,
    FLASH,
    FOUR_D,
    MASK_RULES,
    MATH,
    NESTED_BROADCAST,
    NESTED_TRAINING,
    NESTED_ZERO_LENGTH,
    ON_DEVICE,
    RAISED_LATER,
    ZERO_LENGTH,
    Rule,
    disabled,
    dtype_text,
    sm_range,
)


class Doubt(NamedTuple):
    """What is not sure of the answers for a span of releases."""

    since: Release
    until: Release
    text: str


DOUBTS = (
    Doubt((2, 0), (2, 5),
          "The rules of PyTorch 2.0 to 2.4 were read in the binaries of their wheels, and held against no GPU."),
    Doubt((2, 0), (2, 1),
          "That 2.0 asks for the dtype last is read from the order of its code: another reason may come first."),
    Doubt((2, 1, 0), (2, 1, 1),
          "2.1.0 lacks the preprocessing of attn_mask that came with 2.1.1; the choice is the same."),
    Doubt((2, 0), (2, 3),
          "torch.nn.attention.sdpa_kernel came with PyTorch 2.3; before, one backend is had with "
          "torch.backends.cuda.sdp_kernel(enable_flash=…, enable_math=…, enable_mem_efficient=…)."),
)  # fmt: skip


def doubts(release: Release) -> tuple[str, ...]:
    """Sentences on what is not sure of a release's answers."""
    return tuple(doubt.text for doubt in DOUBTS if doubt.since <= release < doubt.until)


def _span(since: Release, until: Release, *rules: Rule) -> tuple[Rule, ...]:
    """The rows, asked in that span alone."""
    return tuple(rule._replace(since=since, until=until) for rule in rules)


def _by_check(rules: tuple[Rule, ...]) -> dict[str, Rule]:
    return {rule.check: rule for rule in rules}


LATER_FLASH = _by_check(FLASH)  # rows whose condition and text are those of 2.5
LATER_EFFICIENT = _by_check(EFFICIENT)
LATER_CPU = _by_check(CPU_FLASH)
NO_GQA = Rule(
    "no_argument", "front_end", lambda p, _: p.enable_gqa,
    "scaled_dot_product_attention has no argument enable_gqa before PyTorch 2.5.",
)  # fmt: skip
NO_SCALE = Rule(
    "no_argument", "front_end", lambda p, _: p.scaled,
    "scaled_dot_product_attention has no argument scale before PyTorch 2.1.",
)  # fmt: skip
FOUR = FOUR_D._replace(
    message="Both fused kernels requires query, key and value to be 4 dimensional, but got Query dim: {p.ndim}, "
    "Key dim: {p.ndim}, Value dim: {p.ndim} instead."
)
_SAME_SIZES = (
    "query, key and value to have the same batch_size and num_heads. Query.sizes(): {p.query_sizes}"
)
HEADS = Rule(
    "num_heads", "batch_size_and_num_heads", c.heads_or_batch_differ,
    lambda p, m: ("Both fused kernels requires " if m.torch < (2, 1) else
                  "For dense inputs, both fused kernels require ") + _SAME_SIZES.format(p=p),
    scope="dense",
)  # fmt: skip
NESTED_SIZES = HEADS._replace(  # what 2.0 and 2.1 ask of nested inputs was not read
    refuses=lambda p, m: None if c.heads_or_batch_differ(p, m) else False, scope="nested"
)
MASK = Rule(
    "mask", "for_attn_mask", lambda p, _: p.mask is not None,
    lambda _, m: ("Both fused kernels do" if m.torch < (2, 4) else "Flash Attention does")
    + " not support non-null attn_mask.",
)  # fmt: skip
NO_LENGTH = ZERO_LENGTH._replace(
    message="Both fused kernels do not support zero seq_len_q or seq_len_kv."
)
_STRIDE = "Both fused kernels require the last dimension of the input to have stride 1."


def _stride(singleton_ok: bool) -> Rule:
    refuses = c.strided(singleton_ok)
    return Rule("last_dim_stride", "last_stride", refuses, _STRIDE, scope="dense")


def _both(params: AttentionParams, _: Machine) -> bool | None:
    """Whether the front end refuses both before it dispatches was not read."""
    return None if params.is_causal and params.mask is not None else False


CAUSAL_AND_MASK = Rule(RAISED_LATER, "front_end", _both, CAUSAL_MASK)
NO_NESTED_TRAINING = Rule(
    "nested", "requires_grad_and_nested", lambda p, _: p.requires_grad,
    "Memory efficient attention currently doesn't support training with NT inputs.", scope="nested",
)  # fmt: skip


def _training_heads(limit: int, newest: tuple[int, int], where: str) -> Rule:
    """Flash's backward has no room for head_dim above `limit` from sm86 to `newest`."""
    text = f"Flash attention currently doesn't support training with head_dim greater than {limit} on {where}."
    return Rule(
        "head_dim_training", "head_dim_gt", lambda p, m: p.requires_grad and p.head_dim > limit
        and (8, 6) <= m.capability <= newest, text,
    )  # fmt: skip


_ADA = "gpu architectures in the range[sm86, sm89]"
_FA1_DIMS = Rule(
    "head_dim_multiple", "head_dim_size",
    lambda p, _: p.head_dim != p.value_dim or p.head_dim % 8 != 0 or p.head_dim > 128,
    "Flash attention requires q,k,v to have the same last dimension and to be a multiple of 8 and less than or "
    "equal to 128.",
)  # fmt: skip
_FA2_NESTED = (
    NESTED_TRAINING, NESTED_BROADCAST, LATER_FLASH["head_dim_size_nested"], NESTED_ZERO_LENGTH,
)  # fmt: skip
_FLASH_OFF = disabled("flash", "Flash")

FLASH_EARLY = (
    *_span((2, 0), (2, 1),
           NO_GQA, NO_SCALE, _FLASH_OFF, FOUR, HEADS, NESTED_SIZES, MASK, _FA1_DIMS,
           Rule("capability", "hardware", lambda _, m: not (m.capability == (7, 5) or m.major == 8),
                "Flash attention only supports sm75 and sm8x gpu architectures."),
           _training_heads(64, (*c.NEVER, 0), "sm86 or newer"),
           Rule("nested", "nested", lambda *_: True,
                "We are not enabling nested Tensors for Flash Attention because of cuda memory errors.",
                scope="nested"),
           LATER_FLASH["dtypes"]),
    *_span((2, 1), (2, 2),
           NO_GQA, _FLASH_OFF, FOUR, HEADS, NESTED_SIZES, MASK, _FA1_DIMS,
           Rule("capability", "hardware", c.outside((7, 5)), sm_range("Flash attention", "sm75")),
           _training_heads(64, (8, 9), _ADA), NESTED_ZERO_LENGTH, NO_LENGTH,
           _stride(singleton_ok=False), LATER_FLASH["dtypes"]),
    *_span((2, 2), (2, 3),
           NO_GQA, _FLASH_OFF, FOUR, MASK, LATER_FLASH["head_dim_size"], LATER_FLASH["hardware"],
           _training_heads(192, (8, 9), _ADA), LATER_FLASH["causal_non_square"], *_FA2_NESTED, HEADS, NO_LENGTH,
           _stride(singleton_ok=False), LATER_FLASH["dtypes"]),
    *_span((2, 3), (2, 5),
           NO_GQA, _FLASH_OFF, ON_DEVICE, FOUR, MASK, LATER_FLASH["head_dim_size"], LATER_FLASH["hardware"],
           LATER_FLASH["head_dim_gt192"], LATER_FLASH["causal_non_square"], LATER_FLASH["dtypes"], *_FA2_NESTED,
           HEADS, NO_LENGTH, _stride(singleton_ok=True)),
)  # fmt: skip


def _efficient_dtypes(_: AttentionParams, machine: Machine) -> tuple[str, ...]:
    """bf16 stood on every GPU in 2.0, and on every one but those of major 5 in 2.1."""
    bf16 = machine.torch < (2, 1) or machine.major != 5
    return ("fp16", "fp32", "bf16") if bf16 else ("fp16", "fp32")


_EFFICIENT_DTYPE = Rule(
    "dtype", "dtypes", lambda p, m: p.dtype not in _efficient_dtypes(p, m), dtype_text(_efficient_dtypes)
)  # fmt: skip
_EFFICIENT_OFF = disabled("efficient", "Memory Efficient")
_ALIGNED = LATER_EFFICIENT["head_dim_size"]
_EFFICIENT_SM = LATER_EFFICIENT["hardware"]
_EFFICIENT_DENSE = (HEADS, NO_LENGTH, _stride(singleton_ok=False))
_EFFICIENT_NESTED = (NO_NESTED_TRAINING, NESTED_TRAINING, NESTED_BROADCAST, NESTED_ZERO_LENGTH)

EFFICIENT_EARLY = (
    *_span((2, 0), (2, 1),
           NO_GQA, NO_SCALE,
           Rule("capability", "hardware", lambda _, m: m.major < 5,
                "Mem Efficient Attention only supports sm5x or greater gpu architectures."),
           _EFFICIENT_OFF, NO_NESTED_TRAINING, FOUR, HEADS, NESTED_SIZES, MASK, _ALIGNED,
           Rule("head_dim", "head_dim_gt64", lambda p, m: m.capability >= (8, 6) and max(p.head_dim, p.value_dim) > 64,
                "Memory Efficient Attention does not currently support head_dim greater than 64 on sm86 or newer"),
           Rule("seq_len_one", "seq_len_1_nested", lambda p, _: min(p.seq_q, p.seq_kv) <= 1,
                "Memory efficient attention does not support sequence_length <= 1", scope="nested"),
           Rule("dropout", "dropout", lambda p, _: p.dropout > 0,
                "Mem_efficient does not support non_zero dropout. Dropout_p: {p.dropout}"),
           Rule("deterministic", "deterministic", lambda p, _: p.deterministic == "error",
                "Memory Efficient attention is a non-deterministic algorithm and "
                "torch.use_deterministic_algorithms(True) has been set."),
           _EFFICIENT_DTYPE),
    *_span((2, 1), (2, 2),
           NO_GQA, CAUSAL_AND_MASK, _EFFICIENT_OFF, _EFFICIENT_SM, NO_NESTED_TRAINING, FOUR, HEADS, NESTED_SIZES,
           _ALIGNED, NESTED_ZERO_LENGTH, NO_LENGTH, _stride(singleton_ok=False), _EFFICIENT_DTYPE),
    *_span((2, 2), (2, 3),
           NO_GQA, CAUSAL_AND_MASK, _EFFICIENT_OFF, _EFFICIENT_SM, FOUR, _ALIGNED, *_EFFICIENT_NESTED,
           *_EFFICIENT_DENSE, LATER_EFFICIENT["dtypes"]),
    *_span((2, 3), (2, 5),
           NO_GQA, CAUSAL_AND_MASK, _EFFICIENT_OFF, ON_DEVICE, _EFFICIENT_SM, FOUR, _ALIGNED, *_EFFICIENT_NESTED,
           *_EFFICIENT_DENSE, LATER_EFFICIENT["dtypes"]),
)  # fmt: skip


# 2.3 asks nothing else, not even whether cuDNN is switched on. The layout of 2.4 is known from its
# texts alone.
_OPT_IN = Rule(
    "runtime_disabled", "environment", lambda _, m: not m.cudnn_enabled,
    "The CuDNN backend needs to be enabled by setting the enviornment variable`TORCH_CUDNN_SDPA_ENABLED=1`",
)  # fmt: skip
_CUDNN_SM = Rule("capability", "hardware", c.outside((8, 0)), sm_range("cuDNN MHA", "sm80"))

CUDNN_EARLY = (
    *_span((2, 0), (2, 3),
           Rule("not_in_release", "front_end", lambda *_: True, "PyTorch before 2.3 has no cuDNN attention.")),
    *_span((2, 3), (2, 4), NO_GQA, _OPT_IN, _CUDNN_SM),
    *_span((2, 4), (2, 5),
           NO_GQA, _OPT_IN, disabled("cudnn", "CuDNN"), _CUDNN_SM, ON_DEVICE,
           Rule("head_dim_multiple", "cudnn_shapes",
                lambda p, _: any(dim % 8 != 0 or dim > 256 for dim in (p.head_dim, p.value_dim)),
                "head_dim should be a multiple of 8 and no more than 256"),
           Rule("layout", "cudnn_layout", lambda *_: None,
                "Query tensor was not in cuDNN-supported packed QKV layout"),
           Rule("nested", "nested", lambda *_: True,
                "CuDNN currently does not support nested inputs.", scope="nested"),
           Rule("requires_grad", "requires_grad", lambda p, _: p.requires_grad,
                "CuDNN does not currently support inputs with requires_grad=True."),
           Rule("dtype", "dtypes", lambda p, m: p.dtype not in c.low_precision(p, m), dtype_text(c.low_precision))),
)  # fmt: skip


MATH_EARLY = (
    *_span((2, 0), (2, 1), NO_SCALE),
    *_span((2, 0), (2, 5), NO_GQA, *MATH),
)
_CPU_BEFORE_MASK = (
    NO_GQA, _FLASH_OFF, LATER_CPU["nested"], LATER_CPU["dropout"], FOUR, HEADS,
)  # fmt: skip
_CPU_STRIDE = _stride(singleton_ok=False)
_CPU_STRIDES = (
    _CPU_STRIDE._replace(refuses=c.strided(False, mask_matters=False)),
    # whether the CPU looks at the mask's stride was not read
    _CPU_STRIDE._replace(
        refuses=lambda p, _: None if p.mask is not None and p.mask.last_stride != 1 else False
    ),
)


def _cpu_dtype(*names: str) -> Rule:
    return Rule("dtype", "dtypes", lambda p, _: p.dtype not in names, dtype_text(lambda *_: names))


CPU_EARLY = (
    *_span((2, 0), (2, 1),
           Rule("not_in_release", "front_end", lambda *_: True, "PyTorch 2.0 has no flash attention for the CPU.")),
    *_span((2, 1), (2, 3),
           *_CPU_BEFORE_MASK, MASK, LATER_CPU["head_dim_size"], NO_LENGTH, _CPU_STRIDES[0],
           _cpu_dtype("fp32", "fp64", "bf16")),
    *_span((2, 3), (2, 5),
           CAUSAL_AND_MASK, *_CPU_BEFORE_MASK, *MASK_RULES, LATER_CPU["head_dim_size"], NO_LENGTH, *_CPU_STRIDES,
           _cpu_dtype(*c.CPU_DTYPES)),
)  # fmt: skip
# 2.0 answers math on the CPU without a question, so not even its own flag counts there.
CPU_MATH_EARLY = (
    *_span((2, 0), (2, 1), NO_GQA, NO_SCALE, *(rule for rule in MATH if rule.code == RAISED_LATER)),
    *_span((2, 1), (2, 5), NO_GQA, *MATH),
)
NOT_ON_CPU = _span((2, 0), (2, 5), ON_DEVICE)
EARLY: dict[tuple[str, str], tuple[Rule, ...]] = {
    ("cuda", "flash"): FLASH_EARLY,
    ("cuda", "efficient"): EFFICIENT_EARLY,
    ("cuda", "cudnn"): CUDNN_EARLY,
    ("cuda", "math"): MATH_EARLY,
    ("cpu", "flash"): CPU_EARLY,
    ("cpu", "efficient"): NOT_ON_CPU,
    ("cpu", "cudnn"): NOT_ON_CPU,
    ("cpu", "math"): CPU_MATH_EARLY,
}
