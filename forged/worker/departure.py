"""When a worker that was told to go may go.

Law: what others may need of it is kept for them for as long as they come for it, and as long as there is a daemon that
has them come, but for a grace; then it goes all the same. Nobody waits without end.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
from anyio.abc import TaskGroup

from forged.elastic.config import ElasticTrainingConfig
from forged.log import Log
from forged.worker.standing import Standing

LOOK_INTERVAL_S = 0.5
"""How often it is looked whether anybody comes."""


class Departure:
    """Waits for the moment; `is_needed` tells whether others have yet to take over something."""

    def __init__(self, standing: Standing, is_needed: Callable[[], bool], wake: Callable[[], None], log: Log) -> None:
        self.is_overdue = False
        """Whether it waits for nobody any more."""
        self._why = ""
        self._is_limited = False
        self._standing = standing
        self._is_needed = is_needed
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

    def limit(
        self,
        config: Callable[[], ElasticTrainingConfig],
        has_daemon: Callable[[], bool],
        has_given: Callable[[], bool],
        tasks: TaskGroup,
    ) -> None:
        """Let the waiting have an end, by the settings at that time, if it has begun.

        `has_given`: whether anybody has taken something lately.
        """
        if self._standing.draining is not None and not self._is_limited:
            self._is_limited = True
            tasks.start_soon(self._wait, config, has_daemon, has_given)

    async def _wait(
        self,
        settings: Callable[[], ElasticTrainingConfig],
        has_daemon: Callable[[], bool],
        has_given: Callable[[], bool],
    ) -> None:
        alone_s = unwanted_s = 0.0
        while True:
            config = settings()
            if _lasts(alone_s, config.reconnect_grace_s) or _lasts(unwanted_s, config.leave_timeout_s):
                break
            await anyio.sleep(LOOK_INTERVAL_S)
            alone_s = 0.0 if has_daemon() else alone_s + LOOK_INTERVAL_S
            unwanted_s = 0.0 if has_given() else unwanted_s + LOOK_INTERVAL_S
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
