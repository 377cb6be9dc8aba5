from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

import anyio
import pytest

from forged.auth.model import Principal, Role
from forged.errors import ForgedError, RequestRefused, Unavailable
from forged.kernel.bus.requests import IN_FLIGHT_EACH_MAX, IN_FLIGHT_MAX, Proceed
from forged.kernel.messages import ANY_JOB, Call, Decision, Fence, Nothing, Request
from forged.kernel.replies import PREFIX as REPLY_PREFIX
from forged.kernel.store.port import Store
from tests.faulty_store import FaultyStore, full
from tests.kernel_fixture import CLIENT, OPERATOR, Add, Added, Kernel, ReadTotal, call, on_virtual_time, running


class AddSlowly(Request[int], frozen=True):
    """Add to the tally after awaiting."""

    job_field: ClassVar[str | None] = None

    amount: int = 1


class Contemplate(Request[int], frozen=True):
    """Await, and change nothing."""

    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = None


class Tend(Request[Nothing], frozen=True):
    """A request in a job."""

    needs: ClassVar[Role] = Role.WORKER

    job: str


class Survey(Request[Nothing], frozen=True):
    """A read with `ANY_JOB`."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = ANY_JOB


class Prune(Request[Nothing], frozen=True):
    """A decision with `ANY_JOB`."""

    job_field: ClassVar[str | None] = ANY_JOB


class Orphan(Request[Nothing], frozen=True):
    """A request without a handler."""


class Slow:
    """Handles `AddSlowly` when it is released."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.gate = asyncio.Event()
        self.calls = 0
        self.ended: list[str] = []
        kernel.bus.serve(AddSlowly, self, owner="slow")

    async def __call__(self, request: AddSlowly, _: Call) -> Decision[int]:
        self.calls += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        self.ended.append("done")
        return self.kernel.tally.add(request.amount)


class RegisteredHandlers:
    """The handlers that a test registered."""

    slow: Slow

    def with_slow(self, kernel: Kernel) -> None:
        self.slow = Slow(kernel)


def raising(error: BaseException) -> Callable[[Any, Call], Any]:
    def handler(_: Any, __: Call) -> Any:
        raise error

    return handler


async def refused(pending: Any) -> ForgedError:
    """The error with which a request ended."""
    with pytest.raises(ForgedError) as caught:
        await pending.wait()
    return caught.value


# Answers.


@on_virtual_time
async def test_a_request_is_answered_by_its_handler() -> None:
    async with running() as kernel:
        assert await kernel.bus.ask(Add(2)) == 2
        assert await kernel.bus.ask(ReadTotal()) == 2


@on_virtual_time
async def test_reply_waits_until_the_decision_is_durable() -> None:
    store = FaultyStore()
    async with running(store) as kernel:
        store.block()
        decided, read = kernel.submit(), kernel.bus.submit(ReadTotal(), call())
        await anyio.sleep(1)
        assert (decided.done, read.done) == (False, False)
        store.unblock()
        assert (await decided.wait(), await read.wait()) == (1, 1)


@on_virtual_time
async def test_request_without_handler_is_refused() -> None:
    async with running() as kernel:
        assert (await refused(kernel.bus.submit(Orphan(), call()))).code == "request_unknown"


@on_virtual_time
async def test_facts_carry_the_cause_and_the_origin_of_their_call() -> None:
    async with running() as kernel:
        await kernel.add()
        cause = kernel.journal.last
        await kernel.bus.submit(Add(), Call(OPERATOR, "a button", cause=cause)).wait()
        record = kernel.journal.get(kernel.journal.last)
        assert record is not None
        assert (record.cause, record.origin) == (cause, "a button")


