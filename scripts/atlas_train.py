"""Fit the model of an atlas: decision trees and networks of scikit-learn, boosted trees of LightGBM.

pip install scikit-learn lightgbm    (the extra `train`)
python scripts/make_atlas.py package SHARDS [--products FILE]
"""

from __future__ import annotations

import json
import lzma
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lightgbm
import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier
from sklearn.tree import DecisionTreeClassifier

from profharness.atlas.data import NOTHING, NUMBERS, Atlas
from profharness.atlas.features import (
    TILES,
    Columns,
    Integers,
    Values,
    at,
    product_features,
    product_sizes,
    sizes,
    with_shapes,
)
from profharness.atlas.kernels import (
    COMPUTED,
    LEAF,
    MAX_SLOTS,
    PRODUCT,
    PRODUCT_WORKS,
    SAME_LAYOUT,
    WORKS,
    Boost,
    Calls,
    Choice,
    Curve,
    Formula,
    Key,
    Launched,
    Net,
    Rules,
    Size,
    Tree,
    columns,
    launch_columns,
    pooled,
    product_of,
    quantity,
    regimes_of,
    together,
    with_product,
)
from profharness.atlas.model import MODEL_VERSION, Model, Timing
from profharness.atlas.shards import DECODER_BYTES
from profharness.attention.config import SDPA_BACKENDS, Config
from profharness.errors import UsageError, printable_path
from profharness.files import RECORD_BYTES, read_input

GROUP = 10  # consecutive configs, among them pairs of neighbours, that are held out together
COVERED = 0.95  # the share of held-out calls inside an interval; 0.9 is documented
LEAST_CELLS = 40
MOSTLY = 0.8  # the share of the sizes from which a formula is kept
ENOUGH = 4  # distinct sizes from which a kernel's own formula is preferred
MAX_SIZES = 200  # the most sizes among which a tree selects
CAPPED = 0.02  # the share of cells from which a largest grid counts as a limit
KNOTS = 24
LEAST_FOR_KNOT = 6  # launches
FEW = 12  # launches of a kernel that are too few to select its work
LEAVES = 8
BOOSTING = {
    "objective": "regression",
    "num_leaves": LEAVES,
    "learning_rate": 0.15,
    "feature_fraction": 0.5,
    "min_data_in_leaf": 5,
    "max_bin": 255,
    "num_threads": 1,
    "seed": 0,
    "deterministic": True,
    "verbose": -1,
}
ROUNDS = 600
# Learning rates of Adam, and epochs with each.
SCHEDULE = ((0.002, 8), (0.001, 6), (0.0005, 6), (0.00025, 5), (0.0001, 4), (0.00004, 3))
CONFIGURATION = ("block_x", "block_y", "block_z", "registers", "shared_bytes")
PRODUCT_COLUMNS = ("m", "n", "k", "batch", "mn", "mnb")
SHAPES = ("product", "batch_heads", "seq_q", "seq_kv", "head_dim", "kernel")
MULTIPLIERS = ("1", "BH", "BKV", "FBH", "B", "H", "KV", "SPLITS")
# Kernels among which a library selects for one step. Every other kernel has a family of its own.
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
AFTER = "after product"
ANCHORS = (PRODUCT, "flash forward", "flash backward", "efficient forward", "efficient backward",
           "cudnn forward", "cudnn backward")  # fmt: skip
# Parts of kernel names that differ between fp16 and bf16.
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

FLAGS = ("F32", "BWD", "CAUSAL", "MASK", "D%8", "D%4", "G", "SPLIT", "ESPLIT", "SWAP", "MB", "MH", "MQ", "MK",
         "SK%8", "SK%4", "SQ", "SK", "D", "B", "H", "BH", "S", "Q", "K", "M", "SQ=SK", "KV", "SQ%4",
         "SQ%32", "SK%32", "SK%64", "SQ%64", "SK%128", "BKV", "CSPLITS", "SPIECES", "KPIECES", "KXPIECES")  # fmt: skip

