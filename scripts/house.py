"""Print the size and structure of the package, or the files whose code a command runs.

python scripts/house.py [--root FOLDER]                figures: files, lines, floors, circles, imports
python scripts/house.py --walk "kernels --config 2,8,512,64" [--root FOLDER]   the files of one command

A walk counts the files of the package in which a function runs, in the process of the command.
Class bodies and code that runs during an import do not count. `stays` is the number of changes
between files when the functions are read in the order of their first call.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

NAME = "profharness"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
IMPORTS = (ast.Import, ast.ImportFrom)

TRACER = """
import atexit, sys, threading
package, report, *arguments = sys.argv[1:]
order = {}

def note(frame, event, _):
    code = frame.f_code
    key = (code.co_filename, code.co_qualname)
    # 2: a function, no class or module body
    if event == "call" and code.co_flags & 2 and key[0].startswith(package) and key not in order:
        if not imported(frame.f_back):
            order[key] = None

def imported(frame):
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(package):
            return True
        frame = frame.f_back
    return False

def write():
    sys.setprofile(None)
    with open(report, "w") as file:
        file.writelines(f"{path}\\t{name}\\n" for path, name in order)

atexit.register(write)
from profharness.cli import main
sys.argv = ["profharness", *arguments]
threading.setprofile(note)
sys.setprofile(note)
main()
"""


def main() -> None:
    """Print the figures of a checkout, or one walk through it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--walk", metavar="COMMAND", help="the arguments of one profharness call")
    asked = parser.parse_args()
    root = asked.root.resolve()
    if asked.walk:
        print_walk(root, shlex.split(asked.walk))
        return
    for name, figure in figures(root / NAME).items():
        print(f"{name:<46}{figure}")


def figures(package: Path) -> dict[str, str]:
    """Return the figures by name."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in package.rglob("*.py")}
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in trees}
    modules = {module_name(package, path): path for path in trees}
    graph = {name: imports(name, trees[path], modules) for name, path in modules.items()}
    units: dict[str, set[str]] = {}
    for name, targets in graph.items():
        units.setdefault(unit(name), set()).update(unit(target) for target in targets)
    units = {
        name: targets - {name, NAME}
        for name, targets in units.items()
        if name not in (NAME, "__main__")
    }
    functions = [
        node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, FUNCTIONS)
    ]
    top = [path for path in package.iterdir() if path.is_dir() or path.suffix == ".py"]
    top = [path for path in top if path.name != "__pycache__"]
    inner = {
        node for function in functions for node in ast.walk(function) if isinstance(node, IMPORTS)
    }
    longest = max(lines, key=lambda path: lines[path])
    return {
        "files": f"{len(trees)}",
        "lines": f"{sum(lines.values()):,}",
        "longest file": f"{lines[longest]} ({longest.relative_to(package)})",
        "functions": f"{len(functions):,}",
        "longest function": f"{max(node.end_lineno - node.lineno + 1 for node in functions)}",  # type: ignore[operator]
        "names at the top": f"{len(top)}",
        "import floors": f"{max(floor(name, units) for name in units)}",
        "circles of files, type checking counted": f"{len(circles(graph))}",
        "circles of folders, type checking counted": f"{len(circles(units))}",
        "imports inside functions": f"{len(inner)}",
    }


def module_name(package: Path, path: Path) -> str:
    """Return the dotted name of a file, such as `profharness.store.schema`."""
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def unit(module: str) -> str:
    """Return the top-level folder or module that a module belongs to."""
    return module.split(".")[1] if "." in module else NAME


def imports(module: str, tree: ast.AST, modules: Mapping[str, Path]) -> set[str]:
    """Return the modules of the package that a module imports anywhere."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else str(node.module) for name in names}
    return (found & set(modules)) - {module}


def floor(name: str, units: Mapping[str, Set[str]], above: frozenset[str] = frozenset()) -> int:
    """Return 1 for a unit that imports nothing else of the package, else one more than the highest
    unit that it imports.
    """
    below = [target for target in units.get(name, ()) if target not in above]
    return 1 + max((floor(target, units, above | {name}) for target in below), default=0)


def circles(graph: Mapping[str, Set[str]]) -> list[set[str]]:
    """Return the groups of names that reach each other."""
    reach = {name: reached(name, graph) for name in graph}
    groups = {
        frozenset({name, *(other for other in reach[name] if name in reach.get(other, ()))})
        for name in graph
    }
    return [set(group) for group in groups if len(group) > 1]


def reached(name: str, graph: Mapping[str, Set[str]]) -> set[str]:
    """Return every name that can be reached along the edges."""
    seen: set[str] = set()
    todo = [name]
    while todo:
        for target in graph.get(todo.pop(), ()):
            if target not in seen:
                seen.add(target)
                todo.append(target)
    return seen


def print_walk(root: Path, arguments: list[str]) -> None:
    """Run one command in a process that records its functions, and print them."""
    seen = list(walked(root, arguments))
    files = list(dict.fromkeys(path for path, _ in seen))
    stays = sum(one != other for (one, _), (other, _) in itertools.pairwise(seen)) + 1
    for path in files:
        print(f"{sum(path == other for other, _ in seen):>5}  {path}")
    folders = {str(Path(path).parent) for path in files}
    print(f"{len(seen)} functions, {len(files)} files, {len(folders)} folders, {stays} stays")


def walked(root: Path, arguments: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (file in the package, function) in the order of first calls. The command's output goes
    to stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "walk"
        package = str(root / NAME)
        command = [sys.executable, "-c", TRACER, package, str(report), *arguments]
        subprocess.run(command, cwd=root, stdout=sys.stderr, check=False)
        for line in report.read_text(encoding="utf-8").splitlines():
            path, _, name = line.partition("\t")
            yield str(Path(path).relative_to(package)), name


if __name__ == "__main__":
    main()
