"""The limits of devices, such as bandwidth, matrix rates and occupancy.

Bandwidth and matrix rates are either measured or taken from data sheets.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, Protocol

from profharness.columns import column
from profharness.device_types import CPU, device_name
from profharness.errors import UsageError
from profharness.units import KIB

MEASURED = "measured"
DATA_SHEET = "data sheet"
PEAKS_FILE = "peaks.json"  # file to which the measuring process writes the measured Peaks
MB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class Peaks:
    """The maximum bandwidth and matrix rates of one device.

    `source` is `measured` or `data sheet`, and `origin` describes the measurement or names the data
    sheet. `flops_per_s` maps a dtype to the rate of dense matrix products that accumulate in fp32.
    The `fp32` key refers to products in full fp32 (TF32 is off), and the `tf32` key refers to
    products of fp32 inputs on tensor cores. A value that is None or missing is unknown.
    """

    device: str
    source: str
    bandwidth_bytes_per_s: float | None
    flops_per_s: dict[str, float] = field(default_factory=dict)
    l2_bytes: int | None = None
    num_sms: int | None = None
    origin: str = ""


def flop_peak(peaks: Peaks, dtype: str, *, tf32: bool = False) -> tuple[str, float] | None:
    """Return the name and value of the matrix rate that limits a config of this dtype.

    Return None if the rate is unknown. If `tf32` is set, fp32 products may use the tensor cores
    (`torch.backends.cuda.matmul.allow_tf32`).
    """
    name = "tf32" if dtype == "fp32" and tf32 else dtype
    rate = peaks.flops_per_s.get(name)
    return None if rate is None else (name, rate)


def ridge(peaks: Peaks, dtype: str, *, tf32: bool = False) -> float | None:
    """Return the ridge point of the roofline in FLOPs per byte, or None if a peak is unknown.

    The matrix rate limits kernels with a higher arithmetic intensity. The memory bandwidth limits
    kernels with a lower arithmetic intensity.
    """
    peak = flop_peak(peaks, dtype, tf32=tf32)
    if peak is None or not peaks.bandwidth_bytes_per_s:
        return None
    return peak[1] / peaks.bandwidth_bytes_per_s


def roofline_ns(
    peaks: Peaks | None, dtype: str | None, flops: int | None, moved: int | None
) -> float | None:
    """Return the shortest possible time in ns of work with these FLOPs and these moved bytes.

    Divide the FLOPs by the matrix rate and the bytes by the memory bandwidth, and return the longer
    of the two times. Return None if a value is unknown.
    """
    rate = flop_peak(peaks, dtype) if peaks and dtype else None
    if peaks is None or rate is None or flops is None or moved is None:
        return None
    bandwidth = peaks.bandwidth_bytes_per_s
    return None if not bandwidth else 1e9 * max(flops / rate[1], moved / bandwidth)


class Gpu(NamedTuple):
    """One row of the table of GPUs.

    `name` is the name that `--gpu` accepts, or an empty string if users call the GPU by the name of
    another row. `sm_count` is the number of streaming multiprocessors, or None if no data sheet
    contains this number. `pattern` is a regular expression that matches the device name that CUDA
    reports, or an empty string if the row has no data sheet. The other fields are values of the
    data sheet: bandwidth in GB/s, dense matrix rates in TFLOP/s, and the size of the L2 cache in
    MiB. `tensor` is the rate of fp16 products and, on Ampere and newer GPUs, of bf16 products.
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
_H200 = "NVIDIA H200 data sheet; L2 size from the CUDA driver"
_A100 = "NVIDIA A100 data sheet"
_BLACKWELL = "NVIDIA HGX B200 data sheet, with the figures of the board divided by eight"
_RTX_4000 = "NVIDIA RTX 4000 Ada data sheet; tensor rates for 48 SMs at a boost clock of 2.175 GHz"

