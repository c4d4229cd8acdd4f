"""Occupancy against cuda_occupancy.h (CUDA 13, compiled, 360 results) and against ncu on an H200."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profharness.devices import LIMITERS, Device, SmLimits, occupancy, sm_limits

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
