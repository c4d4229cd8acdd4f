"""ncu's CSV in all forms and locales, with noise around the table, damaged or hostile."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nsys_make import FLASH, FLASH_CANONICAL
from test_demangle import bomb

from profharness.errors import TraceFormatError
from profharness.trace import NONE, LaunchConfig, Trace
from profharness.traces import open_trace
from profharness.traces.ncu_csv import (
    PUSH_POP,
    START_END,
    NcuLaunch,
    NcuReport,
    decimal_mark,
    number,
    nvtx_ranges,
    read_csv_text,
    write_csv,
)

HEAD = '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream"'
NOW = f'{HEAD},"Block Size","Grid Size","Device","CC"'
METRICS = (
    '"gpu__time_duration.sum","launch__registers_per_thread","launch__shared_mem_per_block_dynamic",'
    '"launch__shared_mem_per_block_static","launch__func_cache_config","sm__throughput.avg.pct"'
)
UNITS = '"us","register/thread","byte/block","byte/block","","%"'
HEADER = f"{NOW},{METRICS}\n" + ",".join(['""'] * 11) + f",{UNITS}\n"
START = '"0","7","","","flash<int>(float *)","1","7","(128, 1, 1)","(16, 8, 2)","0","9.0"'


def read(tmp_path: Path, text: str) -> Trace:
    path = tmp_path / "x.csv"
    path.write_text(text)
    return open_trace(path)


def value(trace: Trace, name: str, row: int = 0) -> float:
    assert trace.metrics is not None
    return float(trace.metrics.values[row, trace.metrics.names.index(name)])


@pytest.mark.parametrize(
    ("duration", "shared", "share"),
    [
        ("1234.56", "134144", "5.25"),
        ("1,234.56", "134,144", "5.25"),
        ("1.234,56", "134.144", "5,25"),
        ("1\u202f234,56", "134\u202f144", "5,25"),
        ("1\u00a0234,56", "134\u00a0144", "5,25"),
        ("1’234.56", "134’144", "5.25"),
    ],
    ids=["C", "en_US", "de_DE", "fr_FR", "fr_FR-old", "de_CH"],
)
def test_a_table_is_read_in_any_locale(
    tmp_path: Path, duration: str, shared: str, share: str
) -> None:
    row = f'{START},"{duration}","168","{shared}","0","PreferNone","{share}"\n'
    before = "loading weights, please wait\n==PROF== Connected to process 7\n"
    between, after = "epoch 1, loss 0.5\n", "==PROF== Disconnected from process 7\n"
    second = row.replace('"0"', '"1"', 1)
    trace = read(tmp_path, before + HEADER + row + between + second + after)
    assert trace.num_launches == 2 and trace.kernels == ["flash<int>(float *)"]
    assert trace.launch_configs == [LaunchConfig((16, 8, 2), (128, 1, 1), 168, 0, 134144, 134144)]
    (batch,) = trace.batches()
    assert batch.duration_ns.tolist() == [1234560, 1234560]
    assert batch.start_ns.tolist() == [0, 1234560] and batch.stream.tolist() == [7, 7]
    assert value(trace, "sm__throughput.avg.pct", 1) == 5.25
    assert trace.metrics is not None and "launch__func_cache_config" not in trace.metrics.names
    assert trace.devices == () and trace.warnings == ()


def test_the_2022_form_may_lack_a_time(tmp_path: Path) -> None:
    """The form has a Kernel Time and no grid. Without dimensions, only a product of 1 determines
    them.
    """
    text = (
        f'{HEAD},"Kernel Time","launch__grid_size","launch__block_dim_x",'
        '"launch__block_dim_y","launch__block_dim_z","sm__cycles_active.avg"\n'
        '"","","","","","","","","","","block","block","cycle"\n'
        '"0","7","p","h","k","1","7","2022-Oct-06 10:26:35","1","256.0","1.0","1.0","12.5"\n'
        '"1","7","p","h","k","1","7","2022-Oct-06 10:26:35","64","256.0","1.0","1.0","n/a"\n'
    )
    trace = read(tmp_path, text)
    assert [config.grid for config in trace.launch_configs] == [(1, 1, 1), None]
    assert {config.block for config in trace.launch_configs} == {(256, 1, 1)}
    (batch,) = trace.batches()
    assert batch.duration_ns.tolist() == [NONE, NONE]
    assert batch.start_ns.tolist() == [0, 1]
    assert "2 of 2 kernels have no time" in trace.warnings[0]
    assert value(trace, "sm__cycles_active.avg") == 12.5
    missing = value(trace, "sm__cycles_active.avg", 1)
    assert missing != missing


def test_rounded_shared_memory_is_left_out(tmp_path: Path) -> None:
    row = f'{START},"1.5","168","134.14","0","x","5.25"\n'
    trace = read(tmp_path, HEADER.replace('"byte/block"', '"Kbyte/block"', 1) + row)
    config = trace.launch_configs[0]
    assert (config.dynamic_shared_bytes, config.shared_bytes) == (None, None)
    assert config.static_shared_bytes == 0
    assert "--print-units base" in trace.warnings[0]


LONG = f'{NOW},"Section Name","Metric Name","Metric Unit","Metric Value"'


def test_the_long_form_with_metric_names_is_read(tmp_path: Path) -> None:
    section = '"Command line profiler metrics"'
    other = START.replace('"0"', '"1"', 1)
    text = "\n".join(
        [
            LONG,
            f'{START},{section},"gpu__time_duration.sum","us","9.54"',
            f'{START},{section},"dram__bytes.sum","byte","1,234"',
            f'{other},{section},"gpu__time_duration.sum","us","8.50"',
        ]
    )
    trace = read(tmp_path, text)
    (batch,) = trace.batches()
    assert batch.duration_ns.tolist() == [9540, 8500]
    assert value(trace, "dram__bytes.sum") == 1234
    assert trace.launch_configs[0].grid == (16, 8, 2)


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        (f'{START},"Speed Of Light","Memory Throughput","%","5"', "--page raw"),
        (
            f'{START},"s","a__b","us","1"\n{START},"s","a__b","ns","1"',
            "a__b has the units us and ns",
        ),
    ],
    ids=["labels", "units"],
)
def test_an_ambiguous_long_form_is_refused(tmp_path: Path, rows: str, match: str) -> None:
    with pytest.raises(TraceFormatError, match=match):
        read(tmp_path, f"{LONG}\n{rows}\n")


def test_a_truncated_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceFormatError, match=r"line 2 after the header is cut off; copy"):
        read(tmp_path, f'{HEADER}{START},"1234\n')
    with pytest.raises(
        TraceFormatError, match=r"line 2 after the header has 12 columns instead of 17"
    ):
        read(tmp_path, f'{HEADER}{START},"1234"\n')
    with pytest.raises(TraceFormatError, match="no ncu CSV header"):
        read_csv_text("a,b\n1,2\n", Path("x.csv"))
    with pytest.raises(TraceFormatError, match="cannot be read"):
        read_csv_text(tmp_path / "missing.csv", tmp_path / "missing.csv")


def test_a_table_without_rows_is_a_trace_without_launches(tmp_path: Path) -> None:
    trace = read(tmp_path, f"{HEADER}==WARNING== nothing\n")
    assert trace.num_launches == 0 and "no kernel" in trace.warnings[0]


NUMBERS = '"1234.5","168","0","0","x ""y"""'
ROW = f"{START},{NUMBERS}"
TABLE = f'{HEADER}{ROW},"5.25"\n' + ROW.replace('"0"', '"1"', 1) + ',"16"\n'


