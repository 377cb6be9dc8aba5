"""A reply that waits.

Law: whoever holds a pending reply is told once, when its outcome is certain; at once if it is certain already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from forged.errors import ForgedError, without_traceback


class Pending:
    """A reply that waits for its revision to become durable."""

    __slots__ = ("_callbacks", "encoded", "error", "reply", "revision")

    def __init__(self, revision: int, reply: Any = None, encoded: bytes = b"") -> None:
        self.revision = revision
        self.reply = reply
        self.encoded = encoded
        self.error: ForgedError | None = None
        self._callbacks: list[Callable[[Pending], None]] | None = []

    @property
    def done(self) -> bool:
        return self._callbacks is None

    def when_done(self, callback: Callable[[Pending], None]) -> None:
        """Call back once the outcome is certain; at once if it is."""
        if self._callbacks is None:
            callback(self)
        else:
            self._callbacks.append(callback)

    def resolve(self, error: ForgedError | None = None) -> None:
        """The outcome is certain."""
        callbacks, self._callbacks = self._callbacks, None
        self.error = error
        for callback in callbacks or ():
            callback(self)

    async def wait(self) -> Any:
        """The reply, once it is durable."""
        if not self.done:
            arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.when_done(lambda _: None if arrived.done() else arrived.set_result(None))
            await arrived
        if self.error is not None:
            raise without_traceback(self.error)
        return self.reply
