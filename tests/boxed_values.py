"""A package of array values with a provider of leaf types, as torch has one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from forged.leaf_types import Array, Keys, LeafRefused, LeafType


class Boxed:
    """An array in a box."""

    def __init__(self, data: Any, *, is_locked: bool = False) -> None:
        self.data = np.asarray(data)
        self.is_locked = is_locked

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape


class Optimizer:
    """Has entries by number from the first step on, as torch's optimizers have."""

    def __init__(self) -> None:
        self.entries: dict[int, dict[str, Any]] = {}

    def step(self, *numbers: int) -> None:
        for number in numbers:
            self.entries[number] = {"step": 1, "moment": Boxed(np.full(2, float(number)))}

    def state_dict(self) -> Mapping[str, Any]:
        return {"entries": self.entries, "rate": 0.1}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.entries = {number: dict(entry) for number, entry in state["entries"].items()}


class Model(Optimizer):
    """An object that takes no new entries."""


def blank_for(owner: Any, keys: Keys, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    if isinstance(owner, Model):
        return None
    assert keys[0] == "entries"
    return Boxed(np.empty(shape, dtype))


def _to_array(value: Boxed) -> Array:
    if value.is_locked:
        raise LeafRefused("is locked", "open it first")
    return value.data


def _from_array(array: Array, have: Boxed | None) -> Boxed:
    if have is None:
        return Boxed(array)
    have.data[...] = array
    return have


LEAF_TYPES = (LeafType(lambda value: isinstance(value, Boxed), _to_array, _from_array),)
