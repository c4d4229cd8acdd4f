"""`profharness mcp`: offer the answers as tools to other programs."""

from __future__ import annotations

from profharness.commands._command import as_is, command, declaration_of
from profharness.commands._types import Store, store_path


@command("mcp", frame=as_is)
def mcp(*, store: Store = None) -> None:
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
    from profharness.commands._mcp import serve

    serve(store_path(store).absolute())


DECLARATION = declaration_of(mcp)