@on_virtual_time
async def test_awaiting_handler_does_not_delay_other_requests() -> None:
    built = RegisteredHandlers()
    async with running(register=built.with_slow) as kernel:
        pending = kernel.bus.submit(AddSlowly(5), call())
        assert await kernel.add(1) == 1
        assert kernel.bus.dispatcher.in_flight == 1
        built.slow.gate.set()
        assert await pending.wait() == 6
        assert kernel.bus.dispatcher.in_flight == 0


@on_virtual_time
async def test_a_request_that_does_not_decide_must_not_decide() -> None:
    def register(kernel: Kernel) -> None:
        kernel.bus.serve(Contemplate, lambda *_: kernel.tally.add(1), owner="thinker")

    async with running(register=register) as kernel:
        assert (await refused(kernel.bus.submit(Contemplate(), call()))).code == "handler_broken"
        await kernel.ledger.writable()
        assert kernel.tally.total == 0


# Authorisation.


def worker(*jobs: str) -> Call:
    return Call(Principal("a worker", Role.WORKER, frozenset(jobs) if jobs else None), "a test")


def tending(kernel: Kernel) -> None:
    kernel.bus.serve(Tend, lambda *_: Nothing(), owner="tender")
    kernel.bus.serve(Survey, lambda *_: Nothing(), owner="tender")
    kernel.bus.serve(Prune, lambda *_: Nothing(), owner="tender")


@on_virtual_time
async def test_a_role_that_does_not_cover_the_request_is_refused() -> None:
    async with running(register=tending) as kernel:
        viewer = Call(Principal("a viewer", Role.VIEWER), "a test")
        assert (await refused(kernel.bus.submit(Tend("a"), viewer))).code == "forbidden"


@on_virtual_time
async def test_principal_bound_to_jobs_may_send_requests_for_these_jobs_only() -> None:
    async with running(register=tending) as kernel:
        assert await kernel.bus.submit(Tend("a"), worker("a")).wait() == Nothing()
        assert (await refused(kernel.bus.submit(Tend("b"), worker("a")))).code == "forbidden"


@on_virtual_time
async def test_principal_bound_to_jobs_may_not_send_daemon_wide_requests() -> None:
    async with running() as kernel:
        bound = Call(Principal("an operator of a", Role.OPERATOR, frozenset({"a"})), "a test")
        assert (await refused(kernel.bus.submit(Add(), bound))).code == "forbidden"


@on_virtual_time
async def test_any_job_request_needs_only_the_role() -> None:
    async with running(register=tending) as kernel:
        assert await kernel.bus.submit(Survey(), worker("a")).wait() == Nothing()
        assert (await refused(kernel.bus.submit(Prune(), worker("a")))).code == "forbidden"


@pytest.mark.parametrize(
    ("held", "code"),
    [(Fence(2, 5), ""), (Fence(2, 6), ""), (Fence(3, 0), ""), (Fence(2, 4), "fenced"), (Fence(1, 9), "fenced")],
)
@on_virtual_time
async def test_caller_behind_the_fence_of_the_job_is_refused(held: Fence, code: str) -> None:
    def register(kernel: Kernel) -> None:
        tending(kernel)
        kernel.bus.dispatcher.fence_of = {"a": Fence(2, 5)}.get

    async with running(register=register) as kernel:
        pending = kernel.bus.submit(Tend("a"), Call(OPERATOR, "a test", fence=held))
        assert (pending.error.code if pending.error else "") == code
        assert kernel.bus.submit(Tend("b"), Call(OPERATOR, "a test", fence=Fence(0, 0))).error is None


@on_virtual_time
async def test_completed_request_is_answered_again_after_the_generation_advanced() -> None:
    fences = {"a": Fence(2, 5)}

    def register(kernel: Kernel) -> None:
        kernel.bus.serve(Tend, lambda *_: Decision(Nothing(), (Added(1, 1),)), owner="tending")
        kernel.bus.dispatcher.fence_of = fences.get

    async with running(register=register) as kernel:
        assert await kernel.bus.submit(Tend("a"), call(1, fence=Fence(2, 5))).wait() == Nothing()
        fences["a"] = Fence(2, 6)
        assert await kernel.bus.submit(Tend("a"), call(1, fence=Fence(2, 5))).wait() == Nothing()
        assert (await refused(kernel.bus.submit(Tend("a"), call(2, fence=Fence(2, 5))))).code == "fenced"


