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


class CountingFlow:
    """A flow control that counts bytes and delays."""

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


def store_read_from(origin: ShardOrigin, flow: CountingFlow | None = None, one: DataShard = SHARD) -> MemoryShardStore:
    store, flow = MemoryShardStore(), flow or CountingFlow()
    origin_read(origin, store, flow, one=one).run()
    return store


def origin_read(
    origin: ShardOrigin,
    store: ShardStore,
    flow: CountingFlow | None = None,
    clock: Clock | None = None,
    one: DataShard = SHARD,
) -> OriginRead:
    flow = flow or CountingFlow()
    return OriginRead(origin, one, store, flow, flow.waits.append, (clock or SystemClock()).monotonic)


def code_of(origin: ShardOrigin, flow: CountingFlow | None = None) -> str:
    with pytest.raises(ForgedError) as raised:
        store_read_from(origin, flow)
    return raised.value.code


def write(shard: DataShard, file: BinaryIO) -> None:
    for index in range(shard.start_index, shard.end_index):
        file.write(b"%d," % index)


def test_function_origin_writes_the_bytes_of_a_shard() -> None:
    assert store_read_from(FunctionOrigin(write)).read(7) == b"70,71,72,73,74,75,76,77,78,79,"


def test_directory_origin_reads_one_file_per_shard(tmp_path: Path) -> None:
    (tmp_path / "part-0007.bin").write_bytes(b"bytes")
    assert store_read_from(DirectoryOrigin(tmp_path, "part-{shard_id:04}.bin")).read(7) == b"bytes"


def test_shard_missing_in_the_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ForgedError, match="shard 7") as raised:
        store_read_from(DirectoryOrigin(tmp_path))
    assert raised.value.code == "shard_not_at_origin"


def test_error_of_an_origin_becomes_origin_failed_and_leaves_nothing() -> None:
    def fail(shard: DataShard, file: BinaryIO) -> None:
        file.write(b"x")
        raise ConnectionResetError("gone")

    store = MemoryShardStore()
    with pytest.raises(Unavailable, match="gone") as raised:
        origin_read(FunctionOrigin(fail), store).run()
    assert raised.value.code == "origin_failed"
    assert not store.held()
    assert store.partial(7) is None
    assert store_read_from(FunctionOrigin(write)).holds(7)


@pytest.mark.parametrize("raised", [asyncio.CancelledError(), SystemExit(3), GeneratorExit(), KeyboardInterrupt()])
def test_cancellation_or_exit_raised_by_an_origin_becomes_origin_failed(raised: BaseException) -> None:
    def fail(shard: DataShard, file: BinaryIO) -> None:
        raise raised

    with pytest.raises(Unavailable, match=rf"shard 7: {type(raised).__name__}") as error:
        store_read_from(FunctionOrigin(fail))
    assert error.value.code == "origin_failed"


def test_large_writes_are_split_throttled_and_counted() -> None:
    data = bytes(PIECE_BYTES * 2 + 5)
    flow = CountingFlow()

    def write_at_once(shard: DataShard, file: BinaryIO) -> None:
        assert file.write(data) == len(data)

    store = store_read_from(FunctionOrigin(write_at_once), flow)
    assert store.held()[7] == Stamp.of(data)
    assert flow.counts == [PIECE_BYTES, PIECE_BYTES, 5]
    assert flow.waits == [float(count) for count in flow.counts]
    assert flow.began == [(0, None)]


def test_stopped_transfer_ends_at_the_next_write() -> None:
    written: list[int] = []

    def endless(shard: DataShard, file: BinaryIO) -> None:
        while True:
            file.write(b"x")
            written.append(1)

    assert code_of(FunctionOrigin(endless), CountingFlow(stop_after=5)) == "transfer_stopped"
    assert len(written) == 5


def write_nothing(shard: DataShard, file: BinaryIO) -> None:
    file.write(b"")


def test_origin_that_writes_nothing_for_a_shard_with_samples_fails() -> None:
    store = MemoryShardStore()
    with pytest.raises(Unavailable, match="no byte of shard 7") as raised:
        origin_read(FunctionOrigin(write_nothing), store).run()
    assert raised.value.code == "origin_empty"
    assert not store.held()


def test_shard_without_samples_may_be_empty() -> None:
    assert store_read_from(FunctionOrigin(write_nothing), one=DataShard(7, 70, 70)).held() == {7: Stamp.of(b"")}
