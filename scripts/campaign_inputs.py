"""Damaged inputs of the fault campaign: real files of the project, changed by a seeded generator
that knows their structure.
An input is bytes, and a place on disk where a command reads it. `KINDS` has one row per reader.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import shutil
import sqlite3
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
RUN = ROOT / "traces" / "h200-torch-nsys-ncu"
DATA = ROOT / "tests" / "data"
MOST_EVENTS = 120
MOST_ROWS = 24
MOST_BYTES = 600_000
GZIP = b"\x1f\x8b"
CUT = b"\n%%part%%\n"  # between the files of a run folder
# Values that caused errors in readers: too large, not finite, not text, not a number, expanding names.
ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        0,
        -1,
        2**31,
        2**63,
        2**64,
        -(2**63),
        10**400,
        1e300,
        -1e-300,
        0.5,
        "",
        "0",
        "-5",
    ),
    *(
        "NaN",
        "Infinity",
        "1e999",
        "9" * 5000,
        "1" * 25,
        "\ud800",
        "\x00",
        "\u202e",
        "=1+1",
        "'; --",
    ),
    *(
        "<script>alert(1)</script>",
        "\x1b[31m",
        "../../etc/passwd",
        "x" * 70_000,
        [],
        {},
        [[]],
        {"a": {}},
    ),
    *("9999-12-31T23:59:59+00:00", "0000-00-00", "_Z" + "1a" * 50, "_ZN" + "S_" * 40 + "E"),
    "_Z1fI" + "JT_" * 14 + "EvDpT_",
)
ODD_BYTES = (
    b"\x00",
    b"\xff",
    b"\xef\xbb\xbf",
    b"{",
    b"]",
    b'"',
    b"\\",
    b",",
    b"\n",
    b"1e999",
    b"\xed\xa0\x80",
)
TOKENS = (
    *[
        "1",
        "2",
        "8",
        "64",
        "512",
        "0",
        "-1",
        "1e9",
        "99999999999999999999",
        "{1,2}",
        "{1:64:*2}",
        "64:128:+64",
        "{",
        "}",
        ":",
        ",",
        "=",
        "∞",
        "½",
    ],
    *[
        "fp16",
        "bf16",
        "fp32",
        "FP16",
        "half",
        "causal",
        "bwd",
        "deterministic",
        "kv_heads=",
        "seq_q=1",
        "seq_kv=4096",
        "scale=",
    ],
    *[
        "head_dim_v=128",
        "dropout=0.1",
        "scale=sNaN",
        "dropout=nan",
        "scale=inf",
        "mask=bool",
        "mask=float_grad",
    ],
    *[
        "layout=bshd",
        "layout=",
        "mask=none",
        "{fp16,bf16}",
        "{causal,bwd}",
        "scale=1e-400",
        "dropout=1",
    ],
    "\x00",
    "\ud800",
)
MARKS = (b'"', b":", b",", b"{", b"}", b"[", b"]", b"\\", b" ", b"\n", b".", b"-")
# Values inside an event where they do not belong.
PIECES = (
    *(b'"ts":', b'"dur":-1,', b'"args":{', b'"cat":"kernel",', b'"ph":"X",', b'"name":"', b"\0"),
    *(b"\\u0000", b"\\ud800", b"\\\\", b'\\"', b"1e999", b"9" * 400, b"0.1e-5", b"-0", b"[" * 300),
    *(
        b"nan",
        b"true",
        b"null",
        b"{}",
        b"[]",
        b'""',
        b"\xff\xfe",
        b"\xed\xa0\x80",
        b"},{",
        b" " * 70,
    ),
    *(b'"External id":18446744073709551616,', b'"stream":99999999999999999999,', b'"id":"0x7f",'),
)


@dataclass(frozen=True)
class Kind:
    """One reader. `place` writes an input into an empty folder, `commands` read it there. `planted`
    is a text that no other file may contain afterwards.
    """

    name: str
    seeds: Callable[[], list[bytes]]
    change: Callable[[bytes, Random], bytes]
    place: Callable[[bytes, Path], Path]
    commands: Callable[[Path], list[list[str]]]
    planted: str = ""
    has_store: bool = True


def _ingest(path: Path) -> list[list[str]]:
    return [["ingest", str(path)], ["kernels", "--run", "all", "--format", "csv"]]


def odd(random: Random, value: Any = None) -> Any:
    """Return an unexpected value, usually close to the given one."""
    if isinstance(value, int | float) and not isinstance(value, bool) and random.random() < 0.5:
        return random.choice((-value, value * 10**9, value + 1, str(value), value * 1e300, 0))
    if isinstance(value, str) and value and random.random() < 0.5:
        at = random.randrange(len(value))
        return value[:at] + str(random.choice(ODD[13:27])) + value[at + random.randrange(2) :]
    return random.choice(ODD)


def damage(data: bytes, random: Random, times: int | None = None) -> bytes:
    """Change, remove, duplicate or insert some bytes."""
    out = bytearray(data)
    for _ in range(times or random.choice((1, 1, 2, 4, 16))):
        at = random.randrange(len(out) + 1)
        match random.randrange(6):
            case 0 if out:
                out[at % len(out)] = random.randrange(256)
            case 1:
                del out[at : at + random.choice((1, 1, 8, 200))]
            case 2:
                out[at:at] = random.choice(ODD_BYTES)
            case 3:
                out[at:at] = out[at : at + random.choice((1, 30, 900))]
            case 4 if random.random() < 0.2:
                del out[at:]
            case _ if out:
                out[at % len(out)] ^= 1 << random.randrange(8)
    return bytes(out[: max(MOST_BYTES, len(data))])


def _node(tree: Any, random: Random) -> tuple[Any, Any]:
    """Return a random non-empty container of a JSON tree, and a key of it."""
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        key = random.choice(keys)
        below = tree[key]
        if not isinstance(below, dict | list) or not below or random.random() < 0.15:
            return tree, key
        tree = below


def change_tree(tree: Any, random: Random) -> None:
    """Change a JSON tree in place: change a value or a key, duplicate or remove an item."""
    place, key = _node(tree, random)
    match random.randrange(6):
        case 0:
            del place[key]
        case 1 if isinstance(place, list):
            place.insert(random.randrange(len(place) + 1), place[key])
        case 2 if isinstance(place, dict):
            place[random.choice((f"{key}_", str(key).upper(), "ts", "dur", "name", "\ud800"))] = (
                place.pop(key)
            )
        case 3 if isinstance(place, list):
            other = random.randrange(len(place))
            place[key], place[other] = place[other], place[key]
        case _:
            place[key] = odd(random, place[key])


def _dumped(tree: Any) -> bytes:
    # write a lone surrogate as its escape, as a writer would
    return json.dumps(tree, default=str).encode("utf-8", "surrogatepass")


def kineto_seeds() -> list[bytes]:
    """Return small traces with launches, ops, ranges and metadata."""
    found = []
    paths = [RUN / "c0001.torch.json.gz", RUN / "c0005.torch.json.gz", DATA / "kineto_h200.json.gz"]
    for path in paths:
        tree = json.loads(gzip.decompress(path.read_bytes()))
        events = tree["traceEvents"]
        step = max(1, len(events) // MOST_EVENTS)
        tree["traceEvents"] = events[::step] if step > 1 else events
        found.append(_dumped(tree))
    return found


def change_kineto(data: bytes, random: Random) -> bytes:
    """Change a trace as JSON or as bytes, packed or not, before or after packing."""
    if data[:2] == GZIP:
        return damage(data, random)
    data = _changed_json(data, random, 0.75)
    if random.random() < 0.25:
        data = gzip.compress(data, 1)
        data = damage(data, random) if random.random() < 0.8 else data
    return data


def kineto_events() -> list[bytes]:
    """Return the events of the small traces, each as its text."""
    trees = map(json.loads, kineto_seeds())
    return [_dumped(event) for tree in trees for event in tree["traceEvents"]]


def change_kineto_text(data: bytes, random: Random) -> bytes:
    """Return the text of some events with changed bytes, marks, numbers or strings."""
    out = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4, 12))):
        at = random.randrange(len(out) + 1)
        match random.randrange(5):
            case 0:
                found = out.find(random.choice(MARKS), at)
                at = found if found >= 0 else at
                out[at : at + random.randrange(3)] = random.choice(MARKS)
            case 1:
                out[at:at] = random.choice(PIECES)
            case 2:
                end = min(len(out), at + random.choice((1, 4, 30, 300)))
                out[at:at] = out[at:end]
            case 3:
                del out[at : at + random.choice((1, 4, 30, 300))]
            case _ if out:
                out[at % len(out)] = random.randrange(256)
    return bytes(out)


def _changed_json(data: bytes, random: Random, part: float) -> bytes:
    """Change some inputs as JSON, and the bytes of the others."""
    if random.random() < part:
        try:
            tree = json.loads(data)
            for _ in range(random.choice((1, 1, 2, 6))):
                change_tree(tree, random)
            return _dumped(tree)
        except (ValueError, TypeError, IndexError, KeyError, RecursionError, OverflowError):
            pass  # it was damaged before
    return damage(data, random)


def place_kineto(data: bytes, folder: Path) -> Path:
    """Write a trace under a name that fits its first bytes."""
    return _written(folder / ("t.json.gz" if data[:2] == GZIP else "t.json"), data)


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def csv_seeds() -> list[bytes]:
    """Return the start of ncu's wide table, and the same values in its long form."""
    lines = (RUN / "ncu-1.csv").read_bytes().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if line.startswith(b'"ID"'))
    wide = lines[: at + 2 + MOST_ROWS]
    rows = list(csv.DictReader(io.StringIO(b"".join(lines[at : at + 12]).decode())))
    out = io.StringIO()
    fixed = ["ID", "Kernel Name", "Context", "Stream", "Block Size", "Grid Size", "Device", "CC"]
    names = [*fixed, "Section Name", "Metric Name", "Metric Unit", "Metric Value"]
    writer = csv.DictWriter(out, names, extrasaction="ignore", quoting=csv.QUOTE_ALL)
    writer.writeheader()
    for row in rows[1:]:
        for name in list(row)[-6:]:
            told = {"Metric Name": name, "Metric Unit": rows[0][name], "Metric Value": row[name]}
            writer.writerow({**row, "Section Name": "s", **told})
    return [b"".join(wide), out.getvalue().encode()]


