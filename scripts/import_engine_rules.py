"""Import the rules by which serving engines select an attention backend.

    python scripts/import_engine_rules.py vllm SOURCE...
    python scripts/import_engine_rules.py sglang SOURCE...

A SOURCE is a source archive or a wheel of one release, such as `vllm-0.25.0.tar.gz`, or a folder
whose name ends with the release (`vllm-0.25.0`). `pip download --no-deps --no-binary :all: vllm==0.25.0`
gets an archive. The rules replace `profharness/attention/engine_rules/ENGINE.json`.

With --amd, only vLLM's selection on AMD GPUs is queried. The new rules replace the rules for AMD
GPUs in the file; the other rules stay. The sources are then consecutive releases that the file
covers.

For vLLM, `scripts/ask_vllm.py` calls the functions of each release. For SGLang, this script
evaluates the chain of conditions in the function that selects the default backend. No file of an
engine is copied.

The last line reports a check: the tables are compared with the functions of each release, on random
configs from which the tables were not made.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

RULES = Path(__file__).parents[1] / "profharness" / "attention" / "engine_rules"
ASK_VLLM = Path(__file__).with_name("ask_vllm.py")
SAMPLE = 200  # random configs per release, capability and kind of attention
SEED = 20261126
TIMEOUT_S = 300
CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1")
OTHER_DEVICES = ("ascend", "intel_amx", "intel_xpu", "torch_native", "aiter")


def release_of(source: Path) -> tuple[int, ...]:
    """Return the release in the name of a source. Raise SystemExit if there is none."""
    found = re.search(r"-(\d+(?:\.\d+)+)", source.name)
    if found is None:
        raise SystemExit(
            f"{source}: its name contains no release; rename it, for example, to vllm-0.25.0.tar.gz"
        )
    return tuple(map(int, found[1].split(".")))


def python_files(source: Path) -> Iterator[tuple[str, str]]:
    """Yield (path below the folder of the release, text) of each Python file of a source."""
    if source.is_dir():
        for file in source.rglob("*.py"):
            yield str(file.relative_to(source)), file.read_text(errors="replace")
    elif source.suffix == ".whl":
        with zipfile.ZipFile(source) as wheel:
            for name in wheel.namelist():
                if name.endswith(".py"):
                    yield name, wheel.read(name).decode(errors="replace")
    else:
        with tarfile.open(source) as archive:
            for member in archive:
                file = archive.extractfile(member) if member.name.endswith(".py") else None
                if file is not None:
                    yield member.name.partition("/")[2], file.read().decode(errors="replace")


def ask_vllm(source: Path, *, amd: bool = False) -> dict[str, Any]:
    """Return what `ask_vllm.py` prints for one release."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in python_files(source):
            if name.startswith("vllm/") and ".." not in Path(name).parts:
                file = Path(folder, name)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
        command = [sys.executable, str(ASK_VLLM), folder, str(SEED), str(SAMPLE)]
        command += ["amd"] if amd else []
        ran = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if ran.returncode:
        raise SystemExit(f"{source}: {ran.stderr.strip().splitlines()[-1]}")
    answer: dict[str, Any] = json.loads(ran.stdout)
    return answer


class UnknownNameError(Exception):
    """A condition in an engine's source uses a name that this script does not know."""


def default_chain(source: Path) -> ast.If:
    """Return the statement of SGLang that selects the default backend."""
    for name, text in python_files(source):
        if "/srt/" not in name or "use_mla_backend" not in text or "fa3" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.If) and "use_mla_backend" in ast.unparse(node.test):
                words = set(_constants(node))
                if {"fa3", "triton", "flashinfer"} <= words and isinstance(node.test, ast.UnaryOp):
                    return node
    raise SystemExit(f"{source}: no statement that selects the default attention backend")


