"""Events of a worker, to which the training script subscribes.

Invariants:
- A subscriber that fails is logged and does not keep the other subscribers from being called; but the failure of a
  subscriber of `world_entered` is raised.
- An asynchronous subscriber is refused where the event is not awaited: it would never run.
"""

from __future__ import annotations

from asyncio import isfuture
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from inspect import isawaitable, iscoroutinefunction
from typing import Generic, Protocol, TypeVar

from forged.elastic.model import ClusterTopology, GlobalTrainingState, RescalingEvent, Standstill, WorldOver
from forged.errors import RequestRefused, describe
from forged.log import Log

T = TypeVar("T")


class Event(Generic[T]):
    """Something that may happen, and its subscribers."""

    def __init__(self, name: str, log: Log, *, is_awaited: bool = False, is_raised: bool = False) -> None:
        """`is_raised`: whether the failure of a subscriber is raised, and not logged."""
        self.is_awaited = is_awaited
        """Whether subscribers may be asynchronous."""
        self._is_raised = is_raised
        self._name = name
        self._log = log
        self._subscribers: dict[Callable[[T], object], None] = {}

    def subscribe(self, subscriber: Callable[[T], object]) -> Callable[[T], object]:
        """Call the subscriber whenever the event happens; also usable as a decorator."""
        if iscoroutinefunction(subscriber) and not self.is_awaited:
            raise self._not_awaited()
        self._subscribers[subscriber] = None
        return subscriber

    def unsubscribe(self, subscriber: Callable[[T], object]) -> None:
        """No effect for a function that does not subscribe."""
        self._subscribers.pop(subscriber, None)

    def fire(self, value: T) -> None:
        for subscriber in tuple(self._subscribers):
            with self._logging_failure():
                self._discard(subscriber(value))

    async def fire_and_wait(self, value: T) -> None:
        """Call the subscribers one after the other, and await the asynchronous ones."""
        for subscriber in tuple(self._subscribers):
            with self._logging_failure():
                done = subscriber(value)
                if isawaitable(done):
                    await done

    def _discard(self, done: object) -> None:
        """Drop what a subscriber returns: a task runs by itself, a coroutine never would."""
        if isawaitable(done) and not isfuture(done):
            if isinstance(done, Coroutine):
                done.close()
            raise self._not_awaited()

    def _not_awaited(self) -> RequestRefused:
        return RequestRefused(
            "subscriber_asynchronous",
            f"subscribers of `{self._name}` are not awaited here, so an asynchronous function would never run",
            "subscribe a plain function, and await elsewhere",
        )

    @contextmanager
    def _logging_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self._is_raised:
                raise
            self._log.error("a subscriber failed", event_name=self._name, reason=describe(error))


class RescaleHooks(Protocol):
    """The methods of a worker that a rescale or a standstill calls. A subclass of `ElasticWorker` may override them."""

    async def on_rescaling_event(self, event: RescalingEvent) -> None:
        """The worker has entered the event's world."""

    async def synchronize_state(self, state: GlobalTrainingState) -> None:
        """The worker has this training state; called after `on_rescaling_event`."""

    def on_standstill(self, standstill: Standstill) -> None:
        """The worker stands still because the daemon is away, or no longer does."""


class WorkerEvents:
    """The events of one worker."""

    def __init__(self, log: Log) -> None:
        self.rescaling_requested: Event[RescalingEvent] = Event("rescaling_requested", log)
        self.state_synchronized: Event[GlobalTrainingState] = Event("state_synchronized", log)
        self.standstill: Event[Standstill] = Event("standstill", log)
        self.world_over: Event[WorldOver] = Event("world_over", log)
        self.world_entered: Event[ClusterTopology] = Event("world_entered", log, is_awaited=True, is_raised=True)
        self.leaving: Event[str] = Event("leaving", log, is_awaited=True)