def test_a_file_truncated_anywhere_is_refused_or_ends_with_a_row(tmp_path: Path) -> None:
    """Only cuts at the end of a line go unnoticed. No value is ever changed or lost."""
    whole = read(tmp_path, TABLE)
    assert whole.metrics is not None and whole.num_launches == 2
    breaks = [at for at, sign in enumerate(TABLE) if sign == "\n"][1:]
    read_whole = {at for end in breaks for at in (end, end + 1)}
    for cut in range(len(TABLE) + 1):
        with suppress(TraceFormatError):
            trace = read(tmp_path, TABLE[:cut])
            assert cut in read_whole, cut
            rows = whole.metrics.values[: trace.num_launches]
            assert trace.metrics is None or (trace.metrics.values == rows).all()
            read_whole.remove(cut)
    assert not read_whole


@pytest.mark.parametrize("cut", [3, 4, 5, 6, 7])
def test_a_truncation_after_unquoted_cells_is_refused(tmp_path: Path, cut: int) -> None:
    """A spreadsheet leaves out the quotes. ncu's own lines may follow a table, a truncated row may
    not.
    """
    plain = TABLE.replace('"(128, 1, 1)"', "b").replace('"(16, 8, 2)"', "g").replace('"', "")
    plain = plain.replace("flash<int>(float *)", "k").replace("x y", "x")
    assert read(tmp_path, plain).num_launches == 2
    assert read(tmp_path, plain + "==PROF== Disconnected\n1.5 of 2, done\n").num_launches == 2
    with pytest.raises(TraceFormatError, match=r"line 3 after the header (is cut|has)"):
        read(tmp_path, plain[:-cut])


