"""The rules that derive findings, with their evidence, from the figures of a cell."""

from __future__ import annotations

import math

from profharness.attention.config import Config
from profharness.attention.costs import CASTS, REPEAT, matrix_bytes, tensor_bytes
from profharness.commands.analyze.counter_rules import COUNTER_RULES
from profharness.commands.analyze.figures import (
    BASIS_SOURCE,
    DERIVED,
    FLUSHED,
    MEASURED,
    Evidence,
    Facts,
    Finding,
    KernelFigures,
    Rule,
    percent,
    share,
    size,
    us,
)
from profharness.devices import KIB, l1_bytes
from profharness.program.roles import GEMMS
from profharness.recording.profilers.ncu_metrics import L1_BYTES, L2_BYTES
from profharness.rows import EAGER, EVENT, GRAPH, HOST, KERNEL

DRAM_EXCESS = 1.5
SPLIT_MINOR, SPLIT_MAJOR = 0.05, 0.25
HELPERS_MINOR, HELPERS_MAJOR = 0.10, 0.30
COPIES = ("copy", "copy_bwd", "cast", "cast_bwd", "memory", "memory_bwd")
TAIL_MINOR, TAIL_MAJOR = 0.10, 0.25  # minimum share of SM time that the last wave leaves idle
MANY_WAVES = 8
LOW_OCCUPANCY = 0.25
FAR_BELOW = 0.6  # reported if achieved / theoretical occupancy is less
UNUSED_SHARED = 0.25
SEVERAL_READERS = 2
# If ncu counted less than this fraction of the bytes that the grid implies, the grid is no evidence.
DISPROVED = 0.5
LOW_INTENSITY = 1.0  # FLOPs per byte; cache traffic is a major finding below it
# Families whose blocks are known to read all of a head's K and V. Any other kernel may divide
# head_dim or the keys among its blocks, which the grid does not show.
READS_ALL = ("flash", "flash_splitkv", "efficient", "cudnn")
UNCOUNTED = (
    " (if every block reads a whole head; `capture --profiler torch,ncu --metrics cache` counts it)"
)


def intensity(facts: Facts) -> list[Finding]:
    """Report on which side of the ridge the config lies, regardless of the kernels that ran."""
    figures = facts.figures
    peaks = facts.machine.peaks
    if figures.ridge is None or peaks is None:
        return []
    side = "memory" if figures.intensity < figures.ridge else "compute"
    than = "below" if side == "memory" else "above"
    formula = "FLOPs (exact) / compulsory bytes"
    source = f"{figures.rate} rate / bandwidth, {peaks.source}"
    evidence: tuple[Evidence, ...] = (
        Evidence("intensity", round(figures.intensity, 2), "FLOP/B", formula),
        Evidence("ridge", round(figures.ridge, 1), "FLOP/B", source),
    )
    text = (
        f"By its shapes the config is {side}-bound: {figures.intensity:.2f} FLOPs per compulsory "
        f"byte, {than} the ridge of {figures.ridge:.0f}."
    )
    low = [p for p in facts.phases if p.bound == "memory" and p.intensity is not None]
    if low and side == "compute":
        text += f" These phases alone lie below it: {', '.join(p.name for p in low)}."
    evidence += tuple(
        Evidence(f"intensity of {p.name}", round(p.intensity, 2), "FLOP/B", "FLOPs / bytes of it")
        for p in facts.phases
        if p.intensity is not None
    )
    return [Finding(f"{side}_bound", text, "note", DERIVED, evidence)]


