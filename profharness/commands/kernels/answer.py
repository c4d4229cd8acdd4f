"""Summarize the rows of `kernels` in a few sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from profharness.attention.config import AUTO, OWN_CHOICE
from profharness.commands._answers import refused_and_failed, split_text
from profharness.errors import counted, join_and
from profharness.measurements.agreement import (
    OF_PACKAGES,
    backend_of_family,
    backend_of_kernel,
    backend_text,
    backend_that_ran,
    computes_attention,
    ran_backends,
    witnesses,
)
from profharness.measurements.measurements import busy_text
from profharness.rows import MODEL, CellRow, KernelRow, preferred_profiler_rows
from profharness.stats import NOTABLE_LOSS, THRESHOLD
from profharness.units import as_long, share_text, time_text

KINDS = {"memcpy": "copy", "op": "ATen op"}


def noun(rows: Iterable[KernelRow]) -> str:
    """Return `op` for rows of a CPU, which have ops instead of kernels, and `kernel` otherwise."""
    return "op" if any(row.kernel_kind == "op" for row in rows) else "kernel"


@dataclass(frozen=True, slots=True)
class Call:
    """The launches of one call of a cell, and the time that they take."""

    backend: str
    ran: str
    """The backend that computed the cell, or `backend` if PyTorch's choice is unknown."""
    launches: str
    """The number of launches of each kind, such as `1 kernel and 1 memset`.

    A CPU trace has ops instead of kernels.
    """
    ns: float | None
    on_cpu: bool
    predicted: bool

    @property
    def per(self) -> str:
        """What the time is per. On a CPU, profiling makes a call take much longer."""
        return "per profiled call" if self.on_cpu else "per call"


def kernels_answer(rows: Sequence[KernelRow], cells: Sequence[CellRow]) -> tuple[str, ...]:
    """Return sentences on what `auto` runs, how long its kernels take, and what was refused.

    The last sentence says so if the machine was too busy for reliable times. If several profilers
    recorded the same launches, only those of one profiler are counted.
    """
    rows = preferred_profiler_rows(rows)
    if not cells:
        return _of_program(rows)
    calls: dict[tuple[str, str], dict[str, Call]] = {}
    for cell in cells:
        own = [row for row in rows if (row.run, row.cell) == (cell.run, cell.cell)]
        if cell.status == "ok" and own:
            calls.setdefault((cell.run, cell.config), {})[cell.backend] = _call(cell, own)
    several = len({cell.config for cell in cells}) > 1
    if not calls:
        sentences = [*_without_kernels(cells)]
    elif len(calls) > 1:
        sentences = [*_of_configs({config: of for (_, config), of in calls.items()})]
    else:
        (of_backend,) = calls.values()
        sentences = [_of_config(of_backend)]
    busy = busy_text(rows, cells)
    doubt = (f"{busy[0].upper()}{busy[1:]}.",) if busy else ()
    return (*sentences, *refused_and_failed(cells, several=several), *doubt)


def _call(cell: CellRow, rows: Sequence[KernelRow]) -> Call:
    ran = {*ran_backends(rows)} or {
        name for each in witnesses(cell, rows) if each.name == "kernels" for name in each.backends
    }
    chosen = backend_that_ran(cell) or (ran.pop() if len(ran) == 1 else None)
    times = [row.call_ns for row in rows]
    known = [time for time in times if time is not None]
    counts: dict[str, float] = {}
    for row in rows:
        counts[row.kernel_kind] = counts.get(row.kernel_kind, 0) + (row.launches_per_call or 0)
    ordered = sorted(counts.items(), key=lambda item: item[0] != "kernel")
    return Call(
        backend=cell.backend,
        ran=chosen if chosen and cell.backend in OWN_CHOICE else cell.backend,
        launches=join_and([counted(number, KINDS.get(kind, kind)) for kind, number in ordered]),
        ns=sum(known) if len(known) == len(times) else None,
        on_cpu="op" in counts,
        predicted=any(row.source == MODEL for row in rows),
    )


def _without_kernels(cells: Sequence[CellRow]) -> Iterator[str]:
    ran = [cell for cell in cells if cell.status == "ok"]
    chosen = [cell.choice for cell in ran if cell.backend == AUTO]
    known = [name for name in chosen if name not in (None, "none", "error", "unknown")]
    # Only cells from an atlas have a message although they ran. It says why their kernels are unknown.
    takes = "is predicted to run" if any(cell.message for cell in ran) else "runs"
    if known:
        yield f"auto {takes} {split_text(Counter(map(str, known)))}; its kernels are unknown."
    elif any(cell.message for cell in ran):
        yield "The kernels of the requested configs are unknown."
    elif ran:
        yield "No kernels were recorded."


def _of_config(calls: dict[str, Call]) -> str:
    """Return the sentence about the calls of one config by backend."""
    auto = calls.get(AUTO)
    timed = sorted((call for call in calls.values() if call.ns), key=lambda call: call.ns or 0)
    if auto is None:
        return _without_auto(timed or [*calls.values()])
    runs = "is predicted to run" if auto.predicted else "runs"
    lead = f"auto {runs} {auto.ran}: {auto.launches}"
    if auto.ns is None:
        return f"{lead}."
    lead = f"{lead}, {time_text(auto.ns)} {auto.per}"
    other = next((c for c in timed if c.backend not in OWN_CHOICE and c.ran != auto.ran), None)
    # On a CPU the sum of the ops is not the time of the call.
    if other is None or other.ns is None or auto.on_cpu:
        return f"{lead}."
    only = "only " if other.ns < auto.ns else ""
    return f"{lead}; {other.ran} takes {only}{time_text(other.ns)} in {other.launches}."


