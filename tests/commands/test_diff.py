"""The diff on rows of a real H200 trace: pairing by role, verdicts, and reasons against a verdict."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from h200_rows import cell, kernel_rows, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from profharness.commands.diff import check, diff_document, show
from profharness.commands.diff.answer import diff_answer
from profharness.commands.diff.compare import Diff, DiffRow, Side, diff_cells
from profharness.program.changes import environment_changes
from profharness.render.document import More, Note, Table
from profharness.rows import KERNEL, SHARED_CORES, CellRow, KernelRow, Refusal
from profharness.stats import Series

SQUARE = "b2h8s512d64-fp16"
TRAIN = "b2h8s1024d64-fp16-causal-bwd"
FAST = tuple(9_200 + n for n in range(20))
SLOW = tuple(12_100 + n for n in range(20))
CELLS = sorted({(row.config or "", row.backend or "") for row in kernel_rows()})
ENV = {"device_type": "cuda", "gpu": "NVIDIA H200", "torch": "2.11.0", "cudnn": 91900}


def side(
    backend: str | None = None,
    *,
    cells: tuple[CellRow, ...] | None = None,
    kernels: tuple[KernelRow, ...] | None = None,
    env: dict[str, Any] | None = None,
) -> Side:
    cells = tuple(cell(*name) for name in CELLS) if cells is None else cells
    kernels = kernel_rows() if kernels is None else kernels
    return Side(f"h200:{backend}", cells, kernels, backend, ENV if env is None else env)


def one(diff: Diff, config: str, role: str) -> DiffRow:
    found = [row for row in diff.rows if (row.config, row.role) == (config, role)]
    assert len(found) == 1, f"{len(found)} rows of {role} in {config}"
    return found[0]


def slower(row: KernelRow, factor: float) -> KernelRow:
    times = {n: round(getattr(row, n) * factor) for n in ("duration_ns", "min_ns", "max_ns")}
    return replace(row, **times)  # type: ignore[arg-type]


BUSY = (10_000, 11_000, 400_000) * 2


def op_rows(factor: float = 1, *, scattered: bool = False) -> tuple[KernelRow, ...]:
    """Return rows of ops. Their mean and median times differ if `scattered` is set."""
    spread = 4 if scattered else 1
    rows = [slower(row, factor) for row in rows_of(SQUARE, "flash") if row.duration_ns]
    return tuple(
        replace(
            row,
            kernel_kind="op",
            launches=6,
            launches_per_call=2.0,
            total_ns=6 * spread * (row.duration_ns or 0),
        )
        for row in rows
    )


def test_diff_does_not_compare_times_that_bench_cannot_use() -> None:
    """Bug: on a busy CPU, `math` took 860 times as long as `auto`, and only a note warned of it."""
    cells = (cell(SQUARE, "flash", samples={"wall": times}) for times in (FAST, BUSY))
    sides = tuple(
        side("flash", cells=(each,), kernels=rows)
        for each, rows in zip(cells, (op_rows(), op_rows(3, scattered=True)), strict=True)
    )
    diff = diff_cells(*sides)
    row = one(diff, SQUARE, "call")
    assert (row.verdict, row.ratio, row.baseline_ns, row.candidate_ns) == ("unknown", *[None] * 3)
    assert row.reasons == ("the machine was busy, so the times of the candidate cannot be used",)
    assert not any(row.ratio for row in diff.rows)
    first, second, *_ = show((diff, sides)).answer
    assert first == (
        "The times of flash and flash cannot be compared, because the machine was busy."
    )
    assert second.startswith("The machine was busy: the mean and the median time of the ops differ")
    (result,) = check((diff, sides), fail_on=("slower",))
    assert result.findings == (
        "nothing to compare for slower: the machine was busy, so the times of the candidate cannot "
        "be used; capture again when nothing else is running",
    )


def test_diff_compares_what_is_usable_on_a_busy_machine() -> None:
    calm = [cell(SQUARE, name, samples={"wall": BUSY}) for name in ("flash", "math")]
    diff = diff_cells(
        side("flash", cells=(calm[0],), kernels=op_rows()),
        side("flash", cells=(calm[0],), kernels=op_rows(3)),
    )
    assert one(diff, SQUARE, "call").verdict == "unknown"
    of_ops = [row for row in diff.rows if row.role != "call"]
    assert {row.verdict for row in of_ops} == {"slower"}
    assert diff_answer(diff)[1] == "Capture again when nothing else is running."
    # Another measurement of the call, or the time of its kernels, is compared instead.
    for name, role in (("wall", "call"), (KERNEL, "kernels")):
        fast, slow = (
            cell(SQUARE, backend, samples={"eager": BUSY, name: times})
            for backend, times in (("flash", FAST), ("math", SLOW))
        )
        found = diff_cells(
            side("flash", cells=(fast,), kernels=()), side("math", cells=(slow,), kernels=())
        )
        assert one(found, SQUARE, role).verdict == "slower"
        assert "math takes 1.3" in diff_answer(found)[0]
    # The other configs keep their verdicts.
    others = [cell(TRAIN, "flash", samples={"wall": times}) for times in (FAST, SLOW)]
    some = diff_cells(
        side("flash", cells=(calm[0], others[0]), kernels=()),
        side("flash", cells=(calm[0], others[1]), kernels=()),
    )
    first, again, which, *_ = diff_answer(some)
    assert "slower in 1 of 2 configs" in first and "not comparable in 1 config" in first
    assert again == "Capture again when nothing else is running."
    assert which == "The machine was busy, so the times of 1 of 2 configs cannot be used."


def test_fused_against_fused_is_one_row() -> None:
    split = tuple(row for row in kernel_rows() if row.family != "flash_combine")
    diff = diff_cells(side("flash", kernels=split), side("cudnn"))
    row = one(diff, SQUARE, "attention")
    assert [len(row.baseline), len(row.candidate)] == [1, 1]
    changes = {change.field: (change.baseline, change.candidate) for change in row.changes}
    assert changes["grid"] == ((8, 2, 16), (64, 1, 1))
    assert changes["block"] == ((128, 1, 1), (384, 1, 1))
    assert changes["shared_bytes"] == (73728, 134144)
    assert changes["registers_per_thread"] == (255, 168)
    assert changes["tile"] == ("64x256", "64x128x64")
    assert row.ratio == pytest.approx(7_392 / 7_616, rel=0.01)
    assert row.changed
    assert one(diff, SQUARE, "memory").verdict == "added"
    assert one(diff, TRAIN, "bwd_preprocess").baseline[0].kernel.startswith("void pytorch_flash")
    backward = one(diff, TRAIN, "attention_bwd")
    assert (backward.verdict, backward.changed) == ("faster", True)
    assert "medians of 3 and 3 profiled launches" in backward.reasons[0]
    assert "%" not in backward.reasons[0]  # bug: a change was given in percent


def test_a_split_kernel_and_its_combine_are_compared_as_a_whole() -> None:
    """bug: cudnn's kernel was compared with the split-KV kernel alone."""
    diff = diff_cells(side("flash"), side("cudnn"))
    row = one(diff, SQUARE, "attention")
    assert row.composite
    assert [kernel.family for kernel in row.baseline] == ["flash_splitkv", "flash_combine"]
    assert (row.verdict, len(row.candidate)) == ("faster", 1)
    assert row.ratio == pytest.approx(7_392 / (7_616 + 5_024), rel=0.01)
    assert {r.role for r in diff.rows if r.config == SQUARE} == {"call", "attention", "memory"}
    notes = [block.text for block in diff_document(diff).blocks if isinstance(block, Note)]
    assert any("the kernel that combines its outputs" in text for text in notes)
    assert not any("unfused" in text for text in notes)
    alike = diff_cells(side("flash"), side("flash"))
    assert not one(alike, SQUARE, "attention").composite
    assert one(alike, SQUARE, "combine").verdict == "same"


