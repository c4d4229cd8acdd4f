"""The `profharness` command line, which imports commands lazily and returns exit codes."""

from __future__ import annotations

import errno
import io
import os
import re
import shlex
import signal
import sys
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import click

from profharness import __version__
from profharness.errors import (
    Interrupted,
    ProfharnessError,
    did_you_mean,
    join_few,
    near_names,
    printable,
    with_clause,
    wrapped_for,
)

# Maps each command to (its module, its help line). The module is imported when the command is used.
COMMANDS: dict[str, tuple[str, str]] = {
    "capture": (
        "profharness.commands.capture",
        "Run attention configs on backends under a profiler.",
    ),
    "kernels": ("profharness.commands.kernels", "Show which kernels each backend launched."),
    "layers": (
        "profharness.commands.layers",
        "Show the attention of a program, layer by layer: what ran, why, and what it cost.",
    ),
    "explain": (
        "profharness.commands.explain",
        "Explain which backend PyTorch chooses, why it refuses the others, and what to change.",
    ),
    "predict": (
        "profharness.commands.predict",
        "Predict the backend and the time of a call on a GPU that you do not have.",
    ),
    "atlas": (
        "profharness.commands.atlas",
        "List, add, merge and export atlases for `predict`.",
    ),
    "explain-kernel": ("profharness.commands.explain_kernel", "Explain a kernel's name in words."),
    "diff": ("profharness.commands.diff", "Compare two backends of a run, or two runs."),
    "ranks": (
        "profharness.commands.ranks",
        "Compare the ranks of a job to find slow GPUs, and ranks that did different work.",
    ),
    "bench": (
        "profharness.commands.bench",
        "Time several backends on the same configs, side by side.",
    ),
    "analyze": (
        "profharness.commands.analyze",
        "Find the bottleneck of each backend, with evidence.",
    ),
    "verify": ("profharness.commands.verify", "Check backends against an fp64 reference."),
    "report": (
        "profharness.commands.report",
        "Write a report on runs as HTML (with charts), Markdown or another format.",
    ),
    "serve": ("profharness.commands.serve", "Show the store in a browser."),
    "mcp": (
        "profharness.commands.mcp",
        "Serve the store as read-only tools for Model Context Protocol (MCP) clients.",
    ),
    "observe": (
        "profharness.commands.observe",
        "Run a program unchanged and record its attention calls.",
    ),
    "ingest": ("profharness.commands.ingest", "Add traces and run folders to the store."),
    "export": ("profharness.commands.export", "Write a run as a Chrome trace."),
    "repro": (
        "profharness.commands.repro",
        "Write one cell as a Python script that needs only torch.",
    ),
    "scrub": ("profharness.commands.scrub", "Make a publishable copy of a run or a trace."),
    "runs": ("profharness.commands.runs", "List stored and unfinished runs, newest first."),
    "backends": (
        "profharness.commands.backends",
        "Show which backends run on this machine, and why the others do not.",
    ),
    "doctor": ("profharness.commands.doctor", "Check what is installed and whether it works."),
    "new-kernel": (
        "profharness.commands.new_kernel",
        "Create a template for your own attention implementation, and a test for it.",
    ),
}

SYNONYMS = {
    "benchmark": "bench",
    "compare": "diff",
    "list": "runs",
    "profile": "capture",
    "why": "explain",
}
"""Words that other tools use for a command. An error suggests the command."""
EXIT_INTERRUPTED = 130
STDOUT = "stdout"
FEW = 4  # maximum number of commands that an error names
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
LATE_S = 0.01  # time in seconds after which a lost interrupt is raised again


class TerminatedError(KeyboardInterrupt):
    """A received SIGTERM or SIGHUP. The exception ends the process in the same way as Ctrl-C.

    `args` contains the signal number.
    """

    @property
    def exit_code(self) -> int:
        """The exit code that a shell reports: 143 for SIGTERM or 129 for SIGHUP."""
        return 128 + int(self.args[0])


