"""Read the choice of the attention backend from the log of a serving engine.

vLLM logs its choice and the other candidates at level INFO, and the reason for each refusal at level
DEBUG (`VLLM_LOGGING_LEVEL=DEBUG`). SGLang logs the arguments of its server. FlashInfer logs the
paths of the cubins that it loads. The versions of libraries are in the output of `vllm collect-env` and
`python -m sglang.check_env`, which users append to a log.
"""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from profharness.files import open_input

VLLM, SGLANG = "vLLM", "SGLang"
MAX_BYTES = 256 << 20  # a longer log is read only up to here; engines log their choice at the start
MAX_LINE = 1 << 16

_VERSION = re.compile(
    r"(?:vLLM API server version |Initializing an? (?:V[01] )?LLM engine \(|vLLM Version\s*: )v?(\d[\w.+]*)"
)
_SGLANG_VERSION = re.compile(r"(?i)sglang(?:==|[ _]version[ :=]+'?)v?(\d[\w.+]*)")
_CHOICE = re.compile(
    r"Using (?:AttentionBackendEnum\.)?(?P<backend>[A-Z][A-Z0-9_]+)(?: attention)? backend"
    r"(?: out of potential backends: \[(?P<candidates>[^\]]*)\])?"
)
# The texts of vLLM before version 0.11
_OLD_CHOICE = re.compile(
    r"Using (Flash Attention|FlashInfer|Triton|XFormers|FlashMLA|Cutlass MLA)\b.* backend"
)
_VALID = re.compile(r"Valid backends: \[([^\]]*)\]")
_REFUSED = re.compile(
    r"Some attention backends are not valid for \w+ with (?P<question>.*?)\. Reasons: \{(?P<reasons>.*)\}"
)
_REASON = re.compile(r"'?(?:AttentionBackendEnum\.)?(\w+)'?: \[([^\]]*)\]")
_SELECTED = re.compile(
    r"Selected backend (?:AttentionBackendEnum\.)?(\w+) is not valid for this configuration\. "
    r"Reason: \[([^\]]*)\]"
)
_ARGUMENTS = re.compile(r"server_args=ServerArgs\((.*)")
_BACKENDS = re.compile(r"\b((?:prefill_|decode_)?attention_backend)='(\w+)'")
_DEFAULT = re.compile(
    r"Attention backend not (?:explicitly specified|set)\. Use (\w+) backend by default"
)
_CUBIN = re.compile(r"fmha/trtllm-gen/(\w+)")
_FA_VERSION = re.compile(r"Using FlashAttention version (\d)")
# `[pip3] triton==3.6.0` and `PyTorch version: 2.11.0+cu130` of vLLM, `triton: 3.6.0` of SGLang
_LIBRARY = re.compile(
    r"(?:^|\s)(torch|triton|pytorch-triton-rocm|flashinfer[-_]python|flash[-_]attn(?:[-_]3)?|aiter|amd-aiter"
    r"|nvidia-cudnn-cu1\d|sgl[-_]kernel|xformers)(?:==| *: +)v?(\d[\w.+-]*)\s*$"
)
_VERSION_OF = re.compile(
    r"^(PyTorch|cuDNN|Nvidia driver|CUDA Driver|HIP runtime)\s+[Vv]ersion\s*: +(\d\S*)\s*$"
)
# names of libraries in logs, and the keys of an environment that they set
_KEYS = {
    "PyTorch": "torch",
    "Nvidia driver": "driver",
    "CUDA Driver": "driver",
    "HIP runtime": "hip",
    "cuDNN": "cudnn",
    "pytorch-triton-rocm": "triton",
    "flashinfer-python": "flashinfer",
    "amd-aiter": "aiter",
}


