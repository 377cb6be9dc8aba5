"""Counts the faults that simulated worlds have met, so that a fault that never happens is noticed.

Law: only what took effect counts: a death by where it found the worker, a slow transfer when a commit waited for it.
"""

from __future__ import annotations

from collections import Counter

from forged.elastic.messages import (
    GroupBroken,
    JobAborted,
    JobReopened,
    JobWaiting,
    RescaleAborted,
    RescaleCompleted,
    RescaleStarted,
    WorkerFailed,
    WorkerJoined,
    WorkerStalled,
)
from forged.elastic.model import ClusterTopology
from forged.elastic.phases import Phase
from forged.kernel.messages import Fact
from tests.simulation.elastic.script_hooks import MOMENTS
from tests.simulation.elastic.truth import SimulatedWorker, Truth

SLOW_S = 2.0

MUST_HAPPEN = (
    "a world is committed without a stop",
    "a world is committed with a stop",
    "a world is full",
    "a job waits for workers",
    "a job waits too long",
    "too many of a world fail",
    "too many fail in a row",
    "a job is reopened",
    "a job is reopened while workers of it are registered",
    "a reopened job trains",
    "workers are parted, all reach the daemon",
    "workers are parted, some reach the daemon",
    "workers are parted, none reach the daemon",
    "some do not reach the daemon",
    "the whole network pauses",
    "a transfer is slow",
    "a host is gone",
    "a worker is suspended",
    "a worker is suspended within an attempt",
    "the daemon is suspended",
    "a script hangs",
    "a script hangs when a rescale is wanted",
    "a script voids a step",
    "a collective of the scripts' own loses a peer",
    "a script aborts the entry into a world",
    *(f"a script dies {moment}" for moment in MOMENTS),
    "a wall clock jumps",
    "a heartbeat lies",
    "a member says that training is complete",
    "a member says that it has stopped after an impossible step",
    "a gone worker keeps talking",
    "a worker flaps",
    "an id returns on another host",
    "a joiner does not become ready",
    "a worker is stalled",
    "a worker stands still without a daemon",
    "a worker is evicted",
    "a pulse says what its worker could not",
    "a worker dies before it joins",
    "a worker dies waiting to join",
    "a worker dies while all stop",
    "a worker dies while the state travels",
    "the source of the state dies",
    "a worker dies on its way into a world",
    "a worker dies in a step",
    "rank 0 dies",
    "all die at once",
    "a group is broken",
    "a group is killed",
    "several groups lose a process at once",
    "a launcher ends a broken group",
    "a broken group is whole again in the next world",
    "a broken group joins a later world",
    "a job with groups loses committed steps",
)
"""What happens somewhere in the first few hundred seeds."""


class Tally(Counter[str]):
    """How often something was met in a world."""

    def fact(self, fact: Fact, truth: Truth) -> None:
        """Count what a fact tells, with what is known of the job before it."""
        match fact:
            case RescaleStarted(world_size=size) if size == truth.config.max_workers < len(truth.members):
                self["a world is full"] += 1
            case RescaleCompleted():
                stops = "without" if fact.step is None else "with"
                self["worlds"] += 1
                self["a reopened job trains"] += 0 < truth.reopened_after == truth.generation
                self[f"a world is committed {stops} a stop"] += 1
                self["a transfer is slow"] += truth.synchronising and fact.took_s > SLOW_S
                self["data moves while training goes on"] += truth.in_background
                self._returned(truth.world.apply(fact.delta), truth)
                self["steps are committed while data moves"] += (
                    truth.in_background and truth.stepped_at > truth.began_at
                )
            case RescaleAborted():
                self["what moves while training goes on is given up"] += truth.in_background
            case JobWaiting():
                self["a job waits for workers"] += 1
            case JobAborted(reason=reason):
                self._aborted(reason)
            case JobReopened():
                self["a job is reopened"] += 1
                self["a job is reopened while workers of it are registered"] += bool(truth.members)
            case WorkerFailed(rank=rank, reason=reason):
                self["workers failed"] += 1
                self["a joiner does not become ready"] += rank < 0 and reason.startswith("no answer in attempt")
                self["a worker is evicted"] += reason.startswith("evicted")
            case GroupBroken() | WorkerStalled():
                self["a group is broken" if isinstance(fact, GroupBroken) else "a worker is stalled"] += 1
            case WorkerJoined(worker=worker):
                self["an id returns on another host"] += truth.hosts.get(worker.id, worker.hostname) != worker.hostname
            case _:
                pass

    def _returned(self, new: ClusterTopology, truth: Truth) -> None:
        """Count the groups of a new world that were broken before."""
        if truth.group_size == 1:
            return
        earlier = {worker for world in truth.worlds.values() for worker in world.workers}
        for first in range(0, new.world_size, truth.group_size):
            group = new.workers[first : first + truth.group_size]
            survivors = sum(worker in truth.world for worker in group)
            self["a broken group is whole again in the next world"] += 0 < survivors < truth.group_size
            self["a broken group joins a later world"] += not survivors and any(worker in earlier for worker in group)

    def _aborted(self, reason: str) -> None:
        self["a job is aborted"] += 1
        self["a job waits too long"] += reason.startswith("fewer than")
        self["too many of a world fail"] += " failed; limit " in reason
        self["too many fail in a row"] += "without a committed step" in reason

    def death(self, simulated: SimulatedWorker, truth: Truth) -> None:
        """Count where a death found a worker."""
        self[f"a worker dies {_where(simulated, truth)}"] += 1
        self["rank 0 dies"] += simulated.me is not None and truth.world.rank_of(simulated.me) == 0
        self["the source of the state dies"] += truth.synchronising and simulated.name in truth.sources


def _where(simulated: SimulatedWorker, truth: Truth) -> str:
    if simulated.me is None or simulated.me not in truth.members.values():
        return "before it joins"
    if truth.phase is Phase.RESCALING and (simulated.me in truth.world or simulated.name in truth.added):
        if truth.in_background:
            return "while data moves and training goes on"
        return "while the state travels" if truth.synchronising else "while all stop"
    if simulated.me not in truth.world:
        return "waiting to join"
    return "on its way into a world" if simulated.generation < truth.generation else "in a step"
