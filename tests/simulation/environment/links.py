"""The links between simulated hosts: partitions, latency and faults.

A link is one direction between two hosts. All randomness of the network is drawn here from one `Random`; every event is
written to `trace`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from contextvars import copy_context
from dataclasses import dataclass
from random import Random

Range = tuple[float, float]
Trace = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults of a link. Probabilities are per write; ranges are uniform."""

    latency_s: Range = (0.0002, 0.002)
    bytes_per_s: float = math.inf
    split: float = 0.0
    """A write arrives in several pieces, each at its own time."""
    merge: float = 0.0
    """A piece arrives together with the next one."""
    reset: float = 0.0
    """The connection is reset; bytes in flight are lost in both directions."""
    drop: float = 0.0
    """A write is lost; nothing after it arrives, until the sender gives up."""
    duplicate: float = 0.0
    """A write arrives twice, as with a faulty middlebox."""
    give_up_after_s: Range = (5.0, 30.0)
    """How long a sender retransmits before it ends the connection."""
    keepalive_s: Range | None = None
    """How long a receiver takes to detect a vanished peer; None: never."""
    connect_timeout_s: float = 5.0


CALM = Faults()
LOOPBACK = Faults(latency_s=(0.00001, 0.0001))
"""Connections within a host have no faults by default."""


class Links:
    """All links of a simulated network."""

    def __init__(self, loop: asyncio.AbstractEventLoop, random: Random, faults: Faults, trace: Trace | None) -> None:
        self.loop = loop
        self.context = copy_context()
        """Bytes in flight do not belong to the sending process."""
        self.random = random
        self.faults = faults
        self.special: dict[tuple[str, str], Faults] = {}
        """Faults of single links, by source and target."""
        self.gone: set[str] = set()
        self.trace: Trace = trace or (lambda _: None)
        self._blocked: set[tuple[str, str]] = set()

    def faults_of(self, source: str, target: str) -> Faults:
        """The current faults from one host to another."""
        return self.special.get((source, target), LOOPBACK if source == target else self.faults)

    def latency_s(self, source: str, target: str) -> float:
        """Draw the latency from one host to another."""
        return self.draw(self.faults_of(source, target).latency_s)

    def draw(self, between: Range) -> float:
        """Draw a number from a range."""
        return self.random.uniform(*between)

    def chance(self, probability: float) -> bool:
        """Draw an event with this probability."""
        return probability > 0 and self.random.random() < probability

    def reaches(self, source: str, target: str) -> bool:
        """Whether a packet sent now would arrive."""
        return (source, target) not in self._blocked and source not in self.gone and target not in self.gone

    def block(self, sources: Iterable[str], targets: Iterable[str]) -> None:
        """Block all links from the sources to the targets."""
        targets = tuple(targets)
        self._blocked |= {(source, target) for source in sources for target in targets if source != target}

    def unblock(self) -> None:
        """Unblock all links."""
        self._blocked.clear()
