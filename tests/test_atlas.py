"""scripts/make_atlas.py: the cells that it plans, how it resumes after a kill, and what it reads
from a trace.
"""

from __future__ import annotations

import gzip
import itertools
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import atlas_cells
import atlas_fleet
import make_atlas
import pytest
from atlas_cells import Cell, Point, Sampler

from profharness.attention.config import parse_config
from profharness.attention.dispatch.machine import machine_for
from profharness.errors import UsageError

ROOT = Path(__file__).parents[1]
H200 = machine_for("H200", "2.11")
COUNT = 240  # configs


@pytest.fixture(scope="module")
def planned() -> list[list[Cell]]:
    return list(itertools.islice(Sampler(H200).cells(), COUNT))


def test_the_plan_is_the_same_for_the_same_seed(planned: list[list[Cell]]) -> None:
    again = list(itertools.islice(Sampler(H200).cells(), 40))
    assert again == planned[:40]
    assert list(itertools.islice(Sampler(H200, seed=1).cells(), 40)) != again


def test_cells_are_distinct_configs_within_the_bounds(
    planned: list[list[Cell]],
) -> None:
    cells = [cell for each in planned for cell in each]
    assert len({(cell.config, cell.backend) for cell in cells}) == len(cells)
    for each in planned:
        config = parse_config(each[0].config)
        assert config.label == each[0].config
        assert atlas_cells.is_bounded(config)
        assert len({cell.config for cell in each}) == 1
        for cell in each:
            assert cell.estimate_us <= atlas_cells.OVERLONG * atlas_cells.LONGEST_US
            if cell.backend == "math":
                assert atlas_cells.math_bytes(config) <= atlas_cells.MATH_BYTES
    long = [cell for cell in cells if cell.estimate_us > atlas_cells.LONGEST_US]
    assert len(long) <= len(cells) / 50


@pytest.mark.parametrize("begin", [1, 1000, 20_000])
def test_every_prefix_of_the_sequence_fills_its_space(begin: int) -> None:
    """Each eighth of each coordinate has at least half of its share, and so has each quarter of a pair."""
    points = [Point(0, number) for number in range(begin, begin + 256)]
    for name in Point.NAMES:
        eighths = [int(8 * point[name]) for point in points]
        assert min(map(eighths.count, range(8))) >= 16, name
    for one, other in itertools.combinations(Point.NAMES, 2):
        squares = [(int(2 * point[one]), int(2 * point[other])) for point in points]
        counts = [squares.count(square) for square in itertools.product((0, 1), repeat=2)]
        assert min(counts) >= 32, (one, other)


def test_every_prefix_has_all_regimes_and_backends(planned: list[list[Cell]]) -> None:
    for count in (30, 60, 120, COUNT):
        cells = [cell for each in planned[:count] for cell in each]
        regimes = [each[0].regime for each in planned[:count]]
        for name, weight in atlas_cells.REGIMES:
            assert regimes.count(name) >= weight * count / 3, (name, count)
        for backend in ("auto", "flash", "efficient", "cudnn", "math"):
            assert sum(cell.backend == backend for cell in cells) >= count / 3
        dtypes = {parse_config(each[0].config).dtype for each in planned[:count]}
        assert dtypes == {"fp16", "bf16", "fp32"}


def test_pairs_of_neighbours_are_on_both_sides_of_a_choice(planned: list[list[Cell]]) -> None:
    sampler = Sampler(H200)
    configs = [parse_config(each[0].config) for each in planned]
    flips = alike = 0
    for one, other in itertools.pairwise(configs):
        fields = ("batch", "num_heads", "num_kv_heads", "seq_len_q", "seq_len_kv", "head_dim",
                  "dtype", "causal", "mask", "bwd")  # fmt: skip
        if sum(getattr(one, name) != getattr(other, name) for name in fields) == 1:
            alike += 1
            flips += sampler.ask(one).choice != sampler.ask(other).choice
    assert alike >= COUNT / 8
    assert flips >= COUNT / 20


def lines(folder: Path) -> list[dict[str, Any]]:
    rows = [row for path in make_atlas.shards_of(folder) for row in make_atlas.lines_of(path)]
    return [row for row in rows if "config" in row]


def started(folder: Path, cells: int) -> subprocess.Popen[bytes]:
    words = f"--device cpu --longest 5.2 --workers 1 --batch 6 --cells {cells}".split()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder.parent)}
    argv = [sys.executable, str(ROOT / "scripts" / "make_atlas.py"), "measure", str(folder)]
    return subprocess.Popen(
        [*argv, "--seconds", "600", *words], env=environment, stdout=subprocess.PIPE
    )


