from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest
from anyio import CapacityLimiter

from forged.elastic.model import WorkerId
from forged.errors import ForgedError, RequestRefused, Unavailable
from forged.retry import RetryPolicy
from forged.worker.mesh import Mesh
from forged.worker.state_transfer import transfer
from forged.worker.state_transfer.transfer import Into
from forged.worker.transport import bulk_channel
from forged.worker.transport.bulk_channel import (
    BulkChannel,
    BulkTransport,
    LoopBulkTransport,
    Parts,
    SocketBulkTransport,
    VerifiedParts,
)
from forged.worker.transport.dialogue_wire import Conversation
from forged.worker.transport.peer_link import DialledLink, Inbox
from forged.worker.transport.peer_messages import PARTS_MAX, Purpose, StateOffer, StateWanted
from tests.worker.meshes import PATIENCE_S, Gate, Meshes, buffers, failures, open_meshes, random_parts, until

T = TypeVar("T")

SIZES = (0, 1, 65_536, 65_537, 3_000_000, 17)
HEAD = b"what the parts are"


def room(*sizes: int) -> tuple[list[memoryview], Into]:
    """Memory, and a function that gives it."""
    parts = buffers(*sizes)
    return parts, lambda head: parts


class WatchedChannel:
    """A channel that counts its parts, and that `after` may disturb."""

    def __init__(self, inner: BulkChannel, carrier: WatchedCarrier) -> None:
        self.inner = inner
        self.carrier = carrier

    async def give(self, parts: Parts) -> None:
        self.carrier.given.append(len(parts))
        await self.inner.give(parts)

    async def take(self, parts: Parts, verified: VerifiedParts) -> None:
        await self.inner.take(parts, WatchedParts(verified, self))

    @property
    def received(self) -> int:
        return self.inner.received

    @received.setter
    def received(self, count: int) -> None:
        self.inner.received = count

    async def converse(self, conversation: Conversation[T], turns: CapacityLimiter) -> T:
        return await self.inner.converse(conversation, turns)

    async def is_called(self, patience_s: float) -> bool:
        return await self.inner.is_called(patience_s)

    def descriptor(self) -> int | None:
        return self.inner.descriptor()

    def cut(self) -> None:
        self.inner.cut()

    def close(self) -> None:
        self.inner.close()


class WatchedParts(VerifiedParts):
    """Counts the parts of a channel, and calls `after` for each."""

    def __init__(self, inner: VerifiedParts, channel: WatchedChannel) -> None:
        super().__init__()
        self.inner = inner
        self.channel = channel

    def add(self) -> None:
        self.inner.add()
        carrier = self.channel.carrier
        carrier.verified += 1
        carrier.after(self.channel)


class WatchedCarrier:
    """Counts what is moved; `after` is called behind each part that has arrived, in the thread that moves them."""

    def __init__(self, inner: BulkTransport | None = None) -> None:
        self.inner = inner or SocketBulkTransport()
        self.given: list[int] = []
        self.verified = 0
        self.after: Callable[[WatchedChannel], None] = lambda channel: None

    async def open(self, transport: asyncio.Transport) -> WatchedChannel:
        return WatchedChannel(await self.inner.open(transport), self)


def watched(made: Meshes, number: int) -> WatchedCarrier:
    """Put a carrier under watch."""
    mesh = made.meshes[number]
    carrier = WatchedCarrier(mesh._carrier)
    mesh._carrier = mesh.state_fetch._carrier = carrier
    mesh.state_server._carrier = carrier
    return carrier


async def code_of(fetching: Any) -> str:
    with pytest.raises(ForgedError) as raised:
        await fetching
    return raised.value.code


@pytest.mark.parametrize("carrier", [SocketBulkTransport, LoopBulkTransport])
async def test_all_parts_arrive_as_they_are(carrier: Callable[[], BulkTransport]) -> None:
    parts = random_parts(*SIZES)
    heads: list[bytes] = []
    got = buffers(*SIZES)

    def into(head: bytes) -> list[memoryview]:
        heads.append(head)
        return got

    async with open_meshes(2, carrier=carrier()) as made:
        with made.meshes[0].state_server.offering(1, HEAD, parts):
            await made.meshes[1].state_fetch.fetch(made.workers[0], 1, into)
    assert got == parts
    assert heads == [HEAD]


