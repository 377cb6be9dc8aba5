"""DistributedDataParallel over the worlds of a run, and gradients that are averaged without it.

Invariants:
- The gradient is the mean over the samples of all ranks, also where their parts of the global batch differ in size.
- The names in `state_dict` are those of the wrapped module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from forged.errors import RequestRefused

BUCKET_BYTES = 25 << 20
BACKWARD, GRADIENTS = "backward", "gradients"
"""The names of the meetings of the ranks."""


class World(Protocol):
    """What the reduction of gradients needs of a run."""

    @property
    def group(self) -> Any:
        """The process group of the world."""

    @property
    def world_size(self) -> int: ...

    @property
    def weight(self) -> float | None:
        """This rank's part of the samples of the step; None if all ranks have equally many."""

    def meet(self, name: str) -> None:
        """The ranks wait for each other from here to the commit of the step."""


class ElasticDDP(torch.nn.Module):
    """A module whose gradients all ranks of the present world average; made by `run.ddp(module)`."""

    def __init__(self, module: torch.nn.Module, world: World, *, has_equal_state: bool, **options: Any) -> None:
        """`has_equal_state`: whether all ranks have the same parameters already, so that none need be sent."""
        super().__init__()
        import_dynamo()
        self.module = module
        self._world = world
        self._options = {"init_sync": not has_equal_state, **options}
        # In a list, so that it is no submodule: its names would be in `state_dict`.
        self._wrapped: list[DistributedDataParallel] = []

    def enter_world(self) -> None:
        """Wrap the module for the present world; all ranks do so together."""
        self._wrapped.clear()
        wrapped = DistributedDataParallel(self.module, process_group=self._world.group, **self._options)
        # Without annotations, which torch would compare, and which are texts here.
        wrapped.register_comm_hook(None, lambda _, bucket: self._reduced(bucket))
        self._wrapped.append(wrapped)

    def leave_world(self) -> None:
        """Let go of what belongs to the world's process group."""
        self._wrapped.clear()

    @property
    def distributed(self) -> DistributedDataParallel:
        """The module as it is wrapped in the present world."""
        if not self._wrapped:
            raise RequestRefused(
                "group_missing",
                "the wrapped module was called outside a world",
                "call it in a step; outside, call the module that was given to `run.ddp`",
            )
        return self._wrapped[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output; its gradients are averaged in the backward pass."""
        wrapped = self.distributed
        wrapped.training = self.training
        return wrapped(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Only add gradients up inside the block, as long as more parts of the step's batch follow."""
        context: AbstractContextManager[None] = self.distributed.no_sync()
        return context

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of the wrapped module."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load the state of the wrapped module."""
        return self.module.load_state_dict(state, *args, **kwargs)

    def _reduced(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self._world.meet(BACKWARD)
        gradients = bucket.buffer()
        _weigh(gradients, self._world)
        work = dist.all_reduce(gradients, group=self._world.group, async_op=True)
        return work.get_future().then(lambda reduced: reduced.value()[0])


def import_dynamo() -> None:
    """Import what wrapping a module, and the first optimizer, would import in a world, where the other ranks wait.

    It takes as long as torch itself, so scripts that need neither in a world are spared it.
    """
    import_module("torch._dynamo")


def all_reduce_gradients(model: torch.nn.Module | Iterable[torch.nn.Parameter], run: World) -> None:
    """Average the gradients of a module, or of these parameters, over all ranks, in buckets; for scripts without DDP.

    Call it after `backward` and before `step.commit()`. A parameter that no rank has used keeps no gradient.
    """
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else model
    trained = [one for one in parameters if one.requires_grad]
    run.meet(GRADIENTS)
    is_used = torch.tensor([float(one.grad is not None) for one in trained])
    # NCCL reduces tensors of devices only.
    is_used = is_used.to(trained[0].device) if trained else is_used
    dist.all_reduce(is_used, group=run.group)
    used = [one for one, count in zip(trained, is_used.tolist(), strict=True) if count]
    for one in used:
        if one.grad is None:
            one.grad = torch.zeros_like(one)
    reducing = []
    for bucket in _buckets(used):
        gradients = [one.grad for one in bucket]
        flat = torch._utils._flatten_dense_tensors(gradients)
        _weigh(flat, run)
        reducing.append((gradients, flat, dist.all_reduce(flat, group=run.group, async_op=True)))
    for gradients, flat, work in reducing:
        work.wait()
        for gradient, mean in zip(gradients, torch._utils._unflatten_dense_tensors(flat, gradients), strict=True):
            gradient.copy_(mean)


def _weigh(gradients: torch.Tensor, world: World) -> None:
    """Scale the mean of this rank so that the sum over the ranks is the mean of all samples."""
    weight = world.weight
    if weight is None:
        gradients.div_(world.world_size)
    else:
        gradients.mul_(weight)


def _buckets(parameters: Iterable[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """Parameters whose gradients are reduced at once: of one type and device, and of limited size."""
    filling: dict[Any, list[torch.nn.Parameter]] = {}
    sizes: dict[Any, int] = {}
    for one in parameters:
        key = (one.grad.dtype, one.grad.device)
        filling.setdefault(key, []).append(one)
        sizes[key] = sizes.get(key, 0) + one.grad.nbytes
        if sizes[key] >= BUCKET_BYTES:
            yield filling.pop(key)
            sizes[key] = 0
    yield from filling.values()
