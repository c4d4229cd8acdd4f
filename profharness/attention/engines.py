"""The rules by which serving engines select an attention backend, per release.

`scripts/import_engine_rules.py` writes the tables in `engine_rules/` from the source of the
releases. A table lists the candidates in the order in which the engine tries them, and the
conditions under which the engine refuses each candidate. The engine takes the first candidate that
passes all conditions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import msgspec

from profharness.attention.config import Config
from profharness.errors import UsageError, join_few

FOLDER = Path(__file__).with_name("engine_rules")
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
# How many numbers identify a line of releases. vLLM 0.25.1 belongs to the line 0.25. In SGLang, each
# release is its own line.
LINE_NUMBERS = {"vllm": 2, "sglang": 3}
FLASH_ATTN = "FLASH_ATTN"
AMD = "gfx"  # prefix of AMD's architectures, which the tables contain in place of capabilities
FEW_HEADS = 16  # vLLM orders the sparse MLA backends by whether a GPU has at most 16 query heads
DEFAULT_DTYPE = "bf16"  # engines run a model in the dtype of its weights
HEAD_DIM_STEP = 8  # the tables cover every multiple of 8
HEAD_DIM_MAX = 1024


@dataclass(frozen=True)
class Candidate:
    """One backend that an engine considers, and the engine's reasons against it."""

    backend: str
    reasons: tuple[str, ...]
    """Empty if the engine accepts the backend. The first reason is the most general."""
    since: str
    """The first release with these rules for the backend."""


@dataclass(frozen=True)
class Selection:
    """The backend that one release of an engine selects for a config on a GPU."""

    engine: str
    release: str
    config: str
    gpu: str
    capability: str
    candidates: tuple[Candidate, ...]
    """The candidates, in the order in which the engine tries them."""
    variant: str = ""
    """The library version of the chosen backend, such as `FlashAttention 3`, if the rules cover the
    version.
    """
    doubts: tuple[str, ...] = ()

    @property
    def chosen(self) -> str | None:
        """The first candidate that the engine accepts, or None."""
        return next((each.backend for each in self.candidates if not each.reasons), None)


@dataclass(frozen=True)
class Rules:
    """The rule tables of one engine."""

    engine: str
    releases: tuple[str, ...]
    """Oldest first."""
    orders: tuple[dict[str, Any], ...]
    refusals: tuple[dict[str, Any], ...]
    flash_versions: tuple[dict[str, Any], ...]

    @cached_property
    def places(self) -> dict[str, int]:
        return {release: place for place, release in enumerate(self.releases)}

    def rows(
        self, table: tuple[dict[str, Any], ...], release: str, capability: str, **equal: Any
    ) -> Iterator[dict[str, Any]]:
        """Yield the rows of a table that apply to a release and a capability."""
        place = self.places[release]
        for row in table:
            within = self.places[row["since"]] <= place <= self.places[row["until"]]
            applies = within and capability in row["capabilities"]
            if applies and all(row[key] == value for key, value in equal.items()):
                yield row

    def candidates(
        self, release: str, capability: str, *, mla: bool, facts: Mapping[str, Any]
    ) -> list[Candidate]:
        """Return the candidates, with the reasons against each, in the order of the engine.

        `facts` has `heads`, `head_dim`, `dtype`, `kv_dtype`, `page`, `sinks`, `causal` and `window`.
        A rule about a missing fact does not apply. Return an empty list if no rule covers the
        capability.
        """
        values = {
            "heads": FEW_HEADS if facts.get("heads", FEW_HEADS + 1) <= FEW_HEADS else 2 * FEW_HEADS,
            "quantized": str(facts.get("kv_dtype", "")).startswith("fp8"),
            "causal": facts.get("causal", True),
            "head_dim": facts["head_dim"],
            "aiter": facts.get("aiter", False),  # whether VLLM_ROCM_USE_AITER is set, on AMD GPUs
        }
        orders = list(self.rows(self.orders, release, capability, mla=mla))
        exact = [row for row in orders if _matches(row["when"], values)]
        # If the order depends on the head dimension, there is one row for the usual head dimension
        # and one row for the exception.
        found = exact or [row for row in orders if row["when"].get("head_dim") in (128, 576)]
        names = found[0]["backends"] if found else []
        made = []
        for name in names:
            row = next(self.rows(self.refusals, release, capability, mla=mla, backend=name))
            reasons = [each["reason"] for each in row["refusals"] if _refuses(each, facts)]
            made.append(Candidate(name, tuple(dict.fromkeys(reasons)), row["since"]))
        return made

    def flash_version(self, release: str, capability: str, head_dim: int) -> int | None:
        """Return the version of FlashAttention that vLLM's FLASH_ATTN runs, or None if unknown."""
        for row in self.rows(self.flash_versions, release, capability):
            for each in row["versions"]:
                if _within(head_dim, each["head_dim"]):
                    return int(each["version"])
        return None


