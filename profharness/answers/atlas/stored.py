"""The file of a model: its dataclasses as JSON, their arrays beside it. Nothing but these classes is
ever made from a file.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from profharness.answers.atlas.boost import Boost
from profharness.answers.atlas.kernels import Choice, Decision, Formula, Pick, Rules
from profharness.answers.atlas.nets import Net
from profharness.answers.atlas.times import Curve
from profharness.answers.atlas.trees import Tree
from profharness.errors import ProfharnessError, shown
from profharness.files import atomic_file, read_input

MAGIC = b"phmodel\n"
VERSION = 2
HEAD = struct.Struct("<8sII32s")  # magic, version, bytes of the JSON, checksum of all that follows
KINDS = ("<i1", "<i2", "<i4", "<f2", "<f4")  # of arrays, as they are stored


@dataclass(frozen=True)
class Timing:
    """How long a backend's calls take, forward alone or with backward: trees on top of curves, the
    errors that 90 % of calls keep by what calls they are, and graph time over kernel time.
    """

    trees: Boost
    errors: dict[str, float]
    graph: dict[str, float]


@dataclass(frozen=True)
class Model:
    """All that was learned of an atlas. kinds are a name's place, block, registers and shared bytes;
    codes group kinds that share a curve; curves are by backend, then code and product; timings by backend and
    direction; bounds are the most that the sampled configs have of something.
    """

    machine: str
    names: tuple[str, ...]
    kinds: npt.NDArray[np.int64]
    codes: npt.NDArray[np.int64]
    rules: Mapping[str, Rules]
    curves: Mapping[str, dict[tuple[int, int], Curve]]
    timings: Mapping[tuple[str, int], Timing]
    bounds: dict[str, float]


LATER = ("rules", "curves", "timings")  # what is made of a file backend by backend
WRONG = (struct.error, zlib.error, ValueError, TypeError, KeyError, IndexError, AttributeError)
CLASSES = {
    each.__name__: each
    for each in (Model, Timing, Rules, Decision, Tree, Formula, Choice, Curve, Boost, Pick, Net)
}


class _Arrays:
    """Arrays one after the other, by how they are stored."""

    def __init__(self) -> None:
        self.parts: dict[str, list[npt.NDArray[Any]]] = {kind: [] for kind in KINDS}
        self.ends = dict.fromkeys(KINDS, 0)

    def put(self, array: npt.NDArray[Any]) -> list[Any]:
        kind = KINDS[3 if array.dtype == np.float16 else 4]
        if array.dtype.kind in "iu":
            most = int(np.abs(array).max(initial=0))
            kind = next(each for each in KINDS[:3] if most < 1 << (8 * int(each[2]) - 1))
        start = self.ends[kind]
        self.parts[kind].append(array.astype(kind).reshape(-1))
        self.ends[kind] += array.size
        return [KINDS.index(kind), start, *array.shape]


def _encoded(value: Any, arrays: _Arrays) -> Any:
    if isinstance(value, np.ndarray):
        return {"a": arrays.put(value)}
    if is_dataclass(value):
        parts = [_encoded(getattr(value, each.name), arrays) for each in fields(value)]
        return {type(value).__name__: parts}
    if isinstance(value, Formula):
        return {"Formula": list(value)}
    if isinstance(value, tuple):
        return [_encoded(each, arrays) for each in value]
    if isinstance(value, Mapping):
        pairs = ([_encoded(key, arrays), _encoded(each, arrays)] for key, each in value.items())
        return {"d": list(pairs)}
    return value


def _decoded(value: Any, arrays: Mapping[str, npt.NDArray[Any]]) -> Any:
    if isinstance(value, list):
        return tuple([_decoded(each, arrays) for each in value])
    if not isinstance(value, dict):
        return value
    ((name, parts),) = value.items()
    if name == "a":
        kind, start, *shape = parts
        array = arrays[KINDS[kind]][start : start + math.prod(shape)]
        return array if len(shape) == 1 else array.reshape(shape)
    if name == "d":
        return {_decoded(key, arrays): _decoded(each, arrays) for key, each in parts}
    return CLASSES[name](*(_decoded(each, arrays) for each in parts))


class _Parts(Mapping[Any, Any]):
    """A dict of a file whose values are made when something asks for them."""

    def __init__(
        self, pairs: list[Any], arrays: Mapping[str, npt.NDArray[Any]], source: str
    ) -> None:
        self.arrays, self.source = arrays, source
        self.raw = {_decoded(key, arrays): value for key, value in pairs}
        self.made: dict[Any, Any] = {}

    def __getitem__(self, key: Any) -> Any:
        if key not in self.made:
            value = self.raw[key]
            try:
                self.made[key] = _decoded(value, self.arrays)
            except WRONG:
                raise ProfharnessError(
                    f"{self.source}: the model is forged; get it again"
                ) from None
        return self.made[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.raw)

    def __len__(self) -> int:
        return len(self.raw)


def write_model(model: Model, path: Path) -> None:
    """Write it to a file, whole or not at all; an old one is replaced."""
    arrays = _Arrays()
    text = json.dumps(_encoded(model, arrays), separators=(",", ":"))
    blobs = [
        np.concatenate([np.zeros(0, kind), *arrays.parts[kind]]).astype(kind).tobytes()
        for kind in KINDS
    ]
    packed = [zlib.compress(blob, 9) for blob in (text.encode(), *blobs)]
    sizes = struct.pack(f"<{len(packed)}I", *map(len, packed))
    body = sizes + b"".join(packed)
    with atomic_file(path, force=True) as file:
        file.write(HEAD.pack(MAGIC, VERSION, len(text), hashlib.sha256(body).digest()) + body)


def read_model(path: Path) -> Model:
    """The model of a file. Raises ProfharnessError for one of another version, cut short or changed."""
    name, data = shown(path), read_input(path)
    if len(data) < HEAD.size or not data.startswith(MAGIC):
        raise ProfharnessError(f"{name}: not the model of an atlas; install profharness again")
    _, version, _, checksum = HEAD.unpack_from(data)
    if version != VERSION:
        text = f"a model of version {version}; this profharness reads version {VERSION}"
        raise ProfharnessError(f"{name}: {text}")
    body = memoryview(data)[HEAD.size :]
    if hashlib.sha256(body).digest() != checksum:
        raise ProfharnessError(
            f"{name}: the model was cut short or changed (checksum); get it again"
        )
    try:
        sizes = struct.unpack_from(f"<{1 + len(KINDS)}I", body)
        at, parts = 4 * len(sizes), []
        for size in sizes:
            parts.append(zlib.decompress(body[at : at + size]))
            at += size
        arrays = {
            kind: np.frombuffer(part, kind) for kind, part in zip(KINDS, parts[1:], strict=True)
        }
        listed = json.loads(parts[0])["Model"]
        values: dict[str, Any] = {
            each.name: _Parts(value["d"], arrays, name)
            if each.name in LATER
            else _decoded(value, arrays)
            for each, value in zip(fields(Model), listed, strict=True)
        }
        model = Model(**values)
    except WRONG:
        raise ProfharnessError(f"{name}: the model is forged; get it again") from None
    return model
