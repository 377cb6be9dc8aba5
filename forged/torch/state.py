"""The training state of a torch script: modules, optimizers, schedulers, scalers and random generators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class State:
    """`State(model=model, opt=opt, ...)`: objects with `state_dict` and `load_state_dict`, as one such object."""

    def __init__(self, **parts: Any) -> None:
        self._parts = parts

    def state_dict(self) -> dict[str, Any]:
        """By name, the states of all parts."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make all parts equal to a saved state."""
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
