"""Find and load attention functions that users wrote.

The parent process only searches for files and names. Only the worker imports the files.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from profharness.attention.backends.base import (
    Attention,
    Backend,
    ImplementationError,
    RefusedError,
    find_module,
    outside_contract,
)
from profharness.attention.config import Config
from profharness.device_types import DEVICE_TYPES
from profharness.environment import CHANGED
from profharness.errors import UsageError
from profharness.files import read_input
from profharness.processes import run_briefly

GROUP = "profharness.attention.backends"
FOLDER = "kernels"
_PACKAGE = Path(__file__).resolve().parents[2]
# setup.py puts the folder here in a wheel, because a folder `kernels` beside the package in
# site-packages may belong to another package
_IN_WHEEL = _PACKAGE / "_kernels"
SHIPPED = _IN_WHEEL if _IN_WHEEL.is_dir() else _PACKAGE.parent / FOLDER
FUNCTION = "attention"
# the optional arguments of a function that computes sliding windows, limits scores or takes sinks
OPTIONAL = ("window", "softcap", "sinks")
SOURCE_BYTES = 16_000_000  # maximum size of a source file, in bytes
GIT_S = 5.0  # maximum duration of a git command, in seconds
NESTED = "an expression may be nested too deeply for Python"
_CUDA_NAME = re.compile(r"[^\0\n]{1,200}\.cuh?")
_SPLICE = re.compile(rb"\\[ \t]*\r?\n")
# _INCLUDE matches an include with a literal file name. _ANY_INCLUDE matches everything that may be
# an include, for example an include of a macro.
_INCLUDE = re.compile(
    rb'(?:(?:#|%:)[ \t\v\f]*include(?:_next)?|__has_include(?:_next)?[ \t]*\()[ \t\v\f]*["<]([^">\n]+)[">]'
)
_ANY_INCLUDE = re.compile(
    rb"(?:#|%:|\?\?=|\*/)[ \t\v\f]*include(?:_next)?\b|__has_include(?:_next)?[ \t]*\("
)
_NAME = re.compile(r"[A-Za-z][\w.-]*")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def is_source(path: Path) -> bool:
    """Return whether a path is a regular file that is small enough to be source code."""
    return path.is_file() and path.stat().st_size <= SOURCE_BYTES


def local_files(source: Path, text: bytes) -> tuple[dict[Path, bytes], bool]:
    """Return the contents of the source and of all local files that it may include, and whether the
    list of files is complete. `text` is the content of the source.

    Includes are searched in the folder of the including file and in the folder of the source. The
    search order of the compiler depends on the kind of include. Therefore the result contains every
    file that a name may refer to. A name that is in neither folder is left out, because either the
    compiler reports the missing file or a macro disables the include.
    """
    files: dict[Path, bytes] = {}
    complete = True
    todo = [source]
    while todo:
        # Normalize the path, because includes may spell the path of a file differently.
        path = Path(os.path.normpath(spelled := todo.pop()))
        if path in files or not (path.exists() or path == source):
            continue
        # Behind a symbolic link, `..` leads to another folder than the normalized path. Then the
        # list is not complete.
        complete &= path == spelled or (spelled.exists() and path.samefile(spelled))
        if path != source and not is_source(path):
            complete &= path.is_dir()
            continue
        files[path] = text if path == source else read_input(path, limit=SOURCE_BYTES)
        spliced = _SPLICE.sub(b"", files[path])
        names = [os.fsdecode(name) for name in _INCLUDE.findall(spliced)]
        complete &= len(names) == len(_ANY_INCLUDE.findall(spliced))
        todo += [folder / name for folder in (path.parent, source.parent) for name in names]
    return files, complete


def parts_of(file: Path) -> dict[Path, bytes]:
    """Return the contents of a file and of its dependencies. Raise OSError if a file cannot be
    read.

    The dependencies of a Python file are the modules in its folder that it imports, the CUDA source
    of the same name, the CUDA sources whose names are string literals in the Python file, and the
    files that these sources include with `"..."`.
    """
    parts: dict[Path, bytes] = {}
    todo = [file]
    while todo:
        path = todo.pop()
        if path in parts:
            continue
        # a Python file may contain CUDA text with includes, so search it like a .cu file
        files, _ = local_files(path, read_input(path, limit=SOURCE_BYTES))
        for part, content in files.items():
            if parts.setdefault(part, content) is content and part.suffix == ".py":
                todo += (named for named in _named(part, content) if is_source(named))
    return parts


def _named(path: Path, content: bytes) -> Iterator[Path]:
    """Yield the paths of the files that a Python file may use. These files need not exist."""
    yield path.with_suffix(".cu")
    try:
        tree = ast.parse(content)
    # ignore invalid Python code here, because loading the file reports the error
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
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
    for part in parts:
        yield folder / f"{part}.py"
        folder = folder / part
        yield folder / "__init__.py"


def is_source_name(text: str) -> bool:
    """Return whether the name of a backend has the form of a file name or a module name."""
    return ".py:" in text or text.endswith(".py") or _MODULE.fullmatch(text) is not None


def find_implementation(text: str) -> Backend | None:
    """Return the backend for the name of an implementation, `file.py`, `file.py:function` or
    `package.module:function`. Return None if the name is unknown. Raise UsageError if the file does
    not exist.
    """
    path, colon, function = text.rpartition(":") if ".py:" in text else (text, "", FUNCTION)
    if path.endswith(".py"):
        if colon and not function.isidentifier():
            raise UsageError(f"backend {text!r}: {function!r} is not a valid function name")
        return _of_file(Path(path).expanduser(), function, text)
    if _MODULE.fullmatch(text):
        return from_source(text, text, "function of a package")
    return _by_name(text) if _NAME.fullmatch(text) else None


def implementation_names() -> Iterable[str]:
    """Return the names of the implementations in `kernels/` folders and entry points, without
    duplicates.
    """
    # sort the files, because glob returns them in arbitrary order
    files = (path.stem for folder in _folders() for path in sorted(folder.glob("*.py")))
    points = (point.name for point in metadata.entry_points(group=GROUP))
    return dict.fromkeys([*filter(_NAME.fullmatch, files), *points])


def from_source(name: str, source: str, summary: str = "") -> Backend:
    """Return a backend that runs the implementation at `source`, a value of `Backend.source`."""
    path = source.rpartition(":")[0]
    spec = None if path.endswith(".py") else find_module(path)
    origin = spec.origin if spec is not None and spec.has_location else None
    return Backend(
        name,
        summary,
        tuple(DEVICE_TYPES),
        load=lambda: _implementation(source).attention,
        supports=lambda config: _supports(source, config),
        tuning=lambda: _implementation(source).tuning(),
        # all other exceptions are faults in the user's code, not refusals
        refuses=(NotImplementedError,),
        source=source,
        file=Path(origin) if origin else Path(path) if path.endswith(".py") else None,
        isolated=True,
    )


def fingerprint(backend: Backend) -> str | None:
    """Return the hash of a backend's file and its dependencies. If the backend has no file, return
    the versions of its packages, or None if no package is installed.
    """
    file = backend.file
    if file is not None and file.is_file():
        parts = parts_of(file)
        if len(parts) == 1:
            return f"sha256:{hashlib.sha256(parts[file]).hexdigest()[:16]}"
        # use relative paths, so that the hash does not depend on the folder
        named = {os.path.relpath(path, file.parent): content for path, content in parts.items()}
        texts = [text for name in sorted(named) for text in (os.fsencode(name), named[name])]
        return f"sha256:{hash_of(texts)[:16]}"
    versions = []
    for package in backend.packages:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(versions) or None


def commit(file: Path) -> str | None:
    """Return the git commit that is checked out in the work tree of a file. Append `, changed` if
    the file or one of its dependencies differs from the commit. Return None if the file is not in a
    git work tree, or if git fails.
    """
    if not file.is_file():
        return None
    head = _git(file.parent, "rev-parse", "--verify", "HEAD")
    state = head and _git(
        file.parent, "status", "--porcelain", "--", *(str(part) for part in parts_of(file))
    )
    if not head or state is None:
        return None
    return f"{head}{CHANGED}" if state else head


def _git(folder: Path, *arguments: str) -> str | None:
    # disable core.fsmonitor, which could run a program that the repository configures, and keep
    # `git status` from locking the index
    argv = ("git", "-C", str(folder), "-c", "core.fsmonitor=false", *arguments)
    done = run_briefly(argv, GIT_S, os.environ | {"GIT_OPTIONAL_LOCKS": "0"})
    return done.stdout.strip() if done is not None and done.returncode == 0 else None


def hash_of(texts: Iterable[bytes]) -> str:
    """Return the SHA-256 hash of a sequence of texts, in hex digits. The sequences `ab`, `c` and
    `a`, `bc` have different hashes.
    """
    digest = hashlib.sha256()
    for text in texts:
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()


def where(error: BaseException, file: Path | None) -> str:
    """Return text such as ` (file.py, line 12)`, which contains the innermost line of the file in
    the traceback of an exception. Return an empty string if the traceback does not contain the
    file.
    """
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if file and frame.filename == str(file)]
    return f" ({file.name}, line {lines[-1]})" if file and lines else ""


class _Implementation(NamedTuple):
    attention: Attention
    supports: Callable[[Config], Any] | None
    tuning: Callable[[], Any]


def _of_file(path: Path, function: str, text: str) -> Backend:
    file = path
    if not path.is_file() and path.parent == Path(FOLDER):
        file = SHIPPED / path.name
    if not file.is_file():
        raise UsageError(f"backend {text!r}: cannot find the file {path}")
    if not is_source(file):
        raise UsageError(f"backend {text!r}: {path} is larger than {SOURCE_BYTES:,} bytes")
    outside = path.is_absolute() or ".." in path.parts
    shown = path.name if outside else path.as_posix()
    name = f"{shown}:{function}" if text.endswith(f".py:{function}") else shown
    return from_source(name, f"{file.resolve()}:{function}", "implementation in a file")


def _by_name(name: str) -> Backend | None:
    for folder in _folders():
        path = folder / f"{name}.py"
        if is_source(path):
            source = f"{path.resolve()}:{FUNCTION}"
            own = folder != SHIPPED
            summary = f"implementation in {FOLDER}/{name}.py" if own else "bundled with profharness"
            return from_source(name, source, summary)
    points = metadata.entry_points(group=GROUP, name=name)
    values = {point.value: point for point in points}
    if len(values) > 1:
        raise UsageError(
            f"several packages provide the backend {name!r} ({', '.join(sorted(values))}); choose "
            "a package, and give the backend as package.module:function"
        )
    for value, point in values.items():
        source = value if ":" in value else f"{value}:{FUNCTION}"
        package = point.dist.name if point.dist is not None else "a package"
        return from_source(name, source, f"implementation of {package}")
    return None


def _folders() -> list[Path]:
    folders = dict.fromkeys([(Path.cwd() / FOLDER).resolve(), SHIPPED])
    return [folder for folder in folders if folder.is_dir()]


def _supports(source: str, config: Config) -> str | None:
    reason = outside_contract(config, OPTIONAL)
    if reason is None and config.features:
        reason = outside_contract(config, _taken(source))
    supports = _implementation(source).supports
    if reason or supports is None:
        return reason
    answer = supports(config)
    if answer is not None and not isinstance(answer, str):
        raise ImplementationError(
            f"supports() returned {answer!r}; it must return a reason as text, or None if the "
            "config is supported"
        )
    return answer


def _taken(source: str) -> tuple[str, ...]:
    """Return the optional arguments that the function of an implementation has."""
    try:
        parameters = inspect.signature(_implementation(source).attention).parameters
    except (TypeError, ValueError):  # a callable that has no signature
        return ()
    return tuple(name for name in OPTIONAL if name in parameters)


def _implementation(source: str) -> _Implementation:
    loaded = _load(source)
    if not isinstance(loaded, _Implementation):
        raise loaded
    return loaded


@functools.cache
def _load(source: str) -> _Implementation | ImplementationError | RefusedError:
    """Load an implementation once per process.

    If loading fails, return the exception. The exception is cached too, so that a slow compilation
    that failed is not repeated.
    """
    name, _, function = source.rpartition(":")
    file = Path(name) if name.endswith(".py") else None
    shown = file.name if file else name
    try:
        module = _module_of_file(file) if file else importlib.import_module(name)
    # catch SystemExit, because a script without a main guard may call sys.exit
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "triton":
            return RefusedError("absent", f"{shown} needs Triton (pip install triton)")
        # before Python 3.13, the parser raises a MemoryError without a text for deeply nested code
        text = str(error) or (NESTED if isinstance(error, MemoryError) else "")
        return ImplementationError(
            f"{shown} cannot be imported: {type(error).__name__}: {text}{where(error, file)}"
        )
    attention = getattr(module, function, None)
    if not callable(attention):
        return ImplementationError(
            f"{shown} has no function {function!r}; expected {function}(q, k, v, *, "
            "is_causal=False, scale=None, enable_gqa=False)"
        )
    # the loaded module may have imported the attention function from another module
    home = sys.modules.get(getattr(attention, "__module__", None) or "")
    tunings = (getattr(owner, "tuning", None) for owner in (module, home))
    return _Implementation(
        attention,
        supports if callable(supports := getattr(module, "supports", None)) else None,
        next(filter(callable, tunings), lambda: None),
    )


def _module_of_file(path: Path) -> ModuleType:
    """Import a file under a unique name, so that it cannot shadow an installed package. During the
    import, the folder of the file is the last entry of sys.path.
    """
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = "_".join(("_profharness", re.sub(r"\W", "_", path.stem), digest))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path.name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # add the module before its code runs, because dataclasses look up their module while they are
    # created
    sys.modules[name] = module
    folder = str(path.parent)
    sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        # remove the last occurrence, because the file itself may have added the same folder
        if folder in sys.path:
            del sys.path[len(sys.path) - 1 - sys.path[::-1].index(folder)]
    return module
