"""Trials of the fault campaign that need processes: signals at any moment, full disks, failing
tools, planted secrets, hostile pages.
`TRIALS` has one row per kind. Each trial is a generator of outcomes that continues until its time
is over and tries everything at least once.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

from campaign_inputs import ROOT, RUN
from check_observe import KINDS as PROGRAMS
from check_observe import generate, try_program

sys.path.append(str(ROOT / "tests" / "profilers"))
from fake_tools import Behaviour, Scenario, install  # the tools of the tests

END_S = 60.0  # time limit for what takes 10 s on an idle machine
PATIENCE_S = 600.0
MARK = "PROFHARNESS_CAMPAIGN"  # in the environment of every process that a trial starts
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL)
QUICK = ("--device", "cpu", "--samples", "5", "--iterations", "2")
CELLS = ("--config", "1,1,{8,16},8,fp32", "--backend", "auto,math")


@dataclass(frozen=True)
class Outcome:
    """The result of a trial: what was tried and how often, how it failed if it did, or why it was
    skipped.
    """

    what: str
    failure: str = ""
    detail: str = ""
    skipped: str = ""
    times: int = 1


@dataclass
class Bench:
    """The surroundings of a trial: the checkout, a folder, the random generator."""

    root: Path
    folder: Path
    random: Random
    number: int = 0
    extra: dict[str, str] = field(default_factory=dict)

    def place(self) -> Path:
        """Return a new empty folder."""
        self.number += 1
        path = self.folder / f"t{self.number}"
        path.mkdir()
        return path

    def environment(self, mark: str = "") -> dict[str, str]:
        """Return a user's environment with the checkout's package. `mark` identifies processes that
        are left behind.
        """
        kept = {key: value for key, value in os.environ.items() if key != "PROFHARNESS_STORE"}
        found = [str(self.root), *filter(None, [os.environ.get("PYTHONPATH")])]
        paths = {"PYTHONPATH": os.pathsep.join(found), MARK: mark, "CUDA_VISIBLE_DEVICES": ""}
        return kept | paths | self.extra

    def start(
        self, place: Path, *words: str, mark: str = "", log: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Start profharness in its own session, with both streams in a file."""
        with (log or place.parent / f"{place.name}.log").open("ab") as file:
            return subprocess.Popen(
                [sys.executable, "-m", "profharness", *words],
                cwd=place,
                env=self.environment(mark),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def run(self, place: Path, *words: str, mark: str = "") -> tuple[int, str]:
        """Return the exit code (-1 if it did not end) and the output."""
        log = self.folder / f"{place.name}-{time.monotonic_ns()}.log"
        process = self.start(place, *words, mark=mark, log=log)
        try:
            code = process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = -1
        return code, log.read_text(errors="replace")

    def fault(self, words: Sequence[str], code: int, told: str, codes: Sequence[int]) -> Outcome:
        """Return the outcome of a command that may end with these codes, without a traceback."""
        what, name = shlex.join(words), words[0]
        if "Traceback (most recent call last)" in told:
            last = re.sub(r"\d+|/\S+", "#", told.strip().splitlines()[-1])[:80]
            return Outcome(what, f"{name}: traceback: {last}", told[-3000:])
        if code not in codes:
            return Outcome(what, f"{name}: exit code {code}", told[-3000:])
        return Outcome(what)


def left_behind(mark: str) -> list[int]:
    """Return the processes with the mark in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def ended(mark: str) -> list[int]:
    """End processes that should have ended by now, and return them."""
    deadline = time.monotonic() + END_S
    while (found := left_behind(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found


def whole(store: Path) -> str:
    """Return what is damaged in a store, or "". A missing store is intact."""
    if not store.exists():
        return ""
    connection = sqlite3.connect(store)
    try:
        if connection.execute("PRAGMA integrity_check").fetchone() != ("ok",):
            return "the store is damaged"
        if connection.execute("PRAGMA foreign_key_check").fetchone():
            return "the store has a row without its parent"
    except sqlite3.Error as error:
        return f"the store: {error}"
    finally:
        connection.close()
    return ""


def counted(store: Path) -> list[tuple[object, ...]]:
    """Return cells and launches of each run, independent of how often it was ingested."""
    connection = sqlite3.connect(store)
    sql = "SELECT run, count(*), sum(launches) FROM kernel_summary GROUP BY run ORDER BY run"
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def cells_of(folder: Path) -> list[tuple[str, str, str]]:
    """Return the cells of a run folder with their status."""
    record = json.loads((folder / "run.json").read_bytes())
    return sorted(
        (json.dumps(cell["config"]), cell["backend"], cell.get("status", "pending"))
        for cell in record["cells"]
    )


def until(deadline: float, least: int) -> Iterator[int]:
    """Yield numbers until the deadline, but at least this many."""
    number = 0
    while number < least or time.monotonic() < deadline:
        yield number
        number += 1


def interrupted(bench: Bench, place: Path, words: Sequence[str], longest: float) -> tuple[str, str]:
    """Send a signal to a command at a random moment. Return what is wrong with its end, and its
    log.
    """
    mark = f"{os.getpid()}-{bench.number}"
    log = bench.folder / f"{place.name}.log"
    process = bench.start(place, *words, mark=mark, log=log)
    # most moments are early, because most steps start in the first second
    delay = longest * bench.random.random() ** 2
    sign = bench.random.choice(SIGNALS)
    whom = bench.random.choice(("process", "group", "worker"))
    try:
        process.wait(delay)
    except subprocess.TimeoutExpired:
        targets = [pid for pid in left_behind(mark) if pid != process.pid]
        with contextlib.suppress(ProcessLookupError):
            if whom == "group":
                os.killpg(process.pid, sign)
            elif whom == "worker" and targets:
                os.kill(bench.random.choice(targets), sign)
            else:
                os.kill(process.pid, sign)
    what = f"{sign.name} to the {whom} after {delay:.2f} s"
    patience = PATIENCE_S if whom == "worker" else END_S
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"does not end after a signal: {sign.name}", what
    if ended(mark):
        return f"a process is left behind after {sign.name}", what
    told = log.read_text(errors="replace")
    # Python itself prints one for an interrupt before it runs any code of profharness
    if "Traceback (most recent call last)" in told and "init_import_site" not in told:
        last = re.sub(r"\d+|/\S+", "#", told.strip().splitlines()[-1])[:80]
        return f"traceback after {sign.name}: {last}", f"{what}\n{told[-3000:]}"
    return "", what


def kill_run(bench: Bench, deadline: float, words: Sequence[str]) -> Iterator[Outcome]:
    """Send a signal while cells run. After resuming, the run must have the cells of an undisturbed
    run.
    """
    words = [*words, "--store", "s.db", "--out", "runs"]
    reference = bench.place()
    began = time.monotonic()
    code, told = bench.run(reference, *words)
    took = time.monotonic() - began
    if code != 0:
        yield Outcome(words[0], f"a whole {words[0]} fails", told)
        return
    wanted = cells_of(next((reference / "runs").iterdir()))
    for _ in until(deadline, 2):
        place = bench.place()
        wrong, what = interrupted(bench, place, words, took * 1.1)
        wrong = wrong or whole(place / "s.db")
        folders = sorted((place / "runs").iterdir()) if (place / "runs").exists() else []
        if not wrong and folders and (folders[0] / "run.json").exists():
            resume = ["capture", "--resume", str(folders[0]), "--store", "s.db"]
            code, told = bench.run(place, *resume)
            # a complete run cannot be resumed, and the command reports that
            if "Traceback" in told or code not in (0, 1, 2):
                wrong, what = "the resume fails", f"{what}\n{told[-2000:]}"
            elif lost := lost_cells(wanted, cells_of(folders[0])):
                wrong, what = "the resumed run has other cells", f"{what}\n{lost}\n{told[-2000:]}"
            wrong = wrong or whole(place / "s.db")
        yield Outcome(what, wrong, what)
        shutil.rmtree(place)


def lost_cells(wanted: list[tuple[str, str, str]], found: list[tuple[str, str, str]]) -> str:
    """Return the differences. A cell whose worker was killed may be reported as crashed."""
    if [cell[:2] for cell in found] != [cell[:2] for cell in wanted]:
        return f"{found} instead of {wanted}"
    odd = [cell for cell in found if cell[2] not in ("ok", "crashed", "refused")]
    return str(odd) if odd else ""


def kill_capture(bench: Bench, deadline: float) -> Iterator[Outcome]:
    """Run `kill_run` with `capture`."""
    return kill_run(bench, deadline, ["capture", *CELLS, *QUICK])


def kill_campaign(bench: Bench, deadline: float) -> Iterator[Outcome]:
    """Run `kill_run` with cells on one lane."""
    words = ["bench", *CELLS, "--device", "cpu", "--iterations", "6", "--warmup", "1"]
    return kill_run(bench, deadline, [*words, "--scheduler", "local:2"])


def kill_bench(bench: Bench, deadline: float) -> Iterator[Outcome]:
    """Run `kill_run` with `bench`."""
    words = ["bench", *CELLS, "--device", "cpu", "--iterations", "6", "--warmup", "1"]
    return kill_run(bench, deadline, words)


@contextlib.contextmanager
def small_disk(path: Path, kilobytes: int) -> Iterator[bool]:
    """Mount a tmpfs of that size. Yield False if mounting is not allowed."""
    path.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(path)]
    done = subprocess.run(["mount", *options], capture_output=True, check=False)
    try:
        yield done.returncode == 0
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", "-l", str(path)], capture_output=True, check=False)


def disks(bench: Bench, deadline: float) -> Iterator[Outcome]:
    """Fill the disk of the store, the run folder, TMPDIR or an output; use a full or closed stdout."""
    yield from outputs(bench)
    for round_ in until(deadline, 1):
        kilobytes = bench.random.choice((8, 16, 40, 120, 300)) if round_ else 40
        for words, codes in (
            (["ingest", str(RUN), "--store", "disk/s.db"], (1,)),
            (["capture", *CELLS, *QUICK, "--out", "disk/runs"], (0, 1)),
            (["export", "latest", "--store", "own.db", "-o", "disk/t.json"], (1, 2)),
        ):
            place = bench.place()
            with small_disk(place / "disk", kilobytes) as mounted:
                if not mounted:
                    yield Outcome(
                        "disks", skipped="mounting a tmpfs needs root, so full disks were not tried"
                    )
                    return
                if "own.db" in words:
                    bench.run(place, "ingest", str(RUN), "--store", "own.db")
                code, told = bench.run(place, *words)
                outcome = bench.fault(words, code, told, (*codes, 0) if kilobytes > 40 else codes)
                left = [
                    str(p)
                    for p in (place / "disk").rglob("*")
                    if "tmp" in p.suffix or ".part" in p.name
                ]
                if not outcome.failure and left:
                    outcome = Outcome(
                        outcome.what, f"{words[0]}: a temporary file stays", str(left)
                    )
                if not outcome.failure and (wrong := whole(place / "disk" / "s.db")):
                    outcome = Outcome(outcome.what, wrong, told)
                yield outcome


def outputs(bench: Bench) -> Iterator[Outcome]:
    """Run reading commands with a stdout that cannot be written to."""
    place = bench.place()
    bench.run(place, "ingest", str(RUN), "--store", "s.db")
    commands = (
        ["runs"],
        ["kernels"],
        ["kernels", "--format", "json"],
        ["report", "--format", "csv"],
    )
    for words in (*commands, ["diff", "flash", "math"], ["--version"], ["--help"]):
        store = [] if words[0].startswith("-") else ["--store", "s.db"]
        for redirect in (">/dev/full", ">&-"):
            line = shlex.join([sys.executable, "-m", "profharness", *words, *store]) + redirect
            done = subprocess.run(
                ["bash", "-c", line],
                cwd=place,
                env=bench.environment(),
                stderr=subprocess.PIPE,
                check=False,
            )
            told = done.stderr.decode(errors="replace")
            yield bench.fault([*words, redirect], done.returncode, told, (0, 1, 2))


BEHAVIOURS = {
    "garbage": Behaviour(stderr="\x00\x1b[31m" * 50, report="empty", returncode=0),
    "no report": Behaviour(report="none", returncode=0),
    "exit 3": Behaviour(returncode=3, run_target=False),
    "killed": Behaviour(kill_self=True),
    "much output": Behaviour(stdout="x" * 3_000_000, returncode=1, report="none"),
    "target not run": Behaviour(run_target=False),
}


def tools(bench: Bench, deadline: float) -> Iterator[Outcome]:
    """Run nsys and ncu stand-ins that fail in many ways. The failure must be reported without a
    traceback, and nothing may be left behind.
    """
    wanted = [(tool, name) for tool in ("nsys", "ncu") for name in BEHAVIOURS]
    bench.random.shuffle(wanted)
    for number in until(deadline, 2):
        tool, name = wanted[number % len(wanted)]
        place = bench.place()
        scenario = Scenario(**{tool: BEHAVIOURS[name]})
        install(place / "bin", scenario)
        bench.extra = {"PATH": f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        mark = f"{os.getpid()}-tool{bench.number}"
        words = ["capture", *CELLS[:3], "math", *QUICK, "--profiler", tool, "--timeout", "30"]
        words[words.index("1,1,{8,16},8,fp32")] = "1,1,8,8,fp32"
        code, told = bench.run(place, *words, mark=mark)
        bench.extra = {}
        outcome = bench.fault(words, code, told, (1,))
        if ended(mark):
            outcome = Outcome(f"{tool} {name}", f"{tool}, {name}: a process is left behind", told)
        log = sum(path.stat().st_size for path in place.rglob("*.log"))
        if log > 11_000_000:
            outcome = Outcome(f"{tool} {name}", f"{tool}, {name}: a log of {log} bytes", told)
        yield outcome
        shutil.rmtree(place)


# Secrets that scrub must remove wherever a profiler can write them: kind -> (text, what must be gone).
# Each has a unique word, because one trace contains all of them.
SECRETS = {
    "host": ("ran on node17.cluster.example.com", "node17.cluster"),
    "image": ("image registry.example.com/team/private-image:v1", "private-image"),
    "repository": ("git clone git@github.com:user/private.git", "user/private"),
    "path": ("/home/carol/project/train.py", "carol"),
    "path with a blank": ("'/home/erin/My Project/quiet notes.py'", "quiet notes"),
    "encoded path": ("file%3A%2F%2F%2Fhome%2Fdave%2Fproject", "dave"),
    "ssh key": ("ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAABgQC7 alice@box", "AAAAB3NzaC1yc2E"),
    "hex key": ("4f3c2a1b9e8d7c6b5a4f3e2d1c0b9a8f7e6d5c4b", "4f3c2a1b9e8d"),
    "IPv4": ("connect 10.23.45.67:8080", "10.23.45.67"),
    "IPv6": ("connect [fe80::1ff:fe23:4567:890a]:80", "fe80::1ff"),
    "MAC": ("link 00:1A:2B:3C:4D:5E", "00:1A:2B:3C"),
    "basic auth": ("https://bob:hunter2x@example.com/x", "hunter2x"),
    "header": ("Authorization: Basic dXNlcjpodW50ZXIyeA==", "dXNlcjpodW50"),
    "option": ("tool --password hunter2x --fast", "hunter2x"),
    "token": ("token=ghp_0123456789abcdefghijABCDEFGHIJ012345", "ghp_0123456789"),
    "AWS key": ("AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPLE"),
    "mail": ("alice.smith@example.com", "alice.smith"),
}


def secrets(bench: Bench, deadline: float) -> Iterator[Outcome]:
    """Plant secrets in names, ranges, arguments and metadata of a Kineto trace; all must be
    removed. If scrub refuses the copy because of a secret, try each secret by itself.
    """
    del deadline
    code, _, copy = scrubbed(bench, [text for text, _ in SECRETS.values()])
    for kind, (text, secret) in SECRETS.items():
        outcome = Outcome(kind)
        if code != 0:
            alone, told, copy = scrubbed(bench, [text])
            outcome = bench.fault(["scrub", kind], alone, told, (0,))
        if not outcome.failure and secret in copy:
            outcome = Outcome(kind, f"{kind} stays in the copy", text)
        yield outcome


def scrubbed(bench: Bench, texts: Sequence[str]) -> tuple[int, str, str]:
    """Scrub a trace that contains the texts. Return exit code, output and the copy."""
    tree = json.loads(gzip.decompress((RUN / "c0001.torch.json.gz").read_bytes()))
    event = next(event for event in tree["traceEvents"] if event.get("cat") == "cpu_op")
    for number, text in enumerate(texts):
        event["args"][f"note{number}"] = text
        tree["traceEvents"].append({**event, "cat": "user_annotation", "name": text})
        tree[f"note{number}"] = text
    place = bench.place()
    (place / "t.json").write_text(json.dumps(tree))
    code, told = bench.run(place, "scrub", "t.json", "-o", "copy.json")
    copy = place / "copy.json"
    return code, told, copy.read_text() if copy.exists() else ""


HOSTILE = (
    *(
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "</script><svg onload=alert(1)>",
    ),
    *(
        "javascript:alert(1)",
        "';DROP TABLE launches;--",
        "{{7*7}}",
        "\u202eevil",
        "=cmd|' /C calc'!A0",
    ),
    *(
        "\x1b]0;title\x07\x1b[31m",
        "<!--",
        "]]>",
        "<style>*{display:none}</style>",
        "&lt;script&gt;",
    ),
)
RAW = re.compile(r"<script>alert|<img src=x|<svg onload|<style>\*\{display")


def pages(bench: Bench, deadline: float) -> Iterator[Outcome]:
    """Use hostile texts as names of kernels, ranges and files. Every page and format must show them
    as text.
    """
    del deadline
    place = bench.place()
    tree = json.loads(gzip.decompress((RUN / "c0001.torch.json.gz").read_bytes()))
    kernels = [event for event in tree["traceEvents"] if event.get("cat") == "kernel"]
    for number, text in enumerate(HOSTILE):
        event = kernels[number % len(kernels)]
        tree["traceEvents"].append({**event, "name": text, "ts": event["ts"] + number})
        tree["traceEvents"].append({**event, "cat": "user_annotation", "name": text})
    (place / "t.json").write_text(json.dumps(tree))
    code, told = bench.run(place, "ingest", "t.json", "--store", "s.db")
    yield bench.fault(["ingest", "t.json"], code, told, (0,))
    for format_ in ("table", "html", "md", "json", "csv"):
        words = ["kernels", "--run", "latest", "--format", format_, "--full", "--store", "s.db"]
        code, told = bench.run(place, *words)
        outcome = bench.fault(words, code, told, (0,))
        if format_ == "html" and RAW.search(told):
            outcome = Outcome(shlex.join(words), "a page has a foreign tag", told[-2000:])
        if format_ in ("table", "html", "md") and "\x1b" in told:
            outcome = Outcome(shlex.join(words), f"{format_} has an escape sequence", told[-2000:])
        yield outcome
    yield from served_pages(bench, place)


def served_pages(bench: Bench, place: Path) -> Iterator[Outcome]:
    """Request every table and predefined query of `serve`."""
    log = bench.folder / "serve.log"
    process = bench.start(place, "serve", "--port", "0", "--store", "s.db", log=log)
    try:
        deadline = time.monotonic() + END_S
        while not (found := re.search(r"http://[\d.:]+", log.read_text())):
            if process.poll() is not None or time.monotonic() > deadline:
                told = log.read_text()
                skipped = "the extra `web` is not installed" if "profharness[web]" in told else ""
                yield Outcome("serve", "" if skipped else "serve does not start", told, skipped)
                return
            time.sleep(0.05)
        address = urlsplit(found[0]).netloc
        front = page(address, "/profharness")[1]
        paths = set(re.findall(r'href="(/profharness/\w+)"', front))
        for path in sorted(paths | {"/", "/profharness/launches?_size=max", "/nothing"}):
            status, text = page(address, path)
            wrong = "a page has a foreign tag" if RAW.search(text) else ""
            wrong = wrong or ("serve: status 500" if status >= 500 else "")
            yield Outcome(path, wrong, text[:2000])
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_S)


def page(address: str, path: str) -> tuple[int, str]:
    """Return status and body of a page."""
    with contextlib.closing(http.client.HTTPConnection(address, timeout=END_S)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")


def observed(bench: Bench, deadline: float) -> Iterator[Outcome]:
    """Run programs alone and under `observe`. They must behave alike."""
    for number in itertools.count():
        if number >= len(PROGRAMS) and time.monotonic() > deadline:
            return
        program = generate(list(PROGRAMS)[number % len(PROGRAMS)], bench.random)
        result = try_program(program, bench.place(), bench.environment())
        yield Outcome(f"{program.source}\n{program.options}", result.failure, result.detail)


TRIALS: dict[str, Callable[[Bench, float], Iterator[Outcome]]] = {
    "kill-capture": kill_capture,
    "kill-bench": kill_bench,
    "kill-campaign": kill_campaign,
    "disks": disks,
    "tools": tools,
    "secrets": secrets,
    "pages": pages,
    "observed": observed,
}
