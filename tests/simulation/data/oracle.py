"""What must be true of the training data of every job, whatever happens to its workers and their daemon.

Law: as for training itself: what is held against the daemon is what lies on the disks, what it told the workers, and
what training scripts drew at the moment they drew it. Which step counts is known from the worlds: a step belongs to
the last of them that began before it, of those that the state of the present world has come through.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from math import ceil, floor
from typing import NoReturn

import numpy as np

from forged.data.messages import (
    AuditView,
    CorruptShardFound,
    OwnersPage,
    ReadOwners,
    ReadTransfers,
    ShardsLost,
    TransferPart,
    TransfersCompleted,
)
from forged.data.sampling.sampler import ElasticSampler, SamplerState, SamplingMode
from forged.elastic.messages import JobAborted, RescaleCompleted, RescaleStarted
from forged.elastic.model import LostDataPolicy, WorkerId
from forged.kernel.messages import Fact
from tests.simulation.data.simulation import Disk, JobData
from tests.simulation.elastic.truth import SimulatedWorker, Truth
from tests.simulation.oracle import InvariantViolated, broken


class DataPromise(StrEnum):
    """What is promised of every job's data."""

    HELD = (
        "when a plan is committed each shard has an owner that holds it verified, and as many copies as there are to be"
    )
    SHARE = "when a plan is committed each owns its share by weight, rounded down or up"
    KEPT = "no worker drops a shard that it has to hold, or before others hold it under a committed plan"
    GOES_ON = "in a background rescale steps are committed while data moves, as long as no worker fails"
    LOST = "a shard is called lost when no member has it, and the job waits or is aborted by its policy"
    SAMPLES = "a step takes as many samples as it has to, each once, and each rank from what it holds"
    SAMPLER = "all members of a world are equally far in the data, as far as the committed steps have come"
    ONCE = "committed steps use each sample of a finished epoch once"
    AUDIT = "the audit says what was used, and misses only what no worker was left to report"


@dataclass
class Draw:
    """What one world drew for one step, and where it stood before."""

    state: str
    at: SamplerState
    batch: int
    parts: dict[int, list[int]] = field(default_factory=dict)
    """By rank."""
    witnesses: set[SimulatedWorker] = field(default_factory=set)
    """The workers that have seen the commit."""

    @property
    def samples(self) -> list[int]:
        """Those of all ranks."""
        return [sample for part in self.parts.values() for sample in part]


