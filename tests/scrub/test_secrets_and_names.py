"""Tokens and names that stand in a source's texts are in no copy; the audit finds what is left."""

from __future__ import annotations

import dataclasses
import gzip
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from profharness.errors import TraceFormatError
from profharness.run import read_run, write_run
from profharness.scrub import audit, scrub
from profharness.scrub.rules import is_secret
from profharness.scrub.text import names_in, names_in_stream

ROOT = Path(__file__).parents[2]
TOKENS = (
    "ghp_0123456789abcdefABCDEF0123456789abcd",
    "hf_abcdefghijKLMNOPqrstuvwxyz012345",
    "sk-proj-abcDEF0123456789abcd",
    "AKIAIOSFODNN7EXAMPLE",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
)
TEXTS = (
    f"token={TOKENS[0]}",
    f"HF_TOKEN: {TOKENS[1]}",
    f"load with {TOKENS[2]}",
    f"key {TOKENS[3]} used",
    f"Authorization: Bearer {TOKENS[4]}",
    "password is in db_password=hunter2x",
)
SECRETS = (*TOKENS, "hunter2x")


def event(name: str, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 1, "ts": 1.5, "dur": 1,
        "args": args,
    }  # fmt: skip


def trace(path: Path, events: list[dict[str, Any]], **behind: Any) -> Path:
    text = json.dumps({"schemaVersion": 1, "traceEvents": events, **behind}).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def read(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else data


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_no_secret_of_a_kineto_trace_is_copied(tmp_path: Path, name: str) -> None:
    args = {"note": TEXTS[0], "api_key": "zq7", "n_token": 12, "nested": {"client_secret": "zq8"}}
    path = trace(tmp_path / name, [event(text, **args) for text in TEXTS])
    assert "secret" in {finding.kind for finding in audit(path, names=())}
    copy = scrub(path).output
    text = read(copy)
    assert [one for one in (*SECRETS, "zq7", "zq8") if one.encode() in text] == []
    kept = json.loads(text)["traceEvents"]
    assert kept[0]["name"] == "token=<secret>"
    assert kept[0]["args"]["n_token"] == 12
    assert audit(copy, names=()) == []


@pytest.mark.parametrize("text", TEXTS)
def test_the_audit_finds_a_secret_but_does_not_print_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"name": text}))
    found = audit(path, names=())
    assert {finding.kind for finding in found} == {"secret"}
    assert not [one for one in SECRETS for finding in found if one in finding.text]


def test_secrets_of_a_run_and_of_an_export(tmp_path: Path, nsys: Callable[[str], Path]) -> None:
    path = tmp_path / "x.sqlite"
    path.write_bytes(nsys("nsys_h200").read_bytes())
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE NVTX_EVENTS SET text = ? WHERE rowid = 3", (" ".join(TEXTS),))
        db.execute("UPDATE NVTX_EVENTS SET text = 'of alice' WHERE rowid = 4")
        db.execute("CREATE TABLE ELSEWHERE (id INTEGER, note TEXT)")
        db.execute("INSERT INTO ELSEWHERE VALUES (1, 'cwd /home/alice')")
        db.commit()
    data = scrub(path).output.read_bytes()
    assert [one for one in (*SECRETS, "alice") if one.encode() in data] == []
    run = read_run(ROOT / "traces" / "h200-torch2.11")
    folder = tmp_path / "run"
    folder.mkdir()
    note = f"{TEXTS[1]} for alice, see /home/alice/x"
    write_run(folder, dataclasses.replace(run, traces=(), note=note))
    assert read_run(scrub(folder).output).note == "HF_TOKEN: <secret> for <name>, see <path>"


def test_names_are_learnt_wherever_they_stand(tmp_path: Path) -> None:
    many = [event(f"step {at}") for at in range(5000)]  # more than one block before the end
    path = trace(
        tmp_path / "a.json",
        [
            event("run of alice"),
            event("on blade17, by alice_2 and bob77"),
            *many,
            event("open", file="/home/alice/x.py", log="C:\\Users\\bob77\\y"),
        ],
        host_name="blade17.intern",
    )
    kept = json.loads(scrub(path).output.read_bytes())
    assert [one["name"] for one in kept["traceEvents"][:2]] == [
        "run of <name>",
        "on <name>, by <name>_2 and <name>",
    ]
    assert "host_name" not in kept


def test_which_texts_give_names_away() -> None:
    names = names_in(
        [
            "at /home/carol",
            "/home/run.py",
            "/Users/d.jones/a",
            r"C:\\Users\\erika\\b",
            "/home/user/x",
            '"host_name": "box9"',
            "USER=frank1",
            "/home/attention/x",
            "the /home/ folder",
        ]
    )
    assert names == {"carol", "d.jones", "erika", "box9", "frank1"}
    text = b"." * 5000 + b"/home/gerda/" + b"." * 5000
    for at in range(4995, 5015):
        assert names_in_stream([text[:at], text[at:]]) == {"gerda"}


def test_which_members_are_secrets() -> None:
    assert is_secret("token", "abc") and is_secret("HF_TOKEN", "x") and is_secret("passwd", 1234)
    assert not is_secret("token", 128) and not is_secret("token", None)
    assert not is_secret("tokens", "abc") and not is_secret("key", "abc")


CSV = (
    '"ID","Host Name","Kernel Name","Metric"\n"","","","ns"\n"0","blade17","k","15"\n'
    '"1","blade17","k of blade17","16"\n'
)


def test_a_csv_that_is_cut_is_not_copied(tmp_path: Path) -> None:
    path = tmp_path / "k.csv"
    for cut in (3, 4, 7, 20, len(CSV) - 60, len(CSV) - 40):
        path.write_text(CSV[:-cut])
        with pytest.raises(TraceFormatError, match=r"cut off|of 4 columns"):
            scrub(path)
        assert [each.name for each in tmp_path.iterdir()] == ["k.csv"]
    path.write_text(f"==PROF== 1\n{CSV}==PROF== Disconnected from process 9\n")
    assert scrub(path).output.read_text().splitlines()[-1] == '"1","","k of <name>","16"'
