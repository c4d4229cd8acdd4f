"""Options of commands, which are declared in the annotations of function parameters."""

from __future__ import annotations

import inspect
import math
import re
import shlex
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import click
from click.shell_completion import CompletionItem

from profharness.errors import UsageError, choose_from
from profharness.run import require_number


@dataclass(frozen=True)
class Option:
    """Declares how a parameter appears on the command line and in the MCP tool.

    `click` contains more arguments of `click.Option`, such as `{"is_eager": True}`.
    """

    flags: tuple[str, ...] = ()
    """If empty, the parameter is a positional argument."""
    help: str = ""
    metavar: str | None = None
    type: click.ParamType[Any] | None = None
    """If None, the type is derived from the annotation."""
    complete: Callable[..., list[str] | list[CompletionItem]] | None = None
    multiple: bool = False
    file_flag: str = ""
    """A second option that reads more values from a file, using `read_file`."""
    file_help: str = ""
    read_file: Callable[[Path], list[Any]] | None = None
    check: Callable[[Any], object] | None = None
    """A function that raises UsageError if the value is invalid. The value None is not checked."""
    find: Callable[[Any, Path], Any] | None = None
    """A function that replaces the value before the command runs. Its arguments are the value and the
    path of the store. MCP tools do not use it, because it may read files that the value names."""
    old_flags: tuple[str, ...] = ()
    """Earlier spellings of the option, which keep working but are not shown by `--help` and completion.
    A positional argument has earlier spellings if it was an option before, such as `--run`."""
    as_arguments: str = ""
    """The metavar of positional arguments that are values of a repeatable option too, or "" if there
    are none."""
    configs: str = ""
    """The name of the parameter for configs, if the positional arguments may be runs or configs. A run
    in the parameter for configs becomes a value of this parameter."""
    sides: tuple[str, ...] = ()
    """The names of the parameters for the two sides of a comparison, if the positional arguments may
    be two backends of a run and the run."""
    tool: str = ""
    """Description of the parameter in the MCP tool. If empty, the tool has no such parameter."""
    tool_name: str = ""
    """Name of the parameter in the MCP tool. If empty, the name on the command line is used."""
    tool_examples: tuple[str, ...] = ()
    tool_value: Callable[[str], Any] | None = None
    """A function that converts a text from an MCP client to a value of the parameter."""
    click: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the long option name without dashes, or an empty text for an argument."""
        long = [flag for flag in self.flags if flag.startswith("--")]
        return long[0].removeprefix("--").partition("/")[0] if long else ""


class Quantity(click.FloatRange):
    """A range of numbers that may have a unit. In Python, such a number may be a text too."""

    units: ClassVar[Mapping[str, float]]
    """Maps each unit to its factor. A number without a unit has the unit ""."""
    examples: ClassVar[str]

    def parse(self, text: str) -> float:
        """Return the number in a text. Raise UsageError if it is invalid or out of range."""
        units = "|".join(sorted(self.units, key=len, reverse=True))
        match = re.fullmatch(rf"\s*(\d+\.?\d*(?:e-?\d+)?|\.\d+)\s*({units})\s*", text)
        if match is None:
            raise UsageError(f"{text!r} is not a {self.name}; write {self.examples}")
        number = float(match[1]) * self.units[match[2]]
        above, below = self.min or 0.0, math.inf if self.max is None else self.max
        if number < above or (self.min_open and number == above):
            limit = f"above {above:g}" if self.min_open else f"at least {above:g}"
            raise UsageError(f"{text!r} is too small; write a {self.name} {limit}")
        if number > below or (self.max_open and number == below) or number == math.inf:
            limit = f"below {below:g}" if self.max_open else f"at most {below:g}"
            raise UsageError(f"{text!r} is too large; write a {self.name} {limit}")
        return number

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            return self.parse(value) if isinstance(value, str) else value
        except UsageError as error:
            self.fail(str(error), param, ctx)

    def _describe_range(self) -> str:
        return ""


class Fraction(Quantity):
    """A share or a relative difference, such as `3%` or `0.03`."""

    name = "fraction"
    units: ClassVar[Mapping[str, float]] = {"": 1.0, "%": 0.01}
    examples = "3% or 0.03"


class Duration(Quantity):
    """A time in seconds, such as `10s`, `500ms`, `2m` or `10`."""

    name = "duration"
    units: ClassVar[Mapping[str, float]] = {"": 1.0, "s": 1.0, "ms": 1e-3, "min": 60.0, "m": 60.0}
    examples = "10s, 500ms or 2m"


class RenamedOption(click.Option):
    """An option whose earlier spellings are accepted but not shown in the help."""

    def __init__(self, *arguments: Any, old_flags: tuple[str, ...], **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.old_flags = old_flags

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        shown = self.opts
        self.opts = [*shown, *self.old_flags]
        super().add_to_parser(parser, ctx)
        self.opts = shown


@dataclass(frozen=True)
class Parameter:
    """A parameter of a command's function. `base` is its type without `None` and `Annotated`."""

    name: str
    base: Any
    default: Any
    option: Option
    variadic: bool = False

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty and not self.variadic

    @property
    def tool_name(self) -> str:
        return self.option.tool_name or self.option.name or self.name

    def click_parameters(self) -> Iterator[click.Parameter]:
        """Yield the Click parameters that provide the value of this parameter."""
        settings = {"shell_complete": self.option.complete, **self.option.click}
        kind = self.option.type or _click_type(self.base)
        if not self.option.flags:
            count = {"nargs": -1, "required": settings.pop("required", False)}
            many = self.variadic or self.option.old_flags
            settings |= count if many else {"required": self.required}
            yield click.Argument([self.name], type=kind, metavar=self.option.metavar, **settings)
            if self.option.old_flags:
                yield click.Option(
                    [f"{self.name}_option", *self.option.old_flags],
                    multiple=True,
                    hidden=True,
                    shell_complete=self.option.complete,
                )
            return
        if self.base is bool:
            settings |= {"is_flag": True} if "/" not in self.option.flags[0] else {}
        elif self.option.multiple:
            settings["multiple"] = True
        else:
            settings["type"] = kind
        if self.default is not inspect.Parameter.empty and not self.option.multiple:
            settings.setdefault("default", self.default)
            shown = self.default is not None and self.default is not False and self.default != ""
            settings.setdefault("show_default", shown)
        if self.option.as_arguments:
            yield click.Argument(
                [f"{self.name}_arguments"],
                nargs=-1,
                metavar=self.option.as_arguments,
                shell_complete=self.option.complete,
            )
        names = (self.name, *self.option.flags)
        yield RenamedOption(
            names,
            old_flags=self.option.old_flags,
            help=self.option.help,
            metavar=self.option.metavar,
            **settings,
        )
        if self.option.file_flag:
            path = click.Path(exists=True, dir_okay=False, path_type=Path)
            names = (f"{self.name}_file", self.option.file_flag)
            yield click.Option(names, type=path, metavar="FILE", help=self.option.file_help)

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the allowed values, or an empty tuple if any value is allowed."""
        kind = self.option.type or _click_type(self.base)
        return tuple(kind.choices) if isinstance(kind, click.Choice) else ()

    @property
    def range(self) -> click.IntRange | click.FloatRange | None:
        """Return the allowed range of a number, or None if the parameter has no range."""
        kind = self.option.type
        return kind if isinstance(kind, click.IntRange | click.FloatRange) else None

    def value(self, given: dict[str, Any]) -> Any:
        """Remove the value from the parsed arguments of Click, and return it.

        If a repeatable option is missing, return the function's default, or None if there is none.
        """
        value = given.pop(self.name)
        if self.option.old_flags and not self.option.flags:
            value = (*value, *given.pop(f"{self.name}_option"))
            if not self.variadic:
                return self._single(value)
        if self.option.as_arguments:
            value = (*given.pop(f"{self.name}_arguments", ()), *value)
        if self.option.file_flag:
            path = given.pop(f"{self.name}_file")
            if path is not None:
                assert self.option.read_file
                value = (*value, *self.option.read_file(path))
        if self.option.multiple and not value:
            return None if self.required else self.default
        return value

    def _single(self, values: tuple[Any, ...]) -> Any:
        """Return the only value, or the default if there is none.

        Raise UsageError for several values.
        """
        if len(values) > 1:
            command = click.get_current_context().info_name
            pair = shlex.join(map(str, values[:2]))
            raise UsageError(
                f"{command} shows one run, not {len(values)}; to compare two runs, use: profharness diff {pair}"
            )
        return values[0] if values else self.default

    def parsed(self, value: Any) -> Any:
        """Return the number in a text such as `3%` or `500ms`, and any other value unchanged.

        Raise UsageError for an invalid number.
        """
        if not (isinstance(self.option.type, Quantity) and isinstance(value, str)):
            return value
        try:
            return self.option.type.parse(value)
        except UsageError as error:
            raise UsageError(f"{self.name}: {error}") from None

    def require_valid(self, value: Any) -> None:
        """Raise UsageError if the value is invalid.

        For a repeatable option, an empty sequence is valid only if it is the default.
        """
        if value is None:
            return
        refuses_empty = self.option.multiple and self.default != ()
        if refuses_empty and _is_empty(value):
            raise UsageError(f"{self.name} is empty")
        if self.choices and value not in self.choices:
            known = choose_from(str(value), self.choices)
            raise UsageError(f"unknown {self.name} {value!r}; {known}")
        if (kind := self.range) is not None:
            # convert numbers of numpy and pandas to Python numbers
            number = value.item() if hasattr(value, "item") else value
            whole = isinstance(kind, click.IntRange)
            low = -math.inf if kind.min is None else kind.min
            high = math.inf if kind.max is None else kind.max
            is_open = {"above": kind.min_open, "below": kind.max_open}
            require_number(self.name, number, low, high, whole=whole, **is_open)
        if self.option.check is not None:
            self.option.check(value)


def option_parameters(function: Callable[..., Any], skip: int = 0) -> Iterator[Parameter]:
    """Yield the parameters with an `Option` in their annotation, except the first `skip`."""
    for parameter in list(inspect.signature(function).parameters.values())[skip:]:
        annotation = evaluated(function, parameter.annotation)
        option = next(
            (each for each in getattr(annotation, "__metadata__", ()) if isinstance(each, Option)),
            None,
        )
        if option is not None:
            base = _without_none(typing.get_args(annotation)[0])
            variadic = parameter.kind is inspect.Parameter.VAR_POSITIONAL
            yield Parameter(parameter.name, base, parameter.default, option, variadic)


def evaluated(function: Callable[..., Any], annotation: Any) -> Any:
    """Return the annotation. If it is a string, evaluate it."""
    return eval(annotation, function.__globals__) if isinstance(annotation, str) else annotation


def _is_empty(value: Any) -> bool:
    return isinstance(value, Sized) and not isinstance(value, str) and len(value) == 0


def _without_none(kind: Any) -> Any:
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        rest = [each for each in typing.get_args(kind) if each is not types.NoneType]
        return rest[0] if len(rest) == 1 else str
    return kind


def _click_type(base: Any) -> click.ParamType[Any] | None:
    if typing.get_origin(base) is Literal:
        return click.Choice(typing.get_args(base))
    named: dict[Any, click.ParamType[Any]] = {
        int: click.INT,
        float: click.FLOAT,
        Path: click.Path(path_type=Path),
    }
    return named.get(base)


def one_of(known: Iterable[str], flag: str) -> Callable[[Any], None]:
    """Return a function that raises UsageError if any of the given names is not in `known`."""
    # imported here because the module also loads the parser of configs
    from profharness.attention.config import split_names

    names = tuple(known)

    def check(value: Any) -> None:
        for name in split_names(value):
            if name not in names:
                raise UsageError(f"unknown {flag} {name!r}; {choose_from(name, names)}")

    return check