def test_fused_against_math_is_one_composite_row() -> None:
    diff = diff_cells(side("flash"), side("math"))
    row = one(diff, SQUARE, "attention")
    assert row.composite
    assert [kernel.family for kernel in row.baseline] == ["flash_splitkv", "flash_combine"]
    assert sum(round(kernel.launches_per_call or 0) for kernel in row.candidate) == 14
    assert row.verdict == "slower"
    assert row.ratio is not None
    assert 6 < row.ratio < 9
    assert {r.role for r in diff.rows if r.config == SQUARE} == {"call", "attention"}
    backward = {r.role: r for r in diff.rows if r.config == TRAIN}
    assert set(backward) == ({"call", "attention", "attention_bwd", "grad_init", "grad_accumulate"})
    assert backward["attention_bwd"].composite
    assert not backward["grad_init"].changed


def test_calls_are_compared_in_the_order_of_bench() -> None:
    """Bug: `bench` compared cold calls, and `diff` CUDA-graph replays of the same two backends."""
    samples = {"cold": SLOW, "graph": FAST}
    base = cell(SQUARE, "flash", samples=samples)
    cand = cell(SQUARE, "cudnn", samples={"cold": FAST, "graph": SLOW})
    diff = diff_cells(side("flash", cells=(base,)), side("cudnn", cells=(cand,)))
    assert (one(diff, SQUARE, "call").basis, one(diff, SQUARE, "call").verdict) == (
        "cold",
        "faster",
    )


