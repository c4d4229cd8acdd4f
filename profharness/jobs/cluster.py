"""Run groups on the workers of a Dask scheduler. Each worker is a lane.

No other module imports distributed. This module is loaded only for a scheduler with an address, such
as `--scheduler tls://head:8786`. The workers run functions of the `lane` module, which are sent by
name. Arguments and results are texts and plain dicts.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import json
import logging
import queue
import secrets
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any, TypeVar
from urllib.parse import urlsplit

from distributed import Client, Future, Security

from profharness.errors import CaptureError, UnwritableError, UsageError
from profharness.jobs.campaign import OnStep
from profharness.jobs.lane import PART, Plain, describe_lane, end_groups, run_spec, unpack
from profharness.processes import STEP_S, raise_deferred_signals
from profharness.run import CAMPAIGN_FILE

T = TypeVar("T")
# Exceptions that a Dask client raises if its scheduler or worker is gone. It raises AttributeError
# while it reconnects.
FAILURES = (OSError, TimeoutError, AttributeError, ValueError)
CONNECT_S = 10.0
LOOK_S = 1.0  # minimum time between two queries for the list of workers
ANSWER_S = 30.0  # maximum time to wait for the scheduler, and for the first descriptions of workers
EXAMPLE = "as in tls://head:8786"
TLS_SETTINGS = {
    "DASK_DISTRIBUTED__COMM__TLS__CA_FILE": "tls_ca_file",
    "DASK_DISTRIBUTED__COMM__TLS__CLIENT__CERT": "tls_client_cert",
    "DASK_DISTRIBUTED__COMM__TLS__CLIENT__KEY": "tls_client_key",
}
"""Maps Dask's environment variables for the files of a TLS client to attributes of `Security`."""


@dataclass
class _Worker:
    """A worker of the Dask scheduler, which is a lane."""

    address: str
    description: Plain
    scratch: str  # a folder on the worker's host that still exists after the worker has ended
    future: Future | None = None  # future of the group that the worker runs
    terminated: bool = False  # whether `end` was called for this group


