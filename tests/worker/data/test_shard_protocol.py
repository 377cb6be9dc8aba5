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
from forged.worker.data import shard_protocol
from forged.worker.transport.bulk_channel import BulkChannel, BulkTransport, LoopBulkTransport, SocketBulkTransport
from forged.worker.transport.dialogue_wire import PIECE_BYTES, receive
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
    """Remembers."""

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
    """A source waits for no more than a moment in its thread."""
    assert await made.is_called(PATIENCE_S)
    return await served(made, store)


async def fetched(made: BulkChannel, store: ShardStore, flow: FlowControl | None = None) -> Stamp:
    conversation = partial(shard_protocol.fetch, shard=7, store=store, flow=flow or FlowControl())
    return await made.converse(conversation, CapacityLimiter(1))


def hear(far: socket.socket) -> PeerMessage:
    length = int.from_bytes(receive(far, 4), "big")
    return decode(bytes(receive(far, length)))


def said(*words: Any) -> bytes:
    return b"".join(word if isinstance(word, bytes) else frame_of(word) for word in words)


async def apart(action: Callable[..., Any], *arguments: Any) -> Any:
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
    """What comes back for a wish: the word, the bytes behind it, and whether the conversation may go on."""
    async with channel(carrier) as (made, far):
        far.sendall(said(wanted))
        serving = asyncio.ensure_future(served(made, store))
        answer = await apart(hear, far)
        if isinstance(answer, Refused):
            return answer, b"", await serving
        assert isinstance(answer, ShardComing)
        data = bytes(await apart(receive, far, answer.size - answer.offset))
        assert await apart(hear, far) == SENT
        return answer, data, await serving


async def test_a_shard_that_is_wanted_comes_with_its_stamp_and_is_confirmed(carrier: BulkTransport) -> None:
    assert await ask(carrier, full(), ShardWanted(7)) == (ALL, DATA, True)


@pytest.mark.parametrize("offset", [0, 1, 1000, len(DATA)])
async def test_who_has_the_beginning_gets_the_rest(carrier: BulkTransport, offset: int) -> None:
    answer, data, _ = await ask(carrier, full(), ShardWanted(7, offset, *STAMP))
    assert answer == ShardComing(7, *STAMP, offset)
    assert data == DATA[offset:]


