"""The state of a training script: nested dicts and lists of arrays, plain values, and objects with `state_dict`.

Invariants:
- A dict or list that the script holds stays the same object: it receives the loaded values.
- An object with `load_state_dict` is called once, with its own part.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from forged.checkpoint.model import ObjectState, PerRank, is_stateful


class ScriptState:
    """A script's state as one object with `state_dict` and `load_state_dict`."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        """The state, with what its objects return in their place."""
        return values_of(self._state)

    def load_state_dict(self, state: Any) -> None:
        """Make the state equal to a loaded one."""
        adopt(self._state, state)


def values_of(state: Any) -> Any:
    """The state, with what its objects with `state_dict` return in their place."""
    if is_stateful(state):
        return ObjectState(state.state_dict(), state)
    if isinstance(state, PerRank):
        return PerRank(values_of(state.value))
    if isinstance(state, Mapping):
        return {key: values_of(value) for key, value in state.items()}
    if isinstance(state, list):
        return [values_of(value) for value in state]
    if isinstance(state, tuple):
        return tuple(values_of(value) for value in state)
    return state


def adopt(present: Any, loaded: Any) -> Any:
    """The loaded value, put into the present one in place as far as that fits. Its arrays are filled already."""
    if is_stateful(present):
        present.load_state_dict(loaded)
        return present
    if isinstance(present, PerRank):
        return PerRank(adopt(present.value, loaded))
    if isinstance(present, MutableMapping) and isinstance(loaded, Mapping):
        for key, value in loaded.items():
            present[key] = adopt(present.get(key), value)
        return present
    if isinstance(present, list) and isinstance(loaded, list) and len(present) == len(loaded):
        present[:] = map(adopt, present, loaded)
        return present
    if isinstance(present, tuple) and isinstance(loaded, tuple) and len(present) == len(loaded):
        values = map(adopt, present, loaded)
        return type(present)._make(values) if hasattr(present, "_make") else tuple(values)
    return loaded


def contains_stateful(state: Any) -> bool:
    """Whether the state is or contains an object with `state_dict`."""
    if isinstance(state, PerRank):
        return contains_stateful(state.value)
    if isinstance(state, Mapping):
        return any(map(contains_stateful, state.values()))
    if isinstance(state, list | tuple):
        return any(map(contains_stateful, state))
    return is_stateful(state)
