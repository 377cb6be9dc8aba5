"""Searches the offsets of buffers within a capacity: depth first, from low offsets to high ones.

Every packing can be lowered until each buffer is at 0 or on top of another one, and buffers can be placed in the order
of their offsets. So a node has for each buffer that is not placed the lowest offset that the placed ones leave to it,
`lowest`; the next buffer is placed there, and not below the one before. A node is given up if:

- a buffer that is left would fit entirely below the next one (then that buffer comes first);
- in a section the buffers that are left do not fit above their lowest offsets.

Buffers that are not alive together are searched apart from each other. The order in which equally low buffers are tried
decides whether a search takes a thousand nodes or a billion, so it is cut off soon and another order is tried; the
orders follow from a fixed sequence of weights, and the same trace has the same packing everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from forged.memory.traces.lifetimes import Integers, Lifetimes

NODES_PER_ORDER = 1_200
NODES_PER_BUFFER = 6
"""An order has at least so many nodes for each buffer: the way down to a packing is one for each."""
CELLS_PER_NODE = 20_000
"""A node with more buffers times sections counts as several, so that a budget is about the same time for all traces."""
ORDERS_PER_ROUND = 200
"""So many orders with a limit of nodes before the limit is doubled."""
STEPS = (0.8566748838545029, 0.733891856627126, 0.6287067210378087, 0.5385972572236101)
"""Powers of the inverse of the root of x**5 = x + 1: their multiples modulo 1 fill the space of weights evenly."""

SCATTERS = (0.0, 0.35, 1.0)
"""How much the scores of similar buffers differ, in turns."""


class Outcome(Enum):
    FOUND = "found"
    IMPOSSIBLE = "impossible"
    UNKNOWN = "unknown"
    """The nodes are used up."""


@dataclass(slots=True)
class _Node:
    """Buffers that are to be placed together, and what is left to try of them."""

    ids: Integers
    lowest: Integers
    floor: tuple[int, int]
    """Offset and rank of the buffer placed last: the next one has none lower."""
    candidates: Iterator[int]
    parts: list[tuple[Integers, Integers]] = field(default_factory=list)
    """What is still to be searched below the candidate placed now."""
    part_floor: tuple[int, int] = (0, -1)


class PackingSearch:
    """The search of one group of buffers; `offsets` is complete once it is found."""

    def __init__(self, lifetimes: Lifetimes, ids: Integers, capacity: int) -> None:
        self._first = lifetimes.first[ids] - lifetimes.first[ids].min()
        self._last = lifetimes.last[ids] - lifetimes.first[ids].min()
        self._sizes = lifetimes.sizes[ids]
        self._capacity = capacity
        sections = np.arange(self._last.max())
        is_alive = (sections >= self._first[:, None]) & (sections < self._last[:, None])
        self._live_sizes: Integers = np.where(is_alive, self._sizes[:, None], 0)
        self._together = (self._first[:, None] < self._last) & (self._first < self._last[:, None])
        np.fill_diagonal(self._together, val=False)
        self._features = self._measure(lifetimes.durations[ids])
        self._ranks = np.arange(len(ids))
        self.offsets: Integers = np.zeros_like(self._sizes)
        self.nodes = 0
        """What was visited so far; large nodes count as several."""
        self._visited = 0

    def run(self, nodes_max: int) -> Outcome:
        """Search with one order after the other."""
        limit = max(NODES_PER_ORDER, NODES_PER_BUFFER * len(self._sizes))
        order = 0
        while self.nodes < nodes_max:
            self._rank(order)
            outcome = self._run_once(self._visited + limit, nodes_max)
            if outcome is not Outcome.UNKNOWN:
                return outcome
            order += 1
            limit *= 1 if order % ORDERS_PER_ROUND else 2
        return Outcome.UNKNOWN

    def _measure(self, durations: Integers) -> Integers:
        """What a buffer is ranked by: how scarce memory is in its life, durations, sections, and size."""
        live = np.add.reduce(self._live_sizes, axis=0)
        scarcity = [
            float(live[first:last].max()) / self._capacity for first, last in zip(self._first, self._last, strict=True)
        ]
        columns = [
            3 * np.array(scarcity),
            np.log(durations),
            np.log(self._sizes.astype(float)),
            np.log(self._last - self._first),
        ]
        return np.stack([column / (column.std() or 1.0) for column in columns])

    def _rank(self, order: int) -> None:
        weights = np.array([(step * (order + 1)) % 1.0 for step in STEPS])
        scatter = np.arange(len(self._ranks)) * (order + 1) * STEPS[0] % 1.0 * SCATTERS[order % len(SCATTERS)]
        scores = np.round(weights @ self._features + scatter, 6)
        self._ranks[np.argsort(-scores, kind="stable")] = np.arange(len(scores))

    def _run_once(self, visited_max: int, nodes_max: int) -> Outcome:
        ids = np.argsort(self._first, kind="stable")
        path = [self._node(ids, np.zeros_like(self._sizes), (0, -1))]
        is_packed: bool | None = None
        """Whether the node above the present one in the path is; None before it was searched."""
        while path:
            node = path[-1]
            if self._visited >= visited_max or self.nodes >= nodes_max:
                return Outcome.UNKNOWN
            if not is_packed and not self._place_next(node):
                path.pop()
                is_packed = False
            elif node.parts:
                path.append(self._node(*node.parts.pop(), node.part_floor))
                is_packed = None
            else:
                path.pop()
                is_packed = True
        return Outcome.FOUND if is_packed else Outcome.IMPOSSIBLE

    def _node(self, ids: Integers, lowest: Integers, floor: tuple[int, int]) -> _Node:
        """A node with its candidates, the lowest first."""
        top = (lowest + self._sizes[ids]).min()
        offset, rank = floor
        ranks = self._ranks[ids]
        is_next = (lowest < top) & ((lowest > offset) | ((lowest == offset) & (ranks > rank)))
        candidates = sorted(np.flatnonzero(is_next).tolist(), key=lambda at: (lowest[at], ranks[at]))
        return _Node(ids, lowest, floor, iter(candidates))

    def _place_next(self, node: _Node) -> bool:
        """Place the next candidate after which the others may fit; False if there is none."""
        cells = len(node.ids) * int(self._last[node.ids].max() - self._first[node.ids[0]])
        for at in node.candidates:
            self._visited += 1
            self.nodes += 1 + cells // CELLS_PER_NODE
            buffer, offset = node.ids[at], int(node.lowest[at])
            end = offset + int(self._sizes[buffer])
            if end > self._capacity:
                continue
            raised = np.where(self._together[buffer][node.ids], np.maximum(node.lowest, end), node.lowest)
            is_left = np.arange(len(node.ids)) != at
            parts = self._parts(node.ids[is_left], raised[is_left])
            floor = offset, int(self._ranks[buffer])
            if all(self._may_fit(ids, self._bounds(ids, lowest, floor)) for ids, lowest in parts):
                self.offsets[buffer] = offset
                node.parts = sorted(parts, key=lambda part: -len(part[0]))
                node.part_floor = floor
                return True
        return False

    def _parts(self, ids: Integers, lowest: Integers) -> list[tuple[Integers, Integers]]:
        """The buffers in groups that are not alive together; `ids` are in the order of their first sections."""
        if not len(ids):
            return []
        ends = np.maximum.accumulate(self._last[ids])
        cuts = np.flatnonzero(ends[:-1] <= self._first[ids][1:]) + 1
        if not len(cuts):
            return [(ids, lowest)]
        return list(zip(np.split(ids, cuts), np.split(lowest, cuts), strict=True))

    def _bounds(self, ids: Integers, lowest: Integers, floor: tuple[int, int]) -> Integers:
        """Below which no packing has these buffers, given the one that was placed last.

        A buffer that was not placed when it was its turn must be on top of one that is not placed yet.
        """
        offset, rank = floor
        bounds = np.maximum(lowest, offset)
        passed = np.flatnonzero((lowest < offset) | ((lowest == offset) & (self._ranks[ids] < rank)))
        if len(passed):
            ends = bounds + self._sizes[ids]
            below = np.where(self._together[ids[passed]][:, ids], ends, self._capacity + 1).min(axis=1)
            bounds[passed] = np.maximum(bounds[passed], below)
        return bounds

    def _may_fit(self, ids: Integers, bounds: Integers) -> bool:
        """Whether in each section, for each bound, all that is above the bound fits between it and the capacity."""
        order = np.argsort(-bounds, kind="stable")
        first, last = int(self._first[ids].min()), int(self._last[ids].max())
        above = np.add.accumulate(self._live_sizes[ids[order], first:last], axis=0)
        above += bounds[order][:, None]
        return int(above.max()) <= self._capacity