@on_virtual_time
async def test_decision_is_refused_if_the_generation_advanced_while_the_handler_waited() -> None:
    fences = {"a": Fence(2, 5)}

    def register(kernel: Kernel) -> None:
        async def slowly(*_: Any) -> Decision[Nothing]:
            await anyio.sleep(1)
            kernel.tally.total = 99
            return Decision(Nothing(), (Added(1, 99),))

        kernel.bus.serve(Tend, slowly, owner="tending")
        kernel.bus.dispatcher.fence_of = fences.get

    async with running(register=register) as kernel:
        pending = kernel.bus.submit(Tend("a"), call(1, fence=Fence(2, 5)))
        fences["a"] = Fence(2, 6)
        assert (await refused(pending)).code == "fenced"
        await kernel.ledger.writable()
        assert await kernel.bus.ask(ReadTotal()) == 0
        assert kernel.facts(Added) == []


@pytest.mark.parametrize("request_type", [AddSlowly, Contemplate])
@on_virtual_time
async def test_handler_result_from_rolled_back_state_is_not_returned(request_type: type[Request[int]]) -> None:
    def register(kernel: Kernel) -> None:
        async def slowly(*_: Any) -> Any:
            seen = kernel.tally.total
            await anyio.sleep(30)
            return kernel.tally.add(seen) if request_type.decides else seen

        kernel.bus.serve(request_type, slowly, owner="slow")

    store = FaultyStore()
    async with running(store, register) as kernel:
        store.block()
        failing = kernel.submit(10)
        slow = kernel.bus.submit(request_type(), call())
        await anyio.sleep(1)
        store.commit_error = full()
        store.unblock()
        assert (await refused(failing)).code == "store_full"
        store.commit_error = None
        assert (await refused(slow)).code == "reloading"
        await kernel.ledger.writable()
        assert await kernel.bus.ask(ReadTotal()) == 0


@on_virtual_time
async def test_hanging_handler_blocks_only_its_own_requests() -> None:
    def register(kernel: Kernel) -> None:
        async def hang(*_: Any) -> None:
            await anyio.sleep_forever()

        kernel.bus.serve(Contemplate, hang, owner="hanging")

    async with running(register=register) as kernel:
        hanging = [kernel.bus.submit(Contemplate(), call()) for _ in range(IN_FLIGHT_MAX)]
        assert (await refused(kernel.bus.submit(Contemplate(), call()))).code == "busy"
        assert await kernel.add(1) == 1
        assert not kernel.bus.congested
        assert not any(pending.done for pending in hanging)


class Ponder(Request[int], frozen=True):
    """Await on behalf of a job."""

    needs: ClassVar[Role] = Role.WORKER
    decides: ClassVar[bool] = False

    job: str


@on_virtual_time
async def test_hanging_requests_of_one_job_leave_room_for_other_jobs_and_operators() -> None:
    def register(kernel: Kernel) -> None:
        async def hang(*_: Any) -> None:
            await anyio.sleep_forever()

        kernel.bus.serve(Ponder, hang, owner="hanging")

    async with running(register=register) as kernel:
        tokens = [Call(Principal(f"token-{n}", Role.WORKER, frozenset({"a"})), "a test") for n in range(2)]
        hanging = [kernel.bus.submit(Ponder("a"), tokens[n % 2]) for n in range(IN_FLIGHT_EACH_MAX)]
        error = await refused(kernel.bus.submit(Ponder("a"), tokens[0]))
        assert error.code == "busy"
        assert f"uses {IN_FLIGHT_EACH_MAX}; limit of one principal or job {IN_FLIGHT_EACH_MAX}" in error.message
        others = [kernel.bus.submit(Ponder("b"), worker("b")), kernel.bus.submit(Ponder("a"), call())]
        await anyio.sleep(1)
        assert not any(pending.done for pending in (*hanging, *others))


