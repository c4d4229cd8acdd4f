"""Select the cells of an atlas: realistic configs, any prefix of which covers the whole space. Half
of them are pairs between which PyTorch's choice or the shape of the work changes.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from profharness.attention.config import SDPA_BACKENDS, Config
from profharness.attention.costs import compulsory_bytes, flops, matrix_bytes, phases, tensor_bytes
from profharness.attention.dispatch.machine import Machine, from_config
from profharness.attention.dispatch.predict import Prediction, predict

T = TypeVar("T")

REGIMES = (("prefill", 0.25), ("train", 0.27), ("decode", 0.24), ("cross", 0.12), ("vision", 0.12))
HEADS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 36, 40, 48, 56, 64)
HEAD_DIMS = (
    (64, 0.22), (128, 0.28), (32, 0.05), (48, 0.02), (80, 0.06), (96, 0.06), (112, 0.03),
    (160, 0.03), (192, 0.05), (224, 0.02), (256, 0.05), (40, 0.03), (72, 0.03), (88, 0.02),
    (100, 0.02), (36, 0.01), (120, 0.01), (288, 0.005), (512, 0.005),
)  # fmt: skip
DTYPES = (("bf16", 0.45), ("fp16", 0.42), ("fp32", 0.13))
MASKS = (
    (("bool", None), 0.3), (("bool", "b1qk"), 0.15), (("bool", "b11k"), 0.1), (("float", None), 0.2),
    (("float", "bhqk"), 0.15), (("float", "1hqk"), 0.1),
)  # fmt: skip
UNMASKED = 0.8  # share of the configs without a mask
IMAGES = (49, 64, 144, 196, 197, 256, 257, 576, 577, 729, 784, 1024, 1025, 1369, 2304, 4096, 9216)
TEXTS = (64, 77, 128, 226, 256, 333, 512)  # what images attend to

MAX_BATCH, MAX_HEADS, MAX_LENGTH, MAX_HEAD_DIM = 64, 64, 65_536, 512
SHORTEST_US = (
    250  # calls that take less are all kept; longer ones are thinned out evenly in the logarithm
)
LONGEST_US = 20_000.0
OVERLONG = 3  # a few cells may take this many times the longest
COSTLY_US = 6_000  # longer cells are kept with a probability of this divided by their time
MATH_BYTES = 10e9
INPUT_BYTES = 3e9
REFUSED_SHARE = 0.1  # share of cells kept among those that the rules refuse
# FLOP/s and bytes/s to estimate the work of a cell, for planning only.
RATES = {"cudnn": 5e14, "flash": 3e14, "efficient": 1.5e14, "math": 4e13}
FP32_RATE = 3e13
BYTES_RATE = 3e12
LAUNCH_US = 5
TILES = (64, 128)
SMS = 132


@dataclass(frozen=True)
class Cell:
    """One cell to measure. estimate_us is a rough time of one call, used only for planning."""

    config: str
    backend: str
    regime: str
    estimate_us: float

    def row(self) -> dict[str, Any]:
        """Return the cell as JSON values."""
        return asdict(self)


class Point:
    """Point n of a Richtmyer sequence: the fractional parts of n times the roots of primes.
    Each name has its own coordinate, in the order of first use.
    """

    PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
    NAMES = ("regime", "batch", "heads", "group", "long", "short", "dim", "dtype", "mask", "snap",
             "time", "move")  # fmt: skip

    def __init__(self, seed: int, number: int) -> None:
        self.seed, self.number = seed, number

    def __getitem__(self, name: str) -> float:
        """Return a coordinate between 0 and 1."""
        root = math.sqrt(self.PRIMES[self.NAMES.index(name)])
        return (share(f"{self.seed} {name}") + self.number * root) % 1.0

    def pick(self, name: str, table: Sequence[tuple[T, float]]) -> T:
        """Return one of the values, chosen by weight."""
        place = self[name] * sum(weight for _, weight in table)
        for value, weight in table:
            place -= weight
            if place < 0:
                return value
        return table[-1][0]

    def among(self, name: str, values: Sequence[T]) -> T:
        return values[int(self[name] * len(values))]

    def between(self, name: str, low: int, high: int) -> float:
        """Return a number whose logarithm is evenly distributed."""
        return float(low * (high / low) ** self[name])


def share(text: str) -> float:
    """Return an evenly distributed number between 0 and 1 that depends only on a text."""
    return zlib.crc32(text.encode()) / 2**32


def length(point: Point, name: str, low: int, high: int) -> int:
    """Return a length: a power of two, a multiple of 64, or any number."""
    value = point.between(name, low, high)
    # by another coordinate for each of two lengths
    place = (point["snap"] + (0.5 if name == "short" else 0)) % 1
    if place < 0.4:
        return int(2 ** round(math.log2(value)))
    if place < 0.7 and value > 64:
        return int(64 * round(value / 64))
    return max(1, round(value))


def config_of(point: Point) -> tuple[str, Config]:
    """Return the regime and config of a point."""
    regime = point.pick("regime", REGIMES)
    heads = point.among("heads", HEADS)
    batch = point.between("batch", 1, MAX_BATCH)
    dtype, dim = point.pick("dtype", DTYPES), point.pick("dim", HEAD_DIMS)
    groups = [each for each in range(1, heads + 1) if heads % each == 0]
    grouped = point["group"]
    lower, upper = (0.35, 0.9) if regime == "decode" else (0.6, 0.93)
    if grouped < lower or regime == "vision":
        kv_heads = heads
    else:  # multi-query at the end, else a divisor
        kv_heads = (
            1 if grouped > upper else groups[int((grouped - lower) / (upper - lower) * len(groups))]
        )
    queries, keys = lengths_of(regime, point)
    masked = point["mask"] > UNMASKED
    config = Config(
        batch=2 ** round(math.log2(batch)) if point["snap"] < 0.6 else round(batch),
        num_heads=heads,
        num_kv_heads=kv_heads,
        seq_len_q=queries,
        seq_len_kv=keys,
        head_dim=dim,
        dtype=dtype,
        bwd=regime == "train" or (regime in ("vision", "cross") and point["time"] % 0.1 > 0.05),
    )
    if masked:
        weights = [((kind, shape), weight) for (kind, shape), weight in MASKS]
        mask, mask_shape = point.pick("move", weights)
        return regime, replace(config, mask=mask, mask_shape=mask_shape)
    causal = {"prefill": 0.55, "train": 0.5, "decode": 0.04, "cross": 0.04, "vision": 0}[regime]
    return regime, replace(config, causal=point["mask"] < causal)


def lengths_of(regime: str, point: Point) -> tuple[int, int]:
    """Return the numbers of queries and keys."""
    if regime == "decode":
        return (1 if point["short"] < 0.6 else round(1 + 7 * point["short"])), length(
            point, "long", 16, MAX_LENGTH
        )
    if regime == "vision":
        images = point.among("long", IMAGES)
        return images, images
    if regime == "cross":
        if point["snap"] < 0.5:
            return point.among("long", IMAGES), point.among("short", TEXTS)
        return length(point, "long", 1, 16_384), length(point, "short", 16, 16_384)
    queries = length(point, "long", 16, MAX_LENGTH)
    if regime == "prefill" and point["short"] > 0.85:  # a chunk behind a cache
        return queries, min(MAX_LENGTH, queries + length(point, "short", 128, 16_384))
    return queries, queries


def time_us(config: Config, backend: str) -> float:
    """Return a rough time of one call on a data-centre GPU, in microseconds."""
    moved, rate = float(compulsory_bytes(config)), RATES[backend]
    work = flops(config)
    if config.dtype == "fp32":
        rate = min(rate, FP32_RATE)
    if backend == "math":  # 16-bit inputs are widened
        steps = phases(config, "fp32")
        moved = float(sum(step.bytes for step in steps))
        work = sum(step.flops for step in steps if step.matmul)
    launches = (6 if backend == "math" else 1) * (2 if config.bwd else 1)
    return launches * LAUNCH_US + 1e6 * max(work / rate, moved / BYTES_RATE)


def math_bytes(config: Config) -> float:
    """Return the approximate bytes of math's score matrices."""
    return float(matrix_bytes(config, "fp32") * (5 if config.bwd else 3))


