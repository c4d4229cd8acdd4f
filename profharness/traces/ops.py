"""Define which ops the parsers store as objects, together with their arguments.

These are the attention ops, the ops that eager attention consists of, and the ops that show where the
backward of attention ran. The names and the positions of arguments are those in the
native_functions.yaml of PyTorch 2.5 to 2.13.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

OUTER = "aten::scaled_dot_product_attention"
LAYER, FAST = "aten::_transformer_encoder_layer_fwd", "aten::_native_multi_head_attention"
INNER = re.compile(
    r"aten::_scaled_dot_product_(?:flash|efficient|cudnn|fused|attention_math)\w*"
    r"|aten::_(?:flash|efficient|cudnn)_attention_forward"
)
UNFUSED_FLEX = "FlexAttentionAutogradOp"  # flex_attention that has a gradient and is not compiled
FLEX = re.compile(rf"triton_\w*flex_attention\w*|flex_attention\w*|{UNFUSED_FLEX}")
PACKAGES = re.compile(
    r"FlashAttn\w*Func|flash_attn\w*::\w+|(?:xformers\w*|_?vllm\w*|sglang|sgl_kernel|flashinfer"
    r"|sageattention|aiter|transformer_engine\w*)::\w*(?:attention|attn|fmha|flash|mha|mla)\w*"
)
BACKWARD = re.compile(r"(?i)\S*(?:backward|bwd)\w*")
PRODUCTS = ("aten::matmul", "aten::bmm", "aten::baddbmm", "aten::einsum")
SOFTMAX = ("aten::softmax", "aten::_softmax", "aten::_safe_softmax")
LINEAR = "aten::linear"  # the matrix products inside this op do not belong to attention
EVALUATION = "autograd::engine::evaluate_function: "
REGION = re.compile(r"Torch-Compiled Region.*|CompiledFunction\w*|## Call CompiledFxGraph .*")
GRADIENT = re.compile(r"aten::\w*attention\w*backward\w*|triton_\w*flex_attention_backward\w*")
TRITON, TRITON_TEMPLATE = (
    "triton_",
    "triton_tem_",
)  # prefixes of the names of Inductor's kernels, and of those that it makes from a template
MODULE = "nn.Module: "


def is_fused(name: str | None) -> bool:
    """Return whether an op is one of PyTorch's fused attention ops. Their backward is a single op."""
    return bool(name and INNER.fullmatch(name)) and "math" not in str(name)


@cache
def is_detailed(name: str) -> bool:
    """Return whether an op is stored as an object, in addition to its row in the columns."""
    return name == LINEAR or bool(REGION.fullmatch(name)) or has_arguments(name)


@cache
def has_arguments(name: str) -> bool:
    """Return whether the arguments of an op are stored."""
    if name in (OUTER, LAYER, FAST, *PRODUCTS, *SOFTMAX):
        return True
    return any(rule.fullmatch(name) for rule in (INNER, FLEX, PACKAGES, GRADIENT))


@dataclass(frozen=True, slots=True, eq=False)
class OpArguments:
    """The arguments of an op that the trace records, by position.

    Ops that have equal arguments share one object. Objects are compared and hashed by identity, so
    that they can be the keys of a dict.
    """

    dims: Sequence[Any] = ()
    strides: Sequence[Any] = ()
    types: Sequence[Any] = ()
    values: Sequence[Any] = ()


NO_ARGUMENTS = OpArguments()


class HostSpan(NamedTuple):
    """A time span on a CPU thread, such as an op, the call of an nn.Module or a range."""

    name: str
    start: int  # ns
    end: int  # ns
    thread: int  # index of the thread
    arguments: OpArguments = NO_ARGUMENTS
    sequence: int = (
        -1
    )  # autograd's sequence number, which a forward and a backward op have in common


class Flow(NamedTuple):
    """An arrow from a forward op to its backward op.

    `thread` and `start` are a thread and a time at which the forward op runs. `to_thread` and `end` are
    a thread and a time at which the backward op runs.
    """

    thread: int
    start: int
    to_thread: int
    end: int
