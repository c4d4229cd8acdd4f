"""Derive the bottleneck and the remedies of a cell from its findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from profharness.attention.config import SDP_BACKENDS, Config, pytorch_chooses
from profharness.commands._answers import LAUNCH_REMEDY
from profharness.commands.analyze.figures import (
    DERIVED,
    MEASURED,
    CellAnalysis,
    Figures,
    Finding,
    Remedy,
)
from profharness.commands.analyze.rules import COPIES, HELPERS_MAJOR, dram_share, may_be_persistent
from profharness.errors import percent
from profharness.program.roles import GEMMS

NEAR_PEAK = 0.6  # A resource is the bottleneck if its share of the peak is at least this value.
HALF = 0.5
# Unfused ops can be the bottleneck if at least this share of the kernel time is spent outside of
# matrix products.
BESIDE_PRODUCTS = 0.4

Findings = Mapping[str, Finding]  # by code
Bottleneck = tuple[str, Finding]  # a short name such as `memory`, and the finding `bottleneck`
Text = str | Callable[[Config, str], str]

# Maps the code of a finding to the short name of the bottleneck and to the cause in its sentence.
# The finding is the bottleneck if it is major.
CAUSES = {
    "launch_gap": ("launch", "launch overhead"),
    "input_copies": ("input copies", "copies of the inputs"),
    # The bytes are a lower bound, so they do not show that memory traffic is the limit.
    "score_traffic": ("unfused ops", "unfused ops"),
    "few_blocks": ("few blocks", "too few blocks"),
    "split_overhead": ("combine", "combining partial results"),
    "kv_reread": ("K and V traffic", "K and V traffic"),
}


def bottleneck(cell: CellAnalysis, figures: Figures, findings: Findings) -> Bottleneck | None:
    """Return the bottleneck of a cell, or None if the findings do not show it."""
    causes = [*CAUSES][1:]
    # On a CPU, the times of short ops consist mostly of overhead, also of the profiler.
    timed = figures.kernels_ns is not None and cell.main is not None
    if not timed or 1 - cell.share_of(*GEMMS) < BESIDE_PRODUCTS:
        causes.remove("score_traffic")
    if not timed or cell.share_of(*COPIES) < HELPERS_MAJOR:
        causes.remove("input_copies")
    if cell.share_of("combine") < HALF:
        causes.remove("split_overhead")
    return (
        _major(findings, ["launch_gap"])
        or _at_peak(cell, figures, findings)
        or _major(findings, causes)
        or _latency(cell, figures, findings)
    )


def _named(word: str, text: str, finding: Finding) -> Bottleneck:
    return word, Finding("bottleneck", text, "major", finding.grade, finding.evidence)


def _major(findings: Findings, codes: Sequence[str]) -> Bottleneck | None:
    """Return the bottleneck that follows from the first major finding among these codes, if any."""
    for code in codes:
        if code in findings and findings[code].severity == "major":
            word, cause = CAUSES[code]
            return _named(word, f"Bottleneck: {cause}. {findings[code].sentence}", findings[code])
    return None


def _at_peak(cell: CellAnalysis, figures: Figures, findings: Findings) -> Bottleneck | None:
    rate, memory = figures.flops_share or 0, figures.bandwidth_share or 0
    traffic, achieved = findings.get("dram_traffic"), findings.get("achieved")
    part = dram_share(cell, figures) or 0
    if traffic is not None and part >= NEAR_PEAK:
        text = f"Bottleneck: memory bandwidth. DRAM runs at {percent(part, 1)} of its peak."
        return _named("memory", text, traffic)
    if achieved is None or "bandwidth_above_peak" in findings or "rate_above_peak" in findings:
        return None
    if memory >= NEAR_PEAK and memory >= rate:
        text = (
            "Bottleneck: memory bandwidth. Moving the compulsory bytes uses "
            f"{percent(memory, 1)} of the peak bandwidth."
        )
        return _named("memory", text, achieved)
    if rate >= NEAR_PEAK:
        peak = f"{percent(rate, 1)} of the {figures.rate} peak"
        return _named(
            "compute", f"Bottleneck: compute. The matrix products run at {peak}.", achieved
        )
    return None


def _latency(cell: CellAnalysis, figures: Figures, findings: Findings) -> Bottleneck | None:
    """Return latency as the bottleneck if neither FLOP/s nor bandwidth is near its peak."""
    rate, memory, achieved = figures.flops_share, figures.bandwidth_share, findings.get("achieved")
    if achieved is None or rate is None or memory is None or cell.main is None:
        return None
    if max(rate, memory) >= NEAR_PEAK:
        return None
    text = (
        f"Bottleneck: latency. Neither the {figures.rate} rate ({percent(rate, 1)} of the peak) "
        f"nor the bandwidth ({percent(memory, 1)}) is near its peak"
    )
    one_wave = cell.main.waves is not None and cell.main.waves <= 1
    if one_wave and not may_be_persistent(cell, cell.main):
        text += ". There is only one wave of blocks, so no other blocks hide its start and end"
    evidence = achieved.evidence
    for code in ("one_wave", "tail", "few_blocks", "low_occupancy", "idle_warps"):
        if code in findings:
            evidence += findings[code].evidence
    return _named("latency", f"{text}.", replace(achieved, evidence=tuple(dict.fromkeys(evidence))))


def _of_pytorch(backend: str) -> bool:
    """Return whether the kernels of this backend come from PyTorch."""
    return backend in SDP_BACKENDS or pytorch_chooses(backend)


def _is_math(backend: str) -> bool:
    """Return whether unfused kernels of this backend come from PyTorch's math backend."""
    return backend == "math" or pytorch_chooses(backend)


