"""atlas/data.py and npz.py: a written atlas reads back unchanged, and a bad file is refused."""

from __future__ import annotations

import itertools
import json
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profharness.atlas.data import (
    COLUMNS,
    MAX_COUNTS,
    MAX_RATIO,
    PACKAGED,
    Atlas,
    Machine,
    build_atlas,
    read_atlas,
    write_atlas,
)
from profharness.atlas.model import read_model
from profharness.atlas.predictions import known_atlases
from profharness.atlas.shards import read_shards, shard_lines
from profharness.attention.config import parse_config
from profharness.errors import ProfharnessError, UsageError

ROOT = Path(__file__).parents[2]
ARCHIVE = ROOT / "traces" / "atlas-h200.tar.xz"
WHEEL_BYTES = 4_000_000  # all packaged atlases and models


@pytest.fixture(scope="module")
def small(packaged: Atlas, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("atlas") / "small.npz"
    write_atlas(build_atlas(packaged.machine, itertools.islice(packaged.cells(), 60)), path)
    return path


def test_packaged_atlas_equals_its_archive(packaged: Atlas) -> None:
    source = read_shards(ARCHIVE)
    assert source.machine == packaged.machine
    assert source.tables == packaged.tables
    for name in COLUMNS:
        assert np.array_equal(source.columns[name], packaged.columns[name]), name
    assert sum(path.stat().st_size for path in PACKAGED.glob("*.npz")) <= WHEEL_BYTES


def test_cell_equals_its_line(packaged: Atlas) -> None:
    for row in itertools.islice((row for row in shard_lines(ARCHIVE) if "config" in row), 200):
        cell = packaged.find(parse_config(row["config"]), row["backend"])
        assert cell is not None
        kernels = [
            [name, *(list(part) if isinstance(part, tuple) else part for part in rest)]
            for name, *rest, _ in cell.launches
        ]
        assert kernels == row.get("kernels", [])
        assert [launch.time_us for launch in cell.launches] == row.get("kernel_us_each", [])
        for name in ("regime", "status", "choice", "graph_us", "peak_bytes"):
            assert getattr(cell, name) == row[name]
        assert cell.kernel_us == row.get("kernel_us")
        assert cell.message == row.get("message")
    assert packaged.find(parse_config("3,5,12345,64,fp16"), "auto") is None
    assert packaged.find(parse_config("2,8,512,64,fp16,layout=bshd"), "auto") is None


def contents(path: Path) -> dict[str, Any]:
    """Return the arrays of a file, and its header as JSON."""
    with np.load(path) as file:
        arrays = dict(file)
    return arrays | {"header": json.loads(arrays["header"].tobytes())}


def write_contents(path: Path, arrays: dict[str, Any]) -> None:
    header = np.frombuffer(json.dumps(arrays["header"]).encode(), np.uint8)
    np.savez_compressed(path, **(arrays | {"header": header}))


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("tables", "variants", [["no", "fields"]]),
        ("tables", "variants", [{"__class__": 1}]),
        ("tables", "kernels", [1]),
        ("tables", "backends", ["naive"]),
        ("machine", "gpu", 5),
        ("machine", "torch", None),
        ("machine", "torch", "banana"),
    ],
)
def test_forged_header_is_refused(
    small: Path, tmp_path: Path, part: str, name: str, value: object
) -> None:
    arrays = contents(small)
    arrays["header"][part][name] = value
    write_contents(tmp_path / "forged.npz", arrays)
    with pytest.raises(ProfharnessError, match=r"forged\.npz: the header .* get a new copy"):
        read_atlas(tmp_path / "forged.npz")


