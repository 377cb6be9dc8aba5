"""The ranks of a torch process group, as `ranks=` of a save or load with forged."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


class GroupRanks:
    """The ranks of a process group; default: of all processes."""

    def __init__(self, group: Any = None) -> None:
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)

    def barrier(self) -> None:
        dist.barrier(self.group)

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        """The values of all ranks, at the root."""
        found: list[Any] | None = [None] * self.world_size if self.rank == root else None
        dist.gather_object(value, found, group=self.group, group_dst=root)
        return found

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """The value of the root."""
        box = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=root)
        return box[0]
