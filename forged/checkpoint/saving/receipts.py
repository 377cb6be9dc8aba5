"""What the ranks of one save tell each other without meeting: notes in the storage, beside the parts.

Law: every rank but the root hands one note in: what it has written, or why it could not. The root answers with the
manifest, or with a note to each of the others that the save has failed. A note is deleted by whom it was for, when it
was read; those of ranks that have died stay, like all of a save that came to nothing, and are cleared away with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice

import msgspec

from forged.checkpoint.coordinators import RankFailure
from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.format.manifest import Part
from forged.checkpoint.ports import CancelToken, Storage
from forged.checkpoint.saving.pipeline import RankSave
from forged.checkpoint.storage import listing

ROOT = 0
POLL_S = 0.01
POLL_MAX_S = 1.0
RECEIPT_BYTES_MAX = 1 << 30
GONE_S = 2.0
"""How long a rank that is gone is still waited for: what it has to say may be there already."""
GONE_NAMED_MAX = 10
OUTCOME_GRACE_S = 5.0
"""So much longer than the root the others wait, because it still has to tell them when its time is over."""


class Receipt(msgspec.Struct, frozen=True, tag="receipt"):
    """What a rank has written."""

    part: Part


_handed_in: msgspec.json.Decoder[Receipt | RankFailure] = msgspec.json.Decoder(Receipt | RankFailure)
_refusal: msgspec.json.Decoder[RankFailure] = msgspec.json.Decoder(RankFailure)


class RankWaiter:
    """How a save waits for other ranks: less and less often, and not for long for those that are gone."""

    def __init__(self, token: CancelToken, members: Callable[[], Collection[str]], grace_s: float = 0.0) -> None:
        """`members` are the names of the ranks that there are now, by rank, where they have some."""
        self.token = token.extended(grace_s)
        self._members = members
        self._began_with = tuple(members())
        self._pause_s = POLL_S

    def wait(self, ranks: Iterable[int]) -> None:
        """Pause: these ranks have not said yet what they have to say."""
        gone = self._gone(ranks)
        if gone:
            self.token.shorten(GONE_S)
        try:
            self.token.wait(self._pause_s)
        except CheckpointException as error:
            if not gone or error.type is not ExceptionType.TIMEOUT:
                raise
            raise _gone_before(gone) from error
        self._pause_s = min(2 * self._pause_s, POLL_MAX_S)

    def begin_anew(self) -> None:
        """Something has come: more may come soon."""
        self._pause_s = POLL_S

    def _gone(self, ranks: Iterable[int]) -> dict[int, str]:
        """Who of them is not there any more, by rank."""
        names = self._began_with
        if not names:
            return {}
        there = frozenset(self._members())
        return {
            rank: f"rank {rank} ({names[rank]})" if rank < len(names) else f"rank {rank}"
            for rank in ranks
            if rank >= len(names) or names[rank] not in there
        }


def _gone_before(gone: Mapping[int, str]) -> CheckpointException:
    """Ranks are gone, and have not said what became of their part."""
    told = dict(islice(gone.items(), GONE_NAMED_MAX))
    more = f" and {len(gone) - GONE_NAMED_MAX} more" if len(gone) > GONE_NAMED_MAX else ""
    verb = "is" if len(gone) == 1 else "are"
    return CheckpointException(
        f"{', '.join(told.values())}{more} {verb} gone, and had not finished the save",
        type=ExceptionType.SAVE_FAILED,
        code="checkpoint_rank_gone",
        fix="save again, with the ranks that there are now",
        retryable=True,
        ranks=tuple(told),
    )


class ReceiptExchange:
    """Those of one save, as one rank sees them."""

    def __init__(self, storage: Storage, work: RankSave, patience: RankWaiter) -> None:
        self._storage = storage
        self._work = work
        self._patience = patience

    def hand_in(self, said: Part | RankFailure) -> None:
        """Tell the root what this rank has written, or why it could not."""
        note = Receipt(said) if isinstance(said, Part) else said
        self._storage.publish(self._receipt(self._work.rank), msgspec.json.encode(note))

    def collect(self) -> list[Part]:
        """At the root: what all others have written, when they have; raises as soon as one could not."""
        others = range(1, self._work.world_size)
        found: dict[int, Part] = {}
        while len(found) < len(others):
            missing = [rank for rank in others if rank not in found]
            news = self._handed_in(missing)
            if news:
                found |= news
                self._patience.begin_anew()
            else:
                self._patience.wait(missing)
        return [found[rank] for rank in others]

    def verdict(self) -> RankFailure | None:
        """Elsewhere: wait until the root has published, or says what went wrong."""
        while True:
            if (said := self._find(self._notice(self._work.rank))) is not None:
                return _refusal.decode(said)
            if self._stands():
                return None
            self._patience.wait([ROOT])

    def refuse(self, trouble: RankFailure) -> None:
        """Tell the others that there will be no such checkpoint."""
        for rank in range(1, self._work.world_size):
            self._storage.publish(self._notice(rank), msgspec.json.encode(trouble))

    def discard(self) -> None:
        """Delete the notes that have been read: what the others handed in, or what this one did and was told."""
        work = self._work
        names = map(self._receipt, range(1, work.world_size))
        self._storage.delete([*names] if work.is_root else [self._receipt(work.rank), self._notice(work.rank)])

    def _handed_in(self, ranks: Iterable[int]) -> dict[int, Part]:
        """What these have written, as far as they have said so by now."""
        lead = f"{self._work.terms.prefix}/{self._work.terms.save_id}."
        there = {entry.name for entry in self._storage.entries(lead)}
        found = {}
        for rank in ranks:
            name = self._receipt(rank)
            if name in there and (data := self._find(name)) is not None:
                said = _handed_in.decode(data)
                if isinstance(said, RankFailure):
                    raise said.error(self._work.terms.prefix, ExceptionType.SAVE_FAILED, rank)
                found[rank] = said.part
        return found

    def _stands(self) -> bool:
        """Whether this very save has been published."""
        terms = self._work.terms
        if not listing.checkpoint_exists(self._storage, terms.prefix):
            return False
        try:
            return listing.read_manifest(self._storage, terms.prefix).save_id == terms.save_id
        except CheckpointException as error:
            if error.code != "checkpoint_missing":
                raise
            return False

    def _find(self, name: str) -> bytes | None:
        try:
            return self._storage.read(name, RECEIPT_BYTES_MAX)
        except CheckpointException as error:
            if error.code != listing.MISSING:
                raise
            return None

    def _receipt(self, rank: int) -> str:
        return listing.receipt_name(self._work.terms.prefix, self._work.terms.save_id, rank)

    def _notice(self, rank: int) -> str:
        return listing.refusal_name(self._work.terms.prefix, self._work.terms.save_id, rank)
