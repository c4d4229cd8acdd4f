"""Estimate the time and kernels of configs on the backends of a GPU.

An estimate comes from a measured cell, from the model, or from the roofline bound.

docs/atlas.md describes the model.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from profharness.atlas.data import (
    DTYPES,
    MODEL_SUFFIX,
    NOTHING,
    PACKAGED,
    Array,
    Atlas,
    AtlasCell,
    Launch,
    narrowed,
    read_arrays,
    variant_of,
    write_arrays,
)
from profharness.atlas.features import KINDS, Columns, Integers, Values, at, sizes, with_shapes
from profharness.atlas.kernels import (
    COMPUTED,
    Boost,
    Curve,
    Launched,
    Rules,
    columns,
    regimes_of,
    together,
)
from profharness.attention.config import AUTO, STRIDES, WHOLE_MASKS, Config
from profharness.attention.costs import compulsory_bytes, flops
from profharness.attention.dispatch.machine import Machine, from_config, gpu_title, machine_for
from profharness.attention.dispatch.predict import predict
from profharness.device_types import CUDA
from profharness.devices import data_sheet, find_gpu, flop_peak
from profharness.dtypes import CONFIG_DTYPES
from profharness.errors import UsageError, printable_path
from profharness.processes import garbage_collection_off

MODEL_VERSION = 3
MAX_HEADER_BYTES = 4_000_000  # maximum size of the header, which contains all but the arrays
MAX_VALUES = 4_000_000  # maximum number of values in all arrays of one dtype
# Maps fields of a config to the values that occur in an atlas.
SAMPLED: dict[str, tuple[Any, ...]] = {
    "dtype": CONFIG_DTYPES,
    "mask": KINDS,
    "mask_shape": (None, "b1qk", "b11k", "bhqk", "1hqk"),
    "dropout": (0,),
    "scale": (None,),
    "layout": ("contiguous",),
    "head_dim_v": (None,),
    "kv_batch": (None,),
    "deterministic": (False,),
    **dict.fromkeys(STRIDES, (None,)),
}
SHOWN = ("mask", "mask_shape", "layout")  # fields whose values are shown in messages
# Maps fields of a config, for which the atlas contains a range of values, to names in messages.
BOUNDS = {
    "batch": "batch",
    "num_heads": "heads",
    "num_kv_heads": "kv_heads",
    "seq_len_q": "queries",
    "seq_len_kv": "keys",
    "head_dim": "head_dim",
}
LONGER = 1.5  # an estimate may exceed the longest measured call by this factor
NEAR = 0.45  # minimum share of the time that compute or memory must explain to be the bottleneck
MAX_KNOWN = 100_000  # maximum number of cached predictions of the dispatch rules
TINY_US = 4.0  # if kernels take less time on average, the bottleneck is their launches


class Timing(msgspec.Struct, frozen=True):
    """The part of the model that predicts times of one backend, with or without a backward pass."""

    trees: Boost  # log of the factor by which the time differs from the sum of the curves
    # maps a regime to the relative error for the 90 % interval; "" stands for all other regimes
    errors: dict[str, float]
    graph: dict[str, float]  # ratio of graph time to kernel time, by size of the call


class Model(msgspec.Struct, frozen=True):
    """The model fitted to an atlas."""

    version: int
    machine: str
    names: tuple[str, ...]  # names of kernels
    kinds: Integers  # index of the name, block x, y and z, registers and shared bytes of each kind
    codes: Integers  # code of each kind; kinds with the same code share a curve
    rules: dict[str, Rules]  # keys are backends
    curves: dict[str, dict[tuple[int, int], Curve]]  # keys are backends, then code and product
    timings: dict[tuple[str, int], Timing]  # keys are a backend and 1 for a backward pass, else 0
    bounds: dict[str, float]  # smallest and largest values in the atlas


def write_model(model: Model, path: Path) -> None:
    """Write a model atomically. All arrays of the same dtype are stored as one array."""
    pools: dict[str, list[Array]] = {dtype: [] for dtype in DTYPES}
    sizes = dict.fromkeys(DTYPES, 0)

    def encode(array: Array) -> list[int]:
        stored = narrowed(array) if array.dtype.kind in "iu" else array
        dtype = stored.dtype.str if stored.dtype.str in DTYPES else "<f4"
        pools[dtype].append(stored.astype(dtype).reshape(-1))
        start, sizes[dtype] = sizes[dtype], sizes[dtype] + array.size
        return [DTYPES.index(dtype), start, *array.shape]

    header = msgspec.msgpack.encode(model, enc_hook=encode)
    arrays = {dtype[1:]: np.concatenate([np.zeros(0, dtype), *pools[dtype]]) for dtype in DTYPES}
    write_arrays({"header": np.frombuffer(header, np.uint8), **arrays}, path, force=True)


def read_model(path: Path) -> Model:
    """Read a model. Raise UsageError if it is damaged or has another version."""
    counts = dict.fromkeys((dtype[1:] for dtype in DTYPES), MAX_VALUES)
    arrays = read_arrays(path, {"header": MAX_HEADER_BYTES, **counts})
    pools: list[Array] = [arrays[dtype[1:]] for dtype in DTYPES]

    def decode(_: type, value: Any) -> Array:
        number, start, *shape = value
        if min(number, start, *shape) < 0:
            raise ValueError("a negative size")
        array: Array = pools[number][start : start + math.prod(shape)].reshape(shape)
        return array

    try:
        model = msgspec.msgpack.decode(arrays["header"].tobytes(), type=Model, dec_hook=decode)
    except (msgspec.MsgspecError, ValueError, TypeError, IndexError, RecursionError):
        raise UsageError(
            f"{printable_path(path)}: the model is invalid; get a new copy of the file"
        ) from None
    if model.version != MODEL_VERSION:
        raise UsageError(
            f"{printable_path(path)}: the model has version {model.version}, but this profharness "
            f"reads version {MODEL_VERSION}"
        )
    return model


@dataclass(frozen=True)
class Estimate:
    """The estimate for one config on one backend."""

    backend: str
    source: str  # `measured`, `model`, or `floor` if only the rules and the roofline are used
    choice: str | None
    status: str
    launches: tuple[Launch, ...] = ()
    kernel_us: float | None = None  # None for a floor; low_us is then the roofline bound
    low_us: float | None = None  # lower end of the 90 % interval
    high_us: float | None = None  # upper end of the 90 % interval
    error: float | None = None  # the relative error from which the interval was computed
    graph_us: float | None = None
    bottleneck: str | None = None
    outside: str | None = None  # reason why the model cannot predict the config
    timed_as: Config | None = None  # the config that the times belong to, if it is another one


class Dispatch:
    """The dispatch rules of a machine.

    Configs that the rules do not distinguish share a cached result.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._known: dict[tuple[object, ...], dict[str, tuple[str | None, str]]] = {}

    def answers(self, config: Config) -> dict[str, tuple[str | None, str]]:
        """Map each requested backend to the backend that runs (or None) and the call's status."""
        key = self._key(config) if self.machine.torch >= (2, 9) else (config,)
        if len(self._known) > MAX_KNOWN:
            self._known.clear()
        if key not in self._known:
            prediction = predict(from_config(config), self.machine)
            eligible = {name: each.eligible for name, each in prediction.backends.items()}
            auto = {"none": False, "unknown": None}.get(prediction.choice, True)
            self._known[key] = {AUTO: _answer(prediction.choice, auto)} | {
                name: _answer(name, is_eligible) for name, is_eligible in eligible.items()
            }
        return self._known[key]

    def _key(self, config: Config) -> tuple[object, ...]:
        """Return a cache key that is equal for configs that the rules do not distinguish.

        The key is valid for PyTorch 2.9 and newer. Instead of sizes, it contains the results of the
        comparisons in the rules.
        """
        queries, keys, dim = config.seq_len_q, config.seq_len_kv, config.head_dim
        broadcast = config.mask != "none" or config != config.contiguous()
        return (
            *variant_of(config), dim % 8, dim if dim > 128 else 0,
            (min(config.batch, 2), min(config.num_heads, 2)) if broadcast else (),
            config.num_heads == config.num_kv_heads, config.num_heads % config.num_kv_heads == 0,
            max(config.batch, config.num_heads) > 65_535, min(queries, 2), min(keys, 2),
            config.causal and queries == keys, self.machine.torch >= (2, 15) and keys % 128 == 64,
            config.mask_strides is None or config.mask_dims,
        )  # fmt: skip


