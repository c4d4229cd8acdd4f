"""Describe a kernel's name: its family, its library and the meaning of each of its parts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from profharness.traces.kernel_names import ATTENTION_FAMILIES, canonical, parse_kernel_name
from profharness.traces.kernel_names.attention import fa2_flags, fa3_flags
from profharness.traces.kernel_names.meanings import (
    FA2_COMBINE,
    FAMILIES,
    FLAG_TABLES,
    FLAGS,
    LAYOUTS,
    LIBRARIES,
)
from profharness.traces.kernel_names.text import (
    Head,
    KernelName,
    integer,
    normalise,
    short_type,
    split_head,
    template_arguments,
)
from profharness.traces.kernel_names.words import (
    BRACKETS,
    CAMEL,
    COMMON,
    SHORT_LIBRARIES,
    WHOLE,
    WORDS,
    Brackets,
    WordPattern,
)


@dataclass(frozen=True, slots=True)
class NamePart:
    """A piece of a name."""

    token: str
    parameter: str
    """Its name in the sources, "" for a word."""
    meaning: str | None
    """None if unknown."""


@dataclass(frozen=True, slots=True)
class Description:
    """The description of a kernel's name."""

    kernel: KernelName
    """Includes the fields that only the parts of the name contain."""
    library: str
    parts: tuple[NamePart, ...]
    untold: tuple[str, ...]
    """Properties of such a kernel that the name leaves open."""

    @property
    def is_known(self) -> bool:
        """Whether a rule matches the name."""
        return self.kernel.family != "other" or self.library != "unknown"

    @property
    def meaning(self) -> str:
        """A sentence about the kernel."""
        library, family = LIBRARIES[self.library], FAMILIES[self.kernel.family]
        if not self.is_known:
            return "no rule of profharness knows this name"
        return library if self.library == "profharness" else f"{family}; from {library}"

    @property
    def unknown(self) -> tuple[str, ...]:
        """The tokens without a known meaning."""
        return tuple(part.token for part in self.parts if part.meaning is None)


# Properties in a name, and their description if no part of the name gives the whole value.
FACTS = {
    "direction": {"fwd": "forward", "bwd": "backward"},
    "arch": "code for this architecture; newer GPUs may run it too",
    "dtype": "type of the tensors",
    "head_dim": "head dimension that it is compiled for",
    "tile": "tile: rows x columns, and depth",
    "stages": "buffers in shared memory",
    "warps": "warps of a block",
    "causal": {True: "a query attends to no later key", False: "no causal mask"},
    "dropout": {True: "dropout of the weights", False: "no dropout"},
}
_ALWAYS = ("direction", "arch")  # the template does not contain them directly
# Properties that a name of the family may leave open.
_EXPECTED = {
    "gemm": ("dtype", "tile"),
    **dict.fromkeys(("gemv", "softmax", "norm", "flash_combine", "fmha_combine"), ("dtype",)),
}
_SHORT_TOKEN = re.compile(r"\d+x\d+|(?:fp|bf)\d+(?:/\w+)*")
_SHORT = re.compile(r"[^():&*]+")
_WRAPPER = re.compile(r"(?:^|::)(?:device_kernel|Kernel2?|kentry)$")
_WRAPPED = re.compile(r"<\s?(?:\d+, ?)?(?:typename )?(?:\w+::)*(\w+)", re.ASCII)
_FA3_BASE = re.compile(r"FlashAttn\w+", re.ASCII)
_EXTENTS = re.compile(r"(?:C<|int, )(\d+)>")
_MARKED = re.compile(r"[^_:]+", re.ASCII)
_CAPITAL = re.compile(r"[A-Z]?[a-z\d]+|[A-Z]+", re.ASCII)


