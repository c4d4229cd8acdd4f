"""Findings from ncu's counters: pipes, coalescing, bank conflicts, hit rates, stalled warps.

A rule needs its counter (`capture --profiler torch,ncu --metrics …`) and returns nothing without
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from profharness.commands.analyze.figures import (
    MEASURED,
    Evidence,
    Facts,
    Finding,
    KernelFigures,
    Rule,
    percent,
    share,
)
from profharness.program.roles import FUSED_ROLES, GEMMS
from profharness.recording.profilers.ncu_metrics import (
    BANK_CONFLICTS,
    FMA_PIPE,
    ISSUE_ACTIVE,
    L1_HIT_RATE,
    L2_HIT_RATE,
    LOAD_SECTORS,
    STORE_SECTORS,
    TENSOR_INSTRUCTIONS,
    TENSOR_PIPE,
    warp_state,
)

_STALL_RULES = "Nsight Compute's rules CPIStall and IssueSlotUtilization"
_OWN = "profharness: what is less than that costs less than other things on the list"
THRESHOLDS: dict[str, tuple[float, str]] = {
    "tensor pipe": (0.6, "Nsight Compute's rule SOLBottleneck: below it latency limits"),
    "tensor cores": (
        0.01,
        "H200 runs: products without tensor cores stay below 0.5 %, those with them above 2 %",
    ),
    "issue slots": (0.8, _STALL_RULES),
    "stall": (0.3, _STALL_RULES),
    "sectors": (18, "32 threads of 16 bytes in 32-byte sectors, and two for a ragged start"),
    "scattered": (24, "half as many again as the widest access needs"),
    "narrow": (4, "32 threads of 4 bytes in 32-byte sectors"),
    "bank conflicts": (0.1, _OWN),
    "many bank conflicts": (0.5, "every second pass of shared memory is a repetition"),
    "kernel": (0.2, "profharness: the part of a call's time that makes a kernel worth it"),
}
"""The threshold from which each counter is reported, and the source of the threshold."""


_FEWER = "put other instructions between those of that unit, or need fewer of them"
WARP_STATE_WORDS: dict[str, tuple[str, str]] = {
    "long_scoreboard": (
        "for data from global or local memory (L1, L2 or DRAM)",
        "load earlier (a pipeline of several tiles with cp.async or TMA), keep in shared memory what "
        "is read again, or have more warps resident",
    ),
    "short_scoreboard": (
        "for shared memory or a special function such as exp",
        "read shared memory in wider words and without bank conflicts, or need fewer of them",
    ),
    "mio_throttle": ("for room in the queue of shared memory and special functions", _FEWER),
    "lg_throttle": (
        "for room in the queue of global memory",
        "make fewer and wider accesses, 16 bytes a thread",
    ),
    "tex_throttle": ("for room in the queue of texture memory", _FEWER),
    "math_pipe_throttle": (
        "for an arithmetic pipe that is busy",
        "this is what a kernel at its limit looks like; only fewer instructions help",
    ),
    "barrier": (
        "for other warps of the block at a barrier",
        "even out the work between barriers, or have smaller blocks and more of them on an SM; where "
        "warps load and others compute, those that are idle wait by design",
    ),
    "gmma": (
        "for the registers of asynchronous tensor-core products (wgmma)",
        "have two groups of warps take turns, so that one computes while the other prepares",
    ),
    "wait": (
        "a fixed time for the instruction before",
        "have more independent instructions in a warp, or more warps resident",
    ),
    "branch_resolving": ("for the target of a branch", "unroll loops, and branch less"),
    "no_instruction": (
        "for instructions to be fetched",
        "make the code of the loop smaller, or unroll it less",
    ),
    "imc_miss": ("for constants", "let all threads of a warp read the same constant"),
    "membar": ("for a memory barrier", "use fences of a smaller scope, and fewer"),
    "drain": ("for their stores, after the end", "write the results in wider words"),
    "sleeping": ("in a sleep of the code's own", "let them sleep less"),
    "dispatch_stall": ("for the dispatcher", "look at the pipes: one is busy"),
    "misc": ("for other reasons of the hardware", "nothing known helps"),
    "not_selected": (
        "for a scheduler that issues from another warp",
        "there are warps enough; fewer with more registers each would do as well",
    ),
}
"""What the warps of a state wait for, as NVIDIA's table of metrics describes it, and what helps."""


_TENSOR_SOURCE = f"ncu {TENSOR_PIPE}, on Ada its _v2"


def _over(name: str, value: float | None) -> bool:
    return value is not None and value >= THRESHOLDS[name][0]


def counted_kernels(facts: Facts) -> Iterator[KernelFigures]:
    """Yield the main kernel, then the other kernels that take a large share of the time."""
    if facts.main is not None:
        yield facts.main
    for kernel in facts.kernels:
        if kernel is not facts.main and _over("kernel", kernel.share):
            yield kernel


