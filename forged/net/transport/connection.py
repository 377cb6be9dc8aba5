"""One connection, seen from either end.

Law: what arrives is worked off in order, and only as fast as this end admits: over its limits it stops reading, and
the network pushes back; one that has sent much at once waits while the others have their turns. What is sent within
one turn of the loop leaves in two writes, unless it is much. A peer that breaks the protocol, stops in the middle of a
frame, does not read or falls silent is told why and let go; nothing it does raises beyond this class.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any, cast

from forged.clock import Clock
from forged.errors import ForgedError, PeerError, RequestRefused, Unavailable, from_wire
from forged.net.protocol import frames
from forged.net.protocol.frames import FrameDecoder
from forged.net.protocol.messages import Failure, Message, Ping, Pong, decode, encode, failure
from forged.net.transport.tcp import Patience

MESSAGES_PER_TURN = 256
"""How many messages of one connection are worked off before the others have their turn."""
WRITE_BYTES = 256 << 10
"""How much is gathered for one write."""


READ_BYTES = 256 << 10
IP_FAMILIES = (socket.AF_INET, socket.AF_INET6)


class _Arrivals(threading.local):
    """Where what arrives is put first, by all connections of a thread: it is taken out before the next one reads.

    Without it asyncio allocates as much for every read, which costs several times what the read does.
    """

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(READ_BYTES))


_arrivals = _Arrivals()


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What one connection may take."""

    frame_bytes_max: int = frames.FRAME_BYTES_MAX
    hello_bytes_max: int = 16 << 10
    in_flight_max: int = 1024
    write_buffer_bytes_max: int = 1 << 20
    hello_timeout_s: float = 5.0
    frame_timeout_s: float = 10.0
    ping_after_s: float = 5.0
    silence_max_s: float = 15.0
    linger_s: float = 2.0


