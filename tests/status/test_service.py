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
from tests.spine import Add, Added, Echoed, Level, Spine, call, ids, running, virtual

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
    plugins=[],
    connections=0,
    facts=0,
    last_fact=0,
    revision=0,
    term=1,
    history="h",
    decisions=0,
    batches=0,
    trouble=None,
)


def serving(spine: Spine) -> None:
    StatusService(spine.bus, spine.journal, lambda: STATUS)


def viewer(*jobs: str) -> Call:
    return Call(Principal("a viewer", Role.VIEWER, frozenset(jobs) if jobs else None), "a test")


def story_of(answer: list[msgspec.Raw]) -> list[int]:
    return ids([Record.read(raw) for raw in answer])


async def view(spine: Spine, name: str) -> HandlerView:
    (found,) = [view for view in await spine.bus.ask(ListHandlers()) if view.name == name]
    return found


async def record_family(spine: Spine, *jobs: str) -> list[int]:
    """Facts of which each led to the next, in these jobs."""
    cause = 0
    family = []
    for job in jobs:
        await spine.ledger.append(Decision(None, (Echoed(cause),), job=job), cause=cause).wait()
        cause = spine.journal.last
        family.append(cause)
    return family


@virtual
async def test_it_answers_everything_that_is_said_of_the_daemon() -> None:
    async with running(register=serving, requests=ANSWERED) as spine:
        assert await spine.bus.ask(PingDaemon(), viewer("a")) == Nothing()
        assert await spine.bus.ask(ReadStatus(), viewer("a")) is STATUS


# Stories.


@virtual
async def test_a_story_is_told_from_its_first_cause_to_its_last_consequence() -> None:
    async with running(register=serving) as spine:
        family = await record_family(spine, "", "a", "a")
        for fact_id in family:
            assert story_of(await spine.bus.ask(TellStory(fact_id), viewer())) == family


@virtual
async def test_somebody_bound_to_jobs_is_told_the_parts_that_happened_there() -> None:
    async with running(register=serving) as spine:
        _, second, _, fourth = await record_family(spine, "", "a", "b", "a")
        assert story_of(await spine.bus.ask(TellStory(second), viewer("a"))) == [second, fourth]


@pytest.mark.parametrize("jobs", [("b",), ("",)])
@virtual
async def test_a_fact_that_somebody_may_not_see_is_unknown_to_them(jobs: tuple[str, ...]) -> None:
    async with running(register=serving) as spine:
        (fact_id,) = await record_family(spine, *jobs)
        with pytest.raises(RequestRefused) as caught:
            await spine.bus.ask(TellStory(fact_id), viewer("a"))
        assert caught.value.code == "fact_unknown"


@pytest.mark.parametrize("fact_id", [-1, 0, 10_000])
@virtual
async def test_a_fact_that_is_not_kept_is_refused_with_those_that_are(fact_id: int) -> None:
    async with running(register=serving) as spine:
        await spine.add()
        [oldest] = spine.journal.after(spine.journal.floor, 1)
        assert oldest.id == 2, "ids have holes"
        with pytest.raises(RequestRefused, match=f"kept are 2 to {spine.journal.last}"):
            await spine.bus.ask(TellStory(fact_id))


@virtual
async def test_a_story_fits_into_a_frame() -> None:
    async with running(register=serving) as spine:
        await spine.add()
        origin = spine.journal.last
        for _ in range(12):
            large = Decision(None, (Added(1, 1),), job="j" * 100_000)
            await spine.ledger.append(large, cause=origin).wait()
        told = await spine.bus.ask(TellStory(origin))
        assert 1 < len(told) < 13
        assert sum(len(bytes(raw)) for raw in told) <= STORY_BYTES_MAX


@virtual
async def test_what_somebody_may_not_see_takes_no_room_in_their_story() -> None:
    async with running(register=serving) as spine:
        cause = 0
        for _ in range(12):
            hidden = Decision(None, (Added(1, 1),), job="j" * 100_000)
            await spine.ledger.append(hidden, cause=cause).wait()
            cause = spine.journal.last
        await spine.ledger.append(Decision(None, (Echoed(cause),), job="a"), cause=cause).wait()
        own = spine.journal.last
        assert story_of(await spine.bus.ask(TellStory(own), viewer("a"))) == [own]


# Handlers.


@virtual
async def test_every_handler_is_listed_with_what_it_did() -> None:
    def failing(_: Record) -> None:
        raise ValueError("boom")

    async def wrapper(request: Any, _: Call, proceed: Any) -> Any:
        return await proceed(request)

    def register(spine: Spine) -> None:
        serving(spine)
        spine.bus.on(Added, failing, name="failing", failures_max=2)
        spine.bus.on_signal(Level, lambda *_: None, name="gauge")
        spine.bus.wrap(Add, wrapper, owner="plugin")

    async with running(register=register) as spine:
        for _ in range(3):
            await spine.add()
        spine.bus.signal(Level("tank"), call())
        await spine.settle()
        failed = await view(spine, "failing")
        assert (failed.kind, failed.messages, failed.quarantined) == ("fact", ["Added"], True)
        assert (failed.handled, failed.failed, failed.dropped, failed.queued) == (2, 2, 1, 0)
        added = await view(spine, "tally < plugin")
        assert (added.kind, added.messages, added.handled) == ("request", ["Add"], 3)
        assert added.p50_s <= added.p99_s
        assert (await view(spine, "gauge")).kind == "signal"


@virtual
async def test_a_handler_of_all_facts_says_so() -> None:
    async with running(register=serving) as spine:
        spine.bus.on(Fact, lambda _: None, name="everything")
        assert (await view(spine, "everything")).messages == ["*"]


@virtual
async def test_an_operator_readmits_a_handler() -> None:
    heard: list[int] = []

    def once_bitten(record: Record) -> None:
        heard.append(record.id)
        if len(heard) == 1:
            raise ValueError("boom")

    def register(spine: Spine) -> None:
        serving(spine)
        spine.bus.on(Added, once_bitten, name="plugin", failures_max=1)

    async with running(register=register) as spine:
        await spine.add()
        await spine.settle()
        with pytest.raises(RequestRefused):
            await spine.bus.ask(ReadmitHandler("plugin"), viewer())
        assert await spine.bus.ask(ReadmitHandler("plugin")) == Nothing()
        assert not (await view(spine, "plugin")).quarantined
        await spine.add()
        await spine.settle()
        assert len(heard) == 2
