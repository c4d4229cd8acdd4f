"""Fake executables `nsys`, `ncu` and `rocprofv3`.

They print recorded texts, exit with recorded codes, may run their target, and may leave a report.

    log = install(tmp_path / "bin", Scenario(nsys=Behaviour(stderr="…", report="none")))
    # … with tmp_path / "bin" first on PATH, or named by PROFHARNESS_NSYS …
    assert invocations(log)[0][1:] == ["profile", …]

Like the real tools, they pass standard input, both output streams and the environment to the target,
which gets its own session. On SIGINT and SIGTERM they end the target, write the report and exit with
130 or 143. After SIGKILL the target keeps running until `nsys shutdown --session=profile-PID` ends it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

BODY = Path(__file__).with_name("fake_tool_body.py")


@dataclass(frozen=True)
class Behaviour:
    """How one tool behaves when it profiles (or, for `export`, when it exports)."""

    # Printed after the target ended, with {report} and {tmpdir} filled in. With `--log-file`,
    # stdout of ncu goes there.
    stdout: str = ""
    stderr: str = ""
    returncode: int | None = None  # None: that of the target, 128 + n if signal n ended it
    # `new`, `none`, `empty`, or `tmpdir`: a new one in TMPDIR, leaving an old one unchanged.
    report: str = "new"
    report_file: str | None = None  # copied as the new report
    run_target: bool = True
    hang: bool = False  # do not end after the target
    ignore_signals: bool = False  # SIGINT and SIGTERM
    kill_self: bool = False  # by SIGKILL, once the target runs


@dataclass(frozen=True)
class Scenario:
    """The behaviour of each command."""

    nsys: Behaviour = field(default_factory=Behaviour)
    ncu: Behaviour = field(default_factory=Behaviour)
    rocprofv3: Behaviour = field(default_factory=Behaviour)
    export: Behaviour = field(default_factory=Behaviour)  # copies its report_file
    csv_text: str = ""  # printed by `ncu --import`
    nsys_version: str = "2025.3.1.90-253135822126v0"
    ncu_version: str = "2025.3.1.0"
    rocprofv3_version: str = "1.0.0"


def install(folder: Path, scenario: Scenario) -> Path:
    """Make folder/nsys and folder/ncu, which behave as the scenario says. Return the log of their
    calls.

    Another call replaces the scenario.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scenario.json").write_text(json.dumps(asdict(scenario)), encoding="utf-8")
    for name in ("nsys", "ncu", "rocprofv3"):
        tool = folder / name
        # -IS: the target's PYTHONPATH and folder must not affect the tool itself.
        tool.write_text(f"#!{sys.executable} -IS\n" + BODY.read_text(encoding="utf-8"), "utf-8")
        tool.chmod(0o755)
    return folder / "invocations.jsonl"


def invocations(log: Path) -> list[list[str]]:
    """Return the argv of every call so far, including `--version`, in order."""
    return [call["argv"] for call in _calls(log)]


def environments(log: Path) -> list[dict[str, str]]:
    """Return the environment of every call, in the order of `invocations`."""
    return [call["environ"] for call in _calls(log)]


def _calls(log: Path) -> list[dict[str, Any]]:
    if not log.exists():
        return []
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
