"""The presets of `--metrics`, and warnings about metrics that were not measured."""

from __future__ import annotations

import re

import pytest

from profharness.errors import UsageError
from profharness.recording.profilers.ncu import (
    L1_BYTES,
    L1_HIT_RATE,
    PRESETS,
    SOME_GPUS,
    TENSOR_PIPE,
    WARP_STATES,
    metric_names,
    unmeasured,
    warp_state,
)


def test_presets_and_names_can_be_combined_without_duplicates() -> None:
    names = metric_names(["cache", "sm__inst_executed.sum", "memory", L1_HIT_RATE])
    assert names[0] == L1_BYTES and names[4] == "sm__inst_executed.sum"
    assert len(set(names)) == len(names)
    assert set(PRESETS["cache"]) | set(PRESETS["memory"]) < set(names)
    assert metric_names(["group:memory__dram_table", "regex:^dram__"]) == (
        "group:memory__dram_table",
        "regex:^dram__",
    )


@pytest.mark.parametrize("word", ["tensors", "l1", "Cache"])
def test_unknown_word_is_refused_with_the_presets(word: str) -> None:
    with pytest.raises(UsageError, match=f"--metrics {word}: .*tensor, memory, cache, stalls"):
        metric_names(["tensor", word])


def test_metrics_of_presets_are_complete_names_with_suffix() -> None:
    for names in PRESETS.values():
        assert len(set(names)) == len(names)
        for name in names:
            assert re.fullmatch(r"[a-z0-9]+__\w+(\.\w+)+", name), name
    assert set(map(warp_state, WARP_STATES)) < set(PRESETS["stalls"])


def test_metrics_of_some_gpus_are_not_missed_on_others() -> None:
    asked = metric_names(["tensor", "stalls"])
    here = [name for name in asked if name not in SOME_GPUS]
    assert unmeasured(asked, here) == []
    assert unmeasured(asked, here[1:]) == [TENSOR_PIPE]
    assert unmeasured(["dram__bytes", "dram__foo"], ["dram__bytes.sum"]) == ["dram__foo"]
