from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.errors import RequestRefused, Unavailable
from forged.kernel.bus.mailbox import CANCELS_MAX, RETRY_PAUSE_S, Mailbox
from forged.kernel.bus.subscription import FactHandler, Subscription
from forged.kernel.messages import Decision, Gap, Record
from tests.kernel_fixture import Added, Echoed, ids, on_virtual_time, task_group
from tests.simulation.environment.loop import VirtualClock

NOTHING: Decision[None] = Decision(None)


class RunningMailbox:
    """A mailbox, and what it reports."""

    def __init__(self, handler: FactHandler, terms: dict[str, Any]) -> None:
        self.committed: list[int] = []
        self.commit_error: Exception | None = None
        self.reports: list[tuple[int, str]] = []
        self.reloads = 0
        self.writable = asyncio.Event()
        self.writable.set()
        self.gaps: list[Gap] = []
        terms.setdefault("on_gap", self.gaps.append)
        self.mailbox = Mailbox(
            Subscription("watcher", handler, frozenset({Echoed}), **terms),
            now=VirtualClock(asyncio.get_running_loop()).monotonic,
            commit=self._commit,
            reload=self._reload,
            report=lambda _, record, reason: self.reports.append((record.id, reason)),
            writable=self._wait_until_writable,
        )

    def put(self, *fact_ids: int) -> None:
        self.mailbox.put(records(*fact_ids))

    async def idle(self) -> None:
        while not self.mailbox.idle:
            await anyio.sleep(0.001)

    async def supervise(self, seconds: float) -> None:
        """Supervise the mailbox like the bus, for some seconds."""
        for _ in range(int(seconds * 4)):
            await anyio.sleep(0.25)
            if self.mailbox.overdue(asyncio.get_running_loop().time()):
                self.mailbox.interrupt()

    async def _wait_until_writable(self) -> None:
        await self.writable.wait()

    def _commit(self, _: Mailbox, record: Record, decision: Decision[Any]) -> None:
        if self.commit_error is not None:
            raise self.commit_error
        self.committed.append(record.id)

    def _reload(self) -> None:
        self.reloads += 1


def records(*fact_ids: int, job: str = "") -> list[Record]:
    return [Record.of(Echoed(fact_id), fact_id=fact_id, at=0.0, job=job) for fact_id in fact_ids]


@asynccontextmanager
async def running_mailbox(handler: FactHandler, **terms: Any) -> AsyncIterator[RunningMailbox]:
    it = RunningMailbox(handler, terms)
    async with task_group() as tasks:
        tasks.start_soon(it.mailbox.run)
        await anyio.lowlevel.checkpoint()
        yield it


class Seen:
    """A handler that records its facts and misbehaves on chosen ones."""

    def __init__(self, **acts: Callable[[Record], Any]) -> None:
        self.ids: list[int] = []
        self._acts = {int(name.removeprefix("on_")): act for name, act in acts.items()}

    async def __call__(self, record: Record) -> Any:
        self.ids.append(record.id)
        act = self._acts.get(record.id)
        result = act(record) if act else None
        return await result if isinstance(result, Awaitable) else result


def raising(error: BaseException) -> Callable[[Record], Any]:
    def act(_: Record) -> Any:
        raise error

    return act


async def hang(_: Record) -> None:
    await asyncio.Event().wait()


# Order.


@on_virtual_time
async def test_facts_are_handled_one_at_a_time_in_the_order_in_which_they_were_put() -> None:
    running = 0
    seen: list[int] = []

    async def handler(record: Record) -> None:
        nonlocal running
        running += 1
        assert running == 1
        await anyio.sleep(0.01 * (record.id % 3))
        seen.append(record.id)
        running -= 1

    async with running_mailbox(handler) as it:
        it.put(*range(1, 20))
        it.put(*range(20, 40))
        await it.idle()
    assert seen == list(range(1, 40))


@on_virtual_time
async def test_a_plain_function_may_be_a_handler() -> None:
    seen: list[Record] = []
    async with running_mailbox(seen.append) as it:
        it.put(1, 2)
        await it.idle()
    assert ids(seen) == [1, 2]


