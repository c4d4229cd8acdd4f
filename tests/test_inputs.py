"""profharness/files.py opens every file that a user or a folder names, and no file can block a
reader or exhaust its memory.
"""

from __future__ import annotations

import ast
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from profharness import files
from profharness.attention.config import parse_config, parse_config_lines
from profharness.commands._types import config_list, read_config_file
from profharness.errors import TraceFormatError, UsageError
from profharness.files import decode_json, open_input, read_input, read_lines
from profharness.jobs.campaign import read_campaign
from profharness.run import read_run
from profharness.store import ingest_path

PACKAGE = Path(files.__file__).parent
TRACES = PACKAGE.parent / "traces"
READS = {"open", "read_text", "read_bytes"}
DATABASES = {"sqlite3.connect"}
# Modules that open files by themselves, and which files. None is an untrusted input.
OTHERS = {
    "files.py": "the one place",
    "environment.py": "/proc",
    "processes.py": "/proc, and logs of processes that it started",
    "commands/doctor.py": "/proc and /sys",
    "jobs/lane.py": "/proc, and an archive in memory",
    "jobs/fleet.py": "/sys",
    "cli.py": "/dev/null",
    "commands/_output.py": "/dev/null",
    "atlas/data.py": "an archive that open_input opened",
    "traces/ncu_readers.py": "/proc",
    "render/html.py": "the package's own assets",
    "traces/sqlite_file.py": "SQLite, after open_input",
    "store/archives.py": "an archive that open_file opened",
    "attention/engines.py": "the package's own tables",
    "recording/profilers/base.py": "SQLite, after open_input",
    "store/schema.py": "SQLite, and /proc",
    "scrub": "reads what the parsers have read before",
    "attention/backends": "files of code, which the worker runs",
    "recording/worker": "runs in the user's Python, on what the parent wrote",
    "recording/observer": "runs in the user's program, on what the parent wrote",
}


def reading_calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield calls that may open a file for reading."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        name = called.rpartition(".")[2] if "." in called or called == "open" else ""
        words = [*node.args, *(each.value for each in node.keywords if each.arg == "mode")]
        modes = [each.value for each in words if isinstance(each, ast.Constant)]
        writes = any(isinstance(mode, str) and set(mode) & set("wax") for mode in modes)
        if called in DATABASES or (name in READS and not (name == "open" and writes)):
            yield node


def test_only_files_py_opens_untrusted_inputs() -> None:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        calls = [ast.unparse(call) for call in reading_calls(ast.parse(path.read_bytes()))]
        if calls and not any(name == other or name.startswith(f"{other}/") for other in OTHERS):
            found[name] = calls
    assert found == {}


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


SPECIAL = {"a FIFO": fifo, "a device": device, "a socket": unix_socket, "a folder": Path.mkdir}


@pytest.mark.parametrize("make", SPECIAL.values(), ids=SPECIAL)
def test_no_special_file_is_opened(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "x")
    with pytest.raises(OSError):
        open_input(tmp_path / "x")


def test_no_link_leads_out_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"secret")
    inside = tmp_path / "folder"
    (inside / "below").mkdir(parents=True)
    (inside / "file").write_bytes(b"own")
    (inside / "below" / "link").symlink_to("../file")
    (inside / "leak").symlink_to("../out")
    (inside / "up").symlink_to("..")
    (inside / "loop").symlink_to("loop")
    assert read_input(inside / "below" / "link", within=inside) == b"own"
    for name in ("leak", "up/out", "../out", "loop", "none", "a\0b"):
        with pytest.raises(OSError):
            read_input(inside / name, within=inside)
    assert read_input(inside / "leak") == b"secret"


def test_a_file_that_grows_has_an_end(tmp_path: Path) -> None:
    path = tmp_path / "grows"
    path.write_bytes(b"first\n")
    with open_input(path) as file:
        with path.open("ab") as more:
            more.write(b"later\n")
        buffer = bytearray(100)
        assert (file.read(4), file.readinto(buffer), file.read(), file.size) == (b"firs", 2, b"", 6)
    # its size is 0, but it has content
    assert read_input(Path("/proc/self/status")) == b""


def test_a_large_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(1 << 33)
    with pytest.raises(OSError, match="larger than"):
        read_input(path)
    with pytest.raises(OSError, match="a line has more than"):
        next(read_lines(path))


def test_json_of_too_many_values_is_refused_before_they_are_made() -> None:
    for data in (b"[" + b"[]," * 2_500_000 + b"1]", b"[" + b"1," * 6_500_000 + b"1]"):
        with pytest.raises(Exception, match="more than 6,000,000 values"):
            decode_json(data, list)
    assert len(decode_json(b"[" + b"1," * 100_000 + b"1]", list)) == 100_001


def test_json_of_too_many_strings_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"{" + b",".join(b'"a%d":"b"' % number for number in range(25_000)) + b"}"
    monkeypatch.setattr(files, "JSON_WEIGHT", 80_000)
    assert len(decode_json(text, dict)) == 25_000  # a key weighs nothing
    for data in (
        text.replace(b":", b","),
        b'["' + b"x" * 1_200_000 + "\U0001f642".encode() + b'"]',
    ):
        with pytest.raises(Exception, match="values"):
            decode_json(data.replace(b"{", b"[").replace(b"}", b"]"), list)
    assert decode_json(b'["' + b"x" * 1_200_000 + b'", "\\u2192 \\" \xc3\xa4"]', list)


RECORD = {
    "run": "r",
    "created": "2026-01-01T00:00:00+00:00",
    "profilers": [],
    "protocol": {},
    "cells": [],
}
LONG = "x" * 16_100_000


def test_parts_of_a_record_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(RECORD | {"note": LONG}))
    with pytest.raises(
        TraceFormatError, match=r"run\.json: 'note' is larger than 16,000,000 bytes"
    ):
        read_run(tmp_path)
    config = msgspec.to_builtins(parse_config("b1-h1-s16-d16-fp16"))
    cell = {"cell": "c1", "config": config, "backend": "math", "message": LONG}
    (tmp_path / "run.json").write_text(json.dumps(RECORD | {"cells": [cell]}))
    assert read_run(tmp_path).cells[0].message == LONG
    campaign = {"attention/backends": [LONG], "groups": []}
    (tmp_path / "campaign.json").write_text(json.dumps(campaign))
    with pytest.raises(TraceFormatError, match=r"campaign\.json: .*larger than 16,000,000 bytes"):
        read_campaign(tmp_path)


@pytest.mark.skipif(not Path("/proc/kmsg").exists(), reason="a file of Linux")
def test_a_file_of_the_kernel_whose_reading_blocks_has_an_end(tmp_path: Path) -> None:
    with pytest.raises(TraceFormatError, match="/proc/kmsg: "):
        ingest_path(tmp_path / "s.db", Path("/proc/kmsg"))


def test_a_file_of_configs_is_bounded_with_its_repetitions(tmp_path: Path) -> None:
    lines = ["1,1,{1:1000:+1},16"] * 1000
    with pytest.raises(UsageError, match="line 101: more than 100000 configs"):
        parse_config_lines(lines, "x")
    path = tmp_path / "configs"
    path.write_text("#" * 10_000_001)
    with pytest.raises(UsageError, match="larger than 10,000,000 bytes"):
        config_list(read_config_file(path))