class Cluster:
    """The transport to the lanes of a Dask scheduler. A worker that Dask restarts is a new lane.

    A lane that cannot access the folder of the campaign returns the folder of a finished group as
    an archive. The constructor raises UsageError for an invalid or unsafe address, and CaptureError
    if no scheduler answers. The other methods raise CaptureError if the scheduler is gone.
    """

    def __init__(self, url: str, *, insecure: bool = False) -> None:
        check_address(url, insecure=insecure)
        self._url = url
        self._lanes: dict[str, _Worker] = {}
        self._used_names: set[str] = set()  # names of all lanes, including lanes that are gone
        # Addresses of workers that have not sent their description yet.
        self._awaited: set[str] = set()
        self._descriptions: queue.SimpleQueue[tuple[str, object]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[str, Future, Plain | None]] = queue.SimpleQueue()
        self._updated = 0.0
        self._client = _connect(url)

    def lanes(self) -> list[Plain]:
        if not self._lanes or time.monotonic() - self._updated >= LOOK_S:
            self._update_lanes()
        return [worker.description for worker in self._lanes.values()]

    def submit(self, lane: Plain, spec: Plain, on_step: OnStep) -> None:  # noqa: ARG002
        name, home = lane["lane"], Path(spec["root"])
        worker = self._lanes[name]
        spec = {
            **spec,
            "gpu_key": lane.get("gpu_key"),
            "seen": self._campaign_file(home.parent),
            "scratch": f"{worker.scratch}/{home.parent.name}",
        }
        future = worker.future = self._client.submit(
            run_spec,
            # The spec is sent as text. In a dict, Dask would search all values for tasks, which
            # takes 3 ms per cell.
            json.dumps(spec),
            key=f"profharness-{spec['group']}-{secrets.token_hex(4)}",
            workers=[worker.address],
            # the campaign scheduler chooses the lane and handles retries
            allow_other_workers=False,
            retries=0,
            pure=False,
        )
        worker.terminated = False

        def wait() -> None:
            try:
                outcome = self._outcome(worker.address, future, home)
            except Exception as error:
                # report even a bug or an invalid answer to the campaign scheduler
                outcome = {"group": spec["group"], "error": _reason(error)}
            self._done.put((name, future, outcome))

        # each group has its own thread, because result() never returns if the worker ends too early
        _in_thread(wait)

    def next_done(self, timeout_s: float) -> tuple[str, Plain] | None:
        try:
            name, future, outcome = self._done.get(timeout=timeout_s)
        except queue.Empty:
            return None
        worker = self._lanes.get(name)
        if worker is None or worker.future != future:
            return None  # the lane no longer runs this group
        worker.future = None
        if outcome is None:
            raise self._scheduler_gone()
        return name, outcome

    def _outcome(self, address: str, future: Future, home: Path) -> Plain | None:
        """Wait until a group has ended. If the worker sent an archive, unpack it below `home`.

        Return the outcome of the group, or None if the scheduler does not know the group any more.
        """
        try:
            outcome: Plain = future.result()
        except BaseException as error:  # includes CancelledError, which is no Exception
            if future.status != "error":
                return None
            return {"group": str(future.key).split("-")[1], "error": _reason(error)}
        if "packed" not in outcome:
            return outcome
        packed, expected = outcome.pop("packed"), outcome.pop("hash")
        failed = outcome["error"] is not None
        name = f"{outcome['group']}.{expected[:12]}{PART}" if failed else outcome["group"]
        try:
            unpack(packed, home / name, expected)
        except UnwritableError as error:
            return outcome | {"unwritable": str(error)}
        except CaptureError as error:
            return outcome | {"error": outcome["error"] or str(error)}
        # delete the folder on the lane only after the archive is unpacked, so that nothing is lost
        if not failed:
            self._call(shutil.rmtree, address, outcome["folder"], True)
        return outcome

    def end(self, lane: Plain) -> None:
        # Dask itself cannot stop a running task
        worker = self._lanes.get(lane["lane"])
        if worker is not None:
            _in_thread(partial(self._call, end_groups, worker.address, worker.terminated))
            worker.terminated = True

    def close(self) -> None:
        with contextlib.suppress(*FAILURES):
            self._client.close(timeout=CONNECT_S)

    def _update_lanes(self) -> None:
        """Update the lanes from the scheduler's list of workers.

        Cancel the groups of workers that have disappeared, because Dask would wait for these
        workers forever.
        """
        try:
            here = _with_timeout(lambda: self._client.scheduler_info(n_workers=-1)["workers"])
        except FAILURES:
            raise self._scheduler_gone() from None
        if self._client.status != "running":
            raise self._scheduler_gone()
        self._updated = time.monotonic()
        for name, worker in list(self._lanes.items()):
            if worker.address not in here:
                del self._lanes[name]
                if worker.future is not None:
                    worker.future.cancel()
        self._awaited &= set(here)
        known = {worker.address for worker in self._lanes.values()} | self._awaited
        for address in here.keys() - known:
            self._awaited.add(address)
            _in_thread(partial(self._describe, address))
        # if there are no lanes yet, wait until all workers have sent their descriptions
        patience_s = 0.0 if self._lanes else ANSWER_S
        while self._awaited:
            try:
                address, answer = self._descriptions.get(timeout=min(STEP_S, patience_s))
            except queue.Empty:
                raise_deferred_signals()
                if time.monotonic() - self._updated >= patience_s:
                    return
                continue
            if address in self._awaited and answer is not None:
                name = self._unused_name(str(here[address]["name"]))
                self._used_names.add(name)
                if not isinstance(answer, dict):  # the worker raised an error
                    answer = {"problems": [_reason(answer)]}
                described = {**answer, "lane": name, "address": address}
                scratch = str(PurePath(here[address]["local_directory"]).parent / "profharness")
                self._lanes[name] = _Worker(address, described, scratch)
            self._awaited.discard(address)

    def _describe(self, address: str) -> None:
        self._descriptions.put((address, self._call(describe_lane, address)))

    def _unused_name(self, wanted: str) -> str:
        """Return a lane name that no other worker has had.

        Dask gives a restarted worker the name of its predecessor.
        """
        names = itertools.chain([wanted], (f"{wanted}.{number}" for number in itertools.count(2)))
        return next(name for name in names if name not in self._used_names)

    def _campaign_file(self, campaign: Path) -> str:
        """Return the path of a file that a lane can read only if it shares this file system."""
        return str(campaign / CAMPAIGN_FILE)

    def _call(self, function: Callable[..., Any], address: str, *given: Any) -> object:
        """Call a function on a worker, even while the worker runs a group.

        Return the result or the exception of the function, or None if the worker is gone. This
        method may block forever, so it is called in separate threads.
        """
        try:
            answers: dict[str, object] = self._client.run(
                function, *given, workers=[address], on_error="return"
            )
        except FAILURES:
            return None
        return answers.get(address)

    def _scheduler_gone(self) -> CaptureError:
        return CaptureError(
            f"--scheduler {self._url}: the scheduler has ended, but finished groups are kept; "
            "restart the scheduler and its workers, then resume the campaign"
        )


