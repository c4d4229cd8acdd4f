"""Parse the annotations that serving engines put around their steps.

vLLM, SGLang, ATOM, TensorRT-LLM and xDiT open a range around each step, and its name describes the
batch. The forms are those of vLLM's `gpu_worker.py` and `gpu_model_runner.py`, of SGLang's
`model_runner.py`, and of the patches and engines that TraceLens supports.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from profharness.traces.engine_log import SGLANG, VLLM

PREFILL, DECODE, MIXED, VERIFY = "prefill", "decode", "mixed", "verify"
DRAFT, DIFFUSION, STEP_IDLE, CAPTURE = "draft", "diffusion", "idle", "capture"


@dataclass(frozen=True, slots=True)
class BatchPart:
    """The requests of a step that are prefilled, or the requests that are decoded.

    A request computes q new tokens, and attends to k tokens, which include the new ones. A field is
    None if the annotation does not contain it. SGLang computes k as `extend_prefix_lens +
    extend_seq_lens` when it prefills and as `seq_lens` when it decodes (sgl-project/sglang#24911).
    """

    requests: int | None
    queries: int | None = None
    """Sum of q: the number of new tokens."""
    keys: int | None = None
    """Sum of k."""
    squares: int | None = None
    """Sum of q²."""
    products: int | None = None
    """Sum of q·k."""

    @property
    def scores(self) -> int | None:
        """The number of scores that one head computes, or None if a sum is unknown.

        New tokens see the tokens before them and themselves, so a request has
        q·k − q·(q − 1) / 2 scores.
        """
        if self.queries is None or self.squares is None or self.products is None:
            return None
        return self.products - (self.squares - self.queries) // 2


@dataclass(frozen=True, slots=True)
class EngineStep:
    """The batch of a step, as described by the annotation.

    `prefill` and `decode` are None if the step has no such requests.
    """

    phase: str
    """`prefill`, `decode`, `mixed`, `verify` (decoding that checks drafted tokens), `draft`,
    `diffusion`, `idle` or `capture` (of a CUDA graph).
    """
    prefill: BatchPart | None = None
    decode: BatchPart | None = None

    @property
    def requests(self) -> int | None:
        """The number of requests, or None if it is unknown."""
        return self._sum("requests")

    @property
    def new_tokens(self) -> int | None:
        """The number of tokens that the step computes, or None if it is unknown."""
        return self._sum("queries")

    @property
    def keys(self) -> int | None:
        """The number of tokens that the requests attend to, or None if it is unknown."""
        return self._sum("keys")

    def _sum(self, field: str) -> int | None:
        parts = [getattr(part, field) for part in (self.prefill, self.decode) if part]
        return None if not parts or None in parts else sum(parts)


_SUMS = r"sq(\d+)sk(\d+)sqsq(\d+)sqsk(\d+)"
# Some versions of vLLM append a second sum to the number of tokens, as in context_1(888_788544)
_TOKENS = r"(\d+)(?:_\d+)?"
_PAIR = re.compile(r"(\w+)=(\d+)")
# The modes of SGLang's ForwardMode
_MODES = {
    "EXTEND": PREFILL,
    "SPLIT_PREFILL": PREFILL,
    "DLLM_EXTEND": PREFILL,
    "PREBUILT": PREFILL,
    "DECODE": DECODE,
    "MIXED": MIXED,
    "TARGET_VERIFY": VERIFY,
    "DRAFT_EXTEND": DRAFT,
    "DRAFT_EXTEND_V2": DRAFT,
    "IDLE": STEP_IDLE,
}


_WORDS = frozenset(
    re.findall(
        r"\w+",
        "execute context generation new cached diffusion capture FULL PIECEWISE mixed Executor "
        "forward step ctx gen reqs x sq sk sqsq sqsk bs tok toks c g p d spec tbo prefill decode",
    )
) | {word for mode in _MODES for word in re.findall("[A-Za-z]+", mode)}
"""The words that engines use in annotations."""


def parse_engine_step(name: str) -> EngineStep | None:
    """Parse the name of a range. Return None if it is not the name of an engine's step."""
    for form, build, _ in _FORMS:
        if match := form.fullmatch(name):
            return build(match)
    return None


def engine_of_step(name: str) -> str | None:
    """Return the engine that gives its steps such a name, or None if this is not certain."""
    return next((engine for form, _, engine in _FORMS if form.fullmatch(name)), None)


def is_engine_step(name: str) -> bool:
    """Return whether a name is the name of an engine's step.

    The capture of a graph is not a step.
    """
    step = parse_engine_step(name)
    return step is not None and step.phase != CAPTURE


def has_only_numbers(name: str) -> bool:
    """Return whether a name is the name of an engine's step and contains nothing but the batch."""
    words = set(re.findall(r"[A-Za-z]+", name))
    return words <= _WORDS and parse_engine_step(name) is not None


def _of_parts(prefill: BatchPart, decode: BatchPart) -> EngineStep:
    """Return the step that consists of two parts, either of which may be empty."""
    has_prefill, has_decode = bool(prefill.requests), bool(decode.requests)
    drafted = (decode.queries or 0) > (decode.requests or 0)
    if has_prefill:
        phase = MIXED if has_decode else PREFILL
    else:
        phase = (VERIFY if drafted else DECODE) if has_decode else STEP_IDLE
    return EngineStep(phase, prefill if has_prefill else None, decode if has_decode else None)


def _sums(match: re.Match[str]) -> EngineStep:
    numbers = list(map(int, match.groups()))
    return _of_parts(BatchPart(*numbers[:5]), BatchPart(*numbers[5:]))


def _tokens(match: re.Match[str]) -> EngineStep:
    numbers = list(map(int, match.groups()))
    return _of_parts(BatchPart(*numbers[:2]), BatchPart(*numbers[2:]))


def _requests(match: re.Match[str]) -> EngineStep:
    prefill, decode = map(int, match.groups())
    return _of_parts(BatchPart(prefill), BatchPart(decode))


def _part(numbers: Mapping[str, int], requests: int | None, prefix: str = "") -> BatchPart:
    sums = (numbers.get(prefix + key) for key in ("sq", "sk", "sqsq", "sqsk"))
    return BatchPart(requests, *sums)


def _sglang(match: re.Match[str]) -> EngineStep:
    phase = _MODES.get(match[1], match[1].lower())
    numbers = {key: int(value) for key, value in _PAIR.findall(match[2])}
    requests = numbers.get("bs")
    if phase == MIXED and "c" in numbers:
        prefill = _part(numbers, numbers["c"], "c_")
        return _of_parts(prefill, _part(numbers, numbers.get("g"), "g_"))
    if phase in (PREFILL, MIXED):  # without sums, a mixed step tells only the size of the batch
        tokens = {"c_sq": numbers["toks"]} if "toks" in numbers else {}
        return EngineStep(phase, _part(tokens | numbers, requests, "c_"))
    if phase == DECODE and requests:  # a request decodes one token, or checks several drafted ones
        return _of_parts(BatchPart(0), _part({"g_sq": requests} | numbers, requests, "g_"))
    return EngineStep(phase, decode=_part(numbers, requests, "g_") if requests else None)


def _atom(match: re.Match[str]) -> EngineStep:
    numbers = {key: int(value) for key, value in _PAIR.findall(match[2])}
    numbers |= {"sq": numbers["tok"]} if "tok" in numbers else {}
    # A decoding step may contain a few prefilled requests (p), but only sums of the whole batch.
    part = _part(numbers, numbers.get("bs"))
    if match[1] == PREFILL:
        return EngineStep(PREFILL, part)
    if numbers.get("p"):
        return EngineStep(MIXED, decode=part)
    return _of_parts(BatchPart(0), part)


def _batch_of(phase: str) -> Callable[[re.Match[str]], EngineStep]:
    return lambda match: EngineStep(phase, BatchPart(int(match[1])))


_FORMS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], EngineStep], str | None], ...] = (
    tuple(
        (re.compile(form), build, engine)
        for form, build, engine in (
            # vLLM, and SGLang with a patch of TraceLens
            (rf"execute_\d+_context_(\d+)\({_SUMS}\)_generation_(\d+)\({_SUMS}\)", _sums, None),
            (
                rf"(?:execute_)?context_(\d+)\({_TOKENS}\)_generation_(\d+)\({_TOKENS}\)",
                _tokens,
                VLLM,
            ),
            (r"execute_new_(\d+)_cached_(\d+)", _requests, VLLM),
            (
                r"\[Executor\] _forward_step \d+: (\d+) ctx reqs, (\d+) gen reqs.*",
                _requests,
                "TensorRT-LLM",
            ),
            (r"step\[([A-Z_0-9]+)((?: [^\]]*)?)\]", _sglang, SGLANG),
            (r"(prefill|decode)\[(bs=.*)\]", _atom, "ATOM"),
            (r"execute_diffusion_(\d+)_\d+x\d+", _batch_of(DIFFUSION), "xDiT"),
            (r"capture_(\d+)_\w+", _batch_of(CAPTURE), None),
        )
    )
)
"""The forms of names, each with the function that reads them and the engine that writes them."""
