"""The token of an operation that may take long, and that tells when it was last seen at work."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf

from forged.checkpoint.ports import CancelToken

TOLD_EVERY_S = 1.0


class WatchedToken(CancelToken):
    """Tells whenever a thread checks it, which threads do between two blocks; at most once a second."""

    def __init__(self, at_work: Callable[[float], None], monotonic: Callable[[], float] = time.monotonic) -> None:
        """`at_work` is called in the threads, with the seconds for which the operation pauses by intent."""
        super().__init__(None, monotonic)
        self._at_work = at_work
        self._told_at = -inf

    def check(self) -> None:
        super().check()
        self._tell(0.0)

    def wait(self, seconds: float) -> None:
        self._tell(seconds)
        super().wait(seconds)

    def _tell(self, pause_s: float) -> None:
        now = self._monotonic()
        if pause_s >= TOLD_EVERY_S or now - self._told_at >= TOLD_EVERY_S:
            self._told_at = now
            self._at_work(pause_s)
