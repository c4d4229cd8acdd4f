"""The map and the gates of observed programs: journals with a trace, and without one."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from programs import Seen, observe, write

from profharness.cli import cli
from profharness.errors import GateError, NotFoundError, UsageError, with_count
from profharness.program.gates import check_gates, parse_gates
from profharness.program.layer_map import FUSE, LayerMap, find_layers
from profharness.scrub import audit, scrub
from profharness.store import Selection, ingest_path, open_store
from profharness.traces.observed import CUT_SHORT, read_observed

# Trains with other lengths after the window; then masks, another backend, a refusal.
BODY = """
from torch.nn.attention import SDPBackend, sdpa_kernel
model = Model()
train(8, model)
infer(2, model)
with sdpa_kernel(SDPBackend.MATH):
    infer(1, model)
infer(3, Model(1), mask=torch.ones(16, 16, dtype=torch.bool))
infer(1, Model(1), mask=torch.ones(16, 16, dtype=torch.bool).tril())
for rows in (5, 6):
    model(torch.randn(2, rows, 32)).sum().backward()
q = torch.zeros(1, 2, 4, 8)
try:
    F.scaled_dot_product_attention(q, q[..., :5], q)
except RuntimeError:
    print("refused")
sys.exit(7)
"""


TRACE = Path(__file__).parents[2] / "traces" / "models" / "vit.json.gz"  # not observed
# the fixtures are slow: one process creates them once
pytestmark = pytest.mark.xdist_group("observed-layers")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Run a traced program that fails, under gates that fail too."""
    place = tmp_path_factory.mktemp("traced")
    options = (
        "--fail-on",
        "backend-changed,noop-mask,requested-not-run",
        "--expect",
        "flash@layers.1.*",
    )
    return observe(place, write(place, BODY), options=options)


@pytest.fixture(scope="module")
def store(seen: Seen) -> Path:
    assert seen.folder is not None, seen.stderr
    return seen.folder.parents[2] / "profharness.db"


def the_map(store: Path) -> LayerMap:
    with open_store(store) as opened:
        return find_layers(opened, opened.find_run(Selection(), "attention calls"))


def without_trace(seen: Seen, place: Path) -> Path:
    """Return a store with a copy of the run without its trace, under the id `counted`."""
    assert seen.folder is not None
    folder = shutil.copytree(seen.folder, place / "run")
    record = json.loads((folder / "run.json").read_text())
    record |= {"run": "counted", "traces": [], "profilers": []}
    (folder / "run.json").write_text(json.dumps(record))
    ingest_path(place / "s.db", folder)
    return place / "s.db"


def shown(store: Path, *arguments: str) -> Any:
    return CliRunner().invoke(cli, ["layers", *arguments, "--store", str(store)])


def told(layers: LayerMap) -> list[tuple[Any, ...]]:
    return [
        (row.phase, row.mask, row.asked, row.ran, row.calls, row.program_calls, row.lengths)
        for row in layers.rows
        if row.module == "layers.{0-1}.attn"
    ]


def test_calls_without_a_dtype_in_the_trace_have_the_config_of_their_kind(
    seen: Seen, store: Path, tmp_path: Path
) -> None:
    """As in an nsys trace. Applies to layers, the view, analyze and diff."""
    assert seen.folder is not None
    folder = shutil.copytree(seen.folder, tmp_path / "run")
    (path,) = folder.glob("*.torch.json.gz")
    trace = json.loads(gzip.decompress(path.read_bytes()))
    for event in trace["traceEvents"]:
        if told := event.get("args", {}).get("Input type"):
            event["args"]["Input type"] = [""] * len(told)
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    copy = tmp_path / "s.db"
    (result,) = ingest_path(copy, folder)
    before, after = the_map(store).rows[0], the_map(copy).rows[0]
    assert before.config and (after.config, after.reasons) == (before.config, before.reasons)
    with closing(sqlite3.connect(copy)) as connection:
        rows = connection.execute("SELECT DISTINCT config, replayable FROM attention_calls")
        assert rows.fetchall() == [(before.config, 1)]
    run = ["--store", str(copy), "--format", "json"]
    done = CliRunner().invoke(cli, ["analyze", "--run", result.run, *run])
    assert done.exit_code == 0, done.stderr
    assert {row["config"] for row in json.loads(done.stdout)["rows"]} == {before.config}
    done = CliRunner().invoke(cli, ["diff", result.run, result.run, *run])
    assert json.loads(done.stdout)["layers"][0]["baseline"]["config"] == before.config