def test_deep_header_is_refused(small: Path, tmp_path: Path) -> None:
    deep = np.frombuffer(b"[" * 2_000_000, np.uint8)
    np.savez_compressed(tmp_path / "deep.npz", **(contents(small) | {"header": deep}))
    with pytest.raises(ProfharnessError, match=r"deep\.npz: .* get a new copy"):
        read_atlas(tmp_path / "deep.npz")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("batch", lambda values: values[:-1]),
        ("batch", lambda values: values * 0),
        ("time_ns", lambda values: values[:-1]),
        ("length", lambda values: values + 1),
        ("length", lambda values: values * 0 - 1),
        ("kind", lambda values: values.astype(np.int16) + 10_000),
        ("grid_x", lambda values: values * 0 - 1),
        ("backend", lambda values: values * 0 - 1),
        ("kernel", lambda values: values * 0 - 1),
        ("status", lambda values: values * 0 - 1),
        ("status", lambda values: values.astype(np.float32)),
        ("status", lambda values: values.astype(np.uint64)),
        ("status", lambda values: values.reshape(-1, 1)),
        ("status", lambda values: np.array([None] * len(values))),
    ],
)
def test_forged_column_is_refused(small: Path, tmp_path: Path, name: str, change: Any) -> None:
    arrays = contents(small)
    write_contents(tmp_path / "forged.npz", arrays | {name: change(arrays[name])})
    with pytest.raises(ProfharnessError, match=r"forged\.npz: .*(get a new copy)"):
        read_atlas(tmp_path / "forged.npz")


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(path: Path, content: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return path.read_bytes()


def npy(header: str, data: bytes = b"") -> bytes:
    text = header.encode()
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text + data


@pytest.mark.parametrize(
    "member",
    [
        npy("{'descr': '<i8', 'fortran_order': False, 'shape': (1099511627776,), }\n"),
        npy("{'descr': '<i8', 'fortran_order': False, 'shape': (-1, -1), }\n", bytes(8)),
        npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }\n", bytes(8)),
        npy("{'descr': '|V99999999', 'fortran_order': False, 'shape': (0,), }\n"),
        npy("-" * 9_000 + "1"),
        npy("(" * 9_000),
        b"not npy",
        b"",
        npy("{'descr': '|i1', 'fortran_order': False, 'shape': (16777216,), }\n", bytes(1 << 24)),
    ],
    ids=[
        "huge", "negative", "objects", "void", "long-header", "nested-header", "text", "empty",
        "16-MiB",
    ],
)  # fmt: skip
def test_forged_array_is_refused(small: Path, tmp_path: Path, member: bytes) -> None:
    path = tmp_path / "forged.npz"
    zipped(path, members(small) | {"batch.npy": member})
    with pytest.raises(ProfharnessError, match=r"forged\.npz: .* get a new copy"):
        read_atlas(path)


