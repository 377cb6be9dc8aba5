"""Turns what a call on a coordinator has produced into decisions, with the cause of each fact.

Invariants:
- All output of one call is decided together, in as few decisions as the limits of a transaction allow; the last facts
  and the job's own records are in the last one, so that no committed world is published before it is stored.
- A rescale's facts follow from the fact that made it necessary, also after a restart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeVar

from forged.elastic.coordinator.job_coordinator import JobCoordinator
from forged.elastic.coordinator.records import changed_records, job_record
from forged.elastic.messages import (
    JobAborted,
    JobCompleted,
    JobWaiting,
    ProgressLost,
    RescaleAborted,
    RescaleCompleted,
    RescaleStarted,
    RescaleSynchronising,
    WorkerJoined,
)
from forged.kernel.bus import Bus
from forged.kernel.messages import Decision, Fact

R = TypeVar("R")
Writes = dict[str, bytes | None]

OWNER = "elastic"
DECISION_ITEMS_MAX = 40
"""Facts, and keys, in one decision: a transaction has its limits."""

_CONSEQUENCES = (
    RescaleStarted,
    RescaleAborted,
    RescaleSynchronising,
    ProgressLost,
    RescaleCompleted,
    JobWaiting,
    JobAborted,
    JobCompleted,
)
"""The facts that follow from an earlier fact."""


class DecisionWriter:
    """Appends what coordinators have produced to the bus's ledger, as decisions."""

    def __init__(self, bus: Bus, stale_keys: dict[str, None]) -> None:
        self._bus = bus
        self._stale_keys = stale_keys
        """Keys that are to be deleted; a key that is written again is no longer one of them."""

    def decide(self, coordinator: JobCoordinator, reply: R) -> Decision[R]:
        """The decision for all that is in the outbox, with the reply; what does not fit is appended before it."""
        if not coordinator.outbox:
            # True of nearly every answer to an attempt, and each worker gives two.
            return self._decision(coordinator, reply, (), {}, [], coordinator.cause_id)
        writes, output = changed_records(coordinator), coordinator.outbox.take()
        coordinator.is_stored = coordinator.is_stored or bool(writes)
        for key in writes:
            self._stale_keys.pop(key, None)
        *before, last = _parts(output.facts, writes)
        stored_cause_id = coordinator.cause_id
        for facts, part in before:
            decision = self._decision(coordinator, None, facts, part, output.triggers, stored_cause_id)
            self._bus.ledger.append(decision, origin=OWNER)
        return self._decision(coordinator, reply, *last, output.triggers, stored_cause_id)

    def commit(self, coordinator: JobCoordinator) -> bool:
        """Append the decision for an input that was no request, unless the outbox is empty or the ledger read-only."""
        if not (coordinator.outbox and self._bus.ledger.writable_now):
            return False
        self._bus.ledger.append(self.decide(coordinator, None), origin=OWNER)
        return True

    def _decision(
        self,
        coordinator: JobCoordinator,
        reply: R,
        facts: tuple[Fact, ...],
        writes: Writes,
        triggers: list[Fact],
        stored_cause_id: int,
    ) -> Decision[R]:
        cause = _cause(coordinator, facts)
        self._note_fact_ids(coordinator, facts, triggers)
        if coordinator.cause_id != stored_cause_id:
            # The cause must survive a restart, so the job's record is encoded again with the new id.
            writes |= {key: record for key, record in job_record(coordinator).items() if key in writes}
        return Decision(reply, facts, writes, coordinator.name, coordinator.generation, cause)

    def _note_fact_ids(self, coordinator: JobCoordinator, facts: tuple[Fact, ...], triggers: list[Fact]) -> None:
        """Keep the ids of the facts that later facts follow from."""
        for fact_id, fact in enumerate(facts, self._bus.ledger.revision + 1):
            if isinstance(fact, RescaleCompleted):
                coordinator.cause_id = 0
            elif isinstance(fact, RescaleStarted) or any(fact is trigger for trigger in triggers):
                coordinator.cause_id = fact_id
                if isinstance(fact, RescaleStarted) and coordinator.attempt is not None:
                    # If one call has started several attempts, the last one is under way.
                    coordinator.attempt.started_id = fact_id
            elif isinstance(fact, WorkerJoined) and fact.worker.id in coordinator.members:
                coordinator.members[fact.worker.id].joined_id = fact_id


def _cause(coordinator: JobCoordinator, facts: tuple[Fact, ...]) -> int:
    """The id of the fact that these follow from: the last that made a rescale necessary, else the first join."""
    if not (facts and isinstance(facts[0], _CONSEQUENCES)):
        return 0
    added = [worker for fact in facts if isinstance(fact, RescaleStarted) for worker in fact.added[:1]]
    # An added worker may be gone by now: while the ledger is read-only several inputs end up in one decision.
    joined = (coordinator.members[worker].joined_id for worker in added if worker in coordinator.members)
    return coordinator.cause_id or next(joined, 0)


def _parts(facts: list[Fact], writes: Writes) -> Iterator[tuple[tuple[Fact, ...], Writes]]:
    """Facts and writes for one decision at a time; no two facts of which one causes the other are in the same one."""
    keys = sorted(writes, key=lambda key: key.count("/"), reverse=True)
    runs = list(_runs(facts))
    count = max(1, len(runs), math.ceil(len(keys) / DECISION_ITEMS_MAX))
    no_facts: tuple[Fact, ...] = ()
    for index, run in enumerate([*[no_facts] * (count - len(runs)), *runs], 1 - count):
        end = len(keys) + index * DECISION_ITEMS_MAX
        yield run, {key: writes[key] for key in keys[max(0, end - DECISION_ITEMS_MAX) : max(0, end)]}


def _runs(facts: list[Fact]) -> Iterator[tuple[Fact, ...]]:
    """Consecutive facts with the same cause."""
    run: list[Fact] = []
    for fact in facts:
        if run and (
            len(run) == DECISION_ITEMS_MAX
            or isinstance(run[-1], RescaleStarted)
            or isinstance(run[-1], _CONSEQUENCES) != isinstance(fact, _CONSEQUENCES)
        ):
            yield tuple(run)
            run = []
        run.append(fact)
    if run:
        yield tuple(run)
