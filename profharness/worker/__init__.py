"""The profiled program: `python -m profharness.worker FOLDER`. It is started as a process of its
own and never imported.
"""