def _named(call: Call) -> str:
    time = "" if call.ns is None else f", {time_text(call.ns)} {call.per}"
    return f"{call.backend} {'is predicted to launch' if call.predicted else 'launches'} {call.launches}{time}"


def _without_auto(timed: Sequence[Call]) -> str:
    first, *others = timed
    if first.ns is None:
        return f"{'; '.join(map(_named, timed))}."
    if not others:
        return f"{_named(first)}."
    last = others[-1]
    return (
        f"{first.backend} is {'predicted to be ' if first.predicted else ''}the fastest: "
        f"{time_text(first.ns or 0)} {first.per} in {first.launches}; {last.backend} is the "
        f"slowest: {time_text(last.ns or 0)} in {last.launches}."
    )


def _of_configs(configs: Mapping[str, dict[str, Call]]) -> Iterator[str]:
    """Yield sentences about several configs, each with its calls by backend."""
    autos = [calls[AUTO] for calls in configs.values() if AUTO in calls]
    predicted = any(call.predicted for calls in configs.values() for call in calls.values())
    if not autos:
        fastest = Counter(
            min(timed, key=lambda call: call.ns or 0).backend
            for calls in configs.values()
            if (timed := [call for call in calls.values() if call.ns])
        )
        names = {call.backend for calls in configs.values() for call in calls.values()}
        if len(names) == 1:  # nothing to compare
            timed = [call for calls in configs.values() for call in calls.values() if call.ns]
            if times := sorted(call.ns or 0 for call in timed):
                takes = "are predicted to take" if predicted else "take"
                what = "ops" if timed[0].on_cpu else "kernels"
                yield (
                    f"The {what} of {names.pop()} {takes} {time_text(times[0])} to "
                    f"{time_text(times[-1])} {timed[0].per} on {counted(len(configs), 'config')}."
                )
        elif fastest:
            are = "are predicted to take" if predicted else "take"
            on_cpu = any(call.on_cpu for calls in configs.values() for call in calls.values())
            what = "ops" if on_cpu else "kernels"
            yield f"The {what} of {split_text(fastest)} {are} the least time."
        return
    runs = "is predicted to run" if predicted else "runs"
    yield f"auto {runs} {split_text(Counter(call.ran for call in autos))}."
    yield from _lost(configs)


def _lost(configs: Mapping[str, dict[str, Call]]) -> Iterator[str]:
    """Yield a sentence on the configs for which another backend has much faster kernels."""
    losses, compared = [], list[float]()
    for config, calls in configs.items():
        auto = calls.get(AUTO)
        others = [
            call
            for call in calls.values()
            if auto and call.ns and call.backend not in OWN_CHOICE and call.ran != auto.ran
        ]
        if auto is None or not auto.ns or auto.on_cpu or not others:
            continue
        best = min(others, key=lambda call: call.ns or 0)
        loss = auto.ns / (best.ns or 1) - 1
        compared.append(loss)
        if loss > NOTABLE_LOSS:
            losses.append((loss, config, auto, best))
    if losses:
        loss, config, auto, best = max(losses, key=lambda each: each[0])
        yield (
            f"On {len(losses)} of {counted(len(compared), 'config')}, the kernels of auto take more "
            f"than {as_long(1 + NOTABLE_LOSS)} as those of the fastest backend. The worst case is {config}, "
            f"where auto takes {time_text(auto.ns or 0)} and {best.ran} takes "
            f"{time_text(best.ns or 0)}."
        )
    elif compared:
        where = f"({counted(len(compared), 'config')} compared)"
        if max(compared) <= THRESHOLD:
            yield f"By kernel time, no other backend that accepts the call is faster {where}."
        else:
            limit = as_long(1 + NOTABLE_LOSS)
            yield f"The kernels of auto take at most {limit} as those of the fastest backend {where}."


def _of_program(rows: Sequence[KernelRow]) -> tuple[str, ...]:
    """Return sentences on the kernels of a program's trace, and on its attention kernels."""
    if not rows:
        return ("No kernels were recorded.",)
    of = noun(rows)
    total = sum(row.total_ns or 0 for row in rows)
    fused = [row for row in rows if computes_attention(row.family, row.kernel)]
    count = sum(row.launches for row in rows)
    names = len({row.kernel for row in rows})
    what = counted(count, "launch", "launches") if of == "kernel" else counted(count, "call")
    lead = (
        f"The trace has {what} of {counted(names, 'different ' + of)}, "
        f"with a total time of {time_text(total)}."
    )
    if of == "op":
        return (lead,)
    if not fused:
        eager = any(row.family == "softmax" for row in rows)
        perhaps = ", but a softmax did: attention may run eagerly" if eager else ""
        return (lead, f"No kernel of a fused attention backend ran{perhaps}.")
    own = sum(row.total_ns or 0 for row in fused)
    backends = join_and([*dict.fromkeys(map(_name_of_backend, fused))])
    share = f", {share_text(own / total)}" if total else ""
    # `layers` counts all launches of the attention calls.
    others = any(
        row.kernel_kind != "kernel" or row.sdpa_op
        for row in rows
        if not computes_attention(row.family, row.kernel)
    )
    alone = ", excluding memsets and other launches of their calls" if others else ""
    return (lead, f"Attention kernels ({backends}) take {time_text(own)}{share}{alone}.")


def _name_of_backend(row: KernelRow) -> str:
    name = backend_of_family(row.family, row.sdpa_op)
    if name == OF_PACKAGES:
        name = backend_of_kernel(row.family, row.kernel)
    return backend_text(str(name))
