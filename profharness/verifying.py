"""Verification as one step: run the checks, take them into the store, tell them as rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from profharness.backends import ALL, KERNELS, expand_backends
from profharness.config import Config
from profharness.runner.book import Progress
from profharness.runner.verify import VerifyOptions, verify
from profharness.verification import VerificationRow


@dataclass(frozen=True)
class Verified:
    """What a verification left: the run folder, the run's id and its checks."""

    folder: Path
    run: str
    rows: tuple[VerificationRow, ...]


def every_backend(named: Sequence[str], default: Sequence[str]) -> list[str]:
    """The backends to verify: no name is `all,kernels`; the words are those of `expand_backends`."""
    return expand_backends(named or (ALL, KERNELS), default)


def verify_into_store(
    configs: Sequence[Config],
    backends: Sequence[str],
    store: Path,
    options: VerifyOptions | None = None,
    progress: Progress | None = None,
) -> Verified:
    """Verify and ingest. A wrong backend is a row, not an error. Raises UsageError for what cannot
    be meant, CaptureError if no worker starts.
    """
    from profharness.store import ingest_path, open_store

    folder = verify(configs, backends, options, progress)
    (result,) = ingest_path(store, folder)
    with open_store(store) as opened:
        rows = tuple(opened.verifications(result.run))
    return Verified(folder, result.run, rows)
