"""Serve the store read-only with Datasette, with predefined queries and a report on each run.

Importing this module raises MissingExtraError without the `web` extra.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import signal
import socket
import sqlite3
import traceback
from collections.abc import Iterator
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from profharness import __version__
from profharness.commands._output import hint
from profharness.commands.report import report_document
from profharness.commands.serve.front import MAX_RUNS, REPORT, Known, front_page
from profharness.commands.serve.requests import (
    App,
    Message,
    Queue,
    Scope,
    Send,
    guarded,
    is_last,
)
from profharness.errors import MissingExtraError, NotFoundError, ProfharnessError, UsageError
from profharness.measurements.evaluation import evaluate_bench
from profharness.measurements.measurements import CHOSEN
from profharness.render.document import Chart, Note
from profharness.render.html import render_html
from profharness.store import Store, open_store
from profharness.store.schema import connect, file_beside

try:
    import uvicorn
    from datasette import hookimpl
    from datasette.app import Datasette
    from datasette.database import Database
    from datasette.plugins import pm
    from datasette.utils.asgi import Base400, Response
    from datasette.views.base import DatasetteError
except ImportError:
    raise MissingExtraError("`profharness serve`", "web") from None

LOOPBACK = ("127.0.0.1", "localhost", "::1")
DATABASE = "profharness"  # name of the store in URLs, independent of the name of its file
MAX_VALUE_BYTES = 8 << 20  # maximum size of a text or blob in a response
MAX_ERROR = 1000
TELLTALE = ("database_list", "fts3_tokenizer", "load_extension")
REGRET = f"/{DATABASE}/regret"  # this query is as slow as a report, so it has the same limits


# Maps the name of each predefined query to (title, description, SQL).
QUERIES: dict[str, tuple[str, str, str]] = {
    "stored_runs": (
        "Runs",
        "The stored runs, newest first, with the rank of each run in its job.",
        """SELECT run, kind, created, device, torch, rank, world_size,
            (SELECT count(*) FROM cells c WHERE c.run_id = r.id) AS cells,
            (SELECT coalesce(sum(launches), 0) FROM traces t WHERE t.run_id = r.id) AS launches
        FROM runs r ORDER BY created DESC, id DESC""",
    ),
    "busy_devices": (
        "How busy each GPU was",
        (
            "For each traced program, the time from the first launch to the last, and the shares "
            "of this time in which the GPU was busy, in which collectives ran, and in which only "
            "collectives ran."
        ),
        """SELECT run, rank, device_index, span_ms, busy, collectives, exposed FROM (
            SELECT r.run, r.rank, d.device AS device_index,
                (end_ns - start_ns) / 1e6 AS span_ms,
                round(1.0 * busy_ns / nullif(end_ns - start_ns, 0), 4) AS busy,
                round(1.0 * collective_ns / nullif(end_ns - start_ns, 0), 4) AS collectives,
                round(1.0 * exposed_ns / nullif(end_ns - start_ns, 0), 4) AS exposed, r.created
            FROM device_times d JOIN traces t ON t.id = d.trace_id JOIN runs r ON r.id = t.run_id)
        ORDER BY created DESC, run, rank, device_index""",
    ),
    "slowest_kernels": (
        "Slowest kernels",
        "The kernels with the longest times per call, in µs.",
        """SELECT run, config, backend, profiler, kernel_short, launches_per_call,
            round(total_ns * launches_per_call / launches / 1000.0, 2) AS us_per_call,
            round(duration_ns / 1000.0, 2) AS us_per_launch
        FROM kernel_summary WHERE total_ns IS NOT NULL
            AND (:backend = '' OR backend = :backend) ORDER BY us_per_call DESC LIMIT 200""",
    ),
    "cells_by_status": (
        "Cells by status",
        "The number of cells per run, backend and status.",
        """SELECT run, backend, status, count(*) AS cells FROM cell_summary
        GROUP BY run, backend, status ORDER BY run DESC, backend, status""",
    ),
    "refusals_by_reason": (
        "Refusals by reason",
        "The reasons why backends refused configs, most frequent first.",
        """SELECT f.code, c.backend, count(DISTINCT c.id) AS cells, min(f.message) AS example
        FROM refusals f JOIN cells c ON c.id = f.cell_id
        GROUP BY f.code, c.backend ORDER BY cells DESC, f.code""",
    ),
    "metrics_of_a_kernel": (
        "Metrics of a kernel",
        "Hardware counters of the kernels whose names contain the given text.",
        """SELECT run, config, backend, kernel_short, metric, avg(value) AS mean, unit,
            count(*) AS launches
        FROM kernel_metrics WHERE kernel LIKE '%' || :kernel || '%'
        GROUP BY run, config, backend, kernel, metric ORDER BY run DESC, kernel_short, metric
        LIMIT 1000""",
    ),
    "latency": (
        "Time per call by config and backend",
        "The median time of each measurement in µs. The measurements ran without a profiler.",
        """SELECT run, config, backend, status, round(graph_median_ns / 1000.0, 2) AS graph_us,
            round(event_median_ns / 1000.0, 2) AS event_us,
            round(cold_median_ns / 1000.0, 2) AS cold_us,
            round(eager_median_ns / 1000.0, 2) AS eager_us,
            round(host_median_ns / 1000.0, 2) AS host_us,
            round(wall_median_ns / 1000.0, 2) AS wall_us, peak_memory_bytes
        FROM cell_summary ORDER BY run DESC, config, backend""",
    ),
    "regret": (
        "Where auto is slower",
        (
            "For each config, how much longer `auto` takes than the fastest correct backend, as in "
            "`bench` (0.5 means 1.50 times as long). `run` can be an id or `all`; the default is the "
            "newest run with times."
        ),
        """SELECT json_extract(value, '$.run') AS run, json_extract(value, '$.config') AS config,
            json_extract(value, '$.measurement') AS measurement,
            json_extract(value, '$.choice') AS choice, json_extract(value, '$.best') AS best,
            round(json_extract(value, '$.chosen_ns') / 1000.0, 2) AS auto_us,
            round(json_extract(value, '$.best_ns') / 1000.0, 2) AS best_us,
            round(json_extract(value, '$.regret'), 4) AS regret,
            json_extract(value, '$.real') AS real
        FROM json_each(bench_losses(:run)) ORDER BY regret DESC""",
    ),
}


class BenchLosses:
    """The SQL function `bench_losses(run)`, which returns the losses of `auto` as a JSON array.

    An empty `run` selects the newest run that has losses, and `all` selects the newest MAX_RUNS
    runs. The losses of a run are cached until the store changes, because computing the intervals of
    a benchmark takes a long time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.computed: dict[str, tuple[object, list[dict[str, Any]]]] = {}

    def __call__(self, run: str | None) -> str:
        losses: list[dict[str, Any]] = []
        names: list[str] = []
        with open_store(self.path) as store:
            if not run or run == "all":
                names = [row.run for row in store.runs()[:MAX_RUNS]]
            else:
                # An unknown run has no losses. A query without matches is not an error.
                with contextlib.suppress(NotFoundError, UsageError):
                    names = [store.resolve(run)]
            for name in names:
                losses += self._losses_of(store, name)
                if losses and not run:
                    break
        return json.dumps(losses)

    def _losses_of(self, store: Store, run: str) -> list[dict[str, Any]]:
        """Return the losses of a run. Cache the losses until the files of the store change."""
        state = store_state(self.path)
        if run not in self.computed or self.computed[run][0] != state:
            losses = []
            if any(cell.backend == CHOSEN and cell.samples for cell in store.cells(run)):
                answer = evaluate_bench(store, run)
                same = {"run": run, "measurement": answer.ranking}
                losses = [same | asdict(loss) for loss in answer.losses]
            self.computed[run] = state, losses
        return self.computed[run][1]


