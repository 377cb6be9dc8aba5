"""Several subscribers to one event."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from functools import partial
from typing import Any

import pytest

from forged.errors import RequestRefused
from forged.log import Log
from forged.worker.events import Event


class Notes:
    """A log that keeps what is said."""

    def __init__(self) -> None:
        self.errors: list[dict[str, Any]] = []

    def hears(self, level: str, /) -> bool:
        return True

    def debug(self, event: str, **fields: Any) -> None:
        raise AssertionError(event)

    info = warning = debug

    def error(self, event: str, **fields: Any) -> None:
        self.errors.append({"event": event, **fields})

    def bind(self, **fields: Any) -> Log:
        return self


def test_subscribers_are_called_in_order_of_subscription() -> None:
    heard: list[tuple[str, int]] = []
    event: Event[int] = Event("counted", Notes())
    event.subscribe(lambda value: heard.append(("first", value)))
    event.subscribe(lambda value: heard.append(("second", value)))
    event.fire(1)
    event.fire(2)
    assert heard == [("first", 1), ("second", 1), ("first", 2), ("second", 2)]


def test_function_that_subscribes_twice_is_called_once() -> None:
    heard: list[int] = []
    event: Event[int] = Event("counted", Notes())
    event.subscribe(heard.append)
    append = heard.append
    event.subscribe(append)
    event.fire(1)
    event.unsubscribe(append)
    event.unsubscribe(append)
    event.fire(2)
    assert heard == [1]


def test_subscribe_as_a_decorator_returns_the_function() -> None:
    event: Event[int] = Event("counted", Notes())

    @event.subscribe
    def double(value: int) -> int:
        return 2 * value

    assert double(2) == 4


def test_failing_subscriber_is_logged_and_the_rest_are_called() -> None:
    notes = Notes()
    heard: list[int] = []
    event: Event[int] = Event("counted", notes)

    def fail(value: int) -> None:
        raise ValueError("no")

    event.subscribe(fail)
    event.subscribe(heard.append)
    event.fire(1)
    assert heard == [1]
    assert notes.errors == [{"event": "a subscriber failed", "event_name": "counted", "reason": "ValueError: no"}]


def test_failure_of_a_subscriber_is_raised_where_it_counts() -> None:
    notes, heard = Notes(), list[int]()
    event: Event[int] = Event("counted", notes, is_raised=True)

    def fail(value: int) -> None:
        raise ValueError("no")

    event.subscribe(fail)
    event.subscribe(heard.append)
    with pytest.raises(ValueError, match="no"):
        event.fire(1)
    assert (heard, notes.errors) == ([], [])


async def test_awaited_event_waits_for_asynchronous_subscribers_in_order() -> None:
    notes = Notes()
    heard: list[str] = []
    event: Event[int] = Event("counted", notes, is_awaited=True)

    async def slow(value: int) -> None:
        await asyncio.sleep(0)
        heard.append("slow")

    async def fail(value: int) -> None:
        await asyncio.sleep(0)
        raise ValueError("no")

    event.subscribe(fail)
    event.subscribe(slow)
    event.subscribe(lambda value: heard.append("quick"))
    await event.fire_and_wait(1)
    assert heard == ["slow", "quick"]
    assert notes.errors == [{"event": "a subscriber failed", "event_name": "counted", "reason": "ValueError: no"}]


async def hears(value: int) -> None:
    raise AssertionError("never awaited")


class HearsLater:
    """What can be awaited, and is no coroutine."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __await__(self) -> Generator[None, None, None]:
        raise AssertionError("never awaited")


@pytest.mark.parametrize("subscriber", [hears, partial(hears, 1)], ids=["function", "partial"])
def test_asynchronous_subscriber_is_refused_where_it_is_not_awaited(subscriber: Any) -> None:
    event: Event[int] = Event("counted", Notes())
    with pytest.raises(RequestRefused, match="subscribe a plain function") as raised:
        event.subscribe(subscriber)
    assert raised.value.code == "subscriber_asynchronous"
    event.fire(1)


@pytest.mark.parametrize("later", [hears, HearsLater], ids=["coroutine", "other"])
def test_subscriber_that_returns_an_awaitable_is_logged_as_failed(later: Any) -> None:
    def subscriber(value: int) -> Any:
        made.append(later(value))
        return made[-1]

    notes, made, heard = Notes(), list[Any](), list[int]()
    event: Event[int] = Event("counted", notes)
    event.subscribe(subscriber)
    event.subscribe(heard.append)
    # A coroutine that is let go of before it was closed warns, which fails the test.
    event.fire(1)
    assert heard == [1]
    (error,) = notes.errors
    assert error["event"] == "a subscriber failed"
    assert "subscribe a plain function" in error["reason"]


async def test_subscriber_may_return_a_task() -> None:
    notes = Notes()
    event: Event[int] = Event("counted", notes)
    tasks: list[asyncio.Task[int]] = []

    async def double(value: int) -> int:
        return 2 * value

    def start(value: int) -> asyncio.Task[int]:
        tasks.append(asyncio.get_running_loop().create_task(double(value)))
        return tasks[0]

    event.subscribe(start)
    event.fire(1)
    assert await tasks[0] == 2
    assert notes.errors == []


def test_subscribers_may_come_and_go_while_an_event_is_fired() -> None:
    heard: list[str] = []
    event: Event[int] = Event("counted", Notes())

    def once(value: int) -> None:
        heard.append("once")
        event.unsubscribe(once)
        event.subscribe(lambda value: heard.append("later"))

    event.subscribe(once)
    event.fire(1)
    event.fire(2)
    assert heard == ["once", "later"]
