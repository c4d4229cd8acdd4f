"""The store in a browser: Datasette, read-only, with ready queries and a report of each run.
Importing this module raises MissingExtraError without the extra `web`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import sqlite3
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from dataclasses import asdict, replace
from html import escape
from pathlib import Path
from types import ModuleType
from typing import Any

from profharness.answers.bench.answer import benched
from profharness.answers.bench.rows import CHOSEN
from profharness.errors import MissingExtraError, NotFoundError, UsageError
from profharness.store import Store, open_store
from profharness.store.schema import connect
from profharness.views.document import Chart, Note
from profharness.views.html import render_html
from profharness.views.report import report_document

try:
    import uvicorn
    from datasette import hookimpl
    from datasette.app import Datasette
    from datasette.database import Database
    from datasette.plugins import pm
    from datasette.utils.asgi import Response
except ImportError:
    raise MissingExtraError("`profharness serve`", "web") from None

LOOPBACK = ("127.0.0.1", "localhost", "::1")
DATABASE = "profharness"  # what the store is called in addresses, whatever its file is called
MAX_RUNS = 30
MAX_VALUE_BYTES = 8 << 20  # of one text or blob in an answer
TELLTALE = ("database_list", "fts3_tokenizer", "load_extension")
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::\d+)?", re.IGNORECASE)
REPORT = "/-/report/"  # its pages carry a policy of their own, which allows their one script
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


# name -> (title, what it answers, SQL over the store's views)
QUERIES: dict[str, tuple[str, str, str]] = {
    "stored_runs": (
        "Runs",
        "Which runs are stored, the newest first, with the rank of a job that each is of.",
        """SELECT run, kind, created, device, torch, rank, world_size,
            (SELECT count(*) FROM cells c WHERE c.run_id = r.id) AS cells,
            (SELECT coalesce(sum(launches), 0) FROM traces t WHERE t.run_id = r.id) AS launches
        FROM runs r ORDER BY created DESC, id DESC""",
    ),
    "busy_devices": (
        "How busy each GPU was",
        "Of each traced program: the span from the first launch to the last, the part of it in which "
        "the GPU was busy, in which collectives ran, and in which nothing but collectives did.",
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
        "Kernels by the time that they take in a call, in µs.",
        """SELECT run, config, backend, profiler, kernel_short, launches_per_call,
            round(total_ns * launches_per_call / launches / 1000.0, 2) AS us_per_call,
            round(duration_ns / 1000.0, 2) AS us_per_launch
        FROM kernel_summary WHERE total_ns IS NOT NULL
            AND (:backend = '' OR backend = :backend) ORDER BY us_per_call DESC LIMIT 200""",
    ),
    "cells_by_status": (
        "Cells by status",
        "How many cells of each run and backend ended in which status.",
        """SELECT run, backend, status, count(*) AS cells FROM cell_summary
        GROUP BY run, backend, status ORDER BY run DESC, backend, status""",
    ),
    "refusals_by_reason": (
        "Refusals by reason",
        "Why backends could not take a config, the most frequent reason first.",
        """SELECT f.code, c.backend, count(DISTINCT c.id) AS cells, min(f.message) AS example
        FROM refusals f JOIN cells c ON c.id = f.cell_id
        GROUP BY f.code, c.backend ORDER BY cells DESC, f.code""",
    ),
    "metrics_of_a_kernel": (
        "Metrics of a kernel",
        "Hardware counters of the kernels whose name holds a text.",
        """SELECT run, config, backend, kernel_short, metric, avg(value) AS mean, unit,
            count(*) AS launches
        FROM kernel_metrics WHERE kernel LIKE '%' || :kernel || '%'
        GROUP BY run, config, backend, kernel, metric ORDER BY run DESC, kernel_short, metric
        LIMIT 1000""",
    ),
    "latency": (
        "Latency by config and backend",
        "The median of each measurement in µs, without a profiler.",
        """SELECT run, config, backend, status, round(graph_median_ns / 1000.0, 2) AS graph_us,
            round(event_median_ns / 1000.0, 2) AS event_us,
            round(cold_median_ns / 1000.0, 2) AS cold_us,
            round(eager_median_ns / 1000.0, 2) AS eager_us,
            round(host_median_ns / 1000.0, 2) AS host_us,
            round(wall_median_ns / 1000.0, 2) AS wall_us, peak_memory_bytes
        FROM cell_summary ORDER BY run DESC, config, backend""",
    ),
    "regret": (
        "Regret",
        "What the choice of `auto` cost against the fastest correct backend of each config, as "
        "`bench` tells it (0.5: half as much again). run: an id, or `all`; without one the newest "
        "run that has an answer.",
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
    """The SQL function `bench_losses(run)`: what `auto` cost in a run, as a JSON array. run may be
    empty (the newest with an answer) or `all`. A run is computed once for each state of the store's
    file: the intervals of a bench take time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._computed: dict[str, tuple[object, list[dict[str, Any]]]] = {}

    def __call__(self, run: str | None) -> str:
        with open_store(self.path) as store:
            losses: list[dict[str, Any]] = []
            for name in self._runs(store, run):
                losses += self._losses_of(store, name)
                if losses and not run:
                    break
        return json.dumps(losses)

    def _runs(self, store: Store, run: str | None) -> list[str]:
        if not run or run == "all":
            return [row.run for row in store.runs()[:MAX_RUNS]]
        try:
            return [store.resolve(run)]
        except (NotFoundError, UsageError):
            return []  # as any query that asks for what is not there

    def _losses_of(self, store: Store, run: str) -> list[dict[str, Any]]:
        """Computed again whenever a run or a check was added or deleted."""
        files = (self.path, self.path.with_name(self.path.name + "-wal"))
        stats = [file.stat() for file in files if file.exists()]
        # readers make an empty log and delete it again
        state = tuple((stat.st_mtime_ns, stat.st_size) for stat in stats if stat.st_size)
        if run not in self._computed or self._computed[run][0] != state:
            losses = []
            if any(cell.backend == CHOSEN and cell.samples for cell in store.cells(run)):
                answer = benched(store, run)
                same = {"run": run, "measurement": answer.ranking}
                losses = [same | asdict(loss) for loss in answer.losses]
            self._computed[run] = state, losses
        return self._computed[run][1]


