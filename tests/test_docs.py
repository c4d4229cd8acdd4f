"""The documents agree with the program: commands, options, links, SQL, Python, keys."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import click
import make_outputs
import pytest

import profharness
from profharness import run as record
from profharness import stats
from profharness.attention import config
from profharness.attention.backends import ALL, KERNELS, find_backend
from profharness.cli import COMMANDS, cli
from profharness.commands.diff.compare import COSTS, DiffRow
from profharness.commands.kernels.tables import FIELDS
from profharness.commands.ranks.comparison import CODES
from profharness.measurements.agreement import check_expected_names
from profharness.program.changes import VERDICTS
from profharness.program.gates import GATES
from profharness.store import ingest_path, open_store
from profharness.store.schema import VIEWS
from profharness.traces import kernel_names

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
)
TEXT = {name: (ROOT / name).read_text(encoding="utf-8") for name in PAGES}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PLACEHOLDER = re.compile(r"\b(?:FILE_OR_FOLDER|BASELINE|CANDIDATE|RUN|FILE)\b")


def fences(page: str, *kinds: str) -> list[str]:
    """Return the bodies of a page's code blocks of these kinds."""
    return [body for kind, body in FENCE.findall(TEXT[page]) if kind in kinds]


def command_lines(page: str) -> Iterator[str]:
    """Yield every profharness command line of a page, from blocks and running text."""
    for body in fences(page, "sh"):
        yield from (line for line in body.splitlines() if line.startswith("profharness"))
    for body in fences(page, "console"):
        lines = (line[2:] for line in body.splitlines() if line.startswith("$ "))
        yield from (line for line in lines if line.startswith("profharness"))
    prose = FENCE.sub("", TEXT[page])
    yield from re.findall(r"`(profharness(?: [^`\n]+)?)`", prose)


def shown() -> list[str]:
    """Return the distinct command lines, without those that are only a command's name."""
    found = dict.fromkeys(line for page in PAGES for line in command_lines(page))
    bare = {"profharness", *(f"profharness {name}" for name in COMMANDS)}
    return [line for line in found if line not in bare]


def words(line: str) -> list[str]:
    """Return the arguments that a shell would pass, without redirections and pipes."""
    found = shlex.split(line, comments=True)
    end = min(found.index(word) if word in found else len(found) for word in (">", "|"))
    return found[1:end]


def parse(arguments: list[str]) -> click.Context | None:
    """Parse like the program without running anything. Return None if parsing ends early, as with --help."""
    try:
        if arguments and not arguments[0].startswith("-"):
            command = cli.get_command(click.Context(cli), arguments[0])
            if command is None:
                raise click.UsageError(f"no command {arguments[0]!r}")
            return command.make_context(arguments[0], arguments[1:])
        return cli.make_context("profharness", arguments)
    except click.exceptions.Exit as end:
        assert end.exit_code == 0
        return None


