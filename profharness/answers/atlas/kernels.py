"""Which kernels a backend launches for a config, and in which grids: learned from an atlas.

A call is a template of slots. A slot has a role; a tree decides which kernels fill it, another one
which of a kernel's launch configurations, and a formula gives each size of the grid.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from profharness.answers.atlas.data import NOTHING
from profharness.answers.atlas.features import (
    TILES,
    Columns,
    product_features,
    product_sizes,
    tiled,
)
from profharness.answers.atlas.nets import Net
from profharness.answers.atlas.trees import LEAF, Integers, Tree, Values, grow

# Kernels that a library chooses among for one step. Any other kernel is a family of its own.
FAMILIES = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("flash forward", r"pytorch_flash::flash_fwd_(splitkv_)?kernel"),
        ("flash combine", r"flash_fwd_splitkv_combine"),
        ("flash backward", r"flash_bwd_dq_dk_dv"),
        ("flash delta", r"flash_bwd_dot_do_o"),
        ("flash dq", r"flash_bwd_convert_dq"),
        ("efficient forward", r"fmha_cutlassF"),
        ("efficient backward", r"fmha_cutlassB"),
        ("cudnn forward", r"cudnn_generated.*fprop"),
        ("cudnn backward", r"cudnn_generated.*bprop"),
        ("cudnn delta", r"cudnn::fusion::compute_dot_do_o"),
        ("cudnn dq", r"cudnn::fusion::convert_dq"),
        ("cudnn heads", r"cudnn::fusion::fmha_reduce_head"),
        ("softmax", r"softmax_warp_forward|cunn_SoftMaxForward"),
        ("softmax backward", r"softmax_warp_backward|cunn_SoftMaxBackward"),
        ("rows", r"reduce_kernel.*and_kernel"),
        ("sum", r"reduce_kernel.*sum_functor"),
        ("after product", r"splitKreduce|execute_split_k_kernel|scal(_64addr)?_kernel"),
        ("product", r"gemm|gemv|magma"),
        ("copy", r"direct_copy|16_copy_kernel|Memcpy"),
        ("is minus infinity", r"isneginf"),
        ("where", r"where_kernel"),
        ("multiply", r"MulFunctor"),
        ("fill", r"FillFunctor"),
        ("add", r"CUDAFunctor_add|CUDAFunctorOnSelf_add"),
    )
)
PRODUCT, AFTER = "product", "after product"
ANCHORS = (PRODUCT, "flash forward", "flash backward", "efficient forward", "efficient backward",
           "cudnn forward", "cudnn backward")  # fmt: skip
MOST = 16  # kernels of a family between two anchors
# What differs between the names of a kernel for fp16 and for bf16.
SAME = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        (r"cutlass::(half_t|bfloat16_t)", "cutlass::{t}"),
        (r"c10::(Half|BFloat16)", "c10::{t}"),
        (r"fmha_cutlass([FB])_(f16|bf16)_", r"fmha_cutlass\1_{t}_"),
        (r"b?float16_copy_kernel", "16_copy_kernel"),
        (r"(cudnn::fusion::(?!lean)\w+)<(true|false)", r"\1<{t}"),
        (r"#\d+", "#"),
    )
)
# Kernels whose shared memory holds a row of scores, and a number for each warp of the block.
COMPUTED = re.compile(r"cunn_SoftMax(Forward|Backward)Smem")
FLAGS = ("F32", "BWD", "CAUSAL", "MASK", "D%8", "D%4", "G", "SPLIT", "ESPLIT", "SWAP", "MB", "MH", "MQ", "MK",
         "SK%8", "SK%4", "SQ", "SK", "D", "B", "H", "BH", "S", "Q", "K", "M", "SQ=SK", "KV", "SQ%4",
         "SQ%32", "SK%32", "SK%64", "SQ%64", "SK%128", "BKV", "CSPLITS", "SPIECES", "KPIECES", "KXPIECES")  # fmt: skip
MULTIPLIERS = ("1", "BH", "BKV", "FBH", "B", "H", "KV", "SPLITS")
PARTS = 4  # kernels that fill one slot, at most
CAPPED = 0.02  # the share of cells from which a largest grid counts as a limit
# A family, and which of a call's slots: anchors before it * MOST + kernels of the family since then.
Key = tuple[str, int]


def neutral(name: str) -> str:
    """A kernel's name without what says fp16 or bf16."""
    for pattern, text in SAME:
        name = pattern.sub(text, name)
    return name


def family(name: str) -> str:
    """The family of a kernel's name."""
    return next((each for each, pattern in FAMILIES if pattern.search(name)), neutral(name))


class Part(Columns):
    """The columns of some configs, each taken when it is asked for."""

    def __init__(self, whole: Columns, rows: Integers) -> None:
        super().__init__()
        self.whole, self.rows = whole, rows

    def __missing__(self, name: str) -> Values:
        self[name] = self.whole[name][self.rows]
        return self[name]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self.whole


