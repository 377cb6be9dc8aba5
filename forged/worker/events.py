"""Several subscribers to what happens to a worker.

Law: a subscriber that fails is nobody else's affair: the others hear all the same, and its error is logged.
"""

from __future__ import annotations

from collections.abc import Callable
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
            try:
                subscriber(value)
            except Exception as error:  # noqa: BLE001 - a subscriber is somebody else's code
                self._log.error("a subscriber failed", event_name=self._name, reason=describe(error))
