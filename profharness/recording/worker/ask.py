"""A program of the worker that queries PyTorch about each config.

The program records which backend PyTorch chooses, why PyTorch refuses the other backends, and which
changes of the config would make PyTorch accept another backend. No kernel is launched.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from profharness.attention.backends import BACKENDS, find_backend
from profharness.attention.backends.base import Backend
from profharness.attention.config import AUTO, SDP_BACKENDS, SDPA_BACKENDS, Config, sdpa_setting
from profharness.attention.dispatch.advice import (
    ANSWERS_FILE,
    BackendAnswer,
    LiveAnswer,
    advise,
    blockers,
    rule_oracle,
)
from profharness.attention.dispatch.machine import installed_release, machine_of, with_flags
from profharness.attention.dispatch.predict import CPU_ORDER, Eligibility, clean, code, is_header
from profharness.device_types import is_gpu
from profharness.recording.worker.attention import fused_choice, make_inputs, sdpa_mask
from profharness.recording.worker.environment import backend_name, priority_order, set_deterministic
from profharness.recording.worker.failures import (
    is_oom,
    is_refusal,
    reasons_by_backend,
    recorded_warnings,
)
from profharness.recording.worker.program import Stage, run_each
from profharness.recording.worker.timing import Workspace
from profharness.rows import DISABLED, Refusal
from profharness.run import Cell

NO_ADVICE = "--no-advice"

# A warning of PyTorch's C++ logger: [W121 10:00:00.0 sdp_utils.cpp:98] Warning: … (function …)
_STDERR = re.compile(
    r"^(?:\[W[^\]]*\]\s*)?Warning: (.*?)(?:\s*\(function [^()]*(?:\(\))?\))?$", re.M
)


def body(workspace: Workspace) -> None:
    """Append one line of JSON with PyTorch's decisions to the answers file for every cell."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    answers = os.open(workspace.folder / ANSWERS_FILE, flags, 0o644)
    dispatch = LiveDispatch(workspace.device, workspace.environment, NO_ADVICE not in sys.argv[1:])

    def answer(cell: Cell, _: Stage) -> Cell:
        os.write(answers, msgspec.json.encode(dispatch.answer(cell)) + b"\n")
        return replace(cell, config=cell.config.resolve(workspace.device), status="ok")

    run_each(workspace, answer)


