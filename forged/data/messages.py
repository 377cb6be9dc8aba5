"""Facts and requests about training data.

Invariants:
- A column of numbers travels as little-endian bytes, never as a list.
- Messages about an attempt carry its number; a worker's messages carry its incarnation.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from forged.auth.model import Role
from forged.data.model import Natural
from forged.data.sampling.usage import Run
from forged.elastic.model import WorkerId
from forged.kernel.messages import Fact, Nothing, Request

NAMED_MAX = 20
"""How many shards a message names; its count may be larger."""
PAGE_SHARDS_MAX = 1 << 16
"""How many transfers or owners one answer contains."""
MARK_BYTES = 8
"""A copy's mark is the first bytes of its checksum."""


class DatasetSpec(msgspec.Struct, frozen=True):
    """A job's dataset: its division into shards, the replicas of each shard, and whether there is an origin."""

    samples: Natural
    shards: Natural
    replication: Natural = 0
    has_origin: bool = False


class TransferTotals(msgspec.Struct, frozen=True):
    """The number of transfers, by source."""

    shards: Natural = 0
    """Shards that get another owner."""
    transfers: Natural = 0
    from_owners: Natural = 0
    from_replicas: Natural = 0
    from_origin: Natural = 0
    bytes: Natural = 0
    """0 while the sizes of shards are unknown."""
    estimated_s: float | None = None
    """None before the first transfer was measured."""


# Facts.


class DatasetDefined(Fact, frozen=True):
    """A job has this dataset."""

    dataset: DatasetSpec


class TransfersPlanned(Fact, frozen=True):
    """The transfer plan of an attempt is ready: members may read their part."""

    attempt: int
    totals: TransferTotals


class TransfersCompleted(Fact, frozen=True):
    """Every member of an attempt holds and has verified the shards that it needs."""

    attempt: int
    transfers: int
    bytes: int
    took_s: float
    estimated_s: float | None


class ShardsLost(Fact, frozen=True):
    """No member has these shards, and no origin gives them now; the first ones are named."""

    level: ClassVar[str] = "error"

    attempt: int
    count: int
    shards: list[int]
    reason: str = ""
    """Why the origin does not give them, or which workers were not asked."""
    last_held_by: list[str] = []  # noqa: RUF012 - msgspec copies it
    """The workers that held them in the last world and are gone; restarted with their directories, they have them."""


class CopiesDiffer(Fact, frozen=True):
    """Workers hold different bytes of some shards; the first ones are named.

    With an origin the majority's bytes count, and the other workers fetch those. Without one nothing is changed.
    """

    level: ClassVar[str] = "warning"

    attempt: int
    count: int
    shards: list[int]
    workers: list[str]
    """The workers in the minority."""


class CorruptShardFound(Fact, frozen=True):
    """A worker's copy of a shard does not match its checksum."""

    level: ClassVar[str] = "error"

    worker_id: str
    shard: int
    found_by: str


# Requests of workers.


class OfferTaken(msgspec.Struct, frozen=True):
    """The offer counts, unless some of its copies are suspect: those are to be verified, and the offer sent again."""

    suspect: bytes = b""
    """The suspect shards, as int64."""


class OfferShards(Request[OfferTaken], frozen=True):
    """A member of an attempt offers the shards that it holds and has verified, as int64."""

    needs: ClassVar[Role] = Role.WORKER

    job: str
    worker_id: str
    incarnation: bytes
    attempt: int
    dataset: DatasetSpec
    held: bytes = b""
    held_bytes: Natural = 0
    more: bool = False
    """Whether another part of the offer follows."""
    bytes_per_second: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """The measured rate of its transfers; 0 where unknown."""
    weight: float = 1.0
    """The share of the data that it should hold, relative to other workers: finite and > 0."""
    verified: bytes = b""
    """The suspect shards that it has verified since, whether they were bad or not, as int64."""
    marks: bytes = b""
    """The mark of each shard in `held`; empty where unknown."""


class TransferPart(msgspec.Struct, frozen=True):
    """The shards that a member has to fetch, the most urgent first, and those that it has to hold at the commit."""

    workers: tuple[WorkerId, ...]
    shards: bytes
    """The shards to fetch, as int64."""
    sources: bytes
    """For each shard the places of its sources in `workers`, as int32 in rows of `sources_per_shard`; -1 is the
    dataset's origin, -2 fills the rest of a row."""
    sources_per_shard: int
    keep: bytes
    """The shards to hold, as int64, in pages like `shards`."""
    owned: bytes
    """One byte for each shard in `keep`: 1 for the owner, 0 for a replica."""
    more: bool
    """Whether another page follows."""
    is_released: bool
    """Whether the worker leaves after the commit."""
    replaced: bytes = b""
    """Those of `shards` of which its copy differs from the majority's, as int64; it drops its copy first."""


class ReadTransfers(Request[TransferPart], frozen=True):
    """Read a page of a member's part of the plan, from row `after` on."""

    needs: ClassVar[Role] = Role.WORKER
    decides: ClassVar[bool] = False

    job: str
    worker_id: str
    incarnation: bytes
    attempt: int
    after: Natural = 0


class ReportShards(Request[Nothing], frozen=True):
    """A member has fetched and verified all that it needs; or it cannot.

    `missing` counts shards of which it found only bad copies, so all members have to offer anew. `not_stored` counts
    shards that its store refused, so other workers have to take them.
    """

    needs: ClassVar[Role] = Role.WORKER

    job: str
    worker_id: str
    incarnation: bytes
    attempt: int
    transfers: Natural = 0
    received: Natural = 0
    """Bytes received."""
    took_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    missing: Natural = 0
    not_stored: Natural = 0


