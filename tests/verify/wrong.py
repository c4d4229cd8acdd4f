"""Attention with one mistake each, for the tests of verify. `right` has none."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# ruff: noqa: ARG001  every one has the arguments of the contract
T = torch.Tensor
MARK = "PROFHARNESS_TEST_HANGS"  # waiting.MARK; the worker cannot import it


def _right(
    q: T,
    k: T,
    v: T,
    is_causal: bool = False,
    scale: float | None = None,
    diagonal: int = 0,
    interleaved: bool = False,
    keys: int | None = None,
) -> T:
    group = q.shape[1] // k.shape[1]
    if interleaved:
        k, v = k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1)
    else:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    if keys is not None:
        k, v = k[:, :, :keys], v[:, :, :keys]
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = q.float() @ k.float().transpose(-2, -1) * scale
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1 + diagonal)
        scores = scores.masked_fill(hidden, -math.inf)
    return (torch.softmax(scores, dim=-1) @ v.float()).to(q.dtype)


def implementation(attention: Callable[..., T]) -> Callable[..., T]:
    """Return the function with the arguments of the contract."""

    def called(
        q: T,
        k: T,
        v: T,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> T:
        return attention(q, k, v, is_causal, scale)

    called.__name__ = called.__qualname__ = attention.__name__
    return called


@implementation
def right(q: T, k: T, v: T, is_causal: bool, scale: float | None) -> T:
    return _right(q, k, v, is_causal, scale)


@implementation
def no_scale(q: T, k: T, v: T, is_causal: bool, scale: float | None) -> T:
    return _right(q, k, v, is_causal, 1.0)


@implementation
def given_scale_ignored(q: T, k: T, v: T, is_causal: bool, scale: float | None) -> T:
    return _right(q, k, v, is_causal)


@implementation
def causal_off_by_one(q: T, k: T, v: T, is_causal: bool, scale: float | None) -> T:
    return _right(q, k, v, is_causal, scale, diagonal=1)


@implementation
def kv_mapping(q: T, k: T, v: T, is_causal: bool, scale: float | None) -> T:
    return _right(q, k, v, is_causal, scale, interleaved=True)


@implementation
def last_row_unwritten(q: T, k: T, v: T, is_causal: bool, scale: float | None) -> T:
    out = torch.empty(*q.shape[:3], v.shape[-1], dtype=q.dtype, device=q.device)
    out[:, :, :-1] = _right(q, k, v, is_causal, scale)[:, :, :-1]
    return out


@implementation
def nan_row(q: T, k: T, v: T, is_causal: bool, scale: float | None) -> T:
    out = _right(q, k, v, is_causal, scale)
    out[:, :, 3] = math.nan
    return out


@implementation
def tail_of_keys(q: T, k: T, v: T, is_causal: bool, scale: float | None) -> T:
    return _right(q, k, v, is_causal, scale, keys=max(16, k.shape[2] // 16 * 16))


@implementation
def writes_input(q: T, k: T, v: T, is_causal: bool, scale: float | None) -> T:
    out = _right(q, k, v, is_causal, scale)
    with torch.no_grad():
        k[0, 0, 2, 1] += 1
    return out


CACHE: dict = {}


@implementation
def ignores_offset(q: T, k: T, v: T, is_causal: bool, scale: float | None) -> T:
    """Read each tensor from the start of its storage."""
    q, k, v = (each.as_strided(each.shape, each.stride(), 0) for each in (q, k, v))
    return _right(q, k, v, is_causal, scale)


@implementation
def stale(q: T, k: T, v: T, is_causal: bool, scale: float | None) -> T:
    key = (q.shape, k.shape, is_causal)
    if key not in CACHE:
        CACHE[key] = _right(q, k, v, is_causal, scale)
    return CACHE[key]


TOTAL: dict = {}


@implementation
def accumulates(q: T, k: T, v: T, is_causal: bool, scale: float | None) -> T:
    made = _right(q, k, v, is_causal, scale)
    TOTAL[q.shape] = TOTAL.get(q.shape, torch.zeros_like(made)) + made
    return TOTAL[q.shape]


BUFFER: dict = {}


@implementation
def shared_buffer(q: T, k: T, v: T, is_causal: bool, scale: float | None) -> T:
    made = _right(q, k, v, is_causal, scale)
    return BUFFER.setdefault(q.shape, torch.empty_like(made)).copy_(made)


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: T, k: T, v: T, is_causal: bool, scale: float | None) -> T:
        ctx.save_for_backward(q, k, v)
        ctx.rest = (is_causal, scale)
        return _right(q, k, v, is_causal, scale)

    @staticmethod
    def backward(ctx: Any, grad: T) -> tuple[T | None, ...]:
        q, k, v = (each.detach().requires_grad_() for each in ctx.saved_tensors)
        with torch.enable_grad():
            out = _right(q, k, v, *ctx.rest)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad)
        return dq, dk * math.sqrt(q.shape[-1]), dv, None, None


@implementation
def wrong_gradient(q: T, k: T, v: T, is_causal: bool, scale: float | None) -> T:
    return _Gradient.apply(q, k, v, is_causal, scale)


@implementation
def no_gradient(q: T, k: T, v: T, is_causal: bool, scale: float | None) -> T:
    return _right(q.detach(), k.detach(), v.detach(), is_causal, scale)


@implementation
def wrong_shape(q: T, k: T, v: T, is_causal: bool, scale: float | None) -> T:
    return _right(q, k, v, is_causal, scale).transpose(1, 2)


@implementation
def crashes(q: T, k: T, v: T, is_causal: bool, scale: float | None) -> T:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


@implementation
def hangs(q: T, k: T, v: T, is_causal: bool, scale: float | None) -> T:
    Path(os.environ[MARK]).write_text(str(os.getpid()))
    time.sleep(86400)
    raise AssertionError


@implementation
def refuses(q: T, k: T, v: T, is_causal: bool, scale: float | None) -> T:
    raise NotImplementedError("only on Tuesdays")


@implementation
def random_bits(q: T, k: T, v: T, is_causal: bool, scale: float | None) -> T:
    out = _right(q, k, v, is_causal, scale)
    return out * (1 + 2e-7 * torch.rand(out.shape, device=q.device))


@implementation
def unstable(q: T, k: T, v: T, is_causal: bool, scale: float | None) -> T:
    return _right(q, k, v, is_causal, scale) + 0.1 * torch.rand((), device=q.device)
