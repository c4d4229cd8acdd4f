"""Parse kernel names that start like the names of a known library.

The rules cover attention kernels (FlashAttention 2, 3 and 4, FlashInfer, efficient attention,
cuDNN, flex_attention, Triton, AOTriton and TensorRT-LLM), matrix products (cuBLAS, cuBLASLt, CUTLASS,
TensorRT-LLM, Tensile and rocBLAS) and the kernels of CUB, rocPRIM and the HIP runtime.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from profharness.dtypes import OF_CPP_TYPE
from profharness.traces.kernel_names.meanings import (
    FA2_BWD,
    FA2_FLAGS,
    FA2_FWD,
    FA2_SPLIT,
    FA3_BWD,
    FA3_FLAGS,
    FA3_FWD80,
    FA3_FWD90,
    FAMILIES,
    FLASHINFER_FLAGS,
    FLASHINFER_VARIANT,
    LAYOUTS,
    flag_words,
)
from profharness.traces.kernel_names.text import (
    Head,
    KernelName,
    generic_short,
    integer,
    integers,
    join_short,
    short_type,
    template_arguments,
)

# Maximum number of characters to parse in the name of an attention kernel. The parameter list at
# the end of a long name only repeats the template arguments.
READ = 2048
Fields = dict[str, Any]
"""The fields of a KernelName that a parser determines. By default, the short name is the last part
of the path, and the rule determines the family and the backend. The family of a backward kernel
ends with `_bwd`.
"""


def parse_library(text: str, head: Head) -> KernelName | None:
    """Parse the name of a kernel from a known library. Return None if no rule matches the name."""
    begin = head.end - len(head.path)
    for rules, read in ((_ATTENTION, READ), (_PRODUCTS, None)):
        for anchor, family, backend, parser in rules:
            match = anchor.match(text, begin)
            if match:
                fields = parser(text[:read], head, match)
                if fields.get("direction") == "bwd" and f"{family}_bwd" in FAMILIES:
                    family = f"{family}_bwd"
                default: Fields = {"short": head.base, "family": family, "backend": backend}
                return KernelName(head.name, **(default | fields))
    return None


_TRAITS = re.compile(
    r"Flash_(?:fwd|bwd)_kernel_traits\w*<\s?(\d+), (\d+), (\d+), (\d+)"
    r"(?:, \w+){0,6}?, (cutlass::\w+)"
)
_TRAITS_CUT = re.compile(r"Flash_(?:fwd|bwd)_kernel_traits\w*<\s?(\d+), (\d+), (\d+), (\d+)\b")
_FLAGS = re.compile(r"> ?>((?:, ?(?:true|false|\d+)(?=[,>\s]))+)")
_FA2_SHORT = {
    "flash_fwd_splitkv_combine_kernel": "flash_fwd_splitkv_combine",
    "flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel": "flash_bwd_dq_dk_dv",
    "flash_bwd_dq_dk_dv_loop_kernel": "flash_bwd_dq_dk_dv_loop",
}


def fa2_flags(base: str, text: str) -> dict[str, bool]:
    """Return the compile-time flags of a FlashAttention 2 kernel as a dict.

    Kernels of old releases have fewer flags.
    """
    match = _FLAGS.search(text)
    if match is None or "combine" in base:
        return {}
    values = [word == "true" for word in match[1].replace(" ", "").split(",")[1:]]
    layout = FA2_FWD if base.startswith("flash_fwd") else FA2_BWD
    names = (FA2_SPLIT if "splitkv" in base else layout).split()
    if len(values) == len(names) - 1:
        names.remove("softcap")
    elif len(values) < len(names) - 1:
        names = names[: names.index("causal") + 1]
    return dict(zip(names, values, strict=False))


def _fa2(text: str, head: Head, match: re.Match[str]) -> Fields:
    base = head.base
    traits = _TRAITS.search(text) or _TRAITS_CUT.search(text)
    flags = fa2_flags(base, text)
    fields = {
        "backend": "flash2" if "pytorch_flash" in head.path or head.path == base else "flash2_pip",
        "arch": "sm80",
        "dtype": OF_CPP_TYPE.get(traits[5]) if traits and traits.re is _TRAITS else None,
        "direction": match["direction"],
        "causal": flags.get("causal"),
        "dropout": flags.get("dropout"),
        **integers(traits, head_dim=1, tile_m=2, tile_n=3, warps=4),
    }
    head_dim, tile_m, tile_n, warps = traits.groups()[:4] if traits else [None] * 4
    shown = [f"{tile_m}x{tile_n}", f"w{warps}"] if traits else []
    shown += flag_words(FA2_FLAGS, flags)
    if "combine" in base:
        sizes = re.search(r"> ?>, (\d+), (\d+)", text)
        shown = [f"m{sizes[1]}", f"split{2 ** min(int(sizes[2]), 20)}"] if sizes else []
        fields["family"] = "flash_combine"
    elif "splitkv" in base:
        fields["family"] = "flash_splitkv"
    return fields | {"short": join_short(_FA2_SHORT.get(base, base), head_dim, *shown)}


_C = r"cute::(?:C<|constant<int, )(\d+)>"
_TUPLE3 = re.compile(rf"cute::tuple<{_C}, {_C}, {_C} ?>")
_TUPLE2 = re.compile(rf"<cute::tuple<{_C}, {_C} ?>")
_FA3_ELEMENT = re.compile(r"cutlass::(?:half_t|bfloat16_t|float_e4m3_t|float_e5m2_t)\b")
_FA3_FLAGS = re.compile(r"cutlass::arch::Sm(\d+)((?:, (?:true|false))+)")
_FA3_STAGES = re.compile(r"CollectiveMainloop(?:Fwd|Bwd)Sm\d+<(\d+), (\d+)?")

_FA3_SIDE = re.compile(r"FlashAttn(Fwd|Bwd)Sm(\d+)")


def fa3_flags(text: str) -> dict[str, bool]:
    """Return the compile-time flags of a FlashAttention 3 kernel by name."""
    side, match = _FA3_SIDE.search(text), _FA3_FLAGS.search(text)
    if side is None or match is None:
        return {}
    names = FA3_BWD if side[1] == "Bwd" else FA3_FWD80 if side[2] == "80" else FA3_FWD90
    values = (word == "true" for word in match[2].split(", ")[1:])
    return dict(zip(names.split(), values, strict=False))


def _fa3(text: str, _head: Head, match: re.Match[str]) -> Fields:
    base, side = match["base"], match["side"]
    if side is None:
        return {"short": base, "direction": "fwd"}
    element = _FA3_ELEMENT.search(text)
    in_name = re.search(r"Sm(\d+)", base)
    sm = in_name or re.search(r"cutlass::arch::Sm(\d+)", text)
    flags = fa3_flags(text)
    fields: Fields = {
        "arch": f"sm{sm[1]}" if sm else None,
        "dtype": OF_CPP_TYPE.get(element[0]) if element else None,
        "direction": side.lower(),
        "causal": flags.get("causal"),
    }
    tile_m = tile_n = head_dim = None
    if in_name:
        tiles = [tuple(map(int, sizes)) for sizes in _TUPLE3.findall(text[:700])]
        if tiles:
            tile_m, tile_n, head_dim = tiles[1 if in_name[1] != "80" and len(tiles) > 1 else 0]
        counts = _FA3_STAGES.search(text)
        is_fwd80 = (side, in_name[1]) == ("Fwd", "80")
        fields["stages"] = integers(counts, stages=2 if is_fwd80 else 1).get("stages")
        fields["warps"] = int(counts[1]) if counts and is_fwd80 else None
    elif pair := _TUPLE2.search(text):
        tile_m, head_dim = int(pair[1]), int(pair[2])
    size = f"{tile_m}x{tile_n}" if tile_n else f"m{tile_m}" if tile_m else None
    fields["short"] = join_short(base, head_dim, size, *flag_words(FA3_FLAGS, flags))
    if "Combine" in base and not in_name:
        fields["family"], head_dim = "flash_combine", None
    return fields | {"tile_m": tile_m, "tile_n": tile_n or None, "head_dim": head_dim}


_FA4_CLASS = re.compile(r"(Flash(?:Attention|Attn)?(?:Forward|Backward|Decode)\w*?)(?:_object|$|_)")
_FA4_DTYPE = re.compile(r"tensorptr(bf16|f16|f32)")


def _fa4(text: str, _head: Head, match: re.Match[str]) -> Fields:
    found = _FA4_CLASS.search(text[:300])
    class_name = found[1] if found else ""
    dtype = _FA4_DTYPE.search(text)
    sm = re.search(r"[sS]m(\d+)", class_name or match[0])
    is_combine = "combine" in match[0].lower() or "Combine" in class_name
    return {
        "short": class_name or match[0].removeprefix("kernel_cutlass_kernel_"),
        "arch": f"sm{sm[1]}" if sm else None,
        "dtype": {"bf16": "bf16", "f16": "fp16", "f32": None}[dtype[1]] if dtype else None,
        "direction": match["direction"],
        **({"family": "flash_combine"} if is_combine else {}),
    }


def _flashinfer_warps(numbers: Mapping[str, int]) -> Fields:
    """Compute the sizes of a kernel in attention/prefill.cuh."""
    return {
        "head_dim": numbers["NUM_MMA_D_QK"] * 16,
        "tile_m": numbers["CTA_TILE_Q"],
        "tile_n": numbers["NUM_MMA_KV"] * numbers["NUM_WARPS_KV"] * 16,
        "warps": numbers["NUM_WARPS_Q"] * numbers["NUM_WARPS_KV"],
    }


def _flashinfer_hopper(numbers: Mapping[str, int]) -> Fields:
    """Return the sizes of a kernel in attention/hopper."""
    return {
        "head_dim": numbers["HEAD_DIM_QK" if "HEAD_DIM_QK" in numbers else "HEAD_DIM"],
        "tile_m": numbers["CTA_Q"],
        "tile_n": numbers["CTA_KV"],
        "stages": numbers["NUM_STAGES"],
    }


def _flashinfer_decode(numbers: Mapping[str, int]) -> Fields:
    """Compute the sizes of a kernel in attention/decode.cuh, which computes the attention of the
    query heads that share a head of keys.
    """
    threads = numbers["bdx"] * numbers["bdy"] * numbers["bdz"]
    return {
        "head_dim": numbers["vec_size"] * numbers["bdx"],
        "tile_m": numbers["bdy"],
        "tile_n": numbers["tile_size_per_bdx"] * numbers["bdy"] * numbers["bdz"],
        "stages": numbers["num_stages_smem"],
        "warps": -(-threads // 32),
    }


# The functions that compute the sizes of a FlashInfer kernel from its parameters in LAYOUTS
_FLASHINFER_SIZES = {
    "flashinfer::KernelTraits<": _flashinfer_warps,
    "flashinfer::AttentionKernelTraits<": _flashinfer_hopper,
    "flashinfer::FP8AttentionKernelTraits<": _flashinfer_hopper,
    "BatchDecodeWithPagedKVCacheKernel<": _flashinfer_decode,
    "SingleDecodeWithKVCacheKernel<": _flashinfer_decode,
}
_COUNTS = (("stages", "s"), ("warps", "w"))
_FLASHINFER_HOPPER = re.compile(r"(?<![a-z])(?:FP8)?PrefillWithKVCacheKernel(?=<)")
_FLASHINFER_SCORES = re.compile(r"flashinfer::(?:LogitsSoftCap|StandardAttention)\b")
_FLASHINFER_MASK = re.compile(r"KernelTraits<\(flashinfer::MaskMode\)([01]),")


def flashinfer_flags(text: str) -> dict[str, bool]:
    """Return the compile-time flags of a FlashInfer kernel by name."""
    variant, names = "flashinfer::DefaultAttention<", FLASHINFER_VARIANT.split()
    flags: dict[str, bool] = {}
    if (at := text.find(variant)) >= 0:
        arguments = template_arguments(text, at + len(variant) - 1)
        flags |= {name: word == "true" for name, word in zip(names, arguments, strict=False)}
    if mask := _FLASHINFER_MASK.search(text):
        flags["causal"] = mask[1] == "1"
    if kernel := _FLASHINFER_HOPPER.search(text):
        local_and_causal = template_arguments(text, kernel.end())[3:5]
        flags |= {
            name: word == "true"
            for name, word in zip(("local", "causal"), local_and_causal, strict=False)
        }
        if scores := _FLASHINFER_SCORES.search(text):
            flags["softcap"] = scores[0] == "flashinfer::LogitsSoftCap"
    return flags


def _flashinfer_parameters(text: str) -> tuple[str, dict[str, str]]:
    """Return the opening of the template in LAYOUTS that a FlashInfer kernel has, and the value of
    each parameter.
    """
    opening = next((opening for opening in _FLASHINFER_SIZES if opening in text), "")
    arguments = template_arguments(text, text.find(opening) + len(opening) - 1) if opening else []
    parameters = LAYOUTS.get(opening, {})
    return opening, dict(zip(parameters, map(short_type, arguments), strict=False))


def _flashinfer(text: str, head: Head, match: re.Match[str]) -> Fields:
    """Parse a name such as `flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::
    KernelTraits<…>, …>`. The sizes remain unknown if the template is not that of the releases 0.2.1
    to 0.6.18.
    """
    opening, words = _flashinfer_parameters(text)
    values = {name: integer(word) for name, word in words.items() if len(word) < 7}
    numbers = {name: value for name, value in values.items() if value is not None}
    try:
        sizes = _FLASHINFER_SIZES[opening](numbers)
    except KeyError:
        return {"short": generic_short(text, head), "direction": "fwd"}
    flags = flashinfer_flags(text)
    shown = [f"{sizes['tile_m']}x{sizes['tile_n']}"]
    shown += [f"{letter}{sizes[name]}" for name, letter in _COUNTS if name in sizes]
    shown += flag_words(FLASHINFER_FLAGS, flags)
    dtype = words.get("DTypeQ")
    return {
        "short": join_short(match["name"], sizes["head_dim"], *shown),
        "dtype": dtype if dtype in OF_CPP_TYPE.values() else None,
        "direction": "fwd",
        "causal": flags.get("causal"),
        **sizes,
    }


_MAX_K = re.compile(r"AttentionKernel<[^<>]*?(?:true|false), \d+, \d+, (\d+)")


def _efficient(text: str, head: Head, match: re.Match[str]) -> Fields:
    is_backward = match["side"] == "B"
    max_k = None if is_backward else _MAX_K.search(text)
    is_foreign = "PyTorchMemEff" not in text and text[head.end : head.end + 10] == "(Attention"
    return {
        "backend": "xformers" if is_foreign else "efficient",
        "arch": f"sm{match['sm']}" if match["sm"] else None,
        "dtype": {"f16": "fp16", "bf16": "bf16", "f32": "fp32"}[match["dtype"]],
        "direction": "bwd" if is_backward else "fwd",
        "dropout": "_dropout" in head.base if is_backward else None,
        **integers(match, head_dim="k", tile_m="m", tile_n="n"),
        **integers(max_k, head_dim=1),
    }


def _cudnn(_text: str, _head: Head, match: re.Match[str]) -> Fields:
    kind = match["dtype"]
    tile = _TILE.match(match["tile"] or "")
    engine = "cudnn_oss_sdpa" if match["engine"] == "oss" else "cudnn_sdpa"
    knob = f"knob_{match['knob']}" if match["knob"] else None
    low = kind if kind != "f16" else None
    parts = (engine, match["sm"], match["pass"], match["mma"], low, knob, match["tile"])
    return {
        "short": "_".join(part for part in parts if part),
        "arch": match["sm"],
        "dtype": {"f16": "fp16/bf16", "f8": "fp8"}.get(kind, kind),
        "direction": "fwd" if match["pass"] == "fprop" else "bwd",
        **integers(tile, tile_m=1, tile_n=2, tile_k=3, head_dim=3),
    }


def _cudnn_helper(text: str, head: Head, match: re.Match[str]) -> Fields:
    direction = "fwd" if match["helper"] == "lean_reduction" else "bwd"
    return {"short": generic_short(text, head), "direction": direction}


def _triton_attention(_text: str, head: Head, _match: re.Match[str]) -> Fields:
    is_backward = "bwd" in head.base or "backward" in head.base
    return {"direction": "bwd" if is_backward else "fwd"}


def _no_fields(_text: str, _head: Head, _match: re.Match[str]) -> Fields:
    return {}


_TRTLLM = re.compile(r"H(?:Qk)?(\d+)(?:HV\d+)?(?=[A-Z]).*?Q(\d+)Kv(\d+)")
_TRTLLM_DTYPE = {"Bfloat16": "bf16", "Fp16": "fp16", "E4m3": "fp8_e4m3"}


def _trtllm(_text: str, head: Head, match: re.Match[str]) -> Fields:
    """Parse a name such as
    `fmhaSm100aKernel_QkvBfloat16OBfloat16H64PagedKvCausalP16VarSeqQ128Kv128PersistentContext`.
    """
    kind = re.match(r"Q(?:kv)?(Bfloat16|Fp16|E4m3)", head.base[match.end("sm") + 8 :] or "")
    kind = kind or re.search(r"_Qkv(Bfloat16|Fp16|E4m3)", head.base)
    short = head.base.replace("fmhaSm", "fmha_sm", 1).replace("Kernel_", "_", 1)
    return {
        "short": short,
        "arch": f"sm{match['sm']}",
        "dtype": _TRTLLM_DTYPE[kind[1]] if kind else None,
        "direction": "fwd",
        "causal": True if "Causal" in short else False if "Dense" in short else None,
        **integers(_TRTLLM.search(head.base, match.end()), head_dim=1, tile_m=2, tile_n=3),
    }


_CONVOLUTION = re.compile(r"cudnn|winograd|fprop|dgrad|wgrad|conv(?:olve|olution|2d|3d)?(?=_|\b)")
_TILE = re.compile(r"(?<![a-z\d])(?:tilesize)?(\d+)x(\d+)(?:x(\d+))?(?=_|$|>|\()")
_STAGES = re.compile(r"stages_\d+x(\d+)|stage(\d+)|_\d+x\d+_\d+x(\d+)_[ntc]{2}(?:_|$)")
_ELEMENT = re.compile(
    r"(?P<bf16>bf16)|(?P<fp8_e4m3>e4m3)|(?P<fp16>[fh]p?16(?![\d])|(?<![a-z])h\d{3,6}gemm|hgemm)"
    r"|(?P<fp64>f64|d\d{3,6}gemm|dgemm)|(?P<fp32>f32|fp32|tf32|sgemm|s1688gemm)"
)
_CHIP = {"ampere": "sm80", "volta": "sm70", "turing": "sm75", "maxwell": "sm50", "hopper": "sm90"}


def _element(text: str) -> str | None:
    match = _ELEMENT.search(text)
    return match.lastgroup if match else None


def _gemm(text: str, _head: Head, match: re.Match[str]) -> Fields:
    """Parse a name such as `ampere_sgemm_128x64_tn` or `cutlass_80_tensorop_…gemm_…`, which may be
    inside `cutlass::Kernel2<…>`.
    """
    name = match["name"]
    is_convolution = _CONVOLUTION.search(name) is not None
    if is_convolution or "gemm" not in name:
        backend = "cudnn" if "cudnn" in text[:200] else "cutlass"
        family = "convolution" if is_convolution else "other"
        return {"short": name, "family": family, "backend": backend}
    stages = _STAGES.search(name)
    number = re.match(r"cutlass(?:3x)?_(?:sm)?(\d+)", name)
    return {
        "short": name,
        "arch": _CHIP.get(name.partition("_")[0]) or (f"sm{number[1]}" if number else None),
        "dtype": _element(name),
        **integers(_TILE.search(name), tile_m=1, tile_n=2, tile_k=3),
        **integers(stages, stages=(stages and stages.lastindex) or 0),
    }


def _xmma(_text: str, _head: Head, match: re.Match[str]) -> Fields:
    """Parse a name such as `sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_…`."""
    tail = match["tail"]
    if match["gemm"] is None:
        family = "convolution" if _CONVOLUTION.search(tail) else "other"
        return {"family": family, "backend": "cudnn", "arch": match["sm"]}
    formats = re.match(r"_([a-z\d]+?)_([a-z\d]+?)_([a-z\d]+)_([tn]{2})_", tail)
    tile = re.search(r"tilesize((\d+)x(\d+)x(\d+))", tail)
    fields = {
        "arch": match["sm"],
        **integers(tile, tile_m=2, tile_n=3, tile_k=4),
        **integers(re.search(r"stage(\d+)", tail), stages=1),
    }
    if formats is None:
        return fields
    # The first word contains the types of A and B, for example f32f32 or bf16bf16.
    word = formats[1][: len(formats[1]) // 2]
    parts = [match["sm"], "xmma", match["gemm"], "tf32" if "tf32" in formats[2] else word]
    parts += [formats[4], tile[1] if tile else "", "splitk" if "split_k" in tail else ""]
    return {"short": "_".join(filter(None, parts)), "dtype": _element(word), **fields}


def _nvjet(_text: str, _head: Head, match: re.Match[str]) -> Fields:
    """Parse a name such as `nvjet_sm90_hsh_256x128_64x4_…`.

    The parts are the architecture, the types of A, B and D (h is fp16, t is bf16), the tile, the
    depth of a step and the number of stages.
    """
    return {
        "arch": match["sm"],
        "dtype": {"h": "fp16", "t": "bf16"}.get(match["types"][0]) if match["types"] else None,
        **integers(match, tile_m="m", tile_n="n", stages="stages"),
    }


def _first_dtype(arguments: list[str]) -> str | None:
    return next((OF_CPP_TYPE[argument] for argument in arguments if argument in OF_CPP_TYPE), None)


def _gemv(text: str, head: Head, _match: re.Match[str]) -> Fields:
    arguments = template_arguments(text, head.end)
    dtype = _first_dtype(arguments)
    numbers = [argument for argument in arguments if argument.isdigit()]
    base = "gemvx" if "gemvx::" in head.path else head.base
    return {"short": join_short(base, dtype, *numbers[:5]), "dtype": dtype}


def _small_gemm(text: str, head: Head, _match: re.Match[str]) -> Fields:
    dtype = _first_dtype(template_arguments(text, head.end, limit=8))
    return {"short": generic_short(text, head), "dtype": dtype}


def _cutlass3(text: str, _head: Head, match: re.Match[str]) -> Fields:
    """Parse a CUTLASS 2 name, or a CUTLASS 3 name such as
    `cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<…>>`.
    """
    tile = re.search(r"GemmShape<(\d+), (\d+), \d+>", text[:4096])
    element = re.search(r"cutlass::(?:half_t|bfloat16_t|float_e4m3_t)\b", text[:4096])
    return {
        "short": join_short(match["name"], f"{tile[1]}x{tile[2]}" if tile else None),
        "dtype": OF_CPP_TYPE[element[0]] if element else None,
        **integers(tile, tile_m=1, tile_n=2),
    }


def _cub(text: str, head: Head, _match: re.Match[str]) -> Fields:
    is_reduce = re.match(r"Device(?:Segmented|SingleTile)?Reduce", head.base)
    family = "reduce" if is_reduce or "ReduceSingleTile" in head.base else "other"
    return {"short": generic_short(text, head), "family": family}


def _rocprim(text: str, head: Head, _match: re.Match[str]) -> Fields:
    # a kernel named trampoline_kernel has the algorithm only in its first template argument
    algorithm = f"{head.base} {(template_arguments(text, head.end, limit=1) or [''])[0]}"
    is_reduce = re.search(r"(?<!by_key_)reduce(?!_by_key)", algorithm)
    return {"short": generic_short(text, head), "family": "reduce" if is_reduce else "other"}


def _rocblas(text: str, head: Head, match: re.Match[str]) -> Fields:
    family = next((name for name in _ROCBLAS if match[name]), "other")
    dtype = _first_dtype(template_arguments(text, head.end))
    return {"short": generic_short(text, head), "family": family, "dtype": dtype}


_ROCBLAS = ("gemv", "gemm", "reduce", "elementwise", "copy")


def _trtllm_product(_text: str, _head: Head, match: re.Match[str]) -> Fields:
    """Parse a name such as `bmm_Bfloat16_E4m3E4m3_Fp32_t128x16x128u2_s6_…_sm100f`.

    The parts are the type of C, the types of A and B, the type of the accumulator, the tile and the
    number of stages.
    """
    of_a_and_b = {"E4m3E4m3": "fp8_e4m3", "Bfloat16": "bf16", "Fp16": "fp16"}
    return {
        "arch": f"sm{match['sm']}" if match["sm"] else None,
        "dtype": of_a_and_b.get(match["ab"]),
        **integers(match, tile_m="m", tile_n="n", tile_k="k", stages="stages"),
    }


# The type of the operands is the first part of the types in a name of Tensile, such as BBS.
_TENSILE_TYPES = {
    "F8": "fp8_e4m3",
    "B8": "fp8_e5m2",
    "B": "bf16",
    "H": "fp16",
    "S": "fp32",
    "D": "fp64",
}


def _tensile(_text: str, head: Head, match: re.Match[str]) -> Fields:
    """Parse a name from rocBLAS or hipBLASLt, such as
    `Cijk_Alik_Bljk_BBS_BH_…_MT256x32x64_…_ISA942_…`, or `Cijk_SB_BiasS_HAS_PostGSU8_VW2`, which
    adds up the parts of a split product.
    """
    isa = re.search(r"_(?:ISA|gfx)(\d{3,}|90[a-c])(?=_|$)", head.base)
    types = re.match(r"F8B8|B8F8|[FB]8|[BHSD](?=[BHSD]*$)", match["type"] or "")
    return {
        "short": match[0],  # the rest of the name contains about sixty settings
        # ISA942 stands for gfx942. ISA90 is ambiguous, because it lacks the letter of gfx90a.
        "arch": f"gfx{isa[1]}" if isa else None,
        "dtype": _TENSILE_TYPES.get(types[0]) if types else None,
        **integers(match, tile_m="m", tile_n="n", tile_k="k"),
    }


Parser = Callable[[str, Head, re.Match[str]], Fields]


def _rules(
    *rows: tuple[str, str, str, Parser],
) -> list[tuple[re.Pattern[str], str, str, Parser]]:
    return [(re.compile(row[0], re.ASCII), *row[1:]) for row in rows]


# Each rule contains a pattern, a family, a backend and a parser. The first rule whose pattern
# matches the name is used.
_ATTENTION = _rules(
    # this pattern must not match flash_fwd_splitkv_mla_kernel, which belongs to FlashMLA
    (
        r"(?:\w+::){0,4}flash_(?P<direction>fwd|bwd)_(?!\w*mla_)\w+(?=[<(]|$)",
        "flash",
        "flash2",
        _fa2,
    ),
    (
        r"(?:cutlass::device_kernel<)?(?:flash::enable_sm\w+<)?flash::"
        r"(?P<base>FlashAttn(?P<side>Fwd|Bwd)\w*|(?:prepare_varlen\w*))",
        *("flash", "fa3", _fa3),
    ),
    (
        r"(?:kernel_cutlass_)?(?:kernel_)?flash_attn\w{0,20}?(?:cute)?flash_(?P<direction>fwd|bwd)\w*",
        *("flash", "fa4", _fa4),
    ),
    (
        r"flashinfer::(?P<name>(?:FP8|Batch|Single)?(?:Prefill|Decode)With\w*KVCacheKernel)(?=[<(]|$)",
        *("fmha", "flashinfer", _flashinfer),
    ),
    (
        r"fmha_cutlass(?P<side>[FB])_(?P<dtype>f16|bf16|f32)_(?:not)?aligned_(?P<m>\d+)x(?P<n>\d+)"
        r"(?:_rf|_gmem)?(?:_k(?P<k>\d+))?(?:_dropout)?(?:_seqaligned)?(?:_sm(?P<sm>\d+))?",
        *("efficient", "efficient", _efficient),
    ),
    (
        r"cudnn_(?:generated_)?(?:(?P<engine>fort_native|oss)_)?sdpa_(?P<sm>sm\d+[a-z]?)_flash_"
        r"(?P<pass>fprop|bprop)(?:_(?P<mma>wg?mma))?(?:_(?P<dtype>f16|f8|mxfp8|bf16))?"
        r"(?:_knob_(?P<knob>\d+))?(?:_(?P<tile>\d+x\d+x\d+))?",
        *("cudnn", "cudnn", _cudnn),
    ),
    (
        r"(?:cudnn::fusion::)?(?P<helper>compute_dot_do_o|convert_dq_to_16bits|fmha_reduce_head"
        r"|lean_reduction)(?=[_<(]|$)",
        *("cudnn", "cudnn", _cudnn_helper),
    ),
    (
        r"triton_(?:tem_)?(?:fused_)?(?!poi_|red_|per_|for_)\w*?flex_(?:attention|decoding)",
        *("flex", "flex", _triton_attention),
    ),
    (r"triton_", "triton", "triton", _no_fields),
    # tritonsrc/flash.py of AOTriton 0.11. Other Triton kernels begin with an underscore. Old
    # releases of Triton append the specialisation of the arguments, such as _0d1d2d3d.
    (
        r"(?:attn_fwd|bwd_(?:preprocess(?:_varlen)?|postprocess|kernel_(?:dk_dv|dq|fuse))"
        r"|debug_(?:fill_dropout_rng(?:_tensor)?|simulate_encoded_softmax))(?:_\d+[a-z]\w*)?$",
        *("aotriton", "aotriton", _triton_attention),
    ),
    (
        r"(?:_?attn_(?:fwd|bwd)|_(?:fwd|bwd)_(?:kernel(?!_stage)|preprocess)"
        r"|bwd_kernel_(?:dk_dv|dq|fuse)|_splitK_reduce)\w*$",
        *("triton", "triton", _triton_attention),
    ),
)
_PRODUCTS = _rules(
    (
        r"(?P<sm>sm\d+)_xmma_(?P<gemm>(?:sparse_)?gemm)?(?P<tail>\w*)",
        *("gemm", "cublas", _xmma),
    ),
    (
        r"nvjet_(?:(?P<sm>sm\d+)_)?(?P<types>[a-z]{3,6})?"
        r"(?:_(?P<m>\d+)x(?P<n>\d+))?(?:_\d+x(?P<stages>\d+))?",
        *("gemm", "cublas", _nvjet),
    ),
    (
        r"(?:cutlass\w{0,20}::Kernel2?<\s?)?(?:typename )?"
        r"(?P<name>(?:ampere|volta|turing|maxwell|hopper|kepler|blackwell)_\w+"
        r"|cutlass(?:3x)?_(?:sm)?\d+_\w+|cutlass_tensorop_\w+)",
        *("gemm", "cublas", _gemm),
    ),
    (r"(?:internal::)?gemvx::|gemv\w*(?=[<(]|$)", "gemv", "cublas", _gemv),
    (
        r"(?:cublasLt::)?splitKreduce_kernel|cublasLt::|gemmSN_\w+|gemmk1_kernel"
        r"|(?:cublas::)?gemm_kernel\w*|\w*[sdch]gemm_\w+",
        *("gemm", "cublas", _small_gemm),
    ),
    (
        r"cutlass::(?:device_kernel|Kernel2?)<(?:enable_\w+<)?(?:typename )?(?:\w+::){0,3}"
        r"(?P<name>(?:\w*Gemm\w*|default_gemm\w*))",
        *("gemm", "cutlass", _cutlass3),
    ),
    (r"(?:\w+::){0,3}cub::", "other", "cub", _cub),
    (r"(?:\w+::){0,3}(?:rocprim|hipcub)::", "other", "rocprim", _rocprim),
    (r"__amd_rocclr_copyBuffer", "memcpy", "rocclr", _no_fields),
    (r"__amd_rocclr_fillBuffer", "memset", "rocclr", _no_fields),
    (r"__amd_rocclr_", "other", "rocclr", _no_fields),
    (
        r"rocblas_(?:\w*?(?:(?P<gemv>gemv)|(?P<gemm>gemm|trsm|syrk|herk)|(?P<reduce>dot|nrm2|asum|reduc)"
        r"|(?P<elementwise>axpy|scal)|(?P<copy>copy|transpose)))?\w*",
        *("other", "rocblas", _rocblas),
    ),
    (r"fmhaSm(?P<sm>1\d\d)[a-z]?Kernel_", "fmha", "trtllm", _trtllm),
    (
        r"(?:bmm|gemm)_(?:Mx)?(?:Bfloat16|Fp16|Fp32|E[2-5]m[1-3])_(?P<ab>[A-Z]\w*?)_Fp32_\w*?"
        r"(?<=_)t(?P<m>\d+)x(?P<n>\d+)x(?P<k>\d+)(?:u\d)?_s(?P<stages>\d+)\w*?(?:_sm(?P<sm>\d+)|$)",
        *("gemm", "trtllm", _trtllm_product),
    ),
    (
        r"(?:Custom_)?Cijk_(?:A[il]+k_B[jl]+k_)?(?P<type>[A-Z]\w*?)(?:_\w*?"
        r"(?:(?<=_)MT(?P<m>\d+)x(?P<n>\d+)x(?P<k>\d+)|PostGSU\d*|$)|$)",
        *("gemm", "tensile", _tensile),
    ),
)
