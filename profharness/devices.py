"""The limits of devices: bandwidth, matrix rates and occupancy, measured or from data sheets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from profharness.errors import UsageError

MEASURED = "measured"
DATA_SHEET = "data sheet"
PEAKS_FILE = "peaks.json"  # what the measuring process leaves in its folder
MB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class Peaks:
    """Ceilings of one device. source is `measured` or `data sheet`; origin says how or where from.
    flops_per_s: dense matrix rate by dtype, fp32 accumulation; `fp32` is full fp32 (TF32 off),
    `tf32` the tensor cores on fp32 inputs. None or a missing key: not known.
    """

    device: str
    source: str
    bandwidth_bytes_per_s: float | None
    flops_per_s: dict[str, float] = field(default_factory=dict)
    l2_bytes: int | None = None
    num_sms: int | None = None
    origin: str = ""


def flop_peak(peaks: Peaks, dtype: str, *, tf32: bool = False) -> tuple[str, float] | None:
    """Return the name and value of the matrix rate that bounds a config of this dtype, or None.
    With `tf32`, fp32 products may use the tensor cores (`torch.backends.cuda.matmul.allow_tf32`).
    """
    name = "tf32" if dtype == "fp32" and tf32 else dtype
    rate = peaks.flops_per_s.get(name)
    return None if rate is None else (name, rate)


def ridge(peaks: Peaks, dtype: str, *, tf32: bool = False) -> float | None:
    """Return the intensity (FLOPs per byte) above which the matrix rate, not memory, is the limit."""
    peak = flop_peak(peaks, dtype, tf32=tf32)
    if peak is None or not peaks.bandwidth_bytes_per_s:
        return None
    return peak[1] / peaks.bandwidth_bytes_per_s


class Gpu(NamedTuple):
    """One row of the table of GPUs. name is what `--gpu` takes; empty for variants that go by the
    name of another row. sm_count (streaming multiprocessors) is None where no data sheet says it.
    pattern is searched in the device name as CUDA gives it; empty without a data sheet. The data
    sheet's figures: GB/s, dense TFLOP/s (tensor for fp16, and for bf16 from Ampere on), L2 in MiB.
    """

    name: str
    capability: tuple[int, int]
    sm_count: int | None = None
    pattern: str = ""
    gb_per_s: float = 0.0
    tensor: float = 0.0
    tf32: float | None = None
    fp32: float = 0.0
    l2_mib: float | None = None
    origin: str = ""


_ADA = "NVIDIA Ada GPU architecture whitepaper"
_AMPERE = "NVIDIA Ampere GA102 GPU architecture whitepaper"
_HOPPER = "NVIDIA H100 Tensor Core GPU architecture whitepaper and data sheet"
_H200 = "NVIDIA H200 data sheet; L2 as the CUDA driver tells it"
_A100 = "NVIDIA A100 data sheet"
_BLACKWELL = "NVIDIA HGX B200 data sheet, one eighth of the board"
_RTX_4000 = "NVIDIA RTX 4000 Ada data sheet; tensor rates from 48 SMs at 2.175 GHz boost"

# The first pattern that matches wins, so variants stand before what their name contains. Data
# sheets that print rates with sparsity are halved here.
TABLE = (
    Gpu("V100", (7, 0), 80, r"\bV100", 900, 125, None, 15.7, 6, "NVIDIA V100 SXM2 data sheet"),
    Gpu("T4", (7, 5), 40, r"\bT4\b", 320, 65, None, 8.1, 4, "NVIDIA T4 data sheet"),
    Gpu("", (8, 0), 108, r"\bA100.*PCIe.*80GB|\bA100 80GB PCIe", 1935, 312, 156, 19.5, 40, _A100),
    Gpu("", (8, 0), 108, r"\bA100.*80GB", 2039, 312, 156, 19.5, 40, _A100),
    Gpu("A100", (8, 0), 108, r"\bA100\b", 1555, 312, 156, 19.5, 40, _A100),
    Gpu("A30", (8, 0), 56, r"\bA30\b", 933, 165, 82, 10.3, 24, "NVIDIA A30 data sheet"),
    Gpu("", (8, 6), 80, r"\bA10G\b", 600, 70, 35, 35, 6, "NVIDIA A10G product brief"),
    Gpu("A10", (8, 6), 72, r"\bA10\b", 600, 125, 62.5, 31.2, 6, "NVIDIA A10 data sheet"),
    Gpu("A40", (8, 6), 84, r"\bA40\b", 696, 149.7, 74.8, 37.4, 6, "NVIDIA A40 data sheet"),
    Gpu("RTX A6000", (8, 6), 84, r"\bRTX A6000", 768, 154.8, 77.4, 38.7, 6, _AMPERE),
    Gpu("RTX 3090", (8, 6), 82, r"\bRTX 3090$", 936, 71, 35.6, 35.6, 6, _AMPERE),
    Gpu("L4", (8, 9), 58, r"\bL4\b", 300, 121, 60, 30.3, 48, "NVIDIA L4 data sheet"),
    Gpu("L40", (8, 9), 142, r"\bL40\b", 864, 181, 90.5, 90.5, 96, "NVIDIA L40 data sheet"),
    Gpu("L40S", (8, 9), 142, r"\bL40S\b", 864, 362, 183, 91.6, 96, "NVIDIA L40S data sheet"),
    Gpu("RTX 4090", (8, 9), 128, r"\bRTX 4090 (?!Laptop|D\b)|\bRTX 4090$", 1008, 165.2, 82.6, 82.6, 72, _ADA),
    Gpu("", (8, 9), 76, r"\bRTX 4080$", 716.8, 97.5, 48.7, 48.7, 64, _ADA),
    Gpu("RTX 4000 Ada", (8, 9), 48, r"\bRTX 4000 Ada", 360, 106.9, 53.5, 26.7, 48, _RTX_4000),
    Gpu("RTX 6000 Ada", (8, 9), 142, r"\bRTX 6000 Ada", 960, 364.2, 182.1, 91.1, 96,
        "NVIDIA RTX 6000 Ada data sheet"),
    Gpu("", (9, 0), 132, r"\bH100 NVL", 3900, 835.5, 417.5, 60, 50, "NVIDIA H100 NVL data sheet"),
    Gpu("H100", (9, 0), 132, r"\bH100\b(?! PCIe)", 3350, 989.4, 494.7, 66.9, 50, _HOPPER),
    Gpu("H100 PCIe", (9, 0), 114, r"\bH100 PCIe", 2039, 756, 378, 51.2, 50, _HOPPER),
    Gpu("", (9, 0), 132, r"\bH200 NVL", 4800, 835.5, 417.5, 60, 60, _H200),
    Gpu("H200", (9, 0), 132, r"\bH200\b", 4800, 989.5, 494.7, 67, 60, _H200),
    Gpu("GH200", (9, 0), 132, r"\bGH200 480GB", 4000, 989.5, 494.7, 67, 50,
        "NVIDIA GH200 data sheet, 96 GB HBM3"),
    Gpu("B200", (10, 0), 148, r"\bB200\b", 7700, 2250, 1125, 75, None, _BLACKWELL),
    Gpu("GB200", (10, 0), 148, r"\bGB200\b", 8000, 2500, 1250, 80, None,
        "NVIDIA GB200 NVL72 data sheet, per GPU"),
    Gpu("B300", (10, 3)),
    Gpu("GB300", (10, 3)),
    Gpu("RTX 5090", (12, 0), 170, r"\bRTX 5090", 1792, 209.5, 104.8, 104.8, 96,
        "NVIDIA RTX Blackwell whitepaper"),
    Gpu("RTX PRO 6000 Blackwell", (12, 0), 188),
    Gpu("DGX Spark", (12, 1), 48),
)  # fmt: skip
GPUS = tuple(gpu for gpu in TABLE if gpu.name)
ALIASES = {"gb10": "dgxspark", "rtxpro6000": "rtxpro6000blackwell", "a6000": "rtxa6000"}


def data_sheet(device_name: str) -> Peaks | None:
    """Return the data-sheet values of a device by its CUDA name (`NVIDIA H200`), or None."""
    matches = (gpu for gpu in TABLE if gpu.pattern and re.search(gpu.pattern, device_name))
    gpu = next(matches, None)
    if gpu is None:
        return None
    bf16 = gpu.tensor if gpu.capability >= (8, 0) else None
    rates = {"fp16": gpu.tensor, "bf16": bf16, "fp32": gpu.fp32, "tf32": gpu.tf32}
    return Peaks(
        device=device_name,
        source=DATA_SHEET,
        bandwidth_bytes_per_s=gpu.gb_per_s * 1e9,
        flops_per_s={name: rate * 1e12 for name, rate in rates.items() if rate is not None},
        l2_bytes=None if gpu.l2_mib is None else round(gpu.l2_mib * MB),
        num_sms=gpu.sm_count,
        origin=gpu.origin,
    )


# Vendor words and board variants that do not change capability or (as listed) SM count.
_NOISE = re.compile(
    r"\b(nvidia|geforce|tesla|quadro|graphics|generation|tensor core|gpu|sxm\d?|nvl\d*|hbm\d\w*|"
    r"ac|workstation|server|edition|max-q|\d+\s?gb)\b"
)


def find_gpu(text: str) -> Gpu:
    """Find a GPU by its name or capability (`sm90`, `9.0`). Raise UsageError with similar names."""
    capability = _capability(text)
    if capability:
        return Gpu(f"sm{capability[0]}{capability[1]}", capability)
    gpus = {_key(gpu.name): gpu for gpu in GPUS}
    plain = _NOISE.sub(" ", text.lower())
    for spelling in (text, plain, plain.replace("pcie", "")):
        key = ALIASES.get(_key(spelling), _key(spelling))
        if key in gpus:
            return gpus[key]
    import difflib  # only a name that nobody knows needs it

    near = difflib.get_close_matches(key, gpus, n=4, cutoff=0.5)
    near += [name for name in gpus if key and key in name and name not in near][:4]
    names = ", ".join(gpus[name].name for name in (near or gpus))
    raise UsageError(
        f"GPU {text!r} is not known; {'near matches' if near else 'known are'}: {names}; "
        "a capability such as sm90 or 9.0 works too"
    )


def _key(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _capability(text: str) -> tuple[int, int] | None:
    match = re.fullmatch(r"sm_?(\d{1,2})(\d)[af]?|(?:sm_?)?(\d{1,2})\.(\d)", text.strip().lower())
    return (int(match[1] or match[3]), int(match[2] or match[4])) if match else None


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU as the trace describes it. Limits are per SM or per block in bytes, registers or
    threads. None means unknown.
    """

    index: int
    name: str
    compute_major: int
    compute_minor: int
    num_sms: int
    total_memory_bytes: int | None = None
    max_threads_per_block: int | None = None
    max_threads_per_sm: int | None = None
    registers_per_block: int | None = None
    registers_per_sm: int | None = None
    shared_bytes_per_block: int | None = None
    shared_bytes_per_block_optin: int | None = None
    shared_bytes_per_sm: int | None = None
    warp_size: int = 32


