"""The rules still predict what ran in 500 configs captured on an H200."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from profharness.attention.config import parse_config
from profharness.attention.dispatch.machine import from_config, machine_for
from profharness.attention.dispatch.predict import predict
from profharness.attention.dispatch.rules import hazards
from profharness.measurements.agreement import backend_of_op

DATA = Path(__file__).resolve().parents[1] / "data" / "witnesses_h200.jsonl.gz"
H200 = machine_for("H200", "2.11.0", "91900")


def records() -> list[dict[str, Any]]:
    with gzip.open(DATA, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def test_the_predicted_backend_was_chosen_and_ran() -> None:
    found = records()
    assert len(found) == 500
    for record in found:
        predicted = predict(from_config(parse_config(record["config"])), H200).choice
        assert predicted == record["predicted"] == record["choice"], record
        if record["status"] == "ok":
            assert backend_of_op(record["op"]) == predicted, record
            assert not record["kernels"] or record["kernels"] == [predicted], record


def test_the_two_calls_that_raised_are_known_hazards() -> None:
    raised = [record for record in records() if record["status"] != "ok"]
    assert len(raised) == 2
    for record in raised:
        assert record["predicted"] == "cudnn"
        assert "cuDNN Frontend error" in record["message"]
        assert hazards("cudnn", from_config(parse_config(record["config"])), H200)
    quiet = [r for r in records() if r["status"] == "ok" and r["choice"] == "cudnn"]
    warned = [r for r in quiet if hazards("cudnn", from_config(parse_config(r["config"])), H200)]
    assert len(warned) < 0.1 * len(quiet)
