"""Batches of a dataset for the steps of a run, each sample of an epoch once, loaded ahead in processes.

Invariants:
- A step's batch depends on the sampler's position and on the world. What was loaded ahead for another world, or for
  steps that are repeated, is dropped.
- The processes that load are forked once, when the loader is made: before the worker trains, so before there are
  process groups, whose connections they would keep open.
- A rank without samples of a step gets one that counts nothing, because a backward pass needs a batch.
"""

from __future__ import annotations

import multiprocessing
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from forged.data.sampling.sampler import ElasticSampler, SamplerState
from forged.errors import RequestRefused
from forged.worker.blocking import Training

SHARDS_OPEN = 2


class UsesPart(Protocol):
    """What a loader needs of its run."""

    worker: Training

    def use_part(self, samples: int, total: int) -> None: ...


class Loader:
    """Batches of this rank, made by `run.loader`; `next()` returns that of the present step."""

    def __init__(self, run: UsesPart, dataset: Any, sampler: ElasticSampler, **options: Any) -> None:
        """`options` are those of torch's `DataLoader`."""
        self.sampler = sampler
        self._run = run
        self._ahead = _Ahead(sampler)
        has_processes = options.get("num_workers", 0) > 0
        # A generator of its own: the script's is not to depend on how often batches are loaded anew.
        own: dict[str, Any] = {"persistent_workers": has_processes, "generator": torch.Generator()}
        if has_processes and "fork" in multiprocessing.get_all_start_methods():
            # Others would import the script anew, and do not end when this process is killed.
            own["multiprocessing_context"] = "fork"
        self._loader = DataLoader(dataset, batch_sampler=self._ahead, **(own | options))
        self._batches: Iterator[Any] = iter(())
        self._made_for: tuple[int, int] | None = None
        """The generation and the batch size for which batches are loaded ahead."""
        self._given_in: tuple[int, int] | None = None
        """The generation and the step whose batch was given last."""
        if has_processes:
            # They begin now, with nothing to load.
            iter(self._loader)

    def __len__(self) -> int:
        """The steps of an epoch: `run.steps(epochs * len(loader))`."""
        total, batch = self.sampler.total, self.sampler.global_batch
        return total // batch if self.sampler.drop_last else -(-total // batch)

    def next(self) -> Any:
        """The batch of the present step; call it once in each step."""
        worker = self._run.worker
        rank, size = worker.rank, worker.world_size
        if rank < 0:
            raise RequestRefused("step_missing", "a batch was asked for outside a step", "call `next` inside a step")
        if self._given_in == (given_in := (worker.generation, worker.step)):
            raise RequestRefused(
                "batch_given",
                f"a second batch was asked for in step {worker.step}",
                "split the step's batch, with `torch.chunk` for example, to accumulate gradients",
            )
        parts = [sum(map(len, self.sampler.positions(one, size))) for one in range(size)]
        self._run.use_part(parts[rank], sum(parts))
        made_for = (worker.generation, self.sampler.global_batch)
        if made_for != self._made_for or self.sampler.state != self._ahead.position:
            self._ahead.begin(rank, size)
            self._batches, self._made_for = iter(self._loader), made_for
        batch = next(self._batches)
        self._ahead.move_on()
        self._given_in = given_in
        return batch

    def __iter__(self) -> Iterator[Any]:
        """The batches of the steps: `for step, batch in zip(run.steps(total), loader):`."""
        while True:
            yield self.next()

    def close(self) -> None:
        """End the processes."""
        iterator, self._loader._iterator, self._batches = self._loader._iterator, None, iter(())
        if iterator is not None:
            iterator._shutdown_workers()


class _Ahead:
    """The samples of this rank's coming steps: a batch sampler without an end, over all epochs."""

    def __init__(self, sampler: ElasticSampler) -> None:
        self._sampler = sampler
        self._at: ElasticSampler | None = None
        """At the position of the batch that is given next; None before the first."""
        self._rank, self._world_size = 0, 1

    @property
    def position(self) -> SamplerState | None:
        """The sampler's position in the step whose batch is given next."""
        return None if self._at is None else self._at.state

    def begin(self, rank: int, world_size: int) -> None:
        """Begin with the sampler's next step, in this world."""
        self._rank, self._world_size = rank, world_size
        self._at = self._copy()

    def move_on(self) -> None:
        """A batch was given."""
        assert self._at is not None
        self._at.advance()

    def __iter__(self) -> Iterator[list[int]]:
        if self._at is None:
            return
        ahead = self._copy()
        while ahead.total:
            batches = (ahead.batch(rank, self._world_size).tolist() for rank in self._order_of_ranks())
            # Of a rank without samples, the batch is one of another rank's.
            own = next(batches)
            yield own or next(batch for batch in batches if batch)[:1]
            ahead.advance()

    def _order_of_ranks(self) -> list[int]:
        return [self._rank, *(rank for rank in range(self._world_size) if rank != self._rank)]

    def _copy(self) -> ElasticSampler:
        one = self._sampler
        copy = ElasticSampler(one.total, one.global_batch, one.seed, drop_last=one.drop_last, shuffle=one.shuffle)
        copy.load_state_dict(one.state_dict())
        return copy


class Shards(Dataset[Any]):
    """A dataset of shards that are read from begin to end: `Shards(sizes, read)`, for `run.loader`.

    `read(number)` returns the samples of a shard in order, as an iterable of `sizes[number]` samples. The loader takes
    them in the order of the shards, so shuffle them when they are written.
    """

    def __init__(self, sizes: Sequence[int], read: Callable[[int], Iterable[Any]]) -> None:
        self._ends = list(accumulate(sizes))
        self._read = read
        self._open: dict[int, list[Any]] = {}
        """The shards that were read last."""

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, sample: int) -> Any:
        number = bisect_right(self._ends, sample)
        if number not in self._open:
            while len(self._open) >= SHARDS_OPEN:
                self._open.pop(next(iter(self._open)))
            self._open[number] = samples = list(self._read(number))
            wanted = self._ends[number] - (self._ends[number - 1] if number else 0)
            if len(samples) != wanted:
                raise RequestRefused(
                    "shard_size_differs",
                    f"shard {number} must have {wanted} samples, got {len(samples)}",
                    "give the sizes of the shards as they are",
                )
        return self._open[number][sample - self._ends[number]]


class _ByIndex(Dataset[Any]):
    """A dataset that can be iterated over and indexed, of which only the latter is used."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, sample: int) -> Any:
        return self._dataset[sample]


def indexed(dataset: Any) -> Any:
    """The dataset as one whose samples are read by their index."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise RequestRefused(
            "dataset_not_indexed",
            f"a dataset must have __len__ and __getitem__, got {type(dataset).__name__}",
            "give a map-style dataset, or `ft.Shards(sizes, read)` for shards that are read in order",
        )
    return _ByIndex(dataset) if isinstance(dataset, IterableDataset) else dataset