def describe(name: str) -> Description:
    """Describe a mangled, demangled or short kernel name, or an ATen op. Never raises."""
    given = name.strip()
    name = canonical(given)
    kernel, library = _parsed(name)
    text = normalise(name)
    is_short = _SHORT.fullmatch(text) is not None
    library = SHORT_LIBRARIES.get(library, library) if is_short else library
    parts = list(_template(text, kernel)) if library != "cuda" else []
    has_layout = bool(parts)
    values: dict[str, object] = {}
    if not has_layout:
        source = text if is_short else kernel.short
        parts = [*_path(text, library, values), *_bracket(source, values)]
    kernel = replace(kernel, name=given, short=given if is_short else kernel.short)
    kernel = _completed(kernel, values)
    facts = list(_facts(kernel, values, _ALWAYS if has_layout else FACTS))
    return Description(kernel, library, (*facts, *parts), _untold(kernel, library))


def _parsed(name: str) -> tuple[KernelName, str]:
    """Parse the name, after completing a short one, and find its library."""
    made = (pattern.sub(text, name, count=1) for pattern, text in WHOLE if pattern.match(name))
    for candidate in (*made, name):
        if candidate.startswith("aten::"):
            return parse_kernel_name(candidate, "op"), "aten_op"
        kernel = parse_kernel_name(candidate)
        if (kernel.family, kernel.backend) != ("other", "unknown"):
            return kernel, kernel.backend
        if kernel.direction is not None:  # CUDA kernels of kernels/, which have the family `other`
            return kernel, "profharness"
    if re.fullmatch(r"\w+", name, re.ASCII):
        op = parse_kernel_name(f"aten::{name}", "op")
        if op.family != "other":
            return op, "aten_op"
    return parse_kernel_name(name), "unknown"


def _template(text: str, kernel: KernelName) -> Iterator[NamePart]:
    """Yield the parameters of a template with a known layout, in order."""
    is_fa2 = kernel.backend.startswith("flash2")
    flags = fa2_flags(split_head(text, "").base, text) if is_fa2 else fa3_flags(text)
    for layout in LAYOUTS:
        at = text.find(layout.opening)
        if at < 0 or (at and (text[at - 1].isalnum() or text[at - 1] == "_")):
            continue
        arguments = template_arguments(text, at + len(layout.opening) - 1)
        if any(_SHORT_TOKEN.fullmatch(each) for each in arguments):
            return  # a short name has no positional parameters
        yield from _placed(arguments, layout.parameters, kernel, flags)
        if not is_fa2:
            return
        if kernel.family == "flash_combine":
            head = split_head(text, "")
            yield from _placed(template_arguments(text, head.end)[1:], FA2_COMBINE, kernel, {})
        else:
            yield from _flags(kernel, flags)
        return


def _placed(
    arguments: Iterable[str],
    parameters: Mapping[str, str],
    kernel: KernelName,
    flags: Mapping[str, bool],
) -> Iterator[NamePart]:
    left = iter(arguments)
    for parameter, meaning in parameters.items():
        if parameter == FLAGS:
            yield from _flags(kernel, flags)
            for _ in flags:
                next(left, None)
            continue
        argument = next(left, None)
        if argument is None or argument == "...":
            return
        yield NamePart(_value(argument), parameter, meaning.format(_said(_value(argument))))


def _flags(kernel: KernelName, flags: Mapping[str, bool]) -> Iterator[NamePart]:
    table = {flag.name: flag for flag in FLAG_TABLES.get(kernel.backend, ())}
    for name, is_set in flags.items():
        flag = table[name]
        yield NamePart("true" if is_set else "false", name, flag.on if is_set else flag.off)


def _value(argument: str) -> str:
    extents = _EXTENTS.findall(argument) if "tuple<" in argument else None
    return "x".join(extents) if extents else short_type(argument)


def _said(value: str) -> str:
    return {"true": "yes", "false": "no"}.get(value, value)


def _path(text: str, library: str, values: dict[str, object]) -> Iterator[NamePart]:
    """Yield the words of the function's name that the library's table contains. Fills `values`."""
    rows = WORDS.get(library)
    if rows is None:
        return
    base = _subject(text, split_head(text, ""), library)
    is_camel = library in CAMEL
    end = r"(?=[A-Z_:]|$)" if is_camel else r"(?=[_:]|$)"
    other = _CAPITAL if is_camel else _MARKED
    at = 0
    while at < len(base):
        part, at = _word(base, at, (*rows, *COMMON), end, values)
        if part is None:
            match = other.match(base, at)
            part = NamePart(match[0], "", None) if match else None
            at = match.end() if match else at + 1
        if part is not None and part.meaning != "":
            yield part


