"""Check the tables of kernels and of diff."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from view_rows import CONFIG, cell, kernel

from profharness.attention.cases import VerificationRow
from profharness.commands.diff import diff_document
from profharness.commands.diff.answer import diff_answer
from profharness.commands.diff.compare import Change, Cost, Diff, DiffRow
from profharness.commands.kernels.steps import find_steps, steps_document
from profharness.commands.kernels.tables import kernel_record, kernels_document, witness_document
from profharness.commands.verify import verify_document
from profharness.errors import wrapped, wrapped_for
from profharness.program.changes import EnvChange
from profharness.program.step_times import times_by_phase
from profharness.render.document import Heading, Table
from profharness.render.renderers import RENDERERS, render_markdown
from profharness.render.terminal import render_table
from profharness.rows import ACTIVE_WARPS, CPU_WAIT, DRAM_READ, DRAM_WRITE, KernelRow
from profharness.store import Selection, ingest_path, open_store

TRACES = Path(__file__).parents[2] / "traces"
TEXT = "2,8,512,64,fp16"
DECODE = "b1-h32-kv8-sq1-skv4096-d128-bf16"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "store.db"
    ingest_path(path, TRACES / "h200-torch-nsys-ncu")
    return path


@pytest.fixture(scope="module")
def rows(store: Path) -> list[KernelRow]:
    with open_store(store) as opened:
        return opened.rows(Selection("latest"))[0]


def shown(*words: str) -> list[str]:
    return [sys.executable, "-m", "profharness", "kernels", "--config", TEXT, *words]


def on_terminal(*call: str, stream: str = "stdout", width: int = 80) -> tuple[str, int]:
    """Run a command with a stream on a narrow terminal. Return its output and exit code."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"COLUMNS": str(width), "NO_COLOR": "1"}
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL} | {stream: theirs}
    with subprocess.Popen(call, env=environment, **streams) as child:
        os.close(theirs)
        text = b""
        while True:
            try:
                text += os.read(ours, 1 << 16)
            except OSError:  # the command closed its end
                break
    os.close(ours)
    return text.decode(), child.returncode


def test_a_number_and_its_unit_stay_on_one_line() -> None:
    """Bug: a line began with `%`."""
    for unit in ("%", "µs", "ms", "GB/s", "MHz", "B"):
        for width in range(12, 20):
            lines = wrapped(f"takes about 1.25 {unit} of it", width)
            assert any(f"1.25 {unit}" in line for line in lines)
    assert wrapped("at 2 steps of it", 6) == ["at 2", "steps", "of it"]


def test_messages_are_wrapped_on_a_terminal_only() -> None:
    call = [sys.executable, "-m", "profharness", "layers", "--store", "/no/store.db"]
    text, code = on_terminal(*call, stream="stderr")
    lines = text.splitlines()
    assert code == 2 and len(lines) > 1 and max(map(len, lines)) <= 80
    piped = subprocess.run(call, capture_output=True, text=True, check=False).stderr
    assert piped.splitlines() == [" ".join(lines)]


def test_commands_in_messages_are_not_broken() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    command = "profharness layers " + "long/path/of/a/trace.json.gz " * 4
    text = f"To see the attention of this run layer by layer, use: {command}".rstrip()
    assert wrapped_for(Terminal(), text).splitlines()[1:] == [command.rstrip()]
    assert wrapped_for(io.StringIO(), text) == text
    # Bug: a text after a command was not wrapped, as if it were a part of the command.
    text = f"use: {command}; to see why PyTorch chooses a backend, use: profharness explain 2,8"
    assert wrapped_for(Terminal(), text).splitlines()[-1] == text.rpartition("; ")[2]


