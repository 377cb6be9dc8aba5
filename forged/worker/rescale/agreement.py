"""Where the members of a world are, and whose state holds, agreed on among themselves when they have met.

Law: all members decide from the same words by the same rule, which is the daemon's own: so all decide the same. After a
rescale for which all have stopped there is nothing left to settle; where nobody stopped, this is what settles it.
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
class Agreement:
    """Where the world begins: behind so many steps, with the state of the source."""

    source: int
    """The rank of whose state holds."""
    stop: StopReport
    """Where the source has stopped."""
    behind: frozenset[int]
    """The ranks whose state is another one."""

    @property
    def step(self) -> int:
        """How many steps the world has behind it."""
        return self.stop.position


async def agree(world: World, own: StopReport) -> Agreement:
    """Tell the others where this worker is, and hear where they are."""
    return settle(world.names, [_read(told) for told in await world.all_gather(_encode(own))])


def settle(names: tuple[str, ...], stops: list[StopReport]) -> Agreement:
    """What follows from where all are; by rank."""
    source = names.index(choose_source(names, dict(zip(names, stops, strict=True))))
    position = stops[source].position
    behind = frozenset(
        rank
        for rank, stop in enumerate(stops)
        if rank != source and not (stop.holds_state and stop.position == position)
    )
    return Agreement(source, stops[source], behind)


def _read(told: bytes) -> StopReport:
    try:
        return _decode(told)
    except (msgspec.MsgspecError, TypeError) as error:
        raise PeerError("stop_invalid", f"a worker does not say where it is: {error}") from error
