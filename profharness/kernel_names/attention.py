"""Attention kernels: FlashAttention 2, 3 and 4, efficient, cuDNN, flex, Triton and the serving
libraries.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from profharness.kernel_names.text import DTYPES, Head, KernelName, generic_short, join_short

READ = (
    2048  # the fields stand in the template, which comes first; the parameter list only repeats it
)


def parse_attention(text: str, head: Head) -> KernelName | None:
    """The attention kernel that a normalised name stands for; None if it is none."""
    for anchor, parser in _RULES:
        match = anchor.match(text, head.end - len(head.path))
        if match:
            return parser(text[:READ], head, match)
    return None


_TRAITS = re.compile(
    r"Flash_(?:fwd|bwd)_kernel_traits\w*<\s?(\d+), (\d+), (\d+), (\d+)"
    r"(?:, \w+){0,6}?, (cutlass::\w+)"
)
_TRAITS_CUT = re.compile(r"Flash_(?:fwd|bwd)_kernel_traits\w*<\s?(\d+), (\d+), (\d+), (\d+)\b")
_FLAGS = re.compile(r"> ?>((?:, ?(?:true|false|\d+)(?=[,>\s]))+)")
_FA2_FWD = "dropout causal local alibi even_mn even_k softcap return_softmax"
_FA2_SPLIT = "causal local alibi even_mn even_k softcap split append"
_FA2_BWD = "dropout causal local alibi even_mn even_k softcap"
_FA2_SHORT = {
    "flash_fwd_splitkv_combine_kernel": "flash_fwd_splitkv_combine",
    "flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel": "flash_bwd_dq_dk_dv",
    "flash_bwd_dq_dk_dv_loop_kernel": "flash_bwd_dq_dk_dv_loop",
}


def _fa2_flags(base: str, text: str) -> dict[str, bool]:
    """Compile-time flags by name. Releases before softcap have one flag fewer, the first ones
    fewer still.
    """
    match = _FLAGS.search(text)
    if match is None or "combine" in base:
        return {}
    values = [word == "true" for word in match[1].replace(" ", "").split(",")[1:]]
    layout = _FA2_FWD if base.startswith("flash_fwd") else _FA2_BWD
    names = (_FA2_SPLIT if "splitkv" in base else layout).split()
    if len(values) == len(names) - 1:
        names.remove("softcap")
    elif len(values) < len(names) - 1:
        names = names[: names.index("causal") + 1]
    return dict(zip(names, values, strict=False))


def _fa2(text: str, head: Head, match: re.Match[str]) -> KernelName:
    base, direction = head.base, match["direction"]
    traits = _TRAITS.search(text) or _TRAITS_CUT.search(text)
    numbers = [int(value) for value in traits.groups()[:4]] if traits else [None] * 4
    dtype = DTYPES.get(traits[5]) if traits and traits.re is _TRAITS else None
    flags = _fa2_flags(base, text)
    family = "flash_bwd" if direction == "bwd" else "flash"
    if "combine" in base:
        family = "flash_combine"
    elif "splitkv" in base:
        family = "flash_splitkv"
    head_dim, tile_m, tile_n, warps = numbers
    shown = [name for name in ("causal", "dropout", "local", "alibi", "softcap") if flags.get(name)]
    shown += ["append"] if flags.get("append") else []
    shown += ["nosplit"] if flags.get("split") is False else []
    shown += ["uneven"] if flags.get("even_mn") is False else []
    shown += ["padded"] if flags.get("even_k") is False else []
    if family == "flash_combine":
        own = re.search(r"> ?>, (\d+), (\d+)", text)
        shown = [f"m{own[1]}", f"split{2 ** min(int(own[2]), 20)}"] if own else []
    is_combine = family == "flash_combine"
    tile = f"{tile_m}x{tile_n}" if traits and not is_combine else None
    short = join_short(
        _FA2_SHORT.get(base, base), head_dim, tile, f"w{warps}" if tile else None, *shown
    )
    return KernelName(
        head.name,
        short,
        family,
        "flash2" if "pytorch_flash" in head.path or head.path == base else "flash2_pip",
        arch="sm80",
        dtype=dtype,
        head_dim=head_dim,
        tile_m=tile_m,
        tile_n=tile_n,
        warps=warps,
        direction=direction,
        causal=flags.get("causal"),
        dropout=flags.get("dropout"),
    )


_C = r"cute::(?:C<|constant<int, )(\d+)>"
_TUPLE3 = re.compile(rf"cute::tuple<{_C}, {_C}, {_C} ?>")
_TUPLE2 = re.compile(rf"<cute::tuple<{_C}, {_C} ?>")
_FA3_ELEMENT = re.compile(r"cutlass::(?:half_t|bfloat16_t|float_e4m3_t|float_e5m2_t)\b")
_FA3_FLAGS = re.compile(r"cutlass::arch::Sm(\d+)((?:, (?:true|false))+)")
_FA3_STAGES = re.compile(r"CollectiveMainloop(?:Fwd|Bwd)Sm\d+<(\d+), (\d+)?")
_FA3_FWD90 = [
    "causal",
    "local",
    "softcap",
    "varlen",
    "paged",
    "append",
    "qv",
    "rs",
    "overlap",
    "packgqa",
    "split",
    "v_col",
]
_FA3_FWD80 = ["causal", "local", "softcap", "varlen", "paged", "append", "packgqa", "split"]
_FA3_BWD = ["causal", "local", "softcap", "varlen", "deterministic"]
_FA3_SHOWN = ("causal", "local", "softcap", "varlen", "paged", "append", "qv", "packgqa", "split")


def _fa3(text: str, head: Head, match: re.Match[str]) -> KernelName:
    base, side = match["base"], match["side"]
    if side is None:
        return KernelName(head.name, base, "flash", "fa3", direction="fwd")
    direction = side.lower()
    element, flags_match = _FA3_ELEMENT.search(text), _FA3_FLAGS.search(text)
    in_name = re.search(r"Sm(\d+)", base)
    sm_match = in_name or re.search(r"cutlass::arch::Sm(\d+)", text)
    sm = sm_match[1] if sm_match else None
    tiles = [tuple(map(int, found.groups())) for found in _TUPLE3.finditer(text[:700])]
    tile = tiles[1 if sm != "80" and len(tiles) > 1 else 0] if tiles and in_name else None
    flags: dict[str, bool] = {}
    family = "flash_bwd" if direction == "bwd" else "flash"
    stages = warps = None
    if in_name:
        names = _FA3_BWD if direction == "bwd" else _FA3_FWD80 if sm == "80" else _FA3_FWD90
        words = flags_match[2].split(", ")[1:] if flags_match else []
        flags = dict(zip(names, (word == "true" for word in words), strict=False))
        counts = _FA3_STAGES.search(text)
        is_fwd80 = direction == "fwd" and sm == "80"
        stages = _maybe_int(counts[2 if is_fwd80 else 1]) if counts else None
        warps = int(counts[1]) if counts and is_fwd80 else None
    else:
        family = "flash_combine" if "Combine" in base else family
        pair = _TUPLE2.search(text)
        tile = (int(pair[1]), 0, int(pair[2])) if pair else None
    tile_m, tile_n, head_dim = tile or (None, None, None)
    tile_n = tile_n or None
    shown = [name for name in _FA3_SHOWN if flags.get(name)]
    size = f"{tile_m}x{tile_n}" if tile_n else f"m{tile_m}" if tile_m else None
    return KernelName(
        head.name,
        join_short(base, head_dim, size, *shown),
        family,
        "fa3",
        arch=f"sm{sm}" if sm else None,
        dtype=DTYPES.get(element[0]) if element else None,
        head_dim=None if family == "flash_combine" else head_dim,
        tile_m=tile_m,
        tile_n=tile_n,
        stages=stages,
        warps=warps,
        direction=direction,
        causal=flags.get("causal"),
    )


def _maybe_int(text: str | None) -> int | None:
    return int(text) if text else None


_FA4_CLASS = re.compile(r"(Flash(?:Attention|Attn)?(?:Forward|Backward|Decode)\w*?)(?:_object|$|_)")
_FA4_DTYPE = re.compile(r"tensorptr(bf16|f16|f32)")


def _fa4(text: str, head: Head, match: re.Match[str]) -> KernelName:
    found = _FA4_CLASS.search(text[:300])
    dtype = _FA4_DTYPE.search(text)
    sm = re.search(r"[sS]m(\d+)", found[1] if found else match[0])
    direction = match["direction"]
    family = "flash_bwd" if direction == "bwd" else "flash"
    if "combine" in match[0].lower() or (found and "Combine" in found[1]):
        family = "flash_combine"
    return KernelName(
        head.name,
        found[1] if found else match[0].removeprefix("kernel_cutlass_kernel_"),
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
    max_k = match["k"]
    if not is_backward and (found := _MAX_K.search(text)):
        max_k = found[1]
    is_foreign = "PyTorchMemEff" not in text and text[head.end : head.end + 10] == "(Attention"
    return KernelName(
        head.name,
        head.base,
        "efficient_bwd" if is_backward else "efficient",
        "xformers" if is_foreign else "efficient",
        arch=f"sm{match['sm']}" if match["sm"] else None,
        dtype=_EFFICIENT_DTYPES[match["dtype"]],
        head_dim=_maybe_int(max_k),
        tile_m=_maybe_int(match["m"]),
        tile_n=_maybe_int(match["n"]),
        direction="bwd" if is_backward else "fwd",
        dropout="_dropout" in head.base if is_backward else None,
    )


def _cudnn(_text: str, head: Head, match: re.Match[str]) -> KernelName:
    kind = match["dtype"]
    tile = match["tile"]
    m, n, k = map(int, tile.split("x")) if tile else (None, None, None)
    engine = "cudnn_oss_sdpa" if match["engine"] == "oss" else "cudnn_sdpa"
    knob = f"knob_{match['knob']}" if match["knob"] else None
    low = kind if kind != "f16" else None
    parts = (engine, match["sm"], match["pass"], match["mma"], low, knob, tile)
    direction = "fwd" if match["pass"] == "fprop" else "bwd"
    return KernelName(
        head.name,
        "_".join(part for part in parts if part),
        "cudnn" if direction == "fwd" else "cudnn_bwd",
        "cudnn",
        arch=match["sm"],
        dtype={"f16": "fp16/bf16", "f8": "fp8"}.get(kind, kind),
        head_dim=k,
        tile_m=m,
        tile_n=n,
        tile_k=k,
        direction=direction,
    )


def _cudnn_helper(text: str, head: Head, match: re.Match[str]) -> KernelName:
    direction = "fwd" if match["helper"] == "lean_reduction" else "bwd"
    family = "cudnn" if direction == "fwd" else "cudnn_bwd"
    return KernelName(head.name, generic_short(text, head), family, "cudnn", direction=direction)


def _direction(text: str) -> str:
    return "bwd" if "bwd" in text or "backward" in text else "fwd"


def _flex(_text: str, head: Head, match: re.Match[str]) -> KernelName:
    del match
    return KernelName(head.name, head.base, "flex", "flex", direction=_direction(head.base))


def _triton(_text: str, head: Head, match: re.Match[str]) -> KernelName:
    direction = _direction(head.base) if match.groupdict().get("attention") else None
    return KernelName(head.name, head.base, "triton", "triton", direction=direction)


_TRTLLM = re.compile(r"H(?:Qk)?(\d+)(?:HV\d+)?(?=[A-Z]).*?Q(\d+)Kv(\d+)")
_TRTLLM_DTYPE = {"Bfloat16": "bf16", "Fp16": "fp16", "E4m3": "fp8_e4m3"}


def _trtllm(_text: str, head: Head, match: re.Match[str]) -> KernelName:
    sizes = _TRTLLM.search(head.base, match.end())
    kind = re.match(r"Q(?:kv)?(Bfloat16|Fp16|E4m3)", head.base[match.end("sm") + 8 :] or "")
    kind = kind or re.search(r"_Qkv(Bfloat16|Fp16|E4m3)", head.base)
    head_dim, tile_m, tile_n = map(int, sizes.groups()) if sizes else (None, None, None)
    tail = head.base.replace("fmhaSm", "fmha_sm", 1).replace("Kernel_", "_", 1)
    return KernelName(
        head.name,
        tail,
        "other",
        "trtllm",
        arch=f"sm{match['sm']}",
        dtype=_TRTLLM_DTYPE[kind[1]] if kind else None,
        head_dim=head_dim,
        tile_m=tile_m,
        tile_n=tile_n,
        direction="fwd",
        causal=True if "Causal" in tail else False if "Dense" in tail else None,
    )


def _library(text: str, head: Head, match: re.Match[str]) -> KernelName:
    """A serving library's kernel: the library is certain, no family of ours is."""
    backend = next(name for name, value in match.groupdict().items() if value)
    is_attention = re.search(r"attn|attention|prefill|decode|mla", head.base, re.IGNORECASE)
    mask = re.search(r"\(flashinfer::MaskMode\)(\d)", text)
    return KernelName(
        head.name,
        generic_short(text, head),
        "other",
        backend,
        direction=_direction(head.base) if is_attention else None,
        causal={"0": False, "1": True}.get(mask[1]) if mask else None,
    )