def change_csv(seed: bytes, random: Random) -> bytes:
    """Change cells, rows and columns, or bytes."""
    if random.random() < 0.3:
        return damage(seed, random)
    text = seed.decode("utf-8", "surrogateescape")
    lines = text.splitlines(keepends=True)
    at = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), 0)
    csv.field_size_limit(2**30)
    try:
        rows = list(csv.reader(io.StringIO("".join(lines[at:]), newline="")))
    except csv.Error:
        return damage(seed, random)
    for _ in range(random.choice((1, 1, 3))):
        row = random.choice(rows) if rows else []
        match random.randrange(6):
            case 0 if row:
                row.pop(random.randrange(len(row)))
            case 1 if rows:
                rows.insert(random.randrange(len(rows) + 1), list(row))
            case 2 if rows:
                rows.pop(random.randrange(len(rows)))
            case _ if row:
                cell = random.randrange(len(row))
                row[cell] = str(odd(random, row[cell]))
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL).writerows(rows)
    text = "".join(lines[:at]) + out.getvalue()
    return text.encode() if text.isascii() else b"".join(map(_encoded, text))


def _encoded(sign: str) -> bytes:
    """Encode a character. A lone surrogate becomes three bytes; an invalid byte stays as it was."""
    return sign.encode(
        "utf-8", "surrogateescape" if "\udc80" <= sign <= "\udcff" else "surrogatepass"
    )


