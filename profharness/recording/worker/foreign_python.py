"""Start the worker in another Python, which needs torch but no other package.

Run this file by its path: `python .../worker/foreign_python.py [MODULE [ARGUMENT ...]] FOLDER`. The
file contains only syntax of old Python 3 versions, so that it can report an old Python as too old.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import runpy
import sys
from importlib import machinery
from pathlib import Path

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 5)
PACKAGE = Path(__file__).resolve().parents[2]


def refusal() -> str | None:
    """Return why this Python cannot run a worker, or None if it can run a worker."""
    if sys.version_info < OLDEST_PYTHON:
        here, oldest = map(dotted, (sys.version_info, OLDEST_PYTHON))
        return f"Python {here} is too old; {oldest} or newer is required"
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return "torch is not installed in this Python"
    # Read version.py, because a torch that runs from its build tree has no package metadata.
    text = Path(torch.origin).with_name("version.py").read_text(encoding="utf-8")
    version = re.search(r"__version__ = ['\"]((\d+)\.(\d+)[^'\"]*)", text)
    if version and (int(version[2]), int(version[3])) < OLDEST_TORCH:
        return f"torch {version[1]} is too old; {dotted(OLDEST_TORCH)} or newer is required"
    return None


def dotted(version: tuple[object, ...]) -> str:
    return ".".join(map(str, version[:2]))


def clean_path() -> None:
    """Remove the folder that contains profharness, and the folder of this file, from sys.path.

    The former folder may contain packages for another Python version.
    """
    parents = str(PACKAGE.parent)
    unwanted = (parents, str(Path(__file__).resolve().parent))
    sys.path[:] = [path for path in sys.path if path not in unwanted]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path != parents)


def load_package() -> None:
    """Make `profharness` importable, but not the other packages that are installed beside it."""
    spec = importlib.util.spec_from_file_location(
        PACKAGE.name, PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)]
    )
    assert isinstance(spec, machinery.ModuleSpec) and spec.loader is not None
    module = sys.modules[PACKAGE.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "__main__":
    clean_path()
    reason = refusal()
    if reason is not None:
        sys.exit(reason)
    load_package()
    missing = [name for name in ("isal", "msgspec", "nvtx") if not importlib.util.find_spec(name)]
    standins = importlib.import_module("profharness.recording.worker.standins")
    sys.modules.update(dict.fromkeys(missing, standins))
    runpy.run_module("profharness.recording.worker", run_name="__main__")
