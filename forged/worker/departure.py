"""When a worker that was told to go may go.

Law: what only this worker has is kept for the others for as long as they come for it, and as long as there is a daemon
that has them come, but for a grace; then it goes all the same. Whether the state is such a thing, the daemon knows: it
is asked, and asked again when the world may have changed since. Nobody waits without end.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio
from anyio.abc import TaskGroup

from forged.elastic.config import ElasticTrainingConfig
from forged.errors import ForgedError
from forged.log import Log
from forged.worker.standing import Standing

LOOK_INTERVAL_S = 0.5
"""How often it is looked whether anybody comes, and asked whether anybody may."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ties:
    """What keeps a worker where it is."""

    holds_state: Callable[[], bool]
    """Whether it is in the world, with steps behind it."""
    holds_data: Callable[[], bool]
    """Whether others have yet to take over shards."""
    is_waited_for: Callable[[], bool]
    """Whether the others wait for it to end its step, so that nobody can come yet."""
    has_given: Callable[[], bool]
    """Whether anybody has taken something lately."""
    has_daemon: Callable[[], bool]
    ask: Callable[[str], Awaitable[bool]]
    """Tells the daemon that it is to go, and why; returns whether it may as far as the state goes."""


class Departure:
    """Waits for the moment."""

    def __init__(self, standing: Standing, ties: Ties, wake: Callable[[], None], log: Log) -> None:
        self.is_overdue = False
        """Whether it waits for nobody any more."""
        self._may_go = False
        self._changed = anyio.Event()
        self._unwanted_s = 0.0
        """For how long nobody has come who could."""
        self._why = ""
        self._is_begun = False
        self._standing = standing
        self._ties = ties
        self._wake = wake
        self._log = log

    @property
    def is_due(self) -> bool:
        """Whether the worker is to go, and nobody is waited for."""
        return self._standing.draining is not None and (self.is_overdue or not self._is_needed())

    @property
    def reason(self) -> str:
        """Why it goes, and why it did not wait."""
        wish = self._standing.draining or ""
        return f"{wish}; {self._why}" if self._why and self._is_needed() else wish

    def _is_needed(self) -> bool:
        return self._ties.holds_data() or (self._ties.holds_state() and not self._may_go)

    def begin(self, settings: Callable[[], ElasticTrainingConfig], tasks: TaskGroup) -> None:
        """Prepare to go, if the worker was told to; by the settings at any time."""
        if self._standing.draining is not None and not self._is_begun:
            self._is_begun = True
            tasks.start_soon(self._ask_for_leave, self._standing.draining)
            tasks.start_soon(self._wait, settings)

    def reconsider(self) -> None:
        """The world changes: who was not needed may be, and somebody may come."""
        self._may_go, self._unwanted_s = False, 0.0
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def _ask_for_leave(self, wish: str) -> None:
        """Have others come, and be told when nobody has to any more; for ever, because that changes."""
        while True:
            changed = self._changed
            try:
                may_go = await self._ties.ask(wish)
            except ForgedError as error:
                self._log.warning("the daemon was not told that this worker is to go", why=str(error))
                may_go = True
            # What follows from it was decided with the answer, and is told before it.
            if not changed.is_set():
                self._may_go = may_go
                self._wake()
                with anyio.move_on_after(None if may_go else LOOK_INTERVAL_S):
                    await changed.wait()

    async def _wait(self, settings: Callable[[], ElasticTrainingConfig]) -> None:
        """Let the waiting have an end."""
        alone_s = 0.0
        while True:
            config = settings()
            if _lasts(alone_s, config.reconnect_grace_s) or _lasts(self._unwanted_s, config.leave_timeout_s):
                break
            await anyio.sleep(LOOK_INTERVAL_S)
            alone_s = 0.0 if self._ties.has_daemon() else alone_s + LOOK_INTERVAL_S
            is_wanted = self._ties.has_given() or self._ties.is_waited_for()
            self._unwanted_s = 0.0 if is_wanted else self._unwanted_s + LOOK_INTERVAL_S
        if _lasts(alone_s, config.reconnect_grace_s):
            self._why = f"there was no daemon for {config.reconnect_grace_s:g} s"
        else:
            self._why = f"nobody came for what it holds for {config.leave_timeout_s:g} s"
        self.is_overdue = True
        if self._is_needed():
            self._log.warning("goes with what others may need", why=self._why)
        self._wake()


def _lasts(seconds: float, limit_s: float) -> bool:
    """Whether something is the case, and for so long."""
    return 0.0 < seconds >= limit_s
