"""Identify the kernels in kernels/, whose names contain no library."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from nsys_spelling import as_nsys

from profharness.traces.kernel_names import parse_kernel_name
from profharness.traces.kernel_names.meanings import TILED

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


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
