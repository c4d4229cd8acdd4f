"""Learns the model of an atlas from its cells."""

from __future__ import annotations

import json
import lzma
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from profharness.answers.atlas.boost import Schedule, boost
from profharness.answers.atlas.data import NOTHING, NUMBERS, Atlas
from profharness.answers.atlas.features import (
    Columns,
    at,
    product_features,
    product_sizes,
    sizes,
    with_shapes,
)
from profharness.answers.atlas.kernels import (
    AFTER,
    ANCHORS,
    COMPUTED,
    FLAGS,
    MOST,
    PRODUCT,
    SAME_LAYOUT,
    Calls,
    Choice,
    Formula,
    Key,
    Pick,
    Rules,
    Size,
    decide,
    family,
    neutral,
    pooled,
    product_of,
    solve,
    with_product,
)
from profharness.answers.atlas.nets import fitted
from profharness.answers.atlas.packed import DECODER_BYTES
from profharness.answers.atlas.stored import Model, Timing
from profharness.answers.atlas.times import (
    Curve,
    Launched,
    columns,
    curve_of,
    launch_columns,
    regimes_of,
    together,
    works_of,
)
from profharness.answers.atlas.trees import Integers, Values
from profharness.config import SDPA_BACKENDS, Config
from profharness.errors import UsageError, shown
from profharness.files import RECORD_BYTES, read_input

GROUP = (
    10  # configs that follow each other, among them pairs of neighbours, are kept apart together
)
KEPT = 0.95  # the share of calls kept apart that an error holds for; 0.9 is promised
LEAST_CELLS = 40
SCHEDULE = Schedule(trees=400, rate=0.1)
MOSTLY = 0.8  # a formula that gives this share of the sizes stays
ENOUGH = 4  # sizes that a formula must give to count more than what like kernels have
CONFIGURATION = ("block_x", "block_y", "block_z", "registers", "shared_bytes")
SIZES = ("m", "n", "k", "batch", "mn", "mnb")  # of a product
SHAPES = ("product", "batch_heads", "seq_q", "seq_kv", "head_dim", "kernel")
MOST_SIZES = 200  # that a tree decides between
# Decisions ask for these columns.
OF_KERNELS = (*FLAGS, "SPLITS", "LOGSPLITS", "EVEN", "EVENSPLIT", "D8", "D%32", "SQSK", "FSQ", "FBH", "FN", "FBLOCKS",
              "SQ%8", "SK%256", "SQ%128", "ROWS", "KROWS", "KX", "BLOCKS64", "BLOCKS128", "KBLOCKS64",
              "KBLOCKS128")  # fmt: skip
OF_CONFIGURATIONS = ("DT", *OF_KERNELS)


def slots_of(families: Sequence[str]) -> tuple[tuple[Key, tuple[int, ...]], ...]:
    """The slots of a call's kernels, each with the places of the kernels that fill it."""
    slots: list[tuple[Key, tuple[int, ...]]] = []
    anchors, counts = 0, defaultdict[str, int](int)
    for place, group in enumerate(families):
        if group == AFTER and slots and slots[-1][0][0] == PRODUCT:
            key, places = slots[-1]
            slots[-1] = (key, (*places, place))
            continue
        slots.append(((group, anchors * MOST + counts[group]), (place,)))
        counts[group] += 1
        if group in ANCHORS:
            anchors, counts = anchors + 1, defaultdict(int)
    return tuple(slots)


def rules_of(atlas: Atlas, rows: Integers, c: Columns, products: Products | None = None) -> Rules:
    """The rules of one backend, from some of its cells; c has the columns of those."""
    table = _Slots(atlas)
    templates: dict[tuple[Key, ...], int] = {}
    chosen = np.empty(len(rows), np.int64)
    users: dict[Key, list[_Use]] = defaultdict(list)
    for place, sequence in enumerate(atlas.column("sequence")[rows].tolist()):
        first = int(atlas.starts[sequence])
        slots = table.slots(sequence)
        chosen[place] = templates.setdefault(tuple(key for key, _ in slots), len(templates))
        for key, places in slots:
            launches = tuple(first + each for each in places)
            kinds = tuple(table.kind[each] for each in launches)
            users[pooled(key)].append(_Use(place, product_of(key), kinds, launches))
    rules = Rules(tuple(templates), decide(c, FLAGS, chosen))
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
            asked = OF_KERNELS if product_of(key) == NOTHING else (*OF_KERNELS, *SIZES)
            rules.roles[key] = decide(own, asked, classes)
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
    """A slot of a call: its place, its product, and the kinds and launches that fill it."""

    place: int
    product: int
    kinds: tuple[int, ...]
    launches: tuple[int, ...]


class _Job(NamedTuple):
    """The grids of a kind in a slot, which formulas are to be found for, and the columns of their calls."""

    kind: int
    key: Key
    c: Columns
    grids: Integers


@dataclass(frozen=True)
class Products:
    """Which kernels cuBLAS took for products besides the atlas's cells. shapes has a row for each:
    the product, batch times heads, queries, keys, head_dim and the place of its kernels in names.
    """

    names: tuple[tuple[str, ...], ...]
    shapes: Integers