def test_a_call_row_prefers_graph_to_event() -> None:
    """Medians of `event` differ between equal runs, because they include part of the launch path."""
    both = {"event": SLOW, "graph": FAST}
    base = cell(SQUARE, "flash", samples=both, peak_memory_bytes=100)
    cand = cell(SQUARE, "cudnn", samples={"event": FAST, "graph": SLOW}, peak_memory_bytes=90)
    diff = diff_cells(side("flash", cells=(base,)), side("cudnn", cells=(cand,)))
    row = one(diff, SQUARE, "call")
    assert (row.basis, row.verdict) == ("graph", "slower")
    assert row.ratio == pytest.approx(12_109.5 / 9_209.5)
    assert [c.field for c in row.changes] == ["peak_memory_bytes"]
    no_graph = replace(cand, samples={"event": FAST})
    diff = diff_cells(side("flash", cells=(base,)), side("cudnn", cells=(no_graph,)))
    assert (one(diff, SQUARE, "call").basis, one(diff, SQUARE, "call").verdict) == (
        "event",
        "faster",
    )
    none = diff_cells(side("flash", cells=(base,)), side("cudnn", cells=(cell(SQUARE, "cudnn"),)))
    assert one(none, SQUARE, "call").verdict == "unknown"


def test_two_runs_pair_by_backend_and_see_one_slower_kernel() -> None:
    new = tuple(slower(r, 1.5) if r.family == "flash_bwd" else r for r in kernel_rows())
    diff = diff_cells(side(), side(kernels=new))
    differing = [row for row in diff.rows if row.role != "call" and row.verdict != "same"]
    assert [(r.backend_baseline, r.role, r.verdict) for r in differing] == [
        ("flash", "attention_bwd", "slower"),
        ("flash", "bwd_preprocess", "slower"),
        ("flash", "bwd_postprocess", "slower"),
    ]
    assert not any(row.changed for row in differing)


