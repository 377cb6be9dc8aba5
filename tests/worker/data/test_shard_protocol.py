"""Both ends of the shard protocol against a scripted peer, byte by byte."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from anyio import CapacityLimiter

from forged.data.store.memory import MemoryShardStore
from forged.data.store.port import PartialShard, ShardStore, Stamp
from forged.errors import ForgedError, PeerError, RequestRefused
from forged.net.bulk.movers import receive
from forged.worker.data import shard_protocol
from forged.worker.transport.bulk_channel import BulkChannel, BulkTransport, LoopBulkTransport, SocketBulkTransport
from forged.worker.transport.dialogue_wire import PIECE_BYTES
from forged.worker.transport.peer_link import frame_of
from forged.worker.transport.peer_messages import (
    CHECKSUM_BYTES,
    PeerMessage,
    Refused,
    ShardComing,
    ShardSent,
    ShardWanted,
    StateReady,
    decode,
)
from tests.worker.transport.test_dialogue_wire import PATIENCE_S, channel, pair

MAKERS: list[Callable[[], BulkTransport]] = [SocketBulkTransport, LoopBulkTransport]
DATA = bytes(range(256)) * 100
STAMP = Stamp.of(DATA)
ALL = ShardComing(7, *STAMP)
SENT = ShardSent(False)
NO_CHECKSUM = bytes(CHECKSUM_BYTES)


@pytest.fixture(params=MAKERS)
def carrier(request: pytest.FixtureRequest) -> BulkTransport:
    made: BulkTransport = request.param()
    return made


class FlowControl:
    """Records the calls."""

    def __init__(self) -> None:
        self.began: tuple[int, int | None] | None = None
        self.count = 0
        self.pieces: list[int] = []

    def started(self, offset: int, size: int | None) -> None:
        self.began = offset, size

    def received(self, count: int) -> None:
        self.count += count

    def delay_before(self, count: int) -> float:
        self.pieces.append(count)
        return 0.0


async def served(made: BulkChannel, store: ShardStore | None) -> bool:
    return await made.converse(partial(shard_protocol.serve, store=store), CapacityLimiter(1))


async def served_when_called(made: BulkChannel, store: ShardStore) -> bool:
    """Serve once the peer has sent a request, as a source waits only briefly in its thread."""
    assert await made.is_called(PATIENCE_S)
    return await served(made, store)


async def fetched(made: BulkChannel, store: ShardStore, flow: FlowControl | None = None) -> Stamp:
    conversation = partial(shard_protocol.fetch, shard=7, store=store, flow=flow or FlowControl())
    return await made.converse(conversation, CapacityLimiter(1))


def read_message(far: socket.socket) -> PeerMessage:
    length = int.from_bytes(receive(far, 4), "big")
    return decode(bytes(receive(far, length)))


def encoded(*messages: Any) -> bytes:
    return b"".join(message if isinstance(message, bytes) else frame_of(message) for message in messages)


async def in_thread(action: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, action, *arguments)


async def error_of(fetching: Any) -> ForgedError:
    with pytest.raises(ForgedError) as raised:
        await fetching
    return raised.value


def full() -> MemoryShardStore:
    store = MemoryShardStore()
    store.put(7, [DATA])
    return store


def begun(stamp: Stamp = STAMP, count: int = 1000) -> MemoryShardStore:
    store = MemoryShardStore()
    with store.receive(7, stamp) as arriving:
        arriving.write(DATA[:count])
    return store


# The source.


async def ask(carrier: BulkTransport, store: ShardStore | None, wanted: ShardWanted) -> tuple[PeerMessage, bytes, bool]:
    """The answer to a request, the bytes after it, and whether the connection stays open."""
    async with channel(carrier) as (made, far):
        far.sendall(encoded(wanted))
        serving = asyncio.ensure_future(served(made, store))
        answer = await in_thread(read_message, far)
        if isinstance(answer, Refused):
            return answer, b"", await serving
        assert isinstance(answer, ShardComing)
        data = bytes(await in_thread(receive, far, answer.size - answer.offset))
        assert await in_thread(read_message, far) == SENT
        return answer, data, await serving


async def test_requested_shard_is_sent_with_its_stamp_and_confirmed(carrier: BulkTransport) -> None:
    assert await ask(carrier, full(), ShardWanted(7)) == (ALL, DATA, True)


@pytest.mark.parametrize("offset", [0, 1, 1000, len(DATA)])
async def test_request_with_an_offset_receives_the_rest(carrier: BulkTransport, offset: int) -> None:
    answer, data, _ = await ask(carrier, full(), ShardWanted(7, offset, *STAMP))
    assert answer == ShardComing(7, *STAMP, offset)
    assert data == DATA[offset:]


@pytest.mark.parametrize("wanted", [ShardWanted(7, 5, *Stamp.of(b"other")), ShardWanted(7, 5, len(DATA), NO_CHECKSUM)])
async def test_request_with_an_offset_into_other_content_receives_the_whole_shard(
    carrier: BulkTransport, wanted: ShardWanted
) -> None:
    assert await ask(carrier, full(), wanted) == (ALL, DATA, True)


@pytest.mark.parametrize(
    ("wanted", "code"),
    [
        (ShardWanted(8), "shard_not_held"),
        (ShardWanted(2**63 - 1), "shard_not_held"),
        (ShardWanted(7, len(DATA) + 1, *STAMP), "shard_offset_invalid"),
        (ShardWanted(7, 2**63 - 1, *STAMP), "shard_offset_invalid"),
        (ShardWanted(7, 1), "shard_offset_invalid"),
    ],
)
async def test_invalid_request_is_refused_and_the_connection_stays_open(
    carrier: BulkTransport, wanted: ShardWanted, code: str
) -> None:
    answer, _, stays_open = await ask(carrier, full(), wanted)
    assert isinstance(answer, Refused)
    assert answer.code == code
    assert f"shard {wanted.shard}" in answer.text
    assert stays_open


async def test_worker_without_a_store_refuses_every_shard(carrier: BulkTransport) -> None:
    answer, _, _ = await ask(carrier, None, ShardWanted(7))
    assert isinstance(answer, Refused)
    assert answer.code == "shard_not_held"


async def test_pipelined_requests_are_served_in_order(carrier: BulkTransport) -> None:
    store = MemoryShardStore()
    for number in range(50):
        store.put(number, [b"%d" % number])
    async with channel(carrier) as (made, far):
        far.sendall(encoded(*(ShardWanted(number) for number in range(50))))
        serving = asyncio.ensure_future(served(made, store))
        for number in range(50):
            answer = await in_thread(read_message, far)
            assert bytes(await in_thread(receive, far, answer.size)) == b"%d" % number
            assert await in_thread(read_message, far) == SENT
        assert await serving


async def test_source_yields_its_thread_after_its_share_of_bytes(
    carrier: BulkTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_protocol, "TURN_BYTES", 2 * len(DATA))
    async with channel(carrier) as (made, far):
        far.sendall(encoded(*[ShardWanted(7)] * 3))
        reading = in_thread(receive, far, 3 * len(encoded(ALL, DATA, SENT)))
        task = asyncio.ensure_future(reading)
        assert await served(made, full())
        assert await made.is_called(PATIENCE_S)
        assert await served(made, full())
        assert bytes(await task) == encoded(ALL, DATA, SENT) * 3


async def test_source_ends_when_the_peer_has_disconnected(carrier: BulkTransport) -> None:
    async with channel(carrier) as (made, far):
        far.close()
        assert not await served(made, full())


@pytest.mark.parametrize("message", [StateReady(), SENT, b"\0\0\0\1\xc1", b"GET / HTTP/1.1\r\n\r\n"])
async def test_message_other_than_a_request_breaks_the_protocol(carrier: BulkTransport, message: Any) -> None:
    async with channel(carrier) as (made, far):
        far.sendall(encoded(message))
        assert isinstance(await error_of(served(made, full())), PeerError)


@pytest.mark.parametrize("shard", [-1, 2**63, 2**64 - 1])
async def test_invalid_numbers_in_a_request_break_the_protocol(carrier: BulkTransport, shard: int) -> None:
    async with channel(carrier) as (made, far):
        far.sendall(encoded(ShardWanted(shard)))
        assert isinstance(await error_of(served(made, full())), PeerError)


# The fetcher.


async def fetch_from_bytes(carrier: BulkTransport, store: MemoryShardStore, *messages: Any) -> ForgedError:
    """Fetch from a source that sends these bytes and disconnects; return the error."""
    async with channel(carrier) as (made, far):
        far.sendall(encoded(*messages))
        far.shutdown(socket.SHUT_WR)
        error = await error_of(fetched(made, store))
    assert not store.held()
    assert not store._arriving
    return error


async def test_fetched_shard_is_held(carrier: BulkTransport) -> None:
    store, flow = MemoryShardStore(), FlowControl()
    async with channel(carrier) as (made, far):
        far.sendall(encoded(ALL, DATA, SENT))
        assert await fetched(made, store, flow) == STAMP
        assert read_message(far) == ShardWanted(7)
    assert store.read(7) == DATA
    assert (flow.began, flow.count) == ((0, len(DATA)), len(DATA))


async def test_the_rest_of_a_shard_is_fetched_from_where_it_stopped(carrier: BulkTransport) -> None:
    store, flow = begun(), FlowControl()
    async with channel(carrier) as (made, far):
        far.sendall(encoded(ShardComing(7, *STAMP, 1000), DATA[1000:], SENT))
        assert await fetched(made, store, flow) == STAMP
        assert read_message(far) == ShardWanted(7, 1000, *STAMP)
    assert store.read(7) == DATA
    assert (flow.began, flow.count) == ((1000, len(DATA)), len(DATA) - 1000)


async def test_the_rest_comes_in_pieces_that_begin_at_multiples_of_their_length(carrier: BulkTransport) -> None:
    data = os.urandom(2 * PIECE_BYTES + 5)
    stamp, store, flow = Stamp.of(data), MemoryShardStore(), FlowControl()
    with store.receive(7, stamp) as arriving:
        arriving.write(data[:1000])
    async with channel(carrier) as (made, far):
        sending = asyncio.to_thread(far.sendall, encoded(ShardComing(7, *stamp, 1000), data[1000:], SENT))
        assert (await asyncio.gather(fetched(made, store, flow), sending))[0] == stamp
    assert store.read(7) == data
    assert flow.pieces == [PIECE_BYTES - 1000, PIECE_BYTES, 5]


async def test_source_may_restart_from_offset_zero(carrier: BulkTransport) -> None:
    other = b"other" * 100
    store = begun()
    async with channel(carrier) as (made, far):
        far.sendall(encoded(ShardComing(7, *Stamp.of(other)), other, SENT))
        assert await fetched(made, store) == Stamp.of(other)
    assert store.read(7) == other


async def test_bytes_received_before_the_connection_breaks_are_kept(carrier: BulkTransport) -> None:
    store = MemoryShardStore()
    error = await fetch_from_bytes(carrier, store, ALL, DATA[:5000])
    assert error.code == "bulk_truncated"
    assert store.partial(7) == PartialShard(STAMP, 5000)


async def test_shard_without_a_confirmation_is_not_held(carrier: BulkTransport) -> None:
    store = MemoryShardStore()
    error = await fetch_from_bytes(carrier, store, ALL, DATA)
    assert error.retryable
    assert store.partial(7) == PartialShard(STAMP, len(DATA))


async def test_shard_reported_as_changed_is_dropped(carrier: BulkTransport) -> None:
    store = MemoryShardStore()
    error = await fetch_from_bytes(carrier, store, ALL, DATA, ShardSent(True))
    assert isinstance(error, RequestRefused)
    assert error.code == "shard_changed"
    assert "shard 7" in error.message
    assert store.partial(7) is None


async def test_wrong_bytes_are_dropped(carrier: BulkTransport) -> None:
    store = MemoryShardStore()
    error = await fetch_from_bytes(carrier, store, ALL, DATA[::-1], SENT)
    assert error.code == "shard_corrupt"
    assert store.partial(7) is None


@pytest.mark.parametrize("extra", [b"x", b"\xff" * 100, DATA])
async def test_source_that_sends_too_many_bytes_is_rejected(carrier: BulkTransport, extra: bytes) -> None:
    store = MemoryShardStore()
    error = await fetch_from_bytes(carrier, store, ALL, DATA, extra, SENT)
    assert isinstance(error, PeerError)
    assert store.partial(7) is None


async def test_source_that_sends_too_few_bytes_is_rejected(carrier: BulkTransport) -> None:
    store = MemoryShardStore()
    assert (await fetch_from_bytes(carrier, store, ALL, DATA[:-1], SENT)).code in {
        "shard_corrupt",
        "bulk_truncated",
        "frame_length",
    }


@pytest.mark.parametrize(
    "coming",
    [
        ShardComing(8, *STAMP),
        ShardComing(7, *STAMP, 1),
        ShardComing(7, *STAMP, 999),
        ShardComing(7, *STAMP, 2**63 - 1),
        ShardComing(7, *Stamp.of(b"other"), 1000),
        ShardComing(7, len(DATA) + 1, STAMP.checksum, 1000),
        StateReady(),
        SENT,
    ],
)
async def test_answer_for_another_request_breaks_the_protocol(carrier: BulkTransport, coming: Any) -> None:
    store = begun()
    error = await fetch_from_bytes(carrier, store, coming, DATA)
    assert isinstance(error, PeerError)
    assert store.partial(7) == PartialShard(STAMP, 1000)


@pytest.mark.parametrize(
    "coming",
    [
        ShardComing(7, -1, NO_CHECKSUM),
        ShardComing(7, 5, NO_CHECKSUM, -1),
        ShardComing(7, 5, b"short"),
        ShardComing(7, 2**63, NO_CHECKSUM),
    ],
)
async def test_invalid_sizes_and_offsets_break_the_protocol(carrier: BulkTransport, coming: Any) -> None:
    assert isinstance(await fetch_from_bytes(carrier, MemoryShardStore(), coming), PeerError)


async def test_refusal_is_raised_unchanged(carrier: BulkTransport) -> None:
    error = await fetch_from_bytes(
        carrier, MemoryShardStore(), Refused("refused", "shard_not_held", "shard 7 is not held", "ask")
    )
    assert isinstance(error, RequestRefused)
    assert error.code == "shard_not_held"


async def test_source_that_never_answers_times_out(carrier: BulkTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_protocol, "TURN_TIMEOUT_S", 0.01)
    async with channel(carrier) as (made, _):
        assert (await error_of(fetched(made, MemoryShardStore()))).code == "peer_timeout"


async def test_announced_size_allocates_no_memory_before_the_bytes_arrive(carrier: BulkTransport) -> None:
    store = MemoryShardStore()
    error = await fetch_from_bytes(carrier, store, ShardComing(7, 2**62, NO_CHECKSUM), b"few")
    assert error.code == "bulk_truncated"
    assert store.partial(7) == PartialShard(Stamp(2**62, NO_CHECKSUM), 3)


async def test_fetch_and_serve_work_against_each_other(carrier: BulkTransport) -> None:
    store = begun()
    async with pair(carrier) as (source, fetcher):
        stays_open, stamp = await asyncio.gather(served_when_called(source, full()), fetched(fetcher, store))
    assert stays_open
    assert stamp == STAMP
    assert store.read(7) == DATA
