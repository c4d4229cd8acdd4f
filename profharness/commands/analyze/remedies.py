"""The bottleneck of a cell in one word, and its remedies. Both follow from findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from profharness.attention.config import SDP_BACKENDS, Config, pytorch_chooses
from profharness.commands.analyze.figures import DERIVED, MEASURED, Facts, Finding, Remedy, percent
from profharness.program.roles import GEMMS

NEAR_PEAK = 0.6  # minimum share of a peak for the resource to be the bottleneck
HALF = 0.5
# minimum share of the kernel time for the steps between products to be the bottleneck
BESIDE_PRODUCTS = 0.4

Findings = Mapping[str, Finding]
Bottleneck = tuple[str, Finding]  # the word for the bottleneck, and the finding `bottleneck`
Text = str | Callable[[Config, str], str]


def bottleneck(facts: Facts, findings: Findings) -> Bottleneck | None:
    """Return the bottleneck, or None if no figure determines it."""
    return next((named for judge in _CANDIDATES if (named := judge(facts, findings))), None)


def _is_math(backend: str) -> bool:
    """Return whether a backend's unfused kernels are those of PyTorch's math backend."""
    return backend == "math" or pytorch_chooses(backend)


def _named(word: str, text: str, finding: Finding) -> Bottleneck:
    return word, Finding("bottleneck", text, "major", finding.grade, finding.evidence)


def _major(
    facts: Facts,
    findings: Findings,
    code: str,
    word: str,
    cause: str,
    holds: Callable[[Facts], bool] = lambda _: True,
) -> Bottleneck | None:
    """Return a major finding as the bottleneck, if the figures support it."""
    finding = findings.get(code)
    if finding is None or finding.severity != "major" or not holds(facts):
        return None
    return _named(word, f"Bottleneck: {cause}. {finding.sentence}", finding)


def _at_peak(facts: Facts, findings: Findings) -> Bottleneck | None:
    figures = facts.figures
    rate, memory = figures.flops_share or 0, figures.bandwidth_share or 0
    traffic = findings.get("dram_traffic")
    if traffic is not None and facts.dram_share and facts.dram_share >= NEAR_PEAK:
        text = f"Bottleneck: memory. DRAM runs at {percent(facts.dram_share)} of its peak."
        return _named("memory", text, traffic)
    achieved = findings.get("achieved")
    if achieved is None or "bandwidth_above_peak" in findings or "rate_above_peak" in findings:
        return None
    if memory >= NEAR_PEAK and memory >= rate:
        text = f"Bottleneck: memory. Compulsory bytes alone take {percent(memory)} of its peak."
        return _named("memory", text, achieved)
    if rate >= NEAR_PEAK:
        text = (
            f"Bottleneck: compute. The products run at {percent(rate)} of the {figures.rate} peak."
        )
        return _named("compute", text, achieved)
    return None


def _scores_take_time(facts: Facts) -> bool:
    outside = 1 - facts.share_of(*GEMMS)
    return facts.figures.kernels_ns is not None and outside >= BESIDE_PRODUCTS


def _latency(facts: Facts, findings: Findings) -> Bottleneck | None:
    """Return latency as the bottleneck if no ceiling is near and the grid is large enough."""
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
    return _named("latency", f"{text}.", replace(achieved, evidence=tuple(dict.fromkeys(evidence))))


# These functions are tried in order. The first bottleneck that one of them returns is used.
_CANDIDATES: tuple[Callable[[Facts, Findings], Bottleneck | None], ...] = (
    partial(_major, code="launch_gap", word="launch", cause="launching"),
    _at_peak,
    partial(
        _major,
        code="input_copies",
        word="input copies",
        cause="copies of the inputs",
        holds=_scores_take_time,
    ),
    partial(
        _major,
        code="score_traffic",
        word="score traffic",
        cause="score traffic",
        holds=_scores_take_time,
    ),
    partial(_major, code="few_blocks", word="few blocks", cause="too few blocks"),
    partial(
        _major,
        code="split_overhead",
        word="combine",
        cause="combining",
        holds=lambda facts: facts.share_of("combine") >= HALF,
    ),
    partial(_major, code="kv_reread", word="K and V traffic", cause="K and V traffic"),
    _latency,
)


def _split(config: Config, _: str) -> str:
    if config.seq_len_q * 4 <= config.seq_len_kv:
        return (
            "Split over the keys (flash's split-KV and cuDNN do so for short queries), or batch "
            "more sequences into one call."
        )
    return "Batch more sequences or heads into one call, or use a kernel with smaller query tiles."


EAGER_REMEDY = (
    "Call torch.nn.functional.scaled_dot_product_attention (transformers: "
    "attn_implementation='sdpa'), so that a fused backend takes the call."
)
# Codes of findings -> remedy. A remedy for several findings is listed once with all of them.
REMEDIES: tuple[tuple[tuple[str, ...], Text], ...] = (
    (
        ("launch_gap",),
        lambda config, _: (
            "Take the launch path out of the call: capture it into a CUDA graph, or compile the "
            "model with mode='reduce-overhead'"
            + ("; autograd's own work per node is part of the gap." if config.bwd else ".")
        ),
    ),
    (
        ("score_traffic", "input_copies", "fp32_products"),
        lambda _, backend: (
            "Let a fused backend take the call; `profharness explain` says what stands in its way."
            if _is_math(backend)
            else EAGER_REMEDY
            if backend == "eager"
            else "Compute softmax online, tile by tile, so that scores never leave the chip."
        ),
    ),
    (
        ("fp32_products",),
        lambda config, backend: (
            "If it must be math: torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True) "
            "computes in the inputs' dtype, at the price of accuracy."
            if _is_math(backend)
            else f"Hand {config.dtype} to the products; tensor cores add them up in fp32."
        ),
    ),
    (("few_blocks",), _split),
    (
        ("tail",),
        "Change batch, heads or query tiles so that the blocks fill whole waves, or use a "
        "persistent kernel.",
    ),
    (
        ("split_overhead",),
        "Use a kernel that does not split here, or fewer splits; longer "
        "queries or a larger batch fill the device without splitting.",
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
        "Give a block more query rows, so that a tile of K and V in shared memory serves all of "
        "them.",
    ),
    (
        ("no_tensor_cores",),
        "Compute the products on tensor cores (mma or wgmma in CUDA, tl.dot in Triton).",
    ),
    (
        ("uncoalesced",),
        "Let neighbouring threads of a warp access neighbouring addresses, 16 bytes each.",
    ),
    (
        ("bank_conflicts",),
        "Pad or swizzle the tiles in shared memory, so that the threads of a warp meet different "
        "banks.",
    ),
    (("idle_warps",), "Even out the work of the blocks, or give the device more of them."),
)

BESIDE = {"idle_warps": "few_blocks"}
"""A finding -> the finding whose remedy applies to it too: warps are idle if blocks are missing."""
OF_AN_AUTHOR = ("no_tensor_cores", "uncoalesced", "bank_conflicts")
"""Findings whose remedy needs a change of the kernel's source, so not for PyTorch's kernels."""


def remedies(config: Config, backend: str, findings: Findings) -> tuple[Remedy, ...]:
    """Return remedies for findings above a note: the largest known gain first, then major findings."""
    told = {code for code, finding in findings.items() if finding.severity != "note"}
    helpful = []
    for codes, text in REMEDIES:
        mine = [code for code in codes if code in told]
        if not mine or mine[0] != codes[0] or BESIDE.get(mine[0]) in told:
            continue
        if mine[0] in OF_AN_AUTHOR and (backend in SDP_BACKENDS or pytorch_chooses(backend)):
            continue
        factor = max((f for code in mine if (f := findings[code].factor) is not None), default=None)
        said = text if isinstance(text, str) else text(config, backend)
        helpful.append(Remedy(said, tuple(mine), factor, findings[mine[0]].grade))
    faster = findings.get("faster_backend")
    if faster is not None:
        name = str(faster.evidence[0].value)
        how = f": with torch.nn.attention.sdpa_kernel(SDPBackend.{SDP_BACKENDS.get(name)})"
        said = f"Use {name}{how if name in SDP_BACKENDS else ''}."
        helpful.append(Remedy(said, ("faster_backend",), faster.factor, MEASURED))
    return tuple(sorted(helpful, key=lambda remedy: _rank(remedy, findings)))


def _rank(remedy: Remedy, findings: Findings) -> tuple[bool, float, bool, bool]:
    major = any(findings[code].severity == "major" for code in remedy.findings)
    return (remedy.factor is None, -(remedy.factor or 0), not major, remedy.grade == DERIVED)
