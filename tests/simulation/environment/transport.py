"""The simulated asyncio transport.

Invariants:
- `connection_made` is called first and `connection_lost` last, once each, never from within a call of the protocol.
- Bytes arrive in order; a full window pauses writing; data for a closed end is answered by a reset.
- The protocol of a killed process is not called again; that of a suspended process is called when it is resumed.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from forged.net.transport.port import Peer, ProtocolFactory
from tests.simulation.environment.loop import Execution
from tests.simulation.environment.wire import Content, Mark, Wire

WINDOW_BYTES = 1 << 17
"""The bytes of one direction in both kernels: sent or received, but not read."""
HIGH_WATER_BYTES = 1 << 16


def reset_by_peer() -> ConnectionResetError:
    """The error of a socket whose connection was reset."""
    return ConnectionResetError(errno.ECONNRESET, "connection reset by peer")


def timed_out() -> TimeoutError:
    """The error of a socket whose peer does not answer."""
    return TimeoutError(errno.ETIMEDOUT, "connection timed out")


class SimulatedTransport(asyncio.Transport):
    """One end of a connection."""

    _outgoing: Wire
    _incoming: Wire

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        execution: Execution,
        peer: Peer,
        extra: Mapping[str, Any],
        on_closed: Callable[[], None],
    ) -> None:
        super().__init__(extra)
        self.peer = peer
        self.closed = False
        self._lost = False
        self._loop = loop
        self._execution = execution
        self._on_closed = on_closed
        self._protocol = asyncio.Protocol()
        self._buffer: deque[bytes] = deque()
        self._buffered_bytes = 0
        self._inbox: deque[Content] = deque()
        self._begun = False
        self._closing = False
        self._reading_paused = False
        self._eof_written = False
        self._eof_sent = False
        self._writing_paused = False
        self._error: Exception | None = None
        self.set_write_buffer_limits()

    def attach(self, outgoing: Wire, incoming: Wire) -> None:
        """Set the wires."""
        self._outgoing = outgoing
        self._incoming = incoming

    def start(self, factory: ProtocolFactory) -> None:
        """Create the protocol; `connection_made` is called by the loop."""
        if self.closed:
            return
        try:
            self._protocol = factory()
        except BaseException:
            self.die(reset=False)
            raise
        self._soon(self._begin)

    def _soon(self, act: Callable[[], object]) -> None:
        """Schedule a callback in the process of this end."""
        self._loop.call_soon(act, context=self._execution.context.copy())

    def _begin(self) -> None:
        self._begun = True
        try:
            self._protocol.connection_made(self)
        finally:
            self._soon(self._tell_lost if self._lost else self._read_ready)

    # The asyncio.Transport interface.

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol), "buffered protocols are not simulated"
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def is_closing(self) -> bool:
        return self._closing

    def is_reading(self) -> bool:
        return not self._closing and not self._reading_paused

    def pause_reading(self) -> None:
        self._reading_paused = self._reading_paused or not self._closing

    def resume_reading(self) -> None:
        if self._reading_paused and not self._closing:
            self._reading_paused = False
            self._soon(self._read_ready)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._eof_written:
            raise RuntimeError("Cannot call write() after write_eof()")
        if self._closing or not data:
            return
        if Mark.RESET in self._inbox:
            self.end(reset_by_peer())
            return
        copies = self._outgoing.copies()
        self._buffer += [bytes(data)] * copies
        self._buffered_bytes += len(data) * copies
        self._flush()
        self._mind_high_water()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not self._closing:
            self._eof_written = True
            self._end_of_buffer()

    def close(self) -> None:
        self._closing = True
        self._end_of_buffer()

    def abort(self) -> None:
        self.end(None)

    def get_write_buffer_size(self) -> int:
        return self._buffered_bytes

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low_water_bytes, self._high_water_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if high is None:
            high = HIGH_WATER_BYTES if low is None else 4 * low
        if low is None:
            low = high // 4
        if not high >= low >= 0:
            raise ValueError(f"high ({high!r}) must be >= low ({low!r}) must be >= 0")
        self._high_water_bytes, self._low_water_bytes = high, low
        self._mind_high_water()

    # Called by the network.

    def room(self) -> None:
        """The peer has read: send more, and resume writing."""
        if self._lost:
            return
        if self._execution.suspended:
            self._soon(self.room)
            return
        self._flush()
        if self._writing_paused and self.get_write_buffer_size() <= self._low_water_bytes:
            self._writing_paused = False
            self._tell(self._protocol.resume_writing)
        self._end_of_buffer()

    def receive(self, content: Content) -> None:
        """Content arrived; bytes for a lost end are answered by a reset."""
        if self._lost:
            if isinstance(content, bytes):
                self._outgoing.mark(Mark.RESET)
        elif self._closing and content is Mark.RESET:
            self.end(reset_by_peer())
        else:
            self._inbox.append(content)
            if self._execution.suspended:
                self._soon(self._read_ready)
            else:
                self._read_ready()

    def end(self, error: Exception | None) -> None:
        """Drop all buffers, notify the peer, then the protocol."""
        if self._lost:
            return
        self._error = error
        self._leave(reset=any(isinstance(content, bytes) for content in self._inbox))
        if self._begun:
            self._soon(self._tell_lost)

    def die(self, *, reset: bool) -> None:
        """The process was killed: its kernel closes the connection; the protocol is not called."""
        self._protocol = asyncio.Protocol()
        self.closed = True
        if not self._lost:
            self._leave(reset=reset or bool(self._inbox))
        self._on_closed()

    def _leave(self, *, reset: bool) -> None:
        self._lost = self._closing = True
        self._buffer.clear()
        self._buffered_bytes = 0
        self._inbox.clear()
        if reset:
            self._outgoing.mark(Mark.RESET)
        else:
            self._send_eof()

    def _send_eof(self) -> None:
        if not self._eof_sent:
            self._eof_sent = True
            self._outgoing.mark(Mark.EOF)

    def _flush(self) -> None:
        while self._buffer and (room := WINDOW_BYTES - self._outgoing.pending_bytes) > 0:
            data = self._buffer.popleft()
            if len(data) > room:
                self._buffer.appendleft(data[room:])
                data = data[:room]
            self._buffered_bytes -= len(data)
            self._outgoing.send(data)

    def _end_of_buffer(self) -> None:
        """When the buffer is empty, close or send EOF if requested."""
        if self._buffer:
            return
        if self._closing:
            self.end(None)
        elif self._eof_written:
            self._send_eof()

    def _mind_high_water(self) -> None:
        if not self._writing_paused and self.get_write_buffer_size() > self._high_water_bytes:
            self._writing_paused = True
            self._tell(self._protocol.pause_writing)

    def _read_ready(self) -> None:
        while self._inbox and self._begun and self.is_reading():
            if isinstance(self._inbox[0], bytes):
                self._read()
            elif self._inbox.popleft() is Mark.EOF:
                self._read_eof()
            else:
                self.end(reset_by_peer())

    def _read(self) -> None:
        pieces = []
        while self._inbox and isinstance(piece := self._inbox[0], bytes):
            pieces.append(piece)
            self._inbox.popleft()
        data = b"".join(pieces)
        self._incoming.read(len(data))
        self._tell(partial(self._protocol.data_received, data))

    def _read_eof(self) -> None:
        if not self._tell(self._protocol.eof_received):
            self.close()

    def _tell_lost(self) -> None:
        protocol, self._protocol = self._protocol, asyncio.Protocol()
        self.closed = True
        self._on_closed()
        protocol.connection_lost(self._error)

    def _tell(self, call: Callable[[], object]) -> object:
        """Call the protocol; if it raises, the loop reports the error and the connection is lost."""
        try:
            return self._execution.context.copy().run(call)
        except Exception as error:  # noqa: BLE001  # as asyncio does
            context = {"message": "a protocol failed", "exception": error, "protocol": self._protocol}
            self._loop.call_exception_handler(context)
            self.end(error)
            return None
