"""`profharness serve`: the store in a browser."""

from __future__ import annotations

from pathlib import Path

import click

from profharness.cli._options import hint, store_option


@click.command()
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8001,
    show_default=True,
    help="Where to listen; 0 takes any free port.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="The address to listen on; anything but loopback lets others read the store.",
)
@store_option
def command(port: int, host: str, store: Path) -> None:
    """Show the store in a browser, read-only, with ready queries and a report of each run.

    Needs the extra `web` (Datasette). It answers to this machine alone unless --host says
    otherwise, and ends with Ctrl-C. Runs that are ingested meanwhile appear at once.

    \b
    Example:
      profharness serve --port 8001
    """
    # loads Datasette, which only the extra `web` brings
    from profharness.views.web import LOOPBACK, serve

    if host not in LOOPBACK:
        hint(
            f"warning: --host {host}: whoever reaches this machine can read the whole store without a "
            "password, host names and paths in it included; nobody can write"
        )
    serve(store, host=host, port=port, say=hint)
    hint("stopped")