@on_virtual_time
async def test_putting_never_calls_the_handler() -> None:
    seen = Seen()
    async with running_mailbox(seen) as it:
        it.put(1)
        assert seen.ids == []
        await it.idle()
    assert seen.ids == [1]


@on_virtual_time
async def test_a_fact_put_by_the_handler_waits_for_its_turn() -> None:
    depth = deepest = 0

    def handler(record: Record) -> None:
        nonlocal depth, deepest
        depth += 1
        deepest = max(deepest, depth)
        if record.id < 100:
            it.put(record.id + 1)
        depth -= 1

    async with running_mailbox(handler) as it:
        it.put(1)
        await it.idle()
        assert it.mailbox.statistics.handled == 100
    assert deepest == 1


@on_virtual_time
async def test_handler_without_awaits_yields_to_other_tasks() -> None:
    turns: list[int] = []
    seen = Seen()
    async with running_mailbox(seen) as it:
        it.put(*range(1, 2001))
        while not it.mailbox.idle:
            turns.append(len(seen.ids))
            await asyncio.sleep(0)
    assert len(turns) > 5


# Failures of handlers.


@pytest.mark.parametrize(
    "error", [ValueError("boom"), RequestRefused("no", "no"), Unavailable("not now", "not now"), SystemExit(1)]
)
@on_virtual_time
async def test_handler_exception_skips_only_its_fact(error: BaseException) -> None:
    seen = Seen(on_2=raising(error))
    async with running_mailbox(seen) as it:
        it.put(1, 2, 3)
        await it.idle()
        assert seen.ids == [1, 2, 3]
        assert [fact_id for fact_id, _ in it.reports] == [2]
        assert str(error) in it.reports[0][1]
        assert (it.mailbox.statistics.failed, it.mailbox.statistics.handled) == (1, 3)


@on_virtual_time
async def test_a_cancellation_that_comes_from_within_is_a_failure_like_any_other() -> None:
    async def await_something_cancelled(_: Record) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    seen = Seen(on_1=await_something_cancelled, on_2=raising(asyncio.CancelledError()))
    async with running_mailbox(seen) as it:
        it.put(1, 2, 3)
        await it.idle()
        assert seen.ids == [1, 2, 3]
        reason = "raised CancelledError without being cancelled"
        assert it.reports == [(1, reason), (2, reason)]


@on_virtual_time
async def test_handler_result_of_another_type_is_a_failure() -> None:
    async with running_mailbox(Seen(on_1=lambda _: "fine")) as it:
        it.put(1)
        await it.idle()
        assert it.reports == [(1, "TypeError: handler watcher must return a Decision or None, got str")]


@on_virtual_time
async def test_decision_of_a_handler_that_is_not_durable_is_refused_and_its_state_undone() -> None:
    async with running_mailbox(Seen(on_1=lambda _: NOTHING)) as it:
        it.put(1)
        await it.idle()
        assert (it.committed, it.reloads) == ([], 1)
        assert "must be durable" in it.reports[0][1]


@on_virtual_time
async def test_the_end_of_the_mailbox_is_no_failure_of_its_handler() -> None:
    async with running_mailbox(Seen(on_1=hang), deadline_s=5) as it:
        it.put(1)
        await anyio.sleep(1)
    assert it.reports == []


# Deadlines.


@on_virtual_time
async def test_a_handler_over_its_deadline_is_cancelled_and_the_next_fact_has_its_turn() -> None:
    seen = Seen(on_1=hang)
    async with running_mailbox(seen, deadline_s=2) as it:
        it.put(1, 2)
        await it.supervise(5)
        assert seen.ids == [1, 2]
        assert it.reports == [(1, "exceeded its deadline of 2 s")]
        assert it.mailbox.idle


@on_virtual_time
async def test_a_handler_within_its_deadline_is_left_alone() -> None:
    async def take_a_second(_: Record) -> None:
        await anyio.sleep(1)

    async with running_mailbox(take_a_second, deadline_s=2) as it:
        it.put(*range(1, 10))
        await it.supervise(20)
        assert (it.reports, it.mailbox.statistics.handled) == ([], 9)


