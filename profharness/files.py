"""Where files go by default, and output files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from profharness.errors import UsageError

DEFAULT_STORE = "profharness.db"
STORE_ID = 0x70726F66  # "prof": the application id by which SQLite tells a store from other files
STORE_VARIABLE = "PROFHARNESS_STORE"  # names the store where none is given
RUNS_FOLDER = Path("traces/runs")
LOCKS = Path("/tmp")  # not TMPDIR: every user of the host has to look in the same place


def shell_command(*arguments: str, store: Path) -> str:
    """A command line that works as printed: --store stands in it unless that store is the one meant
    without it.
    """
    usual = Path(os.environ.get(STORE_VARIABLE, DEFAULT_STORE))
    option = () if store == usual else ("--store", str(store))
    return shlex.join(["profharness", *arguments, *option])


def check_output(output: Path, *, force: bool) -> None:
    """Refuse early, before any work is done, what `atomic_file` would refuse at the end."""
    if output.exists() and not force:
        raise UsageError(f"{output}: already exists; --force overwrites it")
    if not output.parent.is_dir():
        raise UsageError(f"{output}: its folder does not exist")


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[str | None]:
    """Hold a lock file; yields None, or who has it where another process does.

    The system ends the lock with the process, however that ends. The holder may delete the file.
    Where no file can be locked, nobody is kept out.
    """
    descriptor: int | None = None
    holder: str | None = None
    try:
        while descriptor is None:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_file(descriptor, path):
                os.close(descriptor)  # the holder that has just gone deleted the file
                descriptor = None
        # the holder before may have left a longer text
        os.truncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()}".encode())
    except BlockingIOError:
        assert descriptor is not None
        holder = os.read(descriptor, 100).decode(errors="replace") or "another process"
    except OSError:
        pass
    try:
        yield holder
    finally:
        if descriptor is not None:
            os.close(descriptor)


def opened_to_lock(path: Path) -> int | None:
    """A descriptor to lock by, None where there can be no file: reading suffices, also for a file of
    another user.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    # a sticky folder lets none open another's to create
    for more in (0, os.O_CREAT | os.O_EXCL, 0):
        with contextlib.suppress(OSError):
            return os.open(path, flags | more, 0o644)
    return None


def locked_now(descriptor: int, kind: int) -> bool:
    """Take a lock of a kind of `flock` if it can be had at once."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_file(descriptor: int, path: Path) -> bool:
    """Whether an open file still has that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def atomic_file(output: Path, *, force: bool) -> Iterator[IO[bytes]]:
    """A binary file that appears under its name only when the block ends well; until then any old
    one stays.

    Raises UsageError when the file is there (even if it came to be meanwhile) and force is not
    given, or cannot be written.
    """
    check_output(output, force=force)
    # two may write one output at a time, and hosts that share a folder share no process ids
    temporary = output.with_name(f".{output.name}.{os.urandom(6).hex()}.part")
    try:
        file = temporary.open("xb")
    except OSError as error:
        raise UsageError(f"{output}: cannot be written: {error.strerror}") from None
    try:
        try:
            with file:
                yield file
            _put(temporary, output, force=force)
        except OSError as error:
            raise UsageError(f"{output}: cannot be written: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)


def _put(temporary: Path, output: Path, *, force: bool) -> None:
    """Give the finished file its name; without force by a hard link, which never replaces an
    existing one."""
    if force:
        temporary.replace(output)
        return
    try:
        os.link(temporary, output)
    except FileExistsError:
        raise UsageError(f"{output}: already exists; --force overwrites it") from None
    except OSError:
        # A file system without hard links.
        temporary.replace(output)
