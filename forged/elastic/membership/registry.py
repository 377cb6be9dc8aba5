"""Who has registered with a job.

Law: an id belongs to one incarnation at a time, and to another only when the one before is known to be gone. All names
together fit into one commit.
"""

from __future__ import annotations

from collections.abc import Iterable

from forged.elastic.membership.member import Member
from forged.errors import RequestRefused

ROOM_BYTES = 600 << 10
"""What the names of a job's workers may take: a commit names all of them, and has to fit into the store."""
WORKER_BYTES = 64
"""What a worker takes besides its names."""


class MemberRegistry(dict[str, Member]):
    """The members by their ids, the first to come first."""

    def __init__(self, job: str, members: Iterable[Member] = ()) -> None:
        super().__init__()
        self._job = job
        self._room_taken = 0
        for member in members:
            self.enter(member)

    def enter(self, member: Member) -> None:
        """Take somebody in."""
        if self._room_taken + _room(member) > ROOM_BYTES:
            there = f"job {self._job} has {len(self)} workers, and their names take {self._room_taken} bytes"
            raise RequestRefused("workers_full", there, "use fewer workers, or shorter names")
        self[member.id] = member
        self._room_taken += _room(member)

    def strike(self, member: Member) -> None:
        """Let somebody go."""
        del self[member.id]
        self._room_taken -= _room(member)

    def known(self, worker_id: str, incarnation: bytes) -> Member | None:
        """The worker that says so of itself, if it is the one that has registered."""
        member = self.get(worker_id)
        return member if member is not None and member.incarnation == incarnation else None

    def require(self, worker_id: str) -> Member:
        """The worker of that id, or a refusal."""
        member = self.get(worker_id)
        if member is None:
            raise RequestRefused(
                "worker_unknown", f"job {self._job} has no worker {worker_id[:80]!r}", "see `forgectl workers ls`"
            )
        return member


def _room(member: Member) -> int:
    worker = member.worker
    # The id stands in the topology, and among those who were added or removed.
    return 2 * len(worker.id.encode()) + len(worker.hostname.encode()) + WORKER_BYTES
