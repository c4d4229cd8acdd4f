"""Exports, reports and tables inside gzip are read like plain ones."""

from __future__ import annotations

import gzip
from contextlib import closing
from pathlib import Path

import pytest

from profharness.errors import TraceFormatError
from profharness.parse import is_trace, open_trace, sniff
from profharness.parse.ncu_readers import import_package

DATA = Path(__file__).parents[1] / "data"
CSV = '"ID","Kernel Name","gpu__time_duration.sum"\n"","","ns"\n"0","k","16"\n'


def test_a_packed_export_reads_like_the_plain_one(
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
        with closing(open_trace(path)) as one, closing(open_trace(plain)) as two:  # type: ignore[type-var]
            assert one.kernels == two.kernels and one.num_launches == two.num_launches > 0
            ours, theirs = next(iter(one.batches())), next(iter(two.batches()))
            assert (ours.start_ns == theirs.start_ns).all()
    assert list(temporary.iterdir()) == []


def test_a_packed_table_and_report(tmp_path: Path) -> None:
    path = tmp_path / "k.csv.gz"
    path.write_bytes(gzip.compress(CSV.encode()))
    (batch,) = open_trace(path).batches()
    assert batch.duration_ns.tolist() == [16]
    path.write_bytes(gzip.compress(b"config,time\n1,2\n"))
    assert sniff(path) is None
    if import_package() is None:
        pytest.skip("reading a report needs the package ncu-report")
    assert open_trace(DATA / "ncu_h200.ncu-rep.gz").num_launches == 82


@pytest.mark.parametrize("name", ["x.sqlite.gz", "x.ncu-rep.gz"])
def test_errors_name_the_file_that_was_given(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"hello" * 100))
    with pytest.raises(TraceFormatError, match=rf"^{path}(, byte 0)?: not an ") as caught:
        open_trace(path)
    assert caught.value.path == path
    for data in (gzip.compress(b"hello" * 99)[:-9], b"\x1f\x8bgarbage"):
        path.write_bytes(data)
        with pytest.raises(TraceFormatError, match=rf"^{path}: cannot be decompressed"):
            open_trace(path)
    path.write_bytes(b"not gzip at all")
    with pytest.raises(TraceFormatError, match="not an "):
        open_trace(path)


def test_a_trace_that_lies_there_twice_is_taken_in_once(tmp_path: Path) -> None:
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