@pytest.mark.parametrize("cut", [1, 2, 5, 40, 300])
def test_a_truncated_header_is_refused(tmp_path: Path, cut: int) -> None:
    header = f"{NOW},{METRICS}"
    for tail in ("", "\n", "\n==PROF== Disconnected from process 7\n"):
        with pytest.raises(TraceFormatError, match=r"cut off|not a trace|no ncu CSV header"):
            read(tmp_path, f"==PROF== Connected\n{header[:-cut]}{tail}")
    with pytest.raises(TraceFormatError, match="no row of units"):
        read(tmp_path, f"{header}\n{TABLE.splitlines()[2]}\n")
    with pytest.raises(TraceFormatError, match="no first row"):
        read(tmp_path, f"{LONG}\n")


def test_nvtx_cells_of_ncu_are_parsed() -> None:
    tail = "none:none:RGB:0xff00ff00:ASCII"
    stack = f'129325  "<default domain>:run:{tail}:run"  "<default domain>:daxpy:{tail}:daxpy"'
    names = [("<default domain>", "run"), ("<default domain>", "daxpy")]
    assert list(nvtx_ranges(stack)) == names
    ours = f'592  "profharness:profharness:c0001:{tail}:profharness:c0001"'
    assert nvtx_ranges(ours) == (("profharness", "profharness:c0001"),)
    plain = f"0:<default domain>:stage:backward:step=4:{tail}:stage:backward:step=4"
    found = (("<default domain>", "stage:backward:step=4"),)
    assert nvtx_ranges(plain, numbered=True) == found
    assert nvtx_ranges(f'"{plain}"', numbered=True) == found
    assert nvtx_ranges("") == () == nvtx_ranges("no range at all")


def ranged(
    name: str, start_end: list[tuple[str, str]], push_pop: list[tuple[str, str]]
) -> NcuLaunch:
    return NcuLaunch(
        name,
        {"gpu__time_duration.sum": 100.0},
        {},
        start_end=tuple(start_end),
        push_pop=tuple(push_pop),
    )