def place_csv(data: bytes, folder: Path) -> Path:
    """Write the input as output of `ncu --csv --page raw`."""
    return _written(folder / "t.csv", data)


def nsys_seeds() -> list[bytes]:
    """Return real exports."""
    names = ("nsys_h200.sqlite.gz", "nsys_h200_startend.sqlite.gz")
    return [gzip.decompress((DATA / name).read_bytes()) for name in names]


def change_database(seed: bytes, random: Random) -> bytes:
    """Change an export through SQL, so that it remains a database, or change its bytes."""
    if random.random() < 0.25:
        return damage(seed, random, random.choice((1, 5, 40)))
    connection = sqlite3.connect(":memory:")
    try:
        connection.deserialize(seed)
        for _ in range(random.choice((1, 1, 2, 4))):
            with contextlib.suppress(sqlite3.Error, OverflowError, UnicodeEncodeError, IndexError):
                change_table(connection, random)
        connection.commit()
        return connection.serialize()
    except (sqlite3.Error, OverflowError):
        return damage(seed, random)
    finally:
        connection.close()


def place_nsys(data: bytes, folder: Path) -> Path:
    """Write the input as an export of nsys."""
    return _written(folder / "t.sqlite", data)


def change_table(connection: sqlite3.Connection, random: Random) -> None:
    """Change a value, row, column or table of a database."""
    listed = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    table = random.choice([name for (name,) in listed])
    columns = [row[1] for row in connection.execute(f'PRAGMA table_info("{table}")')]
    column = random.choice(columns)
    some = f'rowid IN (SELECT rowid FROM "{table}" ORDER BY rowid LIMIT 1 OFFSET {random.randrange(20)})'
    where = random.choice((some, some, "1", "rowid % 3 = 0"))
    value = odd(random)
    value = str(value) if isinstance(value, list | dict) else value
    statements: list[tuple[str, tuple[Any, ...]]] = [
        (f'UPDATE "{table}" SET "{column}" = ? WHERE {where}', (value,)),
        (f'UPDATE "{table}" SET "{column}" = -"{column}" WHERE {where}', ()),
        (f'UPDATE "{table}" SET "{column}" = "{column}" + 1 WHERE {where}', ()),
        (f'INSERT INTO "{table}" SELECT * FROM "{table}" WHERE {where}', ()),
        (f'DELETE FROM "{table}" WHERE {where}', ()),
        (f'ALTER TABLE "{table}" RENAME COLUMN "{column}" TO "{column}_2"', ()),
        (f'ALTER TABLE "{table}" DROP COLUMN "{column}"', ()),
        (f'ALTER TABLE "{table}" RENAME TO "{table}_V9"', ()),
        (f'DROP TABLE "{table}"', ()),
    ]
    weights = (8, 2, 2, 2, 3, 2, 2, 1, 1)
    connection.execute(*random.choices(statements, weights)[0])


