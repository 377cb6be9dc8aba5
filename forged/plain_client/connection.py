"""A blocking, untyped connection to the daemon that starts fast, for `forgectl` and the pulse.

Invariants:
- Only sockets and msgpack are imported, so that `forgectl` and the pulse of each worker start fast.
- The protocol is implemented from docs/protocol.md, without the daemon's types, like a client in another language.
- Every call returns or raises in time, whatever is at the other end.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from time import monotonic
from typing import Any

import msgpack

from forged.errors import ConfigError, ForgedError, PeerError, Unavailable, from_wire
from forged.plain_client.dial import dial, no_answer, tls_refusal
from forged.version import VERSION

HELLO, WELCOME, REQUEST, REPLY, FAILURE, SUBSCRIBE, FACTS, GAP, CREDIT, ENDED, PING, PONG, BYE, SIGNAL = (
    0, 1, 2, 3, 4, 6, 7, 8, 9, 11, 12, 13, 14, 15,
)  # fmt: skip
PROTOCOL = 1
GO = b"\x01"
"""The first byte on a side connection, sent by the end that opened it."""
FIRST_FRAME_BYTES_MAX = 64 << 10
WINDOW_FACTS = 1024
PING_AFTER_S = 5.0
"""A daemon that sends nothing for this long gets a ping."""
POLL_S = 0.001
"""The timeout of a poll. Not 0, because TLS raises another error then."""
RECORD_FIELDS = ("id", "at", "type", "job", "generation", "cause", "origin", "fact")
_SHAPES: dict[int, tuple[str, tuple[type, ...]]] = {
    WELCOME: ("welcome", (int, int, str, str, str, str, int, int, int)),
    REPLY: ("reply", (int, int, object)),
    FACTS: ("facts", (int, int, int, list)),
    GAP: ("gap", (int, int, int, int, str)),
    REQUEST: ("request", (int, int, int, str, object)),
}
_HTTP = ("it speaks HTTP", "use the daemon's socket or a listen address")
_FOREIGN = {
    b"HTTP": _HTTP,
    # A web server takes the hello for an HTTP/0.9 request and replies with a bare page.
    b"<!DO": _HTTP,
    b"\x15\x03": ("it speaks TLS", "use tls:// before the host"),
}

Message = list[Any]
Event = dict[str, Any]


class PlainConnection:
    """One connection to the daemon at an endpoint. `agent`, `history` and `latest` are from the daemon's welcome.

    `while_quiet` is called from time to time while waiting without a deadline; an exception from it ends the wait.
    `program` names this program to the daemon.
    """

    def __init__(
        self,
        endpoint: str,
        token: str | None,
        timeout_s: float,
        ticket: bytes | None = None,
        *,
        program: str = "forgectl",
    ) -> None:
        self.endpoint = endpoint
        self.program = program
        self.agent = ""
        self.while_quiet: Callable[[], None] = lambda: None
        self.served: Mapping[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = {}
        """What answers the daemon's requests, by method; it gets the fields and returns those of the reply."""
        self._token = token
        self._timeout_s = timeout_s
        self._deadline: float | None = None
        """When the next message is due; None while waiting without a limit."""
        self._pinged = False
        self._greeted = False
        self._number = 0
        self._frame_bytes_max = FIRST_FRAME_BYTES_MAX
        self._buffer = bytearray()
        self._socket = dial(endpoint, timeout_s)
        try:
            self._greet(ticket)
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        """Send goodbye and close."""
        with contextlib.suppress(ForgedError):
            self._send([BYE, self._number])
        self.drop()

    def drop(self) -> None:
        """Close without a goodbye."""
        self._socket.close()

    def request(self, method: str, **fields: Any) -> Any:
        """Send a request and return the body of its reply."""
        self._number += 1
        self._send([REQUEST, self._number, self._number - 1, method, fields, self._timeout_s])
        return self._receive(REPLY)[2]

    def signal(self, name: str, **fields: Any) -> None:
        """Send a signal, which has no reply."""
        self._send([SIGNAL, name, fields])

    def fileno(self) -> int:
        """The descriptor of the socket, to poll; `process_incoming` reads what has arrived."""
        return self._socket.fileno()

    def process_incoming(self) -> None:
        """Process messages that have arrived, without waiting; raises if the connection has ended."""
        with contextlib.suppress(TimeoutError):
            self._socket.settimeout(POLL_S)
            self._buffer += self._arrived()
        while self._has_message():
            self._process(self._message())

    def set_user_timeout(self, unacknowledged_s: float) -> None:
        """Let the kernel close the connection if the daemon's host acknowledges no sent data for this long."""
        if self._socket.family != socket.AF_UNIX:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(unacknowledged_s * 1000))

    def facts(
        self, since: int | None, types: list[str], jobs: list[str], *, until: int | None = None, history: str = ""
    ) -> Iterator[tuple[int, Event | None]]:
        """Facts and gaps as dictionaries, each with its position; without end, or up to the id `until`.

        None stands for a position up to which there are no further facts.
        """
        self._send([SUBSCRIBE, 1, since, history, types, jobs, WINDOW_FACTS])
        taken = 0
        while True:
            message = self._receive(FACTS, GAP, in_time=until is not None)
            if message[0] == GAP:
                yield message[3], {"gap": {"first": message[2], "last": message[3], "reason": message[4]}}
                continue
            for event in map(as_event, message[3]):
                position = event.get("id")
                if isinstance(position, int):
                    yield position, event
            yield message[2], None
            taken += len(message[3])
            if until is not None and message[2] >= until:
                return
            if taken >= WINDOW_FACTS // 2:
                self._send([CREDIT, 1, taken])
                taken = 0

    def fetch(self, ticket: bytes, size: int) -> Iterator[bytes]:
        """The bytes of a ticket, piece by piece, over a side connection."""
        side = PlainConnection(self.endpoint, self._token, self._timeout_s, ticket)
        try:
            side._send_all(GO)
            missing = size
            while missing:
                side._deadline = monotonic() + self._timeout_s
                piece = side._read(min(missing, max(1, len(side._buffer))))
                missing -= len(piece)
                yield piece
            side._send_all(struct.pack(">Q", size))
        finally:
            side._socket.close()

    def _greet(self, ticket: bytes | None) -> None:
        # A daemon that refuses connections may have closed already; its message can still be read.
        with contextlib.suppress(Unavailable):
            self._send([HELLO, PROTOCOL, PROTOCOL, os.urandom(16), f"{self.program}/{VERSION}", self._token, ticket])
        welcome = self._receive(WELCOME)
        self.agent = welcome[2]
        if welcome[1] != PROTOCOL:
            raise PeerError(
                "version_mismatch",
                f"{self.endpoint} ({self.agent}) speaks version {welcome[1]} of the protocol, "
                f"{self.program} {VERSION} speaks {PROTOCOL}",
                f"upgrade {self.program if welcome[1] > PROTOCOL else 'the daemon'}",
            )
        self._greeted = True
        self.history: str = welcome[5]
        self.latest: int = welcome[6]
        self._frame_bytes_max = welcome[8]

    def _receive(self, *wanted: int, in_time: bool = True) -> Message:
        # Other messages do not extend the deadline: a daemon that only pings does not reply.
        deadline = monotonic() + self._timeout_s if in_time else None
        while True:
            self._deadline = deadline
            message = self._message()
            if message[0] in wanted:
                return message
            self._process(message)

    def _process(self, message: Message) -> None:
        """Process a message that no call waits for: answer a ping, raise an error or the end, ignore the rest."""
        if message[0] in (FAILURE, ENDED):
            raise self._failure(*([f"{one}" for one in message[2:6]] + [""] * 4)[:4])
        if message[0] == PING:
            self._send([PONG, *message[1:2]])
        elif message[0] == REQUEST:
            self._send(self._answer(message))
        elif message[0] == BYE:
            raise Unavailable("stopping", "the daemon is stopping", "try again when it is back")

    def _answer(self, message: Message) -> Message:
        _, number, _, method, fields = message[:5]
        act = self.served.get(method)
        if act is None or not isinstance(fields, dict):
            return [FAILURE, number, "refused", "request_unknown", f"{self.program} does not answer {method}", ""]
        return [REPLY, number, act(fields)]

    def _failure(self, kind: str, code: str, text: str, fix: str) -> ForgedError:
        upgrade = _which_to_upgrade(self.agent, self.program)
        if code == "version_mismatch":
            text = f"{self.endpoint} and {self.program} {VERSION} have no common protocol version: {text}"
        elif code == "request_unknown" or (code == "request_invalid" and upgrade):
            text = f"{text}: the daemon is {self.agent}, this is {self.program} {VERSION}"
            fix = f"upgrade {upgrade}" if upgrade else "install the same build of both"
        return from_wire(kind, code, text, fix)

    def _message(self) -> Message:
        """The next message. Once its first byte has arrived, the rest is due within the timeout."""
        while not self._buffer:
            self._buffer += self._wait()
        self._deadline = self._deadline or monotonic() + self._timeout_s
        head = self._read(4)
        length = int.from_bytes(head, "big")
        if not 0 < length <= self._frame_bytes_max:
            foreign = next((said for start, said in _FOREIGN.items() if head.startswith(start)), None)
            raise self._not_a_daemon(*foreign or (f"it announces {length} bytes",))
        try:
            message = msgpack.unpackb(self._read(length), strict_map_key=False)
        except (ValueError, TypeError) as error:
            raise self._not_a_daemon(f"its data is not msgpack: {error}") from error
        if not isinstance(message, list) or not message or type(message[0]) is not int:
            raise self._not_a_daemon("its data is not a message")
        name, shape = _SHAPES.get(message[0], ("", ()))
        if len(message) < len(shape) or not all(map(isinstance, message, shape)):
            raise self._not_a_daemon(f"its {name} is malformed")
        return message

    def _has_message(self) -> bool:
        """Whether a message is complete, or too large to become one."""
        length = int.from_bytes(self._buffer[:4], "big")
        return len(self._buffer) >= 4 and (length > self._frame_bytes_max or len(self._buffer) >= 4 + length)

    def _not_a_daemon(self, what: str, fix: str = "check the endpoint") -> PeerError:
        return PeerError("not_a_daemon", f"{self.endpoint} is not a forged daemon: {what}", fix)

    def _read(self, count: int) -> bytes:
        buffer = self._buffer
        while len(buffer) < count:
            buffer += self._wait()
        taken = bytes(buffer[:count])
        del buffer[:count]
        return taken

    def _wait(self) -> bytes:
        """The next bytes; empty after a ping to a silent daemon."""
        if self._deadline is None:
            self.while_quiet()
        left_s = PING_AFTER_S if self._deadline is None else self._deadline - monotonic()
        try:
            self._socket.settimeout(max(left_s, 1e-6))
            return self._arrived()
        except TimeoutError as error:
            if self._deadline is None and not self._pinged:
                self._pinged = True
                self._send([PING, 0])
                return b""
            fix = "is the daemon stuck? see its log" if self._is_known else "check that a daemon listens there"
            raise no_answer(self.endpoint, self._waited_s, fix) from error

    def _arrived(self) -> bytes:
        """The bytes that arrive within the socket's timeout; raises `TimeoutError` if none do."""
        try:
            data = self._socket.recv(1 << 16)
        except OSError as error:
            # An error with a number comes from the kernel, which has closed the connection.
            if isinstance(error, TimeoutError) and error.errno is None:
                raise
            raise self._lost(error) from error
        if not data:
            raise Unavailable("connection_lost", f"{self.endpoint} closed the connection", self._again)
        self._pinged = False
        return data

    @property
    def _waited_s(self) -> float:
        return 2 * PING_AFTER_S if self._deadline is None else self._timeout_s

    @property
    def _is_known(self) -> bool:
        return self._greeted or self.endpoint.startswith("unix://")

    @property
    def _again(self) -> str:
        # A TLS port closes a plain connection without an explanation.
        plain = not self._is_known and not self.endpoint.startswith("tls://")
        return f"for TLS use tls://{self.endpoint.removeprefix('tcp://')}" if plain else "try again"

    def _send(self, message: Message) -> None:
        try:
            payload: bytes = msgpack.packb(message)
        except (ValueError, OverflowError) as error:
            what = "it is not UTF-8" if isinstance(error, UnicodeError) else f"{error}"
            raise ConfigError("argument_invalid", f"the argument cannot be sent: {what}", "change it") from error
        self._send_all(struct.pack(">I", len(payload)) + payload)

    def _send_all(self, data: bytes) -> None:
        try:
            self._socket.settimeout(self._timeout_s)
            self._socket.sendall(data)
        except OSError as error:
            raise self._lost(error) from error

    def _lost(self, error: OSError) -> ForgedError:
        return tls_refusal(self.endpoint, error) or Unavailable(
            "connection_lost", f"{self.endpoint}: {error.strerror or error}", self._again
        )


def as_event(record: Any) -> Event:
    """A fact's record as a dictionary; elements that a newer daemon appends are left out."""
    if isinstance(record, dict):
        return record
    return dict(zip(RECORD_FIELDS, record, strict=False)) if isinstance(record, list) else {}


def _which_to_upgrade(agent: str, program: str) -> str:
    """The older of the daemon and this program; empty if they have the same version."""
    theirs, ours = _release(agent.partition("/")[2]), _release(VERSION)
    if not theirs or theirs == ours:
        return ""
    return "the daemon" if theirs < ours else program


def _release(version: str) -> tuple[int, ...]:
    parts = [part for part in version.split(".")[:3] if part.isdecimal()]
    return tuple(int(part[:9]) for part in parts)
