"""Deliberate bugs in what is done with training data, to show that the simulation finds them.

Law: as for the other mutants: each changes one thing, for as long as a world lasts, and breaks the promise that is
named for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from forged.data.audit.epoch_audit import UsageLog
from forged.data.model import Indices
from forged.data.ownership.ownership import ShardOwnership
from forged.data.ownership.suspect_copies import SuspectCopies
from forged.data.sampling.sampler import ElasticSampler
from forged.data.sampling.sharded_order import ShardedOrder
from forged.elastic.coordinator.job_coordinator import JobCoordinator
from forged.elastic.model import WorkerId
from forged.elastic.rescale.attempt import Attempt
from forged.worker.data.sample_usage import SampleUsage
from forged.worker.data.shard_holder import ShardHolder
from forged.worker.data.usage_report import UsageReport
from forged.worker.worker_state.job_view import JobView
from forged.worker.worker_state.progress import TrainingProgress
from tests.simulation.data.oracle import DataPromise

Mutant = Callable[[], Any]


@contextmanager
def commit_without_waiting_for_data() -> Iterator[None]:
    """Wait only for the workers that need the state."""
    settle = Attempt.synchronise

    def hasty(self: Attempt, with_data: Collection[str] = ()) -> bool:
        return settle(self)

    with patch.object(Attempt, "synchronise", hasty):
        yield


@contextmanager
def drop_before_the_commit() -> Iterator[None]:
    """A worker drops a shard that it need not hold as soon as the plan says so."""
    try_once = ShardHolder._try

    async def hasty(self: ShardHolder, attempt: int, **options: Any) -> None:
        await try_once(self, attempt, **options)
        store = self._data.store
        keep = self._assigned[attempt].keep
        for shard in [shard for shard in store.held() if shard not in keep]:
            store.drop(shard)

    with patch.object(ShardHolder, "_try", hasty):
        yield


@contextmanager
def believe_what_was_held_once() -> Iterator[None]:
    """Count a worker's shards of the previous world as held."""
    offer = ShardOwnership.offer

    def trusting(self: ShardOwnership, worker: WorkerId, held: Indices, *what: Any) -> bool:
        names = [known.id for known in self.assignment.workers]
        if worker.id in names:
            held = np.union1d(held, np.flatnonzero(self.assignment.owners == names.index(worker.id)))
        # What the copies are that it has not is not known.
        *others, _marks = what
        return offer(self, worker, held, *others)

    with patch.object(ShardOwnership, "offer", trusting):
        yield


@contextmanager
def weigh_all_alike() -> Iterator[None]:
    """Ignore the weights of workers."""
    offer = ShardOwnership.offer

    def deaf(self: ShardOwnership, worker: WorkerId, held: Indices, *what: Any) -> bool:
        *others, _weight, _marks = what
        return offer(self, worker, held, *others)

    with patch.object(ShardOwnership, "offer", deaf):
        yield


@contextmanager
def call_lost_what_nobody_owns() -> Iterator[None]:
    """Do not count replicas."""
    offer = ShardOwnership.offer

    def forgetful(self: ShardOwnership, worker: WorkerId, held: Indices, *what: Any) -> bool:
        places = [place for place, known in enumerate(self.assignment.workers) if known == worker]
        if self.assignment.generation:
            held = held[np.isin(self.assignment.owners[held], places)]
        # What the copies are is not said of those that are not offered.
        *others, _marks = what
        return offer(self, worker, held, *others)

    with patch.object(ShardOwnership, "offer", forgetful):
        yield


@contextmanager
def leave_the_sampler_behind() -> Iterator[None]:
    """Transfer the training state without the sampler's position."""
    with patch.object(TrainingProgress, "transferable_state", property(lambda self: self.script_state)):
        yield


