"""Define the vocabulary of kernel names: families, libraries, compile-time flags and template
parameters.

Both the short names of kernels and the descriptions of names are derived from these tables.
Parameters and flags have the same names as in the source code of flash-attention 2.8
(csrc/flash_attn/src and hopper), of PyTorch (ATen/native/transformers/cuda/mem_eff_attention) and
of kernels/tiled.cu.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FAMILIES = {
    "flash": "FlashAttention, forward: no S x S matrix in memory",
    "flash_splitkv": "FlashAttention, forward, variant that can split the keys, as for few queries",
    "flash_combine": "FlashAttention: combines the outputs for the parts of the split keys",
    "flash_bwd": "FlashAttention, backward, or a step before or after it",
    "efficient": "memory-efficient attention (CUTLASS), forward",
    "efficient_bwd": "memory-efficient attention (CUTLASS), backward",
    "cudnn": "cuDNN's fused attention, forward",
    "cudnn_bwd": "cuDNN's fused attention, backward, or a step before or after it",
    "flex": "flex_attention, compiled by Inductor",
    "triton": "a Triton kernel; its name does not show whether it computes attention",
    "gemm": "a matrix product",
    "gemv": "a product of a matrix and a vector",
    "softmax": "a softmax over rows, as in math attention",
    "elementwise": "an operation on each element",
    "reduce": "a reduction, such as a sum or a maximum",
    "copy": "a copy, a cast, or a change of the layout in memory",
    "memset": "fills device memory",
    "memcpy": "copies memory to, from or on the device",
    "fmha": "fused attention of a library that PyTorch does not contain",
    "fmha_combine": "combines the parts of a split fused attention",
    "fmha_bwd": "backward of fused attention of a library that PyTorch does not contain",
    "aotriton": "fused attention in Triton by AMD (AOTriton), forward",
    "aotriton_bwd": "fused attention in Triton by AMD (AOTriton), backward, or a step before or "
    "after it",
    "ck": "fused attention of AMD's Composable Kernel, forward",
    "ck_combine": "combines the parts of a split attention of AMD's Composable Kernel",
    "ck_bwd": "fused attention of AMD's Composable Kernel, backward, or a step before or after it",
    "aiter": "fused attention of AMD's aiter, forward",
    "aiter_combine": "combines the parts of a split attention of AMD's aiter",
    "aiter_bwd": "fused attention of AMD's aiter, backward, or a step before or after it",
    "collective": "communication between GPUs",
    "norm": "a normalisation, such as layer norm",
    "rope": "rotary position embedding",
    "moe": "routing of tokens to experts, or the products of experts",
    "quantize": "conversion to a type of fewer bits, or back",
    "convolution": "a convolution",
    "recurrence": "linear attention or another recurrence over tokens, such as a gated delta net",
    "other": "none of the families that profharness knows",
}
LIBRARIES = {
    "flash2": "FlashAttention 2, as built into PyTorch",
    "flash2_pip": "FlashAttention 2 of the package flash-attn, or a build of it such as vLLM's",
    "flash2_any": "FlashAttention 2; a short name does not show which build",
    "fa3": "FlashAttention 3",
    "fa4": "FlashAttention 4 (CuTe DSL)",
    "efficient": "PyTorch's memory-efficient attention",
    "xformers": "xFormers, or PyTorch 2.0",
    "efficient_any": "PyTorch or xFormers; a short name does not show which",
    "cudnn": "NVIDIA cuDNN",
    "flashinfer": "FlashInfer",
    "trtllm": "TensorRT-LLM",
    "sage": "SageAttention",
    "flashmla": "FlashMLA",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "aotriton": "AMD's AOTriton, or a package with the same kernels",
    "aiter": "AMD's aiter",
    "ck": "AMD's Composable Kernel",
    "deepgemm": "DeepGEMM",
    "flex": "PyTorch's flex_attention",
    "triton": "Triton, written by hand or by Inductor",
    "cublas": "NVIDIA cuBLAS or cuBLASLt",
    "cutlass": "NVIDIA CUTLASS",
    "tensile": "AMD's rocBLAS or hipBLASLt (Tensile)",
    "rocblas": "AMD's rocBLAS",
    "miopen": "AMD's MIOpen",
    "rocprim": "AMD's rocPRIM or hipCUB",
    "rocclr": "AMD's HIP runtime",
    "ggml": "llama.cpp (ggml)",
    "nccl": "NCCL, or a library with its names",
    "cub": "NVIDIA CUB",
    "aten": "PyTorch's own kernels (ATen)",
    "aten_op": "a PyTorch op (ATen), used in place of kernels if a trace has none",
    "cuda": "the CUDA runtime",
    "profharness": "an implementation that comes with profharness",
    "unknown": "not known",
}


@dataclass(frozen=True, slots=True)
class Flag:
    """A compile-time flag of a kernel."""

    name: str
    on: str
    """The meaning if the flag is set."""
    off: str
    """The meaning if the flag is not set."""
    shown: str = ""
    """The word in a short name if the flag is set. "" if a short name does not show this."""
    unset: str = ""
    """The word in a short name if the flag is not set. "" if a short name does not show this."""


_CAUSAL = Flag("causal", "a query does not attend to later keys", "no causal mask", "causal")
_LOCAL = Flag("local", "a sliding window of keys", "no sliding window", "local")
_SOFTCAP = Flag("softcap", "scores are capped by a tanh", "scores are not capped", "softcap")
_APPEND = Flag("append", "new keys and values go into the cache", "no keys to append", "append")
# The flags are in the order in which a short name contains them.
FA2_FLAGS = (
    _CAUSAL,
    Flag("dropout", "dropout of the weights", "no dropout", "dropout"),
    _LOCAL,
    Flag("alibi", "ALiBi position biases", "no ALiBi", "alibi"),
    _SOFTCAP,
    _APPEND,
    Flag(
        "split",
        "each part of the keys writes its own output; the outputs are combined later",
        "the keys are not split",
        unset="nosplit",
    ),
    Flag(
        "even_mn",
        "both lengths are multiples of the tile",
        "lengths are checked, because they may not be multiples of the tile",
        unset="uneven",
    ),
    Flag(
        "even_k",
        "the head dimension is the compiled one",
        "the head dimension may be smaller than the compiled one",
        unset="padded",
    ),
    Flag("return_softmax", "the weights are written too", "the weights are not written"),
)
FA3_FLAGS = (
    _CAUSAL,
    _LOCAL,
    _SOFTCAP,
    Flag("varlen", "packed sequences of different lengths", "sequences of equal length", "varlen"),
    Flag(
        "paged",
        "a paged cache of keys, read without TMA",
        "no paged cache that is read without TMA",
        "paged",
    ),
    _APPEND,
    Flag("qv", "a second query, against the values", "no second query", "qv"),
    Flag(
        "packgqa",
        "query heads of a group share a tile",
        "query heads of a group have separate tiles",
        "packgqa",
    ),
    Flag(
        "split",
        "the keys are split; the outputs are combined later",
        "the keys are not split",
        "split",
    ),
    Flag(
        "rs",
        "weights x values reads the weights from registers",
        "weights x values reads the weights from shared memory",
    ),
    Flag(
        "overlap",
        "softmax overlaps the products of a warp group",
        "softmax does not overlap the products of a warp group",
    ),
    Flag("v_col", "values are stored column by column", "values are stored row by row"),
    Flag(
        "deterministic",
        "gradients are summed in a fixed order",
        "gradients are summed in no fixed order",
    ),
)
FLAG_TABLES = {"flash2": FA2_FLAGS, "flash2_pip": FA2_FLAGS, "fa3": FA3_FLAGS}
# The order in which the full name of a kernel contains the flags.
FA2_FWD = "dropout causal local alibi even_mn even_k softcap return_softmax"
FA2_SPLIT = "causal local alibi even_mn even_k softcap split append"
FA2_BWD = "dropout causal local alibi even_mn even_k softcap"
FA3_FWD90 = "causal local softcap varlen paged append qv rs overlap packgqa split v_col"
FA3_FWD80 = "causal local softcap varlen paged append packgqa split"
FA3_BWD = "causal local softcap varlen deterministic"


def flag_words(table: tuple[Flag, ...], flags: Mapping[str, bool]) -> list[str]:
    """Return the words for flags in a short name. Words for flags that are set come before words
    for flags that are not set.
    """
    words = [flag.shown for flag in table if flag.shown and flags.get(flag.name)]
    unset = [flag.unset for flag in table if flag.unset and flags.get(flag.name) is False]
    return words + unset


# The template parameters of tiled_attention in kernels/tiled.cu, and their meanings. {} stands for
# the value.
TILED = {
    "T": "type of the tensors: {}",
    "BM": "tile: {} queries",
    "BN": "tile: {} keys",
    "BK": "columns of the head dimension in one step of queries x keys: {}",
    "CHUNK": "columns of the head dimension of one block: {}",
    "PC": "columns of the output in one pass: {}",
    "STAGES": "{} buffers of queries and keys in shared memory",
    "VALUE_STAGES": "{} buffers of values in shared memory",
    "ONE": "all keys fit in one tile: {}",
    "GRID": "blocks of a tile exchange through L2 instead of a cluster: {}",
    "SPLIT": "the keys are split over blocks and the outputs combined later: {}",
    "PER_SM": "compiled for {} blocks per SM",
}
TILED_FLAGS = {name: name.lower() for name in ("ONE", "GRID", "SPLIT")}

FLAGS = "*"  # stands for the flags of the kernel in a layout
_PARAMETERS = {
    FLAGS: "",
    "kHeadDim": "compiled for head dimensions up to {}",
    "kHeadDimV": "head dimension of the values: {}",
    "kMaxK": "compiled for head dimensions up to {} (65536: any)",
    "kBlockM": "tile: {} queries",
    "kBlockN": "tile: {} keys",
    "kQueriesPerBlock": "tile: {} queries",
    "kKeysPerBlock": "tile: {} keys",
    "kBlockSizeI": "tile: {} queries",
    "kBlockSizeJ": "tile: {} keys",
    "TileShape_MNK": "tile of queries x keys, and head dimension: {}",
    "TileShape_MK": "rows of a block x columns: {}",
    "ClusterShape": "blocks of a cluster: {}",
    "kNWarps": "{} warps a block",
    "kNThreads": "{} threads a block",
    "NumMmaWarpGroups": "{} warp groups compute products",
    "elem_type": "type of the tensors: {}",
    "Element": "type of the tensors: {}",
    "scalar_t": "type of the tensors: {}",
    "ElementAccum": "type of the sums: {}",
    "ArchTag": "architecture of the code: {}",
    "Stages": "{} buffers of keys and values in shared memory",
    "Stages_dO": "{} buffers of the output's gradient",
    "Stages_dS": "{} buffers of the scores' gradient",
    "Is_Q_in_regs": "queries stay in registers: {}",
    "Q_in_regs": "queries stay in registers: {}",
    "Is_V_in_regs": "values stay in registers: {}",
    "Share_Q_K_smem": "queries and keys share their shared memory: {}",
    "No_double_buffer": "queries have one buffer, not two: {}",
    "AtomLayoutMSdP": "warps along the queries in the products for S and dP: {}",
    "AtomLayoutNdKV": "warps along the keys in the products for dK and dV: {}",
    "AtomLayoutMdQ": "warps along the queries in the product for dQ: {}",
    "SdP_swapAB": "operands swapped in the product for S and dP: {}",
    "dKV_swapAB": "operands swapped in the product for dK and dV: {}",
    "dQ_swapAB": "operands swapped in the product for dQ: {}",
    "kLogMaxSplits": "combines at most 2^{} parts",
    "isAligned": "tensors allow wide, aligned loads: {}",
    "kIsAligned": "tensors allow wide, aligned loads: {}",
    "kSupportsDropout": "dropout is compiled in, used or not: {}",
    "kSupportsBias": "an additive mask is compiled in, used or not: {}",
    "kApplyDropout": "dropout: {}",
    "kPreload": "loads for the next product begin early: {}",
    "kKeysQueriesAlignedToBlockSize": "both lengths are multiples of the tile: {}",
    "input_t": "type read: {}",
    "output_t": "type written: {}",
    "acc_t": "type of the sums: {}",
    "log2_elements": "rows of up to 2^{} columns",
    "is_log_softmax": "logarithm of the softmax: {}",
    "is_masked": "with a mask: {}",
    "WARP_SIZE": "{} threads a warp",
}


def _layout(names: str, **own: str) -> dict[str, str]:
    """Return the meaning of each parameter. `own` replaces meanings for a specific kernel."""
    return {name: own.get(name, _PARAMETERS[name]) for name in names.split()}


_FA2_TRAITS = "kHeadDim kBlockM kBlockN kNWarps"
_ATOMS = "AtomLayoutMSdP AtomLayoutNdKV AtomLayoutMdQ"
_FA3_TYPES = f"Element ElementAccum ArchTag {FLAGS}"
_SWAPS = "SdP_swapAB dKV_swapAB dQ_swapAB"
_QUERY_BUFFERS = "{} buffers of queries in shared memory"
_SOFTMAX = _layout("input_t output_t acc_t log2_elements is_log_softmax is_masked WARP_SIZE")
# The template parameters of each kernel, in order. A key is the name of the template with the
# opening bracket.
LAYOUTS = {
    "Flash_fwd_kernel_traits<": _layout(f"{_FA2_TRAITS} Is_Q_in_regs Share_Q_K_smem elem_type"),
    "Flash_bwd_kernel_traits<": _layout(
        f"{_FA2_TRAITS} {_ATOMS} Is_V_in_regs No_double_buffer elem_type"
    ),
    "CollectiveMainloopFwdSm90<": _layout(
        f"Stages ClusterShape TileShape_MNK kHeadDimV {_FA3_TYPES}"
    ),
    "CollectiveMainloopFwdSm80<": _layout(
        f"kNWarps Stages Q_in_regs TileShape_MNK kHeadDimV {_FA3_TYPES}"
    ),
    "CollectiveMainloopBwdSm90<": _layout(
        f"Stages Stages_dO Stages_dS ClusterShape TileShape_MNK {_FA3_TYPES} {_SWAPS} "
        f"NumMmaWarpGroups {_ATOMS}",
        Stages=_QUERY_BUFFERS,
    ),
    "CollectiveMainloopBwdSm80<": _layout(
        f"Stages Stages_dO TileShape_MNK {_FA3_TYPES} {_SWAPS}", Stages=_QUERY_BUFFERS
    ),
    "FlashAttnFwdCombine<": _layout("TileShape_MK kLogMaxSplits kNThreads"),
    "AttentionKernel<": _layout(
        "scalar_t ArchTag isAligned kQueriesPerBlock kKeysPerBlock kMaxK kSupportsDropout "
        "kSupportsBias"
    ),
    "AttentionBackwardKernel<": _layout(
        "ArchTag scalar_t kIsAligned kApplyDropout kPreload kBlockSizeI kBlockSizeJ kMaxK "
        "kKeysQueriesAlignedToBlockSize"
    ),
    "tiled_attention<": TILED,
    "softmax_warp_forward<": _SOFTMAX,
    "softmax_warp_backward<": _SOFTMAX,
}
# The template parameters after the traits in the combine kernel of FlashAttention 2.
FA2_COMBINE = {
    "kBlockM": "{} rows a block",
    "Log_max_splits": "combines at most 2^{} parts",
    "Is_even_K": "the head dimension is the compiled one: {}",
}
