"""A stream of facts.

Invariants:
- The reader gets every subscribed fact once and in order, over any number of connections and daemons, or a `Gap` for
  facts that are no longer available.
- The number of unread facts is limited by the credit that the reader has granted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from copy import copy
from types import TracebackType
from typing import Self

from forged.errors import ForgedError, RequestRefused, from_wire
from forged.kernel.messages import Gap, Record
from forged.net.protocol.messages import Credit, Ended, Facts, GapMessage, Subscribe

WINDOW_FACTS = 512

NOT_OPEN = RequestRefused(
    "stream_not_open", "the stream is not open", "use it inside `async with client.facts(...) as stream`"
)


class FactStream:
    """An asynchronous iterator over records and gaps; made by `ForgedClient.facts`.

    It ends when it is closed or, with `until`, when the daemon has passed that id. Several tasks may read from one
    stream; each fact goes to one of them.
    """

    def __init__(
        self,
        number: int,
        since: int | None,
        types: tuple[str, ...],
        jobs: tuple[str, ...],
        *,
        opened: Callable[[FactStream], None],
        closed: Callable[[FactStream], None],
        until: int | None = None,
        grant: Callable[[Credit], None],
    ) -> None:
        self.number = number
        self.position = since
        """Facts up to this id are received or not subscribed; None before the daemon has confirmed the subscription."""
        self._history = ""
        self._history_asked = ""
        self._types = types
        self._jobs = jobs
        self._until = until
        self._opened = opened
        self._closed = closed
        self._grant = grant
        self._items: deque[Record | Gap] = deque()
        self._taken = 0
        self._caught_up_to = -1
        self._error: ForgedError | None = NOT_OPEN
        self._over = False
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        """Subscribe, and wait until the daemon has confirmed the start."""
        if self._error is not NOT_OPEN:
            raise RequestRefused("stream_reopened", "a stream can be opened only once", "call `client.facts` again")
        self._error = None
        try:
            self._opened(self)
            while self._caught_up_to < 0 and not self._items and not self._over:
                await self._change()
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Record | Gap:
        """The next fact or gap; waits for it, also across reconnections."""
        while not self._items:
            if self._over or (self._until is not None and self._caught_up_to >= self._until):
                raise StopAsyncIteration
            await self._change()
        item = self._items.popleft()
        if type(item) is Record:
            self._taken += 1
            if self._taken >= WINDOW_FACTS // 2:
                self._grant(Credit(self.number, self._taken))
                self._taken = 0
        return item

    @property
    def waiting(self) -> int:
        """The number of unread facts and gaps."""
        return len(self._items)

    def close(self) -> None:
        """End the subscription and discard unread facts."""
        if not self._over:
            self._over = True
            self._items.clear()
            self._closed(self)
            self._changed.set()

    def subscribe(self, history: str) -> Subscribe:
        """The message that subscribes to the missing facts."""
        self._taken = 0
        self._history_asked = history
        room = max(0, WINDOW_FACTS - sum(type(item) is Record for item in self._items))
        return Subscribe(self.number, self.position, self._history, self._types, self._jobs, room)

    def take(self, message: Facts | GapMessage | Ended) -> None:
        """Process a message of this stream."""
        self._enter_history()
        if isinstance(message, Facts):
            for raw in message.records:
                record = Record.read(raw)
                # A batch may arrive twice.
                if self.position is None or record.id > self.position:
                    self._items.append(record)
                    self.position = record.id
            self.position = max(message.upto, self.position or 0)
            self._caught_up_to = message.upto
        elif isinstance(message, GapMessage):
            # So may a gap. One that begins at 0 starts over: the position was of another history or ahead of it.
            if not message.first or self.position is None or message.last > self.position:
                self._items.append(Gap(message.first, message.last, message.reason))
                self.position = message.last
        else:
            self._error = from_wire(message.kind, message.code, message.text, message.fix)
        self._changed.set()

    def fail(self, error: ForgedError) -> None:
        """End with an error; unread facts can still be read."""
        self._error = error
        self._changed.set()

    def _enter_history(self) -> None:
        # The position belongs to the history of the daemon that sent this message, which may be another daemon.
        if self._history not in ("", self._history_asked) and self._until is not None:
            # `until` belongs to the previous history, so its fact will not come.
            self._until = -1
        self._history = self._history_asked

    async def _change(self) -> None:
        if self._error is not None:
            raise copy(self._error)
        self._changed.clear()
        await self._changed.wait()
