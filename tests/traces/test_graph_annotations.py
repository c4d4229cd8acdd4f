"""The names that PyTorch's `mark_kernels` gives to the nodes of CUDA graphs."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from profharness.errors import ProfharnessError
from profharness.program.layer_map import LayerMap, find_layers
from profharness.store import ingest_path, open_store
from profharness.traces.graphs import read_annotations

REPLAYS = Path(__file__).parents[2] / "traces" / "serving" / "graph" / "decode.json.gz"
LAYERS = 6
GRAPH = 7 << 32  # the id of the graph, which is a part of the ids of its nodes


def replays() -> dict[str, Any]:
    """Return the trace with the ids of graph nodes, which Kineto writes from PyTorch 2.12 on."""
    trace: dict[str, Any] = json.loads(gzip.decompress(REPLAYS.read_bytes()))
    numbers: Counter[int] = Counter()
    events = [event for event in trace["traceEvents"] if event.get("cat", "").startswith("gpu_")]
    events += [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    for event in sorted(events, key=lambda event: float(event["ts"])):
        if event["args"].get("correlation"):
            numbers[event["args"]["correlation"]] += 1
            event["args"]["graph node id"] = GRAPH + numbers[event["args"]["correlation"]]
    return trace


def nodes() -> dict[int, str]:
    """Return the kernel of each graph node in the trace, in order."""
    found = [
        event for event in replays()["traceEvents"] if "graph node id" in event.get("args", {})
    ]
    return {event["args"]["graph node id"]: event["name"] for event in found}


def names() -> dict[int, str]:
    """Return annotations as `mark_kernels` would record them around the parts of each layer."""
    made, layer = {}, 0
    for node, kernel in nodes().items():
        is_attention = "flashinfer" in kernel
        made[node] = f"layers.{layer}.{'attention' if is_attention else 'linear'}"
        layer += is_attention and "Merge" in kernel
    return made


def ingested(folder: Path, annotations: Any) -> tuple[LayerMap, tuple[str, ...]]:
    trace = folder / "replays.json"
    trace.write_text(json.dumps(replays()))
    (folder / "annotations.json").write_text(json.dumps(annotations))
    (result,) = ingest_path(folder / "store.db", trace)
    with open_store(folder / "store.db") as store:
        return find_layers(store, result.run), result.warnings


def test_annotations_name_the_modules_of_replayed_attention(tmp_path: Path) -> None:
    found = {str(node): [{"name": name, "dtype": "bf16"}] for node, name in names().items()}
    layers, warnings = ingested(tmp_path, found)
    assert warnings == ()
    modules = [name for row in layers.rows for name in row.names]
    assert len(modules) == LAYERS
    assert sorted(set(re.findall(r"layers\.\d", " ".join(modules)))) == [
        f"layers.{layer}" for layer in range(LAYERS)
    ]
    paths = {path for gap in layers.gaps for path in (gap.op_path,) if path}
    assert any(path.startswith("layers.") for path in paths)


def test_nodes_that_no_replay_has_are_counted(tmp_path: Path) -> None:
    _, warnings = ingested(tmp_path, {"17": ["other"]} | {str(node): ["one"] for node in nodes()})
    total = len(nodes()) + 1
    (warning,) = warnings
    assert f": 1 of {total} annotations describe nodes that no replay" in warning


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"4294967301": [{"name": "a"}]}', {4294967301: "a"}),
        (
            '{"5": [{"str": "inner"}, {"str": "outer"}], "6": ["x"], "7": [{}]}',
            {5: "inner", 6: "x"},
        ),
        ('{"5": {"module_fqn": "layers.0.attn", "name": "fwd"}}', {5: "layers.0.attn"}),
        ('{"5": [{"name": "a\\nb"}]}', {5: "a b"}),
        ("{}", {}),
        ('{"traceEvents": []}', None),
        ('{"5": [', None),
        ('{"5e": []}', None),
        ("[]", None),
        ("", None),
    ],
)
def test_forms_of_annotations(tmp_path: Path, text: str, found: dict[int, str] | None) -> None:
    file = tmp_path / "annotations.json"
    file.write_text(text)
    assert read_annotations(file) == found


def test_a_file_that_is_neither_a_capture_nor_annotations_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"5": [')
    with pytest.raises(ProfharnessError, match=r"other\.json"):
        ingest_path(tmp_path / "store.db", REPLAYS, companions=[other])
