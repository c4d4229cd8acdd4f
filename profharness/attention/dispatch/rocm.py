"""Facts about PyTorch on AMD GPUs: architectures, AOTriton's versions, and the releases' builds.

PyTorch calls an AMD GPU `cuda`, and its ops keep their names. On ROCm, flash and efficient are
computed by AOTriton, a library of compiled Triton kernels, or by CK (Composable Kernel).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from profharness.devices import ARCHITECTURES
from profharness.errors import UsageError

Version = tuple[int, int, int]
Release = tuple[int, ...]

AOTRITON = "aotriton"
CK = "ck"
LIBRARIES = (AOTRITON, CK)
"""The values of torch.backends.cuda.preferred_rocm_fa_library, without `default`."""
EXPERIMENTAL_VARIABLE = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
PREFER_CK_VARIABLE = "TORCH_ROCM_FA_PREFER_CK"


class Kernels(NamedTuple):
    """The architectures that a version of AOTriton has kernels for."""

    architectures: frozenset[str]
    experimental: frozenset[str] = frozenset()
    """Architectures that PyTorch refuses unless EXPERIMENTAL_VARIABLE is 1.

    The list comes from AOTriton's isArchExperimentallySupported, which exists from 0.9 on.
    """


def _kernels(stable: str, experimental: str = "") -> Kernels:
    """Return the kernels for architectures that are written without `gfx`."""
    both = [[f"gfx{each}" for each in text.split()] for text in (stable, experimental)]
    return Kernels(frozenset(both[0] + both[1]), frozenset(both[1]))


# Source: the tables of architectures and isArchExperimentallySupported in util.cc, at the tag of
# each version. A version that is not listed counts as the newest one before it.
VERSIONS: dict[Version, Kernels] = {
    (0, 7, 0): _kernels("90a 942 1100 1101"),
    (0, 8, 0): _kernels("90a 942 1100 1101"),
    (0, 9, 0): _kernels("90a 942 1100 1101", "950 1201"),
    (0, 10, 0): _kernels("90a 942 950 1100 1201", "1101"),
    (0, 11, 0): _kernels("90a 942 950 1201", "1100 1101 1102 1150 1151 1200"),
    (0, 11, 1): _kernels("90a 942 950 1100 1201", "1101 1102 1103 1150 1151 1200"),
    (0, 11, 2): _kernels("90a 942 950 1100 1201", "1101 1102 1103 1150 1151 1152 1153 1200"),
    (0, 12, 0): _kernels("90a 942 950 1100 1151 1201", "1101 1102 1103 1150 1152 1153 1200"),
    (0, 12, 1): _kernels("90a 942 950 1100 1151 1201 1250", "1101 1102 1103 1150 1152 1153 1200"),
    (0, 13, 0): _kernels("90a 942 950 1100 1151 1201 1250", "1101 1102 1103 1150 1152 1153 1200"),
}

# The versions of AOTriton that PyTorch's own ROCm builds of a release may contain. There are
# several if the sources do not settle which one it is. The releases are those whose HIP rules are
# known. Sources: cmake/External/aotriton.cmake, the pull requests that changed it, AOTriton's table
# of compatible versions, and the packages of distributions. The wheels that AMD publishes are built
# from a fork, and can contain a later version.
RELEASES: dict[Release, tuple[Version, ...]] = {
    (2, 5, 0): ((0, 7, 0),),
    (2, 5, 1): ((0, 7, 0),),
    (2, 6, 0): ((0, 8, 0),),
    (2, 7, 0): ((0, 9, 2),),
    (2, 7, 1): ((0, 9, 2),),
    (2, 8, 0): ((0, 10, 0),),
    (2, 9, 0): ((0, 11, 0),),
    (2, 9, 1): ((0, 11, 0),),
    (2, 10, 0): ((0, 11, 1),),
    (2, 11, 0): ((0, 11, 2),),
    (2, 12, 0): ((0, 11, 2),),
    (2, 12, 1): ((0, 11, 2),),
    (2, 13, 0): ((0, 12, 0),),
    (2, 14, 0): ((0, 12, 1), (0, 13, 0)),
    (2, 14, 1): ((0, 12, 1), (0, 13, 0)),
}

# The first release in which preferred_rocm_fa_library exists, the first release whose builds
# certainly contain CK, and the architectures on which PyTorch accepts CK. From AOTriton 0.12 on,
# PyTorch excludes gfx90a, on which CK crashed.
PREFERS_CK: Release = (2, 7)
BUILDS_CK: Release = (2, 13)


def ck_architectures(release: Release) -> tuple[str, ...]:
    """Return the architectures on which PyTorch accepts CK as the preferred library."""
    if release >= BUILDS_CK:
        return ("gfx942", "gfx950")
    return ("gfx90a", "gfx942", "gfx950") if release >= (2, 9) else ("gfx90a", "gfx942")


class AmdGpu(NamedTuple):
    """An AMD GPU as `--gpu` names it."""

    name: str
    """The name in ARCHITECTURES, or the architecture."""
    architecture: str
    """The architecture, such as `gfx942`."""

    @property
    def capability(self) -> tuple[int, int]:
        return capability_of(self.architecture)


def find_amd_gpu(text: str) -> AmdGpu | None:
    """Find an AMD GPU by its name or its architecture, such as `AMD Instinct MI300X` or `gfx942`.
    Return None if the text names none.
    """
    plain = text.strip().lower()
    if match := re.fullmatch(r"gfx([0-9]{1,2}[0-9][0-9a-f])(?:[:-].*)?", plain):
        return AmdGpu(f"gfx{match[1]}", f"gfx{match[1]}")
    # such as `AMD Instinct MI300X VF`, whose last word marks a virtual function
    match = re.fullmatch(r"(?:amd )?(?:instinct )?(mi\d{3}[ax]?)(?: [\w ./-]*)?", plain)
    names = {name.lower(): name for name in ARCHITECTURES}
    if match is None or match[1] not in names:
        return None
    name = names[match[1]]
    return AmdGpu(name, ARCHITECTURES[name])


def capability_of(architecture: str) -> tuple[int, int]:
    """Return the compute capability that PyTorch reports: (9, 4) for gfx942, (11, 0) for gfx1100.

    The last digit of the architecture is the stepping.
    """
    digits = architecture.removeprefix("gfx")
    return int(digits[:-2]), int(digits[-2], 16)


def kernels_of(version: Version) -> Kernels:
    """Return the kernels of a version of AOTriton."""
    known = [each for each in VERSIONS if each <= version]
    return VERSIONS[max(known, default=min(VERSIONS))]


def version_text(version: Version) -> str:
    """Format (0, 9, 2) as `0.9.2b`, and (0, 10, 0) as `0.10b`, like the names of the releases."""
    major, minor, patch = version
    return f"{major}.{minor}{f'.{patch}' if patch else ''}b"


def parse_aotriton(text: str) -> Version:
    """Parse `0.9.2b`, `0.9.2` or `0.10`. Raise UsageError for other text."""
    match = re.fullmatch(r"(\d)\.(\d{1,3})(?:\.(\d{1,3}))?b?", text.strip().lower(), re.ASCII)
    if not match:
        raise UsageError(f"invalid AOTriton version {text!r}; write, for example, 0.11.2b")
    return int(match[1]), int(match[2]), int(match[3] or 0)
