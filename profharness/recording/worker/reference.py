"""The reference of `verify`, and the comparison of a backend's results with it.

The reference is attention in plain torch ops: in fp64 the expected result, in the inputs' own dtype
the expected error. Gradients are computed explicitly, not by autograd. A difference is described by
its place, its size, and the mistake that would produce it.
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

from profharness.attention.backends.inputs import Inputs, output_shape
from profharness.attention.config import Config
from profharness.device_types import CUDA, is_gpu
from profharness.run import Check

MAX_SCORES = (
    1 << 24
)  # maximum number of scores in memory; in fp64, with temporaries, less than 1 GiB
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
    """Attention with a mistake. The default is correct.

    `scale` overrides the config's. With `diagonal`, row i attends to columns 0..i+diagonal under
    causal. With `interleaved`, query head h uses key head h % Hkv. `keys` limits the number of
    keys. `order` is one of ORDERS: another way to round the same scores, which is not a mistake.
    """

    scale: float | None = None
    causal: bool | None = None
    diagonal: int = 0
    interleaved: bool = False
    keys: int | None = None
    order: str = "plain"


@dataclass
class Attended:
    """Tensors by name (`out` `dq` `dk` `dv`), and the magnitude of the terms of each sum without
    cancellation, as (largest element, Frobenius norm). `sizes` also contains the scores, as
    `score`.
    """

    tensors: dict[str, Any]
    sizes: dict[str, tuple[float, float]] = field(default_factory=dict)


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
    variant: Variant | None = None,
    sizes: bool = False,
) -> Attended:
    """Return softmax(Q K^T * scale + mask) V and, if the config has bwd, the inputs' gradients for
    `inputs.grad`, in their shapes. causal is SDPA's, aligned to the first row and column.
    """
    variant = variant or Variant()
    tensors = _results(config, inputs, dtype)
    terms = _results(config, inputs, dtype) if sizes else {}
    if sizes:
        terms["score"] = torch.zeros((), dtype=dtype, device=inputs.query.device)
    with torch.no_grad():
        for place in _places(config, variant):
            _block(config, inputs, dtype, variant, place, tensors, terms)
    return Attended(
        {name: tensor.to(dtype) for name, tensor in tensors.items()},
        {name: _size(tensor) for name, tensor in terms.items()},
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
    made = _results(config, inputs, dtype)["out"]
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
                place = (batch, heads, 0, rows)
                made[batch, heads] = (
                    _weights(config, inputs, Variant(), place, scores) @ value[heads]
                )
    return made


def _places(config: Config, variant: Variant) -> Iterator[tuple[int, slice, int, slice]]:
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


def _results(config: Config, inputs: Inputs, dtype: Any) -> dict[str, Any]:
    """Return zeros to accumulate in. Key and value gradients of a narrow dtype accumulate in fp32."""
    query = inputs.query
    shape = output_shape(config)
    made = {"out": torch.zeros(shape, dtype=dtype, device=query.device)}
    if config.bwd:
        wide = torch.promote_types(dtype, torch.float32)
        for name, source in GRADIENTS.items():
            like = getattr(inputs, source)
            made[name] = torch.zeros(like.shape, dtype=wide, device=like.device)
    return made


def _block(
    config: Config,
    inputs: Inputs,
    dtype: Any,
    variant: Variant,
    place: tuple[int, slice, int, slice],
    tensors: dict[str, Any],
    terms: dict[str, Any],
) -> None:
    """Compute some rows of the query heads of one key head: [G, rows, D] against [Skv, D]."""
    batch, heads, kv, rows = place
    query = inputs.query[batch % config.batch, heads, rows].to(dtype)
    key, value = (
        tensor[batch % config.key_batch, kv].to(dtype) for tensor in (inputs.key, inputs.value)
    )
    scale = default_scale(config) if variant.scale is None else variant.scale
    scores = _scores(query, key, scale, variant.order)
    if terms:
        terms["score"] = torch.maximum(terms["score"], scores.abs().max())
    weights = _weights(config, inputs, variant, place, scores)
    at = (batch, heads, rows)
    tensors["out"][at] = weights @ value
    if terms:
        terms["out"][at] = weights.abs() @ value.abs()
    if not config.bwd:
        return
    grad = inputs.grad[at].to(dtype)
    slope = grad @ value.transpose(-2, -1)
    mean = (weights * slope).sum(-1, keepdim=True)
    inner = weights * (slope - mean) * scale
    _add(tensors, place, inner, weights, (query, key, grad))
    if terms:
        outer = weights.abs() * (slope.abs() + mean.abs()) * abs(scale)
        _add(terms, place, outer, weights.abs(), (query.abs(), key.abs(), grad.abs()))


def _scores(query: Any, key: Any, scale: float, order: str) -> Any:
    if order == "scaled_first":
        return (query * scale) @ key.transpose(-2, -1)
    if order == "reversed":
        query, key = query.flip(-1), key.flip(-1)
    return query @ key.transpose(-2, -1) * scale


def _add(
    into: dict[str, Any],
    place: tuple[int, slice, int, slice],
    inner: Any,
    weights: Any,
    factors: tuple[Any, Any, Any],
) -> None:
    batch, heads, kv, rows = place
    query, key, grad = factors
    wide = into["dk"].dtype
    mine, theirs = (batch % len(into[name]) for name in ("dq", "dk"))  # 0 in a batch of 1
    into["dq"][mine, heads, rows] += (inner @ key).to(wide)
    into["dk"][theirs, kv] += (inner.transpose(-2, -1) @ query).to(wide).sum(0)
    into["dv"][theirs, kv] += (weights.transpose(-2, -1) @ grad).to(wide).sum(0)


def _weights(
    config: Config,
    inputs: Inputs,
    variant: Variant,
    place: tuple[int, slice, int, slice],
    scores: Any,
) -> Any:
    batch, heads, _, rows = place
    if inputs.mask is not None:
        full = (config.output_batch, config.num_heads, config.seq_len_q, config.seq_len_kv)
        mask = inputs.mask.detach().broadcast_to(full)[batch, heads, rows]
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


def _size(tensor: Any) -> tuple[float, float]:
    wide = tensor.double()
    return float(wide.abs().max()), float(wide.norm())


@contextlib.contextmanager
def poisoned(byte: int, like: Iterable[Any], device: str) -> Iterator[None]:
    """Fill memory that is allocated inside the block with `byte`, as far as possible.

    On CUDA, free blocks of the caching allocator are filled, including those of the sizes of
    `like`. Memory that the driver allocates, or another stream uses, is not. On a CPU with glibc,
    malloc fills its blocks, except for the first 16 bytes of a block of up to 1 KiB from its thread
    cache, and some blocks of less than 100 bytes. With other C libraries only freed blocks of those
    sizes are filled.
    """
    held = [
        torch.empty(size, dtype=torch.uint8, device=device).fill_(byte)
        for size in sorted({tensor.numel() * tensor.element_size() for tensor in like})
        for _ in range(COPIES)
    ]
    if is_gpu(device):
        torch.cuda.synchronize()
    held.clear()
    if is_gpu(device):
        _fill_free_blocks(byte)
        yield
        return
    try:
        perturb = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # the C library has no mallopt
        yield
        return
    perturb(
        _M_PERTURB, byte ^ 0xFF | 0x100
    )  # set the bit above the byte, because 0 would disable filling
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
    held = []
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
            held.append(made.fill_(byte))
    torch.cuda.synchronize()
    held.clear()


@dataclass(frozen=True)
class Expected:
    """The reference in fp64 and the allowed error of each result.

    An allowed error is (largest difference of an element, Frobenius norm of the difference).
    """

    reference: Attended
    allowance: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Got:
    """The results of a backend by name. A gradient may be None.

    `first` and `second` are results for the same inputs on memory with different contents.
    `earlier` contains the results of the previous call, which had other inputs. `reused` names the
    results of the first call that a later call changed. `no_gradient` is why the backend has no
    gradients, and `backward_error` is why its backward pass failed.
    """

    first: dict[str, Any]
    second: dict[str, Any]
    earlier: dict[str, Any]
    reused: tuple[str, ...]
    no_gradient: str | None = None
    backward_error: str | None = None


def expect(config: Config, inputs: Inputs) -> Expected:
    """Return the reference for these inputs, and the error that a correct result may have."""
    reference = attend(config, inputs, torch.float64, sizes=True)
    dtype = inputs.query.dtype
    eagers = [attend(config, inputs, dtype, variant=Variant(order=order)) for order in ORDERS]
    eps = torch.finfo(dtype).eps
    allowance = {}
    logsumexp = reference.sizes["score"][0] + math.log(config.seq_len_kv)
    for name in reference.tensors:
        largest, norm = reference.sizes[name]
        offs = [_difference(eager.tensors[name], reference.tensors[name]) for eager in eagers]
        batched = batched_out(config, inputs, dtype) if name == "out" else None
        if batched is not None:
            offs.append(_difference(batched, reference.tensors[name]))
        # eager's error means nothing if it overflows
        offs = [torch.nan_to_num(off, nan=0.0, posinf=0.0, neginf=0.0) for off in offs]
        floor = FLOOR_ULPS * eps
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
    reference, allowance = expected.reference.tensors[name], expected.allowance[name]
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
    fault = _fault(config, inputs, name, got, expected, errors)
    return Check(
        name,
        passed=fault is None,
        message=fault or _nondeterminism(first, second),
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
    """Describe the fault of a result, or return None."""
    first, second = got.first[name], got.second[name]
    reference, allowance = expected.reference.tensors[name], expected.allowance[name]
    unwritten = _unwritten(first, second, reference)
    if unwritten:
        return unwritten
    results = zip((first, second), errors, strict=True)
    bad = [result for result, error in results if not _within(error, allowance)]
    if not bad:
        if name in got.reused:
            return "a later call changed what an earlier one returned: its buffer is shared"
        return None
    where = _where(bad[0], reference, allowance)
    earlier = got.earlier.get(name)
    if earlier is not None and torch.equal(bad[0], earlier) and not torch.equal(bad[0], reference):
        return f"{_same_again(bad[0])}; {where}"
    if len(bad) == 1 or not torch.equal(first, second):
        off = _errors(first, second.double())
        if not _within(off, allowance):
            return f"two calls on the same inputs differ by up to {off[0]:.3g}; {where}"
    guess = _guess(config, inputs, name, bad[0], expected) if bad[0].isfinite().all() else None
    return f"{where}; {guess}" if guess else where


def _same_again(got: Any) -> str:
    """Describe a result that equals the previous call's, which had other inputs."""
    value = got.flatten()[0]
    if got.numel() > 1 and bool((got == value).all()):
        return (
            f"every element is {float(value):.6g} for other inputs too: the inputs do not reach it"
        )
    return "is what the call before returned, for other inputs: state is kept, or the inputs are not read"


