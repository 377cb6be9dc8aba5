"""Several subscribers to what happens to a worker.

Law: a subscriber that fails is nobody else's affair: the others hear all the same, and its error is logged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import isawaitable
from typing import Generic, TypeVar

from forged.errors import describe
from forged.log import Log

T = TypeVar("T")


class Event(Generic[T]):
    """Something that may happen, and who wants to hear of it."""

    def __init__(self, name: str, log: Log) -> None:
        self._name = name
        self._log = log
        self._subscribers: dict[Callable[[T], object], None] = {}

    def subscribe(self, subscriber: Callable[[T], object]) -> Callable[[T], object]:
        """Be called when it happens; also to be used as a decorator."""
        self._subscribers[subscriber] = None
        return subscriber

    def unsubscribe(self, subscriber: Callable[[T], object]) -> None:
        """Be called no more; no error for who is not."""
        self._subscribers.pop(subscriber, None)

    def fire(self, value: T) -> None:
        """Tell everybody."""
        for subscriber in tuple(self._subscribers):
            with self._told_if_it_fails():
                subscriber(value)

    async def fire_and_wait(self, value: T) -> None:
        """Tell everybody, one after the other, and wait for those that are asynchronous."""
        for subscriber in tuple(self._subscribers):
            with self._told_if_it_fails():
                done = subscriber(value)
                if isawaitable(done):
                    await done

    @contextmanager
    def _told_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a subscriber is somebody else's code
            self._log.error("a subscriber failed", event_name=self._name, reason=describe(error))