@pytest.mark.parametrize("sizes", [(), (0,), (5,) * 2000])
async def test_states_of_zero_and_many_parts_are_transferred(sizes: Sequence[int]) -> None:
    parts = random_parts(*sizes)
    got, into = room(*sizes)
    async with open_meshes(2) as made:
        with made.meshes[0].state_server.offering(1, b"", parts):
            await made.meshes[1].state_fetch.fetch(made.workers[0], 1, into)
    assert got == parts


async def test_fetcher_that_connects_before_the_offer_waits() -> None:
    parts = random_parts(100)
    got, into = room(100)
    async with open_meshes(2) as made:
        fetching = asyncio.ensure_future(made.meshes[1].state_fetch.fetch(made.workers[0], 3, into))
        await until(lambda: bool(made.meshes[0]._links))
        with made.meshes[0].state_server.offering(2, HEAD, random_parts(100)):
            pass
        with made.meshes[0].state_server.offering(3, HEAD, parts):
            await fetching
    assert got == parts


async def test_fetcher_that_waits_too_long_gets_an_error() -> None:
    async with open_meshes(2) as made:
        made.meshes[0].state_server._offer_wait_s = 0.05
        _, into = room()
        assert await code_of(made.meshes[1].state_fetch.fetch(made.workers[0], 1, into)) == "state_not_offered"


async def test_withdrawn_or_superseded_offer_is_over_until_it_is_repeated() -> None:
    async with open_meshes(2) as made:
        source, fetcher = made.meshes
        got, into = room(1)
        with source.state_server.offering(4, HEAD, [b"4"]):
            assert await code_of(fetcher.state_fetch.fetch(made.workers[0], 3, into)) == "attempt_over"
        assert await code_of(fetcher.state_fetch.fetch(made.workers[0], 4, into)) == "attempt_over"
        assert await code_of(fetcher.state_fetch.fetch(made.workers[0], 3, into)) == "attempt_over"
        with pytest.raises(Unavailable), source.state_server.offering(3, HEAD, []):
            pass
        with source.state_server.offering(4, HEAD, [b"5"]):
            await fetcher.state_fetch.fetch(made.workers[0], 4, into)
            with pytest.raises(Unavailable), source.state_server.offering(4, HEAD, []):
                pass
    assert bytes(got[0]) == b"5"


async def test_a_newer_offer_is_not_withdrawn_by_the_end_of_an_older_one() -> None:
    got, into = room(1)
    async with open_meshes(2) as made:
        older = made.meshes[0].state_server.offering(1, HEAD, [b"1"])
        older.__enter__()
        with made.meshes[0].state_server.offering(2, HEAD, [b"2"]):
            older.__exit__(None, None, None)
            await made.meshes[1].state_fetch.fetch(made.workers[0], 2, into)
    assert bytes(got[0]) == b"2"


async def test_broken_fetch_resumes_at_its_part() -> None:
    sizes = (100_000,) * 6
    parts = random_parts(*sizes)
    got, into = room(*sizes)
    async with open_meshes(2) as made:
        giving, taking = watched(made, 0), watched(made, 1)

        def break_off(channel: WatchedChannel) -> None:
            if taking.verified in (2, 5):
                channel.cut()

        taking.after = break_off
        with made.meshes[0].state_server.offering(1, HEAD, parts):
            await made.meshes[1].state_fetch.fetch(made.workers[0], 1, into)
        # What was in the kernel's hands when the connection broke may still have arrived.
        assert giving.given[0] == 6
        assert len(giving.given) >= 2
        assert giving.given == sorted(set(giving.given), reverse=True)
        assert taking.verified == 6
    assert got == parts


async def test_damaged_part_is_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, (got, into) = random_parts(10, 20, 30), room(10, 20, 30)
    right = bulk_channel.checksum_of
    damaged = [1]

    def checksum_of(part: memoryview) -> bytes:
        if len(part) == 20 and damaged:
            damaged.pop()
            return bytes(16)
        return right(part)

    monkeypatch.setattr("forged.worker.transport.bulk_channel.checksum_of", checksum_of)
    async with open_meshes(2) as made:
        giving = watched(made, 0)
        with made.meshes[0].state_server.offering(1, HEAD, parts):
            await made.meshes[1].state_fetch.fetch(made.workers[0], 1, into)
        assert giving.given == [3, 2]
    assert got == parts