# The features of decisions.
OF_KERNELS = (*FLAGS, "SPLITS", "LOGSPLITS", "EVEN", "EVENSPLIT", "D8", "D%32", "SQSK", "FSQ", "FBH", "FN", "FBLOCKS",
              "SQ%8", "SK%256", "SQ%128", "ROWS", "KROWS", "KX", "BLOCKS64", "BLOCKS128", "KBLOCKS64",
              "KBLOCKS128")  # fmt: skip
OF_CONFIGURATIONS = ("DT", *OF_KERNELS)


QUANTITIES = (
    "BH", "CPARTS", "SQ", "SK", "FSQ", "KP", "KXP", "SP", "Q", "K", "M", "ROWS", "KROWS", "SQSK", "D", "B", "H", "KV",
    "BKV", "FH", "SPLITS", "KEYSPLITS", "DQBLOCKS", "HEADBLOCKS", "DELTABLOCKS", "BH*SQ*D8",
    "BKV*SK*D8", "BH*SK*D8", "FBH*FSQ", "M8", "PADDED", "CLEARED", "BLOCKS64", "BLOCKS128",
    "KBLOCKS64", "KBLOCKS128", "SQ*SK8", "SQ*D", "SK*D", "SQ*H", "SK*H", "B*SQ", "B*SK", "SQ*D8",
    "SK*D8", "H*SQ*SK", "B*SQ*SK", "D8", "H*SQ*D", "KV*SK*D", "B*SQ*D8", "BKV*SK",
)  # fmt: skip

TILED = tuple(
    f"{axis}{rows}x{width}" for axis in "XYT" for rows, width in TILES
)  # of products, used without a step


def neutral(name: str) -> str:
    """Return a kernel's name without the parts that distinguish fp16 and bf16."""
    for pattern, text in SAME:
        name = pattern.sub(text, name)
    return name


def family(name: str) -> str:
    """Return the family of a kernel."""
    return next((each for each, pattern in FAMILIES if pattern.search(name)), neutral(name))


def slots_of(families: Sequence[str]) -> tuple[tuple[Key, tuple[int, ...]], ...]:
    """Return the slots of a call, each with the places of its kernels."""
    slots: list[tuple[Key, tuple[int, ...]]] = []
    anchors, counts = 0, defaultdict[str, int](int)
    for place, group in enumerate(families):
        if group == AFTER and slots and slots[-1][0][0] == PRODUCT:
            key, places = slots[-1]
            slots[-1] = (key, (*places, place))
            continue
        slots.append(((group, anchors * MAX_SLOTS + counts[group]), (place,)))
        counts[group] += 1
        if group in ANCHORS:
            anchors, counts = anchors + 1, defaultdict(int)
    return tuple(slots)


def rules_of(atlas: Atlas, rows: Integers, c: Columns, products: Products | None = None) -> Rules:
    """Learn the rules of one backend from some of its cells and their columns."""
    table = _Slots(atlas)
    templates: dict[tuple[Key, ...], int] = {}
    chosen = np.empty(len(rows), np.int64)
    users: dict[Key, list[_Use]] = defaultdict(list)
    for place, sequence in enumerate(atlas.columns["sequence"][rows].tolist()):
        first = int(atlas.starts[sequence])
        slots = table.slots(sequence)
        chosen[place] = templates.setdefault(tuple(key for key, _ in slots), len(templates))
        for key, places in slots:
            launches = tuple(first + each for each in places)
            kinds = tuple(table.kind[each] for each in launches)
            users[pooled(key)].append(_Use(place, product_of(key), kinds, launches))
    rules = Rules(tuple(templates), fit_tree(c, FLAGS, chosen), {}, {}, {}, {})
    jobs: list[_Job] = []
    for key, uses in users.items():
        own = with_product(
            at(c, np.array([use.place for use in uses])), np.array([use.product for use in uses])
        )
        names = table.labels if product_of(key) != NOTHING else table.names
        known: dict[tuple[str, ...], int] = {}
        classes = np.array(
            [known.setdefault(tuple(names[kind] for kind in use.kinds), len(known)) for use in uses]
        )
        rules.parts[key] = tuple(known)
        if product_of(key) == NOTHING or products is None:
            features = OF_KERNELS if product_of(key) == NOTHING else (*OF_KERNELS, *PRODUCT_COLUMNS)
            rules.roles[key] = fit_tree(own, features, classes)
        else:
            rules.roles[key] = _product_role(product_of(key), own, classes, known, products)
        jobs += _configurations(rules, names, table.grids, key, uses, own)
    siblings: dict[tuple[str, int], Counter[Formula]] = defaultdict(Counter)
    for job in sorted(jobs, key=lambda job: -len(job.grids)):
        x, y, z = (
            size_of(job.c, job.grids[:, axis], siblings[job.key[0], axis]) for axis in range(3)
        )
        rules.formulas[job.kind, job.key] = (x, y, z)
    return rules


