"""Damaged and hostile CSV of ncu: losses are counted, or refused with the line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from nsys_make import FLASH, FLASH_CANONICAL
from test_demangle import bomb
from test_ncu_csv import HEADER, LONG, START, read, value

from profharness.errors import TraceFormatError
from profharness.trace import NONE
from profharness.traces.ncu_csv import nvtx_ranges

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
        assert texts[0] == "the ids of kernels have gaps: 1 are missing"
        assert "have the id of an earlier one" in texts[1]
        return
    assert count == 5
    assert texts == (
        "1 lines look like damaged rows and are left out (line 5 after the header)",
        "the ids of kernels have gaps: 1 are missing",
    )


def test_missing_and_repeated_rows_are_counted(tmp_path: Path) -> None:
    gone = WHOLE.replace(row(2, 3.5), "").replace(row(3, 4.5), "")
    assert warnings(tmp_path, gone) == (4, ("the ids of kernels have gaps: 2 are missing",))
    count, texts = warnings(tmp_path, WHOLE + WHOLE.replace(HEADER, ""))
    assert count == 6
    assert texts == (
        "6 rows are exact copies of earlier ones and are left out (line 8 after the header)",
    )
    count, texts = warnings(tmp_path, WHOLE + row(2, 99))
    assert count == 7
    assert texts == ("1 kernels have the id of an earlier one; these may be several tables",)


def test_a_file_written_twice_counts_once(tmp_path: Path) -> None:
    count, texts = warnings(tmp_path, WHOLE + WHOLE)
    assert count == 6
    assert texts[0] == "the header stands 1 times more (line 8 after the header)"
    assert texts[1].startswith("7 rows are exact copies") or texts[1].startswith("6 rows are")


def test_missing_rows_are_found_by_ncus_messages(tmp_path: Path) -> None:
    said = "".join(f'==PROF== Profiling "k" - {n}: 0%....100% - 1 pass\n' for n in range(6))
    assert warnings(tmp_path, said + WHOLE) == (6, ())
    cut = WHOLE[: WHOLE.index(row(4, 5.5))]
    assert warnings(tmp_path, said + cut) == (
        4,
        ("ncu says that it profiled 6 kernels, the table has 4",),
    )


@pytest.mark.parametrize("duration", ["-1", "1e300", "1e308", "9" * 400])
def test_an_invalid_time_is_left_out(tmp_path: Path, duration: str) -> None:
    trace = read(tmp_path, HEADER + row(0, 2.5) + row(1, duration))
    (batch,) = trace.batches()
    assert batch.duration_ns.tolist() == [2500, NONE] and (batch.start_ns >= 0).all()
    lost = value(trace, "gpu__time_duration.sum", 1)
    assert lost != lost
    words = "no numbers" if len(duration) > 9 else "below zero or beyond reason"
    assert words in trace.warnings[0]


def test_times_whose_sum_overflows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceFormatError, match=r"x\.csv: the times of its kernels add up to"):
        read(tmp_path, HEADER + "".join(row(n, 2e15) for n in range(4)))


def test_numbers_of_any_size_are_handled(tmp_path: Path) -> None:
    digits = "9" * 5000
    with pytest.raises(TraceFormatError, match=r"line 2 after the header has '9{40}' for a dev"):
        read(tmp_path, HEADER + row(device=digits))
    trace = read(tmp_path, HEADER + row(0, grid=f"({digits}, 1, 1)") + row(1, stream="9" * 25))
    assert [config.grid for config in trace.launch_configs] == [None, (16, 8, 2)]
    (batch,) = trace.batches()
    assert batch.stream.tolist() == [7, NONE]
    assert trace.warnings == (
        "1 cells of Grid Size could not be read (line 2 after the header)",
        "1 cells of Stream could not be read (line 3 after the header)",
    )
    registers = row().replace('"168"', '"1e300"') + row(1).replace('"168"', '"-4"')
    trace = read(tmp_path, HEADER + registers)
    assert {config.registers_per_thread for config in trace.launch_configs} == {None}
    assert trace.warnings == (
        "2 sizes of launches (grid, block, registers, memory) are impossible",
    )


def test_values_other_than_numbers_are_counted(tmp_path: Path) -> None:
    text = HEADER + row() + row(1).replace('"5.25"', '"5.X5"') + row(2).replace('"5.25"', '"n/a"')
    trace = read(tmp_path, text)
    assert trace.warnings == (
        "1 values of metrics are no numbers and are left out (line 3 after the header)",
    )


def test_damage_in_the_header_and_the_units_is_reported(tmp_path: Path) -> None:
    odd = WHOLE.replace('"Grid Size"', '"Gr%d Size"')
    assert warnings(tmp_path, odd)[1] == ("1 columns of unknown names: 'Gr%d Size'",)
    unit = WHOLE.replace('"us"', '"ux"')
    assert warnings(tmp_path, unit)[1] == (
        "6 of 6 kernels have no time: gpu__time_duration.sum is in 'ux'",
    )


def test_names_that_are_bombs_stay_mangled(tmp_path: Path) -> None:
    """481 bytes that would become 35 MB, next to an ordinary name."""
    begun = sum(os.times()[:4])
    text = HEADER + row().replace("flash<int>(float *)", bomb(20))
    trace = read(tmp_path, text + row(1).replace("flash<int>(float *)", FLASH))
    assert trace.kernels == [bomb(20), FLASH_CANONICAL]
    assert trace.warnings == ("1 kernel names are too intricate to demangle and stay mangled",)
    assert sum(os.times()[:4]) - begun < 5


def metric(number: object, name: str, cell: str = "1", kernel: str = "k") -> str:
    start = START.replace('"0"', f'"{number}"', 1).replace("flash<int>(float *)", kernel)
    return f'{start},"s","{name}","","{cell}"\n'


def test_contradictions_in_the_long_form_are_reported(tmp_path: Path) -> None:
    names = ("a__1", "a__2", "a__3")
    rows = [metric(number, name) for number in range(4) for name in names]
    whole = f"{LONG}\n" + "".join(rows)
    untimed = "4 of 4 kernels have no time; ask ncu for gpu__time_duration.sum as well"
    assert warnings(tmp_path, whole) == (4, (untimed,))
    cut = warnings(tmp_path, whole.removesuffix(rows[-1]))
    assert cut == (4, ("1 values are missing that nearly all other kernels have", untimed))
    doubled = warnings(tmp_path, whole + "".join(rows))[1]
    assert doubled[0].startswith("12 rows tell a metric of a kernel again; the first counts")
    other = warnings(tmp_path, whole + metric(3, "a__4", kernel="other"))[1]
    assert other[0].startswith("1 rows disagree with the first row of their kernel")


def test_the_long_form_takes_linear_time(tmp_path: Path) -> None:
    """Each kernel has its own metric, so that a dense table would have 400 million cells."""
    begun = os.times().user
    rows = "".join(metric(number, f"a__{number}") for number in range(20_000))
    with pytest.raises(
        TraceFormatError, match="20000 kernels with 20000 metrics, but 20000 values"
    ):
        read(tmp_path, f"{LONG}\n{rows}")
    assert os.times().user - begun < 20


def test_a_range_with_many_colons_takes_linear_time() -> None:
    begun = os.times().user
    assert nvtx_ranges("a:" * 50_000) == (("a", "a:" * 49_993 + "a"),)
    assert len(nvtx_ranges(":" * 100_000)) == 1
    assert os.times().user - begun < 5
