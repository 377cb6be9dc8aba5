"""Who trains together and how far they are, as values.

Law: every value is frozen, whatever it was made of, and reads no clock: time is an argument, in seconds. A topology is
the workers in the order of their ranks, each of them once; a change makes the next topology, and what changes nothing
returns the same object. A delta turns the one topology that it was made for into the other exactly, or is refused.
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
"""The rank of who has none."""

Run = tuple[int, int]
"""Workers who follow each other: the rank of the first, and how many they are."""


class AdaptationStrategy(StrEnum):
    """How the learning rate follows the number of workers."""

    LINEAR = "linear"
    """In proportion to the number of workers."""
    SQUARE_ROOT = "square_root"
    """With the square root of the number of workers, which is more careful."""
    NONE = "none"
    """Not at all; more workers are only faster."""


class RedistributionType(StrEnum):
    """What happens to the training data when the workers change."""

    FULL_RESHUFFLE = "full_reshuffle"
    """All of it is dealt out anew."""
    INCREMENTAL = "incremental"
    """What can stay where it is stays; as little as possible moves."""


class LostDataPolicy(StrEnum):
    """What happens when nobody has some of the training data any more, and it cannot be had again."""

    WAIT = "wait"
    """The job waits for a worker that has it."""
    ABORT = "abort"
    """The job is given up."""


class RescaleType(StrEnum):
    """What a rescale did to the number of workers."""

    SCALE_UP = "scale_up"
    """There are more."""
    SCALE_DOWN = "scale_down"
    """There are fewer."""
    REPLACE = "replace"
    """There are as many, with others in the place of those who failed."""


class WorkerStatus(StrEnum):
    """What a worker is doing, as far as the daemon knows."""

    JOINING = "joining"
    """It has registered and waits for its first rank."""
    ACTIVE = "active"
    """It trains."""
    RESCALING = "rescaling"
    """It takes part in a rescale."""
    LEAVING = "leaving"
    """It finishes its step and goes."""
    FAILED = "failed"
    """It died, or was taken for dead, by evidence."""


class WorkerId(msgspec.Struct, frozen=True, order=True, cache_hash=True):
    """Which worker, and where other workers reach it."""

    id: str
    hostname: str
    port: Annotated[int, msgspec.Meta(ge=0, le=PORT_MAX)]

    @classmethod
    def parse(cls, text: str) -> WorkerId:
        """Read what `str()` writes. A hostname may be an IPv6 address, and that may stand in brackets."""
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
    """The worker, if its id is a name and its address can be one; else a refusal that names the field."""
    check_name(f"{field}.id", worker.id)
    host = worker.hostname
    is_legible = host.isprintable() and not any(mark in host for mark in "@[]/ ")
    if not 0 < len(host) <= HOSTNAME_LENGTH_MAX or not is_legible or not 0 <= worker.port <= PORT_MAX:
        raise _no_address(field, str(worker))
    return worker


def _no_address(field: str, text: str) -> RequestRefused:
    return RequestRefused(
        "worker_id_invalid",
        f"{field} = {text[:HOSTNAME_LENGTH_MAX]!r} has no address of a worker",
        f"write id@hostname:port, with a host's name or IP address and a port from 0 to {PORT_MAX}",
    )


class WorkerMetadata(msgspec.Struct, frozen=True):
    """What is known of a worker. `local_world_size` is how many processes it stands for on its host."""

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
    """How one topology becomes another: runs of the old one's workers, and workers who were not in it, by new rank."""

    base_epoch: int
    epoch: int
    last_updated: float
    pieces: tuple[Run | WorkerId, ...]