def find_command(name: str) -> click.Command:
    """Import a command's module and return its Click command."""
    command: click.Command = import_module(COMMANDS[name][0]).DECLARATION.click_command()
    return command


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        return find_command(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in COMMANDS:
            return super().resolve_command(ctx, args)
        if Path(args[0]).exists():
            look = f"profharness layers {shlex.quote(args[0])}"
            ctx.fail(f"{args[0]!r} is not a command; to look into it, use: {look}")
        import difflib  # needed only for an unknown command

        same = SYNONYMS.get(args[0])
        near = [same] if same else difflib.get_close_matches(args[0], COMMANDS)
        if near and not args[0].startswith("-"):
            ctx.fail(f"no such command {args[0]!r}; did you mean {' or '.join(near)}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="profharness")
def cli() -> None:
    """Find out which attention kernels ran, why, what they cost, and what changed.

    \b
    Examples:
      profharness layers trace.json.gz
      profharness capture 2,8,512,64
      profharness kernels 2,8,512,64
      profharness diff flash math
    """


def main() -> None:
    """Run the command line.

    Exit codes: 0 success, 1 the machine, a tool or profharness failed, 2 wrong input, 3 a gate was
    not met, 130 interrupted by Ctrl-C, 143 ended by SIGTERM, 129 ended by SIGHUP.
    """
    _open_streams()
    _end_in_order()
    try:
        code = _run()
    except OSError as error:
        code = _failed(error)
    try:
        sys.stderr.flush()
    except OSError:
        _silence(sys.stderr)  # otherwise, an error while closing stderr would change the exit code
    sys.exit(code)


def _run() -> int:
    """Run the command line, print any error, and return the exit code.

    Raise OSError if the system reports an error, such as a full disk.
    """
    try:
        # In standalone mode, Click would print errors itself and exit with 1 on an interrupt.
        code = cli.main(prog_name="profharness", standalone_mode=False)
        # Flush now, so that an error, such as a full disk, still changes the exit code.
        sys.stdout.flush()
    except click.ClickException as error:
        if isinstance(error, click.exceptions.NoArgsIsHelpError):
            _say(error.format_message())
        else:
            _say(f"error: {_wrong_usage(error)}")
        return error.exit_code
    except (click.Abort, KeyboardInterrupt) as stop:
        _say("interrupted")
        return _interrupted(stop)
    except BrokenPipeError:
        _silence(sys.stdout)  # the reader, such as `head`, has closed the pipe
        return 0
    except ProfharnessError as error:
        _say(f"{error.label}: {error}")
        return error.exit_code
    return code if isinstance(code, int) else 0


def _wrong_usage(error: click.ClickException) -> str:
    """Convert Click's message to the style of other errors, and add the command for the usage."""
    if isinstance(error, click.NoSuchOption):
        if others := _commands_with(error.option_name):
            text = f"No such option {error.option_name!r}; it belongs to {join_few(others, FEW)}"
            error = click.UsageError(text, error.ctx)
        else:
            near = _near_options(error)
            error = click.NoSuchOption(error.option_name, possibilities=near, ctx=error.ctx)
    text = error.format_message().rstrip(".").replace(". Did you", "; did you")
    text = re.sub(r"is not a valid (integer|float)( range)?$", "is not a number", text)
    if isinstance(error, click.BadParameter) and error.param is not None:
        wrong = re.search(r"'([^']*)' (?:is not one of|does not exist)", text)
        if wrong and isinstance(error.param.type, click.Choice):
            near = near_names(wrong[1], map(str, error.param.type.choices))
            text += f"; {did_you_mean(near)}" if near else ""
        elif wrong and "--configs" in error.param.opts and "," in wrong[1]:
            text += f"; to give a config instead of a file, use: --config {shlex.quote(wrong[1])}"
    if text[1:2].islower():
        text = f"{text[0].lower()}{text[1:]}"
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    return with_clause(text, f"for help, use: {ctx.command_path} --help") if ctx else text


def _commands_with(flag: str) -> list[str]:
    """Return the commands whose `--help` shows an option."""
    return [
        name
        for name in COMMANDS
        if any(flag in option.opts and not option.hidden for option in _options(find_command(name)))
    ]


def _options(command: click.Command) -> list[click.Option]:
    return [each for each in command.params if isinstance(each, click.Option)]


def _near_options(error: click.NoSuchOption) -> list[str]:
    """Return the options in `--help` whose spelling is similar to the unknown option."""
    import difflib  # needed only for this error

    given = _options(error.ctx.command) if error.ctx else []
    shown = [each for each in given if not each.hidden]
    flags = [flag for each in shown for flag in (*each.opts, *each.secondary_opts)]
    return difflib.get_close_matches(error.option_name, flags, cutoff=0.7)


def _say(text: str) -> None:
    """Print a message to stderr. Ignore write errors."""
    try:
        click.echo(wrapped_for(sys.stderr, printable(text)), err=True)
    except OSError:
        _silence(sys.stderr)


def _open_streams() -> None:
    """Replace stdout and stderr with streams that escape control characters.

    Open closed standard streams on /dev/null, so that no other file gets their descriptors. Writing
    to a closed stdout still raises an error. Output to a closed stderr is discarded.
    """
    for number, mode in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # open() returns the lowest free number, which is this number
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    kinds = io.BufferedWriter | io.FileIO  # FileIO if PYTHONUNBUFFERED is set
    if isinstance(getattr(sys.stderr, "buffer", None), kinds):
        screen = sys.stderr
        file = io.BufferedWriter(io.FileIO(screen.fileno(), "w", closefd=False))
        sys.stderr = _Printable(file, screen.encoding, screen.errors, line_buffering=True)
        sys.stderr.screen = screen
    old = sys.stdout
    if old is not None and not isinstance(getattr(old, "buffer", None), kinds):
        return  # the caller has replaced stdout
    # Open /dev/null only for reading, so that writing to a closed stdout raises an error.
    number = os.open(os.devnull, os.O_RDONLY) if old is None else old.fileno()
    at_once = bool(old and (old.line_buffering or getattr(old, "write_through", False)))
    sys.stdout = _Printable(
        # The old stream (`sys.__stdout__`) closes the descriptor.
        io.BufferedWriter(_Stdout(number, "w", closefd=False)),
        encoding=old.encoding if old else "utf-8",
        errors=old.errors if old else "replace",
        line_buffering=at_once,
    )


class _Stdout(io.FileIO):
    """The unbuffered file of stdout. Write errors have `stdout` as their `filename`."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = STDOUT
            raise


class _Printable(io.TextIOWrapper):
    """A text stream that escapes control characters, for example in warnings and logs of libraries.

    `screen` is the original stream. Progress bars need it, because they move the cursor.
    """

    screen: TextIO

    def write(self, text: str) -> int:
        super().write(printable(text))
        return len(text)


def _silence(stream: TextIO) -> None:
    """Discard the buffered output of a stream after a write error.

    Otherwise, the interpreter would raise the same error again when it closes the stream.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _failed(error: OSError) -> int:
    """Print an error of the operating system, and return the exit code.

    The message names the file that caused the error, stdout, or the working folder.
    """
    why = error.strerror or str(error)
    place = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else ""
    text = f"{place}: {why}" if place else why
    if place == STDOUT:
        _silence(sys.stdout)
        text += "; the result was not written"
    elif error.errno in NO_ROOM:
        text += "; free space on this disk and in TMPDIR, then run the command again"
    elif not _folder_is_there():
        text = "the working folder was deleted; change to another folder"
    _say(f"error: {text}")
    return 1


def _folder_is_there() -> bool:
    try:
        return Path.cwd().exists()
    except OSError:
        return False


def _interrupted(stop: BaseException) -> int:
    """Return the exit code of an interrupt. If a run was interrupted, print how to resume it.

    Click raises `Abort` with the original exception as its cause. Runs in a temporary folder, such
    as runs of `backends`, have been deleted and cannot be resumed.
    """
    code = EXIT_INTERRUPTED
    cause: BaseException | None = stop
    while cause is not None:
        if isinstance(cause, Interrupted) and cause.folder.exists():
            _say(_next_steps(cause))
        elif isinstance(cause, TerminatedError):
            code = cause.exit_code
        cause = cause.__cause__
    return code


def _next_steps(stop: Interrupted) -> str:
    """Return a message about the results of an interrupted run, and the command that resumes it."""
    # imported here because only interrupted commands need them
    from profharness.files import DEFAULT_STORE, shell_command
    from profharness.run import CAMPAIGN_FILE, read_run

    folder, store = stop.folder, Path(stop.store or DEFAULT_STORE)
    run = read_run(folder)
    whole = not (folder / CAMPAIGN_FILE).exists()
    if whole and any(cell.case is not None for cell in run.cells):
        done = sum(cell.status != "pending" for cell in run.cells)
        kept = shell_command("ingest", str(folder), store=store)
        text = f"{done} of {len(run.cells)} checks are done; to store them, use: {kept}"
        if stop.command == "bench":
            shown = shell_command("bench", "latest", store=store)
            text += f"; to show the stored times, use: {shown}"
        return f"{text}; a verification cannot be resumed; run it again to complete the checks"
    text = shell_command("capture", "--resume", str(folder), store=store)
    if stop.command == "bench":
        text += " && " + shell_command("bench", folder.name, store=store)
    return f"the results so far are kept; to resume the run, use: {text}"


def _end_in_order() -> None:
    """Raise an exception on SIGTERM and SIGHUP, so that child processes are ended first.

    Continue to ignore signals that are already ignored, for example because of nohup. Python does
    not propagate exceptions from callbacks of weak references, which the import system uses. If an
    interrupt is lost in such a callback, a timer raises the interrupt again.
    """
    report = sys.unraisablehook

    def stop(number: int, _: FrameType | None) -> None:
        raise TerminatedError(number)

    def repeat(lost: sys.UnraisableHookArgs) -> None:
        if not isinstance(lost.exc_value, KeyboardInterrupt):
            report(lost)
            return
        kind, arguments = type(lost.exc_value), lost.exc_value.args

        def late(_: int, __: FrameType | None) -> None:
            raise kind(*arguments)

        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, LATE_S)

    for number in ENDING_SIGNALS:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, stop)
    sys.unraisablehook = repeat


if __name__ == "__main__":
    main()