class Formula(NamedTuple):
    """A size of a grid: multiplier * ceil(quantity / step), at most limit (0: none). scale is
    multiplied too; a constant has the quantity `1`.
    """

    quantity: str
    step: float
    multiplier: str
    limit: int = 0
    right: float = 1.0

    def fits(self, c: Columns) -> bool:
        """Whether configs have its columns: those of a product, others have not."""
        return _known(c, self.quantity)

    def values(self, c: Columns) -> Values:
        """The sizes for some configs."""
        value = np.ceil(quantity(c, self.quantity) / self.step - 1e-9) * quantity(
            c, self.multiplier
        )
        return np.minimum(value, self.limit) if self.limit else value


def quantity(c: Columns, name: str) -> Values:
    """A product of columns by its name, such as `BH*D`; `1` is one."""
    value = np.ones_like(c["B"])
    if name in c:
        return c[name]
    for part in name.split("*"):
        if part != "1":
            value = value * c[part]
    return value


QUANTITIES = (
    "BH", "CPARTS", "SQ", "SK", "FSQ", "KP", "KXP", "SP", "Q", "K", "M", "ROWS", "KROWS", "SQSK", "D", "B", "H", "KV",
    "BKV", "FH", "SPLITS", "KEYSPLITS", "DQBLOCKS", "HEADBLOCKS", "DELTABLOCKS", "BH*SQ*D8",
    "BKV*SK*D8", "BH*SK*D8", "FBH*FSQ", "M8", "PADDED", "CLEARED", "BLOCKS64", "BLOCKS128",
    "KBLOCKS64", "KBLOCKS128", "SQ*SK8", "SQ*D", "SK*D", "SQ*H", "SK*H", "B*SQ", "B*SK", "SQ*D8",
    "SK*D8", "H*SQ*SK", "B*SQ*SK", "D8", "H*SQ*D", "KV*SK*D", "B*SQ*D8", "BKV*SK",
)  # fmt: skip

TILED = tuple(
    f"{axis}{rows}x{width}" for axis in "XYT" for rows, width in TILES
)  # of products; they count as they are


def solve(c: Columns, sizes: Values) -> Formula:
    """The simplest formula that gives all of these sizes; the one that gives most, where none does."""
    best, share = Formula("1", 1 / float(np.median(sizes)), "1", right=0.0), 0.0
    if (sizes == sizes[0]).all():
        return Formula("1", 1 / sizes[0], "1")
    top = sizes.max()
    at_top = sizes == top
    limits = (0, int(top)) if at_top.mean() > CAPPED and at_top.sum() > 2 else (0,)
    for limit in limits:
        free = ~at_top if limit else np.ones(len(sizes), bool)
        if not free.any():
            continue
        for multiplier in MULTIPLIERS:
            ratio = sizes / quantity(c, multiplier)
            whole = free & (ratio == np.round(ratio)) & (ratio > 0)
            if whole.sum() <= share * len(sizes):
                continue
            for name in (*TILED, "m", "n", *QUANTITIES):
                if not _known(c, name) or quantity(c, name).min() <= 0:
                    continue
                formula = _fit(c, name, multiplier, limit, ratio, free)
                if formula is None:
                    continue
                right = float((formula.values(c) == sizes).mean())
                # a limit explains some cells of any kernel: it must explain more than a few
                if right > share + (CAPPED if limit and right < 1 else 0):
                    best, share = formula._replace(right=right), right
                if right == 1.0:
                    return best
    return best


def _known(c: Columns, name: str) -> bool:
    return name in c or all(part in c for part in name.split("*"))


def _fit(
    c: Columns, name: str, multiplier: str, limit: int, ratio: Values, free: Values
) -> Formula | None:
    """The step with which ceil(quantity / step) is the ratio where a cell is free of the limit."""
    value = quantity(c, name)
    lower = (value / np.maximum(ratio, 1))[free]
    upper = np.where(ratio > 1, value / np.maximum(ratio - 1, 1e-9), np.inf)[free]
    low, high = lower.max(), upper.min()
    if name in TILED:
        return Formula(name, 1.0, multiplier, limit) if low <= 1 < high else None
    if low >= high:  # not all: the step of the median cell may still be right for most
        low, high = np.quantile(lower, 0.9), np.quantile(np.minimum(upper, 1e18), 0.1)
        if low >= high:
            return None
    return Formula(name, _step(float(low), float(min(high, low * 2 + 1))), multiplier, limit)


