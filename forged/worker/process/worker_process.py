"""What a worker has of the process that it lives in.

Law: a process is one worker's, unless it is said that it is shared. Then a pulse speaks for it, its connections end
with it though forked children live on, and SIGTERM lets it finish its step and leave; in a forked child the worker is
nobody. Where many workers live in one process, as in tests and simulations, none of them has any of that: the end of
the process is not the end of one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from random import SystemRandom
from typing import Any, Protocol

from forged.clock import SystemClock
from forged.log import Log
from forged.worker.process.counters import Counters
from forged.worker.process.forks import ForkGuard
from forged.worker.process.pulse import Pulse, PulseKeeper
from forged.worker.process.sigterm import heeding_sigterm


class WorkerProcess(Protocol):
    """The process of a worker; one object for one worker."""

    @property
    def is_forked(self) -> bool:
        """Whether this is a child of the process in which the worker lives."""
        ...

    def check(self) -> None:
        """Raise where the worker does not live."""
        ...

    def inhabited(
        self, descriptors: Callable[[], Iterable[int]], told_to_end: Callable[[], bool]
    ) -> AbstractContextManager[Counters | None]:
        """Be a worker's inside the block; what it counts there is for its pulse. See `ForkGuard`, `heeding_sigterm`."""
        ...

    def begin_pulse(
        self, endpoints: Sequence[str], job: str, worker_id: str, incarnation: bytes, token: str | None
    ) -> None:
        """Have somebody speak for the worker, whom the daemon knows by now."""
        ...

    def look_after_pulse(self) -> None:
        """Start another if it has ended; to be called now and then."""
        ...

    def bequeath(self, words: Mapping[str, Any]) -> None:
        """Leave it to the pulse to tell with what the worker has left, as soon as there is a daemon."""
        ...


class OwnProcess:
    """This process, which is one worker's."""

    def __init__(self, log: Log) -> None:
        self.heart: PulseKeeper | None = None
        """What keeps its pulse going; None while it has none."""
        self._counters: Counters | None = None
        self._guard: ForkGuard | None = None
        self._log = log

    @property
    def is_forked(self) -> bool:
        return self._guard is not None and self._guard.forked

    def check(self) -> None:
        if self._guard is not None:
            self._guard.check()

    @contextmanager
    def inhabited(
        self, descriptors: Callable[[], Iterable[int]], told_to_end: Callable[[], bool]
    ) -> Iterator[Counters]:
        with ExitStack() as stack:
            counters = self._counters = stack.enter_context(closing(Counters.create()))
            # Until the worker has left it may die, which is to be told.
            stack.callback(self._end_pulse)
            self._guard = ForkGuard(descriptors)
            stack.callback(self._guard.close)
            stack.enter_context(heeding_sigterm(told_to_end))
            yield counters

    def begin_pulse(
        self, endpoints: Sequence[str], job: str, worker_id: str, incarnation: bytes, token: str | None
    ) -> None:
        counters = self._counters
        assert counters is not None

        def start() -> Pulse:
            return Pulse.start(endpoints, job, worker_id, incarnation, token, counters)

        self.heart = PulseKeeper(start, SystemClock(), SystemRandom().random, self._log)

    def look_after_pulse(self) -> None:
        if self.heart is not None:
            self.heart.look()

    def bequeath(self, words: Mapping[str, Any]) -> None:
        if self.heart is not None:
            self.heart.pulse.bequeath(words)

    def _end_pulse(self) -> None:
        heart, self.heart = self.heart, None
        if heart is not None:
            heart.close()


class SharedProcess:
    """A process in which more live than this worker. Whoever speaks for it may read `counters`."""

    is_forked = False

    def __init__(self, counters: Counters | None = None) -> None:
        self._counters = counters

    def check(self) -> None:
        return

    @contextmanager
    def inhabited(
        self, descriptors: Callable[[], Iterable[int]], told_to_end: Callable[[], bool]
    ) -> Iterator[Counters | None]:
        yield self._counters

    def begin_pulse(
        self, endpoints: Sequence[str], job: str, worker_id: str, incarnation: bytes, token: str | None
    ) -> None:
        return

    def look_after_pulse(self) -> None:
        return

    def bequeath(self, words: Mapping[str, Any]) -> None:
        return
