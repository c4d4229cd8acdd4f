"""Damaged, foreign and hostile files cause an error with path and offset, or single events are
skipped and counted.
"""

from __future__ import annotations

import gzip
import json
import random
from contextlib import closing
from pathlib import Path

import pytest
from reference import told

from profharness.errors import TraceFormatError
from profharness.store import ingest_path
from profharness.traces import chrome_events, open_trace
from profharness.traces.chrome import parse_chrome

DATA = Path(__file__).parents[1] / "data" / "kineto_h200.json.gz"
GOOD = (
    b'{"ph": "X", "cat": "kernel", "name": "good", "pid": 0, "tid": 7, '
    b'"ts": 5.0, "dur": 1.0, "args": {"correlation": 1}}'
)
LAYOUTS = {"native": (b"\n  ", b",\n  "), "compact": (b"", b",")}


def document(events: list[bytes], layout: str = "native") -> bytes:
    lead, comma = LAYOUTS[layout]
    return b'{"schemaVersion": 1, "traceEvents": [' + lead + comma.join(events) + b"]}"


def refused(path: Path, data: bytes) -> TraceFormatError:
    path.write_bytes(data)
    with pytest.raises(TraceFormatError) as caught:
        parse_chrome(path)
    assert caught.value.path == path
    return caught.value


DOT = b"aten::scaled_dot_product_attention"
ODD = {  # valid events that the columnar scanner could misread
    "escaped key": GOOD.replace(b'"cat"', b'"c\\u0061t"'),
    "key twice": GOOD.replace(b'"pid": 0', b'"pid": 0, "name": "other"'),
    "escaped name": GOOD.replace(b"good", b"g\\u00f6\\ud83d\\ude00d"),
    "half a character": GOOD.replace(b"good", b"g\\ud800d"),
    "order": b'{"args": {"correlation": 1}, "dur": 1.0, "ts": 5.0, "name": "good", "cat": "kernel"}',
    "exponent": GOOD.replace(b"5.0", b"5e0"),
    "five decimals": GOOD.replace(b"5.0", b"5.00049"),
    "before 0": GOOD.replace(b"5.0", b"-5.0"),
    "whole number": GOOD.replace(b"5.0", b"5"),
    "large": GOOD.replace(b"5.0", b"98765432109876.543"),
    "long": GOOD.replace(b"5.0", b"1234567890123456.125"),
    "float for a number": GOOD.replace(b": 1}", b": 1.0}"),
    "null": GOOD.replace(b": 1}", b': 1, "stream": null, "graph node id": null}'),
    "similar key": GOOD.replace(b": 1}", b': 1, "duration": 1234}'),
    "node 0": GOOD.replace(b": 1}", b': 1, "graph node id": 0}'),
    "grid of two": GOOD.replace(b": 1}", b': 1, "grid": [1, 2]}'),
    "launch": GOOD.replace(b": 1}", b': 1, "grid": [1, 2, 3], "block": [4, 5, 6], "bytes": 7}'),
    "no args": GOOD.replace(b', "args": {"correlation": 1}', b""),
    "args of another kind": GOOD.replace(b'{"correlation": 1}', b"[]"),
    "thread by name": GOOD.replace(b"kernel", b"cuda_runtime").replace(b": 7", b': "stream 7"'),
    "no thread": GOOD.replace(b"kernel", b"cuda_runtime").replace(b', "tid": 7', b""),
    "unknown category": GOOD.replace(b"kernel", b"hip_runtime"),
    "op with infinity": GOOD.replace(b"kernel", b"cpu_op").replace(b"good", DOT)
    .replace(b"correlation", b'Concrete Inputs": [""], "Input Dims": [[inf]], "Ev Idx'),
    "op with other characters": GOOD.replace(b"kernel", b"cpu_op").replace(b"good", DOT)
    .replace(b"correlation", b'Concrete Inputs": ["\xff"], "Ev Idx'),
    "module": GOOD.replace(b"kernel", b"python_function").replace(b"good", b"nn.Module: A_0"),
    "no module": GOOD.replace(b"kernel", b"python_function").replace(b'"X"', b'"nn.Module: A_0"'),
    "arrow": b'{"ph": "s", "id": 5, "pid": 0, "tid": 7, "ts": 5.0, "cat": "fwdbwd", "name": "fwdbwd"}',
    "arrow without a time": b'{"ph": "s", "id": 5, "pid": 0, "tid": 7, "cat": "fwdbwd"}',
    "arrow by name": b'{"ph": "f", "id": "a", "pid": 0, "tid": 7, "ts": 5.0, "cat": "fwdbwd"}',
}  # fmt: skip
BROKEN = {
    "control": GOOD.replace(b"good", b"go\nod").replace(b"\n", b"\x01"),
    "utf8": GOOD.replace(b"good", b"go\xffod"),
    "nul": GOOD.replace(b"good", b"go\x00od"),
    "nul-outside": GOOD.replace(b'"pid": 0', b'"pid": \x00'),
    "negative": GOOD.replace(b'"dur": 1.0', b'"dur": -1.0'),
    "nan-time": GOOD.replace(b'"ts": 5.0', b'"ts": NaN'),
    "infinite-time": GOOD.replace(b'"dur": 1.0', b'"dur": Infinity'),
    "huge-id": GOOD.replace(b'"correlation": 1', b'"correlation": 99999999999999999999999'),
    "id-64": GOOD.replace(b'"correlation": 1', b'"correlation": 9223372036854775808'),
    "huge-time": GOOD.replace(b'"ts": 5.0', b'"ts": 1e300'),
    "huge-grid": GOOD.replace(b'"correlation": 1', b'"grid": [9223372036854775808, 1, 1]'),
    "no-name": GOOD.replace(b'"name"', b'"nome"'),
    "deep": GOOD.replace(b'"correlation": 1', b'"x": ' + b"[" * 50_000 + b"]" * 50_000),
    "no-comma": GOOD.replace(b'{"ph": "X",', b'{"x": 1 "ph": "X",'),
    "missing-comma": GOOD.replace(b'"pid": 0,', b'"pid": 0'),
    "quote": GOOD.replace(b"good", b'go"od'),
    "bracket": GOOD.replace(b'"correlation": 1', b'"x": [1], []]'),
}


