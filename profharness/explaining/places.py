"""Where a config is explained for: the GPU, PyTorch release and cuDNN that a user names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from profharness import nvml
from profharness.dispatch.gpus import GPUS, find_gpu
from profharness.dispatch.machine import (
    Machine,
    build_of,
    machine_for,
    parse_release,
    parse_releases,
    release_text,
)
from profharness.errors import UsageError

CPU = "cpu"


@dataclass(frozen=True)
class Place:
    """A machine that the rules are asked about. gpu is its name, None for the CPU; pinned: cuDNN's
    version is the one that the release's build for this CUDA brings, not one that was given.
    """

    machine: Machine
    device: str
    gpu: str | None
    pinned: bool = True

    @property
    def environment(self) -> dict[str, Any]:
        """Flat keys, named as a run's environment names them; None where it is not known."""
        machine = self.machine
        told: dict[str, Any] = {
            "torch": release_text(machine.torch),
            "torch_cuda": machine.cuda,
            "device_type": self.device,
        }
        if self.device == "cuda":
            told |= {"gpu": self.gpu, "capability": machine.sm, "cudnn": machine.cudnn}
        return told

    @property
    def text(self) -> str:
        """`torch 2.8.0, RTX A6000 (sm 8.6), cuDNN 91002, CUDA 12.8`."""
        machine = self.machine
        parts = [f"torch {release_text(machine.torch)}"]
        if self.device == "cpu":
            return f"{parts[0]}, CPU"
        parts.append(f"{self.gpu} (sm {machine.sm})")
        parts.append(f"cuDNN {machine.cudnn or 'unknown'}")
        return ", ".join([*parts, f"CUDA {machine.cuda or 'unknown'}"])


def named_places(
    torch: str | None,
    gpu: str | None,
    cudnn: str | None = None,
    cuda: str | None = None,
    cudnn_compiled: str | None = None,
) -> list[Place]:
    """The places that a user names, none where PyTorch itself is meant. Raises UsageError for a
    cuDNN or CUDA without a place to be in.
    """
    if torch is not None or gpu is not None:
        return find_places(torch, gpu, cudnn, cuda, cudnn_compiled)
    for name, value in (("cudnn", cudnn), ("cuda", cuda), ("cudnn-compiled", cudnn_compiled)):
        if value is not None:
            raise UsageError(
                f"--{name} is for an answer by rule; add --torch or --gpu. "
                "Live, PyTorch's own version counts"
            )
    return []


def find_places(
    torch: str | None,
    gpu: str | None,
    cudnn: str | None = None,
    cuda: str | None = None,
    cudnn_compiled: str | None = None,
) -> list[Place]:
    """One place per release meant, oldest first.

    torch: `2.8`, `2.9.1`, `2.5..2.15`, `2.8,2.10`; None means the installed release. A single
    release need not be one that the rules know. gpu: a name, a capability such as sm90, or `cpu`;
    None means this machine's GPU, as NVML tells. cudnn is the version at run time, cudnn_compiled
    the one that PyTorch was built with. Raises UsageError for what is no version, and for a GPU
    that is not known.
    """
    releases = parse_releases(torch) if torch is not None else [_installed()]
    if cuda is not None and not _is_version(cuda):
        raise UsageError(f"CUDA version {cuda!r} is not a version; write 12.8")
    if (gpu or "").lower() == CPU:
        if (cudnn, cuda, cudnn_compiled) != (None, None, None):
            raise UsageError(
                "--cudnn, --cuda and --cudnn-compiled say nothing about a CPU; leave them out"
            )
        return [Place(Machine(torch=release), "cpu", None) for release in releases]
    name = gpu or nvml.gpu_name()
    if name is None:
        names = ", ".join(each.name for each in GPUS)
        raise UsageError(
            f"this machine has no NVIDIA GPU: add --gpu NAME; known are {names}; "
            "a capability such as sm90 works too, and `cpu`"
        )
    found = find_gpu(name).name
    machines = [machine_for(name, each, cudnn, cuda, cudnn_compiled) for each in releases]
    return [
        Place(each, "cuda", found, cudnn is None and build_of(each.torch, cuda) is not None)
        for each in machines
    ]


def _installed() -> tuple[int, ...]:
    """The installed torch's release, read from its package's metadata: torch is not imported."""
    from importlib import metadata

    try:
        return parse_release(metadata.version("torch"))
    except metadata.PackageNotFoundError:
        raise UsageError(
            "--gpu without --torch means the installed torch, and none is installed; "
            "add --torch, for example --torch 2.11"
        ) from None


def _is_version(text: str) -> bool:
    parts = text.split(".")
    return len(parts) in (2, 3) and all(part.isdecimal() for part in parts)
