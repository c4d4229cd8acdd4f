"""The contents of traces/: the real H200 run, complete, correctly attributed, and without private data."""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from profharness.attention.config import parse_config
from profharness.commands.kernels.tables import join_kernels
from profharness.run import read_run
from profharness.scrub import audit
from profharness.store import ingest_path, open_store
from profharness.store.queries import Store

TRACES = Path(__file__).resolve().parents[1] / "traces"
H200 = TRACES / "h200-torch2.11"
THREE = TRACES / "h200-torch-nsys-ncu"
RUN = read_run(H200).run
THREE_RUN = read_run(THREE).run
BACKWARD = parse_config("2,8,1024,64,fp16,causal,bwd")
DECODE = parse_config("1,32,1,128,bf16,kv_heads=8,seq_kv=4096")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Yield a store with everything in traces/."""
    path = tmp_path_factory.mktemp("traces") / "store.db"
    ingest_path(path, TRACES)
    with open_store(path) as opened:
        yield opened


def test_checksums_equal_those_of_the_readme() -> None:
    listed = dict(
        reversed(line.split("  "))
        for line in (TRACES / "README.md").read_text().splitlines()
        if re.fullmatch(r"[0-9a-f]{64}  \S+", line)
    )
    files = [path for path in TRACES.glob("*/**/*") if path.is_file()]
    found = {
        str(path.relative_to(TRACES)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }
    assert listed == found


def test_they_contain_nothing_private() -> None:
    files = [path for path in TRACES.glob("*/**/*") if path.is_file()]
    assert len(files) > 20
    # one folder at a time, to check the names of its files too
    folders = [path for path in TRACES.iterdir() if path.is_dir()]
    assert [str(finding) for folder in folders for finding in audit(folder)] == []
    kept = re.compile(r"run\.json|\d+\.jsonl|[\w.-]+\.(?:json\.gz|sqlite|sqlite\.gz|csv|csv\.gz)")
    assert [path for path in files if not kept.fullmatch(path.name)] == []
    private = re.compile(
        rb"host_name|traceName|trace_id|/root/|/home/|/tmp/|HOSTNAME|\bPATH=|\.local\b"
    )
    for path in files:
        data = path.read_bytes()
        text = gzip.decompress(data) if path.suffix == ".gz" else data
        assert not private.search(text), path


def test_the_audit_finds_what_a_careless_capture_leaves(tmp_path: Path) -> None:
    trace = gzip.decompress((H200 / "c0001.torch.json.gz").read_bytes())
    careless = trace.replace(b'{"schemaVersion"', b'{"host_name": "blade17", "schemaVersion"', 1)
    assert careless != trace
    (tmp_path / "c0001.torch.json.gz").write_bytes(gzip.compress(careless))
    assert [finding.text for finding in audit(tmp_path)] == ["host_name"]


def test_every_cell_is_ok_or_refused_with_a_reason(store: Store) -> None:
    cells = store.cells(RUN)
    assert len(cells) == len(read_run(H200).cells) == 24
    for cell in cells:
        assert cell.status in ("ok", "refused")
        assert bool(cell.refusals) == (cell.status == "refused")
        assert not cell.warnings
        assert all(refusal.code != "unknown" for refusal in cell.refusals)


def test_op_choice_and_kernels_agree_on_the_backend(store: Store) -> None:
    rows = store.kernels(RUN)
    for cell in store.cells(RUN):
        if cell.status != "ok":
            continue
        assert cell.choice is not None
        assert cell.choice in str(cell.sdpa_op)
        families = {row.family for row in rows if row.cell == cell.cell}
        if cell.choice != "math":
            assert any(family.startswith(cell.choice) for family in families)
        else:
            assert {"softmax"} <= families
            assert {"gemm", "gemv"} & families


@pytest.mark.parametrize(
    ("backend", "families"),
    [
        ("flash", {"flash", "flash_bwd"}),
        ("efficient", {"efficient", "efficient_bwd"}),
        ("cudnn", {"cudnn", "cudnn_bwd"}),
    ],
)
def test_backward_kernels_are_in_their_cell(store: Store, backend: str, families: set[str]) -> None:
    rows = store.kernels(RUN, configs=[BACKWARD], backends=[backend])
    assert families <= {row.family for row in rows}
    assert all(row.launches == 5 * (row.launches_per_call or 0) for row in rows)


def test_launches_of_the_decode_call(store: Store) -> None:
    rows = store.kernels(RUN, configs=[DECODE], backends=["flash"])
    main = next(row for row in rows if row.family == "flash_splitkv")
    assert (main.grid, main.block) == ((1, 32, 8), (128, 1, 1))
    assert (main.registers_per_thread, main.shared_bytes) == (246, 81920)
    assert main.occupancy == pytest.approx(0.125)
    assert main.occupancy_limiter == "registers"
    assert main.dynamic_shared_bytes is None


def test_three_profilers_agree_on_every_kernel(store: Store) -> None:
    joined = join_kernels(store.kernels(THREE_RUN))
    assert len(joined) > 100
    assert not [(each.first.kernel, one) for each in joined for one in each.disagreements]
    for each in joined:
        wanted = {"torch", "nsys"} | ({"ncu"} if each.first.grid else set())  # memset: no kernel
        assert each.rows.keys() == wanted
        for name in ("registers_per_thread", "shared_bytes", "grid", "block"):
            assert len({getattr(row, name) for row in each.rows.values()}) == 1


@pytest.mark.parametrize("profiler", ["torch", "nsys", "ncu"])
def test_every_profiler_has_the_backward_kernels(store: Store, profiler: str) -> None:
    for backend in ("flash", "efficient", "cudnn"):
        rows = store.kernels(
            THREE_RUN, configs=[BACKWARD], backends=[backend], profilers=[profiler]
        )
        assert any(row.family == f"{backend}_bwd" for row in rows)


def test_counters_belong_to_attention(store: Store) -> None:
    rows = store.kernels(THREE_RUN, configs=[DECODE], backends=["flash"], profilers=["ncu"])
    main = next(row for row in rows if row.family == "flash_splitkv")
    keys_and_values = 2 * 8 * 4096 * 128 * 2
    read, unit = main.metrics["dram__bytes_read.sum"]
    assert unit == "byte"
    assert keys_and_values <= read < 1.05 * keys_and_values
    waves, _ = main.metrics["launch__waves_per_multiprocessor"]
    assert waves == pytest.approx(256 / (2 * 132), rel=0.01)