# Handlers with bugs.


@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit(1)])
@on_virtual_time
async def test_a_handler_that_breaks_after_changing_its_state_leaves_no_trace(error: BaseException) -> None:
    def register(kernel: Kernel) -> None:
        def breaking(*_: Any) -> None:
            kernel.tally.total = 99
            raise error

        kernel.bus.serve(AddSlowly, breaking, owner="breaker")

    async with running(register=register) as kernel:
        await kernel.add(10)
        broken = await refused(kernel.bus.submit(AddSlowly(), call()))
        assert (type(broken), broken.code) == (ForgedError, "handler_broken")
        assert "breaker" in broken.message
        await kernel.ledger.writable()
        assert await kernel.bus.ask(ReadTotal()) == 10


@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit(1), asyncio.CancelledError()])
@on_virtual_time
async def test_an_awaiting_handler_that_breaks_after_changing_its_state_leaves_no_trace(error: BaseException) -> None:
    def register(kernel: Kernel) -> None:
        async def breaking(*_: Any) -> None:
            await anyio.sleep(1)
            kernel.tally.total = 99
            raise error

        kernel.bus.serve(AddSlowly, breaking, owner="breaker")

    async with running(register=register) as kernel:
        await kernel.add(10)
        assert (await refused(kernel.bus.submit(AddSlowly(), call()))).code == "handler_broken"
        await kernel.ledger.writable()
        assert await kernel.bus.ask(ReadTotal()) == 10


@on_virtual_time
async def test_failed_read_handler_does_not_affect_other_requests() -> None:
    def register(kernel: Kernel) -> None:
        kernel.bus.serve(Contemplate, raising(ValueError("boom")), owner="thinker")

    async with running(register=register) as kernel:
        assert (await refused(kernel.bus.submit(Contemplate(), call()))).code == "handler_broken"
        kernel.ledger.require_writable()
        assert kernel.tally.loads == 1


@on_virtual_time
async def test_a_refusal_reaches_the_caller_as_it_is_and_changes_nothing() -> None:
    error = RequestRefused("too_much", "that is too much")

    def register(kernel: Kernel) -> None:
        kernel.bus.serve(AddSlowly, raising(error), owner="refuser")

    async with running(register=register) as kernel:
        pending = kernel.bus.submit(AddSlowly(), call(1))
        assert pending.error is error
        assert kernel.tally.loads == 1
        assert kernel.bus.requests.routes[AddSlowly].statistics.failed == 1


@on_virtual_time
async def test_a_reply_that_cannot_be_encoded_leaves_no_trace() -> None:
    def register(kernel: Kernel) -> None:
        def answer(*_: Any) -> Decision[Any]:
            kernel.tally.total = 99
            return Decision(object(), (Added(1, 1),))

        kernel.bus.serve(AddSlowly, answer, owner="oddity")

    async with running(register=register) as kernel:
        assert (await refused(kernel.bus.submit(AddSlowly(), call(1)))).code == "decision_unfit"
        await kernel.ledger.writable()
        assert (kernel.tally.total, kernel.facts()) == (0, [])


# Deadlines and cancellation.


@on_virtual_time
async def test_handler_is_cancelled_at_the_deadline_of_the_caller() -> None:
    built = RegisteredHandlers()
    async with running(register=built.with_slow) as kernel:
        late = await refused(kernel.bus.submit(AddSlowly(), call(1, timeout_s=5)))
        assert (type(late), late.code) == (Unavailable, "deadline_exceeded")
        assert built.slow.ended == ["cancelled"]
        assert kernel.bus.dispatcher.in_flight == 0