def achieved(facts: Facts) -> list[Finding]:
    """Report FLOP/s and compulsory bytes per second as shares of the peaks."""
    figures = facts.figures
    if figures.flops_per_s is None or figures.bytes_per_s is None or not facts.kernels:
        return []
    against = f"{figures.against} peak" if figures.against else ""
    work, moved = (
        f"{what} / {figures.basis} time" for what in ("FLOPs (exact)", "compulsory bytes")
    )
    evidence = [
        facts.duration(),
        Evidence("rate", round(figures.flops_per_s / 1e12, 3), "TFLOP/s", work),
        Evidence("compulsory bandwidth", round(figures.bytes_per_s / 1e9, 1), "GB/s", moved),
    ]
    text = (
        f"{figures.flops_per_s / 1e12:.2f} TFLOP/s and {figures.bytes_per_s / 1e9:.0f} GB/s of "
        "compulsory bytes"
    )
    parts = []
    if figures.flops_share is not None:
        parts.append(f"{percent(figures.flops_share)} of the {figures.rate} rate")
        evidence.append(share("share of rate", figures.flops_share, against))
    if figures.bandwidth_share is not None:
        parts.append(f"{percent(figures.bandwidth_share)} of the bandwidth")
        evidence.append(share("share of bandwidth", figures.bandwidth_share, against))
    text += f": {' and '.join(parts)} ({figures.against})." if parts else "; no peaks are known."
    return [Finding("achieved", text, "note", MEASURED, tuple(evidence))]


def above_ceiling(facts: Facts) -> list[Finding]:
    """Report rates that exceed the peaks of the device, and explain why."""
    figures, findings = facts.figures, []
    if (figures.bandwidth_share or 0) > 1:
        working, l2 = figures.working_set_bytes, facts.l2_bytes
        if l2 and working < l2 and figures.basis not in FLUSHED:
            why = (
                f"the inputs and the output ({size(working)}) fit in the L2 ({size(l2)}) and were "
                "read from there, so this is no DRAM bandwidth"
            )
        else:
            why = (
                "the working set does not explain it: the peak is too low for this device, or the "
                "time misses part of the work"
            )
        text = f"{percent(figures.bandwidth_share or 0)} of the peak bandwidth cannot be: {why}."
        evidence = (
            facts.duration(),
            Evidence("working set", working, "B", "shapes and dtype"),
            Evidence("L2", l2 or "unknown", "B", "device"),
        )
        findings.append(Finding("bandwidth_above_peak", text, "minor", MEASURED, evidence))
    if (figures.flops_share or 0) > 1:
        text = (
            f"{percent(figures.flops_share or 0)} of the peak {figures.rate} rate cannot be: the "
            f"peak ({figures.against}) is too low for this device, or the call skips scores that "
            "the formula counts (a mask with blocks of nothing)."
        )
        findings.append(Finding("rate_above_peak", text, "minor", MEASURED, (facts.duration(),)))
    return findings


def dram_traffic(facts: Facts) -> list[Finding]:
    """Compare measured DRAM bytes with compulsory bytes."""
    figures = facts.figures
    if figures.dram_bytes is None:
        return []
    ratio = figures.dram_bytes / figures.compulsory_bytes
    evidence = [
        Evidence("DRAM bytes", figures.dram_bytes, "B", "ncu dram__bytes_read + dram__bytes_write"),
        Evidence("compulsory bytes", figures.compulsory_bytes, "B", "shapes and dtype"),
    ]
    peaks = facts.machine.peaks
    text = (
        f"ncu counted {size(figures.dram_bytes)} of DRAM traffic, {ratio:.2f} times the compulsory "
        f"{size(figures.compulsory_bytes)}"
    )
    if facts.dram_share is not None and peaks:
        text += f", at {percent(facts.dram_share)} of the bandwidth ({peaks.source})"
        evidence.append(share("DRAM share", facts.dram_share, "ncu bytes / ncu time / bandwidth"))
    if ratio < 1:
        text += "; what is missing was in the L2, or is still there unwritten"
    severity = "major" if ratio >= 2 * DRAM_EXCESS else "minor" if ratio >= DRAM_EXCESS else "note"
    return [Finding("dram_traffic", f"{text}.", severity, MEASURED, tuple(evidence))]


