"""The files that an implementation is made of: its own, and those of its folder that it names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from profharness.backends.cuda_cache import local_files

_CUDA_NAME = re.compile(r"[^\0\n]{1,200}\.cuh?")


def parts_of(file: Path) -> dict[Path, bytes]:
    """The file and what belongs to it, with their contents: modules in its folder that it imports,
    the CUDA source of the same name, those that a string names, and what these include as `"..."`;
    each of them in turn. What is nowhere is left out, and so is what only a running program could
    tell. Raises OSError for a file that cannot be read.
    """
    found: dict[Path, bytes] = {}
    todo = [file]
    while todo:
        path = todo.pop()
        if path in found:
            continue
        # CUDA text in a Python file includes as a .cu file does
        for each, content in local_files(path, path.read_bytes()).items():
            if found.setdefault(each, content) is content and each.suffix == ".py":
                todo += (one for one in _named(each, content) if one.is_file())
    return found


def _named(path: Path, content: bytes) -> Iterator[Path]:
    """The files that a Python file may mean, whether they are there or not."""
    import ast  # where no implementation is run, nothing needs it

    yield path.with_suffix(".cu")
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):  # loading it will say so
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _modules(path.parent, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            up = max(0, node.level - 1)
            folder = path.parents[min(up, len(path.parents) - 1)]
            base = node.module.split(".") if node.module else []
            for alias in node.names:
                yield from _modules(folder, [*base, alias.name])
        elif isinstance(node, ast.Constant) and _CUDA_NAME.fullmatch(str(node.value)):
            yield Path(os.path.normpath(path.parent / str(node.value)))


def _modules(folder: Path, parts: Iterable[str]) -> Iterator[Path]:
    """Where `a.b.c` may be: each of its packages, and `c` as a module of a file or a folder."""
    for part in parts:
        yield folder / f"{part}.py"
        folder = folder / part
        yield folder / "__init__.py"
