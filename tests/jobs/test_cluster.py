"""Lanes behind a real Dask scheduler with TLS: descriptions, and groups when workers or the
scheduler fail.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import dask
import pytest
from dask_tls import tls_variables
from distributed import Future
from kill_lanes import stand_in
from lane_stand_ins import GPU, fake_nvml, falling_worker, other_python, own_bytecode
from waiting import Clock, alive, until

import profharness.jobs.campaign as campaigns
from profharness import __version__
from profharness.attention.config import expand_configs
from profharness.commands.doctor import check_lanes
from profharness.errors import CaptureError, MissingExtraError, UsageError
from profharness.jobs import cluster as clusters
from profharness.jobs.campaign import Plain
from profharness.jobs.cluster import Cluster, check_address
from profharness.jobs.fleet import describe_lanes, lanes_device, open_transport
from profharness.jobs.into_store import Captured, capture_into_store, resume_into_store
from profharness.processes import child_environment
from profharness.recording.supervise import Step
from profharness.run import CaptureOptions, Fleet, Protocol
from profharness.store import open_store

SCRATCH = "lane*/dask-scratch-space/profharness"  # for workers that do not see the campaign
LOCKS = f"{SCRATCH}/*/*{campaigns.PART}/.lock"


@dataclass
class Hosts:
    """A scheduler and two workers, each in its own process."""

    url: str
    folder: Path
    scheduler: subprocess.Popen[bytes]
    workers: list[subprocess.Popen[bytes]]
    nvml: str  # the folder of a pynvml that finds GPUs by files

    def gpu(self, lane: str) -> Path:
        """The file that is the GPU of a lane; there is none at first."""
        return self.folder / f"gpu-{lane}"

    def work(
        self, name: str, python: str | Path = sys.executable, **variables: str
    ) -> subprocess.Popen[bytes]:
        """Start one more worker."""
        place = str(self.folder / name)
        more = "--nthreads", "1", "--no-nanny", "--name", name, "--local-directory", place
        # another Python cannot use the packages of this one
        path = self.nvml
        if python == sys.executable:
            path += os.pathsep + child_environment()["PYTHONPATH"]
        variables |= {GPU: str(self.gpu(name)), "PYTHONPATH": path}
        return start("worker", self.folder, self.url, *more, python=python, **variables)


def holder(lock: Path) -> int | None:
    """Return the process that runs a group, from the lock file of its part."""
    words = lock.read_text().split()
    return int(words[-1]) if words else None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def answers(url: str) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))).close()
        return True
    return False


def start(
    name: str,
    folder: Path,
    *arguments: str,
    python: str | Path = sys.executable,
    **variables: str,
) -> subprocess.Popen[bytes]:
    argv = [python, "-m", f"distributed.cli.dask_{name}", "--no-dashboard", *arguments]
    environment = {**child_environment(), "OMP_NUM_THREADS": "1", **variables}
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(argv, stdout=log, stderr=log, env=environment, cwd=folder)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("cluster")
    variables = tls_variables(folder)
    settings = {
        name.removeprefix("DASK_").lower().replace("__", "."): value
        for name, value in variables.items()
    }
    with pytest.MonkeyPatch.context() as patch, dask.config.set(settings):
        for name, value in variables.items():
            patch.setenv(name, value)
        url = f"tls://127.0.0.1:{free_port()}"
        address = "--host", "127.0.0.1", "--protocol", "tls", "--port", url.rpartition(":")[2]
        scheduler = start("scheduler", folder, *address)
        made_here = Hosts(url, folder, scheduler, [], fake_nvml(folder))
        made_here.workers += [made_here.work(name) for name in ("lane0", "lane1")]
        until(lambda: answers(url), scheduler)
        yield made_here
        for process in (scheduler, *made_here.workers):
            process.kill()
            process.wait()


def options(hosts: Hosts, folder: Path, python: Path | None = None) -> CaptureOptions:
    """Return capture options for the lanes; `python` replaces their workers' interpreter."""
    protocol = Protocol(iterations=1, warmup=0, samples=1, device="cpu")
    return CaptureOptions(
        ("events",),
        folder / "runs",
        protocol,
        python=str(python) if python else None,
        fleet=Fleet(hosts.url),
    )


def captured_on(
    hosts: Hosts,
    folder: Path,
    text: str = "1,1,8,8,fp32",
    python: Path | None = None,
    progress: Callable[[Step], None] | None = None,
) -> Captured:
    configs, given = expand_configs(text), options(hosts, folder, python)
    return capture_into_store(configs, ["math"], folder / "store.db", given, progress)


def until_lanes(hosts: Hosts, *names: str) -> None:
    """Wait until exactly these lanes exist."""
    with contextlib.closing(Cluster(hosts.url)) as cluster:
        until(lambda: {lane["lane"] for lane in cluster.lanes()} == {*names}, hosts.scheduler)


