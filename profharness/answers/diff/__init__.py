"""Compare two backends of a run, or two runs: kernels are paired by role."""
