"""A connection of `forgectl` to the daemon: blocking, untyped, and quick to start.

Law: nothing here imports more than sockets and msgpack, because people wait for the prompt. It speaks the protocol of
docs/protocol.md from that page alone, without the daemon's types, as a client in another language would. Whatever is
at the other end, it has an answer or an error in time.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from time import monotonic
from typing import Any

import msgpack

from forged.errors import ConfigError, ForgedError, PeerError, Unavailable, from_wire
from forged.version import VERSION

HELLO, WELCOME, REQUEST, REPLY, FAILURE, SUBSCRIBE, FACTS, GAP, CREDIT, ENDED, PING, PONG, BYE = (
    0, 1, 2, 3, 4, 6, 7, 8, 9, 11, 12, 13, 14,
)  # fmt: skip
PROTOCOL = 1
GO = b"\x01"
"""The first byte on a side connection, by the end that opened it."""
FIRST_FRAME_BYTES_MAX = 64 << 10
WINDOW_FACTS = 1024
PING_AFTER_S = 5.0
"""How long a daemon may say nothing, where nothing need happen, before it is asked whether it is there."""
RECORD_FIELDS = ("id", "at", "type", "job", "generation", "cause", "origin", "fact")
WELCOME_TYPES = [int, int, str, str, str, str, int, int, int]

Message = list[Any]
Event = dict[str, Any]


class Wire:
    """One connection to the daemon at an endpoint. `history` and `latest` are what it said of itself."""

    def __init__(self, endpoint: str, token: str | None, timeout_s: float, ticket: bytes | None = None) -> None:
        self.endpoint = endpoint
        self._timeout_s = timeout_s
        self._deadline: float | None = None
        """By when something must have come; None while nothing need come."""
        self._pinged = False
        self._greeted = False
        self._number = 0
        self._frame_bytes_max = FIRST_FRAME_BYTES_MAX
        self._buffer = bytearray()
        self._socket = _connect(endpoint, timeout_s)
        try:
            self._greet(token, ticket)
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        """Say goodbye."""
        with contextlib.suppress(ForgedError):
            self._send([BYE, self._number])
        self._socket.close()

    def request(self, method: str, **fields: Any) -> Any:
        """Have a request done and return what the reply says."""
        self._number += 1
        self._send([REQUEST, self._number, self._number - 1, method, fields, self._timeout_s])
        return self._receive(REPLY)[2]

    def facts(
        self, since: int | None, types: list[str], jobs: list[str], *, until: int | None = None, history: str = ""
    ) -> Iterator[tuple[int, Event | None]]:
        """Facts and gaps as dictionaries, each with the position behind it; for ever, or until that id.

        None comes with a position up to which there was nothing more.
        """
        self._send([SUBSCRIBE, 1, since, history, types, jobs, WINDOW_FACTS])
        taken = 0
        while True:
            message = self._receive(FACTS, GAP, in_time=until is not None)
            if message[0] == GAP:
                yield message[3], {"gap": {"first": message[2], "last": message[3], "reason": message[4]}}
                continue
            for record in message[3]:
                yield record[0], dict(zip(RECORD_FIELDS, record, strict=False))
            yield message[2], None
            taken += len(message[3])
            if until is not None and message[2] >= until:
                return
            if taken >= WINDOW_FACTS // 2:
                self._send([CREDIT, 1, taken])
                taken = 0

    def fetch(self, ticket: bytes, size: int) -> Iterator[bytes]:
        """The bytes that a ticket is for, piece by piece, over a side connection."""
        side = Wire(self.endpoint, None, self._timeout_s, ticket)
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

    def _greet(self, token: str | None, ticket: bytes | None) -> None:
        self._send([HELLO, PROTOCOL, PROTOCOL, os.urandom(16), f"forgectl/{VERSION}", token, ticket])
        welcome = self._receive(WELCOME)
        if [type(one) for one in welcome[: len(WELCOME_TYPES)]] != WELCOME_TYPES:
            raise self._strange("its welcome is none")
        if welcome[1] != PROTOCOL:
            raise PeerError(
                "version_mismatch",
                f"{self.endpoint} speaks version {welcome[1]}, this end {PROTOCOL}",
                "upgrade the older of the two",
            )
        self._greeted = True
        self.history: str = welcome[5]
        self.latest: int = welcome[6]
        self._frame_bytes_max = welcome[8]

    def _receive(self, *wanted: int, in_time: bool = True) -> Message:
        # What comes meanwhile gives no more time: a daemon that only pings does not answer.
        self._deadline = monotonic() + self._timeout_s if in_time else None
        while True:
            message = self._message()
            if message[0] in wanted:
                return message
            if message[0] in (FAILURE, ENDED):
                raise from_wire(*(message[2:6] + [""] * 4)[:4])
            if message[0] == PING:
                self._send([PONG, *message[1:2]])
            elif message[0] == BYE:
                raise Unavailable("stopping", "the daemon is stopping", "try again when it is back")

    def _message(self) -> Message:
        (length,) = struct.unpack(">I", self._read(4))
        if not 0 < length <= self._frame_bytes_max:
            raise self._strange(f"it announces {length} bytes")
        try:
            message = msgpack.unpackb(self._read(length), strict_map_key=False)
        except ValueError as error:
            raise self._strange(f"what it sends is not msgpack: {error}") from error
        if not isinstance(message, list) or not message:
            raise self._strange("what it sends is no message")
        return message

    def _strange(self, what: str) -> PeerError:
        return PeerError("not_a_daemon", f"{self.endpoint} is not a forged daemon: {what}", "see the endpoint")

    def _read(self, count: int) -> bytes:
        buffer = self._buffer
        while len(buffer) < count:
            buffer += self._wait()
        taken = bytes(buffer[:count])
        del buffer[:count]
        return taken

    def _wait(self) -> bytes:
        """What arrives next; nothing, after asking a daemon that need not speak whether it is there."""
        left_s = PING_AFTER_S if self._deadline is None else self._deadline - monotonic()
        try:
            self._socket.settimeout(max(left_s, 1e-6))
            data = self._socket.recv(1 << 16)
        except TimeoutError as error:
            if self._deadline is None and not self._pinged:
                self._pinged = True
                self._send([PING, 0])
                return b""
            raise Unavailable(
                "no_answer", f"{self.endpoint} did not answer within {self._patience_s:g} s", "is the daemon stuck?"
            ) from error
        except OSError as error:
            raise self._lost(error) from error
        if not data:
            raise Unavailable("connection_lost", f"{self.endpoint} closed the connection", self._again)
        self._pinged = False
        return data

    @property
    def _patience_s(self) -> float:
        return 2 * PING_AFTER_S if self._deadline is None else self._timeout_s

    @property
    def _again(self) -> str:
        # A port for TLS closes on whoever does not speak it, without a word that they would understand.
        plain = not self._greeted and not self.endpoint.startswith(("unix://", "tls://"))
        return f"if it wants TLS, write tls://{self.endpoint.removeprefix('tcp://')}" if plain else "try again"

    def _send(self, message: Message) -> None:
        payload: bytes = msgpack.packb(message)
        self._send_all(struct.pack(">I", len(payload)) + payload)

    def _send_all(self, data: bytes) -> None:
        try:
            self._socket.settimeout(self._timeout_s)
            self._socket.sendall(data)
        except OSError as error:
            raise self._lost(error) from error

    def _lost(self, error: OSError) -> ForgedError:
        return _tls_refusal(self.endpoint, error) or Unavailable(
            "connection_lost", f"{self.endpoint}: {error.strerror or error}", self._again
        )


def _connect(endpoint: str, timeout_s: float) -> socket.socket:
    scheme, where = _parse(endpoint)
    try:
        if scheme == "unix":
            return _dial_unix(where, timeout_s)
        connection = socket.create_connection(where, timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection if scheme == "tcp" else _secured(connection, where[0])
    except PermissionError as error:
        raise ConfigError(
            "connect_not_permitted", f"{endpoint} may not be used: {error.strerror}", "see its owner and mode"
        ) from error
    except OSError as error:
        raise _tls_refusal(endpoint, error) or Unavailable(
            "no_daemon", f"no daemon on {endpoint}: {error.strerror or error}", "start one with `forged run`"
        ) from error


def _dial_unix(path: str, timeout_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


def _parse(endpoint: str) -> tuple[str, Any]:
    """The scheme, and what a socket calls the rest."""
    scheme, separator, rest = endpoint.rpartition("://")
    if scheme == "unix" and rest:
        return scheme, rest
    host, _, port = rest.rpartition(":")
    if (scheme in ("tcp", "tls") or not separator) and host and port.isdecimal() and int(port) < 1 << 16:
        return scheme or "tcp", (host.strip("[]"), int(port))
    raise ConfigError(
        "address_invalid", f"{endpoint!r} is not an endpoint", "write unix:///path, tcp://host:port or tls://host:port"
    )


def _secured(connection: socket.socket, host: str) -> socket.socket:
    from forged.net.tls import client_context

    names = ("FORGED_CA", "FORGED_CERTIFICATE", "FORGED_KEY")
    try:
        context = client_context(*(os.environ.get(name) or None for name in names))
        return context.wrap_socket(connection, server_hostname=host)
    except BaseException:
        connection.close()
        raise


def _tls_refusal(endpoint: str, error: OSError) -> ForgedError | None:
    # Only an endpoint with TLS can have failed over it, and only then is the module worth its time.
    if not endpoint.startswith("tls://"):
        return None
    import ssl

    from forged.net.tls import refusal

    return refusal(endpoint, error) if isinstance(error, ssl.SSLError) else None
