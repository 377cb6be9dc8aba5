"""The values of elastic training: workers, topologies, training state.

Invariants:
- Every value is frozen and reads no clock: time is an argument, in seconds.
- A topology holds each worker once, in rank order. A change makes the next topology; a change without effect returns
  the same object.
- A delta turns the topology that it was made for into the next one exactly, and is refused for any other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from functools import cached_property
from typing import Annotated

import msgspec

from forged.errors import PeerError, RequestRefused
from forged.ids import check_name

WORLD_SIZE_MAX = 2**31 - 1
PORT_MAX = 65_535
HOSTNAME_LENGTH_MAX = 253
RANK_NONE = -1
"""The rank of a worker outside the world."""

Run = tuple[int, int]
"""Workers with consecutive ranks: the first rank and their number."""


class AdaptationStrategy(StrEnum):
    """How the learning rate follows the number of workers."""

    LINEAR = "linear"
    """In proportion to the number of workers."""
    SQUARE_ROOT = "square_root"
    """With the square root of the number of workers."""
    NONE = "none"
    """The rate stays the same."""


class RedistributionType(StrEnum):
    """How the training data is redistributed when the workers change."""

    FULL_RESHUFFLE = "full_reshuffle"
    """All shards are assigned anew."""
    INCREMENTAL = "incremental"
    """As few shards as possible move."""


class LostDataPolicy(StrEnum):
    """What happens if shards are lost that neither a worker nor the origin has."""

    WAIT = "wait"
    """The job waits for a worker that has them."""
    ABORT = "abort"
    """The job is aborted."""


class RescaleType(StrEnum):
    """How a rescale changed the number of workers."""

    SCALE_UP = "scale_up"
    """More workers."""
    SCALE_DOWN = "scale_down"
    """Fewer workers."""
    REPLACE = "replace"
    """As many workers, of which some were replaced."""


class WorkerStatus(StrEnum):
    """What a worker is doing, as far as the daemon knows."""

    JOINING = "joining"
    """It has registered and waits for its first rank."""
    ACTIVE = "active"
    """It trains."""
    RESCALING = "rescaling"
    """It takes part in a rescale."""
    LEAVING = "leaving"
    """It drains."""
    FAILED = "failed"
    """It is dead, or counts as dead by evidence."""


class WorkerId(msgspec.Struct, frozen=True, order=True, cache_hash=True):
    """A worker and the address at which its peers reach it."""

    id: str
    hostname: str
    port: Annotated[int, msgspec.Meta(ge=0, le=PORT_MAX)]

    @classmethod
    def parse(cls, text: str) -> WorkerId:
        """Read the form that `str()` writes. A hostname may be an IPv6 address, also in brackets."""
        worker_id, _, address = text.rpartition("@")
        hostname, _, port = address.rpartition(":")
        if not (port.isascii() and port.isdecimal() and len(port) <= len(str(PORT_MAX))):
            raise _no_address("worker", text)
        if hostname.startswith("[") and hostname.endswith("]"):
            hostname = hostname[1:-1]
        return check_worker("worker", cls(worker_id, hostname, int(port)))

    def __str__(self) -> str:
        return f"{self.id}@{self.hostname}:{self.port}"


def check_worker(field: str, worker: WorkerId) -> WorkerId:
    """Return the worker, or refuse an invalid id or address by the name of the field."""
    check_name(f"{field}.id", worker.id)
    host = worker.hostname
    is_legible = host.isprintable() and not any(mark in host for mark in "@[]/ ")
    if not 0 < len(host) <= HOSTNAME_LENGTH_MAX or not is_legible or not 0 <= worker.port <= PORT_MAX:
        raise _no_address(field, str(worker))
    return worker


def _no_address(field: str, text: str) -> RequestRefused:
    return RequestRefused(
        "worker_id_invalid",
        f"{field} = {text[:HOSTNAME_LENGTH_MAX]!r} is not a worker's id and address",
        f"write id@hostname:port, with a host's name or IP address and a port from 0 to {PORT_MAX}",
    )


class WorkerMetadata(msgspec.Struct, frozen=True):
    """What is known of a worker; `local_world_size` is the number of processes that it stands for on its host."""

    worker_id: WorkerId
    status: WorkerStatus
    join_time: float
    last_heartbeat: float
    rank: int = RANK_NONE
    local_world_size: int = 1
    custom_attributes: Mapping[str, str] = {}

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "custom_attributes", dict(self.custom_attributes))

    def is_healthy(self, timeout_s: float, now: float) -> bool:
        """Whether its last heartbeat is less than `timeout_s` old."""
        return now - self.last_heartbeat < timeout_s


class TopologyDelta(msgspec.Struct, frozen=True):
    """The change from one topology to the next: runs of old ranks, and new workers, in the order of the new ranks."""

    base_generation: int
    generation: int
    last_updated: float
    pieces: tuple[Run | WorkerId, ...]


class ClusterTopology(msgspec.Struct, frozen=True, dict=True):
    """The workers of a world in rank order; `epoch` is the generation."""

    workers: tuple[WorkerId, ...] = ()
    epoch: int = 0
    last_updated: float = 0.0

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "workers", tuple(self.workers))
        if len(self._ranks) != len(self.workers):
            # A ValueError, because msgspec reports it as a decoding error.
            raise ValueError("a worker is in a topology twice")

    @property
    def generation(self) -> int:
        """The number of the committed world, which is `epoch`."""
        return self.epoch

    @cached_property
    def _ranks(self) -> dict[WorkerId, int]:
        return {worker: rank for rank, worker in enumerate(self.workers)}

    @property
    def world_size(self) -> int:
        return len(self.workers)

    def __contains__(self, worker: object) -> bool:
        return worker in self._ranks

    def rank_of(self, worker: WorkerId) -> int:
        """The worker's rank; -1 outside the world."""
        return self._ranks.get(worker, RANK_NONE)

    def add_worker(self, worker: WorkerId, now: float) -> ClusterTopology:
        """The next topology, with this worker after all others; this one if it is a member already."""
        return self if worker in self else ClusterTopology((*self.workers, worker), self.epoch + 1, now)

    def remove_worker(self, worker: WorkerId, now: float) -> ClusterTopology:
        """The next topology, without this worker; this one if it is not a member."""
        rank = self.rank_of(worker)
        if rank == RANK_NONE:
            return self
        return ClusterTopology(self.workers[:rank] + self.workers[rank + 1 :], self.epoch + 1, now)

    def delta_to(self, new: ClusterTopology) -> TopologyDelta:
        """The change from this topology to `new`; the fewer changes, the smaller."""
        pieces: list[Run | WorkerId] = []
        for worker in new.workers:
            rank = self.rank_of(worker)
            last = pieces[-1] if pieces else None
            if rank == RANK_NONE:
                pieces.append(worker)
            elif isinstance(last, tuple) and sum(last) == rank:
                pieces[-1] = (last[0], last[1] + 1)
            else:
                pieces.append((rank, 1))
        return TopologyDelta(self.generation, new.generation, new.last_updated, tuple(pieces))

    def apply(self, delta: TopologyDelta) -> ClusterTopology:
        """The topology after the delta; refuses a delta that was made for another generation."""
        if delta.base_generation != self.generation:
            raise RequestRefused(
                "topology_generation",
                f"the delta applies to generation {delta.base_generation}, not {self.generation}",
                "read the whole topology",
            )
        runs = [piece for piece in delta.pieces if isinstance(piece, tuple)]
        if not self._has(runs):
            raise PeerError("topology_delta_invalid", f"the delta has ranks beyond the {self.world_size} workers")
        workers: list[WorkerId] = []
        for piece in delta.pieces:
            workers += self.workers[piece[0] : sum(piece)] if isinstance(piece, tuple) else (piece,)
        try:
            return ClusterTopology(tuple(workers), delta.generation, delta.last_updated)
        except ValueError as error:
            raise PeerError("topology_delta_invalid", str(error)) from error

    def _has(self, runs: Collection[Run]) -> bool:
        """Whether all runs lie within the ranks, and are together no more workers than there are."""
        within = all(start >= 0 and count >= 1 and start + count <= self.world_size for start, count in runs)
        return within and sum(count for _, count in runs) <= self.world_size


