"""Parse 2,066 real kernel names, in Kineto's and nsys's spelling, and compare with their known properties."""

from __future__ import annotations

import gzip
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nsys_spelling import as_nsys

from profharness.traces.kernel_names import FAMILIES, canonical, parse_kernel_name
from profharness.traces.kernel_names.meanings import TILED

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
TABLE = Path(__file__).parents[1] / "data" / "kernel_names.tsv.gz"

# The list's category of a name -> family by direction, and backend.
EXPECTED: dict[str, tuple[dict[str, str], str]] = {
    "flash(FA2,torch)": ({"fwd": "flash", "bwd": "flash_bwd"}, "flash2"),
    "FA2(flash-attn pip / vllm)": ({"fwd": "flash", "bwd": "flash_bwd"}, "flash2_pip"),
    "FA3(flash_attn_3)": ({"fwd": "flash", "bwd": "flash_bwd"}, "fa3"),
    "FA4(CuTe DSL)": ({"fwd": "flash", "bwd": "flash_bwd"}, "fa4"),
    "mem_efficient(torch)": ({"fwd": "efficient", "bwd": "efficient_bwd"}, "efficient"),
    "xformers": ({"fwd": "efficient", "bwd": "efficient_bwd"}, "xformers"),
    "xformers (or torch 2.0)": ({"fwd": "efficient", "bwd": "efficient_bwd"}, "xformers"),
    "cudnn": ({"fwd": "cudnn", "bwd": "cudnn_bwd"}, "cudnn"),
    "cudnn(OSS engine of cudnn-frontend)": ({"fwd": "cudnn", "bwd": "cudnn_bwd"}, "cudnn"),
    "cudnn(helper)": ({"fwd": "cudnn", "bwd": "cudnn_bwd"}, "cudnn"),
    "flex_attention(Inductor Triton template)": ({"fwd": "flex", "bwd": "flex"}, "flex"),
    "flex_attention autotune candidate": ({"fwd": "flex", "bwd": "flex"}, "flex"),
    "flex_attention or any other Triton template (old Inductor)": ({"": "triton"}, "triton"),
    "Triton FA (flash_attn_triton)": ({"fwd": "triton", "bwd": "triton"}, "triton"),
    "Triton FA (megafold)": ({"fwd": "triton", "bwd": "triton"}, "triton"),
    "Triton tutorial FA": ({"fwd": "triton"}, "triton"),
    "vLLM Triton": ({"fwd": "fmha"}, "triton"),
    "flashinfer FA2": ({"fwd": "fmha"}, "flashinfer"),
    "flashinfer FA3": ({"fwd": "fmha"}, "flashinfer"),
    "flashinfer decode": ({"fwd": "fmha"}, "flashinfer"),
    "trtllm-gen": ({"fwd": "fmha"}, "trtllm"),
    "math(softmax)": ({"fwd": "softmax", "bwd": "softmax"}, "aten"),
    "math(GEMM cuBLAS)": ({"": "gemm"}, "cublas"),
    "math(GEMM cuBLASLt)": ({"": "gemm"}, "cublas"),
    "math(GEMM helper)": ({"": "gemm"}, "cublas"),
    "math(GEMV cuBLAS, Sq=1)": ({"": "gemv"}, "cublas"),
}


def real_names() -> list[dict[str, str]]:
    with gzip.open(TABLE, "rt", encoding="utf-8", newline="") as file:
        names, *rows = (line.rstrip("\n").split("\t") for line in file)
    return [dict(zip(names, row, strict=True)) for row in rows]


def expected(row: dict[str, str]) -> tuple[str, str]:
    by_direction, backend = EXPECTED[row["backend"]]
    family = by_direction[row["direction"]]
    if family == "flash":  # the list counts split-KV and its combine as forward
        family = "flash_splitkv" if "splitkv" in row["name"] else family
        family = "flash_combine" if "ombine" in row["name"] else family
    return family, backend