async def test_many_fetchers_are_served_concurrently() -> None:
    parts = random_parts(1_000_000, 50)
    rooms = [room(1_000_000, 50) for _ in range(11)]
    async with open_meshes(12) as made:
        with made.meshes[0].state_server.offering(1, HEAD, parts):
            await asyncio.gather(
                *(
                    mesh.state_fetch.fetch(made.workers[0], 1, into)
                    for mesh, (_, into) in zip(made.meshes[1:], rooms, strict=True)
                )
            )
    assert all(got == parts for got, _ in rooms)


async def test_source_serves_while_it_waits_in_a_collective() -> None:
    parts, (got, into) = random_parts(100), room(100)
    async with open_meshes(3) as made:
        worlds = await made.enter(1, 0, 1)
        waiting = asyncio.ensure_future(worlds[0].barrier())
        with made.meshes[0].state_server.offering(1, HEAD, parts):
            await made.meshes[2].state_fetch.fetch(made.workers[0], 1, into)
        await worlds[1].barrier()
        await waiting
    assert got == parts


class HeldFetch:
    """A fetch that stands still in the middle."""

    def __init__(self, made: Meshes, attempt: int = 1) -> None:
        sizes = (1_000_000,) * 40
        self.gate = Gate()
        self.taking = watched(made, 1)
        self.taking.after = lambda _: self.gate.wait()
        self.offer = made.meshes[0].state_server.offering(attempt, HEAD, random_parts(*sizes))
        self.offer.__enter__()
        _, into = room(*sizes)
        self.fetching = asyncio.ensure_future(made.meshes[1].state_fetch.fetch(made.workers[0], attempt, into))

    async def is_under_way(self) -> None:
        """Wait until a part has arrived."""
        await until(lambda: self.taking.verified > 0)


async def test_withdrawn_offer_ends_running_fetches() -> None:
    async with open_meshes(2) as made:
        held = HeldFetch(made)
        await held.is_under_way()
        assert [mesh.has_given() for mesh in made.meshes] == [True, False]
        held.offer.__exit__(None, None, None)
        held.gate.open()
        assert await code_of(held.fetching) == "attempt_over"
        assert held.taking.verified < 40
        door = 1
        await until(lambda: len(made.meshes[0].descriptors()) == door)
        assert not made.meshes[0].has_given()


async def test_newer_offer_ends_fetches_of_the_older_one() -> None:
    async with open_meshes(2) as made:
        held = HeldFetch(made)
        await held.is_under_way()
        with made.meshes[0].state_server.offering(2, HEAD, []):
            held.gate.open()
            assert await code_of(held.fetching) == "attempt_over"


async def test_a_newer_fetch_ends_the_older_one() -> None:
    got, into = room(1)
    async with open_meshes(3) as made:
        held = HeldFetch(made)
        await held.is_under_way()
        with made.meshes[2].state_server.offering(2, HEAD, [b"2"]):
            newer = asyncio.ensure_future(made.meshes[1].state_fetch.fetch(made.workers[2], 2, into))
            held.gate.open()
            assert await code_of(held.fetching) == "attempt_over"
            await newer
    assert bytes(got[0]) == b"2"


async def test_a_cancelled_fetch_writes_nothing_afterwards() -> None:
    async with open_meshes(2) as made:
        held = HeldFetch(made)
        await held.is_under_way()
        held.fetching.cancel()
        held.gate.open()
        with pytest.raises(asyncio.CancelledError):
            await held.fetching
        verified = held.taking.verified
        assert verified < 40
        await asyncio.sleep(0)
        assert held.taking.verified == verified
        assert made.meshes[1].state_fetch.descriptors() == []


