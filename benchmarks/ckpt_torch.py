"""A measured process that checkpoints with torch, in an environment without forged."""

from __future__ import annotations

import os
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.ckpt_server import Figures, peak, reset_peak, serve, timed
from benchmarks.ckpt_workload import workload_from

THREADS = 2
HOST = "127.0.0.1"


class Torch:
    """The actions on the state."""

    def __init__(self, arguments: list[str]) -> None:
        load = workload_from(arguments)
        arrays = zip(load.names(), load.arrays(), strict=True)
        self._state: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays}
        self._memory_before = reset_peak()

    def save(self, path: Path) -> Figures:
        """Save durably."""
        return {"s": timed(lambda: checkpoint.save(self._state, storage_writer=_writer(path), no_dist=True))[1]}

    def save_plain(self, path: Path) -> Figures:
        """`torch.save`, then flush the file."""

        def save() -> None:
            with path.open("wb") as file:
                torch.save(self._state, file)
                file.flush()
                os.fsync(file.fileno())

        return {"s": timed(save)[1]}

    def load(self, path: Path) -> Figures:
        """Load into the existing arrays."""
        reader = FileSystemReader(path)
        return {"s": timed(lambda: checkpoint.load(self._state, storage_reader=reader, no_dist=True))[1]}

    def stall_thread(self, path: Path) -> Figures:
        """Save in the background with a thread; measure how long the caller waits, and the whole save."""
        return self._stall(path, _stager(shared=False), no_dist=True)

    def stall_process(self, path: Path) -> Figures:
        """The same with a process and shared memory."""
        _join_alone()
        kind = AsyncCheckpointerType.PROCESS
        return self._stall(path, _stager(shared=True), async_checkpointer_type=kind)

    def _stall(self, path: Path, stager: DefaultStager, **how: Any) -> Figures:
        writer = _writer(path)
        saving, stalled_s = timed(
            lambda: checkpoint.async_save(self._state, storage_writer=writer, async_stager=stager, **how)
        )
        _, rest_s = timed(saving.result)
        return {"s": stalled_s, "all_s": stalled_s + rest_s, "extra": peak() - self._memory_before}


def _writer(path: Path) -> FileSystemWriter:
    return FileSystemWriter(path, thread_count=THREADS)


@cache
def _stager(*, shared: bool) -> DefaultStager:
    """A stager that keeps its memory."""
    return DefaultStager(StagingOptions(False, shared, False, False))  # noqa: FBT003 - its own order


@cache
def _join_alone() -> None:
    """A group of one, which torch's process-based save requires."""
    os.environ["MASTER_ADDR"] = HOST
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def main() -> None:
    """Make the arrays and serve."""
    warnings.simplefilter("ignore")
    torch_ = Torch(sys.argv[1:])
    serve(
        {
            "save": torch_.save,
            "save_plain": torch_.save_plain,
            "load": torch_.load,
            "stall_thread": torch_.stall_thread,
            "stall_process": torch_.stall_process,
        }
    )


if __name__ == "__main__":
    main()
