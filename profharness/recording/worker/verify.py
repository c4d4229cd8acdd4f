"""A program of the worker that verifies instead of measuring: call each cell's backend several
times on poisoned memory, and compare its results with the fp64 reference.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from profharness.attention.backends import find_backend
from profharness.attention.backends.base import Attention, Backend, RefusedError
from profharness.attention.backends.inputs import Inputs
from profharness.attention.cases import values_of
from profharness.attention.config import Config
from profharness.recording.worker.cell import tuning_of
from profharness.recording.worker.environment import set_deterministic
from profharness.recording.worker.failures import (
    context_is_dead,
    error_text,
    failure,
    implementation_errors,
    is_oom,
    is_refusal,
    reasons_beforehand,
    recorded_warnings,
    unless_dead,
)
from profharness.recording.worker.inputs import check_output, make_forward, make_inputs
from profharness.recording.worker.program import Program, Stage, run_each
from profharness.recording.worker.reference import (
    GRADIENTS,
    NAN_BYTE,
    OTHER_BYTE,
    Expected,
    Got,
    compare,
    expect,
    poisoned,
)
from profharness.recording.worker.timing import Workspace, open_workspace
from profharness.run import Cell, Check

LARGE = 5.5  # factor on q and k; scores then have a standard deviation of 30, and exp(90) overflows fp32
OFFSET = 1 << 20  # offset in elements; it preserves every alignment of the allocator


def body(program: Program) -> None:
    """Verify every cell."""
    run_each(program, Verifier(open_workspace(program)).verify)


@dataclass
class Verifier:
    """Verify cells. The reference of the last problem is reused for its other backends."""

    workspace: Workspace
    _last: tuple[tuple[Config, str], Inputs, Expected] | None = field(default=None, init=False)

    def verify(self, cell: Cell, stage: Stage) -> Cell:
        """Return the cell with its checks. Raise DeadContextError if no other cell can follow."""
        cell = replace(cell, config=cell.config.resolve(self.workspace.device))
        texts: list[str] = []
        set_deterministic(cell.config.deterministic)
        try:
            checks, tuning = self._checks(cell, stage, texts)
        except Exception as error:
            result = failure(cell, self.workspace, texts, error)
            # a backend that refuses, or that had too little memory, is not to blame
            blameless = result.status in ("refused", "oom")
            check = Check("out", None if blameless else False, result.message)
            return unless_dead(replace(result, checks=(check,)), error)
        cell = replace(cell, tuning=tuning, status="ok", checks=checks)
        wrong = [check for check in checks if check.passed is False]
        if not wrong:
            return cell
        return replace(cell, status="error", message=f"wrong {wrong[0].what}: {wrong[0].message}")

    def _checks(
        self, cell: Cell, stage: Stage, texts: list[str]
    ) -> tuple[tuple[Check, ...], dict[str, Any] | None]:
        """Return the checks, and the implementation's tuning of its last call."""
        backend = find_backend(cell.backend, self.workspace.sources)
        stage("compile")
        forward_only = self._forward_only(cell.config, backend)
        config = replace(cell.config, bwd=False) if forward_only else cell.config
        attention = backend.load() if backend.load is not None else None
        stage("reference")
        values = values_of(cell.case or "")
        inputs, expected = self._reference(config, values)
        stage("calls")
        caller = _Caller(config, self.workspace, backend, attention, values)
        with recorded_warnings(texts), backend.context():
            got, changed = caller.run(inputs, self.workspace.plan.protocol.seed)
        stage("comparison")
        checks = [Check("inputs", changed is None, changed)]
        names = [name for name in got.first if name in got.second]
        checks += [compare(config, inputs, name, got, expected) for name in names]
        reason = forward_only or got.no_gradient
        if cell.config.bwd and reason:
            checks += [Check(name, None, f"skipped: {reason}") for name in GRADIENTS]
        elif got.backward_error:
            text = f"the backward pass failed: {got.backward_error}"
            checks += [Check(name, False, text) for name in GRADIENTS if name not in names]
        return tuple(checks), tuning_of(backend, attention)

    def _forward_only(self, config: Config, backend: Backend) -> str | None:
        """Return why only the forward pass can be verified. Raise RefusedError if nothing can."""
        refusals = reasons_beforehand(config, self.workspace, backend)
        if not refusals:
            return None
        forward = replace(config, bwd=False)
        if config.bwd and not reasons_beforehand(forward, self.workspace, backend):
            return refusals[0].message
        raise RefusedError(refusals[0].code, "; ".join(refusal.message for refusal in refusals))

    def _reference(self, config: Config, values: str) -> tuple[Inputs, Expected]:
        key = (config, values)
        if self._last is None or self._last[0] != key:
            self._last = None  # before the next call uses its memory
            seed = self.workspace.plan.protocol.seed
            inputs = case_inputs(config, values, self.workspace.device, seed)
            self._last = (key, inputs, expect(config, inputs))
        return self._last[1], self._last[2]