FLEX = """
from torch.nn.attention.flex_attention import flex_attention

class Flex(torch.nn.Module):
    def forward(self, x):
        q = x.unflatten(-1, (4, 8)).transpose(1, 2)
        return flex_attention(q, q, q).transpose(1, 2).flatten(2)

layers = torch.nn.Sequential(Flex(), Flex())
with torch.inference_mode():  # without it the trace has autograd's op around the products
    for _ in range(4):
        layers(torch.randn(2, 16, 32, dtype=torch.bfloat16))
"""


def test_uncompiled_flex_attention_differs_from_eager_attention(tmp_path: Path) -> None:
    done = observe(tmp_path, write(tmp_path, FLEX), options=("--steps", "1", "--warmup", "1"))
    assert done.code == 0, done.stderr
    layers = the_map(tmp_path / "profharness.db")
    with pytest.raises(GateError, match=r"eager-attention in .*:\n  \{0-1\}"):
        check_gates(layers, parse_gates(["eager-attention"], []))
    (row,) = layers.rows
    assert (row.module, row.mode, row.ran, row.calls) == ("{0-1}", "eager", "flex", 2)
    assert row.program_calls == 8 and row.config is None and not row.replayable
    assert "without torch.compile" in row.reasons[1]
    assert row.advice == (FUSE,)


def test_a_traced_run_contains_what_the_trace_lacks(seen: Seen, store: Path) -> None:
    layers = the_map(store)
    first, *others = layers.rows
    assert first.forward_ns and first.calls == 2 and first.program_calls == 16
    assert (first.asked, first.choice, first.ran, first.mask) == ("auto", "flash", "flash", "none")
    assert first.site == "model.py:18" and first.module == "layers.{0-1}.attn"
    assert all(row.calls is row.forward_ns is None and row.points == () for row in others)
    assert sum(row.program_calls or 0 for row in layers.rows) == sum(c.count for c in seen.calls)
    assert told(layers)[1:] == [
        ("train", "none", "auto", "flash", None, 4, (5, 6)),
        ("prefill", "none", "auto", "flash", None, 4, (16, 16)),
        ("prefill", "none", "math", "math", None, 2, (16, 16)),
    ]
    noop = next(row for row in others if row.mask == "nothing")
    assert noop.program_calls == 3 and "hides nothing" in noop.reasons[0]
    assert noop.advice == ("leave attn_mask out if the mask is the same in all calls",)
    causal = next(row for row in others if row.mask == "causal")
    assert causal.advice[0].startswith("pass is_causal=True instead of attn_mask")
    refused = next(row for row in others if row.ran == "none")
    assert refused.reasons == ("the call raised an error",) and "refused" in seen.stdout


def test_the_program_keeps_its_exit_code_and_the_gates_are_reported(seen: Seen) -> None:
    assert seen.code == 7
    text = seen.stderr
    assert "the program exited with 7" in text and "profharness layers" in text
    blocks = re.findall(r"^gate failed: (.*) in .*:\n((?:  .*\n)+)", text, re.M)
    found = dict(blocks)
    assert (
        "  layers.0.attn: flash and math ran for equal calls" in found["--fail-on backend-changed"]
    )
    assert "  layers.0.attn" in found["--fail-on noop-mask"]
    assert "the mask hides nothing" in found["--fail-on noop-mask"]
    assert "math ran" in found["--expect flash@layers.1.*"]
    assert "--fail-on requested-not-run" not in found


