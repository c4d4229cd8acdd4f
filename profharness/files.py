"""Default paths, and functions that open files.

Reading an input file never blocks. An output file is created only when it is complete.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import re
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from profharness.errors import UsageError

DEFAULT_STORE = "profharness.db"
STORE_ID = 0x70726F66  # "prof", the application id of a store
STORE_VARIABLE = "PROFHARNESS_STORE"  # environment variable with the default path of the store
RUNS_FOLDER = Path("traces/runs")
LOCKS = Path("/tmp")  # not TMPDIR, because all users of the host must use the same folder

RECORD_BYTES = 100_000_000  # maximum size of a file that is read as a whole
LINE_BYTES = 16 << 20  # maximum size of a line
VALUE_BYTES = 40  # memory that a decoded number takes
JSON_WEIGHT = 6_000_000  # maximum memory of decoded JSON, as a multiple of VALUE_BYTES
T = TypeVar("T")
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


class InputFile(io.FileIO):
    """A regular file that is read only up to its size at the time of opening.

    Therefore, reading ends even if the file grows. Files in /proc appear empty, because they have a
    size of 0.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "rb")
        self.size = os.fstat(descriptor).st_size

    def readinto(self, buffer: Any) -> int:
        """Read bytes into a buffer, and return the number of bytes."""
        left = max(0, self.size - self.tell())
        return super().readinto(memoryview(buffer).cast("B")[:left]) or 0

    def read(self, size: int | None = -1) -> bytes:
        """Read at most `size` bytes, or the rest of the file if `size` is negative."""
        left = max(0, self.size - self.tell())
        if size is None or size < 0:
            return self.readall()
        return super().read(min(size, left)) or b""

    def readall(self) -> bytes:
        """Read the rest of the file."""
        parts = []
        while part := self.read(max(1, self.size - self.tell())):
            parts.append(part)
        return b"".join(parts)


def is_store(path: str | Path) -> bool:
    """Return whether a file is a store or the write-ahead log of a store.

    Open the file only through SQLite. If this process opened and closed the file directly, SQLite
    would lose its locks on the store. An immutable connection reads only the header.
    """
    import sqlite3  # imported here, because most commands that open files do not open a store

    whole = Path(path).absolute()
    store = whole.with_name(whole.name.removesuffix("-wal").removesuffix("-shm"))
    if not store.is_file():
        return False
    uri = f"{store.as_uri()}?mode=ro&immutable=1"
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(sqlite3.connect(uri, uri=True)) as connection,
    ):
        connection.execute("PRAGMA writable_schema = ON")  # allows reading a truncated file
        return bool(connection.execute("PRAGMA application_id").fetchone() == (STORE_ID,))
    return False