def is_bounded(config: Config) -> bool:
    """Return whether the numbers are in the atlas's space and the tensors fit into its memory."""
    inputs = tensor_bytes(replace(config, causal=False))
    needed = inputs.forward + (inputs.gradients if config.bwd else 0)
    return (
        1 <= config.batch <= MAX_BATCH
        and config.num_heads <= MAX_HEADS
        and min(config.seq_len_q, config.seq_len_kv) >= 1
        and max(config.seq_len_q, config.seq_len_kv) <= MAX_LENGTH
        and 8 <= config.head_dim <= MAX_HEAD_DIM
        and needed <= INPUT_BYTES
    )


@dataclass(frozen=True)
class Sampler:
    """All cells of an atlas in order. `longest_us` limits the estimated time of a call."""

    machine: Machine
    seed: int = 0
    longest_us: float = LONGEST_US

    def ask(self, config: Config) -> Prediction:
        """Return the prediction of the dispatch rules."""
        return predict(from_config(config, "cuda"), self.machine)

    def configs(self) -> Iterator[tuple[str, Config]]:
        """Yield regimes and configs endlessly, without duplicates: alternately two of the sequence,
        and a pair of neighbours near a third.
        """
        seen: set[Config] = set()
        taken = number = 0
        while True:
            number += 1
            point = Point(self.seed, number)
            regime, config = config_of(point)
            if not self.fits(config, point["time"]):
                continue
            taken += 1
            batch: tuple[Config, ...] = (config,)
            if taken % 3 == 0:
                batch = self.neighbours(config, point, flip=taken % 2 == 0)
            for each in batch:
                if each not in seen and self.fits(each, point["time"]):
                    seen.add(each)
                    yield regime, each

    def cells(self) -> Iterator[list[Cell]]:
        """Yield the cells of each config. The list is empty if a config has none."""
        for regime, config in self.configs():
            if cells := self.cells_of(regime, config):
                yield cells

    def fits(self, config: Config, place: float) -> bool:
        """Return whether to include a config. The longer its fused call, the higher its place must
        be.
        """
        if not is_bounded(config):
            return False
        shortest = min(SHORTEST_US, self.longest_us)
        fused = min(time_us(config, name) for name in ("cudnn", "flash"))
        if place > 0.99:
            return fused <= OVERLONG * self.longest_us
        return bool(fused <= shortest * (self.longest_us / shortest) ** place)

    def cells_of(self, regime: str, config: Config) -> list[Cell]:
        """Return the cells of a config that are worth measuring. `auto` is left out if its choice
        is not.
        """
        prediction, label = self.ask(config), config.label
        cells: list[Cell] = []
        for name in SDPA_BACKENDS:
            cell = Cell(label, name, regime, round(time_us(config, name), 1))
            if prediction.backends[name].eligible is False:
                if share(f"{label} {name} refused") < REFUSED_SHARE:
                    cells.append(replace(cell, estimate_us=0.0))
            elif self.is_worth(cell, config):
                cells.append(cell)
        chosen = next((cell for cell in cells if cell.backend == prediction.choice), None)
        if chosen is not None:
            return [replace(chosen, backend="auto"), *cells]
        return cells

    def is_worth(self, cell: Cell, config: Config) -> bool:
        """Return whether a cell is worth its time and memory. All backends of a config share the
        random number.
        """
        if cell.backend == "math" and math_bytes(config) > MATH_BYTES:
            return False
        dice = share(cell.config)
        if cell.estimate_us > self.longest_us:
            return cell.estimate_us < OVERLONG * self.longest_us and dice < 0.01
        return cell.estimate_us <= COSTLY_US or dice < COSTLY_US / cell.estimate_us

    def neighbours(self, config: Config, point: Point, *, flip: bool) -> tuple[Config, ...]:
        """Return two configs close to this one between which the choice of `auto` changes, or with
        `flip` false, between which the time may bend.
        """
        if flip:
            start = int(point["move"] * len(FLIPS))
            here = self.ask(config).choice
            for move in (*FLIPS[start:], *FLIPS[:start]):
                other = move(config)
                if other != config and is_bounded(other) and self.ask(other).choice != here:
                    return config, other
        start = int(point["move"] * len(BENDS))
        for bend in (*BENDS[start:], *BENDS[:start]):
            pair = bend(config, point)
            if pair[0] != pair[1] and all(map(is_bounded, pair)):
                return pair
        return (config,)


