"""What the workers of a job must have in common to train together, compared before a joiner takes the state.

Invariants:
- A joiner that differs is refused by itself, before it enters a world; its model is left as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from forged.errors import RequestRefused
from forged.torch.state import State

_SHOWN_MAX = 3


class Agreement:
    """A part of the transferred state that refuses the state of a job with another model or another torch."""

    def __init__(self, state: State, backend: str) -> None:
        self._state = state
        self._backend = backend

    def state_dict(self) -> dict[str, Any]:
        """What this worker has."""
        return {
            "torch": ".".join(torch.__version__.split("+")[0].split(".")[:2]),
            "backend": self._backend,
            "model": {
                f"{name}.{key}": _described(tensor)
                for name, module in self._state.modules()
                for key, tensor in module.items()
            },
        }

    def load_state_dict(self, theirs: Mapping[str, Any]) -> None:
        """Compare with what the job has; nothing is loaded."""
        own = self.state_dict()
        for what in ("torch", "backend"):
            if own[what] != theirs[what]:
                raise RequestRefused(
                    f"{what}_differs",
                    f"the job trains with {what} {theirs[what]}, and this worker has {what} {own[what]}",
                    f"start this worker with {what} {theirs[what]}",
                )
        differences = [
            f"{name} is {own['model'].get(name, 'missing')} here and {theirs['model'].get(name, 'missing')} in the job"
            for name in {**theirs["model"], **own["model"]}
            if own["model"].get(name) != theirs["model"].get(name)
        ]
        if differences:
            more = f" and {len(differences) - _SHOWN_MAX} more" if len(differences) > _SHOWN_MAX else ""
            raise RequestRefused(
                "model_differs",
                f"the model is not that of the job: {'; '.join(differences[:_SHOWN_MAX])}{more}",
                "start this worker with the job's model",
            )


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
