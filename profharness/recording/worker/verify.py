"""A program of the worker that verifies instead of measuring: call each cell's backend several
times on poisoned memory, and compare its results with a reference.

The reference is attention in plain torch ops: in fp64 the expected result, in the inputs' own dtype
the expected error. Gradients are computed explicitly, not by autograd. A difference is described by
its position, its size, and the mistake that would produce it.
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
from profharness.recording.worker.attention import check_output, make_forward, make_inputs
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
from profharness.run import Cell, Check

LARGE = 5.5  # factor on q and k; scores then have a standard deviation of 30, and exp(90) overflows fp32
OFFSET = 1 << 20  # offset in elements; it preserves every alignment of the allocator
# Maximum number of scores in memory; in fp64, with temporaries, less than 1 GiB.
MAX_SCORES = 1 << 24
ORDERS = ("plain", "scaled_first", "reversed")
GRADIENTS = {"dq": "query", "dk": "key", "dv": "value"}
NAN_BYTE = 0xFF  # a number with only such bytes is NaN in fp16, bf16, fp32 and fp64
OTHER_BYTE = 0x42  # a number with only such bytes is finite in these dtypes
COPIES = 4  # freed blocks of each size, from which output, gradients and workspaces are allocated
FACTOR = 2.0  # allowed error, relative to the largest error of eager attention in the same dtype
FLOOR_ULPS = 2.0  # minimum allowance, relative to the terms, because eager may be exact by chance
NOT_ONE = 0.01  # minimum distance from 1 of a factor that is reported as wrong
TILES = (16, 32, 64, 128)
_M_PERTURB = -6  # glibc option that fills memory from malloc with the complement of a byte


@dataclass(frozen=True)
class Variant:
    """Attention with a mistake. The default is correct."""

    scale: float | None = None  # instead of the config's
    causal: bool | None = None  # instead of the config's
    diagonal: int = 0  # under causal, row i attends to columns 0..i+diagonal
    interleaved: bool = False  # query head h uses key head h % Hkv
    keys: int | None = None  # number of keys, from the first
    order: str = "plain"  # one of ORDERS, which round the same scores differently; not a mistake


CORRECT = Variant()


@functools.cache
def masked_row_value() -> float:
    """Return the output of torch's math backend for a query that attends to no key.

    It is 0 in torch 2.5 and later, and NaN in earlier versions.
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
    """Return softmax(Q K^T * scale + mask) V as `out`, and the sizes of its terms.

    If the config has bwd, the results include the inputs' gradients for `inputs.grad` as `dq`, `dk`
    and `dv`, in the inputs' shapes. causal is SDPA's, aligned to the first row and column. A size is
    the magnitude of the terms of a sum without cancellation, as (largest element, Frobenius norm);
    that of the scores is `score`. Without `with_sizes`, there are none.
    """
    tensors = _zeros(config, inputs, dtype)
    terms = _zeros(config, inputs, dtype) if with_sizes else {}
    score = torch.zeros((), dtype=dtype, device=inputs.query.device)
    scale = default_scale(config) if variant.scale is None else variant.scale
    with torch.no_grad():
        for batch, heads, kv, rows in _blocks(config, variant):
            at = (batch, heads, rows)
            # [G, rows, D] against [Skv, D]
            query = inputs.query[batch % config.batch, heads, rows].to(dtype)
            key, value = (
                tensor[batch % config.key_batch, kv].to(dtype)
                for tensor in (inputs.key, inputs.value)
            )
            scores = _scores(query, key, scale, variant.order)
            weights = _weights(config, inputs, variant, at, scores)
            tensors["out"][at] = weights @ value
            if with_sizes:
                score = torch.maximum(score, scores.abs().max())
                terms["out"][at] = weights.abs() @ value.abs()
            if not config.bwd:
                continue
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
                )  # 0 in a batch of 1
                into["dq"][mine, heads, rows] += (factor @ k).to(wide)
                into["dk"][theirs, kv] += (factor.transpose(-2, -1) @ q).to(wide).sum(0)
                into["dv"][theirs, kv] += (weight.transpose(-2, -1) @ g).to(wide).sum(0)
    if with_sizes:
        terms["score"] = score
    sizes = {name: tensor.double() for name, tensor in terms.items()}
    return (
        {name: tensor.to(dtype) for name, tensor in tensors.items()},
        {name: (float(size.abs().max()), float(size.norm())) for name, size in sizes.items()},
    )


