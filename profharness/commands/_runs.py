"""Find the runs that a user names, and ingest runs that are named by a file or folder.

The name of a run is an id, a unique prefix of an id, `latest`, `latest~1`, the name of an ingested
file or folder, a trace file, a run folder, or a folder of traces. This module replaces existing
files and folders by the ids of their runs, and the store resolves all other names. MCP tools do not
call this module, because a client may not choose which files the server reads.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from profharness.attention.config import setting_name, split_names
from profharness.commands._output import hint, hint_warning, is_command_line, live
from profharness.errors import (
    AmbiguousNameError,
    NotFoundError,
    ProfharnessError,
    StoreError,
    UnknownNameError,
    UsageError,
    did_you_mean,
    join_few,
    near_names,
    printable_path,
)
from profharness.files import DEFAULT_STORE, STORE_VARIABLE
from profharness.recording.profilers.nsys import SUFFIX, export_limit_s
from profharness.store import ALL_RUNS, LATEST, Need, Selection, open_store
from profharness.store.names import name_as_typed

if TYPE_CHECKING:
    from profharness.store import IngestResult
    from profharness.store.ingest import Progress

Reference = str | os.PathLike[str]
MOST_LISTED = 1000  # maximum number of files in which a misspelled file is searched
FEW = 4  # maximum number of runs that an error lists
NO_FILE = "no such file or folder"
# matches the path of a file, or `latest`, but no config
RUN_TEXT = re.compile(r"latest(~\d+)?|[^,={}]*(/[^,={}]*|\.[a-z][\w-]*)")
_CONFIG = re.compile(r"[\d{][^/]*,|b\d+-h\d+-")


def find_one(ref: Reference | None, store: Path) -> str | None:
    """Return a text that selects the given run in the store. Return None for None.

    Ingest a file or folder that is not stored yet. Raise UsageError for a folder with several runs.
    """
    if ref is None:
        return None
    text = os.fspath(ref)
    if not _is_path(text, store):
        require_run(text, store)
        return text
    return _only(text, _sources(text), store)


def find_only(refs: Reference | tuple[Reference, ...] | None, store: Path) -> str | None:
    """Like `find_one`, for a value that may be several runs. Raise UsageError for several runs."""
    if isinstance(refs, tuple):
        raise UsageError(f"name only one run, not {' and '.join(os.fspath(each) for each in refs)}")
    return find_one(refs, store)


def find_several(refs: Iterable[Reference], store: Path) -> tuple[str, ...]:
    """Return texts that select the given runs in the store. A folder selects all runs in it."""
    found: dict[str, Path | None] = {}  # the file of each run that was given as one
    for text in [os.fspath(ref) for ref in refs]:
        if _is_path(text, store):
            _ingest_all(_sources(text), store, found)
        else:
            require_run(text, store)
            found.setdefault(text, None)
    return tuple(found)


def separate(
    runs: Iterable[Reference], configs: Iterable[str], store: Path
) -> tuple[list[Reference], list[str]]:
    """Return the runs and the configs among texts that may be in the wrong place.

    A text in `runs` counts as a config if it looks like a config and no file has this name. A text in
    `configs` counts as a run only if it selects a run or looks like a path.
    """
    texts = [*runs]
    as_configs = [os.fspath(each) for each in texts if is_config(os.fspath(each))]
    known = [
        each
        for each in configs
        if not is_config(each) and (RUN_TEXT.fullmatch(each) or _is_run(each, store))
    ]
    return (
        [*(each for each in texts if os.fspath(each) not in as_configs), *known],
        [*as_configs, *(each for each in configs if each not in known)],
    )


def separate_sides(
    baseline: Sequence[Reference],
    candidate: Sequence[Reference],
    runs: Sequence[Reference],
    configs: Sequence[Reference],
    store: Path,
) -> tuple[Sequence[Reference], ...]:
    """Return the baseline, the candidate, the run and the configs among texts in any order.

    `runs` contains the value of --run. If there is none, but one of more than two texts that are no
    configs selects a run, the run is this text, and the sides are two of its backends.
    """
    texts = [*baseline, *candidate, *configs]
    as_configs = [each for each in texts if is_config(os.fspath(each))]
    sides = [each for each in texts if each not in as_configs]
    if not runs and len(sides) > 2:
        found = {each for each in sides if _is_run_of_backends(os.fspath(each), store)}
        if len(found) == 1:
            runs = [*found]
            sides = [each for each in sides if each not in found]
    if len(sides) < 2:
        return baseline, candidate, runs, configs
    return sides[:1], sides[1:2], runs, [*as_configs, *sides[2:]]


def _is_run_of_backends(text: str, store: Path) -> bool:
    """Return whether a text selects a run, and is neither a stored backend nor a Python file."""
    return not (text.endswith(".py") or _is_backend(text, store)) and _is_run(text, store)


def is_config(text: str) -> bool:
    """Return whether a text looks like a config, and no file has this name."""
    return _CONFIG.match(text) is not None and not Path(text).exists()


def _is_run(text: str, store: Path) -> bool:
    """Return whether a text selects a stored run, a file or a folder."""
    if text in (LATEST, ALL_RUNS) or _is_path(text, store):
        return True
    if not store.is_file():
        return False
    with open_store(store) as opened, contextlib.suppress(NotFoundError):
        return bool(opened.resolve(text))
    return False


def has_run(need: Need, store: Path) -> bool:
    """Return whether the store exists and has a run that satisfies a need."""
    if store.is_file():
        with open_store(store) as opened, contextlib.suppress(NotFoundError):
            return bool(opened.find_run(Selection(), need))
    return False


def run_text(ref: Reference | None) -> str | None:
    """Return a resolved reference as text."""
    return None if ref is None else os.fspath(ref)


def find_listed(refs: str | Iterable[str], store: Path) -> tuple[str, ...]:
    """Return texts that select the given runs, which may be separated by commas."""
    return find_several(split_names(refs), store)


def find_side(ref: Reference, store: Path) -> str:
    """Return a side of a diff, and replace a file or folder by the id of its run.

    A side is a run, a backend, or RUN:BACKEND. The name of a stored backend is not replaced, even if
    a folder has the same name.
    """
    text = os.fspath(ref)
    if _is_backend(text, store):
        return text
    for end in (len(text), *(place for place, letter in enumerate(text) if letter == ":")):
        path, backend = text[:end], text[end:]
        # FILE.py:FUNCTION is a backend
        if not path.endswith(".py") and _is_path(path, store):
            return _only(path, _sources(path), store) + backend
    if ":" not in text:
        require_run(text, store)
    return text


def _is_backend(text: str, store: Path) -> bool:
    """Return whether a text is the name of a stored backend."""
    if not store.is_file():
        return False
    with open_store(store) as opened:
        return setting_name(text) in opened.backends()


def _is_path(text: str, store: Path) -> bool:
    """Return whether a text is a file or folder that exists. Ids and `latest` take precedence."""
    if not text or text == ALL_RUNS or text.partition("~")[0] == LATEST:
        return False
    try:
        if not Path(text).exists():
            return False
    except (OSError, ValueError):  # such as a text that is too long for a path
        return False
    if os.sep in text or not store.is_file():
        return True
    with open_store(store) as opened:
        return text not in {each.run for each in opened.stored_runs()}


def require_run(text: str, store: Path) -> None:
    """Raise UsageError for a config, and NotFoundError for a missing file that is not stored."""
    if _CONFIG.match(text):
        quoted = shlex.quote(text)
        raise UsageError(
            f"{text!r} is a config, but this command needs a run; to see the kernels of the config, "
            f"use: profharness kernels {quoted}; to see why PyTorch chooses a backend, use: "
            f"profharness explain {quoted}"
        )
    if text.partition("~")[0] in (LATEST, ALL_RUNS):
        return
    missing = f"{text}: {NO_FILE}"
    unknown = ""
    stored: list[str] = []
    if store.exists():
        with open_store(store) as opened:
            if any(Path(text) in Path(each.path).parents for each in opened.stored_runs()):
                return  # `ranks` compares the traces of a folder that was deleted
            try:
                opened.resolve(text)
            except AmbiguousNameError as error:
                raise AmbiguousNameError(f"{missing}; {error}") from None
            except NotFoundError as error:
                unknown = f"; {error}"
                runs = opened.stored_runs()
                stored = [opened.run_name(each.run) for each in runs]
            else:
                if os.sep in text:  # not only the name of a run
                    hint(f"note: {missing}; the stored run with this name is used instead")
                return
    is_path = bool(os.sep in text or Path(text).suffix)
    near = _near_paths(Path(text), stored)
    if near and (is_path or not {*near} <= {*stored}):
        raise UnknownNameError(f"{missing}; {did_you_mean(near)}")
    if is_path:
        raise UnknownNameError(f"{missing}{unknown}")


def require_file(text: str) -> None:
    """Raise UnknownNameError if a text looks like the path of a file that does not exist.

    Suggest files with a similar name. MCP tools do not call this function.
    """
    path = Path(text)
    if (os.sep in text or path.suffix) and not path.exists():
        near = _near_paths(path)
        raise UnknownNameError(f"{text}: {NO_FILE}" + (f"; {did_you_mean(near)}" if near else ""))


def _near_paths(path: Path, stored: Sequence[str] = ()) -> list[str]:
    """Return the stored runs, and the traces beside a missing path, whose names resemble its name."""
    found = {name: name for name in stored}
    with contextlib.suppress(OSError, ValueError):  # such as a missing folder
        listed = itertools.islice(path.parent.iterdir(), MOST_LISTED)
        names = sorted(each.name for each in listed if _may_be_trace(each))
        found |= {name: printable_path(path.with_name(name)) for name in names}
    return [found[name] for name in near_names(path.name, found)]


def _may_be_trace(path: Path) -> bool:
    """Return whether a path is a folder, or a file with a suffix of traces or of their archives."""
    from profharness.store.sources import ARCHIVES  # loads the readers of traces
    from profharness.traces import SUFFIXES

    if path.name.startswith("."):
        return False
    return path.name.lower().endswith((*SUFFIXES, ".gz", *ARCHIVES)) or path.is_dir()


def _sources(text: str) -> list[Path]:
    from profharness.store.sources import find_sources  # loads the readers of traces

    return find_sources(Path(text))


def _only(text: str, sources: list[Path], store: Path) -> str:
    """Return the id of the only run in a file or folder. Raise UsageError if there are several."""
    _require_single(text, sources)
    return ensure_stored(sources[0], store).run


def require_single(text: str) -> None:
    """Raise UsageError for a folder that contains several runs."""
    _require_single(text, _sources(text))


def _require_single(text: str, sources: list[Path]) -> None:
    if len(sources) > 1:
        raise UsageError(
            f"{text} contains {len(sources)} runs; choose one of them: "
            f"{join_few(list(map(str, sources)), FEW)}"
        )


def _ingest_all(sources: list[Path], store: Path, found: dict[str, Path | None]) -> None:
    """Add the runs of the sources to `found`, which maps ids of runs to files.

    Print a warning for a source that is unreadable, and for a copy of a source that was found.
    Raise the first error if no source can be read.
    """
    failures: list[ProfharnessError] = []
    for source in sources:
        try:
            run = ensure_stored(source, store, found).run
        except ProfharnessError as error:
            failures.append(error)
            continue
        first = found.setdefault(run, source)
        if first is not None and first.resolve() != source.resolve():
            hint(
                f"warning: {printable_path(source)} has the same content as "
                f"{printable_path(first)}, so it is used only once"
            )
    if len(failures) == len(sources):
        raise failures[0]
    for failure in failures:
        hint(f"warning: left out: {failure}")


def ensure_stored(source: Path, store: Path, found: Collection[str] = ()) -> IngestResult:
    """Ingest a trace file or run folder unless the store has its content. Return the stored run.

    If the store has the same trace under another name, the output of this command names it by
    `source`, unless the run is in `found`. Raise TraceFormatError if the source cannot be read, and
    StoreError if the store cannot be written.
    """
    # imported here because only a run that is given as a path needs the readers of traces
    from profharness.store.ingest import add_rank, ingest_source, require_stored, unchanged
    from profharness.store.schema import Writer
    from profharness.store.sources import read_source

    read = read_source(source)
    existed = store.is_file()
    if existed:
        with open_store(store) as opened:
            known = unchanged(opened.connection, read)
            named = opened.path_of(known.run) if known else ""
        if known is not None:
            if known.run not in found and named and not _is_same(Path(named), source):
                name_as_typed(known.run, printable_path(source))
                if read.raws:  # a benchmark has no traces
                    with closing(Writer(store)) as writer, contextlib.suppress(StoreError):
                        add_rank(writer(), known.run, read.raws[0].name)
            return known
    with closing(Writer(store)) as writer, ingest_progress(source) as progress:
        result = ingest_source(store, writer, read, progress)
    require_stored(store, [result])
    if not existed and store == Path(DEFAULT_STORE):  # the user did not choose the store
        hint(
            f"Created the store {store.absolute()}; to choose another, use --store or {STORE_VARIABLE}."
        )
    hint_warnings(source, [result])
    return result


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # such as a file that was deleted
        return one == other


def hint_warnings(source: Path, results: Iterable[IngestResult]) -> None:
    """Print the warnings about a source. Each line names the file only once."""
    name = f"{printable_path(source.name)}: "
    for text in (text for result in results for text in result.warnings):
        hint_warning(f"{printable_path(source)}: ", text.removeprefix(name))


@contextlib.contextmanager
def ingest_progress(source: Path) -> Iterator[Progress | None]:
    """Yield a callback that shows the number of launches on a terminal, otherwise None.

    If nsys has to export the source first, print the time limit of the export.
    """
    if source.suffix == SUFFIX:
        hint(
            f"{printable_path(source)}: exporting with nsys, which may take up to "
            f"{export_limit_s(source):.0f} s"
        )
    if not is_command_line() or not sys.stderr.isatty():
        hint(f"reading {printable_path(source)}")
        yield None
        return

    def show(name: str, done: int, total: int) -> None:
        place = "" if name == printable_path(source.name) else f"{printable_path(source.name)}: "
        live(f"{place}{printable_path(name)}: {done:,} of {total:,} launches")

    yield show
    live()
