"""Rules that derive findings, with evidence, from the figures of a cell.

The rules in KERNEL_RULES need counters of ncu (`capture --profiler torch,ncu --metrics …`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from profharness.attention.config import Config
from profharness.attention.costs import CASTS, REPEAT, matrix_bytes, tensor_bytes
from profharness.commands.analyze.figures import (
    BASIS_SOURCE,
    DERIVED,
    MEASURED,
    CellAnalysis,
    Evidence,
    Figures,
    Finding,
    KernelFigures,
    stored_score_dtype,
)
from profharness.devices import is_amd, l1_bytes
from profharness.errors import counted, percent
from profharness.program.roles import FUSED_ROLES, GEMMS
from profharness.recording.profilers import ncu
from profharness.rows import COLD, EAGER, EVENT, GRAPH, HOST, KERNEL
from profharness.units import KIB, memory_text, rate_figure, time_text

Rule = Callable[[CellAnalysis, Figures], Iterator[Finding]]
KernelRule = Callable[[CellAnalysis, KernelFigures], Iterator[Finding]]

DRAM_EXCESS = 1.5
SPLIT_MINOR, SPLIT_MAJOR = 0.05, 0.25
HELPERS_MINOR, HELPERS_MAJOR = 0.10, 0.30
COPIES = ("copy", "copy_bwd", "cast", "cast_bwd", "memory", "memory_bwd")
# Minimum share of empty block slots in the last wave for a finding of minor and of major severity.
TAIL_MINOR, TAIL_MAJOR = 0.10, 0.25
MANY_WAVES = 8
LOW_OCCUPANCY = 0.25
FAR_BELOW = 0.6  # Achieved occupancy is reported if it is below this fraction of the theoretical.
UNUSED_SHARED = 0.25
SEVERAL_READERS = 2
# The number of reads of K and V that follows from the grid is discarded if ncu counted less than
# this fraction of the bytes that this number of reads would move.
DISPROVED = 0.5
LOW_INTENSITY = 1.0  # Cache traffic is a major finding below this number of FLOPs per byte.
GAP_MAJOR, GAP_MINOR = 0.40, 0.20  # minimum share of a call in which no kernel runs
# Families of kernels in which each block reads all of K and V of one head. Other kernels may divide
# head_dim or the keys among their blocks, and the grid does not show whether they do.
READS_ALL = ("flash", "flash_splitkv", "efficient", "cudnn")
UNCOUNTED = (
    " (assuming that every block reads a whole head; count the traffic with `capture --profiler "
    "torch,ncu --metrics cache`)"
)
SHAPES = "shapes and dtype"
HOST_SOURCE = f"{HOST} samples: CPU time of an eager call"


def us(name: str, value_ns: float, source: str) -> Evidence:
    """Return evidence for a time, converted to microseconds."""
    return Evidence(name, round(value_ns / 1e3, 3), "µs", source)


def share(name: str, value: float | None, source: str) -> Evidence | None:
    """Return evidence for a fraction such as 0.25, or None if the value is unknown."""
    return None if value is None else Evidence(name, round(value, 4), "", source)


def in_bytes(name: str, value: float, source: str = SHAPES) -> Evidence:
    """Return an Evidence whose value is in bytes."""
    return Evidence(name, value, "B", source)


def _finding(
    grade: str,
    code: str,
    sentence: str,
    severity: str,
    *evidence: Evidence | None,
    factor: float | None = None,
    basis: str | None = None,
) -> Finding:
    known = tuple(item for item in evidence if item is not None)
    return Finding(code, sentence, severity, grade, known, factor, basis)


measured = partial(_finding, MEASURED)
derived = partial(_finding, DERIVED)


def _severity(value: float, major: float, minor: float = -math.inf) -> str:
    return "major" if value >= major else "minor" if value >= minor else "note"


def _duration(figures: Figures) -> Evidence:
    basis = figures.basis or ""
    return us(f"{basis} time", figures.duration_ns or 0, BASIS_SOURCE[basis])


def dram_share(cell: CellAnalysis, figures: Figures) -> float | None:
    """Return the measured DRAM bytes per second divided by the peak, or None if one is unknown."""
    peaks, rate = cell.machine.peaks, figures.dram_bytes_per_s
    top = peaks.bandwidth_bytes_per_s if peaks else None
    return rate / top if rate and top else None


def intensity(cell: CellAnalysis, figures: Figures) -> Iterator[Finding]:
    """Report whether the shapes alone make the config memory-bound or compute-bound.

    It is compute-bound if its FLOPs per compulsory byte are at or above the ridge.
    """
    peaks = cell.machine.peaks
    if figures.ridge is None or peaks is None:
        return
    below = figures.intensity < figures.ridge
    side, than = ("memory", "below") if below else ("compute", "above")
    text = (
        f"According to its shapes, the config is {side}-bound: {figures.intensity:.2f} FLOPs "
        f"per compulsory byte, {than} the ridge of {figures.ridge:.0f}."
    )
    moving = [phase for phase in cell.phases if phase.intensity is not None]
    low = [phase.name for phase in moving if phase.bound == "memory"]
    if low and not below:
        text += f" Only these phases are below the ridge: {', '.join(low)}."
    source = f"{figures.rate} rate / bandwidth, {peaks.source}"
    formula = "FLOPs (exact) / compulsory bytes"
    yield derived(
        f"{side}_bound",
        text,
        "note",
        Evidence("intensity", round(figures.intensity, 2), "FLOP/B", formula),
        Evidence("ridge", round(figures.ridge, 1), "FLOP/B", source),
        *(
            Evidence(
                f"intensity of {p.name}", round(p.intensity, 2), "FLOP/B", "its FLOPs / its bytes"
            )
            for p in moving
            if p.intensity is not None
        ),
    )


def achieved(cell: CellAnalysis, figures: Figures) -> Iterator[Finding]:
    """Report FLOP/s and compulsory bytes per second as shares of the peaks."""
    if figures.flops_per_s is None or figures.bytes_per_s is None or not cell.kernels:
        return
    tera, giga = figures.flops_per_s / 1e12, figures.bytes_per_s / 1e9
    text = f"{rate_figure(tera)} TFLOP/s and {rate_figure(giga)} GB/s of compulsory bytes"
    parts = []
    if figures.flops_share is not None:
        parts.append(f"{percent(figures.flops_share, 1)} of the {figures.rate} rate")
    if figures.bandwidth_share is not None:
        parts.append(f"{percent(figures.bandwidth_share, 1)} of the bandwidth")
    text += f": {' and '.join(parts)} ({figures.against})." if parts else "; no peaks are known."
    against = f"{figures.against} peak" if figures.against else ""
    time = f"{figures.basis} time"
    yield measured(
        "achieved",
        text,
        "note",
        _duration(figures),
        Evidence("rate", round(tera, 3), "TFLOP/s", f"FLOPs (exact) / {time}"),
        Evidence("compulsory bandwidth", round(giga, 1), "GB/s", f"compulsory bytes / {time}"),
        share("share of rate", figures.flops_share, against),
        share("share of bandwidth", figures.bandwidth_share, against),
    )


def above_ceiling(cell: CellAnalysis, figures: Figures) -> Iterator[Finding]:
    """Report rates that exceed the peak rates of the device, with the probable reason."""
    if (figures.bandwidth_share or 0) > 1:
        working, l2 = figures.working_set_bytes, cell.l2_size
        if l2 and working < l2 and figures.basis not in (COLD, EVENT):
            why = (
                f"the inputs and the output ({memory_text(working)}) fit in the L2 ({memory_text(l2)}) and were "
                "read from there, so this is not DRAM bandwidth"
            )
        else:
            why = (
                "the working set does not explain this rate, so either the peak is too low for "
                "this device or the time excludes part of the work"
            )
        yield measured(
            "bandwidth_above_peak",
            f"{percent(figures.bandwidth_share or 0, 1)} of the peak bandwidth is impossible: {why}.",
            "minor",
            _duration(figures),
            in_bytes("working set", working),
            Evidence("L2", l2 or "unknown", "B", "device"),
        )
    if (figures.flops_share or 0) > 1:
        text = (
            f"{percent(figures.flops_share or 0, 1)} of the peak {figures.rate} rate is impossible: "
            f"the peak ({figures.against}) is too low for this device, or the call skips scores "
            "that the formula counts (a mask with empty blocks)."
        )
        yield measured("rate_above_peak", text, "minor", _duration(figures))


def dram_traffic(cell: CellAnalysis, figures: Figures) -> Iterator[Finding]:
    """Report the DRAM bytes that ncu counted, and compare them with the compulsory bytes."""
    if figures.dram_bytes is None:
        return
    ratio = figures.dram_bytes / figures.compulsory_bytes
    text = (
        f"ncu counted {memory_text(figures.dram_bytes)} of DRAM traffic, {ratio:.2f} times the "
        f"compulsory {memory_text(figures.compulsory_bytes)}"
    )
    part = dram_share(cell, figures)
    if part is not None:
        text += f", at {percent(part, 1)} of the {figures.against} peak bandwidth"
    if ratio < 1:
        text += "; the rest was read from the L2, or has not yet been written back"
    yield measured(
        "dram_traffic",
        f"{text}.",
        _severity(ratio, 2 * DRAM_EXCESS, DRAM_EXCESS),
        in_bytes("DRAM bytes", figures.dram_bytes, "ncu dram__bytes_read + dram__bytes_write"),
        in_bytes("compulsory bytes", figures.compulsory_bytes),
        share("DRAM share", part, "ncu bytes / ncu time / bandwidth"),
    )


def score_traffic(cell: CellAnalysis, figures: Figures) -> Iterator[Finding]:
    """Report the memory traffic of unfused attention, which stores score matrices in memory."""
    dtype = stored_score_dtype(cell.config, cell.kernels)
    if dtype is None:
        return
    matrix = matrix_bytes(cell.config, dtype)
    by_phases = sum(phase.bytes for phase in cell.phases)
    evidence = [
        in_bytes("score matrix", matrix, f"batch x heads x seq_q x seq_kv, {dtype}"),
        in_bytes("bytes of the steps", by_phases, "phases, unfused"),
        in_bytes("compulsory bytes", figures.compulsory_bytes),
        _outside(cell),
    ]
    text = (
        f"The score matrix is written to memory and read back. It takes {memory_text(matrix)}; the "
        f"unfused {cell.parts}s move at least {memory_text(by_phases)}"
    )
    finding = derived
    if figures.dram_bytes is not None:
        finding = measured
        evidence.append(in_bytes("DRAM bytes", figures.dram_bytes, "ncu dram__bytes"))
        rest = "; the rest hit the L2" if figures.dram_bytes < by_phases else ""
        text += f" (ncu counted {memory_text(figures.dram_bytes)} of DRAM traffic{rest})"
    if figures.peak_memory_bytes:
        evidence.append(in_bytes("peak memory", figures.peak_memory_bytes, "allocator"))
    text += (
        f", and fused attention would move {memory_text(figures.compulsory_bytes)}. "
        f"{_outside_text(cell)}"
    )
    severity = _severity(by_phases / figures.compulsory_bytes, 2)
    copies = [phase for phase in cell.phases if phase.name in (REPEAT, CASTS)]
    copied = sum(phase.bytes for phase in copies)
    if copied >= by_phases / 2:
        what = " and ".join(phase.name for phase in copies)
        yield derived(
            "input_copies",
            (
                f"Before the matrix products, math copies the inputs ({what}). These copies account for "
                f"{memory_text(copied)} of the {memory_text(by_phases)} that its {cell.parts}s move. One score matrix "
                f"takes {memory_text(matrix)}; fused attention would move "
                f"{memory_text(figures.compulsory_bytes)} in total."
            ),
            severity,
            in_bytes("bytes of copies", copied, "phases, unfused"),
            *evidence,
        )
        severity = "minor"
    yield finding("score_traffic", text, severity, *evidence)


def _outside(cell: CellAnalysis) -> Evidence | None:
    return share("time outside of products", 1 - cell.share_of(*GEMMS), "roles of the kernels")


def _outside_text(cell: CellAnalysis) -> str:
    part = percent(1 - cell.share_of(*GEMMS), 1)
    return f"{part} of the {cell.parts} time is not spent on matrix products."


def eager_scores(cell: CellAnalysis, figures: Figures) -> Iterator[Finding]:
    """Report that attention implemented in Python stores its score matrices in memory.

    The reported size is a lower bound, because the scores may have a wider dtype than the inputs.
    """
    compulsory, dtype = figures.compulsory_bytes, str(cell.config.dtype)
    matrix = matrix_bytes(cell.config, dtype)
    moved = 4 * matrix  # written by QK^T, read and written by the softmax, read by PV
    yield derived(
        "score_traffic",
        (
            f"Eager attention writes and reads its score matrix (at least {memory_text(matrix)}) twice. "
            f"This moves {memory_text(moved)} per call, in addition to the {memory_text(compulsory)} that fused "
            f"attention would move. {_outside_text(cell)}"
        ),
        _severity((moved + compulsory) / compulsory, 2),
        in_bytes("score matrix", matrix, f"batch x heads x seq_q x seq_kv, {dtype}"),
        in_bytes("compulsory bytes", compulsory),
        _outside(cell),
    )


def full_precision(cell: CellAnalysis, _: Figures) -> Iterator[Finding]:
    """Report matrix products that run in fp32 on 16-bit inputs.

    PyTorch's math backend converts 16-bit inputs to fp32 by default.
    """
    dtype, peaks = str(cell.config.dtype), cell.machine.peaks
    name = "tf32" if cell.machine.tf32 else "fp32"
    if dtype == "fp32" or stored_score_dtype(cell.config, cell.kernels) != "fp32" or not peaks:
        return
    rates = peaks.flops_per_s
    if name not in rates or dtype not in rates:
        return
    ratio = rates[dtype] / rates[name]
    yield derived(
        "fp32_products",
        (
            f"The matrix products run in fp32 although the inputs are {dtype}, so at peak rates they "
            f"take {ratio:.0f} times as long on this device ({name} against {dtype}, {peaks.source})."
        ),
        _severity(ratio, 4),
        *(
            Evidence(f"{kind} rate", round(rates[kind] / 1e12, 1), "TFLOP/s", peaks.source)
            for kind in (name, dtype)
        ),
    )


def split_overhead(cell: CellAnalysis, figures: Figures) -> Iterator[Finding]:
    """Report the time of the combine kernel, which merges partial results if the keys are split."""
    kernels, part, time_ns = _time_of(cell, "combine")
    if kernels and part >= SPLIT_MINOR:
        text = (
            f"The keys are split, so a second kernel combines the partial results: {kernels[0]} "
            f"takes {percent(part, 1)} of the kernel time ({time_text(time_ns)})."
        )
        evidence = (
            us("combine time", time_ns, "trace"),
            us("kernel time", figures.kernels_ns or 0, BASIS_SOURCE[KERNEL]),
            share("share", part, "trace"),
        )
        severity = _severity(part, SPLIT_MAJOR)
        yield measured("split_overhead", text, severity, *evidence)


def helpers(cell: CellAnalysis, _: Figures) -> Iterator[Finding]:
    """Report the time of copies, padding and casts that accompany a fused kernel."""
    # No layout of the inputs avoids a memset, which sets the workspace of the kernel to zero.
    others = tuple(each for each in cell.kernels if "memset" not in each.kernel.lower())
    copies = replace(cell, kernels=others)
    kernels, part, time_ns = _time_of(copies, *COPIES)
    if part >= HELPERS_MINOR and any(kernel.role in FUSED_ROLES for kernel in cell.kernels):
        text = (
            f"Copies before and after the attention kernel take {percent(part, 1)} of the "
            f"{cell.parts} time ({time_text(time_ns)}): {', '.join(sorted(set(kernels)))}"
        )
        dims = (cell.config.head_dim, cell.config.value_dim)
        if any(dim % 8 for dim in dims):
            text += f"; head_dim {max(dims)} is not a multiple of 8, so the inputs are padded"
        evidence = (us("copy time", time_ns, "trace"), share("share", part, "trace"))
        severity = _severity(part, HELPERS_MAJOR)
        yield measured("copies", f"{text}.", severity, *evidence, factor=_gain(part))


def _time_of(cell: CellAnalysis, *roles: str) -> tuple[list[str], float, float]:
    """Return the names of the kernels with these roles, their share of the kernel time, and their
    time in ns.
    """
    kernels = [kernel for kernel in cell.kernels if kernel.role in roles]
    time_ns = sum(kernel.call_ns or 0 for kernel in kernels)
    return [kernel.kernel for kernel in kernels], cell.share_of(*roles), time_ns


def _gain(part: float) -> float | None:
    return 1 / (1 - part) if part < 1 else None


def blocks_and_waves(cell: CellAnalysis, _: Figures) -> Iterator[Finding]:
    """Report a grid of the main kernel that does not fill the device.

    The grid may have fewer blocks than the device has SMs, or it may leave many block slots empty
    in the last wave.
    """
    main, sms = cell.main, cell.machine.num_sms
    if main is None or not main.blocks or not sms:
        return
    evidence = [
        Evidence("blocks", main.blocks, "", f"grid of {main.kernel}"),
        Evidence("SMs", sms, "", "device"),
    ]
    if main.waves is not None:
        evidence.append(Evidence("waves", round(main.waves, 3), "", "blocks / blocks that fit"))
    if main.blocks < sms:
        filled = main.blocks / sms
        yield derived(
            "few_blocks",
            (
                f"{main.kernel} has {main.blocks} blocks for {sms} SMs, so at least {sms - main.blocks} "
                "SMs are idle."
            ),
            "major" if filled <= 0.75 else "minor" if filled <= 0.95 else "note",
            *evidence,
            factor=sms / main.blocks,
        )
        return
    if main.waves is None:
        return
    whole = math.ceil(main.waves)
    idle = 1 - main.waves / whole
    if main.waves <= 1:
        text = f"{main.kernel} runs in one wave, which is {percent(main.waves, 1)} full."
        yield derived("one_wave", text, "note", *evidence)
    elif idle >= TAIL_MINOR and main.waves <= MANY_WAVES:
        yield derived(
            "tail",
            (
                f"{main.kernel} needs {main.waves:.2f} waves, so it runs {whole}. Because the "
                f"last wave is not full, {percent(idle, 1)} of all block slots are empty."
            ),
            _severity(idle, TAIL_MAJOR),
            *evidence,
            factor=1 / (1 - idle),
        )


def occupancy(cell: CellAnalysis, _: Figures) -> Iterator[Finding]:
    """Report low occupancy of the main kernel.

    Report theoretical occupancy if it is low, with the resource that limits it. Report the
    occupancy that ncu measured if it is far below the theoretical one.
    """
    main = cell.main
    if main is None or main.occupancy is None:
        return
    evidence = [
        share("occupancy", main.occupancy, "theoretical, launch configuration"),
        Evidence("limiter", main.limiter or "", "", "launch configuration"),
        Evidence("registers", main.registers_per_thread or 0, "per thread", "trace"),
        Evidence("shared memory", main.shared_bytes or 0, "B per block", "trace"),
    ]
    if main.occupancy <= LOW_OCCUPANCY:
        device = cell.machine.device
        of_amd = device is not None and is_amd(device)
        whose, which = (
            ("a CU's waves", "matrix-core") if of_amd else ("an SM's warps", "tensor-core")
        )
        yield derived(
            "low_occupancy",
            (
                f"{main.kernel} keeps at most {percent(main.occupancy, 1)} of {whose} resident, limited "
                f"by {(main.limiter or '').replace('_', ' ')}. This is usual for {which} kernels, "
                "which hide latency inside a block."
            ),
            "note",
            *evidence,
        )
    active = main.achieved_occupancy
    if active is not None and active < FAR_BELOW * main.occupancy:
        yield measured(
            "idle_warps",
            (
                f"In {main.kernel}, {percent(active, 1)} of the possible warps were active on average, though "
                f"{percent(main.occupancy, 1)} could be resident: there were too few blocks, or their "
                "work was uneven."
            ),
            "minor",
            share("active warps", active, "ncu sm__warps_active.avg.pct_of_peak"),
            *evidence,
        )


def may_be_persistent(cell: CellAnalysis, kernel: KernelFigures) -> bool:
    """Return whether each block may compute several tiles, because the grid is a multiple of the SMs."""
    blocks, sms = kernel.blocks, cell.machine.num_sms
    return bool(blocks and sms and blocks % sms == 0)


def _readers(cell: CellAnalysis, kernel: KernelFigures) -> float | None:
    """Return how many blocks of a forward kernel read the same row of K and V, based on the grid.

    Return None if the grid does not show that several blocks do, or if ncu counted too few bytes
    for this number. Also return None if the config has a window, because a block may then read only
    a part of K and V.
    """
    config = cell.config
    if config.window is not None:
        return None
    heads = config.batch * config.num_kv_heads
    if kernel.role != "attention" or not kernel.blocks or kernel.blocks % heads:
        return None
    if may_be_persistent(cell, kernel):
        return None
    splits = 1
    if kernel.family == "flash_splitkv" and kernel.grid is not None:
        splits = kernel.grid[1]
    elif any(launched.role == "combine" for launched in cell.kernels):
        return None
    times = kernel.blocks / heads / splits
    most = config.seq_len_q * config.num_heads // config.num_kv_heads
    if not SEVERAL_READERS <= times <= most:
        return None
    counted = [moved for moved in (kernel.l1_bytes, kernel.l2_bytes) if moved is not None]
    disproved = counted and max(counted) < DISPROVED * _read_bytes(config, times)
    return None if disproved else times


def _read_bytes(config: Config, times: float) -> float:
    """Return how many bytes are read if `times` blocks read K and V of each head.

    If the config is causal, a block reads only up to the last key to which its last query attends.
    """
    tensors = tensor_bytes(config)
    whole = times * (tensors.key + tensors.value)
    if not config.causal:
        return whole
    blocks = times * config.num_kv_heads / config.num_heads  # blocks per query head
    tile = math.ceil(config.seq_len_q / max(1.0, blocks))
    ends = [min(end, config.seq_len_q) for end in range(tile, config.seq_len_q + tile, tile)]
    seen = min(config.seq_len_q, config.seq_len_kv)
    return whole * (sum(min(end, seen) for end in ends) / (len(ends) * seen))


def kv_traffic(cell: CellAnalysis, figures: Figures) -> Iterator[Finding]:
    """Report how many blocks read the same K and V, and the resulting traffic.

    The number follows from the grid, assuming that each block reads all of K and V of its head.
    """
    config, l2 = cell.config, cell.l2_size
    for kernel in cell.kernels:
        times = _readers(cell, kernel)
        if times is None:
            continue
        tensors = tensor_bytes(config)
        both = tensors.key + tensors.value  # if causal, without keys that no query attends to
        moved = _read_bytes(config, times)
        per_byte = figures.flops / moved
        rows = config.seq_len_q * config.num_heads / config.num_kv_heads / times
        text = (
            f"{times:.0f} blocks of {kernel.kernel} read the same rows of K and V: {memory_text(moved)} "
            f"in total, although K and V occupy only {memory_text(both)}. Each block uses these rows for "
            f"{counted(round(rows), 'query row')}"
        )
        if kernel.family not in READS_ALL and kernel.l1_bytes is None and kernel.l2_bytes is None:
            text += UNCOUNTED
        fits = both <= (l2 or 0)
        text += (
            f", so it performs {per_byte:.2f} FLOPs per byte. The L2 cache "
            f"{'can serve the' if fits else 'cannot serve all'} repeated reads."
        )
        rate = None
        if kernel.call_ns:
            value = round(moved / kernel.call_ns, 1)
            rate = Evidence("its rate", value, "GB/s", "K and V traffic / time")
        yield derived(
            "kv_reread",
            text,
            "major" if rows <= 1 or not fits else "note",
            Evidence("blocks per K/V head", times, "", f"grid of {kernel.kernel}"),
            in_bytes("K and V traffic", round(moved), "blocks x K and V of a head"),
            in_bytes("K and V", both),
            Evidence("intensity of it", round(per_byte, 3), "FLOP/B", "FLOPs / K and V traffic"),
            Evidence("L2", l2 or "unknown", "B", "device"),
            rate,
        )


def cache_traffic(_: CellAnalysis, figures: Figures) -> Iterator[Finding]:
    """Report the bytes that ncu counted in the L1 and L2 caches, compared with the compulsory bytes."""
    counted = [
        (name, counter, moved)
        for name, counter, moved in (
            ("L1", ncu.L1_BYTES, None if figures.past_l1 else figures.l1_bytes),
            ("L2", ncu.L2_BYTES, figures.l2_bytes),
        )
        if moved is not None
    ]
    most = max((moved for *_, moved in counted), default=0.0)
    if not most:
        return
    ratio, per_byte = most / figures.compulsory_bytes, figures.flops / most
    clauses = " and ".join(f"{memory_text(moved)} in the {name}" for name, _, moved in counted)
    yield measured(
        "cache_traffic",
        f"ncu counted {clauses}: up to {ratio:.1f} times the compulsory "
        f"{memory_text(figures.compulsory_bytes)}. This is {per_byte:.2f} FLOPs per byte.",
        "major" if per_byte < LOW_INTENSITY else "note",
        *(in_bytes(f"{name} bytes", round(moved), f"ncu {key}") for name, key, moved in counted),
        in_bytes("compulsory bytes", figures.compulsory_bytes),
        Evidence("intensity of it", round(per_byte, 3), "FLOP/B", "FLOPs / the larger count"),
    )


def _memories(cell: CellAnalysis) -> list[tuple[str, str, int]]:
    """Return (short name, name for use in a sentence, size in bytes) of each on-chip memory.

    The size of the L1 excludes the shared memory of the main kernel. The list is empty if the
    device is unknown.
    """
    device, main = cell.machine.device, cell.main
    if device is None:
        return []
    block = device.shared_bytes_per_block_optin or device.shared_bytes_per_block or 0
    resident = (main.blocks_per_sm or 1, main.shared_bytes or 0) if main else (1, 0)
    memories = [
        ("shared", "one block's shared memory", block),
        (
            "L1",
            "the part of an SM's L1 that is not used as shared memory",
            l1_bytes(device, *resident) or 0,
        ),
        ("L2", "the L2", cell.l2_size or 0),
    ]
    return [(short, name, room) for short, name, room in memories if room]


def kv_places(cell: CellAnalysis, figures: Figures) -> tuple[str, ...] | None:
    """Return the memories in which K and V of one head fit, such as `L2 (51,200 KiB)`.

    Return None if no memory size is known.
    """
    memories = _memories(cell)
    fitting = [(short, room) for short, _, room in memories if room >= figures.kv_head_bytes]
    return (
        tuple(f"{short} ({room / KIB:,.0f} KiB)" for short, room in fitting) if memories else None
    )


def working_set(cell: CellAnalysis, figures: Figures) -> Iterator[Finding]:
    """Report which on-chip memories the data fit in.

    K and V of one head are compared with shared memory and the L1. All inputs and the output are
    compared with the L2.
    """
    memories = _memories(cell)
    if not memories:
        return
    clauses = []
    for short, name, room in memories:
        have = figures.working_set_bytes if short == "L2" else figures.kv_head_bytes
        clauses.append(f"{'fit' if have <= room else 'do not fit'} in {name} ({memory_text(room)})")
    text = f"K and V of one head ({memory_text(figures.kv_head_bytes)}) "
    if cell.l2_size and len(memories) > 1:
        whole = f"inputs and output together ({memory_text(figures.working_set_bytes)})"
        text += f"{' and '.join(clauses[:-1])}; {whole} {clauses[-1]}."
    else:
        text += f"{' and '.join(clauses)}."
    yield derived(
        "working_set",
        text,
        "note",
        in_bytes("K and V of one head", figures.kv_head_bytes),
        in_bytes("inputs and output", figures.working_set_bytes),
        *(in_bytes(name, room, "device limits") for _, name, room in memories),
    )


def unused_shared(cell: CellAnalysis, _: Figures) -> Iterator[Finding]:
    """Report that the main kernel uses little shared memory although blocks read the same K and V.

    A larger tile in shared memory would reduce these repeated reads.
    """
    main, device = cell.main, cell.machine.device
    if main is None or device is None or main.shared_bytes is None or not main.blocks_per_sm:
        return
    times, whole = _readers(cell, main), device.shared_bytes_per_sm
    if times is None or not whole:
        return
    resident = min(main.blocks_per_sm, math.ceil((main.blocks or 0) / device.num_sms))
    used = resident * main.shared_bytes / whole
    if used < UNUSED_SHARED:
        yield derived(
            "unused_shared",
            (
                f"{main.kernel} uses {memory_text(main.shared_bytes)} of shared memory per block "
                f"({percent(used, 1)} of an SM's, with {counted(resident, 'block')} per SM), while {times:.0f} "
                "blocks read the same K and V."
            ),
            "minor",
            Evidence("shared memory", main.shared_bytes, "B per block", "trace"),
            Evidence("blocks per SM", resident, "", "grid, occupancy and SMs"),
            in_bytes("shared memory per SM", whole, "device limits"),
        )


def launch_gap(cell: CellAnalysis, figures: Figures) -> Iterator[Finding]:
    """Report the share of an eager call in which the GPU waits for the CPU.

    The waiting time is the time of the call minus the time of the same call replayed as a CUDA
    graph. If the replay was not timed, the total time of the kernels is used. All these times are
    measured with warm caches.
    """
    eager, host = figures.eager_ns, figures.host_ns
    if not eager:
        yield from _gap_of_older_runs(cell, figures)
        return
    basis, busy = (GRAPH, figures.graph_ns) if figures.graph_ns else (KERNEL, figures.kernels_ns)
    if not busy or 1 - busy / eager < GAP_MINOR:
        return
    gap = 1 - busy / eager
    without = "Replayed as a CUDA graph, it takes" if basis == GRAPH else "Its kernels take"
    text = (
        f"The GPU waits for the CPU during {percent(gap, 1)} of an eager call of "
        f"{time_text(eager)}. {without} {time_text(busy)}"
    )
    if host:
        text += f", and the CPU needs {time_text(host)} to launch it"
    yield measured(
        "launch_gap",
        f"{text}.",
        _severity(gap, GAP_MAJOR),
        us("eager time", eager, BASIS_SOURCE[EAGER]),
        us(f"{basis} time", busy, BASIS_SOURCE[basis]),
        Evidence("launches", figures.launches, "per call", "trace"),
        us("host time", host, HOST_SOURCE) if host else None,
        factor=eager / busy,
    )


def _gap_of_older_runs(cell: CellAnalysis, figures: Figures) -> Iterator[Finding]:
    """Report a lower bound for the launch gap in `event` samples, which only older runs contain.

    In these samples, the L2 flush hides a part of the launch time, and the caches are cold. The
    bound assumes the longest plausible kernel time. That is the larger of two sums: the profiled
    time plus the time to refill the L2, or the time under ncu plus the time of copies and fills.
    """
    event, busy, peaks = figures.event_ns, figures.kernels_ns, cell.machine.peaks
    if figures.cold_ns or not event or not busy:
        return
    sources: list[Evidence] = []
    if peaks and peaks.bandwidth_bytes_per_s:
        refill = figures.compulsory_bytes / peaks.bandwidth_bytes_per_s * 1e9
        busy += refill
        sources = [us("refilling the L2", refill, f"compulsory bytes / bandwidth, {peaks.source}")]
    launched = [kernel for kernel in cell.kernels if kernel.blocks is not None]
    if launched and all(kernel.ncu_ns for kernel in launched):
        cold = sum((kernel.ncu_ns or 0) * kernel.launches_per_call for kernel in launched)
        rest = sum(kernel.call_ns or 0 for kernel in cell.kernels if kernel.blocks is None)
        if cold + rest > busy:
            busy = cold + rest
            sources = [us("cold kernel time", cold, "ncu gpu__time_duration")]
            if rest:
                sources.append(us("copies and fills", rest, BASIS_SOURCE[KERNEL]))
    gap = 1 - busy / event
    if gap < GAP_MINOR:
        return
    text = (
        f"No kernel runs during at least {percent(gap, 1)} of a call of {time_text(event)}. Its "
        f"{counted(round(figures.launches), 'launch takes', 'launches take')} {time_text(busy)} "
        "even with cold caches"
    )
    graph = figures.graph_ns
    if graph:
        text += f", and a CUDA-graph replay of the call takes {time_text(graph)}"
    yield measured(
        "launch_gap",
        f"{text}.",
        _severity(gap, GAP_MAJOR),
        us("event time", event, BASIS_SOURCE[EVENT]),
        us("kernel time", figures.kernels_ns or 0, BASIS_SOURCE[KERNEL]),
        *sources,
        Evidence("launches", figures.launches, "per call", "trace"),
        us("graph time", graph, BASIS_SOURCE[GRAPH]) if graph else None,
        factor=event / busy,
    )


_STALL_RULES = "Nsight Compute's rules CPIStall and IssueSlotUtilization"
_OWN = "profharness: below this value, other problems cost more"
THRESHOLDS: dict[str, tuple[float, str]] = {
    "tensor pipe": (
        0.6,
        "Nsight Compute's rule SOLBottleneck: below this value, latency is the limit",
    ),
    "tensor cores": (
        0.01,
        "H200 runs: products stay below 0.5 % without tensor cores and above 2 % with them",
    ),
    "issue slots": (0.8, _STALL_RULES),
    "stall": (0.3, _STALL_RULES),
    "sectors": (
        18,
        "32 threads with 16 bytes each need 16 sectors of 32 bytes, and two more if misaligned",
    ),
    "scattered": (24, "1.5 times the sectors that the widest access needs"),
    "narrow": (4, "32 threads with 4 bytes each need 4 sectors of 32 bytes"),
    "bank conflicts": (0.1, _OWN),
    "many bank conflicts": (0.5, "every second pass of shared memory is a repetition"),
    "kernel": (0.2, "profharness: kernels with a smaller share of a call's time matter little"),
}
"""The threshold of each check of a counter, and the source of the threshold."""


_FEWER = "issue fewer instructions for that unit, or interleave them with other instructions"
WARP_STATE_WORDS: dict[str, tuple[str, str]] = {
    "long_scoreboard": (
        "for data from global or local memory (L1, L2 or DRAM)",
        (
            "load earlier (a pipeline of several tiles with cp.async or TMA), keep data that is "
            "read again in shared memory, or have more warps resident"
        ),
    ),
    "short_scoreboard": (
        "for shared memory or a special function such as exp",
        "read shared memory in wider words and without bank conflicts, or less often",
    ),
    "mio_throttle": (
        "for a free entry in the queue of shared memory and special functions",
        _FEWER,
    ),
    "lg_throttle": (
        "for a free entry in the queue of global memory",
        "make fewer and wider accesses, 16 bytes per thread",
    ),
    "tex_throttle": ("for a free entry in the queue of texture memory", _FEWER),
    "math_pipe_throttle": (
        "for a busy arithmetic pipe",
        "issue fewer instructions; this kernel is at the limit of the pipe",
    ),
    "barrier": (
        "for other warps of the block at a barrier",
        (
            "balance the work between barriers, or use smaller blocks and more of them on an SM; "
            "if some warps load and others compute, the idle ones wait by design"
        ),
    ),
    "gmma": (
        "for the registers of asynchronous tensor-core products (wgmma)",
        "let two groups of warps take turns, so that one computes while the other prepares",
    ),
    "wait": (
        "for a fixed time after the previous instruction",
        "use more independent instructions in a warp, or have more warps resident",
    ),
    "branch_resolving": ("for the target of a branch", "unroll loops, and branch less"),
    "no_instruction": (
        "for instructions to be fetched",
        "make the code of the loop smaller, or unroll it less",
    ),
    "imc_miss": ("for constants", "let all threads of a warp read the same constant"),
    "membar": ("for a memory barrier", "use fewer fences, and fences with a smaller scope"),
    "drain": ("for their stores to finish at the end", "write the results in wider words"),
    "sleeping": ("in a sleep that the code requests", "sleep less"),
    "dispatch_stall": ("for the dispatcher", "check the pipes: one is busy"),
    "misc": ("for other hardware reasons", "no remedy is known"),
    "not_selected": (
        "for a scheduler that issues from another warp",
        "there are enough warps; fewer warps with more registers each would be as fast",
    ),
}
"""Maps a warp state of ncu to the reason why warps in this state wait, and to a remedy.