def _step(low: float, high: float) -> float:
    """The roundest number from low up to below high."""
    first, last, step = int(np.ceil(low - 1e-9)), int(np.ceil(high - 1e-9)) - 1, 1
    if first > last:
        return (low + high) / 2 if low < high else low
    while (last // (2 * step)) * 2 * step >= first and 2 * step <= max(last, 1):
        step *= 2
    return float(last // step * step)


@dataclass(frozen=True)
class Decision:
    """A tree over named columns; with one class there is no tree."""

    names: tuple[str, ...]
    tree: Tree

    def classes(self, c: Columns) -> Integers:
        """The class of each config."""
        if self.tree.feature[0] == LEAF:
            return np.full(len(c["B"]), self.tree.left[0])
        return self.tree.classes(np.stack([c[name] for name in self.names], axis=1))


def decide(c: Columns, names: Sequence[str], classes: Integers, asked: int = 0) -> Decision:
    """The decision between classes by some columns; it keeps those that it asks for."""
    tree = grow(np.stack([c[name] for name in names], axis=1), classes, asked)
    used = sorted(set(tree.feature[tree.feature != LEAF].tolist()))
    place = {each: number for number, each in enumerate(used)}
    feature = np.array([place.get(int(each), LEAF) for each in tree.feature], np.int64)
    kept = tuple(names[each] for each in used)
    return Decision(kept, Tree(feature, tree.threshold, tree.left, tree.right))


@dataclass(frozen=True)
class Pick:
    """What cuBLAS takes for a product, by a network."""

    net: Net

    def classes(self, c: Columns) -> Integers:
        """The class of each config, which has the sizes of its product."""
        return self.net.classes(product_features(c))


@dataclass(frozen=True)
class Choice:
    """A size of a grid that a library chooses: one of some values, by a tree."""

    sizes: tuple[int, ...]
    decision: Decision

    def values(self, c: Columns) -> Values:
        """The sizes for some configs."""
        return np.array(self.sizes, np.float64)[self.decision.classes(c)]


Size = Formula | Choice


@dataclass
class Calls:
    """Launches of many calls: for each, the config's place, its order, its kind and grid."""

    place: Integers
    order: Integers
    kind: Integers
    grid: Integers
    product: Integers

    @cached_property
    def blocks(self) -> Values:
        """How many blocks each launch has; 1 for what is no kernel."""
        blocks: Values = np.maximum(np.prod(self.grid, axis=1), 1).astype(np.float64)
        return blocks

    def sorted(self) -> Calls:
        by = np.lexsort((self.order, self.place))
        return Calls(
            *(each[by] for each in (self.place, self.order, self.kind, self.grid, self.product))
        )


@dataclass(frozen=True)
class Rules:
    """All that was learned of one backend. templates are the slots of a call; roles and kinds say
    what fills a slot; formulas are by (kind, family, product) and give x, y and z.
    """

    templates: tuple[tuple[Key, ...], ...]
    template: Decision
    parts: dict[Key, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    roles: dict[Key, Decision | Pick] = field(default_factory=dict)
    kinds: dict[tuple[Key, str], tuple[tuple[int, ...], Decision]] = field(default_factory=dict)
    formulas: dict[tuple[int, Key], tuple[Size, Size, Size]] = field(default_factory=dict)

    def calls(self, c: Columns) -> Calls:
        """The launches of each config."""
        chosen = self.template.classes(c)
        slots: dict[Key, list[tuple[Integers, int, int]]] = defaultdict(list)
        for template in np.unique(chosen):
            rows = np.flatnonzero(chosen == template)
            for number, key in enumerate(self.templates[template]):
                slots[pooled(key)].append((rows, number, product_of(key)))
        found: list[Calls] = []
        for key, users in slots.items():
            rows = np.concatenate([each for each, _, _ in users])
            order = np.concatenate([np.full(len(each), number) for each, number, _ in users])
            product = np.concatenate([np.full(len(each), number) for each, _, number in users])
            some = with_product(Part(c, rows), product)
            found += self._slot(key, rows, order * PARTS, product, some)
        return Calls(*(
            np.concatenate([getattr(each, name) for each in found])
            for name in ("place", "order", "kind", "grid", "product")
        )).sorted()  # fmt: skip

    def _slot(
        self, key: Key, rows: Integers, order: Integers, product: Integers, c: Columns
    ) -> list[Calls]:
        role, parts = self.roles[key], self.parts[key]
        classes = role.classes(c)
        found = []
        for number in np.unique(classes):
            inside = np.flatnonzero(classes == number)
            part = Part(c, inside)
            for place, name in enumerate(parts[number]):
                kinds, decision = self.kinds[key, name]
                indexes = np.array(kinds)[decision.classes(part)]
                grid = np.empty((len(inside), 3), np.int64)
                for kind in np.unique(indexes):
                    same = indexes == kind
                    those = Part(part, same)
                    formulas = self.formulas[int(kind), key]
                    grid[same] = np.stack([each.values(those) for each in formulas], axis=1)
                found.append(
                    Calls(rows[inside], order[inside] + place, indexes, grid, product[inside])
                )
        return found


# dP is a product like the scores, dQ one like the output; dK is one like dV, of other sizes.
SAME_PRODUCT = {3: 0, 5: 1}
SAME_LAYOUT = {4: 2}


def pooled(key: Key) -> Key:
    """The slot whose rules a slot has."""
    product = product_of(key)
    return key if product == NOTHING else (PRODUCT, MOST * SAME_LAYOUT.get(product, product))


def product_of(key: Key) -> int:
    """Which product of math a slot is; NOTHING for other kernels."""
    product = key[1] // MOST
    return SAME_PRODUCT.get(product, product) if key[0] == PRODUCT else NOTHING


def with_product(c: Columns, product: Integers) -> Columns:
    """The columns of configs, with the sizes of the product that a slot of them is, if any."""
    if len(product) and product[0] != NOTHING:
        sizes = product_sizes(c, product)
        c.update(sizes | tiled(sizes))
    return c