def test_without_a_trace_there_are_counts_and_a_note(seen: Seen, tmp_path: Path) -> None:
    store = without_trace(seen, tmp_path)
    layers = the_map(store)
    assert layers.steps == () and {row.step for row in layers.rows} == {"the whole program"}
    assert sum(row.program_calls or 0 for row in layers.rows) == sum(c.count for c in seen.calls)
    assert told(layers)[0] == ("train", "none", "auto", "flash", None, 20, (5, 16))
    text = shown(store).stdout
    counted = "The program made 31 attention calls, 28 on flash, 2 on math, 1 with an error."
    assert counted in text and "No step was recorded" in text
    assert "forward µs/step" not in text and "calls in all" in text
    for arguments, error in (
        (["--fail-on", "eager-attention"], "this gate requires a recorded step"),
        (["--step", "0"], "has no recorded step"),
        (["--savings"], "nothing can be timed"),
    ):
        assert error in str(shown(store, *arguments).exception)
    with pytest.raises(
        GateError,
        match=r"eager-attention in .*:\n  the result is unknown, because this gate requires a recorded step",
    ):
        check_gates(layers, parse_gates(["eager-attention"], []))
    failed = shown(store, "--fail-on", "noop-mask").exception
    assert isinstance(failed, GateError) and "hides nothing" in str(failed)


