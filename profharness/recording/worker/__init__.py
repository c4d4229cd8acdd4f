"""The profiled program, started as a process of its own: `python -m profharness.recording.worker FOLDER`."""
