from __future__ import annotations

import pytest

from forged.clock import SystemClock
from forged.errors import PeerError, Unavailable
from forged.worker.collectives.endpoints import MemberEndpoint
from forged.worker.transport.peer_link import PEER_LIMITS, UNREAD_MAX, Inbox, PeerLink
from forged.worker.transport.peer_messages import Left, Started
from tests.kernel_fixture import task_group
from tests.worker.meshes import until

LOST = Unavailable("connection_lost", "the connection was lost")


def link() -> PeerLink:
    """A connection that was never made."""
    return PeerLink(SystemClock(), PEER_LIMITS)


async def test_connection_that_ends_before_use_fails_each_attempt() -> None:
    async with task_group() as tasks:
        member = MemberEndpoint(1, 1, ["a", "b"], tasks)
        for _ in range(2):
            inbox, hub = Inbox(), link()
            inbox.end(hub, LOST)
            with pytest.raises(Unavailable):
                await member.start(hub, inbox)
        assert member.ending is None


async def test_end_of_an_earlier_connection_does_not_affect_the_present_one() -> None:
    async with task_group() as tasks:
        member = MemberEndpoint(1, 1, ["a", "b"], tasks)
        earlier, present = (Inbox(), link()), (Inbox(), link())
        earlier[0].end(earlier[1], LOST)
        with pytest.raises(Unavailable):
            await member.start(earlier[1], earlier[0])
        present[0].put(present[1], Started(1))
        await member.start(present[1], present[0])
        assert member.ending is None
        present[0].end(present[1], LOST)
        await until(lambda: member.ending is not None)
        assert member.ending is not None
        assert (member.ending.peer, "a (rank 0) was lost" in member.ending.reason) == ("a", True)


async def test_inbox_refuses_a_connection_with_too_many_unread_messages() -> None:
    inbox, talkative, quiet = Inbox(), link(), link()
    for _ in range(UNREAD_MAX):
        inbox.put(talkative, Left())
    with pytest.raises(PeerError):
        inbox.put(talkative, Left())
    inbox.put(quiet, Left())
    assert [arrived[0] for arrived in iter(inbox.pop, None)] == [talkative] * UNREAD_MAX + [quiet]
    inbox.put(talkative, Left())


async def test_end_of_a_connection_follows_its_last_message_and_stays() -> None:
    inbox, peer = Inbox(), link()
    inbox.put(peer, Left())
    inbox.end(peer, LOST)
    assert isinstance(await inbox.next(), Left)
    for _ in range(2):
        with pytest.raises(Unavailable):
            await inbox.next()
