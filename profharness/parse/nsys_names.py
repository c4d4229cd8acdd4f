"""Names of device activities as Kineto prints them; demangling that no hostile name can make
endless.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from profharness.kernel_names import canonical

SAFE_REFERENCES = 24  # back references in one name; see `_expands`
CHILD_SECONDS = 20.0  # of all names together, should the next not work
NAME_SECONDS = 0.5  # processor time of one name
CHILD_BYTES = 512 * 1024 * 1024
MAX_DEMANGLED = 65536  # characters of a demangled name; a longer one stays mangled
MAX_CHILDREN = 4
CHILD = "from profharness.parse.nsys_names import main; main()"

# nsys's own numbers, as its ENUM tables have them, in Kineto's words
COPY_KINDS = {
    1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD",
    9: "HtoH", 10: "PtoP", 11: "UVM HtoD", 12: "UVM DtoH", 13: "UVM DtoD",
}  # fmt: skip
MEMORY_KINDS = {
    0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device Static",
    6: "Managed Static", 7: "Unknown",
}  # fmt: skip

_REFERENCE = re.compile(r"S[0-9A-Z]*_|T[0-9]*_")


def memcpy_name(copy: int, source: int, target: int) -> str:
    """`Memcpy HtoD (Pinned -> Device)` for nsys's numbers; a kind that is not told is Unknown."""
    kinds = MEMORY_KINDS
    return (
        f"Memcpy {COPY_KINDS.get(copy, '<unknown>')} "
        f"({kinds.get(source, 'Unknown')} -> {kinds.get(target, 'Unknown')})"
    )


def memset_name(memory: int) -> str:
    """`Memset (Device)` for nsys's number of the kind of memory."""
    return f"Memset ({MEMORY_KINDS.get(memory, 'Unknown')})"


def canonical_names(mangled: Sequence[str]) -> tuple[dict[str, str], int]:
    """(mangled to canonical name, number of names that had to stay mangled).

    A name whose back references could multiply beyond all bounds is demangled by a child process
    with limits on time and memory; a name that breaks these stays as it is.
    """
    names = {name: name if _expands(name) else canonical(name) for name in mangled}
    doubtful = [name for name in names if _expands(name)]
    names.update(_demangle_apart(doubtful))
    left = sum(names[name] == name and name.startswith("_Z") for name in doubtful)
    return names, left


def _expands(name: str) -> bool:
    """Whether demangling could make more than a few MB of one name.

    Each reference repeats at most what is there; k references multiply by at most 3 ** (k / 3).
    """
    return name.startswith("_Z") and len(_REFERENCE.findall(name)) > SAFE_REFERENCES


def _demangle_apart(names: list[str]) -> Mapping[str, str]:
    """What children answer before they are stopped; a child goes on behind the name on which the
    one before it ended.
    """
    known: dict[str, str] = {}
    rest = [name for name in names if "\n" not in name]
    for _ in range(MAX_CHILDREN):
        if not rest:
            break
        answers = _ask_child(rest)
        known.update(zip(rest, answers, strict=False))
        rest = rest[len(answers) + 1 :]
    return known


def _ask_child(names: list[str]) -> list[str]:
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    try:
        output, _ = child.communicate("\n".join(names).encode(), timeout=CHILD_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        output, _ = child.communicate()
    return output.decode("utf-8", "replace").split("\n")[:-1]


def main() -> None:
    """Entry of the child: names on stdin, one canonical name a line on stdout."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # the parent's limit still holds
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (CHILD_BYTES, CHILD_BYTES))
    for name in sys.stdin.buffer.read().decode("utf-8", "replace").split("\n"):
        signal.setitimer(signal.ITIMER_PROF, NAME_SECONDS)  # its signal ends this process
        try:
            found = canonical(name)
        except MemoryError:
            found = name
        found = name if len(found) > MAX_DEMANGLED or "\n" in found else found
        sys.stdout.buffer.write(found.encode() + b"\n")
        sys.stdout.buffer.flush()