@pytest.mark.parametrize("width", [80, 120])
def test_a_long_command_below_a_table_has_a_line_of_its_own(tmp_path: Path, width: int) -> None:
    """Bug: a command that is longer than the terminal was broken into lines that are no commands."""
    trace, own = str(TRACES / "serving" / "shapes.json.gz"), str(tmp_path / "s.db")
    call = [sys.executable, "-m", "profharness", "layers", trace, "--store", own]
    text, _ = on_terminal(*call, width=width)
    lines = [line for line in text.splitlines() if line.startswith("profharness bench ")]
    assert len(lines) == 1 and "--backend flashinfer-fa2,flashinfer-fa3" in lines[0]


def test_pipe_has_whole_names_at_any_width(store: Path) -> None:
    environment = os.environ | {"COLUMNS": "60"}
    call = shown("--profiler", "all", "--store", str(store))
    text = subprocess.run(call, env=environment, capture_output=True, text=True, check=True).stdout
    assert "…" not in text
    for name in ("flash_fwd_splitkv_kernel<64,64x256,w4>", "elementwise<4, isneginf>"):
        assert name in text


def test_terminal_gives_names_lines_of_their_own_if_most_would_be_cut(
    store: Path, rows: list[KernelRow]
) -> None:
    text, code = on_terminal(*shown("--backend", "math", "--store", str(store)), width=60)
    assert code == 0
    short = {row.kernel_short for row in rows if (row.config, row.backend) == (CONFIG, "math")}
    lines = [line.strip() for line in text.splitlines()]
    assert len(short) >= 5 and "…" not in text
    assert all(any(line.endswith(name) for line in lines) for name in short)


def test_full_witnesses_have_whole_names_and_counters(rows: list[KernelRow]) -> None:
    text = render_table(witness_document(rows, full=True))
    for row in rows:
        assert row.kernel in text
    counters = [
        block
        for block in witness_document(rows, full=True).blocks
        if isinstance(block, Table) and block.columns[0].key == "metric"
    ]
    assert len(counters) > 20
    promised = {DRAM_READ, DRAM_WRITE, ACTIVE_WARPS, "gpu__time_duration.sum"}
    for table in counters:
        assert promised <= {row[0] for row in table.rows}
        assert table.rows[0][0] == DRAM_READ  # counters come first


def test_full_steps_have_whole_names(store: Path) -> None:
    with open_store(store) as opened:
        torch, cells = opened.rows(Selection("latest", profilers=("torch",)), by_op=True)
    full = render_table(steps_document(torch, cells, full=True))
    assert all(row.kernel in full for row in torch)


def test_records_of_steps_contain_the_figures_of_backends(store: Path) -> None:
    with open_store(store) as opened:
        torch, cells = opened.rows(Selection("latest", profilers=("torch",)))
    records = steps_document(torch, cells).records
    by_cell = {(row["config"], row["backend"]): row for row in records}
    square, decode = (by_cell[label, "math"] for label in (CONFIG, DECODE))
    assert (square["growth"], by_cell[CONFIG, "flash"]["growth"]) == ("S^2", "S")
    assert square["score_matrices"] == square["peak_memory_bytes"] / (16 * 512 * 512 * 4)
    own = [row for row in records if row["cell"] == square["cell"] and row["kernels"]]
    assert square["kernels_ns"] == pytest.approx(sum(row["call_ns"] for row in own))
    # a step has the launch configuration of its longest kernel, and other parts have none
    off = [row for row in records if (row["config"], row["backend"]) == (CONFIG, "all-disabled")]
    assert (off[0]["grid"], off[0]["block"]) == ((64, 1, 1), (384, 1, 1))
    assert (off[0]["shared_bytes"], off[0]["occupancy"]) == (134144, 0.1875)
    assert {row["grid"] is None for row in off if not row["kernels"]} == {True}
    # one query: scores are one row per head, and the peak consists of repeated and cast K and V
    assert (decode["growth"], by_cell[DECODE, "flash"]["growth"]) == ("S_kv", "S_q")
    assert decode["score_matrices"] is None and decode["peak_over_output"] > 1000


def test_time_per_call_adds_up_to_the_share(rows: list[KernelRow]) -> None:
    own = [row for row in rows if row.backend == "math" and row.profiler == "torch"]
    for config in {row.config for row in own}:
        mine = [row for row in own if row.config == config]
        whole = sum(row.call_ns or 0 for row in mine)
        for row in mine:
            assert (row.call_ns or 0) / whole == pytest.approx(row.share, rel=1e-6)


