"""The dataset of the demo as shards: their origin, their directories and their reader.

A sample has the same bytes wherever it is read. A worker reads it from its own directory if its shard is there, else
from the origin.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from forged.data.model import Dataset, DataShard
from forged.data.store.directory import DirectoryShardStore
from forged.data.store.origin import FunctionOrigin
from forged.data.store.port import ShardStore
from forged.data.training import TrainingData
from forged.demo.learning import SAMPLES, Integers, Samples

SHARDS = 48
REPLICATION = 1
DIVISION = Dataset(SAMPLES, SHARDS)
ROW = np.dtype([("point", "<f8", 2), ("label", "<i8")])


def directory_of(directory: Path, worker: str) -> Path:
    """The directory of a worker's shards."""
    return directory / "shards" / worker


def training_data(directory: Path, worker: str, samples: Samples) -> TrainingData:
    """The training data of a worker."""
    origin = FunctionOrigin(lambda shard, file: write_shard(samples, shard, file))
    return TrainingData(SAMPLES, SHARDS, directory_of(directory, worker), origin=origin, replication=REPLICATION)


def write_shard(samples: Samples, shard: DataShard, file: BinaryIO) -> None:
    """Write the bytes of a shard."""
    rows = np.empty(shard.size, ROW)
    rows["point"] = samples.points[shard.start_index : shard.end_index]
    rows["label"] = samples.labels[shard.start_index : shard.end_index]
    file.write(rows.tobytes())


class DatasetReader:
    """Reads samples, and counts those from the worker's own directory."""

    def __init__(self, store: ShardStore, samples: Samples) -> None:
        self.here = 0
        self.elsewhere = 0
        self._store = store
        self._samples = samples

    def read(self, which: Integers) -> Samples:
        """The samples with these indices, in order."""
        rows = np.empty(len(which), ROW)
        shards = DIVISION.shard_of(which)
        for number in np.unique(shards).tolist():
            shard, chosen = DIVISION.shard(number), shards == number
            rows[chosen] = self._rows(shard, int(chosen.sum()))[which[chosen] - shard.start_index]
        return Samples(rows["point"], rows["label"])

    def _rows(self, shard: DataShard, wanted: int) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        if self._store.holds(shard.shard_id):
            self.here += wanted
            return np.frombuffer(held_bytes(self._store, shard.shard_id), ROW)
        self.elsewhere += wanted
        return np.frombuffer(bytes_of(self._samples, shard), ROW)


def held_bytes(store: ShardStore, shard: int) -> bytes:
    """The bytes of a shard in the store."""
    with store.open(shard) as held:
        return os.pread(held.fd, held.stamp.size, 0)


def bytes_of(samples: Samples, shard: DataShard) -> bytes:
    """The bytes of a shard at the origin."""
    file = io.BytesIO()
    write_shard(samples, shard, file)
    return file.getvalue()


def misplaced(directory: Path, owners: Sequence[str], workers: Sequence[str], samples: Samples) -> list[str]:
    """The problems of the shards in the workers' directories, given the owner of each shard."""
    stores: Mapping[str, ShardStore] = {name: DirectoryShardStore(directory_of(directory, name)) for name in workers}
    copies = min(1 + REPLICATION, len(workers))
    problems = [] if len(owners) == SHARDS else [f"the daemon knows the owners of {len(owners)} of {SHARDS} shards"]
    for number, owner in enumerate(owners[:SHARDS]):
        holders = [name for name, store in stores.items() if store.holds(number)]
        if owner not in holders:
            problems.append(
                f"shard {number} is owned by {owner or 'no worker'} and held by {', '.join(holders) or 'no worker'}"
            )
        if len(holders) != copies:
            problems.append(f"shard {number} has {len(holders)} copies, expected {copies}")
        wanted = bytes_of(samples, DIVISION.shard(number))
        problems += [
            f"shard {number} at {name} differs from the origin"
            for name in holders
            if held_bytes(stores[name], number) != wanted
        ]
    return problems
