"""A measured process that is one of several ranks with a model sharded by FSDP2, saved by forged and by torch DCP.

Runs in the peers' environment. The arguments are `RANK WORLD SOCKET COUNT ROWS COLUMNS`: so many layers, with AdamW.
"""

from __future__ import annotations

import hashlib
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import forged.checkpoint as fc
import forged.torch as ft
from benchmarks.ckpt_server import Figures, serve, timed
from benchmarks.ckpt_workload import Workload, workload_from
from benchmarks.group_ranks import GroupRanks

THREADS = 2


class Layer(torch.nn.Module):
    """One matrix."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(shape))


class Rank:
    """The actions on this rank's part of model and optimizer."""

    def __init__(self, rank: int, world: int, socket_path: str, load: Workload) -> None:
        self._rank, self._world, self._socket_path, self._load = rank, world, socket_path, load
        self._ranks: GroupRanks
        self._state: ft.State
        self._digest = ""

    def join(self, _path: Path) -> Figures:
        """Join the process group, and make the state."""
        torch.set_num_threads(1)
        store = dist.FileStore(self._socket_path, self._world)
        dist.init_process_group("gloo", store=store, rank=self._rank, world_size=self._world)
        self._ranks = GroupRanks()
        torch.manual_seed(1)
        model = torch.nn.ModuleList([Layer(self._load.shape) for _ in range(self._load.count)])
        mesh = init_device_mesh("cpu", (self._world,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 0.1
        optimizer.step()
        optimizer.zero_grad()
        self._state = ft.State(model=model, optimizer=optimizer, rng=False)
        self._digest = self._present_digest()
        return {}

    def save_forged(self, path: Path) -> Figures:
        """Save with all ranks."""
        return {"s": timed(lambda: fc.save(path, {"all": self._state}, ranks=self._ranks))[1]}

    def load_forged(self, path: Path) -> Figures:
        """Load with all ranks, into the existing tensors."""
        return {"s": timed(lambda: fc.load(path, into={"all": self._state}, ranks=self._ranks))[1]}

    def save_dcp(self, path: Path) -> Figures:
        """Save with all ranks."""
        writer = FileSystemWriter(path, thread_count=THREADS)
        return {"s": timed(lambda: checkpoint.save(self._tensors(), storage_writer=writer))[1]}

    def load_dcp(self, path: Path) -> Figures:
        """Load with all ranks, into the existing tensors."""
        reader = FileSystemReader(path)
        return {"s": timed(lambda: checkpoint.load(self._tensors(), storage_reader=reader))[1]}

    def forget(self, _path: Path) -> Figures:
        """Fill all tensors with zeros."""
        with torch.no_grad():
            for tensor in self._locals():
                tensor.zero_()
        return {}

    def check(self, _path: Path) -> Figures:
        """Raise unless the state is that which was made."""
        if self._present_digest() != self._digest:
            raise ValueError("what was loaded is not what was saved")
        return {}

    def _tensors(self) -> dict[str, Any]:
        return {"all": self._state.state_dict()}

    def _locals(self) -> list[torch.Tensor]:
        state = self._state.state_dict()
        moments = [value for entry in state["optimizer"]["state"].values() for value in entry.values()]
        tensors = [*state["model"].values(), *moments]
        return [one.to_local() if hasattr(one, "to_local") else one for one in tensors]

    def _present_digest(self) -> str:
        digest = hashlib.blake2b()
        for tensor in self._locals():
            digest.update(tensor.detach().contiguous().numpy().tobytes())
        return digest.hexdigest()


def main() -> None:
    """Serve."""
    warnings.simplefilter("ignore")
    rank, world, socket_path, *arguments = sys.argv[1:]
    one = Rank(int(rank), int(world), socket_path, workload_from(arguments))
    actions = ("join", "save_forged", "load_forged", "save_dcp", "load_dcp", "forget", "check")
    serve({name: getattr(one, name) for name in actions})


if __name__ == "__main__":
    main()
