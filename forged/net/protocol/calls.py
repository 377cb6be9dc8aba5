"""Requests that wait for their answers, at the end that asked.

Law: numbers grow and are never used twice. A number below the lowest that decides and still waits is acknowledged: its
answer has arrived or is no longer wanted. When that one waits for long, the other end is told now and then which do,
so that it need not keep the answers to all others. One timer watches over all deadlines.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec

from forged.clock import Clock
from forged.errors import ForgedError, PeerError, RequestRefused, Unavailable, from_wire
from forged.kernel.messages import Fence, Request
from forged.net.protocol.frames import FRAME_BYTES_MAX
from forged.net.protocol.messages import Failure, Reply, RequestMessage, decode_body, encode

TIMEOUT_S = 30.0
SPAN_MAX = 1024
"""How far the oldest that waits may fall behind before the other end is told which others do."""
TELL_EVERY = 256
BODY_BYTES_MAX = FRAME_BYTES_MAX - 1024
"""What fits into a frame with all that a request says besides."""


@dataclass(slots=True)
class Waiting:
    """One request on its way."""

    answer: asyncio.Future[Any]
    reply_type: Any
    method: str
    body: msgspec.Raw
    deadline: float
    fence: Fence | None


class OutgoingCalls:
    """What was asked and not yet answered, oldest first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: dict[int, Waiting] = {}
        self._deciding: dict[int, None] = {}
        """Those that the other end remembers the answers to."""
        self._told_at = 0
        """The last number with which the other end was told which still wait."""
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def acknowledged(self) -> int:
        """All answers up to this number have arrived or are no longer wanted."""
        return next(iter(self._deciding)) - 1 if self._deciding else self._number

    def open(self, request: Request[Any], timeout_s: float, fence: Fence | None) -> tuple[int, asyncio.Future[Any]]:
        """Number a request and wait for its answer until its deadline."""
        body = encode(request)
        if len(body) > BODY_BYTES_MAX:
            # Sent, it would cost the connection, and the next one, for it would be sent again.
            too_large = f"{type(request).__name__} has {len(body)} bytes, over {BODY_BYTES_MAX}"
            raise RequestRefused("request_too_large", too_large, "say less at a time")
        self._number += 1
        deadline = self._clock.monotonic() + timeout_s
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        cls = type(request)
        waiting = Waiting(answer, cls.reply_type(), cls.__name__, msgspec.Raw(body), deadline, fence)
        self._waiting[self._number] = waiting
        if cls.decides:
            self._deciding[self._number] = None
        self._watch(loop, deadline)
        return self._number, answer

    def message(self, number: int) -> RequestMessage:
        """The request as it is sent, or sent again, with what is left of its time."""
        waiting = self._waiting[number]
        left_s = max(0.0, waiting.deadline - self._clock.monotonic())
        acknowledged = min(self.acknowledged, number - 1)
        still = None
        if number - acknowledged > SPAN_MAX and number - self._told_at > TELL_EVERY:
            self._told_at = number
            still = tuple(before for before in self._deciding if before < number)
        return RequestMessage(number, acknowledged, waiting.method, waiting.body, left_s, waiting.fence, still)

    def unanswered(self) -> list[int]:
        """The numbers that wait, oldest first."""
        return list(self._waiting)

    def abandon(self, number: int) -> bool:
        """Want an answer no longer; tells whether it was still to come."""
        return self._take(number) is not None

    def outcome(self, message: Reply | Failure) -> None:
        """An answer arrived. One that nobody waits for is dropped: it was asked for twice, or given up."""
        waiting = self._take(message.number)
        if waiting is None or waiting.answer.done():
            return
        if isinstance(message, Failure):
            error = from_wire(message.kind, message.code, message.text, message.fix)
            waiting.answer.set_exception(error)
            return
        try:
            waiting.answer.set_result(decode_body(message.body, waiting.reply_type))
        except msgspec.MsgspecError as error:
            waiting.answer.set_exception(PeerError("reply_invalid", f"the answer to {waiting.method}: {error}"))

    def fail_all(self, error: ForgedError) -> None:
        """No answer will come any more."""
        waiting, self._waiting = self._waiting, {}
        self._deciding.clear()
        for one in waiting.values():
            if not one.answer.done():
                one.answer.set_exception(error)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _take(self, number: int) -> Waiting | None:
        """Wait no longer for this one."""
        self._deciding.pop(number, None)
        return self._waiting.pop(number, None)

    def _watch(self, loop: asyncio.AbstractEventLoop, deadline: float) -> None:
        if self._timer is not None and self._timer_at <= deadline:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = loop.call_later(max(0.0, deadline - self._clock.monotonic()), self._expire)

    def _expire(self) -> None:
        self._timer = None
        now = self._clock.monotonic()
        for number in [number for number, waiting in self._waiting.items() if waiting.deadline <= now]:
            waiting = self._take(number)
            if waiting is not None and not waiting.answer.done():
                waiting.answer.set_exception(
                    Unavailable(
                        "deadline_exceeded",
                        f"no answer to {waiting.method} in time; whether it was done is unknown",
                        "see `forgectl events`, or ask again",
                    )
                )
        if self._waiting:
            self._watch(asyncio.get_running_loop(), min(waiting.deadline for waiting in self._waiting.values()))
