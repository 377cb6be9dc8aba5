"""Makes buffers from a log of allocations and releases at addresses."""

from __future__ import annotations

from forged.memory.traces.errors import file_invalid, too_large
from forged.memory.traces.model import Buffer

BUFFERS_MAX = 1_000_000


class LiveBuffers:
    """The buffers of a log; the number of the entry is the time.

    What is released without an allocation has been alive since the beginning; what is never released is alive to
    the end. The id of a buffer is its address, with a number from the second buffer at the address on.
    """

    def __init__(self) -> None:
        self._time = 0
        self._live: dict[int, tuple[int, int]] = {}
        """When and how large, by address."""
        self._found: list[tuple[int, int, int, int]] = []
        """Address, lower, upper, size."""

    def allocate(self, place: str, address: int, size: int) -> None:
        """`place` is where in the file the entry is. An allocation of no bytes has no buffer."""
        self._step(place)
        if not size:
            return
        if address in self._live:
            raise file_invalid(place, f"{address:#x} is allocated and not released before", "record the log anew")
        self._live[address] = self._time, size

    def release(self, place: str, address: int, size: int) -> None:
        """`size` counts if the allocation is not in the log."""
        self._step(place)
        lower, size = self._live.pop(address, (0, size))
        if size:
            self._found.append((address, lower, self._time, size))

    def present_from_the_beginning(self, place: str, address: int, size: int) -> None:
        """A buffer that is there at the end; it has been so since the beginning unless the log has its allocation."""
        self._limit(place)
        if size:
            self._live.setdefault(address, (0, size))

    def buffers(self) -> list[Buffer]:
        """In the order of allocation."""
        end = self._time + 1
        alive = [(address, lower, end, size) for address, (lower, size) in self._live.items()]
        seen: dict[int, int] = {}
        made = []
        for address, lower, upper, size in sorted([*self._found, *alive], key=lambda one: one[1:3]):
            number = seen[address] = seen.get(address, 0) + 1
            made.append(Buffer(f"{address:#x}" if number == 1 else f"{address:#x}#{number}", lower, upper, size))
        return made

    def _step(self, place: str) -> None:
        self._time += 1
        self._limit(place)

    def _limit(self, place: str) -> None:
        if len(self._found) + len(self._live) >= BUFFERS_MAX:
            raise too_large(place, "buffers", BUFFERS_MAX)
