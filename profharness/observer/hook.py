"""Waits for `import torch` to finish, then loads the recorder. Loads nothing itself, because every
Python that the program starts runs it.
"""

from __future__ import annotations

import os
import sys

# importlib.util has these too, but takes a millisecond to load
from _frozen_importlib import module_from_spec
from _frozen_importlib_external import (
    spec_from_file_location,
)

TYPE_CHECKING = False  # typing takes milliseconds to load
if TYPE_CHECKING:
    from typing import Any

PACKAGE = "profharness.observer"
PARTS = (
    "journal",
    "counts",
    "masks",
    "facts",
    "window",
    "recorder",
    "wrapper",
)  # each after what it imports
PROCESSES_FILE = "processes.jsonl"


def wait_for_torch(folder: str) -> None:
    """Record into a run folder as soon as torch is imported."""
    report(folder, "python")
    if "torch" in sys.modules:
        start(folder)
    else:
        sys.meta_path.insert(0, _Finder("torch", lambda: start(folder)))


def report(folder: str, event: str) -> None:
    """A line on this process, appended whole."""
    try:
        line = f'{{"event":"{event}","pid":{os.getpid()},"parent":{os.getppid()}}}\n'
        append(f"{folder}/{PROCESSES_FILE}", line.encode())
    except OSError:
        pass  # the recorder says so, if there is anything to record


def append(path: str, data: bytes) -> None:
    """Append to a file, which is closed again: a descriptor that stays open may be closed by the
    program, and its number become that of another file. Raises OSError.
    """
    number = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        while data:
            data = data[os.write(number, data) :]
    finally:
        os.close(number)


def start(folder: str) -> None:
    """Record this process's attention. What fails is said once, and the program goes on."""
    try:
        report(folder, "torch")
        load()
        sys.modules[f"{PACKAGE}.wrapper"].install_for(folder)
    except Exception as error:
        print(f"profharness: attention is not recorded: {error!r}", file=sys.stderr)


def load() -> None:
    """Load the observer's files by path under their own names; the package need not be on the path."""
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
    """Call act when a module's import has finished, at once if it has already."""
    if name in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _Finder(name, act))


class _Finder:
    """Finds one module by the other finders, and acts once when that has been executed. The loader
    stays the one that they name.
    """

    def __init__(self, name: str, act: Any) -> None:
        self.name, self.act = name, act

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        for finder in others:
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
            del loader.exec_module  # the class's own shows again
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.act()

        try:
            loader.exec_module = execute_and_act
        except AttributeError:
            print(f"profharness: {type(loader).__name__} cannot be followed", file=sys.stderr)