@contextmanager
def draw_as_in_the_world_before() -> Iterator[None]:
    """Keep the first assignment of the shards."""
    reassign = ElasticSampler.reassign

    def idle(self: ElasticSampler, owners: Any, world_size: int) -> None:
        known = np.asarray(getattr(self, "_first_owners", owners))
        self.__dict__["_first_owners"] = known
        reassign(self, np.minimum(known, world_size - 1), world_size)

    with patch.object(ElasticSampler, "reassign", idle):
        yield


@contextmanager
def advance_twice() -> Iterator[None]:
    """A batch is left out where a world begins."""
    enter = SampleUsage.enter

    def hasty(self: SampleUsage, generation: int, begins_at: int) -> None:
        enter(self, generation, begins_at)
        self.sampler.advance()

    with patch.object(SampleUsage, "enter", hasty):
        yield


@contextmanager
def shuffle_anew_in_each_world() -> Iterator[None]:
    """The order of a shard is another one where there are more workers, or fewer."""
    samples = ShardedOrder.samples

    def anew(self: ShardedOrder, epoch: int, positions: Sequence[range]) -> Indices:
        seed, self.seed = self.seed, self.seed + self.world_size
        try:
            return samples(self, epoch, positions)
        finally:
            self.seed = seed

    with patch.object(ShardedOrder, "samples", anew):
        yield


@contextmanager
def prove_with_what_was_done_again() -> Iterator[None]:
    """What was used in steps that the training has gone back behind counts, too."""
    with patch.object(UsageLog, "rewind", lambda self, generation, step: None):
        yield


@contextmanager
def leave_without_telling() -> Iterator[None]:
    """A leaving worker does not report its last steps."""

    async def silent(self: UsageReport) -> None:
        return

    with patch.object(UsageReport, "_tell", silent):
        yield


@contextmanager
def commit_when_the_first_has_its_data() -> Iterator[None]:
    """In a background rescale, wait for no other worker."""
    ready = JobCoordinator.ready

    def hasty(self: JobCoordinator, *what: Any) -> None:
        if self.attempt is not None and self.attempt.in_background:
            self.attempt.unready.clear()
        ready(self, *what)

    with patch.object(JobCoordinator, "ready", hasty):
        yield


@contextmanager
def stop_while_data_moves() -> Iterator[None]:
    """What moves in the background is a reason to stop, as what moves for all to see."""
    stop_wanted = JobView.stop_wanted

    def eager(self: JobView) -> int:
        return stop_wanted.__get__(self) or self.background_attempt

    with patch.object(JobView, "stop_wanted", property(eager)):
        yield


@contextmanager
def keep_what_was_found_to_be_bad() -> Iterator[None]:
    """That a copy is bad is told, and nothing follows."""
    with patch.object(SuspectCopies, "add", lambda self, holder, shard: True):
        yield


MUTANTS: dict[str, Mutant] = {}
BREAKS: dict[str, DataPromise] = {}
"""The promise that each of them breaks."""

for mutant, promise in (
    (commit_without_waiting_for_data, DataPromise.HELD),
    (commit_when_the_first_has_its_data, DataPromise.HELD),
    (keep_what_was_found_to_be_bad, DataPromise.HELD),
    (stop_while_data_moves, DataPromise.GOES_ON),
    (believe_what_was_held_once, DataPromise.HELD),
    (weigh_all_alike, DataPromise.SHARE),
    (drop_before_the_commit, DataPromise.KEPT),
    (call_lost_what_nobody_owns, DataPromise.LOST),
    (leave_the_sampler_behind, DataPromise.SAMPLER),
    (advance_twice, DataPromise.SAMPLER),
    (draw_as_in_the_world_before, DataPromise.SAMPLES),
    (shuffle_anew_in_each_world, DataPromise.ONCE),
    (prove_with_what_was_done_again, DataPromise.AUDIT),
    (leave_without_telling, DataPromise.AUDIT),
):
    MUTANTS[mutant.__name__] = mutant
    BREAKS[mutant.__name__] = promise
