"""`profharness doctor`: check the installation, and print a remedy for each problem."""

from __future__ import annotations

import os
import platform
import re
import sqlite3
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from profharness import __version__
from profharness.attention.backends.base import RefusedError
from profharness.attention.backends.cuda_source import nvrtc_version
from profharness.columns import column, columns_of
from profharness.commands._command import command, declaration_of, document, gate
from profharness.commands._options import Option
from profharness.commands._types import Insecure, Store, store_path
from profharness.device_types import on_gpu
from profharness.environment import EXTRAS, driver_version, installed_versions, missing_packages
from profharness.errors import NotFoundError, ProfharnessError, counted, install_command, join_and
from profharness.files import open_input
from profharness.processes import run_briefly
from profharness.recording.profilers import NVIDIA, PROFILERS, find_tool, tool_missing
from profharness.recording.profilers.base import Tool, ToolError, version_key
from profharness.render.document import Block, Document, Note, Table, record
from profharness.rows import NCU, NSYS, ROCPROFV3
from profharness.run import Fleet
from profharness.store import open_store, to_frame
from profharness.traces import Scanner

if TYPE_CHECKING:
    import pandas as pd

LDD_TIMEOUT_S = 20.0
IMPORTER = "QdstrmImporter"
TORCH_MIN = (2, 5)
SQLITE_MIN = (3, 37, 0)  # for STRICT tables
DRIVER_PARAMETERS = Path("/proc/driver/nvidia/params")
# Such as libroctracer64.so.4.1.70200. With ROCm 7.2.0 and 7.2.1, a trace contains only some of the
# kernels of a replayed graph: https://github.com/sgl-project/sglang/pull/35390.
LOSES_KERNELS = re.compile(r"\.7020[01]$")
AITER_ARCHITECTURES = ("gfx942", "gfx950")  # vLLM's pull request 36702: gfx90a is not supported
LOCK_FILE = "nsight-compute-lock"
CAP_SYS_ADMIN = 21
ROOM_BYTES = 32 << 20  # free space needed for a small run with its traces, and for the store
DCGM_PROCESSES = ("nv-hostengine", "dcgmi", "dcgm-exporter")
# gVisor reports a fixed kernel version. Only newer releases of gVisor include its name.
GVISOR = r"gvisor|^Linux version 4\.4\.0 .*Sun Jan 10 15:06:54 PST 2016"
# Maps system libraries that nsys and its importer need to their packages in Debian and Ubuntu.
LIBRARY_PACKAGES = {
    "libbz2.so.1.0": "libbz2-1.0",
    "libcrypto.so.3": "libssl3",
    "libdw.so.1": "libdw1",
    "libelf.so.1": "libelf1",
    "libgssapi_krb5.so.2": "libgssapi-krb5-2",
    "liblzma.so.5": "liblzma5",
    "libpfm.so.4": "libpfm4",
    "libssh.so.4": "libssh-4",
    "libz.so.1": "zlib1g",
}
# Maps each version of ncu to the driver branch that was released with it, according to the CUDA
# release notes. With an older driver, ncu may fail with LibraryNotLoaded.
DRIVER_BRANCHES = {
    (2022, 3): 520,
    (2023, 1): 530,
    (2023, 2): 535,
    (2023, 3): 545,
    (2024, 1): 550,
    (2024, 2): 555,
    (2024, 3): 560,
    (2025, 1): 570,
    (2025, 2): 575,
    (2025, 3): 580,
}


CheckedScheduler = Annotated[
    str | None,
    Option(
        ("--scheduler",),
        metavar="WHERE",
        help="Also check the lanes of this scheduler (local or tls://head:8786), and list the differences "
        "between lanes.",
    ),
]


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: Annotated[str, column("check")]
    state: Annotated[str, column("state", importance="answer")]
    """`ok`, `warning` (works only in part), `missing` (required), or `absent` (optional)."""
    detail: Annotated[str, column("found", importance="answer", wrap=True)]
    remedy: str = ""


Lanes = tuple[dict[str, Any], ...]


def _to_frame(found: tuple[list[Check], Lanes]) -> pd.DataFrame:
    return to_frame(found[0], Check)


