"""A program of the worker that verifies the results of backends.

For each cell, it calls the backend several times on poisoned memory, which is memory filled with a
known byte, and compares the results with a reference. The reference is attention in plain torch ops
without autograd. Computed in fp64, the reference is the expected result. Computed in the dtype of
the inputs, the reference shows how large the error of a correct backend can be. The message about a
wrong result describes the position and size of the error and, if possible, the mistake that would
produce it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from profharness.attention.backends import find_backend
from profharness.attention.backends.base import (
    Attention,
    Backend,
    Inputs,
    RefusedError,
    output_shape,
)
from profharness.attention.cases import values_of
from profharness.attention.config import Config
from profharness.device_types import CUDA, is_gpu
from profharness.recording.worker.attention import (
    check_output,
    in_cache,
    make_inputs,
    make_output,
)
from profharness.recording.worker.cell import tuning_of
from profharness.recording.worker.environment import set_deterministic
from profharness.recording.worker.failures import (
    context_is_dead,
    error_text,
    failure,
    implementation_errors,
    is_oom,
    is_refusal,
    reasons_beforehand,
    recorded_warnings,
    unless_dead,
)
from profharness.recording.worker.program import Stage, run_each
from profharness.recording.worker.timing import Workspace
from profharness.run import WRONG, Cell, Check

LARGE = 5.5  # factor on q and k; scores then have a standard deviation of 30, so exp overflows fp32
OFFSET = 1 << 20  # offset in elements, a multiple of every alignment that the allocator guarantees
# Maximum number of scores computed at once. In fp64, with temporaries, they need less than 1 GiB.
MAX_SCORES = 1 << 24
ORDERS = ("plain", "scaled_first", "reversed")
GRADIENTS = {"dq": "query", "dk": "key", "dv": "value"}
NAN_BYTE = 0xFF  # a number made of this byte alone is NaN in fp16, bf16, fp32 and fp64
OTHER_BYTE = 0x42  # a number made of this byte alone is finite in these dtypes
COPIES = 4  # number of poisoned blocks per size, for the output, gradients and workspaces
FACTOR = 2.0  # allowed error, as a multiple of the error of the reference in the same dtype
FLOOR_ULPS = 2.0  # ULPs added to the allowed error, as the reference may be exact by chance
NOT_ONE = 0.01  # a wrong factor is only reported if it differs from 1 by more than this
TILES = (16, 32, 64, 128)
_M_PERTURB = -6  # option of glibc's mallopt: fill new memory with the complement of a byte


@dataclass(frozen=True)
class Variant:
    """A variant of the reference, usually with a mistake. The default is correct attention."""

    scale: float | None = None  # replaces the scale of the config
    causal: bool | None = None  # replaces `causal` of the config
    diagonal: int = 0  # with a causal mask, row i attends to columns 0..i+diagonal
    interleaved: bool = False  # query head h uses key head h % num_kv_heads
    keys: int | None = None  # use only this number of keys, from the beginning
    window: int | None = None  # replaces `window` of the config, where 0 stands for no window
    uncapped: bool = False  # without the softcap
    sinkless: bool = False  # without the sinks
    order: str = "plain"  # one of ORDERS, which round differently but are all correct


CORRECT = Variant()


@functools.cache
def masked_row_value() -> float:
    """Return the output of torch's math backend for a query that may not attend to any key.

    The output is 0 in torch 2.5 and later, and NaN in earlier versions.
    """
    tensor = torch.ones(1, 1, 1, 1)
    with sdpa_kernel([SDPBackend.MATH]):
        out = torch.nn.functional.scaled_dot_product_attention(
            tensor, tensor, tensor, attn_mask=torch.zeros(1, 1, 1, 1, dtype=torch.bool)
        )
    return float(out)


def attend(
    config: Config,
    inputs: Inputs,
    dtype: Any,
    *,
    variant: Variant = CORRECT,
    with_sizes: bool = False,
) -> tuple[dict[str, Any], dict[str, tuple[float, float]]]:
    """Compute attention in plain torch ops. Return the results and, if requested, their sizes.

    The result `out` is softmax(Q K^T * scale + mask) V. If the config has `bwd`, the results also
    contain the gradients `dq`, `dk` and `dv`. A causal mask and a window are aligned to the first row
    and column, as in SDPA.

    If `with_sizes` is set, the second dict has a size for each result, otherwise it is empty. The
    size is the value that the result would have if all terms of its sums were positive, as (largest
    element, Frobenius norm). Rounding errors are proportional to the size. The entry `score` contains
    the largest absolute value of Q K^T * scale.
    """
    tensors = _zeros(config, inputs, dtype)
    terms = _zeros(config, inputs, dtype) if with_sizes else {}
    score = torch.zeros((), dtype=dtype, device=inputs.query.device)
    scale = default_scale(config) if variant.scale is None else variant.scale

    # a function, so that the tensors of a block are freed before the next block
    def add_block(batch: int, heads: slice, kv: int, rows: slice) -> None:
        nonlocal score
        at = (batch, heads, rows)
        # shapes: query [G, rows, D], key and value [Skv, D]
        query = inputs.query[batch % config.batch, heads, rows].to(dtype)
        key, value = (
            tensor[batch % config.key_batch, kv].to(dtype) for tensor in (inputs.key, inputs.value)
        )
        scores = _scores(query, key, scale, variant.order)
        if with_sizes:
            score = torch.maximum(score, scores.abs().max())
        weights = _weights(config, inputs, variant, at, scores)
        tensors["out"][at] = weights @ value
        if with_sizes:
            terms["out"][at] = weights.abs() @ value.abs()
        if not config.bwd:
            return
        grad = inputs.grad[at].to(dtype)
        slope = grad @ value.transpose(-2, -1)
        mean = (weights * slope).sum(-1, keepdim=True)
        inner = weights * (slope - mean) * scale
        sums = [(tensors, inner, weights, query, key, grad)]
        if with_sizes:
            outer = weights.abs() * (slope.abs() + mean.abs()) * abs(scale)
            sums.append((terms, outer, weights.abs(), query.abs(), key.abs(), grad.abs()))
        for into, factor, weight, q, k, g in sums:
            wide = into["dk"].dtype
            mine, theirs = (
                batch % len(into[name]) for name in ("dq", "dk")
            )  # index 0 if the tensor has a batch of 1
            into["dq"][mine, heads, rows] += (factor @ k).to(wide)
            into["dk"][theirs, kv] += (factor.transpose(-2, -1) @ q).to(wide).sum(0)
            into["dv"][theirs, kv] += (weight.transpose(-2, -1) @ g).to(wide).sum(0)

    with torch.no_grad():
        for block in _blocks(config, variant):
            add_block(*block)
    if with_sizes:
        terms["score"] = score
    sizes = {name: tensor.double() for name, tensor in terms.items()}
    return (
        {name: tensor.to(dtype) for name, tensor in tensors.items()},
        {name: (float(size.abs().max()), float(size.norm())) for name, size in sizes.items()},
    )


def batched_out(config: Config, inputs: Inputs, dtype: Any) -> Any:
    """Compute `out` with one matrix product for many heads, as eager attention does.

    For a batched product, BLAS may sum in a less exact order than for single heads. In fp32 on an
    H200 with a head_dim of 2048, the error is 2.4 times as large. Return None if one head has more
    than MAX_SCORES scores.
    """
    group = config.num_heads // config.num_kv_heads
    step = MAX_SCORES // (config.seq_len_q * config.seq_len_kv)
    rows = slice(0, config.seq_len_q)
    if step == 0:
        return None
    made = _zeros(config, inputs, dtype)["out"]
    with torch.no_grad():
        for batch in range(config.output_batch):
            key, value = (
                tensor[batch % config.key_batch].to(dtype).repeat_interleave(group, dim=0)
                for tensor in (inputs.key, inputs.value)
            )
            for first in range(0, config.num_heads, step):
                heads = slice(first, min(first + step, config.num_heads))
                query = inputs.query[batch % config.batch, heads].to(dtype)
                scores = query @ key[heads].transpose(-2, -1) * default_scale(config)
                weights = _weights(config, inputs, CORRECT, (batch, heads, rows), scores)
                made[batch, heads] = weights @ value[heads]
    return made


def _blocks(config: Config, variant: Variant) -> Iterator[tuple[int, slice, int, slice]]:
    """Yield (batch, query heads, key head, rows) of blocks of the scores.

    A block has at most MAX_SCORES scores, but at least one row.
    """
    group = config.num_heads // config.num_kv_heads
    step = max(1, MAX_SCORES // (group * config.seq_len_kv))
    for batch in range(config.output_batch):
        for kv in range(config.num_kv_heads):
            heads = slice(kv * group, (kv + 1) * group)
            if variant.interleaved:
                heads = slice(kv, None, config.num_kv_heads)
            for first in range(0, config.seq_len_q, step):
                yield batch, heads, kv, slice(first, min(first + step, config.seq_len_q))


def default_scale(config: Config) -> float:
    return 1 / math.sqrt(config.head_dim) if config.scale is None else config.scale


def _zeros(config: Config, inputs: Inputs, dtype: Any) -> dict[str, Any]:
    """Return tensors of zeros for the results. Gradients are accumulated in fp32 or fp64."""
    made = {"out": torch.zeros(output_shape(config), dtype=dtype, device=inputs.query.device)}
    if config.bwd:
        wide = torch.promote_types(dtype, torch.float32)
        for name, source in GRADIENTS.items():
            like = getattr(inputs, source)
            made[name] = torch.zeros(like.shape, dtype=wide, device=like.device)
    return made


def _scores(query: Any, key: Any, scale: float, order: str) -> Any:
    if order == "scaled_first":
        return (query * scale) @ key.transpose(-2, -1)
    if order == "reversed":
        query, key = query.flip(-1), key.flip(-1)
    return query @ key.transpose(-2, -1) * scale


def _weights(
    config: Config, inputs: Inputs, variant: Variant, at: tuple[int, slice, slice], scores: Any
) -> Any:
    batch, heads, rows = at
    if config.softcap and not variant.uncapped:
        scores = config.softcap * torch.tanh(scores / config.softcap)
    if inputs.mask is not None:
        full = (config.output_batch, config.num_heads, config.seq_len_q, config.seq_len_kv)
        mask = inputs.mask.detach().broadcast_to(full)[at]
        hides = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -math.inf) if hides else scores + mask.to(scores.dtype)
    columns = torch.arange(config.seq_len_kv, device=scores.device)
    row = torch.arange(rows.start, rows.stop, device=scores.device)[:, None]
    if config.is_served:  # the queries of a request are its last tokens
        queries, keys = config.new_tokens[batch], config.lengths[batch]
        scores = scores.masked_fill((columns >= keys) | (row >= queries), -math.inf)
        row = row + keys - queries
    if config.causal if variant.causal is None else variant.causal:
        scores = scores.masked_fill(columns > row + variant.diagonal, -math.inf)
    window = config.window if variant.window is None else variant.window
    if window:
        hidden = columns <= row - window
        if not config.causal:
            hidden |= columns >= row + window
        scores = scores.masked_fill(hidden, -math.inf)
    if variant.keys is not None:
        scores = scores.masked_fill(columns >= variant.keys, -math.inf)
    nothing = torch.isneginf(scores).all(-1, keepdim=True)
    if inputs.sinks is not None and not variant.sinkless:
        sinks = inputs.sinks[heads].to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        return torch.softmax(torch.cat((scores, sinks), -1), dim=-1)[..., :-1]
    empty = 0.0 if config.is_served else masked_row_value()
    return torch.softmax(scores, dim=-1).masked_fill(nothing, empty)


@contextlib.contextmanager
def poisoned(byte: int, like: Iterable[Any], device: str) -> Iterator[None]:
    """Fill memory that is allocated inside the block with `byte`, as far as possible.

    On CUDA, fill the free blocks of the caching allocator, which include blocks of the sizes of the
    tensors `like`. Memory that the driver allocates or another stream uses is not filled. On a CPU
    with glibc, malloc fills the memory, except for some blocks of less than 100 bytes and the first
    16 bytes of some blocks of up to 1 KiB. With another C library, only freed blocks of the sizes
    of `like` are filled.
    """
    blocks = [
        torch.empty(size, dtype=torch.uint8, device=device).fill_(byte)
        for size in sorted({tensor.numel() * tensor.element_size() for tensor in like})
        for _ in range(COPIES)
    ]
    if is_gpu(device):
        torch.cuda.synchronize()
    blocks.clear()
    if is_gpu(device):
        _fill_free_blocks(byte)
        yield
        return
    try:
        perturb = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # the C library has no mallopt
        yield
        return
    # set a bit above the byte, because the value 0 would disable filling
    perturb(_M_PERTURB, byte ^ 0xFF | 0x100)
    try:
        yield
    finally:
        perturb(_M_PERTURB, 0)


def poison_value(byte: int, dtype: Any) -> float:
    """Return the value of an element of this dtype in memory that is filled with `byte`."""
    width = torch.empty((), dtype=dtype).element_size()
    return float(torch.tensor([byte] * width, dtype=torch.uint8).view(dtype)[0])


def _fill_free_blocks(byte: int) -> None:
    """Fill all free blocks that PyTorch's allocator keeps for the current stream.

    To reach the blocks, allocate a tensor of the size of each block. Free all tensors at the end.
    """
    blocks = []
    stream = torch.cuda.current_stream().cuda_stream
    for segment in torch.cuda.memory_snapshot():
        if segment["stream"] != stream or segment.get("segment_pool_id", (0, 0)) != (0, 0):
            continue
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                continue
            try:
                made = torch.empty(block["size"], dtype=torch.uint8, device=CUDA)
            except torch.cuda.OutOfMemoryError:
                continue
            blocks.append(made.fill_(byte))
    torch.cuda.synchronize()
    blocks.clear()


@dataclass(frozen=True)
class Expected:
    """The expected results in fp64, and the allowed error of each result, by name.

    An allowed error has two numbers, the largest allowed difference of an element and the largest
    allowed Frobenius norm of the difference.
    """

    tensors: dict[str, Any]
    allowance: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Got:
    """The results of a backend in several calls, by name. A gradient may be None."""

    first: dict[str, Any]
    second: dict[str, Any]  # a second call on the same inputs, with other values in freed memory
    earlier: dict[str, Any]  # a call on other inputs, just before the first call
    reused: tuple[str, ...]  # names of results of the first call that a later call overwrote
    no_gradient: str | None = None  # why the backend has no gradients
    backward_error: str | None = None  # why its backward pass failed


def expect(config: Config, inputs: Inputs) -> Expected:
    """Compute the expected results for these inputs, and the error that each result may have."""
    reference, sizes = attend(config, inputs, torch.float64, with_sizes=True)
    dtype = inputs.query.dtype
    eagers = [attend(config, inputs, dtype, variant=Variant(order=order))[0] for order in ORDERS]
    allowance = {}
    logsumexp = sizes["score"][0] + math.log(config.seq_len_kv)
    for name, tensor in reference.items():
        largest, norm = sizes[name]
        offs = [_difference(eager[name], tensor) for eager in eagers]
        batched = batched_out(config, inputs, dtype) if name == "out" else None
        if batched is not None:
            offs.append(_difference(batched, tensor))
        # ignore the error of elements that overflow in the narrow dtype
        offs = [torch.nan_to_num(off, nan=0.0, posinf=0.0, neginf=0.0) for off in offs]
        floor = FLOOR_ULPS * torch.finfo(dtype).eps
        if name != "out":  # a fused backward pass uses each row's logsumexp rounded to fp32
            floor += torch.finfo(torch.float32).eps * logsumexp
        allowance[name] = (
            FACTOR * max(float(off.abs().max()) for off in offs) + floor * largest,
            FACTOR * max(float(off.norm()) for off in offs) + floor * norm,
        )
    return Expected(reference, allowance)


def compare(config: Config, inputs: Inputs, name: str, got: Got, expected: Expected) -> Check:
    """Check the result `name`, which is `out` or a gradient."""
    first, second = got.first[name], got.second[name]
    reference, allowance = expected.tensors[name], expected.allowance[name]
    if first is None or second is None:
        return Check(name, False, "the gradient is None")
    if first.shape != reference.shape:
        shapes = f"has shape {list(first.shape)}; it must be {list(reference.shape)}"
        return Check(name, False, shapes)
    if first.dtype != inputs.query.dtype:
        return Check(
            name, False, f"has dtype {first.dtype}, but the inputs have {inputs.query.dtype}"
        )
    errors = [_errors(result, reference) for result in (first, second)]
    # `x != x` is true only for NaN, which counts as the largest error
    largest, norm = max(errors, key=lambda pair: (pair[0] != pair[0], pair[0]))
    size = float(torch.nan_to_num(reference).norm())
    fault = note = _fault(config, inputs, name, got, expected, errors)
    if fault is None and not torch.equal(first, second):
        most = float((first.double() - second.double()).abs().nan_to_num().max())
        note = f"not deterministic: two calls with the same inputs differ by up to {most:.3g}"
    return Check(
        name,
        passed=fault is None,
        message=note,
        error=_finite(largest),
        allowance=allowance[0],
        relative_error=_finite(norm / size) if size else None,
        relative_allowance=allowance[1] / size if size else None,
    )


def _errors(result: Any, reference: Any) -> tuple[float, float]:
    off = _difference(result, reference)
    return float(off.abs().max()), float(off.norm())


def _difference(result: Any, reference: Any) -> Any:
    """Return `result - reference` in fp64. The difference of two NaNs or equal infinities is 0."""
    off = result.double() - reference
    same = (result.isnan() & reference.isnan()) | (result.double() == reference)
    return off.masked_fill(same, 0.0)


def _within(errors: tuple[float, float], allowance: tuple[float, float]) -> bool:
    return errors[0] <= allowance[0] and errors[1] <= allowance[1]


def _fault(
    config: Config,
    inputs: Inputs,
    name: str,
    got: Got,
    expected: Expected,
    errors: list[tuple[float, float]],
) -> str | None:
    first, second = got.first[name], got.second[name]
    reference, allowance = expected.tensors[name], expected.allowance[name]
    unwritten = _unwritten(first, second, reference)
    if unwritten:
        return unwritten
    results = zip((first, second), errors, strict=True)
    wrong = next((result for result, error in results if not _within(error, allowance)), None)
    if wrong is None:
        if name in got.reused:
            return (
                "a later call overwrote the result of an earlier call, because both use the same "
                "buffer"
            )
        return None
    where = _where(wrong, reference, allowance)
    earlier = got.earlier.get(name)
    if earlier is not None and torch.equal(wrong, earlier) and not torch.equal(wrong, reference):
        value = wrong.flatten()[0]
        if wrong.numel() > 1 and bool((wrong == value).all()):
            text = (
                f"every element is {float(value):.6g}, even for other inputs, so the inputs are "
                "ignored"
            )
        else:
            text = (
                "the result is that of the previous call, although the inputs differ: the inputs "
                "are ignored, or state is kept between calls"
            )
        return f"{text}; {where}"
    off = _errors(first, second.double())
    if not _within(off, allowance):
        return f"two calls with the same inputs differ by up to {off[0]:.3g}; {where}"
    guess = _guess(config, inputs, name, wrong, expected) if wrong.isfinite().all() else None
    return f"{where}; {guess}" if guess else where


def _unwritten(first: Any, second: Any, reference: Any) -> str | None:
    """Return a message about elements that the backend did not write, or None if there are none.

    Unwritten elements contain the poison: NaN in the first result, and OTHER_BYTE in the second.
    """
    other = poison_value(OTHER_BYTE, first.dtype)
    left = first.isnan() & ~reference.isnan() & (second.double() == other)
    count = int(left.sum())
    if not count:
        return None
    return (
        f"not written: {count} of {left.numel()} elements keep the memory's old content; the "
        f"first of them is at {_index(left.flatten().int().argmax(), left.shape)}"
    )


def _where(got: Any, reference: Any, allowance: tuple[float, float]) -> str:
    """Return a message with the position and size of the largest error, and the expected value."""
    lost = (~got.isfinite()) & reference.isfinite()
    count = int(lost.sum())
    off = _difference(got, reference)
    flat = lost.flatten().int().argmax() if count else off.abs().flatten().argmax()
    position, wanted = _index(flat, got.shape), float(reference.flatten()[flat])
    value = float(got.flatten()[flat])
    if count:
        kind = "NaN" if math.isnan(value) else "infinity"
        return (
            f"{kind} at {position} instead of {wanted:.6g}; {count} of {got.numel()} elements "
            "are not finite"
        )
    largest = float(off.flatten()[flat].abs())
    values = f"expected {wanted:.6g}, got {value:.6g}"
    if largest > allowance[0]:
        beyond = int((off.abs() > allowance[0]).sum())
        return (
            f"{values} at {position}: off by {_by(largest, allowance[0])}; {beyond} of "
            f"{got.numel()} elements exceed the allowance"
        )
    by = _by(float(off.norm()), allowance[1])
    return (
        f"the Frobenius norm of the difference is {by}; the largest difference is at {position}: "
        f"{values}"
    )


def _by(error: float, allowance: float) -> str:
    times = f", which is {error / allowance:.3g} times" if allowance else ", which exceeds"
    return f"{error:.3g}{times} the allowance of {allowance:.3g}"


def _guess(config: Config, inputs: Inputs, name: str, got: Any, expected: Expected) -> str | None:
    """Return a message about a common mistake that would produce this result, or None."""
    config = replace(config, bwd=False) if name == "out" else config
    for text, variant in _mistakes(config):
        tried = attend(config, inputs, torch.float64, variant=variant)[0]
        if _within(_errors(got, tried[name]), expected.allowance[name]):
            return f"the result matches a reference in which {text}"
    reference = torch.nan_to_num(expected.tensors[name])
    square = float((reference * reference).sum())
    ratio = float((got.double() * reference).sum()) / square if square else 0.0
    errors = _errors(got, ratio * reference)
    near = abs(ratio - 1) > NOT_ONE and _within(errors, expected.allowance[name])
    return (
        f"the result is {ratio:.4g} times the expected value, so a factor is wrong"
        if near
        else None
    )


def _mistakes(config: Config) -> Iterator[tuple[str, Variant]]:
    scale, columns = default_scale(config), config.seq_len_kv
    if scale != 1:
        yield "no scale is applied (scale=1)", Variant(scale=1.0)
    if config.scale is not None:
        own = default_scale(Config(1, 1, 1, 1, 1, config.head_dim))
        yield "1/sqrt(head_dim) is used instead of the given scale", Variant(scale=own)
    yield "the scale is applied twice", Variant(scale=scale * scale)
    if config.causal:
        yield "the causal mask is left out", Variant(causal=False)
        yield "the causal mask is one column too far right", Variant(diagonal=1)
        yield "the causal mask is one column too far left", Variant(diagonal=-1)
        if columns != config.seq_len_q and not config.is_served:
            text = "the causal mask is aligned to the bottom right instead of the top left"
            yield text, Variant(diagonal=columns - config.seq_len_q)
    else:
        yield "a causal mask is applied, although none was requested", Variant(causal=True)
    if config.window is not None:
        yield "the window is left out", Variant(window=0)
        yield "the window is one key too large", Variant(window=config.window + 1)
        if config.window > 1:
            yield "the window is one key too small", Variant(window=config.window - 1)
    if config.softcap is not None:
        yield "the softcap is left out", Variant(uncapped=True)
    if config.sinks:
        yield "the sinks are left out", Variant(sinkless=True)
    if 1 < config.num_kv_heads < config.num_heads:
        text = "query head h uses key head h % Hkv instead of h // (Hq / Hkv)"
        yield text, Variant(interleaved=True)
    kept = {columns - columns % tile for tile in TILES} | {columns - tile for tile in (1, *TILES)}
    for keys in sorted(keys for keys in kept if 0 < keys < columns):
        yield f"the last {columns - keys} of {columns} keys are left out", Variant(keys=keys)


def _index(flat: Any, shape: Any) -> str:
    return str([int(index) for index in torch.unravel_index(torch.as_tensor(int(flat)), shape)])


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None


def body(workspace: Workspace) -> None:
    """Verify every cell of the plan that belongs to this process."""
    run_each(workspace, Verifier(workspace).verify)


@dataclass
class Verifier:
    """Verifies cells. The reference of a case is kept for the next backend of the same case."""

    workspace: Workspace
    _last: tuple[tuple[Config, str], Inputs, Expected] | None = field(default=None, init=False)

    def verify(self, cell: Cell, stage: Stage) -> Cell:
        """Return the cell with its checks. Raise DeadContextError if the CUDA context is lost."""
        cell = replace(cell, config=cell.config.resolve(self.workspace.device))
        texts: list[str] = []
        set_deterministic(cell.config.deterministic)
        try:
            checks, tuning = self._checks(cell, stage, texts)
        except Exception as error:
            result = failure(cell, self.workspace, texts, error)
            # a refusal or a lack of memory does not make the backend wrong
            blameless = result.status in ("refused", "oom")
            check = Check("out", None if blameless else False, result.message)
            return unless_dead(replace(result, checks=(check,)), error)
        cell = replace(cell, tuning=tuning, status="ok", checks=checks)
        wrong = [check for check in checks if check.passed is False]
        if not wrong:
            return cell
        return replace(cell, status="error", message=f"{WRONG}{wrong[0].what}: {wrong[0].message}")

    def _checks(
        self, cell: Cell, stage: Stage, texts: list[str]
    ) -> tuple[tuple[Check, ...], dict[str, Any] | None]:
        backend = find_backend(cell.backend, self.workspace.sources)
        stage("compile")
        forward_only = self._why_forward_only(cell.config, backend)
        config = replace(cell.config, bwd=False) if forward_only else cell.config
        attention = backend.load() if backend.load is not None else None
        stage("reference")
        values = values_of(cell.case or "")
        inputs, expected = self._reference(config, values)
        stage("calls")
        caller = _Caller(config, self.workspace, backend, attention, values)
        with recorded_warnings(texts), backend.context():
            got, changed = caller.run(inputs, self.workspace.plan.protocol.seed)
        stage("comparison")
        checks = [Check("inputs", changed is None, changed)]
        names = [name for name in got.first if name in got.second]
        checks += [compare(config, inputs, name, got, expected) for name in names]
        if config.kv_dtype and values == "normal":
            checks = [self._with_cache_error(check, config, expected) for check in checks]
        reason = forward_only or got.no_gradient
        if cell.config.bwd and reason:
            checks += [Check(name, None, f"skipped: {reason}") for name in GRADIENTS]
        elif got.backward_error:
            text = f"the backward pass failed: {got.backward_error}"
            checks += [Check(name, False, text) for name in GRADIENTS if name not in names]
        return tuple(checks), tuning_of(backend, attention)

    def _with_cache_error(self, check: Check, config: Config, expected: Expected) -> Check:
        """Return a check whose message contains the error that the dtype of the cache alone causes."""
        if check.what != "out" or check.message:
            return check
        seed, device = self.workspace.plan.protocol.seed, self.workspace.device
        exact = make_inputs(replace(config, kv_dtype=None), device, seed)
        wanted = attend(replace(config, kv_dtype=None), exact, torch.float64)[0]["out"]
        error = float((expected.tensors["out"] - wanted).norm() / wanted.norm())
        text = (
            f"merely storing the cache in {config.kv_dtype} changes the result by "
            f"{100 * error:.2g} %"
        )
        return replace(check, message=f"{text} (Frobenius norm)")

    def _why_forward_only(self, config: Config, backend: Backend) -> str | None:
        """Return why only the forward pass can be verified, or None if the whole config can be
        verified.

        Raise RefusedError if the backend refuses the forward pass too.
        """
        refusals = reasons_beforehand(config, self.workspace, backend)
        if not refusals:
            return None
        forward = replace(config, bwd=False)
        if config.bwd and not reasons_beforehand(forward, self.workspace, backend):
            return refusals[0].message
        raise RefusedError(refusals[0].code, "; ".join(refusal.message for refusal in refusals))

    def _reference(self, config: Config, values: str) -> tuple[Inputs, Expected]:
        key = (config, values)
        if self._last is None or self._last[0] != key:
            self._last = None  # free memory before the next reference is computed
            seed = self.workspace.plan.protocol.seed
            inputs = case_inputs(config, values, self.workspace.device, seed)
            self._last = (key, inputs, expect(config, inputs))
        return self._last[1], self._last[2]


def case_inputs(config: Config, values: str, device: str, seed: int) -> Inputs:
    """Create the inputs of a case of a config. `values` is one of `cases.VALUES`, or `normal`."""
    inputs = make_inputs(config, device, seed)
    with torch.no_grad():
        if values == "large":
            inputs.query.mul_(LARGE)
            inputs.key.mul_(LARGE)
            return in_cache(config, inputs)
        if values == "equal":
            inputs.query.fill_(1)
            inputs.key.fill_(1)
        elif values == "masked_row":
            mask = inputs.mask.clone()
            mask[..., -1, :] = False if mask.dtype == torch.bool else -torch.inf
            grows = inputs.mask.requires_grad
            return replace(inputs, mask=mask.requires_grad_() if grows else mask)
    if values != "large_offset":
        return inputs
    moved = {}
    for name in GRADIENTS.values():
        tensor = getattr(inputs, name)
        storage = torch.zeros(OFFSET + tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        moved[name] = storage[OFFSET:].view(tensor.shape)
        moved[name].copy_(tensor.detach())
        moved[name].requires_grad_(tensor.requires_grad)
    return replace(inputs, **moved)


@dataclass
class _Caller:
    """Calls the backend of one cell four times: on other inputs, on the cell's inputs, and again.

    The calls on other inputs ensure that data left over from an earlier call is never the correct
    result. Both pairs of calls run on poisoned memory, each pair with its own byte.
    """

    config: Config
    workspace: Workspace
    backend: Backend
    attention: Attention | None
    values: str

    def run(self, inputs: Inputs, seed: int) -> tuple[Got, str | None]:
        """Return the results, and a message if a call changed any of the inputs, otherwise None."""
        device = self.workspace.device
        others = case_inputs(self.config, self.values, device, seed + 1)
        before = {name: _bytes(getattr(inputs, name)).clone() for name in GRADIENTS.values()}
        with poisoned(NAN_BYTE, self._sized(inputs), device):
            earlier = _copies(self._call(others)[0])
            first, *why_first = self._call(inputs)
        kept = _copies(first)
        changed = _restored(inputs, before)
        with poisoned(OTHER_BYTE, self._sized(inputs), device):
            self._call(others)
            reused = tuple(name for name in kept if not _same(first[name], kept[name]))
            second, *why_second = self._call(inputs)
        changed = _restored(inputs, before) or changed
        reasons = [one or other for one, other in zip(why_first, why_second, strict=True)]
        return Got(kept, second, earlier, reused, *reasons), changed

    def _sized(self, inputs: Inputs) -> list[Any]:
        """Return tensors that are as large as the tensors a call is likely to allocate."""
        query = inputs.query
        shape = (self.config.batch, self.config.num_heads, self.config.seq_len_q)
        out = torch.empty((*shape, self.config.value_dim), dtype=query.dtype, device="meta")
        sums = torch.empty(shape, dtype=torch.float32, device="meta")
        return [query, inputs.key, inputs.value, out, sums]

    def _call(self, inputs: Inputs) -> tuple[dict[str, Any], str | None, str | None]:
        """Call the backend. Return the results by name and two messages, each of which may be None.

        The messages say why the backend has no gradients, and why its backward pass failed. In both
        cases the results still contain the output. Raise ImplementationError if the output is not
        like SDPA's output, and RefusedError if the backend refuses the config.
        """
        with implementation_errors(self.backend):
            out = make_output(self.config, inputs, self.attention)
        check_output(self.backend.name, self.config, inputs, out)
        tensors, no_gradient, failed = {"out": out.detach()}, None, None
        if self.config.bwd and not out.requires_grad:
            no_gradient = "the output of this backend has no gradient"
        elif self.config.bwd:
            leaves = tuple(getattr(inputs, name) for name in GRADIENTS.values())
            try:
                grads = torch.autograd.grad(out, leaves, inputs.grad, allow_unused=True)
                self.workspace.sync()
            except Exception as error:
                if is_oom(error) or context_is_dead(error):
                    raise
                if isinstance(error, self.backend.refuses) or is_refusal(error):
                    no_gradient = error_text(error)
                else:
                    failed = error_text(error)
            else:
                tensors |= dict(zip(GRADIENTS, grads, strict=True))
        self.workspace.sync()
        return tensors, no_gradient, failed


def _bytes(tensor: Any) -> Any:
    """Return the whole storage of a tensor as bytes, including bytes outside the elements."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage())


def _copies(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: None if tensor is None else tensor.clone() for name, tensor in tensors.items()}


def _restored(inputs: Inputs, before: dict[str, Any]) -> str | None:
    """Restore the storage of the inputs. Return a message if it was changed, otherwise None."""
    changed = None
    for name, old in before.items():
        tensor = getattr(inputs, name)
        stored = _bytes(tensor)
        differing = (stored != old).nonzero()
        if len(differing):
            element = int(differing[0]) // tensor.element_size()
            changed = changed or (
                f"the backend overwrites element {element} in the storage of the input {name}"
            )
            stored.copy_(old)
    return changed


def _same(first: Any, second: Any) -> bool:
    """Return whether two tensors are bitwise equal, so that equal NaNs count as equal."""
    if first is None or second is None:
        return first is second
    bits = (tensor.contiguous().view(torch.uint8) for tensor in (first, second))
    return bool(torch.equal(*bits))
