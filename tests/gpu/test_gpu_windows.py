"""Sliding windows on a GPU: SDPA's backends with the mask, flex with a block mask, and naive."""

from __future__ import annotations

from pathlib import Path

import pytest

from profharness.attention.cases import failures
from profharness.attention.config import expand_configs, parse_config
from profharness.commands.explain import explain_live
from profharness.jobs.into_store import default_backends, verify_into_store
from profharness.run import CaptureOptions, Protocol

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(default_backends() == default_backends("cpu"), reason="no NVIDIA GPU"),
]


@pytest.mark.parametrize("text", ["causal,window=100", "window=33"])
def test_every_backend_is_right_with_a_window(tmp_path: Path, text: str) -> None:
    protocol = Protocol(0, 0, 0, timeout_s=300.0)
    cases = ("window_1", "fewer_queries", "more_queries")
    options = CaptureOptions(out=tmp_path / "runs", protocol=protocol, cases=cases, grad=True)
    backends = ["flash", "efficient", "cudnn", "math", "auto", "flex", "naive", "single_query"]
    configs = expand_configs(f"2,4,256,64,bf16,kv_heads=2,{text}")
    rows = verify_into_store(configs, backends, tmp_path / "store.db", options)
    wrong = [
        f"{row.backend} {row.case} {row.what}: {row.message}"
        for row in failures(rows)
        # cuDNN 9.19 does not return 0 for queries whose window contains no key
        if row.case != "more_queries" or row.backend not in ("cudnn", "auto")
    ]
    assert not wrong, "\n".join(wrong)
    passed = {row.backend for row in rows if row.passed}
    assert passed >= {"math", "auto", "flex", "naive"}
    reasons = {row.backend: row.message or "" for row in rows if row.status == "refused"}
    assert "attn_mask" in reasons["flash"]
    assert "does not support a sliding window" in reasons["single_query"]


def test_pytorch_chooses_as_for_the_mask() -> None:
    texts = ("causal,window=100", "window=33", "mask=bool_2d")
    configs = [parse_config(f"2,4,256,64,bf16,{text}") for text in texts]
    answers = explain_live(configs, device="cuda")
    assert len({answer.choice for answer in answers}) == 1
    assert all(answer.agree is not False for answer in answers)
