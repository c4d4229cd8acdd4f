"""Predict the time per step that the advice on a program's layers would save."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from profharness.atlas.model import Estimate
from profharness.atlas.predictions import Place, find_place, known_atlases, place_estimates
from profharness.attention.config import SDPA_BACKENDS, Config, parse_config
from profharness.attention.dispatch.advice import FLEX, NOT_PREDICTED, PREPARATION, Advice
from profharness.attention.dispatch.machine import from_config
from profharness.attention.dispatch.predict import Prediction, predict
from profharness.devices import pytorch_text, short_device_name
from profharness.errors import ProfharnessError, join_and
from profharness.program.gates import falls_back, is_unfused
from profharness.program.layer_map import CHANGE_CODE, LayerMap, LayerRow, is_explained, suggestions
from profharness.units import time_text

Saves = Sequence[tuple[str | None, float]]
"""The phases of a program, or None if it has none, each with the time saved per step."""

# Traces do not show the mask of eager attention, so the config of an eager call has no mask.
ASSUMED_MASK = "The predicted saving assumes attention without a mask."
NEGLIGIBLE = 0.01  # minimum share of attention in the GPU time for advice


@dataclass(frozen=True, slots=True)
class Change:
    """A piece of advice, the rows that it applies to, and the time that it would save."""

    text: str
    rows: tuple[LayerRow, ...]
    saves: Saves | None
    why_unknown: str = ""  # the reason why no time is predicted, if it is known
    code: str = ""  # the code of the change, as `explain` shows it
    then: str = ""  # what SDPA runs instead of eager attention, without a full stop
    prepares: bool = False  # whether the change copies or converts inputs

    @property
    def saving(self) -> str:
        """A clause on the predicted saving, or "" if it is unknown."""
        return saving_text(self.saves, prepares=self.prepares) if self.saves else ""

    @property
    def assumes(self) -> str:
        """A sentence on the mask that the predicted saving assumes, or "" if the mask is known."""
        eager = any(row.kind == "eager" for row in self.rows)
        return ASSUMED_MASK if eager and self.saves is not None else ""


def matters(layers: LayerMap) -> bool:
    """Return whether attention takes enough of the GPU time that a change could be worthwhile."""
    return not layers.gpu_ns or layers.attention_ns >= NEGLIGIBLE * layers.gpu_ns


def main_change(layers: LayerMap) -> Change | None:
    """Return the first advice on the costliest row that math or eager attention computes."""
    slow = [row for row in layers.rows if falls_back(row) or is_unfused(row)]
    slow.sort(key=lambda row: -row.total_ns)
    text = next((row.advice[0] for row in slow if row.advice), None)
    if text is None:
        return None
    rows = tuple(row for row in slow if text in row.advice)
    place = own_place(layers)
    saved = [saved_ns(row, text, layers, place) for row in rows]
    code = _code(rows[0], text, layers)
    known = [ns for ns in saved if ns is not None]
    if len(known) == len(rows):
        saves: dict[str | None, float] = {}
        for row, ns in zip(rows, known, strict=True):
            saves[row.step_phase] = saves.get(row.step_phase, 0) + ns
        prepares = needs_preparation(rows[0], text, layers)
        return Change(
            text, rows, tuple(saves.items()), code=code, then=_then(rows, place), prepares=prepares
        )
    return Change(
        text, rows, None, _why_unknown(layers, rows, text, place), code, _then(rows, place)
    )


def _then(rows: Sequence[LayerRow], place: Place | None) -> str:
    """Return a sentence, without a full stop, on what SDPA runs instead of eager attention, or ""."""
    eager = [row for row in rows if row.kind == "eager"]
    if place is None or not eager:
        return ""
    chosen = {
        _predict(_as_measured(row, row.config), place).choice if row.config else "unknown"
        for row in eager
    }
    if not chosen <= {*SDPA_BACKENDS}:
        return ""
    names = join_and([name for name in SDPA_BACKENDS if name in chosen])
    return f"With {pytorch_text(place.release)}, scaled_dot_product_attention is predicted to run {names}"


def _code(row: LayerRow, text: str, layers: LayerMap) -> str:
    """Return the code of a change that `explain` shows for the run, or ""."""
    if is_explained(row):
        return next((advice.code for advice in _suggested(row, text, layers)), "")
    # If the rules apply to other calls, `explain` shows only those.
    return "" if any(map(is_explained, layers.rows)) else CHANGE_CODE.get(text, "")


def _suggested(row: LayerRow, text: str, layers: LayerMap) -> Iterator[Advice]:
    """Yield the change that a text of advice describes, if the rules suggest it for a row."""
    if layers.platform is None or row.config is None:
        return
    for backend, advice in suggestions(parse_config(row.config), layers.platform):
        if advice and f"{backend}: {advice.change}" == text:
            yield advice


def needs_preparation(row: LayerRow, text: str, layers: LayerMap) -> bool:
    """Return whether the change that a text of advice describes copies or converts inputs."""
    return any(advice.prepares for advice in _suggested(row, text, layers))


def _why_unknown(layers: LayerMap, rows: Sequence[LayerRow], text: str, place: Place | None) -> str:
    if layers.gpu is None:
        return "the trace does not name the GPU" if layers.busy_ns else "there is no atlas for CPUs"
    if place is None or place.atlas is None:
        return f"there is no atlas for {short_device_name(layers.gpu)}"
    if any(row.kind == "flex" for row in rows):
        return NOT_PREDICTED[FLEX]
    if any(row.config is None for row in rows):
        return "the trace does not contain the shapes of the inputs"
    estimates = (_estimate(row, text, layers, place) for row in rows)
    return next((each.outside for each in estimates if each and each.outside), "")


def saving_text(saves: Saves, *, prepares: bool = False) -> str:
    """Return a clause such as `predicted to save about 2.23 ms of GPU time per step`.

    Set `prepares` if the change copies or converts inputs, which the saving does not include.
    """
    (phase, ns), *others = saves
    texts = [f"{time_text(ns)} of GPU time per {f'{phase} step' if phase else 'step'}"]
    texts += [f"{time_text(ns)} per {phase or 'other'} step" for phase, ns in others]
    minus = f", minus {PREPARATION}" if prepares else ""
    return f"predicted to save about {join_and(texts)}{minus}"


def own_place(layers: LayerMap) -> Place | None:
    """Return the GPU of a program with its atlas, or None if the rows have no advice."""
    if not layers.gpu or not any(row.advice for row in layers.rows):
        return None
    torch = layers.platform.environment["torch"] if layers.platform else None
    release = ".".join(str(torch).split(".")[:2]) if torch else None
    try:
        return find_place(known_atlases(None), layers.gpu, release)[0]
    except ProfharnessError:
        return None


def saved_ns(row: LayerRow, text: str, layers: LayerMap, place: Place | None) -> float | None:
    """Return the predicted time per step that a row would save with the advice `text`.

    Return None if the time is unknown, or if a benchmark has already measured the saving.
    """
    estimate = _estimate(row, text, layers, place)
    if estimate is None or estimate.kernel_us is None or row.saves_ns is not None or not row.calls:
        return None
    saved = row.kernel_ns - estimate.kernel_us * 1e3 * row.calls
    return saved if saved > 0 else None


def _estimate(row: LayerRow, text: str, layers: LayerMap, place: Place | None) -> Estimate | None:
    """Return the estimate for a call of a row after the advice `text`, or None if there is none."""
    if place is None or place.atlas is None or row.config is None:
        return None
    if row.ran == "math":
        label = next((each.config for each in _suggested(row, text, layers)), None)
        if label is None:
            return None
        backend, plain = text.partition(": ")[0], _as_measured(row, label)
    elif row.kind == "eager":
        plain = _as_measured(row, row.config)
        backend = _predict(plain, place).choice
    else:
        return None
    verdict = _predict(plain, place).backends.get(backend)
    if verdict is None or not verdict.eligible:
        return None
    (estimate,) = place_estimates(place, [plain], [backend])
    return estimate


def _predict(config: Config, place: Place) -> Prediction:
    return predict(from_config(config), place.rules)


def _as_measured(row: LayerRow, label: str) -> Config:
    """Return a config as the atlas contains it, with a backward pass if the row has its time."""
    config = parse_config(label).contiguous()
    return replace(config, mask_strides=None, scale=None, bwd=bool(row.backward_ns))
