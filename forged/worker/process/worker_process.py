"""The process that a worker lives in: its pulse, forked children and SIGTERM.

Invariants:
- A process is one worker's own, unless it is given as shared. A worker with its own process has a pulse, its
  connections end with the process even if forked children live on, and SIGTERM drains it. It cannot be used in a
  forked child.
- Workers that share a process, in tests and simulations, have none of that: the end of the process is not the end of
  one worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from random import SystemRandom
from typing import Any, Protocol

from forged.clock import SystemClock
from forged.log import Log
from forged.worker.process.counters import Counters
from forged.worker.process.forks import ForkGuard
from forged.worker.process.pulse import PulseKeeper, PulseProcess
from forged.worker.process.sigterm import heeding_sigterm
from forged.worker.process.stack_dump import StackDump


class WorkerProcess(Protocol):
    """The process of one worker."""

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the worker's."""
        ...

    def check(self) -> None:
        """Raise in a forked child of the worker's process."""
        ...

    def inhabited(
        self, descriptors: Callable[[], Iterable[int]], told_to_end: Callable[[], bool]
    ) -> AbstractContextManager[Counters | None]:
        """Guard forks and handle SIGTERM inside the block; yields the counters for the pulse."""
        ...

    def begin_pulse(
        self, endpoints: Sequence[str], job: str, worker_id: str, incarnation: bytes, token: str | None
    ) -> None:
        """Start the pulse of a worker that the daemon has registered."""
        ...

    def look_after_pulse(self) -> None:
        """Replace a pulse that has ended; called at each step."""
        ...

    def leave_through_pulse(self, leave: Mapping[str, Any]) -> None:
        """Hand the worker's leave to the pulse, which reports it as soon as a daemon is reachable."""
        ...


class OwnProcess:
    """A process that is one worker's own."""

    def __init__(self, log: Log) -> None:
        self.heart: PulseKeeper | None = None
        """Keeps a pulse running; None while the worker has none."""
        self._counters: Counters | None = None
        self._stacks: StackDump | None = None
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
            self._stacks = stack.enter_context(closing(StackDump.create()))
            # The worker may die until it has left, so the pulse ends last.
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

        start = partial(PulseProcess.start, endpoints, job, worker_id, incarnation, token, counters, self._stacks)
        self.heart = PulseKeeper(start, SystemClock(), SystemRandom().random, self._log)

    def look_after_pulse(self) -> None:
        if self.heart is not None:
            self.heart.look()

    def leave_through_pulse(self, leave: Mapping[str, Any]) -> None:
        if self.heart is not None:
            self.heart.pulse.leave_through_pulse(leave)

    def _end_pulse(self) -> None:
        heart, self.heart = self.heart, None
        if heart is not None:
            heart.close()


class SharedProcess:
    """A process that several workers share. A test may read the worker's `counters`."""

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

    def leave_through_pulse(self, leave: Mapping[str, Any]) -> None:
        return