def test_the_longest_kernels_of_a_trace_come_first() -> None:
    rows = [
        kernel(
            cell=None,
            config=None,
            backend=None,
            launches_per_call=None,
            kernel=f"void k{number}()",
            kernel_short=f"k{number}",
            total_ns=1_000 * number,
            share=number / 210,
        )
        for number in range(1, 21)
    ]
    text = render_table(kernels_document(rows))
    assert "the 15 longest of 20 kernels" in text
    assert re.findall(r"^k\d+", text, re.MULTILINE) == [f"k{n}" for n in range(20, 5, -1)]
    assert "5 more kernels take 15.0 µs (7 %)." in text and "--full also shows all kernels" in text
    full = kernels_document(rows, full=True)
    assert sum(len(block.rows) for block in full.blocks if isinstance(block, Table)) == 20
    assert "more take" not in render_table(full)
    assert len(kernels_document(rows).records) == 20


def test_kernels_of_a_program_have_one_row_for_all_grids() -> None:
    """Bug: `kernels` listed 54 rows for 43 kernels, some with equal names, the report 43."""
    foreign = {"cell": None, "config": None, "backend": None, "launches_per_call": None}
    of_grids = {(64, 1, 1): (3, 900), (8, 1, 1): (1, 50)}
    rows = [
        kernel(**foreign, grid=grid, launches=launches, total_ns=ns, share=ns / 1_000)
        for grid, (launches, ns) in of_grids.items()
    ]
    rows.append(kernel(**foreign, kernel="void k()", launches=1, total_ns=50, share=0.05))
    (table,) = (block for block in kernels_document(rows).blocks if isinstance(block, Table))
    keys = [column.key for column in table.columns]
    merged, other = (dict(zip(keys, row, strict=True)) for row in table.rows)
    assert merged["grid"] == "2 grids" and merged["launches"] == 4
    assert merged["total_ns"] == 950 and merged["share"] == pytest.approx(0.95)
    assert merged["mean_launch_ns"] == 950 / 4 and other["mean_launch_ns"] == 50
    full = kernels_document(rows, full=True)
    (table,) = (block for block in full.blocks if isinstance(block, Table))
    assert [row[keys.index("grid")] for row in table.rows][:2] == [*of_grids]
    assert len(full.records) == len(kernels_document(rows).records) == 3


def test_kernels_of_a_call_have_one_row_for_all_grids() -> None:
    """Bug: two rows of a call looked alike where the terminal had no room for the grid."""
    rows = [
        kernel(grid=grid, launches=5 * count, launches_per_call=count, total_ns=ns, share=share)
        for grid, count, ns, share in (((8, 1, 1), 1, 5_000, 0.25), ((4, 1, 1), 2, 15_000, 0.75))
    ]
    (table,) = (block for block in kernels_document(rows).blocks if isinstance(block, Table))
    (row,) = (
        dict(zip((each.key for each in table.columns), row, strict=True)) for row in table.rows
    )
    assert (row["grid"], row["launches_per_call"], row["share"]) == ("2 grids", 3, 1.0)
    assert row["call_ns"] == 4_000
    assert "--full also shows a row for each launch" in render_table(kernels_document(rows))