The reasons follow the table of metrics in NVIDIA's documentation of Nsight Compute.
"""


def _over(name: str, value: float | None) -> bool:
    return value is not None and value >= THRESHOLDS[name][0]


def tensor_pipe(cell: CellAnalysis, kernel: KernelFigures) -> Iterator[Finding]:
    """Report low utilization of the tensor cores in a kernel that multiplies matrices."""
    busy, count = kernel.counters.tensor_pipe, kernel.counters.tensor_instructions
    if kernel.role not in (*FUSED_ROLES, *GEMMS) or busy is None or _over("tensor pipe", busy):
        return
    fma = kernel.counters.fma_pipe
    beside = f"; the FMA pipe is busy in {percent(fma, 1)}" if fma is not None else ""
    if _over("tensor cores", busy):
        code, severity = "tensor_pipe", "note"
        text = f"The tensor pipe is busy in {percent(busy, 1)} of the cycles of {kernel.kernel}{beside}"
    else:
        plain = cell.config.dtype == "fp32" and not cell.machine.tf32
        code, severity = "no_tensor_cores", "note" if plain else "major"
        text = (
            f"{kernel.kernel} multiplies without tensor cores: their pipe is busy in "
            f"{percent(busy, 1)} of the cycles{beside}"
        )
        text += ", as expected for fp32 products without TF32" if plain else ""
    instructions = None
    if count is not None:
        instructions = Evidence("tensor instructions", count, "", f"ncu {ncu.TENSOR_INSTRUCTIONS}")
    yield measured(
        code,
        f"{text}.",
        severity,
        share("tensor pipe", busy, f"ncu {ncu.TENSOR_PIPE}, on Ada its _v2"),
        instructions,
        share("FMA pipe", fma, f"ncu {ncu.FMA_PIPE}"),
    )


def coalescing(_: CellAnalysis, kernel: KernelFigures) -> Iterator[Finding]:
    """Report loads and stores that access many or few 32-byte sectors per request of a warp.

    With many sectors, the accesses of the threads are scattered. With few, they are narrow.
    """
    for what, sectors, name in (
        ("load", kernel.counters.load_sectors, ncu.LOAD_SECTORS),
        ("store", kernel.counters.store_sectors, ncu.STORE_SECTORS),
    ):
        if sectors is None:
            continue
        evidence = Evidence(f"sectors a {what}", round(sectors, 2), "", f"ncu {name}")
        text = f"A {what} of {kernel.kernel} accesses {sectors:.1f} sectors of 32 bytes"
        if sectors > THRESHOLDS["sectors"][0]:
            text += (
                ", more than the 16 that 32 threads with 16 bytes each need: the threads of a warp "
                "do not access neighbouring addresses."
            )
            severity = "major" if _over("scattered", sectors) else "minor"
            yield measured("uncoalesced", text, severity, evidence)
        elif sectors < THRESHOLDS["narrow"][0]:
            text += ": its threads access fewer than 4 bytes each, or the same bytes."
            yield measured("narrow_access", text, "note", evidence)


def bank_conflicts(_: CellAnalysis, kernel: KernelFigures) -> Iterator[Finding]:
    """Report the share of shared memory passes that bank conflicts cause."""
    part = kernel.counters.bank_conflicts
    if part is not None and _over("bank conflicts", part):
        yield measured(
            "bank_conflicts",
            f"{percent(part, 1)} of the shared memory passes of {kernel.kernel} are due to bank conflicts.",
            "major" if _over("many bank conflicts", part) else "minor",
            share("bank conflicts", part, f"ncu {ncu.BANK_CONFLICTS} / wavefronts"),
        )


def hit_rates(_: CellAnalysis, kernel: KernelFigures) -> Iterator[Finding]:
    """Report the hit rates of the L1 and L2 caches.

    ncu flushes both caches before each kernel, so a kernel that reads its data once has few hits.
    """
    rates = (
        ("L1", kernel.counters.l1_hit_rate, ncu.L1_HIT_RATE),
        ("L2", kernel.counters.l2_hit_rate, ncu.L2_HIT_RATE),
    )
    known = [(name, rate, metric) for name, rate, metric in rates if rate is not None]
    if known:
        parts = " and ".join(f"{name} {percent(rate, 1)}" for name, rate, _ in known)
        yield measured(
            "hit_rates",
            (
                f"Hit rates of {kernel.kernel} with cold caches: {parts}. Data that is read only "
                "once misses the caches."
            ),
            "note",
            *(share(f"{name} hits", rate, f"ncu {metric}") for name, rate, metric in known),
        )


def stalls(_: CellAnalysis, kernel: KernelFigures) -> Iterator[Finding]:
    """Report the most frequent reason why warps wait, if the schedulers are often idle."""
    states = [item for item in kernel.counters.warp_states.items() if item[0] != "selected"]
    issue = kernel.counters.issue_active
    if not states or _over("issue slots", issue) or not _over("stall", states[0][1]):
        return
    (name, part), *others = states
    waits, change = WARP_STATE_WORDS[name]
    text = f"Warps of {kernel.kernel} spend {percent(part, 1)} of their time waiting {waits}"
    if issue is not None:
        text += f"; the schedulers issue an instruction in {percent(issue, 1)} of the cycles"
    yield measured(
        "stalls",
        f"{text}. Possible remedy: {change}.",
        "minor",
        share(name, part, f"ncu {ncu.warp_state(name)} / all warp states"),
        *(share(other, of, "the same") for other, of in others[:2]),
        share("issue slots", issue, f"ncu {ncu.ISSUE_ACTIVE}"),
    )


def counters(cell: CellAnalysis, _: Figures) -> Iterator[Finding]:
    """Apply KERNEL_RULES to the main kernel and to kernels that take much of the kernel time."""
    kernels = [kernel for kernel in cell.kernels if _over("kernel", kernel.share)]
    if cell.main is not None:
        kernels = [cell.main, *(kernel for kernel in kernels if kernel is not cell.main)]
    for rule in KERNEL_RULES:
        for kernel in kernels:
            yield from rule(cell, kernel)


KERNEL_RULES: tuple[KernelRule, ...] = (tensor_pipe, coalescing, bank_conflicts, hit_rates, stalls)
RULES: tuple[Rule, ...] = (
    *(intensity, achieved, above_ceiling, dram_traffic, launch_gap),
    *(blocks_and_waves, occupancy, kv_traffic, cache_traffic, working_set, unused_shared),
    *(score_traffic, full_precision, split_overhead, helpers, counters),
)
# Attention implemented in Python may use any dtype for its scores, so the rules that assume the
# dtypes of PyTorch's math backend are replaced.
EAGER_RULES: tuple[Rule, ...] = (
    *(rule for rule in RULES if rule not in (score_traffic, full_precision)),
    eager_scores,
)
