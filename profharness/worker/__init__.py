"""The profiled program, started as a process of its own: `python -m profharness.worker FOLDER`."""
