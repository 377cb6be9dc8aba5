"""A measured process that is one of several ranks checkpointing with forged.

The arguments are `RANK WORLD SOCKET COUNT SHAPE...`. Each array is a `ShardedArray` of which every rank has some rows.
The ranks connect through a Unix socket to rank 0.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from benchmarks.ckpt_forged import Forged, Model, serve_with
from benchmarks.ckpt_server import Figures
from benchmarks.ckpt_workload import Workload, rows_of, workload_from
from forged.checkpoint import ShardedArray


class SocketRanks:
    """A coordinator in which all ranks are connected to rank 0."""

    def __init__(self, rank: int, world_size: int, socket_path: str) -> None:
        self.rank, self.world_size = rank, world_size
        self._socket_path = socket_path
        self._listener = Listener(socket_path, "AF_UNIX", backlog=world_size) if rank == 0 else None
        self._connections: dict[int, Connection] = {}

    def join(self, _path: Path) -> Figures:
        """Connect."""
        if self._listener is None:
            self._connections[0] = Client(self._socket_path, "AF_UNIX")
            self._connections[0].send(self.rank)
            return {}
        for _ in range(1, self.world_size):
            connection = self._listener.accept()
            self._connections[connection.recv()] = connection
        return {}

    def barrier(self) -> None:
        self.broadcast(self.gather(b""))

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        """The values of all ranks, at rank 0."""
        if self.rank:
            self._connections[0].send(value)
            return None
        return [value, *(self._connections[rank].recv() for rank in range(1, self.world_size))]

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """The value of rank 0."""
        if self.rank:
            return self._connections[0].recv()
        for connection in self._connections.values():
            connection.send(value)
        return value


def part_of(load: Workload, rank: int, world: int) -> dict[str, ShardedArray]:
    """A rank's rows of all arrays."""
    rows = rows_of(load.shape[0], rank, world)
    return {
        name: ShardedArray(array[rows].copy(), load.shape, (rows.start, *(0 for _ in load.shape[1:])))
        for name, array in zip(load.names(), load.arrays(), strict=True)
    }


def main() -> None:
    """Make the part and serve."""
    rank, world, socket_path, *arguments = sys.argv[1:]
    star = SocketRanks(int(rank), int(world), socket_path)
    serve_with(Forged(Model(part_of(workload_from(arguments), star.rank, star.world_size)), star), join=star.join)


if __name__ == "__main__":
    main()