# The first matching row is used. Therefore, a variant such as `H100 NVL` comes before `H100`. If a
# data sheet contains only rates for sparse matrices, the table contains half of these rates.
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
        "NVIDIA GH200 data sheet, for the GPU with 96 GB of HBM3"),
    Gpu("B200", (10, 0), 148, r"\bB200\b", 7700, 2250, 1125, 75, None, _BLACKWELL),
    Gpu("GB200", (10, 0), 148, r"\bGB200\b", 8000, 2500, 1250, 80, None,
        "NVIDIA GB200 NVL72 data sheet, with figures converted to one GPU"),
    Gpu("B300", (10, 3)),
    Gpu("GB300", (10, 3)),
    Gpu("RTX 5090", (12, 0), 170, r"\bRTX 5090", 1792, 209.5, 104.8, 104.8, 96,
        "NVIDIA RTX Blackwell whitepaper"),
    Gpu("RTX PRO 6000 Blackwell", (12, 0), 188),
    Gpu("DGX Spark", (12, 1), 48),
)  # fmt: skip
GPUS = tuple(gpu for gpu in TABLE if gpu.name)


@dataclass(frozen=True, slots=True)
class Instinct:
    """One row of the table of AMD's data-center GPUs.

    `name` is the name that `--gpu` accepts, or an empty string if the row does not identify one GPU.
    `pattern` is a regular expression that matches the names that ROCm reports. `gfx` is the name of
    the architecture. The other fields are values of the data sheet: the number of compute units,
    the bandwidth in GB/s, dense matrix rates in TFLOP/s, and the size of the L2 cache in MiB. These
    fields are None or empty if the name does not identify the GPU.
    """

    name: str
    pattern: str
    gfx: str
    compute_units: int | None = None
    gb_per_s: float = 0.0
    rates: Mapping[str, float] = field(default_factory=dict)
    l2_mib: float | None = None
    origin: str = ""


def _rates(half: float, fp32: float, fp64: float, **others: float) -> dict[str, float]:
    return {"fp16": half, "bf16": half, "fp32": fp32, "fp64": fp64, **others}


_ONE_DIE = "data sheet, with the figures halved, because each of the two dies is a separate device"
_CDNA3 = _rates(1307.4, 163.4, 163.4, tf32=653.7, fp8=2614.9)

# The first matching row is used. The L2 sizes come from "AMD GPU specifications" in the
# documentation of ROCm 7.
INSTINCT = (
    Instinct("MI210", r"\bMI210\b", "gfx90a", 104, 1638.4, _rates(181, 45.3, 45.3), 8,
             "AMD Instinct MI210 data sheet"),
    Instinct("", r"\bMI250X ?/ ?MI250\b", "gfx90a"),
    Instinct("MI250X", r"\bMI250X\b", "gfx90a", 110, 1638.4, _rates(191.5, 47.9, 47.9), 8,
             f"AMD Instinct MI250X {_ONE_DIE}"),
    Instinct("MI250", r"\bMI250\b", "gfx90a", 104, 1638.4, _rates(181, 45.3, 45.3), 8,
             f"AMD Instinct MI250 {_ONE_DIE}"),
    Instinct("MI300A", r"\bMI300A\b", "gfx942", 228, 5300,
             _rates(980.6, 122.6, 122.6, tf32=490.3, fp8=1961.2), 24,
             "AMD Instinct MI300A data sheet"),
    Instinct("MI300X", r"\bMI300X\b", "gfx942", 304, 5300, _CDNA3, 32, "AMD Instinct MI300X data sheet"),
    Instinct("MI325X", r"\bMI325X\b", "gfx942", 304, 6000, _CDNA3, 32, "AMD Instinct MI325X data sheet"),
    Instinct("MI350X", r"\bMI350X\b", "gfx950", 256, 8000, _rates(2306.9, 144.2, 72.1, fp8=4613.7), 32,
             "AMD Instinct MI350X data sheet"),
    Instinct("MI355X", r"\bMI355X\b", "gfx950", 256, 8000, _rates(2516.6, 157.3, 78.6, fp8=5033.2), 32,
             "AMD Instinct MI355X data sheet"),
)  # fmt: skip
# Maps the name of an AMD GPU to its architecture, which ROCm calls gcnArchName. The MI308X has no
# data sheet in the table.
ARCHITECTURES = dict(
    sorted([*((row.name, row.gfx) for row in INSTINCT if row.name), ("MI308X", "gfx942")])
)


