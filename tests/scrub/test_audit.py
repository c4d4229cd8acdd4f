"""The audit finds what is put before it, in every kind of file, and changes nothing."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from profharness.cli.scrub import command
from profharness.errors import GateError, TraceFormatError, UsageError
from profharness.scrub import audit
from profharness.scrub.audit import EXCERPT, OVERLAP, WINDOW


def kinds(path: Path, *names: str) -> list[str]:
    return sorted({finding.kind for finding in audit(path, names=names)})


def test_texts_and_their_escapes(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text in ("x\n/home/user7/y", "repr\\n/home/user7/y", "\u002fhome/mm/y", "C:\\Users\\user7"):
        path.write_text(json.dumps({"name": text}).replace("/home", "\\/home"))
        assert kinds(path) == ["path"], text
    path.write_text('{"trace_id": "AB", "env": {"A": "b"}, "hostname": null, "argv": []}')
    assert [finding.text for finding in audit(path)] == ["trace_id", "env"]
    path.write_text('{"traceName": "profharness run 2026-ab", "env": {}}')
    assert audit(path) == []
    path.write_text('{"name": "job of user7"}')
    assert kinds(path) == []
    assert kinds(path, "user7") == ["host or user name"]


@pytest.mark.parametrize("at", [0, WINDOW - 9, WINDOW - OVERLAP, WINDOW + 3, 3 * WINDOW - 1])
@pytest.mark.parametrize("packed", [False, True])
def test_nothing_hides_at_the_border_of_two_windows(tmp_path: Path, at: int, packed: bool) -> None:
    data = b"." * at + b"\n/home/user7/run.py\n" + b"." * WINDOW
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(data) if packed else data)
    assert "/home/user7/run.py" in [finding.text for finding in audit(path)]


def test_every_text_column_of_a_database(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE t (a, b TEXT, c BLOB)")
        db.execute("INSERT INTO t VALUES (1, 'fine', NULL), (2, '/srv/a/b', x'2f7372762f782f79')")
        db.commit()
    assert [(f.where, f.kind, f.text) for f in audit(path)] == [
        ("t.b", "path", "/srv/a/b"),
        ("t.c", "path", "/srv/x/y"),
    ]
    before = path.read_bytes()
    (tmp_path / "a.db.gz").write_bytes(gzip.compress(before))
    assert len(audit(tmp_path / "a.db.gz")) == 2
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", ["/home/user7/x", "by ghp_0123456789abcdefABCDEF01"])
def test_deleted_rows_are_found_in_the_pages(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA secure_delete = OFF")
        db.execute("CREATE TABLE t (b TEXT)")
        db.executemany("INSERT INTO t VALUES (?)", [(text,)] * 50)
        db.commit()
        db.execute("DELETE FROM t")
        db.commit()
    assert [finding.where for finding in audit(path)] == ["deleted rows"]
    with closing(sqlite3.connect(path)) as db:
        db.execute("VACUUM")
    assert audit(path) == []


def test_an_export_of_nsys_is_held_to_the_allow_list(
    nsys: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "x.sqlite"
    path.write_bytes(nsys("nsys_h200").read_bytes())
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE NEW_THING (note TEXT)")
        db.execute("INSERT INTO NEW_THING VALUES ('harmless to look at')")
        db.execute("UPDATE TARGET_INFO_GPU SET uuid = 'odd', busLocation = ''")
        db.commit()
    where = {finding.where for finding in audit(path)}
    assert {"NEW_THING", "TARGET_INFO_GPU.uuid"} <= where
    assert "TARGET_INFO_GPU.busLocation" not in where


def test_raw_reports_names_and_columns(tmp_path: Path) -> None:
    (tmp_path / "a.nsys-rep").write_bytes(b"x")
    (tmp_path / "b.ncu-rep.gz").write_bytes(gzip.compress(b"x"))
    (tmp_path / "for someone@example.org.json").write_text("{}")
    (tmp_path / "k.csv").write_text('"ID","Host Name","Kernel Name"\n"0","","k"\n"1","box","k"\n')
    found = [(finding.path.name, finding.kind) for finding in audit(tmp_path)]
    assert found == [
        ("a.nsys-rep", "raw report"),
        ("b.ncu-rep.gz", "raw report"),
        ("for someone@example.org.json", "mail address"),
        ("k.csv", "private column"),
    ]


def test_excerpts_are_short_and_damage_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("/home/" + "x" * 500)
    (finding,) = audit(path)
    assert len(finding.text) == EXCERPT
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"abc" * 999)[:-9])
    with pytest.raises(TraceFormatError):
        audit(tmp_path / "b.gz")


def test_check_prints_findings_and_exits_3(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("{}")
    clean = CliRunner().invoke(command, ["--check", str(path)])
    assert (clean.exit_code, clean.stdout) == (0, "")
    path.write_text('{"x": "/home/user7/y"}')
    found = CliRunner().invoke(command, ["--check", str(path)])
    assert isinstance(found.exception, GateError)
    assert 'path: "/home/user7/y"' in found.stdout or "path: /home/user7/y" in found.stdout
    assert path.read_text() == '{"x": "/home/user7/y"}'
    wrong = CliRunner().invoke(command, ["--check", str(path), "--force"])
    assert isinstance(wrong.exception, UsageError)
    for args in (["--check", str(tmp_path / "no")], [str(tmp_path / "no")]):
        assert isinstance(CliRunner().invoke(command, args).exception, TraceFormatError)


def test_the_command_says_what_it_did(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"traceEvents": [], "host_name": "blade17"}')
    result = CliRunner().invoke(command, [str(path)])
    assert (result.exit_code, result.stdout) == (0, "")
    assert "wrote" in result.stderr
    assert json.loads((tmp_path / "a-scrubbed.json").read_text()) == {"traceEvents": []}


@pytest.mark.parametrize("shift", range(0, 40, 3))
def test_a_border_makes_nothing_private_of_a_harmless_text(tmp_path: Path, shift: int) -> None:
    """A window that began inside `torch/nn/…` had a path, one that ended in `pytorch.or` a host."""
    texts = '"torch/nn/modules/module.py(1): f","see https://pytorch.org/docs/x.html",\n'
    path = tmp_path / "a.json"
    path.write_text(" " * shift + texts * (2 * WINDOW // len(texts)))
    assert audit(path, names=()) == []


def test_a_packed_table_of_ncu_is_read_inside(tmp_path: Path) -> None:
    path = tmp_path / "k.csv.gz"
    table = '"ID","Process Name","Kernel Name"\n"0","python3.11","k"\n'
    path.write_bytes(gzip.compress(table.encode()))
    assert [(found.where, found.kind) for found in audit(path)] == [
        ("Process Name", "private column")
    ]