def score_traffic(facts: Facts) -> list[Finding]:
    """Report that unfused attention stores its score matrices in memory, and how large they are."""
    dtype = facts.score_dtype
    if dtype is None:
        return []
    figures = facts.figures
    matrix = matrix_bytes(facts.config, dtype)
    by_phases = sum(phase.bytes for phase in facts.phases)
    outside = 1 - facts.share_of(*GEMMS)
    evidence = [
        Evidence("score matrix", matrix, "B", f"batch x heads x seq_q x seq_kv, {dtype}"),
        Evidence("bytes of the steps", by_phases, "B", "phases, unfused"),
        Evidence("compulsory bytes", figures.compulsory_bytes, "B", "shapes and dtype"),
        share("time outside of products", outside, "roles of the kernels"),
    ]
    text = (
        f"The scores go through memory: one matrix of them is {size(matrix)}, and the steps move at "
        f"least {size(by_phases)} where fused attention moves {size(figures.compulsory_bytes)}"
    )
    if figures.dram_bytes is not None:
        evidence.append(Evidence("DRAM bytes", figures.dram_bytes, "B", "ncu dram__bytes"))
        rest = ", the rest hit the L2" if figures.dram_bytes < by_phases else ""
        text += f" (ncu counted {size(figures.dram_bytes)} from and to DRAM{rest})"
    if figures.peak_memory_bytes:
        peak = figures.peak_memory_bytes
        evidence.append(Evidence("peak memory", peak, "B", "allocator"))
    text += f"; {percent(outside)} of the kernel time is no matrix product."
    measured = MEASURED if figures.dram_bytes is not None else DERIVED
    severity = "major" if by_phases / figures.compulsory_bytes >= 2 else "minor"
    copied = sum(phase.bytes for phase in facts.phases if phase.name in (REPEAT, CASTS))
    if copied < by_phases / 2:
        return [Finding("score_traffic", text, severity, measured, tuple(evidence))]
    what = " and ".join(phase.name for phase in facts.phases if phase.name in (REPEAT, CASTS))
    copies = Finding(
        "input_copies",
        f"Copies of the inputs go through memory: {size(copied)} of the {size(by_phases)} that the "
        f"steps move are for what math does before its products ({what}), and one score matrix is "
        f"{size(matrix)}; fused attention moves {size(figures.compulsory_bytes)} in all.",
        severity,
        DERIVED,
        (Evidence("bytes of copies", copied, "B", "phases, unfused"), *evidence),
    )
    return [copies, Finding("score_traffic", text, "minor", measured, tuple(evidence))]


def eager_scores(facts: Facts) -> list[Finding]:
    """Report that attention written in Python stores its score matrices in memory. Their size is a
    lower bound, because their dtype is at least as wide as the inputs' dtype.
    """
    figures, config = facts.figures, facts.config
    matrix = matrix_bytes(config, str(config.dtype))
    moved = 4 * matrix  # written by QK^T, read and written by the softmax, read by PV
    factor = (moved + figures.compulsory_bytes) / figures.compulsory_bytes
    text = (
        f"The scores go through memory: one matrix of them is at least {size(matrix)}, and it is "
        f"written twice and read twice where fused attention moves {size(figures.compulsory_bytes)}."
    )
    outside = 1 - facts.share_of(*GEMMS)
    evidence = (
        Evidence("score matrix", matrix, "B", f"batch x heads x seq_q x seq_kv, {config.dtype}"),
        Evidence("compulsory bytes", figures.compulsory_bytes, "B", "shapes and dtype"),
        share("time outside of products", outside, "roles of the kernels"),
    )
    severity = "major" if factor >= 2 else "minor"
    return [Finding("score_traffic", text, severity, DERIVED, evidence)]


def full_precision(facts: Facts) -> list[Finding]:
    """Report that 16-bit inputs are multiplied in fp32, as PyTorch's math backend does by default."""
    config, machine = facts.config, facts.machine
    if config.dtype == "fp32" or facts.score_dtype != "fp32" or not machine.peaks:
        return []
    name = "tf32" if machine.tf32 else "fp32"
    rates = machine.peaks.flops_per_s
    if name not in rates or str(config.dtype) not in rates:
        return []
    ratio = rates[str(config.dtype)] / rates[name]
    text = (
        f"The products run in fp32 on {config.dtype} inputs, where the device multiplies "
        f"{ratio:.0f} times slower ({name} against {config.dtype}, {machine.peaks.source})."
    )
    evidence = tuple(
        Evidence(f"{kind} rate", round(rates[kind] / 1e12, 1), "TFLOP/s", machine.peaks.source)
        for kind in (name, str(config.dtype))
    )
    return [Finding("fp32_products", text, "major" if ratio >= 4 else "minor", DERIVED, evidence)]


