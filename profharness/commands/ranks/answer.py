"""Compare the ranks of a job: which differ from the others, and in what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from profharness.stats import THRESHOLD

if TYPE_CHECKING:
    from profharness.commands.ranks.comparison import RankComparison
    from profharness.store import Store


def compare_ranks(
    store: Store, refs: Sequence[str] = (), threshold: float = THRESHOLD
) -> RankComparison:
    """Compare the ranks that `refs` select, as in `Store.ranks`."""
    # imports numpy, which no other reading command needs
    from profharness.commands.ranks.outliers import find_outliers

    return find_outliers(store, refs, threshold)