class _Use(NamedTuple):
    """A slot of a call."""

    place: int
    product: int
    kinds: tuple[int, ...]
    launches: tuple[int, ...]


class _Job(NamedTuple):
    """The grids of a kind in a slot, for which formulas are needed, and the columns of their calls."""

    kind: int
    key: Key
    c: Columns
    grids: Integers


@dataclass(frozen=True)
class Products:
    """The kernels that cuBLAS selected for batched products outside of the atlas."""

    names: tuple[tuple[str, ...], ...]
    shapes: Integers  # products x SHAPES; the last column is an index into names


def read_products(path: Path) -> Products:
    """Read a file of products. Raise UsageError for any other file."""
    try:
        packed = lzma.LZMADecompressor(memlimit=DECODER_BYTES)
        record = json.loads(packed.decompress(read_input(path), max_length=RECORD_BYTES))
        columns = [record["columns"][name] for name in SHAPES]
        names = tuple(
            tuple(label(neutral(name), *others) for name, *others in each)
            for each in record["kernels"]
        )
    except (OSError, lzma.LZMAError, ValueError, KeyError, TypeError):
        text = f"{printable_path(path)}: not a file of products; give one such as traces/cublas-h200.json.xz"
        raise UsageError(text) from None
    return Products(names, np.array(columns, np.int64).T)


def label(name: str, block: Sequence[int], registers: int, shared_bytes: int) -> str:
    """Return a kernel's name with its launch configuration."""
    return " ".join(map(str, (name, *block, registers, shared_bytes)))


def _product_role(
    product: int,
    own: Columns,
    classes: Integers,
    known: dict[tuple[str, ...], int],
    more: Products,
) -> Net:
    """Learn the kernels of a product's slot from the atlas and from further products."""
    tables, all_classes = [product_features(own)], [classes]
    code = np.array([known.get(each, NOTHING) for each in more.names])
    for each in (product, *(other for other, same in SAME_LAYOUT.items() if same == product)):
        some = more.shapes[more.shapes[:, 0] == each]
        some = some[code[some[:, 5]] != NOTHING]
        columns = dict(zip(("BH", "SQ", "SK", "D"), some[:, 1:5].T.astype(np.float64), strict=True))
        tables.append(product_features(product_sizes(columns, each)))
        all_classes.append(code[some[:, 5]])
    return fit_net(np.concatenate(tables), np.concatenate(all_classes))


def _configurations(
    rules: Rules,
    names: Sequence[str],
    grids: Integers,
    key: Key,
    uses: Sequence[_Use],
    c: Columns,
) -> list[_Job]:
    """Learn the launch configurations of a slot's kernels. Return the jobs for their grids."""
    jobs: list[_Job] = []
    by_name: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for number, use in enumerate(uses):
        for kind, launch in zip(use.kinds, use.launches, strict=True):
            by_name[names[kind]].append((number, kind, launch))
    for name, each in by_name.items():
        places, kinds, launches = np.array(each).T
        known, classes = np.unique(kinds, return_inverse=True)
        some = at(c, places)
        rules.kinds[key, name] = (tuple(known.tolist()), fit_tree(some, OF_CONFIGURATIONS, classes))
        for number, kind in enumerate(known.tolist()):
            same = classes == number
            jobs.append(_Job(kind, key, at(some, same), grids[launches[same]]))
    return jobs


