"""Incremental checkpoints: a durable save when 5 % of the chunks have changed, against a full save.

And a restore from a chain of ten checkpoints, against that of a full one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import numpy as np

import forged.checkpoint
from benchmarks.ckpt_comparison import Comparison, Scale, measured_rounds, run
from benchmarks.ckpt_workload import Arrays, fill_page_cache, temporary_directory
from benchmarks.harness import Figure
from forged.checkpoint import BlockingCheckpoint, DistributedCheckpoint, SaveOptions
from forged.checkpoint.format.boxes import chunks, grid_of, whole
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.local import LocalStorage

CHAIN = 10
EVERY = 20
"""One chunk in so many changes at each step: 5 %."""
SAVE_AIM = 8.0
RESTORE_AIM = 1 / 1.2


class Run:
    """A state that changes, and its checkpoints in a directory."""

    def __init__(self, path: Path, state: Arrays) -> None:
        self._path = path
        self._state = state
        self._storage = LocalStorage(path)
        self._checkpoint = BlockingCheckpoint(DistributedCheckpoint(None, self._storage))
        self._room = {name: np.zeros_like(array) for name, array in state.items()}
        self._steps = count()
        self._firsts = list(_firsts(state))

    def change(self) -> None:
        """Change 5 % of the chunks, others at each step."""
        for name, row in self._firsts[next(self._steps) % EVERY :: EVERY]:
            self._state[name].view(np.uint32)[row] += 1

    def save(self, name: str, base: str | None) -> float:
        """Seconds for a durable save."""
        start = time.perf_counter()
        options = SaveOptions(name, base=base, chain_max=CHAIN + 1, include_rng_state=False)
        self._checkpoint.save(self._state, options=options)
        return time.perf_counter() - start

    def save_changes(self) -> float:
        """Seconds for a save that builds on the checkpoint of the step before."""
        self.save("before", None)
        self.change()
        return self._deleted(self.save("after", "before"), "after", "before")

    def save_all(self) -> float:
        """Seconds for a full save."""
        return self._deleted(self.save("after", None), "after")

    def _deleted(self, seconds: float, *names: str) -> float:
        for name in names:
            listing.delete(self._storage, name)
        return seconds

    def load(self, name: str, files: list[str]) -> float:
        """Seconds for a verified load into arrays, with all files in the page cache."""
        for file in files:
            fill_page_cache(self._path / file)
        start = time.perf_counter()
        forged.checkpoint.load(self._path / name, into={"model": self._room})
        seconds = time.perf_counter() - start
        for key, array in self._state.items():
            assert np.array_equal(self._room[key].view(np.uint32), array.view(np.uint32))
        return seconds


def _firsts(state: Arrays) -> Iterator[tuple[str, int]]:
    """The first row of each chunk of all arrays."""
    for name, array in state.items():
        for box in chunks(whole(array.shape), grid_of(array.shape, array.itemsize)):
            yield name, box.offset[0]


def measure(scale: Scale) -> list[Figure]:
    """All rows."""
    with temporary_directory() as path:
        subject = Run(path, scale.large.state())
        saved = measured_rounds(scale.rounds, {"ours": subject.save_changes, "full": subject.save_all})
        names = [f"c{number}" for number in range(CHAIN)]
        for name, base in zip(names, [None, *names], strict=False):
            subject.change()
            subject.save(name, base)
        subject.save("full", None)
        loads: dict[str, Callable[[], float]] = {
            "ours": lambda: subject.load(names[-1], names),
            "full": lambda: subject.load("full", ["full"]),
        }
        loaded = measured_rounds(scale.rounds, loads)
        size = f"{scale.large.gib:.3g} GiB"
        saves = Comparison(f"save, {size}, 5 % of the chunks changed", saved["ours"])
        restores = Comparison(f"load, {size} from a chain of {CHAIN}", loaded["ours"])
        return [
            *saves.against("a full save", saved["full"], SAVE_AIM),
            *restores.against("a full checkpoint", loaded["full"], RESTORE_AIM),
        ]


if __name__ == "__main__":
    run("incremental", measure)
