"""The GPUs that are known by name, and how a name is read. Only who names a GPU needs them."""

from __future__ import annotations

import re
from typing import NamedTuple

from profharness.errors import UsageError


class Gpu(NamedTuple):
    """A GPU by name; sm_count (streaming multiprocessors) is None where no data sheet says it."""

    name: str
    capability: tuple[int, int]
    sm_count: int | None = None


GPUS = (
    Gpu("V100", (7, 0), 80),
    Gpu("T4", (7, 5), 40),
    Gpu("A100", (8, 0), 108),
    Gpu("A30", (8, 0), 56),
    Gpu("A10", (8, 6), 72),
    Gpu("A40", (8, 6), 84),
    Gpu("RTX A6000", (8, 6), 84),
    Gpu("RTX 3090", (8, 6), 82),
    Gpu("L4", (8, 9), 58),
    Gpu("L40", (8, 9), 142),
    Gpu("L40S", (8, 9), 142),
    Gpu("RTX 4090", (8, 9), 128),
    Gpu("RTX 4000 Ada", (8, 9), 48),
    Gpu("RTX 6000 Ada", (8, 9), 142),
    Gpu("H100", (9, 0), 132),
    Gpu("H100 PCIe", (9, 0), 114),
    Gpu("H200", (9, 0), 132),
    Gpu("GH200", (9, 0), 132),
    Gpu("B200", (10, 0), 148),
    Gpu("GB200", (10, 0)),
    Gpu("B300", (10, 3)),
    Gpu("GB300", (10, 3)),
    Gpu("RTX 5090", (12, 0), 170),
    Gpu("RTX PRO 6000 Blackwell", (12, 0), 188),
    Gpu("DGX Spark", (12, 1), 48),
)
ALIASES = {"gb10": "dgxspark", "rtxpro6000": "rtxpro6000blackwell", "a6000": "rtxa6000"}

# Vendor words and board variants that do not change capability or (as listed) SM count.
_NOISE = re.compile(
    r"\b(nvidia|geforce|tesla|quadro|graphics|generation|tensor core|gpu|sxm\d?|nvl\d*|hbm\d\w*|"
    r"ac|workstation|server|edition|max-q|\d+\s?gb)\b"
)


def find_gpu(text: str) -> Gpu:
    """A GPU by its name, case, spaces and vendor words left aside, or by capability: `sm90`, `9.0`.
    Raises UsageError with near matches.
    """
    capability = _capability(text)
    if capability:
        return Gpu(f"sm{capability[0]}{capability[1]}", capability)
    known = {_key(gpu.name): gpu for gpu in GPUS}
    plain = _NOISE.sub(" ", text.lower())
    for words in (text, plain, plain.replace("pcie", "")):
        short = ALIASES.get(_key(words), _key(words))
        if short in known:
            return known[short]
    import difflib  # only the error needs it

    near = difflib.get_close_matches(short, known, n=4, cutoff=0.5)
    near += [name for name in known if short and short in name and name not in near][:4]
    names = ", ".join(known[name].name for name in (near or known))
    raise UsageError(
        f"GPU {text!r} is not known; {'near matches' if near else 'known are'}: {names}; "
        "a capability such as sm90 or 9.0 works too"
    )


def _key(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _capability(text: str) -> tuple[int, int] | None:
    match = re.fullmatch(
        r"(?:sm_?(\d{1,2})(\d)[af]?|(?:sm_?)?(\d{1,2})\.(\d))", text.strip().lower()
    )
    if not match:
        return None
    major, minor = match[1] or match[3], match[2] or match[4]
    return int(major), int(minor)
