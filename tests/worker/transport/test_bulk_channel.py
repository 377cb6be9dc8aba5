from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from forged.errors import ForgedError
from forged.net.bulk import movers
from forged.worker.transport.bulk_channel import (
    DONE,
    GO,
    TOGETHER_BYTES,
    BulkChannel,
    BulkTransport,
    LoopBulkTransport,
    SocketBulkTransport,
    VerifiedParts,
    checksum_of,
    run_blocking,
)
from tests.worker.meshes import buffers, random_parts

MAKERS: list[Callable[[], BulkTransport]] = [SocketBulkTransport, LoopBulkTransport]
SIZES = (0, 7, TOGETHER_BYTES, TOGETHER_BYTES + 1, 2_000_000)


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
    far.settimeout(30)
    try:
        yield made, far
    finally:
        made.close()
        far.close()


async def code_of(moving: object) -> str:
    with pytest.raises(ForgedError) as raised:
        await moving  # type: ignore[misc]
    return raised.value.code


@pytest.mark.parametrize("giver", MAKERS)
async def test_both_carriers_understand_each_other(carrier: BulkTransport, giver: Callable[[], BulkTransport]) -> None:
    parts, got, verified = random_parts(*SIZES), buffers(*SIZES), VerifiedParts()
    near, far = socket.socketpair()
    channels: list[BulkChannel] = []
    for sock, one in ((near, carrier), (far, giver())):
        sock.setblocking(False)
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=sock)
        transport.pause_reading()
        channels.append(await one.open(transport))

    async def give() -> None:
        await channels[1].give(parts)
        channels[1].close()

    await asyncio.gather(channels[0].take(got, verified), give())
    channels[0].close()
    assert got == parts
    assert verified.count == len(SIZES)


async def test_nothing_is_sent_before_the_fetcher_says_so(carrier: BulkTransport) -> None:
    async with channel(carrier) as (made, far):
        giving = asyncio.ensure_future(made.give([memoryview(b"abc")]))
        far.setblocking(False)
        with pytest.raises(BlockingIOError):
            far.recv(1)
        far.setblocking(True)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, far.sendall, GO)
        sent = await loop.run_in_executor(None, far.recv, 3 + 16, socket.MSG_WAITALL)
        assert sent == b"abc" + checksum_of(memoryview(b"abc"))
        assert not giving.done()
        await loop.run_in_executor(None, far.sendall, DONE)
        await giving


@pytest.mark.parametrize("size", [5, TOGETHER_BYTES + 5])
async def test_corrupt_part_is_refused_after_the_verified_ones(carrier: BulkTransport, size: int) -> None:
    verified = VerifiedParts()
    parts = random_parts(5, size)
    async with channel(carrier) as (made, far):
        far.sendall(bytes(parts[0]) + checksum_of(parts[0]) + bytes(size) + checksum_of(parts[1]))
        assert await code_of(made.take(buffers(5, size), verified)) == "state_corrupt"
    assert verified.count == 1


@pytest.mark.parametrize("size", [5, TOGETHER_BYTES + 5])
async def test_a_source_that_ends_in_the_middle_is_truncated(carrier: BulkTransport, size: int) -> None:
    async with channel(carrier) as (made, far):
        far.sendall(bytes(size - 1))
        far.shutdown(socket.SHUT_WR)
        assert await code_of(made.take(buffers(size), VerifiedParts())) in {"state_truncated", "bulk_truncated"}


async def test_a_fetcher_that_never_says_that_it_has_all_is_no_success(carrier: BulkTransport) -> None:
    async with channel(carrier) as (made, far):
        far.sendall(GO)
        far.shutdown(socket.SHUT_WR)
        assert await code_of(made.give([memoryview(b"abc")])) == "state_truncated"


async def test_stalled_peer_is_given_up(carrier: BulkTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(movers, "STALL_TIMEOUT_S", 0.05)
    async with channel(carrier) as (made, _):
        assert await code_of(made.take(buffers(5), VerifiedParts())) in {"state_broken_off", "bulk_failed"}
    async with channel(carrier) as (made, _):
        assert await code_of(made.give([])) in {"state_broken_off", "bulk_failed"}


async def test_a_channel_that_is_cut_moves_nothing_more(carrier: BulkTransport) -> None:
    async with channel(carrier) as (made, far):
        taking = asyncio.ensure_future(made.take(buffers(5), VerifiedParts()))
        assert await asyncio.get_running_loop().run_in_executor(None, far.recv, 1) == GO
        made.cut()
        assert (await code_of(taking)) in {"state_truncated", "state_broken_off", "bulk_failed"}
        assert await asyncio.get_running_loop().run_in_executor(None, far.recv, 1) == b""


async def test_a_cancelled_movement_ends_its_thread(carrier: BulkTransport) -> None:
    async with channel(carrier) as (made, far):
        taking = asyncio.ensure_future(made.take(buffers(5), VerifiedParts()))
        assert await asyncio.get_running_loop().run_in_executor(None, far.recv, 1) == GO
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking


async def test_a_conversation_that_suspends_over_a_blocking_wire_is_a_mistake() -> None:
    with pytest.raises(RuntimeError, match="suspended"):
        run_blocking(asyncio.sleep(0))
