"""Requests that the daemon sends to a client.

Invariants:
- Each request is answered once, on its connection, and within its timeout.
- An exception in a handler is sent to the daemon as an error and passed to the loop's exception handler; the client
  continues.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import msgspec

from forged.client.connection import Link
from forged.errors import ForgedError, RequestRefused, Unavailable
from forged.kernel.messages import REQUESTS, Request
from forged.net.protocol.messages import Cancel, Message, ReplyOut, RequestMessage, decode_body, failure

HANDLERS_RUNNING_MAX = 256

Handler = Callable[[Any], Awaitable[Any]]


class ServedRequests:
    """The handlers of a client, and the requests that they handle now."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}
        self._running: dict[tuple[Link, int], anyio.CancelScope] = {}

    def serve(self, request: type[Request[Any]], handler: Handler) -> None:
        """Register the handler of a request type."""
        self._handlers[request.__name__] = handler

    async def answer(self, link: Link, message: RequestMessage) -> None:
        """Handle a request and answer it; ignore a request that is being handled already."""
        number = message.number
        if (link, number) in self._running:
            return
        scope = self._running[link, number] = anyio.CancelScope()
        cancelled = Unavailable("cancelled", f"{message.method} was cancelled", "send the request again if needed")
        answer: Message = failure(number, cancelled)
        try:
            with scope, anyio.move_on_after(message.timeout_s) as deadline:
                answer = await self._outcome(message)
            if deadline.cancelled_caught:
                answer = failure(number, _late(message))
            _send(link, number, answer)
        finally:
            del self._running[link, number]

    def cancel(self, link: Link, message: Cancel) -> None:
        """Cancel the handler of a request that the daemon no longer waits for."""
        scope = self._running.get((link, message.number))
        if scope is not None:
            scope.cancel()

    async def _outcome(self, message: RequestMessage) -> Message:
        try:
            reply = await self._handle(message)
            # Encoded here, so that a reply that cannot be encoded counts as a failure of the handler.
            return ReplyOut(message.number, msgspec.Raw(msgspec.msgpack.encode(reply)))
        except ForgedError as error:
            return failure(message.number, error)
        except Exception as error:  # noqa: BLE001 - the user's handler must not take the client down
            text = f"the client's handler of {message.method} failed"
            loop = asyncio.get_running_loop()
            loop.call_exception_handler({"message": text, "exception": error})
            return failure(message.number, ForgedError("handler_broken", f"{text}: {type(error).__name__}: {error}"))

    async def _handle(self, message: RequestMessage) -> Any:
        handler = self._handlers.get(message.method)
        if handler is None:
            raise RequestRefused("request_unknown", f"this client does not answer {message.method[:80]!r}")
        if len(self._running) > HANDLERS_RUNNING_MAX:
            raise Unavailable("busy", f"this client already handles {HANDLERS_RUNNING_MAX} requests", "try again later")
        try:
            request = decode_body(message.body, REQUESTS[message.method])
        except (msgspec.MsgspecError, RecursionError) as error:
            raise RequestRefused("request_invalid", f"{message.method}: {error}") from error
        return await handler(request)


def _send(link: Link, number: int, answer: Message) -> None:
    try:
        link.send(answer)
    except ForgedError as error:
        # The reply is too large for a frame.
        link.send(failure(number, error))


def _late(message: RequestMessage) -> Unavailable:
    return Unavailable(
        "deadline_exceeded",
        f"{message.method} did not finish within {message.timeout_s} s; its outcome is unknown",
        "try again",
    )