@dataclass(frozen=True, slots=True)
class EngineLog:
    """The statements about attention in the log of an engine."""

    engine: str | None = None
    version: str | None = None
    backend: str | None = None
    """The chosen backend. If prefill and decode use different backends, a text such as
    `fa3 and flashinfer`.
    """
    candidates: tuple[str, ...] = ()
    """All backends that could have been chosen, in the engine's order of preference."""
    refusals: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Maps each refused backend to the engine's reasons."""
    question: str | None = None
    """The config for which the engine chose a backend, as it was logged."""
    cubins: tuple[str, ...] = ()
    """Names of the kernels that FlashInfer loaded."""
    libraries: dict[str, str] = field(default_factory=dict)
    """Maps `driver` and the names of libraries, such as `triton`, to their versions."""

    @property
    def environment(self) -> dict[str, str]:
        """The environment that the log describes, with the keys of a run's environment."""
        told = {"engine": self.engine, "engine_version": self.version}
        told |= {"attention_backend": self.backend}
        return {key: value for key, value in told.items() if value} | self.libraries


def read_engine_log(path: Path) -> EngineLog | None:
    """Return the statements about attention in a log.

    Return None if the log mentions neither attention nor an engine.

    Raise OSError if the file cannot be read.
    """
    found = EngineLog()
    with closing(open_input(path)) as file:
        data = file.read(MAX_BYTES)
    for line in data.decode(errors="replace").splitlines():
        found = _read_line(found, line[:MAX_LINE])
    return found if found != EngineLog() else None


def _read_line(log: EngineLog, line: str) -> EngineLog:
    """Return the log, extended by the information in one more line."""
    if match := _VERSION.search(line):
        return replace(log, engine=VLLM, version=match[1])
    if match := _SGLANG_VERSION.search(line):
        return replace(log, engine=SGLANG, version=match[1])
    if match := _REFUSED.search(line):
        reasons = {name: _items(texts) for name, texts in _REASON.findall(match["reasons"])}
        return replace(
            log, engine=VLLM, question=match["question"], refusals=log.refusals | reasons
        )
    if match := _SELECTED.search(line):
        return replace(log, engine=VLLM, refusals=log.refusals | {match[1]: _items(match[2])})
    if match := _VALID.search(line):
        return replace(log, engine=VLLM, candidates=_items(match[1]))
    if match := _CHOICE.search(line):
        candidates = _items(match["candidates"]) if match["candidates"] else log.candidates
        return replace(log, engine=VLLM, backend=match["backend"], candidates=candidates)
    if match := _OLD_CHOICE.search(line):
        return replace(log, engine=VLLM, backend=match[1])
    if match := _ARGUMENTS.search(line):
        given = dict(_BACKENDS.findall(match[1]))
        common = given.get("attention_backend")
        phases = [
            given.get(f"{phase}_attention_backend", common) for phase in ("prefill", "decode")
        ]
        names = dict.fromkeys(name for name in phases if name)
        return replace(log, engine=SGLANG, backend=" and ".join(names) or log.backend)
    if match := _DEFAULT.search(line):
        return replace(log, engine=SGLANG, backend=match[1])
    if match := _LIBRARY.search(line) or _VERSION_OF.search(line):
        name = match[1] if match[1] in _KEYS else match[1].replace("_", "-")
        key = "cudnn" if name.startswith("nvidia-cudnn") else _KEYS.get(name, name)
        return replace(log, libraries=log.libraries | {key: match[2]})
    if match := _CUBIN.search(line):
        return replace(log, cubins=tuple(dict.fromkeys((*log.cubins, match[1]))))
    if (match := _FA_VERSION.search(line)) and log.backend == "FLASH_ATTN":
        return replace(log, backend=f"FLASH_ATTN (FlashAttention {match[1]})")
    return log


def _items(text: str) -> tuple[str, ...]:
    """Return the items of a list as Python prints it, with or without quotes."""
    quoted = re.findall(r"'([^']*)'|\"([^\"]*)\"", text)
    if quoted:
        return tuple(one or other for one, other in quoted)
    return tuple(
        item.strip().removeprefix("AttentionBackendEnum.")
        for item in text.split(",")
        if item.strip()
    )