@on_virtual_time
async def test_without_a_deadline_a_handler_may_take_for_ever() -> None:
    async with running_mailbox(Seen(on_1=hang)) as it:
        it.put(1)
        await it.supervise(1000)
        assert it.reports == []


@on_virtual_time
async def test_handler_that_swallows_its_cancellation_counts_as_late() -> None:
    async def swallow(_: Record) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await anyio.sleep(0.01)

    async def wait_a_moment(_: Record) -> None:
        await anyio.sleep(1)

    async with running_mailbox(Seen(on_1=swallow, on_2=wait_a_moment), deadline_s=2) as it:
        it.put(1, 2, 3)
        await it.supervise(10)
        assert it.reports == [(1, "exceeded its deadline of 2 s")]
        assert it.mailbox.statistics.handled == 3


@on_virtual_time
async def test_handler_that_raises_after_its_cancellation_fails_with_that_error() -> None:
    async def raise_always(_: Record) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ValueError("boom") from None

    async with running_mailbox(Seen(on_1=raise_always), deadline_s=2) as it:
        it.put(1, 2)
        await it.supervise(10)
        assert it.reports == [(1, "ValueError: boom")]


class Stubborn:
    """Ignores cancellations until it is released."""

    def __init__(self) -> None:
        self.released = False

    async def __call__(self, _: Record) -> None:
        while not self.released:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue


@on_virtual_time
async def test_uncancellable_handler_is_abandoned_and_quarantined() -> None:
    stubborn = Stubborn()
    async with running_mailbox(Seen(on_1=stubborn), deadline_s=2) as it:
        it.put(1, 2)
        await it.supervise(60)
        assert it.reports == [(1, f"still runs after {CANCELS_MAX} cancellations")]
        assert (it.mailbox.quarantined, it.mailbox.stuck, len(it.mailbox.queue)) == (True, True, 0)
        stubborn.released = True
        it.mailbox._cancel()
        await anyio.sleep(1)
        assert not it.mailbox.stuck


@on_virtual_time
async def test_late_decision_of_an_abandoned_handler_is_undone() -> None:
    release = asyncio.Event()

    async def decide_late(_: Record) -> Decision[None]:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return NOTHING

    async with running_mailbox(Seen(on_1=decide_late), durable=True, deadline_s=2) as it:
        it.put(1)
        await it.supervise(60)
        release.set()
        await anyio.sleep(1)
        assert (it.committed, it.reloads) == ([], 1)


# Quarantine.


def failing(_: Record) -> None:
    raise ValueError("boom")


@on_virtual_time
async def test_after_so_many_failures_in_a_row_a_handler_is_given_nothing_more() -> None:
    seen = Seen(**{f"on_{number}": failing for number in range(2, 10)})
    async with running_mailbox(seen, failures_max=3) as it:
        it.put(*range(1, 20))
        await it.idle()
        it.put(20)
        await it.idle()
        assert seen.ids == [1, 2, 3, 4]
        assert it.mailbox.quarantined
        assert it.mailbox.statistics.dropped == 16


@on_virtual_time
async def test_a_success_in_between_starts_the_count_anew() -> None:
    seen = Seen(on_1=failing, on_2=failing, on_4=failing, on_5=failing)
    async with running_mailbox(seen, failures_max=3) as it:
        it.put(*range(1, 7))
        await it.idle()
        assert seen.ids == [1, 2, 3, 4, 5, 6]
        assert not it.mailbox.quarantined


@on_virtual_time
async def test_a_handler_without_that_limit_is_never_quarantined() -> None:
    async with running_mailbox(failing) as it:
        it.put(*range(1, 1001))
        await it.idle()
        assert it.mailbox.statistics.failed == 1000


@on_virtual_time
async def test_re_enabled_handler_gets_a_gap_and_the_next_fact() -> None:
    seen = Seen(on_1=failing)
    async with running_mailbox(seen, failures_max=1) as it:
        it.put(1, 2)
        await it.idle()
        it.put(3)
        await anyio.sleep(1)
        assert it.gaps == []
        it.mailbox.readmit()
        it.put(4)
        await it.idle()
        assert seen.ids == [1, 4]
        assert it.gaps == [Gap(2, 3, "handler watcher was quarantined")]