def serve(
    path: Path, *, host: str = "127.0.0.1", port: int = 8001, announce: Callable[[str], None]
) -> None:
    """Serve the store until interrupted; announce gets the address as soon as it answers. Raises
    NotFoundError without a store, UsageError for an address that cannot be had.
    """
    app = application(path, host)
    with _listen(host, port) as listener:
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{listener.getsockname()[1]}/"
        config = uvicorn.Config(app, log_level="warning", lifespan="on", access_log=False)
        server = uvicorn.Server(config)
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_run(server, listener, lambda: announce(address)))


async def _run(server: Any, listener: socket.socket, started: Callable[[], None]) -> None:
    task = asyncio.ensure_future(server.serve(sockets=[listener]))
    # uvicorn has a flag for its start, no event
    while not server.started and not task.done():
        await asyncio.sleep(0.02)
    if server.started:
        started()
    await task


@contextlib.contextmanager
def _listen(host: str, port: int) -> Iterator[socket.socket]:
    """A listening socket, bound before anything is told, so that a taken port is an error here."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        # else the port of a server that just ended stays taken for a while
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(64)
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"--host {host} --port {port}: cannot listen there: {error}; "
                "take another --port, or --port 0 for any free one"
            ) from None
        yield listener


def application(path: Path, host: str) -> App:
    """The web application on a store. Raises NotFoundError or StoreError."""
    # With rich at hand Datasette prints pages of traceback to stdout for every mistyped query; the
    # browser is told the reason anyway.
    pm.get_plugin("datasette.handle_exception").rich = None
    ready = {
        name: {"title": title, "description": text, "sql": sql}
        for name, (title, text, sql) in QUERIES.items()
    }
    datasette = Datasette(
        [],
        metadata={
            "title": "profharness",
            "description_html": _front(path),
            "databases": {DATABASE: {"queries": ready}},
        },
        # facets would be suggested by a query over each column
        settings={"allow_download": False, "sql_time_limit_ms": 10_000, "suggest_facets": False},
    )
    _add_store(datasette, path)
    _add_routes(path)
    return _guarded(datasette.app(), LOOPBACK if host in LOOPBACK else None)


def _add_store(datasette: Any, path: Path) -> None:
    """The store under a fixed name, read-only; its path may hold any sign."""
    losses = BenchLosses(path)

    class StoreFile(Database):  # type: ignore[misc]
        def connect(self, write: bool = False) -> sqlite3.Connection:
            if write:
                raise UsageError("the store is served read-only")
            # Datasette's queries run in a pool of threads
            connection = connect(path, write=False, any_thread=True)
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
            connection.set_authorizer(_allowed)
            connection.create_function("bench_losses", 1, losses)
            # Datasette closes what stands in this list
            self._all_file_connections.append(connection)
            return connection

        async def attached_databases(self) -> list[Any]:
            # Datasette would ask PRAGMA database_list, which tells the path
            return []

        # What asks for the path shows it; these are what the file itself is needed for.
        @property
        def size(self) -> int:
            return path.stat().st_size

        @property
        def mtime_ns(self) -> int:
            return path.stat().st_mtime_ns

    # mutable: runs come in while it is served
    database = StoreFile(datasette, path=path.name, is_mutable=True)
    datasette.add_database(database, name=DATABASE)


def _allowed(action: int, name: str | None, function: str | None, *_: object) -> int:
    """SQLite's answer to a part of a query: what tells a path or an address in memory is denied."""
    subject = name if action == sqlite3.SQLITE_PRAGMA else function
    return sqlite3.SQLITE_DENY if (subject or "").lower() in TELLTALE else sqlite3.SQLITE_OK