@on_virtual_time
async def test_timed_out_request_may_be_repeated_and_runs_once() -> None:
    built = RegisteredHandlers()
    async with running(register=built.with_slow) as kernel:
        await refused(kernel.bus.submit(AddSlowly(5), call(1, timeout_s=5)))
        built.slow.gate.set()
        assert await kernel.bus.submit(AddSlowly(5), call(1, timeout_s=5)).wait() == 5
        assert kernel.tally.total == 5


@on_virtual_time
async def test_deadline_after_the_decision_keeps_the_decision_and_the_reply() -> None:
    store, built = FaultyStore(), RegisteredHandlers()
    async with running(store, built.with_slow) as kernel:
        built.slow.gate.set()
        store.block()
        assert (await refused(kernel.bus.submit(AddSlowly(5), call(1, timeout_s=5)))).code == "deadline_exceeded"
        store.unblock()
        assert await kernel.bus.submit(AddSlowly(5), call(1)).wait() == 5
        assert (kernel.tally.total, built.slow.calls) == (5, 1)


@on_virtual_time
async def test_caller_may_cancel_an_awaiting_request() -> None:
    built = RegisteredHandlers()
    async with running(register=built.with_slow) as kernel:
        pending = kernel.bus.submit(AddSlowly(), call(1))
        await anyio.sleep(1)
        kernel.bus.dispatcher.cancel(CLIENT, 1)
        assert (await refused(pending)).code == "cancelled"
        assert (built.slow.ended, kernel.tally.total) == (["cancelled"], 0)


@on_virtual_time
async def test_a_cancelled_request_that_is_wrapped_stops_in_its_handler_too() -> None:
    built = RegisteredHandlers()

    def register(kernel: Kernel) -> None:
        built.with_slow(kernel)
        kernel.bus.wrap(AddSlowly, pass_on, owner="wrapper")

    async with running(register=register) as kernel:
        pending = kernel.bus.submit(AddSlowly(), call(1))
        await anyio.sleep(1)
        kernel.bus.dispatcher.cancel(CLIENT, 1)
        assert (await refused(pending)).code == "cancelled"
        assert (built.slow.ended, kernel.bus.dispatcher.in_flight) == (["cancelled"], 0)
        again = kernel.bus.submit(AddSlowly(5), call(1))
        built.slow.gate.set()
        assert await again.wait() == 5


@on_virtual_time
async def test_cancelling_a_finished_or_unknown_request_is_ignored() -> None:
    async with running() as kernel:
        await kernel.bus.submit(Add(), call(1)).wait()
        kernel.bus.dispatcher.cancel(CLIENT, 1)
        kernel.bus.dispatcher.cancel(CLIENT, 99)
        assert await kernel.add() == 2


@on_virtual_time
async def test_waiting_callers_get_an_error_when_the_bus_ends() -> None:
    built = RegisteredHandlers()
    async with running(register=built.with_slow) as kernel:
        pending = kernel.bus.submit(AddSlowly(), call(1))
        await anyio.sleep(1)
    assert pending.error is not None
    assert pending.error.code == "cancelled"


# The same request again.


@on_virtual_time
async def test_a_request_that_is_repeated_is_answered_and_not_repeated() -> None:
    async with running() as kernel:
        assert [await kernel.bus.submit(Add(), call(1)).wait() for _ in range(3)] == [1, 1, 1]
        assert len(kernel.facts(Added)) == 1


@on_virtual_time
async def test_a_request_that_is_repeated_before_its_commit_gets_the_same_reply() -> None:
    store = FaultyStore()
    async with running(store) as kernel:
        store.block()
        first, second = (kernel.bus.submit(Add(), call(1)) for _ in range(2))
        assert second is first
        store.unblock()
        assert await second.wait() == 1


