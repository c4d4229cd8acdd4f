"""`profharness mcp`: serve read-only commands as MCP tools."""

from __future__ import annotations

from profharness.commands._command import as_is, command, declaration_of
from profharness.commands._types import Store, store_path


@command("mcp", frame=as_is)
def mcp(*, store: Store = None) -> None:
    """Serve the store as read-only tools for Model Context Protocol (MCP) clients.

    This command requires the `mcp` extra. The server communicates over stdio and offers the tools
    runs, kernels, layers, predict, explain, diff and explain-kernel. Each tool takes the arguments
    of the command with the same name, and returns the JSON output of the command. The tools never
    write or capture anything, and none of their arguments is a path. The explain tool applies only
    the dispatch rules and does not query PyTorch. The server exits at the end of its input.

    \b
    Example:
      profharness mcp --store /data/profharness.db
    """
    # imports the MCP SDK, which belongs to the `mcp` extra
    from profharness.commands._mcp import serve

    serve(store_path(store).absolute())


DECLARATION = declaration_of(mcp)