@dataclass
class DataTruth:
    """What is known of the data of one job."""

    data: JobData
    truth: Truth
    disks: dict[SimulatedWorker, Disk] = field(default_factory=dict)
    weights: dict[SimulatedWorker, float] = field(default_factory=dict)
    members: dict[int, tuple[WorkerId, ...]] = field(default_factory=dict)
    """Of each attempt, when it began."""
    told: dict[int, dict[str, set[int]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(set)))
    """By attempt and worker: what it was told to hold."""
    owned: dict[int, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    """By attempt and worker that stays behind the commit: how much of that it was told to own."""
    plans: dict[int, dict[str, set[int]]] = field(default_factory=dict)
    """By generation: the same, once committed."""
    crowded: set[int] = field(default_factory=set)
    """The attempts of which the shares go by what workers can keep."""
    lost_in: int = 0
    """The newest attempt in which a shard was found to be lost."""
    draws: dict[tuple[int, int], Draw] = field(default_factory=dict)
    """By generation and step."""

    def valid(self, step: int, generation: int) -> Draw | None:
        """What was drawn for a step by the world that it counts in, as the world of a generation sees it."""
        begins, continues = self.truth.begins, self.truth.continues
        number = self._last_begun(generation)
        while number and begins[number] > step:
            number = self._last_begun(continues.get(number, number - 1))
        return self.draws.get((number, step))

    def _last_begun(self, generation: int) -> int:
        """The last world up to this one of which it is known with what step it begins; 0 for none."""
        return max((number for number in self.truth.begins if number <= generation), default=0)

    def used(self) -> Iterator[tuple[int, Draw]]:
        """The committed steps, and what they used."""
        for step in range(self.truth.steps_committed):
            draw = self.valid(step, self.truth.generation)
            assert draw is not None, f"no worker drew step {step} of {self.truth.job}"
            yield step, draw

    def is_dropped(self, at: SamplerState, batch: int) -> bool:
        """Whether what an epoch has left there is left out."""
        left = self.data.samples - at.consumed
        return not left or (self.data.drop_last and left < batch)

    def behind(self, draw: Draw) -> SamplerState:
        """Where it stands behind a step."""
        at = SamplerState(draw.at.epoch, draw.at.consumed + len(draw.samples))
        return SamplerState(at.epoch + 1, 0) if self.is_dropped(at, draw.batch) else at

    def missing_at(self, disk: Disk, shards: set[int]) -> list[int]:
        """Which of these shards do not lie there as they should; of what a disk has spoilt somebody has to know."""
        return sorted(shard for shard in shards if not self._lies_at(disk, shard))

    def _lies_at(self, disk: Disk, shard: int) -> bool:
        if not disk.holds(shard):
            return False
        is_hidden = disk.is_corrupt(shard) and shard not in disk.found
        return is_hidden or disk.read(shard) == self.data.content(shard)


class DataOracle:
    """Keeps the promises in mind."""

    def __init__(
        self,
        simulated_worker_of: Callable[[WorkerId], SimulatedWorker | None],
        breach: Callable[[InvariantViolated], NoReturn],
        look: Callable[[], None],
        met: Callable[[str], None],
    ) -> None:
        self.jobs: dict[str, DataTruth] = {}
        self._trainee_of = simulated_worker_of
        self._breach = breach
        self._look = look
        self._met = met

    def breach(self, promise: DataPromise, what: str) -> NoReturn:
        """A promise was not kept."""
        self._breach(broken(promise, what))

    def follow(self, data: JobData, truth: Truth) -> None:
        """Watch the data of a job."""
        known = self.jobs[data.job] = DataTruth(data, truth)
        data.dropped = lambda disk, shard: self._drops(known, disk, shard)

    def moves_in(self, simulated: SimulatedWorker, disk: Disk, weight: float) -> None:
        """A process keeps its shards there, and should hold so much of the data."""
        known = self.jobs[simulated.job]
        known.disks[simulated], disk.user = disk, simulated
        known.weights[simulated] = weight

    # What the daemon says.

    def told_part(self, request: ReadTransfers, part: TransferPart, *, is_crowded: bool) -> None:
        """A member of an attempt is told what it has to hold."""
        if known := self.jobs.get(request.job):
            if is_crowded:
                known.crowded.add(request.attempt)
                self._met("other workers take what a worker cannot store")
            known.told[request.attempt][request.worker_id].update(np.frombuffer(part.keep, "<i8").tolist())
            if not part.is_released:
                known.owned[request.attempt][request.worker_id] = sum(part.owned)

    def told_owners(self, request: ReadOwners, page: OwnersPage) -> None:
        """A member of a world reads the owners."""
        known = self.jobs.get(request.job)
        plan = None if known is None else known.plans.get(page.generation)
        if plan is None:
            return
        for shard, place in enumerate(np.frombuffer(page.owners, "<i4").tolist(), request.after):
            if place < 0 or shard not in plan.get(page.workers[place].id, set()):
                owner = page.workers[place].id if place >= 0 else "nobody"
                self.breach(
                    DataPromise.HELD,
                    f"{owner} is said to own shard {shard} of {request.job} in world {page.generation}: {plan}",
                )

    def heard(self, fact: Fact, truth: Truth) -> None:
        """A fact, behind what it means for training."""
        known = self.jobs.get(truth.job)
        if known is None or not known.data.has_shards:
            return
        match fact:
            case RescaleStarted(removed=removed):
                if "has to verify suspect copies" in fact.reason:
                    self._met("training stops for a suspect copy while data is about to move")
                staying = [worker for worker in truth.world.workers if worker.id not in removed]
                known.members[fact.attempt] = (*staying, *(truth.members[name] for name in fact.added))
            case RescaleCompleted():
                self._committed(known, fact)
            case ShardsLost():
                self._lost(known, fact)
            case TransfersCompleted(transfers=transfers) if transfers:
                self._met("shards travel")
            case CorruptShardFound():
                self._met("a bad copy is reported")
                self._found(known, fact)
            case JobAborted() if truth.data_lost:
                self._met("a job is given up because shards are lost")
            case _:
                pass

    def _found(self, known: DataTruth, fact: CorruptShardFound) -> None:
        """It is known of a copy that it is bad, if it is."""
        worker = known.truth.members.get(fact.worker_id)
        disk = None if worker is None else self._disk_of(known, worker)
        if disk is not None and disk.is_corrupt(fact.shard):
            disk.found.add(fact.shard)
            self._met("a shard that a disk has spoilt is found")

    def _committed(self, known: DataTruth, fact: RescaleCompleted) -> None:
        """Another plan holds: everything has to be where it says."""
        truth, world = known.truth, known.truth.world
        plan = known.plans[world.epoch] = dict(known.told.get(fact.attempt, {}))
        where = f"world {world.epoch} of {truth.job} is committed"
        for worker in world.workers:
            disk = self._disk_of(known, worker)
            missing = [] if disk is None else known.missing_at(disk, plan.get(worker.id, set()))
            if missing:
                self.breach(DataPromise.HELD, f"{where}, and {worker} does not have {missing}")
        members = {worker.id for worker in world.workers}
        keepers = [shards for worker, shards in plan.items() if worker in members and shards]
        copies = min(1 + known.data.replication, len(keepers)) if keepers else 1
        for shard in range(known.data.shards):
            found = sum(shard in shards for shards in keepers)
            if found < copies:
                self.breach(DataPromise.HELD, f"{where}, and {found} of {copies} are to hold shard {shard}: {plan}")
        self._check_shares(known, fact.attempt, where)

    def _check_shares(self, known: DataTruth, attempt: int, where: str) -> None:
        """Each that stays owns as much as its process said that it should."""
        if attempt in known.crowded:
            return
        owned, weights = known.owned[attempt], dict[str, Fraction]()
        for worker in known.truth.world.workers:
            simulated = self._trainee_of(worker)
            if simulated is not None and worker.id in owned:
                weights[worker.id] = Fraction(known.weights[simulated])
        if weights.keys() != owned.keys():
            # A worker has failed already.
            return
        for name, weight in weights.items():
            share = known.data.shards * weight / sum(weights.values())
            if not floor(share) <= owned[name] <= ceil(share):
                self.breach(DataPromise.SHARE, f"{where}, and {name} owns {owned[name]} shards of {float(share)}")
        if weights and max(owned.values()) > min(owned.values()) + 1:
            self._met("shares differ by weight")

    def _lost(self, known: DataTruth, fact: ShardsLost) -> None:
        """These shards are reported as lost."""
        truth = known.truth
        truth.data_lost = known.truth.config.lost_data_policy is LostDataPolicy.ABORT
        if not fact.shards or (known.data.has_origin and not known.data.link_quality.origin_failed):
            self.breach(DataPromise.LOST, f"{fact} of {truth.job}, whose data can be had again")
        if known.data.has_origin:
            self._met("the origin gives a shard to no worker")
            return
        known.lost_in = fact.attempt
        for member in known.members[fact.attempt]:
            disk = self._disk_of(known, member) if member in truth.members.values() else None
            held = [shard for shard in fact.shards if disk is not None and disk.holds(shard)]
            if held:
                self.breach(DataPromise.LOST, f"{held} of {truth.job} are called lost, and {member} has them")
        self._met("a shard is lost")

    def starves(self, job: str) -> bool:
        """Whether the current attempt waits for lost shards."""
        known = self.jobs.get(job)
        truth = None if known is None else known.truth
        return known is not None and truth is not None and truth.in_attempt and known.lost_in == truth.attempt

    # What lies on the disks.

    def _drops(self, known: DataTruth, disk: Disk, shard: int) -> None:
        """A worker is about to drop a shard."""
        self._look()
        truth, simulated = known.truth, disk.user
        assert simulated is not None
        if disk.is_corrupt(shard):
            self._met("a shard that a disk has spoilt is dropped")
            return
        me = simulated.me
        act = f"{me} drops shard {shard} of {truth.job}"
        worlds = [generation for generation, world in truth.worlds.items() if me is not None and me in world]
        if me is None or not worlds:
            self.breach(DataPromise.KEPT, f"{act} before it was in any world")
        if shard in known.plans[max(worlds)].get(me.id, set()):
            self.breach(DataPromise.KEPT, f"{act}, to be held in world {max(worlds)}")
        plan = known.plans[truth.generation]
        for worker in truth.world.workers:
            other = self._disk_of(known, worker) if shard in plan.get(worker.id, set()) else None
            if other is not None and known.missing_at(other, {shard}):
                self.breach(DataPromise.KEPT, f"{act}, and {worker} has it not")
        self._met("a shard is dropped")

    def _disk_of(self, known: DataTruth, worker: WorkerId) -> Disk | None:
        """Where a worker keeps its shards, if that is there still."""
        simulated = self._trainee_of(worker)
        disk = None if simulated is None else known.disks.get(simulated)
        return None if disk is None or disk.is_gone else disk

    # What training scripts see.

    def begins(self, simulated: SimulatedWorker, step: int, sampler: ElasticSampler) -> None:
        """A script is told to do a step."""
        known = self.jobs[simulated.job]
        before = known.valid(step - 1, simulated.generation) if step else None
        should = SamplerState(0, 0) if before is None else known.behind(before)
        if sampler.state != should:
            self.breach(
                DataPromise.SAMPLER,
                f"{simulated.me} is at {sampler.state} before step {step}, and should be at {should}",
            )
        state = _in_words(sampler)
        draw = known.draws.setdefault((simulated.generation, step), Draw(state, sampler.state, sampler.global_batch))
        if draw.state != state or draw.batch != sampler.global_batch:
            self.breach(
                DataPromise.SAMPLER,
                f"{simulated.me} is at {state} before step {step}, {sampler.global_batch} at a time; another: {draw}",
            )

    def draws(self, simulated: SimulatedWorker, step: int, rank: int, samples: list[int]) -> None:
        """A script has drawn its part of a step."""
        known = self.jobs[simulated.job]
        known.draws[simulated.generation, step].parts[rank] = samples
        if known.data.mode is not SamplingMode.SHARDED:
            return
        wanted = set(known.data.dataset.shard_of(samples).tolist())
        disk = known.disks[simulated]
        # What is known to be bad is mended by the next commit, and may be drawn from until then.
        if missing := known.missing_at(disk, {shard for shard in wanted if not disk.is_corrupt(shard)}):
            self.breach(DataPromise.SAMPLES, f"{simulated.me} draws from {missing} in step {step}, and has them not")

    def counts(self, simulated: SimulatedWorker, step: int) -> None:
        """A script is told that a step counts."""
        known = self.jobs[simulated.job]
        draw = known.draws[simulated.generation, step]
        draw.witnesses.add(simulated)
        found, left = sorted(draw.samples), known.data.samples - draw.at.consumed
        if len(found) != min(draw.batch, left) or len(set(found)) != len(found):
            self.breach(
                DataPromise.SAMPLES,
                f"step {step} of {simulated.job} took {draw.parts}, and wanted {draw.batch} of {left}",
            )
        if known.data.mode is SamplingMode.SHARED:
            places = range(draw.at.consumed, draw.at.consumed + len(found))
            should = sorted(known.data.sampler().samples_at(draw.at.epoch, places).tolist())
            if found != should:
                self.breach(DataPromise.SAMPLES, f"step {step} of {simulated.job} took {found}, and not {should}")

    # In the end.

    def epochs(self, job: str) -> list[int]:
        """Of which something was used."""
        return sorted({draw.at.epoch for _, draw in self.jobs[job].used()})

    def check_epochs(self, job: str) -> None:
        """Each sample of a finished epoch was used once."""
        known = self.jobs[job]
        used: defaultdict[int, list[int]] = defaultdict(list)
        end = SamplerState(0, 0)
        last: dict[int, int] = {}
        for _, draw in known.used():
            used[draw.at.epoch] += draw.samples
            end, last[draw.at.epoch] = known.behind(draw), draw.batch
        for epoch, samples in used.items():
            left_out = known.data.samples - len(samples)
            is_finished = epoch < end.epoch
            is_right = left_out < last[epoch] if known.data.drop_last else not left_out
            if len(set(samples)) != len(samples) or (is_finished and not is_right):
                self.breach(
                    DataPromise.ONCE, f"epoch {epoch} of {job}: {len(samples)} used, {len(set(samples))} of them differ"
                )
            if is_finished:
                self._met("an epoch is finished")

    def check_audit(self, job: str, epoch: int, view: AuditView | None, tellers: set[SimulatedWorker]) -> None:
        """What is said of an epoch is what was; `tellers` have left in good order when nothing was wrong."""
        known, sampler = self.jobs[job], self.jobs[job].data.sampler()
        draws = [draw for _, draw in known.used() if draw.at.epoch == epoch]
        used = {sample for draw in draws for sample in draw.samples}
        told = {sample for draw in draws if draw.witnesses & tellers for sample in draw.samples}
        said = set(range(known.data.samples))
        if view is not None and view.missing_total:
            missing = [sample for start, end in view.missing for sample in sampler.samples_at(epoch, range(start, end))]
            said -= set(map(int, missing))
        elif view is None:
            said = set()
        ended = bool(draws) and known.behind(draws[-1]).epoch > epoch
        left_out = set(range(known.data.samples)) - used if ended else set[int]()
        if wrong := said - used - left_out:
            self.breach(DataPromise.AUDIT, f"epoch {epoch} of {job}: {sorted(wrong)} are said to be used, and were not")
        if untold := told - said:
            self.breach(DataPromise.AUDIT, f"epoch {epoch} of {job}: {sorted(untold)} were used, and are missing")
        if view is not None:
            self._check_sums(job, view, len(used & said), ended)

    def _check_sums(self, job: str, view: AuditView, used: int, ended: bool) -> None:
        if view.repeated_total or view.used != used:
            self.breach(DataPromise.AUDIT, f"epoch {view.epoch} of {job}: {used} were used, and not as {view} says")
        if view.complete != (view.missing_total == 0):
            self.breach(DataPromise.AUDIT, f"epoch {view.epoch} of {job}: complete or not? {view}")
        if ended:
            self._met("an epoch is proven" if view.complete else "an epoch cannot be proven")


def _in_words(sampler: ElasticSampler) -> str:
    return str({name: np.asarray(value).tolist() for name, value in sorted(sampler.state_dict().items())})