@pytest.fixture
def config_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each config a group."""
    monkeypatch.setattr(campaigns, "GROUP_S", 0.01)
    monkeypatch.setattr(campaigns, "SMALLEST_S", 0.01)


@pytest.fixture
def sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the campaign's folder from the lanes, so that finished groups come back packed."""
    monkeypatch.setattr(Cluster, "_campaign_file", lambda *_: str(tmp_path / "nowhere"))


def test_lanes_describe_themselves(hosts: Hosts) -> None:
    cluster = Cluster(hosts.url)
    until(lambda: len(cluster.lanes()) == 2, hosts.scheduler)
    lanes = sorted(cluster.lanes(), key=lambda lane: str(lane["lane"]))
    assert [lane["lane"] for lane in lanes] == ["lane0", "lane1"]
    assert all(lane["profharness"] == __version__ and not lane["problems"] for lane in lanes)
    assert [check.state for check in check_lanes(lanes, __version__)] == ["ok", "ok"]
    assert lanes_device(Fleet(hosts.url), "auto") == "cpu"
    cluster.close()


def test_client_without_certificate_is_refused(hosts: Hosts) -> None:
    open_url = hosts.url.replace("tls:", "tcp:")
    with pytest.raises(CaptureError, match="no Dask scheduler responds"):
        Cluster(open_url)
    with (
        dask.config.set({"distributed.comm.tls.client.cert": None}),
        pytest.raises(UsageError, match="CLIENT__CERT"),
    ):
        Cluster(hosts.url)


@pytest.mark.usefixtures("config_groups", "sent")
def test_worker_of_another_python_runs_groups(hosts: Hosts, tmp_path: Path) -> None:
    python, missing = other_python(tmp_path)
    if python is None:
        pytest.skip(missing)
    other = hosts.work("other", python, **own_bytecode(tmp_path))
    try:
        until_lanes(hosts, "lane0", "lane1", "other")
        lanes = describe_lanes(Fleet(hosts.url))
        said: list[str] = []
        captured = captured_on(
            hosts,
            tmp_path,
            "1,1,{8,16,24},8,fp32",
            stand_in(tmp_path),
            lambda step: said.append(step.notice or ""),
        )
    finally:
        other.kill()
        other.wait()
    (versions,) = (check for check in check_lanes(lanes, __version__) if "python" in check.name)
    assert versions.state == "ok"
    here, _, there = versions.detail.partition("; ")
    assert re.fullmatch(r"3\.\d+\.\d+: here, lane[01], lane[01]", here)
    assert re.fullmatch(r"3\.\d+\.\d+: other", there)
    # each lane gets one group first, and there are three of each
    assert sum(text.startswith("other: ") for text in said) == 1
    assert [cell.status for cell in captured.run.cells] == ["ok"] * 3
    assert [cell.samples for cell in captured.run.cells] == [{"cold": [1000]}] * 3
    until_lanes(hosts, "lane0", "lane1")


