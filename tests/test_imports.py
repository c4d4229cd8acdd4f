"""The import rule of docs/design.md, read from its two tables and compared with the code."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "profharness"
DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
TRACE = ROOT / "tests" / "data" / "kineto_h200.json.gz"

BESIDE = {"recording.worker", "recording.observer"}  # not in a layer, with their own rules
HEAVY = ("torch", "triton", "pandas", "sqlite_utils", "distributed")
PROBE = """
import json, sys
{work}
print("\\n" + json.dumps([name for name in {heavy!r} if name in sys.modules]))
"""
COMMAND = "from profharness.cli import cli\ncli.main({arguments!r}, standalone_mode=False)"


def table(heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading of the design page, without its header
    rows. A cell is a list of the names in backticks.
    """
    _, _, below = DESIGN.partition(f"### {heading}\n")
    assert below, f"docs/design.md has no heading {heading!r}"
    rows = re.search(r"(?:^\|.*\n)+", below, re.MULTILINE)
    assert rows, f"no table below {heading!r}"
    cells = [line.strip("|").split("|") for line in rows.group().splitlines()[2:]]
    return [[" ".join(re.findall(r"`([\w.]+)`", cell)) for cell in row] for row in cells]


LAYERS = [set(cell.split()) for _, cell in table("Layers")]
RANK = {unit: rank for rank, units in enumerate(LAYERS) for unit in units}
ONLY_IN = {library: set(units.split()) for library, units in table("Restricted libraries")}


def unit_of(place: Path | str) -> str:
    """Return the unit of a file or of a dotted module: `store` for `profharness/store/schema.py`,
    `attention.config` for `profharness.attention.config`. The tables name some parts of folders.
    """
    parts = place.split(".")[1:] if isinstance(place, str) else place.relative_to(PACKAGE).parts
    first, *rest = (part.removesuffix(".py") for part in parts)
    part = f"{first}.{rest[0]}" if rest else first
    return part if part in RANK or part in BESIDE else first