def split_overhead(facts: Facts) -> list[Finding]:
    """Report the share of time that the combine kernel takes if the keys are split."""
    combines = [kernel for kernel in facts.kernels if kernel.role == "combine"]
    part = facts.share_of("combine")
    if not combines or part < SPLIT_MINOR:
        return []
    time_ns = sum(kernel.call_ns or 0 for kernel in combines)
    text = (
        f"Splitting over the keys costs a second kernel: {combines[0].kernel} takes {percent(part)} "
        f"of the kernel time ({time_ns / 1e3:.1f} µs) to put the parts together."
    )
    evidence = (
        us("combine time", time_ns, "trace"),
        us("kernel time", facts.figures.kernels_ns or 0, BASIS_SOURCE["kernel"]),
        share("share", part, "trace"),
    )
    return [_avoidable("split_overhead", text, part, SPLIT_MAJOR, evidence)]


def _avoidable(
    code: str, text: str, part: float, major: float, evidence: tuple[Evidence, ...]
) -> Finding:
    """Return a finding about avoidable kernels, which take the share `part` of the time."""
    severity = "major" if part >= major else "minor"
    factor = 1 / (1 - part) if part < 1 else None
    return Finding(code, text, severity, MEASURED, evidence, factor)


def helpers(facts: Facts) -> list[Finding]:
    """Report the time that copies, padding and casts take beside a fused kernel."""
    part = facts.share_of(*COPIES)
    if not facts.fused or part < HELPERS_MINOR:
        return []
    copies = [kernel for kernel in facts.kernels if kernel.role in COPIES]
    names = sorted({kernel.kernel for kernel in copies})
    time_ns = sum(kernel.call_ns or 0 for kernel in copies)
    text = (
        f"Copies around the attention kernel take {percent(part)} of the kernel time "
        f"({time_ns / 1e3:.1f} µs): {', '.join(names)}"
    )
    dims = (facts.config.head_dim, facts.config.value_dim)
    if any(dim % 8 for dim in dims):
        text += f"; head_dim {max(dims)} is no multiple of 8, so the inputs are padded"
    evidence = (us("copy time", time_ns, "trace"), share("share", part, "trace"))
    return [_avoidable("copies", f"{text}.", part, HELPERS_MAJOR, evidence)]


def blocks_and_waves(facts: Facts) -> list[Finding]:
    """Report whether the main kernel's grid fills the device, and how much of the device is idle
    during the last wave.
    """
    main, sms = facts.main, facts.num_sms
    if main is None or not main.blocks or not sms:
        return []
    evidence = [
        Evidence("blocks", main.blocks, "", f"grid of {main.kernel}"),
        Evidence("SMs", sms, "", "device"),
    ]
    if main.waves is not None:
        evidence.append(Evidence("waves", round(main.waves, 3), "", "blocks / blocks that fit"))
    if main.blocks < sms:
        text = (
            f"{main.kernel} has {main.blocks} blocks for {sms} SMs: at least {sms - main.blocks} "
            "SMs have nothing to do."
        )
        filled = main.blocks / sms
        severity = "major" if filled <= 0.75 else "minor" if filled <= 0.95 else "note"
        factor = sms / main.blocks
        return [Finding("few_blocks", text, severity, DERIVED, tuple(evidence), factor)]
    if main.waves is None:
        return []
    whole = math.ceil(main.waves)
    idle = 1 - main.waves / whole
    if main.waves <= 1:
        text = f"{main.kernel} runs in one wave that is {percent(main.waves)} full."
        return [Finding("one_wave", text, "note", DERIVED, tuple(evidence))]
    if idle < TAIL_MINOR or main.waves > MANY_WAVES:
        return []
    text = (
        f"{main.kernel} needs {main.waves:.2f} waves, so {whole} rounds: the last one leaves "
        f"{percent(idle)} of the block slots of the whole run empty."
    )
    severity = "major" if idle >= TAIL_MAJOR else "minor"
    return [Finding("tail", text, severity, DERIVED, tuple(evidence), 1 / (1 - idle))]


