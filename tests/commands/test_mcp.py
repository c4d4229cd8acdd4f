"""`profharness mcp` as a real process, asked by the SDK's own client over stdio."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from waiting import PATIENCE_S

from profharness.cli import cli
from profharness.errors import UsageError
from profharness.store import ingest_path

TRACES = Path(__file__).parents[2] / "traces"
CONFIG = "2,8,512,64,fp16"
REASON = "2,8,512,100,fp32,mask=bool"
NAME = "flash_fwd_splitkv_kernel<64,64x256,w4>"
RULES = {"gpu": "H200", "torch": "2.11"}
OF_RULES = ["--gpu", "H200", "--torch", "2.11"]

# a tool's arguments, and those of the command whose JSON it has to give
SAME: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "runs": ("runs", {}, ["runs"]),
    "kernels": ("kernels", {}, ["kernels"]),
    "kernels of a cell": (
        "kernels",
        {"config": CONFIG, "backend": "flash", "run": "h200-torch2.11", "profiler": "torch"},
        ["kernels", "--config", CONFIG, "--backend", "flash", "--profiler", "torch"],
    ),
    "steps": ("kernels", {"config": CONFIG, "steps": True}, ["kernels", "--config", CONFIG, "--steps"]),
    "witnesses": ("kernels", {"profiler": "all"}, ["kernels", "--profiler", "all"]),
    "layers": ("layers", {"step": 0}, ["layers", "--step", "0"]),
    "layers elsewhere": ("layers", {"gpu": "H200"}, ["layers", "--gpu", "H200"]),
    "predict": ("predict", {"config": CONFIG, **RULES}, ["predict", "--config", CONFIG, *OF_RULES]),
    "explain": (
        "explain",
        {"config": REASON, **RULES},
        ["explain", "--config", REASON, *OF_RULES],
    ),
    "map": (
        "explain",
        {"config": "2,8,{64:512:*2},64\n2,8,64,{64,80}", **RULES},
        ["explain", "--config", "2,8,{64:512:*2},64", "--config", "2,8,64,{64,80}", *OF_RULES],
    ),
    "releases": (
        "explain",
        {"config": CONFIG, "gpu": "H200", "torch": "2.11,2.13", "backend": "flash+math"},
        ["explain", "--config", CONFIG, "--backend", "flash+math", *OF_RULES[:-1], "2.11,2.13"],
    ),
    "bisect": (
        "explain",
        {"config": CONFIG, "bisect": "head_dim", **RULES},
        ["explain", "--config", CONFIG, "--bisect", "head_dim", *OF_RULES],
    ),
    "diff": (
        "diff",
        {"baseline": "flash", "candidate": "math", "config": CONFIG, "threshold": 0.1},
        ["diff", "flash", "math", "--config", CONFIG, "--threshold", "0.1"],
    ),
    "explain-kernel": ("explain-kernel", {"names": NAME}, ["explain-kernel", NAME]),
}  # fmt: skip
# a tool's arguments, and a part of the error that they give
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "an unknown run": ("kernels", {"run": "2019"}, "error: no run '2019' in "),
    "a path as a run": ("layers", {"run": "/etc/passwd"}, "error: no run '/etc/passwd' in "),
    "a path as a side": ("diff", {"baseline": "../a", "candidate": "math"}, "no run '../a' in"),
    "a config that no run has": ("kernels", {"config": "3,3,3,3"}, "error: "),
    "a file as a backend": ("kernels", {"backend": "{folder}/mine.py:attention"}, "MCP tools do not accept files"),
    "a file to predict": ("predict", {"config": CONFIG, "backend": "flash,mine.py", **RULES}, "'mine.py': MCP tools"),
    "a module to explain": ("explain", {"config": CONFIG, "backend": "os.path:join", **RULES}, "'os.path:join'"),
    "a module of kernels": ("kernels", {"backend": "os.path:join"}, "MCP tools do not accept files"),
    "a path as a config": ("explain", {"config": "/etc/passwd", **RULES}, "config '/etc/passwd'"),
    "another store": ("runs", {"store": "/tmp/other.db"}, "unknown field `store`; the arguments of runs: none"),
    "a lacking argument": ("explain", {"config": CONFIG}, "missing required field `gpu`"),
    "a wrong type": ("layers", {"step": "first"}, "Expected `int | null`, got `str`"),
    "an unknown GPU": ("explain", {"config": CONFIG, "gpu": "ZX81"}, "ZX81"),
    "an unknown profiler": ("kernels", {"profiler": "perf"}, "unknown profiler 'perf'"),
    "steps of all": ("kernels", {"profiler": "all", "steps": True}, "uses one profiler"),
    "no config": ("explain", {"config": " ", **RULES}, "explain: config is empty"),
    "a step below 0": ("layers", {"step": -1}, "Expected `int` >= 0"),
    "a threshold of 0": ("diff", {"baseline": "a", "candidate": "b", "threshold": 0}, "Expected `float` > 0"),
    "too many configs": ("explain", {"config": "1,1,{1:2000:+1},64", **RULES}, "2,000 configs are too many"),
    "an unknown tool": ("capture", {}, "unknown tool 'capture'; choose from runs, kernels, layers"),
}  # fmt: skip


@dataclass(frozen=True)
class Served:
    """What one session gave: the tools, text and failure of every call, and the server's exit code."""

    store: Path
    tools: list[Any]
    answers: dict[str, tuple[str, bool]]
    code: str


def server_command(store: Path) -> list[str]:
    return [sys.executable, "-m", "profharness", "mcp", "--store", str(store)]


