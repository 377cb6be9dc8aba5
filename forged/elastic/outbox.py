"""The output of calls on a job's coordinator: facts, changed records and probes, until the service takes them.

Invariants:
- Nothing in the outbox has happened for any other part of the daemon yet: the service decides all of it together.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

from forged.elastic.model import WorkerId
from forged.kernel.messages import Fact


class Moment(NamedTuple):
    """One point in time, on both clocks."""

    wall: float
    monotonic: float


@dataclass(frozen=True, slots=True)
class Probe:
    """A request to try a connection to a worker's peer port; a refusal proves that the process is gone."""

    worker: WorkerId
    incarnation: bytes
    seen_at: str
    """Where its connection to the daemon came from."""


class Outbox:
    """What calls have produced since the last `take`."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.facts: list[Fact] = []
        self.probes: list[Probe] = []
        self.triggers: list[Fact] = []
        """The facts among `facts` that make a rescale necessary."""
        self.members: set[str] = set()
        """Ids whose records must be written, or deleted if they are no longer members."""
        self.job = False
        """Whether the job's record changed."""
        self.world = False
        """Whether the committed world changed."""

    def publish(self, fact: Fact) -> None:
        self.facts.append(fact)

    def mark_trigger(self) -> None:
        """Note that the last published fact makes a rescale necessary."""
        self.triggers += self.facts[-1:]

    def take(self) -> Outbox:
        """Return the contents and clear the outbox."""
        taken = copy(self)
        self._clear()
        return taken

    def __bool__(self) -> bool:
        return bool(self.facts or self.members or self.job or self.world)