@pytest.mark.parametrize(
    ("later", "verdict"), [((1.001, 0.999), "slower"), ((1.05, 0.99), "unknown")]
)
def test_a_kernel_differs_by_more_than_like_processes_do(
    later: tuple[float, ...], verdict: str
) -> None:
    """The trace is of one process. The kernels' times in the other processes show how much
    processes differ.
    """
    (row,) = (r for r in kernel_rows() if (r.config, r.backend) == (SQUARE, "efficient"))
    assert row.duration_ns is not None

    def timed(factor: float) -> CellRow:
        kernel = [round(row.duration_ns * factor * part) for part in later for _ in range(10)]
        turns = [(process, 0, 10) for process in (1, 2)]
        return replace(cell(SQUARE, "efficient"), samples={KERNEL: Series.of(kernel, turns)})

    sides = (
        side("efficient", cells=(timed(factor),), kernels=(slower(row, factor),))
        for factor in (1.0, 1.06)
    )
    found = one(diff_cells(*sides), SQUARE, "attention")
    assert (found.verdict, "processes" in found.reasons[0]) == (verdict, verdict == "unknown")


def test_kernel_times_without_a_trace_are_compared_as_a_whole() -> None:
    """Three processes have samples on each side. If both have launches, kernels are compared one by
    one.
    """

    def timed(factor: float) -> CellRow:
        sums = [round(factor * (9_000 + 10 * each + n)) for each in range(3) for n in range(10)]
        turns = [(each, 0, 10) for each in range(3)]
        return replace(cell(SQUARE, "flash"), samples={KERNEL: Series.of(sums, turns)})

    def rows(factor: float, kept: tuple[KernelRow, ...] = ()) -> list[DiffRow]:
        base = side(cells=(timed(1.0),), kernels=kept)
        return list(diff_cells(base, side(cells=(timed(factor),), kernels=())).rows)

    (row,) = [row for row in rows(1.05) if row.role == "kernels"]
    assert (row.basis, row.verdict) == (KERNEL, "slower")
    assert row.ratio == pytest.approx(1.05, rel=1e-3) and row.baseline_ns == pytest.approx(9014.5)
    assert [row.verdict for row in rows(1.0) if row.role == "kernels"] == ["same"]
    traced = {row.role: row.verdict for row in rows(1.05, tuple(rows_of(SQUARE, "flash")))}
    assert traced["kernels"] == "slower" and traced["attention"] == "unknown"
    whole = diff_cells(side(cells=(timed(1.0),)), side(cells=(timed(1.05),)))
    assert "kernels" not in {row.role for row in whole.rows}


def test_other_tile_at_the_same_speed_is_changed() -> None:
    new = tuple(
        replace(r, grid=(16, 2, 8), shared_bytes=40960) if r.family == "flash" else r
        for r in kernel_rows()
    )
    diff = diff_cells(side("flash"), side("flash", kernels=new))
    assert [row.role for row in diff.fails({"changed", "slower"})] == ["attention"]
    row = one(diff, TRAIN, "attention")
    assert (row.verdict, row.ratio) == ("changed", 1.0)
    assert [change.field for change in row.changes] == ["grid", "shared_bytes"]
    both = tuple(slower(r, 2) if r.family == "flash" else r for r in new)
    row = one(diff_cells(side("flash"), side("flash", kernels=both)), TRAIN, "attention")
    assert (row.verdict, row.changed) == ("slower", True)


def test_a_value_that_a_profiler_cannot_know_is_no_change() -> None:
    new = tuple(replace(r, registers_per_thread=None, shared_bytes=None) for r in kernel_rows())
    diff = diff_cells(side(), side(kernels=new))
    assert not any(row.changed for row in diff.rows)


@pytest.mark.parametrize(
    ("env", "clock", "text"),
    [
        ({"device_type": "cpu"}, 1980, "kinds of device differ"),
        ({}, 1500, "the SM clocks differ by more than 5 %"),
    ],
)
def test_times_that_must_not_be_compared(env: dict[str, Any], clock: int, text: str) -> None:
    samples = {"event": FAST}
    base = cell(SQUARE, "flash", samples=samples, clocks={"sm_mhz": 1980})
    cand = cell(SQUARE, "flash", samples={"event": SLOW}, clocks={"sm_mhz": clock})
    kernels = tuple(rows_of(SQUARE, "flash"))
    diff = diff_cells(
        side(cells=(base,), kernels=kernels), side(cells=(cand,), kernels=kernels, env=ENV | env)
    )
    assert {(row.verdict, row.ratio) for row in diff.rows} == {("unknown", None)}
    assert all(text in row.reasons[0] for row in diff.rows)