def check_address(url: str, *, insecure: bool) -> None:
    """Raise UsageError if an address is invalid, or if other hosts can reach it without TLS."""
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(
            f"--scheduler {url}: {error}; write the host and the port, {EXAMPLE}"
        ) from None
    # an address must not contain `@`, because Dask would use `user@host` as the name of the host
    if parts.scheme not in ("tls", "tcp") or not host or port is None or "@" in parts.netloc:
        raise UsageError(f"--scheduler {url}: write the host and the port, {EXAMPLE}")
    if parts.scheme == "tcp" and not insecure and not _is_loopback(host):
        raise UsageError(
            f"--scheduler {url}: without TLS, anyone who can reach the port can run programs on "
            "the lanes; use tls:// (docs/scale.md explains the certificates), or pass --insecure"
        )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _connect(url: str) -> Client:
    security = Security(require_encryption=url.startswith("tls:"))
    if url.startswith("tls:"):
        missing = [name for name, key in TLS_SETTINGS.items() if not getattr(security, key)]
        if missing:
            raise UsageError(
                f"--scheduler {url}: Dask's configuration contains no certificate; set "
                f"{', '.join(missing)} (docs/scale.md explains how to create a certificate)"
            )
    # do not log tracebacks of failed connections, because errors are raised for them below
    for name in ("distributed", "distributed.client"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        # Dask warns about all different versions; `doctor --scheduler` compares the relevant ones
        warnings.simplefilter("ignore")
        try:
            return Client(url, security=security, timeout=CONNECT_S, set_as_default=False)
        except (OSError, TimeoutError, ValueError) as error:
            raise CaptureError(
                f"--scheduler {url}: no Dask scheduler responds ({_reason(error)}); start a scheduler "
                "with `dask scheduler` and certificates of the same authority"
            ) from None


def _in_thread(work: Callable[[], object]) -> None:
    """Run a function in a daemon thread, because the function may never return."""
    threading.Thread(target=work, daemon=True, name="cluster").start()


def _with_timeout(call: Callable[[], T]) -> T:
    """Return the result of a call. Raise TimeoutError if the call takes longer than ANSWER_S."""
    answer: futures.Future[T] = futures.Future()

    def work() -> None:
        try:
            answer.set_result(call())
        except Exception as error:
            answer.set_exception(error)

    _in_thread(work)
    deadline = time.monotonic() + ANSWER_S
    while not futures.wait((answer,), STEP_S).done and time.monotonic() < deadline:
        raise_deferred_signals()
    return answer.result(0.0)


def _reason(answer: object) -> str:
    """Return the type of an exception and the first line of its message."""
    kind = f"{type(answer).__name__}: " if isinstance(answer, BaseException) else ""
    return (kind + str(answer)).splitlines()[0] if str(answer) else kind.rstrip(": ")