@command("doctor", frame=_to_frame)
def run_doctor(
    *, scheduler: CheckedScheduler = None, insecure: Insecure = False, store: Store = None
) -> tuple[list[Check], Lanes]:
    """Check what is installed and whether it works.

    The command checks Python, torch, CUDA, the GPU, the driver, compilers, nsys, ncu, extras,
    permissions and the store. It prints each problem with a remedy and changes nothing. The exit
    code is 1 if something that every capture needs is missing.

    \b
    Examples:
      profharness doctor
      profharness doctor --scheduler tls://head:8786

    In Python the result has one row per check, with the state and the remedy.
    """
    # loads the code that starts workers, which --help does not need
    from profharness.recording.probe import probe_environment

    if scheduler is None:
        return run_checks(store_path(store), probe_environment), ()
    from profharness.jobs.fleet import describe_lanes

    lanes = describe_lanes(Fleet(scheduler, insecure=insecure))
    checks = run_checks(store_path(store), probe_environment)
    return [*checks, *check_lanes(lanes, __version__)], lanes


@document(run_doctor)
def show(found: tuple[list[Check], Lanes]) -> Document:
    """Return a document with checks and remedies. The JSON form also describes the lanes."""
    checks, lanes = found
    levels = {"missing": "error", "warning": "warning"}
    notes = tuple(
        Note(check.remedy, check.name, levels.get(check.state, "note"))
        for check in checks
        if check.remedy
    )
    blocks: tuple[Block, ...] = (Table.of([*columns_of(Check).values()], checks), *notes)
    fields = ("name", "state", "detail", "remedy")
    extra = {"lanes": [*lanes]} if lanes else {}
    records, told = tuple(map(record, checks)), doctor_answer(checks)
    return Document("profharness.doctor/1", "Doctor", blocks, fields, records, extra, answer=told)


def doctor_answer(checks: Sequence[Check]) -> tuple[str, ...]:
    """Return sentences that name missing, partly working and optional components."""
    of: dict[str, list[str]] = {}
    for check in checks:
        of.setdefault(check.state, []).append(check.name)
    sentences = ["All components that a capture requires are working."]
    if missing := of.get("missing"):
        sentences = [f"Captures need {join_and(missing)}. See the remedies below."]
    if partial := of.get("warning"):
        sentences.append(f"Partly working: {join_and(partial)}.")
    if absent := of.get("absent"):
        sentences.append(f"Optional and not found: {join_and(absent)}.")
    return tuple(sentences)


@gate(run_doctor)
def check(found: tuple[list[Check], Lanes]) -> None:
    """Exit with 1 if something that every capture needs is missing."""
    if any(each.state == "missing" for each in found[0]):
        click.get_current_context().exit(1)


def run_checks(store: Path, probe: Callable[[], dict[str, Any] | str]) -> list[Check]:
    """Run all checks, and return them in display order.

    `probe` starts a worker and returns its environment, or an error message if the worker failed.
    """
    environment = probe()
    driver = None if isinstance(environment, str) else environment.get("driver")
    sqlite = Check("SQLite", "ok", sqlite3.sqlite_version)
    if sqlite3.sqlite_version_info < SQLITE_MIN:
        remedy = "STRICT tables require SQLite 3.37 or later; use a Python build that includes it"
        sqlite = Check("SQLite", "missing", sqlite3.sqlite_version, remedy)
    scanner = Check("trace scanner", "ok", "compiled")
    if Scanner is None:
        scanner = Check(
            "trace scanner",
            "absent",
            "the scanner is not compiled, or was compiled from older source code, so reading large "
            "traces takes longer",
            (
                "install a C compiler, then reinstall profharness with the pip options "
                "--force-reinstall and --no-deps"
            ),
        )
    if not isinstance(environment, str) and environment.get("torch_hip"):
        of_gpu = check_rocm(environment, os.environ, vllm=find_spec("vllm") is not None)
        tools, counters = [check_tool(ROCPROFV3)[1]], []
    else:
        of_gpu = _check_cuda(environment)
        tools = [*_check_profilers(driver or driver_version()), check_ncu_reader()]
        counters = [check_counters(_read(DRIVER_PARAMETERS), privileged=may_administer())]
    return [
        Check("Python", "ok", f"{platform.python_version()} ({sys.implementation.name})"),
        _check_torch(environment),
        *of_gpu,
        *check_compilers(environment),
        *tools,
        *map(check_extra, ("report", "web", "mcp", "cluster")),
        *counters,
        check_tmpdir(Path(os.environ.get("TMPDIR") or "/tmp")),
        *check_injection(os.environ.get("CUDA_INJECTION64_PATH")),
        *check_dcgm(process_names()),
        *check_sandbox(_read(Path("/proc/version"))),
        scanner,
        sqlite,
        check_store(store),
    ]