def test_times_of_two_gpus_have_a_verdict_that_names_the_gpus() -> None:
    """Bug: a ratio was printed next to the verdict `unknown`. Clocks of two models differ anyway."""
    base = cell(SQUARE, "flash", samples={"event": FAST}, clocks={"sm_mhz": 1980})
    cand = cell(SQUARE, "flash", samples={"event": SLOW}, clocks={"sm_mhz": 1410})
    env = ENV | {"gpu": "NVIDIA A100"}
    diff = diff_cells(side(cells=(base,)), side(cells=(cand,), env=env))
    row = one(diff, SQUARE, "call")
    assert row.verdict == "slower" and row.ratio is not None and row.ratio > 1
    assert all("the GPUs differ" in each.reasons[-1] for each in diff.rows if each.ratio)


def test_a_side_whose_lanes_shared_cores_is_named() -> None:
    base = cell(SQUARE, "flash", samples={"eager": FAST})
    cand = replace(cell(SQUARE, "flash", samples={"eager": SLOW}), warnings=(SHARED_CORES,))
    diff = diff_cells(side(cells=(base,), kernels=()), side(cells=(cand,), kernels=()))
    assert f"candidate: {SHARED_CORES}" in one(diff, SQUARE, "call").reasons
    diff = diff_cells(side(cells=(cand,), kernels=()), side(cells=(cand,), kernels=()))
    assert not any(SHARED_CORES in text for text in one(diff, SQUARE, "call").reasons)


def test_too_few_launches_and_overlapping_ranges_are_unknown() -> None:
    kernels = tuple(rows_of(SQUARE, "efficient"))
    single = tuple(replace(slower(row, 1.2), launches=2) for row in kernels)
    diff = diff_cells(side(kernels=kernels, cells=()), side(kernels=single, cells=()))
    assert "too few launches" in diff.rows[0].reasons[0]
    assert diff.rows[0].verdict == "unknown"
    wide = tuple(replace(slower(r, 1.2), min_ns=r.min_ns) for r in kernels)
    diff = diff_cells(side(kernels=kernels, cells=()), side(kernels=wide, cells=()))
    assert diff.rows[0].verdict == "unknown"
    assert "overlap" in diff.rows[0].reasons[0]


def test_rows_of_different_profilers_do_not_compare_times() -> None:
    kernels = tuple(rows_of(SQUARE, "efficient"))
    ncu = tuple(replace(slower(r, 3), profiler="ncu") for r in kernels)
    diff = diff_cells(side(kernels=kernels, cells=()), side(kernels=ncu, cells=()))
    assert diff.rows[0].verdict == "unknown"
    assert "different profilers (torch, ncu)" in diff.rows[0].reasons[0]
    both = diff_cells(side(kernels=kernels, cells=()), side(kernels=ncu + kernels, cells=()))
    assert [row.verdict for row in both.rows] == ["same"]


def test_a_config_that_one_side_lacks() -> None:
    diff = diff_cells(side("efficient"), side("flash"))
    rows = [row for row in diff.rows if row.config == "b1h1s16d8192-fp32"]
    assert [(row.role, row.verdict) for row in rows] == (
        [("call", "removed"), ("attention", "removed")]
    )
    assert (rows[1].baseline_ns, rows[1].candidate_ns) == (rows[1].baseline[0].duration_ns, None)


