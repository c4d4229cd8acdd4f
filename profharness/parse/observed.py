"""Journals of an observed program: the attention calls that its processes recorded, with counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from profharness.errors import TraceFormatError, UsageError
from profharness.parse.ops import OUTER
from profharness.parse.replay import replay_config
from profharness.trace import AttentionCall, TensorArgument

DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
INNER = "aten::_scaled_dot_product_"
INNER_OPS = {
    "flash": f"{INNER}flash_attention",
    "efficient": f"{INNER}efficient_attention",
    "cudnn": f"{INNER}cudnn_attention",
    "math": f"{INNER}attention_math",
    "overrideable": f"{INNER}fused_attention_overrideable",
}
COMPILED = "torch.compile traced this call; its shapes and how often it runs are in a trace"


@dataclass(frozen=True, slots=True)
class ObservedCall:
    """The calls of one template in one process. lengths: (batch, query, key) to calls; asked: the
    backend that torch said it would take, ran: the one that computed it; mask: the class of its
    contents. enabled: the backends that were allowed, in order of priority.
    """

    call: AttentionCall
    count: int
    pid: int
    rank: int | None = None
    lengths: tuple[tuple[tuple[int, ...], int], ...] = ()
    file: str | None = None
    line: int | None = None
    function: str | None = None
    asked: str | None = None
    ran: str | None = None
    mask: str | None = None
    enabled: tuple[str, ...] = ()


def read_observed(folder: Path) -> tuple[ObservedCall, ...]:
    """The calls in all journals of a run folder. A line that is cut short is passed over. Raises
    TraceFormatError for a journal that cannot be read.
    """
    found: list[ObservedCall] = []
    for path in sorted(folder.glob("[0-9]*.jsonl")):
        found += _journal(path)
    return tuple(found)


def _journal(path: Path) -> Iterator[ObservedCall]:
    counts: dict[int, tuple[int, Any]] = {}
    templates, rank = [], None
    for row in _rows(path):
        if row.get("event") == "template":
            templates.append(row)
        elif row.get("event") == "start":
            rank = int(row["rank"]) if str(row.get("rank", "")).isdigit() else None
        elif row.get("event") == "counts":
            counts = {number: (count, lengths) for number, count, lengths in row["counts"]}
    pid = int(path.stem)
    for row in templates:
        count, lengths = counts.get(row["template"], (0 if row["compiled"] else 1, []))
        yield _call(row, count, tuple((tuple(key), n) for *key, n in lengths), pid, rank)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise TraceFormatError(path, f"cannot be read: {error.strerror}") from None
    for line in lines:
        try:
            row = msgspec.json.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
        if isinstance(row, dict):
            yield row


def _call(
    row: dict[str, Any], count: int, lengths: Any, pid: int, rank: int | None
) -> ObservedCall:
    tensors = tuple(_tensor(item) for item in row.get("tensors", ()))
    tensors = (*tensors, *(None,) * (4 - len(tensors)))
    backward = bool(row.get("grad")) and any(
        item and item.get("requires_grad") for item in row.get("tensors", ())
    )
    config, reason = None, COMPILED if row["compiled"] else None
    if not row["compiled"]:
        flags = {name: row.get(name) for name in ("causal", "dropout", "scale", "gqa")}
        try:
            config = replay_config(_cast(tensors, row.get("autocast")), backward=backward, **flags)
        except UsageError as error:
            reason = str(error)
    ran = row.get("ran")
    call = AttentionCall(
        kind="sdpa",
        op=OUTER,
        sdpa_op=INNER_OPS.get(ran or ""),
        compiled=row["compiled"],
        recompute=bool(row.get("recompute")),
        backward=backward,
        modules=tuple(row.get("modules", ())),
        config=config,
        reason=reason,
        tensors=tensors,
        path=row.get("path"),
        pid=pid,
    )
    enabled = row.get("enabled") or {}
    order = row.get("priority") or list(enabled)
    return ObservedCall(
        call,
        count,
        pid,
        rank,
        lengths,
        file=row.get("file"),
        line=row.get("line"),
        function=row.get("function"),
        asked=row.get("choice"),
        ran=ran,
        mask=(row.get("mask") or {}).get("contents"),
        enabled=tuple(name for name in order if enabled.get(name)),
    )


def _tensor(told: Any) -> TensorArgument | None:
    if not told or told.get("dims") is None:
        return None
    strides, dtype = told.get("strides"), told["dtype"]
    return TensorArgument(
        tuple(told["dims"]), tuple(strides) if strides else None, DTYPES.get(dtype, dtype)
    )


def _cast(
    tensors: tuple[TensorArgument | None, ...], autocast: str | None
) -> tuple[TensorArgument | None, ...]:
    """The tensors as autocast hands them on: floating ones in its dtype."""
    if autocast is None:
        return tensors
    dtype = DTYPES.get(autocast, autocast)
    return tuple(
        TensorArgument(item.dims, item.strides, dtype) if item and item.dtype == "fp32" else item
        for item in tensors
    )
