"""Log lines about facts, store failures and handler exceptions."""

from __future__ import annotations

from typing import Any, ClassVar

import anyio
import pytest

from forged.clock import Clock
from forged.errors import RequestRefused
from forged.kernel.bus.model import HandlerFailed
from forged.kernel.messages import Call, Fact, Record, Request
from forged.telemetry.report import EXCEPTIONS_MAX, TRACEBACK_CHARS_MAX, ExceptionReport, FactReport, Reporter
from tests.faulty_store import FaultyStore, full
from tests.kernel_fixture import Add, Added, Kernel, Tick, call, on_virtual_time, running
from tests.net.manual_daemon import ManualClock
from tests.telemetry.recording_log import RecordingLog


class Shouted(Fact, frozen=True):
    """A fact with an unknown level."""

    level: ClassVar[str] = "deafening"


class Stumble(Request[int], frozen=True):
    """A request that fails in the given way."""

    job_field: ClassVar[str | None] = None

    how: str


def reporting(log: RecordingLog, **limits: Any) -> Any:
    """A `register` function that attaches a reporter to the kernel."""

    def register(kernel: Kernel) -> None:
        kernel.bus.serve(Stumble, stumble, owner="clumsy")
        kernel.reporter = Reporter(log, kernel.bus, kernel.ledger, kernel.clock, **limits)  # type: ignore[attr-defined]

    return register


def stumble(request: Stumble, _: Call) -> int:
    if request.how == "refuse":
        raise RequestRefused("not_now", "not now")
    raise ZeroDivisionError(request.how)


def record_of(fact: Fact, fact_id: int) -> Record:
    return Record.of(fact, fact_id=fact_id, at=1.0, job="j", generation=2, cause=3, origin="a test")


def added(count: int) -> list[Record]:
    return [record_of(Added(1, number), number) for number in range(1, count + 1)]


def fact_report(log: RecordingLog, per_s_max: float = 10.0, clock: Clock | None = None) -> FactReport:
    return FactReport(log, clock or ManualClock(), per_s_max)


def test_fact_is_logged_with_its_id_and_fields() -> None:
    log = RecordingLog()
    fact_report(log).log([record_of(Added(5, 7), 4)])
    assert log.lines == [
        (
            "info",
            "fact",
            {
                "fact_id": 4,
                "at": 1.0,
                "type": "Added",
                "job": "j",
                "generation": 2,
                "cause": 3,
                "origin": "a test",
                "fact": {"amount": 5, "total": 7},
            },
        )
    ]


def test_fact_is_logged_at_the_level_of_its_class_or_info() -> None:
    log = RecordingLog()
    unknown = Record.read(record_of(Shouted(), 2).data.replace(b"Shouted", b"Whisper"))
    fact_report(log).log([record_of(HandlerFailed("h", 1, "why"), 1), record_of(Shouted(), 3), unknown])
    assert [(level, fields["type"]) for level, _, fields in log.lines] == [
        ("warning", "HandlerFailed"),
        ("info", "Shouted"),
        ("info", "Whisper"),
    ]


def test_facts_below_the_log_level_are_not_logged_or_counted() -> None:
    log, clock = RecordingLog(level="warning"), ManualClock()
    report = fact_report(log, clock=clock)
    report.log(added(1000))
    clock.now += 100
    report.look(clock.now)
    assert log.lines == []


def test_facts_over_the_rate_are_counted_in_one_line() -> None:
    log, clock = RecordingLog(), ManualClock()
    report = fact_report(log, 10.0, clock)
    report.log(added(1000))
    report.look(clock.now)
    assert len(log.of("fact")) == 10
    assert log.of("facts left out of the log") == []
    clock.now += 1
    report.look(clock.now)
    report.look(clock.now + 100)
    assert [fields["facts"] for fields in log.of("facts left out of the log")] == [990]


def test_flood_of_info_facts_does_not_suppress_a_warning() -> None:
    log = RecordingLog()
    report = fact_report(log, 10.0)
    report.log([*added(1000), record_of(HandlerFailed("h", 1, "why"), 2000)])
    assert [fields["type"] for level, _, fields in log.lines if level == "warning"] == ["HandlerFailed"]


def test_limit_can_be_changed_and_zero_logs_no_facts() -> None:
    log, clock = RecordingLog(), ManualClock()
    report = fact_report(log, 0.0, clock)
    report.log(added(1000))
    report.look(clock.now + 100)
    assert log.lines == []
    report.set_limit(50)
    clock.now += 1
    report.log(added(1000))
    assert len(log.of("fact")) == 50


@on_virtual_time
async def test_facts_are_logged_when_durable() -> None:
    log, store = RecordingLog(), FaultyStore()
    async with running(store, reporting(log)) as kernel:
        store.block()
        pending = kernel.submit(4)
        await store.entered.wait()
        assert log.lines == []
        store.unblock()
        await pending.wait()
        assert [fields["fact"] for fields in log.of("fact")] == [{"amount": 4, "total": 4}]


@on_virtual_time
async def test_reporter_limit_can_be_changed() -> None:
    log = RecordingLog()
    async with running(register=reporting(log, facts_per_s_max=0)) as kernel:
        await kernel.add()
        assert log.of("fact") == []
        kernel.reporter.set_limits(facts_per_s_max=10)  # type: ignore[attr-defined]
        await kernel.add()
        assert len(log.of("fact")) == 1