def test_status() -> None:
    refusal = (Refusal("mask", "no mask here"),)
    fine = cell("b2-h8-s512-d64-fp16", "flash")
    refused = cell("b2-h8-s512-d64-fp16", "flash", status="refused", refusals=refusal)
    none: tuple[KernelRow, ...] = ()
    diff = diff_cells(side(cells=(fine,), kernels=none), side(cells=(refused,), kernels=none))
    (row,) = diff.rows
    assert (row.role, row.verdict, row.changed) == ("status", "changed", True)
    assert row.reasons == ("baseline: ok", "candidate: refused [mask]: no mask here")
    assert row.endings == ("baseline: ok", "candidate: refused: attn_mask is not supported")
    short, full = (diff_document(diff, full=full).blocks for full in (False, True))
    assert [block for block in short if isinstance(block, Note | Table | More)] == [
        Note("refused: attn_mask is not supported", "candidate")
    ]
    assert [b.text for b in full if isinstance(b, Note)] == ["; ".join(row.reasons)]
    diff = diff_cells(side(cells=(refused,), kernels=none), side(cells=(refused,), kernels=none))
    assert [row.verdict for row in diff.rows] == ["same"]
    other = replace(refused, refusals=(Refusal("dtype", "no half"),))
    diff = diff_cells(side(cells=(refused,), kernels=none), side(cells=(other,), kernels=none))
    assert [c.field for c in diff.rows[0].changes] == ["refusals"]


def test_a_config_that_one_side_refuses_has_the_time_of_the_other_side() -> None:
    """Bug: the kernels of the side that ran were listed, each as removed, but not the time of its call."""
    label = "b2-h8-s512-d64-fp16"
    refusal = (Refusal("mask", "no mask here"),)
    fine = cell(label, "flash", samples={"eager": SLOW, "graph": FAST})
    refused = cell(label, "cudnn", status="refused", refusals=refusal)
    kernels = tuple(replace(row, config=label) for row in rows_of(SQUARE, "flash"))
    diff = diff_cells(
        side("flash", cells=(fine,), kernels=kernels), side("cudnn", cells=(refused,), kernels=())
    )
    status = one(diff, label, "status")
    assert (status.basis, status.baseline_ns, status.candidate_ns) == ("graph", 9209.5, None)
    blocks = diff_document(diff).blocks
    assert [block for block in blocks if isinstance(block, Note | Table | More)] == [
        Note("9.21 µs per call in CUDA-graph replays", "flash"),
        Note("refused: attn_mask is not supported", "cudnn"),
        More("the kernels of configs that only one side runs"),
    ]
    (table,) = (b for b in diff_document(diff, full=True).blocks if isinstance(b, Table))
    assert (
        table.rows[0][0] == "status (graph)" and table.rows[2][0] == f"- {kernels[0].kernel_short}"
    )


def test_kernels_have_the_marks_of_a_unified_diff() -> None:
    """Each role has one row with both times, above the kernels of both sides."""
    base = tuple(rows_of(SQUARE, "flash"))
    slow = (slower(base[0], 2), replace(base[1], grid=(1, 1, 1)))
    cells = (cell(SQUARE, "flash"),)
    found = diff_cells(*(side("flash", cells=cells, kernels=rows) for rows in (base, slow)))
    (table,) = (b for b in diff_document(found).blocks if isinstance(b, Table))
    shown = [{c.key: v for c, v in zip(table.columns, row, strict=True)} for row in table.rows]
    one, other = (row.kernel_short for row in base)
    assert [(line["part"], line["verdict"]) for line in shown[-5:]] == [
        ("attention", "slower"),
        (f"= {one}", ""),
        ("combine", "changed"),
        (f"- {other}", ""),
        (f"+ {other}", ""),
    ]
    assert [line["grid"] for line in shown[-2:]] == [base[1].grid, (1, 1, 1)]
    assert shown[-4]["duration_ns"] == (base[0].duration_ns, slow[0].duration_ns)
    assert {line["grid"] for line in shown if line["verdict"]} == {""}


