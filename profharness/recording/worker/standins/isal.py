"""What the worker uses of isal, for a Python that does not have it."""

import gzip as igzip

__all__ = ["igzip"]
