from __future__ import annotations

import pytest

from forged.data.store.errors import StoreFailed
from forged.data.store.memory import MemoryShardStore
from tests.data.transfer_cluster import open_descriptors


def test_store_refuses_shards_beyond_its_capacity() -> None:
    store = MemoryShardStore(bytes_max=10)
    store.put(1, [b"x" * 6])
    with pytest.raises(StoreFailed) as raised:
        store.put(2, [b"x" * 4, b"x"])
    assert raised.value.code == "disk_full"
    store.put(2, [b"x" * 4])


def test_store_leaks_no_descriptors() -> None:
    before = open_descriptors()
    store = MemoryShardStore()
    store.put(1, [b"x" * 100_000])
    with store.open(1):
        assert open_descriptors() == before + 1
    assert open_descriptors() == before
