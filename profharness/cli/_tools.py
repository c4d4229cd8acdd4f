"""The tools of `profharness mcp`, and their server on stdio. Importing this module raises
MissingExtraError without the extra `mcp`.
"""

from __future__ import annotations

import asyncio
import signal
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from profharness import __version__, stats
from profharness.answers.agreement import predicted_rows
from profharness.answers.atlas.catalog import predicted
from profharness.answers.diff.answer import diff_cells
from profharness.answers.diff.sides import find_sides, nothing_compared
from profharness.answers.explain.rules import asked_about, named_places
from profharness.answers.layers import find_layers
from profharness.cli.explain import Question, answer_question
from profharness.cli.kernels import EVERY_PROFILER, predict_kernels, rows_document
from profharness.cli.layers import find_places, forecast_document
from profharness.config import (
    Config,
    grammar_lines,
    parse_config_lines,
    setting_name,
    split_names,
)
from profharness.errors import (
    MissingExtraError,
    NotFoundError,
    ProfharnessError,
    UsageError,
    printable,
)
from profharness.rows import TRACE_PROFILERS, of_first_profiler
from profharness.store import KERNELS_ELSE_CELLS, Selection, open_store
from profharness.views.diff import diff_document
from profharness.views.document import Document
from profharness.views.explain_kernel import described, names_document
from profharness.views.kernels import kernels_document
from profharness.views.layers import layers_document
from profharness.views.predict import predict_document
from profharness.views.renderers import render_json
from profharness.views.runs import runs_document

try:
    from mcp import types
    from mcp.server.lowlevel import Server
    from mcp.server.stdio import stdio_server
except ImportError:
    raise MissingExtraError("`profharness mcp`", "mcp") from None

MAX_CONFIGS = 1000  # of one call
MAX_ANSWER_BYTES = 1 << 20  # a model reads some 100 kB at best
ALL = "all"  # no filter by backend
GRAMMAR = "\n  ".join(grammar_lines())
INSTRUCTIONS = f"""\
profharness knows which CUDA kernels PyTorch's attention (scaled_dot_product_attention) launches, why
PyTorch chose that backend, and what it cost. A store holds runs: captured configs, traces of programs.
Ask `runs` what is stored. All tools only read, and answer with JSON: `rows`, and keys beside them.
A config is batch,heads,seq_len,head_dim and, after these four, in any order:
  {GRAMMAR}
as in 2,8,512,64,bf16,causal or 16,32,1,128,bf16,seq_kv=4096,kv_heads=8. {{fp16,bf16}} and 128:4096:*2 stand
for several values. Backends of PyTorch are flash, efficient, cudnn, math; auto is PyTorch's own choice.
Times are nanoseconds. null means that it is not known.
"""

ConfigText = Annotated[
    str,
    Meta(
        description="An attention config, or several, one a line.",
        examples=["2,8,512,64,bf16", "2,8,{64:8192:*2},128,bf16,causal"],
    ),
]
RunText = Annotated[
    str,
    Meta(
        description="A stored run: an id, a unique prefix, latest, latest~1. Left out: the latest that "
        "has an answer.",
        examples=["latest", "latest~1"],
    ),
]
BackendText = Annotated[
    str,
    Meta(
        description="Only these backends, joined by commas; left out: all.",
        examples=["auto,flash,math"],
    ),
]
Release = Annotated[
    str,
    Meta(description="The release of PyTorch.", examples=["2.11"]),
]


class _Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of a tool; a subclass's docstring is what a model reads of it."""

    def document(self, store: Path) -> Document:
        """The answer. Raises ProfharnessError."""
        raise NotImplementedError


class Runs(_Tool, frozen=True):
    """List the stored runs, the newest first: id, when, what device and torch, how many cells and launches.

    Use it first, to learn what the other tools can be asked about.
    """

    def document(self, store: Path) -> Document:
        with open_store(store) as opened:
            return runs_document(opened.runs())