class ClusterTopology(msgspec.Struct, frozen=True, dict=True):
    """Who trains together: a worker's place in `workers` is its rank. `epoch` counts the changes."""

    workers: tuple[WorkerId, ...] = ()
    epoch: int = 0
    last_updated: float = 0.0

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "workers", tuple(self.workers))
        if len(self._ranks) != len(self.workers):
            # A ValueError, because msgspec takes it for its own when this comes over the wire.
            raise ValueError("a worker is in a topology twice")

    @cached_property
    def _ranks(self) -> dict[WorkerId, int]:
        return {worker: rank for rank, worker in enumerate(self.workers)}

    @property
    def world_size(self) -> int:
        """How many workers there are."""
        return len(self.workers)

    def __contains__(self, worker: object) -> bool:
        return worker in self._ranks

    def rank_of(self, worker: WorkerId) -> int:
        """The worker's rank; -1 for one who is not here."""
        return self._ranks.get(worker, RANK_NONE)

    def add_worker(self, worker: WorkerId, now: float) -> ClusterTopology:
        """The next topology, with this worker behind the others; this one if it is here already."""
        return self if worker in self else ClusterTopology((*self.workers, worker), self.epoch + 1, now)

    def remove_worker(self, worker: WorkerId, now: float) -> ClusterTopology:
        """The next topology, without this worker, the others in their order; this one if it is not here."""
        rank = self.rank_of(worker)
        if rank == RANK_NONE:
            return self
        return ClusterTopology(self.workers[:rank] + self.workers[rank + 1 :], self.epoch + 1, now)

    def delta_to(self, new: ClusterTopology) -> TopologyDelta:
        """What somebody who has this topology must be told to have the new one: the less changed, the smaller."""
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
        return TopologyDelta(self.epoch, new.epoch, new.last_updated, tuple(pieces))

    def apply(self, delta: TopologyDelta) -> ClusterTopology:
        """The topology that the delta leads to; a refusal if it was made for another epoch than this one's."""
        if delta.base_epoch != self.epoch:
            raise RequestRefused(
                "topology_epoch",
                f"the change is of the topology of epoch {delta.base_epoch}, and this one is of epoch {self.epoch}",
                "ask for the whole topology",
            )
        runs = [piece for piece in delta.pieces if isinstance(piece, tuple)]
        if not self._has(runs):
            raise PeerError("topology_delta_invalid", f"runs of ranks are not those of {self.world_size} workers")
        workers: list[WorkerId] = []
        for piece in delta.pieces:
            workers += self.workers[piece[0] : sum(piece)] if isinstance(piece, tuple) else (piece,)
        try:
            return ClusterTopology(tuple(workers), delta.epoch, delta.last_updated)
        except ValueError as error:
            raise PeerError("topology_delta_invalid", str(error)) from error

    def _has(self, runs: Collection[Run]) -> bool:
        """Whether all runs lie within the ranks and are no more workers together than there are."""
        within = all(start >= 0 and count >= 1 and start + count <= self.world_size for start, count in runs)
        return within and sum(count for _, count in runs) <= self.world_size


class GlobalTrainingState(msgspec.Struct, frozen=True):
    """How far a job's training is. `optimizer_state` goes from worker to worker, and never into store or bus."""

    current_epoch: int = 0
    current_step: int = 0
    learning_rate: float = 0.0
    global_batch_size: int = 0
    active_worker_count: int = 0
    state_timestamp: float = 0.0
    optimizer_state: bytes | None = None

    def __repr__(self) -> str:
        """As any struct's, but for the optimizer's bytes: there may be billions of them."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name != "optimizer_state"}
        size = "None" if self.optimizer_state is None else f"<{len(self.optimizer_state)} bytes>"
        return f"GlobalTrainingState({', '.join(f'{k}={v!r}' for k, v in fields.items())}, optimizer_state={size})"


class RescalingEvent(msgspec.Struct, frozen=True):
    """One rescale: what it led from, what to, when, and why in words."""

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

        `replaced` are those who are in both and yet not the same: their processes ended, and others came under the same
        ids. They count as removed and as added. Where as many came as went, the rescale is a replacement.
        """
        anew = frozenset(replaced)
        added = tuple(worker for worker in new.workers if worker not in old or worker in anew)
        removed = tuple(worker for worker in old.workers if worker not in new or worker in anew)
        return cls(_rescale_type(old, new), old, new, added, removed, now, reason)


def _rescale_type(old: ClusterTopology, new: ClusterTopology) -> RescaleType:
    if new.world_size == old.world_size:
        return RescaleType.REPLACE
    return RescaleType.SCALE_UP if new.world_size > old.world_size else RescaleType.SCALE_DOWN