def test_real_names_have_the_right_family_and_backend() -> None:
    rows = real_names()
    assert len(rows) == 2066
    wrong = []
    for row in rows:
        found = parse_kernel_name(row["name"])
        if (found.family, found.backend) != expected(row):
            wrong.append((row["name"][:120], found.family, found.backend))
        assert (found.direction or "") == row["direction"], row["name"]
    assert wrong == []


def test_nsys_spelling_parses_the_same() -> None:
    for row in real_names():
        kineto, nsys = parse_kernel_name(row["name"]), parse_kernel_name(as_nsys(row["name"]))
        same = ("short", "family", "backend", "dtype", "head_dim", "tile", "causal")
        for field in same:
            assert getattr(kineto, field) == getattr(nsys, field), (row["name"], field)


def test_real_names_are_decoded_as_listed() -> None:
    checked = 0
    for row in real_names():
        found = parse_kernel_name(row["name"])
        if row["backend"] == "flash(FA2,torch)":
            numbers = re.findall(r"\d+", row["head_dim_tile"])
            decoded = [found.head_dim, found.tile_m, found.tile_n, found.warps]
            assert decoded == list(map(int, numbers)), row["name"]
            if found.causal is not None:
                assert found.causal == ("causal" in row["note"]), row["name"]
        elif row["backend"] == "mem_efficient(torch)":
            tile, max_k = re.findall(r"(\d+x\d+) maxK=(\d+)", row["head_dim_tile"])[0]
            assert f"{found.tile_m}x{found.tile_n}" == tile, row["name"]
            assert found.head_dim == int(max_k), row["name"]
        elif "dv" in row["head_dim_tile"] and "FlashAttnFwdSm" in row["name"]:
            assert f"{found.tile_m}x{found.tile_n}" in row["head_dim_tile"], row["name"]
            assert found.causal == ("causal" in row["note"]), row["name"]
        else:
            continue
        assert found.dtype == row["dtype"], row["name"]
        checked += 1
    assert checked > 1600


# How tiles are written in names, independent of the parser.
TILES = (
    re.compile(r"Flash_(?:fwd|bwd)_kernel_traits<\d+, (\d+), (\d+)"),
    re.compile(r"_knob_\d+_(\d+)x(\d+)x(\d+)"),
    re.compile(r"fmha_cutlass[FB]_\w+?_(\d+)x(\d+)_"),
    re.compile(r"tilesize(\d+)x(\d+)x(\d+)"),
    re.compile(r"nvjet_\w+?_(\d+)x(\d+)_"),
    re.compile(r"gemm_(?:\w+?_)?(\d+)x(\d+)_"),
    re.compile(r"Collective\w+Sm\d+<.*?tuple<cute::C<(\d\d+)>, cute::C<(\d\d+)>"),
)


def test_tiles_match_the_names() -> None:
    checked = 0
    for row in real_names():
        found = next(filter(None, (pattern.search(row["name"]) for pattern in TILES)), None)
        if found:
            assert parse_kernel_name(row["name"]).tile == "x".join(found.groups()), row["name"]
            checked += 1
    assert checked > 1600


FA2 = (
    "_ZN13pytorch_flash16flash_fwd_kernelI23Flash_fwd_kernel_traitsILi64ELi128ELi128ELi4ELb0ELb0E"
    ""
    "N7cutlass6half_tE19Flash_kernel_traitsILi64ELi128ELi128ELi4ES2_EELb0ELb1ELb0ELb0ELb1ELb1ELb0ELb0E"
    "EEvNS_16Flash_fwd_paramsE"
)
COPY = (
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::"
    "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda()"
    "#10}::operator()() "
    "const::{lambda(c10::Half)#1}>(at::TensorIteratorBase&)::{lambda(int)#1}>(int)"
)
MUL = (
    "void at::native::vectorized_elementwise_kernel<4, "
    "at::native::BinaryFunctor<float, float, float,"
    " at::native::binary_internal::MulFunctor<float> >, std::array<char*, 3ul> >(int)"
)
AND = (
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<bool, at::native::func_wrapper_t<"
    "bool, at::native::and_kernel_cuda(at::TensorIterator&)::{lambda()#1}>, unsigned "
    "int, bool, 4, 4> >()"
)