class Kernels(_Tool, frozen=True):
    """Which GPU kernels stored cells launched: names, grid, block, registers, shared memory, times.

    Use it for what really ran on a config that a run has. Beside the rows, cells tell what was refused
    and why. Nothing is captured: a config that no run has is an error; ask explain about it. With gpu an
    atlas of that GPU answers, as for predict, and no store is read.
    """

    config: ConfigText = ""
    run: RunText = ""
    backend: BackendText = ""
    profiler: Annotated[
        str,
        Meta(description=f"{', '.join(TRACE_PROFILERS)}, or all: every one side by side."),
    ] = ""
    steps: Annotated[
        bool,
        Meta(description="Sum up by step: QK^T, softmax, PV, casts, launch gaps; with speed-ups."),
    ] = False
    gpu: Annotated[
        str,
        Meta(description="Predict for this GPU by its atlas.", examples=["H200"]),
    ] = ""
    torch: Release = ""

    def document(self, store: Path) -> Document:
        if self.gpu or self.torch:
            return self._predicted()
        profilers = _profilers(self.profiler)
        if self.steps and len(profilers) > 1:
            raise UsageError("steps sums up what one profiler saw; name one as profiler")
        backends = split_names(self.backend)
        names = () if ALL in backends else tuple(map(setting_name, backends))
        selection = Selection(self.run or None, _configs(self.config), names, profilers)
        needs = KERNELS_ELSE_CELLS
        rows, cells = predicted_rows(store, selection, by_op=self.steps, needs=needs)
        if not self.profiler:
            rows = of_first_profiler(rows)
        named = split_names(self.profiler)
        return rows_document(store, rows, cells, profilers=named, steps=self.steps)

    def _predicted(self) -> Document:
        if not self.gpu or self.run or self.profiler or self.steps:
            raise UsageError("gpu, with torch, predicts; leave run, profiler and steps out")
        configs, backends = _configs(self.config), split_names(self.backend)
        return kernels_document(*predict_kernels(configs, backends, self.gpu, self.torch or None))


class Layers(_Tool, frozen=True):
    """The attention of a traced or observed program, layer by layer: module, config, backend that ran,
    kernel times, share of the step, why it ran so, and what would help.

    Use it for a model or a training step, where kernels has single configs. With gpu the keys
    predicted_* say what another GPU would do with the same calls.
    """

    run: RunText = ""
    step: Annotated[
        Annotated[int, Meta(ge=0)] | None, Meta(description="Only this recorded step, from 0.")
    ] = None
    torch: Release = ""
    gpu: Annotated[
        str,
        Meta(description="Predict for these GPUs by their atlases.", examples=["H200"]),
    ] = ""

    def document(self, store: Path) -> Document:
        if self.gpu:
            places = find_places(self.gpu, self.torch or None, None, None)
            return forecast_document(store, self.run or None, places, step=self.step)
        with open_store(store) as opened:
            name = opened.find_run(Selection(self.run or None), "attention calls")
            return layers_document(
                find_layers(opened, name, step=self.step, torch=self.torch or None)
            )


class Predict(_Tool, frozen=True):
    """What a GPU would do with a config, without that GPU: what auto takes, kernels with grid and block,
    time with its 90 % interval, the best backend and what auto loses. By an atlas of measured cells
    and a model between them; source says which, and floor that there is no time.

    Use it for how long a config takes or which backend is fastest there; explain says why.
    """

    config: ConfigText
    gpu: Annotated[
        str,
        Meta(description="A GPU by name. Left out: the only one with an atlas.", examples=["H200"]),
    ] = ""
    torch: Release = ""
    backend: BackendText = ""

    def document(self, store: Path) -> Document:  # noqa: ARG002
        configs, backends = _configs(self.config), split_names(self.backend)
        found = predicted(configs, backends, self.gpu or None, self.torch or None)
        return predict_document(found.answers, found.place, found.backends)


class Explain(_Tool, frozen=True):
    """Why PyTorch takes the backend that it takes for a config on a GPU, why not the others, and what to
    change. By the dispatch rules of that release: needs no GPU, and nothing runs.

    Use it for any config, stored or not. Several configs give a map of choices, several releases show
    where the choice changes, and bisect the value at which it flips.
    """

    config: ConfigText
    gpu: Annotated[
        str,
        Meta(
            description="A GPU by name, a capability, or cpu.",
            examples=["H200", "RTX A6000", "sm90", "cpu"],
        ),
    ]
    torch: Annotated[
        str,
        Meta(
            description="A release of PyTorch, several, or a range. Left out: the one installed here.",
            examples=["2.11", "2.8,2.10", "2.0..2.15"],
        ),
    ] = ""
    backend: Annotated[
        str,
        Meta(
            description="A set or an order that the call may take, in place of auto; or single backends "
            "to limit the advice to.",
            examples=["flash+math", "cudnn-then-flash", "flash"],
        ),
    ] = ""
    bisect: Annotated[
        str,
        Meta(
            description="Find the values of this property at which the choice flips.",
            examples=["head_dim", "seq_len"],
        ),
    ] = ""
    cudnn: Annotated[str, Meta(description="cuDNN's version. Left out: the PyPI wheel's.")] = ""
    cuda: Annotated[str, Meta(description="PyTorch's CUDA. Left out: the PyPI wheel's.")] = ""

    def document(self, store: Path) -> Document:
        configs = _configs(self.config)
        if not configs:
            raise UsageError("explain needs a config, such as 2,8,512,64,bf16")
        asked, backends = asked_about(split_names(self.backend))
        torch, bisect = self.torch or None, self.bisect or None
        places = named_places(torch, self.gpu, self.cudnn or None, self.cuda or None)
        question = Question(configs, asked, backends, places, store, torch=torch, bisect=bisect)
        document, _ = answer_question(question)
        return document


