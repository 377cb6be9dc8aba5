from __future__ import annotations

import asyncio
import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from anyio import CapacityLimiter

from forged.errors import ForgedError, PeerError, Unavailable
from forged.net.bulk import movers
from forged.worker.transport import dialogue_wire
from forged.worker.transport.bulk_channel import BulkChannel, BulkTransport, LoopBulkTransport, SocketBulkTransport
from forged.worker.transport.dialogue_wire import (
    CHUNK_BYTES,
    DIALOGUE_BYTES_MAX,
    PIECE_BYTES,
    Conversation,
    DialogueWire,
    HungUp,
)
from forged.worker.transport.peer_link import frame_of
from forged.worker.transport.peer_messages import ShardSent, ShardsReady, ShardWanted, StateWanted

MAKERS: list[Callable[[], BulkTransport]] = [SocketBulkTransport, LoopBulkTransport]
SOON_S = 0.01
PATIENCE_S = 30.0


@pytest.fixture(params=MAKERS)
def carrier(request: pytest.FixtureRequest) -> BulkTransport:
    made: BulkTransport = request.param()
    return made


@asynccontextmanager
async def channel(carrier: BulkTransport) -> AsyncIterator[tuple[BulkChannel, socket.socket]]:
    """A channel, and the socket at its other end."""
    near, far = socket.socketpair()
    near.setblocking(False)
    transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=near)
    transport.pause_reading()
    made = await carrier.open(transport)
    far.settimeout(PATIENCE_S)
    try:
        yield made, far
    finally:
        made.cut()
        made.close()
        far.close()
        # The loop lets go of what was cut when it turns next.
        await asyncio.sleep(0)


@asynccontextmanager
async def pair(carrier: BulkTransport) -> AsyncIterator[list[BulkChannel]]:
    """A channel, and one in threads at its other end."""
    async with channel(carrier) as (near, far):
        far.setblocking(False)
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=far.dup())
        transport.pause_reading()
        other = await SocketBulkTransport().open(transport)
        try:
            yield [near, other]
        finally:
            other.close()


async def converse(made: BulkChannel, conversation: Conversation[Any]) -> Any:
    return await made.converse(conversation, CapacityLimiter(1))


async def error_of(made: BulkChannel, conversation: Conversation[Any]) -> ForgedError:
    with pytest.raises(ForgedError) as raised:
        await converse(made, conversation)
    return raised.value


async def hear(wire: DialogueWire) -> Any:
    return await wire.hear(PATIENCE_S)


async def take_all(wire: DialogueWire, count: int, got: Callable[[memoryview], object]) -> None:
    """Take `count` bytes, and pass on each part of them."""
    while count:
        data = await wire.take(count)
        got(data)
        count -= data.nbytes


async def apart(action: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, action, *arguments)


async def test_several_conversations_receive_messages_in_order(carrier: BulkTransport) -> None:
    async with channel(carrier) as (made, far):
        far.sendall(frame_of(ShardWanted(7, 1, 2)) + frame_of(ShardsReady()))
        assert await converse(made, hear) == ShardWanted(7, 1, 2)
        assert await converse(made, hear) == ShardsReady()


async def test_words_are_said_as_frames(carrier: BulkTransport) -> None:
    async with channel(carrier) as (made, far):
        await converse(made, lambda wire: wire.say(ShardSent(True)))
        frame = frame_of(ShardSent(True))
        assert await apart(far.recv, len(frame), socket.MSG_WAITALL) == frame


async def test_silent_peer_is_waited_for_until_the_timeout(carrier: BulkTransport) -> None:
    async with channel(carrier) as (made, far):
        assert await converse(made, lambda wire: wire.hear(SOON_S)) is None
        assert not await made.is_called(SOON_S)
        far.sendall(frame_of(ShardsReady()))
        assert await made.is_called(PATIENCE_S)
        assert await made.is_called(PATIENCE_S)
        assert await converse(made, hear) == ShardsReady()


async def test_the_end_of_the_connection_is_a_call_too(carrier: BulkTransport) -> None:
    async with channel(carrier) as (made, far):
        far.close()
        assert await made.is_called(PATIENCE_S)
        assert isinstance(await error_of(made, hear), HungUp)


@pytest.mark.parametrize("rest", [1, 3, 5])
async def test_a_word_that_is_cut_off_is_an_error(carrier: BulkTransport, rest: int) -> None:
    async with channel(carrier) as (made, far):
        far.sendall(frame_of(ShardWanted(7))[:rest])
        far.shutdown(socket.SHUT_WR)
        error = await error_of(made, hear)
        assert isinstance(error, Unavailable)
        assert error.code == "bulk_truncated"


@pytest.mark.parametrize("garbage", [bytes(4), struct.pack(">I", DIALOGUE_BYTES_MAX + 1), b"\0\0\0\1\xc1", b"\xff" * 9])
async def test_invalid_frame_is_a_peer_error(carrier: BulkTransport, garbage: bytes) -> None:
    async with channel(carrier) as (made, far):
        far.sendall(garbage)
        assert isinstance(await error_of(made, hear), PeerError)


