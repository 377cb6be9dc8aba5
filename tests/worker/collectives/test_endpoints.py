from __future__ import annotations

from typing import cast

import pytest

from forged.errors import Unavailable
from forged.worker.collectives.endpoints import MemberEndpoint
from forged.worker.collectives.world import World
from forged.worker.transport.peer_link import PeerLink

LOST = Unavailable("connection_lost", "the connection was lost")


def link() -> PeerLink:
    """One of which it matters only which it is."""
    return cast("PeerLink", object())


async def test_connection_that_ends_before_use_fails_each_attempt() -> None:
    side = MemberEndpoint(World(1, 1, ["a", "b"]))
    first, second = link(), link()
    side.await_start()
    side.link = first
    side.on_end(first, LOST)
    with pytest.raises(Unavailable):
        await side.started
    side.await_start()
    side.on_end(second, LOST)
    side.link = second
    assert side.started.done()
    with pytest.raises(Unavailable):
        await side.started


async def test_end_of_an_earlier_connection_does_not_affect_the_present_one() -> None:
    side = MemberEndpoint(World(1, 1, ["a", "b"]))
    side.await_start()
    side.link = link()
    side.on_end(link(), LOST)
    assert not side.started.done()
