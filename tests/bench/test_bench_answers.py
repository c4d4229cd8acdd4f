"""Conclusions of a bench: the fastest backend, open comparisons, and the selection of cells and
precision.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from written_samples import STUDY, answer, cell, regretful, steady, timed

from profharness.attention.config import parse_config
from profharness.commands.bench.answer import bench_answer, noise_of_auto
from profharness.commands.bench.tables import bench_document
from profharness.errors import NotFoundError
from profharness.measurements.evaluation import (
    bench_configs,
    evaluate_bench,
    stored_backends,
    stored_configs,
)
from profharness.render.document import Chart, Note, Table
from profharness.render.renderers import RENDERERS
from profharness.render.terminal import render_table
from profharness.run import BenchPlan, Cell, read_run, write_run
from profharness.store import ingest_path, open_store


def test_regret_is_sorted_by_loss_and_comes_with_code(tmp_path: Path) -> None:
    found = answer(tmp_path, regretful())
    told = [(each.config, each.best, round(each.regret, 3), each.real) for each in found.losses]
    assert told == [
        ("b1-h1-s128-d64-fp16", "math", 1.906, True),
        ("b1-h1-s512-d64-fp16", "cudnn", 0.25, True),
        ("b1-h1-s32-d64-fp16", "flash", 0.2, False),  # auto chose it: one backend, timed twice
        ("b1-h1-s64-d64-fp16", "flash", 0.0, False),
    ]
    assert "SDPBackend.MATH" in found.losses[0].code
    assert bench_answer(found)[0] == (
        "On 2 of 4 configs, auto takes more than 1.10 times as long as the fastest backend. The worst case is "
        "b1-h1-s128-d64-fp16, where auto takes 2.91 times as long: 369 µs on efficient against 127 µs on "
        "math. Use sdpa_kernel([SDPBackend.MATH]); see the code below."
    )
    winners = {each.config: (each.backend, each.ties) for each in found.winners}
    assert winners["b1-h1-s512-d64-fp16"] == ("cudnn", ())
    assert winners["b1-h1-s64-d64-fp16"] == ("flash", ("auto",))


def test_the_answer_has_the_wide_intervals_of_the_times_that_it_names(tmp_path: Path) -> None:
    """Bug: a ratio of two medians was given without the interval of ±49 % of one of them."""
    wide = [100_000, 50_000, 150_000, 100_000, 148_000, 52_000]
    cells = [
        cell("1,1,64,64,fp16", "auto", {"event": steady(50_000)}, choice="cudnn"),
        *timed("1,1,64,64,fp16", cudnn=49_000),
        cell("1,1,64,64,fp16", "math", {"event": wide}),
    ]
    told = bench_answer(answer(tmp_path, cells))[0]
    assert re.fullmatch(
        r"auto already runs the fastest available backend: cudnn takes 49\.0 µs; math takes 2\.04 times as "
        r"long \(±\d\d %\)\.",
        told,
    )


def test_the_worst_case_has_the_wide_interval_of_auto(tmp_path: Path) -> None:
    wide = [100_000, 70_000, 130_000, 100_000, 128_000, 72_000]
    cells = [
        cell("1,1,64,64,fp16", "auto", {"event": wide}, choice="flash"),
        *timed("1,1,64,64,fp16", cudnn=49_000),
    ]
    told = bench_answer(answer(tmp_path, cells))[0]
    assert re.search(r": 100 µs on flash \(±\d\d %\) against 49\.0 µs on cudnn\.", told)


def test_a_bench_without_times_describes_no_measurement(tmp_path: Path) -> None:
    """Bug: the notes described times that nobody took, and `refused` had no header."""
    message = "cudnn attention does not exist on cpu"
    refused = replace(cell("1,2,128,64,fp16", "cudnn", {}), status="refused", message=message)
    document = bench_document(answer(tmp_path, [refused]))
    (table,) = [block for block in document.blocks if isinstance(block, Table)]
    assert [column.title for column in table.columns] == ["config", "backend", "median µs/call"]
    assert table.rows == (("b1-h2-s128-d64-fp16", "cudnn", "refused"),)
    notes = [block for block in document.blocks if isinstance(block, Note)]
    assert [note.label for note in notes] == ["cudnn"]
    assert notes[0].text == f"refused: {message}"


def test_auto_has_a_ratio_unless_it_ran_the_fastest_backend(tmp_path: Path) -> None:
    """Bug: `auto` and cudnn were both 1.00x of the fastest, but their times differed."""
    shown = {}
    for choice in ("cudnn", "math"):
        cells = [
            cell("1,1,64,64,fp16", "auto", {"event": steady(9_000)}, choice=choice),
            *timed("1,1,64,64,fp16", cudnn=10_000, math=20_000),
        ]
        (tmp_path / choice).mkdir()
        (table, *_) = [
            block
            for block in bench_document(answer(tmp_path / choice, cells)).blocks
            if isinstance(block, Table)
        ]
        at = [column.key for column in table.columns].index("regret")
        shown[choice] = [row[at] for row in table.rows]
    assert shown["cudnn"] == ["= cudnn", 0, 1]
    assert not any(isinstance(value, str) for value in shown["math"])


def test_the_number_of_samples_has_a_thousands_separator(tmp_path: Path) -> None:
    """Bug: the note on the measurement said `584 to 2526 samples per figure`."""
    cells = [
        cell("1,1,64,64,fp16", "math", {"event": steady(9_000) * 120}),
        cell("1,1,64,64,fp16", "flash", {"event": steady(9_000)}),
    ]
    text = render_table(bench_document(answer(tmp_path, cells), full=True), full=True, width=200)
    counts = [len(each.samples["event"]) for each in cells]
    assert f"{counts[1]} to {counts[0]:,} samples per figure" in text and counts[0] > 1000


def test_charts_leave_out_all_disabled(tmp_path: Path) -> None:
    """Bug: the charts of `bench` had a mark for `all-disabled`, and those of `report` had none."""
    cells = [
        replace(
            cell(f"1,2,{length},64,{dtype}", name, {"graph": steady(6_000)}),
            peak_memory_bytes=1 << 20,
        )
        for length in (128, 256)
        for dtype in ("fp16", "bf16")
        for name in ("cudnn", "all-disabled")
    ]
    charts = [b for b in bench_document(answer(tmp_path, cells)).blocks if isinstance(b, Chart)]
    titles = " ".join(chart.title for chart in charts)
    assert all(text in titles for text in ("Time per call", "TFLOP/s", "Peak memory", "by dtype"))
    assert not any("all-disabled" in str(row) for chart in charts for row in chart.rows)


def test_all_disabled_is_no_backend_to_choose(tmp_path: Path) -> None:
    times = {"auto": 60_000, "all-disabled": 40_000, "cudnn": 50_000}
    found = answer(tmp_path, timed("1,1,64,64,fp16", **times))
    assert [each.backend for each in found.winners] == ["cudnn"]
    assert [(each.best, each.regret) for each in found.losses] == [("cudnn", pytest.approx(0.2))]


def apart() -> list[Cell]:
    """Return three samples per side. Their medians differ by a factor of nine, which proves
    nothing.
    """
    times = {"auto": 900_000, "math": 300_000, "naive": 100_000}
    return [
        cell("1,2,128,64,fp16", backend, {"event": steady(time)[:3]})
        for backend, time in times.items()
    ]


def test_undecided_comparisons_have_no_verdict(tmp_path: Path) -> None:
    found = answer(tmp_path, apart())
    assert bench_answer(found)[0] == (
        "auto may take 9.00 times as long: 900 µs against 100 µs on naive. The difference is not significant: "
        "too few samples."
    )
    said = " / ".join(found.conclusions)
    for text in ("is as fast", "x slower than", "is fastest", "is slower"):
        assert text not in said
    assert "no significant difference between auto, math and naive (too few samples)" in said
    assert (
        "the median of auto is 9.00x the median of naive, but the difference is not significant: too few"
        in said
    )
    (loss,), (winner,) = found.losses, found.winners
    assert (loss.real, loss.open, loss.verdict) == (False, True, "unknown")
    assert (winner.ties, winner.open) == ((), ("auto", "math"))
    table = RENDERERS["md"](bench_document(found))
    assert "no significant difference: too few samples" in table


def test_overlapping_samples_are_the_reason_of_an_open_comparison(tmp_path: Path) -> None:
    cells = [
        cell("1,1,64,64,fp16", "auto", {"event": [100_000, 110_000, 120_000, 90_000, 140_000]}),
        cell("1,1,64,64,fp16", "math", {"event": [100_000, 105_000, 130_000, 95_000, 90_000]}),
    ]
    found = answer(tmp_path, cells)
    assert [(each.verdict, each.why_open) for each in found.losses] == [
        ("unknown", "the samples overlap")
    ]
    assert bench_answer(found)[0] == (
        "auto may take 1.10 times as long: 110 µs against 100 µs on math. The difference is not significant: the "
        "samples overlap."
    )


def test_proven_and_open_losses_are_counted_separately(tmp_path: Path) -> None:
    found = answer(tmp_path, [*regretful(), *apart()])
    said, *_ = bench_answer(found)
    assert (
        "On 2 of 5 configs, auto takes more than 1.10 times as long as the fastest backend. The worst case is "
        "b1-h1-s128-d64-fp16, where" in said
    )
    (open_one,) = [loss for loss in found.losses if loss.open]
    assert open_one.remark == "no significant difference: too few samples"


def test_bench_prints_how_it_was_measured(tmp_path: Path) -> None:
    found = answer(tmp_path, timed("1,1,64,64,fp16", math=50_000))
    text = RENDERERS["md"](bench_document(found, full=True))
    line = next(line for line in text.splitlines() if line.startswith("- **measured**"))
    assert found.created and found.created in line
    assert f"{len(steady(50_000))} samples per figure, warm-up calls 3, seed 0" in line


def test_within_the_threshold_auto_is_as_fast(tmp_path: Path) -> None:
    found = answer(tmp_path, timed("1,1,64,64,fp16", auto=50_000, math=50_100))
    assert bench_answer(found)[0] == (
        "auto has the lowest median, 50.0 µs, but there is no significant difference between auto and math."
    )
    assert found.conclusions == (
        "b1-h1-s64-d64-fp16: no significant difference between auto and math (within 3 %)",
    )
    assert "as fast, within 3 %" in RENDERERS["md"](bench_document(found))


def test_a_backend_is_the_fastest_only_if_the_difference_is_significant(tmp_path: Path) -> None:
    """Bug: the lowest median decided, although a verdict said that the difference is noise."""
    wide = [100_000, 104_000, 130_000, 95_000, 90_000]
    cells = [
        cell("1,1,64,64,fp16", "flash", {"event": [100_000, 110_000, 120_000, 90_000, 140_000]}),
        cell("1,1,64,64,fp16", "cudnn", {"event": wide}),
        *timed("1,1,128,64,fp16", cudnn=50_000, flash=70_000),
    ]
    found = answer(tmp_path, cells)
    assert bench_answer(found)[0] == (
        "cudnn is the fastest on 1 of 2 configs. There is no significant difference between cudnn and flash "
        "on 1 of 2 configs."
    )
    assert found.conclusions == (
        "b1-h1-s64-d64-fp16: no significant difference between cudnn and flash (the samples overlap)",
    )


def test_what_auto_ran_is_tied_with_auto(tmp_path: Path) -> None:
    """Bug: cudnn was named as the fastest, and all-disabled as tied, although auto ran cudnn too."""
    took = {"auto": 52_000, "cudnn": 50_000, "all-disabled": 49_000}
    cells = [
        *(
            cell("1,1,64,64,fp16", name, {"event": steady(ns)}, choice="cudnn")
            for name, ns in took.items()
        ),
        *timed("1,1,64,64,fp16", flash=70_000),
    ]
    found = answer(tmp_path, cells)
    (winner,) = found.winners
    assert (winner.backend, winner.same, winner.ties) == ("cudnn", ("auto",), ("auto",))
    assert winner.rivals == () and winner.of_auto
    assert bench_answer(found)[0] == (
        "auto already runs the fastest available backend: cudnn takes 50.0 µs; flash takes 1.40 times as long."
    )
    ratios = {row.backend: row.regret for row in found.figures()}
    assert ratios["all-disabled"] is None and ratios["auto"] == pytest.approx(0.04)


def test_the_lowest_median_is_that_of_its_row(tmp_path: Path) -> None:
    """Bugs: auto had 111 µs and ran flash, and the answer said that flash had 111 µs instead of 112.
    Later, ratios were relative to the cell of auto, so `diff` had other ratios of the same backends."""
    cells = [
        *(
            cell("1,1,64,64,fp16", name, {"event": steady(ns)}, choice="flash")
            for name, ns in (("auto", 111_000), ("flash", 112_000))
        ),
        *timed("1,1,64,64,fp16", efficient=113_000),
    ]
    found = answer(tmp_path, cells)
    assert bench_answer(found)[0] == (
        "flash has the lowest median, 112 µs, but there is no significant difference between "
        "efficient and flash."
    )
    ratios = {row.backend: row.regret for row in found.figures()}
    assert ratios["efficient"] == pytest.approx(113 / 112 - 1)
    # Bug: auto had 0.991x of the fastest backend, which it ran.
    assert (ratios["flash"], ratios["auto"]) == (0, 0)


def test_a_time_that_cannot_be_used_is_not_comparable(tmp_path: Path) -> None:
    """Bug: there was `no significant difference` to a backend whose time was `busy`."""
    cells = [
        *timed("1,2,128,64,fp16", auto=100_000, flash=100_500),
        cell("1,2,128,64,fp16", "math", {"event": [ns * 20 for ns in BUSY]}),
    ]
    found = answer(tmp_path, cells)
    (winner,) = found.winners
    assert (winner.open, winner.rivals, winner.busy) == ((), ("flash",), ("math",))
    both = "no significant difference between auto and flash"
    assert bench_answer(found)[0] == (
        f"auto has the lowest median, 100 µs, but there is {both}; math is not comparable."
    )
    assert found.conclusions == (
        f"b1-h2-s128-d64-fp16: {both} (within 3 %); math is not comparable",
    )


def test_of_two_cells_with_one_config_and_backend_the_first_counts(tmp_path: Path) -> None:
    cells = [*timed(STUDY, auto=80_000), *timed(STUDY, auto=40_000, math=160_000)]
    found = answer(tmp_path, cells)
    assert [(row.backend, row.median_ns) for row in found.rows] == [
        ("auto", 80_000), ("math", 160_000),
    ]  # fmt: skip
    assert [len(found.cells), found.winners[0].median_ns] == [2, 80_000]
    assert not any("apart from auto" in text for text in found.conclusions)
    told = json.loads(RENDERERS["json"](bench_document(found, raw=True)))
    assert told["rows"][0]["samples_ns"] == steady(80_000)


def test_configs_and_backends_of_a_stored_run_are_selected(tmp_path: Path) -> None:
    asked = parse_config("1,1,64,64")
    found = answer(tmp_path, regretful(), configs=[asked], backends=["flash"])
    assert [(row.config, row.backend) for row in found.rows] == [
        ("b1-h1-s64-d64-fp16", "flash"),
    ]  # fmt: skip
    with open_store(tmp_path / "store.db") as store:
        both = evaluate_bench(store, configs=[asked], baseline=parse_config("1,1,512,64"))
        assert {row.config for row in both.rows} == {"b1-h1-s64-d64-fp16", "b1-h1-s512-d64-fp16"}
        with pytest.raises(
            NotFoundError, match="no cell for config b5-h5-s5-d5; it has b1-h1-s512"
        ):
            evaluate_bench(store, configs=[asked, parse_config("5,5,5,5")])
        with pytest.raises(NotFoundError, match="no cell for backend fa3; it has auto, flash"):
            evaluate_bench(store, backends=["auto", "fa3"])
        with pytest.raises(NotFoundError, match="no cell with these configs and backends"):
            evaluate_bench(store, configs=[asked], backends=["math"])


def test_all_selects_the_backends_and_dtypes_of_the_run(tmp_path: Path) -> None:
    found = answer(tmp_path, [*regretful(), cell("1,1,8,64,bf16", "mine.py", {"event": [9] * 9})])
    with open_store(tmp_path / "store.db") as store:
        named = stored_backends(store, found.run, ["all", "mine.py"])
        assert named == ["auto", "flash", "cudnn", "math", "mine.py"]
        assert stored_backends(store, found.run, []) is None
        assert stored_configs(store, found.run, []) is None
        held = stored_configs(store, found.run, [], ["bf16"])
        assert held == [parse_config("1,1,8,64,bf16")]
        with pytest.raises(NotFoundError, match="no config in fp32; it has bf16, fp16"):
            stored_configs(store, found.run, [], ["fp32"])


@pytest.mark.parametrize("precision", [None, 0.02])
def test_a_run_is_judged_by_the_precision_it_was_measured_with(
    tmp_path: Path, precision: float | None
) -> None:
    wide = [80_000 + 800 * step for step in range(-10, 11)]
    cells = [cell(STUDY, "auto", {"event": wide, "graph": wide})]
    found = answer(tmp_path, cells)
    assert (found.precision, found.ranking) == (0.01, "graph")  # no plan
    folder = tmp_path / found.run
    write_run(folder, replace(read_run(folder), bench=BenchPlan(("event", "graph"), 0.4)))
    ingest_path(tmp_path / "store.db", folder)
    folder.rename(tmp_path / "elsewhere")
    with open_store(tmp_path / "store.db") as store:
        again = evaluate_bench(store, precision=precision)
    assert (again.precision, again.ranking) == (precision or 0.4, "event")
    assert bool(again.rows[0].doubts) is (precision is not None)


def test_figures_are_counted_in_one_way(tmp_path: Path) -> None:
    wide = [80_000 + 800 * step for step in range(-10, 11)]
    cells = [
        cell(STUDY, "auto", {"event": wide}),
        *timed(STUDY, math=90_000),
        cell(STUDY, "flash", {}, status="refused", message="no"),
    ]
    found = answer(tmp_path, cells)
    assert "[1] b32-h8-s128-d64-fp16 auto  The interval is wider than" in RENDERERS["table"](
        bench_document(found), width=160
    )


def test_a_config_with_its_default_dtype_is_no_duplicate() -> None:
    asked, baseline = [parse_config("1,2,64,16")], parse_config("1,2,64,16,fp32")
    assert bench_configs(asked, (), baseline, "cpu") == [baseline]
    assert bench_configs(asked, (), baseline, "cuda") == [baseline, *asked]
    assert bench_configs([baseline], (), asked[0], "cpu") == asked
    assert bench_configs(asked, ("fp16", "fp32"), baseline, "cpu") == [
        baseline, replace(baseline, dtype="fp16"),
    ]  # fmt: skip


def test_replaced_backends_are_listed_with_their_configs(tmp_path: Path) -> None:
    times = {"naive": 11_400, "naive-compiled": 107_000}
    configs = ("1,1,16,8192,fp16", "1,1,32,64,fp16")
    found = answer(tmp_path, [each for config in configs for each in timed(config, **times)])
    assert "replaced" not in RENDERERS["md"](bench_document(found))
    op = "aten::_scaled_dot_product_efficient_attention"
    # the op of naive is no replacement
    seen = tuple(replace(each, sdpa_op=op) for each in found.cells[:2])
    document = bench_document(replace(found, cells=(*seen, *found.cells[2:])))
    assert (
        "naive-compiled at b1-h1-s16-d8192-fp16**: torch.compile replaced the attention with "
        "scaled_dot_product_attention, which ran efficient"
    ) in RENDERERS["md"](document)
    assert document.extra["replaced"] == [
        {"backend": "naive-compiled", "config": "b1-h1-s16-d8192-fp16", "took": "efficient"}
    ]


def test_messages_of_compilers_are_shown(tmp_path: Path) -> None:
    log = (
        'k.cu does not compile for sm_90a:\nk.cu(3): error: identifier "x" is undefined\n\n1 error'
    )
    cells = [
        cell(STUDY, "naive", {"event": steady(100_000)}),
        cell(STUDY, "k.py", {}, status="error", message=log),
        cell(STUDY, "wild.py", {}, status="crashed", message="CUDA error: illegal\nSearch for it"),
    ]
    text = RENDERERS["md"](bench_document(answer(tmp_path, cells)))
    assert 'k.cu(3): error: identifier "x" is undefined 1 error' in text
    assert "CUDA error: illegal" in text
    assert "Search for it" not in text


def test_figures_without_the_baseline_that_was_named_are_counted(tmp_path: Path) -> None:
    cells = [
        *timed("1,1,64,64,fp16", flash=9_000, math=9_000),
        *timed("1,1,128,64,fp16", flash=9_000),
        cell("1,1,128,64,fp16", "math", {}, status="refused"),
    ]
    found = answer(tmp_path, cells, baseline="math")
    assert (
        "no speed-up for 1 of 3 figures, because the baseline math has no time for their config"
        in found.conclusions
    )
    with open_store(tmp_path / "store.db") as store:
        assert "no speed-up" not in " ".join(evaluate_bench(store).conclusions)


def test_a_backend_measured_twice_is_not_compared_with_itself(tmp_path: Path) -> None:
    found = answer(tmp_path, regretful()[-2:])  # auto chose flash, and is 20 % slower than it
    assert found.losses[0].regret > 0.19
    # Bug: flash was called the fastest, although no other backend ran.
    assert bench_answer(found)[0] == "auto runs flash, which takes 50.0 µs on b1-h1-s32-d64-fp16."
    assert tuple(noise_of_auto(found.losses)) == (
        "auto ran the same kernels as flash, so the difference between their times (1.20x) "
        "is noise between measurements.",
    )


BUSY = [10_000, 11_000, 400_000] * 2


def test_nothing_is_concluded_from_figures_of_a_busy_machine(tmp_path: Path) -> None:
    cells = [
        cell("1,2,128,64,fp16", "auto", {"event": steady(6_000)}),
        cell("1,2,128,64,fp16", "flash", {"event": BUSY}),
        cell("1,2,128,64,fp16", "math", {"event": steady(9_000)}),
        cell("1,2,256,64,fp16", "auto", {"event": steady(6_000)}),
        cell("1,2,256,64,fp16", "math", {"event": BUSY}),
    ]
    found = answer(tmp_path, cells)
    assert [(row.config, row.backend) for row in found.figures() if row.busy] == [
        ("b1-h2-s128-d64-fp16", "flash"),
        ("b1-h2-s256-d64-fp16", "math"),
    ]
    text = RENDERERS["table"](bench_document(found, charts=False), width=160)
    # The second config has only one usable time, and `auto` is the faster one on the first.
    assert re.findall(r"[\d.]+x\b", text) == ["1.00x", "1.50x"]
    said = " ".join((*bench_answer(found), *found.conclusions))
    assert re.findall(r"[^;:.]*flash[^;:.]*", said) == [" flash is not comparable"]
    assert "2 of 5 times cannot be used" in said
    assert [loss.config for loss in found.sound_losses()] == ["b1-h2-s128-d64-fp16"]
    assert len(found.losses) == 2
    assert all(row.speedup for row in found.figures())  # JSON and CSV keep every figure
    assert [winner.config for winner in found.sound_winners()] == ["b1-h2-s128-d64-fp16"]
    (tmp_path / "every").mkdir()
    every = answer(tmp_path / "every", [cell("1,2,128,64,fp16", "math", {"event": BUSY})])
    assert "fastest" not in " ".join(bench_answer(every))


def test_a_config_without_a_usable_time_of_another_backend_has_no_fastest(tmp_path: Path) -> None:
    """Bug: flash was the fastest on all 3 configs, although math is not comparable on the third."""
    cells = [
        each
        for length, math in (
            (128, steady(90_000)),
            (256, steady(180_000)),
            (512, [ns * 20 for ns in BUSY]),
        )
        for each in (
            cell(f"1,1,{length},64,fp16", "auto", {"event": steady(66_000)}, choice="flash"),
            cell(f"1,1,{length},64,fp16", "flash", {"event": steady(66_000)}, choice="flash"),
            cell(f"1,1,{length},64,fp16", "math", {"event": math}, choice="math"),
        )
    ]
    found = answer(tmp_path, cells)
    assert bench_answer(found)[0] == (
        "auto already runs flash, the fastest on 2 of 3 configs. On 1 config, some backends are not "
        "comparable."
    )
    document = bench_document(found)
    table = next(each for each in document.blocks if isinstance(each, Table))
    keys = [column.key for column in table.columns]
    ratios = [row[keys.index("regret")] for row in table.rows]
    assert ratios[:2] == ["= flash", 0] and ratios[-3:] == [None] * 3
    # Bug: the charts had the time of math on the third config.
    drawn = [each for each in document.blocks if isinstance(each, Chart) and each.kind == "lines"]
    assert drawn and all(
        {row["label"] for row in chart.rows if row["backend"] == "math"}
        == {"b1-h1-s128-d64-fp16", "b1-h1-s256-d64-fp16"}
        for chart in drawn
    )


@pytest.mark.parametrize("baseline", [None, "auto", "math"])
def test_a_ratio_is_left_out_only_if_one_of_its_own_times_is_unusable(
    tmp_path: Path, baseline: str | None
) -> None:
    """Bug: the ratio to the fastest backend was missing if the baseline had no usable time."""
    cells = [
        cell("1,2,128,64,fp16", "auto", {"event": steady(100_000)}, choice="cudnn"),
        cell("1,2,128,64,fp16", "flash", {"event": steady(120_000)}, choice="flash"),
        cell("1,2,128,64,fp16", "math", {"event": [ns * 20 for ns in BUSY]}),
    ]
    found = answer(tmp_path, cells, baseline=baseline)
    table = next(each for each in bench_document(found).blocks if isinstance(each, Table))
    keys = [column.key for column in table.columns]
    ratios = [row[keys.index("regret")] for row in table.rows]
    assert ratios == [0, pytest.approx(0.2, abs=0.01), None]


def test_auto_agrees_with_the_table_if_its_backend_was_timed_twice(tmp_path: Path) -> None:
    cells = [
        each
        for config in ("1,1,128,64,fp16", "1,1,256,64,fp16")
        for each in (
            cell(config, "auto", {"event": steady(78_000)}, choice="flash"),
            cell(config, "flash", {"event": steady(66_000)}, choice="flash"),
            cell(config, "math", {"event": steady(90_000)}, choice="math"),
        )
    ]
    found = answer(tmp_path, cells)
    assert bench_answer(found)[0] == "auto already runs flash, the fastest on both configs."
    assert tuple(noise_of_auto(found.losses)) == (
        "On both configs, auto ran the same kernels as flash, so the differences between their "
        "times (up to 1.18x) are noise between measurements.",
    )
