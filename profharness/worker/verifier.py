"""Verifies one cell: calls the backend on poisoned memory, more than once, and holds what it
returns against the fp64 reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from profharness.backends import Attention, Backend, ImplementationError, RefusedError, find_backend
from profharness.cases import values_of
from profharness.config import Config
from profharness.run import Cell, Check
from profharness.worker import cell as cells
from profharness.worker import failures as failing
from profharness.worker.cell import tuning_of
from profharness.worker.compare import (
    NAN_BYTE,
    OTHER_BYTE,
    Expected,
    Got,
    compare,
    expect,
    poisoned,
)
from profharness.worker.failures import heard_warnings, is_refusal
from profharness.worker.inputs import Inputs, broken_output, make_forward, make_inputs
from profharness.worker.reference import GRADIENTS
from profharness.worker.workspace import Bench

LARGE = 5.5  # q and k times this: scores of 30 standard deviations, and exp(90) overflows fp32
OFFSET = 1 << 20  # elements; keeps every alignment that the allocator gives


@dataclass
class Verifier:
    """Verifies cells; the reference of the last problem is kept, for its other backends."""

    bench: Bench
    _known: tuple[tuple[Config, str], Inputs, Expected] | None = field(default=None, init=False)

    def verify(self, cell: Cell, stage: Callable[[str], None]) -> Cell:
        """The cell with its checks. Raises DeadContextError (carrying the result) when the process
        has to end after it.
        """
        cell = replace(cell, config=cell.config.resolve(self.bench.device))
        heard: list[str] = []
        torch.use_deterministic_algorithms(cell.config.deterministic)
        try:
            checks, tuning = self._checks(cell, stage, heard)
        except Exception as error:
            result = failing.failure(cell, self.bench, heard, error)
            if failing.context_is_dead(error):
                raise failing.DeadContextError(_told(result)) from None
            return _told(result)
        cell = replace(cell, tuning=tuning)
        wrong = [check for check in checks if check.passed is False]
        if wrong:
            message = f"wrong {wrong[0].what}: {wrong[0].message}"
            return replace(cell, status="error", message=message, checks=checks)
        return replace(cell, status="ok", checks=checks)

    def _checks(
        self, cell: Cell, stage: Callable[[str], None], heard: list[str]
    ) -> tuple[tuple[Check, ...], dict[str, Any] | None]:
        """The checks, and what the implementation chose for its last call."""
        backend = find_backend(cell.backend, self.bench.sources)
        stage("compile")
        forward_only = self._refused(cell, backend)
        config = replace(cell.config, bwd=False) if forward_only else cell.config
        attention = backend.load() if backend.load is not None else None
        stage("reference")
        inputs, expected = self._reference(config, cell.case or "")
        stage("calls")
        caller = _Caller(config, self.bench, backend, attention, values_of(cell.case or ""))
        with heard_warnings(heard), backend.context():
            got, changed = caller.run(inputs, self.bench.plan.protocol.seed)
        stage("comparison")
        checks = [_inputs_check(changed)]
        checks += [compare(config, inputs, name, got, expected) for name in got.names]
        reason = forward_only or got.no_gradient
        if cell.config.bwd and reason:
            checks += [Check(name, None, f"skipped: {reason}") for name in GRADIENTS]
        elif got.backward_error:
            text = f"the backward pass failed: {got.backward_error}"
            checks += [Check(name, False, text) for name in GRADIENTS if name not in got.names]
        return tuple(checks), tuning_of(backend, attention)

    def _refused(self, cell: Cell, backend: Backend) -> str | None:
        """Why only the forward pass can be verified, or None. Raises what says that neither can."""
        reasons = cells.reasons_beforehand(cell, self.bench, backend)
        if not reasons:
            return None
        forward = replace(cell, config=replace(cell.config, bwd=False))
        if cell.config.bwd and not cells.reasons_beforehand(forward, self.bench, backend):
            return reasons[0].message
        raise RefusedError(reasons[0].code, "; ".join(each.message for each in reasons))

    def _reference(self, config: Config, case: str) -> tuple[Inputs, Expected]:
        key = (config, values_of(case))
        if self._known is None or self._known[0] != key:
            self._known = None  # before the next one takes its memory
            inputs = case_inputs(config, key[1], self.bench.device, self.bench.plan.protocol.seed)
            self._known = (key, inputs, expect(config, inputs))
        return self._known[1], self._known[2]


def case_inputs(config: Config, values: str, device: str, seed: int) -> Inputs:
    """Inputs of a config whose values or place are those of a case; see `verification.Case`."""
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
class _Called:
    """What one call gave: `out` and gradients by name. no_gradient says why it cannot give any,
    backward_error how it failed to.
    """

    tensors: dict[str, Any]
    no_gradient: str | None = None
    backward_error: str | None = None


@dataclass
class _Caller:
    """The calls of one cell. The order is: other inputs, the inputs, other inputs, the inputs
    again, each pair on memory with another pattern; what an earlier call leaves behind is thus
    never the right answer.
    """

    config: Config
    bench: Bench
    backend: Backend
    attention: Attention | None
    values: str

    def run(self, inputs: Inputs, seed: int) -> tuple[Got, str | None]:
        """What came back, and which input was changed on the way (with the place), or None."""
        others = case_inputs(self.config, self.values, self.bench.device, seed + 1)
        before = {name: _bytes(getattr(inputs, name)).clone() for name in GRADIENTS.values()}
        with poisoned(NAN_BYTE, self._sized(inputs), self.bench.device):
            earlier = _copies(self._call(others).tensors)
            first = self._call(inputs)
        kept = _copies(first.tensors)
        changed = _restored(inputs, before)
        with poisoned(OTHER_BYTE, self._sized(inputs), self.bench.device):
            self._call(others)
            reused = tuple(name for name in kept if not _same(first.tensors[name], kept[name]))
            second = self._call(inputs)
        changed = _restored(inputs, before) or changed
        called = (first, second)
        got = Got(
            kept,
            second.tensors,
            earlier,
            reused,
            next((each.no_gradient for each in called if each.no_gradient), None),
            next((each.backward_error for each in called if each.backward_error), None),
        )
        return got, changed

    def _sized(self, inputs: Inputs) -> list[Any]:
        query = inputs.query
        shape = (self.config.batch, self.config.num_heads, self.config.seq_len_q)
        out = torch.empty((*shape, self.config.value_dim), dtype=query.dtype, device="meta")
        sums = torch.empty(shape, dtype=torch.float32, device="meta")
        return [query, inputs.key, inputs.value, out, sums]

    def _call(self, inputs: Inputs) -> _Called:
        """Raises ImplementationError for an output that breaks the contract, RefusedError for what
        the backend says it cannot do.
        """
        try:
            out = make_forward(self.config, inputs, self.attention)()
        except self.backend.refuses as error:
            raise self._refusal(error) from error
        except SystemExit as error:
            raise ImplementationError(f"{self.backend.name} called exit({error.code})") from error
        broken = broken_output(self.config, inputs, out)
        if broken:
            raise ImplementationError(f"{self.backend.name} {broken}")
        called = _Called({"out": out.detach()})
        if self.config.bwd and not out.requires_grad:
            called.no_gradient = "its output carries no gradient"
        elif self.config.bwd:
            self._backward(out, inputs, called)
        self.bench.sync()
        return called

    def _backward(self, out: Any, inputs: Inputs, called: _Called) -> None:
        """Add the gradients; what goes wrong costs them alone, and not the output."""
        leaves = tuple(getattr(inputs, name) for name in GRADIENTS.values())
        try:
            grads = torch.autograd.grad(out, leaves, inputs.grad, allow_unused=True)
            self.bench.sync()
        except Exception as error:
            if failing.is_oom(error) or failing.context_is_dead(error):
                raise
            text = failing.shortened(f"{type(error).__name__}: {str(error).strip()}")
            if isinstance(error, self.backend.refuses) or is_refusal(error):
                called.no_gradient = text
            else:
                called.backward_error = text
        else:
            called.tensors |= dict(zip(GRADIENTS, grads, strict=True))

    def _refusal(self, error: Exception) -> Exception:
        known = isinstance(error, (RefusedError, ImplementationError)) or is_refusal(error)
        if known or failing.is_oom(error) or failing.context_is_dead(error):
            return error
        text = f"{type(error).__name__}: {str(error).strip()}"
        return RefusedError("unsupported", failing.shortened(text))


def _told(result: Cell) -> Cell:
    """A result without checks as one: passed is None where the backend is not to blame."""
    blameless = result.status in ("refused", "oom")
    check = Check("out", None if blameless else False, result.message)
    return replace(result, checks=(check,))


def _bytes(tensor: Any) -> Any:
    """The whole storage of a tensor, also what lies between and around its elements."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage())


def _copies(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: None if each is None else each.clone() for name, each in tensors.items()}


def _restored(inputs: Inputs, before: dict[str, Any]) -> str | None:
    """Put back what the inputs held before; where it was changed, or None."""
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


def _inputs_check(changed: str | None) -> Check:
    return Check("inputs", changed is None, changed)


def _same(one: Any, other: Any) -> bool:
    """Bitwise, so that NaN equals itself."""
    if one is None or other is None:
        return one is other
    pair = (each.contiguous().view(torch.uint8) for each in (one, other))
    return bool(torch.equal(*pair))
