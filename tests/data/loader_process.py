"""`python -m tests.data.loader_process WORKERS`: an epoch through PyTorch's own `DataLoader`, as its samples in a line.

Halfway the world changes, and all ranks continue from a saved state.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, default_collate

from forged.data import Dataset, ElasticSampler

DATASET = Dataset(103, 7)
BATCH, WORLD, NEW_WORLD, STEPS_BEFORE = 10, 2, 3, 4


def or_none(batch: list[Any]) -> Any:
    """What `default_collate` does not take is a batch, too."""
    return default_collate(batch) if batch else None


def sampler(mode: str, world_size: int) -> ElasticSampler:
    made = ElasticSampler(
        DATASET.samples, BATCH, 7, mode=mode, dataset=DATASET if mode == "sharded" else None, drop_last=False
    )
    if mode == "sharded":
        made.reassign(np.arange(DATASET.shards) % world_size, world_size)
    return made


def loaded(made: ElasticSampler, world_size: int, workers: int) -> Iterator[list[list[int]]]:
    """What each rank loads, step by step."""
    loaders = [
        DataLoader(
            range(DATASET.samples),
            batch_sampler=made.for_rank(rank, world_size),
            num_workers=workers,
            collate_fn=or_none,
        )
        for rank in range(world_size)
    ]
    assert {len(loader) for loader in loaders} == {made.steps_left}
    for batches in zip(*loaders, strict=True):
        yield [[] if batch is None else batch.tolist() for batch in batches]


def epoch(mode: str, workers: int) -> list[int]:
    """The samples that count, in the order of steps and ranks."""
    used: list[int] = []
    before, after = sampler(mode, WORLD), sampler(mode, NEW_WORLD)
    # The loader is further than the training, by what it has fetched ahead.
    for _, batches in zip(range(STEPS_BEFORE), loaded(before, WORLD, workers), strict=False):
        used += [sample for batch in batches for sample in batch]
        before.advance()
    after.load_state_dict(before.state_dict())
    for batches in loaded(after, NEW_WORLD, workers):
        used += [sample for batch in batches for sample in batch]
        after.advance()
    assert after.epoch == 1
    return used


if __name__ == "__main__":
    print(json.dumps({mode: epoch(mode, int(sys.argv[1])) for mode in ("shared", "sharded")}))
