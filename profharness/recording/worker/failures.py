"""Distinguish refusals from failures, and find the reasons that PyTorch reported for a refusal."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from profharness.attention.backends import find_backend
from profharness.attention.backends.base import Backend, ImplementationError, RefusedError
from profharness.attention.backends.sources import where
from profharness.attention.config import Config
from profharness.attention.dispatch.predict import clean, code, is_header
from profharness.attention.dispatch.rules import CAUSAL_MASK
from profharness.device_types import is_gpu
from profharness.recording.worker.program import DeadContextError
from profharness.recording.worker.timing import Workspace
from profharness.rows import Refusal
from profharness.run import Cell

REFUSALS = ("No available kernel", "No viable backend", CAUSAL_MASK)
HEADERS = {"memory": "efficient", "flash": "flash", "cudnn": "cudnn"}
MAX_MESSAGE = 4000  # a compiler's output can be megabytes
OOM_TEXTS = ("not enough memory", "can't allocate memory", "CUDA out of memory")


class RefusedBeforehandError(RefusedError):
    """A backend refuses a config before any call."""

    def __init__(self, reasons: tuple[Refusal, ...]) -> None:
        super().__init__(reasons[0].code, "; ".join(reason.message for reason in reasons))
        self.refusals = reasons


@contextlib.contextmanager
def recorded_warnings(texts: list[str]) -> Iterator[None]:
    """Add all warnings inside the block to `texts`, also those of TORCH_WARN_ONCE."""
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


@contextlib.contextmanager
def implementation_errors(backend: Backend) -> Iterator[None]:
    """Convert refusals to RefusedError, and exits to ImplementationError."""
    try:
        yield
    except backend.refuses as error:
        explained = isinstance(error, RefusedError | ImplementationError) or is_refusal(error)
        if explained or is_oom(error) or context_is_dead(error):
            raise
        raise RefusedError("unsupported", error_text(error)) from error
    except SystemExit as error:
        raise ImplementationError(f"{backend.name} called exit({error.code})") from error


def reasons_beforehand(
    config: Config, workspace: Workspace, backend: Backend
) -> tuple[Refusal, ...]:
    """Return every reason against a config that is known before a call."""
    if backend.load is None:
        device = f"{backend.name} attention does not exist on {workspace.device}"
    else:  # the backend may exist for the device, but profharness does not run it there
        device = f"profharness does not run {backend.name} on {workspace.device}"
    reasons = {
        "absent": backend.absent(),
        "no_device": None if workspace.device in backend.devices else device,
        "unsupported": backend.supports(config),
    }
    return tuple(Refusal(code, reason, "inferred") for code, reason in reasons.items() if reason)


def is_refusal(error: BaseException) -> bool:
    """Return whether an exception means that no permitted backend, or only math, accepts the call."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in REFUSALS)


def reasons_by_backend(texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of a backend and a reason from warnings, with `` before the first header."""
    subject = ""
    for text in map(clean, texts):
        if is_header(text):
            subject = HEADERS.get(text.split()[0].lower(), "")
        else:
            yield subject, text


def refusals(backend: str, texts: list[str], error: BaseException) -> tuple[Refusal, ...]:
    """Return the warnings on why this backend refused the call (all for `auto`), else the error."""
    first_line = str(error).splitlines()[0]
    if CAUSAL_MASK in first_line:  # the warnings are of backends that were passed over before
        return (Refusal(code(first_line), first_line),)
    reasons: dict[Refusal, None] = {}
    for subject, text in reasons_by_backend(texts):
        if not subject or subject == backend:
            reasons[Refusal(code(text), text)] = None
        elif backend not in HEADERS.values():
            reasons[Refusal(code(text), f"{subject}: {text}")] = None
    if reasons:
        return tuple(reasons)
    if REFUSALS[1] in str(error):
        return (Refusal("runtime_disabled", first_line),)
    return (Refusal("no_text", f"PyTorch gave no reason: {first_line}", "inferred"),)


def failure(cell: Cell, workspace: Workspace, texts: list[str], error: Exception) -> Cell:
    """Return the cell with the status `refused`, `oom`, `crashed` or `error`.

    `texts` are the warnings that were issued before the exception.
    """
    if isinstance(error, RefusedError):
        return replace(cell, status="refused", message=str(error), refusals=error.refusals)
    if is_refusal(error):
        reasons = refusals(cell.backend, texts, error)
        return replace(cell, status="refused", message=reasons[0].message, refusals=reasons)
    text, file = str(error).strip(), None
    if cell.backend in workspace.sources:
        file = find_backend(cell.backend, workspace.sources).file
    if file:
        text = text.replace(f"{file.parent}/", "")
    own = isinstance(error, ImplementationError)
    message = shortened(text if own else f"{type(error).__name__}: {text}{where(error, file)}")
    if is_oom(error):
        if is_gpu(workspace.device):
            torch.cuda.empty_cache()
        return replace(cell, status="oom", message=message.splitlines()[0])
    return replace(cell, status="crashed" if context_is_dead(error) else "error", message=message)


def unless_dead(result: Cell, error: Exception) -> Cell:
    """Return the result of a cell that raised. Raise DeadContextError if no other cell can follow."""
    if context_is_dead(error):
        raise DeadContextError(result) from None
    return result


def error_text(error: BaseException) -> str:
    return shortened(f"{type(error).__name__}: {str(error).strip()}")


def shortened(text: str) -> str:
    """Return the head and tail of a text: compilers name the cause first and the failure last."""
    left_out = len(text) - MAX_MESSAGE
    if left_out <= 0:
        return text
    head = MAX_MESSAGE // 4
    return f"{text[:head]}\n[{left_out} characters left out]\n{text[head + left_out :]}"


def is_oom(error: BaseException) -> bool:
    """Return whether the memory of the GPU or the host was insufficient."""
    kinds = (MemoryError, torch.cuda.OutOfMemoryError)
    return isinstance(error, kinds) or any(text in str(error) for text in OOM_TEXTS)


def context_is_dead(error: BaseException) -> bool:
    """Return whether an error is a CUDA error after which every later call in the process fails."""
    if is_oom(error) or not torch.cuda.is_available():
        return False
    return "CUDA error" in str(error) or type(error).__name__ == "AcceleratorError"
