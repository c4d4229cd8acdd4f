"""Files that could take forever or fill the memory cost no more than others of their size."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from test_ncu import same
from test_ncu_csv import HEADER as TABLE
from test_ncu_csv import NOW, START

from profharness import files
from profharness.attention.config import MAX_CONFIGS, expand_configs, parse_config_lines
from profharness.errors import TraceFormatError, UsageError
from profharness.recording.profilers import ncu
from profharness.recording.profilers.ncu import check_file
from profharness.traces import chrome, chrome_events, ncu_csv, ncu_readers, open_trace
from profharness.traces.chrome import parse_chrome
from profharness.traces.ncu import parse_ncu
from profharness.traces.ncu_csv import read_csv_text

CPU_S = 20.0  # limit for a file of 1 MB; the slowest of these takes a tenth of it
SIZE = 1_000_000
KERNEL = (
    b'{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":1,"dur":1,"args":{"correlation":1}}'
)


@contextmanager
def bounded() -> Iterator[None]:
    """Fail if the block takes more processor time than a file of 1 MB may."""
    begun = sum(os.times()[:4])
    yield
    assert sum(os.times()[:4]) - begun < CPU_S


def repeated(text: bytes, before: bytes = b"", behind: bytes = b"") -> bytes:
    return before + text * (SIZE // len(text)) + behind


WHOLE = b'"traceEvents":[' + KERNEL + b"]}"
HEADERS = {
    "arrays of that name": repeated(b'{"traceEvents":[]},', b'{"x":[', b"1]," + WHOLE),
    "open arrays of that name": repeated(b'{"traceEvents":[', b'{"x":'),
    "nested arrays of that name": b'{"x":'
    + b'{"traceEvents":[' * 50_000
    + b"]}" * 50_000
    + b","
    + WHOLE,
    "that name in a string": repeated(rb"\"traceEvents\":[", b'{"x":"', b'",' + WHOLE),
    "that key again": repeated(b'"traceEvents":[0],', b"{", WHOLE),
    "escapes": repeated(rb"\n", b'{"x":"', b'",' + WHOLE),
    "halves of characters": repeated(rb"\ud800", b'{"x":"', b'",' + WHOLE),
    "brackets": b"{" + b'"x":' + b"[" * 500_000 + b"]" * 500_000 + b"," + WHOLE,
    "quotes": repeated(b'"', b"{"),
    "digits": repeated(b"9", b'{"baseTimeNanoseconds":', b"," + WHOLE),
    "blanks": b'{"traceEvents"' + b" " * SIZE + b":[" + KERNEL + b"]}",
    "devices": repeated(b'{"warpSize":-1,"id":[[]]},', b'{"deviceProperties":[', b"1]," + WHOLE),
}
OPEN = KERNEL[:-2]
EVENTS = {
    "events without an end": (OPEN, b","),
    "every second event without an end": (KERNEL + b"," + OPEN, b","),
    "strings without an end": (KERNEL.replace(b'"k"', b'"k""'), b","),
    "events without an end on lines": (OPEN, b",\n"),
    "numbers of 4,000 digits": (KERNEL.replace(b'"ts":1', b'"ts":1' + b"0" * 4000), b",\n"),
    "times beyond all bounds": (KERNEL.replace(b'"ts":1', b'"ts":1e999999'), b",\n"),
    "deep arguments": (KERNEL.replace(b'n":1', b'n":1,"x":' + b"[" * 400 + b"]" * 400), b",\n"),
    "kernels of one correlation": (
        KERNEL + b"," + KERNEL.replace(b"kernel", b"cuda_runtime"),
        b",\n",
    ),
}


def read(path: Path) -> int | str:
    """Return the number of launches in a file, or the reason for which it is refused."""
    try:
        with closing(open_trace(path)) as trace:
            return trace.num_launches
    except TraceFormatError as error:
        return str(error)


@pytest.mark.parametrize("data", HEADERS.values(), ids=HEADERS)
def test_a_header_is_read_once(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_bytes(data)
    with bounded():
        answer = read(tmp_path / "t.json")
    assert answer == 1 or "t.json" in str(answer)


@pytest.mark.parametrize(("event", "between"), EVENTS.values(), ids=EVENTS)
def test_events_take_linear_time(event: bytes, between: bytes, tmp_path: Path) -> None:
    events = between.join([event] * (SIZE // len(event)))
    (tmp_path / "t.json").write_bytes(b'{"traceEvents":[\n' + KERNEL + between + events + b"\n]}")
    with bounded():
        answer = read(tmp_path / "t.json")
    assert isinstance(answer, int) or "t.json" in answer


def test_a_nested_trace_events_key_is_ignored(tmp_path: Path) -> None:
    header = {"x": {"traceEvents": []}, "y": '"traceEvents": [', "traceEventsX": [1]}
    text = json.dumps(header)[:-1] + ', "traceEvents"\n : ' + "\n[" + KERNEL.decode() + "]}"
    # also if a block of the read ends in the middle of it
    for blanks in range(chrome.BLOCK - 150, chrome.BLOCK - 60, 7):
        (tmp_path / "t.json").write_text(text.replace("{", "{" + " " * blanks, 1))
        assert read(tmp_path / "t.json") == 1


def test_a_file_of_a_million_empty_gzip_members_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "t.json.gz").write_bytes(repeated(gzip.compress(b"")))
    with bounded():
        assert "the file is empty" in str(read(tmp_path / "t.json.gz"))


def test_values_that_would_fill_the_memory_are_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "JSON_WEIGHT", 60_000)  # instead of a file of 30 MB
    path = tmp_path / "t.json"
    many = b"[]," * 80_000
    path.write_bytes(b'{"x":[' + many + b"1]," + WHOLE)
    assert "more than 6,000,000 values" in str(read(path))
    op = b'{"ph":"X","cat":"cpu_op","name":"aten::mm","ts":1,"dur":1,"args":{"Input Dims":['
    path.write_bytes(b'{"traceEvents":[\n' + KERNEL + b",\n" + op + many + b"[]]}}\n]}")
    with closing(parse_chrome(path)) as trace:
        assert (trace.num_launches, trace.skipped) == (1, 1)


HALF = rb"\ud800"
HALVES = {
    "of a kernel's arguments": (KERNEL.replace(b'n":1', b'n":1,"x":"' + HALF + b'"'), 0),
    "of an event": (KERNEL[:-1] + b',"u":"' + HALF + b'"}', 0),
    "of a key": (KERNEL[:-1] + b',"' + HALF + b'":1}', 0),
    "of a name": (KERNEL.replace(b'"k"', b'"k' + HALF + b'"'), 1),
    "of a process": (
        KERNEL.replace(b'"pid":0', b'"pid":"' + HALF + b'"').replace(b"kernel", b"cpu_op"),
        1,
    ),
}


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("event", "skipped"), HALVES.values(), ids=HALVES)
def test_a_lone_surrogate_is_an_error_only_where_it_is_read(
    event: bytes, skipped: int, compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(chrome_events, "Scanner", None)
    path = tmp_path / "t.json"
    path.write_bytes(b'{"traceEvents":[\n' + KERNEL + b",\n" + event + b",\n" + KERNEL + b"\n]}")
    with closing(parse_chrome(path)) as trace:
        assert (trace.num_launches, trace.skipped) == (3 - skipped, skipped)


ROW = f'{START},"1.5","168","0","0","x","5.25"\n'


@pytest.mark.parametrize("sign", ["\u2028", "\u2029", "\u0085", "\v", "\f", "\x1c", "\r"])
def test_a_name_may_contain_unicode_line_breaks(sign: str, tmp_path: Path) -> None:
    table = NOW.replace('"Kernel Name"', f'"{ncu_csv.PUSH_POP}","Kernel Name"')
    cell = f'"0  ""<default domain>:a{sign}b:none:none:none:none:ASCII:a{sign}b"""'
    text = TABLE.replace(NOW, table).replace('\n""', '\n"",""', 1)
    path = tmp_path / "t.csv"
    path.write_text(text + ROW.replace('"flash', f'{cell},"flash'), newline="")
    with closing(parse_ncu(path)) as trace:
        assert (trace.num_launches, [item.name for item in trace.ranges]) == (1, [f"a{sign}b"])


