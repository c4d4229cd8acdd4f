"""The whole answer for configs: live or by rule, joined with the store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from profharness.config import Config
from profharness.explaining.places import Place
from profharness.explaining.stored import with_store
from profharness.explanation import Explanation


def explain_all(
    configs: Sequence[Config],
    places: Sequence[Place] = (),
    *,
    backends: Sequence[str] = (),
    advice: bool = True,
    device: str = "auto",
    timeout_s: float = 120.0,
    store: Path | None = None,
) -> list[Explanation]:
    """One answer per config and place, places side by side for each config; without places PyTorch
    on this machine is asked. backends limits the advice; a store adds what was seen and the gains.
    Raises CaptureError if PyTorch cannot be asked at all.
    """
    if places:
        from profharness.explaining.offline import explain_by_rule

        found = [
            explain_by_rule(config, place, backends=backends, advice=advice)
            for config in configs
            for place in places
        ]
    else:
        from profharness.explaining.live import explain_live

        found = explain_live(
            configs, backends=backends, advice=advice, device=device, timeout_s=timeout_s
        )
    return found if store is None else with_store(found, store)