def size_of(c: Columns, sizes: Integers, siblings: Counter[Formula]) -> Size:
    """Return a formula for a size: one of similar kernels, even if it misses some cells, else the
    simplest. If no formula gives most sizes, and they are few, return a tree.
    """
    best, share = Formula("1", 1.0, "1"), 0.0
    for formula, _ in siblings.most_common():
        if not _known(c, formula.quantity):
            continue
        right = float((formula.values(c) == sizes).mean())
        if right > share:
            best, share = formula, right
        if right == 1:
            break
    known, classes = np.unique(sizes, return_inverse=True)
    if share < 1:
        formula, right = solve(c, sizes)
        is_own = right == 1 and (len(known) >= ENOUGH or share < MOSTLY)
        if is_own or right > max(share, MOSTLY):
            best, share = formula, right
    if share == 1:
        siblings[best] += len(sizes)
    if share > MOSTLY or len(known) > MAX_SIZES:
        return best
    features = [name for name in OF_KERNELS if name in c]
    return Choice(tuple(known.tolist()), fit_tree(c, features, classes))


class _Slots:
    """The launch kinds of an atlas, and the slots of its distinct sequences."""

    def __init__(self, atlas: Atlas) -> None:
        self.atlas = atlas
        texts = atlas.tables["kernels"]
        kernels = atlas.columns["kernel"].tolist()
        self.names = [neutral(texts[kernel]) for kernel in kernels]
        self.families = [family(texts[kernel]) for kernel in kernels]
        configurations = [atlas.columns[name].tolist() for name in CONFIGURATION]
        self.labels = [
            label(name, (x, y, z), registers, shared)
            for name, x, y, z, registers, shared in zip(self.names, *configurations, strict=True)
        ]
        # kinds that differ only by a computed size count as one
        alike: dict[str, int] = {}
        same = [
            alike.setdefault(label(name, (x, y, z), registers, 0), kind)
            if COMPUTED.search(name)
            else kind
            for kind, (name, x, y, z, registers, _) in enumerate(
                zip(self.names, *configurations, strict=True)
            )
        ]
        self.kind = [same[kind] for kind in atlas.columns["kind"].tolist()]
        self.grids = np.stack([atlas.columns[f"grid_{axis}"] for axis in "xyz"], axis=1)
        self._known: dict[int, tuple[tuple[Key, tuple[int, ...]], ...]] = {}

    def slots(self, sequence: int) -> tuple[tuple[Key, tuple[int, ...]], ...]:
        if sequence not in self._known:
            first, last = self.atlas.starts[sequence : sequence + 2].tolist()
            self._known[sequence] = slots_of(
                [self.families[kind] for kind in self.kind[first:last]]
            )
        return self._known[sequence]


def launched(atlas: Atlas, rows: Integers, slots: _Slots) -> tuple[Calls, Values]:
    """Return the measured launches of some cells and their microseconds."""
    place, order, kinds, grids, products, us = [], [], [], [], [], []
    times, time_ns, column = atlas.time_starts, atlas.columns["time_ns"], atlas.columns["kind"]
    for number, row in enumerate(rows.tolist()):
        sequence = int(atlas.columns["sequence"][row])
        first, last = atlas.starts[sequence : sequence + 2].tolist()
        product = np.full(last - first, NOTHING)
        for key, places in slots.slots(sequence):
            if product_of(key) != NOTHING:
                product[list(places)] = product_of(key)
        place.append(np.full(last - first, number))
        order.append(np.arange(last - first))
        kinds.append(column[first:last])
        grids.append(slots.grids[first:last])
        products.append(product)
        us.append(time_ns[times[row] : times[row] + last - first] / 1e3)
    parts = (place, order, kinds, grids, products)
    return Calls(*(np.concatenate(each) for each in parts)), np.concatenate(us)


