"""A column of an atlas in its file."""

from __future__ import annotations

import lzma
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from profharness.errors import ProfharnessError

DECODER_BYTES = 128 << 20  # of a decoder's memory; the strongest preset takes 65 MB
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Block:
    """A packed column: the bytes of its values, transposed so that equal places stand together."""

    data: memoryview
    count: int
    width: int
    source: str

    def unpack(self) -> Integers:
        """The values. Raises ProfharnessError where they are not as many as the header says."""
        wanted = self.count * self.width
        try:
            decoder = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=FILTERS)
            raw = decoder.decompress(self.data, max_length=wanted + 1)
        except lzma.LZMAError:
            raw = b""
        if len(raw) != wanted:
            raise ProfharnessError(f"{self.source}: a column of the atlas is damaged; get it again")
        planes = np.frombuffer(raw, np.uint8).reshape(self.width, self.count)
        values = np.ascontiguousarray(planes.T).view(f"<i{self.width}")
        return values.reshape(-1).astype(np.int64)


def pack_column(values: Integers) -> tuple[bytes, int]:
    """The compressed bytes of a column and the bytes of one of its values."""
    largest = max(abs(int(values.min())), abs(int(values.max()))) if len(values) else 0
    width = next(size for size in (1, 2, 4, 8) if largest < 1 << (8 * size - 1))
    planes = values.astype(f"<i{width}").view(np.uint8).reshape(-1, width).T
    packed = lzma.compress(planes.tobytes(), lzma.FORMAT_RAW, filters=FILTERS)
    return packed, width
