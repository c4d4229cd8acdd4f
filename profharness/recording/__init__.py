"""What makes a run: its plan, the worker process, the profilers, and the observer of programs."""
