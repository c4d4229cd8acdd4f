"""The backends naive-compiled and flex: real compilation by Inductor on this CPU, and the notes on
SDPA that Inductor substituted for the plain form.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from profharness.attention.backends import BACKENDS
from profharness.attention.config import parse_config
from profharness.attention.dispatch.by_rule import explain_by_rule, named_platforms
from profharness.commands.explain import with_store
from profharness.commands.kernels.tables import cell_notes
from profharness.measurements.agreement import replaced_by, replacement_notes
from profharness.rows import NAIVE_COMPILED, REPLACEMENTS, CellRow, KernelRow
from profharness.run import Cell, Protocol, Run, write_run
from profharness.store import ingest_path

ROOT = Path(__file__).parents[2]
COMPILE = """
import sys, torch
from profharness.recording.worker.attention import naive_compiled

def count(shape, causal, scale=None):
    attention = naive_compiled()
    q, k, v = (torch.randn(shape) for _ in range(3))
    with torch.no_grad():
        out = attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=False)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    assert (out - want).abs().max() < 1e-4
    return attention.tuning()["sdpa_replacements"]

# beyond Dynamo's recompile limit of 8 graphs for one code object, and only its own are counted
print([count((1, 2, 8, 4 * size), False) for size in range(1, 1 + int(sys.argv[1]))])
first = naive_compiled()
again = naive_compiled()
q = torch.randn(1, 1, 4, 4)
with torch.no_grad():
    first(q, q, q, is_causal=False, scale=2.0, enable_gqa=False)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    again(q, q, q, is_causal=False, scale=2.0, enable_gqa=False)
    first(q, q, q, is_causal=False, scale=2.0, enable_gqa=False)  # keeps its graph
    print(torch._dynamo.utils.counters["stats"]["unique_graphs"] - before)
"""
FLEX = """
import torch
from torch._dynamo.utils import counters
from torch.nn.functional import scaled_dot_product_attention
from profharness.attention.backends import TORCH_ROWS
from profharness.recording.worker.attention import naive_compiled

def call(attention, head_dim, causal):
    q = torch.randn(1, 2, 32, head_dim)
    k, v = torch.randn(2, 1, 1, 32, head_dim)
    arguments = {"is_causal": causal, "scale": None, "enable_gqa": True}
    with torch.no_grad():
        out = attention(q, k, v, **arguments)
    assert (out - scaled_dot_product_attention(q, k, v, **arguments)).abs().max() < 1e-4

def graphs():
    return counters["stats"]["unique_graphs"]

load = next(backend.load for backend in TORCH_ROWS if backend.name == "flex")
naive, first = naive_compiled(), load()
call(naive, 16, False)
call(first, 16, True)
before = graphs()
for size in range(1, 11):  # beyond Dynamo's recompile limit of 8 graphs for one code object
    call(load(), 16 * size, size % 2 == 0)
print(graphs() - before)
before = graphs()
call(naive, 16, False)
call(first, 16, True)
print(graphs() - before)
"""
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="Inductor needs g++ on a CPU")


def counted(cache: Path, graphs: int) -> str:
    own = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return printed(COMPILE, str(graphs), **own)


def printed(code: str, *arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code, *arguments],
        capture_output=True, text=True, env=os.environ | variables, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@needs_compiler
def test_inductor_replaces_naive_by_sdpa_and_a_warm_cache_counts_it(
    tmp_path: Path,
) -> None:
    assert counted(tmp_path, 10) == f"{[1] * 10}\n1\n"
    assert (
        counted(tmp_path, 1) == "[1]\n1\n"
    )  # a result from the cache on disk would not be counted


def test_each_load_of_flex_compiles_and_others_keep_their_graphs() -> None:
    """Covers Dynamo, which is the same on a CPU. Inductor's output is not the same."""
    assert printed(FLEX, TORCH_COMPILE_OVERRIDE_BACKENDS=">=0:aot_eager") == "10\n0\n"


def test_compiled_backends_need_a_gpu_and_the_plain_form() -> None:
    backend = BACKENDS[NAIVE_COMPILED]
    assert backend.devices == ("cuda",)
    reason = backend.absent()
    assert reason is None or "triton" in reason