async def test_a_source_that_is_closed_in_the_middle_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "FETCHING", RetryPolicy(attempts=2, delay_s=0.0))
    async with open_meshes(2) as made:
        source = Mesh("w9", bytes(16), "run", key=b"the job's key, as long as a hash")
        async with source.open() as address:
            replaced = Meshes([source, made.meshes[1]], [WorkerId("w9", address.host, address.port), made.workers[1]])
            held = HeldFetch(replaced)
            await held.is_under_way()
            held.gate.open()
        assert await code_of(held.fetching) in {"connect_refused", "connect_reset", "connection_lost", "bulk_truncated"}


async def test_missing_source_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "FETCHING", RetryPolicy(attempts=2, delay_s=0.0))
    async with open_meshes(1) as made:
        _, into = room()
        nobody = WorkerId("w9", "127.0.0.1", 1)
        assert await code_of(made.meshes[0].state_fetch.fetch(nobody, 1, into)) == "connect_refused"


@pytest.mark.parametrize("sizes", [(), (1,), (1, 3), (1, 2, 0)])
async def test_room_that_does_not_fit_is_refused(sizes: Sequence[int]) -> None:
    async with open_meshes(2) as made:
        _, into = room(*sizes)
        with made.meshes[0].state_server.offering(1, HEAD, random_parts(1, 2)):
            assert await code_of(made.meshes[1].state_fetch.fetch(made.workers[0], 1, into)) == "state_room_unfit"


async def test_room_that_cannot_be_written_is_refused() -> None:
    async with open_meshes(2) as made:
        with made.meshes[0].state_server.offering(1, HEAD, [b"1"]):
            fetching = made.meshes[1].state_fetch.fetch(made.workers[0], 1, lambda _: [memoryview(b"1")])
            assert await code_of(fetching) == "state_room_unfit"


async def test_error_of_the_callers_function_is_raised() -> None:
    def into(head: bytes) -> list[memoryview]:
        raise ZeroDivisionError

    async with open_meshes(2) as made:
        with made.meshes[0].state_server.offering(1, HEAD, [b"1"]):
            with pytest.raises(ZeroDivisionError):
                await made.meshes[1].state_fetch.fetch(made.workers[0], 1, into)
            got, good = room(1)
            await made.meshes[1].state_fetch.fetch(made.workers[0], 1, good)
    assert bytes(got[0]) == b"1"


async def test_too_many_parts_are_refused_before_they_are_offered() -> None:
    async with open_meshes(1) as made:
        with (
            pytest.raises(RequestRefused) as raised,
            made.meshes[0].state_server.offering(1, HEAD, [b""] * (PARTS_MAX + 1)),
        ):
            pass
        assert raised.value.code == "state_too_large"


@asynccontextmanager
async def talk() -> AsyncIterator[tuple[Inbox, DialledLink]]:
    """With a source that offers a state of one part."""
    async with open_meshes(2) as made:
        source, fetcher = made.meshes
        with source.state_server.offering(1, HEAD, [b"1"]):
            inbox = Inbox(unread_max=1)
            yield inbox, await fetcher._dialler.dial(made.workers[0], Purpose.STATE, 1, inbox)


async def test_fetcher_without_a_request_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "ANSWER_TIMEOUT_S", 0.05)
    async with talk() as (inbox, link):
        assert isinstance(await inbox.next(PATIENCE_S), StateOffer)
        (error,) = await failures(inbox.next(PATIENCE_S))
        assert isinstance(error, Unavailable)
        assert error.code == "peer_timeout"
        assert link.lost or link.closing


async def test_slow_fetcher_learns_that_the_source_has_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise it would wait for minutes, and other fetchers for it."""
    monkeypatch.setattr(transfer, "ANSWER_TIMEOUT_S", 0.05)
    async with talk() as (inbox, link):
        async with asyncio.timeout(PATIENCE_S):
            while not link.lost:
                await asyncio.sleep(0.01)
        assert isinstance(await inbox.next(PATIENCE_S), StateOffer)
        link.send(StateWanted(0))
        async with asyncio.timeout(PATIENCE_S):
            assert await code_of(inbox.next(transfer.TURN_TIMEOUT_S)) == "peer_timeout"


async def test_fetcher_that_requests_too_many_parts_is_refused() -> None:
    async with talk() as (inbox, link):
        await inbox.next(PATIENCE_S)
        link.send(StateWanted(2))
        assert await code_of(inbox.next(PATIENCE_S)) == "message_unexpected"
