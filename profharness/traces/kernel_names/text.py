"""Process the text of kernel names.

This module demangles names, normalizes their spelling, splits template arguments and builds short
names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from profharness.dtypes import OF_CPP_TYPE

MAX_DEMANGLED = 8192  # Kineto does not demangle names that are longer than this
# Types that older demanglers do not know, and types that no kernel uses, which stand in for them
# while a name is demangled. Each with its mangled and its plain name.
STAND_INS = (
    ("DF16_", "De", "decimal128", "_Float16"),
    ("DF16b", "Dd", "decimal64", "__bf16"),
)
MAX_READ = 16384  # maximum number of characters of a name that are parsed
MAX_SHORT = 64  # maximum length of a short name, in characters


@dataclass(frozen=True)
class KernelName:
    """The properties of a kernel that its name contains. All other properties are None."""

    name: str
    short: str
    family: str
    backend: str
    """The library that the kernel comes from: a key of `meanings.LIBRARIES`."""
    arch: str | None = None
    """The architecture for which the code was compiled, such as `sm90`. The architecture of the
    device may be newer.
    """
    dtype: str | None = None
    head_dim: int | None = None
    """The largest head dimension that the compiled kernel supports. Efficient attention
    kernels use 65536 if they support any head dimension.
    """
    tile_m: int | None = None
    """Number of rows in a tile: queries in attention, rows of the output in a matrix product."""
    tile_n: int | None = None
    """Number of columns in a tile: keys in attention, columns of the output in a matrix product."""
    stages: int | None = None
    warps: int | None = None
    direction: str | None = None
    """`fwd` or `bwd`."""
    causal: bool | None = None
    """Whether the kernel was compiled with a causal mask."""
    dropout: bool | None = None
    """Whether the kernel was compiled with dropout."""
    tile_k: int | None = None
    """Third number of a tile. In a matrix product, this is the depth of a step. In cuDNN
    attention, this is the head dimension.
    """

    @property
    def tile(self) -> str | None:
        """The tile as text, such as `128x64`, or `128x64x32` if tile_k is known. None if the rows
        or the columns are unknown.
        """
        if self.tile_m is None or self.tile_n is None:
            return None
        sizes = (self.tile_m, self.tile_n, self.tile_k)
        return "x".join(str(size) for size in sizes if size is not None)


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a kernel name, up to its template arguments or parameters."""

    path: str
    """The qualified name of the function, without template arguments."""
    base: str
    """The last part of the path."""
    end: int
    """Position after the path in the normalized text."""
    name: str
    """The kernel name before it was normalized."""


# Matches functions whose template arguments contain the actual kernel, such as
# `cutlass::device_kernel<…>` and `ck_tile::kentry<2, …>`.
WRAPPER = re.compile(r"(?:^|::)(?:device_kernel|Kernel2?|kentry)$")
_CAST = re.compile(r"\((?:unsigned |signed )?(?:int|long long|long|short|char|size_t)\)(?=-?\d)")
_BOOL = re.compile(r"\(bool\)([01])")
_RETURN_TYPE = re.compile(
    r"(?:(?:void|static|__global__) |std::enable_if<.{0,200}?>::type )*", re.ASCII
)
_PATH = re.compile(r"[\w:~.$@*\-/]+")
_BRACKET = re.compile(r"[<>(){},]")
_INTEGER = re.compile(r"-?\d+")
_LENGTH = re.compile(r"[1-9]\d{0,3}", re.ASCII)  # of a name in a mangled path
_MANGLED_INTEGER = re.compile(r"L[a-z](\d+)E", re.ASCII)
_TENSOR_LIST = re.compile(r"TensorList\w*Metadata")
MOST_ARGUMENTS = 5  # maximum number of template arguments in a short name


def canonical(name: str) -> str:
    """Demangle a name that starts with `_Z`, as c++filt and Kineto do. Never raise an exception."""
    if not name.startswith("_Z") or len(name) > MAX_DEMANGLED or "\0" in name:
        return name
    if (text := _demangled(name)) is not None:
        return text
    known = name
    for mangled, other, _, _ in STAND_INS:
        known = known.replace(mangled, other)
    text = _demangled(known) if known != name else None
    if text is None:
        return name
    for _, _, other, plain in STAND_INS:
        text = re.sub(rf"\b{other}\b", plain, text)
    return text


def _demangled(name: str) -> str | None:
    # Import cxxfilt here, because it loads ctypes, which most commands do not need.
    import cxxfilt

    try:
        return str(cxxfilt.demangle(name))
    except (cxxfilt.Error, UnicodeError, OSError):
        return None


