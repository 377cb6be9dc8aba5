from __future__ import annotations

import asyncio
import socket
import struct

import numpy as np
import pytest

from forged.clock import SystemClock
from forged.net.transport.connection import READ_BYTES
from forged.net.transport.tcp import EXTENDED_USER_TIMEOUT_S, Liveness, is_unread
from forged.worker import mesh
from forged.worker.transport import peer_link
from forged.worker.transport.peer_link import PEER_LIMITS, SMALL_BYTES, PeerLink
from tests.worker.meshes import each, open_meshes, until

HOUR_S = 3600.0


def user_timeout_s(link: PeerLink) -> float:
    assert link._transport is not None
    sock = link._transport.get_extra_info("socket")
    return float(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)) / 1000


async def test_a_large_message_may_stay_unread_until_the_next_look_and_a_small_one_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sender may compute right after, with the GIL held."""
    monkeypatch.setattr(mesh, "SWEEP_INTERVAL_S", HOUR_S)
    async with open_meshes(2) as made:
        worlds = await made.enter(1)
        (link,) = made.meshes[0]._links
        await each(worlds, lambda world: world.barrier())
        assert user_timeout_s(link) == Liveness().user_timeout_s
        await each(worlds, lambda world: world.all_reduce(np.ones(SMALL_BYTES, np.uint8)))
        assert user_timeout_s(link) == EXTENDED_USER_TIMEOUT_S
        link.sweep(SystemClock().monotonic())
        assert user_timeout_s(link) == Liveness().user_timeout_s


async def test_a_peer_that_reads_nothing_is_given_time_at_the_next_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As every connection is, the daemon's too."""
    monkeypatch.setattr(mesh, "SWEEP_INTERVAL_S", HOUR_S)
    async with open_meshes(2) as made:
        await made.enter(1)
        (link,), (other,) = made.meshes[0]._links, made.meshes[1]._links
        assert link._transport is not None
        assert other._transport is not None
        sock = link._transport.get_extra_info("socket")
        other._transport.pause_reading()
        while not is_unread(sock):
            link.write(bytes(SMALL_BYTES))
            await asyncio.sleep(0)
        assert user_timeout_s(link) == Liveness().user_timeout_s
        link.sweep(SystemClock().monotonic())
        assert user_timeout_s(link) == EXTENDED_USER_TIMEOUT_S
        other._transport.resume_reading()
        await other.over  # zeroes are no frames
        await link.over


async def test_a_proven_peer_may_be_silent_for_hours() -> None:
    async with open_meshes(2) as made:
        worlds = await made.enter(1)
        for mesh in made.meshes:
            for link in mesh._links:
                link.sweep(SystemClock().monotonic() + HOUR_S)
        await each(worlds, lambda world: world.barrier())


async def test_a_connection_that_is_closed_does_not_wait_for_ever_for_a_peer_that_reads_nothing() -> None:
    async with open_meshes(2) as made:
        await made.enter(1)
        (link,) = made.meshes[0]._links
        (other,) = made.meshes[1]._links
        assert other._transport is not None
        other._transport.pause_reading()
        link.write(bytes(32 << 20))
        link.close()
        assert not link.lost
        link.sweep(SystemClock().monotonic() + PEER_LIMITS.linger_s + 1)
        await link.over
        assert link.lost


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for one unfinished message of two megabytes at a time."""
    monkeypatch.setattr(peer_link, "PEER_BYTES_MAX", 3 << 20)
    monkeypatch.setattr(peer_link, "UNFINISHED_BYTES_MAX", 4 << 20)


@pytest.mark.usefixtures("little_memory")
async def test_large_messages_of_all_peers_take_turns_and_arrive() -> None:
    async with open_meshes(5) as made:
        worlds = await made.enter(1)
        sums = await each(worlds, lambda world: world.all_reduce(np.ones(2 << 20, np.uint8)))
        assert [int(total.min()) for total in sums] == [5] * 5
        assert [mesh._memory.used for mesh in made.meshes] == [0] * 5


@pytest.mark.usefixtures("little_memory")
async def test_unfinished_messages_of_many_peers_hold_bounded_memory() -> None:
    async with open_meshes(9) as made:
        await made.enter(1)
        hub, *members = made.meshes
        for member in members:
            (link,) = member._links
            link.write(struct.pack(">I", 2 << 20) + bytes(2_000_000))
        await until(lambda: sum(link._waits_for_memory for link in hub._links) == 7)
        await until(lambda: sum(len(link._decoder._rest) for link in hub._links) > 2_000_000)
        assert sum(len(link._decoder._rest) for link in hub._links) <= 2_000_000 + 8 * READ_BYTES
