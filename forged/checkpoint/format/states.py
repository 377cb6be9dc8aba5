"""The states of all ranks, stored as common frames and values of single ranks.

A frame is a tree with placeholders where each rank has a value of its own (`PerRank`).

Invariants:
- Ranks whose states have the same structure and common values share a frame.
- A frame with a rank's values in its placeholders is exactly that rank's tree.
- To get the tree of a rank, only its frame and its values are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, NamedTuple, Self

import msgspec

from forged.checkpoint.format.tree import OWN, Node, map_leaves, value_nodes


class PlainValue(NamedTuple):
    """A value of a state that is not an array."""

    name: str
    node: Node
    rank: int
    """A rank that has the value: its only one, or the first of its frame."""
    is_own: bool


class States(msgspec.Struct, frozen=True, dict=True):
    """The states by rank."""

    frames: list[Any]
    """Trees with placeholders, `{"o": number}`; no two are equal."""
    frame_of_rank: list[int]
    own: list[list[Any]]
    """By rank, the values for the placeholders of its frame."""

    @classmethod
    def of(cls, trees: Iterable[Node]) -> Self:
        """Build the states from one tree per rank."""
        states = cls([], [], [])
        for tree in trees:
            frame, own = split_per_rank(tree)
            states.add_rank(states.frame_number(frame), own)
        return states

    def frame_number(self, frame: Node) -> int:
        """The number of a frame, which is added if it is new."""
        number = self._numbers.setdefault(msgspec.json.encode(frame), len(self.frames))
        if number == len(self.frames):
            self.frames.append(frame)
        return number

    def add_rank(self, frame: int, own: list[Node]) -> None:
        """Add the next rank."""
        self.frame_of_rank.append(frame)
        self.own.append(own)

    def tree(self, rank: int) -> Node:
        """The tree of a rank."""
        found = self._trees.get(rank)
        if found is None:
            found = self._trees.setdefault(rank, merge_per_rank(self.frame(rank), self.own[rank]))
        return found

    @cached_property
    def _trees(self) -> dict[int, Node]:
        """The trees built so far."""
        return {}

    @cached_property
    def _numbers(self) -> dict[bytes, int]:
        """The frames as text, because 1 and True are equal in Python."""
        return {msgspec.json.encode(frame): number for number, frame in enumerate(self.frames)}

    def frame(self, rank: int) -> Node:
        """The frame of a rank."""
        return self.frames[self.frame_of_rank[rank]]

    def other_frames(self, rank: int) -> list[Node]:
        """The frames of ranks with another structure."""
        own_frame = self.frame_of_rank[rank]
        return [frame for number, frame in enumerate(self.frames) if number != own_frame]

    def values(self) -> Iterator[PlainValue]:
        """All values that are not arrays: of each frame once, and of each rank's own values."""
        names: dict[int, list[str]] = {}
        for rank, number in enumerate(self.frame_of_rank):
            if number not in names:
                found = list(value_nodes(self.frames[number]))
                names[number] = [name for name, node in found if OWN in node]
                yield from (PlainValue(name, node, rank, is_own=False) for name, node in found if OWN not in node)
            for name, own in zip(names[number], self.own[rank], strict=True):
                yield from (PlainValue(inner, node, rank, is_own=True) for inner, node in value_nodes(own, name))


def split_per_rank(tree: Node) -> tuple[Node, list[Node]]:
    """Split a tree into its frame and the values for its placeholders."""
    own: list[Node] = []

    def take_per_rank(node: Node) -> Node:
        if type(node) is int or "p" not in node:
            return node
        own.append(node["p"])
        return {OWN: len(own) - 1}

    return map_leaves(tree, take_per_rank), own


def merge_per_rank(frame: Node, own: list[Node]) -> Node:
    """The tree with this frame and these values."""
    if not own:
        return frame
    return map_leaves(frame, lambda node: {"p": own[node[OWN]]} if type(node) is dict and OWN in node else node)