def codes_of(atlas: Atlas, slots: _Slots) -> Integers:
    """Return the curve of each kind. Kernels that differ by fp16, bf16 or registers share one."""
    known: dict[tuple[str, int, int], int] = {}
    shared = atlas.columns["shared_bytes"].tolist()
    block = atlas.columns["block_x"].tolist()
    return np.array(
        [
            known.setdefault(
                (name, block[kind], shared[kind] if "cudnn_generated" in name else 0), len(known)
            )
            for kind, name in enumerate(slots.names)
        ]
    )


def curves_of(
    calls: Calls, us: Values, c: Columns, codes: Integers
) -> dict[tuple[int, int], Curve]:
    """Fit the curves of all kernels of a backend."""
    curves = {}
    code = codes[calls.kind]
    for key in sorted(set(zip(code.tolist(), calls.product.tolist(), strict=True))):
        same = np.flatnonzero((code == key[0]) & (calls.product == key[1]))
        own = launch_columns(c, calls, same, key[1])
        table = PRODUCT_WORKS if key[1] >= 0 else WORKS
        works = {name: work(own) for name, work in table.items()}
        curves[key] = curve_of(works, us[same])
    return curves


def fit_model(atlas: Atlas, products: Products | None = None) -> Model:
    """Fit the model of an atlas."""
    slots = _Slots(atlas)
    codes = codes_of(atlas, slots)
    rules: dict[str, Rules] = {}
    curves: dict[str, dict[tuple[int, int], Curve]] = {}
    timings: dict[tuple[str, int], Timing] = {}
    usable = atlas.columns["sequence"] != NOTHING
    for backend in SDPA_BACKENDS:
        if backend not in atlas.tables["choices"]:
            continue
        rows = np.flatnonzero(
            usable & (atlas.columns["choice"] == atlas.tables["choices"].index(backend))
        )
        configs = [atlas.config(row) for row in rows.tolist()]
        c = with_shapes(sizes(configs))
        first = np.unique(rows_of(configs), return_index=True)[1]
        rules[backend] = rules_of(
            atlas, rows[first], at(c, first), products if backend == "math" else None
        )
        calls, us = launched(atlas, rows, slots)
        curves[backend] = curves_of(calls, us, c, codes)
        whole = together(calls, c, codes, curves[backend])
        for direction in (0, 1):
            inside = np.flatnonzero(c["BWD"] == direction)
            if len(inside) > LEAST_CELLS:
                timings[backend, direction] = _timing(
                    at(c, inside), whole.at(inside), rows_of(configs)[inside], atlas, rows[inside]
                )
    table = np.stack([atlas.columns[name] for name in ("kernel", *CONFIGURATION)], axis=1)
    names = tuple(atlas.tables["kernels"])
    bounds = bounds_of(atlas)
    machine = atlas.machine.name
    return Model(MODEL_VERSION, machine, names, table, codes, rules, curves, timings, bounds)


def rows_of(configs: Sequence[Config]) -> Integers:
    """Return the number of each config in the order of first use."""
    known: dict[Config, int] = {}
    return np.array([known.setdefault(config, len(known)) for config in configs])


def _timing(c: Columns, whole: Launched, config: Integers, atlas: Atlas, rows: Integers) -> Timing:
    """Fit the trees of one backend and direction. The errors are those of a fit without a fifth of the
    configs, in groups of neighbours.
    """
    us = atlas.columns["kernel_ns"][rows] / 1e3
    table, target = columns(c, whole), np.log(us / whole.us)
    apart = config // GROUP % 5 == 0
    trial = fit_boost(table[:, ~apart], target[~apart])
    guess = trial.sums(table[:, apart])
    off = np.abs(np.exp(guess - target[apart]) - 1)
    regimes = regimes_of(at(c, np.flatnonzero(apart)), np.exp(guess) * whole.us[apart])
    errors = {"": float(np.quantile(off, COVERED))}
    for regime in sorted(set(regimes)):
        same = np.array([each == regime for each in regimes])
        if same.sum() >= LEAST_CELLS:
            errors[regime] = float(np.quantile(off[same], COVERED))
    timed = atlas.columns["graph_ns"][rows] / 1e3
    graph = {}
    known = timed > 0
    size = np.array([each.split()[1] for each in regimes_of(c, us)])
    for each in ("tiny", "short", "long"):
        same = known & (size == each)
        if same.any():
            graph[each] = float(np.median(timed[same] / us[same]))
    return Timing(fit_boost(table, target), errors, graph)