def test_a_program_is_shown_by_its_longest_ranges() -> None:
    foreign = {"cell": None, "config": None, "backend": None, "launches_per_call": None}
    names = ["load", *(f"ProfilerStep#{number}" for number in range(4)), "model", "optimizer"]
    rows = [
        kernel(
            **foreign,
            range=name,
            kernel=f"void k{number}()",
            kernel_short=f"k{number}",
            total_ns=1_000 * (place + number),
        )
        for place, name in enumerate(names)
        for number in range(1, 7)
    ]
    document = kernels_document(rows)
    headings = [block for block in document.blocks if isinstance(block, Heading)]
    assert [each.text for each in headings] == [
        "Kernels of range optimizer",
        "Kernels of range model",
        "Kernels of range ProfilerStep#3",
    ]
    assert headings[2].detail.startswith("the longest of 4 similar ranges, the 5 longest of 6")
    tables = [block for block in document.blocks if isinstance(block, Table)]
    assert [len(table.rows) for table in tables] == [6, 5, 5]
    text = render_table(document)
    assert "4 more ranges take 120 µs." in text and "--full also shows all kernels" in text
    assert text.count("--full") == 1 and "--full" not in render_markdown(document)
    assert len(document.records) == len(rows)
    assert render_table(kernels_document(rows, full=True)).count("\nKernels of range ") == len(
        names
    )


def test_shares_of_a_program_are_of_its_whole_trace() -> None:
    """Bug: a kernel took 4.7 % of the GPU time in `kernels`, and 3.4 % in the report."""
    foreign = {"cell": None, "config": None, "backend": None, "launches_per_call": None}
    names = {"step": 3_000, "Optimizer.step": 1_000}
    rows = [
        kernel(**foreign, range=name, kernel_short=f"k_{name}", total_ns=ns, share=1.0)
        for name, ns in names.items()
    ]

    def shares(rows: list[KernelRow]) -> list[tuple[str, object]]:
        return [
            (block.columns[at].title, row[at])
            for block in kernels_document(rows).blocks
            if isinstance(block, Table)
            for at, column in enumerate(block.columns)
            if column.key == "share"
            for row in block.rows
        ]

    assert shares(rows) == [("% of GPU time", 0.75), ("% of GPU time", 0.25)]
    assert [record["share"] for record in kernels_document(rows).records] == [1.0, 1.0]
    # a table of one of several steps shows the share of this step
    steps = [replace(row, range=f"step#{number}") for number, row in enumerate(rows)]
    assert shares(steps) == [("% of range", 1.0)]
    # the total is unknown if a time is unknown
    assert {share for _, share in shares([rows[0], replace(rows[1], total_ns=None)])} == {None}


def test_kernels_and_report_agree_on_the_share_of_a_kernel(tmp_path: Path) -> None:
    store = tmp_path / "s.db"
    ingest_path(store, TRACES / "models" / "llama_train.json.gz")
    with open_store(store) as opened:
        steps = opened.steps()
        times = times_by_phase(opened, steps, opened.calls(), {})[None]
        document = kernels_document(opened.rows(Selection("latest"))[0])
    (reported,) = [each.share for each in times.kernels if "bprop_wgmma" in each.kernel_short]
    (shown,) = [
        dict(zip([column.key for column in block.columns], row, strict=True))["share"]
        for block in document.blocks
        if isinstance(block, Table)
        for row in block.rows
        if any("bprop_wgmma" in str(value) for value in row)
    ]
    assert shown == pytest.approx(reported) == pytest.approx(0.034, abs=0.0005)


def test_verify_counts_the_cases_that_a_backend_refused() -> None:
    """Bug: the progress said `refused`, and the table `skipped`."""

    def check(case: str, backend: str) -> VerificationRow:
        refused = backend == "cudnn"
        return VerificationRow(
            error=None,
            allowance=None,
            relative_error=None,
            relative_allowance=None,
            run="r",
            asked="b2-h8-s512-d64-fp16",
            config="b2-h8-s512-d64-fp16",
            case=case,
            backend=backend,
            what="out",
            passed=None if refused else True,
            message="no GPU" if refused else None,
            status="refused" if refused else "ok",
        )

    rows = [check(case, name) for name in ("math", "cudnn") for case in ("plain", "seq_1", "large")]
    text = render_table(verify_document(rows))
    assert "3 cases of cudnn were refused." in text and "skipped" not in text
    titles = ["backend", "verdict", "passed", "failed", "refused"]
    assert titles in [line.split()[:5] for line in text.splitlines()]
    assert ["cudnn", "refused", "0", "0", "3"] in [line.split()[:5] for line in text.splitlines()]
    assert "refused: all 3 cases: no GPU" in render_table(verify_document(rows))
    rows.append(check("odd", "math"))
    assert "refused: plain, seq_1, large: no GPU" in render_table(verify_document(rows))