def _front(path: Path) -> str:
    """Links to the queries and to the reports of the newest runs."""
    with open_store(path) as store:
        runs = store.runs()
    reports = "".join(
        f'<li><a href="{REPORT}{escape(row.run)}">{escape(row.run)}</a> '
        f"{escape(row.created)} {escape(row.device or '')}</li>"
        for row in runs[:MAX_RUNS]
    )
    questions = "".join(
        f'<li><a href="/{DATABASE}/{name}">{escape(title)}</a>: {escape(text)}</li>'
        for name, (title, text, _) in QUERIES.items()
    )
    return f"<h2>Questions</h2><ul>{questions}</ul><h2>Reports</h2><ul>{reports}</ul>"


def _add_routes(path: Path) -> None:
    """Teach Datasette `/-/report/RUN`."""

    async def report(request: Any) -> Any:
        run = request.url_vars["run"]
        try:
            # in a thread: the loop has others to answer meanwhile
            return Response.html(await asyncio.to_thread(_report, path, run))
        except NotFoundError as error:
            return Response.text(str(error), status=404)

    def register_routes() -> list[tuple[str, Any]]:
        return [(rf"^{REPORT}(?P<run>[^/]+)$", report)]

    plugin = ModuleType("profharness_reports")  # Datasette asks a plugin for its __name__
    plugin.register_routes = hookimpl(register_routes)  # type: ignore[attr-defined]
    # plugins are the process's, whatever application they came with
    if pm.has_plugin(plugin.__name__):
        pm.unregister(name=plugin.__name__)
    pm.register(plugin, name=plugin.__name__)


def _report(path: Path, run: str) -> str:
    """The page of one run; without charts, and with a note, where their extra is missing."""
    with open_store(path) as store:
        document = report_document(store, [run])
    try:
        return render_html(document)
    except MissingExtraError as error:
        kept = tuple(block for block in document.blocks if not isinstance(block, Chart))
        return render_html(replace(document, blocks=(Note(str(error), level="warning"), *kept)))


def _guarded(app: App, names: tuple[str, ...] | None) -> App:
    """Answer only what reads, under a policy, and only to these names (None: to any): a page elsewhere
    that points its own name at this machine must not read the store through the reader's browser."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        status, text = _refusal(scope, names)
        if status:
            start = {"type": "http.response.start", "status": status}
            await send(start | {"headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": text})
            return

        async def send_with_policy(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start" and not scope["path"].startswith(REPORT):
                policy = (b"content-security-policy", POLICY.encode())
                message = {**message, "headers": [*message.get("headers", ()), policy]}
            await send(message)

        await app(scope, receive, send_with_policy)

    return guarded


def _refusal(scope: Scope, names: tuple[str, ...] | None) -> tuple[int, bytes]:
    """The status and text for a request that is not answered; 0 for one that is."""
    # latin-1 takes any byte, so that a strange name is refused and no error
    host = HOST.fullmatch(dict(scope["headers"]).get(b"host", b"").decode("latin-1"))
    if host is None or (names and host[1].strip("[]").lower() not in names):
        return 421, b"not a name of this machine\n"
    if scope["method"] not in ("GET", "HEAD"):
        return 405, b"the store is served read-only\n"
    return 0, b""