def test_a_verdict_that_names_the_side_has_no_note() -> None:
    """Bug: the note `This kernel runs only in the candidate.` repeated the verdict `added`."""
    diff = diff_cells(side("flash"), side("cudnn"))
    short, full = (
        [b.text for b in diff_document(diff, full=full).blocks if isinstance(b, Note)]
        for full in (False, True)
    )
    assert not any("runs only in" in text for text in short)
    assert "This kernel runs only in the candidate." in full


def test_foreign_traces_pair_by_range() -> None:
    rows = tuple(
        replace(r, config=None, backend=None, cell=None, launches_per_call=None, range="train")
        for r in rows_of(TRAIN, "flash")
    )
    diff = diff_cells(side(cells=(), kernels=rows), side(cells=(), kernels=rows))
    assert {row.config for row in diff.rows} == {"train"}
    assert one(diff, "train", "copy_bwd").baseline_ns == pytest.approx(
        one(diff_cells(side("flash"), side("flash")), TRAIN, "copy_bwd").baseline_ns or 0
    )


def test_environment_differences_explain_first() -> None:
    base = {"created": "a", "zeta": 1, "torch": "2.9.1", "python": "3.11", "priority_order": ("x",)}
    base |= {"env": {}, "gpu": "NVIDIA L40S"}
    cand = base | {"created": "b", "zeta": 2, "torch": "2.11.0", "priority_order": ["x"]}
    cand |= {"env": {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}, "gpu": "NVIDIA H200"}
    found = environment_changes(base, cand)
    assert [change.key for change in found] == (
        ["gpu", "torch", "env.TORCH_CUDNN_SDPA_DEPRIORITIZED", "zeta", "created"]
    )
    assert all(change.explains for change in found[:3])
    assert found[3].explains is None
    assert (found[2].baseline, found[2].candidate) == (None, "1")
    assert environment_changes(base, base) == []


def test_what_one_side_does_not_tell_is_no_difference() -> None:
    base = {"device_type": "cpu", "torch": "2.13.0", "env": {"OMP_NUM_THREADS": "1"}}
    assert environment_changes(base, {}) == environment_changes({}, base) == []
    assert environment_changes(base, {"torch": "2.13.0"}) == []
    (change,) = environment_changes(base, base | {"device_type": None})
    assert (change.baseline, change.candidate) == ("cpu", None)


def test_json_is_plain_and_complete() -> None:
    diff = diff_cells(side("flash"), side("math", env=ENV | {"torch": "2.12.1"}))
    told = json.loads(json.dumps(diff.to_json()))
    assert told["schema"] == "profharness.diff/1"
    assert told["environment"][0]["key"] == "torch"
    assert len(told["rows"]) == len(diff.rows)
    first = next(row for row in told["rows"] if row["role"] == "attention")
    assert first["baseline"][0]["grid"] == [1, 32, 8]
    assert sum(diff.verdicts().values()) == len(diff.rows)


SUBSETS = st.lists(st.sampled_from(kernel_rows()), unique=True, max_size=60).map(tuple)
FACTORS = st.sampled_from([0.5, 1.0, 1.01, 2.0])


@settings(max_examples=40)
@given(SUBSETS)
def test_a_side_against_itself(kernels: tuple[KernelRow, ...]) -> None:
    diff = diff_cells(side(kernels=kernels), side(kernels=kernels))
    assert set(diff.verdicts()) <= {"same", "unknown"}
    assert not any(row.changed for row in diff.rows)
    assert not diff.fails({"added", "removed", "changed", "faster", "slower"})


