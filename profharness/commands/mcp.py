"""`profharness mcp`: serve read-only commands as MCP tools."""

from __future__ import annotations

from profharness.commands._command import as_is, command, declaration_of
from profharness.commands._types import Store, store_path


@command("mcp", frame=as_is)
def mcp(*, store: Store = None) -> None:
    """Serve read-only tools over the store to programs that speak the Model Context Protocol, on stdio.

    Needs the extra `mcp`. The tools are runs, kernels, layers, predict, explain, diff and explain-kernel.
    Each takes the arguments of the command with that name and returns its JSON (--format json).
    Nothing is written or captured, explain uses only the dispatch rules, and no argument is a path. The server
    exits at the end of its input.

    \b
    Example:
      profharness mcp --store /data/profharness.db
    """
    # imports the MCP SDK, which belongs to the extra `mcp`
    from profharness.commands._mcp import serve

    serve(store_path(store).absolute())


DECLARATION = declaration_of(mcp)
