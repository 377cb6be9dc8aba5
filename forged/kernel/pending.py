"""A reply that is released when the revision it depends on is durable.

Invariants:
- Each callback is called exactly once: when the outcome is known, or immediately if it is known already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from forged.errors import ForgedError, without_traceback


class Pending:
    """A reply and the revision that must become durable before it is released."""

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
        """Call `callback` when the outcome is known; immediately if it is."""
        if self._callbacks is None:
            callback(self)
        else:
            self._callbacks.append(callback)

    def resolve(self, error: ForgedError | None = None) -> None:
        """Set the outcome: durable, or failed with `error`."""
        callbacks, self._callbacks = self._callbacks, None
        self.error = error
        for callback in callbacks or ():
            callback(self)

    async def wait(self) -> Any:
        """Wait until the reply is durable and return it, or raise the error."""
        if not self.done:
            resolved: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.when_done(lambda _: None if resolved.done() else resolved.set_result(None))
            await resolved
        if self.error is not None:
            raise without_traceback(self.error)
        return self.reply