def rep_seeds() -> list[bytes]:
    """Return a real report."""
    return [gzip.decompress((DATA / "ncu_h200.ncu-rep.gz").read_bytes())]


def change_rep(seed: bytes, random: Random) -> bytes:
    """Change bytes of a report: strings, lengths and payload."""
    return damage(seed, random, random.choice((1, 3, 30)))


def place_rep(data: bytes, folder: Path) -> Path:
    """Write the input as a report of ncu."""
    return _written(folder / "t.ncu-rep", data)


def run_seeds() -> list[bytes]:
    """Return the record of a run with its first cells, without and with a journal and a damaged
    trace.
    """
    tree = json.loads((RUN / "run.json").read_bytes())
    tree["cells"] = tree["cells"][:3]
    record = _dumped(tree)
    journal = (
        b'{"event": "started", "cell": "c0001"}\n{"event": "ok", "cell": "c0001"}\n\xff\xfe\n{'
    )
    trace = (RUN / "c0002.torch.json.gz").read_bytes()
    return [record, CUT.join((record, journal)), CUT.join((record, b"", trace))]


def change_run(seed: bytes, random: Random) -> bytes:
    """Change one of its parts: the record, the journal, or the second trace."""
    parts = seed.split(CUT)
    at = random.randrange(len(parts)) if random.random() < 0.4 else 0
    change = (lambda data, random: _changed_json(data, random, 0.75)) if at == 0 else damage
    parts[at] = change(parts[at], random)
    return CUT.join(parts)