async def asked(store: Path, calls: dict[str, tuple[str, dict[str, Any]]]) -> Served:
    mcp = pytest.importorskip("mcp", reason="mcp is not installed")
    code = store.with_name("code")
    # a shell that is ended leaves no exit code
    script = f'"$@"; echo $? > {shlex.quote(str(code))}'
    words = ["-c", script, "sh", *server_command(store)]
    server = mcp.StdioServerParameters(command="sh", args=words)
    async with mcp.Client(mcp.stdio_client(server)) as client:
        tools = (await client.list_tools()).tools
        answers = {}
        for label, (tool, given) in calls.items():
            result = await client.call_tool(tool, given)
            (content,) = result.content
            answers[label] = content.text, result.is_error
    return Served(store, tools, answers, code.read_text().strip())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("mcp")
    (folder / "mine.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    store = folder / "store.db"
    for source in ("models/llama_prefill.json.gz", "h200-torch2.11"):
        ingest_path(store, TRACES / source)
    calls = {label: (tool, given) for label, (tool, given, _) in (SAME | WRONG).items()}
    tool, given = calls["a file as a backend"]
    calls["a file as a backend"] = (
        tool,
        {key: value.format(folder=folder) for key, value in given.items()},
    )
    return asyncio.run(asked(store, calls))


def test_tools_describe_their_arguments_and_are_read_only(served: Served) -> None:
    tools = {tool.name: tool for tool in served.tools}
    assert set(tools) == {tool for tool, *_ in SAME.values()}
    for tool in tools.values():
        assert tool.annotations.read_only_hint and not tool.annotations.open_world_hint
        assert "Use " in tool.description
        schema = tool.input_schema
        assert schema["type"] == "object" and schema["additionalProperties"] is False
        assert all(value["description"] for value in schema["properties"].values())
    assert tools["explain"].input_schema["required"] == ["config", "gpu"]
    assert tools["explain"].input_schema["properties"]["gpu"]["examples"]
    for name in ("kernels", "predict", "explain"):
        backend = tools[name].input_schema["properties"]["backend"]
        assert "modules are not accepted" in backend["description"]


@pytest.mark.parametrize("label", SAME)
def test_a_tool_answers_with_the_json_of_its_command(label: str, served: Served) -> None:
    text, failed = served.answers[label]
    assert not failed, text
    assert json.loads(text)["schema"].startswith("profharness.")
    words = [*SAME[label][2], "--format", "json"]
    if words[0] not in ("explain-kernel", "predict"):
        words += ["--store", str(served.store)]
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    assert text == done.stdout


@pytest.mark.parametrize("label", WRONG)
def test_a_tool_error_has_the_text_of_the_command_line(label: str, served: Served) -> None:
    text, failed = served.answers[label]
    assert failed
    assert WRONG[label][2] in text
    assert "\n" not in text and "Traceback" not in text


def test_nothing_was_run_captured_or_written(served: Served) -> None:
    assert not (served.store.parent / "ran").exists()
    kept = {
        path.name.removesuffix("-wal").removesuffix("-shm")
        for path in served.store.parent.iterdir()
    }
    assert kept == {"store.db", "mine.py", "code"}


def test_server_ends_with_its_input(served: Served) -> None:
    assert served.code == "0"


def started(store: Path, **environment: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        server_command(store),
        stdin=pipe, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **environment},
    )  # fmt: skip


def replied(process: subprocess.Popen[str], method: str, **params: Any) -> dict[str, Any]:
    """The result of a request, as it goes over the wire."""
    request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    assert process.stdin and process.stdout
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    result: dict[str, Any] = json.loads(process.stdout.readline())["result"]
    return result


def test_server_without_a_store_answers_by_rule_and_ends_on_a_signal(tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason="mcp is not installed")
    store = tmp_path / "none.db"
    process = started(store)
    client = {"name": "test", "version": "1"}
    hello = replied(
        process,
        "initialize",
        protocolVersion="2025-06-18",
        capabilities={},
        clientInfo=client,
    )
    assert hello["serverInfo"]["name"] == "profharness"
    assert "batch,heads,seq_len,head_dim" in hello["instructions"]
    runs = replied(process, "tools/call", name="runs")
    assert runs["isError"]
    assert runs["content"][0]["text"] == (
        f"error: {store}: the store does not exist; create it with `profharness ingest FILE` or "
        "`profharness capture`, or choose another store with --store"
    )
    given = {"config": CONFIG, **RULES}
    explained = replied(process, "tools/call", name="explain", arguments=given)
    assert json.loads(explained["content"][0]["text"])["rows"][0]["predicted"] == "cudnn"
    process.terminate()
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == -signal.SIGTERM
    assert not store.exists()


def test_a_missing_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "mcp").mkdir()
    (tmp_path / "mcp" / "__init__.py").write_text("raise ImportError\n")
    process = started(tmp_path / "none.db", PYTHONPATH=str(tmp_path))
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (1, "")
    assert err == (
        "error: `profharness mcp` requires a package that is not installed; "
        "install it with: pip install 'profharness[mcp]'\n"
    )


def test_an_answer_that_is_too_large_names_a_remedy(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    from profharness.commands import _mcp

    monkeypatch.setattr(_mcp, "MAX_ANSWER_BYTES", 1000)
    with pytest.raises(
        UsageError, match=r"the size of the result is [\d.]+ [KM]iB, .*; request fewer"
    ):
        _mcp.answer("kernels", {}, served.store)