class ReportLostShards(Request[Nothing], frozen=True):
    """The origin does not give a member some shards that no worker has. The member tries again meanwhile."""

    needs: ClassVar[Role] = Role.WORKER

    job: str
    worker_id: str
    incarnation: bytes
    attempt: int
    count: Natural
    shards: list[Natural]
    """The first ones."""
    reason: str
    """The origin's error for the first one."""
    certain: bool = False
    """Whether the origin says that it does not have them, or has failed several times in a row."""


class ReportCorruptShard(Request[Nothing], frozen=True):
    """Another worker's copy of a shard does not match its checksum."""

    needs: ClassVar[Role] = Role.WORKER

    job: str
    worker_id: str
    incarnation: bytes
    source: str
    shard: Natural


class UsageTaken(msgspec.Struct, frozen=True):
    """The reported usage is durable."""

    known_to: Natural = 0
    """The daemon knows what the world has used up to this step."""


class ReportUsage(Request[UsageTaken], frozen=True):
    """The samples that the committed steps of a world have used.

    Any member may report them, because known steps do not count again. Without `runs` it asks up to where they are
    known.
    """

    needs: ClassVar[Role] = Role.WORKER

    job: str
    worker_id: str
    incarnation: bytes
    generation: Natural
    begins_at: Natural
    """The committed step at which the world began."""
    samples: Natural
    runs: list[Run]


# Requests of operators.


class HeldView(msgspec.Struct, frozen=True):
    """How many shards one worker owns, and of how many it holds a replica."""

    worker_id: str
    owned: int
    copies: int
    samples: int
    weight: float = 1.0
    """The share of the data that it should hold, relative to other workers."""


class DataView(msgspec.Struct, frozen=True, kw_only=True):
    """A job's dataset and its holders."""

    job: str
    dataset: DatasetSpec
    generation: int
    """The generation of the world that holds it so; 0 before the first."""
    workers: list[HeldView]
    lost: int = 0
    """See `TransfersView`."""
    lost_shards: list[int] = []
    lost_because: str = ""
    last_held_by: list[str] = []
    """The workers that held them in the last world and are gone."""
    differing: int = 0
    """Shards of which workers held different bytes in the last offers."""
    differing_shards: list[int] = []
    """The first ones."""


class ShowData(Request[DataView], frozen=True):
    """Show which workers hold a job's data."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False

    job: str


class WorkerTransfers(msgspec.Struct, frozen=True):
    """The progress of one worker's transfers."""

    worker_id: str
    done: int
    transfers: int
    bytes: int
    finished: bool


class TransfersView(msgspec.Struct, frozen=True, kw_only=True):
    """The transfers of the current or the last attempt."""

    job: str
    attempt: int
    running: bool
    totals: TransferTotals
    done: int
    bytes: int
    elapsed_s: float
    waiting_for: list[str]
    """The members that have not offered yet."""
    lost: int = 0
    """How many shards have no source, so that all members wait. A lower bound when members report more than they
    name."""
    lost_shards: list[int] = []
    """The first ones."""
    lost_because: str = ""
    """Why the origin does not give them, or which workers were not asked."""
    last_held_by: list[str] = []
    """The workers that held them in the last world and are gone."""
    aborted: bool = False
    """Whether the job was aborted meanwhile."""
    planned: bool = True
    """Whether the attempt has a plan."""
    workers: list[WorkerTransfers]


class ShowTransfers(Request[TransfersView], frozen=True):
    """Show the current transfers and their progress."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False

    job: str


class OwnersPage(msgspec.Struct, frozen=True):
    """The owners of the shards from `after` on, as places in `workers`, int32."""

    generation: int
    workers: tuple[WorkerId, ...]
    owners: bytes
    more: bool


class ReadOwners(Request[OwnersPage], frozen=True):
    """Read the owners of a job's shards, from `after` on."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False

    job: str
    after: Natural = 0


class UsageConflict(msgspec.Struct, frozen=True):
    """Two workers reported different samples for a step: their samplers or their steps differ."""

    step: int
    worker_id: str


class AuditView(msgspec.Struct, frozen=True, kw_only=True):
    """The audit of one epoch. Ranges are `[start, end]`, the end exclusive."""

    job: str
    epoch: int
    samples: int
    used: int
    dropped: int
    complete: bool
    missing_total: int
    missing: list[tuple[int, int]]
    repeated_total: int
    repeated: list[tuple[int, int]]
    forgotten: bool
    conflicts: list[UsageConflict] = []
    """An epoch with conflicts is not proven."""
    epochs: list[int]
    """The epochs that have been reported."""


class AuditData(Request[AuditView], frozen=True):
    """Audit an epoch, or the latest one."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False

    job: str
    epoch: int | None = None


class PlanData(Request[TransferTotals], frozen=True):
    """Preview the transfers of a rescale to `workers`, ids in rank order; a new worker may have any id.

    Workers in `gone` count as failed. Present workers that are not listed count as draining.
    """

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False

    job: str
    workers: list[str]
    gone: tuple[str, ...] = ()


WORKER_REQUESTS = (
    OfferShards,
    ReadTransfers,
    ReportShards,
    ReportLostShards,
    ReportCorruptShard,
    ReadOwners,
    ReportUsage,
)
OPERATOR_REQUESTS = (ShowData, ShowTransfers, PlanData, AuditData)
REQUESTS = (*WORKER_REQUESTS, *OPERATOR_REQUESTS)


def mark_of(checksum: bytes) -> bytes:
    return checksum[:MARK_BYTES].ljust(MARK_BYTES, b"\0")
