"""Describe the environment of a measurement without importing torch.

The description consists of the NVIDIA driver, the GPUs that NVML lists, the installed extras, and
some environment variables.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CPU_INFO = "/proc/cpuinfo"
AMD_MODULE = Path("/sys/module/amdgpu")
AOTRITON = re.compile(r"libaotriton_v2\.so\.(\d+(?:\.\d+)*)")
CHANGED = ", changed"  # appended to a commit hash if the file differs from the committed version


@dataclass(frozen=True)
class Extra:
    """An extra of pyproject.toml, which is a group of optional packages."""

    modules: dict[str, str]
    """Maps the name of each module to the name of the package that provides the module."""
    purpose: str


EXTRAS = {
    "kernels": Extra(
        {"cuda.bindings": "cuda-bindings", "cuda.core": "cuda-core", "triton": "triton"},
        "backends written in CUDA or Triton",
    ),
    "mcp": Extra({"mcp": "mcp"}, "`profharness mcp`"),
    "ncu": Extra({"ncu_report": "ncu-report"}, "Nsight Compute reports"),
    "report": Extra(
        {"altair": "altair", "vl_convert": "vl-convert-python"},
        "charts in HTML and Markdown reports",
    ),
    "cluster": Extra(
        {"distributed": "distributed", "cryptography": "cryptography"},
        "lanes on several hosts, connected by Dask",
    ),
    "web": Extra({"datasette": "datasette"}, "`profharness serve`"),
}


def missing_packages(extra: str) -> list[str]:
    """Return the packages of an extra that are not installed. Do not import any package."""
    return [package for name, package in EXTRAS[extra].modules.items() if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # the parent package is missing or cannot be imported
        return False


def installed_versions(extra: str) -> str:
    """Return the installed packages of an extra with their versions.

    An example of the result is `altair 6.3.0, vl-convert-python 1.9.0`.
    """
    from importlib import metadata  # imported here, because it slowly imports the email package

    versions = []
    for package in EXTRAS[extra].modules.values():
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    return ", ".join(versions)


@contextlib.contextmanager
def _opened_nvml() -> Iterator[Any]:
    """Yield the initialized pynvml module, or None if the package or the driver is missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def hashed_key(text: str) -> str:
    """Return a hash that replaces a host name or a GPU's UUID in records."""
    return blake2b(
        text.lower().encode(errors="replace"), digest_size=6, person=b"profharness"
    ).hexdigest()


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver, or None if there is no driver."""
    with _opened_nvml() as nvml:
        return None if nvml is None else _text(nvml.nvmlSystemGetDriverVersion())


def amd_driver_version(module: Path = AMD_MODULE) -> str | None:
    """Return the version of the amdgpu driver, or None if there is none.

    Return `in the kernel` for the driver in the Linux kernel, which has no separate version.
    """
    with contextlib.suppress(OSError):
        return (module / "version").read_text().strip()[:100] or None
    return "in the kernel" if module.is_dir() else None


def rocm_libraries(folder: Path) -> dict[str, Any]:
    """Return the versions of the libraries in the folder of a ROCm build of torch.

    `aotriton` is the version of AOTriton, or None if there is no such library. `roctracer` lists the
    copies of tracing libraries, which torch uses instead of the libraries of the system.
    """
    names = sorted(path.name for path in folder.glob("*.so*")) if folder.is_dir() else []
    versions = [match[1] for name in names if (match := AOTRITON.fullmatch(name))]
    tracers = [name for name in names if name.startswith(("libroctracer", "librocprofiler"))]
    return {"aotriton": max(versions, key=len, default=None), "roctracer": tracers}


def operating_system() -> dict[str, str]:
    """Return the name and release of the operating system, and the version of its kernel.

    Keep only the numbers of the kernel version, because the rest may identify a host or a company,
    as in `6.8.0-1057-aws`.
    """
    system = {"os": f"{platform.system()} {platform.mac_ver()[0]}".strip()}
    with contextlib.suppress(OSError):
        release = platform.freedesktop_os_release()
        named = " ".join(release[key] for key in ("NAME", "VERSION_ID") if release.get(key))
        system = {"os": named or system["os"]}
    numbers = re.match(r"\d+(?:\.\d+){1,2}", platform.release())
    return system | ({"os_kernel": numbers[0]} if numbers else {})


def processor() -> dict[str, str | int]:
    """Return the name of the processor, the number of logical CPUs and, if known, of cores."""
    name, socket, cores = "", "", set[tuple[str, str]]()
    with contextlib.suppress(OSError), open(CPU_INFO, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            key, _, value = (part.strip() for part in line.partition(":"))
            name = name or (value if key == "model name" else "")
            socket = value if key == "physical id" else socket
            if key == "core id":
                cores.add((socket, value))
    found: dict[str, str | int] = {"cpu": name or platform.processor() or platform.machine()}
    found |= {"cpu_cores": len(cores)} if cores else {}
    return found | ({"cpu_count": count} if (count := os.cpu_count()) else {})


VISIBLE = "CUDA_VISIBLE_DEVICES"
MIG = "MIG-"  # prefix of a MIG instance's UUID


@dataclass(frozen=True)
class VisibleGpu:
    """A GPU or MIG instance that CUDA exposes to this process."""

    uuid: str
    name: str
    memory_bytes: int
    bus: str
    """PCI address in the format of sysfs."""

    @property
    def key(self) -> str:
        """Hash of the UUID, which replaces the UUID in records."""
        return hashed_key(self.uuid)


def visible_gpus() -> tuple[VisibleGpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES lists, in the same order.

    If the variable is not set, return all GPUs in the order of their PCI addresses. Replace a GPU
    that has MIG instances with these instances.
    """
    with _opened_nvml() as nvml:
        if nvml is None:
            return ()
        gpus: list[list[VisibleGpu]] = []
        with contextlib.suppress(nvml.NVMLError):
            gpus = [[] for _ in range(nvml.nvmlDeviceGetCount())]
        for index in range(len(gpus)):
            # if a GPU does not respond, omit it, but keep the indices of the other GPUs
            with contextlib.suppress(nvml.NVMLError):
                gpus[index] = _instances(nvml, nvml.nvmlDeviceGetHandleByIndex(index))
        return _chosen(gpus)


