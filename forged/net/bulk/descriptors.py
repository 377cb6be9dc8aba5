"""Pass file descriptors to another process over a connected Unix stream socket.

Invariants:
- Received descriptors are close-on-exec from the start. A failed receive closes the descriptors that had arrived. The
  sender's descriptors stay open.
- After a failure the connection must not be used.

A `recv` without ancillary data silently closes descriptors that arrive with its bytes. So descriptors travel with a
marker byte of their own, after a header of fixed length with their number. The header, and everything before it, must
be read exactly to the byte.

`socket.recv_fds` and anyio's `receive_fds` are not used: their descriptors leak through exec, and they do not report
truncation.
"""

from __future__ import annotations

import array
import errno
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from forged.errors import ForgedError, PeerError, RequestRefused, Unavailable

DESCRIPTORS_MAX = 64
"""The maximum number per message; the kernel allows 253."""

MAGIC = b"FGFD"
HEADER = struct.Struct(">4sH")
MARKER = b"\0"
DESCRIPTOR_BYTES = array.array("i").itemsize


def send_descriptors(sock: socket.socket, descriptors: Sequence[int]) -> None:
    """Send copies of the descriptors, in a thread."""
    _check_socket(sock)
    header = _header(descriptors)
    with _translated():
        sock.sendall(header)
        _send_with_marker(sock, descriptors)


def receive_descriptors(sock: socket.socket, *, descriptors_max: int = DESCRIPTORS_MAX) -> list[int]:
    """Receive descriptors, in a thread. The caller must close them."""
    _check_socket(sock)
    with _translated():
        header = b""
        while missing := HEADER.size - len(header):
            header += _required(sock.recv(missing))
        return _take(sock, _announced(header, descriptors_max))


def _check_socket(sock: socket.socket) -> None:
    assert sock.gettimeout() != 0, "the socket must block or have a timeout"
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM:
        raise RequestRefused(
            "descriptors_socket_invalid",
            f"descriptors need a Unix stream socket, got {sock.family.name} {sock.type.name}",
            "connect by unix://",
        )


def _header(descriptors: Sequence[int]) -> bytes:
    """Check everything before the first byte is sent, because the receiver waits for the announced descriptors."""
    if not 1 <= len(descriptors) <= DESCRIPTORS_MAX:
        raise RequestRefused(
            "descriptors_count",
            f"the number of descriptors must be 1..{DESCRIPTORS_MAX}, got {len(descriptors)}",
            "send them in several messages",
        )
    for descriptor in descriptors:
        try:
            os.fstat(descriptor)
        except OSError as error:
            closed = f"descriptor {descriptor} is not open"
            raise RequestRefused("descriptor_invalid", closed, "send open descriptors") from error
    return HEADER.pack(MAGIC, len(descriptors))


def _send_with_marker(sock: socket.socket, descriptors: Sequence[int]) -> None:
    socket.send_fds(sock, [MARKER], list(descriptors))


def _required(received: bytes) -> bytes:
    if not received:
        raise _truncated()
    return received


def _announced(header: bytes, descriptors_max: int) -> int:
    magic, count = HEADER.unpack(header)
    if magic != MAGIC:
        raise PeerError(
            "descriptors_header", "the header of a descriptor message is invalid", "compare the versions of both ends"
        )
    if not 1 <= count <= descriptors_max:
        raise PeerError(
            "descriptors_too_many",
            f"the peer announced {count} descriptors, allowed are 1..{descriptors_max}",
            "send fewer",
        )
    return int(count)


def _take(sock: socket.socket, count: int) -> list[int]:
    """Receive the marker with exactly `count` descriptors, or raise and close them."""
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
    """The error if the received descriptors differ from the announced number, else None."""
    if not marker:
        return _truncated()
    if received == count and not cut:
        return None
    if received == count:
        return PeerError(
            "descriptors_too_many",
            f"more than the announced {count} descriptors arrived",
            "upgrade forged at the other end",
        )
    if cut:
        return Unavailable(
            "descriptors_exhausted",
            f"this process received only {received} of {count} descriptors: its limit of open files is reached",
            "raise the open-file limit of this process (ulimit -n, LimitNOFILE=)",
        )
    return PeerError(
        "descriptors_missing", f"{received} of {count} announced descriptors arrived", "upgrade forged at the other end"
    )


def _truncated() -> Unavailable:
    return Unavailable("descriptors_truncated", "the connection ended before the descriptors arrived", "connect again")


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise Unavailable("descriptors_stalled", "the peer sent nothing within the timeout", "connect again") from error
    except OSError as error:
        code = "descriptors_in_flight" if error.errno == errno.ETOOMANYREFS else "descriptors_failed"
        reason = error.strerror or str(error)
        raise Unavailable(code, f"cannot pass descriptors: {reason}", "connect again") from error