def batched_out(config: Config, inputs: Inputs, dtype: Any) -> Any:
    """Return `out` by one matrix product for all heads of a batch, like eager attention.

    BLAS may sum it in another, less exact order than head by head (fp32 on an H200 at head_dim
    2048: 2.4 times the error). Return None if the scores of one head are too many.
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
    """Yield (batch, query heads, key head, rows) of blocks with at most MAX_SCORES scores."""
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
    """Return zeros to accumulate in. Key and value gradients of a narrow dtype accumulate in fp32."""
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
    rows = at[2]
    if inputs.mask is not None:
        full = (config.output_batch, config.num_heads, config.seq_len_q, config.seq_len_kv)
        mask = inputs.mask.detach().broadcast_to(full)[at]
        hides = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -math.inf) if hides else scores + mask.to(scores.dtype)
    columns = torch.arange(config.seq_len_kv, device=scores.device)
    if config.causal if variant.causal is None else variant.causal:
        row = torch.arange(rows.start, rows.stop, device=scores.device)[:, None]
        scores = scores.masked_fill(columns > row + variant.diagonal, -math.inf)
    if variant.keys is not None:
        scores = scores.masked_fill(columns >= variant.keys, -math.inf)
    nothing = torch.isneginf(scores).all(-1, keepdim=True)
    return torch.softmax(scores, dim=-1).masked_fill(nothing, masked_row_value())


@contextlib.contextmanager
def poisoned(byte: int, like: Iterable[Any], device: str) -> Iterator[None]:
    """Fill memory that is allocated inside the block with `byte`, as far as possible.

    On CUDA, free blocks of the caching allocator are filled, including those of the sizes of
    `like`. Memory that the driver allocates, or another stream uses, is not. On a CPU with glibc,
    malloc fills its blocks, except for the first 16 bytes of a block of up to 1 KiB from its thread
    cache, and some blocks of less than 100 bytes. With other C libraries only freed blocks of those
    sizes are filled.
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
    # set the bit above the byte, because 0 would disable filling
    perturb(_M_PERTURB, byte ^ 0xFF | 0x100)
    try:
        yield
    finally:
        perturb(_M_PERTURB, 0)


def poison_value(byte: int, dtype: Any) -> float:
    """Return the value of an unwritten element of that dtype."""
    width = torch.empty((), dtype=dtype).element_size()
    return float(torch.tensor([byte] * width, dtype=torch.uint8).view(dtype)[0])


def _fill_free_blocks(byte: int) -> None:
    """Fill all free blocks that the current stream can get, by allocating them by size."""
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
    """The reference in fp64 and the allowed error of each result, by name.

    An allowed error is (largest difference of an element, Frobenius norm of the difference).
    """

    tensors: dict[str, Any]
    allowance: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Got:
    """The results of a backend by name. A gradient may be None."""

    first: dict[str, Any]
    second: dict[str, Any]  # for the same inputs, on memory with different contents
    earlier: dict[str, Any]  # of the previous call, which had other inputs
    reused: tuple[str, ...]  # results of the first call that a later call changed
    no_gradient: str | None = None  # why the backend has no gradients
    backward_error: str | None = None  # why its backward pass failed


