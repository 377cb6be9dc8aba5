"""A measured process that is one of several ranks checkpointing with torch, in an environment without forged.

The arguments are `RANK WORLD SOCKET COUNT SHAPE...`. Each array is a DTensor of which every rank has some rows.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.ckpt_server import Figures, read_bytes, serve, timed
from benchmarks.ckpt_workload import Workload, rows_of, workload_from


class Rank:
    """The actions on this rank's part of the state."""

    def __init__(self, rank: int, world: int, socket_path: str, load: Workload) -> None:
        self._rank, self._world, self._socket_path, self._load = rank, world, socket_path, load
        self._state: dict[str, Any] = {}

    def join(self, _path: Path) -> Figures:
        """Join the process group."""
        dist.init_process_group(
            "gloo", store=dist.FileStore(self._socket_path, self._world), rank=self._rank, world_size=self._world
        )
        mesh = init_device_mesh("cpu", (self._world,))
        rows, shape = rows_of(self._load.shape[0], self._rank, self._world), torch.Size(self._load.shape)
        for name, array in zip(self._load.names(), self._load.arrays(), strict=True):
            part = torch.from_numpy(array)[rows].clone()
            self._state[name] = DTensor.from_local(
                part,
                mesh,
                [Shard(0)],
                run_check=False,
                shape=shape,
                stride=torch.empty(shape, device="meta").stride(),
            )
        return {}

    def save(self, path: Path) -> Figures:
        """Save with all ranks."""
        writer = FileSystemWriter(path, thread_count=2)
        return {"s": timed(lambda: checkpoint.save(self._state, storage_writer=writer))[1]}

    def load(self, path: Path) -> Figures:
        """Load with all ranks, into the existing arrays."""
        before, reader = read_bytes(), FileSystemReader(path)
        _, spent_s = timed(lambda: checkpoint.load(self._state, storage_reader=reader))
        return {"s": spent_s, "read": read_bytes() - before}


def main() -> None:
    """Serve."""
    warnings.simplefilter("ignore")
    rank, world, socket_path, *arguments = sys.argv[1:]
    one = Rank(int(rank), int(world), socket_path, workload_from(arguments))
    serve({"join": one.join, "save": one.save, "load": one.load})


if __name__ == "__main__":
    main()
