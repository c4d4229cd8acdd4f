"""Convert predictions of an atlas to rows of the same types as a store returns."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from profharness.atlas.data import BACKENDS, Launch
from profharness.atlas.predictions import (
    Place,
    Predicted,
    nanoseconds,
    place_at,
    predict_all,
    predicted,
    timing_note,
)
from profharness.attention.config import Config, parse_config
from profharness.columns import VS_FASTEST, column
from profharness.device_types import on_gpu
from profharness.devices import Device, occupancy
from profharness.rows import CellRow, KernelRow
from profharness.traces.kernel_names import parse_kernel_name

PROFILER = "atlas"  # the value of `profiler` in rows of predicted kernels


def predicted_rows(
    configs: Sequence[Config],
    backends: Sequence[str] = (),
    gpu: str | None = None,
    torch: str | None = None,
    folder: Path | None = None,
    driver: str | None = None,
) -> tuple[list[KernelRow], list[CellRow], Place, str]:
    """Return predictions as rows of a store, their place, and a text that explains missing or
    doubtful times.

    The `run` field of a row is the text of the place. Raise the errors of `predicted`.
    """
    found = predicted(configs, backends, gpu, torch, folder, driver)
    prediction = [row for answer in found.answers for row in found.of(answer)]
    rows = [row for each in prediction for row in kernel_rows(each, found.place)]
    doubt = "\n".join(filter(None, (found.doubt, timing_note(prediction))))
    return rows, [_cell_row(each, found.place) for each in prediction], found.place, doubt


def _cell_row(prediction: Predicted, place: Place) -> CellRow:
    message = None
    if prediction.status == "ok" and not prediction.kernels:
        message = (
            prediction.outside
            or "no atlas of this GPU contains this config, so its kernels are unknown"
        )
    return CellRow(
        run=place.text,
        cell=f"{prediction.config} {prediction.backend}",
        config=prediction.config,
        backend=prediction.backend,
        status=prediction.status,
        message=message,
        choice=prediction.choice,
        sdpa_op=None,
        iterations=1,
        refusals=prediction.reasons,
        warnings=(),
        predicted=prediction.choice,
    )


def kernel_rows(prediction: Predicted, place: Place) -> Iterator[KernelRow]:
    """Yield one row per kernel and launch configuration, as a store does for a captured run."""
    groups: dict[tuple[Any, ...], list[tuple[int, int | None]]] = {}
    for order, launch in enumerate(prediction.kernels or ()):
        groups.setdefault(launch[:5], []).append((order, nanoseconds(launch.time_us)))
    whole = sum(ns or 0 for same in groups.values() for _, ns in same)
    for kind, same in groups.items():
        yield _kernel_row(prediction, place, Launch._make((*kind, None)), same, whole)


def _kernel_row(
    prediction: Predicted,
    place: Place,
    launch: Launch,
    same: Sequence[tuple[int, int | None]],
    whole_ns: int,
) -> KernelRow:
    name = parse_kernel_name(launch.kernel)
    times = sorted(ns for _, ns in same if ns is not None)
    total = sum(times) if len(times) == len(same) else None
    filled = None
    if launch.block is not None and None not in (launch.registers, launch.shared_bytes):
        # occupancy does not depend on the number of SMs
        device = Device(0, place.gpu, *place.rules.capability, 0)
        threads = math.prod(launch.block)
        filled = occupancy(threads, launch.registers or 0, launch.shared_bytes or 0, device)
    return KernelRow(
        run=place.text,
        config=prediction.config,
        backend=prediction.backend,
        cell=f"{prediction.config} {prediction.backend}",
        profiler=PROFILER,
        status=prediction.status,
        range=None,
        kernel=launch.kernel,
        kernel_short=name.short,
        kernel_kind="kernel" if launch.grid is not None else "memset",
        family=name.family,
        grid=launch.grid,
        block=launch.block,
        registers_per_thread=launch.registers,
        static_shared_bytes=None,
        dynamic_shared_bytes=None,
        shared_bytes=launch.shared_bytes,
        launches=len(same),
        launches_per_call=float(len(same)),
        duration_ns=times[len(times) // 2] if total is not None else None,
        total_ns=total,
        min_ns=times[0] if total is not None else None,
        max_ns=times[-1] if total is not None else None,
        share=total / whole_ns if total is not None and whole_ns else None,
        first_ns=same[0][0],
        op_path=None,
        sdpa_op=None,
        occupancy=filled.fraction if filled else None,
        occupancy_limiter=filled.limiter if filled else None,
        device=0,
        shared_share=filled.shared_share if filled else None,
        source=prediction.source,
    )


@dataclass(frozen=True, slots=True)
class AtlasComparison:
    """A comparison of the measured time of a cell with the prediction of the machine's atlas."""

    config: Annotated[str, column("config", repeat=False, meaning="label of the attention problem")]
    backend: Annotated[str, column("backend", importance="key", meaning="the backend")]
    ran_ns: Annotated[
        int,
        column(
            "measured µs/call",
            "time",
            importance="answer",
            scale="call",
            meaning="measured kernel time of the call",
        ),
    ]
    kernel_ns: Annotated[
        int,
        column(
            "atlas µs/call", "time", scale="call", meaning="kernel time of the call in the atlas"
        ),
    ]
    low_ns: Annotated[
        int | None,
        column(
            meaning="lower end of the 90 % prediction interval for `kernel_ns`",
        ),
    ]
    high_ns: Annotated[
        int | None,
        column(
            meaning="upper end of the 90 % prediction interval for `kernel_ns`",
        ),
    ]
    ratio: Annotated[
        float,
        column(
            "vs atlas",
            "ratio",
            importance="answer",
            meaning="the measured time divided by the time in the atlas",
        ),
    ]
    inside: Annotated[
        bool | None,
        column(
            meaning="whether `ran_ns` lies within the model's 90 % interval; null if there is "
            "no model"
        ),
    ]
    source: Annotated[str, column("source", importance="detail", meaning="`measured` or `model`")]
    same_kernels: Annotated[
        bool | None,
        column(
            "same kernels",
            "flag",
            meaning="whether the kernels that ran are the same as in the atlas",
        ),
    ]
    best: Annotated[str | None, column("atlas fastest", meaning="the fastest backend in the atlas")]
    regret: Annotated[
        float | None,
        column(
            VS_FASTEST,
            "excess",
            meaning="how much longer the backend takes than `best` in the atlas; tables show the "
            "ratio of the times",
        ),
    ]

    @property
    def interval(
        self,
    ) -> Annotated[
        tuple[int, int | None] | None,
        column(
            "90 % interval",
            "interval",
            importance="detail",
            scale="call",
            meaning="90 % prediction interval for `kernel_ns`",
        ),
    ]:
        """The interval of the time, or None if the time was measured."""
        return None if self.low_ns is None else (self.low_ns, self.high_ns)


