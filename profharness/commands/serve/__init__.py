"""`profharness serve`: show the store in a browser."""

from __future__ import annotations

from typing import Annotated

import click

from profharness.commands._command import as_is, command, declaration_of
from profharness.commands._options import Option
from profharness.commands._output import hint
from profharness.commands._types import Store, store_path

Port = Annotated[
    int,
    Option(
        ("--port",),
        type=click.IntRange(0, 65535),
        help="The port to listen on; 0 means any free port.",
    ),
]
Host = Annotated[
    str,
    Option(
        ("--host",),
        help="The address to listen on. With a non-loopback address, other machines can read the "
        "store.",
    ),
]


@command("serve", frame=as_is)
def serve(*, port: Port = 8001, host: Host = "127.0.0.1", store: Store = None) -> None:
    """Show the store in a browser.

    The store is opened read-only. There are predefined queries and a report for each run. This
    command requires the `web` extra (Datasette). By default, the server accepts connections only
    from this machine; see --host. Newly ingested runs appear immediately. Press Ctrl-C to stop the
    server.

    \b
    Example:
      profharness serve --port 8001
    """
    # imports Datasette, which belongs to the `web` extra
    from profharness.commands.serve import server

    server.serve(store_path(store), host, port)
    hint("stopped")


DECLARATION = declaration_of(serve)
