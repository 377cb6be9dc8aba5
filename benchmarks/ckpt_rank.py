"""One of several ranks that checkpoint with forged together.

`RANK WORLD MEET COUNT SHAPE...`: each array is a `ShardedArray`, of which every rank has some rows. They meet at a Unix
socket, MEET, where rank 0 hears all of them and answers.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from benchmarks.ckpt_actor import Figures
from benchmarks.ckpt_ours import Forged, Model, serve_with
from benchmarks.ckpt_scene import Load, load_of, rows_of
from forged.checkpoint import ShardedArray


class Star:
    """Ranks of which all but the first are connected to the first."""

    def __init__(self, rank: int, world_size: int, meet: str) -> None:
        self.rank, self.world_size = rank, world_size
        self._meet = meet
        self._listener = Listener(meet, "AF_UNIX", backlog=world_size) if rank == 0 else None
        self._others: dict[int, Connection] = {}

    def join(self, _path: Path) -> Figures:
        """Be connected."""
        if self._listener is None:
            self._others[0] = Client(self._meet, "AF_UNIX")
            self._others[0].send(self.rank)
            return {}
        for _ in range(1, self.world_size):
            other = self._listener.accept()
            self._others[other.recv()] = other
        return {}

    def barrier(self) -> None:
        """Wait for all."""
        self.broadcast(self.gather(b""))

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        """What all have given, at the first."""
        if self.rank:
            self._others[0].send(value)
            return None
        return [value, *(self._others[rank].recv() for rank in range(1, self.world_size))]

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """What the first has given."""
        if self.rank:
            return self._others[0].recv()
        for other in self._others.values():
            other.send(value)
        return value


def part_of(load: Load, rank: int, world: int) -> dict[str, ShardedArray]:
    """A rank's rows of all arrays."""
    rows = rows_of(load.shape[0], rank, world)
    return {
        name: ShardedArray(array[rows].copy(), load.shape, (rows.start, *(0 for _ in load.shape[1:])))
        for name, array in zip(load.names(), load.arrays(), strict=True)
    }


def main() -> None:
    """Make the part, and serve."""
    rank, world, meet, *words = sys.argv[1:]
    star = Star(int(rank), int(world), meet)
    serve_with(Forged(Model(part_of(load_of(words), star.rank, star.world_size)), star), join=star.join)


if __name__ == "__main__":
    main()