def against(
    cells: Sequence[CellRow], rows: Sequence[KernelRow], environment: Mapping[str, Any]
) -> list[AtlasComparison]:
    """Compare the measured times of a run's cells with the times that an atlas predicts.

    Return an empty list if the machine has no atlas. `rows` contains the kernels of one profiler.
    """
    if not on_gpu(environment) or not environment.get("gpu") or not environment.get("torch"):
        return []
    by_cell: dict[str, list[KernelRow]] = {}
    for row in rows:
        by_cell.setdefault(row.cell or "", []).append(row)
    ran = [each for each in cells if each.backend in BACKENDS and each.cell in by_cell]
    place = place_at(environment)
    if place is None or not ran:
        return []
    labels = list(dict.fromkeys(cell.config for cell in ran))
    predictions = {
        (row.config, row.backend): row
        for answer in predict_all(place, list(map(parse_config, labels)))
        for row in answer
    }
    found = []
    for cell in ran:
        prediction = predictions[cell.config, cell.backend]
        if prediction.kernel_ns and prediction.timed_as is None:
            found.append(_compared(prediction, prediction.kernel_ns, by_cell[cell.cell]))
    return found


def _compared(
    prediction: Predicted, expected_ns: int, rows: Sequence[KernelRow]
) -> AtlasComparison:
    ran_ns = round(sum(row.call_ns or 0 for row in rows))
    low, high = prediction.low_ns, prediction.high_ns
    by_model = prediction.source == "model" and low is not None and high is not None
    launched = Counter[str]()
    for row in rows:
        launched[row.kernel_short] += round(row.launches_per_call or 0)
    expected = Counter(parse_kernel_name(each.kernel).short for each in prediction.kernels or ())
    return AtlasComparison(
        config=prediction.config,
        backend=prediction.backend,
        ran_ns=ran_ns,
        kernel_ns=expected_ns,
        low_ns=low,
        high_ns=high,
        ratio=ran_ns / expected_ns,
        inside=(low or 0) <= ran_ns <= (high or 0) if by_model else None,
        source=prediction.source,
        same_kernels=launched == expected if expected else None,
        best=prediction.best,
        regret=prediction.regret,
    )
