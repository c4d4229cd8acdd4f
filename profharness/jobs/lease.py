"""Who works on a group of a campaign in a folder that several hosts see.

`flock` over a network file system is not to be trusted, so a lease is a file with a heartbeat: its
holder writes it anew every beat, and who sees it unchanged for three beats takes it over. The
watcher's own clock counts, since the clocks of hosts differ.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from profharness.files import read_input

LEASES = "leases"  # in the folder of a campaign that tasks of an array may run
BEAT_S = 10.0
MISSED_BEATS = 3
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PID_NAMESPACE = Path("/proc/self/ns/pid")


@dataclass(frozen=True)
class Holder:
    """What a lease says: a process by host, boot, id and start, and how often it has beaten."""

    host: str
    boot: str
    pid: int
    start: str
    token: str
    beat: int = 0

    @property
    def text(self) -> str:
        """Which process of which host it is."""
        return f"process {self.pid} of host {self.host.split()[0]}"

    def has_ended(self) -> bool:
        """Whether it is known to be gone: a process of this host since its boot that has ended. Of another
        boot nothing is known: hosts of one image may share a name.
        """
        if self.host != host_name():
            return False
        return self.boot == _read_system(BOOT_ID) and process_start(self.pid) != self.start


def host_name() -> str:
    """This host by its name, and the namespace of its process ids: containers share names."""
    try:
        return f"{socket.gethostname()} {PID_NAMESPACE.readlink()}"
    except OSError:
        return f"{socket.gethostname()} -"


def process_start(pid: int) -> str | None:
    """When a process of this host was started, in ticks since the boot; None where there is none."""
    # the name in parentheses may hold blanks
    state, *fields = _read_system(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split() or ["Z"]
    return None if state == "Z" else fields[18]


def read_holder(path: Path) -> Holder | None:
    """Who holds a lease; None where there is no file, or one that is just being written."""
    try:
        return Holder(**json.loads(_read(path)))
    except (ValueError, TypeError):
        return None


class Lease:
    """A lease on a path, by one process. `on_lost` is called once another has taken it over."""

    def __init__(
        self, path: Path, on_lost: Callable[[], object] = lambda: None, beat_s: float = BEAT_S
    ) -> None:
        pid, token = os.getpid(), secrets.token_hex(8)
        start = process_start(pid) or ""
        self._holder = Holder(host_name(), _read_system(BOOT_ID), pid, start, token)
        self._path, self._on_lost, self._beat_s = path, on_lost, beat_s
        self._ended = threading.Event()

    def take(self) -> bool:
        """Make the file and beat until `end`; False where there is a file already."""
        try:
            with self._path.open("x", encoding="utf-8") as file:
                file.write(self._text())
        except FileExistsError:
            return False
        threading.Thread(target=self._keep, name="lease", daemon=True).start()
        return True

    def end(self) -> None:
        """Give the lease back, where it is still one's own."""
        self._ended.set()
        # one that cannot be removed goes stale
        with contextlib.suppress(OSError):
            if self._is_own():
                self._path.unlink(missing_ok=True)

    def _keep(self) -> None:
        while not self._ended.wait(self._beat_s):
            # a file server that is away for a moment costs beats, which others count
            with contextlib.suppress(OSError):
                if not self._is_own():
                    self._on_lost()
                    return
                self._holder = replace(self._holder, beat=self._holder.beat + 1)
                fresh = _beside(self._path, self._holder.token)
                fresh.write_text(self._text(), encoding="utf-8")
                fresh.replace(self._path)

    def _is_own(self) -> bool:
        """Raises OSError where the file cannot be read, which tells nothing."""
        try:
            return self._holder.token.encode() in read_input(self._path)
        except FileNotFoundError:
            return False

    def _text(self) -> str:
        return json.dumps(asdict(self._holder))


class Watch:
    """What leases of others said, and since when: one that stands still for three beats is stale."""

    def __init__(self, beat_s: float = BEAT_S) -> None:
        self._patience_s = MISSED_BEATS * beat_s
        self._seen: dict[Path, tuple[str, float]] = {}

    def is_stale(self, path: Path) -> bool:
        """Whether the holder has ended, or has missed its beats since this was first asked."""
        text, holder, now = _read(path), read_holder(path), time.monotonic()
        if holder is not None and holder.has_ended():
            self._seen[path] = text, now
            return True
        before, since = self._seen.get(path, ("", now))
        if text != before or path not in self._seen:
            since = now
        self._seen[path] = text, since
        return now - since >= self._patience_s

    def clear(self, path: Path) -> None:
        """Remove the stale lease that `is_stale` has told of, and no other one.

        One of several that do this at once removes it. A lease that was made meanwhile is put back;
        its holder sees at its next beat if that came too late.
        """
        aside = _beside(path, secrets.token_hex(8))
        with contextlib.suppress(FileNotFoundError):
            path.rename(aside)
            if _read(aside) != self._seen[path][0]:
                with contextlib.suppress(FileExistsError):
                    os.link(aside, path)
            aside.unlink(missing_ok=True)


class Leases:
    """The leases on the groups of a campaign, in a folder that several hosts see. say: hears whose lease
    was stale.
    """

    def __init__(self, folder: Path, say: Callable[[str], object], beat_s: float = BEAT_S) -> None:
        self._folder, self._say, self._beat_s = folder, say, beat_s
        self._watch = Watch(beat_s)

    def take(self, group: str, on_lost: Callable[[], object] = lambda: None) -> Lease | None:
        """The lease on a group; None while another process has it."""
        path = self._folder / group
        if path.exists() and self._watch.is_stale(path):
            self._say(f"group {group} is taken over from {self.holder(group)}")
            self._watch.clear(path)
        lease = Lease(path, on_lost, self._beat_s)
        return lease if lease.take() else None

    def holder(self, group: str) -> str:
        """Which process has the lease on a group."""
        holder = read_holder(self._folder / group)
        return holder.text if holder else "another process"


def _beside(path: Path, token: str) -> Path:
    return path.with_name(f".{path.name}.{token}")


def _read(path: Path) -> str:
    """The text of a lease; empty where it cannot be read."""
    try:
        return read_input(path).decode(errors="replace").strip()
    except OSError:
        return ""


def _read_system(path: Path) -> str:
    """A file of /proc; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
