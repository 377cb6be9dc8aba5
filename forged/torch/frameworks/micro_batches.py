"""A worker's part of a step, as micro-batches that fit into its memory.

Invariants:
- The samples of a step depend on `global_batch` and not on the number of workers: a worker with a larger part
  accumulates gradients over more micro-batches.
- All ranks of a step have equally many micro-batches, so that collectives of a forward pass match.
- The weights of all micro-batches of all ranks add up to one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from forged.torch.loader import Loader
from forged.torch.run import Run


class MicroBatch(NamedTuple):
    """Some samples of a step."""

    batch: Any
    """What the `collate_fn` has made of them."""
    weight: float
    """Their part of all samples of the step; 0 of samples that count nothing."""


class Split:
    """A `collate_fn` that makes micro-batches of at most `size` samples, each with the number of its samples."""

    def __init__(self, collate: Callable[[Any], Any], size: int) -> None:
        self._collate = collate
        self._size = size

    def __call__(self, samples: Sequence[Any]) -> list[tuple[int, Any]]:
        """Micro-batches whose sizes differ by at most one."""
        count, total = -(-len(samples) // self._size), len(samples)
        edges = [total * number // count for number in range(count + 1)]
        return [(end - start, self._collate(samples[start:end])) for start, end in pairwise(edges)]


def micro_batches(run: Run, loader: Loader, size: int) -> list[MicroBatch]:
    """This worker's micro-batches of the present step; gradients are the sum over all of them at all ranks."""
    sampler, ranks = loader.sampler, run.world_size
    parts = [sum(map(len, sampler.positions(rank, ranks))) for rank in range(ranks)]
    total, has_samples = sum(parts), parts[run.rank] > 0
    made = [MicroBatch(batch, count / total if has_samples else 0.0) for count, batch in loader.next()]
    rounds = -(-max(parts) // size)
    made += [MicroBatch(made[-1].batch, 0.0)] * (rounds - len(made))
    # The weights are in the losses.
    run.use_part(1, 1)
    return made