MAX_REGISTERS_PER_THREAD = 255
REGISTER_UNIT = 256  # registers are handed out to a warp in units of this many
SUB_PARTITIONS = 4  # each owns a quarter of the registers; a warp lives in one of them
KIB = 1024

# Limiters in the order in which ties are named: a ceiling of the hardware first, what a kernel
# can change after it.
LIMITERS = ("warps", "block", "registers", "shared_memory")

# compute capability: threads per SM, blocks per SM, shared KiB per SM, KiB of L1 and shared memory
# together per SM. Registers per SM are 65536 on all of these.
# Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability";
# cuda_occupancy.h of CUDA 13.
_SM_FACTS: dict[tuple[int, int], tuple[int, int, int, int]] = {
    (7, 0): (2048, 32, 96, 128),
    (7, 2): (2048, 32, 96, 128),
    (7, 5): (1024, 16, 64, 96),
    (8, 0): (2048, 32, 164, 192),
    (8, 6): (1536, 16, 100, 128),
    (8, 7): (1536, 16, 164, 192),
    (8, 9): (1536, 24, 100, 128),
    (9, 0): (2048, 32, 228, 256),
    (10, 0): (2048, 32, 228, 256),
    (10, 1): (1536, 24, 228, 256),
    (10, 3): (2048, 32, 228, 256),
    (11, 0): (1536, 24, 228, 256),
    (12, 0): (1536, 24, 100, 128),
    (12, 1): (1536, 24, 100, 128),
}
# Sizes that the shared part of the unified L1 can have, up to an SM's most. Source: as above.
_CARVE_OUTS_KIB = (8, 16, 32, 64, 100, 132, 164, 196, 228)


