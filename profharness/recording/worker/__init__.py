"""The profiled program, started as a process: `python -m profharness.recording.worker FOLDER`."""