class Diff(_Tool, frozen=True):
    """Compare two backends of a run, or two runs, kernel by kernel: verdicts same, faster, slower,
    changed, added, removed, unknown; traced programs layer by layer too.

    Use it to say what changed, or which backend is faster on what was measured.
    """

    baseline: Annotated[
        str,
        Meta(
            description="A run, RUN:BACKEND, or a backend in the latest run that has both.",
            examples=["latest~1", "latest:flash", "flash"],
        ),
    ]
    candidate: Annotated[
        str,
        Meta(description="What is held against the baseline.", examples=["latest", "math"]),
    ]
    config: ConfigText = ""
    threshold: Annotated[
        float, Meta(gt=0, description="The smallest relative change of a time that counts.")
    ] = stats.THRESHOLD

    def document(self, store: Path) -> Document:
        configs = _configs(self.config)
        with open_store(store) as opened:
            sides = find_sides(opened, self.baseline, self.candidate, configs)
        diff = diff_cells(*sides, threshold=self.threshold)
        if not diff.rows and not diff.layers:
            nothing = nothing_compared(diff, sides, frozenset())
            raise NotFoundError(nothing or "nothing to compare")
        return diff_document(diff)


class ExplainKernel(_Tool, frozen=True):
    """Say kernel names in words: library, family, direction, dtype, tile, and what each part means.

    Use it for a name from any profiler, whole or short. The name alone is read.
    """

    names: Annotated[
        str,
        Meta(
            description="A kernel's name, or several, one a line.",
            examples=["flash_fwd_splitkv_kernel<64,64x256,w4>"],
        ),
    ]

    def document(self, store: Path) -> Document:  # noqa: ARG002
        return names_document(described(self.names.splitlines()))


TOOLS: dict[str, type[_Tool]] = {
    "runs": Runs,
    "kernels": Kernels,
    "layers": Layers,
    "predict": Predict,
    "explain": Explain,
    "diff": Diff,
    "explain-kernel": ExplainKernel,
}


def _configs(text: str) -> list[Config]:
    """Raises UsageError for what is no config, and for more than a call may ask about."""
    configs = parse_config_lines(text.splitlines(), "config")
    if len(configs) > MAX_CONFIGS:
        raise UsageError(f"{len(configs):,} configs; at most {MAX_CONFIGS:,} a call, ask in parts")
    return configs


def _profilers(text: str) -> tuple[str, ...]:
    """Raises UsageError for a profiler that leaves no kernels."""
    names = split_names(text)
    for name in names:
        if name not in (*TRACE_PROFILERS, EVERY_PROFILER):
            known = ", ".join((*TRACE_PROFILERS, EVERY_PROFILER))
            raise UsageError(f"no launches of a profiler {name!r}; known are {known}")
    return TRACE_PROFILERS if EVERY_PROFILER in names else names


def answer(name: str, arguments: dict[str, Any], store: Path) -> str:
    """The JSON that the command prints. Raises ProfharnessError, also for a wrong argument."""
    if name not in TOOLS:
        raise UsageError(f"no tool {name!r}; there are {', '.join(TOOLS)}")
    tool = TOOLS[name]
    try:
        asked = msgspec.convert(arguments, tool)
    except msgspec.ValidationError as error:
        known = ", ".join(tool.__struct_fields__) or "none"
        raise UsageError(f"{name}: {error}; its arguments: {known}") from None
    text = render_json(asked.document(store))
    if len(text) > MAX_ANSWER_BYTES:
        raise UsageError(
            f"the answer has {len(text) / 1e6:.1f} MB, more than the {MAX_ANSWER_BYTES >> 20} MiB of a "
            "call; ask for less: fewer configs or backends, or one run"
        )
    return text


def serve(store: Path) -> None:
    """Answer on stdin and stdout until stdin ends."""
    # a thread waits for input, for which an orderly end would wait; nothing is written half here
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
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
    """The answer, or what the command line would say of the error."""
    failed = True
    try:
        text, failed = answer(name, arguments, store), False
    except (ProfharnessError, OSError) as error:
        text = f"error: {printable(str(error))}"
    return types.CallToolResult(
        content=[types.TextContent(type="text", text=text)], is_error=failed
    )


def _listed(name: str) -> types.Tool:
    tool = TOOLS[name]
    schema = msgspec.json.schema(tool)["$defs"][tool.__name__]
    schema.pop("description", None)
    return types.Tool(
        name=name,
        description=cleandoc(tool.__doc__ or ""),
        input_schema=schema,
        annotations=types.ToolAnnotations(
            read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
        ),
    )
