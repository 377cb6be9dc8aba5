"""A stream of facts, as its reader sees it.

Law: the reader gets every fact it asked for once and in order, over any number of connections and daemons, or a `Gap`
where facts can no longer be had. What waits for the reader is bounded by the credit it gave.
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

    It ends when it is closed or, with `until`, when the daemon has looked through its facts up to that id. Several
    tasks may read from one; each fact goes to one of them.
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
        """Everything up to this id has been received, or was not asked for; None before the daemon has said."""
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
        """Subscribe, and wait until the daemon has confirmed from where."""
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
        """The next fact or gap; waits for it, over reconnections too."""
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
        """How many facts and gaps have arrived and wait to be read."""
        return len(self._items)

    def close(self) -> None:
        """Want no more, of what has arrived either."""
        if not self._over:
            self._over = True
            self._items.clear()
            self._closed(self)
            self._changed.set()

    def subscribe(self, history: str) -> Subscribe:
        """How to ask a daemon for what is missing."""
        self._taken = 0
        self._history_asked = history
        room = max(0, WINDOW_FACTS - sum(type(item) is Record for item in self._items))
        return Subscribe(self.number, self.position, self._history, self._types, self._jobs, room)

    def take(self, message: Facts | GapMessage | Ended) -> None:
        """Something arrived for this stream."""
        self._enter_history()
        if isinstance(message, Facts):
            for raw in message.records:
                record = Record.read(raw)
                # A batch that the network delivered twice must not be seen twice.
                if self.position is None or record.id > self.position:
                    self._items.append(record)
                    self.position = record.id
            self.position = max(message.upto, self.position or 0)
            self._caught_up_to = message.upto
        elif isinstance(message, GapMessage):
            self._items.append(Gap(message.first, message.last, message.reason))
            self.position = message.last
        else:
            self._error = from_wire(message.kind, message.code, message.text, message.fix)
        self._changed.set()

    def fail(self, error: ForgedError) -> None:
        """The stream cannot go on; what has arrived can still be read."""
        self._error = error
        self._changed.set()

    def _enter_history(self) -> None:
        # The position means something in the history of whoever has sent this, not before: the daemon may be another.
        if self._history not in ("", self._history_asked) and self._until is not None:
            # The last fact that was wanted is one of the other history, and will not come.
            self._until = -1
        self._history = self._history_asked

    async def _change(self) -> None:
        if self._error is not None:
            raise copy(self._error)
        self._changed.clear()
        await self._changed.wait()
