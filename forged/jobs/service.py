"""Jobs on the bus."""

from __future__ import annotations

from collections.abc import Callable

from forged.bus import Bus
from forged.clock import Clock
from forged.jobs.core import FLOOR_KEY, PREFIX, JobBook
from forged.jobs.model import AddNote, ChangeJob, CreateJob, Job, JobPage, ListJobs, RemoveJob, ShowJob
from forged.ledger import read_all
from forged.messages import Call, Decision, Fence
from forged.pages import take_page
from forged.store.port import Store

OWNER = "jobs"


class JobService:
    """Owns the jobs; answers what is asked of them."""

    def __init__(self, bus: Bus, clock: Clock, book: JobBook, generation: Callable[[str], int] = lambda job: 0) -> None:
        self.book = book
        self._generation = generation
        self._bus = bus
        self._clock = clock
        bus.serve(CreateJob, self._create, owner=OWNER)
        bus.serve(ChangeJob, lambda request, _: book.change(request), owner=OWNER)
        bus.serve(RemoveJob, lambda request, _: book.remove(request, generation(request.job)), owner=OWNER)
        bus.serve(AddNote, lambda request, _: book.note(request), owner=OWNER)
        bus.serve(ShowJob, lambda request, _: book.get(request.job), owner=OWNER)
        bus.serve(ListJobs, self._list, owner=OWNER)
        bus.desk.fence_of = self._fence

    async def load(self, store: Store) -> None:
        """Become what the store holds."""
        jobs = await read_all(store, PREFIX)
        floor = await store.get(FLOOR_KEY)
        self.book.load((entry.value for entry in jobs), None if floor is None else floor.value)

    def _fence(self, name: str) -> Fence | None:
        """How far a job is: its rescales are counted from where it began."""
        fence = self.book.fence(name)
        return None if fence is None else Fence(fence.term, fence.generation + self._generation(name))

    def _create(self, request: CreateJob, call: Call) -> Decision[Job]:
        return self.book.create(request, call.principal.name, self._clock.wall(), self._bus.ledger.term)

    def _list(self, request: ListJobs, call: Call) -> JobPage:
        return JobPage(*take_page(self.book.visible(call.principal, request.after), request.limit))
