"""What a worker starts while torch is loading, on a machine that may have no driver."""

from __future__ import annotations

import ctypes
import os

import pytest

from profharness.recording.worker import cuda_warmup


def test_without_a_driver_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """No watch, no context and no error. torch finds out itself."""

    def no_library(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    monkeypatch.setattr(cuda_warmup, "open_watch", lambda: None)
    assert cuda_warmup.open_context() is False
    assert cuda_warmup.CudaWarmup().watch() is None
    # the recorded environment is the user's
    assert cuda_warmup.MODULE_LOADING not in os.environ


def test_a_torch_without_cuda_gets_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[bool] = []
    monkeypatch.setattr(cuda_warmup, "open_watch", lambda: None)
    monkeypatch.setattr(cuda_warmup, "open_context", lambda: opened.append(True))
    for has in (False, True):
        monkeypatch.setattr(cuda_warmup, "torch_has_cuda", lambda has=has: has)
        cuda_warmup.CudaWarmup().watch()
    assert opened == [True]