def bounds_of(atlas: Atlas) -> dict[str, float]:
    """Return the bounds of the sampled configs, and the longest call of each backend."""
    ran = atlas.columns["sequence"] != NOTHING
    bounds = {name: float(atlas.columns[name][ran].max()) for name in NUMBERS}
    bounds |= {f"least {name}": float(atlas.columns[name][ran].min()) for name in NUMBERS}
    for code, choice in enumerate(atlas.tables["choices"]):
        same = ran & (atlas.columns["choice"] == code)
        if same.any():
            bounds[f"{choice} us"] = float(atlas.columns["kernel_ns"][same].max()) / 1e3
            scores = atlas.columns["batch"] * atlas.columns["num_heads"]
            scores = scores * atlas.columns["seq_len_q"] * atlas.columns["seq_len_kv"]
            bounds[f"{choice} scores"] = float(scores[same].max())
    return bounds


def solve(c: Columns, sizes: Values) -> tuple[Formula, float]:
    """Return the simplest formula that gives all sizes, or the one that gives most, with its share."""
    if (sizes == sizes[0]).all():
        return Formula("1", 1 / float(sizes[0]), "1"), 1.0
    best, share = Formula("1", 1 / float(np.median(sizes)), "1"), 0.0
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
                # a limit explains some cells of any kernel, so require that it explains more than a few
                if right > share + (CAPPED if limit and right < 1 else 0):
                    best, share = formula, right
                if right == 1.0:
                    return best, share
    return best, share


def _known(c: Columns, name: str) -> bool:
    return name in c or all(part in c for part in name.split("*") if part != "1")


def _fit(
    c: Columns, name: str, multiplier: str, limit: int, ratio: Values, free: Values
) -> Formula | None:
    """Return the formula whose ceil(quantity / step) is the ratio in cells below the limit."""
    value = quantity(c, name)
    lower = (value / np.maximum(ratio, 1))[free]
    upper = np.where(ratio > 1, value / np.maximum(ratio - 1, 1e-9), np.inf)[free]
    low, high = lower.max(), upper.min()
    if name in TILED:
        return Formula(name, 1.0, multiplier, limit) if low <= 1 < high else None
    if low >= high:  # the step of most cells may still exist
        low, high = np.quantile(lower, 0.9), np.quantile(np.minimum(upper, 1e18), 0.1)
        if low >= high:
            return None
    return Formula(name, _step(float(low), float(min(high, low * 2 + 1))), multiplier, limit)