@pytest.mark.usefixtures("config_groups")
def test_hanging_worker_blocks_no_other_lane(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, hanging = tmp_path / "hangs", hosts.workers[1]
    # a worker that does not even describe itself; the scheduler answers, however late
    monkeypatch.setattr(clusters, "time", Clock(mark))
    monkeypatch.setattr(clusters, "_with_timeout", lambda call: call())
    hanging.send_signal(signal.SIGSTOP)
    mark.write_text(str(hanging.pid))
    with contextlib.closing(Cluster(hosts.url)) as cluster:
        until(lambda: [lane["lane"] for lane in cluster.lanes()] == ["lane0"], hosts.scheduler)
        hanging.send_signal(signal.SIGCONT)
        mark.unlink()
        until(lambda: len(cluster.lanes()) == 2, hosts.scheduler)

    # a worker that has finished its group but does not return it
    real = Cluster._outcome

    def outcome(self: Cluster, address: str, future: Future, home: Path) -> Plain | None:
        until(future.done)
        lane = next(name for name, each in self._lanes.items() if each.address == address)
        if lane == "lane1":
            hanging.send_signal(signal.SIGSTOP)
        return real(self, address, future, home)

    said: list[str] = []

    def hear(step: Step) -> None:
        said.append(step.notice or "")
        if "2 of 3 groups" in said[-1]:
            hanging.send_signal(signal.SIGCONT)

    monkeypatch.setattr(Cluster, "_outcome", outcome)
    captured = captured_on(hosts, tmp_path, "1,1,{8,16,24},8,fp32", stand_in(tmp_path), hear)
    assert [cell.status for cell in captured.run.cells] == ["ok"] * 3
    assert [text[:6] for text in said if " of 3 groups" in text] == ["lane0:", "lane0:", "lane1:"]


def test_lost_gpu_costs_its_lane_but_no_cell(hosts: Hosts, tmp_path: Path) -> None:
    for lane in ("lane0", "lane1"):
        hosts.gpu(lane).touch()
    said: list[str] = []
    captured = captured_on(
        hosts,
        tmp_path,
        python=falling_worker(tmp_path),
        progress=lambda step: said.append(step.notice or ""),
    )
    (left,) = (lane for lane in ("lane0", "lane1") if hosts.gpu(lane).exists())
    hosts.gpu(left).unlink()
    assert [cell.status for cell in captured.run.cells] == ["ok"]
    (out,) = (
        text for text in said if "gets no more groups: the lane's GPU no longer responds" in text
    )
    assert left not in out


def test_hanging_scheduler_is_reported(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "hangs"
    monkeypatch.setattr(clusters, "time", Clock(mark))
    monkeypatch.setattr(clusters, "CONNECT_S", 1.0)
    with contextlib.closing(Cluster(hosts.url)) as cluster:
        until(cluster.lanes)
        hosts.scheduler.send_signal(signal.SIGSTOP)
        mark.write_text(str(hosts.scheduler.pid))
        with pytest.raises(CaptureError, match="the scheduler has ended"):
            until(lambda: not cluster.lanes())
    with pytest.raises(CaptureError, match="no Dask scheduler responds"):
        Cluster(hosts.url)
    hosts.scheduler.send_signal(signal.SIGCONT)
    mark.unlink()
    until_lanes(hosts, "lane0", "lane1")


@pytest.mark.usefixtures("sent")
def test_killed_worker_costs_no_cell_and_leaves_no_orphan(hosts: Hosts, tmp_path: Path) -> None:
    killed: list[int] = []

    def kill_one() -> None:
        def found() -> bool:
            # A lock may be released at any time, so its holder is kept.
            killed[:] = filter(None, map(holder, hosts.folder.glob(LOCKS)))
            return bool(killed)

        until(found, hosts.scheduler)
        pid = killed[0]
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent, signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    captured = captured_on(hosts, tmp_path)
    killer.join()
    assert [cell.status for cell in captured.run.cells] == ["ok"]
    until(lambda: not alive(killed[0]))
    with open_store(tmp_path / "store.db") as opened:
        assert len(opened.cells(captured.run.run)) == 1
    # groups that came back complete are removed from the hosts
    left = hosts.folder.glob(f"{SCRATCH}/{captured.run.run}/*/run.json")
    assert [path for path in left if path.parent.suffix != campaigns.PART] == []


@pytest.mark.usefixtures("sent")
def test_failed_group_keeps_its_results(hosts: Hosts, tmp_path: Path) -> None:
    # the stand-in kills the lane's child at the second config
    captured = captured_on(hosts, tmp_path, "1,1,{8,666},8,fp32", stand_in(tmp_path))
    assert [cell.status for cell in captured.run.cells] == ["ok", "crashed"]
    assert "failed 3 times" in str(captured.run.cells[1].message)


def test_campaign_resumes_after_its_scheduler_was_killed(hosts: Hosts, tmp_path: Path) -> None:
    def kill_it() -> None:
        until(lambda: any((tmp_path / "runs").glob(f"*/groups/*{campaigns.PART}/run.json")))
        # kill the workers too: a worker without a scheduler finishes its group
        for process in (hosts.scheduler, *hosts.workers):
            process.kill()

    killer = threading.Thread(target=kill_it)
    killer.start()
    with pytest.raises(CaptureError, match="the scheduler has ended"):
        captured_on(hosts, tmp_path)
    killer.join()
    (folder,) = (tmp_path / "runs").iterdir()
    captured = resume_into_store(folder, tmp_path / "store.db")
    assert [cell.status for cell in captured.run.cells] == ["ok"]


def test_different_lanes_are_reported() -> None:
    same = {"profharness": "0.1.0", "torch": "2.11", "driver": "580", "problems": [], "gpu": "H200"}
    lanes = [
        {**same, "lane": "a", "python": "3.11", "gpu_key": "k"},
        {**same, "lane": "b", "python": "3.12", "gpu_key": "k", "torch": "2.10"},
        {"lane": "c", "problems": ["ModuleNotFoundError: No module named 'profharness'"]},
    ]
    checks = {check.name: check for check in check_lanes(lanes, "0.2.0")}
    assert checks["c"].state == "warning" and "No module" in checks["c"].detail
    assert checks["lanes: torch"].detail == "2.11: a; 2.10: b"
    assert checks["lanes: profharness"].detail == "0.1.0: a, b; 0.2.0: here"
    assert checks["lanes: python"].state == "ok"
    assert checks["lanes: GPU"].detail == "a, b use the same GPU"
    assert [check.state for check in check_lanes([], "0.1.0")] == ["missing"]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("tls://head", "write the host and the port"),
        ("tls://head:x", "write the host and the port"),
        ("http://head:8786", "write the host and the port"),
        ("tcp://x@localhost:8786", "write the host and the port"),
        ("tcp://head:8786", "--insecure"),
        ("tcp://10.0.0.7:8786", "--insecure"),
    ],
)
def test_invalid_or_unencrypted_address_is_refused(url: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        check_address(url, insecure=False)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.1.1", "[::1]"])
def test_local_scheduler_may_lack_tls(host: str) -> None:
    check_address(f"tcp://{host}:8786", insecure=False)
    check_address("tcp://head:8786", insecure=True)


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'profharness\[cluster\]'"):
        open_transport(Fleet("tls://head:8786"), "auto")