def find_instinct(name: str) -> Instinct | None:
    """Return the row of an AMD GPU such as `AMD Instinct MI300X VF`, or None if unknown."""
    return next((row for row in INSTINCT if re.search(row.pattern, name)), None)


ALIASES = {"gb10": "dgxspark", "rtxpro6000": "rtxpro6000blackwell", "a6000": "rtxa6000"}


def data_sheet(name: str, num_sms: int | None = None) -> Peaks | None:
    """Return the data-sheet values of a device such as `NVIDIA H200` or `AMD Instinct MI300X`.

    `num_sms` is the number of SMs or compute units in the trace, or None if this number is unknown.
    A partition of an AMD GPU has the name of the GPU, but fewer compute units. Return None if the
    tables have no data sheet for the device.
    """
    row = find_instinct(name)
    if row is not None and row.rates and num_sms in (None, row.compute_units):
        return Peaks(
            device=name,
            source=DATA_SHEET,
            bandwidth_bytes_per_s=row.gb_per_s * 1e9,
            flops_per_s={name: rate * 1e12 for name, rate in row.rates.items()},
            l2_bytes=None if row.l2_mib is None else round(row.l2_mib * MB),
            num_sms=row.compute_units,
            origin=row.origin,
        )
    matches = (gpu for gpu in TABLE if gpu.pattern and re.search(gpu.pattern, name))
    gpu = next(matches, None)
    if gpu is None:
        return None
    bf16 = gpu.tensor if gpu.capability >= (8, 0) else None
    rates = {"fp16": gpu.tensor, "bf16": bf16, "fp32": gpu.fp32, "tf32": gpu.tf32}
    return Peaks(
        device=name,
        source=DATA_SHEET,
        bandwidth_bytes_per_s=gpu.gb_per_s * 1e9,
        flops_per_s={name: rate * 1e12 for name, rate in rates.items() if rate is not None},
        l2_bytes=None if gpu.l2_mib is None else round(gpu.l2_mib * MB),
        num_sms=gpu.sm_count,
        origin=gpu.origin,
    )


# Words in device names that refer to a vendor or a board variant. `find_gpu` ignores these words,
# because they affect neither the compute capability nor the number of SMs in the table.
_NOISE = re.compile(
    r"\b(nvidia|geforce|tesla|quadro|graphics|generation|tensor core|gpu|sxm\d?|nvl\d*|hbm\d\w*|"
    r"ac|workstation|server|edition|max-q|\d+\s?gb)\b"
)


# The marks, the clock rate and the vendor in names of devices that the tables do not contain.
_DECORATION = re.compile(r"^NVIDIA |\((?:R|TM)\)| CPU(?= @|$)| @ [\d.]+ ?GHz| \d+-Core Processor$")
# The beginning of a name that is spoken with a vowel, such as A100, H100, RTX, sm90 or Intel.
_VOWEL = re.compile(r"[AEIOaeio]|[FHLMNRSX](?=[A-Z0-9])|sm|mi\d|x86|8|1[18]th")


def find_gpu(text: str) -> Gpu:
    """Find a GPU by its name or its compute capability, such as `sm90` or `9.0`.

    If the GPU is unknown, raise a UsageError that suggests similar names.
    """
    capability = _capability(text)
    if capability:
        return Gpu(f"sm{capability[0]}{capability[1]}", capability)
    gpus = {_key(gpu.name): gpu for gpu in GPUS}
    known = {key: gpu.name for key, gpu in gpus.items()}
    known |= {name.lower(): name for name in ARCHITECTURES}
    plain = _NOISE.sub(" ", text.lower())
    for spelling in (text, plain, plain.replace("pcie", "")):
        key = ALIASES.get(_key(spelling), _key(spelling))
        if key in gpus:
            return gpus[key]
    import difflib  # needed only if the name is unknown

    near = difflib.get_close_matches(key, known, n=4, cutoff=0.5)
    near += [name for name in known if key and key in name and name not in near][:4]
    names = ", ".join(known[name] for name in (near or known))
    raise UsageError(
        f"unknown GPU {text!r}; {'close matches are' if near else 'choose from'} {names}; you can also "
        "give a compute capability such as sm90 or 9.0, or an architecture such as gfx942"
    )


