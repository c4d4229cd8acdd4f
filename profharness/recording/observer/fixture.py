"""The pytest fixture `attention`, which records a test's attention calls. pytest finds it by its
entry point.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from profharness.recording.observer.in_process import AttentionCalls


@pytest.fixture
def attention() -> Iterator[AttentionCalls]:
    """Record the attention calls of the test: `attention.calls`, `attention.backends`."""
    with import_module("profharness.recording.observer.in_process").observe() as calls:
        yield calls
