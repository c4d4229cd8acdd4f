"""The model of an atlas: its features, its file, and the sources of its estimates."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from profharness.atlas.data import MODEL_SUFFIX, PACKAGED, Atlas
from profharness.atlas.features import sizes, with_shapes
from profharness.atlas.kernels import LEAF, Boost, Net, Tree
from profharness.atlas.model import (
    Dispatch,
    Model,
    estimate,
    model_of,
    read_model,
    write_model,
)
from profharness.attention.config import SDPA_BACKENDS, parse_config
from profharness.attention.dispatch.machine import from_config, machine_for
from profharness.attention.dispatch.predict import predict
from profharness.errors import ProfharnessError

H200 = machine_for("H200", "2.11")


@pytest.fixture(scope="module")
def model(packaged: Atlas) -> Model:
    found = model_of(packaged.machine.name)
    assert found is not None
    return found


def test_tree_compares_with_thresholds() -> None:
    feature, right = np.array([1, LEAF, 0, LEAF, LEAF]), np.array([2, 0, 4, 0, 0])
    tree = Tree(
        ("B", "H"), feature, np.array([2.0, 0, 1.5, 0, 0]), np.array([1, 7, 3, 8, 9]), right
    )
    columns = {"B": np.array([1.0, 1, 2]), "H": np.array([2.0, 3, 3])}
    assert tree.classes(columns).tolist() == [7, 8, 9]
    with pytest.raises(ValueError, match="cycle"):
        Tree(("B",), np.array([0, LEAF]), np.zeros(2), np.array([0, 1]), np.array([1, 1]))


def test_boosted_trees_are_summed() -> None:
    feature, threshold = np.array([[0, 1], [1, 1]]), np.array([[0.5, 0.5], [1.5, 2.5]])
    values = np.array([[1.0, 2, 3, 4], [10, 20, 30, 40]])
    table = np.array([[0.0, 1, 0, 1], [0, 1, 2, 3]])
    assert Boost(feature, threshold, values).sums(table).tolist() == [11, 14, 23, 44]


def test_network_selects_the_largest_output() -> None:
    first = np.array([[1.0, -1], [0, 0]])  # max(x, 0) and max(-x, 0)
    last = np.array([[1.0, 0], [0, 1], [0, 0.5]])
    net = Net(np.array([1.0]), np.array([2.0]), (first, last))
    assert net.classes(np.array([[4.0], [-4.0], [1.0]])).tolist() == [0, 1, 1]


def test_cudnn_decode_splits_follow_blocks_and_keys(packaged: Atlas) -> None:
    choice = packaged.tables["choices"].index("cudnn")
    one = (packaged.columns["seq_len_q"] == 1) & (packaged.columns["choice"] == choice)
    right = [0, 0]
    for cell in map(packaged.cell, np.flatnonzero(one)[::3].tolist()):
        for launch in cell.launches:
            if "knob_35" in launch.kernel and launch.grid:
                c = with_shapes(sizes([cell.config]))
                right[int(c["CPARTS"][0] == launch.grid[0])] += 1
    assert sum(right) > 200
    assert right[1] > 0.98 * sum(right)


def test_flash_splits_follow_its_heuristic(packaged: Atlas) -> None:
    rows = [
        row
        for row in np.flatnonzero(packaged.columns["sequence"] >= 0)[::3].tolist()
        if packaged.tables["backends"][packaged.columns["backend"][row]] == "flash"
    ]
    c = with_shapes(sizes([packaged.config(row) for row in rows]))
    combined = [
        any("combine" in launch.kernel for launch in packaged.launches(row)) for row in rows
    ]
    assert ((c["SPLITS"] > 1) == np.array(combined)).all()


def test_cached_dispatch_equals_the_rules(packaged: Atlas) -> None:
    dispatch = Dispatch(H200)
    configs = {packaged.config(row): None for row in range(0, len(packaged), 19)}
    for config in configs:
        full = predict(from_config(config), H200)
        found = dict(dispatch.answers(config))
        auto = full.choice if full.choice in SDPA_BACKENDS else None
        assert found.pop("auto")[0] == auto, config
        statuses = {True: "ok", False: "refused", None: "unknown"}
        assert {name: status for name, (_, status) in found.items()} == {
            name: statuses[each.eligible] for name, each in full.backends.items()
        }


def test_estimates_have_a_source(packaged: Atlas) -> None:
    known = packaged.config(0)
    between = parse_config("5,24,1111,128,bf16,causal,kv_heads=8")
    far = parse_config("2,8,200000,64,fp16")
    other = parse_config("2,8,512,64,fp16,dropout=0.1")
    found = estimate(packaged, [known, between, far, other], ["auto", "flash"], "H200", "2.11")
    assert [each.source for each in found] == [
        "measured", "measured", "model", "model", "floor", "floor", "floor", "floor",
    ]  # fmt: skip
    auto = found[2]
    assert auto.choice == "cudnn"
    assert auto.launches
    assert auto.error is not None
    assert auto.kernel_us == pytest.approx(sum(each.time_us or 0 for each in auto.launches))
    assert auto.low_us is not None and auto.high_us is not None and auto.kernel_us is not None
    assert auto.low_us < auto.kernel_us < auto.high_us
    assert auto.bottleneck in ("compute", "memory", "latency", "launch")
    assert found[4].kernel_us is None
    assert found[4].low_us is not None
    assert found[4].outside == "queries 200000 is outside the range of the atlas, 1 to 65536"
    assert found[6].outside == "the atlas has no configs with dropout"


def test_refused_calls_and_missing_atlases(packaged: Atlas) -> None:
    odd = parse_config("2,8,512,64,fp32,causal")
    found = estimate(packaged, [odd], ["flash", "cudnn", "math"], "H200", "2.11", measured=False)
    assert [each.status for each in found] == ["refused", "refused", "ok"]
    assert [each.choice for each in found] == [None, None, "math"]
    elsewhere = estimate(None, [odd], ["auto"], "A100", "2.8")
    assert elsewhere[0].source == "floor"
    assert elsewhere[0].kernel_us is None


def test_model_is_close_to_cells_of_the_atlas(packaged: Atlas) -> None:
    rows = np.flatnonzero(packaged.columns["sequence"] >= 0)[::67]
    off = []
    for backend in SDPA_BACKENDS:
        code = packaged.tables["backends"].index(backend)
        cells = [packaged.cell(row) for row in rows if packaged.columns["backend"][row] == code]
        configs = [cell.config for cell in cells]
        found = estimate(packaged, configs, [backend], "H200", "2.11", measured=False)
        assert [each.status for each in found] == ["ok"] * len(found)
        off += [
            abs(math.log(each.kernel_us / cell.kernel_us))
            for each, cell in zip(found, cells, strict=True)
            if each.kernel_us and cell.kernel_us
        ]
    assert np.median(off) < 0.04


def test_packaged_models_belong_to_packaged_atlases(model: Model) -> None:
    for path in PACKAGED.glob(f"*{MODEL_SUFFIX}"):
        name = path.name.removesuffix(MODEL_SUFFIX)
        assert (PACKAGED / f"{name}.npz").exists()
        assert read_model(path).machine == name
    assert set(model.rules) == set(SDPA_BACKENDS)


def test_model_survives_writing_and_reading(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "again.npz"
    write_model(model, path)
    again = read_model(path)
    assert (again.names, again.bounds) == (model.names, model.bounds)
    assert (again.kinds == model.kinds).all()
    for key, timing in model.timings.items():
        assert (again.timings[key].trees.values == timing.trees.values).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header[:-1], "forged"),
        (lambda _: msgspec.msgpack.encode({"Popen": ["true"]}), "forged"),
        (lambda _: msgspec.msgpack.encode([1, 2]), "forged"),
        (lambda _: b"\x91" * 2_000_000, "forged"),
        (lambda header: changed(header, kinds=[9, 0, 1]), "forged"),
        (lambda header: changed(header, kinds=[1, -1, 1]), "forged"),
        (lambda header: changed(header, kinds=[1, 0, 1 << 40]), "forged"),
        (
            lambda header: changed(header, version=7),
            "version 7, but this profharness reads version 3",
        ),
    ],
)
def test_forged_model_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    (source,) = PACKAGED.glob(f"*{MODEL_SUFFIX}")
    with np.load(source) as file:
        arrays = dict(file)
    header = change(arrays["header"].tobytes())
    path = tmp_path / "forged.npz"
    np.savez_compressed(path, **(arrays | {"header": np.frombuffer(header, np.uint8)}))
    with pytest.raises(ProfharnessError, match=message):
        read_model(path)


def changed(header: bytes, **fields: Any) -> bytes:
    content = msgspec.msgpack.decode(header, strict=False, type=dict[str, msgspec.Raw])
    return msgspec.msgpack.encode(content | fields)