def _answer(backend: str, eligible: bool | None) -> tuple[str | None, str]:
    if eligible:
        return backend, "ok"
    return None, "unknown" if eligible is None else "refused"


dispatch_of = lru_cache(maxsize=4)(Dispatch)  # calls for the same machine share a cache


def estimate(
    atlas: Atlas | None,
    configs: Sequence[Config],
    backends: Sequence[str],
    gpu: str,
    torch: str,
    *,
    measured: bool = True,
    rules: Machine | None = None,
) -> list[Estimate]:
    """Return an estimate for each config on each backend, sorted by config and then by backend.

    If `measured` is False, the cells of the atlas are not used. `rules` is the machine whose
    dispatch rules apply. The default is the GPU with the official wheel of the release. Raise
    UsageError for an unknown GPU.
    """
    rows = [NOTHING] * (len(configs) * len(backends))
    if atlas is not None and measured:
        rows = measured_rows(atlas, configs, backends)
    configs = [_as_measured(config.resolve(CUDA)) for config in configs]
    dispatch = dispatch_of(rules or machine_for(gpu, torch))
    model = None if atlas is None else model_of(atlas.machine.name)
    answers = []
    # maps a chosen backend and the index of a config to the indices of answers for the model
    wanted: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    bounds = {} if model is None else model.bounds
    limits = [(name, bounds[f"least {name}"], bounds[name]) for name in BOUNDS if name in bounds]
    for place, row in enumerate(rows):
        number, backend = place // len(backends), backends[place % len(backends)]
        if atlas is not None and row != NOTHING:
            answers.append(measured_estimate(atlas.cell(row)))
            continue
        config = configs[number]
        choice, status = dispatch.answers(config).get(backend, (None, "unknown"))
        outside = None if model is None or choice is None else _outside(config, limits)
        answer = Estimate(backend, "floor", choice, status, outside=outside)
        if choice is None:
            if status == "refused" and model is not None:
                answer = replace(answer, source="model")
        elif model is None or outside or choice not in model.rules:
            answer = replace(answer, low_us=floor_us(config, gpu))
        else:
            wanted[choice][number].append(place)
        answers.append(answer)
    if model is not None and wanted:
        with garbage_collection_off():
            _fill(answers, model, configs, wanted, gpu)
    return answers