def wait_for_lines(process: subprocess.Popen[bytes], folder: Path, more_than: int) -> None:
    while len(lines(folder)) <= more_than:
        assert process.poll() is None
        time.sleep(0.02)


def children(process: subprocess.Popen[bytes]) -> dict[int, str]:
    """Return the child processes of a process, with their command lines."""
    found = {}
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        for pid in (task / "children").read_text().split():
            found[int(pid)] = (
                Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            )
    return found


def wait_for_end(pids: list[int]) -> None:
    """Wait for processes that are not children of this one."""
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.02)


def test_a_call_resumes_after_a_kill_and_a_dead_worker_costs_one_cell(tmp_path: Path) -> None:
    folder = tmp_path / "atlas"
    first = started(folder, cells=500)
    try:
        wait_for_lines(first, folder, 0)
        below = list(children(first))
    finally:
        first.kill()
        first.communicate()
    wait_for_end(below)
    kept = lines(folder)
    with make_atlas.shards_of(folder)[0].open("a") as shard:
        shard.write('{"config": "b1-h')  # a line cut off, as on a slower disk
    second = started(folder, cells=40)
    try:
        while len(make_atlas.shards_of(folder)) < 2:  # the worker is ready and has its first batch
            assert second.poll() is None
            time.sleep(0.02)
        (worker,) = (pid for pid, argv in children(second).items() if "atlas_worker" in argv)
        os.kill(worker, signal.SIGKILL)
        assert second.wait() == 0
    finally:
        second.kill()
        second.communicate()
    rows = lines(folder)
    assert rows[: len(kept)] == kept
    assert len(rows) >= len(kept) + 40
    keys = [(row["config"], row["backend"]) for row in rows]
    assert len(set(keys)) == len(keys)
    plan = itertools.islice(Sampler(H200, longest_us=5.2).cells(), len(keys))
    assert set(keys) <= {(cell.config, cell.backend) for each in plan for cell in each}
    failed = [row for row in rows if row["status"] == "error"]
    assert len(failed) <= 1
    assert all("ended with -9" in row["message"] for row in failed)
    for row in rows:
        assert row["status"] == "ok" or row["message"]
        if row["status"] == "ok":
            assert row["kernel_us"] > 0
            assert len(row["kernels"]) == len(row["kernel_us_each"])
            assert row["backend"] in ("auto", row["choice"])
    assert make_atlas.main(["stats", str(folder)]) == 0
    packed = tmp_path / "atlas.tar.xz"
    assert make_atlas.main(["pack", str(folder), str(packed)]) == 0
    with tarfile.open(packed) as archive:
        assert archive.getnames() == [path.name for path in make_atlas.shards_of(folder)]


def test_a_fleet_gives_each_lane_its_part_in_the_folder_of_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stub = tmp_path / "stub.py"
    stub.write_text(
        "import os, sys\nprint(*sys.argv[1:], os.environ.get('CUDA_VISIBLE_DEVICES'))\n"
    )
    lanes = [
        {"lane": f"gpu {place}", "gpu": gpu, "uuid": f"GPU-{place}"}
        for place, gpu in enumerate(("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H200"))
    ]
    monkeypatch.setattr(atlas_fleet, "SCRIPT", stub)
    monkeypatch.setattr(atlas_fleet, "local_lanes", lambda count, _: lanes[:count])
    code = make_atlas.main(["measure", str(tmp_path), "--scheduler", "local", "--cells", "9"])
    assert code == 0
    told = sorted(capfd.readouterr().out.splitlines())
    assert [line.split(":")[0] for line in told] == ["gpu 0", "gpu 1", "gpu 2"]
    for line, place, folder, part in zip(
        told, range(3), ("h200", "h100-80gb-hbm3", "h200"), ("0/2", "0/1", "1/2"), strict=True
    ):
        assert f"measure {tmp_path}/nvidia-{folder} --part {part} " in line
        assert "--cells 9" in line
        assert line.endswith(f" GPU-{place}")
    for words in (["--scheduler", "tcp://x"], ["--scheduler", "local", "--part", "0/2"]):
        assert make_atlas.main(["measure", str(tmp_path), *words]) == 1


def test_parts_form_the_whole_plan_and_shards_have_separate_files(
    planned: list[list[Cell]], tmp_path: Path
) -> None:
    plan = planned[:30]
    parts = [
        plan[place::count] for place, count in (make_atlas.part_of(f"{n}/3") for n in range(3))
    ]
    assert sorted(map(repr, itertools.chain(*parts))) == sorted(map(repr, plan))
    with pytest.raises(SystemExit):
        make_atlas.main(["measure", str(tmp_path), "--part", "3/3"])
    shards = [make_atlas.new_shard(tmp_path, {"torch": "2.11.0"}, 0).path for _ in range(2)]
    (tmp_path / "shard-0003.jsonl").touch()  # another process is about to write its first line
    shards.append(make_atlas.new_shard(tmp_path, {"torch": "2.11.0"}, 0).path)
    assert len({*shards, tmp_path / "shard-0003.jsonl"}) == 4


