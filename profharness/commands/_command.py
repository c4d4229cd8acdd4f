"""Build a Click command, a Python function and an MCP tool from one typed function.

A command module decorates its function with `command`. The annotation of each parameter contains an
`Option`. The decorator `document` registers the function that displays the result, and `gate` the
function that makes the command exit with 3. Additional parameters of these two functions become
options that the Python function does not have. `usage` registers the function that rejects mutually
exclusive options before anything is read.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import click

from profharness.commands._help import HelpCommand, HelpGroup
from profharness.commands._options import Parameter, evaluated, option_parameters
from profharness.commands._output import (
    HINTS,
    MEASURED,
    OUTPUT_PARAMETERS,
    emit,
    hint,
    measured,
    on_terminal,
)
from profharness.commands._runs import separate, separate_sides
from profharness.commands._types import store_path
from profharness.errors import GateResult, Interrupted, require_passed
from profharness.render.document import Document
from profharness.store.names import typed_names
from profharness.store.selection import older_runs

P = ParamSpec("P")
Q = ParamSpec("Q")
A = TypeVar("A")
R = TypeVar("R")
T = TypeVar("T")
G = TypeVar("G", bound=Iterable[GateResult] | None)
IN_PYTHON = "\n\nIn Python"


@dataclass
class Declaration:
    """The declaration of a command, from which its Click command and MCP tool are built."""

    name: str
    run: Callable[..., Any]
    frame: Callable[[Any], Any]
    tool: str = ""
    tool_required: tuple[str, ...] = ()
    epilog: str = ""
    context_settings: Mapping[str, Any] | None = None
    document: Callable[..., Any] | None = None
    gate: Callable[..., Iterable[GateResult] | None] | None = None
    usage: Callable[..., None] | None = None

    @functools.cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(option_parameters(self.run))

    @functools.cached_property
    def shown_parameters(self) -> tuple[Parameter, ...]:
        """Return the parameters of `document` and `gate` that `run` does not have."""
        own = {each.name for each in self.parameters}
        found = [
            each
            for function in (self.document, self.gate)
            if function is not None
            for each in list(option_parameters(function, skip=1))
        ]
        return tuple({each.name: each for each in found if each.name not in own}.values())

    @property
    def makes_document(self) -> bool:
        """Return whether the answer is displayed as a `Document`, which has several formats."""
        if self.document is None:
            return False
        returned = evaluated(self.document, inspect.signature(self.document).return_annotation)
        return Document in (returned, *typing.get_args(returned))

    def check_values(self, values: Mapping[str, Any]) -> None:
        """Raise UsageError for an invalid value and for mutually exclusive values."""
        for parameter in (*self.parameters, *self.shown_parameters):
            if parameter.name in values:
                parameter.require_valid(values[parameter.name])
        if self.usage is not None:
            self.usage(**_accepted(self.usage, values))

    def with_separate_arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Move each config, run and side to its own parameter, and return the arguments.

        A value is one text or several texts, as passed by Click or by a Python caller.
        """
        arranged = {**given}
        for each in self.parameters:
            if not (to := each.option.configs):
                continue
            if f"{to}_arguments" in given:  # the positional arguments on the command line
                to = f"{to}_arguments"
            names = (*each.option.sides, each.name, to)
            texts = [own for name in names if (own := _texts(given.get(name))) is not None]
            if len(texts) < len(names):
                continue  # such as Config objects
            arrange: Callable[..., Sequence[Sequence[Any]]] = (
                separate_sides if each.option.sides else separate
            )
            apart = arrange(*texts, store_path(given.get("store")))
            for name, before, after in zip(names, texts, apart, strict=True):
                if before != after:
                    several = isinstance(given.get(name), tuple) or len(after) > 1
                    arranged[name] = tuple(after) if several else next(iter(after), None)
        return arranged

    def with_numbers(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Convert texts such as `3%` and `500ms` to numbers, and return the resulting values."""
        return {**values} | {
            each.name: each.parsed(values[each.name])
            for each in self.parameters
            if each.name in values
        }

    def with_runs(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Apply the `find` functions of the parameters, and return the resulting values."""
        path = store_path(values.get("store"))
        parameters = (*self.parameters, *self.shown_parameters)
        # The run of an option comes first, because arguments may be backends that only this run has.
        return {**values} | {
            each.name: each.option.find(values[each.name], path)
            for each in sorted(parameters, key=lambda each: not each.option.flags)
            if each.option.find is not None and each.name in values
        }

    def answer(self, values: Mapping[str, Any]) -> Any:
        positional: list[Any] = []
        named = {}
        for parameter in self.parameters:
            if parameter.name in values:
                if parameter.variadic:
                    positional += values[parameter.name]
                else:
                    named[parameter.name] = values[parameter.name]
        return self.run(*positional, **named)

    def shown(self, answer: Any, values: Mapping[str, Any]) -> Any:
        """Call the function registered with `document`, and return its result."""
        assert self.document is not None
        return self.document(answer, **_accepted(self.document, values))

    def judge(self, answer: Any, values: Mapping[str, Any]) -> list[str]:
        """Return a line for each gate that passed. Raise GateError if a gate failed."""
        if self.gate is None:
            return []
        return require_passed(self.gate(answer, **_accepted(self.gate, values)) or ())

    def click_command(self) -> click.Command:
        order = [*self.parameters, *self.shown_parameters]
        last = [each for each in order if each.name == "store"]
        parameters = [each for each in order if each not in last]
        if self.makes_document:
            names = {each.name for each in parameters}
            parameters += [each for each in OUTPUT_PARAMETERS if each.name not in names]
        options = [each for one in (*parameters, *last) for each in one.click_parameters()]
        text = inspect.cleandoc(self.run.__doc__ or "").partition(IN_PYTHON)[0]
        return HelpCommand(
            self.name,
            params=options,
            help=text,
            epilog=self.epilog or None,
            context_settings=dict(self.context_settings or {}),
            callback=self._callback,
        )

    def _callback(self, **given: Any) -> None:
        parameters = (*self.parameters, *self.shown_parameters)
        given = self.with_separate_arguments(given)
        values = {each.name: each.value(given) for each in parameters}
        with on_terminal(), typed_names(), older_runs() as older:
            self.check_values(given | values)
            values = self.with_runs(values)
            try:
                answer = self.answer(values)
            except Interrupted as stop:
                stop.command, stop.store = self.name, values.get("store")
                raise
            for text in older.values():
                hint(text)
            if self.document is not None:
                shown = self.shown(answer, values)
                if isinstance(shown, Document):
                    names = [each.name for each in OUTPUT_PARAMETERS]
                    output: dict[str, Any] = {name: (given | values)[name] for name in names}
                    again = click.get_current_context().meta.get(MEASURED)
                    with measured(*again) if again else contextlib.nullcontext():
                        emit(shown, **output)
            for text in click.get_current_context().meta.get(HINTS, ()):
                hint(text)
            for text in self.judge(answer, values):
                hint(text)


def command(
    name: str,
    *,
    frame: Callable[[A], R],
    tool: str = "",
    tool_required: tuple[str, ...] = (),
    fill: Mapping[str, str] | None = None,
    epilog: str = "",
    context_settings: Mapping[str, Any] | None = None,
) -> Callable[[Callable[P, A]], Callable[P, R]]:
    """Declare a function as a command.

    The decorated function belongs to the Python interface and returns `frame(answer)`. `tool` is the
    description of the MCP tool, or empty if there is none. `tool_required` names the parameters that
    only the tool requires. `fill` replaces names in braces in the docstring. The help text of the
    command line consists of the docstring up to the paragraph "In Python", the options and `epilog`.
    """

    def decorate(function: Callable[P, A]) -> Callable[P, R]:
        for key, text in (fill or {}).items():
            whole = inspect.cleandoc(function.__doc__ or "")
            function.__doc__ = whole.replace(f"{{{key}}}", text)
        declaration = Declaration(
            name, function, frame, tool, tool_required, epilog, context_settings
        )

        @functools.wraps(function)
        def call(*arguments: P.args, **named: P.kwargs) -> R:
            bound = inspect.signature(function).bind(*arguments, **named)
            bound.arguments = declaration.with_separate_arguments(bound.arguments)
            bound.arguments |= declaration.with_numbers(bound.arguments)
            declaration.check_values(bound.arguments)
            with typed_names():
                bound.arguments = declaration.with_runs(bound.arguments)
                return frame(function(*bound.args, **bound.kwargs))

        call.declaration = declaration  # type: ignore[attr-defined]
        if frame is not as_is:  # help() shows the type that callers get
            call.__signature__ = inspect.signature(function).replace(  # type: ignore[attr-defined]
                return_annotation=inspect.signature(frame).return_annotation
            )
        return call

    return decorate


def declaration_of(function: Callable[..., Any]) -> Declaration:
    """Return the declaration of a function that `command` decorated."""
    declaration: Declaration = function.declaration  # type: ignore[attr-defined]
    return declaration


def document(
    of: Callable[..., Any],
) -> Callable[[Callable[Concatenate[A, Q], T]], Callable[Concatenate[A, Q], T]]:
    """Register the function that converts a command's answer to a Document or prints the answer."""

    def register(function: Callable[Concatenate[A, Q], T]) -> Callable[Concatenate[A, Q], T]:
        declaration_of(of).document = function
        return function

    return register


def gate(
    of: Callable[..., Any],
) -> Callable[[Callable[Concatenate[A, Q], G]], Callable[Concatenate[A, Q], G]]:
    """Register the function that returns the results of the gates.

    The function runs after the output. The command line prints the results, and exits with code 3 if
    a gate failed.
    """

    def register(function: Callable[Concatenate[A, Q], G]) -> Callable[Concatenate[A, Q], G]:
        declaration_of(of).gate = function
        return function

    return register


def usage(of: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register the function that raises UsageError for mutually exclusive options.

    The parameters of this function have the names and the defaults of the options that it checks.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        declaration_of(of).usage = function
        return function

    return register


@dataclass(frozen=True)
class CommandGroup:
    """The subcommands of a command, such as `list` and `merge` of `atlas`."""

    name: str
    help: str
    commands: tuple[Declaration, ...]

    def click_command(self) -> click.Command:
        commands = [each.click_command() for each in self.commands]
        return HelpGroup(self.name, help=inspect.cleandoc(self.help), commands=commands)


def as_is(answer: A) -> A:
    """Return the answer unchanged. This is the `frame` of commands that do not return a DataFrame."""
    return answer


def _texts(value: Any) -> list[Any] | None:
    """Return one or several texts or paths as a list. Return None for values of other types."""
    values = [] if value is None else [*value] if isinstance(value, list | tuple) else [value]
    return values if all(isinstance(each, str | os.PathLike) for each in values) else None


def _accepted(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return only the values for which the function has a parameter."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in values.items() if name in names}
