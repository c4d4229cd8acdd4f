"""Verification on a GPU: PyTorch's backends are correct, mistakes are found, and memory that a
kernel does not write is detected with the caching allocator too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from profharness.attention.cases import VerificationRow, failures
from profharness.attention.config import expand_configs
from profharness.jobs.into_store import default_backends, verify_into_store
from profharness.run import CaptureOptions, Protocol

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(default_backends() == default_backends("cpu"), reason="no NVIDIA GPU"),
]

WRONG = Path(__file__).resolve().parents[1] / "verify" / "wrong.py"


def rows_of(folder: Path, config: str, backends: list[str], cases: str) -> list[VerificationRow]:
    options = CaptureOptions(
        out=folder / "runs",
        protocol=Protocol(0, 0, 0, timeout_s=120.0),
        cases=(cases,),
        grad=True,
    )
    configs = expand_configs(config)
    return verify_into_store(configs, backends, folder / "store.db", options)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("causal", ["", ",causal"])
def test_pytorchs_backends_are_right_in_every_case(tmp_path: Path, dtype: str, causal: str) -> None:
    backends = [*default_backends(), "naive"]
    rows = rows_of(tmp_path, f"2,8,256,64,{dtype}{causal}", backends, "standard")
    assert not failures(rows), "\n".join(
        f"{row.backend} {row.case} {row.what}: {row.message}" for row in failures(rows)
    )
    assert {row.backend for row in rows if row.passed} >= {"auto", "math", "naive"}


def test_mistakes_are_found_on_the_gpu(tmp_path: Path) -> None:
    """The messages are tested on the CPU, where memory is allocated the same way each time."""
    names = ("last_row_unwritten", "kv_mapping", "tail_of_keys", "stale", "wrong_gradient")
    backends = [f"{WRONG}:{name}" for name in names]
    rows = rows_of(tmp_path, "2,4,100,32,bf16,causal,kv_heads=2", backends, "none")
    caught = {name for name in names for row in failures(rows) if row.backend.endswith(name)}
    assert caught == set(names)
