"""Gzipped exports, reports and tables are read like unpacked ones."""

from __future__ import annotations

import gzip
import os
import random
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from profharness.errors import TraceFormatError
from profharness.store import ingest_path
from profharness.traces import (
    ALWAYS_UNPACKED,
    MAX_RATIO,
    is_trace,
    open_file,
    open_trace,
    sniff,
)
from profharness.traces.ncu_readers import has_package

DATA = Path(__file__).parents[1] / "data"
CSV = '"ID","Kernel Name","gpu__time_duration.sum"\n"","","ns"\n"0","k","16"\n'


def test_a_gzipped_export_reads_like_the_plain_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = DATA / "nsys_h200.sqlite.gz"
    plain = tmp_path / "x.sqlite"
    plain.write_bytes(gzip.decompress(packed.read_bytes()))
    other = tmp_path / "any.gz"
    other.write_bytes(packed.read_bytes())
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    for path in (packed, other):
        with closing(open_trace(path)) as one, closing(open_trace(plain)) as two:
            assert one.kernels == two.kernels and one.num_launches == two.num_launches > 0
            ours, theirs = next(iter(one.batches())), next(iter(two.batches()))
            assert (ours.start_ns == theirs.start_ns).all()
    assert list(temporary.iterdir()) == []


def test_a_gzipped_table_and_report_are_read(tmp_path: Path) -> None:
    path = tmp_path / "k.csv.gz"
    path.write_bytes(gzip.compress(CSV.encode()))
    (batch,) = open_trace(path).batches()
    assert batch.duration_ns.tolist() == [16]
    path.write_bytes(gzip.compress(b"config,time\n1,2\n"))
    assert sniff(path) is None
    if not has_package():
        pytest.skip("reading a report needs the package ncu-report")
    assert open_trace(DATA / "ncu_h200.ncu-rep.gz").num_launches == 82


@pytest.mark.parametrize("name", ["x.sqlite.gz", "x.ncu-rep.gz"])
def test_errors_name_the_given_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"hello" * 100))
    with pytest.raises(
        TraceFormatError, match=rf"^{path}(, byte 0( of the decompressed data)?)?: not an "
    ) as caught:
        open_trace(path)
    assert caught.value.path == path
    for data in (gzip.compress(b"hello" * 99)[:-9], b"\x1f\x8bgarbage"):
        path.write_bytes(data)
        with pytest.raises(
            TraceFormatError,
            match=rf"^{path}, byte [\d,]+ of the decompressed data: the gzip stream is ",
        ):
            open_trace(path)
    path.write_bytes(b"not gzip at all")
    with pytest.raises(TraceFormatError, match="not an "):
        open_trace(path)


def content(path: Path) -> bytes:
    """Return the whole content of a packed file."""
    file, packed = open_file(path)
    assert packed
    with closing(file):
        return b"".join(iter(lambda: file.read(1000), b""))


def test_several_members_and_trailing_zeros_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    one, two = gzip.compress(b"one" * 999), gzip.compress(b"two")
    for data in (
        one + two,
        one + two + bytes(100_000),
        one + bytes(5) + two,
        b"\x1f\x8b" + one[2:] + two,
    ):
        path.write_bytes(data)
        assert content(path) == b"one" * 999 + b"two"
    path.write_bytes(gzip.compress(b""))
    assert content(path) == b""


@pytest.mark.parametrize("tail", [b"g", b"garbage\n" * 50_000, b"\x1f"])
def test_trailing_data_is_refused(tmp_path: Path, tail: bytes) -> None:
    packed = {"x.csv.gz": gzip.compress(CSV.encode())}
    names = ("kineto_h200.json.gz", "nsys_h200.sqlite.gz", "ncu_h200.ncu-rep.gz")
    for name, data in (packed | {name: (DATA / name).read_bytes() for name in names}).items():
        path = tmp_path / name
        path.write_bytes(data + tail)
        with pytest.raises(TraceFormatError, match="there is other data after the gzip stream"):
            open_trace(path)


def test_any_damaged_byte_gives_an_error_that_names_the_file(tmp_path: Path) -> None:
    rng = random.Random(7)
    for name in ("kineto_h200.json.gz", "nsys_h200.sqlite.gz", "ncu_h200.ncu-rep.gz"):
        whole = (DATA / name).read_bytes()
        path = tmp_path / name
        for at in (2, *(rng.randrange(10, len(whole) - 4) for _ in range(12)), len(whole) - 5):
            data = bytearray(whole)
            data[at] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
            with pytest.raises(
                TraceFormatError,
                match=rf"^{path}, byte [\d,]+ of the decompressed data: the gzip stream is",
            ):
                open_trace(path)


def test_a_damaged_trace_does_not_affect_others_in_its_folder(tmp_path: Path) -> None:
    folder = shutil.copytree(DATA.parents[1] / "traces" / "h200-torch2.11", tmp_path / "run")
    first = min(folder.glob("*.torch.json.gz"))
    data = bytearray(first.read_bytes())
    data[len(data) // 2] ^= 0x55
    first.write_bytes(data)
    (result,) = ingest_path(tmp_path / "s.db", folder)
    assert result.cells == 24 and result.launches > 600
    assert any("the gzip stream is damaged" in text for text in result.warnings)


@pytest.mark.parametrize("name", ["x.json.gz", "x.csv.gz", "x.sqlite.gz", "x.ncu-rep.gz", "x.gz"])
def test_a_bomb_is_refused_by_its_unpacked_size(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    starts = {
        "x.csv.gz": CSV.encode(),
        "x.sqlite.gz": b"SQLite format 3\0",
        "x.ncu-rep.gz": b"NVR\0",
    }
    path = tmp_path / name
    with gzip.open(path, "wb", 9) as file:
        file.write(starts.get(name, b'{"traceEvents": ['))
        for _ in range(200):
            file.write(bytes([10]) * 1_000_000)
    limit = max(ALWAYS_UNPACKED, MAX_RATIO * path.stat().st_size)
    with pytest.raises(TraceFormatError, match=f"unpacks to more than {limit:,} bytes"):
        open_trace(path)
    assert list(temporary.iterdir()) == []


def test_real_traces_are_far_below_the_limit() -> None:
    for path in (DATA.parents[1] / "traces").rglob("*.gz"):
        assert len(content(path)) < MAX_RATIO / 4 * path.stat().st_size


def test_a_special_file_is_refused_without_waiting(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        with pytest.raises(TraceFormatError, match="not a regular file"):
            open_trace(path)


def test_a_trace_also_present_as_gzip_is_ingested_once(tmp_path: Path) -> None:
    for name in (
        "a.nsys-rep.gz",
        "a.sqlite.gz",
        "b.sqlite",
        "b.sqlite.gz",
        "c.nsys-rep",
        "c.sqlite.gz",
    ):
        (tmp_path / name).write_bytes(gzip.compress(b""))
    found = [path.name for path in sorted(tmp_path.iterdir()) if is_trace(path)]
    assert found == ["a.sqlite.gz", "b.sqlite", "c.sqlite.gz"]


def test_a_trace_without_a_suffix_is_recognized_by_its_content(tmp_path: Path) -> None:
    names = {"kineto_h200.json": "chrome", "nsys_h200.sqlite": "nsys", "ncu_h200.ncu-rep": "ncu"}
    for name, parser in names.items():
        data = gzip.decompress((DATA / f"{name}.gz").read_bytes())
        (tmp_path / parser).write_bytes(data)
        (tmp_path / name).write_bytes(data)
        assert sniff(tmp_path / parser) == sniff(tmp_path / name) == parser
