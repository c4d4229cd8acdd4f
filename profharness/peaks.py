"""What a device can do at most: memory bandwidth and matrix rates, measured or from its data
sheet.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MEASURED = "measured"
DATA_SHEET = "data sheet"
RATES = ("fp16", "bf16", "fp32", "tf32")
PEAKS_FILE = "peaks.json"  # what the measuring process leaves in its folder
MB = 1 << 20


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
    """Name and value of the rate that bounds a config of this dtype; None if it is not known.

    tf32: fp32 products may use the tensor cores (`torch.backends.cuda.matmul.allow_tf32`).
    """
    name = "tf32" if dtype == "fp32" and tf32 else dtype
    rate = peaks.flops_per_s.get(name)
    return None if rate is None else (name, rate)


def ridge(peaks: Peaks, dtype: str, *, tf32: bool = False) -> float | None:
    """The intensity (FLOPs per byte) from which the matrix rate, not memory, is the ceiling."""
    rate = flop_peak(peaks, dtype, tf32=tf32)
    if rate is None or not peaks.bandwidth_bytes_per_s:
        return None
    return rate[1] / peaks.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True)
class Sheet:
    """One row of the table: GB/s, dense TFLOP/s, L2 in MiB, SMs.

    pattern is searched in the device name as CUDA tells it. tensor is the rate for fp16 and bf16,
    None for bf16 before Ampere.
    """

    pattern: str
    gb_per_s: float
    tensor: float
    tf32: float | None
    fp32: float
    l2_mib: float | None
    sms: int
    origin: str
    bf16: bool = True


_ADA = "NVIDIA Ada GPU architecture whitepaper"
_AMPERE = "NVIDIA Ampere GA102 GPU architecture whitepaper"
_HOPPER = "NVIDIA H100 Tensor Core GPU architecture whitepaper and data sheet"
_H200 = "NVIDIA H200 data sheet; L2 as the CUDA driver tells it"
_A100 = "NVIDIA A100 data sheet"
_BLACKWELL = "NVIDIA HGX B200 data sheet, one eighth of the board"

# The first pattern that matches wins, so variants stand before what their name contains. Data
# sheets that print rates with sparsity are halved here.
SHEETS: tuple[Sheet, ...] = (
    Sheet(r"\bGB200\b", 8000, 2500, 1250, 80, None, 148, "NVIDIA GB200 NVL72 data sheet, per GPU"),
    Sheet(r"\bB200\b", 7700, 2250, 1125, 75, None, 148, _BLACKWELL),
    Sheet(r"\bGH200 480GB", 4000, 989.5, 494.7, 67, 50, 132, "NVIDIA GH200 data sheet, 96 GB HBM3"),
    Sheet(r"\bH200 NVL", 4800, 835.5, 417.5, 60, 60, 132, _H200),
    Sheet(r"\bH200\b", 4800, 989.5, 494.7, 67, 60, 132, _H200),
    Sheet(r"\bH100 NVL", 3900, 835.5, 417.5, 60, 50, 132, "NVIDIA H100 NVL data sheet"),
    Sheet(r"\bH100 PCIe", 2039, 756, 378, 51.2, 50, 114, _HOPPER),
    Sheet(r"\bH100\b", 3350, 989.4, 494.7, 66.9, 50, 132, _HOPPER),
    Sheet(r"\bA100.*PCIe.*80GB|\bA100 80GB PCIe", 1935, 312, 156, 19.5, 40, 108, _A100),
    Sheet(r"\bA100.*80GB", 2039, 312, 156, 19.5, 40, 108, _A100),
    Sheet(r"\bA100\b", 1555, 312, 156, 19.5, 40, 108, _A100),
    Sheet(r"\bA30\b", 933, 165, 82, 10.3, 24, 56, "NVIDIA A30 data sheet"),
    Sheet(r"\bA40\b", 696, 149.7, 74.8, 37.4, 6, 84, "NVIDIA A40 data sheet"),
    Sheet(r"\bA10G\b", 600, 70, 35, 35, 6, 80, "NVIDIA A10G product brief"),
    Sheet(r"\bA10\b", 600, 125, 62.5, 31.2, 6, 72, "NVIDIA A10 data sheet"),
    Sheet(r"\bL40S\b", 864, 362, 183, 91.6, 96, 142, "NVIDIA L40S data sheet"),
    Sheet(r"\bL40\b", 864, 181, 90.5, 90.5, 96, 142, "NVIDIA L40 data sheet"),
    Sheet(r"\bL4\b", 300, 121, 60, 30.3, 48, 58, "NVIDIA L4 data sheet"),
    Sheet(r"\bRTX 6000 Ada", 960, 364.2, 182.1, 91.1, 96, 142, "NVIDIA RTX 6000 Ada data sheet"),
    Sheet(
        r"\bRTX 4000 Ada", 360, 106.9, 53.5, 26.7, 48, 48,
        "NVIDIA RTX 4000 Ada data sheet; tensor rates from 48 SMs at 2.175 GHz boost",
    ),
    Sheet(r"\bRTX A6000", 768, 154.8, 77.4, 38.7, 6, 84, _AMPERE),
    Sheet(r"\bRTX 5090", 1792, 209.5, 104.8, 104.8, 96, 170, "NVIDIA RTX Blackwell whitepaper"),
    Sheet(r"\bRTX 4090 (?!Laptop|D\b)|\bRTX 4090$", 1008, 165.2, 82.6, 82.6, 72, 128, _ADA),
    Sheet(r"\bRTX 4080$", 716.8, 97.5, 48.7, 48.7, 64, 76, _ADA),
    Sheet(r"\bRTX 3090$", 936, 71, 35.6, 35.6, 6, 82, _AMPERE),
    Sheet(r"\bT4\b", 320, 65, None, 8.1, 4, 40, "NVIDIA T4 data sheet", bf16=False),
    Sheet(r"\bV100", 900, 125, None, 15.7, 6, 80, "NVIDIA V100 SXM2 data sheet", bf16=False),
)  # fmt: skip


def data_sheet(device_name: str) -> Peaks | None:
    """The data-sheet figures of a device by its CUDA name (`NVIDIA H200`); None if it is not in
    the table.
    """
    for sheet in SHEETS:
        if re.search(sheet.pattern, device_name):
            return _peaks(device_name, sheet)
    return None


def _peaks(device_name: str, sheet: Sheet) -> Peaks:
    rates = {"fp16": sheet.tensor, "fp32": sheet.fp32}
    if sheet.bf16:
        rates["bf16"] = sheet.tensor
    if sheet.tf32 is not None:
        rates["tf32"] = sheet.tf32
    return Peaks(
        device=device_name,
        source=DATA_SHEET,
        bandwidth_bytes_per_s=sheet.gb_per_s * 1e9,
        flops_per_s={name: rates[name] * 1e12 for name in RATES if name in rates},
        l2_bytes=None if sheet.l2_mib is None else round(sheet.l2_mib * MB),
        num_sms=sheet.sms,
        origin=sheet.origin,
    )
