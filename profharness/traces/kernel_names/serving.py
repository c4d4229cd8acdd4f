"""Parse the names of kernels in serving and training programs by the words in the names.

These kernels compute attention (in libraries outside of PyTorch), collectives, experts, rotary
embeddings, norms and quantization, or write to caches. The words come from the source files that
comments name, and from public traces of vLLM, SGLang and xDiT in TraceLens (171dd74). The traces
were recorded on H100, B200, MI210 and MI300. The words of kernels in llama.cpp (ggml-cuda) and
MIOpen come from public traces too.
"""

from __future__ import annotations

import re
from typing import Any

from profharness.dtypes import OF_CPP_TYPE
from profharness.traces.kernel_names.text import (
    WRAPPER,
    Head,
    KernelName,
    generic_short,
    integers,
    join_short,
    mangled_numbers,
    mangled_path,
    template_arguments,
)

_READ = 2048
_WORD, _END = r"(?<![a-z\d])", r"(?![a-z])"

# The patterns are searched in the words of the path, in this order. The first match determines the
# family. The order gives the main purpose of a kernel priority over a norm, a rotation or a
# quantization that is fused into the kernel. Each row also contains plain texts. Every match of the
# pattern contains at least one of these texts. Searching for the texts first is a hundred times
# faster.
_ROWS = (
    (
        "fmha_combine",
        "reduc merge_ _stage2 combine attention_sum _fixup",
        # Triton kernels in vLLM triton_unified_attention.py, SGLang and vLLM decode_attention.py
        r"^reduce_segments$|^_fwd_kernel_stage2|merge_attn_states"
        # kernels from vLLM csrc/attention/attention_kernels.cuh and csrc/rocm/attention.cu
        r"|paged_attention_(?:v2|ll4mi|decode_\w+?)_reduce|paged_attn_decode_\w*reduce"
        # kernels from aiter 0.1.20 (csrc/kernels/mla, ops/triton), and FmhaFwdSplitKVCombine from
        # Composable Kernel
        rf"|{_WORD}mla_(?:decode_fwd_|prefill_|softmax_)?reduce|fmha_fwd_split_kv_combine"
        # kernels from FlashInfer 0.6.18 (attention/cascade.cuh, fmhaReduction) and FlashMLA 9241ae3
        r"|flashinfer::[\w:]*(?:merge_states?_|attention_sum_kernel)|fmha_reduction_kernel"
        r"|flash_fwd_(?:splitkv_)?mla_combine"
        # kernels from llama.cpp, ggml-cuda/fattn-common.cuh
        r"|^flash_attn_(?:combine_results|stream_k_fixup)",
    ),
    # kernels from aiter 0.1.20 (hsa/*/fmha_v3_bwd), Composable Kernel (FmhaBwd…) and CUTLASS
    # (examples/77)
    ("fmha_bwd", "fmha_bwd_ fmha_v3_bwd", rf"{_WORD}(?:sm\d+_)?fmha_(?:v3_)?bwd(?:_|$)"),
    (
        "fmha",
        "attention attn mha_ mla_ pa_ _stage1 _with_ kernel_mha qk_int sage_fwd",
        # Triton kernels in vLLM triton_unified_attention.py and chunked_prefill_paged_decode.py,
        # and in SGLang
        r"^_?kernel_(?:unified|paged)_attention_\w*\dd|^_fwd_(?:grouped_)?kernel_stage1"
        # kernels from vLLM (csrc/attention/paged_attention_v1.cu, csrc/rocm/attention.cu) and aiter
        r"|(?:^|::)paged_attention_(?:v[12]_kernel|ll4mi_qkv)|^_?paged_attn_decode_v"
        # kernels from FlashInfer 0.6.18, attention/{prefill,decode,mla,pod}.cuh and hopper/
        r"|flashinfer::[\w:]*(?:(?:prefill|decode|pod)_with_\w*kv|mla_paged?_attention)"
        # fmha_v2 and masked multi-head attention from TensorRT-LLM, and XQA from FlashInfer 0.6.18
        r"|^fmha_v2_flash_attention|(?:^|::)masked_multihead_attention_kernel|^kernel_mha$"
        # kernels from SageAttention 2.2 (csrc/qattn), and their Triton version from aiter
        r"|(?:^|::)qk_int\d*_sv_f\d|^_?sage_fwd"
        # kernels from FlashMLA 9241ae3 (csrc/sm90, csrc/sm100) and CUTLASS (examples/77, which vLLM
        # and SGLang use for MLA)
        rf"|flash_fwd_(?:splitkv_)?mla_|(?:^|::)sparse_attn_fwd|{_WORD}sm\d+_fmha_"
        # kernels from aiter 0.1.20 (hsa/*/{fmha_v3_fwd,mla,pa}) and Composable Kernel (Fmha…Kernel)
        r"|^aiter::(?:fmha_fwd_|mla_(?:dec|pfl|prefill|a\d+w\d+|stage1)|pa_(?:[bf]+p?16|a\d|decode))"
        rf"|{_WORD}fmha_v3_fwd|{_WORD}mha_batch_prefill|^_mla_(?:decode|prefill)_fwd_kernel"
        r"|^ck_tile::(?:fmha_(?!fwd_append)|unified_attention)"
        # kernels from llama.cpp, ggml-cuda/fattn-*.cuh
        r"|^flash_attn_(?:tile|vec|ext_f16|ext_vec|vec_ext)(?:_|$)",
    ),
    # kernels from flash-linear-attention, Mamba (causal_conv1d, selective_scan, ssd_*.py), vLLM and
    # SGLang, and from llama.cpp (gated_delta_net.cu, ssm-*.cu, wkv.cu, gla.cu)
    (
        "recurrence",
        "delta ssm_ causal_conv1d selective_scan rwkv linear_attn chunk_scan state_passing",
        r"gated_delta|delta_rule|(?:^|::)ssm_(?:conv|scan)|causal_conv1d|selective_scan|rwkv_wkv"
        r"|^gated_linear_attn|^_(?:chunk_scan|state_passing)_fwd",
    ),
    (
        "collective",
        "ccl all reduce deep_ep moe_a2",
        # kernels from NCCL, RCCL, MSCCL, PyTorch's symmetric memory and vLLM's
        # custom_all_reduce.cuh
        rf"{_WORD}(?:nccl|rccl|msccl)_|{_WORD}(?:all_?reduce|all_?gather|reduce_?scatter){_END}"
        rf"|{_WORD}(?:all_?to_?all|cross_device_reduce|quick_?reduce){_END}"
        # kernels from DeepEP (csrc/kernels), and from TensorRT-LLM, which exchange tokens between
        # experts
        rf"|{_WORD}deep_ep::|moe_a2_?a_",
    ),
    (
        "moe",
        "moe expert rout topk reorder bitmatrix expand_input",
        # kernels from vLLM (csrc/moe, fused_moe.py), SGLang (sgl-kernel/csrc/moe), TensorRT-LLM
        # (routing, cutlass_kernels), aiter (fmoe), Composable Kernel (MoeSorting) and
        # triton_kernels
        rf"{_WORD}(?:f?moe|experts?|routing|router|topk_gating){_END}"
        rf"|{_WORD}(?:grouped_topk|expand_input_rows|(?:pre|post)_reorder|sum_bitmatrix_rows)",
    ),
    # kernels from vLLM (csrc/pos_encoding_kernels.cu), FlashInfer (pos_enc.cuh) and aiter
    # (kn_entry)
    ("rope", "rope rotary kn_entry", rf"{_WORD}(?:m?rope|rotary){_END}|{_WORD}kn_entry_[12]c_"),
    # kernels from vLLM (csrc/layernorm_kernels.cu), FlashInfer (norm.cuh), aiter, Composable Kernel
    # and MIOpen
    (
        "norm",
        "norm _rms_ ::ln_",
        rf"(?:rms|layer|group|batch|qk|l2)_?norm(?:2d)?{_END}|_fused_rms_|::ln_[fb]wd",
    ),
    # kernels from llama.cpp, ggml-cuda/mmv*.cu, dmmv.cu and mm*.cu
    ("gemv", "mul_mat_vec", r"^(?:dequantize_)?mul_mat_vec"),
    ("gemm", "mul_mat_", r"^mul_mat_"),
    # kernels from MIOpen (src/kernels), Composable Kernel and cuDNN
    (
        "convolution",
        "conv igemm_ im2 im3 col2im xdlops_bwd winograd grad",
        r"^(?:mi_?open|naive)\w*?_conv|^gridwise_convolution|^igemm_(?:fwd|bwd|wrw)_"
        r"|^im[23]d?2?_?col|^col2_?im|^(?:mi_?open_?)?winograd|^ck::\w[\w:]*(?:_conv\d?d?(?:_|nd)"
        r"|xdlops_bwd_(?:weight|data))|^conv\d{1,2}x\d{1,2}"
        r"|^(?:im|ex)plicit_convolve|^cudnn::[\w:]*(?:[dw]grad|winograd|conv)",
    ),
    # kernels from vLLM (csrc/quantization), SGLang (per_token_group_quant), FlashInfer and
    # SageAttention 2.2 (csrc/fused, in which mean_scale writes V in 8 bits)
    (
        "quantize",
        "quant mean_scale",
        rf"(?<![a-z])(?:de|re)?quant(?:iz\w*)?{_END}|^mean_scale_kernel",
    ),
    (
        "copy",
        "cache kv_buffer paged_kv copy_ swap_ concat transpose append_kv cpy_ _rows convert_unary"
        " sub_tensor",
        # kernels from vLLM (csrc/cache_kernels.cu), SGLang (kvcache.cuh) and FlashInfer (page.cuh)
        r"(?:reshape|concat|cat)_and_cache|store_(?:mla_)?kv_?cache|set_(?:mla_)?kv_buffer"
        r"|append_paged_kv|(?:^|::)(?:copy_blocks|swap_blocks|gather_cache|concat_mla)"
        # kernels that change a layout, from MIOpen, and from SageAttention for the layout of V
        r"|^batched_transpose_\d|^transpose_(?:[ncdhw]+2_?[ncdhw]+|pad_permute_kernel)"
        r"|^sub_tensor_op_with_(?:cast|sub)_?tensor|^ck_tile::fmha_fwd_append_kv"
        # kernels from llama.cpp, ggml-cuda/{cpy,concat,getrows,set-rows,convert}.cu
        r"|^cpy_(?:scalar|blck|f|q)|^concat_(?:cont|non_cont|f\d)|^k_[gs]et_rows|^convert_unary",
    ),
    # kernels from MIOpen and from llama.cpp, ggml-cuda/{softmax,sumrows,reduce_rows}.cu
    (
        "softmax",
        "softmax soft_max",
        r"^(?:mi_open_)?softmax_(?:for|back)ward$|^soft_max_(?:back_)?f\d",
    ),
    ("reduce", "_rows", r"^(?:sum|mean|reduce)_rows"),
    # kernels from vLLM (csrc/activation_kernels.cu), copies in other libraries, and kernels from
    # SageAttention that subtract a mean
    (
        "elementwise",
        "and_mul activation_kernel sub_mean bin_bcast unary_ scale_f32 op_with_scalar tensor"
        " mi_open_",
        rf"_and_mul{_END}|::activation_kernel|^sub_mean_kernel"
        # kernels from MIOpen, and from llama.cpp, ggml-cuda/{binbcast,unary,scale}.cu
        r"|^sub_tensor_op_with_scalar|^op(?:\dd)?_tensor_|^mi_open_(?:neuron|active|dropout)"
        r"|^k_bin_bcast|^unary_(?:gated_)?op_kernel|^scale_f32$",
    ),
)
_FAMILIES = tuple(
    (family, tuple(texts.split()), re.compile(pattern, re.ASCII))
    for family, texts, pattern in _ROWS
)
_ATTENTION = frozenset({"fmha", "fmha_combine", "fmha_bwd"})
# Libraries whose attention kernels have families of their own, because PyTorch contains these
# libraries on ROCm. For example, the family of a kernel of `ck` is `ck_bwd` instead of `fmha_bwd`.
_OWN_FAMILIES = ("aiter", "ck")
# Matrix products are recognized by the name of the function itself, because a namespace such as
# deep_gemm also contains other kernels.
_PRODUCT_TEXTS = ("gemm", "matmul", "split", "splt", "marlin")
_PRODUCT = re.compile(
    rf"(?<![a-z])(?:(?:f4|f8|fp8|bf16|i8|mx\w{{0,8}}?)?gemm\d?|matmul){_END}|^wv_?spli?t_?kq?_"
    r"|^marlin$",
    re.ASCII,
)
_CONVOLUTION = re.compile(r"conv|bwd_weight|bwd_data|wgrad|dgrad")

