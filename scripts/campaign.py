"""Run the fault campaign: damaged inputs for every reader, signals, full disks, failing tools,
planted secrets, concurrent writers, hostile pages, misbehaving backends. Print what was tried
and what failed.

python scripts/campaign.py                                  everything, 30 s per kind
python scripts/campaign.py --seconds 1200 --only kineto,nsys --format md
python scripts/campaign.py --root ../other-checkout --seed 7
python scripts/campaign.py --repeat FILE                    repeat a kept input; its folder names the kind

Readers are fuzzed in their own process, coverage-guided by atheris if it is installed, otherwise by
a seeded generator that keeps inputs with new kinds of results. An input fails if the reader raises
an uncaught exception, ends by a signal, takes more than 20 s of CPU time or uses more than 400 MB
of memory. An input also fails if it is refused but changes the store. Failing inputs are kept in
the folder of --out with the command that repeats them. docs/reliability.md lists what is
guaranteed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import importlib
import importlib.util
import io
import json
import os
import re
import resource
import selectors
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from campaign_backends import backends
from campaign_inputs import DATA, KINDS, ROOT, Kind
from campaign_scanner import scanner
from campaign_stores import STORE_TRIALS
from campaign_trials import TRIALS, Bench, whole

ALL_TRIALS = TRIALS | STORE_TRIALS | {"backends": backends, "scanner": scanner}
CPU_S = 20.0
MEMORY_KIB = 400 * 1024
CODES = (0, 1, 2, 3)
KEPT = 3  # inputs kept per signature
CORPUS = 300
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Figures:
    """The results of one kind. `failures` counts by signature; `skipped` is the reason if it was
    not tried.
    """

    name: str
    tried: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    memory_kib: int = 0
    engine: str = ""
    skipped: str = ""

    def row(self) -> list[str]:
        """Return a row of the table."""
        failed = sum(self.failures.values())
        how = "; ".join(f"{count} × {text}" for text, count in self.failures.most_common(8))
        cpu = f"{self.slowest_s:.1f}" if self.slowest_s else "-"
        memory = f"{self.memory_kib // 1024}" if self.memory_kib else "-"
        return [
            self.name,
            f"{self.tried:,}",
            f"{failed:,}",
            cpu,
            memory,
            how or self.skipped or self.engine,
        ]


HEADER = ["kind", "tried", "failed", "slowest CPU s", "peak MB", "how"]


def main(arguments: list[str] | None = None) -> int:
    """Run the selected kinds. Return 1 if anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to test")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30.0, help="for each kind")
    parser.add_argument(
        "--failures", type=int, help="stop a reader's kind after this many failures"
    )
    parser.add_argument("--only", default="", help=f"of {','.join((*KINDS, *ALL_TRIALS))}")
    parser.add_argument("--engine", choices=("auto", "atheris", "seeded"), default="auto")
    parser.add_argument("--format", choices=("table", "md", "json"), default="table")
    parser.add_argument(
        "--out", type=Path, default=Path("campaign"), help="folder for failing inputs"
    )
    parser.add_argument("--repeat", type=Path, metavar="FILE")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    asked.root, asked.out = asked.root.resolve(), asked.out.resolve()
    if asked.child:
        return child(asked)
    if asked.repeat:
        return repeat(asked)
    names = [name for name in asked.only.split(",") if name] or [*KINDS, *ALL_TRIALS]
    if unknown := set(names) - {*KINDS, *ALL_TRIALS}:
        parser.error(f"--only {','.join(sorted(unknown))}: no such kind")
    results = []
    for name in names:
        print(f"{name} …", file=sys.stderr, flush=True)
        results.append(fuzz(name, asked) if name in KINDS else try_out(name, asked))
        print("  " + " | ".join(results[-1].row()[1:]), file=sys.stderr, flush=True)
    print(shown(results, asked.format))
    return int(any(result.failures for result in results))


