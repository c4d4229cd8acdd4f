"""Occupancy against cuda_occupancy.h (CUDA 13, compiled, 360 results), against ncu on an H200, and
against LLVM's tests and measurements of AMD on an MI250.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profharness.devices import (
    CU_LIMITS,
    LIMITERS,
    Device,
    SmLimits,
    cu_limits,
    gfx_name,
    is_amd,
    occupancy,
    sm_limits,
)

FACTS = json.loads((Path(__file__).parent / "data" / "occupancy_facts.json").read_text())
H200 = Device(
    0,
    "NVIDIA H200",
    9,
    0,
    132,
    max_threads_per_block=1024,
    max_threads_per_sm=2048,
    registers_per_block=65536,
    registers_per_sm=65536,
    shared_bytes_per_block=49152,
    shared_bytes_per_block_optin=232448,
    shared_bytes_per_sm=233472,
)


def bare(major: int, minor: int) -> Device:
    return Device(0, "device", major, minor, 1)


def rows(name: str) -> list[dict[str, float]]:
    table = FACTS[name]
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def test_agrees_with_cuda_occupancy_header() -> None:
    facts = rows("cuda_occupancy_h")
    assert len(facts) == 360
    for fact in facts:
        device = bare(int(fact["compute_major"]), int(fact["compute_minor"]))
        resources = (fact["block_threads"], fact["registers_per_thread"], fact["shared_bytes"])
        result = occupancy(*map(int, resources), device)
        if fact["blocks"] == 0:
            assert result is None, fact
            continue
        assert result is not None, fact
        assert result.blocks_per_sm == fact["blocks"], fact
        binding = [name for name in LIMITERS if fact[f"blocks_by_{name}"] == fact["blocks"]]
        assert result.limiter == binding[0], fact


def test_agrees_with_ncu_on_h200() -> None:
    facts = rows("ncu_h200")
    assert len(facts) >= 25
    for fact in facts:
        resources = (fact["block_threads"], fact["registers_per_thread"], fact["shared_bytes"])
        result = occupancy(*map(int, resources), H200)
        assert result is not None
        assert result.fraction * 100 == pytest.approx(fact["theoretical_pct"]), fact
        if result.limiter in ("registers", "warps"):
            assert result.blocks_per_sm == fact[f"blocks_by_{result.limiter}"], fact


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "device", "fraction", "blocks", "limiter"),
    [
        (128, 255, 65536, H200, 0.125, 2, "registers"),
        (512, 128, 228352, H200, 0.25, 1, "registers"),
        (128, 255, 98304, bare(8, 0), 0.0625, 1, "shared_memory"),
        (128, 32, 0, H200, 1.0, 16, "warps"),
        (32, 16, 0, H200, 0.5, 32, "block"),
        (384, 168, 134144, H200, 0.1875, 1, "registers"),
    ],
)
def test_known_kernels(
    threads: int,
    registers: int,
    shared: int,
    device: Device,
    fraction: float,
    blocks: int,
    limiter: str,
) -> None:
    result = occupancy(threads, registers, shared, device)
    assert result is not None
    assert (result.fraction, result.blocks_per_sm, result.limiter) == (fraction, blocks, limiter)


def test_the_table_completes_the_trace() -> None:
    assert sm_limits(bare(9, 0)) == sm_limits(H200)
    bigger = sm_limits(dataclasses.replace(bare(9, 0), shared_bytes_per_sm=300_000))
    assert bigger is not None
    assert bigger.shared_bytes_per_sm == 300_000


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "device"),
    [
        (128, 32, 0, bare(3, 7)),  # not in the table
        (0, 32, 0, H200),
        (1025, 32, 0, H200),
        (128, 256, 0, H200),
        (128, -1, 0, H200),
        (1024, 128, 0, H200),  # more registers than a block may have
        (128, 32, 232449, H200),  # one byte above the opt-in limit
    ],
)
def test_impossible_or_unknown_is_none_and_never_zero(
    threads: int, registers: int, shared: int, device: Device
) -> None:
    assert occupancy(threads, registers, shared, device) is None


def test_the_opt_in_limit_itself_fits() -> None:
    result = occupancy(128, 32, 232448, H200)
    assert result is not None
    assert (result.blocks_per_sm, result.limiter) == (1, "shared_memory")


@given(st.integers(1, 1024), st.integers(0, 255), st.integers(0, 232448))
def test_more_resources_never_raise_occupancy(threads: int, registers: int, shared: int) -> None:
    limits = sm_limits(H200)
    assert isinstance(limits, SmLimits)
    result = occupancy(threads, registers, shared, limits)
    if result is None:
        return
    assert 0 < result.fraction <= 1
    assert result.limiter in LIMITERS
    more_registers = occupancy(threads, min(registers + 8, 255), shared, limits)
    more_shared = occupancy(threads, registers, min(shared + 1024, 232448), limits)
    for more in (more_registers, more_shared):
        assert more is None or more.blocks_per_sm <= result.blocks_per_sm


# The occupancy by vector registers in LLVM's test occupancy-levels.ll, in waves per SIMD
LLVM_VGPRS = {
    "gfx900": {24: 10, 28: 9, 32: 8, 36: 7, 40: 6, 44: 5, 48: 5, 56: 4, 64: 4, 72: 3, 80: 3, 84: 3, 88: 2,
               96: 2, 100: 2, 112: 2, 128: 2, 144: 1, 168: 1, 200: 1, 256: 1},
    "gfx950": {24: 8, 28: 8, 32: 8, 36: 8, 40: 8, 44: 8, 48: 8, 56: 8, 64: 8, 72: 7, 80: 6, 84: 5, 88: 5,
               96: 5, 100: 4, 112: 4, 128: 4, 144: 3, 168: 3, 200: 2, 256: 2},
}  # fmt: skip
# The table of registers and waves in AMD's documentation of MI200 and MI300
AMD_VGPRS = {64: 8, 72: 7, 80: 6, 96: 5, 128: 4, 168: 3, 256: 2, 512: 1}


def amd(name: str, **more: int) -> Device:
    return Device(0, name, 9, 0, 104, warp_size=64, **more)


@pytest.mark.parametrize("gfx", LLVM_VGPRS)
def test_agrees_with_llvm_on_vector_registers(gfx: str) -> None:
    for registers, waves in LLVM_VGPRS[gfx].items():
        result = occupancy(256, registers, 0, amd(gfx), accum_registers=0)
        assert result is not None
        assert result.blocks_per_sm == waves, registers  # a block has one wave on each SIMD
        assert result.fraction == waves / CU_LIMITS[gfx].waves_per_simd


@pytest.mark.parametrize(
    "name", ["AMD Instinct MI210", "AMD Instinct MI250X", "AMD Instinct MI300X", "gfx942", "gfx950"]
)
def test_agrees_with_the_tables_of_amd(name: str) -> None:
    for registers, waves in AMD_VGPRS.items():
        for accum in (0, registers // 2):  # both kinds of registers share one file
            result = occupancy(256, registers - accum, 0, amd(name), accum_registers=accum)
            assert result is not None
            assert result.fraction == waves / 8
            assert result.limiter == ("warps" if waves == 8 else "registers")


# ROCm Compute Profiler's example of limiters of the occupancy, measured on an MI250: wavefronts on
# average, of 3328
@pytest.mark.parametrize(
    ("threads", "registers", "accum", "scalar", "shared", "wavefronts", "limiter"),
    [
        (256, 124, 4, 80, 0, 1661.24, "registers"),
        (256, 96, 0, 80, 65536, 415.52, "shared_memory"),
        (1024, 64, 0, 80, 0, 3291.76, "warps"),
    ],
)
def test_agrees_with_measurements_on_an_mi250(
    threads: int,
    registers: int,
    accum: int,
    scalar: int,
    shared: int,
    wavefronts: float,
    limiter: str,
) -> None:
    device = amd("AMD Instinct MI250")
    result = occupancy(
        threads, registers, shared, device, accum_registers=accum, scalar_registers=scalar
    )
    assert result is not None
    assert result.limiter == limiter
    assert result.fraction == pytest.approx(wavefronts / 3328, rel=0.02)


@pytest.mark.parametrize(
    ("gfx", "threads", "shared", "scalar", "waves"),
    [
        # occupancy-levels.ll: local memory, rounded up to a whole wave per SIMD
        ("gfx900", 64, 8252, None, 2),
        ("gfx950", 64, 8252, None, 5),
        ("gfx900", 96, 8252, None, 4),
        ("gfx950", 96, 8252, None, 8),  # 16 blocks of two waves
        ("gfx900", 128, 8252, None, 4),
        ("gfx950", 128, 8252, None, 8),
        # scalar registers, with those of the trap handler; gfx950 adds six to those of the kernel
        ("gfx900", 256, 0, 80, 8),
        ("gfx900", 256, 0, 88, 7),
        ("gfx900", 256, 0, 100, 6),
        ("gfx950", 256, 0, 86, 7),
        ("gfx950", 256, 0, 94, 7),
        ("gfx950", 256, 0, 106, 6),
        # llvm-calc-occupancy -mcpu=gfx90a --wg-size=512 --vgprs=50 --sgprs=30
        ("gfx90a", 512, 0, 30, 8),
    ],
)
def test_agrees_with_llvm_on_other_resources(
    gfx: str, threads: int, shared: int, scalar: int | None, waves: int
) -> None:
    registers = 50 if gfx == "gfx90a" else 8
    result = occupancy(
        threads, registers, shared, amd(gfx), accum_registers=0, scalar_registers=scalar
    )
    assert result is not None
    assert -(-result.blocks_per_sm * -(-threads // 64) // 4) == waves


@pytest.mark.parametrize(
    ("threads", "registers", "accum", "shared", "device"),
    [
        (256, 64, None, 0, amd("AMD Instinct MI300X")),  # no accumulation registers in the trace
        (256, 256, 257, 0, amd("AMD Instinct MI300X")),
        (1024, 256, 128, 0, amd("AMD Instinct MI300X")),  # only one of 16 waves fits a SIMD
        (1025, 64, 0, 0, amd("AMD Instinct MI300X")),
        (256, 64, 0, 65537, amd("AMD Instinct MI300X")),
        (256, 64, 0, 0, amd("AMD Radeon Graphics")),  # version 9.0 has several architectures
        (256, 64, 0, 0, Device(0, "AMD Radeon RX 7900 XTX", 11, 0, 48)),
        (256, 64, 0, 0, Device(0, "AMD Radeon AI PRO R9700", 12, 0, 64)),  # not a Blackwell
    ],
)
def test_amd_is_unknown_rather_than_wrong(
    threads: int, registers: int, accum: int | None, shared: int, device: Device
) -> None:
    assert is_amd(device)
    assert sm_limits(device) is None
    assert occupancy(threads, registers, shared, device, accum_registers=accum) is None


@pytest.mark.parametrize(
    ("device", "gfx"),
    [
        (amd("AMD Instinct MI210"), "gfx90a"),
        (amd("AMD Instinct MI250X / MI250"), "gfx90a"),
        (amd("AMD Instinct MI355X"), "gfx950"),
        (amd("AMD Radeon Graphics (gfx90a)"), "gfx90a"),
        (amd("gfx908"), "gfx908"),
        (Device(0, "", 9, 4, 304, warp_size=64), "gfx942"),
        (Device(0, "AMD GPU", 9, 5, 256, warp_size=64), "gfx950"),
        (amd("AMD Radeon Graphics"), None),
        (H200, None),
    ],
)
def test_architectures_of_amd(device: Device, gfx: str | None) -> None:
    assert gfx_name(device) == gfx
    assert (cu_limits(device) is None) == (gfx is None)


def test_mi350_has_more_shared_memory() -> None:
    result = occupancy(256, 64, 163840, amd("AMD Instinct MI350X"), accum_registers=0)
    assert result is not None
    assert (result.blocks_per_sm, result.limiter, result.shared_share) == (1, "shared_memory", 1)
