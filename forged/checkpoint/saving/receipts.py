"""How the ranks of a background save meet without a collective: receipts and refusals, small files beside the parts.

Invariants:
- Every rank but the root writes one receipt: what it has written, or why it could not.
- The root answers with the manifest, or with a refusal to every other rank. If the host was to write all parts and is
  away, the root first requests that each rank writes its own.
- On a full disk the refusals take the room of the deleted parts. Where the host was to write these, there is none: a
  rank that waits for long asks the host whether it has refused the save.
- The reader of a file deletes it. Files for ranks that have died are deleted with the rest of the failed save.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice

import msgspec

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.format.manifest import Manifest, Part
from forged.checkpoint.ports import CancelToken, Storage
from forged.checkpoint.rank_group import RankFailure
from forged.checkpoint.saving.rank_save import RankSave
from forged.checkpoint.storage import listing

ROOT = 0
RANK_GONE = "checkpoint_rank_gone"
POLL_S = 0.01
POLL_MAX_S = 1.0
RECEIPT_BYTES_MAX = 1 << 30
GONE_S = 2.0
"""How long to wait for the receipt of a rank that has left: it may be in the storage already."""
GONE_NAMED_MAX = 10
OUTCOME_GRACE_S = 5.0
"""The other ranks wait this much longer than the root, which reports a timeout to them."""
REFUSED_WAITS = 5
"""So many pauses after the host has refused a save, the other ranks take that for the outcome."""


class Receipt(msgspec.Struct, frozen=True, tag="receipt"):
    """What a rank has written."""

    parts: list[Part]
    """Its part, and references to unchanged chunks in files of earlier checkpoints."""


_receipt_decoder: msgspec.json.Decoder[Receipt | RankFailure] = msgspec.json.Decoder(Receipt | RankFailure)
_refusal_decoder: msgspec.json.Decoder[RankFailure] = msgspec.json.Decoder(RankFailure)


class RankWaiter:
    """Waits for other ranks with growing pauses, and briefly for ranks that have left."""

    def __init__(self, token: CancelToken, members: Callable[[], Collection[str]], grace_s: float = 0.0) -> None:
        """`members` returns the names of the present ranks, by rank; none where ranks have no names."""
        self.token = token.extended(grace_s)
        self._members = members
        self._initial_members = tuple(members())
        self._pause_s = POLL_S

    def wait(self, ranks: Iterable[int]) -> None:
        """Pause because these ranks have not reported; raise when they have left or the time is over."""
        gone = self._gone(ranks)
        if gone:
            self.token.shorten(GONE_S)
        try:
            self.token.wait(self._pause_s)
        except CheckpointException as error:
            if not gone or error.type is not ExceptionType.TIMEOUT:
                raise
            raise _ranks_gone(gone) from error
        self._pause_s = min(2 * self._pause_s, POLL_MAX_S)

    @property
    def is_slow(self) -> bool:
        """Whether the other ranks have taken their time."""
        return self._pause_s >= POLL_MAX_S

    def reset_pause(self) -> None:
        """Poll fast again after a receipt has come."""
        self._pause_s = POLL_S

    def _gone(self, ranks: Iterable[int]) -> dict[int, str]:
        """Those of the ranks that have left since the save began, with their names."""
        names = self._initial_members
        if not names:
            return {}
        present = frozenset(self._members())
        return {
            rank: f"rank {rank} ({names[rank]})" if rank < len(names) else f"rank {rank}"
            for rank in ranks
            if rank >= len(names) or names[rank] not in present
        }


def _ranks_gone(gone: Mapping[int, str]) -> CheckpointException:
    named = dict(islice(gone.items(), GONE_NAMED_MAX))
    more = f" and {len(gone) - GONE_NAMED_MAX} more" if len(gone) > GONE_NAMED_MAX else ""
    return CheckpointException(
        f"{', '.join(named.values())}{more} left before the save was complete",
        type=ExceptionType.SAVE_FAILED,
        code=RANK_GONE,
        fix="save again with the present ranks",
        retryable=True,
        ranks=tuple(named),
    )


class ReceiptExchange:
    """The receipts and refusals of one save, from one rank's side."""

    def __init__(self, storage: Storage, save: RankSave, waiter: RankWaiter) -> None:
        self._storage = storage
        self._save = save
        self._waiter = waiter
        self._host_refusal: RankFailure | None = None
        """Why there is no checkpoint, if the root could not tell that."""

    def report(self, outcome: list[Part] | RankFailure) -> None:
        """Write this rank's receipt."""
        receipt = outcome if isinstance(outcome, RankFailure) else Receipt(outcome)
        self._storage.publish(self._receipt_name(self._save.rank), msgspec.json.encode(receipt))

    def collect(self) -> list[Part]:
        """At the root: wait for the parts of all other ranks; raise as soon as a rank reports a failure."""
        others = range(1, self._save.world_size)
        parts: dict[int, list[Part]] = {}
        while len(parts) < len(others):
            missing = [rank for rank in others if rank not in parts]
            new = self._new_receipts(missing)
            if new:
                parts |= new
                self._waiter.reset_pause()
            else:
                self._waiter.wait(missing)
        return [part for rank in others for part in parts[rank]]

    def wait_for_outcome(self) -> RankFailure | None:
        """At the other ranks: wait until the root has published the manifest (None) or refused."""
        while self._host_refusal is None:
            if (refusal := self._read(self._refusal_name(self._save.rank))) is not None:
                return _refusal_decoder.decode(refusal)
            if self.published() is not None:
                return None
            self._waiter.wait([ROOT])
        return self._host_refusal

    def wait_for_request(self, refusal_of_host: Callable[[], CheckpointException | None]) -> bool:
        """At another rank: wait until the root requests that the ranks write their parts (true), or has an outcome.

        A root that the host has refused the save may have no room to tell that.
        """
        refusal, waits = None, 0
        while waits < REFUSED_WAITS:
            if self._read(self._request_name(self._save.rank)) is not None:
                return True
            if self._read(self._refusal_name(self._save.rank)) is not None or self.published() is not None:
                return False
            if refusal is None and self._waiter.is_slow:
                refusal = refusal_of_host()
            waits += refusal is not None
            self._waiter.wait([ROOT])
        assert refusal is not None
        self._host_refusal = RankFailure.of(refusal)
        return False

    def request_writing(self) -> None:
        """At the root: request that every other rank writes its part, because the host does not."""
        for rank in range(1, self._save.world_size):
            self._storage.publish(self._request_name(rank), b"{}")

    def refuse(self, failure: RankFailure) -> None:
        """At the root: tell every other rank that the save failed."""
        for rank in range(1, self._save.world_size):
            self._storage.publish(self._refusal_name(rank), msgspec.json.encode(failure))

    def delete_read(self) -> None:
        """Delete what this rank has read: the root all receipts, another rank what is for it."""
        save = self._save
        if save.is_root:
            self._storage.delete([*map(self._receipt_name, range(1, save.world_size))])
            return
        names = self._receipt_name, self._refusal_name, self._request_name
        self._storage.delete([name_of(save.rank) for name_of in names])

    def _new_receipts(self, ranks: Iterable[int]) -> dict[int, list[Part]]:
        lead = f"{self._save.agreement.prefix}/{self._save.agreement.save_id}."
        present = {entry.name for entry in self._storage.entries(lead)}
        found = {}
        for rank in ranks:
            name = self._receipt_name(rank)
            if name in present and (data := self._read(name)) is not None:
                receipt = _receipt_decoder.decode(data)
                if isinstance(receipt, RankFailure):
                    raise receipt.error(self._save.agreement.prefix, ExceptionType.SAVE_FAILED, rank)
                found[rank] = receipt.parts
        return found

    def published(self) -> Manifest | None:
        """The manifest of this save, and not that of another save under the same name; None if there is none."""
        agreement = self._save.agreement
        if not listing.checkpoint_exists(self._storage, agreement.prefix):
            return None
        try:
            manifest = listing.read_manifest(self._storage, agreement.prefix)
        except CheckpointException as error:
            if error.code != "checkpoint_missing":
                raise
            return None
        return manifest if manifest.save_id == agreement.save_id else None

    def _read(self, name: str) -> bytes | None:
        try:
            return self._storage.read(name, RECEIPT_BYTES_MAX)
        except CheckpointException as error:
            if error.code != listing.MISSING:
                raise
            return None

    def _receipt_name(self, rank: int) -> str:
        return listing.receipt_name(self._save.agreement.prefix, self._save.agreement.save_id, rank)

    def _request_name(self, rank: int) -> str:
        return listing.request_name(self._save.agreement.prefix, self._save.agreement.save_id, rank)

    def _refusal_name(self, rank: int) -> str:
        return listing.refusal_name(self._save.agreement.prefix, self._save.agreement.save_id, rank)
