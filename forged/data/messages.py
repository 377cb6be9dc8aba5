"""What is said about training data: by the daemon (facts), and to it (requests).

Law: a column of numbers travels as its bytes, little-endian, and never as a list. What belongs to one attempt at a
rescale carries the attempt's number, and what a worker says carries its incarnation.
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
"""So many shards are named where more may be meant."""
PAGE_SHARDS_MAX = 1 << 16
"""So many transfers, or owners, come in one answer."""


class DatasetSpec(msgspec.Struct, frozen=True):
    """A job's dataset: how it is divided, how many further copies of each shard there should be, and whether a shard
    that no worker has can be had again."""

    samples: Natural
    shards: Natural
    replication: Natural = 0
    has_origin: bool = False


class TransferTotals(msgspec.Struct, frozen=True):
    """What has to travel, by where it comes from."""

    shards: Natural = 0
    """How many shards get another owner."""
    transfers: Natural = 0
    from_owners: Natural = 0
    from_replicas: Natural = 0
    from_origin: Natural = 0
    bytes: Natural = 0
    """As far as the sizes of shards are known."""
    estimated_s: float | None = None
    """None while nobody has measured how fast shards travel."""


# Facts.


class DatasetDefined(Fact, frozen=True):
    """A job trains with this dataset."""

    dataset: DatasetSpec


class TransfersPlanned(Fact, frozen=True):
    """It is settled which shards the members of an attempt need, and from whom."""

    attempt: int
    totals: TransferTotals


class TransfersCompleted(Fact, frozen=True):
    """Every member of an attempt has verified what it needs."""

    attempt: int
    transfers: int
    bytes: int
    took_s: float
    estimated_s: float | None


class ShardsLost(Fact, frozen=True):
    """Nobody who was asked has these shards, and they cannot be had again, or not now; the first few are named."""

    level: ClassVar[str] = "error"

    attempt: int
    count: int
    shards: list[int]
    reason: str = ""
    """Why they cannot be had, where there is more to say."""
    last_held_by: list[str] = []  # noqa: RUF012 - msgspec copies it
    """Who had them in the last world, and is not there: started again with its directory, it brings them back."""


class CopiesDiffer(Fact, frozen=True):
    """Some workers hold something else than others under the same numbers. Where there is an origin, what most of them
    hold counts, and the others fetch that; elsewhere nothing is done about it. The first few are named."""

    level: ClassVar[str] = "warning"

    attempt: int
    count: int
    shards: list[int]
    workers: list[str]
    """Who holds something else than most, or than the owner."""


class CorruptShardFound(Fact, frozen=True):
    """A worker's copy of a shard is not what it was when it was put there."""

    level: ClassVar[str] = "error"

    worker_id: str
    shard: int
    found_by: str


# What workers ask and say.


class OfferTaken(msgspec.Struct, frozen=True):
    """What was said is heard, unless some copies are in doubt: then those are to be looked at, and all is said anew."""

    suspect: bytes = b""
    """Their numbers, as int64."""


class OfferShards(Request[OfferTaken], frozen=True):
    """A member of an attempt says which shards it has verified on its host: their numbers, as int64."""

    needs: ClassVar[Role] = Role.WORKER

    job: str
    worker_id: str
    incarnation: bytes
    attempt: int
    dataset: DatasetSpec
    held: bytes = b""
    held_bytes: Natural = 0
    more: bool = False
    """Whether another part of what it holds follows."""
    bytes_per_second: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """How fast shards came to it lately; 0 where it has not measured that."""
    weight: float = 1.0
    """How much of the data it should hold, in proportion to the others: a finite number above 0."""
    verified: bytes = b""
    """The shards of which the copies were in doubt and were verified again, whether they were bad or not, as int64."""
    marks: bytes = b""
    """For each of `held` the first 8 bytes of its checksum; empty where they are not told."""


class TransferPart(msgspec.Struct, frozen=True):
    """What a member has to fetch, the most urgent first, and what it has to hold when the attempt is committed."""

    workers: tuple[WorkerId, ...]
    shards: bytes
    """The shards to fetch, as int64."""
    sources: bytes
    """For each of them the places in `workers` of those who have it, as int32 in rows of `sources_per_shard`; -1 is the
    dataset's origin, -2 nobody more."""
    sources_per_shard: int
    keep: bytes
    """What it has to hold then, as int64; in pages like the transfers."""
    owned: bytes
    """For each of those a byte: 1 where it is the owner, 0 where it has a further copy."""
    more: bool
    """Whether there is more behind this part."""
    is_released: bool
    """Whether the worker is to go behind the commit, and leaves nothing that others could take over."""
    replaced: bytes = b""
    """Those of `shards` of which it holds something else than others, as int64: it drops that before."""


class ReadTransfers(Request[TransferPart], frozen=True):
    """What a member has to fetch, behind so many shards."""

    needs: ClassVar[Role] = Role.WORKER
    decides: ClassVar[bool] = False

    job: str
    worker_id: str
    attempt: int
    after: Natural = 0


