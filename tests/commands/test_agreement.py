"""The four witnesses of a cell: where they agree, the line for each kind of disagreement, and the gate
of `kernels --expect`.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from render.view_rows import cell, kernel, math_kernels

from profharness.attention.config import parse_config
from profharness.attention.dispatch.machine import rules_know
from profharness.cli import find_command
from profharness.commands.kernels.tables import kernels_document
from profharness.errors import GateError, UsageError
from profharness.measurements.agreement import (
    backend_of_op,
    check_expected_names,
    disagreements,
    unmet_expectations,
    with_predictions,
    witnesses,
)
from profharness.rows import CellRow, KernelRow
from profharness.run import Cell, Protocol, Run, read_run, write_run
from profharness.store import ingest_path, open_store

ROOT = Path(__file__).resolve().parents[2]
H200 = ROOT / "traces" / "h200-torch2.11"
CUDNN_OP = "aten::_scaled_dot_product_cudnn_attention"
FLASH_OP = "aten::_scaled_dot_product_flash_attention"
EFFICIENT_OP = "aten::_scaled_dot_product_efficient_attention"
MATH_OP = "aten::_scaled_dot_product_attention_math"
CK = "void ck_tile::kentry<256, 2, ck_tile::FmhaFwdKernel<int> >(int)"
FA3 = (
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<"
    "flash::CollectiveMainloopFwdSm90<2, 3> > > >(Params)"
)
EXPANDED = "2,8,512,64,fp16,head_dim_v=32,layout=broadcast_batch"


@pytest.fixture(scope="module")
def h200(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("h200") / "store.db"
    ingest_path(path, H200)
    return path


def stored(tmp_path: Path, cells: tuple[Cell, ...], **environment: object) -> list[CellRow]:
    """Return the cells as read from a store, on the H200 of traces/ by default."""
    told = read_run(H200).environment | environment
    folder = tmp_path / "20260101-000000-aaaa"
    folder.mkdir()
    write_run(folder, Run(folder.name, "2026-01-01", ("events",), Protocol(), cells, told))
    ingest_path(tmp_path / "store.db", folder)
    with open_store(tmp_path / "store.db") as store:
        return with_predictions(store, store.cells())


def test_all_four_agree_in_every_cell_of_the_h200_run(h200: Path) -> None:
    with open_store(h200) as store:
        cells, rows = with_predictions(store, store.cells()), store.kernels()
    assert len(cells) == 24
    for each in cells:
        own = [row for row in rows if row.cell == each.cell]
        told = {one.name: one.backends for one in witnesses(each, own)}
        assert disagreements(each, own) == [], each
        if each.backend == "auto":
            assert told["rules"] == told["choice"] == told["op"] == told["kernels"]
        elif each.status == "ok":
            assert each.predicted in ("eligible", "cudnn")
            assert told["rules"] == told["choice"] == told["op"]
        else:
            assert each.predicted in ("refused", "none")


def test_a_chosen_backend_that_raises_is_a_disagreement(tmp_path: Path) -> None:
    failed = Cell("c0", parse_config(EXPANDED), "auto", "error", "RuntimeError: The stride for …")
    (found,) = stored(tmp_path, (replace(failed, choice="cudnn"),))
    assert found.predicted == "cudnn"
    (line,) = disagreements(found, [])
    assert "the rules predict cudnn and PyTorch chose cudnn, but the call failed" in line
    assert "The stride for" in line


@pytest.mark.parametrize(
    ("fields", "row", "parts"),
    [
        ({}, kernel(), None),
        ({}, kernel(kernel=FA3), [FLASH_OP, "but its kernels come from FlashAttention-3"]),
        (
            {"backend": "auto", "predicted": "flash"},
            kernel(family="efficient", kernel="fmha_cutlassF_f16"),
            [
                "the rules predict flash, PyTorch chose flash and the op that ran",
                ", but the kernels belong to family efficient",
            ],
        ),
        (
            {"backend": "auto", "predicted": "flash", "choice": "cudnn", "sdpa_op": CUDNN_OP},
            kernel(family="cudnn", backend="auto", kernel="cudnn_generated_fort_native_sdpa"),
            ["rules predict flash, but", "chose cudnn", CUDNN_OP, "family cudnn"],
        ),
        ({"sdpa_op": MATH_OP}, kernel(sdpa_op=MATH_OP), ["(math)", "family flash"]),
        # on ROCm, the flash op runs kernels of AMD's libraries
        ({}, kernel(family="aotriton", kernel="attn_fwd"), None),
        ({}, kernel(family="ck", kernel=CK, sdpa_op=None), None),
        ({}, kernel(family="aiter_bwd", kernel="aiter::fmha_bwd_hd128_bf16_causal_a32"), None),
        (
            {"backend": "efficient", "choice": "efficient", "sdpa_op": EFFICIENT_OP},
            kernel(family="aotriton", kernel="attn_fwd", sdpa_op=EFFICIENT_OP),
            None,
        ),
        ({"sdpa_op": MATH_OP}, kernel(family="ck", sdpa_op=MATH_OP), ["(math)", "family ck"]),
    ],
)
def test_witnesses_that_disagree_are_named(
    fields: dict[str, str], row: KernelRow, parts: list[str] | None
) -> None:
    lines = disagreements(cell(**fields), [row])
    if parts is None:
        assert lines == []
    else:
        assert any(all(part in line for part in parts) for line in lines), lines


def test_every_step_that_differs_has_a_line() -> None:
    odd = cell(backend="auto", predicted="efficient", choice="cudnn")
    assert len(disagreements(odd, [kernel()])) == 2


@pytest.mark.parametrize(
    ("predicted", "status", "count"),
    [
        ("eligible", "ok", 0),
        ("refused", "refused", 0),
        ("refused", "ok", 1),
        ("eligible", "refused", 1),
        ("eligible", "error", 1),
        ("eligible", "oom", 0),
        (None, "refused", 0),
        (None, "error", 0),
    ],
)
def test_a_forced_backend_against_its_prediction(
    predicted: str | None, status: str, count: int
) -> None:
    ran = status == "ok"
    one = cell(
        predicted=predicted,
        status=status,
        choice="flash" if ran else None,
        sdpa_op=FLASH_OP if ran else None,
    )
    assert len(disagreements(one, [kernel()] if ran else [])) == count


def test_backends_that_the_dispatcher_does_not_know_have_no_disagreement() -> None:
    own = cell(backend="my_kernel", choice=None, sdpa_op=None, status="error", message="boom")
    assert disagreements(own, []) == []


def test_a_release_whose_rules_are_not_known_has_no_prediction(tmp_path: Path) -> None:
    ran = Cell("c0", parse_config("2,8,512,64,fp16"), "auto", "ok", choice="flash")
    (found,) = stored(tmp_path, (ran,), torch="2.0.0+cu117")
    assert found.predicted is None


@pytest.mark.parametrize(
    "missing", [{"torch": None}, {"device_type": None}, {"capability": "0.0"}, {"torch": "nightly"}]
)
def test_an_incomplete_environment_has_no_machine(missing: dict[str, str]) -> None:
    told = read_run(H200).environment
    assert rules_know(told)
    assert not rules_know(told | missing)


@pytest.mark.parametrize(
    "environment", [{"env": {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}}, {"sdp_cudnn": False}]
)
def test_a_setting_against_cudnn_counts(tmp_path: Path, environment: dict[str, object]) -> None:
    ran = Cell("c0", parse_config("2,8,512,64,fp16"), "auto", "ok", choice="flash")
    assert stored(tmp_path, (ran,), **environment)[0].predicted == "flash"


def test_json_and_notes_contain_predictions(h200: Path) -> None:
    with open_store(h200) as store:
        cells, rows = with_predictions(store, store.cells()), store.kernels()
    document = kernels_document(rows, cells)
    assert document.extra["cells"][0]["predicted"] == "cudnn"
    wrong = [replace(each, predicted="flash") for each in cells[:1]]
    texts = [getattr(block, "text", "") for block in kernels_document(rows, wrong).blocks]
    assert any(text.startswith("mismatch: the rules predict flash, but") for text in texts)


def test_a_store_of_a_changed_folder_predicts_anew(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(H200, folder)
    record = json.loads((folder / "run.json").read_text())
    record["environment"]["cudnn"] = 91300
    (folder / "run.json").write_text(json.dumps(record))
    ingest_path(tmp_path / "store.db", folder)
    with open_store(tmp_path / "store.db") as store:
        auto = [each for each in with_predictions(store, store.cells()) if each.backend == "auto"]
    assert [each.predicted for each in auto] == ["flash"] * 4


@pytest.mark.parametrize(
    ("op", "backend"),
    [
        (FLASH_OP, "flash"),
        (f"{FLASH_OP}_for_cpu", "flash"),
        ("aten::_scaled_dot_product_efficient_attention_backward", "efficient"),
        (CUDNN_OP, "cudnn"),
        (MATH_OP, "math"),
        ("aten::scaled_dot_product_attention", None),
        ("aten::mm", None),
        (None, None),
    ],
)
def test_the_op_names_its_backend(op: str | None, backend: str | None) -> None:
    assert backend_of_op(op) == backend


FOREIGN = {"cell": None, "config": None, "backend": None}
MATH_CELL = cell(cell="1", backend="auto", sdpa_op=MATH_OP)
BARE_MATH = [kernel(family=family, sdpa_op=None) for family in ("gemm", "softmax", "gemm")]
EAGER_ROWS = [
    kernel(family=family, sdpa_op=None, op_path=path, **FOREIGN | {"range": "step"})
    for family, path in (("gemm", "aten::matmul;aten::bmm"), ("softmax", "aten::softmax"))
]
WITHOUT_OPS = [replace(row, op_path=None) for row in EAGER_ROWS]
NAIVE_ROWS = [replace(row, cell="0", backend="naive") for row in EAGER_ROWS]
SPLIT = [kernel(family="flash_splitkv"), kernel(family="flash_combine")]
SERVING = [
    kernel(family=family, sdpa_op=None, **FOREIGN)
    for family in ("fmha", "fmha_combine", "moe", "norm", "collective")
]
ON_ROCM = [kernel(family="ck"), kernel(family="ck_combine", sdpa_op=None)]
BARE_ROCM = [kernel(family="ck", sdpa_op=None, **FOREIGN)]
RANGES = [
    kernel(**FOREIGN, range="a"),
    kernel(**FOREIGN, range="b", family="gemm", sdpa_op=None),
]


@pytest.mark.parametrize(
    ("expected", "rows", "cells", "text"),
    [
        ("flash", [kernel()], [cell()], None),
        ("cudnn", math_kernels(), [MATH_CELL], "auto: expected cudnn, but math ran"),
        ("flash", [kernel(), *math_kernels()], [cell(), MATH_CELL], "expected flash, but math"),
        ("flash,math", [kernel(), *math_kernels()], [cell(), MATH_CELL], None),
        # kernels that contradict the op
        ("math", [kernel(sdpa_op=MATH_OP)], [cell(sdpa_op=MATH_OP)], "but flash ran"),
        ("flash", [kernel(sdpa_op=MATH_OP)], [cell(sdpa_op=MATH_OP)], "but math ran"),
        # a family covers its op and its combine kernel only
        ("flash_splitkv", SPLIT, [cell()], None),
        ("flash_combine", SPLIT, [cell()], "expected flash_combine"),
        ("flash", SPLIT, [cell()], None),
        # on ROCm, a backend covers AMD's libraries, and a library covers the backends that run it
        ("flash", ON_ROCM, [cell()], None),
        ("ck", ON_ROCM, [cell()], None),
        ("aotriton", ON_ROCM, [cell()], "expected aotriton, but flash ran (ck kernels; ck_combine"),
        ("efficient", ON_ROCM, [cell()], "but flash ran"),
        ("ck", BARE_ROCM, [], None),
        ("flash", BARE_ROCM, [], "but ck ran (ck kernels)"),
        ("fmha", SERVING, [], None),
        ("flash", SERVING, [], "but fmha ran (fmha kernels; fmha_combine kernels)"),
        # math without an op shows by its kernels
        ("math", BARE_MATH, [cell(sdpa_op=None)], None),
        ("flash", BARE_MATH, [cell(sdpa_op=None)], "gemm and softmax kernels"),
        # outside of SDPA, the same kernels are eager attention if their ops were recorded
        ("eager", EAGER_ROWS, [], None),
        ("math", EAGER_ROWS, [], "range step: expected math, but eager ran"),
        ("eager", NAIVE_ROWS, [cell(backend="naive", sdpa_op=None)], None),
        # without ops, math and eager attention look the same
        (
            "math",
            WITHOUT_OPS,
            [],
            "but math or eager ran (gemm and softmax kernels; the trace does",
        ),
        ("eager", WITHOUT_OPS, [], "but math or eager ran"),
        ("math,eager", WITHOUT_OPS, [], None),
        # a foreign trace is judged by its ranges
        ("flash", RANGES, [], None),
        ("cudnn", RANGES, [], "range a"),
        # a gate that judged nothing is not met
        ("flash", [], [cell(status="refused")], "nothing to check"),
        ("flash", [], [], "nothing to check"),
        ("flash", [], [cell(sdpa_op=None)], "neither an op nor a kernel"),
    ],
)
def test_expect_compares_what_ran_with_the_expected_backend(
    expected: str, rows: list[KernelRow], cells: list[CellRow], text: str | None
) -> None:
    lines = unmet_expectations(expected.split(","), rows, cells, {})
    if text is None:
        assert lines == []
    else:
        (line,) = lines
        assert text in line


@pytest.mark.parametrize(("name", "ran"), [("llama_eager.json.gz", "eager"), ("flex", "flex")])
def test_kernels_and_layers_expect_the_same_backend(name: str, ran: str, tmp_path: Path) -> None:
    """Bug: `kernels --expect math` passed on eager attention, which `layers` rejected."""
    trace, store = str(ROOT / "traces" / "models" / name), str(tmp_path / "store.db")
    for command in map(find_command, ("kernels", "layers")):
        passed = CliRunner().invoke(command, [trace, "--expect", ran, "--store", store])
        assert passed.exception is None
        failed = CliRunner().invoke(command, [trace, "--expect", "math", "--store", store])
        assert isinstance(failed.exception, GateError)
        assert f"{ran} ran" in str(failed.exception)


def test_a_name_that_cannot_be_expected_is_refused() -> None:
    check_expected_names(["flash", "cudnn_bwd"])
    with pytest.raises(UsageError, match="flahs"):
        check_expected_names(["flahs"])
