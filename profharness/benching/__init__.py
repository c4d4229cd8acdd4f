"""What a timed run says: figures, doubts, the best backend of each config, and what PyTorch's own
choice cost.
"""

from profharness.benching.answer import Benched, Loss, Winner, benched
from profharness.benching.rows import BenchRow, bench_rows

__all__ = ["BenchRow", "Benched", "Loss", "Winner", "bench_rows", "benched"]