def read_products(path: Path) -> Products:
    """The products of a file. Raises UsageError where it is none."""
    try:
        packed = lzma.LZMADecompressor(memlimit=DECODER_BYTES)
        record = json.loads(packed.decompress(read_input(path), max_length=RECORD_BYTES))
        columns = [record["columns"][name] for name in SHAPES]
        names = tuple(
            tuple(label(neutral(name), *others) for name, *others in each)
            for each in record["kernels"]
        )
    except (OSError, lzma.LZMAError, ValueError, KeyError, TypeError):
        text = f"{shown(path)}: not a file of products; give one such as traces/cublas-h200.json.xz"
        raise UsageError(text) from None
    return Products(names, np.array(columns, np.int64).T)


def label(name: str, block: Sequence[int], registers: int, shared_bytes: int) -> str:
    """A kernel's name with its launch configuration."""
    return " ".join(map(str, (name, *block, registers, shared_bytes)))


def _product_role(
    product: int,
    own: Columns,
    classes: Integers,
    known: dict[tuple[str, ...], int],
    more: Products,
) -> Pick:
    """What fills a product's slot: learned from the atlas and from further products."""
    tables, all_classes = [product_features(own)], [classes]
    code = np.array([known.get(each, NOTHING) for each in more.names])
    for each in (product, *(other for other, same in SAME_LAYOUT.items() if same == product)):
        some = more.shapes[more.shapes[:, 0] == each]
        some = some[code[some[:, 5]] != NOTHING]
        columns = dict(zip(("BH", "SQ", "SK", "D"), some[:, 1:5].T.astype(np.float64), strict=True))
        tables.append(product_features(product_sizes(columns, each)))
        all_classes.append(code[some[:, 5]])
    return Pick(fitted(np.concatenate(tables), np.concatenate(all_classes)))


def _configurations(
    rules: Rules,
    names: Sequence[str],
    grids: Integers,
    key: Key,
    uses: Sequence[_Use],
    c: Columns,
) -> list[_Job]:
    """Learn the launch configurations of the kernels that fill a slot; the grids are left to do."""
    jobs: list[_Job] = []
    by_name: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for number, use in enumerate(uses):
        for kind, launch in zip(use.kinds, use.launches, strict=True):
            by_name[names[kind]].append((number, kind, launch))
    for name, each in by_name.items():
        places, kinds, launches = np.array(each).T
        known, classes = np.unique(kinds, return_inverse=True)
        some = at(c, places)
        rules.kinds[key, name] = (tuple(known.tolist()), decide(some, OF_CONFIGURATIONS, classes))
        for number, kind in enumerate(known.tolist()):
            same = classes == number
            jobs.append(_Job(kind, key, at(some, same), grids[launches[same]]))
    return jobs


def size_of(c: Columns, sizes: Integers, siblings: Counter[Formula]) -> Size:
    """The formula of a size: one that like kernels have, even where it misses some cells, else the
    simplest. Where none gives most, and the sizes are few, a tree decides.
    """
    best, share = Formula("1", 1.0, "1"), 0.0
    for formula, _ in siblings.most_common():
        right = float((formula.values(c) == sizes).mean()) if formula.fits(c) else 0.0
        if right > share:
            best, share = formula, right
        if right == 1:
            break
    known, classes = np.unique(sizes, return_inverse=True)
    if share < 1:
        formula = solve(c, sizes)
        if (formula.right == 1 and (len(known) >= ENOUGH or share < MOSTLY)) or formula.right > max(
            share, MOSTLY
        ):
            best, share = formula._replace(right=1.0), formula.right
    if share == 1:
        siblings[best] += len(sizes)
    if share > MOSTLY or len(known) > MOST_SIZES:
        return best
    asked = [name for name in OF_KERNELS if name in c]
    return Choice(tuple(known.tolist()), decide(c, asked, classes))


class _Slots:
    """The launches of an atlas, and the slots of its distinct sequences."""

    def __init__(self, atlas: Atlas) -> None:
        self.atlas = atlas
        texts = atlas.tables["kernels"]
        kernels = atlas.column("kernel").tolist()
        self.names = [neutral(texts[kernel]) for kernel in kernels]
        self.families = [family(texts[kernel]) for kernel in kernels]
        configurations = [atlas.column(name).tolist() for name in CONFIGURATION]
        self.labels = [
            label(name, (x, y, z), registers, shared)
            for name, x, y, z, registers, shared in zip(self.names, *configurations, strict=True)
        ]
        # kinds that differ by a computed size alone count as one
        alike: dict[str, int] = {}
        same = [
            alike.setdefault(label(name, (x, y, z), registers, 0), kind)
            if COMPUTED.search(name)
            else kind
            for kind, (name, x, y, z, registers, _) in enumerate(
                zip(self.names, *configurations, strict=True)
            )
        ]
        self.kind = [same[kind] for kind in atlas.column("kind").tolist()]
        self.grids = np.stack([atlas.column(f"grid_{axis}") for axis in "xyz"], axis=1)
        self._known: dict[int, tuple[tuple[Key, tuple[int, ...]], ...]] = {}

    def slots(self, sequence: int) -> tuple[tuple[Key, tuple[int, ...]], ...]:
        if sequence not in self._known:
            first, last = self.atlas.starts[sequence : sequence + 2].tolist()
            self._known[sequence] = slots_of(
                [self.families[kind] for kind in self.kind[first:last]]
            )
        return self._known[sequence]