_SPLIT = re.compile(r"(?<=[a-z\d])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_WRAPPED = re.compile(r"<(?:\d+, ?)*(?:typename )?([\w:]+)", re.ASCII)
_MANGLED_ARGUMENT = re.compile(r"I(?:L[a-z]\d+E)*N(?P<same>S_)?(?=\d)", re.ASCII)

_LIBRARIES = re.compile(
    r"(?P<flashinfer>flashinfer::|kernel_cutlass_kernel_flashinfer)"
    r"|(?P<trtllm>tensorrt_llm::|trtllm|fmha_v2_|moe::dev::|fmha_reduction_)"
    r"|(?P<nccl>nccl_|rccl_)"
    r"|(?P<sage>qk_int\d*_sv_f|_?sage_|(?:quant_int8|mean_scale|transpose_pad_permute|sub_mean)_kernel)"
    r"|(?P<flashmla>(?:\w{1,40}::){0,4}(?:flash_fwd_(?:splitkv_)?mla_|sparse_attn_fwd))"
    r"|(?P<vllm>vllm::)|(?P<aiter>aiter::|kn_mla_|fmha_v3_)|(?P<sglang>(?:sgl_hip|sgl_kernel|sglang)::)"
    r"|(?P<deepgemm>deep_gemm::)|(?P<ck>ck(?:_tile)?::)"
    r"|(?P<triton>_?kernel_(?:unified|paged)_attention|_fwd_(?:grouped_)?kernel_|reduce_segments$"
    r"|_p?_?matmul_ogs)"
    r"|(?P<miopen>mi_?open|naive_conv_|igemm_(?:fwd|bwd|wrw)_|gridwise_convolution|batched_transpose_\d"
    r"|sub_tensor_op_with|op(?:\dd)?_tensor_|transpose_[ncdhw]+2_?[ncdhw]+)"
    r"|(?P<ggml>(?:dequantize_)?mul_mat_(?:vec|q|f)|flash_attn_(?:tile|vec|ext_|combine_results|stream_k)"
    r"|k_bin_bcast|k_[gs]et_rows|unary_(?:gated_)?op_kernel|quantize_(?:mmq|q8)|soft_max_f)"
    r"|(?P<cudnn>cudnn)|(?P<cutlass>cutlass\w*::|kernel_cutlass_)",
    re.ASCII,
)


def parse_serving(text: str, head: Head) -> KernelName | None:
    """Classify a kernel by the words in its name. Return None if no rule matches."""
    path, is_mangled = subject(text, head)
    words = _SPLIT.sub("_", path[:400]).lower()
    family = _family(words)
    library = _LIBRARIES.match(words)
    if family is None and library is None:
        return None
    short = (
        join_short(path.rpartition("::")[2], *mangled_numbers(text))
        if is_mangled
        else generic_short(text, head)
    )
    backend = str(library.lastgroup) if library else "unknown"
    if family is None:
        return KernelName(head.name, short, "other", backend)
    start = text[:_READ]
    is_own = family in _ATTENTION and backend in _OWN_FAMILIES
    return KernelName(
        head.name,
        short,
        family.replace("fmha", backend) if is_own else family,
        backend,
        dtype=_dtype(start, head, words, family),
        **_fields(start, head, words, family),
    )


def _family(words: str) -> str | None:
    found = None
    for family, texts, pattern in _FAMILIES:
        if any(text in words for text in texts) and pattern.search(words):
            found = family
            break
    if found not in (None, "quantize") or not any(text in words for text in _PRODUCT_TEXTS):
        return found
    is_product = _PRODUCT.search(words.rpartition("::")[2]) and not _CONVOLUTION.search(words)
    return "gemm" if is_product else found


def subject(text: str, head: Head) -> tuple[str, bool]:
    """Return the path of the kernel without wrappers, and whether the name is mangled.

    A name that contains newer types (`DF16b`) or is very long may not have been demangled.
    """
    if not head.path.startswith("_ZN"):
        inner = _WRAPPED.match(text, head.end) if WRAPPER.search(head.path) else None
        return (inner[1] if inner else head.path), False
    parts, at = mangled_path(text, 3)
    if parts and WRAPPER.search(parts[-1]) and (argument := _MANGLED_ARGUMENT.match(text, at)):
        # S_ stands for the namespace of the wrapper
        parts = parts[: 1 if argument["same"] else 0] + mangled_path(text, argument.end())[0]
    return "::".join(parts), bool(parts)


_TYPES = re.compile(
    "|".join(
        rf"(?<![\w:]){re.escape(name)}\b"
        for name in sorted(OF_CPP_TYPE, key=len, reverse=True)
        if name not in ("float", "double")  # these are the types of accumulators and scales
    )
)
_MANGLED_TYPES = re.compile(
    r"(?P<bf16>DF16b|13__nv_bfloat16|14__hip_bfloat16)|(?P<fp16>DF16_|6__half)"
)
_TYPE_WORD = re.compile(
    r"(?<![a-z\d])(?:(?P<bf16>bf16|bfloat16)|(?P<fp16>fp16|f16)|(?P<fp8_e4m3>e4m3))(?![a-z\d])"
)
_TYPED = ("gemm", "collective", "convolution")  # families whose words contain the type
# Matches types of fewer than 16 bits. If a product has operands of such a type, a 16-bit type in
# the name is the type of the result.
_NARROW = re.compile(r"fp8|fp4|mx|i8|int\d|a\d+w\d")


def _dtype(text: str, head: Head, words: str, family: str) -> str | None:
    """Return the first 16-bit or 8-bit type in the template arguments. If there is no such type,
    return the type in the words of the name, provided that it is the type of the tensors.
    """
    if head.path.startswith("_Z") and (mangled := _MANGLED_TYPES.search(text)):
        return mangled.lastgroup
    arguments = template_arguments(text, head.end)
    if found := _TYPES.search(", ".join(arguments)):
        return OF_CPP_TYPE[found[0]]
    if family in _ATTENTION or (family in _TYPED and not _NARROW.search(words)):
        match = _TYPE_WORD.search(words)
        if match:
            return match.lastgroup
    return "fp32" if arguments[:1] == ["float"] else None


# The template in SageAttention 2.2 is <rows of Q, rows of K, rows of Q and K per warp, D, …>. On
# sm90, it contains the number of threads in place of the rows per warp.
_SAGE = re.compile(r"<(?P<m>\d+)u?, (?P<n>\d+)u?, \d+u?, (?:(\d+)u?, )?(?P<d>\d+)u?, \(")
# The template in Composable Kernel is
# TileFmhaShape<sequence<M, N, K, D of V, K of the second product, D>, …>.
_CK = re.compile(
    r"TileFmhaShape(?:<ck_tile::sequence<|INS_8sequenceIJ)"
    r"(?:Li)?(\d+)(?:, |ELi)(\d+)(?:, |ELi)\d+(?:, |ELi)\d+(?:, |ELi)\d+(?:, |ELi)(\d+)"
)
# Matches names such as
# fmha_v2_flash_attention_bf16_64_128_S_q_paged_kv_128_causal_tma_ws_sm90_kernel.
_FMHA_V2 = re.compile(r"_(?P<m>\d+)_(?P<n>\d+)_s_[a-z_]+?_(?P<d>\d+)(?=_|x)(?:\w*?_sm(?P<sm>\d+))?")
# The template in llama.cpp is <D of K, D of V, …>.
_GGML = re.compile(r"flash_attn_(?:tile|vec|ext_f16|combine_results)<(\d+)")
_MASK = re.compile(r"\(MaskMode\)(\d)")
_HEAD_DIM = re.compile(r"_hd(\d+)")
_TILE = re.compile(r"(?<![a-z\d])(\d+)x(\d+)(?:x(\d+))?(?=_|x\d|$)")


def _fields(text: str, head: Head, words: str, family: str) -> dict[str, Any]:
    is_backward = re.search(r"bwd|backward", words) is not None
    if family == "gemm":
        tile = _TILE.search(words)
        return integers(tile, tile_m=1, tile_n=2, tile_k=3)
    if family not in _ATTENTION:
        return {"direction": "bwd"} if is_backward and family in ("norm", "rope") else {}
    fields: dict[str, Any] = {"direction": "bwd" if is_backward else "fwd"}
    if mask := _MASK.search(text):
        fields["causal"] = {"0": False, "1": True}.get(mask[1])
    elif re.search(r"_causal(?!0)", words):
        fields["causal"] = True
    if "qk_int" in words:
        fields |= integers(_SAGE.match(text, head.end), head_dim="d", tile_m="m", tile_n="n")
    elif match := _CK.search(text):
        fields |= integers(match, tile_m=1, tile_n=2, head_dim=3)
    elif words.startswith("fmha_v2_") and (match := _FMHA_V2.search(words)):
        fields |= integers(match, tile_m="m", tile_n="n", head_dim="d")
        fields["arch"] = f"sm{match['sm']}" if match["sm"] else None
    elif match := _GGML.match(text, head.end - len(head.path)) or _HEAD_DIM.search(words):
        fields |= integers(match, head_dim=1)
    return fields
