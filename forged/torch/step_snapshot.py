"""What a step changes before it is committed, kept so that the step can be repeated as if it had not begun.

Parameters, optimizers and schedulers change after the commit only, and are not copied.

Invariants:
- After `restore`, buffers, gradients and random generators have every bit that they had at `take`.
- Gradients that were None are None again. Copies are made in memory that is reused.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch


class _Kept(NamedTuple):
    """A tensor and its copy."""

    tensor: torch.Tensor
    copy: torch.Tensor


class _Generators(NamedTuple):
    """The states of the random generators of a process."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    cuda: list[torch.Tensor]
    own: list[tuple[torch.Generator, torch.Tensor]]
    """Those that are parts of the state."""


class StepSnapshot:
    """The last snapshot of these parts of a state."""

    def __init__(self, parts: Iterable[Any], *, has_rng: bool) -> None:
        self._parts = list(parts)
        self._has_rng = has_rng
        self._is_taken = False
        self._tables: list[dict[str, Any]] | None = None
        """The buffers of each module; None before the modules have been walked."""
        self._parameters: list[torch.Tensor] = []
        self._buffers: dict[tuple[int, str], _Kept] = {}
        """By table and name."""
        self._gradients: list[_Kept | None] = []
        """By parameter."""
        self._generators: _Generators | None = None

    def forget(self) -> None:
        """Walk the modules anew at the next snapshot, and restore nothing before that."""
        self._is_taken, self._tables = False, None

    def take(self) -> None:
        """Keep the present values."""
        if self._tables is None:
            self._walk()
        assert self._tables is not None
        with torch.no_grad():
            self._buffers = {
                (place, name): _kept(buffer, self._buffers.get((place, name)))
                for place, table in enumerate(self._tables)
                for name, buffer in table.items()
                if buffer is not None
            }
            before = self._gradients or [None] * len(self._parameters)
            self._gradients = [
                None if parameter.grad is None else _kept(parameter.grad, kept)
                for parameter, kept in zip(self._parameters, before, strict=True)
            ]
        self._generators = _present_generators(self._parts) if self._has_rng else None
        self._is_taken = True

    def restore(self) -> None:
        """Restore the values that were kept; nothing if there is no snapshot."""
        if not self._is_taken:
            return
        assert self._tables is not None
        with torch.no_grad():
            for (place, name), kept in self._buffers.items():
                kept.tensor.copy_(kept.copy)
                self._tables[place][name] = kept.tensor
            for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
                if gradient is not None:
                    gradient.tensor.copy_(gradient.copy)
                parameter.grad = None if gradient is None else gradient.tensor
        for part in self._parts:
            if isinstance(part, torch.amp.GradScaler) and part.is_enabled():
                # Which gradients have been unscaled in this step.
                part._per_optimizer_states.clear()
        if self._generators is not None:
            _restore(self._generators)

    def _walk(self) -> None:
        modules = [module for part in self._parts if isinstance(part, torch.nn.Module) for module in part.modules()]
        of_modules = [parameter for module in modules for parameter in module._parameters.values()]
        of_optimizers = [
            parameter
            for part in self._parts
            if isinstance(part, torch.optim.Optimizer)
            for group in part.param_groups
            for parameter in group["params"]
        ]
        distinct = {id(one): one for one in (*of_modules, *of_optimizers) if one is not None and one.requires_grad}
        self._parameters, self._gradients = list(distinct.values()), []
        self._tables, self._buffers = [module._buffers for module in modules], {}


def _kept(tensor: torch.Tensor, before: _Kept | None) -> _Kept:
    """The tensor with a copy, made in the memory of the copy before."""
    if before is None or before.tensor is not tensor or before.copy.shape != tensor.shape:
        return _Kept(tensor, tensor.detach().clone())
    before.copy.copy_(tensor)
    return before


def _present_generators(parts: Iterable[Any]) -> _Generators:
    has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    cuda = torch.cuda.get_rng_state_all() if has_cuda else []
    own = [(part, part.get_state()) for part in parts if isinstance(part, torch.Generator)]
    return _Generators(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda, own)


def _restore(generators: _Generators) -> None:
    random.setstate(generators.python)
    np.random.set_state(generators.numpy)
    torch.set_rng_state(generators.cpu)
    if generators.cuda:
        torch.cuda.set_rng_state_all(generators.cuda)
    for generator, state in generators.own:
        generator.set_state(state)
