"""The program of the fake `nsys` and `ncu`, using only the standard library. `fake_tools.install`
copies it.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(sys.argv[0]).parent
NAME = Path(sys.argv[0]).name
FLAGS = {
    "--nvtx",
    "--disable-extra-suffixes",
    "-f",
    "--null-stdin",
    "--csv",
    "--import-source",
}
EMPTY_NCU = b"NVR\0" + bytes(4)  # the magic number, and an empty file header
STOP: list[int] = []


def options(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options up to the first word that is none, and the rest."""
    found: dict[str, str] = {}
    words = list(words)
    while words and words[0].startswith("-"):
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if not equals and word not in FLAGS:
            value = words.pop(0) if words else ""
        found[name] = value
    return found, words


def fill(text: str, report: Path) -> str:
    words = {"{report}": str(report), "{tmpdir}": tempfile.gettempdir(), "{pid}": str(os.getpid())}
    for blank, word in words.items():
        text = text.replace(blank, word)
    return text


def write_report(behaviour: dict[str, Any], report: Path) -> None:
    kind = behaviour["report"]
    if kind == "none":
        return
    if kind == "tmpdir":
        report = Path(tempfile.gettempdir()) / f"{NAME}-report-8d68{report.suffix}"
    if kind == "empty":
        report.write_bytes(b"")
    elif behaviour["report_file"]:
        shutil.copyfile(behaviour["report_file"], report)
    else:
        report.write_bytes(EMPTY_NCU if NAME == "ncu" else b"a report of the fake nsys")


def run_target(behaviour: dict[str, Any], command: list[str]) -> int:
    """Return the exit code of the target, or 128 + n for signal n. Forward signals to the target."""
    target = subprocess.Popen(command, start_new_session=True)
    session = HERE / f"session-profile-{os.getpid()}"
    session.write_text(str(target.pid))
    if behaviour["kill_self"]:
        os.kill(os.getpid(), signal.SIGKILL)
    told = False
    while target.poll() is None:
        if STOP and not told:
            os.killpg(target.pid, STOP[0])
            told = True
        time.sleep(0.01)
    session.unlink()
    return 128 - target.returncode if target.returncode < 0 else target.returncode


def profile(behaviour: dict[str, Any], report: Path, command: list[str], log: Path | None) -> int:
    take = [] if behaviour["ignore_signals"] else [signal.SIGINT, signal.SIGTERM]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, (lambda n, _: STOP.append(n)) if number in take else signal.SIG_IGN)
    if not behaviour["report_after_target"]:
        write_report(behaviour, report)
    code = run_target(behaviour, command) if behaviour["run_target"] else 0
    if behaviour["hang"] and "PROFHARNESS_TEST_HANGS" in os.environ:  # see tests/waiting.py
        Path(os.environ["PROFHARNESS_TEST_HANGS"]).write_text(str(os.getpid()))
    while behaviour["hang"] and not STOP:
        time.sleep(0.01)
    if behaviour["report_after_target"]:
        write_report(behaviour, report)
    text = fill(behaviour["stdout"], report)
    if log is not None:
        log.write_text(text)
    else:
        sys.stdout.write(text)
    sys.stderr.write(fill(behaviour["stderr"], report))
    if STOP:
        return 128 + STOP[0]
    return code if behaviour["returncode"] is None else int(behaviour["returncode"])


def export(behaviour: dict[str, Any], output: Path) -> int:
    while behaviour["hang"]:
        if not behaviour["ignore_signals"]:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        else:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(0.01)
    write_report(behaviour, output)
    sys.stdout.write(fill(behaviour["stdout"], output))
    sys.stderr.write(fill(behaviour["stderr"], output))
    return int(behaviour["returncode"] or 0)


def shutdown(found: dict[str, str]) -> int:
    session = HERE / f"session-{found['--session']}"
    number = signal.SIGKILL if found.get("--kill") == "sigkill" else signal.SIGTERM
    try:
        os.killpg(int(session.read_text()), number)
    except (FileNotFoundError, ProcessLookupError):
        sys.stderr.write(f"No such session: {found['--session']}\n")
        return 1
    session.unlink()
    return 0


def nsys(scenario: dict[str, Any], verb: str, words: list[str]) -> int:
    found, rest = options(words)
    if verb == "--version":
        print(f"NVIDIA Nsight Systems version {scenario['nsys_version']}")
        return 0
    if verb == "shutdown":
        return shutdown(found)
    output = Path((found.get("--output") or found["-o"]).replace("%%", "%"))
    if verb == "export":
        return export(scenario["export"], output)
    if output.suffix != ".nsys-rep":
        output = output.with_name(output.name + ".nsys-rep")
    return profile(scenario["nsys"], output, rest, None)


def ncu(scenario: dict[str, Any], words: list[str]) -> int:
    if words[:1] == ["--version"]:
        print("NVIDIA (R) Nsight Compute Command Line Profiler")
        print("Copyright (c) 2018-2025 NVIDIA Corporation")
        print(f"Version {scenario['ncu_version']} (build 36398880) (public-release)")
        return 0
    found, rest = options(words)
    if "--import" in found:
        sys.stdout.write(scenario["csv_text"])
        return 0
    output = Path((found.get("-o") or found["--export"]).replace("%%", "%"))
    if output.suffix != ".ncu-rep":
        output = output.with_name(output.name + ".ncu-rep")
    log = Path(found["--log-file"]) if "--log-file" in found else None
    return profile(scenario["ncu"], output, rest, log)


def main() -> int:
    scenario = json.loads((HERE / "scenario.json").read_text())
    line = json.dumps({"argv": sys.argv, "environ": dict(os.environ)}) + "\n"
    with (HERE / "invocations.jsonl").open("a") as file:
        file.write(line)
    words = sys.argv[1:]
    code = nsys(scenario, words[0], words[1:]) if NAME == "nsys" else ncu(scenario, words)
    sys.stdout.flush()
    return code


sys.exit(main())