@pytest.mark.parametrize("line", shown())
def test_a_shown_command_parses(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text("2,8,512,64\n")  # --configs FILE must exist
    context = parse(words(line))
    if context is None:
        return
    given = context.params
    for text in given.get("config", ()):
        assert config.expand_configs(text)
    for name in (each for text in given.get("backend", ()) for each in text.split(",")):
        assert name in (ALL, KERNELS) or find_backend(name)
    check_expected_names([e for text in given.get("expect", ()) for e in text.split(",")])
    for name in (each for text in given.get("fail_on", ()) for each in text.split(",")):
        assert name in (*VERDICTS, *COSTS, *CODES, *GATES)


def test_a_wrong_command_would_not_parse() -> None:
    for line in ("profharness kernals", "profharness kernels --expected flash"):
        with pytest.raises(click.UsageError):
            parse(words(line))


def test_the_index_shows_every_command() -> None:
    listed = re.findall(r"\| `profharness ([\w-]+)[^`]*` \|", TEXT["docs/index.md"])
    assert set(listed) == set(COMMANDS)


def build_site(folder: Path, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = build_site(tmp_path)
    assert done.returncode == 0, done.stderr
    home = (tmp_path / "index.html").read_text(encoding="utf-8")
    (title,) = re.findall(r"<title>(.*?)</title>", home)
    assert title == "profharness"
    loaded = re.findall(r'(?:src|href)="(?:https?:)?//[^"]+\.(?:js|css|woff2?)"', home)
    assert loaded == []
    assert (tmp_path / "traces" / "index.html").is_file()


def test_broken_links_fail_the_site(tmp_path: Path) -> None:
    """The pages are those of the repository, with one link to each kind of missing target."""
    for name in ("docs", "scripts/site_pages.py", "mkdocs.yml", *site_pages().OUTSIDE):
        copy = tmp_path / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".xz"):
            copy.touch()
        else:
            (shutil.copytree if name == "docs" else shutil.copy)(ROOT / name, copy)
    broken = ("missing.md", "../missing.md", "store.md#missing", "missing.png")
    with (tmp_path / "docs" / "mcp.md").open("a") as page:
        page.writelines(f"\n[link]({target})\n" for target in broken)
    done = build_site(tmp_path / "site", tmp_path)
    assert done.returncode == 1
    warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == len(broken)
    for target, line in zip(sorted(broken), sorted(warnings), strict=True):
        assert "missing" in target and "docs/mcp.md" in line


def site_pages() -> ModuleType:
    return import_module("site_pages")


def test_the_picture_shows_what_the_command_prints(tmp_path: Path) -> None:
    kind, name, *arguments = make_outputs.PICTURES[0]
    script = str(ROOT / "scripts" / "make_pictures.py")
    command = [sys.executable, script, kind, str(tmp_path / name), *arguments]
    subprocess.run(command, cwd=ROOT, check=True)
    assert (tmp_path / name).read_text() == (ROOT / "docs" / "pictures" / name).read_text()


def test_pictures_are_small() -> None:
    for path in (ROOT / "docs" / "pictures").iterdir():
        assert path.stat().st_size < 300_000, path


def test_files_named_in_the_readme_exist() -> None:
    for line in command_lines("README.md"):
        for word in words(line):
            if word.startswith(("tests/", "docs/", "scripts/")):
                assert (ROOT / word).is_file(), word


def test_the_sql_runs_on_a_new_store(tmp_path: Path) -> None:
    blocks = fences("docs/store.md", "sql")
    calls = [call for call in python_calls() if call.func.attr == "query"]  # type: ignore[attr-defined]
    statements = [*blocks, *(ast.literal_eval(call.args[0]) for call in calls)]
    assert len(statements) > 1
    with open_store(tmp_path / "store.db", write=True) as store:
        for statement in statements:
            assert store.connection.execute(statement).fetchall() == []
        with pytest.raises(sqlite3.OperationalError):
            store.connection.execute("SELECT nothing FROM cell_summary")


def test_the_sql_returns_what_its_page_shows(tmp_path: Path) -> None:
    ingest_path(tmp_path / "store.db", ROOT / "traces")
    (statement,) = fences("docs/store.md", "sql")
    (shown_rows,) = (text for text in fences("docs/store.md", "text") if text.startswith("auto|"))
    with open_store(tmp_path / "store.db") as store:
        rows = store.connection.execute(statement).fetchall()
    assert ["|".join(map(str, row)) for row in rows] == shown_rows.splitlines()


def python_calls() -> list[ast.Call]:
    """Return the calls of profharness functions in the Python blocks of docs/store.md."""
    trees = [ast.parse(body) for body in fences("docs/store.md", "python")]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [node for node in nodes if isinstance(node.func, ast.Attribute)]


def test_the_python_calls_fit_the_functions() -> None:
    names = set()
    for call in python_calls():
        assert isinstance(call.func, ast.Attribute)
        names.add(call.func.attr)
        assert call.func.attr in profharness.__all__
        keywords = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        values = [ast.literal_eval(value) for value in call.args]
        inspect.signature(getattr(profharness, call.func.attr)).bind(*values, **keywords)
    assert {"capture", "kernels", "diff", "query"} <= names


def listing(page: str, before: str) -> list[str]:
    """Return the words of the code span after a text. The span may contain line breaks."""
    pattern = r"\s+".join(map(re.escape, before.split()))
    found = re.search(pattern + r"\s*`([^`]+)`", TEXT[page])
    assert found, before
    return found.group(1).split()


def test_contracts_page_lists_the_keys_of_rows() -> None:
    page = "docs/contracts.md"
    assert listing(page, "Each row of `kernels` has the keys") == list(FIELDS)
    assert listing(page, "Each row of `diff` has the keys") == list(DiffRow.__slots__)
    assert listing(page, "`family` is one of") == list(kernel_names.FAMILIES)


def test_contracts_page_lists_words_and_views() -> None:
    text = TEXT["docs/contracts.md"]
    spans = set(re.findall(r"`([^`\n]+)`", FENCE.sub("", text)))
    for verdict in VERDICTS:
        assert verdict in spans
    for status in record.STATUSES:
        assert status in spans
    documented = set(re.findall(r"^\* `(\w+)`: one row", text, re.MULTILINE))
    assert documented == set(VIEWS) - {"kernel_groups", "sample_summary"}


def test_configs_page_lists_all_tokens() -> None:
    text = TEXT["docs/configs.md"]
    spans = set(re.findall(r"`([^`\n]+)`", FENCE.sub("", text)))
    assert spans >= {*config.CONFIG_DTYPES, *config.FLAGS, *config.LAYOUTS}
    assert spans >= {f"mask={mask}" for mask in config.MASKS if mask != "none"}
    for key in config.KEYED:
        assert any(span.startswith(f"{key}=") for span in spans), key


def test_the_threshold_is_the_documented_one() -> None:
    assert f"{stats.THRESHOLD * 100:g} % unless `--threshold`" in TEXT["docs/measuring.md"]


def test_pre_commit_runs_the_checks_of_make() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.search(r"^TORCH \?= (.*)$", makefile, re.MULTILINE)
    assert found
    target = makefile.partition("\ncheck:")[2].partition("\n\n")[0]
    commands = [line.strip() for line in target.splitlines()[1:]]
    in_full = [
        line.replace("$(BIN)", ".venv/bin").replace("'$(TORCH)'", found[1]) for line in commands
    ]
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert re.findall(r"^ +entry: (.*)$", hooks, re.MULTILINE) == in_full


def test_the_readme_is_short() -> None:
    assert len(TEXT["README.md"].splitlines()) <= 150