def test_lines_overwritten_by_a_progress_bar_are_separate(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(f"1 of 2\r2 of 2\r{TABLE}50 %\r{ROW}", newline="")
    assert read(tmp_path / "t.csv") == 1
    (tmp_path / "t.csv").write_text((TABLE + ROW).replace("\n", "\r\n"), newline="")
    assert read(tmp_path / "t.csv") == 1


TABLES = {
    "one line": "x" * 10_000_000,
    "zeros": "\0" * 10_000_000,
    "one row": TABLE + '"0",' * 2_000_000,
    "one cell": TABLE + '"' + "x" * 10_000_000,
    "quotes": TABLE + '"' * 1_000_000 + "\n",
    "rows without end": TABLE + '"1"\n' * 250_000,
    "carriage returns": TABLE + '"' + "\r" * 1_000_000,
    "columns": f"{NOW}," + ",".join(f'"a__{n}"' for n in range(60_000)) + "\n",
}


@pytest.mark.parametrize("text", TABLES.values(), ids=TABLES)
def test_a_table_takes_linear_time(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text)
    with bounded(), pytest.raises(TraceFormatError, match=r"t\.csv: "):
        parse_ncu(tmp_path / "t.csv")


def test_a_table_with_too_many_values_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ncu_csv, "MIN_PLACES", 1 << 16)  # instead of a file of 4 MB
    header = 'ID,"Kernel Name","gpu__time_duration.sum"\n,,ns\n'
    rows = "".join(f"{n},k,1\n" for n in range(4_000))
    with pytest.raises(TraceFormatError, match="values, too many for a report of its size"):
        read_csv_text(header + rows, Path("t.csv"))