async def test_a_word_that_stands_still_in_the_middle_is_given_up(
    carrier: BulkTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(movers, "STALL_TIMEOUT_S", SOON_S)
    async with channel(carrier) as (made, far):
        far.sendall(frame_of(ShardWanted(7))[:5])
        assert isinstance(await error_of(made, hear), Unavailable)


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, PIECE_BYTES, 3 * PIECE_BYTES + 1])
async def test_bytes_of_a_file_arrive_as_they_are(carrier: BulkTransport, size: int) -> None:
    data = os.urandom(size + 10)
    file = os.memfd_create("file")
    os.pwrite(file, data, 0)
    got = bytearray()

    async def take(wire: DialogueWire) -> None:
        while len(got) < size:
            got.extend(await wire.take(min(PIECE_BYTES, size - len(got))))

    async def give(wire: DialogueWire) -> None:
        await wire.give(file, 10, size, PATIENCE_S)

    async with pair(carrier) as channels:
        for taking, giving in (channels, channels[::-1]):
            got.clear()
            await asyncio.gather(converse(taking, take), converse(giving, give))
            assert bytes(got) == data[10:]
    os.close(file)


async def test_bytes_that_are_here_when_the_connection_breaks_are_not_lost(carrier: BulkTransport) -> None:
    got = bytearray()
    async with channel(carrier) as (made, far):
        far.sendall(b"x" * 1000)
        far.shutdown(socket.SHUT_WR)
        error = await error_of(made, lambda wire: take_all(wire, PIECE_BYTES, got.extend))
    assert error.code == "bulk_truncated"
    assert got == b"x" * 1000


async def test_over_a_slow_connection_bytes_are_handed_on_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialogue_wire, "HELD_BACK_S", 0)
    got: list[bytes] = []
    seen = threading.Event()

    def absorb(data: memoryview) -> None:
        got.append(bytes(data))
        seen.set()

    def drip(far: socket.socket) -> None:
        for _ in range(3):
            far.sendall(b"x" * 1000)
            assert seen.wait(PATIENCE_S)
            seen.clear()

    async with channel(SocketBulkTransport()) as (made, far):
        await asyncio.gather(converse(made, lambda wire: take_all(wire, 3000, absorb)), asyncio.to_thread(drip, far))
    assert got == [b"x" * 1000] * 3


async def test_bytes_behind_which_nothing_comes_are_handed_on_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialogue_wire, "HELD_BACK_S", SOON_S)
    monkeypatch.setattr(movers, "STALL_TIMEOUT_S", 2 * PATIENCE_S)
    seen = threading.Event()

    def stand_still(far: socket.socket) -> bool:
        far.sendall(b"x" * 1000)
        try:
            return seen.wait(PATIENCE_S)
        finally:
            far.shutdown(socket.SHUT_WR)

    async with channel(SocketBulkTransport()) as (made, far):
        taking = error_of(made, lambda wire: take_all(wire, PIECE_BYTES, lambda _: seen.set()))
        error, is_seen = await asyncio.gather(taking, asyncio.to_thread(stand_still, far))
    assert (error.code, is_seen) == ("bulk_truncated", True)


async def test_bytes_that_do_not_come_are_given_up(carrier: BulkTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(movers, "STALL_TIMEOUT_S", SOON_S)
    async with channel(carrier) as (made, _):
        assert isinstance(await error_of(made, lambda wire: wire.take(1)), Unavailable)


async def test_a_file_that_ends_early_is_an_error(carrier: BulkTransport) -> None:
    file = os.memfd_create("file")
    os.write(file, b"12345")
    async with channel(carrier) as (made, _):
        error = await error_of(made, lambda wire: wire.give(file, 0, 6, PATIENCE_S))
    os.close(file)
    assert error.code == "bulk_source_short"


async def test_peer_that_reads_nothing_is_given_up(carrier: BulkTransport) -> None:
    file = os.memfd_create("file")
    os.ftruncate(file, 64 << 20)
    async with channel(carrier) as (made, _):
        error = await error_of(made, lambda wire: wire.give(file, 0, 64 << 20, SOON_S))
    os.close(file)
    assert isinstance(error, Unavailable)


async def test_a_pause_takes_its_time(carrier: BulkTransport) -> None:
    async with channel(carrier) as (made, _):
        began = time.monotonic()
        await converse(made, lambda wire: wire.pause(SOON_S))
        assert time.monotonic() - began >= SOON_S


async def test_a_pause_ends_when_the_connection_is_cut() -> None:
    async with channel(SocketBulkTransport()) as (made, far):
        started = asyncio.Event()
        loop = asyncio.get_running_loop()

        async def pause(wire: DialogueWire) -> None:
            loop.call_soon_threadsafe(started.set)
            await wire.pause(100 * PATIENCE_S)

        pausing = asyncio.ensure_future(converse(made, pause))
        await started.wait()
        far.sendall(b"that ends no pause")
        made.cut()
        async with asyncio.timeout(PATIENCE_S):
            await pausing


def test_errors_survive_the_way_between_processes() -> None:
    assert pickle.loads(pickle.dumps(HungUp())).code == "peer_hung_up"


async def test_message_of_another_conversation_is_passed_on(carrier: BulkTransport) -> None:
    """What belongs there is for the conversation to judge."""
    async with channel(carrier) as (made, far):
        far.sendall(frame_of(StateWanted(1)))
        assert await converse(made, hear) == StateWanted(1)
