"""The backend naive-compiled: Inductor on this CPU with real compiles, and what is told where it put
SDPA in the place of the plain form.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from profharness.backends import BACKENDS
from profharness.backends.compiled import NAIVE_COMPILED, REPLACEMENTS
from profharness.report.replaced import replacement, replacement_notes, replacements
from profharness.rows import CellRow, KernelRow

ROOT = Path(__file__).parents[2]
COMPILE = """
import sys, torch
from profharness.backends.compiled import load_naive_compiled

def count(shape, causal, scale=None):
    attention = load_naive_compiled()
    q, k, v = (torch.randn(shape) for _ in range(3))
    with torch.no_grad():
        out = attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=False)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    assert (out - want).abs().max() < 1e-4
    return attention.tuning()["sdpa_replacements"]

# beyond Dynamo's recompile limit of 8 graphs for one code object, and only its own are counted
print([count((1, 2, 8, 4 * size), False) for size in range(1, 1 + int(sys.argv[1]))])
first = load_naive_compiled()
again = load_naive_compiled()
q = torch.randn(1, 1, 4, 4)
with torch.no_grad():
    first(q, q, q, is_causal=False, scale=2.0, enable_gqa=False)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    again(q, q, q, is_causal=False, scale=2.0, enable_gqa=False)
    first(q, q, q, is_causal=False, scale=2.0, enable_gqa=False)  # keeps its graph
    print(torch._dynamo.utils.counters["stats"]["unique_graphs"] - before)
"""
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="Inductor needs g++ on a CPU")


def counted(cache: Path, graphs: int) -> str:
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(graphs)],
        capture_output=True, text=True, env=env, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@needs_compiler
def test_inductor_puts_sdpa_in_the_place_of_naive_and_it_is_counted_with_a_warm_cache_too(
    tmp_path: Path,
) -> None:
    assert counted(tmp_path, 10) == f"{[1] * 10}\n1\n"
    assert counted(tmp_path, 1) == "[1]\n1\n"  # from the cache on disk nothing would be counted


def test_it_exists_on_a_gpu_alone_and_needs_the_plain_form() -> None:
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


def test_each_witness_alone_tells_of_a_replacement() -> None:
    by_op = replacement(cell(op=EFFICIENT))
    by_kernel = replacement(cell(), [kernel("efficient"), kernel("elementwise")])
    assert by_op == by_kernel
    assert by_op is not None
    assert by_op.took == "efficient"
    assert replacement(cell(), [kernel("triton"), kernel("gemm"), kernel("softmax")]) is None
    assert replacement(cell()) is None
    assert replacement(replace(cell(op=EFFICIENT), backend="naive")) is None
    assert replacement(cell(op=EFFICIENT, status="error")) is None


def test_what_the_worker_counted_tells_of_it_without_a_trace() -> None:
    if "tuning" not in CellRow.__dataclass_fields__:
        pytest.skip("cells have no tuning yet")
    found = replacement(cell(tuning={REPLACEMENTS: 1}))
    assert found is not None
    assert found.took is None
    assert replacement(cell(tuning={REPLACEMENTS: 0})) is None


def test_a_note_names_few_configs_and_how_many_more() -> None:
    cells = [cell(f"b1-h1-s{size}-d64-fp16", EFFICIENT) for size in (16, 32, 64, 128, 256)]
    found = replacements([*cells, cell("b1-h1-s512-d64-fp16", f"{EFFICIENT}_math"), cell()])
    where, text = replacement_notes(found)[0]
    assert where == (
        "naive-compiled at b1-h1-s16-d64-fp16, b1-h1-s32-d64-fp16, b1-h1-s64-d64-fp16 and 2 more"
    )
    expected = "torch.compile replaced it by scaled_dot_product_attention, which took efficient"
    assert text == expected
    assert len(replacement_notes(found)) == 2