@pytest.mark.parametrize("block", [b"\0\0\0\0", b"\x02\0\0\0\x10\0", b"\x04\0\0\0\x10\0\x28\0"])
def test_a_report_with_only_empty_blocks_is_refused(
    block: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ncu, "MAX_BLOCKS", 10_000)
    path = tmp_path / "t.ncu-rep"
    path.write_bytes(b"NVR\0\0\0\0\0" + block * 5_000_000)
    with bounded(), pytest.raises(TraceFormatError, match=r"a damaged block|blocks; expected"):
        check_file(path)


@pytest.mark.skipif(not ncu_readers.has_package(), reason="needs the package ncu_report")
def test_children_share_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Children that each read one result give the same as one child that reads all."""
    path = tmp_path / "t.ncu-rep"
    data = Path(__file__).parents[1] / "data" / "ncu_h200.ncu-rep.gz"
    path.write_bytes(gzip.decompress(data.read_bytes())[:107250])
    whole = parse_ncu(path)
    started: list[int] = []
    one = ncu_readers._read_part
    child = f"import profharness.traces.ncu_readers as n; n.ENOUGH_KIB = 1; {ncu_readers.CHILD}"
    monkeypatch.setattr(ncu_readers, "CHILD", child)
    monkeypatch.setattr(ncu_readers, "_read_part", lambda *a: started.append(a[2]) or one(*a))
    parts = parse_ncu(path)
    assert started == list(range(whole.num_launches)) and len(started) > 3
    same(parts, whole)


def test_a_set_of_ranges_counts_toward_the_limit() -> None:
    with pytest.raises(UsageError, match=f"more than {MAX_CONFIGS} values"):
        expand_configs("{" + "1:90000:+1," * 5000 + "1},1,1,64")
    lines = [f"1,1,1:60000:+1,{dim}" for dim in (64, 128)]
    with bounded(), pytest.raises(UsageError, match=f"line 2: more than {MAX_CONFIGS} configs"):
        parse_config_lines(lines * 1000, "configs.txt")
