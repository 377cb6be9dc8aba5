"""The invariants of slots: what all ranks have staged is kept until it is durable, and is saved if a worker fails."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from tests.simulation.catalog.slots import HostMemory, StagedPart
from tests.simulation.catalog.storage import SaveName

LEFT_S = 3.0
LATE_S = 3.0
"""How old the answer may be by which the daemon decides that a checkpoint on disk is as new."""


@dataclass
class SlotOracle:
    """What the slots of all jobs must hold."""

    now: Callable[[], float]
    memory: HostMemory
    lost: Callable[[str], None]
    """Tells of staged states that are lost."""
    mixed: Callable[[str], None]
    """Tells of parts that are not of one save."""
    is_registered: Callable[[tuple[str, str, bytes]], bool]
    removed_jobs: AbstractSet[str]
    used: dict[tuple[str, str, bytes], list[str]] = field(default_factory=dict)
    """The slots that each worker has opened last."""
    left_at: dict[tuple[str, str, bytes], float] = field(default_factory=dict)
    loaded_at: float = 0.0
    """When the last daemon has started."""
    owed: dict[str, StagedPart] = field(default_factory=dict)
    """By job: a part of the save that must be on disk in the end, or a newer one, because a worker has failed."""
    published_saves: set[SaveName] = field(default_factory=set)
    completed_saves: set[SaveName] = field(default_factory=set)
    """Those that were complete checkpoints of the catalogue; they may have been abandoned."""
    failed_saves: set[SaveName] = field(default_factory=set)
    """Those with a try that has failed."""

    saving: Counter[SaveName] = field(default_factory=Counter)
    """What is being saved from slots now."""
    crossed: set[SaveName] = field(default_factory=set)
    """What was deleted while it was saved from slots, or before: it may be there, unknown to the catalogue."""

    def __post_init__(self) -> None:
        self._best: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        """By job, the step of the best restore point from each time on."""

    def forget(self) -> None:
        """The host has lost its power."""
        self.memory.lose()
        self.owed.clear()
        self.used.clear()

    # What is staged.

    def staged(self, job: str) -> None:
        """All ranks have staged a state; training may have gone back, to an earlier step than that which is owed."""
        newest = self._newest(job)
        if newest and job in self.owed and newest[0].step < self.owed[job].step:
            self.owed[job] = newest[0]

    def worker_failed(self, job: str) -> None:
        """What was staged last is to be saved."""
        newest = self._newest(job)
        if not newest or job in self.removed_jobs or all(part.writer in self.left_at for part in newest):
            return
        if self._best_step(job, self.now()) < newest[0].step and newest[0].save not in self.completed_saves:
            self.owed[job] = newest[0]

    def completed(self, job: str, save: SaveName) -> None:
        """A checkpoint is complete."""
        self.completed_saves.add(save)
        if job in self.owed and self.owed[job].save == save:
            del self.owed[job]

    def offered(self, job: str, step: int) -> None:
        """The best restore point of a job has this step from now on; -1 if there is none."""
        self._best[job].append((self.now(), step))
        if job in self.owed and step >= self.owed[job].step:
            del self.owed[job]

    def _newest(self, job: str) -> Sequence[StagedPart]:
        return next(iter(self.memory.whole_saves(job)), [])

    def _best_step(self, job: str, since: float) -> int:
        """The best step that was offered at any time since then."""
        known = self._best[job]
        recent = [step for at, step in known if at >= since]
        before = next((step for at, step in reversed(known) if at < since), -1)
        return max([before, *recent])

    # What the daemon does.

    def freed(self, slot_ids: Sequence[str]) -> None:
        """The daemon is about to delete slots."""
        for slot_id in slot_ids:
            for worker, used in self.used.items():
                if slot_id in used and self.is_registered(worker) and worker[0] not in self.removed_jobs:
                    self.lost(f"slot {slot_id} is deleted, and worker {worker[1]} of {worker[0]} uses it")
            slot = self.memory.slots.get(slot_id)
            if slot is not None and slot.part is not None:
                newest = self._newest(slot.part.job)
                if slot.part in newest and all(part.writer in self.left_at for part in newest):
                    self.owed.pop(slot.part.job, None)
                if slot.part in newest and not self._is_needless(slot.part.job, newest):
                    self.lost(f"a slot of step {slot.part.step} of {slot.part.job} is deleted, which is not on disk")

    def _is_needless(self, job: str, newest: Sequence[StagedPart]) -> bool:
        if job in self.removed_jobs or newest[0].save in self.completed_saves:
            return True
        if self._best_step(job, self.now() - LATE_S) >= newest[0].step:
            return True
        ends = [self.left_at.get(part.writer) for part in newest]
        # Another daemon may have another clock.
        return all(at is not None and (self.now() - at >= LEFT_S or self.loaded_at >= at) for at in ends)

    def began(self, save: SaveName) -> None:
        self.saving[save] += 1

    def ended(self, save: SaveName) -> None:
        self.saving[save] -= 1

    def deleted(self, save: SaveName) -> None:
        """The daemon deletes the files of a save, or forgets it."""
        if self.saving[save]:
            self.crossed.add(save)

    def published(self, save: SaveName, parts: Sequence[StagedPart]) -> None:
        """The daemon publishes a checkpoint from slots."""
        self.check_one_save(f"{save} is saved from", parts)
        if any(part.save != save for part in parts):
            self.mixed(f"{save} is saved from {parts}")
        self.published_saves.add(save)

    def check_one_save(self, what: str, parts: Sequence[StagedPart]) -> None:
        """The parts must be those of all ranks of one save."""
        ranks = [part.rank for part in parts]
        if len({part.save for part in parts}) != 1 or ranks != list(range(parts[0].world_size)):
            self.mixed(f"{what} {parts}")

    def acknowledged(self, save: SaveName) -> None:
        """A worker was told that its save is durable."""
        if save not in self.published_saves:
            self.lost(f"{save} is acknowledged, and was not published")

    # In the end.

    def unsettled(self) -> Mapping[str, str]:
        """What the daemon still has to do, by job or slot."""
        owed = {
            job: f"{job} is owed step {part.step}" for job, part in self.owed.items() if job not in self.removed_jobs
        }
        return owed | {slot_id: f"slot {slot_id} is not freed" for slot_id in self.memory.slots}