def test_ranges_form_cells_calls_and_domains(tmp_path: Path) -> None:
    """A cell's range stays in one piece, whatever opens and closes inside. The same range after
    another one is another call.
    """
    own, default = "profharness", "<default domain>"
    one, two, warm = ((own, f"profharness:{name}") for name in ("c1", "c2", "warmup"))
    launches = [
        ranged("a", [warm], []),
        ranged("b", [one], [(default, "fwd")]),
        ranged("c", [one], [("cuDNN", "plan"), (default, "bwd")]),
        ranged("d", [one], [one]),
        ranged("e", [two], []),
        ranged("f", [one], []),
        ranged("g", [], []),
    ]
    path = tmp_path / "x.csv"
    write_csv(NcuReport(launches, {"gpu__time_duration.sum": "ns"}), path)
    trace = open_trace(path)
    (batch,) = trace.batches()

    def names(column: list[int]) -> list[str | None]:
        return [trace.ranges[index].name if index >= 0 else None for index in column]

    c1, c2 = "profharness:c1", "profharness:c2"
    assert names(batch.cell_range.tolist()) == [None, c1, c1, c1, c2, c1, None]
    assert names(batch.range.tolist()) == ["profharness:warmup", "fwd", "bwd", c1, c2, c1, None]
    calls = [(r.start_ns, r.duration_ns) for r in trace.ranges if r.name == c1]
    assert calls == [(100, 300), (500, 100)]
    assert "cuDNN:plan" in [item.name for item in trace.ranges]
    parent = next(item.parent for item in trace.ranges if item.name == "bwd")
    assert parent is not None and trace.ranges[parent].name == "cuDNN:plan"


def test_our_csv_contains_no_names_of_hosts_or_processes(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    write_csv(NcuReport([ranged("k", [], [])], {}), path)
    header, _, row = path.read_text().splitlines()
    assert PUSH_POP in header and START_END in header
    assert row.startswith('"0","0","",""')


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_double_survives_our_csv(double: float) -> None:
    assert number(repr(double)) == double


@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 99)), min_size=1),
    st.sampled_from([",.", ".,", "\u202f,", "'.", " ."]),
)
def test_numbers_are_read_in_any_locale(numbers: list[tuple[int, int]], marks: str) -> None:
    """Two decimals, as ncu prints them, in groups of three digits."""
    thousands, decimal = marks
    cells = [
        f"{whole:,}".replace(",", thousands) + f"{decimal}{part:02}" for whole, part in numbers
    ]
    mark = decimal_mark(cells)
    assert mark == decimal
    expected = [float(f"{whole}.{part:02}") for whole, part in numbers]
    assert [number(cell, mark) for cell in cells] == expected


