"""The agreement of a world's members on the state that the world starts with, when they have met.

Invariants:
- All members decide from the same stop reports by the daemon's rule, so all decide the same.
- After a synchronous rescale the members agree already; after a background rescale this is what decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from forged.elastic.rescale.attempt import StopReport, choose_source
from forged.errors import PeerError
from forged.worker.collectives.world import World

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(StopReport).decode


@dataclass(frozen=True, slots=True)
class StateAgreement:
    """The state source of a world, and the ranks that need its state."""

    source: int
    """The rank of the state source."""
    stop: StopReport
    """The source's stop report."""
    behind: frozenset[int]
    """The ranks that have another state."""

    @property
    def step(self) -> int:
        """Steps applied to the world's state."""
        return self.stop.position


async def agree(world: World, own: StopReport) -> StateAgreement:
    """Exchange stop reports with all members of a world."""
    return settle(world.names, [_read(told) for told in await world.all_gather(_encode(own))])


def settle(names: tuple[str, ...], stops: list[StopReport]) -> StateAgreement:
    """What follows from the members' stop reports, in rank order."""
    source = names.index(choose_source(names, dict(zip(names, stops, strict=True))))
    position = stops[source].position
    behind = frozenset(
        rank
        for rank, stop in enumerate(stops)
        if rank != source and not (stop.holds_state and stop.position == position)
    )
    return StateAgreement(source, stops[source], behind)


def _read(told: bytes) -> StopReport:
    try:
        return _decode(told)
    except (msgspec.MsgspecError, TypeError) as error:
        raise PeerError("stop_invalid", f"a worker sent no valid stop report: {error}") from error