class Connection(asyncio.BufferedProtocol, asyncio.Protocol):
    """Frames, order, pressure and patience; what the messages mean is for the subclasses."""

    def __init__(self, clock: Clock, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.clogged = False
        """The other end does not read what is sent."""
        self.closing = False
        self.lost = False
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._decoder = FrameDecoder(limits.hello_bytes_max)
        self._inbox: deque[bytes] = deque()
        self._arrivals = _arrivals.buffer
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._corked = False
        self._flush_scheduled = False
        self._working = False
        self._turn_scheduled = False
        self._paused = False
        self._established = False
        self._opened_at = self._heard_at = self._partial_since = self._closing_since = clock.monotonic()
        self._pinged_at = self._unread_since = self._opened_at
        self._unread_bytes = 0
        self._reason: ForgedError | None = None
        self._patience: Patience | None = None
        self._is_under_way = False
        """Whether something that was sent may not have arrived."""

    # For subclasses.

    def opened(self) -> None:
        """The connection stands."""

    def admits(self) -> bool:
        """Whether another message may be worked off now."""
        return not self.clogged

    def received(self, message: Any) -> None:
        """A message arrived, other than ping, pong and failure of the connection as a whole."""
        raise NotImplementedError

    def unclogged(self) -> None:
        """The other end reads again."""

    def ended(self, error: ForgedError) -> None:
        """The connection is gone, and why. Called once."""

    # What both ends do.

    def established(self) -> None:
        """Hellos have been exchanged: large frames are welcome, and pings."""
        self._established = True
        self._decoder.frame_bytes_max = self.limits.frame_bytes_max

    def send(self, message: Message) -> None:
        """Send a message; what is sent in the same turn of the loop leaves together."""
        if self.closing or self.lost:
            return
        payload = encode(message)
        if len(payload) > self.limits.frame_bytes_max:
            raise self._too_large(len(payload))
        frame = frames.encode(payload)
        self._out.append(frame)
        self._out_bytes += len(frame)
        if self._out_bytes >= WRITE_BYTES:
            # At once, because only what was written tells whether the other end reads.
            self._flush()
        elif not self._corked and not self._flush_scheduled:
            # The first leaves at once, for whoever asks one thing at a time; what follows in this turn leaves together.
            self._flush()
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._end_turn)

    def fail(self, error: ForgedError) -> None:
        """Tell the other end what it did wrong, and close."""
        self.send(failure(0, error))
        self.close(error)

    def close(self, error: ForgedError | None = None) -> None:
        """Close once what was sent has left; nothing more is received."""
        if self.closing or self.lost:
            return
        self._flush()
        self.closing = True
        self._closing_since = self._clock.monotonic()
        self._inbox.clear()
        self._reason = error
        if self._transport is not None:
            self._transport.close()
        else:
            self.connection_lost(None)

    def abort(self) -> None:
        """Close now; what has not left is dropped."""
        self.closing = True
        if self._transport is not None:
            self._transport.abort()
        elif not self.lost:
            self.connection_lost(None)

    def descriptor(self) -> int | None:
        """The file descriptor of the connection's socket, where it has one."""
        sock = None if self.lost or self._transport is None else self._transport.get_extra_info("socket")
        return sock.fileno() if sock is not None and sock.fileno() >= 0 else None

    def hand_over(self) -> asyncio.Transport:
        """Give the transport away, after what was sent has been written: this connection is over, that one goes on."""
        assert self._transport is not None
        self._flush()
        transport = self._transport
        transport.pause_reading()
        self.closing = True
        self._reason = Unavailable("handed_over", "the connection carries bulk bytes now", "")
        self.connection_lost(None)
        return transport

    def sweep(self, now: float) -> None:
        """Notice what takes too long. Called about once a second."""
        if self.lost:
            return
        limits = self.limits
        if self._patience is not None and self._is_under_way and self.descriptor() is not None:
            self._is_under_way = not self._patience.look()
        if self.closing:
            if now - self._closing_since > limits.linger_s:
                self.abort()
        elif (error := self._overdue(now)) is not None:
            self.fail(error)
        elif self._established and now - max(self._heard_at, self._pinged_at) > limits.ping_after_s:
            self._pinged_at = now
            self.send(Ping(0))

    def _overdue(self, now: float) -> ForgedError | None:
        """What has taken too long. While this end does not read, the other cannot be blamed for what is not heard."""
        limits = self.limits
        # The times come first: of a thousand connections nearly all are well, and nothing more of them is looked at.
        if now - self._partial_since > limits.frame_timeout_s and self._decoder.partial and not self._paused:
            return PeerError("frame_slow", f"a frame was not whole after {limits.frame_timeout_s} s", "send it whole")
        if now - self._heard_at > limits.silence_max_s and not self._paused:
            return Unavailable("silent", f"nothing was heard for {limits.silence_max_s} s", "reconnect")
        if self.clogged and self._unread_for(now) > limits.silence_max_s:
            return Unavailable("not_reading", f"nothing was read for {limits.silence_max_s} s", "reconnect, and read")
        return None

    def _unread_for(self, now: float) -> float:
        """For how long nothing has left of what waits to be read by the other end."""
        assert self._transport is not None
        waiting = self._transport.get_write_buffer_size()
        if waiting < self._unread_bytes:
            self._unread_since = now
        self._unread_bytes = waiting
        return now - self._unread_since

    def work(self) -> None:
        """Work off what has arrived, as far as it is admitted; then read on or pause."""
        if self._working or self._turn_scheduled:
            return
        self._working = True
        try:
            self._work()
        except ForgedError as error:
            self.fail(error)
        except Exception as error:  # noqa: BLE001 - our mistake over one peer's message must not reach the others
            self._broken(error)
        finally:
            self._working = False
        self._set_paused(bool(self._inbox) or not self.admits())

    def _work(self) -> None:
        inbox = self._inbox
        for _ in range(MESSAGES_PER_TURN):
            if not inbox or not self.admits():
                return
            self._receive(inbox.popleft())
        if inbox and not self._turn_scheduled:
            self._turn_scheduled = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _broken(self, error: Exception) -> None:
        context = {"message": "a message was not survived", "exception": error, "protocol": self}
        asyncio.get_running_loop().call_exception_handler(context)
        reason = f"{type(error).__name__}: {error}"
        self.fail(ForgedError("connection_broken", f"this end made a mistake: {reason}", "report it as a bug"))

    def _next_turn(self) -> None:
        self._turn_scheduled = False
        self.work()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        made = cast("asyncio.Transport", transport)
        if self.lost:
            # Given up while it was being made: a TLS handshake may take longer than a hello.
            made.abort()
            return
        self._transport = made
        self._transport.set_write_buffer_limits(high=self.limits.write_buffer_bytes_max)
        sock = made.get_extra_info("socket")
        if sock is not None and sock.family in IP_FAMILIES:
            self._patience = Patience(sock)
        self.opened()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._arrivals

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._arrivals[:nbytes]))

    def data_received(self, data: bytes) -> None:
        if self.closing:
            return
        self._heard_at = self._clock.monotonic()
        was_partial = self._decoder.partial
        try:
            self._decoder.feed(data, self._inbox)
        except ForgedError as error:
            self.work()
            self.fail(error)
            return
        if not was_partial or self._inbox:
            self._partial_since = self._heard_at
        self._corked = True
        try:
            self.work()
        finally:
            self._corked = False
        self._flush()

    def pause_writing(self) -> None:
        self.clogged = True
        self._unread_since = self._clock.monotonic()
        self._unread_bytes = 0

    def resume_writing(self) -> None:
        self.clogged = False
        self.unclogged()
        self.work()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self.lost:
            return
        self.lost = True
        self._inbox.clear()
        self._out.clear()
        reason = self._reason
        if reason is None:
            how = f"was lost: {exc}" if exc else "was closed by the other end"
            reason = Unavailable("connection_lost", f"the connection {how}", "reconnect")
        # With TLS it holds a quarter of a megabyte, which would wait with this connection for the garbage collector.
        self._transport = self._patience = None
        self.ended(reason)

    def _too_large(self, payload_bytes: int) -> RequestRefused:
        # The other end would let go of the connection, and ask for the same again on the next one.
        limit = self.limits.frame_bytes_max
        return RequestRefused(
            "message_too_large", f"{payload_bytes} bytes are over the {limit} of a frame", "ask for less"
        )

    def _receive(self, payload: bytes) -> None:
        message = decode(payload)
        if not self._established:
            self.received(message)
        elif type(message) is Ping:
            self.send(Pong(message.nonce))
        elif type(message) is Failure and message.number == 0:
            self.close(_from_failure(message))
        elif type(message) is not Pong:
            self.received(message)

    def _end_turn(self) -> None:
        self._flush_scheduled = False
        self._flush()

    def _flush(self) -> None:
        out = self._out
        if not out or self._transport is None or self.lost:
            return
        data = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        self._out_bytes = 0
        self._is_under_way = True
        self._transport.write(data)

    def _set_paused(self, paused: bool) -> None:
        if paused == self._paused or self._transport is None or self.closing or self.lost:
            return
        self._paused = paused
        if paused:
            self._transport.pause_reading()
        else:
            self._heard_at = self._partial_since = self._clock.monotonic()
            self._transport.resume_reading()


def _from_failure(message: Failure) -> ForgedError:
    return from_wire(message.kind, message.code, message.text, message.fix)