@on_virtual_time
async def test_re_enabled_handler_has_a_new_failure_count() -> None:
    seen = Seen(on_1=failing, on_2=failing, on_3=failing)
    async with running_mailbox(seen, failures_max=2) as it:
        it.put(1, 2)
        await it.idle()
        it.mailbox.readmit()
        it.put(3, 4)
        await it.idle()
        assert seen.ids == [1, 2, 3, 4]


# Bounds.


@on_virtual_time
async def test_a_plugin_s_mailbox_forgets_its_oldest_facts_and_tells_which() -> None:
    seen = Seen()
    async with running_mailbox(seen, lossless=False, mailbox_max=3) as it:
        it.put(*range(1, 11))
        assert len(it.mailbox.queue) == 3
        await it.idle()
        assert seen.ids == [8, 9, 10]
        assert it.gaps == [Gap(1, 7, "the mailbox of handler watcher was full (3 facts)")]
        assert it.mailbox.statistics.dropped == 7


@on_virtual_time
async def test_flood_of_one_job_drops_no_fact_of_another_job_from_a_plugin_s_mailbox() -> None:
    told: list[object] = []

    async with running_mailbox(
        lambda record: told.append(record.id),
        lossless=False,
        mailbox_max=4,
        on_gap=lambda gap: told.append((gap.first, gap.last)),
    ) as it:
        it.mailbox.put([*records(1, job="quiet"), *records(*range(2, 100), job="hostile")])
        it.mailbox.put(records(100, job="quiet"))
        await it.idle()
        assert told == [1, (2, 97), 98, 99, 100]
        assert it.mailbox.statistics.dropped == 96


@on_virtual_time
async def test_gap_notice_precedes_the_next_fact() -> None:
    told: list[object] = []
    release = asyncio.Event()

    async def handler(record: Record) -> None:
        told.append(record.id)
        await release.wait()

    async with running_mailbox(
        handler, lossless=False, mailbox_max=2, on_gap=lambda gap: told.append((gap.first, gap.last))
    ) as it:
        it.put(1)
        await anyio.sleep(0.1)
        it.put(2, 3)
        it.put(4)
        it.put(5)
        release.set()
        await it.idle()
    assert told == [1, (2, 3), 4, 5]


@given(
    chunks=st.lists(st.tuples(st.integers(1, 9), st.floats(0, 1)), max_size=30),
    pauses_s=st.lists(st.floats(0, 1), min_size=1, max_size=5),
    mailbox_max=st.integers(1, 6),
)
@on_virtual_time
async def test_each_fact_is_either_seen_or_in_a_gap_and_all_in_order(
    chunks: list[tuple[int, float]], pauses_s: list[float], mailbox_max: int
) -> None:
    told: list[int] = []

    async def handler(record: Record) -> None:
        told.append(record.id)
        await anyio.sleep(pauses_s[record.id % len(pauses_s)])

    def on_gap(gap: Gap) -> None:
        told.extend(range(gap.first, gap.last + 1))

    last = 0
    async with running_mailbox(handler, lossless=False, mailbox_max=mailbox_max, on_gap=on_gap) as it:
        for count, pause_s in chunks:
            it.put(*range(last + 1, last + count + 1))
            last += count
            await anyio.sleep(pause_s)
        await it.idle()
    assert told == list(range(1, last + 1))


@on_virtual_time
async def test_handler_that_fails_on_a_gap_still_gets_its_facts() -> None:
    seen = Seen()
    async with running_mailbox(seen, lossless=False, mailbox_max=1, on_gap=raising(ValueError("boom"))) as it:
        it.put(1, 2)
        await it.idle()
        it.put(3)
        await it.idle()
        assert seen.ids == [2, 3]
        assert it.mailbox.statistics.failed == 1


@on_virtual_time
async def test_a_lossless_mailbox_loses_nothing() -> None:
    seen = Seen()
    async with running_mailbox(seen, mailbox_max=3) as it:
        it.put(*range(1, 1001))
        await it.idle()
        assert len(seen.ids) == 1000
        assert it.mailbox.statistics.dropped == 0


