"""What comes out of the calls on a cluster, until somebody takes it.

Law: nothing here has happened yet for anybody else; what a call leaves here is decided together, or not at all.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

from forged.elastic.model import WorkerId
from forged.kernel.messages import Fact


class Moment(NamedTuple):
    """Now, by both clocks."""

    wall: float
    monotonic: float


@dataclass(frozen=True, slots=True)
class Probe:
    """Somebody should see whether anybody answers at a worker's address."""

    worker: WorkerId
    incarnation: bytes


class Outbox:
    """What has come out of the calls since it was emptied."""

    def __init__(self) -> None:
        self._empty()

    def _empty(self) -> None:
        self.facts: list[Fact] = []
        self.probes: list[Probe] = []
        self.triggers: list[Fact] = []
        """Those of the facts that make a rescale necessary."""
        self.members: set[str] = set()
        """Whose records have to be written, or deleted where they are members no more."""
        self.cluster = False
        self.world = False

    def say(self, fact: Fact) -> None:
        """Tell everybody."""
        self.facts.append(fact)

    def trigger(self) -> None:
        """What was said last makes a rescale necessary."""
        self.triggers += self.facts[-1:]

    def take(self) -> Outbox:
        """What is in it, which it holds no more."""
        taken = copy(self)
        self._empty()
        return taken

    def __bool__(self) -> bool:
        return bool(self.facts or self.members or self.cluster or self.world)