def tensor_pipe(facts: Facts) -> list[Finding]:
    """Report how busy the tensor cores are in a kernel that multiplies matrices."""
    findings = []
    for kernel in counted_kernels(facts):
        busy, count = kernel.counters.tensor_pipe, kernel.counters.tensor_instructions
        if kernel.role not in (*FUSED_ROLES, *GEMMS) or busy is None or _over("tensor pipe", busy):
            continue
        evidence = [share("tensor pipe", busy, _TENSOR_SOURCE)]
        if count is not None:
            evidence.append(
                Evidence("tensor instructions", count, "", f"ncu {TENSOR_INSTRUCTIONS}")
            )
        fma = kernel.counters.fma_pipe
        beside = ""
        if fma is not None:
            evidence.append(share("FMA pipe", fma, f"ncu {FMA_PIPE}"))
            beside = f"; the FMA pipe is at work in {percent(fma)}"
        if not _over("tensor cores", busy):
            text = (
                f"{kernel.kernel} multiplies without tensor cores: their pipe is at work in "
                f"{percent(busy)} of the cycles{beside}"
            )
            plain = facts.config.dtype == "fp32" and not facts.machine.tf32
            if plain:
                text += ", as fp32 products without TF32 do not"
            severity = "note" if plain else "major"
            findings.append(
                Finding("no_tensor_cores", f"{text}.", severity, MEASURED, tuple(evidence))
            )
            continue
        text = f"The tensor pipe is at work in {percent(busy)} of the cycles of {kernel.kernel}{beside}."
        findings.append(Finding("tensor_pipe", text, "note", MEASURED, tuple(evidence)))
    return findings


def coalescing(facts: Facts) -> list[Finding]:
    """Report sectors per request of a warp. Many sectors mean that the
    accesses are scattered. Few sectors mean that the accesses are narrow.
    """
    findings = []
    for kernel in counted_kernels(facts):
        for what, sectors, name in (
            ("load", kernel.counters.load_sectors, LOAD_SECTORS),
            ("store", kernel.counters.store_sectors, STORE_SECTORS),
        ):
            if sectors is None:
                continue
            evidence = (Evidence(f"sectors a {what}", round(sectors, 2), "", f"ncu {name}"),)
            if sectors > THRESHOLDS["sectors"][0]:
                text = (
                    f"A {what} of {kernel.kernel} asks for {sectors:.1f} sectors of 32 bytes, more "
                    "than the 16 that 32 threads with 16 bytes each need: its threads do not access "
                    "neighbouring addresses."
                )
                severity = "major" if _over("scattered", sectors) else "minor"
                findings.append(Finding("uncoalesced", text, severity, MEASURED, evidence))
            elif sectors < THRESHOLDS["narrow"][0]:
                text = (
                    f"A {what} of {kernel.kernel} asks for {sectors:.1f} sectors of 32 bytes: its "
                    "threads access fewer than 4 bytes each, or the same ones."
                )
                findings.append(Finding("narrow_access", text, "note", MEASURED, evidence))
    return findings


def bank_conflicts(facts: Facts) -> list[Finding]:
    """Report passes of shared memory caused by bank conflicts."""
    findings = []
    for kernel in counted_kernels(facts):
        part = kernel.counters.bank_conflicts
        if part is None or not _over("bank conflicts", part):
            continue
        text = f"{percent(part)} of the passes of {kernel.kernel} over shared memory are bank conflicts."
        evidence = (share("bank conflicts", part, f"ncu {BANK_CONFLICTS} / wavefronts"),)
        severity = "major" if _over("many bank conflicts", part) else "minor"
        findings.append(Finding("bank_conflicts", text, severity, MEASURED, evidence))
    return findings


def hit_rates(facts: Facts) -> list[Finding]:
    """Report hit rates of L1 and L2. ncu flushes both before each kernel, so few hits are expected
    from a kernel that reads its data once.
    """
    findings = []
    for kernel in counted_kernels(facts):
        rates = (
            ("L1", kernel.counters.l1_hit_rate, L1_HIT_RATE),
            ("L2", kernel.counters.l2_hit_rate, L2_HIT_RATE),
        )
        known = [(name, rate, metric) for name, rate, metric in rates if rate is not None]
        if not known:
            continue
        parts = " and ".join(f"the {name} {percent(rate)}" for name, rate, _ in known)
        text = (
            f"Of the sectors that {kernel.kernel} asks for, {parts} had, from cold caches: what is "
            "read once misses."
        )
        evidence = tuple(share(f"{name} hits", rate, f"ncu {m}") for name, rate, m in known)
        findings.append(Finding("hit_rates", text, "note", MEASURED, evidence))
    return findings


def stalls(facts: Facts) -> list[Finding]:
    """Report what most resident warps wait for, if the schedulers do not issue all the time."""
    findings = []
    for kernel in counted_kernels(facts):
        states = {
            name: part for name, part in kernel.counters.warp_states.items() if name != "selected"
        }
        issue = kernel.counters.issue_active
        if not states or _over("issue slots", issue):
            continue
        name, part = next(iter(states.items()))
        if not _over("stall", part):
            continue
        waits, change = WARP_STATE_WORDS[name]
        text = f"Warps of {kernel.kernel} spend {percent(part)} of their time waiting {waits}"
        if issue is not None:
            text += f"; the schedulers issue in {percent(issue)} of the cycles"
        evidence = [share(name, part, f"ncu {warp_state(name)} / all of them")]
        evidence += [share(other, of, "the same") for other, of in list(states.items())[1:3]]
        if issue is not None:
            evidence.append(share("issue slots", issue, f"ncu {ISSUE_ACTIVE}"))
        text = f"{text}. What helps: {change}."
        findings.append(Finding("stalls", text, "minor", MEASURED, tuple(evidence)))
    return findings


COUNTER_RULES: Sequence[Rule] = (
    tensor_pipe,
    coalescing,
    bank_conflicts,
    hit_rates,
    stalls,
)