@pytest.mark.parametrize(
    ("name", "family", "short"),
    [
        (canonical(FA2), "flash", "flash_fwd_kernel<64,128x128,w4,causal>"),
        (COPY, "copy", "elementwise<128, 4, direct_copy, fp16>"),
        (MUL, "elementwise", "vectorized_elementwise<4, MulFunctor>"),
        (AND, "reduce", "reduce_kernel<512, 1, and, bool>"),
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_"
            "knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0",
            "cudnn",
            "cudnn_sdpa_sm90_fprop_wgmma_knob_7_64x128x64",
        ),
        (
            "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stag"
            "e3_warpsize2x2x1_ffma_execute_kernel__5x_cublas",
            "gemm",
            "sm80_xmma_gemm_f32_tn_128x128x8",
        ),
        (
            "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_wa"
            "rpgroupsize1x1x1_execute_kernel__5x_cublas",
            "gemm",
            "sm90_xmma_gemm_tf32_tn_128x128x32",
        ),
        (
            "sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x128x32",
            "convolution",
            None,
        ),
        ("ampere_scudnn_128x64_relu_medium_nn_v1", "convolution", None),
        ("ampere_bf16_s16816gemm_bf16_64x128_ldg8_f2f_stages_64x3_tn", "gemm", None),
        ("void gemv2T_kernel_val<int, int, float, float, float, float, 128>(int)", "gemv", None),
        ("void gemmSN_TN_kernel<float, 128, 16, 2, 4, 4, 4, true>(int)", "gemm", None),
        (
            "triton_poi_fused__scaled_dot_product_cudnn_attention_add_mul_permute_view",
            "triton",
            None,
        ),
        ("triton_poi_fused_flex_attention_mul_0", "triton", None),
        ("triton_tem_fused_addmm_3", "triton", None),
        ("triton_tem_fused__to_copy_flex_decoding_1", "flex", None),
        (
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "collective",
            None,
        ),
        ("Memcpy HtoD (Pageable -> Device)", "memcpy", None),
        ("Memset (Device)", "memset", None),
        ("[CUDA memcpy Device-to-Host]", "memcpy", None),
        (
            "void at::native::<unnamed>::CatArrayBatchedCopy<float, unsigned int, (int)4>(T1)",
            "copy",
            None,
        ),
        ("void at::native::radixSortKVInPlace<-2, -1, 32, 4>(long)", "other", None),
        ("my_flash_fwd_thing", "other", "my_flash_fwd_thing"),
        ("", "other", ""),
    ],
)
def test_names_of_each_kind(name: str, family: str, short: str | None) -> None:
    found = parse_kernel_name(name)
    assert found.family == family
    if short is not None:
        assert found.short == short


def test_all_fields_of_an_fa2_name_are_parsed() -> None:
    found = parse_kernel_name(canonical(FA2))
    assert (found.backend, found.arch, found.dtype) == ("flash2", "sm80", "fp16")
    assert (found.causal, found.dropout, found.direction) == (True, False, "fwd")
    older = (
        "void flash::flash_fwd_kernel<flash::Flash_fwd_kernel_traits<64, 128, 64, 4, false, false"
    )
    cut = parse_kernel_name(older)
    assert (cut.family, cut.backend, cut.tile_n, cut.causal) == ("flash", "flash2_pip", 64, None)
    combine = "void cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::tuple<cute::C<16>, "
    assert parse_kernel_name(combine).tile is None  # a tile needs rows and columns


