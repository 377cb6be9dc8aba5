"""How fast samples of a million million are named, against numpy's table of ten million.

A permutation without a table is computed index by index, a step's batch at a time; numpy's is made as a whole. What it
takes in memory, besides the samples that it names, is compared with what the same takes for a million samples.
"""

from __future__ import annotations

import tracemalloc
from functools import partial
from time import perf_counter

import numpy as np

from benchmarks.harness import Figure, interleaved, main
from forged.data.model import Dataset
from forged.data.permutation import Permutation
from forged.data.sampling.sampler import ElasticSampler

TOTAL = 10**12
WORST_TOTAL = 2**40 + 1
"""Just too large for its number of bits: half of what is computed falls beyond the end."""
TABLE = 10**7
BATCH = 1 << 16
WORLD_SIZE = 8
SHARDS = 10_000
ROUNDS = 5


def _named_per_s(total: int, indices: int) -> float:
    """Millions of indices in a second, in batches from the middle of the epoch."""
    order, middle = Permutation(total, 7, 0), total // 2
    began = perf_counter()
    for start in range(middle, middle + indices, BATCH):
        order.span(start, min(start + BATCH, middle + indices))
    return indices / (perf_counter() - began) / 1e6


def _tabled_per_s() -> float:
    generator = np.random.default_rng(7)
    began = perf_counter()
    generator.permutation(TABLE)
    return TABLE / (perf_counter() - began) / 1e6


def _sampled_per_s(sampler: ElasticSampler, steps: int) -> float:
    """Millions of samples in a second that one rank is given, step by step."""
    samples = 0
    began = perf_counter()
    for step in range(steps):
        samples += len(sampler.batch(step % WORLD_SIZE, WORLD_SIZE))
        sampler.advance()
    return samples / (perf_counter() - began) / 1e6


def _sharded() -> ElasticSampler:
    sampler = ElasticSampler(TOTAL, BATCH * WORLD_SIZE, 7, mode="sharded", dataset=Dataset(TOTAL, SHARDS))
    sampler.reassign(np.arange(SHARDS) % WORLD_SIZE, WORLD_SIZE)
    return sampler


def _memory_kib(total: int) -> float:
    """The most memory that is taken while a million samples are named."""
    count = min(total, 1_000_000)
    tracemalloc.start()
    try:
        Permutation(total, 7, 0).span(0, count)
        return tracemalloc.get_traced_memory()[1] / 1024
    finally:
        tracemalloc.stop()


def measure(quick: bool) -> list[Figure]:
    """Speeds in turns, then memory."""
    indices, steps = (TABLE // 100, 10) if quick else (TABLE, TABLE // BATCH)
    found = interleaved(
        1 if quick else ROUNDS,
        {
            "permutation": partial(_named_per_s, TOTAL, indices),
            "worst": partial(_named_per_s, WORST_TOTAL, indices),
            "numpy": _tabled_per_s,
            "shared": lambda: _sampled_per_s(ElasticSampler(TOTAL, BATCH * WORLD_SIZE, 7), steps),
            "sharded": lambda: _sampled_per_s(_sharded(), steps),
        },
    )
    titles = {
        "worst": "indices of 2^40 + 1, where half are computed twice",
        "shared": "a rank's batches of 10^12, shared",
        "sharded": "a rank's batches of 10^12, sharded",
    }
    return [
        Figure("indices of 10^12, against a table of 10^7", "M/s", found["permutation"], found["numpy"], aim=1.0),
        *(Figure(title, "M/s", found[name], found["numpy"]) for name, title in titles.items()),
        Figure(
            "memory for 10^6 samples of 10^12, against of 10^6",
            "KiB",
            _memory_kib(TOTAL),
            _memory_kib(10**6),
            aim=0.95,
            higher_is_better=False,
        ),
    ]


if __name__ == "__main__":
    main("sampler", measure)
