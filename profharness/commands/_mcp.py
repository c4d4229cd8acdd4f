"""The MCP server, which offers read-only commands as tools on stdio.

Importing this module raises MissingExtraError if the `mcp` extra is not installed.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from profharness import __version__
from profharness.attention.config import grammar_lines
from profharness.commands._command import Declaration
from profharness.commands._options import Parameter
from profharness.commands._output import on_terminal
from profharness.errors import MissingExtraError, ProfharnessError, UsageError, printable
from profharness.render.renderers import render_json
from profharness.units import memory_text

try:
    from mcp import types
    from mcp.server.lowlevel import Server
    from mcp.server.stdio import stdio_server
except ImportError:
    raise MissingExtraError("`profharness mcp`", "mcp") from None

MAX_ANSWER_BYTES = 1 << 20  # ten times what a model can usually read at once
TOOLS = ("runs", "kernels", "layers", "predict", "explain", "diff", "explain-kernel")
GRAMMAR = "\n  ".join(grammar_lines())
INSTRUCTIONS = (
    "profharness reports which CUDA kernels PyTorch's attention "
    "(scaled_dot_product_attention) launches, why PyTorch chose the backend, and how "
    "long the kernels took. A store contains runs: captured configs and traces of programs. Call "
    "`runs` to list the runs. All tools are read-only and return JSON with `rows` and other keys. A "
    "config is batch,heads,seq_len,head_dim and, after these four, in any order: "
    f"{GRAMMAR} as in 2,8,512,64,bf16,causal or 16,32,1,128,bf16,seq_kv=4096,kv_heads=8. "
    "{fp16,bf16} and 128:4096:*2 stand for several values. PyTorch's backends are flash, "
    "efficient, cudnn and math; auto is PyTorch's own choice. Times are in nanoseconds. "
    "The value null means unknown.\\n"
)


@cache
def declared(name: str) -> Declaration:
    """Return the declaration of a tool. Raise UsageError if there is no such tool."""
    if name not in TOOLS:
        raise UsageError(f"unknown tool {name!r}; choose from {', '.join(TOOLS)}")
    declaration: Declaration = import_module(
        f"profharness.commands.{name.replace('-', '_')}"
    ).DECLARATION
    return declaration


@cache
def arguments_type(name: str) -> type[msgspec.Struct]:
    """Return a type with a field for each parameter of the tool."""
    declaration = declared(name)
    fields = [_field(each, declaration) for each in _offered(declaration).values()]
    return msgspec.defstruct(
        declaration.run.__name__, fields, frozen=True, kw_only=True, forbid_unknown_fields=True
    )


def _offered(declaration: Declaration) -> dict[str, Parameter]:
    parameters = (*declaration.parameters, *declaration.shown_parameters)
    return {each.tool_name: each for each in parameters if each.option.tool}


def _field(
    parameter: Parameter, declaration: Declaration
) -> tuple[str, Any, Any] | tuple[str, Any]:
    option, base = parameter.option, parameter.base
    if base not in (bool, int, float):
        base = str
    if limits := _limits(parameter):
        base = Annotated[base, Meta(**limits)]
    meta = Meta(description=option.tool, examples=list(option.tool_examples) or None)
    name = parameter.tool_name
    if parameter.required or name in declaration.tool_required:
        return name, Annotated[base, meta]
    if base is str:
        return name, Annotated[str, meta], ""
    default = parameter.default
    return name, Annotated[base if default is not None else base | None, meta], default


def _limits(parameter: Parameter) -> dict[str, Any]:
    """Return the allowed range of a number as arguments of `msgspec.Meta`."""
    kind = parameter.range
    if kind is None:
        return {}
    return {"gt" if kind.min_open else "ge": kind.min, "lt" if kind.max_open else "le": kind.max}


def answer(name: str, arguments: dict[str, Any], store: Path) -> str:
    """Run a command and return its result as JSON. Raise ProfharnessError for invalid arguments."""
    declaration, offered = declared(name), _offered(declared(name))
    try:
        given = msgspec.structs.asdict(msgspec.convert(arguments, arguments_type(name)))
    except msgspec.ValidationError as error:
        known = ", ".join(offered) or "none"
        raise UsageError(f"{name}: {error}; the arguments of {name}: {known}") from None
    values: dict[str, Any] = {"store": store}
    for key, value in given.items():
        parameter = offered[key]
        if isinstance(value, str) and not value.strip():
            if parameter.required or key in declaration.tool_required:
                raise UsageError(f"{name}: {key} is empty")
            continue  # an empty text means that the argument is missing
        convert = parameter.option.tool_value
        values[parameter.name] = convert(value) if convert else value
    declaration.check_values(values)
    text = render_json(declaration.shown(declaration.answer(values), values))
    if len(text) > MAX_ANSWER_BYTES:
        raise UsageError(
            f"the size of the result is {memory_text(len(text))}, which exceeds the limit of "
            f"{memory_text(MAX_ANSWER_BYTES)}; request fewer configs or backends, or only one run"
        )
    return text


def serve(store: Path) -> None:
    """Answer the requests on stdin until stdin is closed."""
    # Signals end the process at once, because an orderly exit would wait for the thread that reads
    # stdin. The tools only read, so no file remains incomplete.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    with on_terminal(False):
        asyncio.run(_serve(store))


async def _serve(store: Path) -> None:
    async def list_tools(*_: object) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[_listed(name) for name in TOOLS])

    async def call_tool(_: object, asked: types.CallToolRequestParams) -> types.CallToolResult:
        return await asyncio.to_thread(_result, asked.name, asked.arguments or {}, store)

    server = Server(
        "profharness",
        version=__version__,
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )
    async with stdio_server() as streams:
        await server.run(*streams, server.create_initialization_options())


def _result(name: str, arguments: dict[str, Any], store: Path) -> types.CallToolResult:
    """Return the answer, or the error message that the command line would print."""
    failed = True
    try:
        text, failed = answer(name, arguments, store), False
    except (ProfharnessError, OSError) as error:
        text = f"error: {printable(str(error))}"
    return types.CallToolResult(
        content=[types.TextContent(type="text", text=text)], is_error=failed
    )


def _listed(name: str) -> types.Tool:
    declaration, kind = declared(name), arguments_type(name)
    schema = msgspec.json.schema(kind)["$defs"][kind.__name__]
    summary = inspect.cleandoc(declaration.run.__doc__ or "").partition("\n\n")[0]
    return types.Tool(
        name=name,
        description=f"{summary}\n\n{declaration.tool}",
        input_schema=schema,
        annotations=types.ToolAnnotations(
            read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
        ),
    )
