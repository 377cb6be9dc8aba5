"""What becomes of transfers, as values.

Law: every value is frozen. A report accounts for each shard that was to come: it was moved, was here already, or is
missing, and then everything that was tried is told.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from forged.data.store.port import StoreFailed
from forged.data.transfer.schedule import Fault, Source
from forged.errors import Unavailable

SHARDS_NAMED_MAX = 20
ORIGIN = "the origin"


class MovedShard(msgspec.Struct, frozen=True):
    """A shard that is held now. `resumed_from` of its bytes were here before the last attempt."""

    shard_id: int
    source: Source
    size: int
    resumed_from: int
    seconds: float


class SourceFailure(msgspec.Struct, frozen=True):
    """Why a shard could not be had from a source."""

    source: Source
    reason: str
    fault: Fault = Fault.BROKEN


class MissingShard(msgspec.Struct, frozen=True):
    """A shard that could be had from nobody."""

    shard_id: int
    failures: tuple[SourceFailure, ...]

    def __str__(self) -> str:
        return f"shard {self.shard_id} ({self.why})"

    @property
    def why(self) -> str:
        """Why it is not here, without its number: several may be missing for the same reason."""
        if self.is_own_fault:
            return self.reason
        # Most sources were asked several times, and said the same.
        return "; ".join(dict.fromkeys(map(self._told_by, self.failures))) or "nobody has it"

    def _told_by(self, failure: SourceFailure) -> str:
        reason = self._about_it(failure.reason)
        if failure.source is None and reason.startswith(ORIGIN):
            return reason
        return f"{failure.source or ORIGIN}: {reason}"

    def _about_it(self, reason: str) -> str:
        """A reason where it is clear which shard is meant."""
        return re.sub(rf"\bshard {self.shard_id}\b", "it", re.sub(rf" for shard {self.shard_id}\b", "", reason))

    @property
    def is_own_fault(self) -> bool:
        """Whether it is this worker that could not take it, whoever would have given it."""
        return bool(self.failures) and self.failures[-1].fault is Fault.OURS

    @property
    def is_with_nobody(self) -> bool:
        """Whether no worker was to have it, so that the dataset's origin was asked alone."""
        return not self.is_own_fault and all(failure.source is None for failure in self.failures)

    @property
    def is_refused(self) -> bool:
        """Whether who was asked last can tell that it does not have it; else it may have it a while later."""
        return not self.failures or self.failures[-1].fault is Fault.REFUSED

    @property
    def reason(self) -> str:
        """What went wrong last."""
        return self._about_it(self.failures[-1].reason) if self.failures else "nobody has it"


class BadCopy(msgspec.Struct, frozen=True):
    """A copy that is not what it should be, or was not when it arrived."""

    shard_id: int
    source: Source
    code: str
    reason: str


class TransferReport(msgspec.Struct, frozen=True):
    """How a plan was executed by one worker."""

    moved: tuple[MovedShard, ...] = ()
    kept: tuple[int, ...] = ()
    """Those that were here already."""
    missing: tuple[MissingShard, ...] = ()
    bad_copies: tuple[BadCopy, ...] = ()
    bytes: int = 0
    """How many travelled for shards that were moved and for those that were not."""
    seconds: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether all shards are here."""
        return not self.missing

    def require_complete(self) -> None:
        """Raise an error that names the shards that are missing, if any are, and tells whose fault that is."""
        if own := [shard for shard in self.missing if shard.is_own_fault]:
            raise StoreFailed("shards_not_kept", f"cannot keep {_named(own)}", "see the disk")
        if self.missing:
            raise Unavailable(
                "shards_missing",
                f"cannot have {_named(self.missing)}",
                "bring back a worker that holds them",
            )


def _named(shards: Sequence[MissingShard]) -> str:
    """The shards with the reasons why they are missing, each reason once."""
    by_reason: defaultdict[str, list[MissingShard]] = defaultdict(list)
    for shard in shards[:SHARDS_NAMED_MAX]:
        by_reason[shard.why].append(shard)
    named = "; ".join(_group(why, group) for why, group in by_reason.items())
    more = len(shards) - SHARDS_NAMED_MAX
    return f"{named} and {more} more" if more > 0 else named


def _group(why: str, shards: Sequence[MissingShard]) -> str:
    if len(shards) == 1:
        return str(shards[0])
    return f"{len(shards)} shards ({why}): {', '.join(str(shard.shard_id) for shard in shards)}"


class UnderWay(msgspec.Struct, frozen=True):
    """A shard that is being moved. `size` is None while it is not known."""

    shard_id: int
    source: Source
    here: int
    size: int | None
    origin_silent_s: float | None = None
    """For how long the origin has given nothing; None while something else is waited for: a worker, or what keeps the
    shards here."""
    is_elsewhere: bool = False
    """Whether a worker has it, or had, who was not reached."""


class TransferProgress(msgspec.Struct, frozen=True):
    """How far a worker is with a plan; a later one makes those before it worthless."""

    done: int
    missing: int
    total: int
    bytes_moved: int
    seconds: float
    under_way: tuple[UnderWay, ...] = ()

    @property
    def bytes_per_s(self) -> float:
        """How fast it has been so far."""
        return self.bytes_moved / self.seconds if self.seconds > 0 else 0.0
