"""Which samples a rank takes in the next step.

Law: each sample of an epoch is taken once, by whatever worlds its steps were done. What a step takes depends on the
seed and on how far the epoch is, and that moves only when a step counts (`advance`). So a step that is done again, by
others perhaps, takes the same, and a state of two numbers, or of one for each shard, is enough to go on.

With `drop_last` an epoch ends when what is left is less than a step takes. That is judged when a step counts, by its
own size: where steps become larger afterwards, the next one takes what there is. Where a world grows so large that its
steps would be larger than an epoch, a step takes an epoch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, Self

import numpy.typing as npt

from forged.data.dataset import SAMPLES_MAX, Dataset
from forged.data.permutation import KEY_MAX, Indices, Permutation, check_whole
from forged.data.sampling.sharded_order import ShardedOrder, counted, joined
from forged.data.sampling.usage import WHOLE_MAX, Use
from forged.elastic.model import WORLD_SIZE_MAX
from forged.errors import Problem, RequestRefused

STATED_LATER = {"drop_last", "mode", "shards"}
"""States that were saved before these were part of them are still good."""


class SamplingMode(StrEnum):
    """Which samples a rank can read."""

    SHARED = "shared"
    """All of them."""
    SHARDED = "sharded"
    """Those of the shards that it holds."""


@dataclass(frozen=True, slots=True)
class SamplerState:
    """How far a sampler is."""

    epoch: int
    consumed: int


class Order(Protocol):
    """The order of an epoch, and how far it is used. Positions are places in it, of which each sample has one."""

    epoch: int
    left: int

    @property
    def total(self) -> int: ...

    def begin(self, epoch: int) -> None: ...

    def positions(self, rank: int, world_size: int, wanted: int) -> list[range]: ...

    def taken(self, wanted: int) -> list[range]: ...

    def rest(self) -> list[range]: ...

    def advance(self, wanted: int) -> None: ...

    def samples(self, epoch: int, positions: Sequence[range]) -> Indices: ...

    def fork(self) -> Self: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class SharedOrder:
    """One sequence for all: a step takes what comes next, and each rank its part, in the order of ranks."""

    def __init__(self, total: int, seed: int, *, shuffle: bool) -> None:
        self._total = total
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.left = total

    @property
    def total(self) -> int:
        """How many samples an epoch has."""
        return self._total

    def begin(self, epoch: int) -> None:
        """Begin an epoch."""
        self.epoch, self.left = epoch, self._total

    def positions(self, rank: int, world_size: int, wanted: int) -> list[range]:
        """What a rank takes of a step that wants so many samples: as much as any other, or one more or less."""
        first, size = self._total - self.left, min(wanted, self.left)
        start, end = first + size * rank // world_size, first + size * (rank + 1) // world_size
        return [range(start, end)] if end > start else []

    def taken(self, wanted: int) -> list[range]:
        """What the whole world takes."""
        return self.positions(0, 1, wanted)

    def rest(self) -> list[range]:
        """What is not used yet."""
        return self.taken(self.left)

    def advance(self, wanted: int) -> None:
        """A step that wanted so many samples counts."""
        self.left -= min(wanted, self.left)

    def samples(self, epoch: int, positions: Sequence[range]) -> Indices:
        """Which samples stand there."""
        if not self.shuffle:
            return counted(positions)
        order = Permutation(self._total, self.seed, epoch)
        return joined(order.span(one.start, one.stop) for one in positions)

    def fork(self) -> Self:
        """The same, to be advanced for itself."""
        return copy.copy(self)

    def state_dict(self) -> dict[str, Any]:
        """How far it is, as plain values."""
        return {"epoch": self.epoch, "consumed": self._total - self.left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Be as far as a state says."""
        consumed = check_whole("sampler_invalid", "consumed", state["consumed"], 0, self._total)
        self.epoch, self.left = state["epoch"], self._total - consumed


