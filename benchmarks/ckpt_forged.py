"""A measured process that checkpoints with forged.

The arguments `COUNT SHAPE...` describe its arrays. A path names a checkpoint: its directory is the storage, its name
the prefix.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import xxhash

from benchmarks.ckpt_server import Action, Figures, peak, read_bytes, reset_peak, serve
from benchmarks.ckpt_workload import workload_from
from forged.checkpoint import (
    CheckpointOptions,
    DistributedCheckpoint,
    LoadOptions,
    SaveOptions,
    ShardedArray,
    StorageOptions,
    create_checkpoint,
)

Step = Callable[[Path], Awaitable[Figures]]


class Model:
    """Arrays that are saved and loaded in place."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state
        self._expected = self._digest()

    def state_dict(self) -> dict[str, Any]:
        """The arrays themselves."""
        return self._state

    def load_state_dict(self, state: Any) -> None:
        """Nothing to do: the arrays were loaded in place."""

    def forget(self) -> None:
        """Fill the arrays with zeros."""
        for array in self._arrays():
            array.fill(0)

    def check(self) -> None:
        """Raise unless the arrays have their first content."""
        if self._digest() != self._expected:
            raise ValueError("what was loaded is not what was saved")

    def _digest(self) -> bytes:
        seen = xxhash.xxh3_128()
        for array in self._arrays():
            seen.update(array.data)
        return seen.digest()

    def _arrays(self) -> list[Any]:
        return [one.local if isinstance(one, ShardedArray) else one for one in self._state.values()]


class Forged:
    """The actions on a model."""

    def __init__(self, model: Model, coordinator: Any = None) -> None:
        self._model, self._coordinator = model, coordinator
        self._checkpoints: dict[Path, DistributedCheckpoint] = {}
        self._memory_before = reset_peak()

    async def save(self, path: Path) -> Figures:
        """Save durably."""
        start = time.perf_counter()
        await self._in(path.parent).save(self._model, options=SaveOptions(path.name))
        return {"s": time.perf_counter() - start}

    async def load(self, path: Path) -> Figures:
        """Load into the existing arrays."""
        before, start = read_bytes(), time.perf_counter()
        await self._in(path.parent).load(self._model, options=LoadOptions(path.name))
        spent_s = time.perf_counter() - start
        return {"s": spent_s, "read": read_bytes() - before}

    async def prepare(self, path: Path) -> Figures:
        """Allocate the staging memory for saves into the directory."""
        start = time.perf_counter()
        await self._in(path).prepare(self._model)
        return {"s": time.perf_counter() - start}

    async def stall(self, path: Path) -> Figures:
        """Save in the background; measure how long the caller waits, and the whole save."""
        checkpoint, start = self._in(path.parent), time.perf_counter()
        saving = await checkpoint.save_async(self._model, options=SaveOptions(path.name))
        stalled_s = time.perf_counter() - start
        await saving.committed()
        return {"s": stalled_s, "all_s": time.perf_counter() - start, "extra": peak() - self._memory_before}

    async def forget(self, path: Path) -> Figures:
        """Fill the arrays with zeros, so that only a load can restore them."""
        self._model.forget()
        return {}

    async def check(self, path: Path) -> Figures:
        """Check that the arrays are restored bit for bit."""
        self._model.check()
        return {}

    def _in(self, directory: Path) -> DistributedCheckpoint:
        """The checkpoint object for a directory; it keeps its staging memory."""
        if directory not in self._checkpoints:
            where = StorageOptions(connection_settings={"base_path": str(directory)})
            self._checkpoints[directory] = create_checkpoint(self._coordinator, CheckpointOptions(where))
        return self._checkpoints[directory]


def serve_with(forged: Forged, **more: Action) -> None:
    """Serve the actions."""
    steps: tuple[Step, ...] = (forged.save, forged.load, forged.prepare, forged.stall, forged.forget, forged.check)
    with asyncio.Runner() as runner:

        def action(step: Step) -> Action:
            async def act(path: Path) -> Figures:
                return await step(path)

            return lambda path: runner.run(act(path))

        serve({**{step.__name__: action(step) for step in steps}, **more})


def main() -> None:
    """Make the arrays and serve."""
    serve_with(Forged(Model(dict(workload_from(sys.argv[1:]).state()))))


if __name__ == "__main__":
    main()