def _unwritten(first: Any, second: Any, reference: Any) -> str | None:
    """Describe elements that the backend did not write.

    They contain NaN in the first result and the other byte pattern in the second.
    """
    other = poison_value(OTHER_BYTE, first.dtype)
    left = first.isnan() & ~reference.isnan() & (second.double() == other)
    count = int(left.sum())
    if not count:
        return None
    place = _index(left.flatten().int().argmax(), left.shape)
    return (
        f"not written: {count} of {left.numel()} elements hold what lay in memory before, "
        f"the first at {place}"
    )


def _where(got: Any, reference: Any, allowance: tuple[float, float]) -> str:
    """Describe the place of the largest difference, the expected value and the excess."""
    lost = (~got.isfinite()) & reference.isfinite()
    count = int(lost.sum())
    if count:
        flat = lost.flatten().int().argmax()
        kind = "NaN" if bool(got.flatten()[flat].isnan()) else "infinite"
        place, value = _index(flat, got.shape), float(reference.flatten()[flat])
        return (
            f"{kind} at {place} where {value:.6g} is expected; "
            f"{count} of {got.numel()} elements are not finite"
        )
    off = _difference(got, reference)
    flat = off.abs().flatten().argmax()
    largest, norm = float(off.flatten()[flat].abs()), float(off.norm())
    values = (
        f"expected {float(reference.flatten()[flat]):.6g}, got {float(got.flatten()[flat]):.6g}"
    )
    place = _index(flat, got.shape)
    if largest > allowance[0]:
        beyond = int((off.abs() > allowance[0]).sum())
        return (
            f"at {place} {values}: {_by(largest, allowance[0])}; "
            f"{beyond} of {got.numel()} elements are beyond it"
        )
    return f"Frobenius norm of the difference {_by(norm, allowance[1])}, most at {place}: {values}"


