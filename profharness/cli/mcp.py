"""`profharness mcp`: the answers as tools for other programs."""

from __future__ import annotations

from pathlib import Path

import click

from profharness.cli._options import store_option


@click.command()
@store_option
def command(store: Path) -> None:
    """Serve read-only tools over the store to programs that speak the Model Context Protocol, on stdio.

    Needs the extra `mcp`. The tools are runs, kernels, layers, predict, explain, diff and explain-kernel:
    each takes what the command of its name takes, and answers with the JSON that --format json prints.
    Nothing is written and nothing is captured; explain answers by rule alone; no argument is a path.
    Ends when its input ends.

    \b
    Example:
      profharness mcp --store /data/profharness.db
    """
    # loads the protocol's SDK, which only the extra `mcp` brings
    from profharness.cli.mcp_tools import serve

    serve(store.absolute())
