"""Where a config is explained for: the GPU, PyTorch release and cuDNN that a user names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from profharness.dispatch.machine import (
    GPUS,
    RELEASES,
    Machine,
    find_gpu,
    machine_for,
    parse_cudnn,
    parse_release,
    parse_releases,
    release_text,
)
from profharness.errors import UsageError

CPU = "cpu"


@dataclass(frozen=True)
class Place:
    """A machine that the rules are asked about. gpu is its name, None for the CPU; pinned: cuDNN's
    version is the one that the release's PyPI wheel brings, not one that was given.
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
    torch: str | None, gpu: str | None, cudnn: str | None = None, cuda: str | None = None
) -> list[Place]:
    """The places that a user names, none where PyTorch itself is meant. Raises UsageError for a
    cuDNN or CUDA without a place to be in.
    """
    if torch is not None or gpu is not None:
        return find_places(torch, gpu, cudnn, cuda)
    for name, value in (("cudnn", cudnn), ("cuda", cuda)):
        if value is not None:
            raise UsageError(
                f"--{name} is for an answer by rule; add --torch or --gpu. "
                "Live, PyTorch's own version counts"
            )
    return []


def find_places(
    torch: str | None, gpu: str | None, cudnn: str | None = None, cuda: str | None = None
) -> list[Place]:
    """One place per release meant, oldest first.

    torch: `2.8`, `2.9.1`, `2.5..2.15`, `2.8,2.10`; None means the installed release. gpu: a name, a
    capability such as sm90, or `cpu`; None means this machine's GPU, as NVML tells. Raises
    UsageError for what is not known, with what is.
    """
    releases = parse_releases(torch) if torch is not None else [_installed()]
    for release in releases:
        if release[:2] not in {known[:2] for known in RELEASES}:
            known = " ".join(dict.fromkeys(release_text(each[:2]) for each in RELEASES))
            raise UsageError(
                f"PyTorch {release_text(release)}: no rules of this release; known are {known}"
            )
    if cuda is not None and not _is_version(cuda):
        raise UsageError(f"CUDA version {cuda!r} is not a version; write 12.8")
    if (gpu or "").lower() == CPU:
        if cudnn is not None or cuda is not None:
            raise UsageError("--cudnn and --cuda say nothing about a CPU; leave them out")
        return [Place(Machine(torch=release), "cpu", None) for release in releases]
    name = gpu or local_gpu()
    if name is None:
        names = ", ".join(each.name for each in GPUS)
        raise UsageError(
            f"this machine has no NVIDIA GPU: add --gpu NAME; known are {names}; "
            "a capability such as sm90 works too, and `cpu`"
        )
    return [_place(name, release, cudnn, cuda) for release in releases]


def local_gpu() -> str | None:
    """The first GPU's name as NVML tells it; None without one."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return None
    try:
        if not pynvml.nvmlDeviceGetCount():
            return None
        name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
        return name.decode() if isinstance(name, bytes) else str(name)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _place(name: str, release: tuple[int, ...], cudnn: str | None, cuda: str | None) -> Place:
    version = None if cudnn is None else parse_cudnn(cudnn)
    machine = machine_for(name, release, version)
    if cuda is not None and cuda != machine.cuda:
        machine = replace(machine, cuda=cuda, cudnn_compiled=None)
    return Place(machine, "cuda", find_gpu(name).name, pinned=cudnn is None)


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
