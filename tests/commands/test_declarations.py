"""Each command has the same parameters on the command line, in Python and as an MCP tool."""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest

import profharness
from profharness.cli import COMMANDS, find_command
from profharness.commands._command import CommandGroup, Declaration
from profharness.commands._options import Duration, Fraction, Parameter, Quantity
from profharness.errors import NotFoundError, UsageError
from profharness.files import DEFAULT_STORE
from profharness.run import SEED

NOT_ON_THE_COMMAND_LINE = {"progress"}
"""Parameters of functions. The command line shows progress on a terminal."""


def declarations() -> Iterator[Declaration]:
    for module, _ in COMMANDS.values():
        declared = import_module(module).DECLARATION
        yield from declared.commands if isinstance(declared, CommandGroup) else (declared,)


def test_a_seed_has_one_default() -> None:
    """Bug: the default of `bench` was 42, and that of `capture` and `verify` was 0."""
    defaults = {
        declared.name: parameter.default
        for declared in declarations()
        for parameter in declared.parameters
        if parameter.name == "seed"
    }
    assert defaults == {"capture": SEED, "verify": SEED, "bench": SEED, "repro": None}


def pairs() -> Iterator[Any]:
    """Yield each parameter with its Click parameter."""
    for declared in declarations():
        by_name = {each.name: each for each in declared.click_command().params}
        for parameter in (*declared.parameters, *declared.shown_parameters):
            yield pytest.param(
                parameter, by_name[parameter.name], id=f"{declared.name}-{parameter.name}"
            )


def default_of(parameter: Parameter, option: click.Parameter) -> Any:
    """Return the value that the function gets if the option is missing, in its own type."""
    missing = option.get_default(click.Context(click.Command("any")))
    if not isinstance(missing, tuple | str | int | float | Path | None):
        missing = None  # Click's own sign of an option without a default
    if option.multiple or option.nargs == -1:
        missing = missing or ()
    given = {parameter.name: missing}
    given |= {f"{parameter.name}_file": None, f"{parameter.name}_option": ()}
    value = parameter.value(given)
    if parameter.base is bool and parameter.default is False:
        return bool(value)
    if parameter.name == "store":
        return None if value == DEFAULT_STORE else value
    if isinstance(parameter.default, Path):
        return Path(value)
    return parameter.parsed(value)


def test_earlier_spellings_work_and_are_not_shown() -> None:
    """An argument that was an option is tested in test_which_run.py."""
    found = 0
    for declared in declarations():
        command = declared.click_command()
        shown = command.get_help(click.Context(command, info_name=declared.name))
        for parameter in (*declared.parameters, *declared.shown_parameters):
            for old in parameter.option.old_flags:
                # other commands may have an option of the same name
                own = rf"(?<!capture )(?<!bench ){old}\b(?!-)"
                assert not re.search(own, " ".join(shown.split())), (declared.name, old)
                if not parameter.option.flags:
                    continue
                option = next(each for each in command.params if each.name == parameter.name)
                value = [] if getattr(option, "is_flag", False) else ["3"]
                given, _, _ = command.make_parser(click.Context(command)).parse_args([old, *value])
                assert given[parameter.name], (declared.name, old)
                found += 1
    assert found


@pytest.mark.parametrize("name", ["explain", "predict", "capture", "verify"])
def test_configs_are_arguments_or_options(name: str) -> None:
    (declared,) = (each for each in declarations() if each.name == name)
    command = declared.click_command()
    (parameter,) = (each for each in declared.parameters if each.name == "configs")
    words = ["1,2,8,16", "1,2,16,16", "--config", "1,2,32,16"]
    context = command.make_context(name, words)
    assert parameter.value(context.params) == ("1,2,8,16", "1,2,16,16", "1,2,32,16")
    shown = "[CONFIG|RUN]..." if name == "explain" else "[CONFIG]..."
    assert shown in command.get_usage(context)


