"""The sender's side of requests: numbering, acknowledgement, deadlines, replies.

Invariants:
- Request numbers ascend and are never reused.
- All numbers below the lowest deciding request that still waits are acknowledged. If that request waits for long, the
  sender lists the waiting numbers now and then, so that the receiver can drop the other replies.
- One timer serves all deadlines.
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
"""How far the oldest waiting request may be behind before waiting numbers are listed."""
LIST_EVERY = 256
BODY_BYTES_MAX = FRAME_BYTES_MAX - 1024
"""The maximum size of an encoded request; the rest of the frame is for the other elements."""


@dataclass(slots=True)
class PendingCall:
    """One request that waits for its reply."""

    answer: asyncio.Future[Any]
    reply_type: Any
    method: str
    body: msgspec.Raw
    deadline: float
    fence: Fence | None


class OutgoingCalls:
    """The requests without a reply, oldest first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: dict[int, PendingCall] = {}
        self._deciding: dict[int, None] = {}
        """The waiting requests for which the receiver remembers the replies."""
        self._listed_at = 0
        """The request number with which waiting numbers were last listed."""
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def acknowledged(self) -> int:
        """All replies up to this number have arrived or are no longer wanted."""
        return next(iter(self._deciding)) - 1 if self._deciding else self._number

    def open(self, request: Request[Any], timeout_s: float, fence: Fence | None) -> tuple[int, asyncio.Future[Any]]:
        """Number a request and start its deadline."""
        body = encode(request)
        if len(body) > BODY_BYTES_MAX:
            # If sent, the receiver would close the connection, and the retry the next one.
            too_large = f"{type(request).__name__} must have at most {BODY_BYTES_MAX} bytes, got {len(body)}"
            raise RequestRefused("request_too_large", too_large, "split the request")
        self._number += 1
        deadline = self._clock.monotonic() + timeout_s
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        cls = type(request)
        waiting = PendingCall(answer, cls.reply_type(), cls.__name__, msgspec.Raw(body), deadline, fence)
        self._waiting[self._number] = waiting
        if cls.decides:
            self._deciding[self._number] = None
        self._watch(loop, deadline)
        return self._number, answer

    def message(self, number: int) -> RequestMessage:
        """The request message, for the first send or a repetition, with the remaining time."""
        waiting = self._waiting[number]
        left_s = max(0.0, waiting.deadline - self._clock.monotonic())
        acknowledged = min(self.acknowledged, number - 1)
        listed = None
        if number - acknowledged > SPAN_MAX and number - self._listed_at > LIST_EVERY:
            self._listed_at = number
            listed = tuple(before for before in self._deciding if before < number)
        return RequestMessage(number, acknowledged, waiting.method, waiting.body, left_s, waiting.fence, listed)

    def unanswered(self) -> list[int]:
        """The waiting numbers, oldest first."""
        return list(self._waiting)

    def abandon(self, number: int) -> bool:
        """Drop a request; returns whether its reply was still pending."""
        return self._take(number) is not None

    def outcome(self, message: Reply | Failure) -> None:
        """Resolve a request with its reply. A reply to a repeated or dropped request is ignored."""
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
            waiting.answer.set_exception(PeerError("reply_invalid", f"invalid reply to {waiting.method}: {error}"))

    def fail_all(self, error: ForgedError) -> None:
        """Fail all waiting requests."""
        waiting, self._waiting = self._waiting, {}
        self._deciding.clear()
        for one in waiting.values():
            if not one.answer.done():
                one.answer.set_exception(error)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _take(self, number: int) -> PendingCall | None:
        """Remove a waiting request."""
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
                        f"no reply to {waiting.method} in time; the request may have been executed",
                        "check `forgectl events`, or send it again",
                    )
                )
        if self._waiting:
            self._watch(asyncio.get_running_loop(), min(waiting.deadline for waiting in self._waiting.values()))