def measured_rows(atlas: Atlas, configs: Sequence[Config], backends: Sequence[str]) -> list[int]:
    """Return the row of the atlas for each config on each backend, or NOTHING if there is none.

    If the atlas does not contain a config, return the row of a config that makes the same call.
    """
    exact = [config.resolve(CUDA) for config in configs]
    alike = [_as_measured(config) for config in exact]
    rows = atlas.rows(exact, backends)
    if alike == exact:
        return rows
    others = atlas.rows(alike, backends)
    return [other if row == NOTHING else row for row, other in zip(rows, others, strict=True)]


def _as_measured(config: Config) -> Config:
    """Return a config that makes the same call, but whose mask has a shape that atlases contain.

    PyTorch expands masks [Sq, Skv] and [1, 1, Sq, Skv] to the same strided tensor, and its backends
    accept both, so their choices, kernels and times are the same.
    """
    config = config.sdpa_call()
    letters = config.mask_shape or WHOLE_MASKS.get(config.mask, "")
    if config.mask_strides is not None or len(letters) not in (2, 4):
        return config  # PyTorch's fused backends refuse masks with three dimensions
    letters = letters.rjust(4, "1")
    kind = config.mask.removesuffix("_2d").removesuffix("_bh")
    return replace(config, mask=kind, mask_shape=None if letters == "11qk" else letters)