def test_functions_have_the_parameters_of_their_commands() -> None:
    for declared in declarations():
        names = set(inspect.signature(declared.run).parameters) - NOT_ON_THE_COMMAND_LINE
        assert names == {each.name for each in declared.parameters}, declared.name


@pytest.mark.parametrize(("parameter", "option"), list(pairs()))
def test_the_default_is_the_same_on_the_command_line_and_in_python(
    parameter: Parameter, option: click.Parameter
) -> None:
    if parameter.variadic:
        assert option.nargs == -1
    elif parameter.required:
        assert option.required or option.multiple
    else:
        assert not option.required
        assert default_of(parameter, option) == parameter.default
        parameter.require_valid(parameter.default)


@pytest.mark.parametrize(("parameter", "option"), list(pairs()))
def test_choices_and_ranges_are_the_same_on_the_command_line_and_in_python(
    parameter: Parameter, option: click.Parameter
) -> None:
    kind = option.type
    if isinstance(kind, click.Choice):
        for value in kind.choices:
            parameter.require_valid((value,) if option.multiple else value)
        with pytest.raises(UsageError):
            parameter.require_valid(("nosuch",) if option.multiple else "nosuch")
    if isinstance(kind, click.IntRange | click.FloatRange):
        assert parameter.range is kind
        step = 1 if isinstance(kind, click.IntRange) else 1e-9
        for limit, outside, is_open in (
            (kind.min, -step, kind.min_open),
            (kind.max, step, kind.max_open),
        ):
            if limit is None:
                continue
            wrong = (
                limit if is_open else limit + math.copysign(max(step, abs(limit) * 1e-9), outside)
            )
            wrong = limit + int(outside) if isinstance(kind, click.IntRange) else wrong
            with pytest.raises(UsageError):
                parameter.require_valid(wrong)
            if not is_open:
                parameter.require_valid(limit)
    if isinstance(kind, click.IntRange):
        with pytest.raises(UsageError):
            parameter.require_valid(1.5)


def test_numbers_of_functions_have_a_range_or_a_parser() -> None:
    for declared in declarations():
        for each in (*declared.parameters, *declared.shown_parameters):
            if each.base in (int, float):
                assert each.range is not None, f"{declared.name} {each.name}"


def test_tools_have_the_defaults_ranges_and_requirements_of_their_commands() -> None:
    _mcp = pytest.importorskip("profharness.commands._mcp")
    seen = set()
    for name in _mcp.TOOLS:
        declared = _mcp.declared(name)
        schema = _mcp._listed(name).input_schema
        parameters = {
            each.tool_name: each
            for each in (*declared.parameters, *declared.shown_parameters)
            if each.option.tool
        }
        required = {key for key, each in parameters.items() if each.required}
        assert set(schema["required"]) == required | set(declared.tool_required)
        assert set(schema["properties"]) == set(parameters)
        for key, each in parameters.items():
            field = schema["properties"][key]
            kinds = [kind for kind in field.get("anyOf", [field]) if kind["type"] != "null"]
            (kind,) = kinds
            names = {bool: "boolean", int: "integer", float: "number"}
            assert kind["type"] == names.get(each.base, "string")
            if key not in schema["required"]:
                # an empty text is an argument that is not given
                absent = "" if kind["type"] == "string" else each.default
                assert field["default"] == absent
            limits = {word: kind[word] for word in kind if "inimum" in word or "aximum" in word}
            if each.range is None:
                assert limits == {}
                continue
            seen.add((name, key))
            low = "exclusiveMinimum" if each.range.min_open else "minimum"
            assert limits.pop(low) == each.range.min
            assert limits.pop("maximum", None) == each.range.max and limits == {}
    assert seen == {("layers", "step"), ("diff", "threshold")}


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (
            Fraction(0, min_open=True),
            {"3%": 0.03, "0.5 %": 0.005, "0.03": 0.03, "1e-3": 0.001, ".5": 0.5, "300%": 3.0},
            ("", "0", "-1%", "fast", "nan", "inf", "3s"),
        ),
        (
            Duration(0.1, 1000),
            {"10s": 10, "0.3s": 0.3, "500ms": 0.5, "2m": 120, "2min": 120, "10": 10, "0.5": 0.5},
            ("", "0", "-1s", "fast", "nan", "inf", "3%", "50ms", "1001"),
        ),
    ],
)
def test_numbers_with_units(kind: Quantity, good: dict[str, float], bad: tuple[str, ...]) -> None:
    for text, value in good.items():
        assert kind.parse(text) == pytest.approx(value), text
    for text in bad:
        with pytest.raises(UsageError, match=rf"(not|write) a {kind.name}"):
            kind.parse(text)


