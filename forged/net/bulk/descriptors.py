"""File descriptors handed from one process to another over a connected Unix stream socket.

Law: whoever holds a descriptor knows it. Received ones are closed on exec from their first moment, and a receive that
fails has closed whatever had arrived; the sender's stay the sender's. After a failure or a cancellation the connection
is of no more use.

A receive that does not ask for descriptors silently closes those that travel with its bytes. So they travel on a byte
of their own, behind a header of fixed length that tells how many they are. The header is read to the byte, which
stops before them; so must be whatever was read on this socket before.

Neither `socket.recv_fds` nor anyio's `receive_fds` will do: they let descriptors leak through an exec, and do not
tell that some were cut off. Between the moment in which the kernel hands the descriptors over and the return nothing
is awaited, so a cancel scope or a timeout cannot lose them; a task put between can.
"""

from __future__ import annotations

import array
import errno
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import anyio

from forged.errors import ForgedError, PeerError, RequestRefused, Unavailable

DESCRIPTORS_MAX = 64
"""How many travel at once; the kernel takes 253 at most."""

MAGIC = b"FGFD"
HEADER = struct.Struct(">4sH")
MARKER = b"\0"
DESCRIPTOR_BYTES = array.array("i").itemsize

T = TypeVar("T")
Wait = Callable[[socket.socket], Awaitable[None]]


async def send_descriptors(sock: socket.socket, descriptors: Sequence[int]) -> None:
    """Send copies of the descriptors over a non-blocking socket."""
    _check_socket(sock, blocking=False)
    header = memoryview(_header(descriptors))
    with _translated():
        while header:
            header = header[await _once(anyio.wait_writable, sock, partial(sock.send, header)) :]
        await _once(anyio.wait_writable, sock, partial(_hand_over, sock, descriptors))


async def receive_descriptors(sock: socket.socket, *, descriptors_max: int = DESCRIPTORS_MAX) -> list[int]:
    """The descriptors that the other end sends over a non-blocking socket. They are the caller's to close."""
    _check_socket(sock, blocking=False)
    with _translated():
        header = b""
        while missing := HEADER.size - len(header):
            header += _some(await _once(anyio.wait_readable, sock, partial(sock.recv, missing)))
        count = _announced(header, descriptors_max)
        return await _once(anyio.wait_readable, sock, partial(_take, sock, count))


def send_descriptors_blocking(sock: socket.socket, descriptors: Sequence[int]) -> None:
    """`send_descriptors` for a thread: over a socket that blocks, or has a timeout."""
    _check_socket(sock, blocking=True)
    header = _header(descriptors)
    with _translated():
        sock.sendall(header)
        _hand_over(sock, descriptors)


def receive_descriptors_blocking(sock: socket.socket, *, descriptors_max: int = DESCRIPTORS_MAX) -> list[int]:
    """`receive_descriptors` for a thread: over a socket that blocks, or has a timeout."""
    _check_socket(sock, blocking=True)
    with _translated():
        header = b""
        while missing := HEADER.size - len(header):
            header += _some(sock.recv(missing))
        return _take(sock, _announced(header, descriptors_max))


async def _once(ready: Wait, sock: socket.socket, operation: Callable[[], T]) -> T:
    """The result of `operation` as soon as the socket lets it happen."""
    while True:
        try:
            return operation()
        except BlockingIOError:
            await ready(sock)


def _check_socket(sock: socket.socket, *, blocking: bool) -> None:
    assert (sock.gettimeout() != 0) is blocking, "a socket of the wrong mode would block the loop, or the thread never"
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM:
        raise RequestRefused(
            "descriptors_socket_invalid",
            f"descriptors travel over Unix stream sockets only, not {sock.family.name} {sock.type.name}",
            "connect by unix://",
        )


def _header(descriptors: Sequence[int]) -> bytes:
    """Everything is checked before a byte leaves, because the other end waits for what a header announces."""
    if not 1 <= len(descriptors) <= DESCRIPTORS_MAX:
        raise RequestRefused(
            "descriptors_count",
            f"{len(descriptors)} descriptors cannot travel at once",
            f"send from 1 to {DESCRIPTORS_MAX}",
        )
    for descriptor in descriptors:
        try:
            os.fstat(descriptor)
        except OSError as error:
            raise RequestRefused("descriptor_invalid", f"{descriptor} is no open descriptor", "open it") from error
    return HEADER.pack(MAGIC, len(descriptors))


def _hand_over(sock: socket.socket, descriptors: Sequence[int]) -> None:
    socket.send_fds(sock, [MARKER], list(descriptors))


def _some(received: bytes) -> bytes:
    if not received:
        raise _truncated()
    return received


def _announced(header: bytes, descriptors_max: int) -> int:
    magic, count = HEADER.unpack(header)
    if magic != MAGIC:
        raise PeerError("descriptors_header", "something else came where descriptors belong", "see the peer's version")
    if not 1 <= count <= descriptors_max:
        raise PeerError(
            "descriptors_too_many",
            f"the other end announced {count} descriptors",
            f"send from 1 to {descriptors_max}",
        )
    return int(count)


def _take(sock: socket.socket, count: int) -> list[int]:
    """Receive the marker, and with it exactly `count` descriptors or an error."""
    room = socket.CMSG_LEN(count * DESCRIPTOR_BYTES)
    marker, ancillary, flags, _ = sock.recvmsg(len(MARKER), room, socket.MSG_CMSG_CLOEXEC)
    received = _rights(ancillary)
    failure = _wrong(marker, len(received), count, cut=bool(flags & socket.MSG_CTRUNC))
    if failure is not None:
        for descriptor in received:
            os.close(descriptor)
        raise failure
    return received


def _rights(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    received = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            received.frombytes(data[: len(data) - len(data) % DESCRIPTOR_BYTES])
    return received.tolist()


def _wrong(marker: bytes, received: int, count: int, *, cut: bool) -> ForgedError | None:
    """Why what was received is not what was announced, or None."""
    if not marker:
        return _truncated()
    if received == count and not cut:
        return None
    if received == count:
        return PeerError("descriptors_too_many", f"more came than the {count} announced", "fix the peer")
    if cut:
        return Unavailable(
            "descriptors_exhausted",
            f"this process could open {received} of {count} descriptors",
            "raise its limit of open files (LimitNOFILE=)",
        )
    return PeerError("descriptors_missing", f"{received} of {count} announced descriptors came", "fix the peer")


def _truncated() -> Unavailable:
    return Unavailable("descriptors_truncated", "the connection ended before the descriptors came", "connect again")


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise Unavailable("descriptors_stalled", "the other end was silent for too long", "connect again") from error
    except OSError as error:
        code = "descriptors_in_flight" if error.errno == errno.ETOOMANYREFS else "descriptors_failed"
        reason = error.strerror or str(error)
        raise Unavailable(code, f"descriptors cannot be passed: {reason}", "connect again") from error
