"""The machine that a prediction is for: a PyTorch release, a GPU's compute capability, cuDNN."""

from __future__ import annotations

import re
from dataclasses import dataclass

from profharness.errors import UsageError

Release = tuple[int, ...]


@dataclass(frozen=True)
class Wheel:
    """What the PyPI CUDA wheel of a release brings. cuDNN versions are written as
    cudnnGetVersion() returns them, 9.19.0 as 91900; compiled is None where it was not read.
    """

    cuda: str
    cudnn: int
    cudnn_compiled: int | None = None


# Only releases whose binary was read. Another one is unknown, never guessed from its neighbours.
RELEASES: dict[Release, Wheel] = {
    (2, 5, 0): Wheel("12.4", 90100),
    (2, 5, 1): Wheel("12.4", 90100),
    (2, 6, 0): Wheel("12.4", 90100),
    (2, 7, 1): Wheel("12.6", 90501),
    (2, 8, 0): Wheel("12.8", 91002),
    (2, 9, 1): Wheel("12.8", 91002, 90800),
    (2, 10, 0): Wheel("12.8", 91002, 91002),
    (2, 11, 0): Wheel("13.0", 91900, 91900),
    (2, 12, 1): Wheel("13.0", 92000, 92000),
    (2, 13, 0): Wheel("13.0", 92000, 92000),
    (2, 14, 1): Wheel("13.0", 92400, 92400),
    (2, 15, 0): Wheel("13.2", 92600, 92600),
}


@dataclass(frozen=True)
class Gpu:
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


@dataclass(frozen=True)
class Machine:
    """What dispatch asks of the machine. cudnn is the runtime version as an integer (9.19.0 is
    91900), None where unknown; cudnn_compiled the one PyTorch was built with. cudnn_preferred: None
    for the default, False where TORCH_CUDNN_SDPA_DEPRIORITIZED=1 (2.10 and newer) or
    TORCH_CUDNN_SDPA_PREFERRED=0 (2.9) is set. cudnn_nested: TORCH_CUDNN_SDPA_NESTED_TENSOR_ENABLED.
    """

    torch: Release
    capability: tuple[int, int] = (0, 0)
    cudnn: int | None = None
    cuda: str | None = None
    cudnn_compiled: int | None = None
    cudnn_preferred: bool | None = None
    cudnn_nested: bool = False

    @property
    def known(self) -> bool:
        """Whether the rules of this release were verified."""
        return self.torch in RELEASES

    @property
    def major(self) -> int:
        """Major number of the compute capability."""
        return self.capability[0]

    @property
    def sm(self) -> str:
        """The capability as PyTorch's messages print it: `9.0`."""
        return f"{self.capability[0]}.{self.capability[1]}"

    @property
    def cuda_major(self) -> int | None:
        """Major number of the CUDA version that PyTorch was built with."""
        return int(self.cuda.split(".")[0]) if self.cuda else None


def machine_for(gpu: str, release: str | Release, cudnn: int | str | None = None) -> Machine:
    """The machine with that GPU and the PyPI CUDA wheel of that release; cudnn replaces the wheel's
    version. Raises UsageError for an unknown GPU; an unknown release gives a machine not `known`.
    """
    number = parse_release(release) if isinstance(release, str) else release
    wheel = RELEASES.get(number)
    own = wheel.cudnn if wheel else None
    return Machine(
        torch=number,
        capability=find_gpu(gpu).capability,
        cudnn=own if cudnn is None else parse_cudnn(cudnn),
        cuda=wheel.cuda if wheel else None,
        cudnn_compiled=wheel.cudnn_compiled if wheel else None,
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


def parse_cudnn(value: int | str) -> int:
    """`9.19.0`, `9.19.0.56`, `91900` or 91900 as 91900. Raises UsageError for anything else."""
    match = re.fullmatch(r"(\d+)\.(\d+)(?:\.(\d+))?(?:\.\d+)?", str(value).strip())
    if match:
        return int(match[1]) * 10_000 + int(match[2]) * 100 + int(match[3] or 0)
    if re.fullmatch(r"\d{5,6}", str(value).strip()):
        return int(value)
    raise UsageError(f"cuDNN version {value!r} is not a version; write 9.19.0 or 91900")


def parse_release(text: str) -> Release:
    """`2.8` as the newest known patch of it, `2.9.1` or `2.11.0+cu130` as it stands. A release that
    is not in the table comes back as written (with patch 0); `Machine.known` says so. Raises
    UsageError when the text is no version.
    """
    match = re.fullmatch(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:\+[\w.]+)?", text.strip())
    if not match:
        raise UsageError(f"PyTorch release {text!r} is not a version; write 2.8 or 2.9.1")
    if match[3] is not None:
        return (int(match[1]), int(match[2]), int(match[3]))
    minor = (int(match[1]), int(match[2]))
    return max((release for release in RELEASES if release[:2] == minor), default=(*minor, 0))


def parse_releases(text: str) -> list[Release]:
    """`2.5..2.15` (every known release from 2.5.0 to the newest 2.15), `2.8,2.10`, `2.9.1` or a mix,
    oldest first. Raises UsageError for an empty range or an end that is not in the table.
    """
    found: set[Release] = set()
    for part in text.split(","):
        first, dots, last = part.partition("..")
        low, high = parse_release(first), parse_release(last if dots else first)
        if dots:
            low = low if first.count(".") > 1 else (*low[:2], 0)
            if low[:2] < min(RELEASES)[:2] or high not in RELEASES or low > high:
                raise UsageError(f"release range {part.strip()!r} is not inside {_span()}")
            found.update(release for release in RELEASES if low <= release <= high)
        else:
            found.add(low)
    return sorted(found)


def release_text(release: Release) -> str:
    """`(2, 9, 1)` as `2.9.1`."""
    return ".".join(map(str, release))


def _span() -> str:
    return f"{release_text(min(RELEASES))} .. {release_text(max(RELEASES))}"


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
