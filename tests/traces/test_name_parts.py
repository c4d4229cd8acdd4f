"""Descriptions of kernel names: every real name, whole and short."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from nsys_spelling import as_nsys

from profharness.cli import cli
from profharness.traces.kernel_names import FAMILIES, parse_kernel_name
from profharness.traces.kernel_names.meanings import (
    FA2_FLAGS,
    FA3_FLAGS,
    FLASHINFER_FLAGS,
    LIBRARIES,
)
from profharness.traces.kernel_names.parts import Description, describe

TABLE = Path(__file__).parents[1] / "data" / "kernel_names.tsv.gz"
FLASH = (
    "void pytorch_flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<64, 64, 256, 4, false, false, "
    "cutlass::bfloat16_t, Flash_kernel_traits<64, 64, 256, 4, cutlass::bfloat16_t> >, true, false, "
    "false, false, true, false, true, false>(pytorch_flash::Flash_fwd_params)"
)
SIZES = ("direction", "dtype", "head_dim", "tile_m", "tile_n", "warps", "stages", "arch")


@pytest.fixture(scope="module")
def names() -> list[str]:
    with gzip.open(TABLE, "rt", encoding="utf-8", newline="") as file:
        place = next(file).rstrip("\n").split("\t").index("name")
        return [line.rstrip("\n").split("\t")[place] for line in file]


def said(description: Description) -> dict[str, str | None]:
    return {part.parameter or part.token: part.meaning for part in description.parts}


def test_every_real_name_is_described(names: list[str]) -> None:
    described = [describe(name) for name in names]
    assert all(each.is_known for each in described)
    parts = [part for each in described for part in each.parts]
    assert sum(part.meaning is None for part in parts) < 0.01 * len(parts)
    exact = {"flash2", "flash2_pip", "fa3", "efficient"}
    assert not [each.unknown for each in described if each.library in exact and each.unknown]


def test_short_and_whole_names_have_the_same_description(names: list[str]) -> None:
    for name in names:
        whole, short = parse_kernel_name(name), describe(parse_kernel_name(name).short).kernel
        assert short.family == whole.family, whole.short
        for field in SIZES:
            of_whole, of_short = getattr(whole, field), getattr(short, field)
            assert of_short in (None, of_whole) or of_whole is None, (field, whole.short)


def test_every_template_parameter_is_described() -> None:
    for spelling in (FLASH, as_nsys(FLASH)):
        found = describe(spelling)
        assert (found.library, found.kernel.family) == ("flash2", "flash_splitkv")
        meanings = said(found)
        assert meanings["kBlockN"] == "tile: 256 keys"
        assert meanings["elem_type"] == "type of the tensors: bf16"
        assert meanings["causal"] == "a query does not attend to later keys"
        assert meanings["even_mn"] is not None
        assert meanings["even_mn"].startswith("sequence lengths are checked")
        assert meanings["append"] == "no keys to append"
        assert found.untold == ()


@pytest.mark.parametrize(
    ("name", "token", "meaning"),
    [
        ("flash_fwd_splitkv_kernel<64,64x256,w4,nosplit>", "nosplit", "the keys are not split"),
        (
            "flash_fwd_splitkv_combine<64,m8,split2>",
            "split2",
            "combines the outputs for at most 2 parts of the keys",
        ),
        ("FlashAttnFwdSm90<128,128x224,packgqa>", "packgqa", (
            "the query heads of a group share a "
            "tile"
        )),
        ("tiled_attention<fp16,64x64,32,512,8,3,2,one,2>", "one", "all keys fit in one tile"),
        ("tiled_attention<fp16,64x64,32,512,8,3,2,one,2>", "512", "head-dimension columns per block: 512"),
        ("softmax_warp_forward<fp32,9>", "9", "rows of up to 2^9 columns"),
        ("reduce_kernel<512, 1, and>", "512", "512 threads per block"),
        ("nvjet_sm90_tst_192x8_64x8_4x1_v_bz_TNT", "4x1", None),
        ("triton_tem_fused_mul_1", "fused_mul", "the ATen ops in it: mul"),
    ],
)  # fmt: skip
def test_tokens_of_short_names(name: str, token: str, meaning: str | None) -> None:
    assert said(describe(name))[token] == meaning


def test_a_short_copy_is_a_copy() -> None:
    for name in ("elementwise<128, 2, direct_copy>", "unrolled_elementwise<direct_copy>"):
        assert describe(name).kernel.family == "copy"
    assert describe("vectorized_elementwise<4, isneginf>").kernel.family == "elementwise"


def test_a_short_name_does_not_identify_the_build() -> None:
    assert describe("flash_fwd_kernel<64,64x128,w4>").library == "flash2_any"
    assert describe("fmha_cutlassF_f16_aligned_64x64_rf_sm80").library == "efficient_any"
    found = describe("flash_fwd_kernel<64,64x128,w4,causal>").kernel
    assert (found.head_dim, found.tile, found.warps, found.causal) == (64, "64x128", 4, True)


def test_mangled_names_ops_and_transfers() -> None:
    assert describe("_Z15tiled_attentionIfEvi").library == "profharness"
    assert (describe("bmm").library, describe("aten::_softmax").kernel.family) == (
        "aten_op",
        "softmax",
    )
    assert describe("Memset (Device)").kernel.family == "memset"


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_traits_without_a_kernel_are_described(direction: str) -> None:
    """A study contains them without their kernel."""
    found = describe(f"Flash_{direction}_kernel_traits<64, 128, 96, 4>")
    assert found.kernel.family == ("flash" if direction == "fwd" else "flash_bwd")
    parts = {part.parameter: part.token for part in found.parts}
    names = ("kHeadDim", "kBlockM", "kBlockN", "kNWarps")
    assert [parts[name] for name in names] == ["64", "128", "96", "4"]


@pytest.mark.parametrize("name", ["foo_kernel", "void mine::attention<64>(int)", "<<<", "{0}"])
def test_unknown_names_are_reported(name: str) -> None:
    found = describe(name)
    assert not found.is_known
    assert (found.library, found.meaning) == ("unknown", "profharness has no rule for this name")


@given(st.text(alphabet="flash_fwdkernel<>(){},:12x64 w…cudnn*.", max_size=60))
def test_describing_never_raises(name: str) -> None:
    found = describe(name)
    assert found.kernel.family in FAMILIES
    assert found.library in LIBRARIES


def test_a_number_too_long_for_python_is_a_word() -> None:
    found = describe(f"flash_fwd_kernel<Flash_fwd_kernel_traits<{'9' * 5000}, 128, 128, 4>>")
    assert found.kernel.family.startswith("flash")
    assert found.kernel.head_dim is None


def test_short_words_of_flags_are_unique() -> None:
    for table in (FA2_FLAGS, FA3_FLAGS, FLASHINFER_FLAGS):
        words = [word for flag in table for word in (flag.shown, flag.unset) if word]
        assert len(set(words)) == len(words)


def test_the_command_prints_json_and_words() -> None:
    unknown = "mystery"
    done = CliRunner().invoke(cli, ["explain-kernel", FLASH, unknown, "--format", "json"])
    answer = json.loads(done.stdout)
    assert answer["schema"] == "profharness.kernel_name/1"
    first, second = answer["rows"]
    assert (first["tile"], first["causal"], first["dropout"], first["warps"]) == (
        *("64x256", True),
        *(None, 4),
    )
    assert (second["library"], second["parts"]) == ("unknown", [])
    done = CliRunner().invoke(cli, ["explain-kernel", "nvjet_hsh_256x128_64x4_1x2_h_bz_NNT"])
    assert "in steps of depth 64, with 4 buffers" in done.stdout
    assert done.stdout.startswith("A matrix product; from NVIDIA cuBLAS")
    assert "\nbz                   unknown\n" in done.stdout
    assert CliRunner().invoke(cli, ["explain-kernel", " "]).exit_code != 0


@pytest.mark.parametrize("name", ["cudnn_sdpa_sm90_…_64x128x64", "flash_fwd_…kernel<…>"])
def test_a_shortened_name_is_reported(name: str) -> None:
    """Bug: `the name does not contain tile` was said of a shortened name with a tile."""
    text = CliRunner().invoke(cli, ["explain-kernel", name]).stdout
    assert "Parts of the name are missing where it contains …" in text and "--full" in text
    assert "does not contain" not in text


@pytest.mark.parametrize(
    ("name", "stages", "roles"),
    [
        (
            "flash_fwd_splitkv_kernel<64,64x256,w4>",
            "K and V have one buffer each",
            "both loads data and computes",
        ),
        ("flash_bwd_dq_dk_dv<64,128x128,w8>", "Q has two buffers", "both loads data and computes"),
        (
            "fmha_cutlassF_f16_aligned_64x64_rf_sm80",
            "4 buffers, or one for every 32 elements",
            "both loads data and computes",
        ),
        ("fmha_cutlassF_f32_aligned_64x64_rf_sm80", None, "both loads data and computes"),
        ("FlashAttnFwdSm90<128,128x176>", None, "warp group 0 is the producer"),
        ("FlashAttnBwdSm90<128,80x128>", None, "warp 1 writes dQ"),
        ("FlashAttentionForwardSm100", None, "warps 8-11 correct the output"),
        ("cudnn_sdpa_sm90_fprop_wgmma_knob_7_64x128x64", None, None),
        ("flash_fwd_splitkv_combine<64,m8,split2>", None, None),
        ("fmha_cutlassB_f16_aligned_64x64_k64_sm80", None, None),
    ],
)
def test_stages_and_roles_come_from_sources_that_were_read(
    name: str, stages: str | None, roles: str | None
) -> None:
    facts = {fact.property: fact for fact in describe(name).by_source}
    expected = {"stages": stages, "warp roles": roles}
    assert facts.keys() == {key for key, text in expected.items() if text}
    for key, fact in facts.items():
        assert (expected[key] or "") in fact.meaning
        assert fact.source
