"""Stand-ins for GPUs and for another Python, for tests of lanes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from profharness.recording.worker import standins

GPU = "PROFHARNESS_TEST_GPU"  # path of a file; while it exists, the process has a GPU of that name
NVML = f"""
import os
from types import SimpleNamespace
FILE = os.environ["{GPU}"]
class NVMLError(Exception): ...
def nvmlInit(): ...
def nvmlShutdown(): ...
def nvmlSystemGetDriverVersion(): return "590.1"
def nvmlDeviceGetCount(): return int(os.path.exists(FILE))
def nvmlDeviceGetHandleByIndex(index): return "GPU-" + os.path.basename(FILE)
def nvmlDeviceGetUUID(handle): return handle
def nvmlDeviceGetName(_): return "NVIDIA H100"
def nvmlDeviceGetMemoryInfo(_): return SimpleNamespace(total=80 << 30)
"""
FALLING = """#!{python} -IS
import json, os, sys
folder = sys.argv[-1]
plan = json.load(open(folder + "/plan.json"))
journal = open(folder + "/journal.jsonl", "a", buffering=1)
def write(**entry):
    print(json.dumps(entry), file=journal)
write(event="environment", environment={{"device_type": "cuda", "torch": "2.0", "python": "3"}})
for cell in plan["cells"]:
    write(event="begin", cell=cell["cell"])
    status = "ok"
    if os.path.exists({trap!r}):
        os.unlink({trap!r})
        os.unlink(os.environ["{gpu}"])
        status = "error"
    write(event="end", cell=cell["cell"], result=cell | {{"status": status}})
os._exit(0)
"""
# Extends the stand-in for msgspec that workers use; lanes use neither xxhash nor isal.
COMPILED = {
    "msgspec.py": """
from stand_in_msgspec import *
from stand_in_msgspec import _plain as to_builtins, _typed
json.format = staticmethod(lambda data, indent: data)
def convert(value, *, type): return _typed(value, type)
def Meta(**limits): return limits
""",
    "isal.py": "import gzip as igzip, zlib as igzip_lib\n",
    "xxhash.py": "",
}


def fake_nvml(place: Path) -> str:
    """Write a pynvml that obeys the variable GPU. Return its folder, for PYTHONPATH."""
    (place / "nvml").mkdir()
    (place / "nvml" / "pynvml.py").write_text(NVML)
    return str(place / "nvml")


def falling_worker(place: Path) -> Path:
    """Write a worker whose first cell fails, once, while the GPU of its lane disappears."""
    trap, path = place / "trap", place / "falling"
    trap.touch()
    path.write_text(FALLING.format(python=sys.executable, trap=str(trap), gpu=GPU))
    path.chmod(0o755)
    return path


def other_python(place: Path) -> tuple[Path | None, str]:
    """Make a virtual environment of another Python with profharness, Dask and torch's metadata.

    Return its interpreter, or None and what is missing. Pure Python packages come from this Python.
    """
    why = "no other Python from 3.11 on is on PATH or among those of pyenv"
    for base in _interpreters():
        folder = place / base.parents[1].name
        subprocess.run([base, "-m", "venv", "--without-pip", folder], check=True)
        (packages,) = folder.glob("lib/python*/site-packages")
        _lend(packages)
        python = folder / "bin" / "python"
        tried = subprocess.run(
            [python, "-c", "import distributed.cli.dask_worker, profharness.jobs.lane"],
            capture_output=True,
            text=True,
            env={**os.environ, **own_bytecode(place)},
        )
        if not tried.returncode:
            return python, ""
        why = f"{base}: {tried.stderr.strip().splitlines()[-1]}"
    return None, why


def own_bytecode(place: Path) -> dict[str, str]:
    """Return variables that make a Python cache its bytecode here only."""
    return {"PYTHONPYCACHEPREFIX": str(place / "bytecode"), "PYTHONDONTWRITEBYTECODE": ""}


def _interpreters() -> list[Path]:
    """Return other Pythons that profharness supports, one per minor version."""
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    names = [f"python3.{minor}" for minor in range(11, 20) if minor != sys.version_info.minor]
    by_name: dict[str, Path] = {}
    on_path = [(name, shutil.which(name)) for name in names]
    for path in (
        *sorted(home.glob("versions/3.*/bin/python3.*")),
        *(Path(path) for _, path in on_path if path and home not in Path(path).parents),
    ):
        if path.name in names and re.fullmatch(r"python3\.\d+", path.name):
            by_name.setdefault(path.name, path)
    return list(by_name.values())


def _lend(packages: Path) -> None:
    """Link Dask's dependencies, stand-ins for compiled packages, and profharness itself."""
    lent: set[str] = set()
    wanted = ["distributed"]
    while wanted:
        dist = metadata.distribution(wanted.pop())
        if dist.name in lent:
            continue
        lent.add(dist.name)
        needs = map(Requirement, dist.requires or ())
        wanted += [need.name for need in needs if not need.marker or need.marker.evaluate()]
        for name in {file.parts[0] for file in dist.files or ()} - {"..", "__pycache__"}:
            (packages / name).symlink_to(Path(str(dist.locate_file(name))).resolve())
    torch = metadata.distribution("torch")
    (name,) = {file.parts[0] for file in torch.files or () if file.name == "METADATA"}
    (packages / name).symlink_to(Path(str(torch.locate_file(name))).resolve())
    stand_ins = Path(standins.__file__)
    (packages / "stand_in_msgspec.py").symlink_to(stand_ins)
    (packages / "profharness").symlink_to(stand_ins.parents[2])
    for name, text in COMPILED.items():
        (packages / name).write_text(text)