class ReportShards(Request[Nothing], frozen=True):
    """A member has fetched and verified all that it needs for an attempt; or cannot.

    If some are `missing`, copies of those were found to be bad, so all have to say anew what they hold. If it does not
    keep some, others are to take them.
    """

    needs: ClassVar[Role] = Role.WORKER

    job: str
    worker_id: str
    incarnation: bytes
    attempt: int
    transfers: Natural = 0
    received: Natural = 0
    """How many bytes came."""
    took_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    missing: Natural = 0
    not_stored: Natural = 0


class ReportLostShards(Request[Nothing], frozen=True):
    """A member cannot have some shards that no worker has, because the dataset's origin does not give them. It tries
    again; what it has then it reports."""

    needs: ClassVar[Role] = Role.WORKER

    job: str
    worker_id: str
    incarnation: bytes
    attempt: int
    count: Natural
    shards: list[Natural]
    """The first of them."""
    reason: str
    """What the origin said of the first."""
    certain: bool = False
    """Whether the origin says that it does not have them, or has failed for a while; else it may only be away."""


class ReportCorruptShard(Request[Nothing], frozen=True):
    """What another worker sent of a shard is not what the shard was."""

    needs: ClassVar[Role] = Role.WORKER

    job: str
    worker_id: str
    source: str
    shard: Natural


class UsageTaken(msgspec.Struct, frozen=True):
    """What was told is kept."""

    known_to: Natural = 0
    """Up to this step it is known what the world has used."""


class ReportUsage(Request[UsageTaken], frozen=True):
    """What the committed steps of a world have used of a dataset of so many samples. What is known is not counted
    again, so any member may say it; who says nothing hears what is known."""

    needs: ClassVar[Role] = Role.WORKER

    job: str
    worker_id: str
    generation: Natural
    begins_at: Natural
    """How many steps the world had behind it when it began."""
    samples: Natural
    runs: list[Run]


# What operators ask.


class HeldView(msgspec.Struct, frozen=True):
    """What one worker owns, and of how many shards it has a further copy."""

    worker_id: str
    owned: int
    copies: int
    samples: int
    weight: float = 1.0
    """How much of the data it should hold, in proportion to the others."""


class DataView(msgspec.Struct, frozen=True, kw_only=True):
    """A job's data in one look."""

    job: str
    dataset: DatasetSpec
    generation: int
    """Of the world that holds it so; 0 while nobody holds any."""
    workers: list[HeldView]
    lost: int = 0
    """As in `TransfersView`."""
    lost_shards: list[int] = []
    lost_because: str = ""
    last_held_by: list[str] = []
    """Who had them in the last world, and is not there."""
    differing: int = 0
    """Of how many shards workers held something else than others, when they said last what they hold."""
    differing_shards: list[int] = []
    """The first of them."""


class ShowData(Request[DataView], frozen=True):
    """Who holds a job's data."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False

    job: str


class WorkerTransfers(msgspec.Struct, frozen=True):
    """How far one worker is."""

    worker_id: str
    done: int
    transfers: int
    bytes: int
    finished: bool


class TransfersView(msgspec.Struct, frozen=True, kw_only=True):
    """The transfers of the attempt that is under way, or of the last one."""

    job: str
    attempt: int
    running: bool
    totals: TransferTotals
    done: int
    bytes: int
    elapsed_s: float
    waiting_for: list[str]
    """Who has yet to say what it holds."""
    lost: int = 0
    """How many shards nobody has any more, though they cannot be had again, or not now: all wait until somebody has
    them. At least so many, where the origin refuses several workers more than are named."""
    lost_shards: list[int] = []
    """The first of them."""
    lost_because: str = ""
    """Why they cannot be had, where there is more to say."""
    last_held_by: list[str] = []
    """Who had them in the last world, and is not there."""
    aborted: bool = False
    """Whether the job was given up meanwhile, so that nothing is waited for."""
    planned: bool = True
    """Whether it is settled what has to travel."""
    workers: list[WorkerTransfers]


class ShowTransfers(Request[TransfersView], frozen=True):
    """What travels now, and how far it is."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False

    job: str


class OwnersPage(msgspec.Struct, frozen=True):
    """Who owns the shards behind `after`: places in `workers`, as int32."""

    generation: int
    workers: tuple[WorkerId, ...]
    owners: bytes
    more: bool


class ReadOwners(Request[OwnersPage], frozen=True):
    """Who owns which shard of a job."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False

    job: str
    after: Natural = 0


class UsageConflict(msgspec.Struct, frozen=True):
    """A worker has told of a step otherwise than others before: they had not the same sampler, or not the same step."""

    step: int
    worker_id: str


class AuditView(msgspec.Struct, frozen=True, kw_only=True):
    """What is proven of one epoch: whether each sample was used once. Ranges are `[start, end]`, the end not in it."""

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
    """Nothing is proven of an epoch where there are some."""
    epochs: list[int]
    """Of which there is something to say."""


class AuditData(Request[AuditView], frozen=True):
    """Whether each sample of an epoch was used once; of the latest epoch that was begun, if none is named."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False

    job: str
    epoch: int | None = None


class PlanData(Request[TransferTotals], frozen=True):
    """What would have to travel if these were the workers, by rank; who is not there yet may have any name. Those who
    are `gone`, as `RescalePlan` names them, give nothing; who else is not to stay does."""

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
