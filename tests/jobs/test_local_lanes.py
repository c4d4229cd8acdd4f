"""GPUs and cores of lanes on this host, and the lock of a GPU."""

from __future__ import annotations

import fcntl
import os
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from waiting import until

from profharness import environment
from profharness.environment import VisibleGpu, gpu_name, gpu_present, visible_gpus
from profharness.errors import UsageError
from profharness.files import open_lock_file, try_lock
from profharness.jobs.fleet import gpu_cores, local_lanes, parse_cores, split_cores
from profharness.program.changes import environment_changes
from profharness.recording import capture


class FakeNvml(ModuleType):
    """Three GPUs, the last one split into two MIG instances."""

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlSystemGetDriverVersion(self) -> str:
        return "590.1"

    def nvmlDeviceGetCount(self) -> int:
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"GPU-{index}abc"

    def nvmlDeviceGetUUID(self, handle: str) -> bytes:
        return handle.encode()

    def nvmlDeviceGetName(self, handle: str) -> str:
        return "NVIDIA H100 MIG 1g.10gb" if handle.startswith("MIG") else "NVIDIA H100"

    def nvmlDeviceGetMemoryInfo(self, _: str) -> Any:
        return SimpleNamespace(total=80 << 30)

    def nvmlDeviceGetPciInfo(self, handle: str) -> Any:
        return SimpleNamespace(busId=f"00000000:{handle[4]}B:00.0".encode())

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        return [int(handle == "GPU-2abc"), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, _: str) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, _: str, index: int) -> str:
        if index > 1:
            raise self.NVMLError
        return f"MIG-{index}def"


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml("pynvml"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("three_gpus")
@pytest.mark.parametrize(
    ("variable", "uuids"),
    [
        (None, ["GPU-0abc", "GPU-1abc", "MIG-0def", "MIG-1def"]),
        ("", []),
        ("-1", []),
        ("1", ["GPU-1abc"]),
        ("1,0", ["GPU-1abc", "GPU-0abc"]),
        ("2", ["MIG-0def"]),
        ("0,9,1", ["GPU-0abc"]),
        ("GPU-1", ["GPU-1abc"]),
        ("MIG-1def,GPU-0abc", ["MIG-1def", "GPU-0abc"]),
        ("GPU-", []),
    ],
)
def test_visible_gpus_are_those_of_cuda(
    variable: str | None, uuids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert [gpu.uuid for gpu in visible_gpus()] == uuids
    assert gpu_present() == bool(uuids)
    assert (gpu_name() is None) == (not uuids)


@pytest.mark.usefixtures("three_gpus")
def test_each_gpu_is_a_lane_with_its_uuid() -> None:
    lanes = local_lanes(None, "auto")
    assert [lane["uuid"] for lane in lanes] == ["GPU-0abc", "GPU-1abc", "MIG-0def", "MIG-1def"]
    assert [lane["lane"] for lane in lanes] == ["gpu 0", "gpu 1", "gpu 2", "gpu 3"]
    assert len({lane["gpu_key"] for lane in lanes}) == 4
    assert not any("GPU-" in str(lane["gpu_key"]) for lane in lanes)
    assert [gpu.bus for gpu in visible_gpus()[:2]] == ["0000:0b:00.0", "0000:1b:00.0"]
    assert len(local_lanes(2, "auto")) == 2
    with pytest.raises(UsageError, match=r"4 GPUs are visible"):
        local_lanes(5, "auto")
    assert [lane["lane"] for lane in local_lanes(3, "cpu")] == ["cpu 0", "cpu 1", "cpu 2"]


@pytest.mark.usefixtures("three_gpus")
def test_lost_gpu_does_not_renumber_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def handle(_: FakeNvml, index: int) -> str:
        if index == 0:
            raise FakeNvml.NVMLError
        return f"GPU-{index}abc"

    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetHandleByIndex", handle)
    assert [gpu.uuid for gpu in visible_gpus()] == ["GPU-1abc", "MIG-0def", "MIG-1def"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu.uuid for gpu in visible_gpus()] == ["GPU-1abc"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert visible_gpus() == ()


def test_parse_cores_reads_the_format_of_the_kernel() -> None:
    assert parse_cores("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_cores("\n") == set()


def test_lanes_split_the_cores_that_they_have_in_common() -> None:
    low, high = list(range(8)), list(range(8, 16))
    assert split_cores([low, low, high], 2) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert split_cores([[0, 1, 2], [0, 1, 2]], 2) == [[], []]
    assert split_cores([[0, 1], [0, 1]], 1) == [[0], [1]]
    assert split_cores([], 1) == []


def test_lane_gets_whole_cores_close_to_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for bus, cores in (("0000:0b:00.0", "0-1,4-5"), ("0000:1b:00.0", "2-3,6-7")):
        folder = tmp_path / "bus/pci/devices" / bus
        folder.mkdir(parents=True)
        (folder / "local_cpulist").write_text(cores)
    for cpu in range(8):  # cpu and cpu + 4 are threads of the same core
        folder = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}")
    gpus = [VisibleGpu(f"GPU-{bus}", "H100", 1, bus) for bus in ("0000:0b:00.0", "0000:1b:00.0")]
    assert gpu_cores(gpus, tmp_path) == [[0, 4, 1, 5], [2, 6, 3, 7]]
    assert gpu_cores([gpus[0], gpus[0]], tmp_path) == [[0, 4], [1, 5]]


GPU = VisibleGpu("GPU-1", "NVIDIA H100", 1, "0000:0b:00.0")


def test_second_process_waits_for_the_gpu_with_a_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "visible_gpus", lambda: (GPU,))
    said: list[str] = []
    held = threading.Event()

    def second() -> None:
        with capture.gpu_locked("auto", said.append, tmp_path) as inherited:
            assert len(inherited) == 1
            held.set()

    with capture.gpu_locked("cuda", said.append, tmp_path):
        waiting = threading.Thread(target=second)
        waiting.start()
        until(lambda: said)
        assert not held.is_set()
    waiting.join()
    assert held.is_set()
    assert len(said) == 1
    assert "another profharness process is measuring on NVIDIA H100" in said[0]
    assert "GPU-1" not in said[0]


def test_child_that_outlives_its_parent_keeps_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "visible_gpus", lambda: (GPU,))
    with capture.gpu_locked("cuda", str, tmp_path) as (descriptor,):
        inherited = os.dup(descriptor)
    other = open_lock_file(capture.lock_file(GPU, tmp_path))
    assert other is not None
    assert not try_lock(other, fcntl.LOCK_EX)
    os.close(inherited)
    assert try_lock(other, fcntl.LOCK_EX)
    os.close(other)


def test_no_lock_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "visible_gpus", lambda: (GPU,))
    with capture.gpu_locked("cpu", str, tmp_path) as inherited:
        assert inherited == ()
    monkeypatch.setattr(capture, "visible_gpus", tuple)
    with capture.gpu_locked("auto", str, tmp_path) as inherited:
        assert inherited == ()
    assert list(tmp_path.iterdir()) == []


def test_equal_gpus_are_the_same_environment() -> None:
    one = {"gpu": "H200", "gpu_key": "a", "env": {"CUDA_VISIBLE_DEVICES": "0"}}
    two = {"gpu": "H200", "gpu_key": "b", "env": {"CUDA_VISIBLE_DEVICES": "1"}}
    assert environment_changes(one, two) == []
    assert "CUDA_VISIBLE_DEVICES" not in environment.RELEVANT_VARIABLES