@given(
    st.text(alphabet="abc:/ _-0", min_size=1), st.sampled_from(["profharness", "<default domain>"])
)
def test_any_name_survives_our_csv(
    tmp_path_factory: pytest.TempPathFactory, name: str, domain: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "names.csv"
    launch = ranged("k", [(domain, name)], [(domain, name), (domain, "x")])
    write_csv(NcuReport([launch], {}), path)
    (back,) = read_csv_text(path, path).launches
    assert (back.start_end, back.push_pop) == (launch.start_end, launch.push_pop)


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(TraceFormatError):
        read_csv_text(f"{NOW},{METRICS}\n{text}", Path("x.csv"))


TRACES = Path(__file__).parents[2] / "traces"
LAST = '"168","0","0","x","5.25"'


def row(number: object = 0, duration: object = "1.5", **cells: str) -> str:
    """Return the row of a kernel. `cells` replaces the usual cells by column."""
    start = START
    for old, new in cells.items():
        known = {"device": ',"0","9.0"', "stream": '"1","7"', "grid": '"(16, 8, 2)"'}
        made = {"device": f',"{new}","9.0"', "stream": f'"1","{new}"', "grid": f'"{new}"'}
        start = start.replace(known[old], made[old])
    return start.replace('"0"', f'"{number}"', 1) + f',"{duration}",{LAST}\n'


def warnings(tmp_path: Path, text: str) -> tuple[int, tuple[str, ...]]:
    trace = read(tmp_path, text)
    return trace.num_launches, trace.warnings


WHOLE = HEADER + "".join(row(number, 1.5 + number) for number in range(6))


def test_a_complete_table_has_no_warnings(tmp_path: Path) -> None:
    assert warnings(tmp_path, WHOLE) == (6, ())
    committed = (TRACES / "h200-torch-nsys-ncu" / "ncu-1.csv").read_text()
    assert warnings(tmp_path, committed) == (128, ())


@pytest.mark.parametrize("sign", ["X", "5", "\x00", "\ufffd", " "])
@pytest.mark.parametrize("at", [0, 1])
def test_a_row_with_a_damaged_start_is_counted(tmp_path: Path, sign: str, at: int) -> None:
    """Damage the first byte of the fourth row, or its id."""
    start = WHOLE.index(row(3, 4.5)) + at
    count, texts = warnings(tmp_path, WHOLE[:start] + sign + WHOLE[start + 1 :])
    if sign == "5" and at == 1:
        assert (count, len(texts)) == (6, 2)
        assert texts[0] == "the kernel ids have gaps: 1 id is missing"
        assert "the id of an earlier kernel" in texts[1]
        return
    assert count == 5
    assert texts == (
        "1 line looks like a damaged row and is skipped (line 5 after the header)",
        "the kernel ids have gaps: 1 id is missing",
    )


def test_missing_and_repeated_rows_are_counted(tmp_path: Path) -> None:
    gone = WHOLE.replace(row(2, 3.5), "").replace(row(3, 4.5), "")
    assert warnings(tmp_path, gone) == (4, ("the kernel ids have gaps: 2 ids are missing",))
    count, texts = warnings(tmp_path, WHOLE + WHOLE.replace(HEADER, ""))
    assert count == 6
    assert texts == (
        "6 rows are exact copies of earlier rows and are skipped (line 8 after the header)",
    )
    count, texts = warnings(tmp_path, WHOLE + row(2, 99))
    assert count == 7
    assert texts == (
        "1 kernel has the id of an earlier kernel; the file may contain several tables",
    )


def test_a_file_written_twice_counts_once(tmp_path: Path) -> None:
    count, texts = warnings(tmp_path, WHOLE + WHOLE)
    assert count == 6
    assert texts[0] == "the header is repeated 1 time (line 8 after the header)"
    assert texts[1].startswith("7 rows are exact copies") or texts[1].startswith("6 rows are")


def test_missing_rows_are_found_by_ncus_messages(tmp_path: Path) -> None:
    said = "".join(f'==PROF== Profiling "k" - {n}: 0%....100% - 1 pass\n' for n in range(6))
    assert warnings(tmp_path, said + WHOLE) == (6, ())
    cut = WHOLE[: WHOLE.index(row(4, 5.5))]
    assert warnings(tmp_path, said + cut) == (
        4,
        ("ncu reports 6 profiled kernels, but the table has 4",),
    )


@pytest.mark.parametrize("duration", ["-1", "1e300", "1e308", "9" * 400])
def test_an_invalid_time_is_left_out(tmp_path: Path, duration: str) -> None:
    trace = read(tmp_path, HEADER + row(0, 2.5) + row(1, duration))
    (batch,) = trace.batches()
    assert batch.duration_ns.tolist() == [2500, NONE] and (batch.start_ns >= 0).all()
    lost = value(trace, "gpu__time_duration.sum", 1)
    assert lost != lost
    words = "not a number" if len(duration) > 9 else "negative or implausible"
    assert words in trace.warnings[0]


def test_times_whose_sum_overflows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceFormatError, match=r"x\.csv: the kernel times add up to"):
        read(tmp_path, HEADER + "".join(row(n, 2e15) for n in range(4)))


def test_numbers_of_any_size_are_handled(tmp_path: Path) -> None:
    digits = "9" * 5000
    with pytest.raises(
        TraceFormatError, match=r"line 2 after the header has the invalid device '9{40}'"
    ):
        read(tmp_path, HEADER + row(device=digits))
    trace = read(tmp_path, HEADER + row(0, grid=f"({digits}, 1, 1)") + row(1, stream="9" * 25))
    assert [config.grid for config in trace.launch_configs] == [None, (16, 8, 2)]
    (batch,) = trace.batches()
    assert batch.stream.tolist() == [7, NONE]
    assert trace.warnings == (
        "1 cell in the column Grid Size could not be read (line 2 after the header)",
        "1 cell in the column Stream could not be read (line 3 after the header)",
    )
    registers = row().replace('"168"', '"1e300"') + row(1).replace('"168"', '"-4"')
    trace = read(tmp_path, HEADER + registers)
    assert {config.registers_per_thread for config in trace.launch_configs} == {None}
    assert trace.warnings == ("2 launch sizes (grid, block, registers or memory) are impossible",)


