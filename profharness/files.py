"""Where files go by default, input files that cannot hang a reader, and output files that appear whole
or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from profharness.errors import UsageError

DEFAULT_STORE = "profharness.db"
STORE_ID = 0x70726F66  # "prof": the application id by which SQLite tells a store from other files
STORE_VARIABLE = "PROFHARNESS_STORE"  # names the store where none is given
RUNS_FOLDER = Path("traces/runs")
LOCKS = Path("/tmp")  # not TMPDIR: every user of the host has to look in the same place

RECORD_BYTES = 100_000_000  # of a file that is read whole
LINE_BYTES = 16 << 20  # of a file that is read line by line
JSON_WEIGHT = 6_000_000  # commas, and brackets twice; see `is_heavy`
T = TypeVar("T")


class InputFile(io.FileIO):
    """A regular file of which no more is read than it held when it was opened.

    So a reader ends, whether the file grows meanwhile or is one of /proc, which says that it is empty.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "rb")
        self.size = os.fstat(descriptor).st_size

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer."""
        left = max(0, self.size - self.tell())
        return super().readinto(memoryview(buffer).cast("B")[:left]) or 0

    def read(self, size: int | None = -1) -> bytes:
        """Read at most so many bytes, all for a negative number."""
        left = max(0, self.size - self.tell())
        if size is None or size < 0:
            return self.readall()
        return super().read(min(size, left)) or b""

    def readall(self) -> bytes:
        """Read what is left."""
        parts = []
        while part := self.read(max(1, self.size - self.tell())):
            parts.append(part)
        return b"".join(parts)


def is_store(path: str | Path) -> bool:
    """Return whether a file is a store, or SQLite's log of one.

    SQLite reads the file: closing any other descriptor of a store would release the locks that
    SQLite holds on it in this process. An immutable connection reads the header alone.
    """
    import sqlite3  # most commands that open files open no store

    whole = Path(path).absolute()
    store = whole.with_name(whole.name.removesuffix("-wal").removesuffix("-shm"))
    if not store.is_file():
        return False
    uri = f"{store.as_uri()}?mode=ro&immutable=1"
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(sqlite3.connect(uri, uri=True)) as connection,
    ):
        connection.execute("PRAGMA writable_schema = ON")  # reads a file that is cut short, too
        return bool(connection.execute("PRAGMA application_id").fetchone() == (STORE_ID,))
    return False


def open_input(path: str | Path, *, within: Path | None = None) -> InputFile:
    """Open a file that a user or a folder names, without waiting for anything.

    Raises OSError for what cannot be opened, for what is no regular file (a folder, a FIFO, a device),
    for a store, and for a link that leads out of the folder `within`.
    """
    real, flags = os.fspath(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
    try:
        if within is not None:
            real, flags = os.path.realpath(path), flags | os.O_NOFOLLOW
            if not Path(real).is_relative_to(os.path.realpath(within)):
                raise OSError(errno.EXDEV, "a link leads out of its folder", os.fspath(path))
        if is_store(real):
            message = "a store of profharness, not a trace; read it with --store"
            raise OSError(errno.EINVAL, message, os.fspath(path))
        descriptor = os.open(real, flags)
    except ValueError:  # a NUL
        raise OSError(errno.EINVAL, "no file can have this name", os.fspath(path)) from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        return InputFile(descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def read_input(path: Path, *, limit: int = RECORD_BYTES, within: Path | None = None) -> bytes:
    """Return all of a file that `open_input` opens. Raises OSError for one of more than `limit` bytes too."""
    with open_input(path, within=within) as file:
        if file.size > limit:
            raise OSError(errno.EFBIG, f"larger than {limit:,} bytes", os.fspath(path))
        return file.readall()


def read_lines(path: Path, *, within: Path | None = None) -> Iterator[bytes]:
    """Yield the lines of a file that `open_input` opens. Raises OSError for one of more than LINE_BYTES too."""
    with io.BufferedReader(open_input(path, within=within), 1 << 20) as file:
        while line := file.readline(LINE_BYTES + 1):
            if len(line) > LINE_BYTES:
                raise OSError(errno.EFBIG, f"a line of more than {LINE_BYTES:,} bytes", str(path))
            yield line


def read_json(path: Path, kind: type[T], *, within: Path | None = None) -> T:
    """Decode a JSON file. Raises OSError as `read_input` does, and what `decode_json` raises."""
    return decode_json(read_input(path, within=within), kind)


def decode_json(data: bytes, kind: type[T]) -> T:
    """Decode JSON to a type. Raises what msgspec raises, and MsgspecError for text that `is_heavy`."""
    if is_heavy(data):
        raise msgspec.MsgspecError(f"more than {JSON_WEIGHT:,} values")
    return msgspec.json.decode(data, type=kind)


def is_heavy(data: bytes) -> bool:
    """Whether JSON has so many values that they would fill the memory, told before any is made.

    A value takes far more memory than its text: a number 40 bytes, an empty list 80.
    """
    if 2 * len(data) <= JSON_WEIGHT:
        return False
    return data.count(b",") + 2 * (data.count(b"[") + data.count(b"{")) > JSON_WEIGHT


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