def case_inputs(config: Config, values: str, device: str, seed: int) -> Inputs:
    """Return inputs of a config with the values or placement of a case; see `cases.VALUES`."""
    inputs = make_inputs(config, device, seed)
    with torch.no_grad():
        if values == "large":
            inputs.query.mul_(LARGE)
            inputs.key.mul_(LARGE)
        elif values == "equal":
            inputs.query.fill_(1)
            inputs.key.fill_(1)
        elif values == "masked_row":
            mask = inputs.mask.clone()
            mask[..., -1, :] = False if mask.dtype == torch.bool else -torch.inf
            grows = inputs.mask.requires_grad
            return replace(inputs, mask=mask.requires_grad_() if grows else mask)
    if values != "large_offset":
        return inputs
    moved = {name: _moved(getattr(inputs, name)) for name in GRADIENTS.values()}
    return replace(inputs, **moved)


def _moved(tensor: Any) -> Any:
    storage = torch.zeros(OFFSET + tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    made = storage[OFFSET:].view(tensor.shape)
    made.copy_(tensor.detach())
    return made.requires_grad_(tensor.requires_grad)


@dataclass
class _Results:
    """The results of one call by name. `no_gradient` and `backward_error` are why gradients are
    missing.
    """

    tensors: dict[str, Any]
    no_gradient: str | None = None
    backward_error: str | None = None


@dataclass
class _Caller:
    """The calls of one cell: twice a call on other inputs, followed by a call on its own inputs.

    Each pair of calls runs on memory that is filled with a different byte pattern. Data that an
    earlier call left in memory is therefore never the correct result.
    """

    config: Config
    workspace: Workspace
    backend: Backend
    attention: Attention | None
    values: str

    def run(self, inputs: Inputs, seed: int) -> tuple[Got, str | None]:
        """Return the results, and which input the call changed (with the place), or None."""
        device = self.workspace.device
        others = case_inputs(self.config, self.values, device, seed + 1)
        before = {name: _bytes(getattr(inputs, name)).clone() for name in GRADIENTS.values()}
        with poisoned(NAN_BYTE, self._sized(inputs), device):
            earlier = _copies(self._call(others).tensors)
            first = self._call(inputs)
        kept = _copies(first.tensors)
        changed = _restored(inputs, before)
        with poisoned(OTHER_BYTE, self._sized(inputs), device):
            self._call(others)
            reused = tuple(name for name in kept if not _same(first.tensors[name], kept[name]))
            second = self._call(inputs)
        changed = _restored(inputs, before) or changed
        got = Got(
            kept,
            second.tensors,
            earlier,
            reused,
            first.no_gradient or second.no_gradient,
            first.backward_error or second.backward_error,
        )
        return got, changed

    def _sized(self, inputs: Inputs) -> list[Any]:
        """Return tensors of the sizes that a call may allocate."""
        query = inputs.query
        shape = (self.config.batch, self.config.num_heads, self.config.seq_len_q)
        out = torch.empty((*shape, self.config.value_dim), dtype=query.dtype, device="meta")
        sums = torch.empty(shape, dtype=torch.float32, device="meta")
        return [query, inputs.key, inputs.value, out, sums]

    def _call(self, inputs: Inputs) -> _Results:
        """Call the backend. Raise ImplementationError if the output violates the contract, and
        RefusedError if the backend refuses.
        """
        with implementation_errors(self.backend):
            out = make_forward(self.config, inputs, self.attention)()
        check_output(self.backend.name, self.config, inputs, out)
        results = _Results({"out": out.detach()})
        if self.config.bwd and not out.requires_grad:
            results.no_gradient = "its output carries no gradient"
        elif self.config.bwd:
            self._backward(out, inputs, results)
        self.workspace.sync()
        return results

    def _backward(self, out: Any, inputs: Inputs, results: _Results) -> None:
        """Add the gradients. A failure loses only them, not the output."""
        leaves = tuple(getattr(inputs, name) for name in GRADIENTS.values())
        try:
            grads = torch.autograd.grad(out, leaves, inputs.grad, allow_unused=True)
            self.workspace.sync()
        except Exception as error:
            if is_oom(error) or context_is_dead(error):
                raise
            if isinstance(error, self.backend.refuses) or is_refusal(error):
                results.no_gradient = error_text(error)
            else:
                results.backward_error = error_text(error)
        else:
            results.tensors |= dict(zip(GRADIENTS, grads, strict=True))


def _bytes(tensor: Any) -> Any:
    """Return a tensor's whole storage, including bytes between and around its elements."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage())


def _copies(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: None if tensor is None else tensor.clone() for name, tensor in tensors.items()}


def _restored(inputs: Inputs, before: dict[str, Any]) -> str | None:
    """Restore the inputs' contents. Return where they were changed, or None."""
    changed = None
    for name, old in before.items():
        tensor = getattr(inputs, name)
        held = _bytes(tensor)
        places = (held != old).nonzero()
        if len(places):
            element = int(places[0]) // tensor.element_size()
            changed = changed or f"writes into {name}, element {element} of its storage"
            held.copy_(old)
    return changed


def _same(first: Any, second: Any) -> bool:
    """Compare bitwise, so that NaN equals itself."""
    if first is None or second is None:
        return first is second
    bits = (tensor.contiguous().view(torch.uint8) for tensor in (first, second))
    return bool(torch.equal(*bits))
