"""Run generated programs alone and under `profharness observe`, and compare exit code, stdout,
stderr, and the number of attention calls. Print one line per kind of program. Exit with 1 if
anything differs.

python scripts/check_observe.py                                   5 of each kind, on the CPU
python scripts/check_observe.py --programs 50 --jobs 8 --seed 3 --only threads,fork
python scripts/check_observe.py --device cuda --keep failing     keep the programs that failed

The programs train and infer in threads, pools, coroutines, forks and loaders, and end in many
ways. The fault campaign runs them as the kind `observed`.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 300.0
OPTIONS: tuple[tuple[str, ...], ...] = (
    (),
    ("--warmup", "0"),
    ("--steps", "1", "--warmup", "1"),
    ("--steps", "2", "--warmup", "2"),
)
# Output of PyTorch's tracer at its first start, and when the program starts its own profiler.
TRACER_LINES = re.compile(r"USDT:|ERROR: External init callback|ERROR:.* DeviceProperties\.cpp:")

PROLOGUE = '''
import asyncio, concurrent.futures, contextlib, functools, multiprocessing, os, signal, sys, threading
import time
import torch
import torch.nn.functional as F

torch.set_num_threads(1)
print = functools.partial(print)
threading.excepthook = lambda told: sys.stderr.write(f"{told.exc_type.__name__} in a thread\\n")
DEVICE = {device!r}
MADE = threading.Lock()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = (p.unflatten(-1, (4, 8)).transpose(1, 2) for p in self.inner(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.outer(y.transpose(1, 2).flatten(-2))


class Job:
    """A model with data of its own; a step is one call of attention."""

    def __init__(self, seed, train, device=DEVICE):
        with MADE:
            torch.manual_seed(seed)
            self.net, self.x = Net().to(device), torch.randn(2, 16, 32).to(device)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 1e-2) if train else None
        self.last = 0.0

    def step(self):
        with contextlib.nullcontext() if self.optimizer else torch.no_grad():
            loss = self.net(self.x).square().mean()
        if self.optimizer:
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.last = loss.item()

    def run(self, steps):
        for _ in range(steps):
            self.step()
        return round(self.last, 4) if DEVICE == "cpu" else self.last < 1e9


def work(seed, steps, train=True, device=DEVICE):
    return Job(seed, train, device).run(steps)


def infer(seed, steps=3):
    """For children, which cannot use the parent's GPU."""
    return work(seed, steps, False, "cpu")


class Data(torch.utils.data.Dataset):
    """Calls attention for each item, in a worker of the loader."""

    def __len__(self):
        return 12

    def __getitem__(self, at):
        return torch.tensor(infer(at, 1))

