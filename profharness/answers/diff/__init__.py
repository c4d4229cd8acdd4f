"""What changed between two backends of a run, or between two runs: kernels paired by role."""
