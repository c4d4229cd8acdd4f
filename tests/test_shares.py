"""No share in any answer about any trace exceeds 100 %."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from make_trace import make_trace
from step_traces import engine, iterations, work, written

from profharness.cli import find_command
from profharness.store import ingest_path, open_store

ROOT = Path(__file__).resolve().parents[1]

TRACES = (
    *sorted((ROOT / "traces" / "models").iterdir()),
    *(ROOT / "traces" / "h200-torch-nsys-ncu", ROOT / "traces" / "h200-torch2.11"),
    *(ROOT / "tests" / "data" / name for name in ("kineto_h200.json.gz", "ncu_h200.ncu-rep.gz")),
    *sorted((ROOT / "tests" / "data").glob("*nsys*.gz")),
)
SHARES = frozenset({
    "share", "step_share", "predicted_share", "occupancy", "shared_share", "idle", "collectives",
    "exposed", "busy_share",
})  # fmt: skip
# the time of the first key is a part of the time of the second
PARTS = {"busy_ns": "duration_ns", "idle_ns": "span_ns", "exposed_ns": "collective_ns"}
COMMANDS = (
    *(["layers"], ["report"], ["kernels", "--run"], ["kernels", "--steps", "--run"]),
    ["analyze", "--run"],
)


def excesses(value: Any, path: str = "") -> Iterator[str]:
    """Yield the places in a JSON value where a share is not between 0 and 1."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in SHARES and isinstance(inner, int | float) and not -1e-9 <= inner <= 1 + 1e-9:
                yield f"{path}.{key} = {inner}"
            whole = value.get(PARTS.get(key, ""))
            if inner is not None and whole is not None and inner > whole:
                yield f"{path}.{key} = {inner} of {whole}"
            yield from excesses(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield from excesses(inner, f"{path}[{at}]")


def shares_in_words(read: Any) -> Iterator[str]:
    """Yield the shares above 100 % in the answer of `layers`."""
    for sentence in (read or {}).get("answer", ()):
        yield from (sentence for share in re.findall(r"([\d.]+) %", sentence) if float(share) > 100)


def answer(*arguments: str) -> Any:
    command, *options = arguments
    result = CliRunner().invoke(find_command(command), [*options, "--format", "json"])
    return json.loads(result.stdout) if result.exit_code == 0 else None


def concurrent(folder: Path) -> Path:
    """Return a trace in which attention runs on two streams of two GPUs at the same time."""
    events = [*iterations("iteration {}", 4)]
    for at in range(4):
        for stream, device in ((8, 0), (7, 1), (8, 1)):
            number = 100 * (10 * device + stream) + at
            gpu = {"stream": stream, "device": device}
            events += work(number, 100 * at + 21, 100 * at + 26, 900, **gpu)
    return written(folder, events)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of all committed traces, and of generated ones."""
    folder = tmp_path_factory.mktemp("shares")
    made: list[Path] = []
    for at, form in enumerate(("execute_context_0(0)_generation_8(8)", "step[DECODE bs=8]")):
        (folder / f"{at}").mkdir()
        made.append(written(folder / f"{at}", engine(form, 5 + at)))
    (folder / "concurrent").mkdir()
    made.append(concurrent(folder / "concurrent"))
    made.append(folder / "long.json")
    make_trace(ROOT / "traces" / "models" / "llama_train.json.gz", made[-1], 8_000_000, "train")
    for path in (*TRACES, *made):
        ingest_path(folder / "store.db", path)
    return folder / "store.db"


def test_no_share_exceeds_the_whole(store: Path) -> None:
    with open_store(store) as stored:
        runs = [run.run for run in stored.runs()]
    found, answers = [], 0
    for run in runs:
        for command in COMMANDS:
            read = answer(*command, run, "--store", str(store))
            answers += read is not None
            found += [f"{' '.join(command)} {run}: {text}" for text in excesses(read)]
            found += shares_in_words(read) if command == ["layers"] else ()
    for first, second in pairwise(runs):
        for command in ("diff", "report", "ranks"):
            read = answer(command, first, second, "--store", str(store))
            answers += read is not None
            found += [f"{command} {first} {second}: {text}" for text in excesses(read)]
    assert found == []
    assert answers > 3 * len(runs)
