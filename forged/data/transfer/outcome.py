"""The results and the progress of transfers, as values.

Invariants:
- Values are frozen.
- A report accounts for each wanted shard: moved, held before, or missing with the failure of every attempt.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from forged.data.store.errors import StoreFailed
from forged.data.transfer.schedule import Fault, Source
from forged.errors import Unavailable

SHARDS_NAMED_MAX = 20
ORIGIN = "the origin"
NO_SOURCE = "no worker has it"


class MovedShard(msgspec.Struct, frozen=True):
    """A shard that was fetched. `resumed_from` of its bytes were stored before the last attempt."""

    shard_id: int
    source: Source
    size: int
    resumed_from: int
    seconds: float


class SourceFailure(msgspec.Struct, frozen=True):
    """Why one attempt to fetch a shard from a source failed."""

    source: Source
    reason: str
    fault: Fault = Fault.BROKEN


class MissingShard(msgspec.Struct, frozen=True):
    """A shard that no source gave."""

    shard_id: int
    failures: tuple[SourceFailure, ...]

    def __str__(self) -> str:
        return f"shard {self.shard_id} ({self.why})"

    @property
    def why(self) -> str:
        """All failures, without the shard's id: several shards may be missing for the same reason."""
        if self.is_own_fault:
            return self.reason
        # Most sources were asked several times, and failed the same way.
        return "; ".join(dict.fromkeys(map(self._with_source, self.failures))) or NO_SOURCE

    def _with_source(self, failure: SourceFailure) -> str:
        reason = self._without_id(failure.reason)
        if failure.source is None and reason.startswith(ORIGIN):
            return reason
        return f"{failure.source or ORIGIN}: {reason}"

    def _without_id(self, reason: str) -> str:
        return re.sub(rf"\bshard {self.shard_id}\b", "it", re.sub(rf" for shard {self.shard_id}\b", "", reason))

    @property
    def is_own_fault(self) -> bool:
        """Whether this worker's own store failed, so that no other source would help."""
        return bool(self.failures) and self.failures[-1].fault is Fault.OWN

    @property
    def has_no_holder(self) -> bool:
        """Whether no worker was named as a source, so that only the origin was asked."""
        return not self.is_own_fault and all(failure.source is None for failure in self.failures)

    @property
    def is_refused(self) -> bool:
        """Whether the last source said that it does not have the shard; any other failure may pass."""
        return not self.failures or self.failures[-1].fault is Fault.REFUSED

    @property
    def reason(self) -> str:
        """The last failure."""
        return self._without_id(self.failures[-1].reason) if self.failures else NO_SOURCE


class BadCopy(msgspec.Struct, frozen=True):
    """A copy whose bytes do not match its stamp, at the source or on arrival."""

    shard_id: int
    source: Source
    code: str
    reason: str


class TransferReport(msgspec.Struct, frozen=True):
    """The result of one batch of transfers."""

    moved: tuple[MovedShard, ...] = ()
    kept: tuple[int, ...] = ()
    """Shards that were held already."""
    missing: tuple[MissingShard, ...] = ()
    bad_copies: tuple[BadCopy, ...] = ()
    bytes: int = 0
    """Received for all shards, including those that are missing."""
    seconds: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether every shard is held."""
        return not self.missing

    def require_complete(self) -> None:
        """Raise an error that names the missing shards, if there are any."""
        if own := [shard for shard in self.missing if shard.is_own_fault]:
            raise StoreFailed("shards_not_kept", f"cannot store {_named(own)}", "check the disk of this host")
        if self.missing:
            raise Unavailable(
                "shards_missing",
                f"cannot fetch {_named(self.missing)}",
                "restart a worker that holds them",
            )


def _named(shards: Sequence[MissingShard]) -> str:
    """The first shards with their reasons, each reason once."""
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


class ShardInTransit(msgspec.Struct, frozen=True):
    """A shard that is being fetched; `size` is None while it is unknown."""

    shard_id: int
    source: Source
    stored: int
    """How many of its bytes are in the store."""
    size: int | None
    origin_silent_s: float | None = None
    """For how long the origin has sent no byte; None while the transfer waits for a worker or for the store."""
    may_be_at_a_worker: bool = False
    """Whether a worker that was named as a source was not reached."""


class TransferProgress(msgspec.Struct, frozen=True):
    """The progress of a worker's transfers; each value replaces the previous one."""

    done: int
    missing: int
    total: int
    bytes_moved: int
    seconds: float
    in_transit: tuple[ShardInTransit, ...] = ()

    @property
    def bytes_per_s(self) -> float:
        """The average so far."""
        return self.bytes_moved / self.seconds if self.seconds > 0 else 0.0
