"""Between hosts: which of them reach which, and what may happen to bytes on the way.

Law: a link is one direction between two hosts. Everything random about the network is drawn here, from one `Random`,
and everything that happens passes through `trace`.
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
    """What a link does to what is written to it: probabilities are per write, ranges are drawn from evenly."""

    latency_s: Range = (0.0002, 0.002)
    bytes_per_s: float = math.inf
    split: float = 0.0
    """A write arrives in several pieces, each at its own time."""
    merge: float = 0.0
    """A piece waits for the one behind it and arrives together with it."""
    reset: float = 0.0
    """The connection breaks, and with it all that is under way in either direction."""
    drop: float = 0.0
    """A write vanishes; nothing behind it arrives, until the sender gives up."""
    duplicate: float = 0.0
    """A write arrives twice, as no TCP does: a misbehaving middlebox."""
    give_up_after_s: Range = (5.0, 30.0)
    """How long a sender repeats what is not acknowledged before it takes the connection for dead."""
    keepalive_s: Range | None = None
    """How long a receiver takes to notice that the other end vanished without a word; None is never."""
    connect_timeout_s: float = 5.0


CALM = Faults()
LOOPBACK = Faults(latency_s=(0.00001, 0.0001))
"""Within a host nothing breaks unless a test asks for it."""


class Links:
    """All links of a simulated network."""

    def __init__(self, loop: asyncio.AbstractEventLoop, random: Random, faults: Faults, trace: Trace | None) -> None:
        self.loop = loop
        self.context = copy_context()
        """What is under way is no part of the process that has sent it."""
        self.random = random
        self.faults = faults
        self.special: dict[tuple[str, str], Faults] = {}
        """Faults of single links, by source and target."""
        self.gone: set[str] = set()
        self.trace: Trace = trace or (lambda _: None)
        self._blocked: set[tuple[str, str]] = set()

    def faults_of(self, source: str, target: str) -> Faults:
        """What holds for bytes from one host to another now."""
        return self.special.get((source, target), LOOPBACK if source == target else self.faults)

    def latency_s(self, source: str, target: str) -> float:
        """How long the next thing from one host to another takes."""
        return self.draw(self.faults_of(source, target).latency_s)

    def draw(self, between: Range) -> float:
        """A number from a range."""
        return self.random.uniform(*between)

    def chance(self, probability: float) -> bool:
        """Whether something of this probability happens now."""
        return probability > 0 and self.random.random() < probability

    def reaches(self, source: str, target: str) -> bool:
        """Whether a packet sent now would arrive."""
        return (source, target) not in self._blocked and source not in self.gone and target not in self.gone

    def block(self, sources: Iterable[str], targets: Iterable[str]) -> None:
        """Let nothing pass from any of the sources to any of the targets."""
        targets = tuple(targets)
        self._blocked |= {(source, target) for source in sources for target in targets if source != target}

    def unblock(self) -> None:
        """Let everything pass again."""
        self._blocked.clear()
