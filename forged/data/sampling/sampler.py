"""`ElasticSampler`: which samples a rank uses in the next step.

Invariants:
- Each sample of an epoch is used once, whatever worlds do its steps.
- A step's samples depend on the seed and on the position in the epoch, which moves only when a step is committed
  (`advance`). So a repeated step uses the same samples, and the state is two numbers, or one per shard.

With `drop_last` an epoch ends when less than a step is left. That is decided when a step is committed, by its size; if
steps become larger afterwards, the next step uses what is left. If a step would be larger than an epoch, it uses a
whole epoch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, Self

import numpy.typing as npt

from forged.data.model import SAMPLES_MAX, Dataset
from forged.data.permutation import KEY_MAX, Indices, Permutation, check_whole
from forged.data.sampling.sharded_order import ShardedOrder, counted, joined
from forged.data.sampling.usage import WHOLE_MAX, Use
from forged.elastic.model import WORLD_SIZE_MAX
from forged.errors import Problem, RequestRefused

STATED_LATER = {"drop_last", "mode", "shards"}
"""These may be missing in states of earlier versions."""


class SamplingMode(StrEnum):
    """Which samples a rank can read."""

    SHARED = "shared"

    SHARDED = "sharded"
    """Those of the shards that the rank holds."""


@dataclass(frozen=True, slots=True)
class SamplerState:
    """The position of a sampler."""

    epoch: int
    consumed: int


class Order(Protocol):
    """The order of an epoch and the position in it. Each sample has one position."""

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
    """One sequence for all ranks: a step takes the next samples, divided by rank."""

    def __init__(self, total: int, seed: int, *, shuffle: bool) -> None:
        self._total = total
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.left = total

    @property
    def total(self) -> int:
        """The number of samples of an epoch."""
        return self._total

    def begin(self, epoch: int) -> None:
        """Begin an epoch."""
        self.epoch, self.left = epoch, self._total

    def positions(self, rank: int, world_size: int, wanted: int) -> list[range]:
        """A rank's part of a step of so many samples; parts differ by at most one."""
        first, size = self._total - self.left, min(wanted, self.left)
        start, end = first + size * rank // world_size, first + size * (rank + 1) // world_size
        return [range(start, end)] if end > start else []

    def taken(self, wanted: int) -> list[range]:
        """The parts of all ranks."""
        return self.positions(0, 1, wanted)

    def rest(self) -> list[range]:
        """The unused positions."""
        return self.taken(self.left)

    def advance(self, wanted: int) -> None:
        """A step of so many samples is committed."""
        self.left -= min(wanted, self.left)

    def samples(self, epoch: int, positions: Sequence[range]) -> Indices:
        """The samples at these positions."""
        if not self.shuffle:
            return counted(positions)
        order = Permutation(self._total, self.seed, epoch)
        return joined(order.span(one.start, one.stop) for one in positions)

    def fork(self) -> Self:
        """An independent copy."""
        return copy.copy(self)

    def state_dict(self) -> dict[str, Any]:
        """The position as plain values."""
        return {"epoch": self.epoch, "consumed": self._total - self.left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state."""
        consumed = check_whole("sampler_invalid", "consumed", state["consumed"], 0, self._total)
        self.epoch, self.left = state["epoch"], self._total - consumed


class ElasticSampler:
    """The samples of a job, by epochs; each worker has one, all at the same position."""

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
        """The number of samples of an epoch."""
        return self._order.total

    @property
    def mode(self) -> SamplingMode:

        return SamplingMode.SHARDED if isinstance(self._order, ShardedOrder) else SamplingMode.SHARED

    @property
    def shards(self) -> int:
        """The number of shards in mode sharded, else 0."""
        return self._order.dataset.shards if isinstance(self._order, ShardedOrder) else 0

    @property
    def settings(self) -> dict[str, int | bool | str]:
        """The settings that determine the order, which must be the same at all workers."""
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
        """The number of samples of a step of the whole world; may be set between steps."""
        return self._global_batch

    @global_batch.setter
    def global_batch(self, size: int) -> None:
        size = _check("global_batch", size, 1, SAMPLES_MAX)
        if self.drop_last and size > self.total > 0:
            raise RequestRefused(
                "sampler_invalid",
                f"global_batch must be at most {self.total}, the samples of an epoch, with drop_last; got {size}",
                "make it smaller, or set drop_last=False",
            )
        self._global_batch = size

    def take(self, size: int) -> None:
        """Set the batch size, at most to a whole epoch with `drop_last`."""
        self.global_batch = min(size, self.total) if self.drop_last and self.total else size

    @property
    def state(self) -> SamplerState:
        """The position in the data: epoch, and samples used."""
        return SamplerState(self._order.epoch, self.total - self._order.left)

    @property
    def epoch(self) -> int:
        """The epoch of the next step."""
        return self._order.epoch

    @property
    def steps_left(self) -> int:
        """The steps left in the epoch with the current batch, if every shard has a holder."""
        left = self._order.left
        steps = -(-left // self._global_batch)
        return max(1, left // self._global_batch) if self.drop_last and left else steps

    def positions(self, rank: int, world_size: int) -> list[range]:
        """This rank's positions in the next step."""
        _check_rank(rank, world_size)
        return self._order.positions(rank, world_size, self._global_batch)

    def batch(self, rank: int, world_size: int) -> Indices:
        """This rank's samples in the next step."""
        _check_rank(rank, world_size)
        return _batch(self._order, rank, world_size, self._global_batch)

    def samples_at(self, epoch: int, positions: range) -> Indices:
        """The samples at these positions of any epoch."""
        _check("epoch", epoch, 0, WHOLE_MAX)
        if positions.step != 1 or not 0 <= positions.start <= positions.stop <= self.total:
            raise RequestRefused(
                "sampler_invalid", str(Problem("positions", positions, f"a range within {self.total}"))
            )
        return self._order.samples(epoch, [positions])

    def advance(self) -> list[Use]:
        """The step is committed; returns what the world has used in it, and dropped if it was its epoch's last."""
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
        """This rank's batches from the next step to the end of the epoch.

        Reading them does not advance the sampler, so a loader may prefetch. All ranks get the same number of batches;
        some may be empty.
        """
        _check_rank(rank, world_size)
        return self._ahead(self._order.fork(), rank, world_size, self._global_batch)

    def for_rank(self, rank: int, world_size: int) -> RankBatches:
        """This rank's batches as a `batch_sampler` for PyTorch's `DataLoader`."""
        return RankBatches(self, rank, world_size)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, unless it is the current one."""
        epoch = _check("epoch", epoch, 0, WHOLE_MAX)
        if epoch != self.epoch:
            self._order.begin(epoch)

    def reassign(self, owners: npt.ArrayLike, world_size: int) -> None:
        """Set the rank that holds each shard in a new world, or -1. Used samples stay used."""
        if not isinstance(self._order, ShardedOrder):
            raise RequestRefused(
                "sampler_invalid",
                "reassign needs mode sharded: in mode shared every rank reads every shard",
                "leave it out",
            )
        self._order.reassign(owners, world_size)

    def state_dict(self) -> dict[str, Any]:
        """The position and the settings, for a checkpoint or a state transfer."""
        return {**self.settings, **self._order.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state; one of another dataset or order is refused and changes nothing."""
        settings = self.settings
        for name, own in settings.items():
            if name in state and state[name] != own:
                text = f"the state is that of a sampler with {name} = {state[name]}, and this one has {name} = {own}"
                raise RequestRefused("sampler_differs", text, f"create this sampler with {name} = {state[name]}")
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
    """A batch sampler over the lists of this rank's samples in the rest of the epoch.

    All ranks get the same number of lists. A list may be empty, which a loader's `collate_fn` must handle.
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
        """Go to the beginning of an epoch, unless it is the current one."""
        self.sampler.set_epoch(epoch)


def _order(total: int, seed: int, shuffle: bool, mode: SamplingMode | str, dataset: Dataset | None) -> Order:
    if mode == SamplingMode.SHARED:
        if dataset is not None:
            raise _refused("dataset", dataset, "None in mode shared")
        return SharedOrder(total, seed, shuffle=shuffle)
    if mode != SamplingMode.SHARDED:
        raise _refused("mode", mode, f"one of {', '.join(SamplingMode)}")
    if dataset is None or dataset.samples != total:
        raise _refused("dataset", dataset, f"a Dataset of {total} samples in mode sharded")
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
