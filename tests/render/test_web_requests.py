"""Check requests that are answered in their own processes: limits, turns and what ends them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from profharness.commands.serve import requests as web_requests
from profharness.commands.serve.requests import Message, Queue, Scope, Send, guarded

START = {"type": "http.response.start", "status": 200, "headers": []}
BODY = b"x" * 1_000_000


def queue(**options: Any) -> Queue:
    return Queue(**{"most": 2, "limit_s": 1e6, "fair_s": 1e6, "memory_bytes": 8 << 30, **options})


@dataclass
class Pages:
    """Pages whose paths name their behaviour. `lessons` contains the messages of their processes."""

    only: Queue
    lessons: list[Message] = field(default_factory=list)

    def queue(self, path: str) -> Queue:  # noqa: ARG002
        return self.only

    async def answer(self, scope: Scope, send: Send) -> None:
        match scope["path"]:
            case "/hang":
                time.sleep(86400)
            case "/half":
                await send(START)
                await send({"type": "http.response.body", "body": b"half", "more_body": True})
                time.sleep(86400)
            case "/die":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "/raise":
                raise ValueError("a secret")
            case "/print":
                print("noise")
        await send({"type": "lesson", "pid": os.getpid()})
        await send(START)
        await send({"type": "http.response.body", "body": BODY})

    def learn(self, message: Message) -> None:
        self.lessons.append(message)


Ask = Callable[[str], Awaitable[tuple[int, bytes]]]


def asking(pages: Pages, left: asyncio.Event) -> Ask:
    """Send a request to the application. The client disconnects when `left` is set."""
    app = guarded(pages, None, "/-/own/")

    async def receive() -> Message:
        await left.wait()
        return {"type": "http.disconnect"}

    async def ask(path: str) -> tuple[int, bytes]:
        messages: list[Message] = []

        async def send(message: Message) -> None:
            messages.append(message)

        headers = [(b"host", b"here")]
        scope = {"method": "GET", "path": path, "query_string": b"", "headers": headers}
        await app(scope, receive, send)
        status = messages[0]["status"] if messages else 0
        return status, b"".join(message.get("body", b"") for message in messages)

    return ask


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/", 200, BODY),
        ("/print", 200, BODY),
        ("/die", 500, b"crashed or ran out of memory"),
        ("/raise", 500, b"crashed or ran out of memory"),
    ],
)
def test_answer_of_a_process_is_passed_on(path: str, status: int, text: bytes) -> None:
    pages = Pages(queue())

    async def run() -> tuple[int, bytes]:
        return await asking(pages, asyncio.Event())(path)

    got, body = asyncio.run(run())
    assert got == status and text in body and b"secret" not in body
    assert [message["pid"] != os.getpid() for message in pages.lessons] == [True] * (status == 200)


def children() -> set[str]:
    """Return the processes that this thread forked and that are not reaped. Other tests have some."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.mark.parametrize(("path", "status"), [("/hang", 504), ("/half", 200)])
def test_process_that_takes_too_long_is_killed(
    path: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_requests, "GRACE_S", 0.0)
    before = children()

    async def run() -> tuple[int, bytes]:
        return await asking(Pages(queue(limit_s=0.5)), asyncio.Event())(path)

    got, body = asyncio.run(run())
    # on a slow machine the answer may not have started
    assert got in (status, 504)
    assert body in (
        b"half",
        b"this request took more than 0 s and was stopped; request less data\n",
    )
    assert children() <= before


def test_process_is_killed_when_its_client_leaves_or_the_server_ends() -> None:
    before = children()

    async def run() -> None:
        left = asyncio.Event()
        ask = asking(Pages(queue()), left)
        task = asyncio.ensure_future(ask("/hang"))
        await asyncio.sleep(0.1)
        left.set()
        assert await task == (0, b"")
        left.clear()
        task = asyncio.ensure_future(ask("/hang"))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert children() <= before


def test_long_answers_give_way_to_the_newest_and_the_oldest_are_turned_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(web_requests, "MAX_WAITING", 3)

    async def run() -> tuple[list[int], int]:
        left = asyncio.Event()
        ask = asking(Pages(queue(fair_s=0.0)), left)
        tasks = [asyncio.ensure_future(ask("/hang")) for _ in range(9)]
        await asyncio.sleep(0)  # each task has sent its request
        status, _ = await ask("/")
        ended = [task.result()[0] for task in tasks if task.done()]
        left.set()
        await asyncio.gather(*tasks)
        return ended, status

    ended, status = asyncio.run(run())
    assert status == 200
    # of nine, two started, three waited, and four were dropped
    assert len(ended) >= 5 and set(ended) == {503}
