"""Compare a backend's results with the reference, and describe a difference: its place, its size,
and the mistake that would produce it.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from profharness.attention.backends.inputs import Inputs
from profharness.attention.config import Config
from profharness.device_types import CUDA, is_gpu
from profharness.recording.worker.reference import (
    ORDERS,
    Attended,
    Variant,
    attend,
    batched_out,
    default_scale,
)
from profharness.run import Check

NAN_BYTE = 0xFF  # repeated, it is NaN in fp16, bf16, fp32 and fp64
OTHER_BYTE = 0x42  # repeated, a finite number in all of them
COPIES = 4  # of each size: output, gradients and workspaces come from the freed ones
FACTOR = 2.0  # times the error of eager attention in the same dtype, the worst of its orders
FLOOR_ULPS = 2.0  # relative to the terms, for cases in which eager is exact by chance
NOT_ONE = 0.01  # a factor nearer to 1 is no mistake in a factor
TILES = (16, 32, 64, 128)
_M_PERTURB = -6  # glibc: fill what malloc hands out with the complement of a byte


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
    except (AttributeError, OSError, TypeError):  # the C library has none
        yield
        return
    perturb(_M_PERTURB, byte ^ 0xFF | 0x100)  # the bit above the byte: 0 would switch it off
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
    """The reference in fp64, and per name the allowed error: (largest difference, its Frobenius
    norm).
    """

    reference: Attended
    allowance: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Got:
    """The results of a backend by name. A gradient may be None.

    `first` and `second` are results for the same inputs on memory with different contents,
    `earlier` of the call before, on other inputs. `reused` are results of the first call that a
    later call changed. `no_gradient` is why there can be none, `backward_error` why they are
    missing.
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
    # NaN, which is larger than nothing, is the worst
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
    """Describe elements that contain the memory's previous contents: NaN at first, then the other
    pattern.
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