def _matches(when: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    return all(values[name] == value for name, value in when.items())


def _refuses(refusal: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    for name, values in refusal.items():
        if name == "head_dim" and not _within(facts[name], values):
            return False
        if name not in ("head_dim", "reason") and facts.get(name) not in values:
            return False
    return True


def _within(number: int, spans: list[list[int]]) -> bool:
    """Return whether a number is in one of the spans, each of which is [first, last, step]."""
    return any(
        first <= number <= last and (number - first) % step == 0 for first, last, step in spans
    )


def read_rules(file: Path) -> Rules:
    """Return the rules in a file that `scripts/import_engine_rules.py` wrote."""
    read = msgspec.json.decode(file.read_bytes())
    tables = {name: tuple(read[name]) for name in ("orders", "refusals", "flash_versions")}
    return Rules(read["engine"], tuple(read["releases"]), **tables)


@cache
def rules_of(engine: str) -> Rules:
    """Return the rules of an engine. Raise UsageError if the engine is not in ENGINES."""
    if engine not in ENGINES:
        raise UsageError(f"unknown engine {engine!r}; choose from {', '.join(ENGINES)}")
    return read_rules(FOLDER / f"{engine}.json")


def engine_releases(engine: str, text: str | None) -> list[str]:
    """Parse a text such as `0.25`, `0.25.1`, `0.19..0.32` or `0.19,0.25`. Return the releases.

    A release without its last part stands for the newest release of that line. A range contains the
    newest release of each line. If the text is None, return the newest release. Raise UsageError if
    a release is unknown.
    """
    known = rules_of(engine).releases
    if text is None:
        return [known[-1]]
    found: dict[str, None] = {}
    for part in text.split(","):
        first, dots, last = (each.strip() for each in part.partition(".."))
        if dots:
            low, high = _numbers(first, engine), _numbers(last, engine)
            inside = [each for each in known if low <= _numbers(each, engine) <= _end(high)]
            if not inside:
                raise UsageError(_unknown(engine, part))
            count = LINE_NUMBERS[engine]
            newest = {_numbers(each, engine)[:count]: each for each in inside}
            found |= dict.fromkeys(newest.values())
        else:
            wanted = _numbers(first, engine)
            same = [each for each in known if _numbers(each, engine)[: len(wanted)] == wanted]
            if not same:
                raise UsageError(_unknown(engine, first))
            found[same[-1]] = None
    return sorted(found, key=known.index)


def _numbers(text: str, engine: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d{1,4}(\.\d{1,4}){1,3}", text, re.ASCII):
        raise UsageError(f"invalid release {text!r} of {ENGINES[engine]}; write, for example, 0.25")
    return tuple(map(int, text.split(".")))


def _end(release: tuple[int, ...]) -> tuple[int, ...]:
    """Return a bound that no release of the same line exceeds."""
    return (*release, 9999)


def _unknown(engine: str, text: str) -> str:
    known = rules_of(engine).releases
    return (
        f"the rules do not cover {ENGINES[engine]} {text}; they cover {known[0]} to {known[-1]}: "
        f"{join_few(known, len(known))}"
    )


def select(
    engine: str, release: str, config: Config, gpu: str, capability: tuple[int, int] | str
) -> Selection:
    """Return which backend a release of an engine selects for a config on a GPU, and why.

    `capability` is the compute capability, or the architecture of an AMD GPU, such as `gfx942`. The
    config describes one layer on one GPU: its heads are the query heads of that GPU. `page` is
    treated as set by the user (`--block-size`). Raise UsageError if the rules do not cover the GPU.
    """
    rules = rules_of(engine)
    amd = isinstance(capability, str)
    number = capability if isinstance(capability, str) else "{}.{}".format(*capability)
    head_dim = sum(config.mla) if config.mla else config.head_dim
    facts = {
        "heads": config.num_heads,
        "head_dim": head_dim,
        "dtype": config.dtype or DEFAULT_DTYPE,
        "kv_dtype": config.kv_dtype or "auto",
        "page": config.page,
        "sinks": config.sinks,
        "causal": _is_causal(config),
        "window": config.window is not None,
    }
    candidates = rules.candidates(release, number, mla=bool(config.mla), facts=facts)
    if not candidates and amd:
        raise UsageError(_no_amd(rules, release, gpu, number))
    if not candidates:
        capabilities = {each for row in rules.orders for each in row["capabilities"]}
        covered = sorted((each for each in capabilities if not each.startswith(AMD)), key=float)
        raise UsageError(
            f"the rules of {ENGINES[engine]} do not cover {gpu} (compute capability {number}); they "
            f"cover {', '.join(covered)}"
        )
    doubts: list[str] = []
    if amd:
        facts["aiter"] = True
        others = rules.candidates(release, number, mla=bool(config.mla), facts=facts)
        doubts += _aiter_doubt(candidates, others)
    if head_dim % HEAD_DIM_STEP or head_dim > HEAD_DIM_MAX:
        doubts.append(
            f"the rules cover head dimensions up to {HEAD_DIM_MAX} in steps of {HEAD_DIM_STEP}, not "
            f"{head_dim}"
        )
    if not facts["causal"]:
        doubts.append("the config is bidirectional; for a decoder, add causal")
    made = Selection(
        engine, release, config.label, gpu, number, tuple(candidates), doubts=tuple(doubts)
    )
    version = rules.flash_version(release, number, head_dim)
    if made.chosen == FLASH_ATTN and version is not None:
        return replace(made, variant=f"FlashAttention {version}")
    return made


def _aiter_doubt(candidates: list[Candidate], with_aiter: list[Candidate]) -> Iterator[str]:
    """Yield a sentence about the effect of VLLM_ROCM_USE_AITER=1, if there is an effect."""
    names = {each.backend for each in candidates}
    added = [each.backend for each in with_aiter if each.backend not in names]
    if not added:
        return
    runs = next((each.backend for each in with_aiter if not each.reasons), "no backend")
    yield (
        "The answer assumes that VLLM_ROCM_USE_AITER is unset and the AITER library is installed. "
        f"With VLLM_ROCM_USE_AITER=1, vLLM also considers {' and '.join(added)} and runs {runs}"
    )


def _no_amd(rules: Rules, release: str, gpu: str, architecture: str) -> str:
    """Return why no rule covers an AMD GPU in a release."""
    name = ENGINES[rules.engine]
    rows = [row for row in rules.orders if row["capabilities"][0].startswith(AMD)]
    if not rows:
        return f"the rules of {name} do not cover AMD GPUs; give an NVIDIA GPU, such as --gpu H100"
    known = sorted({each for row in rows for each in row["capabilities"]})
    if architecture not in known:
        return f"the rules of {name} do not cover {gpu} ({architecture}); they cover {', '.join(known)}"
    places = [rules.places[row[end]] for row in rows for end in ("since", "until")]
    first, last = rules.releases[min(places)], rules.releases[max(places)]
    return (
        f"the rules of {name} {release} do not cover AMD GPUs, but those of releases "
        f"{first} to {last} do"
    )


def _is_causal(config: Config) -> bool:
    """Return whether the layer belongs to a decoder. One query per request is always causal."""
    return config.causal or config.seq_len_q == 1 or config.window is not None