def _fused(_: Config, backend: str) -> str:
    if backend == "math":
        return "Use a fused backend; `profharness explain` shows which ones support the config."
    if pytorch_chooses(backend):
        return "Use a fused backend; `profharness explain` shows why none was used."
    if backend == "eager":
        return (
            "Call torch.nn.functional.scaled_dot_product_attention (in transformers: "
            "attn_implementation='sdpa') to get a fused backend."
        )
    return "Compute the softmax online, tile by tile, so that the scores never leave the chip."


def _products(config: Config, backend: str) -> str:
    if _is_math(backend):
        return (
            "If you need the math backend, "
            "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True) makes it compute in the "
            "dtype of the inputs, which is less accurate."
        )
    return (
        f"Pass the operands of the matrix products as {config.dtype}; tensor cores accumulate in "
        "fp32."
    )


def _more_blocks(config: Config, backend: str) -> str:
    if config.seq_len_q * 4 > config.seq_len_kv:
        return (
            "Batch more sequences or heads into one call, or use a kernel with smaller query tiles."
        )
    if _of_pytorch(backend):  # these kernels decide themselves whether to split the keys
        return "Batch more sequences into one call, so that each takes less time."
    return (
        "Split the work over the keys, as flash's split-KV does for short queries, or batch more "
        "sequences into one call."
    )


# Maps codes of findings to a remedy. The remedy is given if the cell has the finding with the first
# code, and it refers to all of these findings that the cell has.
#
# `split_overhead` has no remedy: without the split, the main kernel has fewer blocks and takes longer,
# and the measurements do not show by how much.
REMEDIES: Mapping[tuple[str, ...], Text] = {
    ("launch_gap",): lambda config, _: (
        f"Capture the call {LAUNCH_REMEDY}"
        + ("; part of the gap is autograd's own work." if config.bwd else ".")
    ),
    ("score_traffic", "input_copies", "fp32_products"): _fused,
    ("fp32_products",): _products,
    ("few_blocks",): _more_blocks,
    ("tail",): (
        "Change batch, heads or the query tile so that the blocks fill whole waves, or use a "
        "persistent kernel."
    ),
    ("copies",): lambda config, _: (
        (
            f"Pad head_dim {config.head_dim} to a multiple of 8 once, outside the call, and "
            "keep the inputs contiguous."
        )
        if config.head_dim % 8 or config.value_dim % 8
        else "Pass inputs in the layout that the kernel expects, so that no copy is needed."
    ),
    ("kv_reread", "cache_traffic", "unused_shared"): (
        "Give each block more query rows, so that these rows share each tile of K and V in shared memory."
    ),
    ("no_tensor_cores",): "Compute the products on tensor cores (mma or wgmma in CUDA, tl.dot in "
    "Triton).",
    ("uncoalesced",): "Let neighbouring threads of a warp access neighbouring addresses, 16 bytes "
    "each.",
    ("bank_conflicts",): (
        "Pad or swizzle the tiles in shared memory, so that the threads of a warp use "
        "different banks."
    ),
    ("idle_warps",): "Distribute the work evenly among the blocks, or launch more blocks.",
}

BESIDE = {"idle_warps": "few_blocks"}
"""Maps a finding to its cause.

If the cause was found too, the remedy for the finding is left out, because the remedy for the cause
is enough. For example, warps are idle if there are too few blocks.
"""
OF_AN_AUTHOR = ("no_tensor_cores", "uncoalesced", "bank_conflicts")
"""Findings whose remedy changes the source of the kernel.

PyTorch's own kernels get no such remedy.
"""


def remedies(cell: CellAnalysis, findings: Findings) -> tuple[Remedy, ...]:
    """Return remedies for all findings of severity major or minor.

    A faster backend comes first, because its gain was measured. Remedies with an upper bound of the
    gain follow, the largest at the top. Of the others, remedies for major findings come first.
    """
    relevant = {code for code, finding in findings.items() if finding.severity != "note"}
    config, backend = cell.config, cell.backend
    of_pytorch = _of_pytorch(backend)
    helpful = []
    for codes, text in REMEDIES.items():
        mine = tuple(code for code in codes if code in relevant)
        if codes[0] not in mine or BESIDE.get(codes[0]) in relevant:
            continue
        if of_pytorch and codes[0] in OF_AN_AUTHOR:
            continue
        if of_pytorch and codes[0] == "score_traffic" and "faster_backend" in findings:
            continue  # the faster backend is named below
        factor = max((f for code in mine if (f := findings[code].factor) is not None), default=None)
        advice = text if isinstance(text, str) else text(config, backend)
        if codes[0] == "few_blocks" and cell.share_of("combine"):
            advice = "Batch more sequences into one call (the keys are already split)."
        helpful.append(Remedy(advice, mine, factor, findings[codes[0]].grade))
    if faster := findings.get("faster_backend"):
        name = str(faster.evidence[0].value)
        how = f", with torch.nn.attention.sdpa_kernel(SDPBackend.{SDP_BACKENDS.get(name)})"
        advice = f"Use {name}{how if name in SDP_BACKENDS else ''}."
        helpful.append(Remedy(advice, ("faster_backend",), faster.factor, MEASURED, faster.basis))

    def rank(remedy: Remedy) -> tuple[bool, bool, float, bool, bool]:
        major = any(findings[code].severity == "major" for code in remedy.findings)
        gain = remedy.factor is None, -(remedy.factor or 0)
        return (not remedy.measured, *gain, not major, remedy.grade == DERIVED)

    return tuple(sorted(helpful, key=rank))
