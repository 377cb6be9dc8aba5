"""One of several ranks that checkpoint with torch together; run in the peers' environment, without anything of forged.

`RANK WORLD MEET COUNT SHAPE...`: each array is a DTensor, of which every rank has some rows.
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

from benchmarks.ckpt_actor import Figures, read_bytes, serve, timed
from benchmarks.ckpt_scene import Load, load_of, rows_of


class Rank:
    """Its part of the state, and what can be done with it."""

    def __init__(self, rank: int, world: int, meet: str, load: Load) -> None:
        self._rank, self._world, self._meet, self._load = rank, world, meet, load
        self._state: dict[str, Any] = {}

    def join(self, _path: Path) -> Figures:
        """Meet the others."""
        dist.init_process_group(
            "gloo", store=dist.FileStore(self._meet, self._world), rank=self._rank, world_size=self._world
        )
        mesh = init_device_mesh("cpu", (self._world,))
        rows, shape = rows_of(self._load.shape[0], self._rank, self._world), torch.Size(self._load.shape)
        for name, array in zip(self._load.names(), self._load.arrays(), strict=True):
            part = torch.from_numpy(array)[rows].clone()
            self._state[name] = DTensor.from_local(
                part, mesh, [Shard(0)], run_check=False, shape=shape, stride=torch.empty(shape, device="meta").stride()
            )
        return {}

    def save(self, path: Path) -> Figures:
        """Save together."""
        writer = FileSystemWriter(path, thread_count=2)
        return {"s": timed(lambda: checkpoint.save(self._state, storage_writer=writer))[1]}

    def load(self, path: Path) -> Figures:
        """Load together, into the arrays that are there."""
        before, reader = read_bytes(), FileSystemReader(path)
        _, spent_s = timed(lambda: checkpoint.load(self._state, storage_reader=reader))
        return {"s": spent_s, "read": read_bytes() - before}


def main() -> None:
    """Serve."""
    warnings.simplefilter("ignore")
    rank, world, meet, *words = sys.argv[1:]
    one = Rank(int(rank), int(world), meet, load_of(words))
    serve({"join": one.join, "save": one.save, "load": one.load})


if __name__ == "__main__":
    main()
