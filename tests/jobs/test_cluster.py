"""Lanes behind a real Dask scheduler with TLS: what they tell, and what becomes of groups when workers
and the scheduler are killed. The tests build on each other: each works with what the one before left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import dask
import pytest
from distributed import Security
from waiting import alive, until

import profharness.jobs.campaign as campaigns
from profharness import __version__
from profharness.config import parse_config
from profharness.doctor import check_lanes
from profharness.errors import CaptureError, MissingExtraError, UsageError
from profharness.jobs import capture_into_store, resume_into_store
from profharness.jobs.cluster import Cluster, check_address
from profharness.jobs.fleet import lanes_device, open_transport
from profharness.processes import child_environment
from profharness.run import CaptureOptions, Fleet, Protocol
from profharness.store import open_store

CONFIGS = [parse_config("1,1,8,8,fp32")]
SCRATCH = "lane*/dask-scratch-space/profharness"  # of workers that do not see the campaign
LOCKS = f"{SCRATCH}/*/*{campaigns.PART}/.lock"


@dataclass
class Hosts:
    """A scheduler and two workers, each in a process of its own."""

    url: str
    folder: Path
    scheduler: subprocess.Popen[bytes]
    workers: list[subprocess.Popen[bytes]]


def holder(lock: Path) -> int | None:
    """The process that works on a group, by the lock file of its part."""
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


def start(name: str, folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", f"distributed.cli.dask_{name}", "--no-dashboard", *arguments]
    environment = {**child_environment(), "OMP_NUM_THREADS": "1"}
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(argv, stdout=log, stderr=log, env=environment, cwd=folder)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("cluster")
    # one certificate, its own authority, for all
    made = Security.temporary()
    (folder / "cert.pem").write_text(made.tls_ca_file)
    (folder / "key.pem").write_text(made.tls_client_key)
    (folder / "key.pem").chmod(0o600)
    who = [
        f"{role}.{part}" for role in ("scheduler", "worker", "client") for part in ("cert", "key")
    ]
    settings = {
        f"distributed.comm.tls.{each}": f"{folder}/{each[-4:].strip('.')}.pem" for each in who
    }
    settings["distributed.comm.tls.ca-file"] = f"{folder}/cert.pem"
    with pytest.MonkeyPatch.context() as patch, dask.config.set(settings):
        for name, value in settings.items():
            variable = name.replace(".", "__").replace("-", "_").upper()
            patch.setenv(f"DASK_{variable}", value)
        url = f"tls://127.0.0.1:{free_port()}"
        address = "--host", "127.0.0.1", "--protocol", "tls", "--port", url.rpartition(":")[2]
        started = [start("scheduler", folder, *address)]
        for name in ("lane0", "lane1"):
            more = (
                "--nthreads",
                "1",
                "--no-nanny",
                "--name",
                name,
                "--local-directory",
                str(folder / name),
            )
            started.append(start("worker", folder, url, *more))
        until(lambda: answers(url), started[0])
        yield Hosts(url, folder, started[0], started[1:])
        for process in started:
            process.kill()
            process.wait()


def options(hosts: Hosts, folder: Path) -> CaptureOptions:
    protocol = Protocol(iterations=1, warmup=0, samples=1, device="cpu")
    return CaptureOptions(("events",), folder / "runs", protocol, fleet=Fleet(hosts.url))


def test_lanes_tell_what_they_are(hosts: Hosts) -> None:
    cluster = Cluster(hosts.url)
    until(lambda: len(cluster.lanes()) == 2, hosts.scheduler)
    lanes = sorted(cluster.lanes(), key=lambda lane: str(lane["lane"]))
    assert [lane["lane"] for lane in lanes] == ["lane0", "lane1"]
    assert all(lane["profharness"] == __version__ and not lane["problems"] for lane in lanes)
    assert [check.state for check in check_lanes(lanes, __version__)] == ["ok", "ok"]
    assert lanes_device(Fleet(hosts.url), "auto") == "cpu"
    cluster.close()


def test_who_has_no_certificate_is_refused(hosts: Hosts) -> None:
    open_url = hosts.url.replace("tls:", "tcp:")
    with pytest.raises(CaptureError, match="no Dask scheduler answers"):
        Cluster(open_url)
    with (
        dask.config.set({"distributed.comm.tls.client.cert": None}),
        pytest.raises(UsageError, match="CLIENT__CERT"),
    ):
        Cluster(hosts.url)


def test_a_worker_that_is_killed_costs_no_cell_and_leaves_no_orphan(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as if no lane saw the folder of the campaign: what is done comes back packed
    monkeypatch.setattr(Cluster, "_seen", lambda *_: str(tmp_path / "nowhere"))
    killed: list[int] = []

    def kill_one() -> None:
        until(lambda: any(map(holder, hosts.folder.glob(LOCKS))), hosts.scheduler)
        pid = next(filter(None, map(holder, hosts.folder.glob(LOCKS))))
        killed.append(pid)
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent, signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    store = tmp_path / "store.db"
    captured = capture_into_store(CONFIGS, ["math"], store, options(hosts, tmp_path))
    killer.join()
    assert [cell.status for cell in captured.run.cells] == ["ok"]
    until(lambda: not alive(killed[0]))
    with open_store(store) as opened:
        assert len(opened.cells(captured.run.run)) == 1
    # what came back whole stays on no host
    left = hosts.folder.glob(f"{SCRATCH}/{captured.run.run}/*/run.json")
    assert [path for path in left if path.parent.suffix != campaigns.PART] == []


def test_a_campaign_whose_scheduler_is_killed_goes_on_elsewhere(
    hosts: Hosts, tmp_path: Path
) -> None:
    def kill_it() -> None:
        until(lambda: any((tmp_path / "runs").glob(f"*/groups/*{campaigns.PART}/run.json")))
        # the workers too: one that is left without a scheduler ends its group all the same
        for process in (hosts.scheduler, *hosts.workers):
            process.kill()

    killer = threading.Thread(target=kill_it)
    killer.start()
    store = tmp_path / "store.db"
    with pytest.raises(CaptureError, match="the scheduler is gone"):
        capture_into_store(CONFIGS, ["math"], store, options(hosts, tmp_path))
    killer.join()
    (folder,) = (tmp_path / "runs").iterdir()
    captured = resume_into_store(folder, store)
    assert [cell.status for cell in captured.run.cells] == ["ok"]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("tls://head", "say host and port"),
        ("tls://head:x", "say host and port"),
        ("http://head:8786", "say host and port"),
        ("tcp://x@localhost:8786", "say host and port"),
        ("tcp://head:8786", "--insecure"),
        ("tcp://10.0.0.7:8786", "--insecure"),
    ],
)
def test_an_address_that_is_none_or_open_to_others_is_refused(url: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        check_address(url, insecure=False)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
def test_a_scheduler_of_this_host_may_be_without_tls(host: str) -> None:
    check_address(f"tcp://{host}:8786", insecure=False)
    check_address("tcp://head:8786", insecure=True)


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'profharness\[cluster\]'"):
        open_transport(Fleet("tls://head:8786"), "auto")
