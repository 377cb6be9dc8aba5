"""The small values that the ranks of a world share: what the hub holds, and how a rank calls it. No I/O.

Invariants:
- Every call is answered once: at once, or a `get` that waits when the key is set, or when its caller waits no longer.
- The values, the waiting calls and the unanswered calls of a rank are bounded. What does not fit is refused.
- The values end with their world.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import anyio

from forged.errors import ForgedError, RequestRefused, Unavailable
from forged.net.protocol.messages import INTEGER_MAX
from forged.worker.transport.peer_messages import STORE_CALLS_MAX, StoreAction, StoreAnswer, StoreCall

KEY_BYTES_MAX = 256
VALUE_BYTES_MAX = 1 << 20
STORE_BYTES_MAX = 16 << 20
"""The bytes of all keys and values of a world."""
ENTRY_BYTES = 64
"""How much a key counts besides its bytes and those of its value."""

Answers = Iterator[tuple[int, StoreAnswer]]
"""Answers, each with the rank that it is for."""


class StoreValues:
    """The values of one world, held by its hub."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._bytes = 0
        self._waiting: dict[str, list[tuple[int, int]]] = {}
        """The calls that wait for a key, each by its rank and number."""

    def take(self, rank: int, call: StoreCall) -> Answers:
        """Take a rank's call; yields the answers that are due."""
        try:
            yield from self._take(rank, call)
        except RequestRefused as error:
            yield rank, StoreAnswer(call.number, code=error.code, text=error.message, fix=error.fix)

    def _take(self, rank: int, call: StoreCall) -> Answers:
        key, value = call.key, self._values.get(call.key)
        match call.action:
            case StoreAction.SET:
                yield from self._set(key, call.value)
                yield rank, StoreAnswer(call.number)
            case StoreAction.ADD:
                total = _number_in(key, value) + call.delta
                yield from self._set(key, str(total).encode())
                yield rank, StoreAnswer(call.number, number_in=total)
            case StoreAction.GET if value is None and call.waits:
                self._waiting.setdefault(key, []).append((rank, call.number))
            case StoreAction.GET:
                yield rank, StoreAnswer(call.number, value)
            case StoreAction.DELETE:
                self._delete(key)
                yield rank, StoreAnswer(call.number, number_in=int(value is not None))
            case StoreAction.FORGET if (rank, call.number) in self._waiting.get(key, ()):
                self._forget(key, (rank, call.number))
                yield rank, StoreAnswer(call.number)
            case StoreAction.FORGET:
                # The answer is under way.
                pass

    def _set(self, key: str, value: bytes) -> Answers:
        check(key, value)
        grown = self._bytes - self._size_of(key) + ENTRY_BYTES + len(key.encode()) + len(value)
        if grown > STORE_BYTES_MAX:
            raise RequestRefused(
                "store_full",
                f"the values of the world would have {grown} bytes; limit {STORE_BYTES_MAX}",
                "delete keys, or share large values by collectives",
            )
        self._values[key], self._bytes = value, grown
        for rank, number in self._waiting.pop(key, ()):
            yield rank, StoreAnswer(number, value)

    def _delete(self, key: str) -> None:
        self._bytes -= self._size_of(key)
        self._values.pop(key, None)

    def _size_of(self, key: str) -> int:
        value = self._values.get(key)
        return 0 if value is None else ENTRY_BYTES + len(key.encode()) + len(value)

    def _forget(self, key: str, call: tuple[int, int]) -> None:
        self._waiting[key].remove(call)
        if not self._waiting[key]:
            del self._waiting[key]


class StoreCalls:
    """One rank's calls, which `send` brings to the hub; in any number of tasks at once."""

    def __init__(self, send: Callable[[StoreCall], object]) -> None:
        self._send = send
        self._number = 0
        self._pending: dict[int, asyncio.Future[StoreAnswer]] = {}
        self._turns = anyio.Semaphore(STORE_CALLS_MAX, fast_acquire=True)
        self._error: ForgedError | None = None
        """Why the world is over."""

    async def call(
        self,
        action: StoreAction,
        key: str,
        value: bytes = b"",
        delta: int = 0,
        *,
        waits: bool = False,
        timeout_s: float | None = None,
    ) -> StoreAnswer:
        """Send a call, and wait for its answer; `timeout_s` counts for one that waits for the key."""
        check(key, value)
        await self._turns.acquire()
        if self._error is not None:
            self._turns.release()
            raise self._error
        self._number += 1
        number = self._number
        # The turn lasts until the answer, also for a caller that waits no longer.
        pending: asyncio.Future[StoreAnswer] = asyncio.get_running_loop().create_future()
        self._pending[number] = pending
        self._send(StoreCall(number, action, key, value, delta, waits))
        try:
            await asyncio.wait([pending], timeout=timeout_s)
        finally:
            if not pending.done():
                self._send(StoreCall(number, StoreAction.FORGET, key))
        answer = pending.result() if pending.done() else StoreAnswer(number)
        if answer.code:
            raise RequestRefused(answer.code, answer.text, answer.fix)
        if waits and answer.value is None:
            raise Unavailable(
                "key_missing", f"key {key!r} was not set within {timeout_s:g} s", "set it at a rank, or wait for longer"
            )
        return answer

    def take(self, answer: StoreAnswer) -> None:
        """An answer has arrived."""
        pending = self._pending.pop(answer.number, None)
        if pending is not None:
            self._turns.release()
            pending.set_result(answer)

    def end(self, error: ForgedError) -> None:
        """The world is over: all calls raise this."""
        self._error = error
        for pending in self._pending.values():
            self._turns.release()
            pending.set_exception(error)
            pending.exception()  # retrieved, so that asyncio does not log it
        self._pending.clear()


def check(key: str, value: bytes) -> None:
    """Refuse a key or a value that is too large."""
    if not 0 < len(key.encode()) <= KEY_BYTES_MAX:
        raise RequestRefused(
            "store_key_invalid",
            f"a key must have 1 to {KEY_BYTES_MAX} bytes, got {len(key.encode())}",
            "use a key within these limits",
        )
    if len(value) > VALUE_BYTES_MAX:
        raise RequestRefused(
            "store_value_too_large",
            f"the value of key {key!r} has {len(value)} bytes; limit {VALUE_BYTES_MAX}",
            "share large values by collectives",
        )


def _number_in(key: str, value: bytes | None) -> int:
    try:
        number = int(value or b"0")
    except ValueError:
        number = INTEGER_MAX + 1
    if abs(number) > INTEGER_MAX:
        raise RequestRefused(
            "store_value_no_number", f"the value of key {key!r} is no number that can be added to", "use another key"
        )
    return number