def as_sampled(config: Config) -> Config:
    """Return the config with contiguous tensors and the default scale, as atlases contain it.

    A backend runs the same kernels for both, except that `math` copies other tensors first. Return
    the config itself if its layout changes the kernels of other backends too: if the elements of a
    head are not adjacent, or if the tensors are not aligned.
    """
    params = from_config(config)
    if params.last_stride != 1 or params.storage_offset_bytes:
        return config
    return replace(config.contiguous(), mask_strides=None, scale=None)


def _fill(
    answers: list[Estimate],
    model: Model,
    configs: Sequence[Config],
    wanted: dict[str, dict[int, list[int]]],
    gpu: str,
) -> None:
    """Replace the answers in `wanted` with predictions of the model."""
    numbers = sorted({number for places in wanted.values() for number in places})
    c = with_shapes(sizes([configs[number] for number in numbers]))
    row_of = {number: row for row, number in enumerate(numbers)}
    for choice, places in wanted.items():
        most = model.bounds[f"{choice} us"] * LONGER
        rows = np.array([row_of[number] for number in places])
        forecasts = _forecast(model, choice, at(c, rows), gpu)
        for forecast, (number, users) in zip(forecasts, places.items(), strict=True):
            if (forecast.kernel_us or 0) > most:
                text = f"{choice} was measured only up to {most / LONGER / 1000.0:.0f} ms per call"
                low = floor_us(configs[number], gpu)
                forecast = Estimate("", "floor", choice, "ok", low_us=low, outside=text)
            for place in users:
                answers[place] = replace(forecast, backend=answers[place].backend)


def _forecast(model: Model, choice: str, c: Columns, gpu: str) -> Iterator[Estimate]:
    """Yield the model's prediction for each config on a backend. The `backend` field is empty."""
    calls = model.rules[choice].calls(c)
    whole = together(calls, c, model.codes, model.curves[choice])
    count = len(c["B"])
    us, error, graph = np.empty(count), np.empty(count), np.empty(count)
    for direction in (0, 1):
        rows = np.flatnonzero(c["BWD"] == direction)
        timing = model.timings.get((choice, direction))
        if len(rows) and timing is not None:
            part, some = at(c, rows), whole.at(rows)
            us[rows] = np.exp(timing.trees.sums(columns(part, some))) * some.us
            regimes = regimes_of(part, us[rows])
            error[rows] = [timing.errors.get(each, timing.errors[""]) for each in regimes]
            graph[rows] = us[rows] * [timing.graph.get(each.split()[1], 1.0) for each in regimes]
    kinds = [
        (
            model.names[name],
            None if x == NOTHING else (x, y, z),
            None if x == NOTHING else registers,
        )
        for name, x, y, z, registers, _ in model.kinds.tolist()
    ]
    # some kernels need a row of scores in shared memory
    computed = np.array([bool(COMPUTED.search(name)) for name in model.names])
    of_kinds = model.kinds[calls.kind]
    rows_bytes = 4 * c["SK"][calls.place] + of_kinds[:, 1] // 8
    shared_bytes = np.where(computed[of_kinds[:, 0]], rows_bytes, of_kinds[:, 5]).astype(np.int64)
    launches = []
    for kind, grid, time, shared in zip(
        calls.kind.tolist(),
        map(tuple, calls.grid.tolist()),
        (whole.each * (us / whole.us)[calls.place]).tolist(),
        shared_bytes.tolist(),
        strict=True,
    ):
        name, block, registers = kinds[kind]
        launches.append(
            Launch(name, grid if block else None, block, registers, shared if block else None, time)
        )
    edges = np.searchsorted(calls.place, np.arange(count + 1)).tolist()
    bottlenecks = _bottlenecks(c, whole, us, gpu)
    for row, (time, off, graph_us) in enumerate(
        zip(us.tolist(), error.tolist(), graph.tolist(), strict=True)
    ):
        yield Estimate(
            "", "model", choice, "ok", tuple(launches[edges[row] : edges[row + 1]]), time,
            time / (1 + off), time * (1 + off), off, graph_us, bottlenecks[row],
        )  # fmt: skip


