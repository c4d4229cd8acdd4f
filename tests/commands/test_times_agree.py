"""Check that the answers of commands quote times and ratios with the digits of their tables."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from written_benches import bench_run

import profharness.commands._command as command_module
from profharness.cli import find_command
from profharness.columns import Column, pick
from profharness.commands import bench
from profharness.commands.diff.compare import DiffRow
from profharness.commands.layers.by_gpu import PAIR
from profharness.commands.layers.tables import figure_columns
from profharness.measurements.measurements import BenchRow
from profharness.program.matching import LayerDiff
from profharness.render.document import (
    FORMATS,
    Document,
    Heading,
    Note,
    Table,
    for_reading,
    formatted_rows,
)
from profharness.store import ingest_path
from profharness.units import (
    UNITS,
    as_fast,
    as_long,
    by_how_much,
    memory_text,
    rate_figure,
    ratio_text,
    time_text,
    time_unit,
)

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "traces" / "models"
NAMES = tuple(sorted(path.name for path in MODELS.glob("*.json.gz")))
GPU = ("--gpu", "H200")
CONFIGS = ("2,8,512,64", "2,8,512,64,layout=bshd", "1,8,16384,64,fp16,seq_q=9", "4,32,8192,128,bwd")
SWEEP = "2,8,{64:8192:*2},64"
TIME = re.compile(r"([\d,]+(?:\.\d+)?) (µs|ms|s)\b")
RATIO = re.compile(r"(\d[\d,.]*) times as (?:fast|long)")


@dataclass(frozen=True)
class Shown:
    """The times and ratios in the answer of a document, and those in its tables and headings."""

    quoted: tuple[str, ...]
    ratios: tuple[str, ...]
    texts: frozenset[str]  # times with their units, and ratios
    times_ns: tuple[float, ...]  # raw times in tables


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "s.db"
    for name in ("h200-torch2.11", "h200-torch-nsys-ncu"):
        ingest_path(path, ROOT / "traces" / name)
    for name in NAMES:
        ingest_path(path, MODELS / name)
    return path


def document_of(*words: str) -> Document:
    shown: list[Document] = []

    def emit(document: Document, *_: object, **__: object) -> None:
        shown.append(document)

    with pytest.MonkeyPatch.context() as patch:
        for module in (command_module, bench):
            patch.setattr(module, "emit", emit)
        find_command(words[0]).main(list(words[1:]), standalone_mode=False)
    return shown[0]


def texts_of(table: Table) -> Iterator[str]:
    for row in formatted_rows(table):
        unit = ""
        for column, cell in zip(table.columns, row, strict=True):
            # An interval has the unit of the time before it.
            own = next((unit for unit in UNITS if re.search(rf"\b{unit}\b", column.title)), "")
            unit = own or unit
            for each in re.split(" → | to ", cell.rstrip("*?").removeprefix("at least ")):
                is_time = column.format.startswith(("time ", "interval ")) and each[0].isdigit()
                # A sentence has the time's own unit, and a column has the unit of its longest time.
                yield time_text(ns_of(f"{each} {unit}")) if is_time else each


def shown_by(*words: str) -> Shown:
    raw = document_of(*words)
    document = for_reading(raw)
    answer = " ".join(document.answer)
    texts: set[str] = set()
    for block in document.blocks:
        if isinstance(block, Table):
            texts.update(texts_of(block))
        elif isinstance(block, Heading | Note):
            own = block.detail if isinstance(block, Heading) else block.text
            texts.update(match[0] for match in TIME.finditer(own))
    times = [
        float(value)
        for block in raw.blocks
        if isinstance(block, Table)
        for row in block.rows
        for column, cell in zip(block.columns, row, strict=True)
        if column.format == "time"
        for value in (cell if isinstance(cell, tuple) else (cell,))
        if isinstance(value, int | float) and value
    ]
    quoted = tuple(match[0] for match in TIME.finditer(answer))
    return Shown(quoted, tuple(RATIO.findall(answer)), frozenset(texts), tuple(times))


def ns_of(text: str) -> float:
    number, unit = text.split()
    return float(number.replace(",", "")) * UNITS[unit]


def check_equal_times(shown: Shown) -> None:
    """Check that a time of a table that is equal to a quoted time has the same text."""
    for text in shown.quoted:
        equal = [ns for ns in shown.times_ns if float(f"{ns:.3g}") == round(ns_of(text), 3)]
        assert not equal or text in shown.texts, (text, equal)


@pytest.mark.parametrize("config", CONFIGS)
def test_every_time_of_a_prediction_is_in_its_table(config: str) -> None:
    shown = shown_by("predict", "--config", config, *GPU)
    assert shown.quoted and set(shown.quoted) <= shown.texts
    assert {f"{ratio}x" for ratio in shown.ratios} <= shown.texts


def test_every_ratio_of_a_map_of_predictions_is_in_its_tables() -> None:
    shown = shown_by("predict", "--config", SWEEP, *GPU)
    assert {f"{ratio}x" for ratio in shown.ratios} <= shown.texts
    check_equal_times(shown)


@pytest.mark.parametrize(
    "times",
    [
        {"auto": 42_123, "flash": 30_049, "math": 3_210_000},
        {"auto": 30_100, "flash": 30_049, "math": 999_700},
        {"flash": 1_234_567, "cudnn": 987_654},
        {"math": 2_345_678_901},
    ],
)
def test_every_time_of_a_benchmark_is_in_its_table(times: dict[str, int], tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    bench_run(
        path, "times", {("1,2,64,16,fp32", name): ns for name, ns in times.items()}, choice="math"
    )
    shown = shown_by("bench", "latest", "--store", str(path))
    assert shown.quoted and set(shown.quoted) <= shown.texts
    assert {f"{ratio}x" for ratio in shown.ratios} <= shown.texts


@pytest.mark.parametrize("sides", [("math", "flash"), ("flash", "cudnn")])
def test_every_ratio_of_a_diff_is_in_its_tables(sides: tuple[str, str], store: Path) -> None:
    shown = shown_by("diff", *sides, "--config", "2,8,512,64", "--store", str(store))
    # The table prints the ratio of `takes 1.36 times as long` as its inverse.
    inverses = {ratio_text(1 / float(ratio)) for ratio in shown.ratios}
    printed = {f"{ratio}x" for ratio in shown.ratios} | inverses
    assert shown.ratios and len(printed & shown.texts) >= len(shown.ratios)
    check_equal_times(shown)


@pytest.mark.parametrize("extra", [(), GPU])
def test_equal_times_of_layers_have_equal_texts(extra: tuple[str, ...], store: Path) -> None:
    quoted = 0
    for name in NAMES:
        if extra and name.startswith(("llama_graph.json", "llama_reduce_overhead")):
            continue  # the shapes of its calls are unknown, so nothing is predicted
        shown = shown_by("layers", name, *extra, "--store", str(store))
        check_equal_times(shown)
        quoted += len(shown.quoted)
    assert quoted > len(NAMES)


def test_equal_times_of_compared_programs_have_equal_texts(store: Path) -> None:
    for before, after in pairwise(name for name in NAMES if name.startswith("llama")):
        for command in ("diff", "layers"):
            check_equal_times(shown_by(command, before, after, "--store", str(store)))


@pytest.mark.parametrize(
    ("ns", "unit"), [(1, "µs"), (999_499, "µs"), (999_600, "ms"), (9.996e8, "s"), (-2e6, "ms")]
)
def test_a_time_has_the_largest_unit_in_which_it_is_1_or_more(ns: float, unit: str) -> None:
    assert time_unit(ns) == unit and time_text(ns).endswith(f" {unit}")
    assert math.isclose(ns_of(time_text(ns)), ns, rel_tol=0.006)


def test_sentences_have_the_digits_of_ratios() -> None:
    for ratio in (1, 1.399, 9.996, 18.4931, 99.96, 437.53):
        digits = ratio_text(ratio).removesuffix("x")
        assert as_long(ratio) == f"{digits} times as long"
        assert as_fast(ratio) == f"{digits} times as fast"
        if ratio >= 2:
            assert by_how_much(1 / ratio) == f"{digits} times as long"
    assert as_fast(1.401, most=1.399) == "1.40 times as fast"


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(0.00312, "<0.01x"), (0.0123, "0.0123x"), (0.0999, "0.0999x"), (0.714, "0.714x"), (0.9996, "1.00x"),
     (1.399, "1.40x"), (9.996, "10.0x"), (22.63, "22.6x"),
     (437.53, "438x"), (13_000, "13,000x")],
)  # fmt: skip
def test_a_ratio_has_at_most_three_significant_figures(ratio: float, text: str) -> None:
    """Bugs: `22.63 times as fast`, from 3 calls, and a speed-up of `0.00312x`."""
    assert ratio_text(ratio) == text


@pytest.mark.parametrize(
    ("columns", "key"),
    [(pick(DiffRow), "speedup"), (pick(LayerDiff), "speedup"), (pick(BenchRow), "speedup"), (PAIR, "times1"),
     (figure_columns(["A", "B"], "ran", "µs/call"), "times1")],
)  # fmt: skip
def test_every_speed_up_is_a_plain_ratio(columns: Sequence[Column], key: str) -> None:
    (column,) = (each for each in columns if each.key == key)
    shown = FORMATS[column.format]
    assert [shown(22.63), shown(0.9709), shown(1.0)] == ["22.6x", "0.971x", "1.00x"]


@pytest.mark.parametrize(
    ("size", "text"),
    [(512, "512 B"), (65536, "64.0 KiB"), (79_700_480, "76.0 MiB"), (3 << 30, "3,070 MiB")],
)
def test_sizes_have_three_figures_and_a_binary_unit(size: int, text: str) -> None:
    assert memory_text(size) == text


@pytest.mark.parametrize("unit", ["mega", "giga", "tera"])
@pytest.mark.parametrize(
    ("rate", "text"),
    [(0, "0"), (0.00001234, "0.0000123"), (0.0512, "0.051"), (0.9996, "1.00"), (13.84, "13.8"),
     (11.7, "11.7"), (1_367.31, "1,370")],
)  # fmt: skip
def test_a_rate_has_at_most_three_significant_figures(rate: float, text: str, unit: str) -> None:
    """Bug: a column of rates with `1,367.31`, `13.84` and `11.7`."""
    size = {"mega": 1e6, "giga": 1e9, "tera": 1e12}[unit]
    assert FORMATS[unit](rate * size) == rate_figure(rate) == text
    assert {column.format for column in pick(BenchRow, "queries_per_s")} == {"mega"}


def test_a_slowdown_has_no_exponent_and_is_not_vanishing() -> None:
    """Bug: 1.996 times the time was `1e+02 % slower`, and an equal time `0.001 % slower`."""
    assert by_how_much(1 / 1.99) == "1.99 times as long"
    assert by_how_much(1 / 1.996) == "2.00 times as long"
    assert by_how_much(0.99999) == "1.00 times as fast"
    assert time_text(0.4) == "<0.001 µs"
