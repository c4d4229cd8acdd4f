"""Executables `nsys` and `ncu` that behave as a scenario says: they print recorded texts, exit with
recorded codes, run their target or do not, and leave a report or none.

    log = install(tmp_path / "bin", Scenario(nsys=Behaviour(stderr="…", report="none")))
    # … with tmp_path / "bin" first on PATH, or named by PROFHARNESS_NSYS …
    assert invocations(log)[0][1:] == ["profile", …]

As the real tools do, the fakes pass standard input, both streams and the environment on to the
target, which gets a session of its own; on SIGINT and SIGTERM they end the target, write the report
and exit 130 or 143; killed by SIGKILL they leave the target running, until
`nsys shutdown --session=profile-PID` ends it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

BODY = Path(__file__).with_name("fake_tool_body.py")


@dataclass(frozen=True)
class Behaviour:
    """How one tool behaves when it profiles (or, for `export`, when it exports).

    stdout, stderr: texts to print after the target ended; {report}, {tmpdir} and {pid} are filled
    in. With `--log-file`, ncu's stdout goes there. returncode None: that of the target, 128 + n if
    a signal n ended it. report: `new` (content copied from report_file, if given), `none`, `empty`,
    `tmpdir` (a new one in TMPDIR, an old one left alone). run_target False: it is not started.
    report_after_target False: the report stands before the target runs. hang: does not end by
    itself after the target did; ignore_signals: SIGINT and SIGTERM do not end it either. kill_self:
    ends itself by SIGKILL once the target runs.
    """

    stdout: str = ""
    stderr: str = ""
    returncode: int | None = None
    report: str = "new"
    report_file: str | None = None
    run_target: bool = True
    report_after_target: bool = True
    hang: bool = False
    ignore_signals: bool = False
    kill_self: bool = False


@dataclass(frozen=True)
class Scenario:
    """What each command does. export copies export.report_file (for ncu: `--import` prints
    csv_text); versions are what `--version` answers.
    """

    nsys: Behaviour = field(default_factory=Behaviour)
    ncu: Behaviour = field(default_factory=Behaviour)
    export: Behaviour = field(default_factory=Behaviour)
    csv_text: str = ""
    nsys_version: str = "2025.3.1.90-253135822126v0"
    ncu_version: str = "2025.3.1.0"


def install(folder: Path, scenario: Scenario) -> Path:
    """Make folder/nsys and folder/ncu, which behave as the scenario says from now on (calling it
    again replaces the scenario). Returns the log of invocations, which `invocations` reads.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scenario.json").write_text(json.dumps(asdict(scenario)), encoding="utf-8")
    for name in ("nsys", "ncu"):
        tool = folder / name
        # -IS: the target's PYTHONPATH and folder must not matter to the tool itself.
        tool.write_text(f"#!{sys.executable} -IS\n" + BODY.read_text(encoding="utf-8"), "utf-8")
        tool.chmod(0o755)
    return folder / "invocations.jsonl"


def invocations(log: Path) -> list[list[str]]:
    """Every whole argv so far, in the order of the calls; `--version` counts too."""
    if not log.exists():
        return []
    return [json.loads(line)["argv"] for line in log.read_text(encoding="utf-8").splitlines()]


def environments(log: Path) -> list[dict[str, str]]:
    """The environment of every call, in the order of `invocations`."""
    if not log.exists():
        return []
    return [json.loads(line)["environ"] for line in log.read_text(encoding="utf-8").splitlines()]
