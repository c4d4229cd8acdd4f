"""Check requests of browsers, and answer each accepted request in a separate process.

A process can be killed at any time, and the operating system then frees its memory. There is no
other way to interrupt functions of SQLite and of the library that draws charts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import re
import resource
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

from profharness.processes import SIGNALS, end_with_parent

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_WAITING = 64
FRAME_BYTES = 1 << 16
GRACE_S = 2.0  # extra time in which Datasette can report that its own time limit was exceeded
POLL_S = 0.1
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::\d+)?", re.IGNORECASE)
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)
BUSY = "too many concurrent requests; try again later"
ENDED = "the process for this request crashed or ran out of memory; request less data"
FOREIGN = "a page on another site sent this request; enter the address in the browser yourself"


@dataclass
class Queue:
    """A queue for requests of one kind.

    The newest request is answered first, because the client of that request is the most likely to
    be still waiting.
    """

    most: int
    """Maximum number of requests that are answered at the same time."""
    limit_s: float
    """Maximum time until the first part of a response, and between two parts, in seconds."""
    fair_s: float
    """Time after which a request is stopped if another request is waiting, in seconds."""
    memory_bytes: int
    """Maximum memory of the process that answers a request."""
    running: int = 0
    waiting: list[asyncio.Future[bool]] = field(default_factory=list)

    async def enter(self) -> bool:
        """Wait until the request may be answered, and return True. Call `leave` after the answer.

        Return False if too many newer requests are waiting.
        """
        if self.running < self.most:
            self.running += 1
            return True
        if len(self.waiting) == MAX_WAITING:
            self.waiting.pop(0).set_result(False)
        self.waiting.append(asyncio.get_running_loop().create_future())
        return await self.waiting[-1]

    def leave(self) -> None:
        """Let the newest waiting request continue, because another request was answered."""
        if self.waiting:
            self.waiting.pop().set_result(True)
        else:
            self.running -= 1


class Pages(Protocol):
    """An application that answers requests, each in a forked process."""

    def queue(self, path: str) -> Queue:
        """Return the queue for requests of a path."""

    async def answer(self, scope: Scope, send: Send) -> None:
        """Answer one request. This method runs in a process that exits afterwards."""

    def learn(self, message: Message) -> None:
        """Process a message that `answer` sent and that does not belong to the HTTP response."""


def guarded(pages: Pages, names: tuple[str, ...] | None, free_of_policy: str) -> App:
    """Return an application that only accepts read requests to the given host names.

    If `names` is None, accept any host name. The check prevents DNS rebinding, in which a foreign
    site lets its name resolve to this machine and reads the store through the browser. Pages below
    the path `free_of_policy` set their own content security policy.
    """

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        status, text = _refusal(scope, names)
        if status:
            await _send_text(send, status, text)
            return

        async def send_with_policy(message: Message) -> None:
            start = message["type"] == "http.response.start"
            if start and not scope["path"].startswith(free_of_policy):
                policy = (b"content-security-policy", POLICY.encode())
                message = {**message, "headers": [*message.get("headers", ()), policy]}
            await send(message)

        queue = pages.queue(scope["path"])
        if not await queue.enter():
            await _send_text(send, 503, BUSY)
            return
        try:
            await _answer(pages, queue, scope, receive, send_with_policy)
        finally:
            queue.leave()

    return app


def _refusal(scope: Scope, names: tuple[str, ...] | None) -> tuple[int, str]:
    """Return the HTTP status and the text for a refused request, or status 0 for an accepted one."""
    headers = dict(scope["headers"])
    # Latin-1 can decode any bytes, so a malformed name is refused and raises no error.
    host = headers.get(b"host", b"")
    name = HOST.fullmatch(host.decode("latin-1"))
    if name is None or (names and name[1].strip("[]").lower() not in names):
        return 421, "unknown host name; open the address that profharness serve printed"
    if scope["method"] not in ("GET", "HEAD"):
        return 405, "the store is served read-only"
    origin = headers.get(b"origin", b"//" + host).partition(b"//")[2]
    site = headers.get(b"sec-fetch-site", b"none")
    is_own = origin.lower() == host.lower() and site in (b"same-origin", b"none")
    kind = (headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest"))
    # A link on another site may open a page, but only if the URL contains no query.
    follows_link = kind == (b"navigate", b"document") and not scope["query_string"]
    return (0, "") if is_own or follows_link else (403, FOREIGN)


async def _send_text(send: Send, status: int, text: str) -> None:
    start = {"type": "http.response.start", "status": status}
    await send(start | {"headers": [(b"content-type", b"text/plain; charset=utf-8")]})
    await send({"type": "http.response.body", "body": f"{text}\n".encode()})


def is_last(message: Message) -> bool:
    """Return whether the message is the last one of a response."""
    return message["type"] == "http.response.body" and not message.get("more_body")


async def _answer(pages: Pages, queue: Queue, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request in a forked process.

    Kill the process if the answer takes too long, if the client disconnects, or if this task is
    cancelled.
    """
    mine, its = socket.socketpair()
    with mine, its:
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:  # out of memory, or too many processes
            await _send_text(send, 503, BUSY)
            return
        if pid == 0:
            _become_child(pages, scope, its, parent, queue.memory_bytes)
        its.close()
        try:
            reader, writer = await asyncio.open_connection(sock=mine)
            with contextlib.closing(writer):
                failure = await _forward(reader, pages, queue, receive, send)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if failure:
        await _send_text(send, *failure)


