"""scripts/atlas_train.py: fits with scikit-learn and LightGBM, and formulas of grids."""

from __future__ import annotations

import numpy as np
import pytest

from profharness.atlas.data import Atlas
from profharness.atlas.features import sizes, with_shapes
from profharness.atlas.kernels import Formula

train = pytest.importorskip(
    "atlas_train", reason="needs scikit-learn and lightgbm (the extra `train`)"
)


def test_tree_separates_classes_at_round_numbers() -> None:
    dice = np.random.default_rng(0)
    columns = {name: dice.integers(1, 5000, 3000).astype(float) for name in "BHD"}
    columns["D%2"] = columns["D"] % 2
    classes = (columns["H"] > 1024).astype(int) + 2 * (columns["D%2"] == 0)
    tree = train.fit_tree(columns, tuple(columns), classes)
    assert (tree.classes(columns) == classes).all()
    assert 1024.0 in tree.threshold
    assert train.roundest(1000, 1030) == 1024
    assert train.roundest(0.25, 0.5) == 0.375


def test_boosted_trees_approximate_a_smooth_surface() -> None:
    dice = np.random.default_rng(0)
    table = dice.random((4, 2000))
    target = np.sin(3 * table[0]) + table[1] * table[2]
    trees = train.fit_boost(table[:, :1500], target[:1500])
    assert np.abs(trees.sums(table[:, 1500:]) - target[1500:]).mean() < 0.05


def test_network_learns_the_largest_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "SCHEDULE", ((0.003, 15), (0.0005, 5)))
    table = np.random.default_rng(3).random((6000, 4))
    net = train.fit_net(table, table.argmax(axis=1))
    other = np.random.default_rng(4).random((1000, 4))
    assert (net.classes(other) == other.argmax(axis=1)).mean() > 0.95


@pytest.mark.parametrize(
    ("quantity", "step", "multiplier", "limit"),
    [("SQ", 128, "1", 0), ("SP", 1024, "1", 0), ("SK", 64, "BH", 0), ("ROWS", 4, "1", 132)],
)
def test_formula_is_found_in_its_sizes(
    packaged: Atlas, quantity: str, step: int, multiplier: str, limit: int
) -> None:
    c = with_shapes(sizes([packaged.config(row) for row in range(0, len(packaged), 97)]))
    values = Formula(quantity, step, multiplier, limit).values(c)
    found, share = train.solve(c, values)
    assert share == 1
    assert (found.values(c) == values).all()


def test_names_that_differ_by_dtype_have_one_neutral_name(packaged: Atlas) -> None:
    names = packaged.tables["kernels"]
    neutrals = {train.neutral(name) for name in names}
    assert len(neutrals) < 0.75 * len(names)
    half, brain = ("void f<cutlass::half_t>(x)", "void f<cutlass::bfloat16_t>(x)")
    assert train.neutral(half) == train.neutral(brain)
    assert train.family("fmha_cutlassF_f16_aligned_64x64_rf_sm80(P)") == "efficient forward"


def test_curve_selects_the_work_that_matters() -> None:
    dice = np.random.default_rng(0)
    work, other = 2.0 ** dice.uniform(0, 16, 300), 2.0 ** dice.uniform(0, 16, 300)
    curve = train.curve_of({"other": other, "work": work}, 2 + work / 100)
    assert curve.work == "work"
    assert curve.us(np.array([2.0**20]))[0] == pytest.approx(2**20 / 100, rel=0.2)


def test_rules_from_some_cells_predict_others(packaged: Atlas) -> None:
    code = packaged.tables["backends"].index("efficient")
    rows = np.flatnonzero(
        (packaged.columns["backend"] == code) & (packaged.columns["sequence"] >= 0)
    )
    rows = rows[rows % 3 == 0]
    configs = [packaged.config(row) for row in rows]
    apart = train.rows_of(configs) // 10 % 5 == 0
    c = with_shapes(sizes(configs))
    learn, ask = np.flatnonzero(~apart), np.flatnonzero(apart)
    rules = train.rules_of(packaged, rows[learn], {name: each[learn] for name, each in c.items()})
    calls = rules.calls({name: each[ask] for name, each in c.items()})
    edges = np.searchsorted(calls.place, np.arange(len(ask) + 1))
    right = 0
    for place, row in enumerate(rows[ask]):
        first, last = edges[place : place + 2]
        names = [
            packaged.tables["kernels"][packaged.columns["kernel"][kind]]
            for kind in calls.kind[first:last]
        ]
        right += names == [launch.kernel for launch in packaged.launches(row)]
    assert right / len(ask) > 0.95
