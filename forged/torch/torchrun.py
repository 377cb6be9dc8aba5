"""The entry point of `torchrun --rdzv-backend=forged`.

Every torchrun loads it, whatever its backend, so it imports nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def rendezvous() -> Callable[[Any], Any]:
    """What makes a rendezvous of torchrun's parameters."""

    def create(parameters: Any) -> Any:
        from forged.torch.rendezvous import ForgedRendezvous

        return ForgedRendezvous(parameters)

    return create
