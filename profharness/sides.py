"""What BASELINE and CANDIDATE of a diff stand for: a run, RUN:BACKEND, or a backend of the latest run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from profharness.differ import Side
from profharness.errors import NotFoundError

if TYPE_CHECKING:
    from profharness.config import Config
    from profharness.store import Store


def find_side(store: Store, text: str, configs: Sequence[Config]) -> Side:
    """The rows that RUN, RUN:BACKEND or a backend of the latest run stands for. Raises
    NotFoundError."""
    latest = store.latest_run_with(configs) if configs else None
    if ":" in text:
        ref, _, backend = text.partition(":")
        run = store.resolve(ref)
        _require_backend(backend, [cell.backend for cell in store.cells(run)], run)
    else:
        run, backend = latest or store.resolve("latest"), text
        known = dict.fromkeys(cell.backend for cell in store.cells(run))
        if text not in known:
            try:
                run, backend = store.resolve(text), ""
            except NotFoundError:
                raise NotFoundError(
                    f"{text!r} is neither a run nor a backend of the latest run {run} "
                    f"(it has {', '.join(known) or 'none'})"
                ) from None
    chosen = configs or None
    return Side(
        label=f"{run}:{backend}" if backend else run,
        cells=tuple(store.cells(run, configs=chosen)),
        kernels=tuple(store.kernels(run, configs=chosen)),
        backend=backend or None,
        environment=store.environment(run),
    )


def _require_backend(backend: str, known: Sequence[str], run: str) -> None:
    if backend not in known:
        has = ", ".join(dict.fromkeys(known)) or "none"
        raise NotFoundError(f"run {run} has no backend {backend!r}; it has {has}")