def expect(config: Config, inputs: Inputs) -> Expected:
    """Return the reference for these inputs, and the error that a correct result may have."""
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
        # eager's error means nothing if it overflows
        offs = [torch.nan_to_num(off, nan=0.0, posinf=0.0, neginf=0.0) for off in offs]
        floor = FLOOR_ULPS * torch.finfo(dtype).eps
        if name != "out":  # a fused backward pass keeps each row's logsumexp, rounded to fp32
            floor += torch.finfo(torch.float32).eps * logsumexp
        allowance[name] = (
            FACTOR * max(float(off.abs().max()) for off in offs) + floor * largest,
            FACTOR * max(float(off.norm()) for off in offs) + floor * norm,
        )
    return Expected(reference, allowance)


def compare(config: Config, inputs: Inputs, name: str, got: Got, expected: Expected) -> Check:
    """Check one result by name."""
    first, second = got.first[name], got.second[name]
    reference, allowance = expected.tensors[name], expected.allowance[name]
    if first is None or second is None:
        return Check(name, False, "no gradient came back (None)")
    if first.shape != reference.shape:
        shapes = f"has shape {list(first.shape)}; it must be {list(reference.shape)}"
        return Check(name, False, shapes)
    if first.dtype != inputs.query.dtype:
        return Check(name, False, f"is {first.dtype}; the inputs are {inputs.query.dtype}")
    errors = [_errors(result, reference) for result in (first, second)]
    # treat NaN, which compares as false, as the largest error
    largest, norm = max(errors, key=lambda pair: (pair[0] != pair[0], pair[0]))
    size = float(torch.nan_to_num(reference).norm())
    fault = note = _fault(config, inputs, name, got, expected, errors)
    if fault is None and not torch.equal(first, second):
        most = float((first.double() - second.double()).abs().nan_to_num().max())
        note = f"not deterministic: two calls on the same inputs differ by up to {most:.3g}"
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
    """Return result - reference in fp64. Equal NaNs and infinities differ by 0."""
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
            return "a later call changed what an earlier one returned: its buffer is shared"
        return None
    where = _where(wrong, reference, allowance)
    earlier = got.earlier.get(name)
    if earlier is not None and torch.equal(wrong, earlier) and not torch.equal(wrong, reference):
        value = wrong.flatten()[0]
        if wrong.numel() > 1 and bool((wrong == value).all()):
            text = f"every element is {float(value):.6g} for other inputs too: the inputs do not reach it"
        else:
            text = "is what the call before returned, for other inputs: state is kept, or the inputs are not read"
        return f"{text}; {where}"
    off = _errors(first, second.double())
    if not _within(off, allowance):
        return f"two calls on the same inputs differ by up to {off[0]:.3g}; {where}"
    guess = _guess(config, inputs, name, wrong, expected) if wrong.isfinite().all() else None
    return f"{where}; {guess}" if guess else where


def _unwritten(first: Any, second: Any, reference: Any) -> str | None:
    """Describe elements that the backend did not write.

    They contain NaN in the first result and the other byte pattern in the second.
    """
    other = poison_value(OTHER_BYTE, first.dtype)
    left = first.isnan() & ~reference.isnan() & (second.double() == other)
    count = int(left.sum())
    if not count:
        return None
    return (
        f"not written: {count} of {left.numel()} elements hold what lay in memory before, "
        f"the first at {_index(left.flatten().int().argmax(), left.shape)}"
    )


def _where(got: Any, reference: Any, allowance: tuple[float, float]) -> str:
    """Describe the position of the largest difference, the expected value and the excess."""
    lost = (~got.isfinite()) & reference.isfinite()
    count = int(lost.sum())
    off = _difference(got, reference)
    flat = lost.flatten().int().argmax() if count else off.abs().flatten().argmax()
    position, wanted = _index(flat, got.shape), float(reference.flatten()[flat])
    value = float(got.flatten()[flat])
    if count:
        kind = "NaN" if math.isnan(value) else "infinite"
        return (
            f"{kind} at {position} where {wanted:.6g} is expected; "
            f"{count} of {got.numel()} elements are not finite"
        )
    largest = float(off.flatten()[flat].abs())
    values = f"expected {wanted:.6g}, got {value:.6g}"
    if largest > allowance[0]:
        beyond = int((off.abs() > allowance[0]).sum())
        return (
            f"at {position} {values}: {_by(largest, allowance[0])}; "
            f"{beyond} of {got.numel()} elements are beyond it"
        )
    by = _by(float(off.norm()), allowance[1])
    return f"Frobenius norm of the difference {by}, most at {position}: {values}"