# Durable mailboxes.


@on_virtual_time
async def test_durable_decision_is_committed_with_its_fact() -> None:
    async with running_mailbox(Seen(on_2=lambda _: NOTHING), durable=True) as it:
        it.put(1, 2, 3)
        await it.idle()
        assert it.committed == [2]
        assert it.mailbox.position == 3


@on_virtual_time
async def test_a_durable_handler_rests_while_nothing_can_be_written() -> None:
    seen = Seen(on_1=lambda _: it.writable.clear())
    async with running_mailbox(seen, durable=True, deadline_s=1, failures_max=1) as it:
        it.put(1, 2)
        await it.supervise(30)
        assert (seen.ids, it.reports, it.mailbox.quarantined) == ([1], [], False)
        it.writable.set()
        await it.idle()
        assert seen.ids == [1, 2]


@on_virtual_time
async def test_durable_handler_retries_unavailable_in_order() -> None:
    times = 0

    def sometimes(_: Record) -> None:
        nonlocal times
        times += 1
        if times < 4:
            raise Unavailable("not now", "not now")

    seen = Seen(on_1=sometimes)
    async with running_mailbox(seen, durable=True, failures_max=1) as it:
        it.put(1, 2)
        await anyio.sleep(10 * RETRY_PAUSE_S)
        assert seen.ids == [1, 1, 1, 1, 2]
        assert it.reports == []


@on_virtual_time
async def test_the_time_between_two_tries_counts_for_no_deadline() -> None:
    async with running_mailbox(raising_async(Unavailable("not now", "not now")), durable=True, deadline_s=1) as it:
        it.put(1)
        await it.supervise(30)
        assert it.reports == []


def raising_async(error: Exception) -> FactHandler:
    async def handler(_: Record) -> None:
        await anyio.sleep(0.3)
        raise error

    return handler


@on_virtual_time
async def test_a_commit_that_is_unavailable_is_decided_again() -> None:
    seen = Seen(on_1=lambda _: NOTHING)
    async with running_mailbox(seen, durable=True) as it:
        it.commit_error = Unavailable("full", "full")
        it.put(1)
        await anyio.sleep(RETRY_PAUSE_S / 2)
        it.commit_error = None
        await anyio.sleep(2 * RETRY_PAUSE_S)
        assert (seen.ids, it.committed) == ([1, 1], [1])


@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit(1), asyncio.CancelledError()])
@on_virtual_time
async def test_failed_durable_handler_reloads_its_state(error: BaseException) -> None:
    async with running_mailbox(Seen(on_1=raising(error)), durable=True) as it:
        it.put(1)
        await it.idle()
        assert it.reloads == 1


@on_virtual_time
async def test_a_refusal_changes_nothing_so_nothing_is_undone() -> None:
    async with running_mailbox(Seen(on_1=raising(RequestRefused("no", "no"))), durable=True) as it:
        it.put(1)
        await it.idle()
        assert (it.reloads, len(it.reports)) == (0, 1)


@on_virtual_time
async def test_a_rewound_mailbox_handles_its_facts_again() -> None:
    seen = Seen(on_2=lambda _: NOTHING)
    async with running_mailbox(seen, durable=True) as it:
        it.put(1, 2, 3)
        await it.idle()
        it.mailbox.rewind(records(2, 3), 1)
        await it.idle()
        assert seen.ids == [1, 2, 3, 2, 3]
        assert it.mailbox.position == 3


@on_virtual_time
async def test_rewound_mailbox_takes_only_its_own_fact_types() -> None:
    seen = Seen()
    async with running_mailbox(seen, durable=True) as it:
        it.mailbox.rewind([Record.of(Added(1, 1), fact_id=1, at=0.0), *records(2)], 0)
        await it.idle()
        assert seen.ids == [2]


@on_virtual_time
async def test_a_rewind_in_the_middle_of_a_fact_cancels_it_without_blame() -> None:
    seen = Seen(on_2=hang)
    async with running_mailbox(seen, durable=True, failures_max=1) as it:
        it.put(1, 2, 3)
        await anyio.sleep(1)
        seen._acts.clear()
        it.mailbox.rewind(records(1, 2, 3), 0)
        await it.idle()
        assert seen.ids == [1, 2, 1, 2, 3]
        assert (it.reports, it.reloads) == ([], 0)


