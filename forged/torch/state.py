"""The training state of a torch script: modules, optimizers, schedulers, scalers and random generators.

Invariants:
- The state of a module has the same names whether the module is compiled, wrapped by DistributedDataParallel, or not.
- All objects of the script stay the same: they receive what is loaded, tensors and arrays in place.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

from forged.errors import RequestRefused
from forged.leaf_types import PerRank
from forged.torch.step_snapshot import StepSnapshot

RNG = "rng"
COMPILED = "_orig_mod."
"""What `torch.compile` adds to the names of a module's parameters."""
_KINDS = (torch.Generator, torch.Tensor, np.ndarray, MutableMapping, list)
"""What a part may be that is no object with `state_dict`."""
_KEPT_KINDS = (Counter, OrderedDict)
"""Dicts of schedulers that are more than their items, and are saved as plain ones."""


class State:
    """`State(model=model, opt=opt, sched=sched, scaler=scaler)`: the state of a script, for `state=` and checkpoints.

    A part is a module, any object with `state_dict` and `load_state_dict`, a `torch.Generator`, a tensor, an array, or
    a dict or list of these. With `rng`, torch's own generators belong to it: of the CPU and of all CUDA devices.
    """

    def __init__(self, *, rng: bool = True, **parts: Any) -> None:
        for name, part in parts.items():
            if not (_is_stateful(part) or isinstance(part, _KINDS)):
                raise RequestRefused(
                    "state_unfit",
                    f"{name} of ft.State is a {type(part).__name__}",
                    "give objects with state_dict() and load_state_dict(), generators, tensors, arrays, dicts or lists",
                )
        self._parts = {name: _unwrapped(part) for name, part in parts.items()}
        self._rng = rng
        self._snapshot = StepSnapshot(self._parts.values(), has_rng=rng)

    def part_at(self, name: str) -> Any:
        """The part of this name, as its values are saved; None if there is none."""
        return self._parts.get(name)

    def modules(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The modules by name, each with its parameters and buffers."""
        for name, part in self._parts.items():
            if isinstance(part, torch.nn.Module):
                yield name, _values(part)

    def optimizers(self) -> Iterator[torch.optim.Optimizer]:
        """The optimizers."""
        return (part for part in self._parts.values() if isinstance(part, torch.optim.Optimizer))

    def holds(self, module: torch.nn.Module) -> bool:
        """Whether a module is a part, so that all ranks have the same values of it."""
        return any(part is _unwrapped(module) for part in self._parts.values())

    def state_dict(self) -> dict[str, Any]:
        """By name, the values of all parts."""
        state = {name: _values(part) for name, part in self._parts.items()}
        if self._rng:
            state[RNG] = PerRank(_generators())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make all parts equal to a saved state. A rank that none was saved for keeps its random generators."""
        for name, part in self._parts.items():
            _put(part, state[name])
        if self._rng and state.get(RNG):
            _set_generators(state[RNG])
        self._snapshot.forget()

    def snapshot(self) -> None:
        """Keep what a step changes before it is committed: buffers, gradients, random generators."""
        self._snapshot.take()

    def restore(self) -> None:
        """Make buffers, gradients and random generators those of the last snapshot, because the step is repeated."""
        self._snapshot.restore()


def _is_stateful(part: Any) -> bool:
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


def _unwrapped(part: Any) -> Any:
    """The module that a compiled or a distributed one wraps."""
    inner = part
    while inner is not None:
        part = inner
        inner = None
        if isinstance(part, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
            inner = part.module
        elif isinstance(part, torch.nn.Module):
            inner = part._modules.get(COMPILED.removesuffix("."))
    return part


# The values of a part.


def _values(part: Any) -> Any:
    if isinstance(part, torch.nn.Module):
        return {_plain_name(name): value for name, value in _of_module(part).items()}
    if _is_stateful(part):
        return part.state_dict()
    if isinstance(part, torch.Generator):
        return part.get_state()
    if isinstance(part, Mapping):
        return {key: _values(value) for key, value in part.items()}
    if isinstance(part, list):
        return [_values(one) for one in part]
    if isinstance(part, tuple):
        return tuple(_values(one) for one in part)
    return part


def _of_module(module: torch.nn.Module) -> Mapping[str, Any]:
    # The parameters themselves: those that are loaded in place need not be copied on themselves.
    is_plain = type(module).state_dict is torch.nn.Module.state_dict
    found: Mapping[str, Any] = module.state_dict(keep_vars=True) if is_plain else module.state_dict()
    return found


def _plain_name(name: str) -> str:
    return name.replace(COMPILED, "")


def _put(part: Any, values: Any) -> Any:
    """The part with these values, in place as far as it can change."""
    if isinstance(part, torch.nn.Module):
        names = {_plain_name(name): name for name in _of_module(part)}
        part.load_state_dict({names.get(name, name): value for name, value in values.items()})
    elif _is_stateful(part):
        part.load_state_dict(_of_kinds(part.state_dict(), values))
    elif isinstance(part, torch.Generator):
        part.set_state(values)
    elif isinstance(part, MutableMapping):
        for key in part.keys() - values.keys():
            del part[key]
        part.update({key: _put(part.get(key), value) for key, value in values.items()})
    elif isinstance(part, list):
        part[:] = [_put(part[n] if n < len(part) else None, value) for n, value in enumerate(values)]
    elif isinstance(part, torch.Tensor) and isinstance(values, torch.Tensor) and part.shape == values.shape:
        with torch.no_grad():
            part.copy_(values)
    elif isinstance(part, np.ndarray) and isinstance(values, np.ndarray) and part.shape == values.shape:
        part[...] = values
    else:
        return values
    return part


def _of_kinds(present: Any, values: Any) -> Any:
    """The values, with the kinds of dicts that are present in their places."""
    if isinstance(present, Mapping) and isinstance(values, dict):
        found = {key: _of_kinds(present.get(key), value) for key, value in values.items()}
        kind: Any = type(present)
        return kind(found) if kind in _KEPT_KINDS else found
    return values


# Random generators.


def _generators() -> dict[str, Any]:
    """The states of torch's generators of this process."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states |= {f"cuda:{number}": state for number, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def _set_generators(states: Mapping[str, Any]) -> None:
    """Set the generators of the devices that this process has."""
    torch.set_rng_state(_bytes_of(states["cpu"]))
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            if (state := states.get(f"cuda:{number}")) is not None:
                torch.cuda.set_rng_state(_bytes_of(state), number)


def _bytes_of(state: Any) -> torch.Tensor:
    return state if isinstance(state, torch.Tensor) else torch.from_numpy(np.array(state))
