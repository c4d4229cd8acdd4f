"""The worker process, which runs cells: `python -m profharness.recording.worker FOLDER`."""
