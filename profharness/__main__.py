"""`python -m profharness` is the `profharness` command."""

from __future__ import annotations

from profharness.cli.main import main

main()
