"""The registered workers of a job, by id.

Invariants:
- An id belongs to one incarnation at a time, and to the next one only after the previous one is known to be gone.
- The names of all workers together fit into one commit.
"""

from __future__ import annotations

from collections.abc import Iterable

from forged.elastic.membership.member import Member
from forged.errors import RequestRefused

NAMES_BYTES_MAX = 600 << 10
"""What the names of a job's workers may take: a commit contains all of them and must fit into the store."""
WORKER_BYTES = 64
"""What a worker takes besides its names."""


class MemberRegistry(dict[str, Member]):
    """The members by id, in the order in which they registered."""

    def __init__(self, job: str, members: Iterable[Member] = ()) -> None:
        super().__init__()
        self._job = job
        self._names_bytes = 0
        for member in members:
            self.add(member)

    def add(self, member: Member) -> None:
        if self._names_bytes + _names_bytes(member) > NAMES_BYTES_MAX:
            text = f"job {self._job} has {len(self)} workers, whose names take {self._names_bytes} bytes"
            raise RequestRefused("workers_full", text, "use fewer workers, or shorter names")
        self[member.id] = member
        self._names_bytes += _names_bytes(member)

    def remove(self, member: Member) -> None:
        del self[member.id]
        self._names_bytes -= _names_bytes(member)

    def find(self, worker_id: str, incarnation: bytes) -> Member | None:
        """The member with this id, if it is the same incarnation."""
        member = self.get(worker_id)
        return member if member is not None and member.incarnation == incarnation else None

    def require(self, worker_id: str) -> Member:
        """The member with this id, or a refusal."""
        member = self.get(worker_id)
        if member is None:
            raise RequestRefused(
                "worker_unknown", f"job {self._job} has no worker {worker_id[:80]!r}", "see `forgectl workers ls`"
            )
        return member


def _names_bytes(member: Member) -> int:
    worker = member.worker
    # The id appears in the topology and in the list of added or removed workers.
    return 2 * len(worker.id.encode()) + len(worker.hostname.encode()) + WORKER_BYTES