def _by(error: float, allowance: float) -> str:
    times = f", {error / allowance:.3g} times" if allowance else ", beyond"
    return f"off by {error:.3g}{times} the allowance of {allowance:.3g}"


def _guess(config: Config, inputs: Inputs, name: str, got: Any, expected: Expected) -> str | None:
    """Return the common mistake that would produce exactly this result, or None."""
    config = replace(config, bwd=False) if name == "out" else config
    for text, variant in _mistakes(config):
        tried = attend(config, inputs, torch.float64, variant=variant)[0]
        if _within(_errors(got, tried[name]), expected.allowance[name]):
            return f"this is the result {text}"
    reference = torch.nan_to_num(expected.tensors[name])
    square = float((reference * reference).sum())
    ratio = float((got.double() * reference).sum()) / square if square else 0.0
    errors = _errors(got, ratio * reference)
    near = abs(ratio - 1) > NOT_ONE and _within(errors, expected.allowance[name])
    return f"it is {ratio:.4g} times what is expected: a factor is wrong" if near else None


def _mistakes(config: Config) -> Iterator[tuple[str, Variant]]:
    scale, columns = default_scale(config), config.seq_len_kv
    if scale != 1:
        yield "without the scale (scale=1)", Variant(scale=1.0)
    if config.scale is not None:
        own = default_scale(Config(1, 1, 1, 1, 1, config.head_dim))
        yield "with 1/sqrt(head_dim) in place of the given scale", Variant(scale=own)
    yield "with the scale applied twice", Variant(scale=scale * scale)
    if config.causal:
        yield "without the causal mask", Variant(causal=False)
        yield "with the causal mask one column too far right", Variant(diagonal=1)
        yield "with the causal mask one column too far left", Variant(diagonal=-1)
        if columns != config.seq_len_q:
            text = "with the causal mask aligned to the last row and column, not the first"
            yield text, Variant(diagonal=columns - config.seq_len_q)
    else:
        yield "with a causal mask that was not asked for", Variant(causal=True)
    if 1 < config.num_kv_heads < config.num_heads:
        text = "with query head h on key head h % Hkv, not h // (Hq / Hkv)"
        yield text, Variant(interleaved=True)
    kept = {columns - columns % tile for tile in TILES} | {columns - tile for tile in (1, *TILES)}
    for keys in sorted(keys for keys in kept if 0 < keys < columns):
        yield f"without the last {columns - keys} of {columns} keys", Variant(keys=keys)


def _index(flat: Any, shape: Any) -> str:
    return str([int(index) for index in torch.unravel_index(torch.as_tensor(int(flat)), shape)])


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None


def body(workspace: Workspace) -> None:
    """Verify every cell."""
    run_each(workspace, Verifier(workspace).verify)


