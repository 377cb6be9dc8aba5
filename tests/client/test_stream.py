"""Streams of facts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec import Raw

from forged.auth.model import Role
from forged.client.client import EARLIEST
from forged.client.stream import WINDOW_FACTS, FactStream
from forged.errors import ForgedError, RequestRefused
from forged.jobs.model import JobCreated, NoteAdded
from forged.kernel.messages import Fact, Gap, Record
from forged.net.protocol.messages import Credit, Ended, Facts, GapMessage, Subscribe, Unsubscribe
from tests.client.daemon_runner import DaemonRunner, ReusableStore, config_in
from tests.client.proxy import Proxy
from tests.client.test_client import client_of

SEED = 7


def record(fact_id: int) -> Raw:
    fact = NoteAdded(f"note {fact_id}")
    return Raw(Record.of(fact, fact_id=fact_id, at=0.0, job="a", generation=0, cause=0, origin="a test").data)


def facts(*ids: int, upto: int | None = None) -> Facts:
    return Facts(1, max(ids, default=0) if upto is None else upto, tuple(map(record, ids)))


class Reader:
    """A stream without a client, and the messages that it sends."""

    def __init__(self, since: int | None = EARLIEST, until: int | None = None) -> None:
        self.sent: list[Any] = []
        self.stream = FactStream(
            1, since, (), (), opened=self.sent.append, closed=self.sent.append, until=until, grant=self.sent.append
        )

    async def open(self, *, history: str = "h1", upto: int = 0) -> Reader:
        opening = asyncio.create_task(self.stream.__aenter__())
        await asyncio.sleep(0)
        self.subscribe(history)
        self.stream.take(facts(upto=upto))
        await opening
        return self

    def subscribe(self, history: str = "h1") -> Subscribe:
        return self.stream.subscribe(history)

    async def read(self, count: int) -> list[int | Gap]:
        return [_id(await anext(self.stream)) for _ in range(count)]


def _id(item: Record | Gap) -> int | Gap:
    return item.id if isinstance(item, Record) else item


class TestPosition:
    async def test_facts_are_read_once_and_in_order(self) -> None:
        reader = await Reader().open()
        reader.stream.take(facts(1, 2))
        reader.stream.take(facts(1, 2, 3))
        assert await reader.read(3) == [1, 2, 3]
        assert reader.stream.waiting == 0

    async def test_resubscription_starts_after_the_last_received_fact(self) -> None:
        reader = await Reader().open()
        reader.stream.take(facts(1, 2, upto=9))
        assert reader.subscribe().since == 9

    async def test_resubscription_before_the_first_reply_repeats_the_readers_position(self) -> None:
        reader = Reader(since=None)
        assert reader.subscribe().since is None
        assert reader.subscribe().since is None
        reader.stream.take(facts(upto=5))
        assert reader.subscribe().since == 5

    async def test_messages_that_arrive_again_give_neither_facts_nor_gaps_twice(self) -> None:
        reader = await Reader().open()
        batch = (facts(1), GapMessage(1, 2, 7, "forgotten"), facts(8, 9))
        for message in (*batch, *batch, facts(10)):
            reader.stream.take(message)
        assert await reader.read(5) == [1, Gap(2, 7, "forgotten"), 8, 9, 10]
        assert reader.stream.waiting == 0

    async def test_gap_is_returned_in_place_of_the_missing_facts(self) -> None:
        reader = await Reader().open()
        reader.stream.take(facts(1))
        reader.stream.take(GapMessage(1, 2, 7, "forgotten"))
        reader.stream.take(facts(8))
        assert await reader.read(3) == [1, Gap(2, 7, "forgotten"), 8]

    async def test_position_belongs_to_the_history_that_sent_the_facts(self) -> None:
        reader = await Reader().open(history="h1")
        reader.stream.take(facts(1, 2))
        lost_before_an_answer = reader.subscribe("h2")
        assert (lost_before_an_answer.history, lost_before_an_answer.since) == ("h1", 2)
        again = reader.subscribe("h2")
        assert again.history == "h1"
        reader.stream.take(GapMessage(1, 0, 0, "another history"))
        reader.stream.take(facts(1))
        assert (reader.subscribe("h2").history, reader.stream.position) == ("h2", 1)
        assert await reader.read(4) == [1, 2, Gap(0, 0, "another history"), 1]

    async def test_until_does_not_apply_to_another_history(self) -> None:
        reader = await Reader(until=100).open(history="h1")
        reader.stream.take(facts(1))
        reader.subscribe("h2")
        reader.stream.take(GapMessage(1, 0, 0, "another history"))
        assert [_id(item) async for item in reader.stream] == [1, Gap(0, 0, "another history")]


class TestCredit:
    async def test_the_first_credit_is_a_window(self) -> None:
        assert Reader().subscribe().credit == WINDOW_FACTS

    async def test_half_a_window_is_granted_after_it_was_read(self) -> None:
        reader = await Reader().open()
        reader.stream.take(facts(*range(1, WINDOW_FACTS + 1)))
        await reader.read(WINDOW_FACTS // 2 - 1)
        assert not any(isinstance(one, Credit) for one in reader.sent)
        await reader.read(1)
        assert reader.sent[-1] == Credit(1, WINDOW_FACTS // 2)

    async def test_resubscription_credit_excludes_unread_facts(self) -> None:
        reader = await Reader().open()
        reader.stream.take(facts(*range(1, 101)))
        await reader.read(40)
        assert reader.subscribe().credit == WINDOW_FACTS - 60
        await reader.read(60)
        reader.stream.take(facts(*range(101, WINDOW_FACTS // 2 + 41)))
        await reader.read(WINDOW_FACTS // 2 - 60)
        assert reader.sent[-1] == Credit(1, WINDOW_FACTS // 2)

    async def test_idle_reader_buffers_at_most_the_window(self, runner: DaemonRunner) -> None:
        async with client_of(runner) as client, client_of(runner) as other:
            await other.create_job("a")
            async with client.facts(NoteAdded, since=None) as stream:
                for start in range(0, 2 * WINDOW_FACTS, 100):
                    await asyncio.gather(*(other.note("a", f"{start + number}") for number in range(100)))
                await client.ping()
                assert stream.waiting == WINDOW_FACTS
                received = [_fact(await anext(stream)).text for _ in range(2 * WINDOW_FACTS)]
        assert sorted(map(int, received)) == list(range(2 * WINDOW_FACTS))


class TestEnding:
    async def test_use_outside_the_block_is_refused(self) -> None:
        reader = Reader()
        with pytest.raises(RequestRefused, match="not open"):
            await anext(reader.stream)

    async def test_second_opening_is_refused(self) -> None:
        reader = await Reader().open()
        with pytest.raises(RequestRefused, match="opened only once"):
            await reader.stream.__aenter__()

    async def test_close_ends_all_readers(self) -> None:
        reader = await Reader().open()
        first, second = (asyncio.create_task(anext(reader.stream, None)) for _ in range(2))
        await asyncio.sleep(0)
        reader.stream.close()
        assert (await first, await second) == (None, None)

    async def test_close_discards_unread_facts(self) -> None:
        reader = await Reader().open()
        reader.stream.take(facts(1, 2))
        reader.stream.close()
        assert [item async for item in reader.stream] == []

    async def test_closing_during_opening_ends_the_wait(self) -> None:
        reader = Reader()
        opening = asyncio.create_task(reader.stream.__aenter__())
        await asyncio.sleep(0)
        reader.stream.close()
        assert await opening is reader.stream
        assert [item async for item in reader.stream] == []

    async def test_a_stream_cancelled_while_opening_is_not_subscribed_again(self) -> None:
        reader = Reader()
        opening = asyncio.create_task(reader.stream.__aenter__())
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert reader.sent == [reader.stream, reader.stream]

    async def test_facts_received_before_a_failure_are_read_first(self) -> None:
        reader = await Reader().open()
        reader.stream.take(facts(1))
        reader.stream.take(Ended(1, "refused", "forbidden", "not yours"))
        assert await reader.read(1) == [1]
        for _ in range(2):
            with pytest.raises(RequestRefused, match="not yours"):
                await anext(reader.stream)

    async def test_several_tasks_share_the_facts(self) -> None:
        reader = await Reader().open()
        first, second = (asyncio.create_task(reader.read(1)) for _ in range(2))
        await asyncio.sleep(0)
        reader.stream.take(facts(1, 2))
        assert sorted([*await first, *await second], key=str) == [1, 2]

    async def test_a_cancelled_read_loses_nothing(self) -> None:
        reader = await Reader().open()
        reading = asyncio.create_task(reader.read(1))
        await asyncio.sleep(0)
        reader.stream.take(facts(1))
        reading.cancel()
        await asyncio.wait([reading])
        assert await reader.read(1) == [1]

    async def test_stream_ends_after_until(self) -> None:
        reader = await Reader(until=3).open()
        reader.stream.take(facts(1, 3))
        assert [_id(item) async for item in reader.stream] == [1, 3]


class TestRealDaemon:
    async def test_facts_arrive_as_they_become_durable(self, runner: DaemonRunner) -> None:
        async with client_of(runner) as client, client.facts(since=None) as stream:
            job = await client.create_job("a", {"lr": 1})
            created = await anext(stream)
            assert isinstance(created, Record)
            assert created.fact == JobCreated(job.name, job.settings)
            assert created.job == "a"

    async def test_only_the_selected_facts_arrive(self, runner: DaemonRunner) -> None:
        async with client_of(runner) as client:
            await client.create_job("a")
            await client.create_job("b")
            await client.note("a", "mine")
            async with client.facts(NoteAdded, "JobCreated", since=EARLIEST, jobs=["b"]) as stream:
                await client.note("b", "theirs")
                received = [await anext(stream) for _ in range(2)]
            assert [_fact(item) for item in received] == [JobCreated("b", {}), NoteAdded("theirs")]

    async def test_type_fact_selects_every_fact(self, runner: DaemonRunner) -> None:
        async with client_of(runner) as client:
            everything = [item async for item in client.past_facts(Fact)]
            assert [_id(item) for item in everything] == [_id(item) async for item in client.past_facts()]

    async def test_past_facts_without_matches_end(self, runner: DaemonRunner) -> None:
        async with client_of(runner) as client:
            await client.create_job("a")
            assert [item async for item in client.past_facts("NoSuchFact")] == []
            assert [item async for item in client.past_facts(jobs=["none"])] == []

    async def test_past_facts_end_even_if_the_last_fact_is_not_visible(self, runner: DaemonRunner) -> None:
        async with client_of(runner) as operator:
            await operator.create_job("a")
            text = await operator.create_token("bot", Role.VIEWER, jobs=["a"])
        async with client_of(runner, token=text) as client:
            assert [_fact(item) async for item in client.past_facts()] == [JobCreated("a", {})]

    async def test_forbidden_stream_is_refused_and_not_retried(self, runner: DaemonRunner, proxy: Proxy) -> None:
        async with client_of(runner) as operator:
            text = await operator.create_token("bot", Role.VIEWER, jobs=["a"])
        async with client_of(proxy, token=text) as client:
            with pytest.raises(RequestRefused, match="b"):
                async with client.facts(jobs=["b"]):
                    pass
            proxy.cut()
            await client.ping()
        subscriptions = [one for way, one in proxy.seen if isinstance(one, Subscribe)]
        assert len(subscriptions) == 1

    async def test_too_large_selection_fails_only_its_stream(self, runner: DaemonRunner, proxy: Proxy) -> None:
        async with client_of(proxy) as client:
            with pytest.raises(ForgedError):
                async with client.facts(jobs=["x" * 1000] * 5000):
                    pass
            proxy.cut()
            assert await client.ping() >= 0

    async def test_leaving_the_block_unsubscribes(self, runner: DaemonRunner, proxy: Proxy) -> None:
        async with client_of(proxy) as client:
            async with client.facts() as stream:
                pass
            await client.ping()
        assert [one for _, one in proxy.seen if isinstance(one, Unsubscribe)] == [Unsubscribe(stream.number)]

    async def test_no_fact_is_lost_or_seen_twice_over_broken_connections(
        self, runner: DaemonRunner, proxy: Proxy
    ) -> None:
        random = Random(SEED)
        notes = 600

        async def write(writer: Any) -> None:
            await writer.create_job("a")
            for start in range(0, notes, 10):
                await asyncio.gather(*(writer.note("a", f"{start + number}") for number in range(10)))

        proxy.rule = lambda way, message: isinstance(message, Facts) and random.random() < 0.4
        async with client_of(runner) as writer, client_of(proxy) as client:
            async with client.facts(since=EARLIEST) as stream:
                writing = asyncio.create_task(write(writer))
                received = await _until_last_note(stream, notes)
                await writing
            journal = [_id(item) async for item in writer.past_facts()]
        assert [_id(item) for item in received] == journal
        assert proxy.cuts > 5

    async def test_stream_continues_across_daemon_restarts(self, runner: DaemonRunner) -> None:
        async with client_of(runner) as client, client.facts(NoteAdded, since=None) as stream:
            await client.create_job("a")
            for text in ("one", "two", "three"):
                await client.note("a", text)
                await runner.reopen()
            assert [_fact(await anext(stream)) for _ in range(3)] == [
                NoteAdded("one"),
                NoteAdded("two"),
                NoteAdded("three"),
            ]

    async def test_facts_trimmed_during_a_disconnection_are_a_gap(self, runner: DaemonRunner, proxy: Proxy) -> None:
        await runner.reopen(journal_facts_max=100)
        async with client_of(runner) as writer, client_of(proxy) as client:
            await writer.create_job("a")
            async with client.facts(since=None) as stream:
                await writer.note("a", "seen")
                seen = await anext(stream)
                proxy.rule = lambda way, message: way == "down"
                proxy.cut()
                for number in range(200):
                    await writer.note("a", f"{number}")
                proxy.rule = lambda way, message: False
                gap, next_one = await anext(stream), await anext(stream)
        assert isinstance(seen, Record)
        assert isinstance(gap, Gap)
        assert isinstance(next_one, Record)
        assert (gap.first, gap.last) == (seen.id + 1, next_one.id - 1)

    async def test_flood_of_one_job_erases_no_fact_of_another_also_after_a_restart(self, runner: DaemonRunner) -> None:
        await runner.reopen(journal_facts_max=100)
        async with client_of(runner) as client:
            for job in ("quiet", "noisy"):
                await client.create_job(job)
            for number in range(300):
                await client.note("noisy", f"{number}")
                if number % 10 == 0:
                    await client.note("quiet", f"{number}")
            for _ in range(2):
                quiet = [_fact(item) async for item in client.past_facts(jobs=["quiet"])]
                assert quiet == [JobCreated("quiet", {}), *(NoteAdded(f"{number}") for number in range(0, 300, 10))]
                noisy = [item async for item in client.past_facts(jobs=["noisy"])]
                assert len(noisy) >= 60
                assert _fact(noisy[-1]) == NoteAdded("299")
                await runner.reopen()

    async def test_reader_of_all_jobs_gets_the_kept_facts_and_gaps_for_those_that_a_flood_displaced(
        self, runner: DaemonRunner, proxy: Proxy
    ) -> None:
        await runner.reopen(journal_facts_max=100)
        async with client_of(runner) as writer, client_of(proxy) as client:
            for job in ("quiet", "noisy"):
                await writer.create_job(job)
            async with client.facts(since=None) as everything, client.facts(since=None, jobs=["quiet"]) as quiet:
                proxy.rule = lambda way, message: way == "down"
                proxy.cut()
                for number in range(300):
                    await writer.note("quiet" if number % 100 == 50 else "noisy", f"{number}")
                proxy.rule = lambda way, message: False
                assert [_fact(await anext(quiet)) for _ in range(3)] == [NoteAdded(f"{n}") for n in (50, 150, 250)]
                items = await _until_note(everything, "299")
        gaps = [item for item in items if isinstance(item, Gap)]
        ids = [item.id for item in items if isinstance(item, Record)]
        missed = {fact_id for gap in gaps for fact_id in range(gap.first, gap.last + 1)}
        assert ids == sorted(set(ids))
        assert missed.isdisjoint(ids)
        assert len(missed) + len(ids) == 300
        assert {"50", "150", "250"} <= {item.fact.text for item in items if isinstance(item, Record)}  # type: ignore[union-attr]

    @pytest.mark.parametrize("notes", [0, 50])
    async def test_another_history_at_the_same_address_is_a_gap(
        self, runner: DaemonRunner, tmp_path: Path, notes: int
    ) -> None:
        """The other history is longer or shorter than the first one."""
        other = await _other_history(tmp_path / "other", notes)
        async with client_of(runner) as client:
            await client.create_job("a")
            async with client.facts(JobCreated, NoteAdded, since=EARLIEST) as stream:
                await client.note("a", "seen")
                assert [_fact(await anext(stream)) for _ in range(2)] == [JobCreated("a", {}), NoteAdded("seen")]
                await runner.reopen(other)
                gap = await anext(stream)
                assert isinstance(gap, Gap)
                assert "another history" in gap.reason
                rest = [_id(await anext(stream)) for _ in range(notes + 1)]
            journal = [_id(item) async for item in client.past_facts(JobCreated, NoteAdded)]
        assert rest == journal


async def _other_history(directory: Path, notes: int) -> ReusableStore:
    """A store in which a daemon has taken these notes."""
    runner = DaemonRunner(config_in(directory), store := ReusableStore("another history"))
    await runner.open()
    async with client_of(runner) as client:
        await client.create_job("b")
        for number in range(notes):
            await client.note("b", f"{number}")
    await runner.close()
    return store


async def _until_last_note(stream: FactStream, notes: int) -> list[Record | Gap]:
    received: list[Record | Gap] = []
    left = notes
    while left:
        received.append(await anext(stream))
        left -= isinstance(_fact(received[-1]), NoteAdded)
    return received


async def _until_note(stream: FactStream, text: str) -> list[Record | Gap]:
    received = [await anext(stream)]
    while isinstance(received[-1], Gap) or received[-1].fact != NoteAdded(text):
        received.append(await anext(stream))
    return received


def _fact(item: Record | Gap) -> Any:
    return item.fact if isinstance(item, Record) else item
