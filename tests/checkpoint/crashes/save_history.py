"""A history of saves and deletions on files in memory, and the states that are allowed at any moment.

Invariants:
- A checkpoint whose save was acknowledged exists, whole, until its deletion begins.
- A checkpoint whose deletion was acknowledged is gone for good with all its files.
- In between, and after a failed save, a checkpoint exists whole or not at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np

from forged.checkpoint.checkpoint import DistributedCheckpoint
from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.export import conversion
from forged.checkpoint.format.manifest import TOMBSTONE
from forged.checkpoint.format.tree import flatten
from forged.checkpoint.loading.loader import load_state
from forged.checkpoint.model import CheckpointFormat, PerRank, SaveOptions, ShardedArray
from forged.checkpoint.ports import CancelToken, Storage
from forged.checkpoint.saving.compaction import make_full
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.fault_handler import FaultToleranceHandler
from forged.checkpoint.storage.files import Files
from forged.checkpoint.storage.local import LocalStorage
from forged.retry import RetryPolicy
from tests.checkpoint.fixtures.memory_files import ROOT, WRITTEN_AT, Image, MemoryFiles
from tests.checkpoint.fixtures.rank_group import SimulatedRank, all_ranks

AT = f"{ROOT}/checkpoints"
HALF = -1
"""What is found of a checkpoint that is there and cannot be loaded as it was saved."""
PATIENCE_S = 60.0


def state(version: int, rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    """What is saved: replicated arrays, a sharded one, one of each rank's own, and plain values.

    `same` is the same in all versions, and `slow` in two that follow each other: incremental saves do not write these.
    """
    random = np.random.default_rng(version)
    rows = random.standard_normal((6, 60), dtype=np.float32)
    first, last = rank * 6 // world_size, (rank + 1) * 6 // world_size
    own = np.random.default_rng([version, rank]).integers(0, 1 << 30, 5)
    return {
        "w": random.standard_normal((40, 30), dtype=np.float32),
        "empty": np.zeros((0, 3), np.int64),
        "same": np.arange(50, dtype=np.float32),
        "slow": np.full(50, version // 2, np.float32),
        "rows": ShardedArray(rows[first:last], rows.shape, (first, 0)) if world_size > 1 else rows,
        "step": version,
        "own": PerRank({"numbers": own, "rank": rank}),
    }


@dataclass(slots=True)
class Expectation:
    """What may be found of every checkpoint."""

    certain: dict[str, int] = field(default_factory=dict)
    under_way: dict[str, set[int]] = field(default_factory=dict)
    """What else may be found, because something was begun, or has failed."""

    def note(self, note: str) -> None:
        """Something has happened: `begin`, `end` or `fail`, `save` or `delete`, prefix, version."""
        stage, act, prefix, version = note.split()
        before, after = (0, int(version)) if act == "save" else (int(version), 0)
        match stage:
            case "begin":
                self.under_way[prefix] = self.under_way.get(prefix, set()) | {before, after}
            case "end":
                self.certain[prefix] = after
                self.under_way.pop(prefix, None)

    def allows(self, prefix: str, found: int) -> bool:
        """Whether this may be found; 0 stands for nothing."""
        return found in self.under_way.get(prefix, {self.certain.get(prefix, 0)})

    def gone(self) -> set[str]:
        """The versions with an acknowledged deletion and no files left."""
        return {prefix for prefix, version in self.certain.items() if not version and prefix not in self.under_way}

    def prefixes(self) -> set[str]:
        """All that were ever spoken of."""
        return {*self.certain, *self.under_way}


class Finder:
    """Looks what is in a storage, and remembers what it has seen before."""

    def __init__(self, world_size: int = 1) -> None:
        self._world_size = world_size
        self._seen: dict[Any, int] = {}
        self.opened = 0

    def found(self, image: Image) -> dict[str, int]:
        """The checkpoints on a disk, with the version of each."""
        storage = LocalStorage(AT, files=MemoryFiles(image))
        found = {}
        for prefix in listing.prefixes(storage):
            leads = tuple(f"{AT}/{name}" for name in self._chain(storage, prefix))
            key = tuple((path, data) for path, data in sorted(image.files.items()) if path.startswith(leads))
            if key not in self._seen:
                self._seen[key] = self._version(storage, prefix)
                self.opened += 1
            found[prefix] = self._seen[key]
        return found

    def wrong(self, image: Image, expected: Expectation) -> str:
        """What is found that may not be; nothing when all is well."""
        found = self.found(image)
        for prefix in {*found, *expected.prefixes()}:
            if not expected.allows(prefix, found.get(prefix, 0)):
                return f"{prefix} is {found.get(prefix, 0)}, not {expected.certain} or {expected.under_way}"
        gone = tuple(f"{AT}/{prefix}{rest}" for prefix in expected.gone() for rest in ("/", TOMBSTONE))
        left = [path for path in image.files if path.startswith(gone)]
        return f"of what was deleted there is {left}" if left else ""

    def _chain(self, storage: Storage, prefix: str) -> list[str]:
        """The checkpoint, and those whose files it uses."""
        try:
            links = listing.read_manifest(storage, prefix).links
        except CheckpointException:
            links = []
        return [prefix, *(link.prefix for link in links)]

    def _version(self, storage: Storage, prefix: str) -> int:
        try:
            states = load_all(storage, prefix)
        except CheckpointException:
            return HALF
        version = int(states[0]["step"])
        wanted = [state(version, rank, self._world_size) for rank in range(self._world_size)]
        return version if len(states) == self._world_size and all(map(same, states, wanted)) else HALF


def load_all(storage: Storage, prefix: str) -> list[Any]:
    """The states of all ranks."""
    manifest = listing.read_manifest(storage, prefix)
    world_size = manifest.world_size
    return [
        load_state(storage, manifest, rank=rank, world_size=world_size, threads=1).state["model"]
        for rank in range(world_size)
    ]


def same(found: Any, saved: Any) -> bool:
    """Whether a state that was loaded is the one that was saved, bit for bit."""
    tree, leaves = flatten(found)
    wanted_tree, wanted_leaves = flatten({**saved, "own": saved["own"].value})
    return tree == wanted_tree and all(
        mine.name == its.name
        and mine.array.dtype == its.array.dtype
        and mine.box == its.box
        and mine.array.tobytes() == its.array.tobytes()
        for mine, its in zip(leaves, wanted_leaves, strict=True)
    )


def clear_away(storage: Storage) -> None:
    """Finish deletions that were interrupted, and delete what is left of saves."""
    for prefix in listing.tombstones(storage):
        listing.finish_deletion(storage, prefix)
    for prefix in listing.unfinished_saves(storage):
        listing.delete_unfinished(storage, prefix)


class History:
    """What is done to some files, one thing after the other, by as many ranks as there are."""

    def __init__(
        self,
        memory: MemoryFiles,
        files: Files | None = None,
        world_size: int = 1,
        *,
        retries: int = 0,
        in_background: bool = False,
        timeout_s: float = PATIENCE_S,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.memory = memory
        self.storage: Storage = LocalStorage(AT, files=files or memory, threads=1, wall=lambda: WRITTEN_AT)
        self._world_size = world_size
        self._retry_policy = RetryPolicy(retries + 1, delay_s=0.0)
        self._in_background = in_background
        self._timeout_s = timeout_s
        self._options = options
        self._random = Random(seed)

    def save(self, prefix: str, version: int, base: str | None = None) -> None:
        """Save, and note when that begins and has succeeded."""
        options = SaveOptions(checkpoint_prefix=prefix, include_rng_state=False, base=base, **self._options)

        async def save(checkpoint: DistributedCheckpoint, rank: int) -> None:
            model = state(version, rank, self._world_size)
            if self._in_background:
                await (await checkpoint.save_async(model, options=options)).committed()
            else:
                await checkpoint.save(model, options=options)

        self._act("save", prefix, version, save)

    def delete(self, prefix: str, version: int) -> None:
        """Delete, and note when that begins and has succeeded."""

        async def delete(checkpoint: DistributedCheckpoint, rank: int) -> None:
            await checkpoint.delete_checkpoint(prefix)

        self._act("delete", prefix, version, delete)

    def convert(self, source: str, target: str, version: int) -> None:
        """Make a consolidated checkpoint of another one, in one process, and note it likewise."""
        self.memory.mark(f"begin save {target} {version}")
        with patch.object(conversion, "storage_at", lambda where: (self.storage, where)):
            conversion.convert(
                source, target, conversion.ConversionOptions(CheckpointFormat.CONSOLIDATED, draw=self._random.randbytes)
            )
        self.memory.mark(f"end save {target} {version}")

    def compact(self, prefix: str) -> None:
        """Make a full checkpoint of an incremental one, in one process: it stays what it is meanwhile."""
        make_full(self.storage, prefix, CancelToken(), draw=self._random.randbytes)

    def clear_away(self) -> None:
        """Finish deletions that were interrupted, and delete what is left of saves."""
        clear_away(self.storage)

    def _act(
        self, act: str, prefix: str, version: int, do: Callable[[DistributedCheckpoint, int], Awaitable[None]]
    ) -> None:
        self.memory.mark(f"begin {act} {prefix} {version}")

        async def at_rank(rank: SimulatedRank) -> None:
            faults = FaultToleranceHandler(self.storage, self._retry_policy)
            draw = self._random.randbytes
            async with DistributedCheckpoint(
                rank, self.storage, faults, default_timeout=self._timeout_s, wall=lambda: 0.0, draw=draw
            ) as checkpoint:
                await do(checkpoint, rank.rank)

        outcomes = asyncio.run(all_ranks(self._world_size, at_rank))
        if failures := [outcome for outcome in outcomes if isinstance(outcome, BaseException)]:
            raise failures[0]
        self.memory.mark(f"end {act} {prefix} {version}")


def lives(history: History) -> None:
    """Everything that happens to checkpoints: they come and go, also under a name that had been another's."""
    history.save("a", 1)
    history.save("run/b", 2)
    history.delete("a", 1)
    history.save("a", 3)
    history.delete("run/b", 2)
    history.save("run/c", 4)
    history.convert("run/c", "d", 4)
    history.delete("a", 3)
    history.delete("run/c", 4)


def lives_in_chains(history: History) -> None:
    """Incremental checkpoints come, become full, and go; the files of `a` and `b` are used by later ones."""
    history.save("a", 1)
    history.save("b", 2, base="a")
    history.save("c", 3, base="b")
    assert [link.prefix for link in listing.read_manifest(history.storage, "c").links] == ["a", "b"]
    history.compact("c")
    history.delete("b", 2)
    history.save("d", 4, base="c")
    history.delete("a", 1)
    history.compact("d")
    history.delete("c", 3)


def expected_after(memory: MemoryFiles, certain: Mapping[str, int] | None = None) -> Expectation:
    """What may be found when all has been done that was done to these files."""
    expected = Expectation(dict(certain or {}))
    for operation in memory.operations:
        if operation.kind == "mark":
            expected.note(operation.path)
    return expected