def occupancy(facts: Facts) -> list[Finding]:
    """Report low theoretical occupancy with its limiter, and much lower measured occupancy."""
    main, findings = facts.main, []
    if main is None or main.occupancy is None:
        return []
    evidence = [
        share("occupancy", main.occupancy, "theoretical, launch configuration"),
        Evidence("limiter", main.limiter or "", "", "launch configuration"),
        Evidence("registers", main.registers_per_thread or 0, "per thread", "trace"),
        Evidence("shared memory", main.shared_bytes or 0, "B per block", "trace"),
    ]
    if main.occupancy <= LOW_OCCUPANCY:
        limiter = (main.limiter or "").replace("_", " ")
        text = (
            f"{main.kernel} keeps at most {percent(main.occupancy)} of an SM's warps resident, "
            f"limited by {limiter}; tensor-core kernels are built that way and hide latency inside "
            "a block, so this alone is no fault."
        )
        findings.append(Finding("low_occupancy", text, "note", DERIVED, tuple(evidence)))
    achieved = main.achieved_occupancy
    if achieved is not None and achieved < FAR_BELOW * main.occupancy:
        text = (
            f"{main.kernel} had {percent(achieved)} of the warps active on average where "
            f"{percent(main.occupancy)} could be resident: blocks were missing or uneven."
        )
        counter = share("active warps", achieved, "ncu sm__warps_active.avg.pct_of_peak")
        findings.append(Finding("idle_warps", text, "minor", MEASURED, (counter, *evidence)))
    return findings


def readers(facts: Facts, kernel: KernelFigures) -> float | None:
    """Return how many blocks of a forward kernel read the same row of K and V, derived from its grid.
    Return None if the grid does not show this number, or if ncu counted too few bytes for it.
    """
    config = facts.config
    heads = config.batch * config.num_kv_heads
    if kernel.role != "attention" or not kernel.blocks or kernel.blocks % heads:
        return None
    if facts.num_sms and kernel.blocks % facts.num_sms == 0:
        return None  # a persistent kernel, whose blocks each compute several tiles
    splits = 1
    if kernel.family == "flash_splitkv" and kernel.grid is not None:
        splits = kernel.grid[1]
    elif any(launched.role == "combine" for launched in facts.kernels):
        return None
    most = config.seq_len_q * config.num_heads // config.num_kv_heads
    times = kernel.blocks / heads / splits
    counted = [size for size in (kernel.l1_bytes, kernel.l2_bytes) if size is not None]
    if not 1 <= times <= most or (
        counted and max(counted) < DISPROVED * _read_bytes(config, times)
    ):
        return None
    return times


def _read_bytes(config: Config, times: float) -> float:
    """Return how many bytes of K and V are read if `times` blocks read K and V of each head."""
    tensors = tensor_bytes(config)
    return times * (tensors.key + tensors.value) * _unmasked_part(config, times)