def launched(atlas: Atlas, rows: Integers, slots: _Slots) -> tuple[Calls, Values]:
    """The launches of some cells as they were measured, and their microseconds."""
    place, order, kinds, grids, products, us = [], [], [], [], [], []
    times, time_ns, column = atlas.time_starts, atlas.column("time_ns"), atlas.column("kind")
    for number, row in enumerate(rows.tolist()):
        sequence = int(atlas.column("sequence")[row])
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
    """Of each kind which curve it has: kernels alike but for fp16 or bf16 and registers share one."""
    known: dict[tuple[str, int, int], int] = {}
    shared = atlas.column("shared_bytes").tolist()
    block = atlas.column("block_x").tolist()
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
    """The curves of all kernels of a backend."""
    curves = {}
    code = codes[calls.kind]
    for key in sorted(set(zip(code.tolist(), calls.product.tolist(), strict=True))):
        same = np.flatnonzero((code == key[0]) & (calls.product == key[1]))
        works = works_of(launch_columns(c, calls, same, key[1]), key[1])
        curves[key] = curve_of(works, us[same])
    return curves


def model_of(atlas: Atlas, products: Products | None = None) -> Model:
    """The model of an atlas. A tenth of its configs, in groups of neighbours, are kept apart for the
    errors; the trees are then grown again from all.
    """
    slots = _Slots(atlas)
    codes = codes_of(atlas, slots)
    rules: dict[str, Rules] = {}
    curves: dict[str, dict[tuple[int, int], Curve]] = {}
    timings: dict[tuple[str, int], Timing] = {}
    usable = atlas.column("sequence") != NOTHING
    for backend in SDPA_BACKENDS:
        if backend not in atlas.tables["choices"]:
            continue
        rows = np.flatnonzero(
            usable & (atlas.column("choice") == atlas.tables["choices"].index(backend))
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
    table = np.stack([atlas.column(name) for name in ("kernel", *CONFIGURATION)], axis=1)
    names = tuple(atlas.tables["kernels"])
    return Model(atlas.machine.name, names, table, codes, rules, curves, timings, bounds_of(atlas))


def rows_of(configs: Sequence[Config]) -> Integers:
    """The number of each config, in the order in which they come first."""
    known: dict[Config, int] = {}
    return np.array([known.setdefault(config, len(known)) for config in configs])


def _timing(c: Columns, whole: Launched, config: Integers, atlas: Atlas, rows: Integers) -> Timing:
    """Trees for one backend and direction, and how far off they are where they were not fitted."""
    us = atlas.column("kernel_ns")[rows] / 1e3
    table, target = columns(c, whole), np.log(us / whole.us)
    apart = config // GROUP % 5 == 0
    trial = boost(table[:, ~apart], target[~apart], SCHEDULE)
    guess = trial.sums(table[:, apart])
    off = np.abs(np.exp(guess - target[apart]) - 1)
    regimes = regimes_of(at(c, np.flatnonzero(apart)), np.exp(guess) * whole.us[apart])
    errors = {"": float(np.quantile(off, KEPT))}
    for regime in sorted(set(regimes)):
        same = np.array([each == regime for each in regimes])
        if same.sum() >= LEAST_CELLS:
            errors[regime] = float(np.quantile(off[same], KEPT))
    timed = atlas.column("graph_ns")[rows] / 1e3
    graph = {}
    known = timed > 0
    size = np.array([each.split()[1] for each in regimes_of(c, us)])
    for each in ("tiny", "short", "long"):
        same = known & (size == each)
        if same.any():
            graph[each] = float(np.median(timed[same] / us[same]))
    return Timing(boost(table, target, SCHEDULE), errors, graph)


def bounds_of(atlas: Atlas) -> dict[str, float]:
    """The most that a measured config has of each number, and the longest call of each backend."""
    ran = atlas.column("sequence") != NOTHING
    bounds = {name: float(atlas.column(name)[ran].max()) for name in NUMBERS}
    bounds |= {f"least {name}": float(atlas.column(name)[ran].min()) for name in NUMBERS}
    for code, choice in enumerate(atlas.tables["choices"]):
        same = ran & (atlas.column("choice") == code)
        if same.any():
            bounds[f"{choice} us"] = float(atlas.column("kernel_ns")[same].max()) / 1e3
            scores = atlas.column("batch") * atlas.column("num_heads")
            scores = scores * atlas.column("seq_len_q") * atlas.column("seq_len_kv")
            bounds[f"{choice} scores"] = float(scores[same].max())
    return bounds
