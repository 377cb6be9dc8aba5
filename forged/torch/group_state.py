"""The state of a model that is sharded inside a replica group, carried from one world to the next.

Each world makes the sharded model anew, on its own device mesh. What a rank holds of it depends on its group rank
alone, so it goes over as it is: from the model of the world before, or from the same group rank of another group.

Invariants:
- A joiner receives its values before it has a model; they are put into the first one that it makes.
- Parts of sharded tensors only go to the same part of the same tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from forged.torch.state import State
from forged.torch.tensors import local_of
from forged.worker.state_transfer.encoding import Arriving, Packed, pack

_NOTHING: dict[str, Any] = {"steps_before": 0, "head": b"", "parts": []}


class GroupState:
    """The values that a rank of a replica group holds; a part of the transferred state."""

    def __init__(self) -> None:
        self._attached: State | None = None
        self._steps_before = 0
        self._values = _NOTHING
        """Those that are not in a model: that have arrived, or are of the world before."""

    @property
    def has_values(self) -> bool:
        """Whether there are values for the model of a new world."""
        return self._attached is not None or bool(self._values["head"])

    def state_dict(self) -> dict[str, Any]:
        """The values, in the memory of the model that has them."""
        if self._attached is None:
            return self._values
        packed = pack(self._attached)
        return {"steps_before": self._steps_before, "head": packed.head, "parts": _arrays_of(packed)}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Keep values that have arrived for the next model."""
        self._attached, self._values = None, dict(values)

    def detach(self) -> None:
        """Keep the values of the model: its world is over, and the next one makes another."""
        self._attached, self._values = None, self.state_dict()

    def attach(self, state: State, steps_before: int) -> None:
        """The values are those of a state from now on."""
        self._attached, self._steps_before, self._values = state, steps_before, _NOTHING

    def put_into(self, state: State) -> int:
        """Load the values into a state of the same shards; returns by how much its steps differ from the worker's."""
        arriving = Arriving(self._values["head"])
        for target, source in zip(arriving.parts, self._values["parts"], strict=True):
            target[:] = memoryview(source)
        arriving.adopt(state)
        steps_before: int = self._values["steps_before"]
        return steps_before


def _arrays_of(packed: Packed) -> list[Any]:
    return [np.frombuffer(part, np.uint8) for part in packed.parts]


def share_first(state: State, replicas: Any) -> None:
    """Make the modules of a state equal to those of the first replica; all ranks call it together."""
    with torch.no_grad():
        for _, values in state.modules():
            for value in values.values():
                if isinstance(value, torch.Tensor):
                    dist.broadcast(local_of(value), group=replicas, group_src=0)