def kv_traffic(facts: Facts) -> list[Finding]:
    """Report how often K and V are read. The number is derived from the grid and assumes that every
    block reads all of its head's K and V.
    """
    findings = []
    config, l2 = facts.config, facts.l2_bytes
    for kernel in facts.fused:
        times = readers(facts, kernel)
        if times is None or times < SEVERAL_READERS:
            continue
        tensors = tensor_bytes(config)
        both = tensors.key + tensors.value  # excludes fully masked rows if causal
        moved = _read_bytes(config, times)
        per_byte = facts.figures.flops / moved
        rows = config.seq_len_q * config.num_heads / config.num_kv_heads / times
        alone = rows <= 1
        text = (
            f"{kernel.kernel} reads every row of K and V from {times:.0f} blocks, {size(moved)} in "
            f"all for {size(both)} of K and V; a block has {rows:.0f} query row(s) to use them for"
        )
        if kernel.family not in READS_ALL and kernel.l1_bytes is None and kernel.l2_bytes is None:
            text += UNCOUNTED
        fits = bool(l2) and both <= (l2 or 0)
        text += f", {per_byte:.2f} FLOPs per byte"
        text += f", and the repeats {'can' if fits else 'cannot all'} be served by the L2"
        evidence: tuple[Evidence, ...] = (
            Evidence("blocks per K/V head", times, "", f"grid of {kernel.kernel}"),
            Evidence("K and V traffic", round(moved), "B", "blocks x K and V of a head"),
            Evidence("K and V", both, "B", "shapes and dtype"),
            Evidence("intensity of it", round(per_byte, 3), "FLOP/B", "FLOPs / K and V traffic"),
            Evidence("L2", l2 or "unknown", "B", "device"),
        )
        if kernel.call_ns:
            rate = moved / kernel.call_ns
            evidence += (Evidence("its rate", round(rate, 1), "GB/s", "K and V traffic / time"),)
        severity = "major" if alone or not fits else "note"
        findings.append(Finding("kv_reread", f"{text}.", severity, DERIVED, evidence))
    return findings


def cache_traffic(facts: Facts) -> list[Finding]:
    """Compare the bytes that ncu counted in the L1 and the L2 with the compulsory bytes."""
    figures = facts.figures
    evidence, clauses, most = [], [], 0.0
    for name, counter, moved in (
        ("L1", L1_BYTES, None if figures.past_l1 else figures.l1_bytes),
        ("L2", L2_BYTES, figures.l2_bytes),
    ):
        if moved is None:
            continue
        most = max(most, moved)
        evidence.append(Evidence(f"{name} bytes", round(moved), "B", f"ncu {counter}"))
        clauses.append(f"{size(moved)} through the {name}")
    if not most:
        return []
    ratio, per_byte = most / figures.compulsory_bytes, figures.flops / most
    evidence += [
        Evidence("compulsory bytes", figures.compulsory_bytes, "B", "shapes and dtype"),
        Evidence("intensity of it", round(per_byte, 3), "FLOP/B", "FLOPs / the larger count"),
    ]
    text = (
        f"ncu counted {' and '.join(clauses)}: up to {ratio:.1f} times the compulsory "
        f"{size(figures.compulsory_bytes)}, {per_byte:.2f} FLOPs per byte."
    )
    severity = "major" if per_byte < LOW_INTENSITY else "note"
    return [Finding("cache_traffic", text, severity, MEASURED, tuple(evidence))]


def _unmasked_part(config: Config, times: float) -> float:
    """Return the average share of the unmasked rows of K and V that one of `times` blocks reads. If
    `causal` is set, a block stops at the last row to which its last query attends.
    """
    if not config.causal:
        return 1.0
    blocks = times * config.num_kv_heads / config.num_heads  # blocks of one query head
    tile = math.ceil(config.seq_len_q / max(1.0, blocks))
    ends = [min(end, config.seq_len_q) for end in range(tile, config.seq_len_q + tile, tile)]
    seen = min(config.seq_len_q, config.seq_len_kv)
    return sum(min(end, seen) for end in ends) / (len(ends) * seen)


def _memories(facts: Facts) -> list[tuple[str, str, int]]:
    """Return a short name, a name for use in a sentence, and the bytes of each on-chip memory. Return
    an empty list if the device is not known. The L1's size excludes the main kernel's shared memory.
    """
    device, main = facts.machine.device, facts.main
    if device is None:
        return []
    block = device.shared_bytes_per_block_optin or device.shared_bytes_per_block or 0
    taken = (main.blocks_per_sm or 1, main.shared_bytes or 0) if main else (1, 0)
    places = [
        ("shared", "one block's shared memory", block),
        ("L1", "what shared memory leaves of an SM's L1", l1_bytes(device, *taken) or 0),
        ("L2", "the L2", facts.l2_bytes or 0),
    ]
    return [(short, name, room) for short, name, room in places if room]