def _bottlenecks(c: Columns, whole: Launched, us: Values, gpu: str) -> list[str]:
    """Return the bottleneck of each call, which is `compute`, `memory`, `launch` or `latency`.

    The bottleneck is determined with the rates in the GPU's data sheet.
    """
    work = 2 * np.where(c["BWD"] > 0, 7, 2) * c["S"] * c["D"] * np.where(c["CAUSAL"] > 0, 0.5, 1.0)
    moved = c["ITEM"] * (2 * c["Q"] + 2 * c["K"]) * np.where(c["BWD"] > 0, 2.5, 1.0)
    unfused = whole.count > 11  # unfused kernels read and write the matrix of scores several times
    moved = moved + np.where(unfused, 4 * c["S"] * whole.count * 0.8, c["M"] * c["ITEM"])
    peaks = data_sheet(find_gpu(gpu).name)
    if peaks is None or not peaks.bandwidth_bytes_per_s:
        return ["latency"] * len(us)
    rates = np.array([(flop_peak(peaks, dtype) or ("", np.inf))[1] for dtype in CONFIG_DTYPES])
    rate = np.where(unfused, rates[2], rates[c["DT"].astype(int)])
    compute, memory = work / rate * 1e6 / us, moved / peaks.bandwidth_bytes_per_s * 1e6 / us
    small = us / whole.count < TINY_US
    bound = np.select(
        [(compute >= memory) & (compute > NEAR), memory > NEAR, small], ["compute", "memory", "launch"], "latency"
    )  # fmt: skip
    names: list[str] = bound.tolist()
    return names


@lru_cache(maxsize=4)
def model_of(name: str) -> Model | None:
    """Return the model of a machine, or None if the package contains no model of this machine."""
    path = PACKAGED / f"{name}{MODEL_SUFFIX}"
    return read_model(path) if path.exists() else None


def _outside(config: Config, limits: Sequence[tuple[str, float, float]]) -> str | None:
    """Return why the model cannot predict a config, or None if the model can predict it.

    `limits` contains the name, the smallest and the largest value in the atlas for each size.
    """
    for name, least, most in limits:
        value = getattr(config, name)
        if not least <= value <= most:
            return f"{BOUNDS[name]} {value} is outside the range of the atlas, {least:.0f} to {most:.0f}"
    wrong = []
    for name, sampled in SAMPLED.items():
        value = getattr(config, name)
        if value not in sampled:
            text = "strides" if name in STRIDES else name
            wrong.append(f"{name}={value}" if name in SHOWN else text)
    return f"the atlas has no configs with {', '.join(dict.fromkeys(wrong))}" if wrong else None


def measured_estimate(cell: AtlasCell) -> Estimate:
    """Convert a measured cell to an estimate."""
    us = cell.kernel_us
    error = None if us is None else 0.0
    result = cell.backend, "measured", cell.choice, cell.status, cell.launches
    return Estimate(*result, us, us, us, error, cell.graph_us)


def floor_us(config: Config, gpu: str) -> float | None:
    """Return the roofline bound in microseconds, or None for a GPU without a data sheet."""
    try:
        peaks = data_sheet(gpu_title(gpu))
    except UsageError:
        return None
    if peaks is None or not peaks.bandwidth_bytes_per_s:
        return None
    rate = flop_peak(peaks, str(config.dtype))
    times = [compulsory_bytes(config) / peaks.bandwidth_bytes_per_s]
    times += [flops(config) / rate[1]] if rate else []
    return 1e6 * max(times)
