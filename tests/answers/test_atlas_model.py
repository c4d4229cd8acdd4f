"""The model of the atlas: its trees, rules and curves, its file, and what estimate says where."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from profharness.answers.atlas import stored
from profharness.answers.atlas.boost import Schedule, boost
from profharness.answers.atlas.data import Atlas, packaged_atlases
from profharness.answers.atlas.features import sizes, with_shapes
from profharness.answers.atlas.fit import rows_of, rules_of
from profharness.answers.atlas.kernels import Formula, family, neutral, solve
from profharness.answers.atlas.model import MODEL_SUFFIX, Dispatch, estimate, model_of
from profharness.answers.atlas.nets import Lessons, fitted
from profharness.answers.atlas.stored import Model, read_model, write_model
from profharness.answers.atlas.times import curve_of
from profharness.answers.atlas.trees import grow, roundest
from profharness.config import SDPA_BACKENDS, parse_config
from profharness.dispatch.machine import from_config, machine_for
from profharness.dispatch.predict import predict
from profharness.errors import ProfharnessError

H200 = machine_for("H200", "2.11")


@pytest.fixture(scope="module")
def model(packaged: Atlas) -> Model:
    found = model_of(packaged.machine.name)
    assert found is not None
    return found


def test_a_tree_parts_what_its_features_part_and_cuts_at_round_numbers() -> None:
    dice = np.random.default_rng(0)
    table = dice.integers(1, 5000, (3000, 3)).astype(float)
    classes = (table[:, 1] > 1024).astype(int) + 2 * (table[:, 2] % 2 == 0)
    wide = np.column_stack([table, table[:, 2] % 2])
    tree = grow(wide, classes)
    assert (tree.classes(wide) == classes).all()
    assert 1024.0 in tree.threshold
    assert roundest(1000, 1030) == 1024
    assert roundest(0.25, 0.5) == 0.375


def test_a_network_learns_which_of_some_numbers_is_the_largest() -> None:
    table = np.random.default_rng(3).random((6000, 4))
    net = fitted(table, table.argmax(axis=1), Lessons(width=32, rounds=30, rows=256))
    ask = np.random.default_rng(4).random((1000, 4))
    assert (net.classes(ask) == ask.argmax(axis=1)).mean() > 0.97


def test_the_splits_of_a_decode_on_cudnn_follow_blocks_and_keys(packaged: Atlas) -> None:
    choice = packaged.tables["choices"].index("cudnn")
    one = (packaged.column("seq_len_q") == 1) & (packaged.column("choice") == choice)
    right = [0, 0]
    for cell in map(packaged.cell, np.flatnonzero(one)[::3].tolist()):
        for launch in cell.launches:
            if "knob_35" in launch.kernel and launch.grid:
                c = with_shapes(sizes([cell.config]))
                right[int(c["CPARTS"][0] == launch.grid[0])] += 1
    assert sum(right) > 200
    assert right[1] > 0.98 * sum(right)


def test_boosted_trees_come_close_to_a_smooth_surface() -> None:
    dice = np.random.default_rng(0)
    table = dice.random((4, 2000))
    target = np.sin(3 * table[0]) + table[1] * table[2]
    trees = boost(table[:, :1500], target[:1500], Schedule(trees=80, rate=0.2))
    assert np.abs(trees.sums(table[:, 1500:]) - target[1500:]).mean() < 0.05


@pytest.mark.parametrize(
    ("quantity", "step", "multiplier", "limit"),
    [("SQ", 128, "1", 0), ("SP", 1024, "1", 0), ("SK", 64, "BH", 0), ("ROWS", 4, "1", 132)],
)
def test_a_formula_is_found_in_the_sizes_that_it_gives(
    packaged: Atlas, quantity: str, step: int, multiplier: str, limit: int
) -> None:
    c = with_shapes(sizes([packaged.config(row) for row in range(0, len(packaged), 97)]))
    values = Formula(quantity, step, multiplier, limit).values(c)
    found = solve(c, values)
    assert found.right == 1
    assert (found.values(c) == values).all()


def test_names_that_differ_by_dtype_alone_are_one_neutral_name(packaged: Atlas) -> None:
    names = packaged.tables["kernels"]
    neutrals = {neutral(name) for name in names}
    assert len(neutrals) < 0.75 * len(names)
    half, brain = ("void f<cutlass::half_t>(x)", "void f<cutlass::bfloat16_t>(x)")
    assert neutral(half) == neutral(brain)
    assert family("fmha_cutlassF_f16_aligned_64x64_rf_sm80(P)") == "efficient forward"


def test_a_curve_follows_the_work_that_decides() -> None:
    dice = np.random.default_rng(0)
    work, other = 2.0 ** dice.uniform(0, 16, 300), 2.0 ** dice.uniform(0, 16, 300)
    curve = curve_of({"other": other, "work": work}, 2 + work / 100)
    assert curve.work == "work"
    assert curve.us(np.array([2.0**20]))[0] == pytest.approx(2**20 / 100, rel=0.2)


def test_the_splits_of_flash_are_those_of_its_heuristic(packaged: Atlas) -> None:
    rows = [
        row
        for row in np.flatnonzero(packaged.column("sequence") >= 0)[::3].tolist()
        if packaged.tables["backends"][packaged.column("backend")[row]] == "flash"
    ]
    c = with_shapes(sizes([packaged.config(row) for row in rows]))
    combined = [
        any("combine" in launch.kernel for launch in packaged.launches(row)) for row in rows
    ]
    assert ((c["SPLITS"] > 1) == np.array(combined)).all()


def test_rules_learned_from_some_cells_hold_for_others(packaged: Atlas) -> None:
    code = packaged.tables["backends"].index("efficient")
    rows = np.flatnonzero((packaged.column("backend") == code) & (packaged.column("sequence") >= 0))
    rows = rows[rows % 3 == 0]
    configs = [packaged.config(row) for row in rows]
    apart = rows_of(configs) // 10 % 5 == 0
    c = with_shapes(sizes(configs))
    learn, ask = np.flatnonzero(~apart), np.flatnonzero(apart)
    rules = rules_of(packaged, rows[learn], {name: each[learn] for name, each in c.items()})
    calls = rules.calls({name: each[ask] for name, each in c.items()})
    edges = np.searchsorted(calls.place, np.arange(len(ask) + 1))
    right = 0
    for place, row in enumerate(rows[ask]):
        first, last = edges[place : place + 2]
        names = [
            packaged.tables["kernels"][packaged.column("kernel")[kind]]
            for kind in calls.kind[first:last]
        ]
        right += names == [launch.kernel for launch in packaged.launches(row)]
    assert right / len(ask) > 0.95


def test_rules_asked_once_for_like_configs_say_what_they_say_of_each(packaged: Atlas) -> None:
    dispatch = Dispatch(H200)
    configs = {packaged.config(row): None for row in range(0, len(packaged), 19)}
    for config in configs:
        full = predict(from_config(config), H200)
        told = dispatch.ask(config)
        assert told.choice == full.choice, config
        assert told.eligible == {name: each.eligible for name, each in full.backends.items()}


def test_an_estimate_says_where_it_is_from(packaged: Atlas) -> None:
    known = packaged.config(0)
    between = parse_config("5,24,1111,128,bf16,causal,kv_heads=8")
    far = parse_config("2,8,200000,64,fp16")
    other = parse_config("2,8,512,64,fp16,dropout=0.1")
    told = estimate(packaged, [known, between, far, other], ["auto", "flash"], "H200", "2.11")
    assert [each.source for each in told] == [
        "measured", "measured", "model", "model", "floor", "floor", "floor", "floor",
    ]  # fmt: skip
    auto = told[2]
    assert auto.choice == "cudnn"
    assert auto.launches
    assert auto.error is not None
    assert auto.kernel_us == pytest.approx(sum(each.time_us or 0 for each in auto.launches))
    assert auto.low_us is not None and auto.high_us is not None and auto.kernel_us is not None
    assert auto.low_us < auto.kernel_us < auto.high_us
    assert auto.bottleneck in ("compute", "memory", "latency", "launch")
    assert told[4].kernel_us is None
    assert told[4].low_us is not None
    assert told[4].outside == "queries 200000 is outside of the atlas's 1 to 65536"
    assert told[6].outside == "the atlas has no configs with dropout"


def test_refused_calls_and_places_without_an_atlas(packaged: Atlas) -> None:
    odd = parse_config("2,8,512,64,fp32,causal")
    told = estimate(packaged, [odd], ["flash", "cudnn", "math"], "H200", "2.11", measured=False)
    assert [each.status for each in told] == ["refused", "refused", "ok"]
    assert [each.choice for each in told] == [None, None, "math"]
    elsewhere = estimate(None, [odd], ["auto"], "A100", "2.8")
    assert elsewhere[0].source == "floor"
    assert elsewhere[0].kernel_us is None


def test_the_model_alone_is_close_on_cells_of_the_atlas(packaged: Atlas) -> None:
    rows = np.flatnonzero(packaged.column("sequence") >= 0)[::67]
    off = []
    for backend in SDPA_BACKENDS:
        code = packaged.tables["backends"].index(backend)
        cells = [packaged.cell(row) for row in rows if packaged.column("backend")[row] == code]
        configs = [cell.config for cell in cells]
        told = estimate(packaged, configs, [backend], "H200", "2.11", measured=False)
        assert [each.status for each in told] == ["ok"] * len(told)
        off += [
            abs(math.log(each.kernel_us / cell.kernel_us))
            for each, cell in zip(told, cells, strict=True)
            if each.kernel_us and cell.kernel_us
        ]
    assert np.median(off) < 0.04


def test_the_packaged_models_belong_to_packaged_atlases(model: Model, tmp_path: Path) -> None:
    assert {path.stem for path in stored_models()} <= {path.stem for path in packaged_atlases()}
    small = replace(
        model, rules={}, timings={}, curves=dict(itertools.islice(model.curves.items(), 3))
    )
    path = tmp_path / "some.model"
    write_model(small, path)
    again = read_model(path)
    assert (again.names, again.bounds) == (small.names, small.bounds)
    assert (again.kinds == small.kinds).all()
    whole = path.read_bytes()
    for bad, message in (
        (whole[:-1], "cut short or changed"),
        (whole[:8] + b"\7" + whole[9:], "version 7; this profharness reads version 2"),
        (b"", "not the model"),
        (forged({"Curve": ["blocks"]}), "forged"),
        (forged({"Popen": ["true"]}), "forged"),
        (forged([1, 2]), "forged"),
    ):
        path.write_bytes(bad)
        with pytest.raises(ProfharnessError, match=message):
            read_model(path)


def stored_models() -> list[Path]:
    return sorted(packaged_atlases()[0].parent.glob(f"*{MODEL_SUFFIX}"))


def forged(content: object) -> bytes:
    """A model's file with that for its content, and the right checksum."""
    parts = [zlib.compress(json.dumps(content).encode()), *[zlib.compress(b"")] * len(stored.KINDS)]
    body = struct.pack(f"<{len(parts)}I", *map(len, parts)) + b"".join(parts)
    return stored.HEAD.pack(stored.MAGIC, stored.VERSION, 0, hashlib.sha256(body).digest()) + body
