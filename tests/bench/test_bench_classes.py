"""Benches of the same cells on two GPU models, as one document."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from written_samples import L4, STUDY, answer, cell, steady

from profharness.commands.bench.tables import bench_document, benches_by_gpu_document
from profharness.measurements.evaluation import BenchResult
from profharness.render.renderers import render_json
from profharness.render.terminal import render_table
from profharness.rows import COLD


def on(folder: Path, gpu: str, **times: int) -> BenchResult:
    folder.mkdir()
    cells = [cell(STUDY, backend, {COLD: steady(ns)}) for backend, ns in times.items()]
    return replace(answer(folder, cells, {**L4, "gpu": gpu}), run=f"run-{gpu}")


def test_each_class_is_a_column_and_another_fastest_backend_is_told(tmp_path: Path) -> None:
    old = on(tmp_path / "a", "H100", flash=80_000, cudnn=60_000, math=900_000)
    new = on(tmp_path / "b", "H200", flash=40_000, cudnn=50_000)
    document = benches_by_gpu_document([old, new])
    text = render_table(document, width=160)
    table = text[text.index("classes  2 of them") :].splitlines()
    header, *rows = table[1:]
    for title in ("H100 µs", "H200 µs", "speed-up of H200"):
        assert title in header
    by_backend = {("flash", "cudnn", "math")[at]: row.split() for at, row in enumerate(rows[:3])}
    assert by_backend["flash"][-3:] == ["80.00", "40.00", "2.00x"]
    assert by_backend["cudnn"][-3:] == ["60.00", "50.00", "1.20x"]
    assert by_backend["math"][-3:] == ["900.00", "-", "-"]
    label = "b32-h8-s128-d64-fp16"
    assert f"the fastest for 1 of 1 configs: {label} (cudnn, there flash)" in " ".join(text.split())
    assert len(document.records) == 5
    assert [each["device"] for each in document.extra["classes"]] == ["H100", "H200"]
    assert '"classes"' in render_json(document)


def test_the_same_winner_is_no_other_choice(tmp_path: Path) -> None:
    old = on(tmp_path / "a", "H100", flash=80_000, cudnn=60_000)
    new = on(tmp_path / "b", "H200", flash=80_000, cudnn=60_000)
    text = " ".join(render_table(benches_by_gpu_document([old, new]), width=160).split())
    assert "is the fastest for 0 of 1 configs" in text


def test_one_class_is_its_answer_alone(tmp_path: Path) -> None:
    only = on(tmp_path / "a", "H100", flash=80_000)
    assert benches_by_gpu_document([only]) == bench_document(only)