@on_virtual_time
async def test_a_request_that_is_repeated_while_its_handler_awaits_gets_the_same_reply() -> None:
    built = RegisteredHandlers()
    async with running(register=built.with_slow) as kernel:
        first, second = (kernel.bus.submit(AddSlowly(), call(1)) for _ in range(2))
        built.slow.gate.set()
        assert (await first.wait(), await second.wait(), built.slow.calls) == (1, 1, 1)


@on_virtual_time
async def test_another_request_under_the_number_of_one_that_is_being_done_is_refused() -> None:
    built = RegisteredHandlers()
    async with running(register=built.with_slow) as kernel:
        first = kernel.bus.submit(AddSlowly(), call(1, digest=7))
        assert (await refused(kernel.bus.submit(AddSlowly(9), call(1, digest=8)))).code == "request_id_reused"
        built.slow.gate.set()
        assert await first.wait() == 1


@on_virtual_time
async def test_another_request_under_the_number_of_one_that_was_done_is_refused() -> None:
    async with running() as kernel:
        await kernel.bus.submit(Add(), call(1, digest=7)).wait()
        assert (await refused(kernel.bus.submit(Add(9), call(1, digest=8)))).code == "request_id_reused"
        assert kernel.tally.total == 1


@on_virtual_time
async def test_acknowledged_number_is_refused() -> None:
    async with running() as kernel:
        await kernel.bus.submit(Add(), call(1)).wait()
        await kernel.bus.submit(Add(), call(2, acknowledged=1)).wait()
        assert (await refused(kernel.bus.submit(Add(), call(1)))).code == "request_stale"
        assert kernel.tally.total == 2


@on_virtual_time
async def test_a_reply_is_remembered_across_a_restart() -> None:
    store = FaultyStore()
    async with running(store) as kernel:
        await kernel.bus.submit(Add(5), call(1)).wait()
    async with running(store) as kernel:
        pending = kernel.bus.submit(Add(5), call(1))
        assert pending.done
        assert await pending.wait() == 5
        assert pending.encoded == b"\x05"
        assert kernel.tally.total == 5


@on_virtual_time
async def test_a_request_that_died_before_its_commit_is_done_after_the_restart() -> None:
    store = FaultyStore()
    async with running(store) as kernel:
        await kernel.add(1)
        store.dies = "before"
        kernel.bus.submit(Add(5), call(1))
        await anyio.sleep(1)
    store.dies = ""
    async with running(store) as kernel:
        assert await kernel.bus.submit(Add(5), call(1)).wait() == 6


@on_virtual_time
async def test_a_request_that_died_after_its_commit_is_answered_and_not_repeated_after_the_restart() -> None:
    store = FaultyStore()
    async with running(store) as kernel:
        await kernel.add(1)
        store.dies = "after"
        kernel.bus.submit(Add(5), call(1))
        await anyio.sleep(1)
    store.dies = ""
    async with running(store) as kernel:
        assert await kernel.bus.submit(Add(5), call(1)).wait() == 6
        assert kernel.tally.total == 6


class Lamp:
    """State for which a request may need no change."""

    def __init__(self, kernel: Kernel) -> None:
        self.lit = False
        kernel.bus.serve(AddSlowly, self.light, owner="lamp")

    async def load(self, _: Store) -> None: ...

    def light(self, *_: Any) -> Decision[int]:
        if self.lit:
            return Decision(0)
        self.lit = True
        return Decision(1, (Added(1, 1),))


@on_virtual_time
async def test_a_request_that_changed_nothing_is_not_done_later_when_it_is_repeated() -> None:
    lamps: list[Lamp] = []
    async with running(register=lambda kernel: lamps.append(Lamp(kernel))) as kernel:
        lamps[0].lit = True
        assert await kernel.bus.submit(AddSlowly(), call(1)).wait() == 0
        lamps[0].lit = False
        assert await kernel.bus.submit(AddSlowly(), call(1)).wait() == 0
        assert not lamps[0].lit