def test_fractions_and_durations_have_one_spelling_each() -> None:
    """Options for a share or a time limit have the same parser and the same metavar everywhere."""
    flags = {"--threshold": Fraction, "--precision": Fraction}
    flags |= {"--timeout": Duration, "--max-time": Duration}
    found: Counter[str] = Counter()
    for declared in declarations():
        for option in declared.click_command().params:
            for flag in set(option.opts) & set(flags):
                assert isinstance(option.type, flags[flag]), (declared.name, flag)
                assert option.metavar == flags[flag].__name__.upper(), (declared.name, flag)
                found[flag] += 1
    assert found == {"--threshold": 2, "--precision": 1, "--timeout": 4, "--max-time": 2}


def test_a_python_caller_may_write_a_unit() -> None:
    with pytest.raises(UsageError, match=r"^threshold: '3 s' is not a fraction; write 3%"):
        profharness.ranks("missing", threshold="3 s")
    with pytest.raises(NotFoundError):  # that is, the threshold is valid
        profharness.ranks("missing", threshold="3%")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_has_the_first_line_of_each_command(name: str) -> None:
    first = (find_command(name).help or "").partition("\n\n")[0]
    assert COMMANDS[name][1] == " ".join(first.split())


OWN_METAVARS = {
    "--output",
    "--gpu",
    "--torch",
    "--profiler",
    "--expect",
    "--fail-on",
    "--scheduler",
}
OWN_METAVARS |= {"--bench", "--cuda"}  # flags in one command
"""Options whose values differ between commands, such as one release or several."""


def options() -> Iterator[tuple[str, click.Option]]:
    """Yield each option that `--help` shows, with the name of its command."""
    for declared in declarations():
        for each in declared.click_command().params:
            if isinstance(each, click.Option) and not each.hidden:
                yield declared.name, each


def test_an_option_has_the_same_metavar_in_every_command() -> None:
    metavars: dict[str, set[str]] = {}
    for name, option in options():
        context = click.Context(click.Command(name))
        metavars.setdefault(option.opts[-1], set()).add(option.make_metavar(context))
    differing = {flag for flag, names in metavars.items() if len(names) > 1}
    assert differing <= OWN_METAVARS


def test_a_default_is_at_the_end_in_brackets() -> None:
    for name, option in options():
        text = option.help or ""
        assert "(default" not in text and "default value" not in text, (name, option.opts)
        assert "[default" not in text or text.endswith("]"), (name, option.opts)


def test_an_option_that_several_commands_have_is_described_alike() -> None:
    """The words that say which values --gpu, --backend and --device accept are the same."""
    ends = {
        "--gpu": ("Name one GPU, such as H200.", "Name one GPU (H200) or several (H200,A100)."),
        "--device": ("`auto` means a GPU if there is one.", "else a GPU if there is one."),
    }
    for name, option in options():
        if (allowed := ends.get(option.opts[-1])) is not None:
            assert (option.help or "").partition("  [")[0].endswith(allowed), (name, option.opts)
    texts = {name: option.help or "" for name, option in options() if "--backend" in option.opts}
    assert "Separate several" not in texts["repro"]
    for name in ("capture", "bench", "verify"):
        assert texts[name].endswith(
            "[default: all,kernels]" if name == "verify" else "[default: all]"
        )
