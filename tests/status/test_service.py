from __future__ import annotations

from typing import Any

import msgspec
import pytest

from forged.auth.model import Principal, Role
from forged.errors import RequestRefused
from forged.kernel.messages import Call, Decision, Fact, Nothing, Record
from forged.status.model import (
    HandlerView,
    ListHandlers,
    PingDaemon,
    ReadmitHandler,
    ReadStatus,
    Status,
    TellStory,
)
from forged.status.service import STORY_BYTES_MAX, StatusService
from tests.kernel_fixture import Add, Added, Echoed, Kernel, Level, call, ids, on_virtual_time, running

ANSWERED = (PingDaemon, ReadStatus, TellStory, ListHandlers, ReadmitHandler)
STATUS = Status(
    version="1",
    pid=2,
    uptime_s=3.0,
    listen=[],
    http=None,
    socket=None,
    data_dir="/data",
    jobs=0,
    workers=0,
    checkpoints=0,
    plugins=[],
    connections=0,
    facts=0,
    last_fact=0,
    revision=0,
    term=1,
    history="h",
    decisions=0,
    batches=0,
    write_error=None,
)


def serving(kernel: Kernel) -> None:
    StatusService(kernel.bus, kernel.journal, lambda: STATUS)


def viewer(*jobs: str) -> Call:
    return Call(Principal("a viewer", Role.VIEWER, frozenset(jobs) if jobs else None), "a test")


def story_of(answer: list[msgspec.Raw]) -> list[int]:
    return ids([Record.read(raw) for raw in answer])


async def view(kernel: Kernel, name: str) -> HandlerView:
    (found,) = [view for view in await kernel.bus.ask(ListHandlers()) if view.name == name]
    return found


async def record_family(kernel: Kernel, *jobs: str) -> list[int]:
    """A chain of facts in these jobs; each causes the next."""
    cause = 0
    family = []
    for job in jobs:
        await kernel.ledger.append(Decision(None, (Echoed(cause),), job=job), cause=cause).wait()
        cause = kernel.journal.last
        family.append(cause)
    return family


@on_virtual_time
async def test_it_answers_everything_that_is_said_of_the_daemon() -> None:
    async with running(register=serving, requests=ANSWERED) as kernel:
        assert await kernel.bus.ask(PingDaemon(), viewer("a")) == Nothing()
        assert await kernel.bus.ask(ReadStatus(), viewer("a")) is STATUS


# Stories.


@on_virtual_time
async def test_story_has_all_facts_from_first_cause_to_last_consequence() -> None:
    async with running(register=serving) as kernel:
        family = await record_family(kernel, "", "a", "a")
        for fact_id in family:
            assert story_of(await kernel.bus.ask(TellStory(fact_id), viewer())) == family


@on_virtual_time
async def test_story_for_a_job_bound_viewer_has_only_facts_of_its_jobs() -> None:
    async with running(register=serving) as kernel:
        _, second, _, fourth = await record_family(kernel, "", "a", "b", "a")
        assert story_of(await kernel.bus.ask(TellStory(second), viewer("a"))) == [second, fourth]


@pytest.mark.parametrize("jobs", [("b",), ("",)])
@on_virtual_time
async def test_story_of_a_fact_of_another_job_is_refused_as_unknown(jobs: tuple[str, ...]) -> None:
    async with running(register=serving) as kernel:
        (fact_id,) = await record_family(kernel, *jobs)
        with pytest.raises(RequestRefused) as caught:
            await kernel.bus.ask(TellStory(fact_id), viewer("a"))
        assert caught.value.code == "fact_unknown"


@pytest.mark.parametrize("fact_id", [-1, 0, 10_000])
@on_virtual_time
async def test_a_fact_that_is_not_kept_is_refused_with_those_that_are(fact_id: int) -> None:
    async with running(register=serving) as kernel:
        await kernel.add()
        [oldest] = kernel.journal.after(kernel.journal.floor, 1)
        assert oldest.id == 2, "ids have holes"
        with pytest.raises(RequestRefused, match=f"the journal has facts 2 to {kernel.journal.last}"):
            await kernel.bus.ask(TellStory(fact_id))


@on_virtual_time
async def test_a_story_fits_into_a_frame() -> None:
    async with running(register=serving) as kernel:
        await kernel.add()
        origin = kernel.journal.last
        for _ in range(12):
            large = Decision(None, (Added(1, 1),), job="j" * 100_000)
            await kernel.ledger.append(large, cause=origin).wait()
        told = await kernel.bus.ask(TellStory(origin))
        assert 1 < len(told) < 13
        assert sum(len(bytes(raw)) for raw in told) <= STORY_BYTES_MAX


@on_virtual_time
async def test_hidden_facts_do_not_count_towards_the_size_of_a_story() -> None:
    async with running(register=serving) as kernel:
        cause = 0
        for _ in range(12):
            hidden = Decision(None, (Added(1, 1),), job="j" * 100_000)
            await kernel.ledger.append(hidden, cause=cause).wait()
            cause = kernel.journal.last
        await kernel.ledger.append(Decision(None, (Echoed(cause),), job="a"), cause=cause).wait()
        own = kernel.journal.last
        assert story_of(await kernel.bus.ask(TellStory(own), viewer("a"))) == [own]


# Handlers.


@on_virtual_time
async def test_every_handler_is_listed_with_its_counts() -> None:
    def failing(_: Record) -> None:
        raise ValueError("boom")

    async def wrapper(request: Any, _: Call, proceed: Any) -> Any:
        return await proceed(request)

    def register(kernel: Kernel) -> None:
        serving(kernel)
        kernel.bus.on(Added, failing, name="failing", failures_max=2)
        kernel.bus.on_signal(Level, lambda *_: None, name="gauge")
        kernel.bus.wrap(Add, wrapper, owner="plugin")

    async with running(register=register) as kernel:
        for _ in range(3):
            await kernel.add()
        kernel.bus.signal(Level("tank"), call())
        await kernel.settle()
        failed = await view(kernel, "failing")
        assert (failed.kind, failed.messages, failed.quarantined) == ("fact", ["Added"], True)
        assert (failed.handled, failed.failed, failed.dropped, failed.queued) == (2, 2, 1, 0)
        added = await view(kernel, "tally < plugin")
        assert (added.kind, added.messages, added.handled) == ("request", ["Add"], 3)
        assert added.p50_s <= added.p99_s
        assert (await view(kernel, "gauge")).kind == "signal"


@on_virtual_time
async def test_a_handler_of_all_facts_says_so() -> None:
    async with running(register=serving) as kernel:
        kernel.bus.on(Fact, lambda _: None, name="everything")
        assert (await view(kernel, "everything")).messages == ["*"]


@on_virtual_time
async def test_an_operator_readmits_a_handler() -> None:
    heard: list[int] = []

    def once_bitten(record: Record) -> None:
        heard.append(record.id)
        if len(heard) == 1:
            raise ValueError("boom")

    def register(kernel: Kernel) -> None:
        serving(kernel)
        kernel.bus.on(Added, once_bitten, name="plugin", failures_max=1)

    async with running(register=register) as kernel:
        await kernel.add()
        await kernel.settle()
        with pytest.raises(RequestRefused):
            await kernel.bus.ask(ReadmitHandler("plugin"), viewer())
        assert await kernel.bus.ask(ReadmitHandler("plugin")) == Nothing()
        assert not (await view(kernel, "plugin")).quarantined
        await kernel.add()
        await kernel.settle()
        assert len(heard) == 2