def _word(
    base: str, at: int, rows: Iterable[WordPattern], end: str, values: dict[str, object]
) -> tuple[NamePart | None, int]:
    """Return the first matching row's part at a position, and where it ends."""
    for row in rows:
        match = re.compile(f"(?:{row.pattern.pattern}){end}", re.ASCII).match(base, at)
        if match and match.end() > at:
            return _read(row, match, values), match.end()
    return None, at


def _read(row: WordPattern, match: re.Match[str], values: dict[str, object]) -> NamePart:
    for name, value in {**match.groupdict(), **row.values}.items():
        if value is not None:
            number = integer(str(value))
            values.setdefault(name, value if number is None else number)
    return NamePart(match[0], "", row.meaning.format(match[0], *match.groups()))


def _subject(text: str, head: Head, library: str) -> str:
    """Return the function's own name without the wrappers around it."""
    if library == "fa3":
        match = _FA3_BASE.search(text)
        return match[0] if match else head.base
    inner = _WRAPPED.match(text, head.end) if _WRAPPER.search(head.path) else None
    if inner:
        return inner[1]
    return head.path if head.base == "kernel" else head.base


def _bracket(short: str, values: dict[str, object]) -> Iterator[NamePart]:
    """Yield the parts between the brackets of a short name. Fills `values`."""
    at = short.find("<")
    rule = next((each for each in BRACKETS if each.base.match(short)), Brackets(re.compile("")))
    integers = iter(rule.integers)
    flags = [flag for table in {*FLAG_TABLES.values()} for flag in table] if rule.head_dim else []
    words = {flag.shown: flag.on for flag in flags} | {flag.unset: flag.off for flag in flags}
    for token in template_arguments(short, at) if at >= 0 else []:
        if token == "...":
            continue
        number = integer(token)
        if number is not None and (meaning := next(integers, None)):
            if rule.head_dim:
                values.setdefault("head_dim", number)
            yield NamePart(token, "", meaning.format(token))
        elif token in words:
            values |= {token: True} if token in ("causal", "dropout") else {}
            yield NamePart(token, "", words[token])
        else:
            part, end = _word(token, 0, (*rule.words, *COMMON), "$", values)
            known = part is not None and end == len(token)
            is_rest = rule.rest and not token.isdigit() and "…" not in token
            yield part if known and part else NamePart(token, "", rule.rest if is_rest else None)


def _completed(kernel: KernelName, values: Mapping[str, object]) -> KernelName:
    """Return the kernel, with fields from its tokens where the rules for whole names found none."""
    found = dict(values)
    if "sm" in found:
        found["arch"] = f"sm{found.pop('sm')}"
    fields = {
        name: value
        for name, value in found.items()
        if getattr(kernel, name, "") is None and len(str(value)) < 10
    }
    return replace(kernel, **fields)  # type: ignore[arg-type]


def _facts(
    kernel: KernelName, values: Mapping[str, object], names: Iterable[str]
) -> Iterator[NamePart]:
    """Yield the properties that the rules find in the whole name but that no token contains."""
    implied = {"tile_m": "tile", "sm": "arch", "tile_k": "head_dim"}
    said = {*values, *(implied[name] for name in implied if name in values)}
    for name in names:
        value = getattr(kernel, name)
        if value is None or name in said:
            continue
        meaning = FACTS[name]
        text = meaning if isinstance(meaning, str) else meaning[value]  # type: ignore[index]
        yield NamePart(str(value).lower() if isinstance(value, bool) else str(value), name, text)


def _untold(kernel: KernelName, library: str) -> tuple[str, ...]:
    if library == "aten_op":
        return ()
    names = _EXPECTED.get(kernel.family, ())
    if kernel.family in ATTENTION_FAMILIES and not names:
        names = ("dtype", "head_dim", "tile", "direction", "causal")
    return tuple(name for name in names if getattr(kernel, name) is None)
