"""Kernels of serving traces: names launched by vLLM, SGLang, TensorRT-LLM and xDiT on H100, H200,
B200, MI300 and MI355X.
"""

from __future__ import annotations

import pytest
from nsys_spelling import as_nsys

from profharness.traces.kernel_names import FAMILIES, canonical, parse_kernel_name
from profharness.traces.kernel_names.parts import describe

RAGGED = (
    "void flashinfer::BatchPrefillWithRaggedKVCacheKernel<flashinfer::KernelTraits<"
    "(flashinfer::MaskMode)1, 128u, 2u, 4u, 4u, 4u, 4u, 1u, (flashinfer::PosEncodingMode)0, "
    "__nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, int, flashinfer::DefaultAttention<false, "
    "false, false, false> >, RaggedParams>(RaggedParams)"
)
PAGED = (
    "void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits<"
    "(flashinfer::MaskMode)1, (unsigned int)128, (unsigned int)2, (unsigned int)2, (unsigned int)8,"
    " (unsigned int)8, (unsigned int)4, (unsigned int)1, (flashinfer::PosEncodingMode)0, "
    "__nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, int, flashinfer::DefaultAttention<(bool)0,"
    " (bool)0, (bool)0, (bool)0>>, PagedParams>(T2)"
)
_HOPPER = (
    "flashinfer::AttentionKernelTraits<false, 128, 128, 128, 96, 2, cutlass::bfloat16_t, "
    "cutlass::bfloat16_t, cutlass::bfloat16_t, int, flashinfer::StandardAttention>"
)
HOPPER = (
    "void flashinfer::PrefillWithKVCacheKernel<flashinfer::SparseCollectiveMainloop<"
    f"PagedParams::AdditionalParams, {_HOPPER}, true, false>, flashinfer::CollectiveEpilogue<"
    f"{_HOPPER} >, {_HOPPER}, false, true, flashinfer::BatchPrefillPersistentTileScheduler<int>, "
    "false>(int)"
)
DECODE = (
    "void flashinfer::BatchDecodeWithPagedKVCacheKernel<(flashinfer::PosEncodingMode)0, 2u, 1u, 8u,"
    " 16u, 2u, 4u, flashinfer::DefaultAttention<false, false, false, false>, Params>(Params)"
)
SAGE = (
    "void qk_int_sv_f8_attn_kernel<128u, 64u, 32u, 64u, 128u, (DataType)1, (QuantGranularity)3, "
    "(QuantGranularity)3, float, false, __half, (ComputeUnit)1, (MaskMode)0, false, true, false, "
    "false>(signed char*, signed char*, signed char*, __half*)"
)
SAGE100 = (
    "void qk_int8_sv_f8_attn_kernel_sm100<128u, 128u, 128u, 128u, (QuantGranularity)2, "
    "(QuantGranularity)2, __half, (MaskMode)1, false, true, false>(CUtensorMap_st)"
)
CK_PAGED = (
    "_ZN7ck_tile6kentryILi2ENS_38FmhaBatchPrefillWithPagedKVCacheKernelINS_40BlockFmhaBatchPrefill"
    "PipelineQRKSVSAsyncINS_36BlockFmhaBatchPrefillPipelineProblemIDF16bDF16bDF16bffDF16bhfDF16bfDF"
    "16bNS_13TileFmhaShapeINS_8sequenceIJLi128ELi128ELi32ELi128ELi32ELi128EEEENS5_IJLi4ELi1ELi1EEEE"
)
TENSILE = (
    "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x32x64_MI16x16x1_SN_LDSB1_AFC1_AFEM1_AFEM1_A"
    "SEM1_CLR1_CADS0_DTLA0_DTLB0_DTVA0_DTVB0_EPS0_FDSI0_GRPM1_GRVWA8_GRVWB8_GSUAMBSK_GLS0_ISA942_IU1"
)
ADD_NORM = (
    "std::enable_if<(((8)>(0)))&&vllm::_typeConvert<c10::BFloat16>::exists, void>::type "
    "vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*, long, c10::BFloat16*)"
)
ALL_REDUCE = (
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<(flashinfer::"
    "trtllm_allreduce_fusion::AllReduceFusionPattern)1, __nv_bfloat16, 8, false, false>(int)"
)
GROUPED = (
    "_ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversalINS1_17GroupProblemShapeIN4cute5tuple"
    "IJiiiEEEEE"
)


@pytest.mark.parametrize(
    ("name", "backend", "dtype", "head_dim", "tile", "causal"),
    [
        (RAGGED, "flashinfer", "bf16", 64, "128x64", True),
        (PAGED, "flashinfer", "bf16", 128, "128x32", True),
        (HOPPER, "flashinfer", "bf16", 128, "128x96", True),
        (DECODE, "flashinfer", None, 128, "2x8", None),
        ("flashinfer::PrefillWithKVCacheKernel", "flashinfer", None, None, None, None),
        (
            "void cutlass::device_kernel<flashinfer::PrefillWithKVCacheKernel<int> >(int)",
            *("flashinfer", None, None, None, None),
        ),
        (
            "void flashinfer::mla::hopper::BatchMLAPageAttentionHopperKernel<int>(int)",
            *("flashinfer", None, None, None, None),
        ),
        (SAGE, "sage", "fp16", 128, "128x64", False),
        (SAGE100, "sage", "fp16", 128, "128x128", True),
        ("sage_fwd", "sage", None, None, None, None),
        (
            "fmhaSm100fKernel_QkvFp16OFp16H128PagedKvCausalP64MultiCtasKvVarSeqQ32Kv128StaticSwaps",
            *("trtllm", "fp16", 128, "32x128", True),
        ),
        (
            "fmhaSm100aKernel_QkvE4m3OBfloat16H64PagedKvSlidingOrChunkedCausalP16VarSeqQ128Kv128"
            "PersistentContext",
            *("trtllm", "fp8_e4m3", 64, "128x128", True),
        ),
        (
            "fmha_v2_flash_attention_bf16_64_128_S_qkv_128_causal_tma_ws_sm90_kernel",
            *("trtllm", "bf16", 128, "64x128", True),
        ),
        (CK_PAGED, "ck", "bf16", 128, "128x128", None),
        (
            "void ck_tile::kentry<2, ck_tile::FmhaFwdKernel<ck_tile::BlockFmhaPipelineQRKSVSAsync<"
            "ck_tile::TileFmhaShape<ck_tile::sequence<128, 64, 32, 128, 32, 128>, 1> > > >(int)",
            *("ck", None, 128, "128x64", None),
        ),
        (
            "_ZN5aiter32fmha_fwd_hd128_bf16_causal_groupE",
            *("aiter", "bf16", 128, None, True),
        ),
        (
            "aiter::fmha_fwd_hd192_hd128_bf16_causal_group",
            *("aiter", "bf16", 192, None, True),
        ),
        ("aiter::mla_dec_stage1_bf16_a16w16_subQ16_mqa16", "aiter", "bf16", None, None, None),
        ("aiter::mla_pfl_qh192_vh128_m32x8_n128x1_causal1", "aiter", None, None, None, True),
        ("_ZN5aiter42pa_bf16_pertokenFp8_gqa10_1tg_4w_mtp3_msk1E", "aiter", "bf16", *[None] * 3),
        (
            "void sm90::flash_fwd_splitkv_mla_kernel<Flash_fwd_mla_kernel_traits_sm90<"
            "cutlass::bfloat16_t> >(Flash_fwd_mla_params)",
            *("flashmla", "bf16", None, None, None),
        ),
        (
            "void cutlass::device_kernel<cutlass::fmha::kernel::Sm100FmhaMlaKernelTmaWarpspecialized"
            "<cute::tuple<cute::C<128> >, cutlass::bfloat16_t, float> >(int)",
            *("cutlass", "bf16", None, None, None),
        ),
        (
            "void vllm::paged_attention_v1_kernel<unsigned short, unsigned short, 128, 16, 128, "
            "(vllm::Fp8KVCacheDataType)0, false>(unsigned short*)",
            *("vllm", None, None, None, None),
        ),
        (
            "void paged_attention_ll4mi_QKV_mfma16_kernel<0, __hip_bfloat16, __hip_bfloat16, "
            "(vllm::Fp8KVCacheDataType)0, 1, 128, 256, false, 4, 1>(__hip_bfloat16 const*)",
            *("unknown", "bf16", None, None, None),
        ),
        ("kernel_unified_attention_2d", "triton", None, None, None, None),
        ("_fwd_grouped_kernel_stage1", "triton", None, None, None, None),
    ],
)
def test_attention_of_other_libraries(
    name: str,
    backend: str,
    dtype: str | None,
    head_dim: int | None,
    tile: str | None,
    causal: bool | None,
) -> None:
    found = parse_kernel_name(canonical(name))
    family = backend if backend in ("aiter", "ck") else "fmha"
    assert (found.family, found.backend, found.direction) == (family, backend, "fwd")
    assert (found.dtype, found.head_dim, found.tile) == (dtype, head_dim, tile)
    assert found.causal is causal
    nsys = parse_kernel_name(as_nsys(canonical(name)))
    assert (nsys.family, nsys.head_dim, nsys.tile) == (family, head_dim, tile)


@pytest.mark.parametrize(
    ("name", "family", "backend"),
    [
        ("aiter::fmha_bwd_hd128_bf16_causal_a32_rtne", "aiter_bwd", "aiter"),
        ("_ZN5aiter30fmha_bwd_hd128_dq_convert_fp16E", "aiter_bwd", "aiter"),
        ("_fwd_kernel_stage2", "fmha_combine", "triton"),
        ("reduce_segments", "fmha_combine", "triton"),
        (
            "void kn_mla_reduce_v1<MlaReduceKernelV1Traits<512, 16, 1>, float>",
            *("aiter_combine", "aiter"),
        ),
        (
            "void flash_fwd_mla_combine_kernel<cutlass::bfloat16_t, 4>(int)",
            "fmha_combine",
            "flashmla",
        ),
        (
            "void vllm::paged_attention_v2_reduce_kernel<unsigned short, 128, 128, 512>(int)",
            *("fmha_combine", "vllm"),
        ),
        (
            "void flashinfer::PersistentVariableLengthMergeStatesKernel<8u, 16u, __nv_bfloat16>(int)",
            *("fmha_combine", "flashinfer"),
        ),
        (
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "collective",
            "nccl",
        ),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)", "collective", "nccl"),
        ("mscclKernel_Sum_float_LL_false(ncclDevComm*)", "collective", "unknown"),
        (ALL_REDUCE, "collective", "flashinfer"),
        (
            "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(int)",
            *("collective", "unknown"),
        ),
        ("void sglang::cross_device_reduce_1stage<__nv_bfloat16, 4>(int)", "collective", "sglang"),
        ("fused_moe_kernel", "moe", "unknown"),
        ("void moeTopK<256>(float const*, bool const*)", "moe", "unknown"),
        ("void vllm::moe::topkGatingSoftmax<4, 128, 4, 16, 32, int>(int)", "moe", "vllm"),
        (
            "void moe::dev::finalize::finalizeKernelVecLoad<moe::dev::finalize::KernelParams<"
            "cutlass::bfloat16_t, cutlass::bfloat16_t, 4, true> >(int)",
            *("moe", "trtllm"),
        ),
        (
            "void ck_tile::kentry<2, ck_tile::MoeSortingMultiPhaseKernel_P23<int> >(int)",
            *("moe", "ck"),
        ),
        ("_ZN5aiter59fmoe_stage1_bf16_pertokenFp8_blockscale_g1u1_32x128_3tg_pf3E", "moe", "aiter"),
        ("void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*)", "rope", "vllm"),
        (
            "void flashinfer::BatchQKApplyRotaryPosIdsCosSinCacheKernel<true, 64u>(int)",
            *("rope", "flashinfer"),
        ),
        (ADD_NORM, "norm", "vllm"),
        (
            "_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi256ELi16ELb1ELb0ELb1ELi1EEEvPT0_PT_",
            *("norm", "aiter"),
        ),
        (
            "kernel_cutlass_kernel_flashinfernormkernelsfused_add_rmsnormFusedAddRMSNormKernel_"
            "object_at__tensorptrbf16gmemalign128o409640961_0",
            *("norm", "flashinfer"),
        ),
        (
            "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, "
            "float>(int)",
            *("norm", "aten"),
        ),
        (
            "void vllm::scaled_fp8_quant_kernel_strided<c10::BFloat16, c10::Float8_e4m3fn>(int)",
            *("quantize", "vllm"),
        ),
        (
            "void QuantInt8Kernel<128u, 32u, 1u, false, false, __nv_bfloat16>(int)",
            "quantize",
            "sage",
        ),
        (
            "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, unsigned char, "
            "(vllm::Fp8KVCacheDataType)1>(int)",
            *("copy", "vllm"),
        ),
        ("set_mla_kv_buffer_kernel", "copy", "unknown"),
        (
            "_ZN7sgl_hip10activation18act_and_mul_kernelI14__hip_bfloat16TnPFT_RKS3_EXadL_Z4siluIS2_",
            *("elementwise", "sglang"),
        ),
        ("_w8a8_block_fp8_matmul", "gemm", "unknown"),
        ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<2112u, 7168u>(int)", "gemm", "deepgemm"),
        (GROUPED, "gemm", "cutlass"),
    ],
)
def test_kernels_around_attention(name: str, family: str, backend: str) -> None:
    found = parse_kernel_name(canonical(name))
    assert (found.family, found.backend) == (family, backend)
    assert found.family in FAMILIES