@dataclass
class Verifier:
    """Verify cells. The reference of the last problem is reused for its other backends."""

    workspace: Workspace
    _last: tuple[tuple[Config, str], Inputs, Expected] | None = field(default=None, init=False)

    def verify(self, cell: Cell, stage: Stage) -> Cell:
        """Return the cell with its checks. Raise DeadContextError if no other cell can follow."""
        cell = replace(cell, config=cell.config.resolve(self.workspace.device))
        texts: list[str] = []
        set_deterministic(cell.config.deterministic)
        try:
            checks, tuning = self._checks(cell, stage, texts)
        except Exception as error:
            result = failure(cell, self.workspace, texts, error)
            # a backend that refuses, or that had too little memory, is not to blame
            blameless = result.status in ("refused", "oom")
            check = Check("out", None if blameless else False, result.message)
            return unless_dead(replace(result, checks=(check,)), error)
        cell = replace(cell, tuning=tuning, status="ok", checks=checks)
        wrong = [check for check in checks if check.passed is False]
        if not wrong:
            return cell
        return replace(cell, status="error", message=f"wrong {wrong[0].what}: {wrong[0].message}")

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
        reason = forward_only or got.no_gradient
        if cell.config.bwd and reason:
            checks += [Check(name, None, f"skipped: {reason}") for name in GRADIENTS]
        elif got.backward_error:
            text = f"the backward pass failed: {got.backward_error}"
            checks += [Check(name, False, text) for name in GRADIENTS if name not in names]
        return tuple(checks), tuning_of(backend, attention)

    def _why_forward_only(self, config: Config, backend: Backend) -> str | None:
        """Return why only the forward pass can be verified. Raise RefusedError if nothing can."""
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
            self._last = None  # before the next call uses its memory
            seed = self.workspace.plan.protocol.seed
            inputs = case_inputs(config, values, self.workspace.device, seed)
            self._last = (key, inputs, expect(config, inputs))
        return self._last[1], self._last[2]


def case_inputs(config: Config, values: str, device: str, seed: int) -> Inputs:
    """Return inputs of a config with the values or placement of a case; see `cases.VALUES`."""
    inputs = make_inputs(config, device, seed)
    with torch.no_grad():
        if values == "large":
            inputs.query.mul_(LARGE)
            inputs.key.mul_(LARGE)
        elif values == "equal":
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
    """The calls of one cell: twice a call on other inputs, followed by a call on its own inputs.

    Each pair of calls runs on memory that is filled with a different byte pattern. Data that an
    earlier call left in memory is therefore never the correct result.
    """

    config: Config
    workspace: Workspace
    backend: Backend
    attention: Attention | None
    values: str

    def run(self, inputs: Inputs, seed: int) -> tuple[Got, str | None]:
        """Return the results, and which input the call changed (with the position), or None."""
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
        """Return tensors of the sizes that a call may allocate."""
        query = inputs.query
        shape = (self.config.batch, self.config.num_heads, self.config.seq_len_q)
        out = torch.empty((*shape, self.config.value_dim), dtype=query.dtype, device="meta")
        sums = torch.empty(shape, dtype=torch.float32, device="meta")
        return [query, inputs.key, inputs.value, out, sums]

    def _call(self, inputs: Inputs) -> tuple[dict[str, Any], str | None, str | None]:
        """Return the results of a call by name, why there are no gradients, and why they failed.

        Raise ImplementationError if the output violates the contract, and RefusedError if the
        backend refuses. A failure of the backward pass does not lose the output.
        """
        with implementation_errors(self.backend):
            out = make_forward(self.config, inputs, self.attention)()
        check_output(self.backend.name, self.config, inputs, out)
        tensors, no_gradient, failed = {"out": out.detach()}, None, None
        if self.config.bwd and not out.requires_grad:
            no_gradient = "its output carries no gradient"
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
    """Return a tensor's whole storage, including bytes between and around its elements."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage())


def _copies(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: None if tensor is None else tensor.clone() for name, tensor in tensors.items()}


def _restored(inputs: Inputs, before: dict[str, Any]) -> str | None:
    """Restore the inputs' contents. Return where they were changed, or None."""
    changed = None
    for name, old in before.items():
        tensor = getattr(inputs, name)
        stored = _bytes(tensor)
        differing = (stored != old).nonzero()
        if len(differing):
            element = int(differing[0]) // tensor.element_size()
            changed = changed or f"writes into {name}, element {element} of its storage"
            stored.copy_(old)
    return changed


def _same(first: Any, second: Any) -> bool:
    """Compare bitwise, so that NaN equals itself."""
    if first is None or second is None:
        return first is second
    bits = (tensor.contiguous().view(torch.uint8) for tensor in (first, second))
    return bool(torch.equal(*bits))