def test_kernels_of_a_real_trace(tmp_path: Path) -> None:
    """A cell of an H200: in order, with launch configurations. A memset has none."""
    packed = ROOT / "traces" / "h200-torch2.11" / "c0001.torch.json.gz"
    path = tmp_path / "1.json"
    path.write_bytes(gzip.decompress(packed.read_bytes()))
    cell = {"config": "b2-h8-s512-d64-fp16", "backend": "auto", "regime": "prefill"}
    results = [{"status": "refused", "message": "no"}, {"status": "ok", "choice": "cudnn"}]
    refused, row = make_atlas.rows_of([cell, cell], results, str(path))
    assert refused == cell | results[0]
    assert not path.exists()
    names, grids, blocks, registers, shared = zip(*row["kernels"], strict=True)
    assert names[0] == "Memset (Device)"
    assert names[1].startswith("cudnn_generated_fort_native_sdpa_sm90_flash_fprop")
    assert (grids, blocks) == ((None, (64, 1, 1)), (None, (384, 1, 1)))
    assert (registers, shared) == ((None, 168), (None, 134144))
    assert (row["kernel_us"], row["calls"]) == (pytest.approx(8.224), 5)
    assert sum(row["kernel_us_each"]) == pytest.approx(8.224)


def test_an_unreadable_trace_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "1.json"
    path.write_text('{"traceEvents": [')
    cell = {"config": "b2-h8-s512-d64-fp16", "backend": "auto", "regime": "prefill"}
    (row,) = make_atlas.rows_of([cell], [{"status": "ok"}], str(path))
    assert row["status"] == "error"
    assert str(tmp_path) not in row["message"]


def test_folders_of_others_are_refused(tmp_path: Path) -> None:
    environment = {"device_type": "cuda", "gpu": "NVIDIA H200", "torch": "2.11.0+cu130"}
    assert make_atlas.new_shard(tmp_path, environment, 0).path.name == "shard-0001.jsonl"
    with pytest.raises(
        UsageError, match="contains cells of gpu NVIDIA H200; this machine has NVIDIA H100"
    ):
        make_atlas.new_shard(tmp_path, environment | {"gpu": "NVIDIA H100"}, 0)
    assert make_atlas.new_shard(tmp_path, environment, 0).path.name == "shard-0002.jsonl"
    for line, why in (
        ('{"config": "b1-h1-s1-d8"}', "line 1: no backend"),
        ('{"config": "b1-h1-s1-d8", "backend": "math", "status": "ok"}', "not a shard of an atlas"),
        ('{"atlas": 2}', "not a shard of an atlas of version 1"),
    ):
        (tmp_path / "shard-0003.jsonl").write_text(f"{line}\n")
        with pytest.raises(UsageError, match=why):
            list(make_atlas.lines_of(tmp_path / "shard-0003.jsonl"))
    (tmp_path / "shard-0003.jsonl").write_text('{"atlas": 1}\n{"conf\n{}\n')
    with pytest.raises(UsageError, match="line 2"):
        list(make_atlas.lines_of(tmp_path / "shard-0003.jsonl"))


def test_inputs_of_the_pool_have_the_layout_of_a_capture() -> None:
    worker = pytest.importorskip("atlas_worker")
    from profharness.recording.worker.attention import make_inputs

    pool = worker.Pool("cpu")
    for text in (
        "2,4,33,40,fp16,bwd,kv_heads=2,seq_kv=65",
        "1,2,8,16,fp32,mask=bool,mask_shape=b1qk",
    ):
        config = parse_config(text)
        made, wanted = pool.inputs(config), make_inputs(config, "cpu", 0)
        for name in ("query", "key", "value", "mask", "grad"):
            one, other = getattr(made, name), getattr(wanted, name)
            assert (one is None) == (other is None)
            if one is not None:
                assert (one.shape, one.stride(), one.dtype) == (
                    other.shape,
                    other.stride(),
                    other.dtype,
                )
                assert (one.is_leaf, one.requires_grad) == (other.is_leaf, other.requires_grad)
                assert one.storage_offset() * one.element_size() % worker.ALIGNED == 0
    assert made.mask[..., 0].all()
    assert worker.text_of("cannot open /opt/x/y.so: no\nmore") == "cannot open …: no"