@on_virtual_time
async def test_the_daemon_s_own_requests_are_not_remembered() -> None:
    async with running() as kernel:
        assert [await kernel.bus.ask(Add()) for _ in range(2)] == [1, 2]
        assert await kernel.store.list(REPLY_PREFIX) == []


@on_virtual_time
async def test_a_reading_request_is_done_anew_each_time() -> None:
    async with running() as kernel:
        assert await kernel.bus.submit(ReadTotal(), call(1)).wait() == 0
        await kernel.add()
        assert await kernel.bus.submit(ReadTotal(), call(1)).wait() == 1


@on_virtual_time
async def test_a_request_whose_commit_failed_may_be_sent_again() -> None:
    store = FaultyStore()
    async with running(store) as kernel:
        store.commit_error = full()
        assert (await refused(kernel.bus.submit(Add(5), call(1)))).code == "store_full"
        store.commit_error = None
        await kernel.ledger.writable()
        assert await kernel.bus.submit(Add(5), call(1)).wait() == 5


@on_virtual_time
async def test_while_the_disk_is_full_reads_are_answered_and_decisions_unavailable_before_they_are_taken() -> None:
    store = FaultyStore()
    async with running(store) as kernel:
        await kernel.add(10)
        store.commit_error = full()
        await refused(kernel.submit())
        await anyio.sleep(5)
        loads = kernel.tally.loads
        assert (await refused(kernel.submit())).code == "store_full"
        assert await kernel.bus.ask(ReadTotal()) == 10
        assert kernel.tally.loads == loads


@on_virtual_time
async def test_handlers_wait_while_state_is_reloaded() -> None:
    looked: list[int] = []

    def register(kernel: Kernel) -> None:
        kernel.bus.serve(Contemplate, lambda *_: looked.append(1), owner="thinker")

    async with running(register=register) as kernel:
        kernel.ledger.reload(Unavailable("reloading", "state is being reloaded"))
        assert (await refused(kernel.bus.submit(Contemplate(), call()))).code == "reloading"
        assert (await refused(kernel.bus.submit(Add(), call(1)))).code == "reloading"
    assert looked == []


# Wrappers.


async def pass_on(request: Any, _: Call, proceed: Proceed) -> Any:
    return await proceed(request)


@on_virtual_time
async def test_the_wrapper_that_was_added_last_is_outermost() -> None:
    order: list[str] = []

    def noting(name: str) -> Any:
        async def wrapper(request: Any, _: Call, proceed: Proceed) -> Any:
            order.append(f"{name} before")
            reply = await proceed(request)
            order.append(f"{name} after")
            return reply

        return wrapper

    def register(kernel: Kernel) -> None:
        kernel.bus.wrap(Add, noting("first"), owner="a")
        kernel.bus.wrap(Add, noting("second"), owner="b")

    async with running(register=register) as kernel:
        assert await kernel.add(3) == 3
    assert order == ["second before", "first before", "first after", "second after"]


@on_virtual_time
async def test_a_wrapper_sees_the_reply_when_it_is_durable() -> None:
    store = FaultyStore()
    durable: list[bool] = []

    async def wrapper(request: Any, _: Call, proceed: Proceed) -> Any:
        reply = await proceed(request)
        durable.append(store.revision >= kernel.ledger.revision)
        return reply

    async with running(store, lambda kernel: kernel.bus.wrap(Add, wrapper, owner="a")) as kernel:
        await kernel.add()
    assert durable == [True]


@on_virtual_time
async def test_a_wrapper_may_change_the_request_and_the_reply() -> None:
    async def wrapper(request: Add, _: Call, proceed: Proceed) -> Any:
        return 100 + await proceed(Add(2 * request.amount))

    async with running(register=lambda kernel: kernel.bus.wrap(Add, wrapper, owner="a")) as kernel:
        assert await kernel.add(3) == 106
        assert kernel.tally.total == 6


