"""Why a shard store refuses or fails."""

from __future__ import annotations

from forged.errors import RequestRefused, Unavailable


class StoreFailed(Unavailable):
    """This worker's shard store cannot read or write now; no other worker is at fault."""


class ShardCorrupt(Unavailable):
    """The received bytes do not match the stamp; `is_whole` if all of them came from one source."""

    def __init__(self, shard: int, is_whole: bool) -> None:
        super().__init__("shard_corrupt", f"the bytes of shard {shard} do not match its checksum", "fetch another copy")
        self.shard = shard
        self.is_whole = is_whole

    def __reduce__(self) -> tuple[type[ShardCorrupt], tuple[int, bool]]:
        return ShardCorrupt, (self.shard, self.is_whole)


def not_held(shard: int) -> RequestRefused:
    return RequestRefused("shard_not_held", f"shard {shard} is not held here", "ask a worker that holds it")


def damaged(shard: int, what: str) -> RequestRefused:
    return RequestRefused("shard_damaged", f"shard {shard} is damaged here: {what}", "fetch another copy")


def already_held(shard: int) -> RequestRefused:
    return RequestRefused("shard_held", f"shard {shard} is already held here", "drop it first")


def already_arriving(shard: int) -> StoreFailed:
    return StoreFailed(
        "shard_arriving", f"shard {shard} is already being written", "wait until the other writer has ended"
    )


def store_failed(shard: int, reason: str, fix: str) -> StoreFailed:
    return StoreFailed("shard_store_failed", f"shard {shard} cannot be stored: {reason}", fix)


def no_longer_arriving(shard: int) -> StoreFailed:
    return StoreFailed("shard_closed", f"the writer of shard {shard} is closed", "call `receive` again")
