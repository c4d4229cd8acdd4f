"""Theoretical occupancy of a launch, computed here because Kineto prints 0 above 48 KiB of shared
memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from profharness.trace import Device

MAX_REGISTERS_PER_THREAD = 255
REGISTER_UNIT = 256  # registers are handed out to a warp in units of this many
SUB_PARTITIONS = 4  # each owns a quarter of the registers; a warp lives in one of them
KIB = 1024

# Limiters in the order in which ties are named: a ceiling of the hardware first, what a kernel
# can change after it.
LIMITERS = ("warps", "block", "registers", "shared_memory")

# compute capability: threads per SM, blocks per SM, shared KiB per SM. Registers per SM are 65536
# on all of these.
# Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability";
# cuda_occupancy.h of CUDA 13.
_SM_FACTS: dict[tuple[int, int], tuple[int, int, int]] = {
    (7, 0): (2048, 32, 96),
    (7, 2): (2048, 32, 96),
    (7, 5): (1024, 16, 64),
    (8, 0): (2048, 32, 164),
    (8, 6): (1536, 16, 100),
    (8, 7): (1536, 16, 164),
    (8, 9): (1536, 24, 100),
    (9, 0): (2048, 32, 228),
    (10, 0): (2048, 32, 228),
    (10, 1): (1536, 24, 228),
    (10, 3): (2048, 32, 228),
    (11, 0): (1536, 24, 228),
    (12, 0): (1536, 24, 100),
    (12, 1): (1536, 24, 100),
}


@dataclass(frozen=True, slots=True)
class SmLimits:
    """What one SM offers and what one block may take; shared memory in bytes, the driver's reserve
    per block apart.
    """

    max_threads_per_sm: int
    max_threads_per_block: int
    max_blocks_per_sm: int
    registers_per_sm: int
    registers_per_block: int
    shared_bytes_per_sm: int
    shared_bytes_per_block_optin: int
    shared_bytes_reserved: int
    shared_unit_bytes: int
    warp_size: int = 32


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Theoretical occupancy: resident warps over the most an SM holds (0 to 1), blocks that fit,
    and what stops one more.

    limiter is one of `registers shared_memory block warps`; when several bind at once, the first
    in LIMITERS is named.
    """

    fraction: float
    blocks_per_sm: int
    limiter: str


def sm_limits(device: Device) -> SmLimits | None:
    """A device's limits: what the trace tells, the rest from the table above. None for an unknown
    compute capability.
    """
    facts = _SM_FACTS.get((device.compute_major, device.compute_minor))
    if facts is None:
        return None
    threads, blocks, shared_kib = facts
    is_ampere_or_later = device.compute_major >= 8
    reserved = KIB if is_ampere_or_later else 0
    shared = device.shared_bytes_per_sm or shared_kib * KIB
    registers = device.registers_per_sm or 65536
    return SmLimits(
        max_threads_per_sm=device.max_threads_per_sm or threads,
        max_threads_per_block=device.max_threads_per_block or 1024,
        max_blocks_per_sm=blocks,
        registers_per_sm=registers,
        registers_per_block=device.registers_per_block or registers,
        shared_bytes_per_sm=shared,
        shared_bytes_per_block_optin=device.shared_bytes_per_block_optin or shared - reserved,
        shared_bytes_reserved=reserved,
        shared_unit_bytes=128 if is_ampere_or_later else 256,
        warp_size=device.warp_size or 32,
    )


def occupancy(
    block_threads: int, registers_per_thread: int, shared_bytes: int, limits: SmLimits | Device
) -> Occupancy | None:
    """Theoretical occupancy as cuda_occupancy.h has it, with the largest shared-memory carve-out
    and opt-in.

    shared_bytes is static plus dynamic of one block, without the driver's reserve. None when the
    device is unknown or when such a block could not be launched there at all, so that a real
    launch never reads 0. Named barriers, which no profiler but ncu tells, and clusters are left
    out.
    """
    sm = sm_limits(limits) if isinstance(limits, Device) else limits
    if sm is None or not 0 < block_threads <= sm.max_threads_per_block:
        return None
    if not 0 <= registers_per_thread <= MAX_REGISTERS_PER_THREAD:
        return None
    if not 0 <= shared_bytes <= sm.shared_bytes_per_block_optin:
        return None
    warps = -(-block_threads // sm.warp_size)
    max_warps = sm.max_threads_per_sm // sm.warp_size
    blocks_by = {
        "warps": max_warps // warps,
        "block": sm.max_blocks_per_sm,
        "registers": _blocks_by_registers(warps, registers_per_thread, sm),
        "shared_memory": _blocks_by_shared(shared_bytes, sm),
    }
    limiter = min(LIMITERS, key=lambda name: blocks_by[name])
    blocks = blocks_by[limiter]
    return Occupancy(blocks * warps / max_warps, blocks, limiter) if blocks else None


def _blocks_by_registers(warps: int, registers_per_thread: int, sm: SmLimits) -> int:
    if registers_per_thread == 0:
        return sm.max_blocks_per_sm
    per_warp = _round_up(registers_per_thread * sm.warp_size, REGISTER_UNIT)
    if per_warp * _round_up(warps, SUB_PARTITIONS) > sm.registers_per_block:
        return 0
    return sm.registers_per_sm // SUB_PARTITIONS // per_warp * SUB_PARTITIONS // warps


def _blocks_by_shared(shared_bytes: int, sm: SmLimits) -> int:
    allocated = _round_up(shared_bytes + sm.shared_bytes_reserved, sm.shared_unit_bytes)
    return sm.shared_bytes_per_sm // allocated if allocated else sm.max_blocks_per_sm


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
