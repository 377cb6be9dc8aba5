from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
import pytest

from forged.auth.model import Principal, Role
from forged.errors import RequestRefused, Unavailable
from forged.jobs.core import JobBook
from forged.jobs.model import (
    REQUESTS,
    AddNote,
    ChangeJob,
    CreateJob,
    JobChanged,
    JobCreated,
    JobPage,
    JobRemoved,
    ListJobs,
    NoteAdded,
    RemoveJob,
    SettingValue,
    ShowJob,
)
from forged.jobs.service import UNTRAINED, JobService, TrainingPort
from forged.kernel.messages import Call, Fence, Nothing
from forged.kernel.store.port import Store
from forged.pagination import PAGE_BYTES_MAX
from tests.faulty_store import FaultyStore, full
from tests.kernel_fixture import OPERATOR, Kernel, on_virtual_time, running
from tests.simulation.environment.loop import EPOCH_S

WORKER_OF_A = Call(Principal("a worker", Role.WORKER, frozenset({"a"})), "a test")


def join(kernel: Kernel, training: TrainingPort = UNTRAINED) -> JobService:
    service = JobService(kernel.bus, kernel.clock, JobBook(), training)
    kernel.ledger.register(service)
    return service


def serving(kernel: Kernel, training: TrainingPort = UNTRAINED) -> None:
    join(kernel, training)


async def jobs_in(store: Store) -> dict[str, int]:
    """The versions of the jobs that a daemon on this store knows."""
    async with running(store, serving) as kernel:
        return {job.name: job.version for job in (await kernel.bus.ask(ListJobs())).jobs}


@on_virtual_time
async def test_service_answers_every_job_request() -> None:
    async with running(register=serving, requests=REQUESTS) as kernel:
        job = await kernel.bus.ask(CreateJob("a", {"lr": 0.1}))
        assert (job.created_by, int(job.created_at)) == ("daemon", int(EPOCH_S))
        assert await kernel.bus.ask(ShowJob("a")) == job
        assert (await kernel.bus.ask(ChangeJob("a", {"lr": 0.2}, 1))).version == 2
        assert await kernel.bus.ask(AddNote("a", "hi")) == Nothing()
        assert [one.name for one in (await kernel.bus.ask(ListJobs())).jobs] == ["a"]
        assert await kernel.bus.ask(RemoveJob("a")) == Nothing()
        assert await kernel.bus.ask(ListJobs()) == JobPage([], more=False)
        assert [type(fact) for fact in kernel.facts()] == [JobCreated, JobChanged, NoteAdded, JobRemoved]


@on_virtual_time
async def test_facts_of_a_job_carry_its_name() -> None:
    async with running(register=serving) as kernel:
        await kernel.bus.ask(CreateJob("a"))
        await kernel.bus.ask(AddNote("a", "hi"))
        await kernel.bus.ask(RemoveJob("a"))
        assert {record.job for record in kernel.journal.after(0, 10)} == {"a"}


@on_virtual_time
async def test_jobs_survive_a_restart() -> None:
    store = FaultyStore()
    async with running(store, serving) as kernel:
        await kernel.bus.ask(CreateJob("a"))
        await kernel.bus.ask(CreateJob("b"))
        await kernel.bus.ask(ChangeJob("a", {"lr": 1}, 1))
        await kernel.bus.ask(RemoveJob("b"))
    assert await jobs_in(store) == {"a": 2}


@on_virtual_time
async def test_a_job_whose_commit_failed_does_not_exist() -> None:
    store = FaultyStore()
    async with running(store, serving) as kernel:
        store.commit_error = full()
        with pytest.raises(Unavailable):
            await kernel.bus.ask(CreateJob("a"))
        assert await kernel.bus.ask(ListJobs()) == JobPage([], more=False)
        store.commit_error = None
        await kernel.ledger.writable()
        assert (await kernel.bus.ask(CreateJob("a", {"lr": 1}))).settings == {"lr": 1}


@on_virtual_time
async def test_worker_creates_its_own_job_and_sees_no_other() -> None:
    async with running(register=serving) as kernel:
        await kernel.bus.ask(CreateJob("b"))
        assert (await kernel.bus.ask(CreateJob("a"), WORKER_OF_A)).created_by == "a worker"
        assert [job.name for job in (await kernel.bus.ask(ListJobs(), WORKER_OF_A)).jobs] == ["a"]
        with pytest.raises(RequestRefused) as caught:
            await kernel.bus.ask(ShowJob("b"), WORKER_OF_A)
        assert caught.value.code == "forbidden"


@on_virtual_time
async def test_a_viewer_changes_nothing() -> None:
    viewer = Call(Principal("a viewer", Role.VIEWER), "a test")
    async with running(register=serving) as kernel:
        await kernel.bus.ask(CreateJob("a"))
        for request in (CreateJob("b"), ChangeJob("a", {}, 1), AddNote("a", "hi"), RemoveJob("a")):
            with pytest.raises(RequestRefused):
                await kernel.bus.ask(request, viewer)
        assert (await kernel.bus.ask(ShowJob("a"), viewer)).version == 1


