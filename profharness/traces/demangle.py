"""Demangle kernel names in bounded time and memory, even if the demangled text would be huge."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping

from profharness.processes import start_python
from profharness.traces.kernel_names import canonical

# A name is demangled in this process if its demangled text cannot be longer than this. Other names
# are demangled in a child process. `_expands` estimates the length.
SAFE_CHARACTERS = 1 << 22
CHILD_SECONDS = 20.0  # maximum time for a child, in case NAME_SECONDS has no effect
NAME_SECONDS = 0.2  # maximum processor time for a name
CHILD_BYTES = 512 * 1024 * 1024
MAX_DEMANGLED = 65536  # maximum length of a demangled name; longer names stay mangled
MAX_CHILDREN = 4
MAX_THIRDS = 600  # references beyond this number are not counted, to avoid an overflow

CHILD = "from profharness.traces.demangle import main; main()"

_REFERENCE = re.compile(r"S[0-9A-Z]*_|T[0-9]*_")


def canonical_names(mangled: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Return a dict that maps mangled names to canonical names, and warnings.

    A mangled name can repeat parts of itself by back references. A name whose demangled text could
    therefore be huge is demangled in a child process that has limits on time and memory. A name
    that exceeds these limits stays mangled.
    """
    names = {name: name if _expands(name) else canonical(name) for name in mangled}
    names.update(_demangle_apart([name for name in names if _expands(name)]))
    left = 0
    for name, demangled in names.items():
        if len(demangled) > MAX_DEMANGLED or (demangled == name and _expands(name)):
            names[name] = name
            left += 1
    text = f"{left} kernel names are too complex to demangle and remain mangled"
    return names, [text] if left else []


def _expands(name: str) -> bool:
    """Return whether the demangled text of a name could be larger than a few MB.

    A back reference repeats at most the text before it. So k references multiply the length by at
    most 3 ** (k / 3).
    """
    if not name.startswith("_Z"):
        return False
    thirds = min(len(_REFERENCE.findall(name)), MAX_THIRDS) / 3
    return len(name) * 3**thirds > SAFE_CHARACTERS


def _demangle_apart(names: list[str]) -> Mapping[str, str]:
    """Demangle names in child processes.

    If a child dies, the next child continues after the name at which the previous child died.
    """
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
    """Run in the child process. Read names from stdin, and print one canonical name per line."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # the parent still limits the time
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