COMPARED = {
    "profharness": (
        "install the same version of profharness on all hosts; workers whose version differs "
        "from that of this host are not used"
    ),
    "torch": (
        "install the same version of torch on all hosts; workers whose version differs from that "
        "of the first worker are not used"
    ),
    "driver": (
        "install the same driver version on all hosts; workers whose driver differs from that of "
        "the first worker are not used"
    ),
    "python": "",  # a lane may have any Python that profharness supports
}
"""Maps each property that is compared between lanes to the remedy for a difference."""


def check_lanes(lanes: Sequence[Mapping[str, Any]], version: str) -> list[Check]:
    """Return one check per lane, and one per property that differs between lanes.

    `lanes` are results of `describe_lane`. The versions of profharness and Python are also compared
    with the versions on this host.
    """
    if not lanes:
        remedy = "start one worker per GPU, with the command in docs/scale.md"
        return [Check("lanes", "missing", "no worker is connected", remedy)]
    checks = []
    for lane in lanes:
        known = [f"{key} {lane[key]}" for key in COMPARED if lane.get(key) is not None]
        detail = f"{lane.get('gpu') or 'CPU'}, {', '.join(known)}" if known else ""
        state, remedy = "ok", ""
        if lane["problems"]:
            detail = "; ".join(filter(None, [detail, *lane["problems"]]))
            state, remedy = "warning", "the worker is not used until its problem is fixed"
        checks.append(Check(str(lane["lane"]), state, detail, remedy))
    here = {"profharness": version, "python": platform.python_version()}
    for key, remedy in COMPARED.items():
        values = {"here": here[key]} if key in here else {}
        values |= {lane["lane"]: str(lane[key]) for lane in lanes if lane.get(key) is not None}
        names = _names_by_value(values)
        if len(names) > 1:
            ordered = sorted(names.items(), key=lambda item: -len(item[1]))
            text = "; ".join(f"{value}: {', '.join(who)}" for value, who in ordered)
            checks.append(Check(f"lanes: {key}", "warning" if remedy else "ok", text, remedy))
    gpus = {lane["lane"]: lane["gpu_key"] for lane in lanes if lane.get("gpu_key")}
    for _, sharing in sorted(_names_by_value(gpus).items()):
        if len(sharing) > 1:
            remedy = (
                "the workers wait for each other; give each worker its own CUDA_VISIBLE_DEVICES"
            )
            text = f"{', '.join(sharing)} use the same GPU"
            checks.append(Check("lanes: GPU", "warning", text, remedy))
    return checks


