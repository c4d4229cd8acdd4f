"""answers/atlas/data.py: the file of an atlas gives back what was measured, and a bad one is refused."""

from __future__ import annotations

import hashlib
import itertools
import json
import lzma
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from profharness.answers.atlas.data import (
    COLUMNS,
    HEAD,
    MAGIC,
    MAX_HEADER,
    TABLES,
    VERSION,
    Atlas,
    Machine,
    atlas_of,
    packaged_atlases,
    read_atlas,
    read_shards,
    shard_lines,
    write_atlas,
)
from profharness.config import parse_config
from profharness.errors import ProfharnessError, UsageError

ROOT = Path(__file__).parents[2]
ARCHIVE = ROOT / "traces" / "atlas-h200.tar.xz"
WHEEL_BYTES = 4_000_000  # what all packaged atlases may take together


@pytest.fixture(scope="module")
def small(packaged: Atlas, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("atlas") / "small.atlas"
    write_atlas(atlas_of(packaged.machine, itertools.islice(packaged.cells(), 60)), path)
    return path


def test_the_packaged_atlas_is_what_its_archive_gives(packaged: Atlas) -> None:
    source = read_shards(ARCHIVE)
    assert source.machine == packaged.machine
    assert {name: source.tables[name] for name in TABLES} == dict(packaged.tables)
    for name in COLUMNS:
        assert np.array_equal(source.column(name), packaged.column(name)), name
    files = [*packaged_atlases(), *packaged_atlases()[0].parent.glob("*.model")]
    assert sum(path.stat().st_size for path in files) <= WHEEL_BYTES


def test_a_cell_reads_as_its_line_was_written(packaged: Atlas) -> None:
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
        assert (cell.kernel_us, cell.message) == (row.get("kernel_us"), row.get("message"))
    assert packaged.find(parse_config("3,5,12345,64,fp16"), "auto") is None
    assert packaged.find(parse_config("2,8,512,64,fp16,layout=bshd"), "auto") is None


def test_every_config_of_an_atlas_comes_back(small: Path) -> None:
    atlas = read_atlas(small)
    again = atlas_of(atlas.machine, atlas.cells())
    assert list(again.cells()) == list(atlas.cells())


def forged(data: bytes, edit: str, value: object) -> bytes:
    """The same file with another header, and the right checksum."""
    length = HEAD.unpack_from(data)[2]
    body = data[HEAD.size :]
    header = json.loads(lzma.decompress(body[:length]))
    part, name = edit.split("/")
    header[part][name] = value
    text = lzma.compress(json.dumps(header).encode())
    body = text + body[length:]
    return HEAD.pack(MAGIC, VERSION, len(text), hashlib.sha256(body).digest()) + body


@pytest.mark.parametrize(
    ("edit", "value"),
    [("counts/cells", 61), ("counts/cells", 1 << 40), ("counts/times", -1), ("columns/batch", [3, 1]),
     ("tables/variants", [["no", "fields"]]), ("tables/variants", [{"__class__": 1}]),
     ("tables/kernels", []), ("machine/host", "x"), ("columns/time_ns", [4, 1]),
     ("machine/gpu", 5), ("machine/torch", None)],
)  # fmt: skip
def test_a_forged_header_is_refused(small: Path, tmp_path: Path, edit: str, value: object) -> None:
    path = tmp_path / "forged.atlas"
    path.write_bytes(forged(small.read_bytes(), edit, value))
    with pytest.raises(ProfharnessError, match=r"forged\.atlas: .* get it again"):
        list(read_atlas(path).cells())


def test_a_machine_has_the_name_of_a_file_in_a_folder() -> None:
    for gpu in ("../../../escaped", "/etc/passwd", "..", "a\0b\nc"):
        name = Machine(gpu, "2.11.0/../..").name
        assert Path(name).name == name and name.isprintable() and not name.startswith(".")


def test_an_index_before_its_table_is_refused(small: Path, tmp_path: Path) -> None:
    atlas = read_atlas(small)
    for name in ("backend", "kernel", "status"):
        columns = {each: atlas.column(each) for each in COLUMNS}
        columns[name] = np.full_like(columns[name], -1)
        path = tmp_path / f"{name}.atlas"
        write_atlas(replace(atlas, columns=columns, blocks={}), path)
        with pytest.raises(ProfharnessError, match=f"column {name} of the atlas is damaged"):
            list(read_atlas(path).cells())


@pytest.mark.parametrize(
    "line",
    [{"config": 5}, {"config": "0,8,64,64"}, {"backend": None}, {"backend": "naive"},
     {"status": "fine"}, {"kernels": [["one"]]}, {"kernels": [["one", [1, 1, -1], None, 1, 1]]},
     {"kernel_us": "a"}, {"kernel_us": -1}, {"graph_us": float("nan")}, {"peak_bytes": 1 << 70},
     {"peak_bytes": -1}, {"kernel_us_each": [-1]}, {"environment": 5}],
)  # fmt: skip
def test_a_wrong_field_is_refused_by_file_line_and_name(
    tmp_path: Path, line: dict[str, object]
) -> None:
    shard(tmp_path, {}, line)
    (name,) = line
    with pytest.raises(UsageError, match=rf"shard-0\.jsonl, line 2: (no )?{name}"):
        read_shards(tmp_path)


def test_launches_without_their_times_are_refused(tmp_path: Path) -> None:
    shard(tmp_path, {}, {"kernel_us_each": [1, 2, 3]})
    with pytest.raises(UsageError, match="a line is no cell of an atlas"):
        read_shards(tmp_path)


@pytest.mark.parametrize(
    "changed",
    [{"torch": "banana"}, {"cudnn": "x"}, {"cudnn": -1}, {"torch_cuda": 13}, {"driver": 580},
     {"gpu": ""}],
)  # fmt: skip
def test_a_machine_that_is_none_is_refused(tmp_path: Path, changed: dict[str, object]) -> None:
    shard(tmp_path, changed, {})
    (name,) = changed
    with pytest.raises(UsageError, match=rf"line 1: {name} .*: it should be"):
        read_shards(tmp_path)


def shard(folder: Path, machine: dict[str, object], line: dict[str, object]) -> None:
    environment = {"gpu": "NVIDIA H200", "torch": "2.11.0"} | machine
    head = {"atlas": 1, "environment": environment}
    cell = {"config": "1,8,64,64,fp16", "backend": "auto", "status": "ok"} | line
    (folder / "shard-0.jsonl").write_text(f"{json.dumps(head)}\n{json.dumps(cell)}\n")


def test_a_header_that_unpacks_without_end_is_refused(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    length = HEAD.unpack_from(data)[2]
    header, columns = data[HEAD.size : HEAD.size + length], data[HEAD.size + length :]
    bomb = lzma.compress(lzma.decompress(header) + b" " * MAX_HEADER, preset=0)
    head = HEAD.pack(MAGIC, VERSION, len(bomb), hashlib.sha256(bomb + columns).digest())
    (tmp_path / "bomb.atlas").write_bytes(head + bomb + columns)
    with pytest.raises(ProfharnessError, match=r"bomb\.atlas: the header of the atlas is forged"):
        read_atlas(tmp_path / "bomb.atlas")


def test_a_file_cut_short_changed_or_of_another_version_is_refused(
    small: Path, tmp_path: Path
) -> None:
    whole, path = small.read_bytes(), tmp_path / "bad.atlas"
    for bad, message in (
        (whole[:-1], "cut short or changed"),
        (whole[:-1] + b"?", "cut short or changed"),
        (whole + b"more", "cut short or changed"),
        (whole[:20], "not an atlas"),
        (b"", "not an atlas"),
        (b"SQLite format 3\0" * 9, "not an atlas"),
        (whole[:8] + b"\7" + whole[9:], "version 7; this profharness reads version 1"),
    ):
        path.write_bytes(bad)
        with pytest.raises(ProfharnessError, match=message):
            read_atlas(path)
    with pytest.raises(UsageError, match="No such file"):
        read_atlas(tmp_path / "none.atlas")


def test_shards_of_two_machines_or_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no machine"):
        read_shards(tmp_path)
    for number, gpu in enumerate(("NVIDIA H200", "NVIDIA L4")):
        head = {"atlas": 1, "environment": {"gpu": gpu, "torch": "2.11.0"}}
        (tmp_path / f"shard-{number}.jsonl").write_text(json.dumps(head) + "\n")
    with pytest.raises(UsageError, match=r"h200-torch2\.11\.0, l4-torch2\.11\.0"):
        read_shards(tmp_path)
    (tmp_path / "shard-9.jsonl").write_text('{"atlas": 2}\n')
    with pytest.raises(UsageError, match="not a shard of an atlas of version 1"):
        read_shards(tmp_path)