@pytest.mark.parametrize(
    ("name", "backend", "arch", "dtype", "tile", "stages"),
    [
        (TENSILE, "tensile", "gfx942", "bf16", "256x32x64", None),
        (
            "bmm_E4m3_E4m3E4m3_Fp32_t128x16x128u2_s6_et64x16_m64x16x32_c1x1x1_rM_TN_dynB_sm100f",
            *("trtllm", "sm100", "fp8_e4m3", "128x16x128", 6),
        ),
        (
            "bmm_Bfloat16_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_et128x16_m128x16x32_dynBatch_sm100f",
            *("trtllm", "sm100", None, "128x16x256", 3),
        ),
        (
            "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1_swiglu",
            *("triton", None, None, "16x128x256", None),
        ),
    ],
)
def test_products_have_their_tiles(
    name: str, backend: str, arch: str | None, dtype: str | None, tile: str, stages: int | None
) -> None:
    found = parse_kernel_name(name)
    assert (found.family, found.backend, found.arch) == ("gemm", backend, arch)
    assert (found.dtype, found.tile, found.stages) == (dtype, tile, stages)


@pytest.mark.parametrize(
    "name",
    [
        "create_flashinfer_kv_indices_triton",
        "rejection_greedy_sample_kernel",
        "kn_get_mla_metadata_v1_2",
        "get_mla_metadata_kernel",
        "void deep_gemm::sm90_fp8_paged_mqa_logits<64u, 64u>(int)",
        "void tensorrt_llm::kernels::topKPerRowDecode<512, true>(float const*)",
        "_topk_forward",
        "my_attention_kernel",
        "normal_kernel",
        "european_copper",
    ],
)
def test_ambiguous_names_are_other(name: str) -> None:
    assert parse_kernel_name(canonical(name)).family == "other"


