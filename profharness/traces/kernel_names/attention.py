"""Parse the names of kernels from the libraries that PyTorch uses.

These are attention kernels (FlashAttention 2, 3 and 4, efficient attention, cuDNN, flex_attention and
Triton), matrix products (cuBLAS, cuBLASLt and CUTLASS) and the kernels of CUB.
"""

from __future__ import annotations

import re
from collections.abc import Callable

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
    flag_words,
)
from profharness.traces.kernel_names.text import (
    Head,
    KernelName,
    generic_short,
    integers,
    join_short,
    template_arguments,
)

# Number of characters of an attention kernel's name that are parsed. The template contains all fields,
# and the parameter list after it only repeats them.
READ = 2048


def parse_library(text: str, head: Head) -> KernelName | None:
    for rules, read in ((_ATTENTION, READ), (_PRODUCTS, None)):
        for anchor, parser in rules:
            match = anchor.match(text, head.end - len(head.path))
            if match:
                return parser(text[:read], head, match)
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
    """Return the compile-time flags of a FlashAttention 2 kernel by name.

    Releases that do not support softcap have fewer flags.
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


def _fa2(text: str, head: Head, match: re.Match[str]) -> KernelName:
    base, direction = head.base, match["direction"]
    traits = _TRAITS.search(text) or _TRAITS_CUT.search(text)
    dtype = OF_CPP_TYPE.get(traits[5]) if traits and traits.re is _TRAITS else None
    flags = fa2_flags(base, text)
    family = "flash_bwd" if direction == "bwd" else "flash"
    if "combine" in base:
        family = "flash_combine"
    elif "splitkv" in base:
        family = "flash_splitkv"
    sizes = integers(traits, head_dim=1, tile_m=2, tile_n=3, warps=4)
    shown = flag_words(FA2_FLAGS, flags)
    if family == "flash_combine":
        own = re.search(r"> ?>, (\d+), (\d+)", text)
        shown = [f"m{own[1]}", f"split{2 ** min(int(own[2]), 20)}"] if own else []
    head_dim, tile_m, tile_n, warps = traits.groups()[:4] if traits else [None] * 4
    tile = (f"{tile_m}x{tile_n}", f"w{warps}") if traits and family != "flash_combine" else ()
    return KernelName(
        head.name,
        join_short(_FA2_SHORT.get(base, base), head_dim, *tile, *shown),
        family,
        "flash2" if "pytorch_flash" in head.path or head.path == base else "flash2_pip",
        arch="sm80",
        dtype=dtype,
        direction=direction,
        causal=flags.get("causal"),
        dropout=flags.get("dropout"),
        **sizes,
    )


_C = r"cute::(?:C<|constant<int, )(\d+)>"
_TUPLE3 = re.compile(rf"cute::tuple<{_C}, {_C}, {_C} ?>")
_TUPLE2 = re.compile(rf"<cute::tuple<{_C}, {_C} ?>")
_FA3_ELEMENT = re.compile(r"cutlass::(?:half_t|bfloat16_t|float_e4m3_t|float_e5m2_t)\b")
_FA3_FLAGS = re.compile(r"cutlass::arch::Sm(\d+)((?:, (?:true|false))+)")
_FA3_STAGES = re.compile(r"CollectiveMainloop(?:Fwd|Bwd)Sm\d+<(\d+), (\d+)?")

_FA3_SIDE = re.compile(r"FlashAttn(Fwd|Bwd)Sm(\d+)")


def fa3_flags(text: str) -> dict[str, bool]:
    """Return the compile-time flags of a FlashAttention 3 kernel by name.

    Return {} if the name of the kernel does not contain an architecture.
    """
    side, match = _FA3_SIDE.search(text), _FA3_FLAGS.search(text)
    if side is None or match is None:
        return {}
    names = FA3_BWD if side[1] == "Bwd" else FA3_FWD80 if side[2] == "80" else FA3_FWD90
    values = (word == "true" for word in match[2].split(", ")[1:])
    return dict(zip(names.split(), values, strict=False))


def _fa3(text: str, head: Head, match: re.Match[str]) -> KernelName:
    base, side = match["base"], match["side"]
    if side is None:
        return KernelName(head.name, base, "flash", "fa3", direction="fwd")
    direction = side.lower()
    element = _FA3_ELEMENT.search(text)
    in_name = re.search(r"Sm(\d+)", base)
    sm_match = in_name or re.search(r"cutlass::arch::Sm(\d+)", text)
    sm = sm_match[1] if sm_match else None
    tiles = [tuple(map(int, sizes)) for sizes in _TUPLE3.findall(text[:700])]
    tile = tiles[1 if sm != "80" and len(tiles) > 1 else 0] if tiles and in_name else None
    flags = fa3_flags(text)
    family = "flash_bwd" if direction == "bwd" else "flash"
    stages = warps = None
    if in_name:
        counts = _FA3_STAGES.search(text)
        is_fwd80 = direction == "fwd" and sm == "80"
        stages = integers(counts, stages=2 if is_fwd80 else 1).get("stages")
        warps = int(counts[1]) if counts and is_fwd80 else None
    else:
        family = "flash_combine" if "Combine" in base else family
        pair = _TUPLE2.search(text)
        tile = (int(pair[1]), 0, int(pair[2])) if pair else None
    tile_m, tile_n, head_dim = tile or (None, None, None)
    tile_n = tile_n or None
    shown = flag_words(FA3_FLAGS, flags)
    size = f"{tile_m}x{tile_n}" if tile_n else f"m{tile_m}" if tile_m else None
    return KernelName(
        head.name,
        join_short(base, head_dim, size, *shown),
        family,
        "fa3",
        arch=f"sm{sm}" if sm else None,
        dtype=OF_CPP_TYPE.get(element[0]) if element else None,
        head_dim=None if family == "flash_combine" else head_dim,
        tile_m=tile_m,
        tile_n=tile_n,
        stages=stages,
        warps=warps,
        direction=direction,
        causal=flags.get("causal"),
    )


_FA4_CLASS = re.compile(r"(Flash(?:Attention|Attn)?(?:Forward|Backward|Decode)\w*?)(?:_object|$|_)")
_FA4_DTYPE = re.compile(r"tensorptr(bf16|f16|f32)")


def _fa4(text: str, head: Head, match: re.Match[str]) -> KernelName:
    class_name = _FA4_CLASS.search(text[:300])
    dtype = _FA4_DTYPE.search(text)
    sm = re.search(r"[sS]m(\d+)", class_name[1] if class_name else match[0])
    direction = match["direction"]
    family = "flash_bwd" if direction == "bwd" else "flash"
    if "combine" in match[0].lower() or (class_name and "Combine" in class_name[1]):
        family = "flash_combine"
    return KernelName(
        head.name,
        class_name[1] if class_name else match[0].removeprefix("kernel_cutlass_kernel_"),
        family,
        "fa4",
        arch=f"sm{sm[1]}" if sm else None,
        dtype={"bf16": "bf16", "f16": "fp16", "f32": None}[dtype[1]] if dtype else None,
        direction=direction,
    )


_EFFICIENT_DTYPES = {"f16": "fp16", "bf16": "bf16", "f32": "fp32"}
_MAX_K = re.compile(r"AttentionKernel<[^<>]*?(?:true|false), \d+, \d+, (\d+)")


def _efficient(text: str, head: Head, match: re.Match[str]) -> KernelName:
    is_backward = match["side"] == "B"
    max_k = None if is_backward else _MAX_K.search(text)
    is_foreign = "PyTorchMemEff" not in text and text[head.end : head.end + 10] == "(Attention"
    return KernelName(
        head.name,
        head.base,
        "efficient_bwd" if is_backward else "efficient",
        "xformers" if is_foreign else "efficient",
        arch=f"sm{match['sm']}" if match["sm"] else None,
        dtype=_EFFICIENT_DTYPES[match["dtype"]],
        direction="bwd" if is_backward else "fwd",
        dropout="_dropout" in head.base if is_backward else None,
        **integers(match, head_dim="k", tile_m="m", tile_n="n") | integers(max_k, head_dim=1),
    )


def _cudnn(_text: str, head: Head, match: re.Match[str]) -> KernelName:
    kind = match["dtype"]
    tile = _TILE.match(match["tile"] or "")
    engine = "cudnn_oss_sdpa" if match["engine"] == "oss" else "cudnn_sdpa"
    knob = f"knob_{match['knob']}" if match["knob"] else None
    low = kind if kind != "f16" else None
    parts = (engine, match["sm"], match["pass"], match["mma"], low, knob, match["tile"])
    direction = "fwd" if match["pass"] == "fprop" else "bwd"
    return KernelName(
        head.name,
        "_".join(part for part in parts if part),
        "cudnn" if direction == "fwd" else "cudnn_bwd",
        "cudnn",
        arch=match["sm"],
        dtype={"f16": "fp16/bf16", "f8": "fp8"}.get(kind, kind),
        direction=direction,
        **integers(tile, tile_m=1, tile_n=2, tile_k=3, head_dim=3),
    )


def _cudnn_helper(text: str, head: Head, match: re.Match[str]) -> KernelName:
    direction = "fwd" if match["helper"] == "lean_reduction" else "bwd"
    family = "cudnn" if direction == "fwd" else "cudnn_bwd"
    return KernelName(head.name, generic_short(text, head), family, "cudnn", direction=direction)


def _direction(text: str) -> str:
    return "bwd" if "bwd" in text or "backward" in text else "fwd"


def _flex(_text: str, head: Head, _match: re.Match[str]) -> KernelName:
    return KernelName(head.name, head.base, "flex", "flex", direction=_direction(head.base))


def _triton(_text: str, head: Head, match: re.Match[str]) -> KernelName:
    direction = _direction(head.base) if match.groupdict().get("attention") else None
    return KernelName(head.name, head.base, "triton", "triton", direction=direction)


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


def _gemm(text: str, head: Head, match: re.Match[str]) -> KernelName:
    """Parse a name such as `ampere_sgemm_128x64_tn` or `cutlass_80_tensorop_…gemm_…`.

    The name may be a template argument of `cutlass::Kernel2<…>`.
    """
    name = match["name"]
    if _CONVOLUTION.search(name) or "gemm" not in name:
        return KernelName(head.name, name, "other", "cudnn" if "cudnn" in text[:200] else "cutlass")
    tile, stages = _TILE.search(name), _STAGES.search(name)
    number = re.match(r"cutlass(?:3x)?_(?:sm)?(\d+)", name)
    chip = name.partition("_")[0]
    arch = _CHIP.get(chip) or (f"sm{number[1]}" if number else None)
    return KernelName(
        head.name,
        name,
        "gemm",
        "cublas",
        arch=arch,
        dtype=_element(name),
        **integers(tile, tile_m=1, tile_n=2, tile_k=3),
        **integers(stages, stages=(stages and stages.lastindex) or 0),
    )


def _xmma(_text: str, head: Head, match: re.Match[str]) -> KernelName:
    """Parse a name such as
    `sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_…`.
    """
    if match["gemm"] is None:
        return KernelName(head.name, head.base, "other", "cudnn", arch=match["sm"])
    formats = re.match(r"_([a-z\d]+?)_([a-z\d]+?)_([a-z\d]+)_([tn]{2})_", match["tail"])
    tile = re.search(r"tilesize(\d+)x(\d+)x(\d+)", match["tail"])
    stage = re.search(r"stage(\d+)", match["tail"])
    math = "tf32" if formats and "tf32" in formats[2] else None
    # The first word contains the types of A and B, for example f32f32 or bf16bf16.
    word = formats[1][: len(formats[1]) // 2] if formats else None
    parts = [math or word, formats[4] if formats else None, tile[0][8:] if tile else None]
    parts += ["splitk" if "split_k" in match["tail"] else None]
    stem = f"{match['sm']}_xmma_{match['gemm']}"
    return KernelName(
        head.name,
        "_".join([stem, *(part for part in parts if part)]) if formats else head.base,
        "gemm",
        "cublas",
        arch=match["sm"],
        dtype=_element(word) if word else None,
        **integers(tile, tile_m=1, tile_n=2, tile_k=3),
        **integers(stage, stages=1),
    )


def _nvjet(_text: str, head: Head, match: re.Match[str]) -> KernelName:
    """Parse a name such as `nvjet_sm90_hsh_256x128_64x4_…`, in which the architecture is optional.

    The letters are the types of A, B and D (h is fp16, t is bf16). After them come the tile, and the
    depth of a step and the number of stages.
    """
    return KernelName(
        head.name,
        head.base,
        "gemm",
        "cublas",
        arch=match["sm"],
        dtype={"h": "fp16", "t": "bf16"}.get(match["types"][0]) if match["types"] else None,
        **integers(match, tile_m="m", tile_n="n", stages="stages"),
    )


def _first_dtype(arguments: list[str]) -> str | None:
    return next((OF_CPP_TYPE[argument] for argument in arguments if argument in OF_CPP_TYPE), None)


def _gemv(text: str, head: Head, _match: re.Match[str]) -> KernelName:
    arguments = template_arguments(text, head.end)
    dtype = _first_dtype(arguments)
    numbers = [argument for argument in arguments if argument.isdigit()]
    base = "gemvx" if "gemvx::" in head.path else head.base
    short = join_short(base, dtype, *numbers[:5])
    return KernelName(head.name, short, "gemv", "cublas", dtype=dtype)


def _small_gemm(text: str, head: Head, _match: re.Match[str]) -> KernelName:
    dtype = _first_dtype(template_arguments(text, head.end, limit=8))
    return KernelName(head.name, generic_short(text, head), "gemm", "cublas", dtype=dtype)


def _cutlass3(text: str, head: Head, match: re.Match[str]) -> KernelName:
    """Parse a CUTLASS 3 name such as
    `cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<…>>`, or a CUTLASS 2 name.
    """
    tile = re.search(r"GemmShape<(\d+), (\d+), \d+>", text[:4096])
    element = re.search(r"cutlass::(?:half_t|bfloat16_t|float_e4m3_t)\b", text[:4096])
    return KernelName(
        head.name,
        join_short(match["name"], f"{tile[1]}x{tile[2]}" if tile else None),
        "gemm",
        "cutlass",
        dtype=OF_CPP_TYPE[element[0]] if element else None,
        **integers(tile, tile_m=1, tile_n=2),
    )


def _cub(text: str, head: Head, _match: re.Match[str]) -> KernelName:
    is_reduce = re.match(r"Device(?:Segmented|SingleTile)?Reduce", head.base)
    family = "reduce" if is_reduce or "ReduceSingleTile" in head.base else "other"
    return KernelName(head.name, generic_short(text, head), family, "cub")


NameRule = tuple[re.Pattern[str], Callable[[str, Head, re.Match[str]], KernelName]]


def _rules(*rows: tuple[str, Callable[[str, Head, re.Match[str]], KernelName]]) -> list[NameRule]:
    return [(re.compile(pattern, re.ASCII), parser) for pattern, parser in rows]


# The rules are tried in this order. The first rule that matches determines the parser.
_ATTENTION = _rules(
    # this pattern must not match flash_fwd_splitkv_mla_kernel, which belongs to FlashMLA
    (r"(?:\w+::){0,4}flash_(?P<direction>fwd|bwd)_(?!\w*mla_)\w+(?=[<(]|$)", _fa2),
    (
        r"(?:cutlass::device_kernel<)?(?:flash::enable_sm\w+<)?flash::"
        r"(?P<base>FlashAttn(?P<side>Fwd|Bwd)\w*|(?:prepare_varlen\w*))",
        _fa3,
    ),
    (
        r"(?:kernel_cutlass_)?(?:kernel_)?flash_attn\w{0,20}?(?:cute)?flash_(?P<direction>fwd|bwd)\w*",
        _fa4,
    ),
    (
        r"fmha_cutlass(?P<side>[FB])_(?P<dtype>f16|bf16|f32)_(?:not)?aligned_(?P<m>\d+)x(?P<n>\d+)"
        r"(?:_rf|_gmem)?(?:_k(?P<k>\d+))?(?:_dropout)?(?:_seqaligned)?(?:_sm(?P<sm>\d+))?",
        _efficient,
    ),
    (
        r"cudnn_(?:generated_)?(?:(?P<engine>fort_native|oss)_)?sdpa_(?P<sm>sm\d+[a-z]?)_flash_"
        r"(?P<pass>fprop|bprop)(?:_(?P<mma>wg?mma))?(?:_(?P<dtype>f16|f8|mxfp8|bf16))?"
        r"(?:_knob_(?P<knob>\d+))?(?:_(?P<tile>\d+x\d+x\d+))?",
        _cudnn,
    ),
    (
        r"(?:cudnn::fusion::)?(?P<helper>compute_dot_do_o|convert_dq_to_16bits|fmha_reduce_head"
        r"|lean_reduction)(?=[_<(]|$)",
        _cudnn_helper,
    ),
    (
        r"triton_(?:tem_)?(?:fused_)?(?!poi_|red_|per_|for_)\w*?flex_(?:attention|decoding)",
        _flex,
    ),
    (r"triton_", _triton),
    (
        r"(?P<attention>_?attn_(?:fwd|bwd)|_(?:fwd|bwd)_(?:kernel(?!_stage)|preprocess)"
        r"|bwd_kernel_(?:dk_dv|dq|fuse)|_splitK_reduce)\w*$",
        _triton,
    ),
)
_PRODUCTS = _rules(
    (
        r"(?P<sm>sm\d+)_xmma_(?P<gemm>(?:sparse_)?gemm)?(?P<tail>\w*)",
        _xmma,
    ),
    (
        r"nvjet_(?:(?P<sm>sm\d+)_)?(?P<types>[a-z]{3,6})?"
        r"(?:_(?P<m>\d+)x(?P<n>\d+))?(?:_\d+x(?P<stages>\d+))?",
        _nvjet,
    ),
    (
        r"(?:cutlass\w{0,20}::Kernel2?<\s?)?(?:typename )?"
        r"(?P<name>(?:ampere|volta|turing|maxwell|hopper|kepler|blackwell)_\w+"
        r"|cutlass(?:3x)?_(?:sm)?\d+_\w+|cutlass_tensorop_\w+)",
        _gemm,
    ),
    (r"(?:internal::)?gemvx::|gemv\w*(?=[<(]|$)", _gemv),
    (
        r"(?:cublasLt::)?splitKreduce_kernel|cublasLt::|gemmSN_\w+|gemmk1_kernel"
        r"|(?:cublas::)?gemm_kernel\w*|\w*[sdch]gemm_\w+",
        _small_gemm,
    ),
    (
        r"cutlass::(?:device_kernel|Kernel2?)<(?:enable_\w+<)?(?:typename )?(?:\w+::){0,3}"
        r"(?P<name>(?:\w*Gemm\w*|default_gemm\w*))",
        _cutlass3,
    ),
    (r"(?:\w+::){0,3}cub::", _cub),
)
