"""Run the `profharness` command with `python -m profharness`."""

from __future__ import annotations

import sys


def main() -> None:
    """Import and run the command line. Print no traceback if the import is interrupted."""
    try:
        from profharness.cli import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
