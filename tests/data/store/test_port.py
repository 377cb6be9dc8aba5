"""The contract of all shard stores."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from forged.data.model import SHARD_ID_MAX
from forged.data.store.directory import DirectoryShardStore
from forged.data.store.errors import ShardCorrupt
from forged.data.store.memory import MemoryShardStore
from forged.data.store.port import PartialShard, ShardStore, Stamp
from forged.errors import ForgedError, RequestRefused

DATA = bytes(range(256)) * 20
STAMP = Stamp.of(DATA)


@pytest.fixture(params=[DirectoryShardStore, MemoryShardStore])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ShardStore:
    made: ShardStore = request.param(tmp_path) if request.param is DirectoryShardStore else request.param()
    return made


def read(store: ShardStore, shard: int) -> bytes:
    with store.open(shard) as opened:
        return os.pread(opened.fd, opened.stamp.size + 1, 0)


def code_of(action: Callable[[], object]) -> str:
    with pytest.raises(ForgedError) as raised:
        action()
    return raised.value.code


@pytest.mark.parametrize("shard", [True, False, 1.5, 1.0, "7", None, -1, SHARD_ID_MAX + 1, np.bool_(True)])
def test_invalid_shard_number_is_refused_with_its_value(store: ShardStore, shard: Any) -> None:
    with pytest.raises(RequestRefused) as raised:
        store.put(shard, [b"x"])
    assert raised.value.code == "shard_invalid"
    assert raised.value.message == f"shard must be a whole number from 0 to {2**63 - 1}, got {shard!r}"
    assert store.held() == {}


def test_numpy_shard_number_is_accepted(store: ShardStore) -> None:
    store.put(cast("int", np.int64(7)), [DATA])
    assert store.held() == {7: STAMP}
    assert {type(shard) for shard in store.held()} == {int}


@pytest.mark.parametrize("data", [b"", b"x", DATA])
def test_put_shard_is_held_with_the_stamp_of_its_bytes(store: ShardStore, data: bytes) -> None:
    assert store.put(7, [data[:3], data[3:]]) == Stamp.of(data)
    assert store.held() == {7: Stamp.of(data)}
    assert store.holds(7)
    assert read(store, 7) == data


def test_received_shard_is_held_after_the_commit_and_not_before(store: ShardStore) -> None:
    with store.receive(7, STAMP) as arriving:
        arriving.write(DATA)
        assert not store.holds(7)
        assert code_of(lambda: store.open(7)) == "shard_not_held"
        assert arriving.commit() == STAMP
    assert read(store, 7) == DATA
    assert store.partial(7) is None


@pytest.mark.parametrize("data", [DATA[:-1], DATA + b"x", b"\1" + DATA[1:], b""])
def test_shard_that_differs_from_its_stamp_is_dropped(store: ShardStore, data: bytes) -> None:
    with store.receive(7, STAMP) as arriving:
        arriving.write(data)
        with pytest.raises(ShardCorrupt) as raised:
            arriving.commit()
    assert raised.value.shard == 7
    assert raised.value.is_whole
    assert not store.held()
    assert store.partial(7) is None


def test_interrupted_shard_resumes_at_its_offset(store: ShardStore) -> None:
    with store.receive(7, STAMP) as arriving:
        arriving.write(DATA[:1000])
    assert store.partial(7) == PartialShard(STAMP, 1000)
    with store.receive(7, STAMP, 900) as arriving:
        assert store.holds(7) is False
        arriving.write(DATA[900:])
        assert arriving.commit() == STAMP
    assert read(store, 7) == DATA


def test_corrupt_resumed_shard_is_reported_as_not_whole(store: ShardStore) -> None:
    with store.receive(7, STAMP) as arriving:
        arriving.write(b"x" * 1000)
    with store.receive(7, STAMP, 1000) as arriving:
        arriving.write(DATA[1000:])
        with pytest.raises(ShardCorrupt) as raised:
            arriving.commit()
    assert not raised.value.is_whole
    assert store.partial(7) is None


def test_receive_with_another_stamp_starts_over(store: ShardStore) -> None:
    with store.receive(7, STAMP) as arriving:
        arriving.write(DATA[:1000])
    other = Stamp.of(b"other")
    with store.receive(7, other) as arriving:
        arriving.write(b"oth")
    assert store.partial(7) == PartialShard(other, 3)


def test_interrupted_shard_without_a_stamp_leaves_nothing(store: ShardStore) -> None:
    with store.receive(7, None) as arriving:
        arriving.write(DATA)
    assert store.partial(7) is None
    assert not store.held()


def test_failed_put_leaves_nothing(store: ShardStore) -> None:
    def pieces() -> object:
        yield DATA
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.put(7, pieces())  # type: ignore[arg-type]
    assert store.partial(7) is None
    assert not store.held()
    store.put(7, [DATA])


def test_second_writer_and_held_shard_are_refused(store: ShardStore) -> None:
    with store.receive(7, STAMP):
        assert code_of(lambda: store.receive(7, STAMP)) == "shard_arriving"
        assert code_of(lambda: store.drop(7)) == "shard_arriving"
    store.put(7, [DATA])
    assert code_of(lambda: store.receive(7, STAMP)) == "shard_held"


@pytest.mark.parametrize("stamp", [None, STAMP])
@pytest.mark.parametrize("end", ["close", "drop"])
def test_closed_writer_cannot_touch_the_shard(store: ShardStore, end: str, stamp: Stamp | None) -> None:
    """A thread may hang while another writer takes over the shard."""
    older = store.receive(7, stamp)
    older.write(DATA[:100])
    getattr(older, end)()
    with store.receive(7, stamp) as newer:
        newer.write(DATA[:1000])
        assert code_of(lambda: older.write(DATA)) == "shard_closed"
        assert code_of(older.commit) == "shard_closed"
        older.drop()
        older.close()
        assert code_of(lambda: store.receive(7, stamp)) == "shard_arriving"
        newer.write(DATA[1000:])
        assert newer.commit() == STAMP
    older.close()
    assert read(store, 7) == DATA


def test_dropped_shard_is_gone_and_open_readers_finish(store: ShardStore) -> None:
    store.put(7, [DATA])
    with store.receive(8, STAMP) as arriving:
        arriving.write(b"x")
    with store.open(7) as opened:
        store.drop(7)
        store.drop(8)
        assert not opened.has_changed()
        assert os.pread(opened.fd, len(DATA), 0) == DATA
    assert not store.held()
    assert store.partial(8) is None
    assert code_of(lambda: store.open(7)) == "shard_not_held"
    store.drop(7)


@pytest.mark.parametrize("shard", [-1, SHARD_ID_MAX + 1])
def test_shard_numbers_out_of_range_are_refused(store: ShardStore, shard: int) -> None:
    assert code_of(lambda: store.receive(shard, STAMP)) == "shard_invalid"
    with pytest.raises(RequestRefused):
        store.open(shard)


def test_held_is_a_snapshot(store: ShardStore) -> None:
    store.put(1, [b"1"])
    before = store.held()
    store.put(2, [b"2"])
    assert set(before) == {1}


def test_errors_are_picklable() -> None:
    error = pickle.loads(pickle.dumps(ShardCorrupt(3, is_whole=True)))
    assert (error.shard, error.is_whole, error.code) == (3, True, "shard_corrupt")
