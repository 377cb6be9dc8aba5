"""What becomes of transfers, as values.

Law: every value is frozen. A report accounts for each shard that was to come: it was moved, was here already, or is
missing, and then everything that was tried is told.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from forged.data.schedule import Fault, Source
from forged.data.store import StoreFailed
from forged.errors import Unavailable

SHARDS_NAMED_MAX = 20


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
        if self.is_own_fault:
            return f"shard {self.shard_id} ({self.reason})"
        # Most sources were asked several times, and said the same.
        asked = dict.fromkeys(f"{failure.source or 'the origin'}: {failure.reason}" for failure in self.failures)
        tried = "; ".join(asked)
        return f"shard {self.shard_id} ({tried or 'nobody has it'})"

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
        return self.failures[-1].reason if self.failures else "nobody has it"


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
            raise StoreFailed("shards_not_kept", f"{_named(own)} cannot be kept here", "see the disk")
        if self.missing:
            raise Unavailable(
                "shards_missing",
                f"{_named(self.missing)} cannot be had from anybody",
                "bring back a worker that holds them",
            )


def _named(shards: Sequence[MissingShard]) -> str:
    named = ", ".join(str(shard) for shard in shards[:SHARDS_NAMED_MAX])
    more = len(shards) - SHARDS_NAMED_MAX
    return f"{named} and {more} more" if more > 0 else named


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
