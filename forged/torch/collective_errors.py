"""Which exceptions are the failure of a torch collective, and how often one worker may repeat a step for them.

Invariants:
- The failure of a collective voids the step at once: torch says nothing of which rank is lost, and the library knows.
- A step that the same worker has voided `ABORTS_MAX` times with the same members is not repeated again: the cause is
  the script's or the hosts', and not a lost worker.
"""

from __future__ import annotations

import torch.distributed as dist

from forged.errors import RequestRefused
from forged.worker.errors import StepAborted

ABORTS_MAX = 5
_GLOO = ("gloo/", "[gloo]", "Gloo ", "ProcessGroupGloo", "Connection closed by peer", "Connection reset by peer")
"""What only the messages of gloo's errors have, which are plain `RuntimeError`s."""


def is_collective_error(error: BaseException | None) -> bool:
    """Whether a torch collective, process group or store has failed."""
    while error is not None:
        if isinstance(error, dist.DistError):
            return True
        if type(error) is RuntimeError and any(mark in str(error) for mark in _GLOO):
            return True
        error = error.__cause__
    return False


class Repeats:
    """How often this worker has voided the present step by itself."""

    def __init__(self) -> None:
        self._of: tuple[int, frozenset[str]] | None = None
        self._count = 0

    def count(self, step: int, members: frozenset[str], error: Exception) -> None:
        """This worker voids the step because of this exception; raises if that has happened too often."""
        if self._of != (step, members):
            self._of, self._count = (step, members), 0
        self._count += 1
        if self._count >= ABORTS_MAX:
            reason = error.reason if isinstance(error, StepAborted) else str(error)
            often = f"{self._count} times with the same {len(members)} members"
            raise RequestRefused(
                "step_always_aborted",
                f"this worker has aborted step {step} {often}: {reason}",
                "remove the cause that the message names, and start the worker again",
            ) from error
