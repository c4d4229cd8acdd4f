"""Classify exceptions as refusals or failures, and find PyTorch's reasons for a refusal."""

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
from profharness.rows import DISABLED, Refusal, decisive
from profharness.run import Cell

REFUSALS = ("No available kernel", "No viable backend", CAUSAL_MASK)
HEADERS = {"memory": "efficient", "flash": "flash", "cudnn": "cudnn"}
MAX_MESSAGE = 4000  # maximum length, because a compiler can write megabytes
OOM_TEXTS = ("not enough memory", "can't allocate memory", "CUDA out of memory")


class RefusedBeforehandError(RefusedError):
    """Raised if it is known without a call that a backend refuses a config."""

    def __init__(self, reasons: tuple[Refusal, ...]) -> None:
        super().__init__(reasons[0].code, "; ".join(reason.message for reason in reasons))
        self.refusals = reasons


@contextlib.contextmanager
def recorded_warnings(texts: list[str]) -> Iterator[None]:
    """Append all warnings of the block to `texts`.

    This includes warnings that PyTorch otherwise issues only once per process.
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


@contextlib.contextmanager
def implementation_errors(backend: Backend) -> Iterator[None]:
    """Convert exceptions of an implementation inside the block.

    Exceptions that the backend declares as refusals become RefusedError, and SystemExit becomes
    ImplementationError.
    """
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
    """Return the reasons, known before a call, why a backend cannot compute a config."""
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
    """Return whether PyTorch raised an exception because it refuses a call."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in REFUSALS)


def reasons_by_backend(texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield a pair of backend and reason for each warning that gives a reason.

    A header such as "Flash attention kernel not used because:" names the backend for the warnings
    that follow. The backend is an empty string if no header precedes the warning.
    """
    subject = ""
    for text in map(clean, texts):
        if is_header(text):
            subject = HEADERS.get(text.split()[0].lower(), "")
        else:
            yield subject, text


def refusals(backend: str, texts: list[str], error: BaseException) -> tuple[Refusal, ...]:
    """Return why PyTorch refused a call.

    The reasons are the warnings about `backend`, or about all backends if `backend` is not a single
    fused backend. If there are none, the reason is the error itself.
    """
    first_line = str(error).splitlines()[0]
    if CAUSAL_MASK in first_line:  # ignore the warnings, which are about backends other than math
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
        return (Refusal(DISABLED, first_line),)
    return (Refusal("no_text", f"PyTorch gave no reason: {first_line}", "inferred"),)


def failure(cell: Cell, workspace: Workspace, texts: list[str], error: Exception) -> Cell:
    """Return a cell that raised `error`, with the status `refused`, `oom`, `crashed` or `error`.

    `texts` contains the warnings that were issued before the exception.
    """
    if isinstance(error, RefusedError):
        return replace(cell, status="refused", message=str(error), refusals=error.refusals)
    if is_refusal(error):
        reasons = refusals(cell.backend, texts, error)
        return replace(
            cell, status="refused", message=decisive(reasons)[0].message, refusals=reasons
        )
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
    """Return `result`, the result of a cell that raised `error`.

    Raise DeadContextError if no other cell can run in this process.
    """
    if context_is_dead(error):
        raise DeadContextError(result) from None
    return result


def error_text(error: BaseException) -> str:
    return shortened(f"{type(error).__name__}: {str(error).strip()}")


def shortened(text: str) -> str:
    """Cut out the middle of a long text.

    In the output of a compiler, the cause is at the beginning and the failure at the end.
    """
    left_out = len(text) - MAX_MESSAGE
    if left_out <= 0:
        return text
    head = MAX_MESSAGE // 4
    return f"{text[:head]}\n[{left_out} characters left out]\n{text[head + left_out :]}"


def is_oom(error: BaseException) -> bool:
    """Return whether an error means that the GPU or the host is out of memory."""
    kinds = (MemoryError, torch.cuda.OutOfMemoryError)
    return isinstance(error, kinds) or any(text in str(error) for text in OOM_TEXTS)


def context_is_dead(error: BaseException) -> bool:
    """Return whether, after this CUDA error, every later CUDA call in the process fails."""
    if is_oom(error) or not torch.cuda.is_available():
        return False
    return "CUDA error" in str(error) or type(error).__name__ == "AcceleratorError"