def store_state(path: Path) -> tuple[tuple[int, int], ...]:
    """Return a value that changes whenever the store changes."""
    files = (path, file_beside(path, "-wal"))
    stats = [file.stat() for file in files if file.exists()]
    # An empty write-ahead log is ignored, because readers create and delete one.
    return tuple((stat.st_mtime_ns, stat.st_size) for stat in stats if stat.st_size)


def serve(path: Path, host: str, port: int) -> None:
    """Serve the store until Ctrl-C, and print the address once the server is ready.

    Raise NotFoundError if the store does not exist, or UsageError if the address is unavailable.
    """
    if host not in LOOPBACK:
        hint(
            f"warning: with --host {host}, anyone who can reach this machine can read the whole "
            "store, including file paths, without a password; nobody can write to the store"
        )
    app = application(path, host)
    with _listen(host, port) as listener:
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{listener.getsockname()[1]}/"
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            # At lower levels, an interrupted response is logged as an error with a traceback.
            log_level="critical",
            timeout_graceful_shutdown=0,
        )
        server = _Server(config, f"serving {path} on {address} (press Ctrl-C to stop)")
        try:
            asyncio.run(server.serve(sockets=[listener]))
        except KeyboardInterrupt as stop:
            if type(stop) is not KeyboardInterrupt:  # SIGTERM has its own exit code
                raise


