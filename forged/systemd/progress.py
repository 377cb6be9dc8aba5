"""Whether work that waits is being done.

Law: where something waited at two looks in a row and nothing was done in between, nothing gets on. One look proves
nothing, and a queue that is long but moves is no fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lane:
    """Work that is done one after the other: whether some waits or is being done, and how much was done so far."""

    name: str
    waiting: bool
    done: int


class Progress:
    """What was seen at the last look."""

    def __init__(self) -> None:
        self._before: Mapping[str, Lane] = {}

    def stuck(self, lanes: Iterable[Lane]) -> list[str]:
        """The names of the lanes in which nothing has got on since the last look."""
        now = {lane.name: lane for lane in lanes}
        before, self._before = self._before, now
        return [name for name, lane in now.items() if lane.waiting and before.get(name) == lane]