def kv_places(facts: Facts) -> tuple[str, ...] | None:
    """Return the memories that can contain K and V of one head, with their sizes. Return None if no
    memory size is known.
    """
    places = _memories(facts)
    one_head = facts.figures.kv_head_bytes
    held = (f"{short} ({room / KIB:,.0f} KiB)" for short, _, room in places if room >= one_head)
    return tuple(held) if places else None


def working_set(facts: Facts) -> list[Finding]:
    """Compare K and V of one head with shared memory and L1, and all inputs and output with the L2."""
    places, figures = _memories(facts), facts.figures
    if not places:
        return []
    clauses = []
    for short, name, room in places:
        have = figures.working_set_bytes if short == "L2" else figures.kv_head_bytes
        clauses.append(f"{'fit' if have <= room else 'do not fit'} in {name} ({size(room)})")
    head = f"K and V of one head ({size(figures.kv_head_bytes)})"
    text = f"{head} {' and '.join(clauses)}."
    if facts.l2_bytes and len(places) > 1:
        text = (
            f"{head} {' and '.join(clauses[:-1])}; "
            f"inputs and output together ({size(figures.working_set_bytes)}) {clauses[-1]}."
        )
    evidence = (
        Evidence("K and V of one head", figures.kv_head_bytes, "B", "shapes and dtype"),
        Evidence("inputs and output", figures.working_set_bytes, "B", "shapes and dtype"),
        *(Evidence(name, room, "B", "device limits") for _, name, room in places),
    )
    return [Finding("working_set", text, "note", DERIVED, evidence)]


def unused_shared(facts: Facts) -> list[Finding]:
    """Report shared memory that the main kernel leaves unused although K and V are read repeatedly."""
    main, device = facts.main, facts.machine.device
    if main is None or device is None or main.shared_bytes is None or not main.blocks_per_sm:
        return []
    times = readers(facts, main)
    if times is None or times < SEVERAL_READERS or not device.shared_bytes_per_sm:
        return []
    sms = device.num_sms
    resident = min(main.blocks_per_sm, math.ceil((main.blocks or 0) / sms))
    used = resident * main.shared_bytes / device.shared_bytes_per_sm
    if used >= UNUSED_SHARED:
        return []
    text = (
        f"{main.kernel} uses {size(main.shared_bytes)} of shared memory per block, {percent(used)} "
        f"of an SM's with {resident} block(s) on it, while {times:.0f} blocks read the same K and V."
    )
    evidence = (
        Evidence("shared memory", main.shared_bytes, "B per block", "trace"),
        Evidence("blocks per SM", resident, "", "grid, occupancy and SMs"),
        Evidence("shared memory per SM", device.shared_bytes_per_sm, "B", "device limits"),
    )
    return [Finding("unused_shared", text, "minor", DERIVED, evidence)]


GAP_MAJOR, GAP_MINOR = 0.40, 0.20  # minimum share of a call in which no kernel runs


def launch_gap(facts: Facts) -> list[Finding]:
    """Report how long the GPU waits for the CPU in an eager call: the time of the call minus the time
    of its graph replay. If there is no graph sample, use the time of the kernels instead of the
    replay. All of these times are measured with warm caches.
    """
    figures = facts.figures
    if not figures.eager_ns:
        return _gap_of_older_runs(facts)
    basis, busy = GRAPH, figures.graph_ns
    if not busy:
        basis, busy = KERNEL, figures.kernels_ns
    if not busy or 1 - busy / figures.eager_ns < GAP_MINOR:
        return []
    gap = 1 - busy / figures.eager_ns
    evidence = [
        us("eager time", figures.eager_ns, BASIS_SOURCE[EAGER]),
        us(f"{basis} time", busy, BASIS_SOURCE[basis]),
        Evidence("launches", figures.launches, "per call", "trace"),
    ]
    without = "replayed as a CUDA graph it takes" if basis == GRAPH else "its kernels take"
    text = (
        f"Of an eager call of {figures.eager_ns / 1e3:.1f} µs {percent(gap)} pass waiting for the "
        f"CPU: {without} {busy / 1e3:.1f} µs"
    )
    if figures.host_ns:
        evidence.append(us("host time", figures.host_ns, HOST_SOURCE))
        text += f", and the CPU needs {figures.host_ns / 1e3:.1f} µs to issue it"
    factor = figures.eager_ns / busy
    return [Finding("launch_gap", f"{text}.", _severity(gap), MEASURED, tuple(evidence), factor)]


