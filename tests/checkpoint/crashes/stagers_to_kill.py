"""A warm process that forks stagers to be killed: `python -m tests.checkpoint.crashes.stagers_to_kill`.

An order on its input is the directory of the slots, a seed and the last version that was staged, one line each. A
stager prints `born` with its process, then which version it begins to stage and which it has staged; the warm process
prints `dead` with the reason of the stager's end.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import sys
import traceback
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from forged.checkpoint.checkpoint import DistributedCheckpoint
from forged.checkpoint.model import SaveOptions
from forged.checkpoint.ports import CancelToken, SlotLease, SlotMemory
from forged.checkpoint.rank_group import SingleProcess
from forged.checkpoint.storage.local import LocalStorage
from tests.checkpoint.crashes.savers_to_kill import say

SLOT_BYTES = 48 << 20
NUMBERS = 5_000_000
NAMES = ("0.slot", "1.slot")


def staged_state(version: int) -> dict[str, Any]:
    """What is staged as this version: one to five blocks."""
    return {"bulk": np.full(NUMBERS * (1 + version % 4) // 4, version, np.float32), "version": version}


class OwnSlots:
    """The slots in a directory; the host never persists them."""

    owner = b"own"

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def open(self, size: int, storage: str, token: CancelToken) -> SlotLease:
        assert size <= SLOT_BYTES
        return SlotLease(self.owner, [_mapped(self._directory / name) for name in NAMES], persists=False)

    def persist(self, save_id: str, token: CancelToken) -> int:
        raise AssertionError

    def refusal_of(self, save_id: str) -> None:
        raise AssertionError


class Stager(SingleProcess):
    """Stages one version after the other, until it is killed."""

    def __init__(self, directory: Path, seed: int, version: int) -> None:
        self.slots = OwnSlots(directory)
        self.step = version
        self.generation = 1
        self._random = Random(seed)
        self._storage = LocalStorage(directory / "unused")

    async def live(self) -> None:
        checkpoint = DistributedCheckpoint(self, self._storage)
        while True:
            self.step += 1
            say(f"begin {self.step}")
            assert await checkpoint.keep_in_memory(staged_state(self.step), options=SaveOptions(f"v{self.step}"))
            say(f"staged {self.step}")


def _mapped(path: Path) -> SlotMemory:
    fd = os.open(path, os.O_RDWR)
    return SlotMemory(mmap.mmap(fd, SLOT_BYTES), fd)


def main() -> None:
    """Fork one stager per order, and wait for its end."""
    for line in sys.stdin:
        directory, seed, version = line.rstrip("\n").rsplit(" ", 2)
        stager = os.fork()
        if stager == 0:
            say(f"born {os.getpid()}")
            try:
                asyncio.run(Stager(Path(directory), int(seed), int(version)).live())
            except BaseException:  # noqa: BLE001 - it is told what it was, and that it was no kill
                traceback.print_exc()
            os._exit(1)
        say(f"dead {os.waitstatus_to_exitcode(os.waitpid(stager, 0)[1])}")


if __name__ == "__main__":
    main()