'''


@dataclass(frozen=True)
class Program:
    """A program, and the number of attention calls in all its processes."""

    kind: str
    source: str
    calls: int
    options: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """The difference under `observe`, if any, and the number of calls counted."""

    program: Program
    failure: str
    detail: str
    counted: int = 0
    traced: bool = False


def threads(random: Random) -> tuple[str, int]:
    """Generate threads that train or infer, with or without work in the main thread."""
    count, steps, own = random.randint(2, 12), random.randint(1, 10), random.choice((0, 0, 7, 12))
    body = f"""
    told = {{}}
    def go(at):
        told[at] = work(at, {steps}, train={random.random() < 0.6})
    each = [threading.Thread(target=go, args=(at,), daemon={random.random() < 0.3}) for at in range({count})]
    for thread in each: thread.start()
    print(work(99, {own}, train={random.random() < 0.7}))
    for thread in each: thread.join()
    print(sorted(told.items()))"""
    return body, count * steps + own


def one_model(random: Random) -> tuple[str, int]:
    """Generate threads that share a model."""
    count, steps, own = random.randint(2, 8), random.randint(1, 12), random.choice((0, 9))
    body = f"""
    job = Job(1, False)
    each = [threading.Thread(target=job.run, args=({steps},)) for _ in range({count})]
    for thread in each: thread.start()
    print(job.run({own}))
    for thread in each: thread.join()"""
    return body, count * steps + own


def pools(random: Random) -> tuple[str, int]:
    """Generate tasks of a thread pool."""
    tasks, steps, own = random.randint(4, 16), random.randint(1, 6), random.choice((0, 6, 10))
    train = random.random() < 0.5
    body = f"""
    with concurrent.futures.ThreadPoolExecutor({random.randint(1, 6)}) as pool:
        told = [pool.submit(work, at, {steps}, {train}) for at in range({tasks})]
        print(work(99, {own}))
        print([each.result() for each in told])"""
    return body, tasks * steps + own


def coroutines(random: Random) -> tuple[str, int]:
    """Generate asyncio.to_thread, and attention in coroutines."""
    tasks, steps, own = random.randint(2, 10), random.randint(1, 6), random.choice((0, 8, 12))
    body = f"""
    async def serve():
        job = Job(99, False)
        async def here():
            for _ in range({own}):
                job.step()
                await asyncio.sleep(0)
        calls = [asyncio.to_thread(work, at, {steps}, {random.random() < 0.5}) for at in range({tasks})]
        told = await asyncio.gather(here(), *calls)
        print(told)
    asyncio.run(serve())"""
    return body, tasks * steps + own


def churn(random: Random) -> tuple[str, int]:
    """Generate threads that start and end at every step of the main thread."""
    own, count, steps = random.randint(8, 16), random.randint(1, 3), random.randint(0, 2)
    body = f"""
    job, each = Job(99, {random.random() < 0.7}), []
    for at in range({own}):
        for number in range({count}):
            each.append(threading.Thread(target=work, args=(at, {steps})))
            each[-1].start()
        job.step()
        if at % {random.randint(1, 4)} == 0:
            while each: each.pop().join()
    while each: each.pop().join()
    print(job.run(0))"""
    return body, own + own * count * steps


def daemons(random: Random) -> tuple[str, int]:
    """Generate daemon threads that are still running at the end."""
    count, steps, own = random.randint(1, 6), random.randint(1, 8), random.choice((0, 5, 9))
    rest = random.choice(("threading.Event().wait()", "while True: time.sleep(1e-4)"))
    body = f"""
    ready = [threading.Event() for _ in range({count})]
    def go(at):
        work(at, {steps})
        ready[at].set()
        {rest}
    for at in range({count}):
        threading.Thread(target=go, args=(at,), daemon=True).start()
    print(work(99, {own}))
    for each in ready: each.wait()
    {random.choice(ENDS)}"""
    return body, count * steps + own


def forks(random: Random) -> tuple[str, int]:
    """Generate os.fork before, during and after the recorded steps, with children that end in many
    ways.
    """
    own, calls, lines = random.randint(9, 14), 0, []
    places = sorted(random.sample(range(own), random.randint(1, 3)))
    for place in places:
        steps, end = random.randint(0, 4), random.choice(ENDS)
        calls += steps
        lines += [
            f"        if at == {place}:",
            "            child = os.fork()",
            "            if not child:",
            f"                infer(at, {steps})",
            f"                {end}",
            "                sys.exit(0)",
            "            print('child', os.waitpid(child, 0)[1])",
        ]
    return "\n".join(
        [
            f"\n    job = Job(99, {random.random() < 0.7})",
            f"    for at in range({own}):",
            *lines,
            "        job.step()",
            "    print(job.run(0))",
        ]
    ), calls + own


def fork_in_thread(random: Random) -> tuple[str, int]:
    """Generate a thread that forks while the main thread continues."""
    own, steps = random.randint(8, 14), random.randint(0, 3)
    body = f"""
    def go():
        child = os.fork()
        if not child:
            os._exit(3)
        print("child", os.waitpid(child, 0)[1])
    job = Job(99, {random.random() < 0.7})
    for at in range({own}):
        if at in ({random.randint(0, 4)}, {random.randint(5, 7)}):
            thread = threading.Thread(target=go)
            thread.start()
            infer(at, {steps})
            thread.join()
        job.step()"""
    return body, own + 2 * steps


def processes(random: Random) -> tuple[str, int]:
    """Generate multiprocessing: processes, pools that are terminated, executors."""
    own, tasks, steps = random.choice((0, 6, 10)), random.randint(2, 5), random.randint(1, 5)
    how = random.choice(("fork", "fork", "spawn"))
    starts = {
        "process": f"""each = [context.Process(target=infer, args=(at, {steps})) for at in range({tasks})]
        for child in each: child.start()
        for child in each: child.join()
        print([child.exitcode for child in each])""",
        "pool": f"""with context.Pool(2) as pool:
            print(pool.starmap(infer, [(at, {steps}) for at in range({tasks})]))""",
        "executor": f"""with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
            print(list(pool.map(infer, range({tasks}), [{steps}] * {tasks})))""",
    }
    body = f"""
    context = multiprocessing.get_context({how!r})
    job = Job(99, {random.random() < 0.7})
    for _ in range(2):
        job.run({own})
        {random.choice(list(starts.values()))}
    print(job.run(0))"""
    return body, 2 * (own + tasks * steps)


def loaders(random: Random) -> tuple[str, int]:
    """Generate training with a data loader whose workers also call attention."""
    epochs, batch, workers = random.randint(1, 3), random.choice((1, 2, 3)), random.randint(1, 2)
    body = f"""
    job = Job(99, True)
    keep = {random.random() < 0.5}
    loader = torch.utils.data.DataLoader(
        Data(), batch_size={batch}, num_workers={workers}, persistent_workers=keep
    )
    for _ in range({epochs}):
        for batch in loader:
            job.step()
    print(job.run(0), float(batch.sum()))"""
    return body, epochs * (12 + 12 // batch)


ENDS = (
    "sys.exit(0)",
    "sys.exit(5)",
    "os._exit(6)",
    "raise ValueError('on purpose')",
    "os.kill(os.getpid(), signal.SIGKILL)",
    "os.kill(os.getpid(), signal.SIGTERM)",
    "os.abort()",
)


def exits(random: Random) -> tuple[str, int]:
    """Generate ends of the process and its threads, during and after the recorded steps."""
    own, count, steps = random.randint(1, 12), random.randint(0, 4), random.randint(1, 4)
    ends = ("sys.exit(3)", "raise ValueError('in a thread')", "pass")
    body = f"""
    def go(at):
        work(at, {steps})
        {random.choice(ends)}
    each = [threading.Thread(target=go, args=(at,)) for at in range({count})]
    for thread in each: thread.start()
    print(work(99, {own}, train={random.random() < 0.7}))
    for thread in each: thread.join()
    {random.choice(ENDS)}"""
    return body, own + count * steps


def exit_in_thread(random: Random) -> tuple[str, int]:
    """Generate os._exit in a thread, and os.execv."""
    own, steps = random.randint(0, 10), random.randint(1, 6)
    if random.random() < 0.5:
        body = f"""
    print(work(1, {steps}))
    if sys.argv[1:] != ["again"]:
        work(2, {own})
        os.execv(sys.executable, [sys.executable, __file__, "again"])"""
        return body, 2 * steps + own
    body = f"""
    def go():
        work(1, {steps})
        os._exit(7)
    print(work(99, {own}))
    threading.Thread(target=go).start()
    time.sleep(60)"""
    return body, own + steps


def errors(random: Random) -> tuple[str, int]:
    """Generate calls that raise, in the main thread and in others."""
    count, steps = random.randint(1, 6), random.randint(1, 4)
    body = f"""
    def go(at):
        for number in range({steps}):
            q = torch.zeros(1, 2, 4 + at, 8)
            try:
                F.scaled_dot_product_attention(q, q[..., :5], q)
            except RuntimeError:
                work(at, 1)
    each = [threading.Thread(target=go, args=(at,)) for at in range({count})]
    for thread in each: thread.start()
    go(50)
    for thread in each: thread.join()
    q = torch.zeros(1, 2, 4, 8)
    F.scaled_dot_product_attention(q, q[..., :5], q)"""
    return body, 2 * steps * (count + 1) + 1


def profilers(random: Random) -> tuple[str, int]:
    """Generate a program with its own profiler: in the main thread, in another, with a schedule."""
    begin, length, own = random.randint(0, 8), random.randint(1, 4), 14
    body = f"""
    def counted(profiler):
        name = "aten::scaled_dot_product_attention"
        print(sum(event.name == name for event in profiler.events()))
    job = Job(99, {random.random() < 0.7})
    job.run({begin})"""
    form = random.choice(("main", "thread", "schedule"))
    if form == "main":
        body += f"""
    with torch.profiler.profile() as profiler:
        job.run({length})
    counted(profiler)"""
    elif form == "thread":
        body += f"""
    def go():
        with torch.profiler.profile() as profiler:
            work(1, {length})
        counted(profiler)
    thread = threading.Thread(target=go)
    thread.start()
    thread.join()"""
    else:
        body += f"""
    plan = torch.profiler.schedule(wait={random.randint(0, 3)}, warmup={random.randint(1, 5)}, active=2)
    with torch.profiler.profile(schedule=plan, on_trace_ready=counted) as profiler:
        for _ in range({own}):
            job.step()
            profiler.step()"""
        return body, begin + own
    body += f"""
    job.run({own})"""
    return body, begin + length + own


KINDS: dict[str, Callable[[Random], tuple[str, int]]] = {
    "threads": threads,
    "one-model": one_model,
    "pools": pools,
    "coroutines": coroutines,
    "churn": churn,
    "daemons": daemons,
    "forks": forks,
    "fork-in-thread": fork_in_thread,
    "processes": processes,
    "loaders": loaders,
    "exits": exits,
    "exit-in-thread": exit_in_thread,
    "errors": errors,
    "profilers": profilers,
}


def generate(kind: str, random: Random, device: str = "cpu") -> Program:
    """Generate a program of a kind."""
    body, calls = KINDS[kind](random)
    head = PROLOGUE.replace("{device!r}", repr(device))
    source = f'{head}\ndef main():{body}\n\n\nif __name__ == "__main__":\n    main()\n'
    return Program(kind, source, calls, random.choice(OPTIONS))


def try_program(program: Program, place: Path, environment: Mapping[str, str]) -> Result:
    """Run a program alone and observed, in its own folder."""
    (place / "program.py").write_text(program.source)
    argv = [sys.executable, "program.py"]
    alone = _run(argv, place, environment)
    observe = [sys.executable, "-m", "profharness", "observe", *program.options, "--"]
    seen = _run([*observe, *argv], place, environment)
    found = re.search(r"^([\d,]+) attention calls of", seen.err, re.M)
    counted = int(found[1].replace(",", "")) if found else 0
    failure = _difference(program, alone, seen, counted)
    detail = (
        f"{program.options} exit {alone.code} and {seen.code}\n--- alone\n{alone.out}{alone.err}"
    )
    detail += f"\n--- observed\n{seen.out}{seen.err}"
    traced = any(place.glob("traces/runs/*/*.torch.json.gz"))
    return Result(program, failure, detail[-6000:], counted, traced)


@dataclass(frozen=True)
class _Ended:
    code: int
    out: str
    err: str


def _run(argv: Sequence[str], place: Path, environment: Mapping[str, str]) -> _Ended:
    process = subprocess.Popen(
        argv,
        cwd=place,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        return _Ended(-1, out, f"{err}\nit did not end")
    code = process.returncode
    return _Ended(code if code >= 0 else 128 - code, out, err)


def _difference(program: Program, alone: _Ended, seen: _Ended, counted: int) -> str:
    """Return the first difference from the program run alone."""
    if seen.code != alone.code:
        return f"{program.kind}: different exit code"
    if seen.out != alone.out:
        return f"{program.kind}: different output"
    if missing := _lines(alone.err) - _lines(seen.err):
        return f"{program.kind}: a line of stderr is missing: {next(iter(missing))[:60]}"
    if foreign := [line for line in _lines(seen.err) - _lines(alone.err) if _is_fault(line)]:
        return f"{program.kind}: a line of stderr is new: {foreign[0][:60]}"
    if counted != program.calls:
        return f"{program.kind}: {'fewer' if counted < program.calls else 'more'} calls counted"
    return ""


def _lines(text: str) -> Counter[str]:
    """Return the lines without what differs between runs."""
    lines = (re.sub(r"0x[0-9a-f]+|\d+", "#", line).strip() for line in text.splitlines())
    return Counter(line for line in lines if not TRACER_LINES.match(line))


def _is_fault(line: str) -> bool:
    """Return whether a line that the program does not print alone reports a fault."""
    return line.startswith(("Traceback", "profharness:", "warning:", "error:", "ERROR:", "Fatal"))


def main() -> int:
    """Print the figures of each kind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=5, help="of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="programs that run at once")
    parser.add_argument("--only", default=",".join(KINDS), help="kinds, joined by commas")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--keep", type=Path, help="a folder for the programs that failed")
    asked = parser.parse_args()
    failed = 0
    for kind in asked.only.split(","):
        random = Random(f"{asked.seed}-{kind}")
        programs = [generate(kind, random, asked.device) for _ in range(asked.programs)]
        with ThreadPoolExecutor(asked.jobs) as pool:
            results = list(pool.map(try_in_folder, programs))
        failures = Counter(result.failure for result in results if result.failure)
        failed += failures.total()
        print(
            f"{kind:15} {len(results):4} tried, {failures.total():3} failed, "
            f"{sum(result.counted for result in results):,} of "
            f"{sum(program.calls for program in programs):,} calls counted, "
            f"{sum(result.traced for result in results)} with recorded steps"
            + "".join(f"\n  {count} x {text}" for text, count in failures.items()),
            flush=True,
        )
        for number, result in enumerate(results):
            if result.failure and asked.keep:
                asked.keep.mkdir(parents=True, exist_ok=True)
                (asked.keep / f"{kind}-{number}.py").write_text(result.program.source)
                (asked.keep / f"{kind}-{number}.txt").write_text(result.detail)
    print(f"{asked.device}: {failed} of {asked.programs * len(asked.only.split(','))} failed")
    return int(failed > 0)


def try_in_folder(program: Program) -> Result:
    """Try a program in a temporary folder, with the package of this checkout."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        return try_program(program, Path(folder), {**os.environ, "PYTHONPATH": paths})


if __name__ == "__main__":
    sys.exit(main())