@pytest.mark.parametrize(
    ("op", "family"),
    [
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "flash"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "flash_bwd"),
        ("aten::_scaled_dot_product_efficient_attention_backward", "efficient_bwd"),
        ("aten::bmm", "gemm"),
        ("aten::baddbmm", "gemm"),
        ("aten::_softmax", "softmax"),
        ("aten::copy_", "copy"),
        ("aten::mul_", "elementwise"),
        ("aten::sum", "reduce"),
        ("aten::zero_", "memset"),
        ("aten::view", "other"),
        ("", "other"),
    ],
)
def test_ops_are_kernels_on_the_cpu(op: str, family: str) -> None:
    assert parse_kernel_name(op, "op").family == family
    for kind in ("memcpy", "memset"):
        assert parse_kernel_name(op, kind).family == kind


def test_canonical_keeps_plain_and_broken_names() -> None:
    assert canonical("triton_poi_fused_0") == "triton_poi_fused_0"
    assert canonical("_Zbroken") == "_Zbroken"
    assert canonical("_Z" + "a" * 10_000) == "_Z" + "a" * 10_000
    assert canonical("_Z1f\0") == "_Z1f\0"
    assert canonical("_Z\udc80") == "_Z\udc80"


@given(st.text(max_size=300))
def test_any_text_can_be_parsed(text: str) -> None:
    found = parse_kernel_name(canonical(text))
    assert found.family in FAMILIES
    assert len(found.short) <= 64


@given(st.sampled_from(real_names()), st.integers(0, 400))
def test_a_truncated_name_is_never_misidentified(row: dict[str, str], keep: int) -> None:
    family = parse_kernel_name(row["name"][:keep]).family
    relatives = {"other", expected(row)[0], "triton"}
    if "flash" in row["name"] or "Flash" in row["name"]:
        relatives |= {"flash", "flash_bwd", "flash_splitkv", "flash_combine"}
    assert family in relatives