@on_virtual_time
async def test_store_failure_and_recovery_are_logged_once_each() -> None:
    log, store = RecordingLog(), FaultyStore()
    async with running(store, reporting(log)) as kernel, anyio.create_task_group() as tasks:
        tasks.start_soon(kernel.reporter.run)  # type: ignore[attr-defined]
        store.commit_error = full()
        kernel.submit()
        await anyio.sleep(5)
        assert [fields["code"] for fields in log.of("decisions cannot be written")] == ["store_full"]
        assert log.levels("decisions cannot be written") == {"error"}
        store.commit_error = None
        await anyio.sleep(5)
        [again] = log.of("decisions can be written again")
        assert 0 < again["after_s"] <= 6
        tasks.cancel_scope.cancel()


@on_virtual_time
async def test_short_store_failure_is_logged_too() -> None:
    log = RecordingLog()
    async with running(register=reporting(log)) as kernel:
        kernel.bus.submit(Stumble("once"), call())
        await kernel.ledger.writable()
        kernel.reporter.look()  # type: ignore[attr-defined]
        assert log.of("state reloaded from the store") == [{"times": 1}]


@on_virtual_time
async def test_request_handler_exception_is_logged_with_its_traceback() -> None:
    log = RecordingLog()
    async with running(register=reporting(log)) as kernel:
        assert kernel.bus.submit(Stumble("over a stone"), call()).error is not None
        [mistake] = log.of("unexpected exception")
        assert mistake["owner"] == "Stumble in clumsy"
        assert mistake["exception"].startswith("Traceback")
        assert "ZeroDivisionError: over a stone" in mistake["exception"]
        assert "in stumble" in mistake["exception"]


@on_virtual_time
async def test_wrapper_exception_is_logged_with_the_wrapper_as_owner() -> None:
    log = RecordingLog()

    async def wrap(request: Add, _: Call, proceed: Any) -> int:
        raise KeyError(request.amount)

    def register(kernel: Kernel) -> None:
        reporting(log)(kernel)
        kernel.bus.wrap(Add, wrap, owner="wrapping paper")

    async with running(register=register) as kernel:
        with pytest.raises(Exception, match="wrapping paper"):
            await kernel.add()
    assert [fields["owner"] for fields in log.of("unexpected exception")] == ["Add in wrapping paper"]


@on_virtual_time
async def test_fact_handler_exception_is_logged_and_a_refusal_is_not() -> None:
    log = RecordingLog()

    async def break_down(record: Record) -> None:
        raise ZeroDivisionError(record.id)

    async def refuse(record: Record) -> None:
        raise RequestRefused("not_now", "not now")

    def register(kernel: Kernel) -> None:
        reporting(log)(kernel)
        kernel.bus.on(Added, break_down, name="fragile")
        kernel.bus.on(Added, refuse, name="stubborn")

    async with running(register=register) as kernel:
        await kernel.add()
        await kernel.settle()
    assert [fields["owner"] for fields in log.of("unexpected exception")] == ["fragile"]
    assert {fields["fact"]["handler"] for fields in log.of("fact") if fields["type"] == "HandlerFailed"} == {
        "fragile",
        "stubborn",
    }


@on_virtual_time
async def test_refused_request_is_not_logged_as_an_exception() -> None:
    log = RecordingLog()
    async with running(register=reporting(log)) as kernel:
        assert kernel.bus.submit(Stumble("refuse"), call()).error is not None
    assert log.of("unexpected exception") == []


@on_virtual_time
async def test_exceptions_are_answered_without_a_reporter() -> None:
    async with running(register=lambda kernel: kernel.bus.serve(Stumble, stumble, owner="clumsy")) as kernel:
        error = kernel.bus.submit(Stumble("x"), call()).error
        assert error is not None
        assert error.code == "handler_broken"
        kernel.bus.signal(Tick(1.0), call())


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except type(error) as caught:
        return caught


def test_repeated_exception_is_logged_three_times_a_minute_and_counted() -> None:
    log, clock = RecordingLog(), ManualClock()
    report = ExceptionReport(log, clock)
    for _ in range(100):
        report.log("h", raised(ValueError("x")))
    report.look(clock.now)
    assert len(log.of("unexpected exception")) == 3
    assert log.of("repeated exceptions") == []
    clock.now += 61
    report.look(clock.now)
    [again] = log.of("repeated exceptions")
    assert (again["owner"], again["error"], again["times"]) == ("h", "ValueError", 97)
    assert "test_report.py:" in again["place"]


def test_new_exception_is_logged_while_another_repeats() -> None:
    log = RecordingLog()
    report = ExceptionReport(log, ManualClock())
    for error in [ValueError("x")] * 10 + [KeyError("y")]:
        report.log("h", raised(error))
    assert "KeyError" in log.lines[-1][2]["exception"]


def test_distinct_exceptions_use_bounded_memory() -> None:
    log = RecordingLog()
    report = ExceptionReport(log, ManualClock())
    for number in range(EXCEPTIONS_MAX * 3):
        report.log(f"owner {number}", ValueError("x"))
    assert len(report._limits) == EXCEPTIONS_MAX


class Hostile(Exception):
    """An exception whose text cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


def deep(levels: int = 900) -> None:
    if levels:
        deep(levels - 1)
    raise RecursionError("x" * 100_000)


def test_exception_that_cannot_be_shown_is_logged_without_raising() -> None:
    log = RecordingLog()
    report = ExceptionReport(log, ManualClock())
    report.log("h", raised(Hostile()))
    try:
        deep()
    except RecursionError as error:
        report.log("h", error)
    hostile, huge = (fields["exception"] for fields in log.of("unexpected exception"))
    assert "Hostile" in hostile
    assert len(huge) <= TRACEBACK_CHARS_MAX + 3
