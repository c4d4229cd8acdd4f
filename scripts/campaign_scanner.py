"""The trial of the compiled scanner: scan mutated texts of events whole, truncated and in parts.

The scanner is compiled again with the address and undefined-behaviour sanitizers if a C compiler
and their libraries are available. Every text is in a buffer of exactly its length, so a read
beyond its end is detected.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from campaign_inputs import change_kineto_text, kineto_events
from campaign_trials import Bench, Outcome, until

BATCH = 1000  # scans between two lines of a child
TAIL = 6000  # characters of a sanitizer's report
FLAGS = ("-shared", "-fPIC", "-g", "-O1", "-DPy_LIMITED_API=0x030B0000")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def scanner(bench: Bench, deadline: float) -> Iterator[Outcome]:
    """Scan mutated texts in a child process. If a text ends the process, start another one."""
    place = bench.place()
    environment = bench.environment() | sanitized(bench, place)
    for _ in until(deadline, 1):
        words = [sys.executable, __file__, str(place), str(bench.random.random()), str(deadline)]
        with (
            (place / "child.log").open("wb") as log,
            subprocess.Popen(
                words, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
            ) as child,
        ):
            assert child.stdout is not None
            for line in child.stdout:
                told = json.loads(line)
                yield Outcome(told["what"], told["failure"], told["detail"], times=told["scans"])
        if child.returncode == 0:
            return
        report = (place / "child.log").read_text(errors="replace")[:TAIL]
        text = (place / "text").read_bytes()
        detail = f"{report}\n{text!r}"
        yield Outcome("scan", f"the scanner ends its process: exit {child.returncode}", detail)


def sanitized(bench: Bench, place: Path) -> dict[str, str]:
    """Compile the scanner with sanitizers, and return the environment in which Python loads it.
    Without a compiler or the libraries, return one for the installed scanner.
    """
    parse = bench.root / "profharness" / "traces"
    include = f"-I{sysconfig.get_paths()['include']}"
    output = place / "sanitized" / "_scanner.abi3.so"
    output.parent.mkdir()
    words = ["cc", *FLAGS, *SANITIZERS, include, str(parse / "scanner.c"), "-o", str(output)]
    try:
        subprocess.run(words, check=True, capture_output=True)
        found = subprocess.run(
            ["cc", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {
        "LD_PRELOAD": os.path.realpath(found),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONMALLOC": "malloc",
        "CAMPAIGN_SCANNER": str(output),
    }


def main(place: Path, seed: str, deadline: float) -> None:
    """Scan until the deadline; print a line of JSON for each batch."""
    if path := os.environ.get("CAMPAIGN_SCANNER"):
        spec = importlib.util.spec_from_file_location("profharness.traces._scanner", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules["profharness.traces._scanner"] = module
    import numpy as np

    from profharness.traces import Scanner
    from profharness.traces import chrome_events as columns

    assert Scanner is not None, "the scanner is not compiled"
    events, random = kineto_events(), Random(seed)
    roles = bytes(columns.ROLES.values())
    keys = (columns.NUMBERS, columns.PARTS, columns.OP_KEYS)
    joined = ["\0".join(names).encode() for names in keys]
    shape = (len(columns.Role), len(columns.Column), columns.CAPACITY)
    rows = np.empty(shape, np.int64)
    where = os.open(place / "text", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    scans, failure, detail = 0, "", ""
    what = "scans of " + ("the sanitized scanner" if path else "the installed scanner")

    def scan(data: bytes, end: int) -> str:
        nonlocal scans
        text = memoryview(
            (ctypes.c_char * len(data)).from_buffer_copy(data)
        )  # without a NUL at the end
        made = Scanner("\0".join(columns.ROLES).encode(), roles, *joined, columns.MODULE.encode())
        used = 0
        while True:
            before = used
            used, counts = made.scan(text, used, end, rows)
            scans += 1
            if not before <= used <= end or len(counts) != len(columns.Role):
                return "the scanner returns a place outside the text"
            if any(not 0 <= count <= columns.CAPACITY for count in counts[columns.Role.OP :]):
                return "the scanner returns more rows than fit"
            for role in list(columns.Role)[columns.Role.OP :]:
                places = rows[role, [columns.Column.BEGIN, columns.Column.END], : counts[role]]
                if places.size and not (before <= places.min() and places.max() <= end):
                    return "the scanner returns an event outside the text"
            made.texts(0)
            if used == before or max(counts[columns.Role.OP :]) < columns.CAPACITY:
                return ""

    while True:
        text = change_kineto_text(b",\n".join(random.choices(events, k=3)), random)
        os.ftruncate(where, 0)
        os.pwrite(where, text, 0)
        ends = [len(text), *(random.randrange(len(text) + 1) for _ in range(3))]
        for end in ends:
            if wrong := scan(text[:end], end) or scan(text, end):
                failure, detail = wrong, f"{end}: {text!r}"
        over = time.monotonic() >= deadline
        if scans >= BATCH or over:
            told = {"what": what, "scans": scans, "failure": failure, "detail": detail}
            print(json.dumps(told), flush=True)
            scans, failure, detail = 0, "", ""
        if over:
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