class GlobalTrainingState(msgspec.Struct, frozen=True):
    """A job's training state. `optimizer_state` moves between workers, and never enters store or bus."""

    current_epoch: int = 0
    current_step: int = 0
    learning_rate: float = 0.0
    global_batch_size: int = 0
    active_worker_count: int = 0
    state_timestamp: float = 0.0
    optimizer_state: bytes | None = None

    def __repr__(self) -> str:
        """Like any struct's, with the size of the optimizer state in place of its bytes, which may be billions."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name != "optimizer_state"}
        size = "None" if self.optimizer_state is None else f"<{len(self.optimizer_state)} bytes>"
        return f"GlobalTrainingState({', '.join(f'{k}={v!r}' for k, v in fields.items())}, optimizer_state={size})"


class RescalingEvent(msgspec.Struct, frozen=True):
    """One rescale: the topologies before and after, the workers that changed, when and why."""

    type: RescaleType
    old_topology: ClusterTopology
    new_topology: ClusterTopology
    added_workers: tuple[WorkerId, ...] = ()
    removed_workers: tuple[WorkerId, ...] = ()
    event_time: float = 0.0
    trigger_reason: str = ""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "added_workers", tuple(self.added_workers))
        msgspec.structs.force_setattr(self, "removed_workers", tuple(self.removed_workers))

    @classmethod
    def between(
        cls,
        old: ClusterTopology,
        new: ClusterTopology,
        now: float,
        reason: str,
        replaced: Iterable[WorkerId] = (),
    ) -> RescalingEvent:
        """The rescale from one topology to another.

        `replaced` are workers in both whose processes were replaced; they count as removed and as added. If the world
        size stays the same, the rescale is a replacement.
        """
        anew = frozenset(replaced)
        added = tuple(worker for worker in new.workers if worker not in old or worker in anew)
        removed = tuple(worker for worker in old.workers if worker not in new or worker in anew)
        return cls(_rescale_type(old, new), old, new, added, removed, now, reason)


class Standstill(msgspec.Struct, frozen=True):
    """A time in which a worker stands still: its world is over, and it has no connection to the daemon, which commits
    the next one. Times are by the worker's wall clock.
    """

    generation: int
    """That of the world that is over."""
    peer: str
    """The worker that was lost; empty if none was, or if it is unknown which."""
    reason: str
    """Why the world is over."""
    began_at: float
    daemon_away_since: float
    """When the connection to the daemon was lost."""
    lasted_s: float | None = None
    """None while it lasts."""


class WorldOver(msgspec.Struct, frozen=True):
    """No further collective of a world that a worker has entered will complete."""

    generation: int
    reason: str
    peer: str = ""
    """The worker that was lost; empty if none was, or if it is unknown which."""
    is_orderly: bool = False
    """Whether the worker, or another member, leaves the world or goes over to the next one, and no step is under way
    here."""


def _rescale_type(old: ClusterTopology, new: ClusterTopology) -> RescaleType:
    if new.world_size == old.world_size:
        return RescaleType.REPLACE
    return RescaleType.SCALE_UP if new.world_size > old.world_size else RescaleType.SCALE_DOWN
