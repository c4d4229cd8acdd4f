"""Demangle names in bounded time and memory, whatever their demangled text would be."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping

from profharness.processes import start_python
from profharness.traces.kernel_names import canonical

# Possible length up to which a name is demangled in this process, see `_expands`
SAFE_CHARACTERS = 1 << 22
CHILD_SECONDS = 20.0  # for all names, if single limits fail
NAME_SECONDS = 0.2  # processor time per name
CHILD_BYTES = 512 * 1024 * 1024
MAX_DEMANGLED = 65536  # characters; a name that would become longer stays mangled
MAX_CHILDREN = 4
MAX_THIRDS = 600  # more references change no decision

CHILD = "from profharness.traces.demangle import main; main()"

_REFERENCE = re.compile(r"S[0-9A-Z]*_|T[0-9]*_")


def canonical_names(mangled: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Return canonical names by mangled name, and warnings.

    Names whose back references could multiply without bounds are demangled in a child process with
    limits on time and memory. A name that exceeds the limits stays mangled and is counted.
    """
    names = {name: name if _expands(name) else canonical(name) for name in mangled}
    names.update(_demangle_apart([name for name in names if _expands(name)]))
    left = 0
    for name, demangled in names.items():
        if len(demangled) > MAX_DEMANGLED or (demangled == name and _expands(name)):
            names[name] = name
            left += 1
    text = f"{left} kernel names are too intricate to demangle and stay mangled"
    return names, [text] if left else []


def _expands(name: str) -> bool:
    """Return whether a name could demangle to more than a few MB.

    Each reference repeats at most the text before it. k references multiply by at most 3 ** (k /
    3).
    """
    if not name.startswith("_Z"):
        return False
    thirds = min(len(_REFERENCE.findall(name)), MAX_THIRDS) / 3
    return len(name) * 3**thirds > SAFE_CHARACTERS


def _demangle_apart(names: list[str]) -> Mapping[str, str]:
    """Demangle names in child processes. A child that dies is followed by one that skips the name."""
    demangled: dict[str, str] = {}
    rest = [name for name in names if "\n" not in name]
    for _ in range(MAX_CHILDREN):
        if not rest:
            break
        child = start_python(CHILD)
        try:
            output, _ = child.communicate("\n".join(rest).encode(), timeout=CHILD_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            output, _ = child.communicate()
        answers = output.decode("utf-8", "replace").split("\n")[:-1]
        demangled.update(zip(rest, answers, strict=False))
        rest = rest[len(answers) + 1 :]
    return demangled


def main() -> None:
    """Run the child: read names from stdin, and print one canonical name per line."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # the parent's limit still applies
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (CHILD_BYTES, CHILD_BYTES))
    for name in sys.stdin.buffer.read().decode("utf-8", "replace").split("\n"):
        signal.setitimer(signal.ITIMER_PROF, NAME_SECONDS)  # the signal ends this process
        try:
            demangled = canonical(name)
        except MemoryError:
            demangled = name
        too_long = len(demangled) > MAX_DEMANGLED or "\n" in demangled
        sys.stdout.buffer.write((name if too_long else demangled).encode() + b"\n")
        sys.stdout.buffer.flush()