def open_input(path: str | Path, *, within: Path | None = None) -> InputFile:
    """Open an input file without ever blocking.

    Raise OSError if the file cannot be opened, is a folder, a FIFO or a device, is a store, or is a
    link that leads out of the folder `within`.
    """
    real, flags = os.fspath(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
    try:
        if within is not None:
            real, flags = os.path.realpath(path), flags | os.O_NOFOLLOW
            if not Path(real).is_relative_to(os.path.realpath(within)):
                raise OSError(errno.EXDEV, "the link points outside its folder", os.fspath(path))
        if is_store(real):
            message = "this file is a profharness store, not a trace; pass it with --store"
            raise OSError(errno.EINVAL, message, os.fspath(path))
        descriptor = os.open(real, flags)
    except ValueError:  # the path contains a NUL character
        raise OSError(errno.EINVAL, "the file name is invalid", os.fspath(path)) from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        return InputFile(descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def read_input(path: Path, *, limit: int = RECORD_BYTES, within: Path | None = None) -> bytes:
    """Return the content of a file.

    Raise OSError if the file is larger than `limit` bytes or if `open_input` fails.
    """
    with open_input(path, within=within) as file:
        if file.size > limit:
            raise OSError(errno.EFBIG, f"larger than {limit:,} bytes", os.fspath(path))
        return file.readall()


def read_lines(path: Path, *, within: Path | None = None) -> Iterator[bytes]:
    """Yield the lines of a file.

    Raise OSError if a line is longer than LINE_BYTES or if `open_input` fails.
    """
    with io.BufferedReader(open_input(path, within=within), 1 << 20) as file:
        while line := file.readline(LINE_BYTES + 1):
            if len(line) > LINE_BYTES:
                raise OSError(errno.EFBIG, f"a line has more than {LINE_BYTES:,} bytes", str(path))
            yield line


def read_json(
    path: Path, kind: type[T], *, limit: int = RECORD_BYTES, within: Path | None = None
) -> T:
    """Decode a JSON file. Raise the errors of `read_input` and `decode_json`."""
    return decode_json(read_input(path, limit=limit, within=within), kind)


def decode_json(data: bytes, kind: type[T]) -> T:
    """Decode JSON text into an instance of `kind`.

    Raise the errors of msgspec. Also raise MsgspecError if the text has too many values.
    """
    if has_too_many_values(data):
        raise msgspec.MsgspecError(f"more than {JSON_WEIGHT:,} values")
    return msgspec.json.decode(data, type=kind)


def has_too_many_values(data: bytes) -> bool:
    """Return whether JSON text has so many values that decoding it would exhaust memory.

    A decoded value takes far more memory than its text. A number takes 40 bytes, an empty list takes
    80 bytes, and a string takes 60 bytes in addition to its characters. Each character takes up to 4
    bytes if the string has characters outside of Latin-1.
    """
    if 2 * len(data) <= JSON_WEIGHT:
        return False
    # number of quotes, without the quotes around keys
    quotes = data.count(b'"') - 2 * (data.count(b'":') - data.count(b'\\":'))
    weight = data.count(b",") + 2 * (data.count(b"[") + data.count(b"{")) + quotes
    if weight <= JSON_WEIGHT and (not data.isascii() or b"\\u" in data):
        strings = (match[0] for match in _STRING.finditer(data))
        wide = sum(len(text) for text in strings if not text.isascii() or b"\\u" in text)
        weight += 3 * wide // VALUE_BYTES
    return weight > JSON_WEIGHT


def default_store() -> Path:
    """Return the store that commands use without --store."""
    return Path(os.environ.get(STORE_VARIABLE, DEFAULT_STORE))


def shell_command(*arguments: str, store: Path) -> str:
    """Format a command line that a user can copy from the output and run.

    The command line contains the option --store unless `store` is the default store.
    """
    option = () if store == default_store() else ("--store", str(store))
    return shlex.join(["profharness", *arguments, *option])


def check_output(output: Path, *, force: bool) -> None:
    """Raise UsageError if `atomic_file` cannot create `output`.

    Call this function before expensive work.
    """
    if output.exists() and not force:
        raise UsageError(f"{output}: already exists; --force overwrites it")
    if not output.parent.is_dir():
        raise UsageError(f"{output}: the folder {output.parent} does not exist; create it first")


@contextlib.contextmanager
def hold_lock_file(path: Path) -> Iterator[str | None]:
    """Lock a file during the block.

    Yield None, or the name of another process if that process holds the lock. The system releases
    the lock when the process ends. The process that holds the lock may delete the file. If the file
    system does not support locks, run the block without a lock.
    """
    descriptor: int | None = None
    holder: str | None = None
    try:
        while descriptor is None:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_file(descriptor, path):
                os.close(descriptor)  # the previous holder deleted the file
                descriptor = None
        # delete the text of the previous holder, which may be longer than the new text
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


def open_lock_file(path: Path) -> int | None:
    """Open a file in order to lock it. Create the file if it does not exist.

    Open the file only for reading, because the file may belong to another user. Return None if the
    file cannot be opened.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    # try without O_CREAT first, because in a sticky folder O_CREAT fails on files of other users
    for more in (0, os.O_CREAT | os.O_EXCL, 0):
        with contextlib.suppress(OSError):
            return os.open(path, flags | more, 0o644)
    return None


def try_lock(descriptor: int, kind: int) -> bool:
    """Try to acquire a `flock` lock without waiting. Return whether the lock was acquired."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_file(descriptor: int, path: Path) -> bool:
    """Return whether `path` still refers to the open file with this descriptor."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def atomic_file(output: Path, *, force: bool) -> Iterator[IO[bytes]]:
    """Open a binary file that replaces `output` only if the block succeeds.

    Raise UsageError if the file cannot be written. Unless `force` is set, also raise UsageError if
    the file exists before or after the block.
    """
    check_output(output, force=force)
    # The name is random, because processes on several hosts may write the same output at once, and
    # process IDs are not unique across hosts.
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
    """Move the finished file to `output`.

    Unless `force` is set, create a hard link instead of renaming the file, because a hard link
    never replaces an existing file.
    """
    if force:
        temporary.replace(output)
        return
    try:
        os.link(temporary, output)
    except FileExistsError:
        raise UsageError(f"{output}: already exists; --force overwrites it") from None
    except OSError:
        # the file system has no hard links
        temporary.replace(output)
