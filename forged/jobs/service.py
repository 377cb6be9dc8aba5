"""Jobs on the bus: answers requests about jobs, and gives each job its fence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from forged.clock import Clock
from forged.errors import RequestRefused
from forged.jobs.core import FLOOR_KEY, PREFIX, JobBook
from forged.jobs.model import (
    AddNote,
    ChangeJob,
    CreateJob,
    Job,
    JobPage,
    ListJobs,
    RemoveJob,
    SettingValue,
    ShowJob,
)
from forged.kernel.bus import Bus
from forged.kernel.ledger import read_all
from forged.kernel.messages import Call, Decision, Fence, Nothing
from forged.kernel.store.port import Store
from forged.pagination import take_page

OWNER = "jobs"


@dataclass(frozen=True, slots=True)
class TrainingPort:
    """What jobs need to know of the training service."""

    generation: Callable[[str], int] = lambda job: 0
    """A job's generation."""
    workers: Callable[[str], int] = lambda job: 0
    """How many workers a job has that is not over."""
    require: Callable[[str, Mapping[str, SettingValue]], None] = lambda job, settings: None
    """Refuses invalid settings."""


UNTRAINED = TrainingPort()


class JobService:
    """Owns all jobs."""

    def __init__(self, bus: Bus, clock: Clock, book: JobBook, training: TrainingPort = UNTRAINED) -> None:
        self.book = book
        self._training = training
        self._bus = bus
        self._clock = clock
        bus.serve(CreateJob, self._create, owner=OWNER)
        bus.serve(ChangeJob, self._change, owner=OWNER)
        bus.serve(RemoveJob, self._remove, owner=OWNER)
        bus.serve(AddNote, lambda request, _: book.note(request), owner=OWNER)
        bus.serve(ShowJob, lambda request, _: book.get(request.job), owner=OWNER)
        bus.serve(ListJobs, self._list, owner=OWNER)
        bus.dispatcher.fence_of = self._fence

    async def load(self, store: Store) -> None:
        """Replace all jobs by those in the store."""
        jobs = await read_all(store, PREFIX)
        floor = await store.get(FLOOR_KEY)
        self.book.load((entry.value for entry in jobs), None if floor is None else floor.value)

    def settings(self, name: str) -> Mapping[str, SettingValue] | None:
        """A job's settings; None for an unknown job."""
        return self.book.settings(name)

    def _fence(self, name: str) -> Fence | None:
        """A job's current fence: its generations are counted from the fence that it started with."""
        fence = self.book.fence(name)
        return None if fence is None else Fence(fence.term, fence.generation + self._training.generation(name))

    def _create(self, request: CreateJob, call: Call) -> Decision[Job]:
        self._training.require(request.job, request.settings)
        by = call.principal.holder
        now, term = self._clock.wall(), self._bus.ledger.term
        return self.book.create(request, by.name, now, term, is_operator=by.is_operator)

    def _change(self, request: ChangeJob, call: Call) -> Decision[Job]:
        self._training.require(request.job, request.settings)
        return self.book.change(request)

    def _remove(self, request: RemoveJob, call: Call) -> Decision[Nothing]:
        workers = self._training.workers(request.job)
        if workers and not request.force:
            raise RequestRefused(
                "job_in_use",
                f"job {request.job} has {workers} worker{'' if workers == 1 else 's'}",
                f"abort it first (`forgectl jobs abort {request.job}`), or use --force",
            )
        return self.book.remove(request, self._training.generation(request.job))

    def _list(self, request: ListJobs, call: Call) -> JobPage:
        return JobPage(*take_page(self.book.visible(call.principal, request.after), request.limit))
