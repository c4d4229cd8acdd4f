"""Why a backend is or is not taken: PyTorch's dispatch rules as data, and its own reasons as codes."""

from __future__ import annotations

from profharness.dispatch.checks import hazards
from profharness.dispatch.machine import (
    AttentionParams,
    Machine,
    Mask,
    from_config,
    machine_for,
    parse_cudnn,
    parse_release,
    parse_releases,
    release_text,
)
from profharness.dispatch.predict import (
    Prediction,
    Verdict,
    judge,
    predict,
    predict_cell,
    priority_order,
)

__all__ = [
    "AttentionParams",
    "Machine",
    "Mask",
    "Prediction",
    "Verdict",
    "from_config",
    "hazards",
    "judge",
    "machine_for",
    "parse_cudnn",
    "parse_release",
    "parse_releases",
    "predict",
    "predict_cell",
    "priority_order",
    "release_text",
]
