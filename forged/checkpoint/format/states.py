"""The states of all ranks, with what they have in common told once.

Law: a frame is the tree of a state in which what a rank has for itself is left open, so that ranks whose states are
built alike share it. A frame with a rank's own in its open places is the rank's tree, as it was. No more than one frame
and what is one rank's own is looked at for the tree of a rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, NamedTuple, Self

import msgspec

from forged.checkpoint.format.tree import OWN, Node, map_leaves, value_nodes


class Value(NamedTuple):
    """Something in a state that is no array."""

    name: str
    node: Node
    rank: int
    """A rank that has it: the first one of a frame, or the one whose own it is."""
    is_own: bool


class States(msgspec.Struct, frozen=True, dict=True):
    """The states, by rank."""

    frames: list[Any]
    """Trees with open places, `{"o": number}`; each frame once."""
    frame_of_rank: list[int]
    own: list[list[Any]]
    """By rank, what stands in the open places of its frame."""

    @classmethod
    def of(cls, trees: Iterable[Node]) -> Self:
        """The states that are these trees, by rank."""
        made = cls([], [], [])
        for tree in trees:
            frame, own = split_per_rank(tree)
            made.add_rank(made.frame_number(frame), own)
        return made

    def frame_number(self, frame: Node) -> int:
        """Which of the frames it is; from now on it is one of them."""
        number = self._numbers.setdefault(msgspec.json.encode(frame), len(self.frames))
        if number == len(self.frames):
            self.frames.append(frame)
        return number

    def add_rank(self, frame: int, own: list[Node]) -> None:
        """Take in the next rank."""
        self.frame_of_rank.append(frame)
        self.own.append(own)

    def tree(self, rank: int) -> Node:
        """The state of a rank."""
        found = self._trees.get(rank)
        if found is None:
            found = self._trees.setdefault(rank, merge_per_rank(self.frame(rank), self.own[rank]))
        return found

    @cached_property
    def _trees(self) -> dict[int, Node]:
        """Those that were asked for."""
        return {}

    @cached_property
    def _numbers(self) -> dict[bytes, int]:
        """The frames as texts, in which 1 and true are not the same."""
        return {msgspec.json.encode(frame): number for number, frame in enumerate(self.frames)}

    def frame(self, rank: int) -> Node:
        """The frame of a rank."""
        return self.frames[self.frame_of_rank[rank]]

    def other_frames(self, rank: int) -> list[Node]:
        """The frames that a rank does not have."""
        mine = self.frame_of_rank[rank]
        return [frame for number, frame in enumerate(self.frames) if number != mine]

    def values(self) -> Iterator[Value]:
        """All values that are no arrays: those of each frame once, and those of every rank's own."""
        names: dict[int, list[str]] = {}
        for rank, number in enumerate(self.frame_of_rank):
            if number not in names:
                found = list(value_nodes(self.frames[number]))
                names[number] = [name for name, node in found if OWN in node]
                yield from (Value(name, node, rank, is_own=False) for name, node in found if OWN not in node)
            for name, own in zip(names[number], self.own[rank], strict=True):
                yield from (Value(inner, node, rank, is_own=True) for inner, node in value_nodes(own, name))


def split_per_rank(tree: Node) -> tuple[Node, list[Node]]:
    """The frame of a tree, and what stands in its open places."""
    own: list[Node] = []

    def put(node: Node) -> Node:
        if type(node) is int or "p" not in node:
            return node
        own.append(node["p"])
        return {OWN: len(own) - 1}

    return map_leaves(tree, put), own


def merge_per_rank(frame: Node, own: list[Node]) -> Node:
    """The tree that has such a frame."""
    if not own:
        return frame
    return map_leaves(frame, lambda node: {"p": own[node[OWN]]} if type(node) is dict and OWN in node else node)
