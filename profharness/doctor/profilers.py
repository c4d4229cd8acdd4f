"""nsys with its importer, ncu with its driver and its reader."""

from __future__ import annotations

import os
import re
import subprocess
from importlib import metadata
from pathlib import Path

from profharness.doctor.system import Check
from profharness.profilers import find_tool, tool_missing
from profharness.profilers.base import Tool, ToolError, version_key

LDD_TIMEOUT_S = 20.0
IMPORTER = "QdstrmImporter"


# Debian's and Ubuntu's packages of the libraries that the importer or nsys takes from the system.
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


# The driver branch that came out with each ncu, by the CUDA release notes; an older driver may not
# load the counter library of a newer ncu (LibraryNotLoaded).
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


def check_profilers(driver: str | None) -> list[Check]:
    """nsys, its importer, ncu and whether the driver suits it. driver: its version, None if there
    is none.
    """
    nsys, nsys_check = check_tool("nsys")
    ncu, ncu_check = check_tool("ncu")
    return [
        nsys_check,
        *([check_importer(nsys)] if nsys else []),
        ncu_check,
        *(check_ncu_driver(ncu.version, driver) if ncu else []),
    ]


def check_tool(name: str) -> tuple[Tool | None, Check]:
    """A profiler's executable on PATH, where its variable says, or where its installers put it."""
    try:
        tool = find_tool(name)
    except ToolError as error:
        return None, Check(name, "warning", error.failure.message, error.failure.remedy)
    if tool is None:
        failure = tool_missing(name)
        return None, Check(name, "absent", "not found", failure.remedy)
    where = "on PATH" if tool.on_path else f"not on PATH: {tool.path}"
    if tool.version is None:
        missing = missing_libraries(tool.path)
        remedy = packages_remedy(missing) if missing else f"run `{tool.path} --version` to see why"
        return tool, Check(name, "warning", f"does not answer --version, {where}", remedy)
    return tool, Check(name, "ok", f"{tool.version}, {where}")


def find_importer(nsys: Path) -> Path | None:
    """The importer where nsys looks for it: in a sibling folder of its real one, or in or below
    that.
    """
    folder = nsys.resolve().parent
    patterns = [
        (folder.parent, f"host-linux-*/{IMPORTER}"),
        (folder, IMPORTER),
        (folder, f"*/{IMPORTER}"),
        (folder.parent, f"linux-desktop-*/{IMPORTER}"),
    ]
    return next((path for root, pattern in patterns for path in root.glob(pattern)), None)


def check_importer(nsys: Tool) -> Check:
    """Whether nsys can turn its raw files into reports: importer and its libraries are there."""
    name = "nsys importer"
    importer = find_importer(nsys.path)
    if importer is None:
        if _is_script(nsys.path):
            return Check(name, "absent", f"{nsys.path} is a script; its importer is not beside it")
        folder = nsys.path.resolve().parent.parent / "host-linux-x64"
        remedy = (
            f"without it nsys leaves no report: link the folder that has {IMPORTER} to {folder} "
            "(Debian has it in /usr/lib/nsight-systems/host-linux-x64)"
        )
        return Check(name, "warning", f"{IMPORTER} is not where nsys looks", remedy)
    missing = missing_libraries(importer)
    if missing:
        detail = f"{importer} lacks {', '.join(missing)}"
        return Check(name, "warning", detail, packages_remedy(missing))
    detail = str(importer) if missing is not None else f"{importer}; ldd could not check it"
    return Check(name, "ok", detail)


def _is_script(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"#!"


def missing_libraries(path: Path) -> list[str] | None:
    """The shared libraries that the loader does not find for an executable, by `ldd`; None if ldd
    cannot tell.
    """
    try:
        done = subprocess.run(
            ["ldd", str(path)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
            timeout=LDD_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_ldd(done.stdout) if done.returncode == 0 else None


def parse_ldd(text: str) -> list[str]:
    """The libraries that ldd reports as not found, each once, sorted."""
    return sorted(set(re.findall(r"^\s*(\S+) => not found", text, re.MULTILINE)))


def packages_remedy(libraries: list[str]) -> str:
    """What to install for the libraries."""
    packages = [LIBRARY_PACKAGES[name] for name in libraries if name in LIBRARY_PACKAGES]
    others = [name for name in libraries if name not in LIBRARY_PACKAGES]
    parts = [f"install {' '.join(packages)} (names of Debian and Ubuntu)"] if packages else []
    parts += [f"install what has {', '.join(others)}"] if others else []
    return "; ".join(parts)


def check_ncu_driver(ncu: str | None, driver: str | None) -> list[Check]:
    """Whether the driver is as new as ncu, where both are known."""
    if ncu is None or driver is None:
        return []
    year, release = (*version_key(ncu), 0, 0)[:2]
    wanted = DRIVER_BRANCHES.get((year, release))
    branch = version_key(driver)[:1]
    if wanted is None or not branch or branch[0] >= wanted:
        return []
    detail = f"ncu {ncu} came out with driver {wanted}, this is {driver}"
    remedy = "if ncu ends with LibraryNotLoaded: update the driver, or use an older Nsight Compute"
    return [Check("ncu driver", "warning", detail, remedy)]


def ncu_reader() -> Check:
    """What can read ncu's reports from Python: the package, or the module in ncu's folder."""
    try:
        return Check("ncu-report", "ok", metadata.version("ncu-report"))
    except metadata.PackageNotFoundError:
        pass
    remedy = 'pip install "profharness[ncu]"'
    try:
        ncu = find_tool("ncu")
    except ToolError:
        ncu = None
    module = ncu.path.resolve().parent / "extras" / "python" / "ncu_report.py" if ncu else None
    if module is not None and module.is_file():
        return Check("ncu-report", "ok", f"not installed, but in ncu's folder: {module}")
    return Check("ncu-report", "absent", "not installed", remedy)