def cell(config: str = "b1-h1-s16-d8192-fp16", op: str | None = None, **more: object) -> CellRow:
    row = CellRow("r", "c1", config, NAIVE_COMPILED, "ok", None, None, op, 5, (), ())
    return replace(row, **more)  # type: ignore[arg-type]


def kernel(family: str, name: str = "k") -> KernelRow:
    return KernelRow(
        *("r", "b1-h1-s16-d8192-fp16", NAIVE_COMPILED, "c1", "torch", "ok", None),
        *(name, name, "kernel", family, (1, 1, 1), (128, 1, 1), 32, None, None, 0, 5, 1.0),
        *(10, 50, 10, 10, 1.0, 0, None, None, None, None, 0),
    )


EFFICIENT = "aten::_scaled_dot_product_efficient_attention"


def test_each_witness_alone_shows_a_replacement() -> None:
    assert replaced_by(cell(op=EFFICIENT)) == "efficient"
    assert replaced_by(cell(), [kernel("efficient"), kernel("elementwise")]) == "efficient"
    assert replaced_by(cell(), [kernel("triton"), kernel("gemm"), kernel("softmax")]) is None
    assert replaced_by(cell()) is None
    assert replaced_by(replace(cell(op=EFFICIENT), backend="naive")) is None
    assert replaced_by(cell(op=EFFICIENT, status="error")) is None


def test_the_workers_count_shows_a_replacement_without_a_trace() -> None:
    assert replaced_by(cell(tuning={REPLACEMENTS: 1})) == ""
    assert replaced_by(cell(tuning={REPLACEMENTS: 0})) is None


def test_kernels_prints_a_note_below_the_table() -> None:
    def said(one: CellRow, *rows: KernelRow) -> list[str]:
        notes = cell_notes(one, rows)
        return [
            note.text
            for note in notes
            if note.text.startswith("torch.compile replaced the attention")
        ]

    assert said(cell(), kernel("flash")) == [
        "torch.compile replaced the attention with scaled_dot_product_attention, which ran flash"
    ]
    assert said(cell(tuning={REPLACEMENTS: 1})) == [
        "torch.compile replaced the attention with scaled_dot_product_attention"
    ]
    assert said(cell(), kernel("triton")) == said(cell(backend="naive"), kernel("flash")) == []


def test_explain_prints_a_note_on_the_newest_run_with_a_count(tmp_path: Path) -> None:
    plain = parse_config("2,8,512,64,bf16")
    for day, counted in ((1, 1), (2, 2), (3, 0)):
        cells = (
            Cell("c1", plain, NAIVE_COMPILED, "ok", tuning={REPLACEMENTS: counted}),
            Cell("c2", plain, "naive", "ok"),
        )
        name, when = f"r{day}", f"2026-01-0{day}T00:00:00+00:00"
        told = {"torch": "2.11.0", "device_type": "cuda", "capability": "9.0"}
        (tmp_path / name).mkdir()
        write_run(tmp_path / name, Run(name, when, ("events",), Protocol(), cells, told))
        ingest_path(tmp_path / "s.db", tmp_path / name)
    places = named_platforms("2.11", "H200", None, None, None)
    configs = (plain, parse_config("2,8,256,64,bf16"))
    answers = [explain_by_rule(config, place) for config in configs for place in places]
    same, other = (answer.caveats for answer in with_store(answers, tmp_path / "s.db"))
    said = "torch.compile replaced the attention with scaled_dot_product_attention, in run r2"
    assert [text for text in same if "replaced" in text] == [f"{NAIVE_COMPILED}: {said}"]
    assert not [text for text in other if "replaced" in text]


def test_a_note_names_few_configs_and_counts_the_rest() -> None:
    cells = [cell(f"b1-h1-s{size}-d64-fp16", EFFICIENT) for size in (16, 32, 64, 128, 256)]
    cells += [cell("b1-h1-s512-d64-fp16", f"{EFFICIENT}_math"), cell()]
    notes = replacement_notes(cells)
    where, text = notes[0]
    assert where == (
        "naive-compiled at b1-h1-s16-d64-fp16, b1-h1-s32-d64-fp16, b1-h1-s64-d64-fp16 and 2 more"
    )
    expected = "torch.compile replaced the attention with scaled_dot_product_attention, which ran efficient"
    assert text == expected
    assert len(notes) == 2
