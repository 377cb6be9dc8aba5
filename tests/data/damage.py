"""Damage to shards in memory."""

from __future__ import annotations

from forged.data.store.memory import MemoryShardStore


def damage(store: MemoryShardStore, shard: int, data: bytes) -> None:
    """Replace the bytes of a shard and keep its stamp, as a failing disk would."""
    stamp, _ = store._held[shard]
    store._held[shard] = stamp, data
