"""Read and write `.npz` files.

A file is checked before memory is allocated for its arrays, because it may be foreign.
"""

from __future__ import annotations

import io
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from profharness.errors import ProfharnessError, printable_path
from profharness.files import atomic_file, read_input

Array = npt.NDArray[Any]
MAGIC = b"PK\3\4"
# The last record of a zip file: signature, size and offset of the directory.
END = struct.Struct("<4s8xII2x")
MAX_ENTRY = 200  # maximum size of the zip directory for each array, in bytes
MAX_RATIO = 64  # maximum compression ratio; deflate can reach 1,032
ALWAYS_UNPACKED = 1 << 20  # unpacked size in bytes up to which the ratio is not limited
START = struct.Struct("<8sH")  # magic bytes, version and header size of an array
# The header of an array as numpy writes it. numpy would parse it as Python source, which can fail
# with many kinds of errors.
HEADER = re.compile(
    rb"\{'descr': '([<|][a-z]\d)', 'fortran_order': False, "
    rb"'shape': \((\d{1,12},|\d{1,12}, ?\d{1,12})\), \} *\n"
)
DTYPES = ("|u1", "|i1", "<i2", "<i4", "<i8", "<f2", "<f4")
FORGED = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, KeyError, OverflowError),
    *(NotImplementedError, RuntimeError, TypeError),
)


def write_arrays(arrays: Mapping[str, Array], path: Path, *, force: bool = False) -> None:
    """Write a compressed `.npz` file atomically.

    Raise UsageError if the file exists and `force` is False.
    """
    with atomic_file(path, force=force) as file:
        np.savez_compressed(file, allow_pickle=False, **dict(arrays))


def read_arrays(path: Path, counts: Mapping[str, int]) -> dict[str, Array]:
    """Read the arrays of a file, which must have exactly the names in `counts`.

    `counts` gives the maximum number of values of each array. Raise OSError if the file cannot be
    read, and ProfharnessError if it has larger or other arrays, or was cut short or changed.
    """
    data = read_input(path)
    try:
        # zipfile reads the whole directory, and a zip64 record could replace its size
        signature, directory, _ = END.unpack(data[-END.size :])
        _require(signature == b"PK\5\6" and b"PK\6\7" not in data[-END.size - 20 : -END.size])
        _require(directory <= MAX_ENTRY * len(counts))
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {each.filename.removesuffix(".npy"): each for each in archive.infolist()}
            _require(members.keys() == counts.keys() and len(archive.infolist()) == len(counts))
            unpacked = sum(each.file_size for each in members.values())
            _require(unpacked <= max(ALWAYS_UNPACKED, MAX_RATIO * len(data)))
            return {name: _read(archive, members[name], counts[name]) for name in members}
    except FORGED:
        text = f"{printable_path(path)}: the file was cut short, changed or forged; get it again"
        raise ProfharnessError(text) from None


def _read(archive: zipfile.ZipFile, member: zipfile.ZipInfo, limit: int) -> Array:
    _require(member.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with archive.open(member) as file:
        magic, length = START.unpack(file.read(START.size))
        header = HEADER.fullmatch(file.read(length))
        if magic != b"\x93NUMPY\1\0" or header is None:
            raise ValueError
        dtype = np.dtype(header[1].decode())
        shape = tuple(int(size) for size in header[2].split(b",") if size)
        left = member.file_size - file.tell()
        _require(dtype.str in DTYPES and math.prod(shape) <= limit)
        _require(math.prod(shape) * dtype.itemsize == left)
        return np.frombuffer(file.read(left), dtype).reshape(shape)


def _require(holds: bool) -> None:
    if not holds:
        raise ValueError
