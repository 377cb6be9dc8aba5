"""Exceptions in the steps of simulated scripts: a voided step, and a lost peer in a collective of the scripts' own.

Invariants:
- Every draw comes from a generator of its own, so that no other draw of a world depends on it.
- A collective of the scripts' own raises `PeerGone` at every waiting rank once a rank has died or left the step, as a
  collective of torch or MPI raises `RuntimeError`. It never raises for another reason.
"""

from __future__ import annotations

from collections import defaultdict
from random import Random

VOIDING_JOBS = 0.3
VOIDED_STEPS = 0.02
"""How often a script of such a job voids a step."""
JOBS_WITH_OWN_COLLECTIVES = 0.4
BEFORE_OWN_COLLECTIVE_S = 0.1
LOOK_S = 0.05
"""How often a rank looks whether its peers have come, or are gone."""
WAITS_LONG_S = 1.0
"""A script that waits for its peers for longer counts as held up: the library does not know that it waits."""


class PeerGone(RuntimeError):
    """A collective of the scripts' own has lost a peer."""


class OwnCollective:
    """One collective of the ranks of a world, of which the library knows nothing."""

    def __init__(self) -> None:
        self.here: set[str] = set()
        """The workers that have come."""
        self.left_by = ""
        """A worker that has left the step early; empty for none."""


class StepErrors:
    """The exceptions that the scripts of one job meet in their steps."""

    def __init__(self, source: Random) -> None:
        self.voids = source.random() < VOIDING_JOBS
        """Whether scripts now and then void a step."""
        self.has_own_collectives = source.random() < JOBS_WITH_OWN_COLLECTIVES
        """Whether each step has a collective of the scripts' own."""
        self.collectives: defaultdict[tuple[int, int], OwnCollective] = defaultdict(OwnCollective)
        """By generation and step."""
