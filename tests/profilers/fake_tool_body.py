"""The program of the fake `nsys`, `ncu` and `rocprofv3`, using only the standard library. `fake_tools.install`
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
FLAGS = {"--nvtx", "--disable-extra-suffixes", "-f", "--csv"}
FLAGS |= {"--kernel-trace", "--hip-runtime-trace", "--memory-copy-trace", "--marker-trace"}
EMPTY_NCU = b"NVR\0" + bytes(4)  # the magic number, and an empty file header
STOP: list[int] = []


def options(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options up to the first word that is none, and the rest."""
    found: dict[str, str] = {}
    words = list(words)
    while words and words[0].startswith("-") and words[0] != "--":
        word = words.pop(0)
        name, equals, value = word.partition("=")
        found[name] = value if equals or word in FLAGS else words.pop(0)
    return found, words


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


def leave(behaviour: dict[str, Any], report: Path, log: Path | None = None) -> None:
    """Write the report and the texts."""
    write_report(behaviour, report)
    out, err = (
        behaviour[name].replace("{report}", str(report)).replace("{tmpdir}", tempfile.gettempdir())
        for name in ("stdout", "stderr")
    )
    if log is None:
        sys.stdout.write(out)
    else:
        log.write_text(out)
    sys.stderr.write(err)


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
    for number in (signal.SIGINT, signal.SIGTERM):
        ignored = behaviour["ignore_signals"]
        signal.signal(number, signal.SIG_IGN if ignored else lambda n, _: STOP.append(n))
    code = run_target(behaviour, command) if behaviour["run_target"] else 0
    if behaviour["hang"] and "PROFHARNESS_TEST_HANGS" in os.environ:  # see tests/waiting.py
        Path(os.environ["PROFHARNESS_TEST_HANGS"]).write_text(str(os.getpid()))
    while behaviour["hang"] and not STOP:
        time.sleep(0.01)
    leave(behaviour, report, log)
    if STOP:
        return 128 + STOP[0]
    return code if behaviour["returncode"] is None else int(behaviour["returncode"])


def export(behaviour: dict[str, Any], output: Path) -> int:
    if behaviour["ignore_signals"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while behaviour["hang"]:
        time.sleep(0.01)
    leave(behaviour, output)
    return int(behaviour["returncode"] or 0)


def shutdown(found: dict[str, str]) -> int:
    session = HERE / f"session-{found['--session']}"
    try:
        os.killpg(int(session.read_text()), signal.SIGTERM)
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
    output = Path(found["--output"].replace("%%", "%"))
    if verb == "export":
        return export(scenario["export"], output)
    return profile(scenario["nsys"], output, rest, None)


def rocprofv3(scenario: dict[str, Any], words: list[str]) -> int:
    """Like the real tool, name the database after the process, which real rocprofv3 becomes."""
    if words[:1] == ["--version"]:
        print(f"             version: {scenario['rocprofv3_version']}")
        print("        rocm_version: 7.0.2")
        return 0
    found, rest = options(words)
    name = found["--output-file"].replace("%pid%", str(os.getpid()))
    output = Path(found["--output-directory"]) / f"{name}_results.db"
    return profile(scenario["rocprofv3"], output, rest[1:], None)


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
    output = Path(found["-o"].replace("%%", "%"))
    return profile(scenario["ncu"], output, rest, Path(found["--log-file"]))


def main() -> int:
    scenario = json.loads((HERE / "scenario.json").read_text())
    line = json.dumps({"argv": sys.argv, "environ": dict(os.environ)}) + "\n"
    with (HERE / "invocations.jsonl").open("a") as file:
        file.write(line)
    words = sys.argv[1:]
    if NAME == "nsys":
        code = nsys(scenario, words[0], words[1:])
    else:
        code = ncu(scenario, words) if NAME == "ncu" else rocprofv3(scenario, words)
    sys.stdout.flush()
    return code


sys.exit(main())