def short_device_name(name: str) -> str:
    """Return the common name of a GPU or CPU, such as `H100` for `NVIDIA H100 80GB HBM3`.

    If the tables do not contain the device, or only another variant such as `H200` for `H200 NVL`,
    return its name without the vendor of the GPU, or without the marks and the clock rate of the
    CPU.
    """
    if (row := find_instinct(name)) and row.name:
        return row.name
    with contextlib.suppress(UsageError):
        if have_same_rates(name, common := find_gpu(name).name):
            return common
    return " ".join(_DECORATION.sub(" ", name).split())


def have_same_rates(*names: str) -> bool:
    """Return whether the data sheets of GPUs have the same rates. Ignore GPUs without a data sheet,
    since the spelling of a user may match none.
    """
    sheets = [sheet for name in names if (sheet := data_sheet(name))]
    return len({(*each.flops_per_s.items(), each.bandwidth_bytes_per_s) for each in sheets}) < 2


def short_device_names(names: Iterable[str]) -> dict[str, str]:
    """Map names of devices to their short names, or to themselves if two short names are equal."""
    short = {name: short_device_name(name) for name in names}
    alike = len(set(short.values())) < len(short)  # such as two variants of a board
    return {name: name for name in short} if alike else short


def short_release(version: str) -> str:
    """Return a PyTorch version without its build, such as `2.11.0` for `2.11.0+cu130`."""
    return version.split("+")[0]


def pytorch_text(version: str | None) -> str:
    """Return a PyTorch version as part of a sentence, such as `PyTorch 2.11` for `2.11.0+cu130`."""
    return f"PyTorch {short_release(version or '').removesuffix('.0')}".rstrip()


def with_article(device: str) -> str:
    """Return the short name of a device as part of a sentence, such as `an H100`."""
    name = short_device_name(device)
    return f"{'an' if _VOWEL.match(name) else 'a'} {name}"


def platform_text(environment: Mapping[str, Any]) -> tuple[str, str]:
    """Return the PyTorch release and the device as parts of a sentence: `PyTorch 2.11`, `an H100`."""
    gpu = environment.get("gpu")
    return pytorch_text(environment.get("torch")), with_article(gpu) if gpu else "the CPU"


def device_and_release(
    environment: Mapping[str, Any], *, full: bool = False, vendor: bool = False
) -> list[str]:
    """Return the device and the PyTorch release of an environment: `H100`, `torch 2.11.0`.

    Omit unknown values. If `full` is set, the release has its build: `torch 2.11.0+cu130`. If
    `vendor` is set, the device has the name that the environment recorded, such as `NVIDIA H200`.
    """
    device = device_name(environment)
    if device is None and environment.get("device_type") == CPU:
        device = "CPU"
    torch = str(environment.get("torch") or "")
    return [
        *([device if vendor else short_device_name(device)] if device else []),
        *([f"torch {torch if full else short_release(torch)}"] if torch else []),
    ]


def run_context(environment: Mapping[str, Any], run: str, *, full: bool = False) -> str:
    """Describe where a run was made, and name it: `H200, torch 2.11.0, run NAME`."""
    return ", ".join([*device_and_release(environment, full=full), f"run {run}"])


def context_text(environment: Mapping[str, Any], *others: str, full: bool = False) -> str:
    """Describe an environment in one line: `H200, torch 2.11.0, cuDNN 91900`, and then `others`.

    If `full` is set, use the names that the environment recorded, and add the driver.
    """
    versions = {"cudnn": "cuDNN", "aotriton": "AOTriton"} | ({"driver": "driver"} if full else {})
    named = [
        f"{title} {environment[key]}" for key, title in versions.items() if environment.get(key)
    ]
    whole = device_and_release(environment, full=full, vendor=full)
    return ", ".join([*whole, *named, *others])


