"""Process kernel names as text: demangle them, normalize the spelling, split template arguments in
linear time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from profharness.dtypes import OF_CPP_TYPE

MAX_DEMANGLED = 8192  # Kineto does not demangle longer names
MAX_READ = 16384
MAX_SHORT = 64


@dataclass(frozen=True)
class KernelName:
    """The properties of a kernel in its name. None if the name does not contain them."""

    name: str
    short: str
    family: str
    backend: str
    """The library: `flash2 flash2_pip fa3 fa4 efficient xformers cudnn flashinfer trtllm sage
    flashmla vllm sglang aiter ck deepgemm flex triton cublas cutlass tensile nccl cub aten cuda
    unknown`.
    """
    arch: str | None = None
    """Architecture that the code was compiled for (`sm90`), not that of the device."""
    dtype: str | None = None
    head_dim: int | None = None
    """Largest head_dim of the compiled kernel. The efficient kernels use 65536 for any."""
    tile_m: int | None = None
    """Query rows of a tile in attention, output rows in GEMM."""
    tile_n: int | None = None
    """Key rows of a tile in attention, output columns in GEMM."""
    stages: int | None = None
    warps: int | None = None
    direction: str | None = None
    """`fwd` or `bwd`."""
    causal: bool | None = None
    """Compile-time flag."""
    dropout: bool | None = None
    """Compile-time flag."""
    tile_k: int | None = None
    """Third number of a tile: depth of a step in GEMM, head dim in cuDNN attention."""

    @property
    def tile(self) -> str | None:
        """`128x64`, or `128x64x32` with tile_k. None unless rows and columns are known."""
        if self.tile_m is None or self.tile_n is None:
            return None
        sizes = (self.tile_m, self.tile_n, self.tile_k)
        return "x".join(str(size) for size in sizes if size is not None)

    def clipped(self) -> KernelName:
        """Return the name with a short name of at most 64 characters."""
        return self if len(self.short) <= MAX_SHORT else replace(self, short=shorten(self.short))


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a normalized kernel name."""

    path: str
    """The function's path without template arguments."""
    base: str
    """The last part of the path."""
    end: int
    """Position after the path in the normalized text."""
    name: str
    """The name as given."""


# Wrappers whose first argument is the kernel: `cutlass::device_kernel<…>`, `ck_tile::kentry<2, …>`.
WRAPPER = re.compile(r"(?:^|::)(?:device_kernel|Kernel2?|kentry)$")
_CAST = re.compile(r"\((?:unsigned |signed )?(?:int|long long|long|short|char|size_t)\)(?=-?\d)")
_BOOL = re.compile(r"\(bool\)([01])")
_RETURN_TYPE = re.compile(
    r"(?:(?:void|static|__global__) |std::enable_if<.{0,200}?>::type )*", re.ASCII
)
_PATH = re.compile(r"[\w:~.$@*\-/]+")
_BRACKET = re.compile(r"[<>(){},]")
_INTEGER = re.compile(r"-?\d+")


def canonical(name: str) -> str:
    """Demangle a `_Z` name as c++filt and Kineto do. Return other names unchanged. Never raises."""
    if not name.startswith("_Z") or len(name) > MAX_DEMANGLED or "\0" in name:
        return name
    import cxxfilt  # imports ctypes, which commands that only read a store do not need

    try:
        return str(cxxfilt.demangle(name))
    except (cxxfilt.Error, UnicodeError, OSError):
        return name


def normalise(name: str) -> str:
    """Return the first 16 KiB of a name in the spelling that the rules expect.

    nsys and ncu write `(int)4`, `(bool)1`, `<unnamed>::` and `>>`, Kineto `4`, `true`, `(anonymous
    namespace)::`. The result has `4`, `true`, no anonymous namespace, and `> >`.
    """
    text = name[:MAX_READ]
    if "(bool)" in text:
        text = _BOOL.sub(lambda match: "true" if match[1] == "1" else "false", text)
    if ")" in text:
        text = _CAST.sub("", text).replace("(anonymous namespace)::", "")
    return text.replace("<unnamed>::", "").replace(">>", "> >").replace(">>", "> >").strip()