def _constants(node: ast.AST) -> Iterator[str]:
    """Yield the strings of a node, in the order of the source."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    for child in ast.iter_child_nodes(node):
        yield from _constants(child)


def choose(statements: Iterable[ast.stmt], facts: dict[str, Any]) -> str | None:
    """Return the backend that statements of SGLang assign or return, under these facts.

    `facts` maps the last part of a name, such as `is_sm100`, to its value or to the value that a call
    returns. Raise UnknownNameError for another name.
    """
    for statement in statements:
        if isinstance(statement, ast.If):
            branch = statement.body if _value(statement.test, facts) else statement.orelse
            if (made := choose(branch, facts)) is not None:
                return made
        elif isinstance(statement, ast.Return) and statement.value is not None:
            return str(_value(statement.value, facts))
        elif isinstance(statement, ast.Assign):
            target = ast.unparse(statement.targets[0])
            value = _value(statement.value, facts)
            if target.endswith("attention_backend"):
                return str(value)
            facts = {**facts, target: value}
    return None


def _value(node: ast.expr, facts: dict[str, Any]) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.UnaryOp(op=ast.Not()):
            return not _value(node.operand, facts)
        case ast.BoolOp():
            both = isinstance(node.op, ast.And)
            for each in node.values:  # like Python, without evaluating the rest
                if bool(_value(each, facts)) is not both:
                    return not both
            return both
        case ast.Compare(ops=[operator], comparators=[other]):
            left, right = _value(node.left, facts), _value(other, facts)
            compared: dict[type, Callable[[], bool]] = {
                ast.Is: lambda: left is right,
                ast.IsNot: lambda: left is not right,
                ast.Eq: lambda: left == right,
            }
            return compared[type(operator)]()
        case ast.IfExp():
            return _value(node.body if _value(node.test, facts) else node.orelse, facts)
        case ast.Call():
            return _value(node.func, facts)
        case ast.Name() | ast.Attribute():
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in facts:
                return facts[name]
    raise UnknownNameError(ast.unparse(node))


def facts_of(capability: str, *, mla: bool, sinks: bool) -> dict[str, Any]:
    """Return the facts for a model without speculation and without a special architecture."""
    major = int(capability.split(".")[0])
    return {
        "use_mla_backend": mla,
        "has_attention_sinks": sinks,
        "is_hopper_with_cuda_12_3": major == 9,
        **dict.fromkeys(("is_sm100", "is_sm100_supported"), major == 10),
        **dict.fromkeys(("is_hip", "_is_hip", "is_npu", "_is_npu", "is_mps"), False),
        **dict.fromkeys(("is_flashinfer_available", "has_flashinfer"), True),
        **dict.fromkeys(("is_no_spec_infer_or_topk_one", "is_fa3_default_architecture"), True),
        "speculative_algorithm": None,
        "enable_hierarchical_cache": False,
        "has_asymmetric_kv": False,
    }


def ask_sglang(source: Path) -> dict[str, Any]:
    """Return the rules of one release of SGLang, in the form of `ask_vllm.py`."""
    chain = default_chain(source)
    answer: dict[str, Any] = {"orders": [], "refusals": [], "flash_versions": [], "sample": []}
    for mla in (False, True):
        chosen = {
            (capability, sinks): str(choose([chain], facts_of(capability, mla=mla, sinks=sinks)))
            for capability, sinks in itertools.product(CAPABILITIES, (False, True))
        }
        branch = chain.orelse if mla else chain.body
        words = [word for statement in branch for word in _constants(statement)]
        order = [name for name in dict.fromkeys(words) if name in chosen.values()]
        order += [name for name in ("triton",) if name not in order]
        for capability in CAPABILITIES:
            where = {"capability": capability, "mla": mla}
            answer["orders"].append({**where, "when": {}, "backends": order})
            for place, backend in enumerate(order):
                refusals = []
                rank = {sinks: order.index(chosen[capability, sinks]) for sinks in (False, True)}
                majors = {
                    each.split(".")[0] for (each, _), name in chosen.items() if name == backend
                }
                if place < min(rank.values()):
                    devices = " and ".join(f"{major}.x" for major in sorted(majors, key=int))
                    refusals.append({"reason": f"the default only on SM {devices}"})
                elif place < rank[True]:
                    reason = "the default only for models without sinks"
                    refusals.append({"sinks": [True], "reason": reason})
                answer["refusals"].append({**where, "backend": backend, "refusals": refusals})
            for sinks in (False, True):
                config = {"sinks": sinks, "heads": 32, "head_dim": 576 if mla else 128}
                answer["sample"].append(
                    {**where, "config": config, "chosen": chosen[capability, sinks]}
                )
    return answer


# The tables of an engine, and the keys by which their rows are sorted.
TABLES = {
    "orders": ("mla", "since", "capabilities"),
    "refusals": ("backend", "since", "capabilities"),
    "flash_versions": ("since", "capabilities"),
}


def merged(answers: dict[str, dict[str, Any]], table: str, keys: tuple[str, ...]) -> list[Any]:
    """Return one table for all releases. Equal rows of consecutive releases become one row.

    `answers` maps each release to its answer, oldest first. A row of the result has the first and the
    last release (`since`, `until`) and the capabilities that it applies to.
    """
    releases = list(answers)
    spans: dict[str, list[list[int]]] = {}
    for place, answer in enumerate(answers.values()):
        for row in answer[table]:
            text = json.dumps(row, sort_keys=True)
            if spans.get(text) and spans[text][-1][1] == place - 1:
                spans[text][-1][1] = place
            else:
                spans.setdefault(text, []).append([place, place])
    joined: dict[str, dict[str, Any]] = {}
    for text, places in spans.items():
        row = json.loads(text)
        capability = row.pop("capability")
        for first, last in places:
            made = {"since": releases[first], "until": releases[last], **row}
            held = joined.setdefault(json.dumps(made, sort_keys=True), {**made, "capabilities": []})
            held["capabilities"].append(capability)
    return sorted(joined.values(), key=lambda row: [json.dumps(row[key]) for key in keys])


def check(file: Path, answers: dict[str, dict[str, Any]]) -> tuple[int, int, int]:
    """Compare the written tables with the functions of the engine, on random configs.

    Return how many configs have the same accepted backends in the same order, how many also have the
    same reasons, and how many there are.
    """
    sys.path.insert(0, str(RULES.parents[2]))
    from profharness.attention.engines import read_rules

    accepted = alike = total = 0
    rules = read_rules(file)
    for release, answer in answers.items():
        for case in answer["sample"]:
            config = case["config"]
            found = rules.candidates(release, case["capability"], mla=case["mla"], facts=config)
            total += 1
            if "chosen" in case:
                right = next(each.backend for each in found if not each.reasons) == case["chosen"]
                accepted, alike = accepted + right, alike + right
                continue
            told = {each.backend: sorted(each.reasons) for each in found}
            expected = {name: sorted(reasons) for name, reasons in case["reasons"].items()}
            # The order of a dict does not count in its comparison, but that of a list does.
            if [name for name in told if not told[name]] == [
                name for name in expected if not expected[name]
            ]:
                accepted += 1
            else:
                print(f"{release} {case}: {told}", file=sys.stderr)
            alike += told == expected
    return accepted, alike, total


def with_amd(rules: dict[str, Any], answers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the tables with the rules of AMD GPUs replaced by the rules of the answers. Raise
    SystemExit if the answers do not belong to consecutive releases.
    """
    known = rules["releases"]
    first = known.index(next(iter(answers))) if next(iter(answers)) in known else 0
    if known[first : first + len(answers)] != list(answers):
        raise SystemExit(f"these are not consecutive releases of the file: {', '.join(answers)}")
    made = dict(rules)
    for table, keys in TABLES.items():
        others = [row for row in rules[table] if not row["capabilities"][0].startswith("gfx")]
        rows = others + merged(answers, table, keys)
        made[table] = sorted(rows, key=lambda row: [json.dumps(row[key]) for key in keys])
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("engine", choices=("vllm", "sglang"))
    parser.add_argument("--out", type=Path, default=RULES, help="the folder for the rules")
    parser.add_argument("--amd", action="store_true", help="import only vLLM's rules for AMD GPUs")
    parser.add_argument("sources", nargs="+", type=Path)
    options = parser.parse_args()
    if options.amd and options.engine != "vllm":
        parser.error("--amd asks vLLM")
    ask: Callable[[Path], dict[str, Any]] = ask_vllm if options.engine == "vllm" else ask_sglang
    if options.amd:
        ask = partial(ask_vllm, amd=True)
    answers = {}
    for source in sorted(options.sources, key=release_of):
        release = ".".join(map(str, release_of(source)))
        print(f"{options.engine} {release}", file=sys.stderr)
        answers[release] = ask(source)
    file = options.out / f"{options.engine}.json"
    if options.amd:
        rules = with_amd(json.loads(file.read_text()), answers)
    else:
        rules = {"engine": options.engine, "releases": list(answers)}
        rules |= {table: merged(answers, table, keys) for table, keys in TABLES.items()}
    options.out.mkdir(exist_ok=True)
    lines = [
        f" {json.dumps(table)}: [\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]"
        if isinstance(rows, list) and table != "releases"
        else f" {json.dumps(table)}: {json.dumps(rows)}"
        for table, rows in rules.items()
    ]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    accepted, alike, total = check(file, answers)
    print(
        f"{options.engine}: {len(answers)} releases; of {total:,} random configs, {accepted:,} have the "
        f"same accepted backends, and {alike:,} also the same reasons"
    )


if __name__ == "__main__":
    main()
