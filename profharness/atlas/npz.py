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
END = struct.Struct(
    "<4s8xII2x"
)  # the last record of a zip file, with the signature and the size of the directory
MAX_ENTRY = 200  # maximum size of the zip directory for each array, in bytes
MAX_RATIO = 64  # maximum compression ratio; deflate can reach 1,032
ALWAYS_UNPACKED = 1 << 20  # unpacked size in bytes up to which the ratio is not limited
START = struct.Struct(
    "<8sH"
)  # the start of an array, with the magic bytes, the version and the header size
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
        return _read(data, counts)
    except FORGED:
        text = f"{printable_path(path)}: the file was cut short, changed or forged; get it again"
        raise ProfharnessError(text) from None


def _read(data: bytes, counts: Mapping[str, int]) -> dict[str, Array]:
    # zipfile reads the whole directory, and a zip64 record could replace its size
    signature, directory, _ = END.unpack(data[-END.size :])
    if signature != b"PK\5\6" or b"PK\6\7" in data[-END.size - 20 : -END.size]:
        raise ValueError("no plain end of a zip file")
    if directory > MAX_ENTRY * len(counts):
        raise ValueError("the directory is too large")
    arrays = {}
    names = {f"{name}.npy": name for name in counts}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        if sorted(each.filename for each in members) != sorted(names):
            raise ValueError("other arrays")
        unpacked = sum(each.file_size for each in members)
        if unpacked > max(ALWAYS_UNPACKED, MAX_RATIO * len(data)):
            raise ValueError("it unpacks to too much")
        for each in members:
            if each.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError("another compression")
            name = names[each.filename]
            arrays[name] = _read_array(archive, each, counts[name])
    return arrays


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo, limit: int) -> Array:
    with archive.open(member) as file:
        start = file.read(START.size)
        magic, length = START.unpack(start)
        header = HEADER.fullmatch(file.read(length))
        if magic != b"\x93NUMPY\1\0" or header is None:
            raise ValueError("another format")
        dtype = np.dtype(header[1].decode())
        shape = tuple(int(size) for size in header[2].split(b",") if size)
        if dtype.str not in DTYPES:
            raise ValueError("another dtype")
        if math.prod(shape) > limit:
            raise ValueError("too many values")
        if math.prod(shape) * dtype.itemsize != member.file_size - file.tell():
            raise ValueError("another number of values")
        return np.frombuffer(file.read(member.file_size - file.tell()), dtype).reshape(shape)