HOST_SOURCE = f"{HOST} samples: the CPU's own time of an eager call"


def _severity(gap: float) -> str:
    return "major" if gap >= GAP_MAJOR else "minor"


def _gap_of_older_runs(facts: Facts) -> list[Finding]:
    """Return a lower bound of the gap from `event` samples, which older runs recorded. In these
    samples the flush hid a part of the launch path, and the caches were cold.
    """
    figures = facts.figures
    if figures.cold_ns or not figures.event_ns or not figures.kernels_ns:
        return []
    busy, evidence = _busy_ns(facts)
    gap = 1 - busy / figures.event_ns
    if gap < GAP_MINOR:
        return []
    evidence = [
        us("event time", figures.event_ns, BASIS_SOURCE[EVENT]),
        us("kernel time", figures.kernels_ns, BASIS_SOURCE[KERNEL]),
        *evidence,
        Evidence("launches", figures.launches, "per call", "trace"),
    ]
    text = (
        f"Of a call of {figures.event_ns / 1e3:.1f} µs at least {percent(gap)} pass without a "
        f"kernel running: its {figures.launches:.0f} launches take {busy / 1e3:.1f} µs even with "
        "cold caches"
    )
    factor = figures.event_ns / busy
    if figures.graph_ns:
        evidence.append(us("graph time", figures.graph_ns, BASIS_SOURCE[GRAPH]))
        text += f", and replayed as a CUDA graph the call takes {figures.graph_ns / 1e3:.1f} µs"
    return [Finding("launch_gap", f"{text}.", _severity(gap), MEASURED, tuple(evidence), factor)]


def _busy_ns(facts: Facts) -> tuple[float, list[Evidence]]:
    """Return an upper bound of the kernels' time with cold caches, and its evidence. The bound is the
    larger of two sums: ncu's time plus the time of copies, and the profiled time plus the time to
    refill the L2.
    """
    figures, peaks = facts.figures, facts.machine.peaks
    warm = figures.kernels_ns or 0.0
    busy, evidence = warm, []
    if peaks and peaks.bandwidth_bytes_per_s:
        refill = figures.compulsory_bytes / peaks.bandwidth_bytes_per_s * 1e9
        busy = warm + refill
        evidence = [us("refilling the L2", refill, f"compulsory bytes / bandwidth, {peaks.source}")]
    launched = [kernel for kernel in facts.kernels if kernel.blocks is not None]
    if launched and all(kernel.ncu_ns for kernel in launched):
        cold = sum((kernel.ncu_ns or 0) * kernel.launches_per_call for kernel in launched)
        rest = sum(kernel.call_ns or 0 for kernel in facts.kernels if kernel.blocks is None)
        if cold + rest > busy:
            busy, evidence = cold + rest, [us("cold kernel time", cold, "ncu gpu__time_duration")]
            if rest:
                evidence.append(us("copies and fills", rest, BASIS_SOURCE[KERNEL]))
    return busy, evidence


RULES: tuple[Rule, ...] = (
    *(intensity, achieved, above_ceiling, dram_traffic, launch_gap),
    *(blocks_and_waves, occupancy, kv_traffic, cache_traffic, working_set, unused_shared),
    *(score_traffic, full_precision, split_overhead, helpers),
    *COUNTER_RULES,
)
# Attention written in Python chooses its own dtypes, so rules that assume SDPA's dtypes are omitted.
OF_EAGER: tuple[Rule, ...] = (
    *(rule for rule in RULES if rule not in (score_traffic, full_precision)),
    eager_scores,
)
