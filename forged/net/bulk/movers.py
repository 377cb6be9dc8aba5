"""Move bulk bytes between a connected socket and a file or memory, in a thread.

Invariants:
- The bytes pass neither msgpack nor the event loop, and only memory that has been touched before is used.
- A mover moves exactly the requested bytes or raises; after an error the connection must be closed.
- A mover gives up between one and two times `stall_timeout_s` after the last byte moved.

Files are written through a pipe, since `splice` passes pages without a copy. Plain sockets block with the kernel's
timeouts: Python's timeouts poll before every call, and MSG_WAITALL sleeps until the whole buffer is full. Socket
buffers are not enlarged, because that disables the kernel's auto-tuning. TLS sockets have no `sendfile` and ignore the
kernel's timeouts: they use Python's timeouts, and a reused buffer for files. Measured by `benchmarks/bulk.py`.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import anyio
from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar

from forged.errors import ForgedError, RequestRefused, Unavailable
from forged.net.transport import tls

STALL_TIMEOUT_S = 10.0
THREADS_MAX = 8
PIECE_BYTES = 8 << 20
PIPE_BYTES = 1 << 20
BUFFER_BYTES = 256 << 10
"""Small enough to stay in the CPU cache between two calls."""

TIMEVAL = struct.Struct("ll")

Progress = Callable[[int], None]
"""Called in the mover's thread with the number of bytes moved so far."""

T = TypeVar("T")

_limiter: RunVar[CapacityLimiter] = RunVar("forged_bulk_limiter")


class ThreadBuffer(threading.local):
    """A buffer for each thread; its pages are populated at creation."""

    def __init__(self, size: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        self.buffer = memoryview(mmap.mmap(-1, size, flags=flags))


_warm = ThreadBuffer(BUFFER_BYTES)


def send_file(
    sock: socket.socket,
    fd: int,
    offset: int,
    count: int,
    *,
    stall_timeout_s: float = STALL_TIMEOUT_S,
    progress: Progress | None = None,
) -> None:
    """Send `count` bytes of the file from `offset` on. The file must not change until the peer has received them."""

    def plain(moved: int) -> int:
        return os.sendfile(sock.fileno(), fd, offset + moved, min(PIECE_BYTES, count - moved))

    def encrypted(moved: int) -> int:
        size = os.preadv(fd, [_warm.buffer[: count - moved]], offset + moved)
        sent = 0
        while sent < size:
            sent += sock.send(_warm.buffer[sent:size])
        return size

    step = encrypted if isinstance(sock, ssl.SSLSocket) else plain
    if (moved := _move(sock, step, count, stall_timeout_s, progress)) < count:
        raise Unavailable(
            "bulk_source_short", f"the file ended after {moved} of {count} bytes", "find what truncates it"
        )


def send_buffer(
    sock: socket.socket,
    view: memoryview[Any],
    *,
    stall_timeout_s: float = STALL_TIMEOUT_S,
    progress: Progress | None = None,
) -> None:
    """Send all of `view`."""
    data = view.cast("B")

    def step(moved: int) -> int:
        return sock.send(data[moved : moved + PIECE_BYTES])

    _move(sock, step, len(data), stall_timeout_s, progress)


def receive_into_file(
    sock: socket.socket,
    fd: int,
    offset: int,
    count: int,
    *,
    stall_timeout_s: float = STALL_TIMEOUT_S,
    progress: Progress | None = None,
) -> None:
    """Receive `count` bytes into the file from `offset` on. If the disk is full, the rest is not read."""

    def encrypted(moved: int) -> int:
        size = _fill(sock, _warm.buffer[: count - moved])
        _write(fd, _warm.buffer[:size], offset + moved)
        return size

    def plain(outlet: int, inlet: int, moved: int) -> int:
        size = os.splice(sock.fileno(), inlet, min(PIPE_BYTES, count - moved))
        _drain(outlet, fd, offset + moved, size)
        return size

    if isinstance(sock, ssl.SSLSocket):
        moved = _move(sock, encrypted, count, stall_timeout_s, progress)
    else:
        with _pipe() as ends:
            moved = _move(sock, partial(plain, *ends), count, stall_timeout_s, progress)
    _require_whole(moved, count)


def receive_into_buffer(
    sock: socket.socket,
    view: memoryview[Any],
    *,
    stall_timeout_s: float = STALL_TIMEOUT_S,
    progress: Progress | None = None,
) -> None:
    """Fill all of `view`."""
    data = view.cast("B")

    def step(moved: int) -> int:
        return sock.recv_into(data[moved : moved + PIECE_BYTES])

    _require_whole(_move(sock, step, len(data), stall_timeout_s, progress), len(data))


def receive(sock: socket.socket, count: int) -> memoryview:
    """Receive `count` bytes, or fewer if the connection ends before."""
    data = memoryview(bytearray(count))
    filled = 0
    while filled < count:
        size = sock.recv_into(data[filled:])
        if not size:
            break
        filled += size
    return data[:filled]


async def run(mover: Callable[[socket.socket], T], sock: socket.socket, *, limiter: CapacityLimiter | None = None) -> T:
    """Run `mover(sock)` in a thread. A cancellation shuts the socket down, so that the thread ends, and waits for it.

    Without a `limiter`, at most `THREADS_MAX` movers run per event loop.
    """
    outcome: list[T | Exception] = []
    ended = anyio.Event()

    def attempt() -> T | Exception:
        # An error raised in the task would leave the task group in an exception group.
        try:
            return mover(sock)
        except OSError as error:
            return _refused(error)
        except Exception as error:  # noqa: BLE001 - raised below, by the waiting task
            return error

    async def work() -> None:
        try:
            outcome.append(await to_thread.run_sync(attempt, limiter=limiter or _default_limiter()))
        except RuntimeError as error:
            # The thread did not start; errors of the mover are returned, not raised.
            outcome.append(Unavailable("bulk_no_thread", f"cannot start a thread: {error}", "retry later"))
        ended.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work)
        try:
            await ended.wait()
        except BaseException:
            _shut_down(sock)
            raise
    [result] = outcome
    if isinstance(result, Exception):
        raise result
    return result


