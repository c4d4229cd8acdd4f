"""Backends other than SDPA's on a GPU: available ones run and agree with fp64, others report why
they are unavailable. Templates compile.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from profharness.attention.backends import BACKENDS, LIBRARY_BACKENDS, TORCH_ROWS, find_backend
from profharness.attention.config import expand_configs
from profharness.jobs.into_store import default_backends
from profharness.recording.capture import capture
from profharness.run import CaptureOptions, Protocol, Run, read_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(default_backends() == default_backends("cpu"), reason="no NVIDIA GPU"),
]

OTHERS = [backend.name for backend in (*TORCH_ROWS, *LIBRARY_BACKENDS)]
CONFIGS = (
    "1,4,256,64,fp16",
    "2,4,192,64,bf16,causal,kv_heads=2,scale=0.2,layout=bshd",
    "1,2,128,64,fp16,causal,bwd",
    "1,2,128,64,fp16,mask=bool",
    "1,2,128,64,fp16,dropout=0.1",
    "1,2,128,64,fp32",
    "1,2,64,64,fp16,causal,seq_kv=128",
)
CHECK = """
import sys, torch
from profharness.attention.backends import BACKENDS, find_backend
for name in sys.argv[1:]:
    backend = BACKENDS[name]
    if backend.absent(): continue
    attention = backend.load()
    for heads, kv, causal, scale, batch in ((4, 4, False, None, 1), (4, 2, True, 0.2, 1), (4, 4, True, None, 3)):
        if batch > 1 and name == "flashinfer": continue
        q = torch.randn(batch, heads, 192, 64, device="cuda", dtype=torch.float16)
        k, v = (torch.randn(batch, kv, 192, 64, device="cuda", dtype=torch.float16) for _ in range(2))
        arguments = dict(is_causal=causal, scale=scale, enable_gqa=heads != kv)
        with backend.context():
            out = attention(q, k, v, **arguments)
        naive = find_backend("naive").load()
        want = naive(q.double(), k.double(), v.double(), **arguments)
        worst = (out.double() - want).abs().max().item()
        assert worst < (0.1 if name == "sage" else 0.005), (name, causal, worst)
    print(name)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    protocol = Protocol(iterations=2, warmup=1, samples=5, timeout_s=300.0, device="cuda")
    options = CaptureOptions(("torch",), tmp_path_factory.mktemp("runs"), protocol)
    configs = [config for text in CONFIGS for config in expand_configs(text)]
    return read_run(capture(configs, [*OTHERS, "naive"], options))


def test_every_cell_runs_or_is_refused_with_a_reason(run: Run) -> None:
    told = {(c.backend, c.config.label): (c.status, c.message) for c in run.cells}
    assert {status for status, _ in told.values()} <= {"ok", "refused"}, told
    for cell in run.cells:
        if cell.status == "refused":
            assert {refusal.code for refusal in cell.refusals} <= {"absent", "unsupported"} | {
                refusal.code for refusal in cell.refusals if refusal.source == "live"
            }
    ok = {backend for (backend, _), (status, _) in told.items() if status == "ok"}
    assert {"flex", "naive"} <= ok, told
    assert all(cell.compile_ns for cell in run.cells if cell.status == "ok")


def test_available_backends_agree_with_fp64() -> None:
    argv = [sys.executable, "-c", CHECK, *OTHERS]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "flex" in done.stdout.split()
    assert set(done.stdout.split()) <= set(BACKENDS)


@pytest.mark.parametrize("kind", ["triton", "cuda"])
def test_templates_run_on_the_gpu(kind: str, tmp_path: Path) -> None:
    from profharness.attention.backends.templates import kernel_text

    (tmp_path / "made.py").write_text(kernel_text("made", kind))
    protocol = Protocol(iterations=2, warmup=1, samples=0, timeout_s=300.0, device="cuda")
    options = CaptureOptions(("torch",), tmp_path / "runs", protocol)
    configs = expand_configs("2,4,130,48,{fp16,fp32},causal,kv_heads=2")
    record = read_run(capture(configs, [f"{tmp_path}/made.py"], options))
    assert [(cell.status, cell.message) for cell in record.cells] == [("ok", None)] * 2
    import torch

    q = torch.randn(2, 4, 130, 48, device="cuda")
    k, v = (torch.randn(2, 2, 130, 48, device="cuda") for _ in range(2))
    out = find_backend(f"{tmp_path}/made.py").load()(q, k, v, is_causal=True, enable_gqa=True)  # type: ignore[misc]
    naive = find_backend("naive").load
    assert naive is not None
    want = naive()(q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-4)
