"""Matrix products and what comes with them: cuBLAS, cuBLASLt, CUTLASS; and cuDNN, NCCL, CUB by
their names.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from profharness.kernel_names.text import (
    DTYPES,
    Head,
    KernelName,
    generic_short,
    join_short,
    template_arguments,
)


def parse_library(text: str, head: Head) -> KernelName | None:
    """The matrix product or library kernel that a name stands for; None if it is none."""
    for anchor, parser in _RULES:
        match = anchor.match(text, head.end - len(head.path))
        if match:
            return parser(text, head, match)
    return None


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
    """`ampere_sgemm_128x64_tn`, `cutlass_80_tensorop_…gemm_…`, also in `cutlass::Kernel2<…>`."""
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
        tile_m=int(tile[1]) if tile else None,
        tile_n=int(tile[2]) if tile else None,
        tile_k=int(tile[3]) if tile and tile[3] else None,
        stages=int(next(filter(None, stages.groups()))) if stages else None,
    )


def _xmma(_text: str, head: Head, match: re.Match[str]) -> KernelName:
    """`sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_…`."""
    if match["gemm"] is None:
        return KernelName(head.name, head.base, "other", "cudnn", arch=match["sm"])
    formats = re.match(r"_([a-z\d]+?)_([a-z\d]+?)_([a-z\d]+)_([tn]{2})_", match["tail"])
    tile = re.search(r"tilesize(\d+)x(\d+)x(\d+)", match["tail"])
    stage = re.search(r"stage(\d+)", match["tail"])
    math = "tf32" if formats and "tf32" in formats[2] else None
    # the first word names A and B in one: f32f32, bf16bf16
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
        tile_m=int(tile[1]) if tile else None,
        tile_n=int(tile[2]) if tile else None,
        tile_k=int(tile[3]) if tile else None,
        stages=int(stage[1]) if stage else None,
    )


def _nvjet(_text: str, head: Head, match: re.Match[str]) -> KernelName:
    """`nvjet_[sm90_]hsh_256x128_64x4_…`: A, B and D types (h fp16, t bf16), tile, K step x
    stages.
    """
    return KernelName(
        head.name,
        head.base,
        "gemm",
        "cublas",
        arch=match["sm"],
        dtype={"h": "fp16", "t": "bf16"}.get(match["types"][0]) if match["types"] else None,
        tile_m=int(match["m"]) if match["m"] else None,
        tile_n=int(match["n"]) if match["n"] else None,
        stages=int(match["stages"]) if match["stages"] else None,
    )


def _first_dtype(text: str, head: Head) -> str | None:
    for argument in template_arguments(text, head.end, limit=8):
        if argument in DTYPES:
            return DTYPES[argument]
    return None


def _gemv(text: str, head: Head, _match: re.Match[str]) -> KernelName:
    arguments = template_arguments(text, head.end)
    dtype = next((DTYPES[argument] for argument in arguments if argument in DTYPES), None)
    numbers = [argument for argument in arguments if argument.isdigit()]
    base = "gemvx" if "gemvx::" in head.path else head.base
    return KernelName(
        head.name, join_short(base, dtype, *numbers[:5]), "gemv", "cublas", dtype=dtype
    )


def _small_gemm(text: str, head: Head, _match: re.Match[str]) -> KernelName:
    dtype = _first_dtype(text, head)
    return KernelName(head.name, generic_short(text, head), "gemm", "cublas", dtype=dtype)


def _cutlass3(text: str, head: Head, match: re.Match[str]) -> KernelName:
    """`cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<…>>` and its CUTLASS 2
    sisters.
    """
    tile = re.search(r"GemmShape<(\d+), (\d+), \d+>", text[:4096])
    element = re.search(r"cutlass::(?:half_t|bfloat16_t|float_e4m3_t)\b", text[:4096])
    return KernelName(
        head.name,
        join_short(match["name"], f"{tile[1]}x{tile[2]}" if tile else None),
        "gemm",
        "cutlass",
        dtype=DTYPES[element[0]] if element else None,
        tile_m=int(tile[1]) if tile else None,
        tile_n=int(tile[2]) if tile else None,
    )


def _cub(text: str, head: Head, _match: re.Match[str]) -> KernelName:
    is_reduce = re.match(r"Device(?:Segmented|SingleTile)?Reduce", head.base)
    family = "reduce" if is_reduce or "ReduceSingleTile" in head.base else "other"
    return KernelName(head.name, generic_short(text, head), family, "cub")


def _named(text: str, head: Head, match: re.Match[str]) -> KernelName:
    backend = next(name for name, value in match.groupdict().items() if value)
    return KernelName(head.name, generic_short(text, head), "other", backend)


_RULES: tuple[tuple[re.Pattern[str], Callable[[str, Head, re.Match[str]], KernelName]], ...] = (
    tuple(
        (re.compile(pattern, re.ASCII), parser)
        for pattern, parser in (
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
            (
                r"(?P<nccl>nccl(?:DevKernel|Kernel|SymDevKernel|Symk)\w*)|(?P<cudnn>cudnn\w*)"
                r"|(?P<cutlass>cutlass\w*::|kernel_cutlass_)",
                _named,
            ),
        )
    )
)