def _by(error: float, allowance: float) -> str:
    times = f", {error / allowance:.3g} times" if allowance else ", beyond"
    return f"off by {error:.3g}{times} the allowance of {allowance:.3g}"


def _guess(config: Config, inputs: Inputs, name: str, got: Any, expected: Expected) -> str | None:
    """Return the common mistake that would produce exactly this result, or None."""
    config = replace(config, bwd=False) if name == "out" else config
    for text, variant in _mistakes(config):
        tried = attend(config, inputs, torch.float64, variant=variant)
        if _within(_errors(got, tried.tensors[name]), expected.allowance[name]):
            return f"this is the result {text}"
    reference = torch.nan_to_num(expected.reference.tensors[name])
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
    kept = {columns - columns % tile: tile for tile in reversed(TILES)}
    kept |= {columns - tile: tile for tile in reversed((1, *TILES))}
    for keys in sorted(keys for keys in kept if 0 < keys < columns):
        text = f"without the last {columns - keys} of {columns} keys"
        yield text, Variant(keys=keys)


def _nondeterminism(first: Any, second: Any) -> str | None:
    """Return a note on a correct result that differs between two calls."""
    if torch.equal(first, second):
        return None
    largest = float((first.double() - second.double()).abs().nan_to_num().max())
    return f"not deterministic: two calls on the same inputs differ by up to {largest:.3g}"


def _index(flat: Any, shape: Any) -> str:
    return str([int(place) for place in torch.unravel_index(torch.as_tensor(int(flat)), shape)])


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None