@on_virtual_time
async def test_a_rewind_reaches_a_handler_that_was_about_to_go_on() -> None:
    woken = asyncio.Event()
    decided: list[int] = []

    async def handler(record: Record) -> Decision[None]:
        if not decided:
            await woken.wait()
        decided.append(record.id)
        return NOTHING

    async with running_mailbox(handler, durable=True) as it:
        it.put(1)
        await anyio.sleep(1)
        woken.set()
        it.mailbox.rewind(records(1), 0)
        await it.idle()
        assert (decided, it.committed) == ([1], [1])


@on_virtual_time
async def test_decision_of_a_rewound_handler_is_discarded() -> None:
    async def decide_all_the_same(_: Record) -> Decision[None]:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return NOTHING

    seen = Seen(on_1=decide_all_the_same)
    async with running_mailbox(seen, durable=True) as it:
        it.put(1)
        await anyio.sleep(1)
        seen._acts.clear()
        it.mailbox.rewind(records(1), 0)
        await it.idle()
        assert (seen.ids, it.committed, it.reloads) == ([1, 1], [], 1)


@on_virtual_time
async def test_a_rewind_between_two_tries_does_not_double_the_fact() -> None:
    times = 0

    def once(_: Record) -> None:
        nonlocal times
        times += 1
        if times == 1:
            raise Unavailable("not now", "not now")

    seen = Seen(on_1=once)
    async with running_mailbox(seen, durable=True) as it:
        it.put(1, 2)
        await anyio.sleep(RETRY_PAUSE_S / 2)
        it.mailbox.rewind(records(1, 2), 0)
        await anyio.sleep(10)
        assert seen.ids == [1, 1, 2]


@on_virtual_time
async def test_a_quarantined_mailbox_stays_closed_when_it_is_rewound() -> None:
    seen = Seen(on_2=failing)
    async with running_mailbox(seen, durable=True, failures_max=1) as it:
        it.put(1, 2)
        await it.idle()
        it.mailbox.rewind(records(1, 2), 0)
        await anyio.sleep(1)
        assert seen.ids == [1, 2]
        assert it.mailbox.position == 0


@given(
    acts=st.lists(st.sampled_from(["nothing", "decide", "raise", "wait", "unavailable", "cancelled"]), max_size=40),
    chunks=st.lists(st.integers(1, 7), min_size=40, max_size=40),
)
@on_virtual_time
async def test_durable_handler_gets_each_fact_in_order_under_any_faults(acts: Sequence[str], chunks: list[int]) -> None:
    handled: list[int] = []
    tried: set[int] = set()

    async def handler(record: Record) -> Decision[None] | None:
        act = acts[record.id - 1]
        if act == "wait":
            await anyio.sleep(0.5)
        if act == "unavailable" and record.id not in tried:
            tried.add(record.id)
            raise Unavailable("not now", "not now")
        handled.append(record.id)
        if act == "raise":
            raise ValueError("boom")
        if act == "cancelled":
            raise asyncio.CancelledError
        return NOTHING if act == "decide" else None

    async with running_mailbox(handler, durable=True) as it:
        waiting = list(range(1, len(acts) + 1))
        for chunk in chunks:
            if waiting[:chunk]:
                it.put(*waiting[:chunk])
            del waiting[:chunk]
            await anyio.sleep(0.1)
        await it.supervise(60)
        assert handled == list(range(1, len(acts) + 1))
        assert it.committed == [index for index, act in enumerate(acts, 1) if act == "decide"]
        broken = [index for index, act in enumerate(acts, 1) if act in ("raise", "cancelled")]
        assert [fact_id for fact_id, _ in it.reports] == broken


def test_a_subscription_is_lossless_and_not_durable_unless_it_says_so() -> None:
    subscription = Subscription("watcher", failing, frozenset({Echoed}))
    assert (subscription.lossless, subscription.durable, subscription.failures_max) == (True, False, None)