@pytest.mark.parametrize(
    "name",
    [
        TENSILE.replace("256x32x64", f"{'9' * 5000}x32x64"),
        RAGGED.replace("128u", "9" * 1500),
        f"nvjet_tst_{'9' * 5000}x64_64x16_2x1_v_bz_TNT",
        f"fmhaSm100fKernel_QkvFp16OFp16H{'9' * 5000}PagedKvCausalVarSeqQ32Kv128",
    ],
)
def test_a_number_too_long_for_a_size_is_omitted(name: str) -> None:
    found = parse_kernel_name(name)
    sizes = (found.head_dim, found.tile_m, found.tile_n, found.tile_k, found.stages, found.warps)
    assert all(size is None or size < 10**9 for size in sizes)


# From vLLM on an MI300X, recorded with rpd. The first template argument is the block size.
CK_FMHA = (
    "_ZN7ck_tile6kentryILi256ELi2ENS_13FmhaFwdKernelINS_26FmhaFwdTilePartitioner_HBSINS_13TileFmha"
    "ShapeINS_8sequenceIJLi128ELi128ELi32ELi128ELi32ELi128EEEENS4_IJLi4ELi1ELi1EEEENS4_IJLi32ELi32E"
    "Li16EEEES6_S7_Lb1EEEEENS_28BlockFmhaPipelineQRKSVSAsyncINS_24BlockFmhaPipelineProblemIDF16_DF16"
    "_DF16_ffDF16_hfDF16_fDF16_S8_Lb1ENS_30SimplifiedGenericAttentionMaskILb1EEENS_14TileFmhaTraits"
    "ILb1ELb1ELb1ELb1ELNS_22BlockAttentionBiasEnumE0ELb0ELb1ELb0ELb0ELin1EEEEENS_35BlockFmhaPipeline"
    "QXKSVSCustomPolicyILb1ELb1ELb0ELi3ELi3EEEEENS_17Default2DEpilogueINS_24Default2DEpilogueProblem"
    "IfDF16_Lb1ELb1EEEvEEEEJNSP_21FmhaFwdGroupModeKargsEEEEvDpT2_"
)


