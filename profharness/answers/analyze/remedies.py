"""One word for what holds a cell back, taken only from findings that are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from profharness.answers.analyze.figures import Facts, percent
from profharness.answers.analyze.model import DERIVED, MEASURED, Evidence, Finding, Remedy
from profharness.answers.analyze.rules_rates import GEMMS
from profharness.config import Config

NEAR_PEAK = 0.6  # of a peak from which that resource is what limits
HALF = 0.5
BESIDE_PRODUCTS = 0.4  # of the kernel time, from which the steps between products are what limits

Answer = tuple[str, str, str, tuple[Evidence, ...]]  # word, sentence, grade, evidence


def bottleneck(facts: Facts, findings: Findings) -> tuple[str, Finding] | None:
    """The word and the finding `bottleneck`; None where no figure decides."""
    for judge in _JUDGES:
        answer = judge(facts, findings)
        if answer is not None:
            word, sentence, grade, evidence = answer
            return word, Finding("bottleneck", sentence, "major", grade, evidence)
    return None


def _launch(_: Facts, findings: Findings) -> Answer | None:
    found = findings.get("launch_gap")
    if found is None or found.severity != "major":
        return None
    return (
        "launch",
        f"Bottleneck: launching. {found.sentence}",
        MEASURED,
        found.evidence,
    )


def _at_peak(facts: Facts, findings: Findings) -> Answer | None:
    figures = facts.figures
    rate, memory = figures.flops_share or 0, figures.bandwidth_share or 0
    traffic = findings.get("dram_traffic")
    counted = [e for e in (traffic.evidence if traffic else ()) if e.name == "DRAM share"]
    if counted and float(counted[0].value) >= NEAR_PEAK and traffic is not None:
        text = f"Bottleneck: memory. DRAM runs at {percent(float(counted[0].value))} of its peak."
        return "memory", text, MEASURED, traffic.evidence
    achieved = findings.get("achieved")
    if achieved is None or "bandwidth_above_peak" in findings or "rate_above_peak" in findings:
        return None
    if memory >= NEAR_PEAK and memory >= rate:
        text = f"Bottleneck: memory. Compulsory bytes alone take {percent(memory)} of its peak."
        return "memory", text, MEASURED, achieved.evidence
    if rate >= NEAR_PEAK:
        text = (
            f"Bottleneck: compute. The products run at {percent(rate)} of the {figures.rate} peak."
        )
        return "compute", text, MEASURED, achieved.evidence
    return None


def _scores(facts: Facts, findings: Findings) -> Answer | None:
    found = findings.get("score_traffic")
    if found is None or found.severity != "major" or facts.figures.kernels_ns is None:
        return None
    if 1 - facts.share_of(*GEMMS) < BESIDE_PRODUCTS:
        return None
    return (
        "score traffic",
        f"Bottleneck: score traffic. {found.sentence}",
        found.grade,
        found.evidence,
    )


def _few_blocks(_: Facts, findings: Findings) -> Answer | None:
    found = findings.get("few_blocks")
    if found is None or found.severity != "major":
        return None
    return "few blocks", f"Bottleneck: too few blocks. {found.sentence}", DERIVED, found.evidence


def _combine(facts: Facts, findings: Findings) -> Answer | None:
    found = findings.get("split_overhead")
    if found is None or facts.share_of("combine") < HALF:
        return None
    return "combine", f"Bottleneck: combining. {found.sentence}", MEASURED, found.evidence


def _rereads(_: Facts, findings: Findings) -> Answer | None:
    found = findings.get("kv_reread")
    if found is None or found.severity != "major":
        return None
    return (
        "K and V traffic",
        f"Bottleneck: K and V traffic. {found.sentence}",
        DERIVED,
        found.evidence,
    )


def _latency(facts: Facts, findings: Findings) -> Answer | None:
    """Neither ceiling is near and the grid is no reason: waiting, shown by what it is not."""
    figures, achieved = facts.figures, findings.get("achieved")
    if achieved is None or figures.flops_share is None or figures.bandwidth_share is None:
        return None
    if max(figures.flops_share, figures.bandwidth_share) >= NEAR_PEAK or facts.main is None:
        return None
    text = (
        f"Bottleneck: latency. Neither the {figures.rate} rate ({percent(figures.flops_share)}) nor "
        f"the bandwidth ({percent(figures.bandwidth_share)}) is near its peak"
    )
    evidence = achieved.evidence
    for code in ("one_wave", "tail", "few_blocks", "low_occupancy", "idle_warps"):
        if code in findings:
            evidence += findings[code].evidence
    if facts.main.waves is not None and facts.main.waves <= 1:
        text += ", and a single wave of blocks leaves nothing to overlap its start and end with"
    return "latency", f"{text}.", MEASURED, tuple(dict.fromkeys(evidence))


_JUDGES: tuple[Callable[[Facts, Findings], Answer | None], ...] = (
    _launch,
    _at_peak,
    _scores,
    _few_blocks,
    _combine,
    _rereads,
    _latency,
)


Findings = Mapping[str, Finding]
Words = Callable[[Config, str], str]


def _split(config: Config, _: str) -> str:
    if config.seq_len_q * 4 <= config.seq_len_kv:
        return (
            "Split over the keys (flash's split-KV and cuDNN do so for short queries), or batch "
            "more sequences into one call."
        )
    return "Batch more sequences or heads into one call, or use a kernel with smaller query tiles."


# code of a finding -> what helps. A remedy for several findings stands once, with all of them.
REMEDIES: tuple[tuple[tuple[str, ...], Words], ...] = (
    (
        ("launch_gap",),
        lambda config, _: (
            "Take the launch path out of the call: capture it into a CUDA graph, or compile the "
            "model with mode='reduce-overhead'"
            + (
                "." if not config.bwd else "; autograd's own work per node is part of the gap."
            )
        ),
    ),
    (
        ("score_traffic", "fp32_products"),
        lambda _, backend: (
            "Let a fused backend take the call; `profharness explain` says what stands in its way."
            if backend in ("math", "auto")
            else "Compute softmax online, tile by tile, so that scores never leave the chip."
        ),
    ),
    (
        ("fp32_products",),
        lambda _, __: (
            "If it must be math: torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True) "
            "computes in the inputs' dtype, at the price of accuracy."
        ),
    ),
    (("few_blocks",), _split),
    (
        ("tail",),
        lambda _, __: (
            "Change batch, heads or query tiles so that the blocks fill whole waves, or use a "
            "persistent kernel."
        ),
    ),
    (
        ("split_overhead",),
        lambda _, __: (
            "Use a kernel that does not split here, or fewer splits; longer "
            "queries or a larger batch fill the device without splitting."
        ),
    ),
    (
        ("copies",),
        lambda config, _: (
            f"Pad head_dim {config.head_dim} to a multiple of 8 once, outside of the call, and keep "
            "inputs contiguous."
            if config.head_dim % 8 or config.value_dim % 8
            else "Hand over inputs in the layout that the kernel wants, so that no copy is needed."
        ),
    ),
    (
        ("kv_reread", "cache_traffic", "unused_shared"),
        lambda _, __: (
            "Give a block more query rows, so that a tile of K and V in shared memory serves all of "
            "them."
        ),
    ),
    (
        ("idle_warps",),
        lambda _, __: "Even out the work of the blocks, or give the device more of them.",
    ),
)  # fmt: skip


def remedies(config: Config, backend: str, findings: Findings) -> tuple[Remedy, ...]:
    """Remedies for findings that are more than a note, the largest possible gain first; those
    without a known gain follow, major findings before minor ones.
    """
    found = []
    for codes, words in REMEDIES:
        mine = [code for code in codes if _counts(findings.get(code))]
        if not mine or mine[0] != codes[0]:
            continue
        factors = [f for code in mine if (f := findings[code].factor) is not None]
        factor = max(factors, default=None)
        grade = findings[mine[0]].grade
        found.append(Remedy(words(config, backend), tuple(mine), factor, grade))
    faster = findings.get("faster_backend")
    if faster is not None:
        name = str(faster.evidence[0].value)
        text = f"Use {name}: with torch.nn.attention.sdpa_kernel(SDPBackend.{_enum(name)})."
        if name not in _ENUM:
            text = f"Use {name}."
        found.append(Remedy(text, ("faster_backend",), faster.factor, MEASURED))
    return tuple(sorted(found, key=lambda each: _rank(each, findings)))


_ENUM = {
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "math": "MATH",
}


def _enum(name: str) -> str:
    return _ENUM.get(name, "")


def _counts(finding: Finding | None) -> bool:
    return finding is not None and finding.severity != "note"


def _rank(remedy: Remedy, findings: Findings) -> tuple[bool, float, bool, bool]:
    major = any(findings[code].severity == "major" for code in remedy.findings)
    return (remedy.factor is None, -(remedy.factor or 0), not major, remedy.grade == DERIVED)