def split_head(text: str, name: str) -> Head:
    """Find the function's path in a normalized text, after its return type."""
    start = _RETURN_TYPE.match(text)
    begin = start.end() if start else 0
    match = _PATH.match(text, begin)
    if match is None:
        return Head("", "", begin, name)
    path = match[0]
    return Head(path, path[path.rfind(":") + 1 :], match.end(), name)


def template_arguments(text: str, start: int, limit: int = 24) -> list[str]:
    """Return at most `limit` top-level template arguments of the list that opens at text[start].

    Return [] if there is none. Takes linear time. A truncated list returns its arguments so far.
    """
    if start >= len(text) or text[start] != "<":
        return []
    depth = 0
    begin = start + 1
    arguments: list[str] = []
    for match in _BRACKET.finditer(text, start):
        char, at = match[0], match.start()
        if char in "<({":
            depth += 1
        elif char == ",":
            if depth == 1:
                arguments.append(text[begin:at].strip())
                begin = at + 1
                if len(arguments) >= limit:
                    return arguments
        elif not (char == ">" and text[at - 1] == "-"):
            depth -= 1
            if depth == 0:
                arguments.append(text[begin:at].strip())
                return arguments
    tail = text[begin : begin + 200].strip()
    return [*arguments, tail] if tail else arguments


def integer(argument: str) -> int | None:
    """Parse `4`, `4u` or `-1`. Return None for other text."""
    argument = argument.rstrip("ul")
    return int(argument) if len(argument) < 12 and _INTEGER.fullmatch(argument) else None


def integers(match: re.Match[str] | None, **groups: int | str) -> dict[str, Any]:
    """Return groups of a match as fields of a KernelName, with None for an absent group.

    Return {} without a match. A number of ten digits or more becomes None: it is no size, and a
    store could not contain it.
    """
    if match is None:
        return {}
    texts = {field: match[group] or "" for field, group in groups.items()}
    return {field: int(text) if 0 < len(text) < 10 else None for field, text in texts.items()}


def short_type(argument: str) -> str:
    """Shorten an argument to a word: `c10::Half` to fp16, `a::b::Name<…>` to Name, `(x::Mode)1` to 1."""
    if argument in OF_CPP_TYPE:
        return OF_CPP_TYPE[argument]
    if argument.startswith("("):
        argument = argument.rpartition(")")[2] or argument
    head = re.split(r"[<({]", argument, maxsplit=1)[0]
    name = head.rstrip(" *&").rsplit("::", 1)[-1].removesuffix(" const").removeprefix("const ")
    return name.rstrip("u") if name[:1].isdigit() else name or argument[:12]


def reduced_arguments(arguments: list[str], most: int = 5) -> list[str]:
    """Select the informative arguments: types once each, all numbers, bools only in a short list."""
    parts: list[str] = []
    for argument in arguments:
        word = short_type(argument)
        if word in ("true", "false"):
            is_shown = len(arguments) <= 3
        else:
            is_shown = word not in ("int", "long") and (word.isdigit() or word not in parts)
        if is_shown:
            parts.append(word)
    return parts if len(parts) <= most else [*parts[:most], "…"]


def generic_short(text: str, head: Head) -> str:
    """Return the last part of the path with its reduced template arguments."""
    if not head.base:
        return text
    parts = reduced_arguments(template_arguments(text, head.end))
    return f"{head.base}<{','.join(parts)}>" if parts else head.base


def join_short(base: str, *parts: object) -> str:
    """Return `base<a,b>` of the parts that are not empty, None or False."""
    shown = [str(part) for part in parts if part not in ("", None, False)]
    return f"{base}<{','.join(shown)}>" if shown else base


def shorten(text: str) -> str:
    """Shorten a text to 64 characters. The middle is removed, because the ends identify variants."""
    return text if len(text) <= MAX_SHORT else f"{text[:47]}…{text[-16:]}"