def test_diff_pairs_counted_calls_and_reports_missing_ones(seen: Seen, tmp_path: Path) -> None:
    store = without_trace(seen, tmp_path)
    assert seen.folder is not None
    (traced,) = ingest_path(store, seen.folder)

    def diff(left: str, right: str, *options: str) -> Any:
        return CliRunner().invoke(cli, ["diff", left, right, *options, "--store", str(store)])

    done = diff("counted", "counted", "--fail-on", "backend-changed", "--format", "json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["layers"]
    counts = [row["baseline"]["program_calls"] for row in rows]
    assert sum(counts) == sum(call.count for call in seen.calls)
    assert {row["verdict"] for row in rows} == {"unknown"}
    assert {row["baseline"]["calls"] for row in rows} == {None}
    assert {row["candidate"]["asked"] for row in rows} == {"auto", "auto and math"}
    assert all("no step of the baseline or the candidate was" in row["reasons"][-1] for row in rows)
    failed = diff("counted", "counted", "--fail-on", "slower").exception
    assert isinstance(failed, GateError) and "no step was recorded" in str(failed)
    rows = json.loads(diff(traced.run, "counted", "--format", "json").stdout)["layers"]
    first = next(row for row in rows if row["baseline"] and row["baseline"]["forward_ns"])
    assert (first["baseline"]["ran"], first["candidate"]["ran"]) == ("flash", "flash")
    assert first["baseline"]["calls"] and first["candidate"]["calls"] is None
    assert first["reasons"][-1].startswith("no step of the candidate was recorded")
    (foreign,) = ingest_path(store, TRACE)
    answer = json.loads(diff(foreign.run, "counted", "--format", "json").stdout)
    assert answer["environment"] == [] and answer["environment_told"] is False


def test_analyze_reports_what_a_run_without_a_trace_lacks(seen: Seen, tmp_path: Path) -> None:
    store = without_trace(seen, tmp_path)
    for run in ((), ("--run", "counted")):
        failed = CliRunner().invoke(cli, ["analyze", *run, "--store", str(store)]).exception
        assert isinstance(failed, NotFoundError)
        assert "run run has no recorded step" in str(failed) and "--warmup 0" in str(failed)


def test_the_views_contain_observed_calls(store: Path) -> None:
    with closing(sqlite3.connect(store)) as connection:
        calls = connection.execute(
            "SELECT DISTINCT module, asked, choice, mask, file, line FROM attention_calls ORDER BY 1"
        ).fetchall()
        kinds = connection.execute(
            "SELECT module, calls, asked, ran, json_array_length(enabled) FROM observed_calls "
            "WHERE asked = 'math' ORDER BY 1"
        ).fetchall()
    assert calls == [
        (f"layers.{at}.attn", "auto", "flash", "none", "model.py", 18) for at in (0, 1)
    ]
    assert kinds == [(f"layers.{at}.attn", 1, "math", "math", 1) for at in (0, 1)]


def test_a_scrubbed_copy_has_the_same_calls_and_no_names(seen: Seen, tmp_path: Path) -> None:
    assert seen.folder is not None
    copy = scrub(seen.folder, tmp_path / "plain").output
    assert read_observed(copy) == seen.calls
    folder = shutil.copytree(seen.folder, tmp_path / "run")
    (journal,) = folder.glob("[0-9]*.jsonl")
    text = journal.read_text().replace('"file":"model.py"', '"file":"/home/user7/quiet/model.py"')
    failed = {"event": "failed", "why": "OSError('/home/user7/x on blade17.corp.example.com')"}
    journal.write_text(f"{text}{json.dumps(failed)}\nuser7")
    assert audit(folder)
    done = scrub(folder, tmp_path / "copy")
    assert audit(done.output) == []
    assert journal.name in done.files and "processes.jsonl" in done.left_out
    calls = read_observed(done.output)
    assert [call.count for call in calls] == [call.count for call in seen.calls]
    assert "user7" not in (done.output / journal.name).read_text()
    (result,) = ingest_path(tmp_path / "s.db", done.output)
    assert result.warnings == (with_count(CUT_SHORT, 1),)


def test_damaged_journals_are_reported_and_replace_nothing(seen: Seen, tmp_path: Path) -> None:
    assert seen.folder is not None
    folder = shutil.copytree(seen.folder, tmp_path / "run")
    (result,) = ingest_path(tmp_path / "s.db", folder)
    assert result.warnings == ()
    (journal,) = folder.glob("[0-9]*.jsonl")
    whole = journal.read_bytes()
    odd = [b'{"event":["x"]}', b'{"event":"template","template":-1}', b"[1]", b"\xff", b'{"event":']
    journal.write_bytes(whole + b"\n".join([b'{"event":"new kind","x":1}', *odd]))
    (result,) = ingest_path(tmp_path / "s.db", folder)
    assert result.status == "replaced"
    assert result.warnings == (f"{journal.name}: skipped 4 lines that cannot be read",)
    journal.write_bytes(b"")
    (result,) = ingest_path(tmp_path / "empty.db", folder)
    assert result.warnings[0] == "none of the program's processes recorded an attention call"
    journal.write_bytes(whole[: len(whole) // 3])
    failed = CliRunner().invoke(cli, ["ingest", str(folder), "--store", str(tmp_path / "s.db")])
    assert failed.exit_code == 1 and "observed calls" in failed.stderr


COMPILED = """
from torch.nn.attention import SDPBackend, sdpa_kernel
model = Model()
compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
    for _ in range(4):
        compiled(torch.randn(2, 16, 32){}).sum().backward()
        optimizer.step()
"""


def test_gates_use_the_settings_when_compiled_code_was_traced(tmp_path: Path) -> None:
    options = ("--steps", "1", "--warmup", "1", "--fail-on", "requested-not-run,noop-mask")
    done = observe(tmp_path, write(tmp_path, COMPILED.format("")), options=options)
    assert done.code == 0, done.stderr
    (row,) = the_map(tmp_path / "profharness.db").rows
    assert (row.mode, row.asked, row.ran, row.mask) == ("compile", "flash", "flash", "none")
    program = write(tmp_path, COMPILED.format(", torch.ones(16, 16, dtype=torch.bool)"))
    options = ("--profiler", "none", "--fail-on", "noop-mask")
    done = observe(tmp_path, program, options=options)
    assert done.code == 3
    assert "the effect of the mask is unknown (torch.compile traced this call" in done.stderr


def test_a_gate_without_a_recording_fails_a_successful_program(tmp_path: Path) -> None:
    program = write(tmp_path, "infer(1)")
    options = ("--profiler", "none", "--fail-on", "math-fallback,eager-attention")
    done = observe(tmp_path, program, options=options)
    assert done.code == 3
    failed = re.findall(r"^gate failed: --fail-on (\S+) in .*:\n  (.*)", done.stderr, re.M)
    assert [name for name, _ in failed] == ["eager-attention"]
    assert failed[0][1].startswith("the result is unknown")


def test_gates_are_parsed_before_the_program_starts(tmp_path: Path) -> None:
    for option in (("--fail-on", "maths"), ("--expect", "fash@*")):
        arguments = ["observe", *option, "--", "touch", str(tmp_path / "ran")]
        failed = CliRunner().invoke(cli, arguments)
        assert isinstance(failed.exception, UsageError) and not (tmp_path / "ran").exists()
