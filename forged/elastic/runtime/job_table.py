"""The coordinators of all jobs, loaded from the store, with the clients that speak for their workers.

Invariants:
- A job's records are deleted with the record that makes it known first, so that a later start recognises the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import islice

from forged.elastic.coordinator.job_coordinator import JobCoordinator
from forged.elastic.coordinator.records import PREFIX, changed_records, job_of, restore
from forged.elastic.outbox import Moment
from forged.elastic.runtime.decisions import DECISION_ITEMS_MAX
from forged.kernel.ledger import read_all
from forged.kernel.store.port import Store

WORKERS_PER_CLIENT = 64
"""Beyond this number the workers that a client no longer speaks for are looked for and forgotten."""


class JobTable:
    """The coordinators by job, and the workers by client."""

    def __init__(self) -> None:
        self.coordinators: dict[str, JobCoordinator] = {}
        self.connected: set[bytes] = set()
        self.stale_keys: dict[str, None] = {}
        """Keys of removed jobs and members that are still to be deleted."""
        self._workers_by_client: defaultdict[bytes, dict[tuple[str, str], None]] = defaultdict(dict)

    async def load(self, store: Store, clock: Callable[[], Moment]) -> None:
        """Replace everything by what the store holds, except which clients are connected."""
        entries: defaultdict[str, list[tuple[str, bytes]]] = defaultdict(list)
        for entry in await read_all(store, PREFIX):
            entries[job_of(entry.key)].append((entry.key, entry.value))
        # Not the time before the read, which may take longer than a worker may be silent.
        now = clock()
        self.coordinators.clear()
        self._workers_by_client.clear()
        self.stale_keys.clear()
        for job, found in entries.items():
            coordinator = restore(job, found, now)
            if coordinator is None:
                self.stale_keys.update(dict.fromkeys(key for key, _ in found))
            else:
                self.coordinators[job] = coordinator
        for coordinator in self.coordinators.values():
            for member in coordinator.members.values():
                self._workers_by_client[member.client][coordinator.name, member.id] = None
                if member.client in self.connected:
                    member.lost_at, member.is_unseen_since_restart = None, False

    def add_worker(self, client: bytes, job: str, worker_id: str) -> None:
        """Note that the client speaks for the worker."""
        self._workers_by_client[client][job, worker_id] = None
        if len(self._workers_by_client[client]) > WORKERS_PER_CLIENT:
            self.workers_of(client)

    def workers_of(self, client: bytes) -> list[tuple[JobCoordinator, str]]:
        """The workers that the client speaks for; forgets those that it no longer does."""
        found: list[tuple[JobCoordinator, str]] = []
        for job, worker in tuple(self._workers_by_client.get(client, ())):
            coordinator = self.coordinators.get(job)
            member = coordinator.members.get(worker) if coordinator else None
            if coordinator is not None and member is not None and member.client == client:
                found.append((coordinator, worker))
            else:
                self._workers_by_client[client].pop((job, worker), None)
        if not found:
            self._workers_by_client.pop(client, None)
        return found

    def remove(self, job: str) -> dict[str, bytes | None] | None:
        """Remove a job. Returns as many of its keys as one decision can delete; None if the job is unknown.

        The other keys are queued in `stale_keys`.
        """
        coordinator = self.coordinators.pop(job, None)
        if coordinator is None:
            return None
        for member in coordinator.members.values():
            self._workers_by_client[member.client].pop((coordinator.name, member.id), None)
            coordinator.outbox.members.add(member.id)
        coordinator.members.clear()
        coordinator.outbox.job = coordinator.outbox.world = True
        keys = sorted(changed_records(coordinator), key=lambda key: key.count("/"))
        self.stale_keys.update(dict.fromkeys(keys[DECISION_ITEMS_MAX:]))
        return dict.fromkeys(keys[:DECISION_ITEMS_MAX])

    def take_stale_keys(self) -> dict[str, bytes | None]:
        """As many stale keys as fit into one decision; they count as deleted."""
        keys = list(islice(self.stale_keys, DECISION_ITEMS_MAX))
        for key in keys:
            del self.stale_keys[key]
        return dict.fromkeys(keys)
