"""Saves and restores the random generators of a process.

Invariants:
- A restored generator continues the sequence of the saved one.
- The state is per rank and never deduplicated.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from forged.checkpoint.errors import corrupted, invalid
from forged.checkpoint.model import PerRank

PYTHON = "python"
NUMPY = "numpy"
REGISTERED = "registered"


@runtime_checkable
class Generator(Protocol):
    """A generator of another library."""

    def get_state(self) -> Any:
        """The state as plain values and arrays."""
        ...

    def set_state(self, state: Any) -> object: ...


Generators = Mapping[str, Generator | np.random.Generator | random.Random]


def capture(registered: Generators) -> PerRank:
    """The states of all generators of this process."""
    state: dict[str, Any] = {PYTHON: _of_python(random.getstate()), NUMPY: _of_numpy(np.random.get_state())}
    if registered:
        state[REGISTERED] = {name: _of(name, generator) for name, generator in registered.items()}
    return PerRank(state)


def restore(state: Any, registered: Generators) -> None:
    """Restore the generators. A generator without a saved state stays as it is."""
    try:
        if PYTHON in state:
            random.setstate(_to_python(state[PYTHON]))
        if NUMPY in state:
            np.random.set_state(_to_numpy(state[NUMPY]))
        for name, generator in registered.items():
            if name in state.get(REGISTERED, {}):
                _give(generator, state[REGISTERED][name])
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise corrupted(f"invalid state of the random generators: {error}", "") from error


def _of_python(state: tuple[Any, ...]) -> dict[str, Any]:
    version, words, gauss = state
    return {"version": version, "words": np.array(words, np.uint32), "gauss": gauss}


def _to_python(state: Mapping[str, Any]) -> tuple[Any, ...]:
    return state["version"], tuple(int(word) for word in state["words"]), state["gauss"]


def _of_numpy(state: Any) -> dict[str, Any]:
    name, keys, position, has_gauss, gauss = state
    return {"name": name, "keys": keys, "position": position, "has_gauss": has_gauss, "gauss": gauss}


def _to_numpy(state: Mapping[str, Any]) -> tuple[str, Any, int, int, float]:
    return state["name"], state["keys"], state["position"], state["has_gauss"], state["gauss"]


def _of(name: str, generator: Any) -> Any:
    match generator:
        case np.random.Generator():
            return generator.bit_generator.state
        case random.Random():
            return _of_python(generator.getstate())
        case Generator():
            return generator.get_state()
        case _:
            raise invalid(f"generator {name} is a {type(generator).__name__}", "give it get_state and set_state")


def _give(generator: Any, state: Any) -> None:
    match generator:
        case np.random.Generator():
            generator.bit_generator.state = state
        case random.Random():
            generator.setstate(_to_python(state))
        case _:
            generator.set_state(state)