@pytest.mark.parametrize("wanted", [ShardWanted(7, 5, *Stamp.of(b"other")), ShardWanted(7, 5, len(DATA), NO_CHECKSUM)])
async def test_who_has_the_beginning_of_something_else_gets_all_of_it(
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
async def test_what_cannot_be_given_is_refused_by_name_and_the_conversation_goes_on(
    carrier: BulkTransport, wanted: ShardWanted, code: str
) -> None:
    answer, _, goes_on = await ask(carrier, full(), wanted)
    assert isinstance(answer, Refused)
    assert answer.code == code
    assert f"shard {wanted.shard}" in answer.text
    assert goes_on


async def test_a_worker_without_a_store_holds_nothing(carrier: BulkTransport) -> None:
    answer, _, _ = await ask(carrier, None, ShardWanted(7))
    assert isinstance(answer, Refused)
    assert answer.code == "shard_not_held"


async def test_many_wishes_are_granted_in_their_order(carrier: BulkTransport) -> None:
    store = MemoryShardStore()
    for number in range(50):
        store.put(number, [b"%d" % number])
    async with channel(carrier) as (made, far):
        far.sendall(said(*(ShardWanted(number) for number in range(50))))
        serving = asyncio.ensure_future(served(made, store))
        for number in range(50):
            answer = await apart(hear, far)
            assert bytes(await apart(receive, far, answer.size)) == b"%d" % number
            assert await apart(hear, far) == SENT
        assert await serving


async def test_a_source_lets_others_have_their_turn(carrier: BulkTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_protocol, "TURN_BYTES", 2 * len(DATA))
    async with channel(carrier) as (made, far):
        far.sendall(said(*[ShardWanted(7)] * 3))
        reading = apart(receive, far, 3 * len(said(ALL, DATA, SENT)))
        task = asyncio.ensure_future(reading)
        assert await served(made, full())
        assert await made.is_called(PATIENCE_S)
        assert await served(made, full())
        assert bytes(await task) == said(ALL, DATA, SENT) * 3


async def test_when_nobody_is_there_any_more_the_source_is_done(carrier: BulkTransport) -> None:
    async with channel(carrier) as (made, far):
        far.close()
        assert not await served(made, full())


@pytest.mark.parametrize("word", [StateReady(), SENT, b"\0\0\0\1\xc1", b"GET / HTTP/1.1\r\n\r\n"])
async def test_who_does_not_wish_breaks_the_protocol(carrier: BulkTransport, word: Any) -> None:
    async with channel(carrier) as (made, far):
        far.sendall(said(word))
        assert isinstance(await error_of(served(made, full())), PeerError)


@pytest.mark.parametrize("shard", [-1, 2**63, 2**64 - 1])
async def test_numbers_that_are_none_break_the_protocol(carrier: BulkTransport, shard: int) -> None:
    async with channel(carrier) as (made, far):
        far.sendall(said(ShardWanted(shard)))
        assert isinstance(await error_of(served(made, full())), PeerError)


# The fetcher.


async def told(carrier: BulkTransport, store: MemoryShardStore, *words: Any) -> ForgedError:
    """What the fetcher makes of what a source says, which then hangs up."""
    async with channel(carrier) as (made, far):
        far.sendall(said(*words))
        far.shutdown(socket.SHUT_WR)
        error = await error_of(fetched(made, store))
    assert not store.held()
    assert not store._arriving
    return error


async def test_a_shard_is_fetched_and_held(carrier: BulkTransport) -> None:
    store, flow = MemoryShardStore(), FlowControl()
    async with channel(carrier) as (made, far):
        far.sendall(said(ALL, DATA, SENT))
        assert await fetched(made, store, flow) == STAMP
        assert hear(far) == ShardWanted(7)
    assert store.read(7) == DATA
    assert (flow.began, flow.count) == ((0, len(DATA)), len(DATA))


async def test_the_rest_of_a_shard_is_fetched_from_where_it_stopped(carrier: BulkTransport) -> None:
    store, flow = begun(), FlowControl()
    async with channel(carrier) as (made, far):
        far.sendall(said(ShardComing(7, *STAMP, 1000), DATA[1000:], SENT))
        assert await fetched(made, store, flow) == STAMP
        assert hear(far) == ShardWanted(7, 1000, *STAMP)
    assert store.read(7) == DATA
    assert (flow.began, flow.count) == ((1000, len(DATA)), len(DATA) - 1000)


async def test_the_rest_comes_in_pieces_that_begin_at_multiples_of_their_length(carrier: BulkTransport) -> None:
    data = os.urandom(2 * PIECE_BYTES + 5)
    stamp, store, flow = Stamp.of(data), MemoryShardStore(), FlowControl()
    with store.receive(7, stamp) as arriving:
        arriving.write(data[:1000])
    async with channel(carrier) as (made, far):
        sending = asyncio.to_thread(far.sendall, said(ShardComing(7, *stamp, 1000), data[1000:], SENT))
        assert (await asyncio.gather(fetched(made, store, flow), sending))[0] == stamp
    assert store.read(7) == data
    assert flow.pieces == [PIECE_BYTES - 1000, PIECE_BYTES, 5]


async def test_a_source_may_begin_anew(carrier: BulkTransport) -> None:
    other = b"other" * 100
    store = begun()
    async with channel(carrier) as (made, far):
        far.sendall(said(ShardComing(7, *Stamp.of(other)), other, SENT))
        assert await fetched(made, store) == Stamp.of(other)
    assert store.read(7) == other


async def test_what_has_arrived_before_the_connection_breaks_is_kept(carrier: BulkTransport) -> None:
    store = MemoryShardStore()
    error = await told(carrier, store, ALL, DATA[:5000])
    assert error.code == "bulk_truncated"
    assert store.partial(7) == PartialShard(STAMP, 5000)


async def test_all_bytes_without_a_confirmation_do_not_count_yet(carrier: BulkTransport) -> None:
    store = MemoryShardStore()
    error = await told(carrier, store, ALL, DATA)
    assert error.retryable
    assert store.partial(7) == PartialShard(STAMP, len(DATA))


async def test_a_shard_that_was_changed_meanwhile_is_dropped(carrier: BulkTransport) -> None:
    store = MemoryShardStore()
    error = await told(carrier, store, ALL, DATA, ShardSent(True))
    assert isinstance(error, RequestRefused)
    assert error.code == "shard_changed"
    assert "shard 7" in error.message
    assert store.partial(7) is None


async def test_wrong_bytes_are_dropped(carrier: BulkTransport) -> None:
    store = MemoryShardStore()
    error = await told(carrier, store, ALL, DATA[::-1], SENT)
    assert error.code == "shard_corrupt"
    assert store.partial(7) is None


@pytest.mark.parametrize("extra", [b"x", b"\xff" * 100, DATA])
async def test_a_source_that_sends_too_much_is_not_believed(carrier: BulkTransport, extra: bytes) -> None:
    store = MemoryShardStore()
    error = await told(carrier, store, ALL, DATA, extra, SENT)
    assert isinstance(error, PeerError)
    assert store.partial(7) is None


async def test_a_source_that_sends_too_little_is_not_believed(carrier: BulkTransport) -> None:
    store = MemoryShardStore()
    assert (await told(carrier, store, ALL, DATA[:-1], SENT)).code in {
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
async def test_a_source_that_answers_something_else_breaks_the_protocol(carrier: BulkTransport, coming: Any) -> None:
    store = begun()
    error = await told(carrier, store, coming, DATA)
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
async def test_sizes_and_offsets_that_are_none_break_the_protocol(carrier: BulkTransport, coming: Any) -> None:
    assert isinstance(await told(carrier, MemoryShardStore(), coming), PeerError)


async def test_a_refusal_comes_out_as_it_was_said(carrier: BulkTransport) -> None:
    error = await told(carrier, MemoryShardStore(), Refused("refused", "shard_not_held", "shard 7 is not held", "ask"))
    assert isinstance(error, RequestRefused)
    assert error.code == "shard_not_held"


async def test_a_source_that_never_answers_is_given_up(carrier: BulkTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_protocol, "TURN_TIMEOUT_S", 0.01)
    async with channel(carrier) as (made, _):
        assert (await error_of(fetched(made, MemoryShardStore()))).code == "peer_timeout"


async def test_an_announced_size_takes_no_room_before_its_bytes_come(carrier: BulkTransport) -> None:
    store = MemoryShardStore()
    error = await told(carrier, store, ShardComing(7, 2**62, NO_CHECKSUM), b"few")
    assert error.code == "bulk_truncated"
    assert store.partial(7) == PartialShard(Stamp(2**62, NO_CHECKSUM), 3)


async def test_both_ends_understand_each_other(carrier: BulkTransport) -> None:
    store = begun()
    async with pair(carrier) as (source, fetcher):
        goes_on, stamp = await asyncio.gather(served_when_called(source, full()), fetched(fetcher, store))
    assert goes_on
    assert stamp == STAMP
    assert store.read(7) == DATA
