"""Rules about launch configurations: blocks, waves, occupancy, K and V traffic, shared memory."""

from __future__ import annotations

import math

from profharness.answers.analyze.figures import (
    KIB,
    L1_BYTES,
    L2_BYTES,
    Facts,
    Rule,
    percent,
    share,
    size,
)
from profharness.answers.analyze.model import DERIVED, MEASURED, Evidence, Finding, KernelFigures
from profharness.config import Config
from profharness.costs import tensor_bytes

TAIL_MINOR, TAIL_MAJOR = 0.10, 0.25  # part of the SM time that the last wave leaves idle
MANY_WAVES = 8
LOW_OCCUPANCY = 0.25
FAR_BELOW = 0.6  # achieved over theoretical occupancy
UNUSED_SHARED = 0.25
SEVERAL_READERS = 2
DISPROVED = 0.5  # counted bytes over those that the grid says, below which the grid says nothing
LOW_INTENSITY = 1.0  # FLOPs per byte that a kernel reads
# Families whose blocks are known to read all of a head's K and V. Any other kernel may share out
# head_dim or the keys over its blocks, which the grid does not show.
READS_ALL = ("flash", "flash_splitkv", "efficient", "cudnn")
UNCOUNTED = (
    " (if every block reads a whole head; `capture --profiler torch,ncu --metrics "
    f"{L1_BYTES},{L2_BYTES}` counts it)"
)
CACHES = (("L1", L1_BYTES, "l1_bytes"), ("L2", L2_BYTES, "l2_bytes"))
# Unified L1 and shared memory of one SM in KiB, by compute capability (CUDA C++ Programming Guide,
# "Technical Specifications per Compute Capability").
L1_KIB = {(7, 0): 128, (7, 5): 96, (8, 0): 192, (8, 6): 128, (8, 7): 192, (8, 9): 128}
L1_KIB |= {(9, 0): 256, (10, 0): 256, (10, 3): 256, (12, 0): 128, (12, 1): 128}


def blocks_and_waves(facts: Facts) -> list[Finding]:
    """Whether the main kernel's grid fills the device, and what its last wave leaves idle."""
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
    """Theoretical occupancy with its limiter, and how far the measured one stays below it."""
    main, found = facts.main, []
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
        found.append(Finding("low_occupancy", text, "note", DERIVED, tuple(evidence)))
    achieved = main.achieved_occupancy
    if achieved is not None and achieved < FAR_BELOW * main.occupancy:
        text = (
            f"{main.kernel} had {percent(achieved)} of the warps active on average where "
            f"{percent(main.occupancy)} could be resident: blocks were missing or uneven."
        )
        counter = share("active warps", achieved, "ncu sm__warps_active.avg.pct_of_peak")
        found.append(Finding("idle_warps", text, "minor", MEASURED, (counter, *evidence)))
    return found


def readers(facts: Facts, kernel: KernelFigures) -> float | None:
    """How many blocks read the same row of K and V in a forward kernel, from its grid.

    None where the grid does not tell (persistent kernels, splits that cannot be seen), or where ncu
    counted so few bytes in the caches that its blocks must share out head_dim or the keys.
    """
    config = facts.config
    heads = config.batch * config.num_kv_heads
    if kernel.role != "attention" or not kernel.blocks or kernel.blocks % heads:
        return None
    if facts.num_sms and kernel.blocks % facts.num_sms == 0:
        return None  # as many blocks as SMs: persistent, each takes several tiles
    splits = 1
    if kernel.family == "flash_splitkv" and kernel.grid is not None:
        splits = kernel.grid[1]
    elif any(each.role == "combine" for each in facts.kernels):
        return None
    most = config.seq_len_q * config.num_heads // config.num_kv_heads
    found = kernel.blocks / heads / splits
    counted = [each for each in (kernel.l1_bytes, kernel.l2_bytes) if each is not None]
    if not 1 <= found <= most or (
        counted and max(counted) < DISPROVED * _read_bytes(config, found)
    ):
        return None
    return found


def _read_bytes(config: Config, times: float) -> float:
    """Bytes of K and V that are read if `times` blocks read those of each head."""
    tensors = tensor_bytes(config)
    return times * (tensors.key + tensors.value) * _seen_part(config, times)


def kv_traffic(facts: Facts) -> list[Finding]:
    """How often K and V are read, from the grid: every block reads all of its head's K and V."""
    found = []
    config, l2 = facts.config, facts.l2_bytes
    for kernel in facts.fused:
        times = readers(facts, kernel)
        if times is None or times < SEVERAL_READERS:
            continue
        tensors = tensor_bytes(config)
        both = tensors.key + tensors.value  # with causal, of the rows that are seen
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
        found.append(Finding("kv_reread", f"{text}.", severity, DERIVED, evidence))
    return found


def cache_traffic(facts: Facts) -> list[Finding]:
    """Bytes that ncu counted in L1 and L2, where it was asked for them, against compulsory bytes."""
    figures = facts.figures
    evidence, clauses, most = [], [], 0.0
    launched = [kernel for kernel in facts.kernels if kernel.blocks is not None]
    for name, counter, attribute in CACHES:
        if not launched or any(getattr(kernel, attribute) is None for kernel in launched):
            continue
        moved = sum((getattr(k, attribute) or 0) * k.launches_per_call for k in facts.kernels)
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


def _seen_part(config: Config, times: float) -> float:
    """The part of the seen rows of K and V that a block reads, on average over `times` blocks.

    With `causal` a block stops at the last row that its last query sees.
    """
    if not config.causal:
        return 1.0
    blocks = times * config.num_kv_heads / config.num_heads  # of one query head
    tile = math.ceil(config.seq_len_q / max(1.0, blocks))
    ends = [min(end, config.seq_len_q) for end in range(tile, config.seq_len_q + tile, tile)]
    seen = min(config.seq_len_q, config.seq_len_kv)
    return sum(min(end, seen) for end in ends) / (len(ends) * seen)


def _places(facts: Facts) -> list[tuple[str, str, int]]:
    """The memories on the chip: short name, name in a sentence, bytes. Empty for no known device."""
    device = facts.machine.device
    if device is None:
        return []
    block = device.shared_bytes_per_block_optin or device.shared_bytes_per_block
    l1 = L1_KIB.get((device.compute_major, device.compute_minor), 0) * KIB
    places = [
        ("shared", "one block's shared memory", block),
        ("L1", "one SM's L1", l1),
        ("L2", "the L2", facts.l2_bytes),
    ]
    return [(short, name, room) for short, name, room in places if room]


def kv_places(facts: Facts) -> tuple[str, ...] | None:
    """The memories that hold K and V of one head, None where none is known."""
    places = _places(facts)
    one_head = facts.figures.kv_head_bytes
    return tuple(short for short, _, room in places if room >= one_head) if places else None


def working_set(facts: Facts) -> list[Finding]:
    """K and V of one head against shared memory and L1, all inputs and output against the L2."""
    places, figures = _places(facts), facts.figures
    if not places:
        return []
    clauses = []
    for short, name, room in places:
        have = figures.working_set_bytes if short == "L2" else figures.kv_head_bytes
        clauses.append(f"{'fit' if have <= room else 'do not fit'} in {name}")
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
    """Shared memory that the main attention kernel leaves unused while K and V are read again."""
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


RULES: tuple[Rule, ...] = (
    *(blocks_and_waves, occupancy, kv_traffic, cache_traffic),
    *(working_set, unused_shared),
)