_RULES: tuple[tuple[re.Pattern[str], Callable[[str, Head, re.Match[str]], KernelName]], ...] = (
    tuple(
        (re.compile(pattern, re.ASCII), parser)
        for pattern, parser in (
            (r"(?:\w+::){0,4}flash_(?P<direction>fwd|bwd)_\w+(?=[<(]|$)", _fa2),
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
                r"cudnn_(?:generated_)?(?P<engine>fort_native|oss)_sdpa_(?P<sm>sm\d+[a-z]?)_flash_"
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
                r"(?P<attention>_?attn_(?:fwd|bwd)|_(?:fwd|bwd)_(?:kernel|preprocess|grouped_kernel)"
                r"|bwd_kernel_(?:dk_dv|dq|fuse)|kernel_unified_attention|_splitK_reduce)\w*$",
                _triton,
            ),
            (r"fmhaSm(?P<sm>1\d\d)[a-z]?Kernel_", _trtllm),
            (
                r"(?P<flashinfer>(?:cutlass::device_kernel<)?flashinfer::)"
                r"|(?P<trtllm>fmha_v2_flash_attention_|tensorrt_llm::)"
                r"|(?P<sage>qk_int\w{0,12}_sv_f|(?:QuantInt8|MeanScale|TransposePadPermute)Kernel\b)"
                r"|(?P<vllm>vllm::)",
                _library,
            ),
        )
    )
)
