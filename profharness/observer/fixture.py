"""The pytest fixture `attention`; pytest finds it by its entry point, and a test that asks for it has
its attention calls recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from profharness.observer.seen import Seen


@pytest.fixture
def attention() -> Iterator[Seen]:
    """The attention calls of the test: `attention.calls`, `attention.backends`."""
    with import_module("profharness.observer.seen").observe() as seen:
        yield seen
