"""Kernels of ROCm: names from public traces, sources and issues of AMD's libraries."""

from __future__ import annotations

import re
from pathlib import Path

import check_rocm_names
import pytest
from test_rocm_kineto import launch, write

from profharness.measurements.agreement import FAMILY_BACKENDS
from profharness.program.roles import role
from profharness.rows import KernelRow
from profharness.traces.kernel_names import ATTENTION_FAMILIES, canonical, parse_kernel_name
from profharness.traces.kernel_names.parts import describe

ROOT = Path(__file__).resolve().parents[2]
CK_BACKWARD = "_ZN7ck_tile6kentryILi1ENS_19FmhaBwdDQDKDVKernelINS_2"  # cut off by torch's table
CK_DOT = "_ZN7ck_tile6kentryILi2ENS_22FmhaBwdOGradDotOKernelIN"
CK_COMBINE = (
    "void ck_tile::kentry<256, 2, ck_tile::FmhaFwdSplitKVCombineKernel<ck_tile::"
    "BlockFmhaFwdSplitKVCombinePipeline<ck_tile::BlockFmhaSplitKVCombinePipelineProblem<float, "
    "float, _Float16, 128, false, 32, ck_tile::TileFmhaFwdSplitKVCombineTraits<true, true, true, "
    "false, 4, -1> > > > >(int)"
)
# From a trace of llama.cpp by rocprofv3
TILE = (
    "void flash_attn_tile<256, 256, 8, 4, false>(char const*, char const*, char const*, "
    "char const*, char const*, int const*, float*, HIP_vector_type<float, 2u>*)"
)
TENSILE = (
    "Cijk_Alik_Bljk_BBS_BH_UserArgs_MT128x128x64_MI16x16x1_SN_AFC1_GSUAMB_ISA950_MIWT2_2_WG32_8_1"
)
NAMES = [
    # AOTriton, tritonsrc/flash.py
    ("attn_fwd", "aotriton", "aotriton", "attention"),
    ("bwd_kernel_dk_dv", "aotriton_bwd", "aotriton", "attention_bwd"),
    ("bwd_kernel_dq", "aotriton_bwd", "aotriton", "attention_bwd"),
    ("bwd_kernel_fuse", "aotriton_bwd", "aotriton", "attention_bwd"),
    ("bwd_preprocess", "aotriton_bwd", "aotriton", "bwd_preprocess"),
    ("bwd_preprocess_varlen", "aotriton_bwd", "aotriton", "bwd_preprocess"),
    ("bwd_postprocess", "aotriton_bwd", "aotriton", "bwd_postprocess"),
    ("debug_simulate_encoded_softmax", "aotriton", "aotriton", "helper"),
    # Triton kernels by others
    ("_attn_fwd", "triton", "triton", "attention"),
    ("_bwd_kernel_dkdv", "triton", "triton", "attention_bwd"),
    # Composable Kernel
    (CK_BACKWARD, "ck_bwd", "ck", "attention_bwd"),
    (CK_DOT, "ck_bwd", "ck", "bwd_preprocess"),
    (
        "void ck_tile::kentry<1, ck_tile::FmhaBwdConvertQGradKernel<int> >(int)",
        *("ck_bwd", "ck", "bwd_postprocess"),
    ),
    (
        "void ck_tile::kentry<2, ck_tile::FmhaFwdSplitKVKernel<int> >(int)",
        *("ck", "ck", "attention"),
    ),
    (CK_COMBINE, "ck_combine", "ck", "combine"),
    ("_ZN7ck_tile6kentryILi1ENS_13FmhaFwdKernelEEEvv", "ck", "ck", "attention"),
    (
        "void ck_tile::kentry<2, ck_tile::UnifiedAttentionKernel<int> >(int)",
        *("ck", "ck", "attention"),
    ),
    ("void ck_tile::kentry<2, ck_tile::FmhaFwdAppendKVKernel<int> >(int)", "copy", "ck", None),
    # aiter
    ("aiter::fmha_fwd_hd128_bf16_causal_rtna_group", "aiter", "aiter", "attention"),
    ("aiter::fmha_bwd_hd128_bf16_causal_a16_psskddv", "aiter_bwd", "aiter", "attention_bwd"),
    ("_ZN5aiter30fmha_bwd_hd128_dq_convert_fp16E", "aiter_bwd", "aiter", "bwd_postprocess"),
    ("_ZN5aiter44PA_A16W8_BLK256_1TG_4W_16mx1_64nx4_MTP_PS_PBE", "aiter", "aiter", "attention"),
    ("aiter::mla_dec_stage1_bf16_a16w16_subQ16_mqa16", "aiter", "aiter", "attention"),
    ("fmha_v3_bwd_hd128_bf16", "aiter_bwd", "aiter", "attention_bwd"),
    ("mha_batch_prefill_bf16_causal", "fmha", "unknown", "attention"),
    (
        "_ZN5aiter59fmoe_stage1_bf16_pertokenFp8_blockscale_g1u1_32x128_3tg_pf3E",
        "moe",
        "aiter",
        None,
    ),
    ("_ZN5aiter33f4gemm_bf16_per1x32Fp4_tn_256x256E", "gemm", "aiter", None),
    # vLLM and llama.cpp
    ("kernel_paged_attention_2d", "fmha", "triton", "attention"),
    ("kernel_unified_attention_3d", "fmha", "triton", "attention"),
    ("reduce_segments", "fmha_combine", "triton", "combine"),
    (TILE, "fmha", "ggml", "attention"),
    ("void flash_attn_combine_results<256>(float const*)", "fmha_combine", "ggml", "combine"),
    ("void mul_mat_q<(ggml_type)14, 64, false>(char const*)", "gemm", "ggml", None),
    ("void mul_mat_vec_dq_q6_K<32, 1>(void const*)", "gemv", "ggml", None),
    ("void gated_delta_net_cuda<128, false, false>(float const*)", "recurrence", "unknown", None),
    ("void k_get_rows_float<float, float>(float const*)", "copy", "ggml", None),
    (
        "void unary_gated_op_kernel<&(op_silu(float)), float>(float const*)",
        "elementwise",
        "ggml",
        None,
    ),
    ("void wvSpltK_hf_sml_<64, 4, 16, 8, 1, 4>(int)", "gemm", "unknown", None),
    # rocBLAS, hipBLASLt, MIOpen, RCCL, rocPRIM and the HIP runtime
    ("rocblas_gemvn_kernel", "gemv", "rocblas", None),
    ("rocblas_symv_kernel_upper_double", "other", "rocblas", None),
    ("Cijk_SB_GG_BiasS_HAS_ScaleAlphaVec_PostGSU8_VW2", "gemm", "tensile", None),
    ("Cijk_B_PostGSU16", "gemm", "tensile", None),
    ("miopenSp3AsmConv_v21_1_3_gfx9_fp32_f2x3_stride1", "convolution", "miopen", None),
    ("naive_conv_ab_nonpacked_fwd_nchw_ushort_double_ushort_0", "convolution", "miopen", None),
    ("igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x256x32_wt32x32x8", "convolution", "miopen", None),
    (
        "_ZN2ck16tensor_operation6device37kernel_batched_gemm_xdlops_bwd_weightINS_47GridwiseGemm",
        *("convolution", "ck", None),
    ),
    ("MIOpenBatchNormFwdTrainSpatial", "norm", "miopen", None),
    ("SubTensorOpWithScalar1d", "elementwise", "miopen", None),
    ("transpose_CNHW2NCHW_V2_2D_WG_off64", "copy", "miopen", None),
    ("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", "collective", "nccl", None),
    (
        "void rocprim::detail::single_scan_kernel<false, rocprim::detail::wrapped_scan_config<"
        "rocprim::default_config, int>, int const*, int*, std::plus<int>, int, int>(int const*)",
        *("other", "rocprim", None),
    ),
    ("__amd_rocclr_copyBuffer", "memcpy", "rocclr", None),
    ("__amd_rocclr_fillBufferAligned", "memset", "rocclr", None),
]