def unified_l1_bytes(device: Device) -> int | None:
    """Return the combined size of L1 and shared memory per SM, or None for an unknown capability."""
    facts = _SM_FACTS.get((device.compute_major, device.compute_minor))
    return facts[3] * KIB if facts else None


def l1_bytes(device: Device, blocks_per_sm: int, shared_bytes: int) -> int | None:
    """Return the largest L1 cache that an SM has left beside the shared memory of its resident
    blocks. `shared_bytes` is one block's, without the driver's reserve. Return None for an unknown
    device.
    """
    unified, sm = unified_l1_bytes(device), sm_limits(device)
    if unified is None or sm is None:
        return None
    block = _round_up(shared_bytes + sm.shared_bytes_reserved, sm.shared_unit_bytes)
    most = sm.shared_bytes_per_sm
    needed = min(max(1, blocks_per_sm) * block, most)
    sizes = (size * KIB for size in _CARVE_OUTS_KIB)
    return unified - next((size for size in sizes if needed <= size <= most), most)


@dataclass(frozen=True, slots=True)
class SmLimits:
    """The resources of one SM and the limits of one block, in bytes of shared memory without the
    driver's reserve per block.
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
    """Theoretical occupancy: resident warps divided by an SM's maximum (0 to 1), the blocks that
    fit, and the first of LIMITERS that prevents one more. `shared_share` is one block's part of an
    SM's shared memory.
    """

    fraction: float
    blocks_per_sm: int
    limiter: str
    shared_share: float


def sm_limits(device: Device) -> SmLimits | None:
    """Return the trace's limits, completed by the table above, or None for an unknown capability."""
    facts = _SM_FACTS.get((device.compute_major, device.compute_minor))
    if facts is None:
        return None
    threads, blocks, shared_kib, _ = facts
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
    """Return the theoretical occupancy by the formulas of cuda_occupancy.h, with the largest
    shared-memory carve-out and opt-in.

    `shared_bytes` is the static plus dynamic memory of one block, without the driver's reserve.
    Return None if the device is unknown or could not launch such a block, so that a real launch
    never reads 0. Named barriers, which only ncu reports, and clusters are ignored.
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
    per_warp = _round_up(registers_per_thread * sm.warp_size, REGISTER_UNIT)
    by_registers = sm.max_blocks_per_sm
    if per_warp * _round_up(warps, SUB_PARTITIONS) > sm.registers_per_block:
        by_registers = 0
    elif per_warp:
        by_registers = sm.registers_per_sm // SUB_PARTITIONS // per_warp * SUB_PARTITIONS // warps
    allocated = _round_up(shared_bytes + sm.shared_bytes_reserved, sm.shared_unit_bytes)
    by_shared = sm.shared_bytes_per_sm // allocated if allocated else sm.max_blocks_per_sm
    counts = (max_warps // warps, sm.max_blocks_per_sm, by_registers, by_shared)
    blocks = min(counts)
    limiter = LIMITERS[counts.index(blocks)]
    part = shared_bytes / sm.shared_bytes_per_sm
    return Occupancy(blocks * warps / max_warps, blocks, limiter, part) if blocks else None


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


class DeviceFact(NamedTuple):
    """A property of a device with its unit and source."""

    name: str
    value: float | str
    unit: str
    source: str


_TRACE = "as the trace tells it"
_GUIDE = "CUDA C++ Programming Guide, by compute capability"


def device_facts(
    device: Device | None,
    peaks: Sequence[Peaks],
    *,
    l2_bytes: int | None = None,
    sm_mhz: float | None = None,
    memory_mhz: float | None = None,
) -> tuple[DeviceFact, ...]:
    """Return the known properties of a device: sizes, clocks while cells were timed, and the limits
    of each of the peaks with their ridge points.
    """
    clocks = "NVML, median while cells were timed"
    facts: list[tuple[str, float | str | None, str, str]] = []
    if device is not None:
        limits = sm_limits(device)
        unified = unified_l1_bytes(device)
        capability = f"{device.compute_major}.{device.compute_minor}"
        memory = device.total_memory_bytes
        facts += [
            ("compute capability", capability, "", _TRACE),
            ("SMs", device.num_sms, "", _TRACE),
            ("memory", memory and memory / GIB, "GiB", _TRACE),
            ("L1 and shared memory of an SM", unified and unified / KIB, "KiB", _GUIDE),
        ]
        if limits is not None:
            facts += [
                ("of it shared memory at most", limits.shared_bytes_per_sm / KIB, "KiB", _TRACE),
                (
                    "shared memory of a block at most",
                    limits.shared_bytes_per_block_optin / KIB,
                    "KiB",
                    _TRACE,
                ),
                ("registers of an SM", limits.registers_per_sm, "", _TRACE),
                ("threads of an SM", limits.max_threads_per_sm, "", _TRACE),
            ]
    known = l2_bytes or next((each.l2_bytes for each in peaks if each.l2_bytes), None)
    facts += [
        ("L2", known and known / MB, "MiB", "CUDA driver" if l2_bytes else DATA_SHEET),
        ("SM clock", sm_mhz, "MHz", clocks),
        ("memory clock", memory_mhz, "MHz", clocks),
    ]
    for each in peaks:
        bandwidth = each.bandwidth_bytes_per_s
        facts.append(("bandwidth", bandwidth and bandwidth / 1e9, "GB/s", each.source))
        for dtype, rate in each.flops_per_s.items():
            facts.append((f"{dtype} rate", rate / 1e12, "TFLOP/s", each.source))
        for dtype in each.flops_per_s:
            facts.append((f"{dtype} ridge point", ridge(each, dtype), "FLOP/B", each.source))
    return tuple(
        DeviceFact(name, value, unit, source) for name, value, unit, source in facts if value
    )
