"""The audit reports what a copy would replace or drop, in every kind of file, and changes nothing."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from profharness.cli import find_command
from profharness.errors import GateError, TraceFormatError, UnknownNameError, UsageError
from profharness.scrub import audit, scrub

command = find_command("scrub")

SECRET = "wombat in /srv/x/y"


def test_audit_reports_what_the_copy_replaces(nsys: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    scrub(nsys("nsys_h200"), path)
    assert audit(path) == []
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE NEW_THING (note TEXT)")
        db.execute("INSERT INTO NEW_THING VALUES ('harmless to look at')")
        db.execute("UPDATE TARGET_INFO_GPU SET uuid = 'odd', busLocation = ''")
        db.execute("UPDATE NVTX_EVENTS SET text = ? WHERE rowid = 3", (SECRET,))
        db.commit()
    before = path.read_bytes()
    where = {finding.where for finding in audit(path)}
    assert where >= {"NEW_THING.note", "TARGET_INFO_GPU.uuid", "NVTX_EVENTS.text"}
    assert "TARGET_INFO_GPU.busLocation" not in where
    assert path.read_bytes() == before
    (tmp_path / "x.sqlite.gz").write_bytes(gzip.compress(before))
    assert {finding.where for finding in audit(tmp_path / "x.sqlite.gz")} == where
    copy = scrub(path).output
    assert audit(copy) == []
    assert b"wombat" not in copy.read_bytes()


def test_deleted_rows_are_found_in_the_pages(nsys: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    scrub(nsys("nsys_h200"), path)
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA secure_delete = OFF")
        rows = ((900_000 + at, f"{SECRET} {at}") for at in range(500))
        db.executemany("INSERT INTO StringIds VALUES (?, ?)", rows)
        db.commit()
        db.execute("DELETE FROM StringIds WHERE id >= 900000")
        db.commit()
    assert [finding.where for finding in audit(path)] == ["pages"]
    assert b"wombat" not in scrub(path).output.read_bytes()
    with closing(sqlite3.connect(path)) as db:
        db.execute("VACUUM")
    assert audit(path) == []


def test_audit_finds_raw_reports_names_and_columns(tmp_path: Path) -> None:
    (tmp_path / "a.nsys-rep").write_bytes(b"x")
    (tmp_path / "b.ncu-rep.gz").write_bytes(gzip.compress(b"x"))
    (tmp_path / "for someone@example.org.json").write_text("{}")
    table = '"ID","Host Name","Kernel Name"\n"","",""\n"0","","k"\n"1","box","k"\n'
    (tmp_path / "k.csv.gz").write_bytes(gzip.compress(table.encode()))
    found = [(finding.path.name, finding.kind) for finding in audit(tmp_path)]
    assert found == [
        ("a.nsys-rep", "raw report"),
        ("b.ncu-rep.gz", "raw report"),
        ("for someone@example.org.json", "text"),
        ("k.csv.gz", "column"),
    ]


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "worker.log", "1.jsonl", "bench.json"])
def test_a_finding_has_no_private_text(tmp_path: Path, name: str) -> None:
    text = json.dumps({"message": f"cannot open {SECRET}", "wombat_id": 17})
    data = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    findings = audit(tmp_path / name)
    assert "cannot open removed_1" in {finding.text for finding in findings} or name == "worker.log"
    assert not [finding for finding in findings if "srv" in str(finding.text)]


def test_damaged_files_are_errors(tmp_path: Path) -> None:
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"abc" * 999)[:-9])
    with pytest.raises(TraceFormatError):
        audit(tmp_path / "b.gz")


def test_check_prints_findings_and_exits_3(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("{}")
    clean = CliRunner().invoke(command, ["--check", str(path)])
    assert (clean.exit_code, clean.stdout) == (0, "")
    path.write_text('{"message": "/home/user7/y"}')
    found = CliRunner().invoke(command, ["--check", str(path)])
    assert isinstance(found.exception, GateError)
    assert "text: removed_1" in found.stdout
    assert path.read_text() == '{"message": "/home/user7/y"}'
    wrong = CliRunner().invoke(command, ["--check", str(path), "--force"])
    assert isinstance(wrong.exception, UsageError)
    for args in (["--check", str(tmp_path / "no")], [str(tmp_path / "no")]):
        assert isinstance(CliRunner().invoke(command, args).exception, UnknownNameError)


def test_the_command_reports_what_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"traceEvents": [], "host_name": "blade17"}')
    result = CliRunner().invoke(command, [str(path)])
    assert (result.exit_code, result.stdout) == (0, "")
    assert "wrote" in result.stderr
    assert json.loads((tmp_path / "a-scrubbed.json").read_text()) == {"traceEvents": []}