@pytest.mark.parametrize(("name", "family", "library", "expected"), NAMES)
def test_kernels_of_amd(name: str, family: str, library: str, expected: str | None) -> None:
    name = canonical(name)
    found = parse_kernel_name(name)
    assert (found.family, found.backend) == (family, library)
    assert (family in ATTENTION_FAMILIES) is (expected is not None and family != "triton")
    if expected is None:
        return
    assert (found.direction == "bwd") is family.endswith("_bwd") or family == "triton"
    fields = dict.fromkeys(KernelRow.__dataclass_fields__)
    fields |= {"kernel": name, "kernel_short": found.short, "family": family, "launches": 1}
    fields |= {"kernel_kind": "kernel", "metrics": {}, "cell": "c0"}
    assert role(KernelRow(**fields)) == expected  # type: ignore[arg-type]


def test_every_family_of_attention_has_a_backend() -> None:
    assert ATTENTION_FAMILIES - FAMILY_BACKENDS.keys() == set()


@pytest.mark.parametrize(
    ("name", "dtype", "tile", "arch"),
    [
        (TENSILE, "bf16", "128x128x64", "gfx950"),
        (
            "Custom_Cijk_Alik_Bljk_BBS_BH_MT256x256x64_MI16x16x1_UserArgs_shortname1_gfx950",
            *("bf16", "256x256x64", "gfx950"),
        ),
        (
            "Cijk_Alik_Bljk_F8HS_BH_BiasSH_AS_SAB_SAV_UserArgs_MT256x224x128_MI16x16x1_SN",
            *("fp8_e4m3", "256x224x128", None),
        ),
        ("Cijk_Ailk_Bljk_F8B8BS_BH_MT64x32x256_MI16x16x1_ISA942", None, "64x32x256", "gfx942"),
        (
            "Cijk_Ailk_Bjlk_SB_Bias_AS_SAV_UserArgs_MT64x16x16_MI16x16x1_SN_LDSB0_ISA90a_IU1",
            *("fp32", "64x16x16", "gfx90a"),
        ),
        ("Cijk_Ailk_Bljk_HHS_BH_MT32x32x64_SN_ISA90_IU1", "fp16", "32x32x64", None),
    ],
)
def test_names_of_tensile_have_types_and_tiles(
    name: str, dtype: str | None, tile: str, arch: str | None
) -> None:
    found = parse_kernel_name(name)
    assert (found.family, found.dtype, found.tile, found.arch) == ("gemm", dtype, tile, arch)
    tokens = {part.token: part.meaning for part in describe(name).parts}
    assert tokens[f"MT{tile}"] is not None
    assert tokens["Cijk"] is not None


