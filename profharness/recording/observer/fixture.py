"""The pytest fixture `attention`, which pytest finds by the entry point of the package."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from profharness.recording.observer.wrapper import AttentionCalls


@pytest.fixture
def attention() -> Iterator[AttentionCalls]:
    """Record the attention calls of the test in `attention.calls` and `attention.backends`."""
    with import_module("profharness.recording.observer.wrapper").observe() as calls:
        yield calls
