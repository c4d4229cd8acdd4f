"""What helps against each finding, ranked by how much it could gain."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from profharness.analysis.model import DERIVED, MEASURED, Finding, Remedy
from profharness.config import Config

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
