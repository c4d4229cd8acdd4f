"""Compare the answers of the reading commands on the committed traces with recorded answers.

python scripts/check_golden.py                     compare; exit 1 and print each difference
python scripts/check_golden.py --only layers,diff  compare the cases of these commands alone
python scripts/check_golden.py --write             record the answers of this checkout
python scripts/check_golden.py --root ../other     test another checkout

A case is one command line. Its answer is the exit code and the JSON on stdout; for a text that is
not JSON, such as a script of `repro`, the text. Nothing here needs a GPU or PyTorch.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "data" / "golden.json.xz"
SOURCES = {  # archive in traces/: what of it is ingested
    "studies": ("runs",),
    "counters": ("counters",),
    "intervals": ("gpu0/slower", "gpu1/slower"),
    "forecast-h200": ("*-0.json",),
}
TIMEOUT_S = 300
SHOWN = 5  # differences printed per case

CAPTURES = ("20261121-165619-f5ef", "20261121-151544-59c7")
CONFIGS = (
    "2,8,512,64,fp16",
    "2,8,512,100,fp32,mask=bool",
    "1,32,1,128,bf16,kv_heads=8,seq_kv=4096",
    "2,8,1024,64,fp16,causal,bwd",
    "8,16,2048,256,bf16,dropout=0.1,bwd",
    "1,4,4096,64,fp32,layout=bshd,causal",
)
GPUS = ("H200", "A100", "RTX 4090", "sm75", "cpu")
NAMES = (
    "flash_fwd_splitkv_kernel<64,64x256,w4>",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_kernel0_0",
    "fmha_cutlassF_f16_aligned_64x64_rf_sm80",
    "unknown_kernel_name",
)


def ask(root: Path, folder: Path, *argv: str) -> tuple[int, str, str]:
    """Run one command of a checkout in a folder. Return its exit code, stdout and stderr."""
    environ = {name: value for name, value in os.environ.items() if "PROFHARNESS" not in name}
    environ |= {"PYTHONPATH": str(root), "PROFHARNESS_STORE": "golden.db", "COLUMNS": "120"}
    environ |= {"XDG_DATA_HOME": str(folder / "data")}
    command = [sys.executable, "-m", "profharness", *argv]
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    return done.returncode, done.stdout, done.stderr


def make_store(root: Path, folder: Path) -> dict[str, str]:
    """Ingest the contents of traces/ into golden.db. Return the kind of each run by its id."""
    # traces/runs has what was captured here
    shutil.copytree(ROOT / "traces", folder / "traces", ignore=shutil.ignore_patterns("runs"))
    sources = ["traces"]
    for name, patterns in SOURCES.items():
        with tarfile.open(ROOT / "traces" / f"{name}.tar.xz") as archive:
            archive.extractall(folder / name, filter="data")
        found = (path for pattern in patterns for path in (folder / name).glob(pattern))
        sources += sorted(str(path.relative_to(folder)) for path in found)
    code, _, errors = ask(root, folder, "ingest", *sources)
    if code:
        raise SystemExit(f"ingest failed with {code}:\n{errors}")
    _, text, _ = ask(root, folder, "runs", "--format", "json")
    return {row["run"]: row["kind"] for row in reversed(json.loads(text)["rows"])}


def run_cases(runs: dict[str, str]) -> Iterator[tuple[str, ...]]:
    """Yield the command lines that query each stored run."""
    yield ("runs",)
    for run, kind in runs.items():
        yield ("analyze", "--run", run, "--full", "--peaks", "data-sheet")
        yield ("report", run)
        if kind in ("trace", "observe"):
            yield ("layers", run, "--full")
            yield ("layers", run, "--gpu", "H200")
            yield ("layers", run, "--list-configs")
            yield ("layers", run, "--fail-on", "math-fallback,eager-attention,unseen")
        else:
            yield ("kernels", "--run", run)
            yield ("bench", "--run", run)
    for run in CAPTURES:
        yield ("kernels", "--run", run, "--profiler", "all", "--full")
        yield ("kernels", "--run", run, "--steps")
        for expected in ("flash", "cudnn", "efficient"):
            yield ("kernels", "--run", run, "--backend", "auto", "--expect", expected)


def diff_cases(runs: dict[str, str]) -> Iterator[tuple[str, ...]]:
    """Yield the command lines that compare runs, backends and ranks."""
    gates = "changed,slower,memory,launches,refused"
    for run in CAPTURES:
        for first, second in (("flash", "cudnn"), ("math", "auto"), ("efficient", "flash")):
            yield ("diff", f"{run}:{first}", f"{run}:{second}", "--full")
            yield ("diff", f"{run}:{first}", f"{run}:{second}", "--fail-on", gates)
    yield ("diff", *CAPTURES)
    yield ("diff", *reversed(CAPTURES), "--fail-on", gates)
    programs = sorted(run for run, kind in runs.items() if kind == "trace")
    for first, second in zip(programs[::2], programs[1::2], strict=False):
        yield ("diff", first, second)
        yield ("diff", first, second, "--fail-on", "backend-changed")
        yield ("layers", first, second)
    yield ("ranks", *programs[:4])
    yield ("report", *programs[:2])
    for run in (*programs[:2], CAPTURES[0]):
        yield ("export", run, "-o", "-")


def rule_cases() -> Iterator[tuple[str, ...]]:
    """Yield the command lines that need only rules, names and atlases."""
    for config in CONFIGS:
        for gpu in GPUS:
            yield ("explain", "--config", config, "--gpu", gpu, "--torch", "2.5..2.15")
        for release in ("2.5", "2.11", "2.15"):
            yield ("explain", "--config", config, "--gpu", "H100", "--torch", release, "--full")
        yield ("predict", "--config", config, "--gpu", "H200")
        yield ("kernels", "--config", config, "--gpu", "H200")
        yield ("repro", "--config", config, "--backend", "math", "--device", "cpu")
    sets = "2,8,{64:4096:*4},{64,80,96,100,128}"
    yield ("explain", "--config", sets, "--gpu", "H200", "--torch", "2.11")
    yield ("predict", "--config", f"{sets},{{fp16,fp32}}", "--gpu", "H200", "--full")
    yield ("predict", "--config", CONFIGS[0], "--gpu", "A100")
    for wrong in ("1,2,3", "2,8,512,64,colour=red", "2,8,512,64,kv_heads=3"):
        yield ("explain", "--config", wrong, "--gpu", "H200", "--torch", "2.11")
    yield ("explain-kernel", *NAMES)
    yield ("atlas", "list")


def without_machine(value: Any) -> Any:
    """Return an answer without what differs between machines, days and stores: times, paths and row ids."""
    if isinstance(value, dict):
        return {
            key: without_machine(each)
            for key, each in value.items()
            if key != "created" and not (key in ("trace", "flow", "id") and isinstance(each, int))
        }
    if isinstance(value, list):
        return [without_machine(each) for each in value]
    if isinstance(value, str) and value.startswith("/") and "/profharness/" in value:
        return value.rpartition("/")[2]
    return value


def answer(root: Path, folder: Path, case: tuple[str, ...]) -> dict[str, Any]:
    """Run one case. Return its exit code and its output."""
    as_json = (
        () if case[0] in ("export", "repro") or "--list-configs" in case else ("--format", "json")
    )
    code, text, _ = ask(root, folder, *case, *as_json)
    try:
        return {"code": code, "json": without_machine(json.loads(text))}
    except ValueError:
        return {"code": code, "text": text}


def differences(old: Any, new: Any, place: str = "") -> Iterator[str]:
    """Yield the places where two answers differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old | new:
            missing = object()
            yield from differences(old.get(key, missing), new.get(key, missing), f"{place}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from differences(one, other, f"{place}[{number}]")
    elif isinstance(old, float) and isinstance(new, float):
        if not math.isclose(old, new, rel_tol=1e-9):  # numpy's sums differ between processors
            yield f"{place}: {old} -> {new}"
    elif old != new:
        yield f"{place}: {shorten(old)} -> {shorten(new)}"


def shorten(value: Any) -> str:
    """Return a value as text of at most 200 characters."""
    text = "missing" if type(value) is object else json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--write", action="store_true", help="record the answers")
    parser.add_argument("--only", default="", help="commands, separated by commas")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to test")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    only = set(filter(None, options.only.split(",")))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        runs = make_store(options.root.resolve(), folder)
        cases = [*run_cases(runs), *diff_cases(runs), *rule_cases()]
        cases = [case for case in dict.fromkeys(cases) if not only or case[0] in only]
        with ThreadPoolExecutor(options.jobs) as pool:
            answers = pool.map(lambda case: answer(options.root.resolve(), folder, case), cases)
            found = {" ".join(case): each for case, each in zip(cases, answers, strict=True)}
    if options.write:
        GOLDEN.write_bytes(lzma.compress(json.dumps(found, sort_keys=True).encode(), preset=9))
        print(
            f"{len(found)} answers in {GOLDEN.relative_to(ROOT)}, {GOLDEN.stat().st_size:,} bytes"
        )
        return 0
    golden = json.loads(lzma.decompress(GOLDEN.read_bytes()))
    wrong = 0
    for name in found:
        places = list(differences(without_machine(golden.get(name)), found[name]))
        wrong += bool(places)
        for place in places[:SHOWN]:
            print(f"{name}: {place}")
        if len(places) > SHOWN:
            print(f"{name}: {len(places) - SHOWN} more differences")
    print(f"{len(found) - wrong} of {len(found)} answers are unchanged")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
