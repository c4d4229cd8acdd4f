"""Start the worker in a Python that has torch but need not have the other dependencies:
`python .../worker/foreign_python.py [MODULE [ARGUMENT ...]] FOLDER`. It is run by its path.

It uses only syntax of old Python 3 versions, so that these can report that they are too old.
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
    """Return why this Python cannot run a worker, or None."""
    if sys.version_info < OLDEST_PYTHON:
        here, oldest = map(dotted, (sys.version_info, OLDEST_PYTHON))
        return f"Python {here} is too old, {oldest} is the oldest"
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return "no torch is installed there"
    # A build tree has no distribution metadata.
    text = Path(torch.origin).with_name("version.py").read_text(encoding="utf-8")
    version = re.search(r"__version__ = ['\"]((\d+)\.(\d+)[^'\"]*)", text)
    if version and (int(version[2]), int(version[3])) < OLDEST_TORCH:
        return f"torch {version[1]} is too old, {dotted(OLDEST_TORCH)} is the oldest"
    return None


def dotted(version: tuple[object, ...]) -> str:
    """Format the first two numbers of a version."""
    return ".".join(map(str, version[:2]))


def clean_path() -> None:
    """Remove the packages of the Python that started this one from the path."""
    parents = str(PACKAGE.parent)
    unwanted = (parents, str(Path(__file__).resolve().parent))
    sys.path[:] = [path for path in sys.path if path not in unwanted]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path != parents)


def load_package() -> None:
    """Make `profharness` importable, but not the other packages in its folder."""
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