class LiveDispatch:
    """PyTorch's dispatch decisions on one device.

    `environment` is the result of `environment.collect()`.
    """

    def __init__(self, device: str, environment: dict[str, Any], advice: bool) -> None:
        self.device, self.environment, self.advice = device, environment, advice
        self.rules = rule_oracle(machine_of(environment), device, with_flags(environment))
        self.stderr = StderrTap()

    def answer(self, cell: Cell) -> LiveAnswer:
        """Return PyTorch's decisions about the config of a cell.

        If an exception occurs, the answer contains only an `error`.
        """
        config, asked = cell.config.resolve(self.device), find_backend(cell.backend)
        if reason := asked.absent():
            return LiveAnswer(cell.cell, config.label, error=reason)
        setting = sdpa_setting(asked.name)
        permitted = SDPA_BACKENDS if setting is None else setting.backends
        try:
            choice = self.choose(config, asked)
            order: tuple[str, ...] = CPU_ORDER
            if is_gpu(self.device):
                with asked.context():  # read after a first choice, which sets the order
                    order = tuple(name for name in priority_order() or () if name in SDPA_BACKENDS)
            advised = [name for name in permitted if name != "math" or choice == "none"]
            backends = tuple(
                self._backend(config, name, asked, advice=self.advice and name in advised)
                if name in permitted
                else BackendAnswer(name, False, (_disabled(name),))
                for name in SDPA_BACKENDS
            )
            return LiveAnswer(cell.cell, config.label, choice, order, backends)
        except Exception as error:
            return LiveAnswer(cell.cell, config.label, error=_failure(error, config))

    def _backend(self, config: Config, name: str, asked: Backend, *, advice: bool) -> BackendAnswer:
        oracle = cache(self.ask)  # `blockers` and `advise` query some configs repeatedly
        eligible = oracle(config, name).eligible

        def choose(changed: Config) -> str:
            try:
                return self.choose(changed, asked)
            except RuntimeError:
                return "unknown"

        advised = (
            advise(config, name, oracle, choose, asked.name, installed_release()) if advice else ()
        )
        can_use = (
            None if name == "math" or not is_gpu(self.device) else self.can_use(config, name)[0]
        )
        reasons = dict.fromkeys(reason for _, reason in blockers(config, name, oracle))
        return BackendAnswer(name, eligible, tuple(reasons), advised, can_use)

    def choose(self, config: Config, asked: Backend = BACKENDS[AUTO]) -> str:
        """Return the SDPA backend that PyTorch chooses among those that `asked` permits.

        Return `none` if PyTorch refuses the call.
        """
        with _deterministic(config), recorded_warnings([]), asked.context():
            return self._fused_choice(config) or "none"

    def ask(self, config: Config, backend: str) -> Eligibility:
        """Return whether PyTorch accepts the config when only `backend` is enabled, and the reasons
        if not.

        The answer is None if PyTorch raises another error, for example because it is out of memory.
        """
        if self.environment.get(f"sdp_{backend}") is False:
            return Eligibility(False, (_disabled(backend),))
        warnings: list[str] = []
        try:
            with (
                _deterministic(config),
                recorded_warnings(warnings),
                self.stderr.into(warnings),
                sdpa_kernel([getattr(SDPBackend, SDP_BACKENDS[backend])]),
            ):
                choice = self._fused_choice(config)
        except RuntimeError as error:
            return Eligibility(None, (Refusal("error", _failure(error, config)),))
        if choice == backend:
            return Eligibility(True)
        reasons = reasons_by_backend(warnings)
        texts = list(dict.fromkeys(text for subject, text in reasons if subject == backend))
        if not texts and is_gpu(self.device):
            texts = self.can_use(config, backend)[1]
        refusals = tuple(Refusal(code(text), text) for text in texts)
        if not refusals:
            by_rule = self.rules(config, backend)
            refusals = (
                Refusal("no_text", "PyTorch refuses the call without giving a reason.", "inferred"),
            )
            if by_rule.eligible is False:
                refusals = (replace(by_rule.reasons[0], source="inferred"),)
        return Eligibility(False, refusals)

    def can_use(self, config: Config, backend: str) -> tuple[bool | None, list[str]]:
        """Return the result of torch's `can_use_BACKEND_attention`, and its reasons if it is False.

        The result is None if torch has no such function or the function raises.
        """
        ask = getattr(torch.backends.cuda, f"can_use_{backend}_attention", None)
        if ask is None:
            return None, []
        warnings: list[str] = []
        try:
            with _deterministic(config), recorded_warnings(warnings), self.stderr.into(warnings):
                inputs = make_inputs(config, self.device, seed=None)
                mask = sdpa_mask(config, inputs)
                tensors = (inputs.query, inputs.key, inputs.value, mask)
                grouped = config.num_kv_heads != config.num_heads
                options = (config.dropout, config.sdpa_call().causal, grouped)
                can = bool(ask(torch.backends.cuda.SDPAParams(*tensors, *options), True))
        except RuntimeError:
            return None, []
        return can, [] if can else [text for text in map(clean, warnings) if not is_header(text)]

    def _fused_choice(self, config: Config) -> str | None:
        inputs = make_inputs(config, self.device, seed=None)
        try:
            name = backend_name(fused_choice(config, inputs))
        except RuntimeError as error:
            if is_refusal(error):
                return None
            raise
        return None if name == "error" else name


class StderrTap:
    """Collects the warnings that PyTorch's C++ code writes to file descriptor 2 (stderr)."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - stays open until the process exits

    @contextlib.contextmanager
    def into(self, texts: list[str]) -> Iterator[None]:
        """Append the warnings that are written inside the block to `texts`.

        Write all other output to stderr when the block ends.
        """
        sys.stderr.flush()
        kept = os.dup(2)
        os.dup2(self._file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            self._file.seek(0)
            written = self._file.read().decode(errors="replace")
            self._file.seek(0)
            self._file.truncate()
            texts += [match.strip() for match in _STDERR.findall(written)]
            rest = [line for line in written.splitlines() if line and not _STDERR.match(line)]
            os.write(2, "".join(f"{line}\n" for line in rest).encode())


@contextlib.contextmanager
def _deterministic(config: Config) -> Iterator[None]:
    """Set the config's deterministic mode inside the block.

    Deterministic mode normally fills new tensors, which launches kernels, so disable that.
    """
    torch.utils.deterministic.fill_uninitialized_memory = False
    set_deterministic(config.deterministic)
    try:
        yield
    finally:
        set_deterministic(False)


def _disabled(backend: str) -> Refusal:
    return Refusal(DISABLED, f"{backend} attention has been runtime disabled.")


def _failure(error: BaseException, config: Config) -> str:
    text = next(iter(str(error).splitlines()), type(error).__name__)
    if is_oom(error) or "out of memory" in text:
        return (
            f"the inputs of {config.label} do not fit into memory, so PyTorch could not be queried: "
            f"{text}"
        )
    return f"the query about {config.label} failed: {text}"