def _off_eight(config: Config) -> Config:
    """Change head_dim to one that is not a multiple of 8, or to the next multiple."""
    dim = config.head_dim
    return replace(config, head_dim=dim + 1 if dim % 8 == 0 else (dim // 8 + 1) * 8)


def _over_256(config: Config) -> Config:
    return replace(config, head_dim=264 if config.head_dim <= 256 else 256)


def _other_width(config: Config) -> Config:
    return replace(config, dtype="fp32" if config.dtype != "fp32" else "fp16")


def _other_mask(config: Config) -> Config:
    if config.mask == "none":
        return replace(config, mask="bool", causal=False)
    return replace(config, mask="none", mask_shape=None)


def _other_group(config: Config) -> Config:
    grouped = config.num_kv_heads != config.num_heads
    return replace(config, num_kv_heads=config.num_heads if grouped else 1)


def _one_query(config: Config) -> Config:
    return replace(config, seq_len_q=2 if config.seq_len_q == 1 else 1)


def _one_key(config: Config) -> Config:
    return replace(config, seq_len_kv=2 if config.seq_len_kv == 1 else 1)


def _other_triangle(config: Config) -> Config:
    return replace(config, causal=not config.causal) if config.mask == "none" else config


def _other_direction(config: Config) -> Config:
    return replace(config, bwd=not config.bwd)


FLIPS: tuple[Callable[[Config], Config], ...] = (
    _off_eight, _over_256, _other_width, _other_mask, _off_eight, _other_group, _one_query,
    _other_triangle, _other_direction, _one_key,
)  # fmt: skip
Pair = tuple[Config, Config]


def _query_tile(config: Config, point: Point) -> Pair:
    """Return a config with a full last tile of queries, and a config whose last tile has a single
    row.
    """
    tile = point.among("snap", TILES)
    rows = max(1, round(config.seq_len_q / tile)) * tile
    return replace(config, seq_len_q=rows), replace(config, seq_len_q=rows + 1)


def _key_tile(config: Config, point: Point) -> Pair:
    tile = point.among("snap", TILES)
    rows = max(1, round(config.seq_len_kv / tile)) * tile
    return replace(config, seq_len_kv=rows), replace(config, seq_len_kv=rows + 1)


def _batch_wave(config: Config, point: Point) -> Pair:
    """Return batches between which the blocks of a forward kernel need one more wave of SMs."""
    tile = point.among("snap", TILES)
    blocks = config.num_heads * math.ceil(config.seq_len_q / tile)
    wave = max(1, round(config.batch * blocks / SMS))
    fewer = max(1, wave * SMS // blocks)
    return replace(config, batch=fewer), replace(config, batch=fewer + 1)


def _query_wave(config: Config, point: Point) -> Pair:
    """Return lengths between which the blocks of a forward kernel need one more wave of SMs."""
    tile = point.among("snap", TILES)
    heads = config.batch * config.num_heads
    wave = max(1, round(heads * math.ceil(config.seq_len_q / tile) / SMS))
    tiles = max(1, wave * SMS // heads)
    return replace(config, seq_len_q=tiles * tile), replace(config, seq_len_q=(tiles + 1) * tile)


def _head_dim_step(config: Config, _: Point) -> Pair:
    """Return the head_dims on both sides of a limit of a kernel template."""
    step = min((32, 64, 96, 128, 192), key=lambda each: abs(each - config.head_dim))
    return replace(config, head_dim=step), replace(config, head_dim=step + 8)


def _few_queries(config: Config, point: Point) -> Pair:
    rows = point.among("snap", (1, 2, 3, 4, 7, 8, 16, 32))
    return replace(config, seq_len_q=rows), replace(config, seq_len_q=rows + 1)


def _double_keys(config: Config, _: Point) -> Pair:
    return config, replace(config, seq_len_kv=min(MAX_LENGTH, 2 * config.seq_len_kv))


def _halves(config: Config, _: Point) -> Pair:
    """Return the same work with and without the causal mask."""
    return config, _other_triangle(config)


BENDS: tuple[Callable[[Config, Point], Pair], ...] = (
    _query_tile, _batch_wave, _key_tile, _query_wave, _head_dim_step, _few_queries, _double_keys,
    _halves,
)  # fmt: skip
