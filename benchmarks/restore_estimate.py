"""How well the catalogue estimates restores: full and incremental ones of 1 MiB to 1 GiB, from a disk and from memory.

All checkpoints belong to one job. They are restored in random order into existing arrays; local files are not in the
page cache. Before each restore the catalogue estimates it, afterwards it learns how long it took, as the daemon does
when a worker reports a restore. The first round is only learnt from. Hindsight, the reference, is the median of all
other restores of the same checkpoint, also of later ones: it tells how steady the machine is.
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import forged.checkpoint
from benchmarks.ckpt_workload import MIB, drop_page_cache, temporary_directory
from benchmarks.harness import Figure, main
from forged.auth.model import Principal, Role
from forged.catalog.book.catalog_book import CatalogBook
from forged.catalog.book.questions import CatalogQuestions
from forged.catalog.messages import AdoptCheckpoints, AdoptedCheckpoint, ReportRestore, RestoreEstimate, ShowCheckpoint
from forged.catalog.records import Moment
from forged.checkpoint.storage.listing import read_manifest
from forged.checkpoint.storage.locations import storage_at

JOB = "run"
SIZES_MIB = (1, 4, 16, 64, 256, 1024)
ROUNDS = 4
ARRAYS = 16
CHANGED = 4
"""So many of the arrays change between a checkpoint and the incremental one that builds on it."""
SHARE = 0.9
OFF_BY_MAX = 1.4
LOCAL, MEMORY = "local", "memory"
HOLDER = Principal("bench", Role.OPERATOR).holder
NOW = Moment(0.0, 0.0)

State = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint, and arrays to restore it into."""

    folder: str
    prefix: str
    step: int
    parent: str
    """The path of the checkpoint that it builds on; empty for a full one."""
    state: State

    @property
    def path(self) -> str:
        return f"{self.folder}/{self.prefix}"

    @property
    def kind(self) -> str:
        return MEMORY if self.folder.startswith("memory://") else LOCAL

    def restore_s(self) -> float:
        """The seconds of a restore; nothing is in the page cache."""
        if self.kind == LOCAL:
            drop_page_cache(Path(self.folder))
        began = perf_counter()
        forged.checkpoint.load(self.path, into={"model": self.state}, strict=False)
        return perf_counter() - began

    def described(self) -> AdoptedCheckpoint:
        manifest = read_manifest(*storage_at(self.path))
        return AdoptedCheckpoint(
            self.path, manifest.save_id, 0, self.step, manifest.size_bytes, float(self.step), self.parent
        )


def _saved(root: str, sizes_mib: Sequence[int], steps: Iterator[int]) -> Iterator[Saved]:
    """A full checkpoint of each size, and an incremental one that builds on it."""
    source = np.random.default_rng(7)
    for size_mib in sizes_mib:
        folder, each = f"{root}/{size_mib}", size_mib * MIB // ARRAYS
        state = {f"layer.{number}": _noise(source, each) for number in range(ARRAYS)}
        with forged.checkpoint.Checkpoints(folder, incremental=True) as checkpoints:
            for step in (next(steps), next(steps)):
                checkpoints.save(step, state)
                info = checkpoints.latest()
                assert info is not None
                yield Saved(folder, info.prefix, step, f"{folder}/{info.parent}" if info.parent else "", state)
                state |= {f"layer.{number}": _noise(source, each) for number in range(CHANGED)}


def _noise(source: np.random.Generator, size_bytes: int) -> np.ndarray[Any, Any]:
    return np.frombuffer(source.bytes(size_bytes), np.uint8).copy()


@dataclass(frozen=True, slots=True)
class Restore:
    """A restore, and what was expected of it."""

    checkpoint: Saved
    estimate: RestoreEstimate
    actual_s: float

    @property
    def ratio(self) -> float:
        return self.estimate.expected_s / self.actual_s


class Catalogue:
    """What the daemon knows of the checkpoints of the job."""

    def __init__(self, checkpoints: Sequence[Saved]) -> None:
        self._book = CatalogBook(lambda job: {}, defaults={})
        self._questions = CatalogQuestions(self._book)
        self._ids: dict[int, str] = {}
        numbers = count(1)
        for one in checkpoints:
            request = AdoptCheckpoints(JOB, one.folder, [one.described()])
            [decision] = self._book.adoptions.adopt(
                request, lambda: f"ckpt-{next(numbers)}", HOLDER, NOW, is_trusted=True
            )
            [self._ids[one.step]] = decision.reply.adopted

    def restore(self, one: Saved) -> Restore:
        """Estimate a restore, do it, and learn from it."""
        checkpoint_id = self._ids[one.step]
        shown = self._questions.show(ShowCheckpoint(JOB, checkpoint_id), NOW)
        assert shown.estimate is not None
        actual_s = one.restore_s()
        size_bytes = shown.meta.size_bytes
        self._book.restores.restored(ReportRestore(JOB, "", b"", checkpoint_id, one.step, actual_s, size_bytes), NOW)
        return Restore(one, shown.estimate, actual_s)


def _rounds(checkpoints: Sequence[Saved], rounds: int) -> list[Restore]:
    """All restores after the first round."""
    catalogue, order = Catalogue(checkpoints), random.Random(7)
    found: list[Restore] = []
    for number in range(rounds):
        for one in order.sample(checkpoints, len(checkpoints)):
            restore = catalogue.restore(one)
            found += [restore] if number else []
    return found


def _measure(quick: bool) -> Sequence[Figure]:
    sizes, rounds = ((1, 4), 3) if quick else (SIZES_MIB, ROUNDS)
    steps = count(1)
    with temporary_directory() as path:
        checkpoints = [*_saved(str(path), sizes, steps), *_saved("memory://bench", sizes, steps)]
        restores = _rounds(checkpoints, rounds)
    return [
        *_figures("all restores", restores),
        *_figures("from a disk", [one for one in restores if one.checkpoint.kind == LOCAL]),
        *_figures("from memory", [one for one in restores if one.checkpoint.kind == MEMORY]),
        *_figures("incremental ones", [one for one in restores if one.checkpoint.parent]),
    ]


def _figures(name: str, restores: Sequence[Restore]) -> list[Figure]:
    off = _off_by([one.ratio for one in restores])
    steadiness = _off_by(_hindsight(restores))
    said = f"{name}: factor by which {SHARE:.0%} of the estimates are off at most"
    return [
        Figure(f"{said}, against the limit", "", off, OFF_BY_MAX, aim=1.0, higher_is_better=False),
        Figure(f"{said}, against hindsight", "", off, steadiness, higher_is_better=False),
        Figure(f"{name}: estimated / actual, median", "", statistics.median(one.ratio for one in restores)),
    ]


def _off_by(ratios: Sequence[float]) -> float:
    factors = sorted(max(ratio, 1 / ratio) for ratio in ratios)
    return factors[min(len(factors) - 1, int(SHARE * len(factors)))]


def _hindsight(restores: Sequence[Restore]) -> list[float]:
    """The same ratios, of the median of all other restores of the checkpoint."""
    by_step: dict[int, list[float]] = defaultdict(list)
    for one in restores:
        by_step[one.checkpoint.step].append(one.actual_s)
    return [
        statistics.median([*times[:place], *times[place + 1 :]]) / actual_s
        for times in by_step.values()
        for place, actual_s in enumerate(times)
    ]


if __name__ == "__main__":
    main("restore_estimate", _measure)