def normalise(name: str) -> str:
    """Convert a name to the spelling that the rules for kernel names expect.

    nsys and ncu write `(int)4`, `(bool)1`, `<unnamed>::` and `>>`, whereas Kineto writes `4`,
    `true` and `(anonymous namespace)::`. The result contains `4`, `true` and `> >`, and no
    anonymous namespaces. Characters after MAX_READ are cut off.
    """
    text = name[:MAX_READ]
    if "(bool)" in text:
        text = _BOOL.sub(lambda match: "true" if match[1] == "1" else "false", text)
    if ")" in text:
        text = _CAST.sub("", text).replace("(anonymous namespace)::", "")
    return text.replace("<unnamed>::", "").replace(">>", "> >").replace(">>", "> >").strip()


def split_head(text: str, name: str) -> Head:
    """Find the path of the function in `text`, which is the normalized form of `name`."""
    start = _RETURN_TYPE.match(text)
    begin = start.end() if start else 0
    match = _PATH.match(text, begin)
    if match is None:
        return Head("", "", begin, name)
    path = match[0]
    return Head(path, path[path.rfind(":") + 1 :], match.end(), name)


def template_arguments(text: str, start: int, limit: int = 24) -> list[str]:
    """Return at most `limit` top-level template arguments in the list that starts at text[start].

    Return [] if no list starts there. This function takes linear time.
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
    """Parse an integer such as `4`, `4u` or `-1`. Return None if the text is not an integer."""
    argument = argument.rstrip("ul")
    return int(argument) if len(argument) < 12 and _INTEGER.fullmatch(argument) else None


def integers(match: re.Match[str] | None, **groups: int | str) -> dict[str, Any]:
    """Convert the group of each field to an integer. Return {} if `match` is None.

    A group that did not match becomes None. A number of ten or more digits becomes None too,
    because it cannot be a size and may be too large for the store.
    """
    if match is None:
        return {}
    texts = {field: match[group] or "" for field, group in groups.items()}
    return {field: int(text) if 0 < len(text) < 10 else None for field, text in texts.items()}


def short_type(argument: str) -> str:
    """Shorten `c10::Half` to `fp16`, `a::b::Name<…>` to `Name`, and `(x::Mode)1` to `1`."""
    if argument in OF_CPP_TYPE:
        return OF_CPP_TYPE[argument]
    if argument.startswith("("):
        argument = argument.rpartition(")")[2] or argument
    head = re.split(r"[<({]", argument, maxsplit=1)[0]
    name = head.rstrip(" *&").rsplit("::", 1)[-1].removesuffix(" const").removeprefix("const ")
    return name.rstrip("u") if name[:1].isdigit() else name or argument[:12]


def reduced_arguments(arguments: list[str], most: int = MOST_ARGUMENTS) -> list[str]:
    """Return the template arguments that a short name contains: all numbers, and each type once.

    Bools are included if there are at most 3 arguments. If more than `most` arguments remain, an
    ellipsis replaces the last arguments.
    """
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
    """Return the last part of the path, followed by the template arguments from
    `reduced_arguments`.
    """
    if not head.base:
        return text
    if head.path.startswith("_ZN"):
        path, _ = mangled_path(text, 3)
        return join_short(path[-1] if path else head.base, *mangled_numbers(text))
    parts = reduced_arguments(template_arguments(text, head.end))
    base = head.base
    if base == "multi_tensor_apply_kernel":
        # the functor tells what the kernel computes
        base = "multi_tensor_apply"
        parts = [part.removesuffix("Functor") for part in parts if not _TENSOR_LIST.match(part)]
    return join_short(base, *parts)


def mangled_numbers(text: str) -> list[str]:
    """Return the integers among the template arguments of a mangled name."""
    return _MANGLED_INTEGER.findall(text)[:MOST_ARGUMENTS]


def mangled_path(text: str, at: int) -> tuple[list[str], int]:
    """Return the names in the mangled path at text[at], and the position after the path. For
    example, the path `5aiter3abc` contains the names `aiter` and `abc`.
    """
    parts: list[str] = []
    while (match := _LENGTH.match(text, at)) and len(parts) < 12:
        at = match.end() + int(match[0])
        parts.append(text[match.end() : at])
    return parts, at


def join_short(base: str, *parts: object) -> str:
    """Return a short name such as `base<a,b>`. Parts that are empty, None or False are left out."""
    shown = [str(part) for part in parts if part not in ("", None, False)]
    return f"{base}<{','.join(shown)}>" if shown else base


def shorten(text: str) -> str:
    """Replace the middle of a text by an ellipsis if it has more than MAX_SHORT characters."""
    return text if len(text) <= MAX_SHORT else f"{text[:47]}…{text[-16:]}"
