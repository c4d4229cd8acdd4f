"""Check that an ordinary machine can install what `make` installs.

python scripts/check_install.py torch==2.13.0

For each supported Python, resolve this torch and all extras of ./pyproject.toml with
./constraints.txt, using the default wheels of the package index (on Linux, torch's CUDA build).
Nothing is installed, and pip's settings are not read. Exit with 1 if a Python has no solution.
Without an index, report it and exit with 0.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORM = "x86_64-manylinux_2_28"  # like torch's own wheels
PROBE_S = 30.0
LIMIT_S = 300.0
# uv evaluates environment markers for the given Python, which `pip install --python-version` does not.
UV = (sys.executable, "-m", "uv", "pip", "compile", "-", "--quiet", "--no-config", "--no-header")
WHEELS = ("--only-binary", ":all:", "--python-platform", PLATFORM)
HERE = ("--python", sys.executable, "--no-python-downloads")  # do not search for other interpreters
PROJECT = ("pyproject.toml", "--all-extras", "--constraints", "constraints.txt")


def unreachable(torch: str) -> str | None:
    """Return why the index cannot be used for this torch, or None if it answers."""
    command = [*UV, *WHEELS, *HERE, "--no-deps", "--refresh"]
    quick = {"UV_HTTP_TIMEOUT": "10", "UV_HTTP_RETRIES": "0"}
    try:
        done = subprocess.run(
            command,
            input=torch,
            env=os.environ | quick,
            capture_output=True,
            text=True,
            timeout=PROBE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the package index did not answer in {PROBE_S:g} s"
    return done.stderr.split("\n")[0].removeprefix("error: ") if done.returncode == 2 else None


def resolve(torch: str) -> dict[str, str | None]:
    """Return uv's error for each Python, or None if there is a solution. A Python that was not
    resolved in time has no entry.
    """
    started = {
        version: subprocess.Popen(
            [*UV, *WHEELS, *HERE, *PROJECT, "--python-version", version],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for version in PYTHONS
    }
    deadline = time.monotonic() + LIMIT_S
    found = {}
    for version, process in started.items():
        try:
            errors = process.communicate(torch, timeout=max(0.1, deadline - time.monotonic()))[1]
            found[version] = errors.strip() if process.returncode else None
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
    return found


def main() -> None:
    """Print one line for each Python, and exit 1 if one has no solution."""
    torch = sys.argv[1]
    if why := unreachable(torch):
        print(f"check_install: skipped: {why}")
        return
    found = resolve(torch)
    for version in PYTHONS:
        told = found.get(version, f"skipped: not resolved in {LIMIT_S:g} s")
        print(f"Python {version}: {told or 'ok'}")
    sys.exit(any(found.values()))


if __name__ == "__main__":
    main()