@pytest.mark.parametrize(
    ("name", "token", "meaning"),
    [
        (CK_BACKWARD, "DQDKDV", "gradients of queries, keys and values"),
        (CK_COMBINE, "SplitKVCombine", "combines the partial outputs for the split keys"),
        ("bwd_kernel_dk_dv", "dk_dv", "gradients of keys and values"),
        ("aiter::fmha_fwd_hd128_bf16_causal_group", "causal", "a query does not attend to later keys"),
        ("_ZN5aiter42pa_bf16_pertokenFp8_gqa10_1tg_4w_mtp3_msk1E", "gqa10", "10 query heads share a head of keys"),
        (TENSILE, "Alik", "A is transposed"),
    ],
)  # fmt: skip
def test_words_of_amd(name: str, token: str, meaning: str) -> None:
    assert {part.token: part.meaning for part in describe(name).parts}[token] == meaning


def test_attention_of_llama_cpp_has_its_head_dimension() -> None:
    assert parse_kernel_name(TILE).head_dim == 256


def test_the_check_finds_unknown_kernels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "t.json", launch(1, "hipLaunchKernel"))
    assert check_rocm_names.main(tmp_path) == 0
    assert "0.00% of the time of 1 kernels" in capsys.readouterr().out
    text, is_known = check_rocm_names.check(check_rocm_names.Counter(attn_fwd=97, mystery=3))
    assert (text.splitlines()[1], is_known) == ("  3.00% mystery", False)
    assert check_rocm_names.check(check_rocm_names.Counter(attn_fwd=98, mystery=2))[1]
    assert check_rocm_names.check(check_rocm_names.Counter(mystery=2))[1]  # no attention


def test_kernels_of_the_tests_are_known() -> None:
    """At most 2 % of the kernels in tests of ROCm are unknown."""
    names = {
        name
        for path in Path(__file__).parent.glob("*rocm*.py")
        if path.name != Path(__file__).name
        for name in re.findall(
            r'"((?:void ck_tile::|attn_fwd|Cijk_)[^"]*)"', path.read_text("utf-8")
        )
    }
    assert names
    assert not [name for name in names if parse_kernel_name(name).family == "other"]