def place_run(data: bytes, folder: Path) -> Path:
    """Write a run folder with three traces."""
    run = folder / "run"
    run.mkdir()
    record, journal, trace, *_ = [*data.split(CUT), b"", b""]
    for name in ("c0001.torch.json.gz", "c0002.torch.json.gz", "c0003.torch.json.gz"):
        shutil.copyfile(RUN / name, run / name)
    for name, content in (("journal.jsonl", journal), ("c0002.torch.json.gz", trace)):
        if content:
            (run / name).write_bytes(content)
    (run / "run.json").write_bytes(record)
    return run


def grammar_seeds() -> list[bytes]:
    """Return configs from the documentation."""
    texts = ("2,8,512,64", "1,4,{128,256},64,causal,bf16", "1,4,64:128:+64,64,{fp32,bf16},bwd")
    return [text.encode() for text in (*texts, "1,32,1,128,kv_heads=8,seq_kv=4096,scale=0.125")]


def change_grammar(seed: bytes, random: Random) -> bytes:
    """Insert, replace and duplicate words."""
    words = seed.decode("utf-8", "replace").replace("\n", ",").split(",")[:40]
    for _ in range(random.choice((1, 2, 4))):
        at = random.randrange(len(words) + 1)
        words[at : at + random.randrange(2)] = [random.choice(TOKENS)]
    return ",".join(words).encode("utf-8", "surrogatepass")


def place_grammar(data: bytes, folder: Path) -> Path:
    """Write a file of configs with one line."""
    return _written(folder / "configs.txt", data)


def change_store(seed: bytes, random: Random) -> bytes:
    """Damage some bytes of a store, or remove a table or column."""
    if random.random() < 0.4:
        return change_database(seed, random)
    out = bytearray(seed)
    for _ in range(random.choice((1, 5, 20))):
        at = random.randrange(100, max(101, len(out) - 8))
        out[at : at + random.choice((1, 1, 8))] = random.randbytes(1)
    if random.random() < 0.2:
        del out[random.randrange(len(out)) :]
    return bytes(out)


def place_store(data: bytes, folder: Path) -> Path:
    """Write a store."""
    return _written(folder / "s.db", data)


def _store_commands(path: Path) -> list[list[str]]:
    store = ["--store", str(path)]
    trace = str(DATA / "kineto_h200.json.gz")
    return [
        [*words, *store]
        for words in (
            *(
                ["runs"],
                ["kernels", "--run", "all", "--format", "json"],
                ["report", "--format", "json"],
            ),
            *(["diff", "flash", "math"], ["analyze"], ["export", "latest", "-o", f"{path}.json"]),
            *(["ingest", trace], ["bench", "--run", "latest"]),
        )
    ]


def _grammar_commands(path: Path) -> list[list[str]]:
    return [
        ["explain", "--configs", str(path), "--torch", "2.11", "--gpu", "H200", "--format", "json"]
    ]


def store_seeds() -> list[bytes]:
    """Return a placeholder for the store that `campaign.py` makes."""
    return []


ATLASES = ROOT / "profharness" / "atlas"
ATLAS_CELLS = 6