class _Server(uvicorn.Server):  # type: ignore[misc]
    """A server that prints a message when ready, and that also shuts down cleanly on SIGHUP.

    The signal handler of `profharness.cli` would raise an exception inside a request, and uvicorn
    would only log it.
    """

    def __init__(self, config: uvicorn.Config, ready: str) -> None:
        super().__init__(config)
        self.ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            hint(self.ready)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals():  # raises the received signals again when it ends
            handler = signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, handler)


@contextlib.contextmanager
def _listen(host: str, port: int) -> Iterator[socket.socket]:
    """Yield a listening socket. Raise UsageError if the address is invalid or in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        # Otherwise the port of a server that just ended stays in use for a while.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(64)
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"cannot listen on --host {host} --port {port}: {error}; choose another --port, or "
                "use --port 0 for any free port"
            ) from None
        yield listener


def application(path: Path, host: str) -> App:
    """Return the web application for a store."""
    # Reports contain their own policy.
    return guarded(Site(path), LOOPBACK if host in LOOPBACK else None, REPORT)


class StoreFile(Database):  # type: ignore[misc]
    """The store as a read-only database of Datasette. The path may contain any character."""

    def __init__(self, datasette: Any, path: Path, losses: BenchLosses) -> None:
        # The store is mutable, because runs may be added while it is served.
        super().__init__(datasette, path=path.name, is_mutable=True)
        self.file, self.losses = path, losses

    def connect(self, write: bool = False) -> sqlite3.Connection:
        if write:
            raise UsageError("the store is served read-only")
        connection = connect(self.file, write=False)
        # Sort in memory, which is limited, instead of in temporary files.
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        connection.set_authorizer(_allowed)
        connection.create_function("bench_losses", 1, self.losses)
        # Datasette closes the connections in this list
        self._all_file_connections.append(connection)
        return connection

    def close(self) -> None:
        """Close the connection. The next query then opens the current file, even if replaced."""
        super().close()
        self._read_connection = None

    async def attached_databases(self) -> list[Any]:
        # Datasette would use PRAGMA database_list, which reveals the path
        return []

    # Datasette would show the path of the file on its pages, so it does not know the path.
    # These properties replace the properties of Datasette that need the path.
    @property
    def size(self) -> int:
        return self.file.stat().st_size

    @property
    def mtime_ns(self) -> int:
        return self.file.stat().st_mtime_ns


def _allowed(action: int, name: str | None, function: str | None, *_: object) -> int:
    """Deny pragmas and functions in queries that would reveal a path or a memory address."""
    subject = name if action == sqlite3.SQLITE_PRAGMA else function
    return sqlite3.SQLITE_DENY if (subject or "").lower() in TELLTALE else sqlite3.SQLITE_OK


class Site:
    """The pages of Datasette and the reports. This class implements the protocol `Pages`.

    The constructor raises NotFoundError or StoreError if the store cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.queries = Queue(most=6, limit_s=10, fair_s=2, memory_bytes=1 << 30)
        # The time of a report is limited too, but a report takes longer than a query.
        self.front = Queue(most=3, limit_s=60, fair_s=10, memory_bytes=2 << 30)
        self.reports = Queue(most=3, limit_s=300, fair_s=300, memory_bytes=4 << 30)
        self.losses = BenchLosses(path)
        self.known: Known = {}  # of the first page
        ready = {
            name: {"title": title, "description": text, "sql": sql}
            for name, (title, text, sql) in QUERIES.items()
        }
        self.metadata = {
            "title": "profharness",
            "description_html": "",  # of the first page; written for each request of this page
            "databases": {DATABASE: {"queries": ready}},
        }
        with open_store(path):  # report an invalid store before serving
            pass
        self._send: Send = _drop
        # If rich is installed, Datasette prints long tracebacks for every mistyped query.
        pm.get_plugin("datasette.handle_exception").rich = None
        self.datasette = Datasette(
            [],
            metadata=self.metadata,
            # To suggest facets, Datasette would run a query for each column.
            settings={"allow_download": False, "suggest_facets": False, "num_sql_threads": 0},
        )
        self.datasette.remove_database("_memory")
        self.store = StoreFile(self.datasette, path, self.losses)
        self.datasette.add_database(self.store, name=DATABASE)
        self._register_plugin()
        self.app = self.datasette.app()
        # The first request loads the templates and the schema, which all later processes inherit.
        page = f"/{DATABASE}"
        scope = {"type": "http", "method": "GET", "scheme": "http", "path": page, "headers": []}
        more = {"raw_path": page.encode(), "query_string": b"sql=select+1"}
        asyncio.run(self.answer(scope | more, _drop))
        # Otherwise the garbage collector of each process would scan the loaded modules at exit, which
        # takes long and copies their memory.
        gc.freeze()

    def queue(self, path: str) -> Queue:
        if path == "/":
            return self.front
        return self.reports if path.startswith((REPORT, REGRET)) else self.queries

    async def answer(self, scope: Scope, send: Send) -> None:
        known, first = dict(self.losses.computed), self.known

        async def send_when_closed(message: Message) -> None:
            if is_last(message):
                self.store.close()
                if self.losses.computed != known:
                    await send({"type": "losses", "losses": self.losses.computed})
                if self.known is not first:
                    await send({"type": "known", "known": self.known})
            await send(message)

        self._send = send
        self.datasette.sql_time_limit_ms = self.queue(scope["path"]).limit_s * 1000
        try:
            if scope["path"] == "/":
                self.metadata["description_html"] = self._front()
            await self.app(scope, _receive, send_when_closed)
        except Exception as error:  # an exception that Datasette did not handle
            response = await self._failed(error)
            await response.asgi_send(send)

    def learn(self, message: Message) -> None:
        if message["type"] == "losses":
            self.losses.computed = message["losses"]
        elif message["type"] == "known":
            self.known = message["known"]
        else:
            hint(f"error: {message['text']}")

    def _front(self) -> str:
        questions = (
            (f"/{DATABASE}/{name}", title, text) for name, (title, text, _) in QUERIES.items()
        )
        with open_store(self.path) as store:
            page, self.known = front_page(store, self.known, questions)
        return page

    def _report(self, runs: list[str], seen: str | None) -> Any:
        """Return the report on one run, or on two runs and the changes between them.

        `seen` is the tag of the report that the browser has cached. If this tag is still valid,
        return status 304.
        """
        state = repr((__version__, store_state(self.path), runs))
        headers = {"etag": f'"{sha256(state.encode()).hexdigest()}"', "cache-control": "no-cache"}
        if seen == headers["etag"]:
            return Response("", status=304, headers=headers)
        with open_store(self.path) as store:
            for run in runs:
                try:
                    store.resolve(run)
                except NotFoundError:
                    text = f"run {run!r} is not stored; /{DATABASE}/stored_runs lists all runs"
                    return Response.text(text, status=404)
            document = report_document(store, runs)
        try:
            return Response.html(render_html(document), headers=headers)
        except MissingExtraError as error:  # the `report` extra is missing
            note = Note(str(error), level="warning")
            kept = (block for block in document.blocks if not isinstance(block, Chart))
            return Response.html(render_html(replace(document, blocks=(note, *kept))))

    def _register_plugin(self) -> None:
        """Add `/-/report/RUN`, `/-/report/RUN/RUN` and the error pages to Datasette."""

        async def report(request: Any) -> Any:
            runs = list(filter(None, (request.url_vars["run"], request.url_vars["other"])))
            return self._report(runs, request.headers.get("if-none-match"))

        def handle_exception(exception: Exception) -> Any:
            # Datasette has its own pages for invalid requests.
            if isinstance(exception, Base400 | DatasetteError):
                return None
            return self._failed(exception)

        plugin = ModuleType("profharness_site")  # Datasette requires a __name__
        routes = [(rf"^{REPORT}(?P<run>[^/]+)(?:/(?P<other>[^/]+))?$", report)]
        plugin.register_routes = hookimpl(lambda: routes)  # type: ignore[attr-defined]
        plugin.handle_exception = hookimpl(handle_exception)  # type: ignore[attr-defined]
        # Plugins are global to the process, so an earlier one may still be registered.
        if pm.has_plugin(plugin.__name__):
            pm.unregister(name=plugin.__name__)
        pm.register(plugin, name=plugin.__name__)

    async def _failed(self, error: Exception) -> Any:
        """Return the response for an unexpected error. Print the cause only on the terminal."""
        if isinstance(error, MemoryError):
            return Response.text(
                "this request needs too much memory; request less data", status=400
            )
        cause = str(error)
        if not isinstance(error, ProfharnessError):
            code = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
            cause = f"{error!r} in {code.co_filename}:{code.co_name}"
        await self._send({"type": "error", "text": cause[:MAX_ERROR]})
        status = 404 if isinstance(error, NotFoundError) else 500
        text = (
            "the server cannot answer this request; the reason is printed in the terminal that "
            "runs profharness serve"
        )
        return Response.text(text, status=status)


async def _receive() -> Message:
    return {"type": "http.request"}


async def _drop(_: Message) -> None:
    pass
