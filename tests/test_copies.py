"""Knowledge that is defined once: lists of names, the type of a reason, starting and ending processes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from profharness import dtypes, rows
from profharness.attention import config

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "profharness"
NAMES = {
    frozenset(names): name
    for name, names in {
        "config.SDPA_BACKENDS": config.SDPA_BACKENDS,
        "config.OWN_CHOICE": config.OWN_CHOICE,
        "dtypes.CONFIG_DTYPES": dtypes.CONFIG_DTYPES,
        "rows.TRACE_PROFILERS": rows.TRACE_PROFILERS,
        "rows.MEASUREMENTS": set(rows.MEASUREMENTS) - {rows.EVENT},  # a name of older runs
    }.items()
}
DERIVED = {  # derived from other names in the same module
    "config.SDPA_BACKENDS",
    "config.OWN_CHOICE",
    "rows.TRACE_PROFILERS",
}
# Lists of the same names that are independent facts.
OTHER_FACTS = {
    (
        "attention/dispatch/predict.py",
        "config.SDPA_BACKENDS",
    ): "the orders of preference, by release",
    (
        "attention/dispatch/rules.py",
        "dtypes.CONFIG_DTYPES",
    ): "what efficient computes in, in PyTorch's order",
}


def files() -> Iterator[tuple[str, ast.Module]]:
    """Yield each file of the package, as a relative path, with its syntax tree."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text(encoding="utf-8"))


def strings(node: ast.AST) -> frozenset[str]:
    """Return the strings of a tuple, list or set that contains nothing else."""
    elements = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else []
    texts = [each.value for each in elements if isinstance(each, ast.Constant)]
    whole = len(texts) == len(elements) and all(isinstance(text, str) for text in texts)
    return frozenset(map(str, texts)) if whole else frozenset()


def test_lists_of_names_are_defined_once() -> None:
    assert all(len(names) > 1 for names in NAMES)
    found: dict[tuple[str, str], list[int]] = {}
    for path, tree in files():
        for node in ast.walk(tree):
            name = NAMES.get(strings(node))
            if name is not None:
                found.setdefault((path, name), []).append(getattr(node, "lineno", 0))
    listed = {*NAMES.values()} - DERIVED
    homes = {(f"{name.split('.')[0]}.py", name): [1] for name in listed}
    assert {key: len(found.pop(key)) for key in homes} == dict.fromkeys(homes, 1)
    assert {key for key in OTHER_FACTS if key not in found} == set()
    copies = [
        f"{path}:{lines}: {name}"
        for (path, name), lines in found.items()
        if (path, name) not in OTHER_FACTS
    ]
    assert not copies, "\n".join(copies)


def test_there_is_one_type_for_reasons() -> None:
    types = [
        f"{path}:{node.lineno}"
        for path, tree in files()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and fields(node) == {"code", "message", "source"}
    ]
    assert len(types) == 1, types
    assert types[0].startswith("rows.py:")


def fields(node: ast.ClassDef) -> set[str]:
    """Return the annotated names of a class."""
    return {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }


def test_one_file_ends_processes_and_creates_their_environment() -> None:
    wrong = []
    for path, tree in files():
        for node in ast.walk(tree):
            ends = isinstance(node, ast.Attribute) and node.attr == "killpg"
            makes = isinstance(node, ast.Constant) and node.value == "PYTHONPATH"
            if ends or makes:
                wrong.append(f"{path}:{node.lineno}")
    # foreign_python.py removes the path of the Python that started it from its own environment
    homes = ("processes.py:", "recording/worker/foreign_python.py:")
    assert [place for place in wrong if not place.startswith(homes)] == []
    assert wrong