def atlas_seeds() -> list[bytes]:
    """Return the shortened header of the packaged atlas, and columns of one byte per value."""
    (packaged,) = (path for path in ATLASES.glob("*.npz") if ".model" not in path.name)
    with np.load(packaged) as arrays:
        names = [name for name in arrays.files if name != "header"]
        head = json.loads(arrays["header"].tobytes())
    for table in ("messages", "kernels"):
        del head["tables"][table][ATLAS_CELLS:]
    columns = {name: [1] * ATLAS_CELLS for name in names}
    return [_dumped({"header": head, "columns": columns})]


def change_atlas(seed: bytes, random: Random) -> bytes:
    """Change the header or the columns."""
    return _changed_json(seed, random, 1.0)


def place_atlas(data: bytes, folder: Path) -> Path:
    """Write a file into a folder of atlases. Data that is no longer JSON becomes the header."""
    try:
        tree = json.loads(data)
        text, columns = _dumped(tree["header"]), dict(tree["columns"])
    except (ValueError, TypeError, KeyError, RecursionError):
        text, columns = data, {}
    arrays = {"header": np.frombuffer(text, np.uint8)}
    for name, values in columns.items():
        with contextlib.suppress(ValueError, OverflowError, UnicodeEncodeError):
            name.encode()
            arrays[name] = np.array(values)
    (folder / "atlases").mkdir()
    path = folder / "atlases" / "forged.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, array)
    return path


def _atlas_commands(path: Path) -> list[list[str]]:
    folder = ["--atlas", str(path.parent)]
    return [
        ["atlas", "list", *folder],
        ["predict", "--config", "2,8,512,64,bf16", "--gpu", "H200", *folder],
        ["atlas", "export", str(path), "-o", str(path.with_suffix(".jsonl"))],
        ["atlas", "add", str(path), "--atlas", str(path.parent / "others")],
    ]


PLANTED = "hunter2x"
SECRET = f"password={PLANTED}"


def place_secret_nsys(data: bytes, folder: Path) -> Path:
    """Write an export. If it is still a database, add a password to its strings."""
    path = place_nsys(data, folder)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for change in (
            "UPDATE StringIds SET value = ? || ' ' || value WHERE id % 2",
            "UPDATE NVTX_EVENTS SET text = ? WHERE text IS NOT NULL",
            "UPDATE TARGET_INFO_SYSTEM_ENV SET value = ?",
        ):
            with contextlib.suppress(sqlite3.Error), connection:
                connection.execute(change, (SECRET,))
    return path


def place_secret_csv(data: bytes, folder: Path) -> Path:
    """Write a table of ncu with a password in front of the names of cuDNN's kernels."""
    return place_csv(data.replace(b'"cudnn_', f'"{SECRET} cudnn_'.encode()), folder)


def _scrub_commands(path: Path) -> list[list[str]]:
    return [["scrub", str(path), "-o", str(path.with_name(f"copy{path.suffix}"))]]


KINDS = {
    kind.name: kind
    for kind in (
        Kind("kineto", kineto_seeds, change_kineto, place_kineto, _ingest),
        Kind("ncu-csv", csv_seeds, change_csv, place_csv, _ingest),
        Kind("nsys", nsys_seeds, change_database, place_nsys, _ingest),
        Kind("ncu-rep", rep_seeds, change_rep, place_rep, _ingest),
        Kind("run-folder", run_seeds, change_run, place_run, _ingest),
        Kind("grammar", grammar_seeds, change_grammar, place_grammar, _grammar_commands),
        Kind("store", store_seeds, change_store, place_store, _store_commands),
        Kind("atlas", atlas_seeds, change_atlas, place_atlas, _atlas_commands, has_store=False),
        Kind(
            "scrub-nsys", nsys_seeds, change_database, place_secret_nsys, _scrub_commands, PLANTED
        ),
        Kind("scrub-ncu", csv_seeds, change_csv, place_secret_csv, _scrub_commands, PLANTED),
    )
}