@settings(max_examples=40)
@given(SUBSETS, SUBSETS, FACTORS, st.sampled_from([None, ("flash", "math"), ("cudnn", "flash")]))
def test_swapping_and_completeness(
    left: tuple[KernelRow, ...],
    right: tuple[KernelRow, ...],
    factor: float,
    backends: tuple[str, str] | None,
) -> None:
    right = tuple(slower(row, factor) for row in right)
    a, b = backends or (None, None)
    there = diff_cells(side(a, kernels=left), side(b, kernels=right))
    back = diff_cells(side(b, kernels=right), side(a, kernels=left))
    opposite = {"added": "removed", "removed": "added", "slower": "faster", "faster": "slower"}

    def key(row: DiffRow) -> tuple[str, str, str]:
        return row.config, row.backend_baseline or "" if backends is None else "", row.role

    mirrored = {key(row): row for row in back.rows}
    assert set(mirrored) == {key(row) for row in there.rows}
    for row in there.rows:
        other = mirrored[key(row)]
        assert other.verdict == opposite.get(row.verdict, row.verdict)
        assert (row.ratio is None) == (other.ratio is None)
        if row.ratio is not None and other.ratio is not None:
            assert row.ratio * other.ratio == pytest.approx(1)
    for wanted, rows, name in ((a, left, "baseline"), (b, right, "candidate")):
        given_rows = Counter(r for r in rows if wanted in (None, r.backend))
        assert Counter(k for row in there.rows for k in getattr(row, name)) == given_rows


PEAKS = (10_000_000, 10_090_000, 10_110_000, 9_000_000)


@pytest.mark.parametrize(
    ("peaks", "verdict"),
    [((0, 0), "same"), ((0, 1), "same"), ((0, 2), "more"), ((0, 3), "less"), ((2, 0), "less")],
)
def test_peak_memory_has_a_verdict_of_its_own(peaks: tuple[int, int], verdict: str) -> None:
    """A change of more than 1 % counts, because peaks are repeatable to the byte."""
    cells = [replace(cell(SQUARE, "flash"), peak_memory_bytes=PEAKS[place]) for place in peaks]
    diff = diff_cells(*(side("flash", cells=(one_cell,)) for one_cell in cells))
    (cost,) = (cost for cost in diff.costs if cost.what == "memory")
    assert (cost.baseline, cost.candidate, cost.verdict) == (
        *map(PEAKS.__getitem__, peaks),
        verdict,
    )
    assert bool(diff.failing_costs({"memory"})) == (verdict == "more")
    assert not diff.failing_costs({"launches", "refused"})
    assert one(diff, SQUARE, "attention").verdict == "same"


def test_launches_of_a_call_have_a_verdict_of_their_own() -> None:
    diff = diff_cells(side("flash"), side("math"))
    costs = {cost.config: cost for cost in diff.costs if cost.what == "launches"}
    assert (costs[SQUARE].baseline, costs[SQUARE].candidate) == (2, 14)
    assert costs[SQUARE].verdict == "more" and costs[SQUARE].ratio == 7
    assert costs[SQUARE] in diff.failing_costs({"launches"})
    back = diff_cells(side("math"), side("flash"))
    assert not back.failing_costs({"launches"})
    same = diff_cells(side("flash"), side("flash"))
    assert {cost.verdict for cost in same.costs} == {"same"}


def test_what_one_side_refuses_is_told_and_what_both_refuse_is_not() -> None:
    ran = cell("b2-h8-s512-d64-fp16", "flash")
    refused = replace(ran, status="refused", refusals=(Refusal("dtype", "no"),))
    died = replace(ran, status="crashed")

    def verdict(first: CellRow, second: CellRow) -> list[str]:
        diff = diff_cells(side("flash", cells=(first,)), side("flash", cells=(second,)))
        assert bool(diff.failing_costs({"refused"})) == ((first, second) == (ran, refused))
        return [cost.verdict for cost in diff.costs if cost.what == "refused"]

    assert verdict(ran, refused) == ["refused"]
    assert verdict(refused, ran) == ["accepted"]
    assert verdict(refused, refused) == verdict(ran, ran) == ["same"]
    assert verdict(ran, died) == []  # nothing was refused; `changed` covers it


def test_costs_stand_in_the_json_where_there_are_any() -> None:
    costs = diff_cells(side("flash"), side("math")).to_json()["costs"]
    assert {cost["what"] for cost in costs} == {"launches", "refused"}
    assert "costs" not in diff_cells(side("flash", cells=()), side("math", cells=())).to_json()
