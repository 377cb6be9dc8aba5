"""A warm process that forks savers to be killed: `python -m tests.checkpoint.crashes.savers_to_kill`.

An order on its input is the directory of the checkpoints, a seed and the first version to save, one line each. A saver
prints `born` with its process, then what it begins, what it has done and what has failed, as `history.Expectation`
notes it; the warm process prints `dead` with the reason of the saver's end.
"""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from forged.checkpoint.checkpoint import DistributedCheckpoint
from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.export.conversion import ConversionOptions, convert
from forged.checkpoint.model import CheckpointFormat, CompressionLevel, SaveOptions
from forged.checkpoint.ports import CancelToken
from forged.checkpoint.saving.compaction import make_full
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.ancestry import NEEDED
from forged.checkpoint.storage.local import LocalStorage
from tests.checkpoint.crashes.save_history import clear_away, load_all, state

STDOUT = 1
PREFIXES = ("a", "b", "run/c", "run/d", "e")
FORMATS = tuple(CheckpointFormat)
LEVELS = (CompressionLevel.NONE, CompressionLevel.NONE, CompressionLevel.FAST)
BULK = 700_000
"""Numbers in the larger states: several blocks on their way to the disk."""


def saved_state(version: int) -> dict[str, Any]:
    """What is saved as this version; some of it is the same in all versions."""
    return {
        **state(version),
        "bulk": np.full(version % 4 * BULK, version, np.float32),
        "kept": np.arange(BULK, dtype=np.float32),
    }


class KillableSaver:
    """Saves, converts, compacts and deletes, until it is killed."""

    def __init__(self, directory: Path, seed: int, version: int) -> None:
        self._directory = directory
        self._storage = LocalStorage(directory)
        self._random = Random(seed)
        self._version = version

    async def live(self) -> None:
        """One thing after the other."""
        async with DistributedCheckpoint(None, self._storage) as checkpoint:
            if self._random.random() < 0.7:
                clear_away(self._storage)
            while True:
                there = listing.prefixes(self._storage)
                prefix = self._random.choice(PREFIXES)
                if there and self._random.random() < 0.2:
                    make_full(self._storage, self._random.choice(there), CancelToken())
                elif prefix in there:
                    await self._delete(checkpoint, prefix)
                elif there and self._random.random() < 0.3:
                    await self._convert(self._random.choice(there), prefix)
                else:
                    folder = prefix.rpartition("/")[0]
                    bases = [one for one in there if one.rpartition("/")[0] == folder]
                    await self._save(checkpoint, prefix, self._random.choice([None, *bases]))

    async def _save(self, checkpoint: DistributedCheckpoint, prefix: str, base: str | None) -> None:
        self._version += 1
        model = saved_state(self._version)
        layout = self._random.choice(FORMATS) if base is None else CheckpointFormat.MULTI_SHARD
        options = SaveOptions(prefix, layout, self._random.choice(LEVELS), base=base)
        say(f"begin save {prefix} {self._version}")
        try:
            if self._random.random() < 0.5:
                await checkpoint.save(model, options=options)
            else:
                await (await checkpoint.save_async(model, options=options)).committed()
        except CheckpointException as error:
            self._go_on("save", prefix, self._version, error)
        else:
            say(f"end save {prefix} {self._version}")

    async def _convert(self, source: str, prefix: str) -> None:
        version = int(load_all(self._storage, source)[0]["step"])
        how = ConversionOptions(self._random.choice(FORMATS), self._random.choice(LEVELS))
        say(f"begin save {prefix} {version}")
        try:
            convert(self._directory / source, self._directory / prefix, how)
        except CheckpointException as error:
            self._go_on("save", prefix, version, error)
        else:
            say(f"end save {prefix} {version}")

    async def _delete(self, checkpoint: DistributedCheckpoint, prefix: str) -> None:
        version = int(load_all(self._storage, prefix)[0]["step"])
        say(f"begin delete {prefix} {version}")
        try:
            await checkpoint.delete_checkpoint(prefix)
        except CheckpointException as error:
            if error.code != NEEDED:
                raise
            say(f"fail delete {prefix} {version}")
            return
        say(f"end delete {prefix} {version}")

    def _go_on(self, act: str, prefix: str, version: int, error: CheckpointException) -> None:
        """Only files of a killed saver may be in the way."""
        if error.code not in {"checkpoint_exists", "checkpoint_being_deleted"}:
            raise error
        say(f"fail {act} {prefix} {version}")
        clear_away(self._storage)


def say(line: str) -> None:
    """One line, in one write."""
    os.write(STDOUT, f"{line}\n".encode())


def main() -> None:
    """Fork one saver per order, and wait for its end."""
    for line in sys.stdin:
        directory, seed, version = line.rstrip("\n").rsplit(" ", 2)
        saver = os.fork()
        if saver == 0:
            say(f"born {os.getpid()}")
            try:
                asyncio.run(KillableSaver(Path(directory), int(seed), int(version)).live())
            except BaseException:  # noqa: BLE001 - it is told what it was, and that it was no kill
                traceback.print_exc()
            os._exit(1)
        say(f"dead {os.waitstatus_to_exitcode(os.waitpid(saver, 0)[1])}")


if __name__ == "__main__":
    main()