@pytest.mark.parametrize(
    "unit",
    [
        *(
            "<",
            ">",
            "(",
            "a",
            "a::",
            "flash_",
            "void ",
            "(int)4",
            "cute::tuple<cute::C<1>, ",
            "_1x1",
        ),
        *("9", "1a", "A", "Ab", "_", "_quant", "MT1x", "reduce_", "::a", "S_"),
    ],
)
@pytest.mark.parametrize(
    "stem",
    [
        *("", "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<", "flashinfer::", "fmha_v2_"),
        *("at::native::elementwise_kernel<", "_ZN", "_ZN7ck_tile6kentryI", "Cijk_A_B_"),
    ],
)
def test_hostile_names_are_parsed_fast(stem: str, unit: str) -> None:
    name = stem + unit * (1_000_000 // len(unit))
    start = time.process_time()
    parse_kernel_name(name)
    assert time.process_time() - start < 0.5


def test_parsing_takes_as_long_as_a_few_scans_of_the_names() -> None:
    """Compare with a floor in the same process, because the machine may be busy."""
    names = [row["name"] for row in real_names()]

    def parse() -> None:
        parse_kernel_name.cache_clear()
        for name in names:
            parse_kernel_name(name)

    def scan() -> None:
        for name in names:
            re.findall(r"\w+|\W", name)

    def seconds(work: Callable[[], None]) -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    rounds = [(seconds(parse), seconds(scan)) for _ in range(3)]
    ratios = [parsed / scanned for parsed, scanned in rounds]
    assert min(ratios) < 10  # about 2


@pytest.mark.parametrize(
    ("name", "family", "short", "tile", "dtype"),
    [
        (
            "void tiled_attention<float, 64, 32, 512, 8>(Params<float>)",
            *("other", "tiled_attention<fp32,64x32,512,8>", "64x32", "fp32"),
        ),
        (
            "void tiled_attention<fp16, (int)64, (int)128, (bool)1>(fp16 const*)",
            *("other", "tiled_attention<fp16,64x128,true>", "64x128", "fp16"),
        ),
        (
            "void tiled_attention<bf16, 128, 64, 32, 1024, 16, 4, 2, true, false, true, 1>(int)",
            "other",
            "tiled_attention<bf16,128x64,32,1024,16,4,2,one,split,1>",
            *("128x64", "bf16"),
        ),
        ("void single_query<fp16>(fp16 const*)", "other", "single_query<fp16>", None, "fp16"),
        ("tiled_attention", "other", "tiled_attention", None, None),
        ("void tiled_attention<64, 128>(int)", "other", "tiled_attention<64,128>", None, None),
        ("void tiled_attention<T, BM, BN>(int)", "other", "tiled_attention<T,BM,BN>", None, None),
        (
            "void single_query_attention<__nv_bfloat16>(__nv_bfloat16 const*, float*, int)",
            *("other", "single_query_attention<bf16>", None, "bf16"),
        ),
        (
            "void combine_splits<bf16, 128, 4>(float const*)",
            *("other", "combine_splits<bf16,128,4>", None, "bf16"),
        ),
        ("flash_forward", "triton", "flash_forward", None, None),
        ("flash_backward_dkdv", "triton", "flash_backward_dkdv", None, None),
        ("flash_backward_dq", "triton", "flash_backward_dq", None, None),
        ("flash_backward_delta", "triton", "flash_backward_delta", None, None),
    ],
)
def test_kernels_of_packaged_implementations(
    name: str, family: str, short: str, tile: str | None, dtype: str | None
) -> None:
    found = parse_kernel_name(name)
    assert (found.family, found.short, found.tile, found.dtype) == (family, short, tile, dtype)
    assert found.direction == ("bwd" if "backward" in name else "fwd")
    assert parse_kernel_name(as_nsys(name)).short == short


def test_every_kernel_in_kernels_is_known_with_its_arguments() -> None:
    """Compare with the sources, so that renaming or changing a kernel there fails here."""
    cuda = "\n".join(path.read_text() for path in KERNELS.glob("*.cu"))
    names = re.findall(r"__global__\s+\w+\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(", cuda)
    assert {"tiled_attention", "combine_splits"} < set(names)
    for name in names:
        assert parse_kernel_name(f"void {name}<fp16>(int)").dtype == "fp16", name
    declared = re.search(r"template <([^>]*)>\s+__global__[^;{]*?\btiled_attention\(", cuda)
    assert declared is not None
    assert tuple(re.findall(r"(\w+)(?:,|$)", declared[1])) == tuple(TILED)
    triton = (KERNELS / "_flash_triton_kernels.py").read_text()
    names = re.findall(r"^def ([a-z]\w+)", triton, re.MULTILINE)
    assert len(names) == 4
    for name in names:
        parsed = parse_kernel_name(name)
        expected = ("triton", "bwd" if "backward" in name else "fwd")
        assert (parsed.family, parsed.direction) == expected, name


def test_variants_of_the_tiled_kernel_differ() -> None:
    flags = ("true", "false")
    names = [
        f"void tiled_attention<float, 64, 64, 32, 512, 8, 3, 2, {one}, {grid}, {split}, 2>(int)"
        for one in flags
        for grid in flags
        for split in flags
    ]
    assert len({parse_kernel_name(name).short for name in names}) == len(names)
    assert {parse_kernel_name(name).stages for name in names} == {3}


@pytest.mark.parametrize(
    "name",
    [
        "flash_forward(float const*)",
        "my_flash_forward",
        "flash_backward_dk",
        "void mine::tiled_attention<float, 64, 64>(int)",
        "void attention_forward<float>(float const*)",
    ],
)
def test_kernels_of_others_are_other(name: str) -> None:
    found = parse_kernel_name(name)
    assert (found.family, found.backend, found.tile, found.direction) == (
        *("other", "unknown"),
        *(None, None),
    )