def shown(results: list[Figures], kind: str) -> str:
    """Return the table of figures."""
    rows = [result.row() for result in results]
    if kind == "json":
        return json.dumps([dict(zip(HEADER, row, strict=True)) for row in rows], indent=1)
    if kind == "md":
        cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
        lines = [HEADER, ["---", *["---:"] * 4, "---"], *cells]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    widths = [max(len(row[at]) for row in [HEADER, *rows]) for at in range(len(HEADER) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
        for row in [HEADER, *rows]
    )


def try_out(name: str, asked: argparse.Namespace) -> Figures:
    """Run one kind of trial until its time is over, and every trial at least once."""
    figures = Figures(name)
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        bench = Bench(asked.root, Path(folder), Random(f"{asked.seed}-{name}"))
        deadline = time.monotonic() + asked.seconds
        for outcome in ALL_TRIALS[name](bench, deadline):
            if outcome.skipped:
                figures.skipped = outcome.skipped
                continue
            figures.tried += outcome.times
            if outcome.failure:
                figures.failures[outcome.failure] += 1
                note(asked.out / name, outcome.failure, f"{outcome.what}\n{outcome.detail}\n")
    return figures


def note(folder: Path, signature: str, text: str) -> None:
    """Keep the record of a failing trial."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{digest(signature)}.txt").open(
        "a", encoding="utf-8", errors="replace"
    ) as file:
        file.write(f"{signature}\n{text}\n")


def digest(text: str) -> str:
    """Return a file name for a text."""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:10]


# ---- readers: the parent, which watches ----


def fuzz(name: str, asked: argparse.Namespace) -> Figures:
    """Fuzz one reader in child processes. A child that dies, hangs or grows too large is replaced.
    The start of a child does not count as time.
    """
    figures = Figures(name)
    left, start = asked.seconds, 0
    while left > 0 and not enough(figures, asked):
        with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
            watch = Watch(figures, asked, Path(folder), start)
            watch.follow(left)
        if watch.began is None:
            figures.failures["the fuzzing process does not start"] += 1
            print(watch.log, file=sys.stderr)
            break
        left -= time.monotonic() - watch.began
        start = watch.number
    return figures


def enough(figures: Figures, asked: argparse.Namespace) -> bool:
    """Return whether the requested number of failures is reached."""
    return asked.failures is not None and figures.failures.total() >= asked.failures


@dataclass
class Watch:
    """Follows one child. `number` is that of the next input; `began` is when the child was ready,
    None before.
    """

    figures: Figures
    asked: argparse.Namespace
    folder: Path
    number: int
    began: float | None = None
    log: str = ""

    def follow(self, seconds: float) -> None:
        """Follow the child until it ends or the time is over."""
        settings = {"kind": self.figures.name, "start": self.number, "seconds": seconds}
        words = json.dumps({**settings, "folder": str(self.folder)})
        argv = [sys.executable, __file__, "--child", words, "--engine", self.asked.engine]
        argv += ["--root", str(self.asked.root), "--seed", str(self.asked.seed)]
        with (self.folder / "child.log").open("wb") as log:
            process = subprocess.Popen(
                argv,
                stdout=subprocess.PIPE,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            self._read(process)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
            self.log = (self.folder / "child.log").read_text(errors="replace")[-2000:]

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        running, before = (
            False,
            0.0,
        )  # whether an input is being read, and the CPU seconds at its start
        for line in lines_of(process):
            told = {} if line is None else json.loads(line)
            if running and cpu_seconds(process.pid) - before > 2 * CPU_S:
                self._failed("hang: more than 20 s of CPU time")
                return
            if "engine" in told:
                self.figures.engine, self.began = told["engine"], time.monotonic()
            elif "begin" in told:
                running, before = True, cpu_seconds(process.pid)
            elif "end" in told:
                running, self.number = False, told["end"] + 1
                take(self.figures, self.asked, self.folder / f"input-{told['end']}", told)
                if enough(self.figures, self.asked):
                    return
        if running:
            self._failed(f"the process ended: {ending(process.wait())}")

    def _failed(self, text: str) -> None:
        """Record an input that did not finish."""
        self.figures.tried += 1
        self.figures.failures[text] += 1
        log = (self.folder / "child.log").read_text(errors="replace")[-4000:]
        keep(self.asked, self.figures.name, self.folder / f"input-{self.number}", text, log)
        self.number += 1


def take(figures: Figures, asked: argparse.Namespace, path: Path, told: dict[str, Any]) -> None:
    """Add the result of one input to the figures."""
    figures.tried += 1
    figures.slowest_s = max(figures.slowest_s, told["cpu"])
    figures.memory_kib = max(figures.memory_kib, told["rss"])
    if told["failure"]:
        figures.failures[told["failure"]] += 1
        keep(asked, figures.name, path, told["failure"], told["detail"])


def lines_of(process: subprocess.Popen[bytes]) -> Iterator[bytes | None]:
    """Yield the lines that a process writes until it ends, and None for each second without one."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        rest = b""
        while True:
            if not selector.select(1.0):
                yield None
                continue
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                return
            *whole, rest = (rest + data).split(b"\n")
            yield from whole


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and of its finished children."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS


def ending(code: int) -> str:
    """Describe how a process ended."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit {code}"


def keep(
    asked: argparse.Namespace, name: str, path: Path, signature: str, detail: str = ""
) -> None:
    """Keep the first failing inputs of each signature, with the command that repeats them."""
    folder = asked.out / name
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.glob(f"{digest(signature)}-*.bin")))
    if number >= KEPT or not path.exists():
        return
    target = folder / f"{digest(signature)}-{number}.bin"
    shutil.copyfile(path, target)
    words = ["python", "scripts/campaign.py", "--root", str(asked.root), "--repeat", str(target)]
    note(folder, signature, f"{shlex.join(words)}\n{detail}\n")


# ---- readers: the child, which reads ----


@dataclass(frozen=True)
class Reader:
    """Reads inputs of one kind through the command line, in this process."""

    kind: Kind
    main: Callable[[], None]
    store: bytes
    folder: Path

    def read(self, data: bytes) -> dict[str, Any]:
        """Read one input. Return its failure (or ""), answer, CPU seconds and peak memory."""
        place = self.folder / "place"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        store = place / "profharness.db"
        before = None
        commands = self.kind.commands(self.kind.place(data, place))
        if self.kind.name != "store":
            store.write_bytes(self.store)
            before = rows(store)
        began = used()
        failure, answer, detail = "", [], ""
        for command in commands:
            if "--store" not in command and self.kind.has_store:
                command = [*command, "--store", str(store)]
            code, told, wrong = self.call(command)
            answer.append((code, re.sub(r"\d+|/\S+|'[^']*'", "#", told[:160])))
            if wrong and not failure:
                failure, detail = wrong, f"{shlex.join(command)}\n{told}"
            if before is not None and command[0] == "ingest" and not failure:
                refused = code != 0 and self.kind.name != "run-folder"
                failure = damage_of(store, before if refused else None)
                detail = f"{shlex.join(command)}\nexit {code}\n{told}" if failure else detail
        for copy in place.glob("copy*") if self.kind.planted else ():
            if not failure and self.kind.planted.encode() in copy.read_bytes():
                failure = "a planted secret is in the copy"
        usage = used() - began
        peak = peak_kib()
        if usage > CPU_S and not failure:
            failure = "hang: more than 20 s of CPU time"
        if peak > MEMORY_KIB and not failure:
            failure = "memory: more than 400 MB"
        return {
            "failure": failure,
            "detail": detail[-4000:],
            "cpu": usage,
            "rss": peak,
            "answer": repr(answer),
        }

    def call(self, command: list[str]) -> tuple[int, str, str]:
        """Return the exit code, the text on stderr, and what is wrong with it."""
        out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
        sys.argv = ["profharness", *command]
        code, wrong = 0, ""
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                self.main()
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            except BaseException as error:
                code, wrong = -1, signature(error)
                traceback.print_exc()
        told = err.buffer.getvalue().decode("utf-8", "replace")  # type: ignore[attr-defined]
        if not wrong and "Traceback (most recent call last)" in told:
            wrong = f"traceback: {told.strip().splitlines()[-1][:80]}"
        if not wrong and code not in CODES:
            wrong = f"exit code {code}"
        return code, told, wrong


def signature(error: BaseException) -> str:
    """Return the type of an error, and the innermost line of the package in its traceback."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "profharness" in frame.filename
    ]
    where = f"{Path(frames[-1].filename).name} {frames[-1].name}" if frames else "?"
    return f"{type(error).__name__} in {where}"


