"""`profharness serve` as a real process, asked over real HTTP."""

from __future__ import annotations

import gc
import http.client
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest
from waiting import PATIENCE_S, alive, until

from profharness.attention.config import parse_config
from profharness.measurements.evaluation import evaluate_bench
from profharness.run import Cell, Check, Protocol, Run, write_run
from profharness.store import ingest_path, open_store

with warnings.catch_warnings():  # Datasette 0.65 leaves connections open when it is imported
    warnings.simplefilter("ignore", ResourceWarning)
    from profharness.commands.serve.server import DATABASE, QUERIES, BenchLosses

    gc.collect()  # a connection is in a reference cycle; Python 3.13 warns when it is freed

STORED = Path(__file__).parents[2] / "traces"
TRACES = STORED / "h200-torch2.11"
RUN = "20261121-151544-59c7"
Answer = tuple[int, str]
SHORT = f"/{DATABASE}.json?sql=select+1"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store under a name that would mean something in an address."""
    path = tmp_path_factory.mktemp("serve") / "a ?#%.db"
    ingest_path(path, TRACES)
    return path


@contextmanager
def serving(
    *args: object, program: tuple[str, str] = ("-m", "profharness")
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and the host and port that it told on stderr."""
    pytest.importorskip("datasette", reason="datasette is not installed")
    command = [sys.executable, *program, "serve", "--port", "0", *map(str, args)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        told = ""
        while "serving" not in told:
            line = process.stderr.readline()
            assert line, f"ended early: {told}"
            told += line
        address = next(word for word in told.split() if word.startswith("http://"))
        yield process, urlsplit(address).netloc
    finally:
        process.kill()
        process.communicate()


def ended(
    *args: object, program: tuple[str, str] = ("-m", "profharness")
) -> subprocess.CompletedProcess[str]:
    """Run a server that ends by itself."""
    command = [sys.executable, *program, "serve", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.fixture(scope="module")
def served(store: Path) -> Iterator[str]:
    with serving("--store", store) as (_, address):
        yield address


def get(
    address: str,
    path: str,
    host: str | None = None,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
) -> Answer:
    with closing(http.client.HTTPConnection(address, timeout=PATIENCE_S)) as connection:
        connection.request(method, path, headers={"Host": host or address, **(headers or {})})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")


def test_the_front_page_links_to_reports_and_queries(served: str, store: Path) -> None:
    status, page = get(served, "/")
    assert status == 200
    with open_store(store) as opened:
        run = opened.resolve("latest")
    assert f"/-/report/{run}" in page
    for name in QUERIES:
        assert f"/{DATABASE}/{name}" in page


def section(page: str, title: str) -> str:
    """Return a section of the front page."""
    return page.partition(f"<h2>{title}</h2>")[2].partition("<h2>")[0]


def links(text: str) -> list[str]:
    return re.findall(r'href="([^"]+)"', text)


def test_the_front_page_says_what_is_stored_slow_and_changed(tmp_path: Path) -> None:
    models = STORED / "models"
    # A training step is not a version of an inference step, though they share modules and sizes.
    for name in ("llama_prefill", "llama_eager", "llama_train", "vit"):
        ingest_path(tmp_path / "s.db", models / f"{name}.json.gz")
    ingest_path(tmp_path / "s.db", TRACES)
    with serving("--store", tmp_path / "s.db") as (_, address):
        page = get(address, "/")[1]
        stored, slow, changed = (
            section(page, f"What {words}") for words in ("is stored", "is slow", "changed")
        )
        for name in ("llama_prefill", "llama_eager", "vit"):
            assert f">{name}.json.gz</a>" in stored
        assert "Attention takes" in slow and ">llama_eager.json.gz</a>" in slow
        assert slow.index("llama_eager") < slow.index("llama_prefill")  # the slowest first
        assert RUN not in slow  # auto is within 10 % of the fastest backend
        assert ">llama_prefill.json.gz → llama_eager.json.gz</a>" in changed
        assert "times as long as" in changed
        for link in {*links(stored), *links(slow), *links(changed)}:
            assert get(address, link)[0] == 200, link
        again = get(address, "/")[1]  # from what the server remembers of the first request
        assert [section(again, f"What {words}") for words in ("is slow", "changed")] == [
            slow,
            changed,
        ]
        ingest_path(tmp_path / "s.db", models / "whisper.json.gz")
        assert ">whisper.json.gz</a>" in section(get(address, "/")[1], "What is stored")


def test_captures_are_slow_where_auto_loses(tmp_path: Path) -> None:
    for name, factor in (("little", 1.5), ("much", 4), ("nothing", 1)):
        samples = {"auto": factor, "flash": 1}
        cells = tuple(
            Cell(
                f"c{place}", parse_config("2,8,512,64,fp16"), backend, "ok",
                choice="math" if backend == "auto" and factor > 1 else "flash",
                samples={"cold": [round(times * 10_000) + n for n in range(30)]},
            )
            for place, (backend, times) in enumerate(samples.items())
        )  # fmt: skip
        (tmp_path / name).mkdir()
        when, environment = "2026-01-01T00:00:00+00:00", {"gpu": "NVIDIA H200", "torch": "2.11"}
        run = Run(f"20260101-{name}", when, ("events",), Protocol(), cells, environment)
        write_run(tmp_path / name, run)
        ingest_path(tmp_path / "s.db", tmp_path / name)
    with serving("--store", tmp_path / "s.db") as (_, address):
        slow = section(get(address, "/")[1], "What is slow")
    assert "auto takes 4.00 times as long" in slow and "nothing" not in slow
    assert slow.index("20260101-much") < slow.index("20260101-little")


def test_front_page_escapes_names(tmp_path: Path) -> None:
    path = tmp_path / "<img src=x onerror=alert(1)>&.json.gz"
    shutil.copy(STORED / "models" / "vit.json.gz", path)
    ingest_path(tmp_path / "s.db", path)
    with serving("--store", tmp_path / "s.db") as (_, address):
        page = get(address, "/")[1]
    assert "<img" not in page and "&lt;img src=x onerror=alert(1)&gt;&amp;.json.gz" in page


def test_a_report_is_made_again_only_when_the_store_changed(store: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(store, tmp_path / "s.db"))

    def report(address: str, tag: str) -> tuple[int, str, int]:
        with closing(http.client.HTTPConnection(address, timeout=PATIENCE_S)) as connection:
            connection.request("GET", "/-/report/latest", headers={"If-None-Match": tag})
            answer = connection.getresponse()
            return answer.status, answer.getheader("ETag") or "", len(answer.read())

    with serving("--store", path) as (_, address):
        status, tag, size = report(address, "")
        assert (status, size > 10_000) == (200, True)
        assert report(address, tag) == (304, tag, 0)
        ingest_path(path, STORED / "models" / "vit.json.gz")
        status, other, size = report(address, tag)
        assert (status, size > 10_000) == (200, True) and other != tag


def test_captures_are_seen_while_the_store_is_served(tmp_path: Path) -> None:
    """Each capture opens, writes and closes the store that the server has open."""
    capture = [sys.executable, "-m", "profharness", "capture", "--profiler", "torch"]
    capture += ["--backend", "math", "--samples", "2", "--warmup", "1"]

    def captured(seq_len: int) -> str:
        command = [*capture, "--config", f"1,1,{seq_len},16", "--store", "s.db"]
        subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
        return max(path.name for path in (tmp_path / "traces" / "runs").iterdir())

    def asked_runs(address: str, question: str) -> set[object]:
        status, text = get(address, f"/{DATABASE}/{question}.json?_shape=array&backend=")
        assert status == 200, text
        return {row["run"] for row in json.loads(text)}

    runs = {captured(16)}
    with serving("--store", tmp_path / "s.db") as (_, address):
        for seq_len in (32, 48, 64):
            for question in ("stored_runs", "slowest_kernels", "latency"):
                assert asked_runs(address, question) == runs
            runs.add(captured(seq_len))
            page = section(get(address, "/")[1], "What is stored")
            assert {link.rpartition("/")[2] for link in links(page)} == runs
    with closing(sqlite3.connect(tmp_path / "s.db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.mark.parametrize("name", list(QUERIES))
def test_a_ready_query_answers(served: str, name: str) -> None:
    status, text = get(served, f"/{DATABASE}/{name}.json?_shape=array&kernel=flash&backend=")
    assert status == 200, text
    rows = json.loads(text)
    if name in ("metrics_of_a_kernel", "busy_devices"):
        assert rows == []  # that run has no counters, and is no program's
        return
    assert rows
    if name == "regret":
        assert all(row["regret"] >= 0 for row in rows)
        assert [row["regret"] for row in rows] == sorted(
            (row["regret"] for row in rows), reverse=True
        )


def test_a_report_is_made_on_request(served: str) -> None:
    status, page = get(served, "/-/report/latest")
    assert status == 200 and page.startswith("<!DOCTYPE html>") and "<svg" in page


@pytest.mark.parametrize(
    "run", ["nope", "all", "latest~9", "latest~99999999999999999999", "0", "%00", "~", "a%2fb"]
)
def test_wrong_run_is_not_found(served: str, store: Path, run: str) -> None:
    status, text = get(served, f"/-/report/{run}")
    assert status == 404 and text.startswith(f"run '{run}' is not stored")
    assert str(store.parent) not in text


def test_store_that_is_gone_is_an_error_without_path(store: Path, tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    with serving("--store", shutil.copy(store, path)) as (process, address):
        path.rename(tmp_path / "away.db")
        for page in ("/", "/-/report/latest", f"/{DATABASE}/runs", SHORT):
            status, text = get(address, page)
            assert (status, str(tmp_path) in text) == (404, False), text
            assert process.stderr is not None
            assert process.stderr.readline().startswith(f"error: {path}: the store does not exist")
        (tmp_path / "away.db").rename(path)
        assert get(address, "/-/report/latest")[0] == 200
        path.write_bytes(b"no store" * 1000)
        status, text = get(address, f"/{DATABASE}/runs")
        assert (status, str(tmp_path) in text) == (500, False), text
        assert f"error: {path}: the file is not an SQLite file" in process.stderr.readline()


@pytest.mark.parametrize(
    "sql", ["delete+from+runs", "drop+view+cell_summary", "pragma+user_version=9"]
)
def test_nothing_can_be_written(served: str, store: Path, sql: str) -> None:
    status, _ = get(served, f"/{DATABASE}.json?sql={sql}")
    assert status == 400
    assert get(served, f"/{DATABASE}/runs/1/-/delete", method="POST")[0] in (403, 404, 405)
    with open_store(store) as opened:
        assert opened.runs()


def test_a_foreign_name_is_not_answered(served: str) -> None:
    port = served.rpartition(":")[2]
    assert get(served, "/", host="evil.example")[0] == 421
    assert get(served, "/", host=f"evil.example:{port}")[0] == 421
    assert get(served, "/", host=f"localhost:{port}")[0] == 200
    assert get(served, "/", host="[::1]")[0] == 200


@pytest.mark.parametrize("host", ["[localhost", "localhost]", "a b", "127.0.0.1:x", ""])
def test_an_invalid_host_name_is_refused(served: str, host: str) -> None:
    with closing(http.client.HTTPConnection(served, timeout=PATIENCE_S)) as connection:
        connection.putrequest("GET", "/", skip_host=True)
        connection.putheader("Host", host)
        connection.endheaders()
        assert connection.getresponse().status in (400, 421)


@pytest.mark.parametrize("path", ["/", f"/{DATABASE}/runs", f"/{DATABASE}/regret", "/-/report/x"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_but_reading_is_answered(served: str, method: str, path: str) -> None:
    assert get(served, path, method=method) == (405, "the store is served read-only\n")


@pytest.mark.parametrize(
    ("sql", "told"),
    [
        ("select+length(zeroblob(900000000))", "too big"),
        ("select+hex(randomblob(9000000))", "too big"),
        ("select+*+from+pragma_database_list", "not authorized"),
        ("select+fts3_tokenizer('simple')", "not authorized"),
    ],
)
def test_a_query_takes_no_memory_and_tells_no_path(served: str, sql: str, told: str) -> None:
    status, text = get(served, f"/{DATABASE}.json?sql={sql}")
    assert (status, told in text) == (400, True), text


def test_no_page_shows_where_the_store_lies(served: str, store: Path) -> None:
    paths = ("/", "/-/databases.json", f"/{DATABASE}", "/nope", f"/{DATABASE}/nope", "/-/threads")
    for path in paths:
        assert str(store.parent) not in get(served, path)[1], path


def test_every_page_has_a_policy(served: str) -> None:
    for path in ("/", f"/{DATABASE}", f"/{DATABASE}/runs", "/nope", f"/{DATABASE}/nope"):
        with closing(http.client.HTTPConnection(served, timeout=PATIENCE_S)) as connection:
            connection.request("GET", path)
            policy = connection.getresponse().getheader("Content-Security-Policy") or ""
        assert "default-src 'none'; script-src 'self';" in policy, path
    assert 'http-equiv="Content-Security-Policy"' in get(served, "/-/report/latest")[1]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_store_on_a_medium_that_is_read_only_is_served(store: Path, tmp_path: Path) -> None:
    medium = tmp_path / "medium"
    medium.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(medium)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        shutil.copy(store, medium / "s.db")
        subprocess.run(["mount", "-o", "remount,ro", str(medium)], check=True)
        with serving("--store", medium / "s.db") as (_, address):
            for path in ("/", f"/{DATABASE}/runs.json", SHORT):
                assert get(address, path)[0] == 200, path
    finally:
        subprocess.run(["umount", "-l", str(medium)], check=True)


def test_only_loopback_is_listened_on_and_a_warning_else(store: Path) -> None:
    with serving("--store", store) as (_, address):
        assert address.startswith("127.0.0.1:")
    done = ended("--host", "192.0.2.1", "--store", store)
    assert "warning: with --host 192.0.2.1," in done.stderr
    assert done.returncode == 2  # no machine has this address


ENDLESS = "select instr(printf('%.*c', 8000000, 'a'), printf('%.*c', 4000000, 'a') || 'b')"


def children(process: subprocess.Popen[str]) -> list[int]:
    """The processes that a process has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = path.read_text(errors="replace").rpartition(")")[2].split()[1]
            found += [int(path.parent.name)] if int(parent) == process.pid else []
    return found


@contextmanager
def asked(address: str, sql: str, times: int = 1) -> Iterator[list[http.client.HTTPConnection]]:
    """Connections with a query that nobody has read the answer of."""
    with ExitStack() as stack:
        connections = []
        for _ in range(times):
            connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
            stack.enter_context(closing(connection))
            connection.request("GET", f"/{DATABASE}.json?sql={quote(sql)}")
            connections.append(connection)
        yield connections


@pytest.mark.parametrize("times", [3, 90])
def test_queries_without_end_stop_no_other_query_and_end_with_their_clients(
    store: Path, times: int
) -> None:
    with serving("--store", store) as (process, address):
        with asked(address, ENDLESS, times):
            until(lambda: len(children(process)) >= 3)
            assert get(address, SHORT)[0] == 200
            assert children(process)
        until(lambda: not children(process))


def test_query_whose_process_dies_is_an_error_of_its_own(store: Path) -> None:
    with (
        serving("--store", store) as (process, address),
        asked(address, ENDLESS) as (connection,),
    ):
        until(lambda: children(process))
        os.kill(children(process)[0], signal.SIGSEGV)
        answer = connection.getresponse()
        assert answer.status == 500 and b"crashed or ran out of memory" in answer.read()
        assert get(address, SHORT)[0] == 200


def test_query_that_takes_much_memory_is_refused(served: str) -> None:
    sql = "with recursive n(i) as (select 1 union all select i + 1 from n limit 300) "
    path = f"/{DATABASE}.json?sql={quote(sql)}select+zeroblob(8000000)+from+n"
    answers: list[Answer] = []

    def refused() -> bool:
        answers.append(get(served, path))
        return answers[-1][0] != 504  # on a busy machine, its time ends before its memory

    until(refused)
    assert answers[-1] == (400, "this request needs too much memory; request less data")


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 0),
        (signal.SIGTERM, 143),
        (signal.SIGHUP, 129),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_signal_ends_the_server_and_all_its_queries(
    store: Path, number: signal.Signals, code: int
) -> None:
    with serving("--store", store) as (process, address), asked(address, ENDLESS, 9):
        until(lambda: len(children(process)) >= 3)
        pids = children(process)
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, out, "Traceback" in err) == (code, "", False), err
        assert number != signal.SIGINT or err == "stopped\n"
        until(lambda: not any(alive(pid) for pid in pids))


SIGNALLED = """
import os, signal
from profharness.cli import main
from profharness.commands.serve import server
async def app(scope, receive, send):
    signal.raise_signal(int(os.environ["NUMBER"]))
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"answered"})
server.application = lambda *_: app
main()
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signal_during_a_request_ends_the_server(
    store: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    monkeypatch.setenv("NUMBER", str(int(number)))
    with serving("--store", store, program=("-c", SIGNALLED)) as (process, address):
        with closing(http.client.HTTPConnection(address, timeout=PATIENCE_S)) as connection:
            connection.request("GET", "/")
            with suppress(ConnectionError):
                connection.getresponse().read()
        _, err = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, "Traceback" in err) == (code, False), err


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
    ],
)
def test_request_of_another_site_is_refused(served: str, headers: dict[str, str]) -> None:
    for path in ("/", SHORT, "/-/report/latest"):
        assert get(served, path, headers=headers)[0] == 403
    link = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert get(served, SHORT, headers=headers | link)[0] == 403


@pytest.mark.parametrize("site", ["none", "same-origin", "cross-site"])
def test_links_and_own_pages_are_answered(served: str, site: str) -> None:
    link = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert get(served, f"/{DATABASE}/runs", headers=link)[0] == 200
    own = {"Origin": f"http://{served}", "Sec-Fetch-Site": "same-origin"}
    assert get(served, SHORT, headers=own)[0] == 200
    # a link must not bring a query along
    assert get(served, SHORT, headers=link)[0] == (403 if site == "cross-site" else 200)


def test_a_taken_port_is_an_error(store: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = ended("--port", port, "--store", store)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: cannot listen on --host 127.0.0.1 --port {port}: ")
    assert "Traceback" not in done.stderr


def test_without_a_store_or_the_extra_it_says_so(store: Path, tmp_path: Path) -> None:
    code = "import sys\nsys.modules['datasette'] = None\nfrom profharness.cli import main\nmain()"
    done = ended("--store", store, program=("-c", code))
    assert done.returncode == 1 and "pip install 'profharness[web]'" in done.stderr
    done = ended("--store", tmp_path / "no.db")
    assert done.returncode == 2 and "the store does not exist" in done.stderr


ENVIRONMENT = {"torch": "2.13.0", "gpu": "H200", "device_type": "cuda"}
LABEL = "b1-h1-s16-d16-fp16"


def timed(number: int, backend: str, median_ns: int) -> Cell:
    samples = {"event": [median_ns + each for each in range(-5, 6)]}
    return Cell(f"c{number:04d}", parse_config(LABEL), backend, "ok", samples=samples)


def checked(passed: bool) -> Cell:
    """Return a check of `mine` on another problem than the one that was timed."""
    other = parse_config("b1-h4-kv1-s16-d16-fp16")
    checks = (Check("out", passed),)
    return Cell("v00001", other, "mine", "ok", case="mqa", asked=LABEL, checks=checks)


def stored(folder: Path, number: int, cells: list[Cell], environment: dict[str, str]) -> str:
    """A run taken into the store of the folder; its id."""
    run = Run(
        f"run-{number}",
        f"2026-01-01T00:00:{number:02d}+00:00",
        ("events",) if cells[0].samples else (),
        Protocol(),
        tuple(cells),
        environment,
    )
    (folder / run.run).mkdir()
    write_run(folder / run.run, run)
    ingest_path(folder / "store.db", folder / run.run)
    return run.run


def regret_rows(address: str, run: str = "") -> list[dict[str, object]]:
    status, text = get(address, f"/{DATABASE}/regret.json?_shape=array&run={run}")
    assert status == 200, text
    found: list[dict[str, object]] = json.loads(text)
    return found


def test_regret_is_what_bench_says_of_the_same_store(tmp_path: Path) -> None:
    """`mine`, and all-disabled, are faster than auto; a check of any case that applies takes `mine`
    out, also while the store is being served; one on another device does not.
    """
    cells = [timed(1, "auto", 3000), timed(2, "flash", 2000), timed(3, "mine", 1500)]
    bench = stored(tmp_path, 1, [*cells, timed(4, "all-disabled", 500)], ENVIRONMENT)
    path = tmp_path / "store.db"

    def same_as_bench(address: str) -> dict[str, object]:
        (row,) = regret_rows(address)
        with open_store(path) as opened:
            (loss,) = evaluate_bench(opened, bench).losses
        assert row == {
            "run": bench,
            "config": LABEL,
            "measurement": "event",
            "choice": loss.choice,
            "best": loss.best,
            "auto_us": loss.chosen_ns / 1000,
            "best_us": loss.best_ns / 1000,
            "regret": pytest.approx(loss.regret, abs=1e-4),
            "real": int(loss.real),
        }
        assert regret_rows(address, bench) == regret_rows(address, "all") == [row]
        assert regret_rows(address, "nope") == []
        return row

    with serving("--store", path) as (_, address):
        assert f"/-/report/{bench}" in get(address, "/")[1]
        first = same_as_bench(address)
        assert (first["best"], first["regret"]) == ("mine", 1.0)
        stored(tmp_path, 2, [checked(False)], ENVIRONMENT | {"gpu": "L4"})
        assert same_as_bench(address)["best"] == "mine"
        assert "/-/report/run-2" in get(address, "/")[1]
        stored(tmp_path, 3, [checked(False)], ENVIRONMENT)
        wrong = same_as_bench(address)
        assert (wrong["best"], wrong["regret"], wrong["real"]) == ("flash", 0.5, 1)
        stored(tmp_path, 4, [checked(True)], ENVIRONMENT)
        assert same_as_bench(address)["best"] == "mine"


def test_a_run_is_computed_once_for_each_state_of_the_store(store: Path) -> None:
    losses = BenchLosses(store)
    first = losses("all")
    known = {run: rows for run, (_, rows) in losses.computed.items()}
    assert json.loads(first) and losses("all") == first
    assert all(losses.computed[run][1] is rows for run, rows in known.items())


def test_it_leaves_nothing_beside_the_store(store: Path) -> None:
    before = {path.name for path in store.parent.iterdir()}
    with serving("--store", store) as (_, address):
        get(address, "/")
    after = {path.name for path in store.parent.iterdir()}
    assert {name for name in after if not name.endswith(("-wal", "-shm"))} <= before
