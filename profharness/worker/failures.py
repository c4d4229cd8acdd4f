"""Tells a refusal from a failure, and finds the reasons that PyTorch gave for it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from profharness.backends import ImplementationError, RefusedError, find_backend
from profharness.backends.sources import where
from profharness.dispatch.predict import clean, code, is_header
from profharness.rows import Refusal
from profharness.run import Cell

if TYPE_CHECKING:
    from profharness.worker.workspace import Bench


REFUSALS = ("No available kernel", "No viable backend")
HEADERS = {"memory": "efficient", "flash": "flash", "cudnn": "cudnn"}


@contextlib.contextmanager
def heard_warnings(texts: list[str]) -> Iterator[None]:
    """Adds to `texts` all warnings raised inside, also by what raises, and TORCH_WARN_ONCE ones
    however often they came.
    """
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                yield
            finally:
                texts += [str(warning.message) for warning in caught]
    finally:
        torch.set_warn_always(before)


def is_refusal(error: BaseException) -> bool:
    """Whether an exception says that no permitted backend takes the call."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in REFUSALS)


def refusals(backend: str, texts: list[str], error: BaseException) -> tuple[Refusal, ...]:
    """The reasons for `backend` among the warnings (all of them for `auto` and the like), or the
    error itself, inferred.
    """
    found: list[Refusal] = []
    subject = ""
    for text in map(clean, texts):
        if is_header(text):
            subject = HEADERS.get(text.split()[0].lower(), "")
            continue
        if not subject or subject == backend:
            found.append(Refusal(code(text), text))
        elif backend not in HEADERS.values():
            found.append(Refusal(code(text), f"{subject}: {text}"))
    if not found and REFUSALS[1] in str(error):
        found.append(Refusal("runtime_disabled", str(error).splitlines()[0]))
    elif not found:
        found.append(
            Refusal("no_text", f"PyTorch gave no reason: {str(error).splitlines()[0]}", "inferred")
        )
    return tuple(dict.fromkeys(found))


MAX_MESSAGE = 4000  # a compiler's output can be megabytes
OOM_TEXTS = ("not enough memory", "can't allocate memory", "CUDA out of memory")


class DeadContextError(Exception):
    """The CUDA context is lost; this process can compute nothing more. args: the cell's result."""


def failure(cell: Cell, bench: Bench, heard: list[str], error: Exception) -> Cell:
    """The cell as refused, oom, crashed or error; heard are the warnings before the exception."""
    message = _message(cell, bench, error)
    if isinstance(error, RefusedError):
        reason = Refusal(error.code, str(error))
        return replace(cell, status="refused", message=reason.message, refusals=(reason,))
    if is_refusal(error):
        reasons = refusals(cell.backend, heard, error)
        return replace(cell, status="refused", message=reasons[0].message, refusals=reasons)
    if is_oom(error):
        if bench.device == "cuda":
            torch.cuda.empty_cache()
        return replace(cell, status="oom", message=message.splitlines()[0])
    if context_is_dead(error):
        return replace(cell, status="crashed", message=message)
    return replace(cell, status="error", message=message)


def _message(cell: Cell, bench: Bench, error: Exception) -> str:
    """The error's own words, with the line of the user's file and without the file's folder."""
    text = str(error).strip()
    file = None
    if cell.backend in bench.sources:
        file = find_backend(cell.backend, bench.sources).file
        text = text.replace(f"{file.parent}/", "") if file else text
    known = isinstance(error, ImplementationError)
    return shortened(text if known else f"{type(error).__name__}: {text}{where(error, file)}")


def shortened(text: str) -> str:
    """Head and tail of a long text: a compiler says first what it was, last what went wrong."""
    left_out = len(text) - MAX_MESSAGE
    if left_out <= 0:
        return text
    head = MAX_MESSAGE // 4
    tail = text[head + left_out :]
    return f"{text[:head]}\n[{left_out} characters left out]\n{tail}"


def is_oom(error: Exception) -> bool:
    """Whether the memory of the GPU or the host did not suffice."""
    kinds = (MemoryError, torch.cuda.OutOfMemoryError)
    return isinstance(error, kinds) or any(text in str(error) for text in OOM_TEXTS)


def context_is_dead(error: Exception) -> bool:
    """Whether a CUDA error is one of those after which every later call in the process fails too."""
    if is_oom(error) or not torch.cuda.is_available():
        return False
    return "CUDA error" in str(error) or type(error).__name__ == "AcceleratorError"
