"""What a worker starts beside the loading of torch, on a machine that may have no driver."""

from __future__ import annotations

import ctypes
import os

import pytest

from profharness.worker import early


def test_without_a_driver_nothing_comes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """No watch, no context, no error; torch finds out itself."""

    def no_library(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    monkeypatch.setattr(early, "open_watch", lambda: None)
    assert early.open_context() is False
    assert early.EarlyStart().watch() is None
    # what is recorded of the environment is the user's
    assert early.MODULE_LOADING not in os.environ


def test_a_torch_without_cuda_gets_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[bool] = []
    monkeypatch.setattr(early, "open_watch", lambda: None)
    monkeypatch.setattr(early, "open_context", lambda: opened.append(True))
    for has in (False, True):
        monkeypatch.setattr(early, "torch_has_cuda", lambda has=has: has)
        early.EarlyStart().watch()
    assert opened == [True]
