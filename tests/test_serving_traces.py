"""Traces of a small engine with FlashInfer, recorded on an H100 by scripts/record_serving.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from profharness.commands.report import report_document
from profharness.program.layer_map import LayerMap, find_layers
from profharness.render.renderers import RENDERERS
from profharness.scrub.copies import audit
from profharness.store import ingest_path, open_store

SERVING = Path(__file__).resolve().parents[1] / "traces" / "serving"
LAYERS = 6
PREFILL_US, DECODE_US = 50.1, 34.4  # median of a layer's attention, measured with CUDA events


def layers_of(source: Path, folder: Path) -> LayerMap:
    (result,) = ingest_path(folder / "store.db", source)
    assert result.warnings == ()
    with open_store(folder / "store.db") as store:
        return find_layers(store, result.run)


def test_eager_steps_have_phases_and_every_layer_its_attention(tmp_path: Path) -> None:
    layers = layers_of(SERVING / "eager.json.gz", tmp_path)
    prefill, decode = layers.phases
    assert (prefill.phase, prefill.steps, prefill.requests, prefill.new_tokens) == (
        *("prefill", 1, 4),
        100 + 300 + 450 + 600,
    )
    assert (decode.phase, decode.steps, decode.requests, decode.new_tokens) == ("decode", 5, 4, 4)
    (row,) = layers.rows
    assert (row.ran, row.calls, len(row.names)) == ("flashinfer", LAYERS, LAYERS)
    assert row.module == "Model_0.DecoderLayer_{0-5}.RadixAttention_{0-5}"
    # the events include the gaps between the kernels of a call, and on a CPU-bound step its launches
    assert 0.8 * PREFILL_US < prefill.attention_ns / LAYERS / 1e3 < PREFILL_US
    assert decode.attention_ns / LAYERS / 1e3 < DECODE_US
    assert prefill.tokens_per_s == pytest.approx(1450 / prefill.step_ns * 1e9)


def test_replays_have_the_modules_of_the_capture_beside_them(tmp_path: Path) -> None:
    layers = layers_of(SERVING / "graph", tmp_path)
    (row,) = layers.rows
    assert (row.mode, row.ran, row.calls, len(row.names)) == ("graph", "flashinfer", LAYERS, LAYERS)
    (decode,) = layers.phases
    assert (decode.phase, decode.steps, decode.new_tokens) == ("decode", 5, 4)
    assert not any("record the capture" in text for text in layers.caveats)
    with_ops = [gap.op_path for gap in layers.gaps if gap.op_path]
    assert any("aten::linear" in path for path in with_ops)


def test_a_report_has_the_phases(tmp_path: Path) -> None:
    (result,) = ingest_path(tmp_path / "store.db", SERVING / "eager.json.gz")
    with open_store(tmp_path / "store.db") as store:
        page = RENDERERS["md"](report_document(store, [result.run]))
    section = page.split("## Phases of the engine")[1].split("## ")[0]
    rows = [line.split(" | ")[:2] for line in section.splitlines() if line.startswith("| ")]
    assert rows == [["| phase", "steps"], ["| :---", "---:"], ["| prefill", "1"], ["| decode", "5"]]


def test_a_scrubbed_trace_keeps_the_annotations_of_steps() -> None:
    assert not list(audit(SERVING))