def _step(low: float, high: float) -> float:
    """Return the roundest number in [low, high)."""
    first, last, step = int(np.ceil(low - 1e-9)), int(np.ceil(high - 1e-9)) - 1, 1
    if first > last:
        return (low + high) / 2 if low < high else low
    while (last // (2 * step)) * 2 * step >= first and 2 * step <= max(last, 1):
        step *= 2
    return float(last // step * step)


def curve_of(works: dict[str, Values], us: Values) -> Curve:
    """Fit a curve over the work that these times depend on most."""
    y = np.log2(np.maximum(us, 0.1))
    best, found = np.inf, Curve("blocks", np.zeros(1), np.array([np.median(y)]))
    for name, work in works.items():
        x = np.log2(np.maximum(work, 1e-9))
        curve = _through(name, x, y)
        missed = float(np.mean(np.minimum(np.abs(np.log2(curve.us(work)) - y), 1)))
        missed += 1e-4 * len(curve.x)  # fewer knots are better
        if missed < best:
            best, found = missed, curve
        if len(us) < FEW:
            break
    return found


def _through(name: str, x: Values, y: Values) -> Curve:
    order = np.argsort(x, kind="stable")
    count = int(np.clip(len(x) // LEAST_FOR_KNOT, 1, KNOTS))
    parts = np.array_split(order, count)
    at = np.array([np.median(x[part]) for part in parts])
    value = np.array([np.median(y[part]) for part in parts])
    keep = np.concatenate([[True], np.diff(at) > 1e-6])
    at, value = at[keep], value[keep]
    return Curve(name, at, np.maximum.accumulate(value))


def fit_tree(c: Columns, names: Sequence[str], classes: Integers) -> Tree:
    """Fit a tree that separates all rows by class as far as the features allow.

    Thresholds are the roundest numbers that separate the rows, as limits in programs are.
    """
    table = np.stack([c[name] for name in names], axis=1)
    fitted = DecisionTreeClassifier(random_state=0).fit(table, classes).tree_
    feature = np.where(fitted.children_left < 0, LEAF, fitted.feature)
    known = np.unique(classes)
    leaves = known[fitted.value[:, 0].argmax(axis=1)]
    left = np.where(feature == LEAF, leaves, fitted.children_left)
    right = np.where(feature == LEAF, 0, fitted.children_right)
    threshold = np.zeros(len(feature))
    rows = {0: np.arange(len(table))}
    for node in np.flatnonzero(feature != LEAF).tolist():
        inside = rows.pop(node)
        values = table[inside, feature[node]]
        lower = values.astype(np.float32) <= fitted.threshold[node]
        threshold[node] = roundest(float(values[lower].max()), float(values[~lower].min()))
        rows[int(left[node])], rows[int(right[node])] = inside[lower], inside[~lower]
    used = sorted(set(feature[feature != LEAF].tolist()))
    place = {number: at for at, number in enumerate(used)}
    feature = np.array([place.get(number, LEAF) for number in feature.tolist()], np.int64)
    return Tree(tuple(names[number] for number in used), feature, threshold, left, right)


def roundest(low: float, high: float) -> float:
    """Return a threshold in [low, high): for integers the multiple of the largest power of two."""
    if low != int(low) or high != int(high) or high - low < 1:
        middle = (low + high) / 2
        return middle if middle < high else low
    return _step(low, high)


def fit_boost(table: Values, target: Values) -> Boost:
    """Fit boosted trees to a table that has features as rows."""
    data = lightgbm.Dataset(table.T.astype(np.float32), target)
    trees = lightgbm.train(BOOSTING, data, ROUNDS).dump_model()["tree_info"]
    nodes = LEAVES - 1
    feature = np.zeros((len(trees), nodes), np.int64)
    threshold = np.full((len(trees), nodes), np.inf, np.float32)
    values = np.empty((len(trees), 1 << nodes), np.float32)
    above = np.arange(1 << nodes)[:, None] >> np.arange(nodes) & 1

    def place(node: dict[str, Any], rows: Integers, tree: int) -> None:
        if "leaf_value" in node:
            values[tree, rows] = node["leaf_value"]
            return
        number = node["split_index"]
        feature[tree, number], threshold[tree, number] = node["split_feature"], node["threshold"]
        is_above = above[rows, number] > 0
        place(node["left_child"], rows[~is_above], tree)
        place(node["right_child"], rows[is_above], tree)

    for number, tree in enumerate(trees):
        place(tree["tree_structure"], np.arange(1 << nodes), number)
    return Boost(feature, threshold, values)


def fit_net(table: Values, classes: Integers) -> Net:
    """Fit a network by cross-entropy, with learning rates that fall in steps."""
    shift = table.mean(axis=0).astype(np.float32)
    scale = (1 / (table.std(axis=0) + 1e-3)).astype(np.float32)
    scaled = ((table - shift) * scale).astype(np.float32)
    net = MLPClassifier(
        (256, 256), batch_size=1024, alpha=1e-5, tol=0, warm_start=True, random_state=0
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the number of epochs is fixed
        for rate, epochs in SCHEDULE:
            net.set_params(learning_rate_init=rate, max_iter=epochs, n_iter_no_change=epochs)
            net.fit(scaled, classes)
    layers = tuple(
        np.vstack([weights, bias]).astype(np.float16)
        for weights, bias in zip(net.coefs_, net.intercepts_, strict=True)
    )
    return Net(shift, scale, layers)