def nodes(tree: ast.AST, typing_only: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Yield every node, and whether it is below `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(tree):
        below = typing_only or (
            isinstance(child, ast.If)
            and isinstance(child.test, ast.Name)
            and child.test.id == "TYPE_CHECKING"
        )
        yield child, below
        yield from nodes(child, below)


def imported(path: Path) -> Iterator[tuple[str, bool, int]]:
    """Yield (dotted module, only for type checking, line) of every import in a file, including
    those in functions. `from profharness import x` is `profharness.x`.
    """
    for node, typing_only in nodes(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} is a relative import"
            module = str(node.module)
            bare = module == "profharness"
            names = [f"{module}.{alias.name}" for alias in node.names] if bare else [module]
        else:
            continue
        for name in names:
            yield name, typing_only, getattr(node, "lineno", 0)


def everything() -> Iterator[tuple[Path, str, bool, int]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for name, typing_only, line in imported(path):
            yield path, name, typing_only, line


def test_the_page_names_exactly_the_modules() -> None:
    real = {unit_of(path) for path in PACKAGE.rglob("*.py")} - {"__init__", "__main__"}
    assert set(RANK) | BESIDE == real


def test_imports_go_to_lower_layers_only() -> None:
    wrong = []
    checked = 0
    for path, name, _, line in everything():
        unit = unit_of(path)
        parts = name.split(".")
        if parts[0] != "profharness" or len(parts) < 2 or parts[1].startswith("__"):
            continue
        other = unit_of(name)
        if other == unit or unit in ("__init__", "__main__"):
            continue
        checked += 1
        if unit in BESIDE:
            continue
        if RANK.get(other, len(LAYERS)) >= RANK[unit]:
            wrong.append(f"{path.relative_to(ROOT)}:{line}: {unit} imports {other}")
    assert checked > 50
    assert not wrong, "\n".join(wrong)


def test_the_store_does_not_import_answers() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path, name, _, line in everything()
        if unit_of(path) == "store" and name.startswith("profharness.attention.dispatch")
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("inside", sorted(BESIDE))
def test_the_worker_is_started_and_never_imported(inside: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path, name, _, line in everything()
        if name.startswith(f"profharness.{inside}") and unit_of(path) != inside
    ]
    assert not wrong, "\n".join(wrong)


def test_the_observer_imports_the_standard_library_torch_and_itself() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, name, _, line in everything()
        if unit_of(path) == "recording.observer"
        and name.split(".")[0] not in {*sys.stdlib_module_names, "torch"}
        and not name.startswith("profharness.recording.observer")
        and path.stem != "fixture"  # pytest imports it
    ]
    assert not wrong, "\n".join(wrong)


def test_the_worker_imports_from_the_lowest_four_layers() -> None:
    below = {
        unit_of(name)
        for path, name, _, _ in everything()
        if unit_of(path) == "recording.worker" and name.startswith("profharness.")
    } - {"recording.worker"}
    assert "run" in below
    assert {unit: RANK[unit] for unit in below if RANK[unit] > RANK["run"]} == {}


def test_libraries_are_imported_in_their_places() -> None:
    assert {"torch", "triton", "pandas", "click", "sqlite_utils"} <= set(ONLY_IN)
    wrong = []
    for path, name, typing_only, line in everything():
        library = name.split(".")[0]
        if typing_only or library not in ONLY_IN:
            continue
        if unit_of(path) not in ONLY_IN[library]:
            wrong.append(f"{path.relative_to(ROOT)}:{line}: {library}")
    assert not wrong, "\n".join(wrong)


def test_distributed_is_imported_in_one_file() -> None:
    places = {path for path, name, _, _ in everything() if name.split(".")[0] == "distributed"}
    assert places == {PACKAGE / "jobs" / "cluster.py"}


def test_children_start_and_process_groups_end_in_one_module() -> None:
    def places(pattern: str) -> set[str]:
        return {
            path.relative_to(PACKAGE).as_posix()
            for path in PACKAGE.rglob("*.py")
            if re.search(pattern, path.read_text(encoding="utf-8"))
        }

    starts = r"subprocess\.(?:Popen|run|call|check_\w+)\(|os\.(?:killpg|system)\b"
    assert places(starts) == {"processes.py"}
    assert places(r"os\.fork\b") == {"commands/serve/requests.py"}  # a copy of the server itself


def test_torch_is_imported_only_in_functions_outside_of_the_worker() -> None:
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if unit_of(path) in BESIDE:
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] in ("torch", "triton") for name in names):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong, "\n".join(wrong)


def loaded(work: str, folder: Path, watched: tuple[str, ...] = HEAVY) -> list[str]:
    """Return which of the watched modules a fresh interpreter has loaded after running `work`."""
    code = PROBE.format(work=work, heavy=watched)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr
    names: list[str] = json.loads(done.stdout.splitlines()[-1])
    return names


@pytest.mark.parametrize(
    "work",
    [
        "import profharness\nassert 'capture' in dir(profharness)",
        "import profharness.commands._python",
        *(
            COMMAND.format(arguments=arguments)
            for arguments in (["--help"], ["capture", "--help"], ["kernels", "--help"])
        ),
    ],
    ids=["import", "api", "help", "capture-help", "kernels-help"],
)
def test_a_start_loads_nothing_heavy(work: str, tmp_path: Path) -> None:
    assert loaded(work, tmp_path) == []


def test_reading_a_store_loads_nothing_heavy(tmp_path: Path) -> None:
    store = ["--store", str(tmp_path / "store.db")]
    ingest = loaded(COMMAND.format(arguments=["ingest", str(TRACE), *store]), tmp_path)
    assert ingest == ["sqlite_utils"]
    for command in ("kernels", "runs"):
        assert loaded(COMMAND.format(arguments=[command, *store]), tmp_path) == []


def test_kernels_load_the_dispatch_rules_only_if_they_apply(tmp_path: Path) -> None:
    watched = (
        "profharness.attention.dispatch",
        "profharness.attention.backends",
        "profharness.render.html",
        "cxxfilt",
    )
    folder = ROOT / "traces" / "h200-torch2.11"
    for source, rules in ((TRACE, []), (folder, ["profharness.attention.dispatch"])):
        store = ["--store", str(tmp_path / f"{source.name}.db")]
        loaded(COMMAND.format(arguments=["ingest", str(source), *store]), tmp_path)
        work = COMMAND.format(arguments=["kernels", *store])
        assert loaded(work, tmp_path, watched) == rules
