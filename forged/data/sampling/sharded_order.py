"""The order of an epoch in which each rank draws from the shards that it holds.

Invariants:
- A step's samples depend only on the holders of the shards and on each shard's cursor, so all ranks agree on them.
- A cursor moves when a step is committed. A repeated step draws the same samples, and committed ones stay used when a
  worker dies.
- The next holder of a shard continues at its cursor, so each sample is used once.
- Ranks draw as evenly as their remaining samples allow; when one runs out, the rest draw more.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from forged.data.columns import NOBODY
from forged.data.model import Dataset
from forged.data.permutation import Indices, Permutation, check_whole, permute_each
from forged.elastic.model import WORLD_SIZE_MAX
from forged.errors import Problem, RequestRefused, Unavailable

SHARDS_NAMED_MAX = 10
SPANS_MAX = 16
"""Above this number of shards the samples are computed vectorised."""


class ShardedOrder:
    """The cursor and the holder of each shard."""

    def __init__(self, dataset: Dataset, seed: int, *, shuffle: bool) -> None:
        self.dataset = dataset
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.world_size = 0
        self.left = dataset.samples
        self._owners = np.full(dataset.shards, NOBODY, np.int32)
        self._left: Indices
        self._begin(0, np.zeros(dataset.shards, np.int64))

    @property
    def total(self) -> int:
        """The number of samples of an epoch."""
        return self.dataset.samples

    @property
    def cursors(self) -> Indices:
        """The number of used samples of each shard."""
        found = self._cursors.copy()
        reached = np.repeat(self._ends - self._left, np.diff(self._edges))
        found[self._line] += np.clip(reached - self._until + self._left_in_shard, 0, self._left_in_shard)
        return found

    def reassign(self, owners: npt.ArrayLike, world_size: int) -> None:
        """Set the rank that holds each shard, or -1."""
        check_whole("sampler_invalid", "world_size", world_size, 1, WORLD_SIZE_MAX)
        self._assign(_owners(owners, self.dataset.shards, world_size), world_size, self.cursors)

    def begin(self, epoch: int) -> None:
        """Begin an epoch; the holders stay."""
        self._begin(epoch, np.zeros(self.dataset.shards, np.int64))

    def positions(self, rank: int, world_size: int, wanted: int) -> list[range]:
        """A rank's part of a step of so many samples."""
        if world_size != self.world_size:
            raise RequestRefused(
                "sampler_invalid",
                f"world_size must be {self.world_size}, to which the shards are assigned, got {world_size}",
                "call `reassign` when the world changes",
            )
        return self._spans(np.array([rank]), self._draws(wanted))

    def taken(self, wanted: int) -> list[range]:
        """The parts of all ranks."""
        return self._spans(np.arange(self.world_size), self._draws(wanted))

    def rest(self) -> list[range]:
        """The unused positions."""
        cursors = self.cursors
        ids = self._unused(cursors)
        starts, ends = self.dataset.bounds(ids)
        return _ranges(starts + cursors[ids], ends)

    def advance(self, wanted: int) -> None:
        """A step of so many samples is committed."""
        draws = self._draws(wanted)
        self._left = self._left - draws
        self.left -= int(draws.sum())

    def samples(self, epoch: int, positions: Sequence[range]) -> Indices:
        """The samples at these positions. A shard's positions are those of its samples, in the shard's own order."""
        if not self.shuffle:
            return counted(positions)
        edges = [edge for one in positions if one for edge in (one[0], one[-1])]
        shards = self.dataset.shard_of(edges).tolist()
        if len(edges) > 2 * SPANS_MAX or shards[::2] != shards[1::2]:
            return self._samples_of_many(epoch, counted(positions))
        return joined(map(partial(self._samples_of_one, epoch), shards[::2], filter(None, positions)))

    def fork(self) -> Self:
        """An independent copy."""
        # Arrays are shared, because they are replaced and never modified.
        return copy.copy(self)

    def state_dict(self) -> dict[str, Any]:
        """The position as plain values and an array."""
        return {"epoch": self.epoch, "cursors": self.cursors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state; the holders stay."""
        cursors = np.asarray(state["cursors"])
        if cursors.shape != (self.dataset.shards,) or cursors.dtype.kind not in "iu":
            raise _refused("cursors", cursors, f"an array of {self.dataset.shards} whole numbers")
        if np.any((cursors < 0) | (cursors > self._sizes())):
            raise _refused("cursors", cursors, "numbers from 0 to the size of each shard")
        self._begin(state["epoch"], cursors.astype(np.int64))

    def _begin(self, epoch: int, cursors: Indices) -> None:
        self.epoch = epoch
        shards = self.dataset.shards
        self._shard_order = Permutation(shards, self.seed, epoch).span(0, shards) if self.shuffle else np.arange(shards)
        self._assign(self._owners, self.world_size, cursors)

    def _assign(self, owners: npt.NDArray[np.int32], world_size: int, cursors: Indices) -> None:
        self._owners, self.world_size, self._cursors = owners, world_size, cursors
        in_order = owners[self._shard_order]
        line = self._shard_order[np.argsort(in_order, kind="stable")]
        edges = np.searchsorted(owners[line], np.arange(world_size + 1))
        self._line = line[edges[0] :]
        """The held shards: those of rank 0 in the order of the epoch, then those of rank 1, …"""
        self._edges = edges - edges[0]
        self._left_in_shard = self.dataset.sizes(self._line) - cursors[self._line]
        self._until = np.cumsum(self._left_in_shard)
        sums = np.concatenate([[0], self._until])[self._edges]
        self._ends, self._left = sums[1:], np.diff(sums)
        self.left = self.dataset.samples - int(cursors.sum())

    def _draws(self, wanted: int) -> Indices:
        """Each rank's part of a step; fewer in all where the remaining shards have no holder."""
        draws = even_draws(self._left, wanted)
        if not self.left or draws.any():
            return draws
        unused = self._unused(self.cursors)
        named = ", ".join(map(str, unused[:SHARDS_NAMED_MAX].tolist()))
        raise Unavailable(
            "shards_unheld",
            f"no rank holds the {unused.size} remaining shards of epoch {self.epoch}: {named}",
            "reassign them to ranks that hold them",
        )

    def _unused(self, cursors: Indices) -> Indices:
        return np.flatnonzero(cursors < self._sizes())

    def _sizes(self) -> Indices:
        return self.dataset.sizes(np.arange(self.dataset.shards))

    def _spans(self, ranks: Indices, draws: Indices) -> list[range]:
        """The ranks' parts of a step, shard by shard."""
        first = (self._ends - self._left)[ranks]
        end = first + draws[ranks]
        low = np.searchsorted(self._until, first, side="right")
        high = np.where(end > first, np.searchsorted(self._until, end, side="left") + 1, low)
        counts = high - low
        at = np.repeat(low - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
        shards, before = self._line[at], self._until[at] - self._left_in_shard[at]
        shift = self.dataset.bounds(shards)[0] + self._cursors[shards] - before
        starts = np.maximum(np.repeat(first, counts), before)
        stops = np.minimum(np.repeat(end, counts), self._until[at])
        return _ranges(starts + shift, stops + shift)

    def _samples_of_one(self, epoch: int, shard_id: int, positions: range) -> Indices:
        shard = self.dataset.shard(shard_id)
        order = Permutation(shard.size, self.seed, epoch, shard_id)
        return shard.start_index + order.span(positions.start - shard.start_index, positions.stop - shard.start_index)

    def _samples_of_many(self, epoch: int, found: Indices) -> Indices:
        """The same, vectorised for many shards."""
        shards = self.dataset.shard_of(found)
        starts, ends = self.dataset.bounds(shards)
        sizes = ends - starts
        for size in np.unique(sizes).tolist():
            chosen = sizes == size
            within = (found - starts)[chosen]
            found[chosen] = starts[chosen] + permute_each(
                size, within, self.seed, epoch, shards[chosen].view(np.uint64)
            )
        return found


def even_draws(left: Indices, wanted: int) -> Indices:
    """How many samples each rank draws, given what each has left, for `wanted` in all or everything that is left.

    The numbers differ by at most one among ranks that have samples left. The remainder goes to the ranks with the most
    left, and among equals to the lower rank.
    """
    ordered = np.sort(left)
    drained = np.concatenate([[0], np.cumsum(ordered)])
    others = np.arange(len(left), 0, -1)
    # The total if no rank draws more than the one with the least left, the second least, …
    together = drained[:-1] + ordered * others
    fewer = int(np.searchsorted(together, wanted, side="right"))
    if fewer == len(left):
        return left
    level, rest = divmod(wanted - int(drained[fewer]), int(others[fewer]))
    draws = np.minimum(left, level)
    draws[np.argsort(-left, kind="stable")[:rest]] += 1
    return draws


def counted(positions: Iterable[range]) -> Indices:
    """Positions one by one."""
    return joined(np.arange(one.start, one.stop) for one in positions)


def joined(parts: Iterable[Indices]) -> Indices:
    """All positions as one array."""
    found = list(parts)
    return found[0] if len(found) == 1 else np.concatenate([np.empty(0, np.int64), *found])


def _owners(given: npt.ArrayLike, shards: int, world_size: int) -> npt.NDArray[np.int32]:
    owners = np.asarray(given)
    if owners.shape != (shards,) or (shards and owners.dtype.kind not in "iu"):
        raise _refused("owners", given, f"a rank for each of {shards} shards")
    if shards and not NOBODY <= owners.min() <= owners.max() < world_size:
        raise _refused("owners", given, f"ranks below {world_size}, or {NOBODY} for none")
    return owners.astype(np.int32)


def _ranges(starts: Indices, stops: Indices) -> list[range]:
    return [range(*span) for span in zip(starts.tolist(), stops.tolist(), strict=True) if span[0] < span[1]]


def _refused(name: str, value: object, wanted: str) -> RequestRefused:
    return RequestRefused("sampler_invalid", str(Problem(name, value, wanted)))
