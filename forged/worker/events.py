"""Several subscribers to what happens to a worker.

Law: a subscriber that fails is nobody else's affair: the others hear all the same, and its error is logged. None is
left out silently: where nobody awaits subscribers, an asynchronous one is refused.
"""

from __future__ import annotations

from asyncio import isfuture
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from inspect import isawaitable, iscoroutinefunction
from typing import Generic, TypeVar

from forged.errors import RequestRefused, describe
from forged.log import Log

T = TypeVar("T")


class Event(Generic[T]):
    """Something that may happen, and who wants to hear of it."""

    def __init__(self, name: str, log: Log, *, is_awaited: bool = False) -> None:
        self.is_awaited = is_awaited
        """Whether subscribers may be asynchronous, because whoever fires it waits for them."""
        self._name = name
        self._log = log
        self._subscribers: dict[Callable[[T], object], None] = {}

    def subscribe(self, subscriber: Callable[[T], object]) -> Callable[[T], object]:
        """Be called when it happens; also to be used as a decorator."""
        if iscoroutinefunction(subscriber) and not self.is_awaited:
            raise self._awaits_nobody()
        self._subscribers[subscriber] = None
        return subscriber

    def unsubscribe(self, subscriber: Callable[[T], object]) -> None:
        """Be called no more; no error for who is not."""
        self._subscribers.pop(subscriber, None)

    def fire(self, value: T) -> None:
        """Tell everybody."""
        for subscriber in tuple(self._subscribers):
            with self._told_if_it_fails():
                self._let_go_of(subscriber(value))

    async def fire_and_wait(self, value: T) -> None:
        """Tell everybody, one after the other, and wait for those that are asynchronous."""
        for subscriber in tuple(self._subscribers):
            with self._told_if_it_fails():
                done = subscriber(value)
                if isawaitable(done):
                    await done

    def _let_go_of(self, done: object) -> None:
        """What a subscriber returns does not matter, unless it has yet to be awaited; a task goes on by itself."""
        if isawaitable(done) and not isfuture(done):
            if isinstance(done, Coroutine):
                done.close()
            raise self._awaits_nobody()

    def _awaits_nobody(self) -> RequestRefused:
        return RequestRefused(
            "subscriber_asynchronous",
            f"nobody awaits what subscribes to `{self._name}` here, and an asynchronous function would never be run",
            "subscribe a plain function, and do elsewhere what has to be awaited",
        )

    @contextmanager
    def _told_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a subscriber is somebody else's code
            self._log.error("a subscriber failed", event_name=self._name, reason=describe(error))