def _key(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _capability(text: str) -> tuple[int, int] | None:
    match = re.fullmatch(r"sm_?(\d{1,2})(\d)[af]?|(?:sm_?)?(\d{1,2})\.(\d)", text.strip().lower())
    return (int(match[1] or match[3]), int(match[2] or match[4])) if match else None


@dataclass(frozen=True, slots=True)
class Device:
    """The properties of a GPU, as a trace records them.

    Limits apply to one SM or one block, and are in bytes, registers or threads. None means that a
    limit is unknown.
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
REGISTER_UNIT = 256  # the number of registers of a warp is rounded up to a multiple of this number
SUB_PARTITIONS = 4  # per SM; each sub-partition has a quarter of the registers and its own warps

# Resources that can limit the occupancy. If several resources limit the occupancy equally, the first
# resource is reported. Limits of the hardware come before resources that a kernel can change.
LIMITERS = ("warps", "block", "registers", "shared_memory")

# Maps a compute capability to the maximum threads, blocks and KiB of shared memory per SM, and the
# combined KiB of L1 and shared memory per SM. All of these GPUs have 65536 registers per SM.
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
# FP32 cores ("CUDA cores") and tensor cores of an SM by compute capability. Sources: CUDA C++
# Programming Guide, "Compute Capabilities", sections 7.x to 12.x; NVIDIA's whitepapers of the
# Volta, Turing, A100, GA102, Ada, H100 and RTX Blackwell architectures. The boards' own figures
# agree: H200 16,896 and 528, RTX PRO 6000 24,064 and 752.
_CORES: dict[tuple[int, int], tuple[int, int]] = {
    **dict.fromkeys([(7, 0), (7, 2), (7, 5)], (64, 8)),
    (8, 0): (64, 4),
    **dict.fromkeys([(8, 6), (8, 7), (8, 9), (9, 0)], (128, 4)),
    **dict.fromkeys([(10, 0), (10, 3), (12, 0), (12, 1)], (128, 4)),
}
_NO_TENSOR_CORES = re.compile(r"\bGTX 16\d\d")
# Possible sizes of the shared memory within the unified L1 cache, in KiB. An SM supports the sizes
# that do not exceed its maximum in _SM_FACTS. The sources are the same as for _SM_FACTS.
_CARVE_OUTS_KIB = (8, 16, 32, 64, 100, 132, 164, 196, 228)


_AMD_NAME = re.compile(r"\b(?:AMD|Radeon|Instinct)\b|\bgfx\d|^MI\d")
_GFX_NAME = re.compile(r"\bgfx(?:9[0-9a-f]{2}|1\d[0-9a-f]{2})\b")
WAVE = 64  # threads of a wave on CDNA; the warps of all NVIDIA GPUs have 32 threads


def is_amd(device: Device) -> bool:
    """Return whether a device is an AMD GPU.

    The compute capability does not show this, because ROCm also reports capabilities such as 9.0.
    """
    return device.warp_size == WAVE or _AMD_NAME.search(device.name) is not None


def gfx_name(device: Device) -> str | None:
    """Return the architecture of an AMD GPU, such as `gfx942`, or None if unknown.

    Find the architecture by the name of the device, or else by an unambiguous version.
    """
    if not is_amd(device):
        return None
    if row := find_instinct(device.name):
        return row.gfx
    if match := _GFX_NAME.search(device.name):
        return match[0]
    return _GFX_OF_VERSION.get((device.compute_major, device.compute_minor))


# All architectures of these versions have the same limits. Version 9.0 covers gfx900 to gfx90a.
_GFX_OF_VERSION = {(9, 4): "gfx942", (9, 5): "gfx950"}


def _capability_of(device: Device) -> tuple[int, int]:
    """Return the compute capability of an NVIDIA GPU, or (0, 0) for an AMD GPU."""
    return (0, 0) if is_amd(device) else (device.compute_major, device.compute_minor)


def unified_l1_bytes(device: Device) -> int | None:
    """Return the combined size of L1 and shared memory per SM, or None if unknown."""
    facts = _SM_FACTS.get(_capability_of(device))
    return facts[3] * KIB if facts else None


def cores(device: Device) -> tuple[int | None, int | None]:
    """Return the numbers of CUDA cores and of tensor cores. Return None for an unknown number."""
    cuda, tensor = _CORES.get(_capability_of(device), (None, None))
    if cuda is None or tensor is None:
        return None, None
    has_tensor_cores = not _NO_TENSOR_CORES.search(device.name)
    return cuda * device.num_sms, tensor * device.num_sms if has_tensor_cores else 0


def l1_bytes(device: Device, blocks_per_sm: int, shared_bytes: int) -> int | None:
    """Return the size of the L1 cache on an SM after shared memory is reserved for blocks.

    `blocks_per_sm` is the number of resident blocks. `shared_bytes` is the shared memory of one
    block, without the part that the driver reserves. Return None if the device is unknown.
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
    """The resources of one SM and the limits of one block.

    `shared_bytes_reserved` is the shared memory that the driver reserves in each block. The limit
    of a block does not include this memory.
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
class CuLimits:
    """The resources of one compute unit (CU) of an AMD GPU, and the limits of one block.

    A CU has several SIMDs, which share one local data share (LDS). Each SIMD has its own registers.
    `vector_registers` is the number of VGPRs of a SIMD for each thread of a wave.
    """

    waves_per_simd: int
    vector_registers: int
    vector_unit: int
    """The number of vector registers of a wave is rounded up to a multiple of this number."""
    has_unified_registers: bool
    """Whether accumulation registers are part of the vector registers."""
    lds_bytes: int = 64 * KIB
    lds_unit_bytes: int = 512
    simds: int = 4
    scalar_registers: int = 800
    scalar_unit: int = 16
    scalar_reserved: int = 16
    """Scalar registers of each wave that the trap handler of ROCm reserves."""
    max_blocks: int = 16
    """Maximum number of blocks with more than one wave, which need a barrier."""
    max_threads_per_block: int = 1024


# Sources: AMDGPUBaseInfo.cpp of LLVM (getTotalNumVGPRs, getVGPRAllocGranule, getMaxWavesPerEU,
# getMaxWorkGroupsPerCU, getTotalNumSGPRs) and its test occupancy-levels.ll; "AMD GPU specifications"
# in the documentation of ROCm 7 (512 KiB of VGPRs, 12.5 KiB of SGPRs, and 64 or 160 KiB of LDS per
# CU); "Register pressure in AMD CDNA2 GPUs", AMD lab notes.
_GCN = CuLimits(10, 256, 4, has_unified_registers=False)
_CDNA = CuLimits(8, 512, 8, has_unified_registers=True)
_CDNA4 = CuLimits(8, 512, 8, has_unified_registers=True, lds_bytes=160 * KIB, lds_unit_bytes=1280)
CU_LIMITS = {
    **dict.fromkeys(("gfx900", "gfx906", "gfx908"), _GCN),
    **dict.fromkeys(("gfx90a", "gfx940", "gfx941", "gfx942"), _CDNA),
    "gfx950": _CDNA4,
}


def cu_limits(device: Device) -> CuLimits | None:
    """Return the limits of an AMD GPU, or None if the architecture is unknown."""
    return CU_LIMITS.get(gfx_name(device) or "")


@dataclass(frozen=True, slots=True)
class Occupancy:
    """The theoretical occupancy of an SM, or of a compute unit (CU) of an AMD GPU.

    `fraction` is the number of resident warps divided by the maximum number of the SM, from 0 to 1.
    `limiter` is the first of LIMITERS that prevents another resident block. `shared_share` is the
    share of the SM's shared memory that one block uses.
    """

    fraction: float
    blocks_per_sm: int
    limiter: str
    shared_share: float


def sm_limits(device: Device) -> SmLimits | None:
    """Return the limits of an NVIDIA GPU, or None if the compute capability is unknown.

    If the trace does not contain a limit, use the default for the compute capability.
    """
    facts = _SM_FACTS.get(_capability_of(device))
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
    block_threads: int | None,
    registers_per_thread: int | None,
    shared_bytes: int | None,
    limits: SmLimits | CuLimits | Device | None,
    *,
    accum_registers: int | None = None,
    scalar_registers: int | None = None,
) -> Occupancy | None:
    """Return the theoretical occupancy of a launch.

    The formulas come from cuda_occupancy.h, or from LLVM for AMD GPUs. They assume the largest
    shared-memory carve-out and opt-in, and ignore clusters and named barriers (which only ncu
    reports). `shared_bytes` is the static and dynamic shared memory of one block, without the part
    that the driver reserves. `accum_registers` (per thread) and `scalar_registers` (per wave) are
    used only for AMD GPUs.

    Return None if a value is unknown or if the device cannot launch such a block. Therefore, the
    occupancy is never 0.
    """
    if block_threads is None or registers_per_thread is None or shared_bytes is None:
        return None
    if isinstance(limits, Device):
        limits = cu_limits(limits) if is_amd(limits) else sm_limits(limits)
    if isinstance(limits, CuLimits):
        registers = (registers_per_thread, accum_registers, scalar_registers)
        return _occupancy_of_cu(block_threads, registers, shared_bytes, limits)
    sm = limits
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


class Resources(Protocol):
    """The registers and the shared memory of a launch. All rows of launches have these fields."""

    @property
    def registers_per_thread(self) -> int | None: ...
    @property
    def accum_registers_per_thread(self) -> int | None: ...
    @property
    def scalar_registers(self) -> int | None: ...
    @property
    def shared_bytes(self) -> int | None: ...


def launch_occupancy(
    block_threads: int | None, launch: Resources, device: Device | None
) -> Occupancy | None:
    """Return the theoretical occupancy of a launch, computed by `occupancy`."""
    return occupancy(
        block_threads,
        launch.registers_per_thread,
        launch.shared_bytes,
        device,
        accum_registers=launch.accum_registers_per_thread,
        scalar_registers=launch.scalar_registers,
    )


def _occupancy_of_cu(
    block_threads: int,
    registers: tuple[int, int | None, int | None],
    shared_bytes: int,
    cu: CuLimits,
) -> Occupancy | None:
    """Return the occupancy of a CU. `registers` are vector, accumulation and scalar registers.

    The waves of a block are spread over the SIMDs. If the number of scalar registers is unknown,
    assume that scalar registers do not limit the occupancy.
    """
    vector, accum, scalar = registers
    if cu.has_unified_registers:
        if accum is None:
            return None
        vector += accum
    else:  # accumulation registers have a separate register file of the same size
        vector = max(vector, accum or 0)
    if not 0 < block_threads <= cu.max_threads_per_block:
        return None
    if not (0 <= vector <= cu.vector_registers and 0 <= shared_bytes <= cu.lds_bytes):
        return None
    waves, most = -(-block_threads // WAVE), cu.waves_per_simd * cu.simds
    fitting = cu.vector_registers // _round_up(max(vector, 1), cu.vector_unit)
    if scalar is not None and scalar > 0:
        of_wave = _round_up(scalar, cu.scalar_unit) + cu.scalar_reserved
        fitting = min(fitting, cu.scalar_registers // of_wave)
    allocated = _round_up(shared_bytes, cu.lds_unit_bytes)
    by_shared = cu.lds_bytes // allocated if allocated else most
    by_block = cu.max_blocks if waves > 1 else most
    counts = (most // waves, by_block, fitting * cu.simds // waves, by_shared)
    blocks = min(counts)
    limiter = LIMITERS[counts.index(blocks)]
    part = shared_bytes / cu.lds_bytes
    return Occupancy(blocks * waves / most, blocks, limiter, part) if blocks else None


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


class DeviceFact(NamedTuple):
    """A property of a device, with its unit and its source."""

    name: Annotated[str, column("figure", repeat=False, meaning="name of the property")]
    value: Annotated[
        float | str,
        # A long value, such as the name of a CPU, continues beside its unit in a narrow terminal.
        column("value", "tenths", importance="answer", wrap=True, meaning="value of the property"),
    ]
    unit: Annotated[str, column("unit", importance="answer", meaning="unit of the value")]
    source: Annotated[str, column("source", wrap=True, meaning="source of the value")]


# The names of facts about the machine around the device, and their keys in an environment. Old
# environments contain only `platform` instead of `os`.
_HOST_FACTS = {
    "CPU": ("cpu",),
    "CPU cores": ("cpu_cores",),
    "logical CPUs": ("cpu_count",),
    "operating system": ("os", "platform"),
    "operating system kernel": ("os_kernel",),
}
_TRACE = "trace"
_GUIDE = "CUDA C++ Programming Guide, for the GPU's compute capability"
_LLVM = "LLVM and ROCm documentation, for the GPU's architecture"
_Fact = tuple[str, float | str | None, str, str]


def _amd_facts(device: Device) -> list[_Fact]:
    """Return the known properties of an AMD GPU."""
    memory, cu = device.total_memory_bytes, cu_limits(device)
    facts: list[_Fact] = [
        ("architecture", gfx_name(device), "", _TRACE),
        ("compute units", device.num_sms, "", _TRACE),
        ("memory", memory and memory / GIB, "GiB", _TRACE),
    ]
    if cu is not None:
        facts += [
            ("LDS per compute unit", cu.lds_bytes / KIB, "KiB", _LLVM),
            ("VGPRs per SIMD and lane", cu.vector_registers, "", _LLVM),
            ("SIMDs per compute unit", cu.simds, "", _LLVM),
            ("maximum waves per SIMD", cu.waves_per_simd, "", _LLVM),
        ]
    return facts


def device_facts(
    device: Device | None,
    peaks: Sequence[Peaks],
    *,
    l2_bytes: int | None = None,
    sm_mhz: float | None = None,
    memory_mhz: float | None = None,
    host: Mapping[str, Any] | None = None,
) -> tuple[DeviceFact, ...]:
    """Return the known properties of a device and of its machine.

    The properties are the sizes of the device, the clocks while cells were timed, the bandwidth,
    matrix rates and ridge points of each element of `peaks`, and the processor and the operating
    system in the environment `host`.
    """
    clocks = "median of the NVML readings taken while cells were timed"
    facts: list[_Fact] = []
    if device is not None and is_amd(device):
        facts += _amd_facts(device)
    elif device is not None:
        limits = sm_limits(device)
        unified = unified_l1_bytes(device)
        cuda_cores, tensor_cores = cores(device)
        capability = f"{device.compute_major}.{device.compute_minor}"
        memory = device.total_memory_bytes
        facts += [
            ("compute capability", capability, "", _TRACE),
            ("SMs", device.num_sms, "", _TRACE),
            ("CUDA cores (fp32)", cuda_cores, "", f"SMs times the value in the {_GUIDE}"),
            ("tensor cores", tensor_cores, "", f"SMs times the value in the {_GUIDE}"),
            ("memory", memory and memory / GIB, "GiB", _TRACE),
            ("L1 and shared memory per SM", unified and unified / KIB, "KiB", _GUIDE),
        ]
        if limits is not None:
            facts += [
                ("maximum shared memory per SM", limits.shared_bytes_per_sm / KIB, "KiB", _TRACE),
                (
                    "maximum shared memory per block",
                    limits.shared_bytes_per_block_optin / KIB,
                    "KiB",
                    _TRACE,
                ),
                ("registers per SM", limits.registers_per_sm, "", _TRACE),
                ("maximum threads per SM", limits.max_threads_per_sm, "", _TRACE),
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
    for name, keys in _HOST_FACTS.items():
        values = [value for key in keys if (value := (host or {}).get(key))]
        facts.append((name, next(iter(values), None), "", "environment of the run"))
    return tuple(
        DeviceFact(name, value, unit, source) for name, value, unit, source in facts if value
    )