SHAPES = b'"Input Dims": [[1, 2, 128, 64], [1, 2, 128, 64], [1, 2, 128, 64]]'
ODD_ARGUMENTS = [
    b'"Sequence number": 7, "Concrete Inputs": [], ' + SHAPES,
    b'"Sequence number": 7.0, "Concrete Inputs": [], ' + SHAPES,
    b'"Sequence number": null, "Concrete Inputs": [], ' + SHAPES,
    b'"Sequence number": 7, "Sequence number": 8, "Concrete Inputs": [], ' + SHAPES,
    b'"Sequence\\u0020number": 7, "Concrete Inputs": [], ' + SHAPES,
    b'"Concrete Inputs": [], "x": NaN, ' + SHAPES,
    b'"Concrete Inputs": [], "Input type": [nan], ' + SHAPES,
    b'"Concrete Inputs": [], "Input type": 3, ' + SHAPES,
    b'"Concrete Inputs": [], "Input type": nan, nan, ' + SHAPES,
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", ODD)
def test_the_scanner_and_the_decoder_agree_on_odd_events(
    case: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(document([GOOD, ODD[case], GOOD, ODD[case].replace(b"1", b"2")], layout))
    scanned = told(path)
    monkeypatch.setattr(chrome_events, "Scanner", None)
    assert told(path) == scanned


def test_the_scanner_and_the_decoder_agree_on_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only damage in the unread parts of an op or a frame no longer costs the event."""
    path, chance = tmp_path / "t.json", random.Random(1)
    whole = [event for event in ODD.values() if b"inf" not in event and b"\xff" not in event]
    for turn in range(120):
        data = bytearray(document([GOOD, *whole, GOOD], list(LAYOUTS)[turn % 2]))
        at = chance.randrange(40, len(data))
        data[at : at + chance.choice((0, 1, 9))] = chance.choice(
            (b"", b'"', b"\\", b"}", b"[", b"\xff")
        )
        path.write_bytes(data)
        with monkeypatch.context() as patch:
            scanned = told(path)
            patch.setattr(chrome_events, "Scanner", None)
            decoded = told(path)
        assert scanned[:-2] == decoded[:-2], data
        assert scanned[-1] == decoded[-1] or scanned[-1] < decoded[-1], data


@pytest.mark.parametrize("args", ODD_ARGUMENTS)
def test_the_scanner_and_the_decoder_agree_on_arguments(
    args: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among them are more distinct arguments than the scanner keeps."""
    path, many = tmp_path / "t.json", []
    for number in range(700):
        filler = b"%0*d" % (10_000, number)
        ours = args.replace(b"[]", b'["%b"]' % filler) if number % 3 else args
        start = b'"ts": %d.0, "dur": 0.5' % (number + 10)
        many.append(b'{"ph": "X", "cat": "cpu_op", "name": "aten::scaled_dot_product_attention",'
                    b' "pid": 1, "tid": 1, %b, "args": {%b}}' % (start, ours))  # fmt: skip
    path.write_bytes(document([GOOD, *many, GOOD]))
    scanned = told(path)
    monkeypatch.setattr(chrome_events, "Scanner", None)
    assert told(path) == scanned
    assert len(scanned[5]) == (0 if b"nan," in args else 700)


@pytest.fixture(params=["scanner", "decoder"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read files with the compiled scanner, and as if it were not installed."""
    assert chrome_events.Scanner is not None
    if request.param == "decoder":
        monkeypatch.setattr(chrome_events, "Scanner", None)


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", BROKEN)
def test_one_bad_event_is_skipped_and_counted(case: str, layout: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(document([GOOD, GOOD, BROKEN[case], GOOD, GOOD], layout))
    trace = parse_chrome(path)
    assert trace.num_launches == 4
    assert trace.skipped == 1
    assert "1 event could not be read" in trace.warnings[0]
    trace.close()


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("value", [b"NaN", b"inf", b"-Infinity", b"-nan"])
def test_unused_numbers_may_be_infinite(value: bytes, tmp_path: Path) -> None:
    odd = GOOD.replace(b'"correlation": 1', b'"memory bandwidth (GB/s)": ' + value)
    path = tmp_path / "t.json"
    path.write_bytes(document([GOOD, odd]))
    trace = parse_chrome(path)
    assert (trace.num_launches, trace.skipped) == (2, 0)
    trace.close()


def test_braces_in_strings_do_not_end_events(tmp_path: Path) -> None:
    tricky = GOOD.replace(b"good", b'},{\\"ph\\": ],[')
    nested = GOOD.replace(b'"correlation": 1', b'"x": [{"ph":1},{"ph":2}]')
    path = tmp_path / "t.json"
    path.write_bytes(document([GOOD, tricky, nested] * 3000, "compact"))
    trace = parse_chrome(path)
    assert (trace.num_launches, trace.skipped) == (9000, 0)
    assert '},{"ph": ],[' in trace.kernels
    trace.close()


@pytest.mark.parametrize("cut", [0.0, 0.0005, 0.1, 0.5, 0.9, 0.9999])
@pytest.mark.parametrize("zipped", [False, True])
def test_a_truncated_file_is_refused(cut: float, zipped: bool, tmp_path: Path) -> None:
    whole = DATA.read_bytes()
    data = whole if zipped else gzip.decompress(whole)
    size = int(len(data) * cut)
    error = refused(tmp_path / "t.json", data[:size])
    assert error.offset is not None
    assert zipped or error.offset == size or cut == 0.0005  # there the header is incomplete


@pytest.mark.parametrize("cut", [1, 3, 10, 40])
def test_a_file_truncated_after_the_events_is_refused(cut: int, tmp_path: Path) -> None:
    refused(tmp_path / "t.json", gzip.decompress(DATA.read_bytes())[:-cut])


@pytest.mark.parametrize(
    "data",
    [
        b"", b"   ", b"hello", b"\x7fELF", b"null", b'{"a": 1}', b'{"traceEvents": 5}',
        b"[1, 2]", b"[" * 100_000,
        b'{"x": ' * 100_000, b'{"a": {"traceEvents": []}}', b'{"a": "\\"traceEvents\\": ["}',
        b"\0" * 1000,
        b"\xff\xfe{\0", b'{"traceEvents": [5]}', b"\x1f\x8b", b"\x1f\x8bgarbage-garbage-garbage",
        b'{"traceEvents": [], "x": ', b"[] x", b'{"traceEvents": [\n' + GOOD + b",\n" + GOOD,
        b'{"traceEvents": [\n' + GOOD, b'{"traceEvents": [',
    ],
)  # fmt: skip
def test_a_foreign_or_truncated_file_is_refused(data: bytes, tmp_path: Path) -> None:
    refused(tmp_path / "t.json", data)


CALL = (
    b'{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 2, '
    b'"ts": 4.0, "dur": 1.0, "args": {"correlation": 1}}'
)
OP = b'{"ph": "X", "cat": "cpu_op", "name": "aten::mul", "pid": 1, "tid": 2, "ts": 4.5, "dur": 2.0}'
UNKNOWN = CALL.replace(b"cuda_runtime", b"new_runtime")


@pytest.mark.parametrize("text", ['{"traceEvents": []}', "[]", '{"traceEvents": [ ], "x": 1}\n'])
def test_a_file_without_events_is_refused(text: str, tmp_path: Path) -> None:
    assert "traceEvents is empty" in str(refused(tmp_path / "t.json", text.encode()))


def test_a_file_without_launches_or_ops_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    error = refused(path, document([CALL, BROKEN["negative"], BROKEN["huge-id"]]))
    wanted = "the 3 events in the file record no work; 2 events could not be read and were skipped"
    assert f"{wanted}, 1 of them " in str(error)
    with pytest.raises(TraceFormatError):
        ingest_path(tmp_path / "s.db", path)
    assert not (tmp_path / "s.db").exists()


@pytest.mark.parametrize(
    ("events", "warning"),
    [
        ([GOOD], "1 launch has no API call with the same correlation id"),
        ([CALL, CALL.replace(b"4.0", b"4.1"), GOOD], "1 launch has several API calls"),
        ([CALL, GOOD] * 2, "1 launch occurs twice in the file"),
        ([OP] * 2, "1 launch occurs twice in the file"),
        (
            [CALL, GOOD, BROKEN["negative"]],
            "was skipped, 1 of them because of a negative duration",
        ),
    ],
)
def test_doubtful_launches_are_counted(events: list[bytes], warning: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(document(events))
    with closing(parse_chrome(path)) as trace:
        assert any(warning in text for text in trace.warnings)
    path.write_bytes(document([CALL, GOOD, OP, OP.replace(b"4.5", b"7.5")]))
    with closing(parse_chrome(path)) as trace:
        assert trace.warnings == ()


def test_a_second_list_of_events_is_refused(tmp_path: Path) -> None:
    data = document([CALL, GOOD])[:-1] + b', "traceEvents": []}'
    assert "occurs twice" in str(refused(tmp_path / "t.json", data))


NUMBERS = [
    b"9" * 400, b"-" + b"9" * 400, b"1e300", b"1e400", b'"NaN"', b'"sNaN"', b'"Infinity"',
    b'"1e99999999999999999999"', b"1e-99999999999", b'"--5"', b'"\\ud800"', b'"a\\u0000b"',
]  # fmt: skip


@pytest.mark.parametrize("event", [GOOD, CALL, UNKNOWN, OP], ids=["gpu", "call", "new", "op"])
def test_odd_numbers_and_texts_do_not_crash(event: bytes, tmp_path: Path) -> None:
    fields = json.loads(event)
    events = []
    for name in ("ts", "dur", "pid", "tid", "name", "args"):
        odd = json.dumps({**fields, name: "@"}).encode()
        events += [odd.replace(b'"@"', value) for value in NUMBERS]
        events += [odd.replace(b'"@"', b'{"correlation": %s}' % value) for value in NUMBERS]
    path = tmp_path / "t.json"
    path.write_bytes(document([GOOD, GOOD, *events, GOOD]))
    (result,) = ingest_path(tmp_path / "s.db", path)
    assert result.launches >= 3
    assert any("could not be read" in text for text in result.warnings)


def test_lone_surrogates_in_the_header_are_replaced(tmp_path: Path) -> None:
    device = {"id": 0, "name": "\ud800 H200 \ud83d\ude00", "numSms": 132}
    device |= {"computeMajor": 9, "computeMinor": 0}
    path = tmp_path / "t.json"
    path.write_bytes(
        b'{"trace_id": "\\udc00", "deviceProperties": [%s], ' % json.dumps(device).encode()
        + document([CALL, GOOD])[1:]
    )
    with closing(parse_chrome(path)) as trace:
        assert trace.devices[0].name == "\ufffd H200 \U0001f600"
        assert trace.warnings[0] == "device 0: its name contains invalid characters"
        assert trace.environment["trace_id"] == "\ufffd"
    (result,) = ingest_path(tmp_path / "s.db", path)
    assert result.launches == 1


@pytest.mark.parametrize("lost", [1, 4000])
def test_damage_in_unread_args_is_counted(lost: int, tmp_path: Path) -> None:
    data = gzip.decompress(DATA.read_bytes())
    at = data.index(b'Input type": ["c10::Half"')
    at += len("Input type")
    path = tmp_path / "t.json"
    behind = at + lost if lost == 1 else data.index(b"[[", at + lost)
    path.write_bytes(data[:at] + data[behind:])
    with closing(parse_chrome(path)) as trace:
        assert trace.skipped == 1


def test_a_directory_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(TraceFormatError):
            parse_chrome(path)


@pytest.mark.parametrize(
    "head", [b"", b'{"traceEvents": [', b'{"traceEvents": [{"name": "', b'{"x": "']
)
def test_a_gzip_bomb_is_bounded(head: bytes, tmp_path: Path) -> None:
    import resource

    path = tmp_path / "bomb.json.gz"
    with gzip.open(path, "wb", 9) as file:
        file.write(head)
        for _ in range(200):
            file.write((b"a" if head.endswith(b'"') else b" ") * 1_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TraceFormatError):
        parse_chrome(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 220_000


def test_an_endless_event_does_not_fill_the_memory(tmp_path: Path) -> None:
    long = GOOD.replace(b"good", b"a" * 40_000_000)
    assert "32 MiB" in str(refused(tmp_path / "t.json", document([GOOD, GOOD, long])))


def test_bad_values_in_the_header_are_left_out(tmp_path: Path) -> None:
    header = {
        "baseTimeNanoseconds": "soon", "deviceProperties": [1, {"id": 0}, {"name": 3}],
        "host_name": "h",
        "cuda_runtime_version": {"a": 1},
        "distributedInfo": {"backend": "nccl", "rank": 1, "pg": ["x"]},
    }  # fmt: skip
    path = tmp_path / "t.json"
    path.write_text(json.dumps({**header, "traceEvents": [json.loads(GOOD)]}))
    trace = parse_chrome(path)
    assert trace.environment == {"distributedInfo": {"backend": "nccl", "rank": 1}}
    assert trace.devices == ()
    assert "baseTimeNanoseconds" in trace.warnings[0]
    assert trace.warnings[1:3] == (
        "device None: name has the impossible value 3, which is ignored",
        "1 of 3 entries in deviceProperties are not devices",
    )
    trace.close()


def test_impossible_gpu_properties_are_left_out_with_a_warning(tmp_path: Path) -> None:
    device = {"id": 0, "name": "H200", "numSms": 132, "computeMajor": 9, "computeMinor": 0}
    odd = {"warpSize": 1 << 60, "totalGlobalMem": 1 << 51, "regsPerBlock": "64k", "numSms": 132}
    path = tmp_path / "t.json"
    header = {"deviceProperties": [device | odd, device | {"id": 1, "numSms": -1}]}
    path.write_text(json.dumps(header | {"traceEvents": [json.loads(GOOD)]}))
    with closing(parse_chrome(path)) as trace:
        (kept,) = trace.devices
        assert (kept.warp_size, kept.total_memory_bytes, kept.registers_per_block) == (
            32,
            None,
            None,
        )
        assert list(trace.warnings[:4]) == [
            f"device 0: total_memory_bytes has the impossible value {1 << 51}, which is ignored",
            "device 0: registers_per_block has the impossible value 64k, which is ignored",
            f"device 0: warp_size has the impossible value {1 << 60}, which is ignored",
            "device 1: num_sms has the impossible value -1, which is ignored",
        ]


def test_files_of_other_tools_are_refused_by_name(tmp_path: Path) -> None:
    report = tmp_path / "report.qdstrm"
    report.write_bytes(bytes(100))
    with pytest.raises(TraceFormatError, match="expected a Kineto trace"):
        open_trace(report)