def test_a_kernel_of_composable_kernel_with_two_numbers_is_attention() -> None:
    for name in (CK_FMHA, canonical(CK_FMHA)):
        kernel = parse_kernel_name(name, "kernel")
        assert (kernel.family, kernel.backend, kernel.direction) == ("ck", "ck", "fwd")
        assert (kernel.head_dim, kernel.tile_m, kernel.tile_n) == (128, 128, 128)
        assert kernel.dtype == "fp16"


@pytest.mark.parametrize(
    ("name", "short", "stages", "warps"),
    [
        (RAGGED, "BatchPrefillWithRaggedKVCacheKernel<64,128x64,w4,causal>", None, 4),
        (PAGED, "BatchPrefillWithPagedKVCacheKernel<128,128x32,w4,causal>", None, 4),
        (
            PAGED.replace("MaskMode)1", "MaskMode)0"),
            "BatchPrefillWithPagedKVCacheKernel<128,128x32,w4>",
            *(None, 4),
        ),
        (
            PAGED.replace("MaskMode)1", "MaskMode)2").replace("<(bool)0", "<(bool)1"),
            "BatchPrefillWithPagedKVCacheKernel<128,128x32,w4,custom>",
            *(None, 4),
        ),
        (HOPPER, "PrefillWithKVCacheKernel<128,128x96,s2,causal>", 2, None),
        (
            HOPPER.replace("StandardAttention", "LogitsSoftCap").replace(
                ">, false, true, f", ">, true, false, f"
            ),
            "PrefillWithKVCacheKernel<128,128x96,s2,local,softcap>",
            *(2, None),
        ),
        (DECODE, "BatchDecodeWithPagedKVCacheKernel<128,2x8,s2,w4>", 2, 4),
    ],
)
def test_short_names_of_flashinfer_show_the_sizes(
    name: str, short: str, stages: int | None, warps: int | None
) -> None:
    kernel = parse_kernel_name(name)
    assert (kernel.short, kernel.stages, kernel.warps) == (short, stages, warps)
    whole, of_short = describe(name), describe(short)
    assert not of_short.unknown
    assert whole.unknown == ()
    assert whole.by_source == of_short.by_source != ()
    for field in ("head_dim", "tile", "stages", "warps", "family", "backend"):
        assert getattr(of_short.kernel, field) == getattr(kernel, field)
    # a short name shows a causal mask only if there is one
    assert of_short.kernel.causal is (kernel.causal or None)


def test_a_template_of_another_release_has_no_sizes() -> None:
    """FlashInfer 0.2.0 has one head dimension in the traits, and no traits for other GPUs."""
    hopper = HOPPER.replace("128, 128, 128, 96, 2", "128, 128, 96, 2")
    older = "void flashinfer::BatchPrefillWithPagedKVCacheKernel<(flashinfer::MaskMode)1, 2u>(int)"
    for name in (hopper, older):
        kernel = parse_kernel_name(name)
        assert (kernel.backend, kernel.family) == ("flashinfer", "fmha")
        assert (kernel.head_dim, kernel.tile, kernel.stages, kernel.warps) == (None,) * 4
        assert "CTA_KV" not in {part.parameter for part in describe(name).parts}