def _instances(nvml: Any, handle: Any) -> list[VisibleGpu]:
    """Return a list that contains a GPU, followed by its MIG instances."""
    parts = [handle]
    with contextlib.suppress(Exception):  # the GPU or the driver does not support MIG
        if nvml.nvmlDeviceGetMigMode(handle)[0]:
            for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
                with contextlib.suppress(nvml.NVMLError):  # there is no instance with this index
                    parts.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
    bus = ""
    with contextlib.suppress(Exception):
        # the PCI domain has four digits in sysfs and eight digits in NVML
        bus = _text(nvml.nvmlDeviceGetPciInfo(handle).busId).lower()[-12:]
    return [
        VisibleGpu(
            _text(nvml.nvmlDeviceGetUUID(part)),
            _text(nvml.nvmlDeviceGetName(part)),
            int(nvml.nvmlDeviceGetMemoryInfo(part).total),
            bus,
        )
        for part in parts
    ]


def _chosen(gpus: Sequence[Sequence[VisibleGpu]]) -> tuple[VisibleGpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES selects by index or by a prefix of the UUID.

    As in CUDA, ignore the first entry that does not match exactly one GPU and all entries after it.
    """
    # if a GPU is divided into MIG instances, programs can use only the instances
    whole = [gpu[1:] or gpu for gpu in gpus]
    names = os.environ.get(VISIBLE)
    if names is None:
        return tuple(each for gpu in whole for each in gpu)
    chosen: list[VisibleGpu] = []
    for name in (name.strip() for name in names.split(",")):
        if name.isdigit():
            fitting = list(whole[int(name)][:1]) if int(name) < len(whole) else []
        else:
            every = [each for gpu in gpus for each in gpu] if name else []
            fitting = [each for each in every if each.uuid.startswith(name)]
        if len(fitting) != 1:
            break
        chosen += fitting
    return tuple(chosen)


def gpu_handle(nvml: Any, uuid: str) -> Any:
    """Return NVML's handle of the GPU with the given UUID.

    For the UUID of a MIG instance, return the handle of the GPU that contains the instance.
    Raise NVMLError if the GPU is not found.
    """
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid.encode())
    if uuid.startswith(MIG):
        return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    return handle


def gpu_present() -> bool:
    """Return whether this process can use an NVIDIA GPU."""
    return bool(visible_gpus())


def gpu_name() -> str | None:
    """Return the name of the first GPU that this process can use, or None if there is no GPU."""
    return next((gpu.name for gpu in visible_gpus()), None)


def no_gpu_text(remedy: str) -> str:
    """Return an error text for a command that needs a GPU. `remedy` suggests a command."""
    return f"{no_gpu_cause()}; {remedy}"


def no_gpu_cause() -> str:
    """Return a clause on why there is no GPU to use."""
    return "PyTorch cannot use the GPU" if gpu_present() else "this machine has no GPU"


def _text(answer: str | bytes) -> str:
    return answer.decode() if isinstance(answer, bytes) else answer


# Environment variables that are recorded because they change dispatch or speed.
# CUDA_VISIBLE_DEVICES is not recorded, because `gpu_key` identifies the GPU.
RELEVANT_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "DISABLE_ADDMM_CUDA_LT",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_CUDNN_SDPA_AVOID_RECOMPILE",
    "TORCH_CUDNN_SDPA_DEPRIORITIZED",
    "TORCH_CUDNN_SDPA_ENABLED",
    "TORCH_CUDNN_SDPA_NESTED_TENSOR_ENABLED",
    "TORCH_CUDNN_SDPA_PREFERRED",
)