class ElasticSampler:
    """The samples of a job, by epochs; every worker has one, and all are equally far."""

    def __init__(
        self,
        total: int,
        global_batch: int,
        seed: int = 0,
        *,
        drop_last: bool = False,
        shuffle: bool = True,
        mode: SamplingMode | str = SamplingMode.SHARED,
        dataset: Dataset | None = None,
    ) -> None:
        self.seed = _check("seed", seed, 0, KEY_MAX)
        self.drop_last = bool(drop_last)
        self.shuffle = bool(shuffle)
        self._order = _order(_check("total", total, 0, SAMPLES_MAX), self.seed, self.shuffle, mode, dataset)
        self.global_batch = global_batch

    @property
    def total(self) -> int:
        """How many samples an epoch has."""
        return self._order.total

    @property
    def mode(self) -> SamplingMode:
        """Which samples a rank can read."""
        return SamplingMode.SHARDED if isinstance(self._order, ShardedOrder) else SamplingMode.SHARED

    @property
    def shards(self) -> int:
        """In how many shards the samples lie, where that matters for their order; else 0."""
        return self._order.dataset.shards if isinstance(self._order, ShardedOrder) else 0

    @property
    def settings(self) -> dict[str, int | bool | str]:
        """What decides which samples are taken, besides the batch and how far it is: the same at all workers."""
        return {
            "total": self.total,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "mode": str(self.mode),
            "shards": self.shards,
        }

    @property
    def global_batch(self) -> int:
        """How many samples a step of the whole world takes; may be set between steps."""
        return self._global_batch

    @global_batch.setter
    def global_batch(self, size: int) -> None:
        size = _check("global_batch", size, 1, SAMPLES_MAX)
        if self.drop_last and size > self.total > 0:
            raise RequestRefused(
                "sampler_invalid",
                f"global_batch = {size}: an epoch of {self.total} samples would be dropped as a whole",
                "make it smaller, or let drop_last be false",
            )
        self._global_batch = size

    def take(self, size: int) -> None:
        """Have a step take so many samples, or all of an epoch where it would be dropped as a whole otherwise."""
        self.global_batch = min(size, self.total) if self.drop_last and self.total else size

    @property
    def state(self) -> SamplerState:
        """How far it is."""
        return SamplerState(self._order.epoch, self.total - self._order.left)

    @property
    def epoch(self) -> int:
        """The epoch of the next step."""
        return self._order.epoch

    @property
    def steps_left(self) -> int:
        """How many steps the epoch has yet, if the batch stays as it is and somebody holds each shard."""
        left = self._order.left
        steps = -(-left // self._global_batch)
        return max(1, left // self._global_batch) if self.drop_last and left else steps

    def positions(self, rank: int, world_size: int) -> list[range]:
        """Which positions of the epoch are this rank's in the next step."""
        _check_rank(rank, world_size)
        return self._order.positions(rank, world_size, self._global_batch)

    def batch(self, rank: int, world_size: int) -> Indices:
        """Which samples are this rank's in the next step."""
        _check_rank(rank, world_size)
        return _batch(self._order, rank, world_size, self._global_batch)

    def samples_at(self, epoch: int, positions: range) -> Indices:
        """Which samples stand at these positions of an epoch, whichever epoch is on."""
        _check("epoch", epoch, 0, WHOLE_MAX)
        if positions.step != 1 or not 0 <= positions.start <= positions.stop <= self.total:
            raise RequestRefused(
                "sampler_invalid", str(Problem("positions", positions, f"a range within {self.total}"))
            )
        return self._order.samples(epoch, [positions])

    def advance(self) -> list[Use]:
        """The step counts. Tells what the whole world has used in it, and what it has left out, as its epoch's last."""
        epoch = self.epoch
        taken = self._order.taken(self._global_batch)
        self._order.advance(self._global_batch)
        dropped: list[range] = []
        if self._is_over(self._order):
            dropped = self._order.rest()
            self._order.begin(epoch + 1)
        return [Use(epoch, one.start, one.stop) for one in taken] + [
            Use(epoch, one.start, one.stop, dropped=True) for one in dropped
        ]

    def batches(self, rank: int, world_size: int) -> Iterator[Indices]:
        """This rank's batches from the next step to the end of the epoch, as it is now.

        Nothing is advanced by it, so it may run ahead of the training. All ranks have as many; some may be empty.
        """
        _check_rank(rank, world_size)
        return self._ahead(self._order.fork(), rank, world_size, self._global_batch)

    def for_rank(self, rank: int, world_size: int) -> RankBatches:
        """This rank's batches as PyTorch's `DataLoader` takes them for its `batch_sampler`."""
        return RankBatches(self, rank, world_size)

    def set_epoch(self, epoch: int) -> None:
        """Be in an epoch: at its beginning, unless it is on already."""
        epoch = _check("epoch", epoch, 0, WHOLE_MAX)
        if epoch != self.epoch:
            self._order.begin(epoch)

    def reassign(self, owners: npt.ArrayLike, world_size: int) -> None:
        """Another world: the rank that holds each shard, or -1. What was used stays used."""
        if not isinstance(self._order, ShardedOrder):
            raise RequestRefused("sampler_invalid", "mode = shared: every rank reads every shard", "leave it out")
        self._order.reassign(owners, world_size)

    def state_dict(self) -> dict[str, Any]:
        """How far it is, and in what; it can travel in a worker's state."""
        return {**self.settings, **self._order.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Be as far as a state says. One of another dataset or order is refused, and changes nothing."""
        settings = self.settings
        for name, own in settings.items():
            if name in state and state[name] != own:
                text = f"the state is that of a sampler with {name} = {state[name]}, and this one has {name} = {own}"
                raise RequestRefused("sampler_differs", text, f"make this one with {name} = {state[name]}")
        missing = self.state_dict().keys() - state.keys() - STATED_LATER
        if missing:
            raise _refused(min(missing), None, "part of a state of a sampler in this mode")
        epoch = _check("epoch", state["epoch"], 0, WHOLE_MAX)
        self._order.load_state_dict({**state, "epoch": epoch})

    def _is_over(self, order: Order) -> bool:
        return not order.left or (self.drop_last and order.left < self._global_batch)

    def _ahead(self, order: Order, rank: int, world_size: int, wanted: int) -> Iterator[Indices]:
        while order.left:
            yield _batch(order, rank, world_size, wanted)
            order.advance(wanted)
            if self.drop_last and order.left < wanted:
                return


class RankBatches:
    """A batch sampler: iterated, it gives the lists of this rank's samples in the rest of the epoch.

    All ranks have as many; where a rank has nothing to draw its list is empty, which a loader's `collate_fn` must take.
    """

    def __init__(self, sampler: ElasticSampler, rank: int, world_size: int) -> None:
        _check_rank(rank, world_size)
        self.sampler = sampler
        self.rank = rank
        self.world_size = world_size

    def __iter__(self) -> Iterator[list[int]]:
        batches: Iterator[list[int]] = (batch.tolist() for batch in self.sampler.batches(self.rank, self.world_size))
        return batches

    def __len__(self) -> int:
        return self.sampler.steps_left

    def set_epoch(self, epoch: int) -> None:
        """Be in an epoch: at its beginning, unless it is on already."""
        self.sampler.set_epoch(epoch)


def _order(total: int, seed: int, shuffle: bool, mode: SamplingMode | str, dataset: Dataset | None) -> Order:
    if mode == SamplingMode.SHARED:
        if dataset is not None:
            raise _refused("dataset", dataset, "nothing where mode is shared")
        return SharedOrder(total, seed, shuffle=shuffle)
    if mode != SamplingMode.SHARDED:
        raise _refused("mode", mode, f"one of {', '.join(SamplingMode)}")
    if dataset is None or dataset.samples != total:
        raise _refused("dataset", dataset, f"a Dataset of {total} samples where mode is sharded")
    return ShardedOrder(dataset, seed, shuffle=shuffle)


def _batch(order: Order, rank: int, world_size: int, wanted: int) -> Indices:
    return order.samples(order.epoch, order.positions(rank, world_size, wanted))


def _check(name: str, number: object, least: int, most: int) -> int:
    return check_whole("sampler_invalid", name, number, least, most)


def _check_rank(rank: int, world_size: int) -> None:
    _check("world_size", world_size, 1, WORLD_SIZE_MAX)
    _check("rank", rank, 0, world_size - 1)


def _refused(name: str, value: object, wanted: str) -> RequestRefused:
    return RequestRefused("sampler_invalid", str(Problem(name, value, wanted)))