async def _forward(
    reader: asyncio.StreamReader, pages: Pages, queue: Queue, receive: Receive, send: Send
) -> tuple[int, str] | None:
    """Forward a response to the client.

    Return the status and the text of an error if the process did not begin a response.
    """
    clock = asyncio.get_running_loop().time
    begun = moved = clock()
    started = False

    async def forward() -> None:
        nonlocal moved, started
        is_complete = False
        while not is_complete:
            size = int.from_bytes(await reader.readexactly(4), "big")
            message = pickle.loads(await reader.readexactly(size))
            if message["type"].startswith("http."):
                started = True
                await send(message)
                moved = clock()
                is_complete = is_last(message)
            else:
                pages.learn(message)

    async def wait_until_left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    failure = None
    tasks = [asyncio.ensure_future(forward()), asyncio.ensure_future(wait_until_left())]
    try:
        while failure is None and not any(task.done() for task in tasks):
            await asyncio.wait(tasks, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
            now = clock()
            if now - moved > queue.limit_s + GRACE_S:
                text = f"this request took more than {queue.limit_s:.0f} s and was stopped; request less data"
                failure = 504, text
            elif queue.waiting and now - begun > queue.fair_s:
                text = (
                    f"this request took more than {queue.fair_s:.0f} s while other requests "
                    "waited; try again"
                )
                failure = 503, text
        ended = tasks[0].done() and isinstance(tasks[0].exception(), asyncio.IncompleteReadError)
        if ended and failure is None:
            failure = 500, ENDED
        return None if started else failure
    finally:
        for task in tasks:
            task.cancel()


def _become_child(
    pages: Pages, scope: Scope, channel: socket.socket, parent: int, memory_bytes: int
) -> NoReturn:
    """Answer a request in a process that was just forked, and exit."""
    try:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        end_with_parent(parent)
        os.dup2(channel.fileno(), 1)
        # Otherwise the connections of other clients would stay open until this process ends.
        for path in list(Path("/proc/self/fd").iterdir()):
            if int(path.name) > 2:
                with contextlib.suppress(OSError):
                    os.close(int(path.name))
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
        # Otherwise libraries would print tracebacks and queries.
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        asyncio.run(pages.answer(scope, _send_up))
    finally:
        os._exit(0)


async def _send_up(message: Message) -> None:
    """Send a message to `_forward` in the parent process. Split a long body into several messages."""
    body, begin = message.get("body", b""), 0
    while len(body) - begin > FRAME_BYTES:
        part = body[begin : begin + FRAME_BYTES]
        _write({"type": message["type"], "body": part, "more_body": True})
        begin += FRAME_BYTES
    _write({**message, "body": body[begin:]} if begin else message)


def _write(message: Message) -> None:
    data = pickle.dumps(message)
    data = len(data).to_bytes(4, "big") + data
    while data:
        data = data[os.write(1, data) :]