def test_scattered_times_of_ops_are_blamed_on_a_busy_machine() -> None:
    """Bug: contention on a CPU was shown without a warning, such as 860 µs x 4 in 14.2 ms."""
    steady = {"kernel_kind": "op", "launches": 20, "launches_per_call": 4.0, "duration_ns": 860_000}
    calm = kernel(**steady, total_ns=20 * 900_000)
    scattered = kernel(**steady, total_ns=20 * 3_550_000)
    text = " ".join(render_table(kernels_document([scattered], [cell()])).split())
    # The time of a profiled call is not the time that `bench` measures.
    assert text.startswith(
        "flash launches 4 ATen ops, 14.2 ms per profiled call. The machine was busy: the mean and "
        "the median time of the ops differ by a factor of up to 4.1 (flash on b2-h8-s512-d64-fp16); "
        "capture again"
    ), text
    assert text.count("machine was busy") == 1
    waited = cell(clocks={CPU_WAIT: 0.4})
    assert "waited for a CPU for 40 % of the time" in render_table(
        kernels_document([calm], [waited])
    )
    on_gpu = replace(scattered, kernel_kind="kernel")
    for rows, cells in (([calm], [cell()]), ([on_gpu], [waited])):
        assert "busy" not in render_table(kernels_document(rows, cells))


def test_calls_on_a_cpu_have_ops_instead_of_kernels() -> None:
    """Bug: ops in a column `kernel`, with `launches/call`."""
    op = kernel(kernel_kind="op", kernel="aten::mul", kernel_short="mul", op_path=None)
    for full in (False, True):
        document = kernels_document(
            [op, replace(op, kernel="aten::t", kernel_short="t")], full=full
        )
        text = render_table(document)
        table = next(b for b in document.blocks if isinstance(b, Table))
        titles = [column.title for column in table.columns]
        assert {"op", "ops/call", "mean µs/call"} <= {*titles}
        assert ("median µs/op" in titles) == full == ("Full names of the ops" in text)
        assert "launch" not in " ".join(titles) and "kernel" not in text


def test_foreign_trace_has_totals_instead_of_times_per_call() -> None:
    foreign = kernel(cell=None, config=None, backend=None, launches_per_call=None, launches=7)
    assert kernel_record(foreign)["call_ns"] is None
    assert kernel_record(kernel())["call_ns"] == pytest.approx(36960 / 5)
    for row, title in ((foreign, "total µs"), (kernel(), "mean µs/call")):
        table = next(b for b in kernels_document([row]).blocks if isinstance(b, Table))
        assert title in [column.title for column in table.columns]


def test_steps_rank_auto_like_bench() -> None:
    """Bug: flash was 1.05x of the fastest here and 1.00x in `bench`, because `auto` ran flash too."""
    cells = [
        cell(cell=str(at), backend=name, samples={"wall": (ns, ns)})
        for at, (name, ns) in enumerate((("auto", 9500), ("flash", 10_000), ("math", 20_000)))
    ]
    text = render_table(steps_document([kernel(cell="0")], cells))
    assert re.search(r"^auto .* = flash ", text, re.MULTILINE)
    assert re.search(r"^flash .* 1\.00x", text, re.MULTILINE)


def test_times_of_a_cpu_are_named_wall() -> None:
    op = kernel(kernel_kind="op", kernel="aten::mul", op_path=None, sdpa_op=None)
    text = render_table(steps_document([op], [cell(samples={"wall": (9000, 9100)})]))
    assert "median wall µs" in " ".join(text.split())
    assert "event" not in text
    text = render_table(steps_document([kernel()], [cell(samples={"event": (9000, 9100)})]))
    assert "median cold µs" in " ".join(text.split())


