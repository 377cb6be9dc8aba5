"""One connection, at either end: frames, flow control, pings and timeouts.

Invariants:
- Messages are processed in order. Above its limits this end stops reading, so that TCP pushes back; after
  `MESSAGES_PER_TURN` messages other connections are served.
- Messages that are sent in one turn of the loop leave in few writes: the first at once, the rest in groups.
- A peer that violates the protocol, sends incomplete frames, does not read or is silent gets a failure message and the
  connection is closed. Nothing that a peer sends raises outside of this class.
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
from forged.net.transport.memory import Memory
from forged.net.transport.tcp import UserTimeout
from forged.shares import Holder

MESSAGES_PER_TURN = 256
"""The number of messages of one connection before other connections are served."""
MESSAGES_PER_WRITE = 16
"""Messages of one turn are written in groups of so many, so that both ends work at the same time."""
WRITE_BYTES = 256 << 10
"""Messages are written at once above this size, otherwise at the end of the turn."""
READ_BYTES = 256 << 10
IP_FAMILIES = (socket.AF_INET, socket.AF_INET6)


class _ReadBuffer(threading.local):
    """The read buffer of all connections of a thread; received bytes are copied out before the next read.

    Without it asyncio allocates a buffer for every read, which costs several times as much as the read.
    """

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(READ_BYTES))


_read_buffer = _ReadBuffer()


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits of one connection."""

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
    """Frames, flow control and timeouts; subclasses handle the messages. `memory` counts the bytes that it holds."""

    def __init__(self, clock: Clock, limits: ConnectionLimits, memory: Memory | None = None) -> None:
        self.limits = limits
        self.holder = Holder("", "")
        """Whose share of the memory it uses."""
        self.write_paused = False
        """Whether the write buffer is full: the peer does not read."""
        self.closing = False
        self.lost = False
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._decoder = FrameDecoder(limits.hello_bytes_max)
        self._inbox: deque[bytes] = deque()
        self._memory = memory
        self._read_small = _read_buffer.buffer if memory is None else _read_buffer.buffer[: memory.small_bytes]
        """Without a grant no more is read at once."""
        self._read_buffer = self._read_small
        self._frame_grant = 0
        """The memory that was granted for a large frame, until the frame was handled."""
        self._waits_for_memory = False
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
        self._user_timeout: UserTimeout | None = None
        self._has_unacknowledged = False
        """Whether sent bytes may not have been acknowledged."""

    # For subclasses.

    def opened(self) -> None:
        """The connection is established."""

    def admits(self) -> bool:
        """Whether another message may be processed now."""
        return not self.write_paused

    def received(self, message: Any) -> None:
        """Handle a message other than ping, pong and the failure of the connection."""
        raise NotImplementedError

    def write_resumed(self) -> None:
        """The peer reads again."""

    def ended(self, error: ForgedError) -> None:
        """The connection has ended with this error. Called once."""

    # For subclasses and their users.

    def established(self) -> None:
        """The hello was accepted: allow full-size frames and pings."""
        self._established = True
        self._decoder.frame_bytes_max = self.limits.frame_bytes_max

    def send(self, message: Message) -> None:
        """Send a message; messages of one turn of the loop are written together."""
        if self.closing or self.lost:
            return
        payload = encode(message)
        if len(payload) > self.limits.frame_bytes_max:
            raise self._too_large(len(payload))
        frame = frames.encode(payload)
        self._out.append(frame)
        self._out_bytes += len(frame)
        if self._out_bytes >= WRITE_BYTES or len(self._out) >= MESSAGES_PER_WRITE:
            # Only written bytes show whether the peer reads, and the peer works on them while this end continues.
            self._flush()
        elif not self._corked and not self._flush_scheduled:
            # The first message of a turn is written at once, for low latency; the rest together at the end of the
            # turn.
            self._flush()
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._end_turn)

    def fail(self, error: ForgedError) -> None:
        """Send the error to the peer and close."""
        self.send(failure(0, error))
        self.close(error)

    def close(self, error: ForgedError | None = None) -> None:
        """Close after the sent messages are written; nothing more is received."""
        if self.closing or self.lost:
            return
        self._flush()
        self.closing = True
        self._closing_since = self._clock.monotonic()
        self._release()
        self._reason = error
        if self._transport is not None:
            self._transport.close()
        else:
            self.connection_lost(None)

    def abort(self) -> None:
        """Close immediately; unsent messages are dropped."""
        self.closing = True
        self._release()
        if self._transport is not None:
            self._transport.abort()
        elif not self.lost:
            self.connection_lost(None)

    def descriptor(self) -> int | None:
        """The file descriptor of the connection's socket, if it has one."""
        sock = None if self.lost or self._transport is None else self._transport.get_extra_info("socket")
        return sock.fileno() if sock is not None and sock.fileno() >= 0 else None

    def hand_over(self) -> asyncio.Transport:
        """Detach and return the transport after writing the sent messages; this connection has ended."""
        assert self._transport is not None
        self._flush()
        transport = self._transport
        transport.pause_reading()
        self.closing = True
        self._reason = Unavailable("handed_over", "the connection carries bulk bytes now", "")
        self.connection_lost(None)
        return transport

    def sweep(self, now: float) -> None:
        """Check the timeouts; to be called about once per second."""
        if self.lost:
            return
        limits = self.limits
        if self._user_timeout is not None and self._has_unacknowledged and self.descriptor() is not None:
            self._has_unacknowledged = not self._user_timeout.update()
        if self.closing:
            if now - self._closing_since > limits.linger_s:
                self.abort()
        elif (error := self._overdue(now)) is not None:
            self.fail(error)
        elif self._established and now - max(self._heard_at, self._pinged_at) > limits.ping_after_s:
            self._pinged_at = now
            self.send(Ping(0))

    def _overdue(self, now: float) -> ForgedError | None:
        """The error of an exceeded timeout, or None. While this end does not read, silence does not count."""
        limits = self.limits
        # Times first: for nearly all of a thousand connections nothing else needs to be checked.
        if now - self._partial_since > limits.frame_timeout_s and self._decoder.partial and not self._paused:
            return PeerError(
                "frame_slow", f"a frame was incomplete after {limits.frame_timeout_s} s", "send complete frames"
            )
        if now - self._heard_at > limits.silence_max_s and not self._paused:
            return Unavailable("silent", f"nothing was received for {limits.silence_max_s} s", "reconnect")
        if self.write_paused and self._unread_for(now) > limits.silence_max_s:
            return Unavailable(
                "not_reading", f"the peer read nothing for {limits.silence_max_s} s", "reconnect and read"
            )
        return None

    def _unread_for(self, now: float) -> float:
        """How long the write buffer has not become smaller."""
        assert self._transport is not None
        waiting = self._transport.get_write_buffer_size()
        if waiting < self._unread_bytes:
            self._unread_since = now
        self._unread_bytes = waiting
        return now - self._unread_since

    def work(self) -> None:
        """Process received messages as far as they are admitted; then resume or pause reading."""
        if self._working or self._turn_scheduled:
            return
        self._working = True
        try:
            self._work()
        except ForgedError as error:
            self.fail(error)
        except Exception as error:  # noqa: BLE001 - a bug in the handling of one message must not end the daemon
            self._report_bug(error)
        finally:
            self._working = False
        if self._frame_grant:
            self._account()
        self._set_paused(bool(self._inbox) or self._waits_for_memory or not self.admits())

    def _work(self) -> None:
        inbox = self._inbox
        for _ in range(MESSAGES_PER_TURN):
            if not inbox or not self.admits():
                return
            self._receive(inbox.popleft())
        if inbox and not self._turn_scheduled:
            self._turn_scheduled = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _report_bug(self, error: Exception) -> None:
        context = {"message": "a message raised an unexpected error", "exception": error, "protocol": self}
        asyncio.get_running_loop().call_exception_handler(context)
        reason = f"{type(error).__name__}: {error}"
        self.fail(ForgedError("connection_broken", f"unexpected error: {reason}", "report this bug"))

    def _next_turn(self) -> None:
        self._turn_scheduled = False
        self.work()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        made = cast("asyncio.Transport", transport)
        if self.lost:
            # Closed during the TLS handshake, which may take longer than the hello timeout.
            made.abort()
            return
        self._transport = made
        self._transport.set_write_buffer_limits(high=self.limits.write_buffer_bytes_max)
        sock = made.get_extra_info("socket")
        if sock is not None and sock.family in IP_FAMILIES:
            self._user_timeout = UserTimeout(sock)
        self.opened()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._read_buffer[:nbytes]))

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
        if self._memory is not None and self._decoder.awaited > self._memory.small_bytes:
            self._account()
        self._corked = True
        try:
            self.work()
        finally:
            self._corked = False
        self._flush()

    def granted(self, size: int) -> None:
        """The memory for a large frame is there: read the rest of it."""
        self._waits_for_memory = False
        self._frame_grant = size
        self._read_buffer = _read_buffer.buffer
        self.work()

    def pause_writing(self) -> None:
        self.write_paused = True
        self._unread_since = self._clock.monotonic()
        self._unread_bytes = 0

    def resume_writing(self) -> None:
        self.write_paused = False
        self.write_resumed()
        self.work()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self.lost:
            return
        self.lost = True
        self._release()
        self._out.clear()
        reason = self._reason
        if reason is None:
            how = f"was lost: {exc}" if exc else "was closed by the other end"
            reason = Unavailable("connection_lost", f"the connection {how}", "reconnect")
        # A TLS transport holds 256 KiB, which would otherwise wait for the garbage collector.
        self._transport = self._user_timeout = None
        self.ended(reason)

    def _account(self) -> None:
        """Ask for the memory of a large frame that has begun, and return it when the frame was handled."""
        memory, awaited = self._memory, self._decoder.awaited
        if memory is None or self.closing or self._waits_for_memory:
            return
        if self._frame_grant and self._frame_grant != awaited and not self._inbox:
            memory.give_back(self, self._frame_grant)
            self._frame_grant = 0
            self._read_buffer = self._read_small
        if awaited > memory.small_bytes and not self._frame_grant:
            if memory.grant(self, awaited):
                self._frame_grant = awaited
                self._read_buffer = _read_buffer.buffer
            else:
                self._waits_for_memory = True

    def _release(self) -> None:
        """Return all memory; what the peer has sent is not used any more."""
        self._inbox.clear()
        self._decoder.clear()
        self._frame_grant = 0
        self._waits_for_memory = False
        if self._memory is not None:
            self._memory.leave(self)

    def _too_large(self, payload_bytes: int) -> RequestRefused:
        # If sent, the peer would close the connection and repeat its request on the next one.
        limit = self.limits.frame_bytes_max
        return RequestRefused(
            "message_too_large", f"a message must have at most {limit} bytes, got {payload_bytes}", "request less data"
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
        self._has_unacknowledged = True
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