def test_values_other_than_numbers_are_counted(tmp_path: Path) -> None:
    text = HEADER + row() + row(1).replace('"5.25"', '"5.X5"') + row(2).replace('"5.25"', '"n/a"')
    trace = read(tmp_path, text)
    assert trace.warnings == (
        "1 metric value is not a number and is skipped (line 3 after the header)",
    )


def test_damage_in_the_header_and_the_units_is_reported(tmp_path: Path) -> None:
    odd = WHOLE.replace('"Grid Size"', '"Gr%d Size"')
    assert warnings(tmp_path, odd)[1] == ("1 column has an unknown name: 'Gr%d Size'",)
    unit = WHOLE.replace('"us"', '"ux"')
    assert warnings(tmp_path, unit)[1] == (
        "6 of 6 kernels have no time, because the unit of gpu__time_duration.sum is 'ux'",
    )


def test_names_that_are_bombs_stay_mangled(tmp_path: Path) -> None:
    """481 bytes that would become 35 MB, next to an ordinary name."""
    begun = sum(os.times()[:4])
    text = HEADER + row().replace("flash<int>(float *)", bomb(20))
    trace = read(tmp_path, text + row(1).replace("flash<int>(float *)", FLASH))
    assert trace.kernels == [bomb(20), FLASH_CANONICAL]
    assert trace.warnings == ("1 kernel names are too complex to demangle and remain mangled",)
    assert sum(os.times()[:4]) - begun < 5


def metric(number: object, name: str, cell: str = "1", kernel: str = "k") -> str:
    start = START.replace('"0"', f'"{number}"', 1).replace("flash<int>(float *)", kernel)
    return f'{start},"s","{name}","","{cell}"\n'


def test_contradictions_in_the_long_form_are_reported(tmp_path: Path) -> None:
    names = ("a__1", "a__2", "a__3")
    rows = [metric(number, name) for number in range(4) for name in names]
    whole = f"{LONG}\n" + "".join(rows)
    untimed = (
        "4 of 4 kernels have no time; add gpu__time_duration.sum to the metrics that ncu measures"
    )
    assert warnings(tmp_path, whole) == (4, (untimed,))
    cut = warnings(tmp_path, whole.removesuffix(rows[-1]))
    assert cut == (4, ("1 value that nearly all other kernels have is missing", untimed))
    doubled = warnings(tmp_path, whole + "".join(rows))[1]
    assert doubled[0].startswith("12 rows repeat a metric of a kernel; the first value is used")
    other = warnings(tmp_path, whole + metric(3, "a__4", kernel="other"))[1]
    assert other[0].startswith("1 row disagrees with the first row of the same kernel")


def test_the_long_form_takes_linear_time(tmp_path: Path) -> None:
    """Each kernel has its own metric, so that a dense table would have 400 million cells."""
    begun = os.times().user
    rows = "".join(metric(number, f"a__{number}") for number in range(20_000))
    with pytest.raises(
        TraceFormatError, match="20,000 kernels and 20,000 metrics, but only 20,000 values"
    ):
        read(tmp_path, f"{LONG}\n{rows}")
    assert os.times().user - begun < 20


def test_a_range_with_many_colons_takes_linear_time() -> None:
    begun = os.times().user
    assert nvtx_ranges("a:" * 50_000) == (("a", "a:" * 49_993 + "a"),)
    assert len(nvtx_ranges(":" * 100_000)) == 1
    assert os.times().user - begun < 5