def _default_limiter() -> CapacityLimiter:
    try:
        return _limiter.get()
    except LookupError:
        limiter = CapacityLimiter(THREADS_MAX)
        _limiter.set(limiter)
        return limiter


def _shut_down(sock: socket.socket) -> None:
    with suppress(OSError):
        # Not `sock.shutdown`: on a TLS socket that drops TLS, and a running mover would continue in plain text.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _move(
    sock: socket.socket,
    step: Callable[[int], int],
    count: int,
    stall_timeout_s: float,
    progress: Progress | None,
) -> int:
    """Repeat `step(moved)`, which returns the bytes it moved, until `count` bytes have moved or it returns 0."""
    moved = 0
    try:
        with _stall_timeout(sock, stall_timeout_s):
            while moved < count:
                size = step(moved)
                if size == 0:
                    break
                moved += size
                if progress is not None:
                    progress(moved)
    except OSError as error:
        raise _failure(error, moved, count, stall_timeout_s) from error
    return moved


def _require_whole(moved: int, count: int) -> None:
    if moved < count:
        raise _truncated(moved, count)


@contextmanager
def _stall_timeout(sock: socket.socket, stall_timeout_s: float) -> Iterator[None]:
    """Let the socket block for at most `stall_timeout_s`. After success the socket's options are restored.

    The TCP user timeout is set to twice that: the short one that detects dead hosts would also end the connection to a
    receiver whose disk is busy for a moment, and with the same value a stall could look like a lost connection.
    """
    if sock.type != socket.SOCK_STREAM:
        raise RequestRefused("bulk_socket_invalid", "bulk bytes need a stream socket", "connect by TCP")
    timeout_s, plain = sock.gettimeout(), not isinstance(sock, ssl.SSLSocket)
    user_timeout_ms = _exchange_user_timeout(sock, max(1, round(2 * stall_timeout_s * 1000)))
    sock.settimeout(None if plain else stall_timeout_s)
    if plain:
        _set_kernel_timeouts(sock, stall_timeout_s)
    yield
    if plain:
        _set_kernel_timeouts(sock, 0)
    sock.settimeout(timeout_s)
    _exchange_user_timeout(sock, user_timeout_ms)


def _set_kernel_timeouts(sock: socket.socket, timeout_s: float) -> None:
    seconds, fraction = divmod(timeout_s, 1)
    timeval = TIMEVAL.pack(int(seconds), int(fraction * 1_000_000))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, timeval)


def _exchange_user_timeout(sock: socket.socket, timeout_ms: int) -> int:
    """Set the TCP user timeout and return the previous one; 0 for a Unix socket."""
    if sock.family == socket.AF_UNIX:
        return 0
    before = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
    return before


@contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    try:
        outlet, inlet = os.pipe()
    except OSError as error:
        raise _refused(error) from error
    try:
        # Beyond the user's quota for pipes the size cannot be raised; a small pipe is only slower.
        with suppress(PermissionError):
            fcntl.fcntl(inlet, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        yield outlet, inlet
    finally:
        os.close(outlet)
        os.close(inlet)


def _drain(outlet: int, fd: int, offset: int, count: int) -> None:
    """Move `count` bytes out of the pipe into the file."""
    drained = 0
    while drained < count:
        try:
            drained += os.splice(outlet, fd, count - drained, offset_dst=offset + drained)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # This file system does not support splice.
            piece = memoryview(os.read(outlet, count - drained))
            _write(fd, piece, offset + drained)
            drained += len(piece)


def _fill(sock: socket.socket, view: memoryview) -> int:
    """Receive until `view` is full or the stream ends; a TLS socket returns one record per call."""
    filled = 0
    while filled < len(view):
        size = sock.recv_into(view[filled:])
        if size == 0:
            break
        filled += size
    return filled


def _write(fd: int, view: memoryview, offset: int) -> None:
    written = 0
    while written < len(view):
        written += os.pwrite(fd, view[written:], offset + written)


def _truncated(moved: int, count: int) -> Unavailable:
    return Unavailable("bulk_truncated", f"the connection ended after {moved} of {count} bytes", "transfer again")


def _refused(error: OSError) -> Unavailable:
    """The error of a failed system call outside of the data path."""
    return Unavailable("bulk_failed", f"cannot move the bytes: {error.strerror or error}", "retry later")


def _failure(error: OSError, moved: int, count: int, stall_timeout_s: float) -> ForgedError:
    so_far = f"{moved} of {count} bytes"
    if isinstance(error, BlockingIOError | TimeoutError):
        return Unavailable("bulk_stalled", f"nothing moved for {stall_timeout_s} s after {so_far}", "transfer again")
    if isinstance(error, ConnectionError | ssl.SSLEOFError | ssl.SSLZeroReturnError) or error.errno == errno.ENOTCONN:
        return _truncated(moved, count)
    if isinstance(error, ssl.SSLError):
        return tls.refusal("the peer", error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Unavailable("disk_full", f"the disk was full after {so_far}", "free some space, then transfer again")
    return Unavailable("bulk_failed", f"{error.strerror or error}, after {so_far}", "check the disk and the connection")