@pytest.mark.parametrize(
    ("samples", "beyond"),
    [
        (
            {"graph": (9000,), "eager": (20_000,), "host": (19_000,), "cold": (12_000,)},
            {"launch gaps": 1608, "waiting for the host": 11_000, "cold refill": 3000},
        ),
        ({"eager": (20_000,)}, {"launch gaps, waiting for the host": 12_608}),
        (
            {"graph": (9000,), "event": (20_000,)},
            {"launch gaps": 1608, "cold refill, waiting for the host": 11_000},
        ),
        ({"event": (20_000,)}, {"launch gaps, cold refill, waiting for the host": 12_608}),
    ],
)
def test_steps_separate_gaps_host_and_refill(
    samples: dict[str, tuple[int, ...]], beyond: dict[str, float]
) -> None:
    """Separate them as far as the run measured them. Shares are of the call, which has no refill."""
    steps = find_steps(cell(samples=samples), [kernel()])
    assert {each.step: each.call_ns for each in steps if not each.kernels} == pytest.approx(beyond)
    assert sum(each.share or 0 for each in steps) == pytest.approx(1)


GOLDEN = Path(__file__).parent / "golden"


def sample() -> Diff:
    split = kernel(
        backend="auto", family="flash_splitkv", kernel_short="flash_fwd_splitkv", grid=(8, 2, 16)
    )
    rows = (
        DiffRow(
            *(CONFIG, "flash", "auto", "call", "slower"),
            ratio=1.25,
            reasons=("+25 %, p = 0.001",),
            baseline_ns=8000.0,
            candidate_ns=10000.0,
            basis="graph",
        ),
        DiffRow(
            *(CONFIG, "flash", "auto", "attention", "changed", True, 1.0),
            reasons=("another grid",),
            changes=(Change("grid", (4, 2, 8), (8, 2, 16)),),
            baseline_ns=7392.0,
            candidate_ns=7392.0,
            baseline=(kernel(),),
            candidate=(split,),
        ),
        DiffRow(
            *(CONFIG, "flash", "auto", "combine", "added"), candidate_ns=7392.0, candidate=(split,)
        ),
    )
    environment = (EnvChange("torch", "2.10.0", "2.11.0", "another choice of backend"),)
    return Diff("a:flash", "b:auto", environment, rows)


@pytest.mark.parametrize("name", list(RENDERERS))
def test_diff_matches_the_golden_file(name: str) -> None:
    text = RENDERERS[name](diff_document(sample()))
    path = GOLDEN / f"diff.{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_environment_comes_before_any_kernel() -> None:
    text = RENDERERS["table"](diff_document(sample()))
    assert text.index("2.11.0") < text.index(CONFIG) < text.index("flash_fwd_splitkv")


def test_json_is_that_of_the_diff() -> None:
    diff = sample()
    shown = json.loads(RENDERERS["json"](diff_document(diff)))
    assert shown.pop("answer") == list(diff_answer(diff))
    assert shown == json.loads(json.dumps(diff.to_json()))


def test_full_shows_whole_names() -> None:
    assert kernel().kernel_short in RENDERERS["table"](diff_document(sample(), full=True))


def test_differences_of_memory_and_launches_name_their_config() -> None:
    costs = (
        Cost(CONFIG, "flash", "auto", "memory", 2.0**20, 3 * 2.0**20, "more", 3.0),
        Cost(CONFIG, "flash", "auto", "launches", 1.0, 1.0, "same", 1.0),
        Cost(CONFIG, "flash", "auto", "refused", "ok", "ok", "same"),
    )
    text = RENDERERS["table"](diff_document(replace(sample(), costs=costs)))
    # Bug: this note ended with a full stop, and the note about less memory did not.
    assert "peak memory  1.00 → 3.00 MiB (more)\n" in f"{text}\n"
    assert "a call" not in text
    same = DiffRow(CONFIG, "flash", "auto", "call", verdict="same")
    short = diff_document(Diff("a", "b", (), (same,), costs=costs), changed_first=True)
    assert "peak memory" in RENDERERS["table"](short)
