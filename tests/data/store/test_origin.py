from __future__ import annotations

import asyncio
from pathlib import Path
from typing import BinaryIO

import pytest

from forged.clock import Clock, SystemClock
from forged.data.model import DataShard
from forged.data.store.memory import MemoryShardStore
from forged.data.store.origin import DirectoryOrigin, FunctionOrigin, ShardOrigin
from forged.data.store.port import ShardStore, Stamp
from forged.data.transfer.origin_reads import PIECE_BYTES, OriginRead
from forged.errors import ForgedError, Unavailable

SHARD = DataShard(7, 70, 80)


class Watched:
    """A flow that counts."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.counts: list[int] = []
        self.waits: list[float] = []
        self.began: list[tuple[int, int | None]] = []
        self._stop_after = stop_after

    def started(self, offset: int, size: int | None) -> None:
        self.began.append((offset, size))

    def received(self, count: int) -> None:
        self.counts.append(count)
        if self._stop_after is not None and sum(self.counts) > self._stop_after:
            raise Unavailable("transfer_stopped", "no longer wanted")

    def delay_before(self, count: int) -> float:
        return float(count)


def brought(origin: ShardOrigin, flow: Watched | None = None, one: DataShard = SHARD) -> MemoryShardStore:
    store, watched = MemoryShardStore(), flow or Watched()
    bringing(origin, store, watched, one=one).run()
    return store


def bringing(
    origin: ShardOrigin,
    store: ShardStore,
    watched: Watched | None = None,
    clock: Clock | None = None,
    one: DataShard = SHARD,
) -> OriginRead:
    told = watched or Watched()
    return OriginRead(origin, one, store, told, told.waits.append, (clock or SystemClock()).monotonic)


def code_of(origin: ShardOrigin, flow: Watched | None = None) -> str:
    with pytest.raises(ForgedError) as raised:
        brought(origin, flow)
    return raised.value.code


def write(shard: DataShard, file: BinaryIO) -> None:
    for index in range(shard.start_index, shard.end_index):
        file.write(b"%d," % index)


def test_a_function_writes_the_bytes_of_a_shard() -> None:
    assert brought(FunctionOrigin(write)).read(7) == b"70,71,72,73,74,75,76,77,78,79,"


def test_a_directory_has_a_file_for_each_shard(tmp_path: Path) -> None:
    (tmp_path / "part-0007.bin").write_bytes(b"bytes")
    assert brought(DirectoryOrigin(tmp_path, "part-{shard_id:04}.bin")).read(7) == b"bytes"


def test_a_shard_that_the_directory_has_not_is_named(tmp_path: Path) -> None:
    with pytest.raises(ForgedError, match="shard 7") as raised:
        brought(DirectoryOrigin(tmp_path))
    assert raised.value.code == "shard_not_at_origin"


def test_what_an_origin_raises_is_translated_and_nothing_is_left() -> None:
    def fail(shard: DataShard, file: BinaryIO) -> None:
        file.write(b"x")
        raise ConnectionResetError("gone")

    store = MemoryShardStore()
    with pytest.raises(Unavailable, match="gone") as raised:
        bringing(FunctionOrigin(fail), store).run()
    assert raised.value.code == "origin_failed"
    assert not store.held()
    assert store.partial(7) is None
    assert brought(FunctionOrigin(write)).holds(7)


@pytest.mark.parametrize("raised", [asyncio.CancelledError(), SystemExit(3), GeneratorExit(), KeyboardInterrupt()])
def test_what_would_cancel_or_end_others_is_the_origins_failure_too(raised: BaseException) -> None:
    def fail(shard: DataShard, file: BinaryIO) -> None:
        raise raised

    with pytest.raises(Unavailable, match=rf"shard 7: {type(raised).__name__}") as told:
        brought(FunctionOrigin(fail))
    assert told.value.code == "origin_failed"


def test_large_writes_are_cut_slowed_down_and_told() -> None:
    data = bytes(PIECE_BYTES * 2 + 5)
    watched = Watched()

    def write_at_once(shard: DataShard, file: BinaryIO) -> None:
        assert file.write(data) == len(data)

    store = brought(FunctionOrigin(write_at_once), watched)
    assert store.held()[7] == Stamp.of(data)
    assert watched.counts == [PIECE_BYTES, PIECE_BYTES, 5]
    assert watched.waits == [float(count) for count in watched.counts]
    assert watched.began == [(0, None)]


def test_what_is_no_longer_wanted_stops_at_the_next_write() -> None:
    written: list[int] = []

    def endless(shard: DataShard, file: BinaryIO) -> None:
        while True:
            file.write(b"x")
            written.append(1)

    assert code_of(FunctionOrigin(endless), Watched(stop_after=5)) == "transfer_stopped"
    assert len(written) == 5


def no_byte(shard: DataShard, file: BinaryIO) -> None:
    file.write(b"")


def test_an_origin_that_writes_nothing_of_a_shard_with_samples_has_failed() -> None:
    store = MemoryShardStore()
    with pytest.raises(Unavailable, match="no byte of shard 7") as raised:
        bringing(FunctionOrigin(no_byte), store).run()
    assert raised.value.code == "origin_empty"
    assert not store.held()


def test_a_shard_of_no_samples_may_have_no_bytes() -> None:
    assert brought(FunctionOrigin(no_byte), one=DataShard(7, 70, 70)).held() == {7: Stamp.of(b"")}