@on_virtual_time
async def test_a_wrapper_may_refuse() -> None:
    async def wrapper(*_: Any) -> Any:
        raise RequestRefused("closed", "closed on Sundays")

    async with running(register=lambda kernel: kernel.bus.wrap(Add, wrapper, owner="a")) as kernel:
        assert (await refused(kernel.submit())).code == "closed"
        assert kernel.tally.total == 0


@on_virtual_time
async def test_a_wrapper_may_answer_by_itself() -> None:
    async def wrapper(*_: Any) -> Any:
        return 42

    async with running(register=lambda kernel: kernel.bus.wrap(Add, wrapper, owner="a")) as kernel:
        assert await kernel.add() == 42
        assert kernel.tally.total == 0


def break_at_once(*_: Any) -> Any:
    raise ValueError("boom")


async def break_later(*_: Any) -> Any:
    await anyio.sleep(1)
    raise ValueError("boom")


async def leave(*_: Any) -> Any:
    raise SystemExit(1)


async def cancel_itself(*_: Any) -> Any:
    raise asyncio.CancelledError


def return_no_awaitable(*_: Any) -> Any:
    return 42


@pytest.mark.parametrize("wrapper", [break_at_once, break_later, leave, cancel_itself, return_no_awaitable])
@on_virtual_time
async def test_failed_wrapper_affects_only_its_caller(wrapper: Any) -> None:
    async with running(register=lambda kernel: kernel.bus.wrap(Add, wrapper, owner="a plugin")) as kernel:
        broken = await refused(kernel.submit())
        assert (type(broken), broken.code) == (ForgedError, "handler_broken")
        assert "a plugin" in broken.message
        assert await kernel.bus.ask(ReadTotal()) == 0
        assert kernel.bus.dispatcher.in_flight == 0


@on_virtual_time
async def test_a_wrapper_that_breaks_behind_the_handler_leaves_its_decision_which_a_repeated_request_gets() -> None:
    broken = True

    async def wrapper(request: Any, _: Call, proceed: Proceed) -> Any:
        reply = await proceed(request)
        if broken:
            raise ValueError("boom")
        return reply

    async with running(register=lambda kernel: kernel.bus.wrap(Add, wrapper, owner="a")) as kernel:
        assert (await refused(kernel.bus.submit(Add(5), call(1)))).code == "handler_broken"
        broken = False
        assert await kernel.bus.submit(Add(5), call(1)).wait() == 5
        assert kernel.tally.total == 5


@on_virtual_time
async def test_a_wrapper_that_proceeds_twice_has_the_request_done_once() -> None:
    async def wrapper(request: Any, _: Call, proceed: Proceed) -> Any:
        return await proceed(request) + await proceed(request)

    async with running(register=lambda kernel: kernel.bus.wrap(Add, wrapper, owner="a")) as kernel:
        assert await kernel.bus.submit(Add(5), call(1)).wait() == 10
        assert kernel.tally.total == 5


@on_virtual_time
async def test_the_deadline_covers_wrappers_and_handler_together() -> None:
    built = RegisteredHandlers()

    def register(kernel: Kernel) -> None:
        built.with_slow(kernel)
        kernel.bus.wrap(AddSlowly, pass_on, owner="wrapper")

    async with running(register=register) as kernel:
        assert (await refused(kernel.bus.submit(AddSlowly(), call(1, timeout_s=5)))).code == "deadline_exceeded"
        assert built.slow.ended == ["cancelled"]


@on_virtual_time
async def test_unauthorised_request_does_not_reach_wrappers() -> None:
    reached: list[object] = []

    async def wrapper(request: Any, _: Call, proceed: Proceed) -> Any:
        reached.append(request)
        return await proceed(request)

    def register(kernel: Kernel) -> None:
        tending(kernel)
        kernel.bus.wrap(Tend, wrapper, owner="a")

    async with running(register=register) as kernel:
        assert (await refused(kernel.bus.submit(Tend("b"), worker("a")))).code == "forbidden"
    assert reached == []