def _names_by_value(values: Mapping[str, str]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for name, value in values.items():
        names.setdefault(value, []).append(name)
    return names


def _check_torch(environment: dict[str, Any] | str) -> Check:
    if isinstance(environment, str):
        remedy = (
            "install a build of torch 2.5 or later for this machine: "
            "https://pytorch.org/get-started/locally"
        )
        return Check("torch", "missing", environment, remedy)
    version = str(environment["torch"])
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < TORCH_MIN:
        return Check("torch", "missing", version, "profharness needs torch >= 2.5")
    return Check("torch", "ok", version)


def _check_cuda(environment: dict[str, Any] | str) -> list[Check]:
    """Check CUDA, the GPU, the driver and the loaded cuDNN, or report why torch uses the CPU."""
    if isinstance(environment, str):
        return []
    if not on_gpu(environment):
        if driver := driver_version():
            detail = "an NVIDIA driver is installed, but torch uses the CPU"
            remedy = (
                "install a CUDA build of torch, or find out why torch.cuda.is_available() returns "
                "False"
            )
            return [Check("driver", "ok", driver), Check("CUDA", "warning", detail, remedy)]
        detail = (
            "there is no NVIDIA GPU, so captures run on the CPU and record ATen ops instead of "
            "kernels"
        )
        return [Check("CUDA", "absent", detail)]
    gpu = f"{environment['gpu']}, sm {environment['capability']}, {environment['num_sms']} SMs"
    cudnn = Check("cuDNN", "ok", f"{environment.get('cudnn')} (as loaded)")
    if not environment.get("cudnn"):
        remedy = "the cudnn backend requires cuDNN; reinstall torch with its CUDA packages"
        cudnn = Check("cuDNN", "warning", "not loaded", remedy)
    return [
        Check("CUDA", "ok", f"{environment['torch_cuda']} (as torch was built)"),
        Check("GPU", "ok", gpu),
        Check("driver", "ok", str(environment.get("driver", "unknown"))),
        cudnn,
    ]


def check_rocm(
    environment: Mapping[str, Any], variables: Mapping[str, str], *, vllm: bool
) -> list[Check]:
    """Check a ROCm build of torch, the GPU, the driver, AOTriton and the tracing libraries.

    `vllm` is whether vLLM is installed.
    """
    hip, arch = str(environment["torch_hip"]), environment.get("architecture")
    gpu = ", ".join(filter(None, (environment.get("gpu"), arch)))
    checks = [
        Check("ROCm", "ok", f"{hip} (as torch was built)"),
        Check("GPU", "ok", f"{gpu or 'unknown'}, {environment.get('num_sms')} compute units"),
        Check("driver", "ok", f"amdgpu {environment.get('driver', 'unknown')}"),
    ]
    if aotriton := environment.get("aotriton"):
        checks.append(Check("AOTriton", "ok", f"{aotriton} (in torch)"))
    else:
        remedy = (
            "the flash and efficient backends require AOTriton; install the ROCm build of torch "
            "from pytorch.org"
        )
        checks.append(Check("AOTriton", "warning", "not found in torch", remedy))
    if tracers := environment.get("roctracer"):
        state, remedy = "ok", ""
        if any(map(LOSES_KERNELS.search, tracers)):
            state = "warning"
            remedy = (
                "traces of HIP graphs lack kernels, because torch bundles the libraries of ROCm 7.2.0 "
                "or 7.2.1; install a build of torch for another ROCm version, or preload the "
                "system's libroctracer64.so (installing a newer ROCm is not enough)"
            )
        checks.append(Check("roctracer", state, f"torch uses {join_and(list(tracers))}", remedy))
    if vllm and arch in AITER_ARCHITECTURES and "VLLM_ROCM_USE_AITER" not in variables:
        remedy = (
            "set VLLM_ROCM_USE_AITER=1 to let vLLM use AITER's kernels, then compare the times "
            "with and without AITER"
        )
        checks.append(
            Check("vLLM", "warning", "VLLM_ROCM_USE_AITER is not set, so AITER is off", remedy)
        )
    return checks


def check_compilers(environment: dict[str, Any] | str) -> list[Check]:
    """Check Triton and NVRTC, which compile implementations in kernels/.

    This does not check whether the driver can run the code that NVRTC compiles.
    """
    version = None if isinstance(environment, str) else environment.get("triton")
    triton = Check("Triton", "ok", str(version))
    if not version:
        triton = Check("Triton", "absent", "not installed", install_command("kernels"))
    try:
        nvrtc = Check("NVRTC", "ok", nvrtc_version())
    except RefusedError as error:
        nvrtc = Check("NVRTC", "absent", str(error))
    return [triton, nvrtc]


def check_extra(extra: str) -> Check:
    """Check that the packages of an extra, such as `report`, are installed."""
    missing, purpose = missing_packages(extra), EXTRAS[extra].purpose
    if not missing:
        return Check(f"extra {extra}", "ok", f"{purpose}: {installed_versions(extra)}")
    which = "the package" if len(missing) == 1 else "the packages"
    detail = f"{purpose}: {which} {join_and(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
    return Check(f"extra {extra}", "absent", detail, install_command(extra))


def check_store(path: Path) -> Check:
    """Check that the store can be opened and written to. A missing store is not created."""
    try:
        with open_store(path) as store:
            detail = f"{path}: {counted(len(store.runs()), 'run')}"
    except NotFoundError:
        detail = f"{path} does not exist yet; capture and ingest create the store"
    except ProfharnessError as error:
        return Check("store", "missing", str(error), "choose another file with --store")
    hindrance = _write_hindrance(path)
    if hindrance is None:
        return Check("store", "ok", detail)
    remedy = (
        "the store can be read but not changed; to capture or ingest, choose another file with "
        "--store"
    )
    return Check("store", "warning", f"{detail}; {hindrance}", remedy)


def _write_hindrance(path: Path) -> str | None:
    folder = path.absolute().parent
    try:
        state = os.statvfs(folder)
    except OSError as error:
        return f"{folder}: {error.strerror}"
    if state.f_flag & os.ST_RDONLY:
        return "the file system is read-only"
    if not _may(folder, os.W_OK | os.X_OK) or (path.exists() and not _may(path, os.W_OK)):
        return "the store or its folder is not writable"
    free = state.f_bavail * state.f_frsize
    return None if free >= ROOM_BYTES else f"the file system has only {free:,} free bytes"


def _may(path: Path, mode: int) -> bool:
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def _check_profilers(driver: str | None) -> list[Check]:
    """Check nsys, nsys's importer and ncu, and check that the driver is new enough for ncu."""
    checks = []
    own = [each.name for each in PROFILERS.values() if each.session and each.vendor == NVIDIA]
    for name in own:
        tool, check = check_tool(name)
        checks.append(check)
        if tool and name == NSYS:
            checks.append(check_importer(tool))
        elif tool and name == NCU:
            checks += check_ncu_driver(tool.version, driver)
    return checks


def check_tool(name: str) -> tuple[Tool | None, Check]:
    """Find the executable of a profiler, and check that it prints its version."""
    try:
        tool = find_tool(name)
    except ToolError as error:
        return None, Check(name, "warning", error.problem.message, error.problem.remedy)
    if tool is None:
        return None, Check(name, "absent", "not found", tool_missing(name).remedy)
    where = "on PATH" if tool.on_path else f"not on PATH: {tool.path}"
    if tool.version is None:
        missing = missing_libraries(tool.path)
        reason = f"run `{tool.path} --version` to see the reason for the failure"
        remedy = packages_remedy(missing) if missing else reason
        return tool, Check(name, "warning", f"does not print a version, {where}", remedy)
    return tool, Check(name, "ok", f"{tool.version}, {where}")


def find_importer(nsys: Path) -> Path | None:
    """Return the path of the importer that nsys starts, or None if nsys cannot find one."""
    folder = nsys.resolve().parent
    patterns = (
        (folder.parent, f"host-linux-*/{IMPORTER}"),
        (folder, IMPORTER),
        (folder, f"*/{IMPORTER}"),
        (folder.parent, f"linux-desktop-*/{IMPORTER}"),
    )
    return next((path for root, pattern in patterns for path in root.glob(pattern)), None)


def check_importer(nsys: Tool) -> Check:
    """Check the importer and its libraries. nsys uses the importer to convert raw files to reports."""
    name = "nsys importer"
    importer = find_importer(nsys.path)
    if importer is None:
        with open_input(nsys.path) as file:
            is_script = file.read(2) == b"#!"
        if is_script:
            return Check(
                name,
                "absent",
                f"{nsys.path} is a script, and its importer is not in the same folder",
            )
        folder = nsys.path.resolve().parent.parent / "host-linux-x64"
        remedy = (
            f"link the folder that contains {IMPORTER} (on Debian: "
            f"/usr/lib/nsight-systems/host-linux-x64) to {folder}, because nsys cannot write a report "
            f"without {IMPORTER}"
        )
        return Check(name, "warning", f"{IMPORTER} is not where nsys expects it", remedy)
    missing = missing_libraries(importer)
    if missing:
        detail = f"{importer} lacks {', '.join(missing)}"
        return Check(name, "warning", detail, packages_remedy(missing))
    unchecked = "; ldd could not check it" if missing is None else ""
    return Check(name, "ok", f"{importer}{unchecked}")


def missing_libraries(path: Path) -> list[str] | None:
    """Return the shared libraries that `ldd` does not find. Return None if ldd fails."""
    done = run_briefly(["ldd", str(path)], LDD_TIMEOUT_S, {**os.environ, "LC_ALL": "C"})
    if done is None or done.returncode != 0:
        return None
    return sorted(set(re.findall(r"^\s*(\S+) => not found", done.stdout, re.MULTILINE)))


def packages_remedy(libraries: list[str]) -> str:
    """Return a remedy that explains how to install the libraries."""
    packages = [LIBRARY_PACKAGES[name] for name in libraries if name in LIBRARY_PACKAGES]
    others = [name for name in libraries if name not in LIBRARY_PACKAGES]
    parts = (
        [f"install {' '.join(packages)} (these are the package names on Debian and Ubuntu)"]
        if packages
        else []
    )
    parts += [f"install the packages that contain {', '.join(others)}"] if others else []
    return "; ".join(parts)


def check_ncu_driver(ncu: str | None, driver: str | None) -> list[Check]:
    """Return a warning if the driver is older than the driver branch released with ncu."""
    if ncu is None or driver is None:
        return []
    year, release = (*version_key(ncu), 0, 0)[:2]
    needed = DRIVER_BRANCHES.get((year, release))
    branch = version_key(driver)[:1]
    if needed is None or not branch or branch[0] >= needed:
        return []
    detail = f"ncu {ncu} was released for driver {needed}; this driver is {driver}"
    remedy = "if ncu fails with LibraryNotLoaded, update the driver or use an older Nsight Compute"
    return [Check("ncu driver", "warning", detail, remedy)]


def check_ncu_reader() -> Check:
    """Check that the package ncu-report or the module in ncu's folder can read reports of ncu."""
    try:
        return Check("ncu-report", "ok", metadata.version("ncu-report"))
    except metadata.PackageNotFoundError:
        pass
    try:
        ncu = find_tool(NCU)
    except ToolError:
        ncu = None
    module = ncu.path.resolve().parent / "extras" / "python" / "ncu_report.py" if ncu else None
    if module is not None and module.is_file():
        return Check("ncu-report", "ok", f"not installed, but found in ncu's folder: {module}")
    return Check("ncu-report", "absent", "not installed", install_command("ncu"))


def _read(path: Path) -> str | None:
    """Return the content of a small text file, or None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def may_administer(status: Path = Path("/proc/self/status")) -> bool:
    """Return whether this process has CAP_SYS_ADMIN, which root in a container often lacks."""
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", _read(status) or "", re.MULTILINE)
    return match is not None and bool(int(match[1], 16) >> CAP_SYS_ADMIN & 1)


def check_counters(parameters: str | None, *, privileged: bool = False) -> Check:
    """Check that this user may read hardware counters.

    `parameters` is the content of the driver's parameter file, or None if the file is missing.
    """
    if parameters is None:
        return Check("counters", "absent", "no NVIDIA kernel driver is loaded")
    if "RmProfilingAdminOnly: 0" in parameters:
        return Check("counters", "ok", "every user can read hardware counters")
    detail = "only an administrator can read hardware counters"
    if privileged:
        return Check("counters", "ok", f"{detail}, and this process has the permission")
    remedy = (
        "run ncu as root or with CAP_SYS_ADMIN, or load the driver with "
        "NVreg_RestrictProfilingToAdminUsers=0; otherwise ncu fails with ERR_NVGPUCTRPERM"
    )
    return Check("counters", "warning", detail, remedy)


def check_tmpdir(folder: Path) -> Check:
    """Check that nsys and ncu can use TMPDIR for raw files and ncu's lock file."""
    if not folder.is_dir() or not _may(folder, os.W_OK | os.X_OK):
        remedy = "set TMPDIR to an existing, writable folder"
        return Check("TMPDIR", "warning", f"{folder} is not a writable folder", remedy)
    lock = folder / LOCK_FILE
    if lock.exists() and not _may(lock, os.W_OK):
        remedy = "if you run ncu without profharness, set TMPDIR to a folder of your own"
        return Check("TMPDIR", "warning", f"{lock} belongs to another user", remedy)
    return Check("TMPDIR", "ok", str(folder))


def check_injection(path: str | None) -> list[Check]:
    """Return a warning if CUDA_INJECTION64_PATH injects another tool into CUDA programs."""
    if not path:
        return []
    remedy = (
        "unset CUDA_INJECTION64_PATH, because nsys and ncu do not work while another tool is "
        "injected"
    )
    return [Check("CUDA injection", "warning", f"CUDA_INJECTION64_PATH is {path}", remedy)]


def process_names() -> list[str]:
    """Return the names of all visible processes."""
    names = (_read(path) for path in Path("/proc").glob("[0-9]*/comm"))
    return [name.strip() for name in names if name]


def check_dcgm(names: Iterable[str]) -> list[Check]:
    """Return a warning if DCGM runs, because it can occupy the hardware counters.

    `names` are the names of the running processes.
    """
    running = sorted(set(names) & set(DCGM_PROCESSES))
    if not running:
        return []
    remedy = (
        "if ncu reports that the counters are busy, run `dcgmi profile --pause` before ncu and "
        "`dcgmi profile --resume` afterwards"
    )
    detail = f"{', '.join(running)} is running and may use the counters"
    return [Check("DCGM", "warning", detail, remedy)]


def check_sandbox(version: str | None) -> list[Check]:
    """Return a warning about gVisor, in which neither nsys nor ncu works.

    `version` is the content of /proc/version.
    """
    if not version or not re.search(GVISOR, version, re.IGNORECASE):
        return []
    remedy = (
        "nsys and ncu require a virtual machine or bare metal; `--profiler torch` also works in "
        "a container like this one"
    )
    return [Check("sandbox", "warning", "this is a gVisor container", remedy)]


DECLARATION = declaration_of(run_doctor)