def test_forged_zip_is_refused(small: Path, tmp_path: Path) -> None:
    path, content = tmp_path / "forged.npz", members(small)
    whole = zipped(path, content)
    forged = [
        zipped(path, content | {"more.npy": b""}),
        zipped(path, {name: data for name, data in content.items() if name != "batch.npy"}),
        zipped(path, content, zipfile.ZIP_LZMA),
        # a directory of many entries, and a zip64 record, of which zipfile would read any size
        whole[:-10] + struct.pack("<II", 1 << 30, 0) + whole[-2:],
        whole[:-22] + struct.pack("<4sIQI", b"PK\6\7", 0, 0, 1) + whole[-22:],
        whole[:-1],
        whole[:100] + b"?" + whole[101:],
        whole + b"more",
        whole[: len(whole) // 2],
    ]
    for data in forged:
        path.write_bytes(data)
        with pytest.raises(ProfharnessError, match=r"forged\.npz: .* get a new copy"):
            read_atlas(path)


def test_unpacked_size_is_limited(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "bomb.npz"
    count = 8 << 20
    header = f"{{'descr': '|i1', 'fortran_order': False, 'shape': ({count},), }}\n"
    bomb = npy(header, bytes(count))
    data = zipped(path, members(small) | {"batch.npy": bomb})
    assert count > MAX_RATIO * len(data)
    with pytest.raises(ProfharnessError, match=r"bomb\.npz: .* get a new copy"):
        read_atlas(path)


def read_in_process(expression: str) -> tuple[str, int]:
    """Return the value or error of an expression, and the growth of the peak memory in kB.

    getrusage would count the memory of the parent too.
    """
    code = (
        "import re; from pathlib import Path; import profharness.atlas.shards\n"
        "def peak():\n"
        "    status = Path('/proc/self/status').read_text()\n"
        "    return int(re.search(r'VmHWM:\\s+(\\d+)', status)[1])\n"
        "before = peak()\n"
        f"try:\n    print({expression})\n"
        "except profharness.errors.ProfharnessError as error:\n    print(error)\n"
        "print(peak() - before)\n"
    )
    made = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    text, kilobytes = made.stdout.splitlines()
    return text, int(kilobytes)


def understated(path: Path, name: str) -> None:
    """Append 100 MB to an array's deflate stream. The file states the size without them."""
    content = members(path)
    stream = zlib.compressobj(wbits=-15)
    packed = stream.compress(content[name] + bytes(100_000_000)) + stream.flush()
    zipped(path, {other: data for other, data in content.items() if other != name})
    with zipfile.ZipFile(path, "a") as archive:
        # Stored, then declared as deflated: local and central headers have the method at 8 and 10.
        archive.writestr(name, packed)
        info = archive.getinfo(name)
        info.compress_type, info.file_size = zipfile.ZIP_DEFLATED, len(content[name])
        info.CRC = zlib.crc32(content[name])
    data = bytearray(path.read_bytes())
    struct.pack_into("<H", data, info.header_offset + 8, zipfile.ZIP_DEFLATED)
    path.write_bytes(data)


@pytest.mark.parametrize("forged", ["header", "batch", "kind", "understated"])
def test_forged_sizes_are_refused_before_memory_is_allocated(
    small: Path, tmp_path: Path, forged: str
) -> None:
    path = tmp_path / "forged.npz"
    # Noise, so that the file may unpack to 128 MB.
    noise = np.random.default_rng(0).integers(0, 1 << 62, 250_000)
    arrays = contents(small) | {"kernel_ns": noise}
    large = np.zeros(100_000_000, np.int8)
    if forged == "header":
        arrays["header"] |= {"more": "x" * len(large)}
    elif forged != "understated":
        arrays[forged] = large
    write_contents(path, arrays)
    if forged == "understated":
        understated(path, "batch.npy")
    text, kilobytes = read_in_process(f"profharness.atlas.data.read_atlas(Path({str(path)!r}))")
    assert "get a new copy" in text
    assert kilobytes < 40_000


def test_models_with_too_many_values_are_refused(tmp_path: Path) -> None:
    (source,) = PACKAGED.glob("*.model.npz")
    path = tmp_path / "forged.model.npz"
    for name, count, dtype in (("header", 4_000_001, np.uint8), ("f4", 4_000_001, "<f4")):
        with np.load(source) as file:
            np.savez(path, **(dict(file) | {name: np.zeros(count, dtype)}))
        with pytest.raises(
            ProfharnessError, match=r"model\.npz: the file is truncated or was changed"
        ):
            read_model(path)


def test_other_files_are_refused(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.npz"
    for data, message in (
        (b"", "not an atlas"),
        (b"SQLite format 3\0" * 9, "not an atlas"),
    ):
        path.write_bytes(data)
        with pytest.raises(UsageError, match=message):
            read_atlas(path)
    arrays = contents(small)
    arrays["header"]["version"] = 7
    write_contents(path, arrays)
    with pytest.raises(UsageError, match="version 7, but this profharness reads version 2"):
        read_atlas(path)
    with pytest.raises(UsageError, match="No such file"):
        read_atlas(tmp_path / "none.npz")


def test_atlases_of_the_package_are_read_once(tmp_path: Path) -> None:
    (first,), (second,) = known_atlases(tmp_path), known_atlases(tmp_path)
    assert first.atlas is second.atlas


def test_bad_file_in_the_folder_costs_one_line(
    small: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cut.npz").write_bytes(small.read_bytes()[:-1])
    (tmp_path / "good.npz").write_bytes(small.read_bytes())
    assert [entry.name for entry in known_atlases(tmp_path)][1:] == ["good"]
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 1
    assert texts[0].endswith("(skipped)") and "\n" not in texts[0]


def test_machine_name_is_a_file_name() -> None:
    for gpu in ("../../../escaped", "/etc/passwd", "..", "a\0b\nc"):
        name = Machine(gpu, "2.11.0").name
        assert Path(name).name == name
        assert name.isprintable()
        assert not name.startswith(".")


@pytest.mark.parametrize(
    "line",
    [{"config": 5}, {"config": "0,8,64,64"}, {"backend": None}, {"backend": "naive"},
     {"status": "fine"}, {"kernels": [["one"]]}, {"kernels": [["one", [1, 1, -1], None, 1, 1]]},
     {"kernel_us": "a"}, {"kernel_us": -1}, {"graph_us": float("nan")}, {"peak_bytes": 1 << 70},
     {"peak_bytes": -1}, {"kernel_us_each": [-1]}, {"environment": 5}],
)  # fmt: skip
def test_invalid_field_is_refused_by_file_line_and_name(
    tmp_path: Path, line: dict[str, object]
) -> None:
    write_shard(tmp_path, {}, line)
    (name,) = line
    with pytest.raises(UsageError, match=rf"shard-0\.jsonl, line 2: (no )?{name}"):
        read_shards(tmp_path)


def test_launches_without_their_times_are_refused(tmp_path: Path) -> None:
    write_shard(tmp_path, {}, {"kernel_us_each": [1, 2, 3]})
    with pytest.raises(UsageError, match="a line is not a cell of an atlas"):
        read_shards(tmp_path)


@pytest.mark.parametrize(
    "changed",
    [{"torch": "banana"}, {"cudnn": "x"}, {"cudnn": -1}, {"torch_cuda": 13}, {"driver": 580},
     {"gpu": ""}, {"capability": 9.0}, {"num_sms": -1}, {"l2_bytes": "50 MB"}],
)  # fmt: skip
def test_invalid_machine_is_refused(tmp_path: Path, changed: dict[str, object]) -> None:
    write_shard(tmp_path, changed, {})
    ((name, value),) = changed.items()
    text = rf"line 1: {name.removeprefix('torch_')} {value!r}: expected "
    if name == "torch":
        text = "line 1: invalid PyTorch release 'banana'"
    with pytest.raises(UsageError, match=text):
        read_shards(tmp_path)


def write_shard(folder: Path, machine: dict[str, object], *lines: dict[str, object]) -> None:
    environment = {"gpu": "NVIDIA H200", "torch": "2.11.0"} | machine
    head = {"atlas": 1, "environment": environment}
    cell = {"config": "1,8,64,64,fp16", "backend": "auto", "status": "ok"}
    rows = [head, *(cell | line for line in lines)]
    (folder / "shard-0.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.mark.parametrize("kind", MAX_COUNTS)
def test_every_count_of_shards_is_limited_before_it_is_stored(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences = [[["one", [1, 1, 1], None, 1, 1]], [["one", [2, 1, 1], None, 1, 1]] * 2,
                 [["two", None, None, None, None]]]  # fmt: skip
    write_shard(tmp_path, {}, *({"kernels": each, "config": f"1,8,{at + 1},64,fp16"}
                                for at, each in enumerate([*sequences, sequences[1]])))  # fmt: skip
    counts = {"cells": 4, "kinds": 2, "sequences": 3, "launches": 4, "times": 6}
    for name, count in counts.items():
        monkeypatch.setitem(MAX_COUNTS, name, count)
    atlas = read_shards(tmp_path)
    assert {kind: len(atlas.columns[name]) for name, kind in COLUMNS.items()} == counts
    monkeypatch.setitem(MAX_COUNTS, kind, counts[kind] - 1)
    with pytest.raises(UsageError, match=f"more than {counts[kind] - 1} {kind} in one atlas"):
        read_shards(tmp_path)


@pytest.mark.parametrize("field", ["message", "regime"])
def test_texts_of_shards_are_limited(
    tmp_path: Path, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("profharness.atlas.data.MAX_HEADER_BYTES", 1_000)
    write_shard(tmp_path, {}, {field: "x" * 500})
    atlas = read_shards(tmp_path)
    write_atlas(atlas, tmp_path / "fits.npz")
    # JSON escapes the character with 12 bytes
    write_shard(tmp_path, {}, {field: "\U0001f600" * 90})
    with pytest.raises(UsageError, match="more than 1,000 bytes of names and messages"):
        read_shards(tmp_path)
    monkeypatch.setattr("profharness.atlas.data.MAX_HEADER_BYTES", 600)
    with pytest.raises(UsageError, match="more than 600 bytes of names and messages"):
        write_atlas(atlas, tmp_path / "large.npz")


def test_long_line_is_refused(tmp_path: Path) -> None:
    write_shard(tmp_path, {}, {"message": "x" * (1 << 20)})
    with pytest.raises(UsageError, match=r"shard-0\.jsonl, line 2: more than 1,048,576 bytes"):
        read_shards(tmp_path)


def test_shards_of_distinct_launches_take_little_memory(tmp_path: Path) -> None:
    kernels = (["k", [number, 1000, 1000], None, None, None] for number in range(300_000))
    lines = [
        {"config": f"1,8,{at + 1},64,fp16", "kernels": list(itertools.islice(kernels, 3_000))}
        for at in range(100)
    ]
    write_shard(tmp_path, {}, *lines)
    text, kilobytes = read_in_process(
        f"len(profharness.atlas.shards.read_shards(Path({str(tmp_path)!r})).columns['kind'])"
    )
    assert text == "300000"
    assert kilobytes < 50_000


def test_shards_of_several_machines_or_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="gpu is missing, but an atlas needs a GPU"):
        read_shards(tmp_path)
    for number, gpu in enumerate(("NVIDIA H200", "NVIDIA L4")):
        head = {"atlas": 1, "environment": {"gpu": gpu, "torch": "2.11.0"}}
        (tmp_path / f"shard-{number}.jsonl").write_text(json.dumps(head) + "\n")
    with pytest.raises(UsageError, match=r"h200-torch2\.11\.0, l4-torch2\.11\.0"):
        read_shards(tmp_path)
    (tmp_path / "shard-0.jsonl").write_text('{"atlas": 2}\n')
    with pytest.raises(UsageError, match="not a shard of an atlas of version 1"):
        read_shards(tmp_path)
