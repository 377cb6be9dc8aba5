"""Ranks that save, load and send sharded models: `python -m tests.torch.sharded_ranks FOLDER`.

Rank 0 writes found.json: by what was done, the digest of each tensor of model and optimizer as a whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import forged.checkpoint as fc
import forged.torch as ft
from benchmarks.group_ranks import GroupRanks
from forged.worker.state_transfer.encoding import Arriving, pack

PLAIN, FSDP, HSDP, TENSOR_PARALLEL = "plain", "fsdp", "hsdp", "tp"
WORLD = 4


def build(layout: str, ranks: GroupRanks | None) -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    """A model with shapes that no number of ranks divides, but for tensor parallelism."""
    width = 16 if layout == TENSOR_PARALLEL else 33
    model = torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, width), torch.nn.Linear(width, 5)
    ).to(torch.bfloat16)
    model.register_buffer("seen", torch.zeros(3))
    if ranks is not None:
        _shard(model, layout, ranks)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _shard(model: torch.nn.Sequential, layout: str, ranks: GroupRanks) -> None:
    mesh = DeviceMesh.from_group(ranks.group, "cpu")
    if layout != FSDP:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if layout == TENSOR_PARALLEL:
        parallelize_module(model, mesh["shard"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        mesh = mesh["replicate"]
    for layer in model:
        if not isinstance(layer, torch.nn.GELU):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def train(model: torch.nn.Sequential, opt: torch.optim.Optimizer, steps: int) -> None:
    for number in range(steps):
        generator = torch.Generator().manual_seed(number)
        batch = torch.randn(8, model[0].in_features, generator=generator).bfloat16()
        model(batch).square().mean().backward()
        opt.step()
        opt.zero_grad()


def digests(model: torch.nn.Module, opt: torch.optim.Optimizer) -> dict[str, str]:
    tensors = dict(model.state_dict())
    for number, entry in opt.state_dict()["state"].items():
        tensors |= {f"{number}/{name}": value for name, value in entry.items()}
    return {name: digest(value) for name, value in tensors.items()}


def digest(tensor: torch.Tensor) -> str:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return f"{tuple(whole.shape)} {hashlib.sha256(ft.array_of(whole).tobytes()).hexdigest()}"


def saved(layout: str, folder: Path, ranks: GroupRanks) -> dict[str, str]:
    """Train and save; returns the digests of what was saved."""
    torch.manual_seed(0)
    model, opt = build(layout, ranks)
    train(model, opt, 3)
    fc.save(folder / layout, {"all": ft.State(model=model, opt=opt, rng=False)}, ranks=ranks)
    return digests(model, opt)


def loaded(layout: str, folder: Path, name: str, ranks: GroupRanks | None) -> dict[str, str]:
    """Load into a model and an optimizer that has made no step, which then makes one."""
    torch.manual_seed(7)
    model, opt = build(layout, ranks)
    fc.load(folder / name, into={"all": ft.State(model=model, opt=opt, rng=False)}, ranks=ranks)
    found = digests(model, opt)
    train(model, opt, 1)
    return found


def transferred(layout: str, ranks: GroupRanks) -> tuple[dict[str, str], dict[str, str]]:
    """Send each rank's state to another model of the same rank; returns the digests of both."""
    torch.manual_seed(7)
    (model, opt), (other, other_opt) = build(layout, ranks), build(layout, ranks)
    train(model, opt, 2)
    packed = pack(ft.State(model=model, opt=opt))
    arriving = Arriving(packed.head)
    for target, source in zip(arriving.parts, packed.parts, strict=True):
        target[:] = source
    arriving.adopt(ft.State(model=other, opt=other_opt))
    return digests(model, opt), digests(other, other_opt)


def run(rank: int, folder: Path) -> dict[str, Any]:
    """All that the tests look at, in one group of processes, because each import of torch takes seconds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", WORLD), rank=rank, world_size=WORLD)
    everybody, three = GroupRanks(), dist.new_group([0, 1, 2])
    found: dict[str, Any] = {}
    for layout in (FSDP, HSDP, TENSOR_PARALLEL):
        found[f"{layout} saved"] = saved(layout, folder, everybody)
        found[f"{layout} loaded"] = loaded(layout, folder, layout, everybody)
        found[f"{layout} transferred"] = transferred(layout, everybody)
    if rank < 3:
        found["fsdp loaded by three"] = loaded(FSDP, folder, FSDP, GroupRanks(three))
    if rank == 0:
        for layout in (FSDP, HSDP):
            found[f"{layout} loaded by one"] = loaded(PLAIN, folder, layout, None)
        model, opt = build(PLAIN, None)
        train(model, opt, 3)
        fc.save(folder / PLAIN, {"all": ft.State(model=model, opt=opt, rng=False)})
        found["plain saved"] = digests(model, opt)
    model, opt = build(FSDP, everybody)
    train(model, opt, 3)
    dcp.save({"all": ft.State(model=model, opt=opt, rng=False).state_dict()}, checkpoint_id=folder / "dcp")
    found["dcp saved"] = digests(model, opt)
    if rank == 0:
        fc.convert(folder / FSDP, folder / "converted", fc.ConversionOptions(is_torch_directory=True))
    dist.barrier()
    model, opt = build(FSDP, everybody)
    train(model, opt, 1)
    dcp.load({"all": ft.State(model=model, opt=opt, rng=False).state_dict()}, checkpoint_id=folder / "converted")
    found["converted loaded by four"] = digests(model, opt)
    dist.barrier()
    found["plain loaded by four"] = loaded(FSDP, folder, PLAIN, everybody)
    dist.barrier()
    dist.destroy_process_group()
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    children = []
    for rank in range(WORLD):
        child = os.fork()
        if child == 0:
            found = run(rank, folder)
            if rank == 0:
                (folder / "found.json").write_text(json.dumps(found))
            os._exit(0)
        children.append(child)
    sys.exit(any(os.waitpid(child, 0)[1] for child in children))


if __name__ == "__main__":
    main()
