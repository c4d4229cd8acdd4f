"""Asks PyTorch on this machine about configs, in a process of its own, nothing launched."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from profharness.config import Config
from profharness.dispatch import BACKENDS, Prediction, from_config, hazards, predict
from profharness.dispatch.advice import Advice as Way
from profharness.dispatch.live import ANSWERS_FILE, LiveAnswer, LiveBackend
from profharness.dispatch.told import machine_of, with_flags
from profharness.explanation import Advice, BackendAnswer, Explanation
from profharness.record import Cell, JournalEntry, Protocol, Refusal
from profharness.runner.supervise import run_cells

AskProgress = Callable[[int, int, str], None]
"""Hears (configs done, configs in all, the label of the one just done)."""

TOLD = ("torch", "torch_cuda", "gpu", "capability", "cudnn", "device_type", "flash_attention_impl")
COMPILED = (
    "Under torch.compile the choice is made when the graph is traced, and stays as it was then."
)
ALLOW_SET = (
    "sdpa_kernel([...]) says which backends are allowed, not in which order, unless set_priority=True "
    "(PyTorch 2.8 and newer)."
)
LEGACY = "The legacy sdp_kernel with its three flags off leaves cuDNN on."


def ask(
    configs: Sequence[Config],
    *,
    device: str = "auto",
    advice: bool = True,
    timeout_s: float = 120,
    progress: AskProgress | None = None,
) -> list[Explanation]:
    """One explanation a config, in that order. device is `cuda`, `cpu` or `auto`; timeout_s the
    seconds that one config may take.

    A config whose process died or took too long has an `error` and what the rules say. Raises
    CaptureError if no process starts.
    """
    cells = tuple(Cell(f"c{index:04d}", config, "auto") for index, config in enumerate(configs, 1))
    if not cells:
        return []
    told: dict[str, Any] = {}
    ended: dict[str, Cell] = {}

    def hear(entry: JournalEntry) -> None:
        if entry.environment is not None:
            told.update(entry.environment)
        if entry.event == "end" and entry.result is not None:
            ended[entry.result.cell] = entry.result
            if progress is not None:
                progress(len(ended), len(cells), entry.result.config.label)

    with tempfile.TemporaryDirectory(prefix="profharness-") as name:
        folder = Path(name)
        protocol = Protocol(device=device, timeout_s=timeout_s)
        run_cells(folder, cells, protocol, (), hear, command=lambda at: ask_argv(at, advice=advice))
        answers = _read(folder / ANSWERS_FILE)
    return [_explain(cell, answers.get(cell.cell), ended.get(cell.cell), told) for cell in cells]


def ask_argv(folder: Path, *, advice: bool) -> list[str]:
    """-P as for the worker: what lies in the user's folder is not on the program's path."""
    command = [sys.executable, "-P", "-m", "profharness.worker.ask", str(folder)]
    return command if advice else [*command, "--no-advice"]


def _read(path: Path) -> dict[str, LiveAnswer]:
    """Answers by cell; a line that a crash cut short is passed over."""
    found: dict[str, LiveAnswer] = {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            answer = msgspec.json.decode(line, type=LiveAnswer)
        except msgspec.MsgspecError:
            continue
        found[answer.cell] = answer
    return found


def _explain(
    cell: Cell, answer: LiveAnswer | None, ended: Cell | None, environment: Mapping[str, Any]
) -> Explanation:
    device = str(environment.get("device_type", "cpu"))
    config = cell.config.resolve(device)
    machine = machine_of(environment)
    params = with_flags(environment)(from_config(config, device))
    prediction = predict(params, machine)
    if answer is None:
        answer = LiveAnswer(cell.cell, config.label, error=_lost(ended))
    taken = answer.choice or prediction.choice
    return Explanation(
        config=config.label,
        environment=_surroundings(environment),
        source="live",
        priority_order=answer.priority_order or prediction.priority_order,
        predicted=prediction.choice,
        choice=answer.choice,
        observed=None,
        agree=_agree(prediction.choice, answer.choice),
        backends=tuple(_backend(each) for each in answer.backends) or _by_rule(prediction),
        caveats=(*hazards(taken, params, machine), *_doubts(environment, answer)),
        error=answer.error,
    )


def _lost(ended: Cell | None) -> str:
    message = ended.message if ended is not None else None
    return f"PyTorch could not be asked: {message or 'its process left no answer'}"


def _agree(predicted: str, choice: str | None) -> bool | None:
    return None if choice is None or predicted == "unknown" else predicted == choice


def _backend(live: LiveBackend) -> BackendAnswer:
    reasons = [
        Refusal(each.reason.code, each.reason.message, each.reason.source) for each in live.blockers
    ]
    return BackendAnswer(
        live.backend,
        live.eligible,
        tuple(dict.fromkeys(reasons)),
        tuple(_advice(way) for way in live.advice),
    )


def _advice(way: Way) -> Advice:
    return Advice(way.change, way.code, way.config, way.verified, way.choice)


def _by_rule(prediction: Prediction) -> tuple[BackendAnswer, ...]:
    """What the rules say, where PyTorch gave no answer."""
    return tuple(
        BackendAnswer(
            name,
            prediction.backends[name].eligible,
            tuple(Refusal(r.code, r.message, "rule") for r in prediction.backends[name].reasons),
        )
        for name in BACKENDS
    )


def _surroundings(environment: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the choice, and no more."""
    found = {key: environment[key] for key in TOLD if environment.get(key) is not None}
    found["flags"] = {
        name: environment[f"sdp_{name}"] for name in BACKENDS if f"sdp_{name}" in environment
    }
    variables = environment.get("env") or {}
    switches = {name: variables[name] for name in variables if name.startswith("TORCH_CUDNN_SDPA_")}
    return found | ({"env": switches} if switches else {})


def _doubts(environment: Mapping[str, Any], answer: LiveAnswer) -> list[str]:
    doubts = [COMPILED]
    if environment.get("device_type") == "cuda":
        doubts.append(ALLOW_SET)
        if environment.get("sdp_cudnn"):
            doubts.append(LEGACY)
    impl = environment.get("flash_attention_impl")
    if impl:
        doubts.append(
            f"{impl} is activated: flash runs its kernels instead of FA2's, and a call that it does not support "
            "raises instead of taking another backend."
        )
    for each in answer.backends:
        if None not in (each.eligible, each.can_use) and each.eligible != each.can_use:
            says = "yes" if each.can_use else "no"
            doubts.append(
                f"PyTorch answers twice and differently: can_use_{each.backend}_attention says {says}, a call that "
                f"may take {each.backend} alone would{' ' if each.eligible else ' not '}run."
            )
    return doubts