@on_virtual_time
async def test_callers_are_checked_against_the_fence_of_the_job() -> None:
    async with running(register=serving) as kernel:
        fence = (await kernel.bus.ask(CreateJob("a"))).fence
        assert await kernel.bus.ask(AddNote("a", "hi"), Call(OPERATOR, "a test", fence=fence)) == Nothing()
        assert kernel.bus.dispatcher.fence_of("a") == fence == Fence(kernel.ledger.term, 0)
        assert kernel.bus.dispatcher.fence_of("b") is None


@on_virtual_time
async def test_worker_of_a_removed_job_is_fenced_off_the_next_job_of_that_name() -> None:
    async with running(register=serving) as kernel:
        held = (await kernel.bus.ask(CreateJob("a"))).fence
        await kernel.bus.ask(RemoveJob("a"))
        await kernel.bus.ask(CreateJob("a"))
        with pytest.raises(RequestRefused) as caught:
            await kernel.bus.ask(AddNote("a", "hi"), Call(OPERATOR, "a test", fence=held))
        assert caught.value.code == "fenced"


@on_virtual_time
async def test_first_generation_of_new_jobs_survives_a_restart() -> None:
    store = FaultyStore()
    async with running(store, serving) as kernel:
        await kernel.bus.ask(CreateJob("a"))
        await kernel.bus.ask(RemoveJob("a"))
    service: list[JobService] = []
    async with running(store, lambda kernel: service.append(join(kernel))) as kernel:
        first_term = kernel.ledger.term - 1
        again = service[0].book.create(CreateJob("a"), "somebody", 1.0, first_term)
        assert again.reply.fence == Fence(first_term, 1)


# Pages.


@on_virtual_time
async def test_jobs_are_listed_in_pages_that_follow_each_other() -> None:
    async with running(register=serving) as kernel:
        for name in "dbeca":
            await kernel.bus.ask(CreateJob(name))
        first = await kernel.bus.ask(ListJobs(limit=3))
        second = await kernel.bus.ask(ListJobs(first.jobs[-1].name, limit=3))
        assert ([job.name for job in first.jobs], first.more) == (["a", "b", "c"], True)
        assert ([job.name for job in second.jobs], second.more) == (["d", "e"], False)


@on_virtual_time
async def test_a_page_of_jobs_fits_into_a_frame() -> None:
    async with running(register=serving) as kernel:
        for number in range(30):
            await kernel.bus.ask(CreateJob(f"j{number}", {"x": "y" * 60_000}))
        page = await kernel.bus.ask(ListJobs())
        assert page.more
        assert len(msgspec.msgpack.encode(page)) < PAGE_BYTES_MAX + len(b"some framing" * 4)


@on_virtual_time
async def test_last_page_is_known_when_the_rest_is_hidden_from_the_caller() -> None:
    async with running(register=serving) as kernel:
        await kernel.bus.ask(CreateJob("a"))
        await kernel.bus.ask(CreateJob("b"))
        assert not (await kernel.bus.ask(ListJobs(limit=1), WORKER_OF_A)).more


@on_virtual_time
async def test_settings_refused_by_the_training_service_change_nothing() -> None:
    def require(job: str, settings: Mapping[str, SettingValue]) -> None:
        if "wrong" in settings:
            raise RequestRefused("setting_wrong", f"{job} cannot have that", "leave it out")

    training = TrainingPort(require=require)
    async with running(register=lambda kernel: serving(kernel, training)) as kernel:
        await kernel.bus.ask(CreateJob("a", {"lr": 0.1}))
        for request in (CreateJob("b", {"wrong": 1}), ChangeJob("a", {"wrong": 1}, 1)):
            with pytest.raises(RequestRefused, match="cannot have that"):
                await kernel.bus.ask(request)
        assert [(job.name, job.version) for job in (await kernel.bus.ask(ListJobs())).jobs] == [("a", 1)]


@on_virtual_time
async def test_job_with_active_workers_is_removed_only_with_force() -> None:
    workers = {"a": 1, "b": 2}
    training = TrainingPort(workers=lambda job: workers.get(job, 0))
    async with running(register=lambda kernel: serving(kernel, training)) as kernel:
        for job in "abc":
            await kernel.bus.ask(CreateJob(job))
        for job, said in (("a", "job a has 1 worker$"), ("b", "job b has 2 workers$")):
            with pytest.raises(RequestRefused) as error:
                await kernel.bus.ask(RemoveJob(job))
            assert (error.value.code, re.search(said, error.value.message) is not None) == ("job_in_use", True)
        await kernel.bus.ask(RemoveJob("c"))
        await kernel.bus.ask(RemoveJob("a", force=True))
        assert [job.name for job in (await kernel.bus.ask(ListJobs())).jobs] == ["b"]
