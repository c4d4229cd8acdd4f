"""Query PyTorch on a GPU: the same answers as on the H200 before, and the same reasons as the rules."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from profharness.attention.config import Config
from profharness.attention.dispatch.advice import blockers, rule_oracle
from profharness.attention.dispatch.by_rule import Explanation
from profharness.attention.dispatch.machine import machine_of, with_flags
from profharness.commands.explain import explain_live
from profharness.dtypes import CONFIG_DTYPES
from profharness.jobs.into_store import default_backends

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(default_backends() == default_backends("cpu"), reason="no NVIDIA GPU"),
]

DATA = Path(__file__).resolve().parents[1] / "data" / "dispatch_h200.jsonl.gz"


def config_of(told: dict[str, Any]) -> Config | None:
    """Return the call's config. None for calls that a config cannot express: fp64, unlike heads
    without enable_gqa, or heads that do not divide.
    """
    if told["dtype"] not in CONFIG_DTYPES:
        return None
    grouped = told["kv_heads"] != told["heads"]
    if (grouped and not told["gqa"]) or told["heads"] % told["kv_heads"]:
        return None
    return Config(
        batch=told["batch"],
        num_heads=told["heads"],
        num_kv_heads=told["kv_heads"],
        seq_len_q=told["seq_q"],
        seq_len_kv=told["seq_kv"],
        head_dim=told["head_dim"],
        head_dim_v=None if told["head_dim_v"] == told["head_dim"] else told["head_dim_v"],
        dtype=told["dtype"],
        causal=told["causal"],
        mask=told["mask"],
        dropout=told["dropout"],
        layout=told["layout"],
        bwd=told["grad"],
        deterministic=told["deterministic"],
    )


@pytest.fixture(scope="module")
def asked() -> list[tuple[Config, dict[str, Any], Explanation]]:
    with gzip.open(DATA, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    pairs = [(config, row) for row in rows if (config := config_of(row["config"])) is not None]
    answers = explain_live([config for config, _ in pairs], device="cuda")
    return [(*pair, answer) for pair, answer in zip(pairs, answers, strict=True)]


def test_pytorch_chooses_the_predicted_backend(
    asked: list[tuple[Config, dict[str, Any], Explanation]],
) -> None:
    wrong = [(a.config, a.predicted, a.choice) for _, _, a in asked if a.agree is not True]
    assert wrong == []
    assert not [answer.error for _, _, answer in asked if answer.error]


def test_choices_equal_the_recorded_ones(
    asked: list[tuple[Config, dict[str, Any], Explanation]],
) -> None:
    environment = asked[0][2].environment
    if not (str(environment["torch"]).startswith("2.11.") and environment["capability"] == "9.0"):
        pytest.skip("the record is of torch 2.11 on compute capability 9.0")
    wrong = [(c.label, row["choice"], a.choice) for c, row, a in asked if row["choice"] != a.choice]
    assert wrong == []


def test_reasons_and_texts_equal_those_of_the_rules(
    asked: list[tuple[Config, dict[str, Any], Explanation]],
) -> None:
    wrong = []
    sources: Counter[str] = Counter()
    for config, _, answer in asked:
        environment = answer.environment | {
            f"sdp_{name}": on for name, on in answer.environment["flags"].items()
        }
        rules = rule_oracle(machine_of(environment), "cuda", with_flags(environment))
        for side in answer.backends:
            expected = [reason.code for _, reason in blockers(config, side.backend, rules)]
            if [reason.code for reason in side.reasons] != expected:
                wrong.append((answer.config, side.backend, expected, side.reasons))
            sources.update(reason.source for reason in side.reasons)
    assert wrong == []
    # only masks that require a gradient are refused without a message
    assert sources["live"] > 10 * sources["inferred"]


def test_all_advice_was_verified_and_texts_came_from_pytorch(
    asked: list[tuple[Config, dict[str, Any], Explanation]],
) -> None:
    refused = [side for _, _, a in asked for side in a.backends if side.eligible is False]
    assert refused
    assert sum(bool(side.advice) for side in refused) > 0.5 * len(refused)
    verified = {way.verified for side in refused for way in side.advice if way.config}
    assert verified == {True}
    doubts = [
        doubt for _, _, a in asked for doubt in a.caveats if "PyTorch contradicts itself" in doubt
    ]
    assert doubts == []