def used() -> float:
    """Return the CPU seconds of this process and its children."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    usages = [resource.getrusage(kind) for kind in kinds]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def peak_kib() -> int:
    """Return the peak resident memory of this process in KiB. getrusage may return the peak of the
    parent, because Linux inherits the figure from before the exec.
    """
    status = Path("/proc/self/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1])


def rows(store: Path) -> dict[str, int]:
    """Return the number of rows of each table."""
    connection = sqlite3.connect(store)
    try:
        names = [
            n for (n,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        ]
        return {n: connection.execute(f'SELECT count(*) FROM "{n}"').fetchone()[0] for n in names}
    finally:
        connection.close()


def damage_of(store: Path, before: dict[str, int] | None) -> str:
    """Return what is wrong with a store: damage, or a change by a refused input."""
    if wrong := whole(store):
        return wrong
    connection = sqlite3.connect(store)
    try:
        if connection.execute("SELECT 1 FROM launch_groups WHERE min_ns < 0 LIMIT 1").fetchone():
            return "store: a negative time"
    except sqlite3.OperationalError as error:
        return f"store: {error}"
    finally:
        connection.close()
    if before is not None and rows(store) != before:
        return "store: changed by a refused input"
    return ""


def child(asked: argparse.Namespace) -> int:
    """Read inputs until killed or the time is over. Print a line of JSON before and after each."""
    settings = json.loads(asked.child)
    kind, folder = KINDS[settings["kind"]], Path(settings["folder"])
    pipe = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # atheris prints its progress there
    os.chdir(folder)

    def tell(**what: Any) -> None:
        pipe.write(json.dumps(what) + "\n")

    engine = asked.engine
    if engine == "auto":
        engine = "atheris" if importlib.util.find_spec("atheris") else "seeded"
    reader, seeds = opened(kind, folder, asked.root, engine)
    tell(engine=engine)
    number = settings["start"]

    def one(data: bytes) -> dict[str, Any]:
        nonlocal number
        path = folder / f"input-{number}"
        path.write_bytes(data)
        tell(begin=number)
        told = reader.read(data)
        if not told["failure"]:
            path.unlink()
        tell(end=number, **{key: told[key] for key in ("failure", "detail", "cpu", "rss")})
        number += 1
        if told["rss"] > MEMORY_KIB:
            pipe.flush()
            os._exit(3)  # the next child starts with little memory
        return told

    if engine == "atheris":
        guided(kind, seeds, one, settings["seconds"], f"{asked.seed}{number}")
        return 0
    seen: set[str] = set()
    end = time.monotonic() + settings["seconds"]
    while time.monotonic() < end:
        random = Random(f"{asked.seed}-{kind.name}-{number}")
        data = kind.change(random.choice(seeds), random)
        answer = one(data)["answer"]
        if answer not in seen and len(seeds) < CORPUS:
            seen.add(answer)
            seeds.append(data)
        if number % 200 == 0:
            gc.collect()
    return 0


def opened(kind: Kind, folder: Path, root: Path, engine: str) -> tuple[Reader, list[bytes]]:
    """Import the package of the checkout, and make a store with one run and the initial inputs."""
    sys.path.insert(0, str(root))
    instrumented: Any = contextlib.nullcontext()
    if engine == "atheris":
        instrumented = importlib.import_module("atheris").instrument_imports(
            include=["profharness"]
        )
    with instrumented:
        from profharness.cli import COMMANDS, main  # of --root

        for module, _ in COMMANDS.values():
            with contextlib.suppress(Exception):
                importlib.import_module(module)
        importlib.import_module("profharness.traces")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    base = folder / "base.db"
    reader = Reader(kind, main, b"", folder)
    code, told, _ = reader.call(["ingest", str(DATA / "kineto_h200.json.gz"), "--store", str(base)])
    assert code == 0, told
    connection = sqlite3.connect(base)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    store = base.read_bytes()
    return Reader(kind, main, store, folder), kind.seeds() or [store]


def guided(
    kind: Kind, seeds: list[bytes], one: Callable[[bytes], Any], seconds: float, seed: str
) -> None:
    """Fuzz with atheris. Never returns, because libFuzzer ends the process."""
    atheris = importlib.import_module("atheris")
    corpus = Path("corpus")
    corpus.mkdir()
    for number, data in enumerate(seeds):
        (corpus / str(number)).write_bytes(data)

    def change(data: bytes, limit: int, number: int) -> bytes:
        return kind.change(data, Random(number))[:limit]

    argv = ["campaign", f"-max_total_time={int(seconds) + 1}", f"-seed={int(seed) % 2**31}"]
    argv += ["-max_len=700000", "-rss_limit_mb=0", "-timeout=0", "-print_final_stats=0", "corpus"]
    atheris.Setup(argv, lambda data: one(data) and None, custom_mutator=change)
    atheris.Fuzz()


def repeat(asked: argparse.Namespace) -> int:
    """Repeat one kept input and print its answer."""
    path = asked.repeat.resolve()
    kind = KINDS[path.parent.name]
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        os.chdir(folder)
        reader, _ = opened(kind, Path(folder), asked.root, "seeded")
        told = reader.read(path.read_bytes())
        os.chdir("/")
    print("\n".join(f"{key}: {value}" for key, value in told.items()))
    return int(bool(told["failure"]))


if __name__ == "__main__":
    # nohup and shells make background processes ignore signals, and the trials would inherit this
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
