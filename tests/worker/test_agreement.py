"""What the members of a world agree on when they have met."""

from __future__ import annotations

import asyncio

import pytest

from forged.elastic.rescale.attempt import StopReport
from forged.errors import PeerError
from forged.worker.rescaler import agree, settle
from tests.worker.meshes import each, open_world

NAMES = ("a", "b", "c")


@pytest.mark.parametrize(
    ("stops", "source", "step", "behind"),
    [
        pytest.param([StopReport(5, True)] * 3, 0, 5, set(), id="nothing is left to settle"),
        pytest.param([StopReport(0, False)] * 3, 0, 0, {1, 2}, id="no member has a state: that of the first"),
        pytest.param(
            [StopReport(0, False), StopReport(9, False), StopReport(9, False)],
            1,
            9,
            {0, 2},
            id="no survivor has, joiners bring one",
        ),
        pytest.param(
            [StopReport(0, False), StopReport(7, True), StopReport(7, True)], 1, 7, {0}, id="a new one at rank 0"
        ),
        pytest.param(
            [StopReport(5, True), StopReport(6, True), StopReport(6, True)], 1, 6, {0}, id="the highest committed step"
        ),
        pytest.param(
            [StopReport(5, True, True), StopReport(6, True), StopReport(5, True, True)],
            0,
            6,
            set(),
            id="finished is there",
        ),
        pytest.param(
            [StopReport(5, True, True), StopReport(5, True), StopReport(5, True, True)],
            1,
            5,
            {0, 2},
            id="not all finished",
        ),
        pytest.param(
            [StopReport(5, True, True), StopReport(0, False), StopReport(5, True, True)], 0, 6, {1}, id="all finished"
        ),
    ],
)
def test_settled_source_and_ranks_that_need_its_state(
    stops: list[StopReport], source: int, step: int, behind: set[int]
) -> None:
    agreement = settle(NAMES, stops)
    assert (agreement.sources, agreement.step, agreement.behind) == ((source,), step, frozenset(behind))


async def test_all_members_agree_on_the_same() -> None:
    stops = [StopReport(3, True, epoch=1), StopReport(4, True, True, 2, 0.5, 64), StopReport(0, False)]
    async with open_world(3) as worlds:
        first, *others = await each(list(zip(worlds, stops, strict=True)), lambda one: agree(*one))
    assert [first, first] == others
    assert (first.sources, first.step, first.behind, first.stop.epoch) == ((1,), 5, frozenset({0, 2}), 2)


@pytest.mark.parametrize("word", [b"\xc1", 5])
async def test_invalid_stop_report_is_a_peer_error(word: bytes | int) -> None:
    async with open_world(2) as (world, other):
        told = asyncio.ensure_future(other.all_gather(word))
        with pytest.raises(PeerError, match="sent no valid stop report"):
            await agree(world, StopReport(0, True))
        await told
