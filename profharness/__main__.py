"""`python -m profharness` is the `profharness` command."""

from profharness.cli.main import main

main()
