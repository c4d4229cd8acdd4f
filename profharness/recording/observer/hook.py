"""Load the recorder when `import torch` has finished.

This module runs in every Python that the program starts, so it imports as little as possible.
"""

from __future__ import annotations

import os
import sys

# importlib.util has these functions too, but its import takes a millisecond.
from _frozen_importlib import module_from_spec
from _frozen_importlib_external import (
    spec_from_file_location,
)

TYPE_CHECKING = False  # importing typing takes milliseconds
if TYPE_CHECKING:
    from typing import Any

PACKAGE = "profharness.recording.observer"
PARTS = ("journal", "window", "recorder", "wrapper")  # in import order
PROCESSES_FILE = "processes.jsonl"


def wait_for_torch(folder: str) -> None:
    """Start recording into a run folder as soon as torch is imported."""
    report(folder, "python")
    if "torch" in sys.modules:
        start(folder)
    else:
        sys.meta_path.insert(0, _Finder("torch", lambda: start(folder)))


def report(folder: str, event: str) -> None:
    """Append a line about an event of this process to PROCESSES_FILE."""
    try:
        line = f'{{"event":"{event}","pid":{os.getpid()},"parent":{os.getppid()}}}\n'
        append(f"{folder}/{PROCESSES_FILE}", line.encode())
    except OSError:
        pass  # the recorder reports the error if there are calls to record


def append(path: str, data: bytes) -> None:
    """Append data to a file, and close the file. Raise OSError.

    No file stays open, because the program could close its descriptor and reuse the number of the
    descriptor for another file.
    """
    number = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        while data:
            data = data[os.write(number, data) :]
    finally:
        os.close(number)


def start(folder: str) -> None:
    """Record the attention calls of this process.

    If that is impossible, print the error. The program continues in any case.
    """
    try:
        report(folder, "torch")
        load()
        sys.modules[f"{PACKAGE}.wrapper"].install_for(folder)
    except Exception as error:
        print(f"profharness: attention is not recorded: {error!r}", file=sys.stderr)


def load() -> None:
    """Load the observer's modules by path, because the program may not be able to import them."""
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    for part in PARTS:
        name = f"{PACKAGE}.{part}"
        if name in sys.modules:
            continue
        spec = spec_from_file_location(name, os.path.join(here, f"{part}.py"))  # noqa: PTH118
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise


def after_import(name: str, act: Any) -> None:
    """Call `act` when a module's import has finished, or at once if it is already imported."""
    if name in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _Finder(name, act))


class _Finder:
    """A finder that calls `act` once after a certain module is imported.

    The other finders find the module, and the module keeps its own loader.
    """

    def __init__(self, name: str, act: Any) -> None:
        self.name, self.act = name, act

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name:
            return None
        for finder in [finder for finder in sys.meta_path if finder is not self]:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find else None
            if spec is not None:
                self._follow(spec.loader)
                return spec
        return None

    def _follow(self, loader: Any) -> None:
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def execute_and_act(module: Any) -> None:
            del loader.exec_module  # restores the class's method
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.act()

        try:
            loader.exec_module = execute_and_act
        except AttributeError:
            print(
                f"profharness: imports through {type(loader).__name__} cannot be observed",
                file=sys.stderr,
            )
