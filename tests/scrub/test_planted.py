"""Private texts in every place that a profiler or profharness writes to are removed from copies."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from profharness.run import Problem, read_run, write_run
from profharness.scrub import audit, scrub
from profharness.traces.ncu_csv import PUSH_POP, START_END

ROOT = Path(__file__).parents[2]
RUN = ROOT / "traces" / "h200-torch-nsys-ncu"
FORMS = json.loads(Path(__file__).with_name("forms.json").read_text())
TEXTS = [text for _, text, _ in FORMS]


def staying(copy: str, source: str) -> list[str]:
    """Return the forms of which something is left; `w o m b a t` and the like are in no source."""
    return [name for name, _, secret in FORMS if secret in copy and secret not in source]


def kineto(folder: Path, texts: list[str]) -> Path:
    """Plant texts in the header, names of events, kernels and tracks, arguments, lists and keys."""
    tree = json.loads(gzip.decompress((RUN / "c0001.torch.json.gz").read_bytes()))
    op = next(event for event in tree["traceEvents"] if event.get("cat") == "cpu_op")
    kernel = next(event for event in tree["traceEvents"] if event.get("cat") == "kernel")
    for number, text in enumerate(texts):
        tree[f"note{number}"] = text
        op["args"][f"note{number}"] = text
        tree["traceEvents"] += [
            {**op, "cat": "user_annotation", "name": text, "args": {"list": [[text], {text: 1}]}},
            {**kernel, "name": text, "args": {**kernel["args"], "kernel_backend": text}},
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": text}},
            {"ph": "M", "name": "process_sort_index", "pid": 1, "tid": 0, "args": {"x": text}},
            {"ph": "i", "name": text, "pid": 1, "tid": 0, "ts": 1.5, "s": "g"},
        ]
    path = folder / "t.json.gz"
    path.write_bytes(gzip.compress(json.dumps(tree).encode()))
    return path


def nsys(folder: Path, texts: list[str]) -> Path:
    """Plant texts in ranges, StringIds of kernels and ranges, device names, metadata and a foreign
    table.
    """
    path = folder / "t.sqlite"
    path.write_bytes((RUN / "nsys-1.sqlite").read_bytes())
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE FOREIGN_NOTES (id INTEGER PRIMARY KEY, note TEXT NOT NULL)")
        for number, text in enumerate(texts):
            key = 900_000 + number
            db.execute("INSERT INTO StringIds VALUES (?, ?)", (key, text))
            row = "(SELECT rowid FROM {} LIMIT 1 OFFSET ?)"
            kernels = row.format("CUPTI_ACTIVITY_KIND_KERNEL")
            db.execute(
                f"UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET demangledName = ? WHERE rowid = {kernels}",
                (key, number),
            )
            for column, value, at in (("text", text, 0), ("textId", key, len(texts))):
                ranges = row.format("NVTX_EVENTS")
                sql = f"UPDATE NVTX_EVENTS SET {column} = ? WHERE rowid = {ranges}"
                db.execute(sql, (value, number + at))
            db.execute("INSERT INTO META_DATA_EXPORT VALUES (?, ?)", ("EXPORT_PLATFORM", text))
            db.execute("INSERT INTO FOREIGN_NOTES VALUES (?, ?)", (number, text))
        db.execute("UPDATE TARGET_INFO_GPU SET name = ?", (" ".join(texts),))
        db.commit()
    return path


def ncu(folder: Path, texts: list[str]) -> Path:
    """Plant texts in names of kernels, both kinds of NVTX cells, other cells, and around the table."""
    head, units, first, *_ = csv.reader(io.StringIO((RUN / "ncu-1.csv").read_text()))
    rows = []
    for number, text in enumerate(texts):
        text = text.replace("\n", "\\n")  # the table has one line per kernel
        row = dict(zip(head, first, strict=True)) | {"ID": str(number), "Kernel Name": text}
        item = f":{text}:none:none:none:none:ASCII:{text}"
        row |= {PUSH_POP: f'0  "<default domain>{item}"', START_END: f'"{number}:d{item}"'}
        row |= {"Process Name": text, "device__attribute_display_name": text}
        rows.append(list(row.values()))
    head = list(row)
    file = io.StringIO()
    for line in (head, units, *rows):
        cells = [*line, *[""] * (len(head) - len(line))]
        csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n").writerow(cells)
    path = folder / "t.csv.gz"
    path.write_bytes(gzip.compress(f"==PROF== {texts[0]}\n{file.getvalue()}".encode()))
    return path


def record(folder: Path, texts: list[str]) -> Path:
    """Plant texts in the fields of run.json: the run, its environment, cells and problems."""
    run = read_run(RUN)
    path = folder / "run"
    path.mkdir()
    cells = list(run.cells)
    words = " and ".join(texts)
    problems = [Problem("nsys", "no_tool", text, text, text) for text in texts]
    cells[0] = dataclasses.replace(
        cells[0],
        message=words,
        warnings=tuple(texts),
        tuning={"note": texts, "by_text": {text: text for text in texts}},
    )
    environment: dict[str, Any] = {**run.environment, "env": {"A": texts[0]}}
    environment |= {f"note{number}": text for number, text in enumerate(texts)}
    changed = dataclasses.replace(
        run, traces=(), note=words, cells=tuple(cells), environment=environment
    )
    write_run(path, dataclasses.replace(changed, problems=tuple(problems)))
    return path


def content(path: Path) -> str:
    """Return the whole content of a copy, uncompressed and without JSON's escapes."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    data = b"".join(file.read_bytes() for file in files)
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    return data.decode("utf-8", "replace").replace("\\n", "\n").replace("\\\\", "\\")


PLACES: dict[str, Callable[[Path, list[str]], Path]] = {
    "kineto": kineto,
    "nsys": nsys,
    "ncu": ncu,
    "run": record,
}


@pytest.mark.parametrize("place", PLACES)
def test_planted_texts_are_removed(tmp_path: Path, place: str) -> None:
    source = PLACES[place](tmp_path, TEXTS)
    (tmp_path / "harmless").mkdir()
    harmless = PLACES[place](tmp_path / "harmless", ["step"])
    copy = scrub(source).output
    assert staying(content(copy), content(harmless)) == []
    assert audit(copy) == []


@pytest.mark.parametrize(
    "name", ["t.json", "worker.log", "campaign.json", "1234.jsonl", "bench.json"]
)
def test_audit_finds_each_planted_text_by_itself(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    for form, text, _ in FORMS:
        line = text if name.endswith(".log") else json.dumps({"name": text})
        path.write_text(line, encoding="utf-8", errors="surrogatepass")
        assert audit(path), form
