"""Create runs: plan cells, supervise the worker process and profilers, and observe programs."""
