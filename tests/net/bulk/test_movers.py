from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from forged.errors import ForgedError, RequestRefused, Unavailable
from forged.net.bulk import movers
from tests.net.recording_connections import Certificates

MIB = 1 << 20
DATA = os.urandom(3 * MIB + 17)
STALL_S = 0.05
PATIENCE_S = 30.0

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture(params=["unix", "tcp", "tls"])
def pair(request: pytest.FixtureRequest, certificates: Certificates) -> Iterator[Pair]:
    makers: dict[str, Callable[[], AbstractContextManager[Pair]]] = {
        "unix": unix_pair,
        "tcp": tcp_pair,
        "tls": partial(tls_pair, certificates),
    }
    with makers[request.param]() as made:
        yield made


@contextmanager
def unix_pair() -> Iterator[Pair]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


@contextmanager
def tcp_pair() -> Iterator[Pair]:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as near,
        listener.accept()[0] as far,
    ):
        yield near, far


@contextmanager
def tls_pair(certificates: Certificates) -> Iterator[Pair]:
    with ExitStack() as stack:
        near, far = stack.enter_context(tcp_pair())
        with ThreadPoolExecutor(1) as executor:
            server = executor.submit(certificates.server().wrap_socket, far, server_side=True)
            client = stack.enter_context(certificates.client().wrap_socket(near, server_hostname="localhost"))
        yield client, stack.enter_context(server.result())


@pytest.fixture
def source(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "source").write_bytes(DATA)
    with (tmp_path / "source").open("rb") as file:
        yield file.fileno()


@pytest.fixture
def destination(tmp_path: Path) -> Iterator[int]:
    with (tmp_path / "destination").open("w+b") as file:
        yield file.fileno()


def read(fd: int) -> bytes:
    return os.pread(fd, len(DATA) * 2, 0)


def code_of(movement: Callable[[], None]) -> str:
    with pytest.raises(Unavailable) as raised:
        movement()
    return raised.value.code


@pytest.mark.parametrize("count", [0, 1, MIB, len(DATA)])
def test_a_file_arrives_as_it_was(
    pair: Pair, thread: ThreadPoolExecutor, source: int, destination: int, count: int
) -> None:
    near, far = pair
    sending = thread.submit(movers.send_file, near, source, 0, count)
    movers.receive_into_file(far, destination, 0, count)
    sending.result()
    assert read(destination) == DATA[:count]


def test_file_movement_leaves_no_descriptor(
    pair: Pair, thread: ThreadPoolExecutor, source: int, destination: int
) -> None:
    near, far = pair
    before = sorted(path.name for path in Path("/proc/self/fd").iterdir())
    sending = thread.submit(movers.send_file, near, source, 0, MIB)
    movers.receive_into_file(far, destination, 0, MIB)
    sending.result()
    assert sorted(path.name for path in Path("/proc/self/fd").iterdir()) == before


def test_a_part_of_a_file_arrives_in_its_place(
    pair: Pair, thread: ThreadPoolExecutor, source: int, destination: int
) -> None:
    near, far = pair
    sending = thread.submit(movers.send_file, near, source, 1001, MIB + 1)
    movers.receive_into_file(far, destination, 77, MIB + 1)
    sending.result()
    assert read(destination) == bytes(77) + DATA[1001 : 1001 + MIB + 1]


@pytest.mark.parametrize("count", [0, 1, len(DATA)])
def test_memory_arrives_as_it_was(pair: Pair, thread: ThreadPoolExecutor, count: int) -> None:
    near, far = pair
    arrived = bytearray(count)
    sending = thread.submit(movers.send_buffer, near, memoryview(DATA)[:count])
    movers.receive_into_buffer(far, memoryview(arrived))
    sending.result()
    assert arrived == DATA[:count]


def test_memory_of_wide_items_arrives_whole(thread: ThreadPoolExecutor) -> None:
    arrived = bytearray(80)
    with tcp_pair() as (near, far):
        thread.submit(movers.send_buffer, near, memoryview(DATA[:80]).cast("d")).result()
        movers.receive_into_buffer(far, memoryview(arrived).cast("d"))
    assert arrived == DATA[:80]


def test_bytes_after_the_count_stay_unread(pair: Pair, destination: int) -> None:
    near, far = pair
    near.sendall(DATA[:1000] + b"next")
    movers.receive_into_file(far, destination, 0, 1000)
    assert far.recv(100) == b"next"


def test_one_movement_follows_another_on_the_same_socket(
    pair: Pair, thread: ThreadPoolExecutor, source: int, destination: int
) -> None:
    near, far = pair
    for start, end in ((0, MIB), (MIB, len(DATA))):
        sending = thread.submit(movers.send_file, near, source, start, end - start)
        movers.receive_into_file(far, destination, start, end - start)
        sending.result()
    assert read(destination) == DATA


def test_progress_grows_to_the_count_at_both_ends(
    pair: Pair, thread: ThreadPoolExecutor, source: int, destination: int
) -> None:
    near, far = pair
    sent: list[int] = []
    received: list[int] = []
    sending = thread.submit(movers.send_file, near, source, 0, len(DATA), progress=sent.append)
    movers.receive_into_file(far, destination, 0, len(DATA), progress=received.append)
    sending.result()
    for told in (sent, received):
        assert told == sorted(set(told))
        assert told[-1] == len(DATA)


def test_a_sender_that_closes_half_way_is_truncated_and_says_where(pair: Pair, destination: int) -> None:
    near, far = pair
    near.sendall(DATA[:1000])
    near.close()
    with pytest.raises(Unavailable, match="1000 of 3000 bytes") as raised:
        movers.receive_into_file(far, destination, 0, 3000)
    assert raised.value.code == "bulk_truncated"
    assert read(destination) == DATA[:1000]


def test_a_sender_that_closes_half_way_truncates_memory_too(pair: Pair) -> None:
    near, far = pair
    near.sendall(DATA[:1000])
    near.close()
    with pytest.raises(Unavailable, match="1000 of 3000 bytes") as raised:
        movers.receive_into_buffer(far, memoryview(bytearray(3000)))
    assert raised.value.code == "bulk_truncated"


def test_stalled_sender_times_out(pair: Pair, destination: int) -> None:
    near, far = pair
    near.sendall(DATA[:1000])
    receive = partial(movers.receive_into_file, far, destination, 0, 3000, stall_timeout_s=STALL_S)
    assert code_of(receive) == "bulk_stalled"


def test_sender_that_never_starts_times_out(pair: Pair) -> None:
    _, far = pair
    receive = partial(movers.receive_into_buffer, far, memoryview(bytearray(10)), stall_timeout_s=STALL_S)
    assert code_of(receive) == "bulk_stalled"


@pytest.mark.parametrize("from_file", [True, False])
def test_receiver_that_does_not_read_times_out(pair: Pair, tmp_path: Path, from_file: bool) -> None:
    near, _ = pair
    (tmp_path / "endless").touch()
    os.truncate(tmp_path / "endless", 64 * MIB)
    with (tmp_path / "endless").open("rb") as file:
        send = (
            partial(movers.send_file, near, file.fileno(), 0, 64 * MIB, stall_timeout_s=STALL_S)
            if from_file
            else partial(movers.send_buffer, near, memoryview(bytes(64 * MIB)), stall_timeout_s=STALL_S)
        )
        assert code_of(send) == "bulk_stalled"


def test_a_receiver_that_closes_half_way_is_truncated(pair: Pair, thread: ThreadPoolExecutor) -> None:
    near, far = pair
    sending = thread.submit(movers.send_buffer, near, memoryview(bytes(64 * MIB)))
    movers.receive_into_buffer(far, memoryview(bytearray(MIB)))
    far.close()
    assert code_of(sending.result) == "bulk_truncated"


def test_a_connection_that_was_gone_before_is_truncated(pair: Pair, source: int) -> None:
    near, far = pair
    socket.socket.shutdown(near, socket.SHUT_RDWR)
    far.close()
    with pytest.raises(Unavailable, match="0 of 10 bytes") as raised:
        movers.send_file(near, source, 0, 10)
    assert raised.value.code == "bulk_truncated"


def test_tls_that_is_tampered_with_is_the_peers_fault(certificates: Certificates, destination: int) -> None:
    with tls_pair(certificates) as (near, far):
        socket.socket.sendall(near, b"\x17\x03\x03\x00\x20" + bytes(32))
        with pytest.raises(ForgedError) as raised:
            movers.receive_into_file(far, destination, 0, 10)
    assert (raised.value.kind, raised.value.code) == ("peer", "tls_failed")


def test_full_disk_raises_and_leaves_the_rest_unread(pair: Pair) -> None:
    near, far = pair
    near.sendall(DATA[:1000] + b"rest")
    with Path("/dev/full").open("r+b", buffering=0) as full:
        receive = partial(movers.receive_into_file, far, full.fileno(), 0, 1000)
        assert code_of(receive) == "disk_full"
    assert far.recv(100) == b"rest"


def test_unwritable_file_raises_bulk_failed(pair: Pair, source: int) -> None:
    near, far = pair
    near.sendall(DATA[:1000])
    assert code_of(partial(movers.receive_into_file, far, source, 0, 1000)) == "bulk_failed"


def test_source_shorter_than_announced_raises(
    pair: Pair, thread: ThreadPoolExecutor, source: int, destination: int
) -> None:
    near, far = pair
    receiving = thread.submit(movers.receive_into_file, far, destination, 0, len(DATA) + 1)
    with pytest.raises(Unavailable, match=f"{len(DATA)} of {len(DATA) + 1} bytes") as raised:
        movers.send_file(near, source, 0, len(DATA) + 1)
    assert raised.value.code == "bulk_source_short"
    near.close()
    assert code_of(receiving.result) == "bulk_truncated"


def test_datagrams_are_refused(source: int) -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as sock, pytest.raises(RequestRefused) as raised:
        movers.send_file(sock, source, 0, 10)
    assert raised.value.code == "bulk_socket_invalid"


@pytest.mark.parametrize("timeout_s", [None, 0.0, 5.0])
def test_a_socket_is_afterwards_as_it_was(pair: Pair, timeout_s: float | None) -> None:
    near, far = pair
    near.sendall(DATA[:10])
    far.settimeout(timeout_s)
    before = options(far)
    movers.receive_into_buffer(far, memoryview(bytearray(10)))
    assert far.gettimeout() == timeout_s
    assert options(far) == before


def test_kernel_user_timeout_is_twice_the_stall_timeout() -> None:
    seen: list[int] = []
    with tcp_pair() as (near, _):
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 2000)

        def look(_moved: int) -> None:
            seen.append(near.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))

        movers.send_buffer(near, memoryview(DATA[:10]), stall_timeout_s=12.5, progress=look)
        assert seen == [25000]
        assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 2000


async def test_a_mover_runs_in_a_thread_and_its_result_comes_back() -> None:
    def mover(sock: socket.socket) -> tuple[socket.socket, int]:
        return sock, threading.get_ident()

    with unix_pair() as (near, _):
        sock, ident = await movers.run(mover, near)
        assert sock is near
    assert ident != threading.get_ident()


async def test_the_error_of_a_mover_comes_back_as_it_is() -> None:
    with unix_pair() as (near, far):
        far.close()
        with pytest.raises(Unavailable) as raised:
            await movers.run(lambda sock: movers.receive_into_buffer(sock, memoryview(bytearray(10))), near)
    assert raised.value.code == "bulk_truncated"


async def test_system_error_of_a_mover_is_unavailable() -> None:
    def mover(sock: socket.socket) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with unix_pair() as (near, _), pytest.raises(Unavailable, match="Too many open files") as raised:
        await movers.run(mover, near)
    assert raised.value.code == "bulk_failed"


def test_a_receive_that_gets_no_pipe_is_unavailable(destination: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> tuple[int, int]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with unix_pair() as (near, _):
        monkeypatch.setattr(os, "pipe", refuse)
        with pytest.raises(Unavailable, match="Too many open files"):
            movers.receive_into_file(near, destination, 0, 1)


async def test_a_thread_that_does_not_start_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(to_thread, "run_sync", refuse)
    with unix_pair() as (near, _), pytest.raises(Unavailable, match="new thread") as raised:
        await movers.run(lambda sock: None, near)
    assert raised.value.code == "bulk_no_thread"


async def test_unexpected_exception_of_a_mover_is_raised_unchanged() -> None:
    def mover(sock: socket.socket) -> None:
        raise RuntimeError("a mistake")

    with unix_pair() as (near, _), pytest.raises(RuntimeError, match="a mistake"):
        await movers.run(mover, near)


class Watched:
    """A running receive, and whether its thread has ended."""

    def __init__(self, destination: int, on_start: Callable[[], None] = lambda: None) -> None:
        self.started = asyncio.Event()
        self.error: Future[ForgedError] = Future()
        self._destination = destination
        self._on_start = on_start
        self._loop = asyncio.get_running_loop()

    def __call__(self, sock: socket.socket) -> None:
        try:
            movers.receive_into_file(
                sock, self._destination, 0, len(DATA), stall_timeout_s=PATIENCE_S, progress=self._start
            )
        except ForgedError as error:
            self.error.set_result(error)
            raise

    def _start(self, _moved: int) -> None:
        self._loop.call_soon_threadsafe(self.started.set)
        self._loop.call_soon_threadsafe(self._on_start)


def first_bytes(sock: socket.socket) -> None:
    """Receive part of the bytes, but more than one TLS write."""
    with suppress(OSError):
        sock.sendall(DATA[: movers.BUFFER_BYTES])


async def test_a_cancelled_scope_ends_the_thread_before_it_is_left(
    pair: Pair, thread: ThreadPoolExecutor, destination: int
) -> None:
    near, far = pair
    watched = Watched(destination)
    sending = thread.submit(first_bytes, near)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(movers.run, watched, far)
        await watched.started.wait()
        await asyncio.wrap_future(sending)
        tasks.cancel_scope.cancel()
    assert watched.error.done()


async def test_a_cancelled_task_ends_the_thread_before_it_is_done(
    pair: Pair, thread: ThreadPoolExecutor, destination: int
) -> None:
    near, far = pair
    watched = Watched(destination)
    sending = thread.submit(first_bytes, near)
    task = asyncio.get_running_loop().create_task(movers.run(watched, far))
    await watched.started.wait()
    await asyncio.wrap_future(sending)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert watched.error.done()


async def test_a_timeout_ends_the_thread(pair: Pair, thread: ThreadPoolExecutor, destination: int) -> None:
    near, far = pair
    sending = thread.submit(first_bytes, near)
    timeout = asyncio.timeout(None)
    watched = Watched(destination, partial(timeout.reschedule, 0))
    with pytest.raises(TimeoutError):
        async with timeout:
            await movers.run(watched, far)
    sending.result()
    assert watched.error.done()


async def test_a_cancelled_receive_has_written_nothing_that_was_not_sent(
    certificates: Certificates, thread: ThreadPoolExecutor, destination: int
) -> None:
    with tls_pair(certificates) as (near, far):
        watched = Watched(destination)
        sending = thread.submit(near.sendall, DATA[:-1])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(movers.run, watched, far)
            await watched.started.wait()
            tasks.cancel_scope.cancel()
        far.close()
        assert isinstance(sending.exception(), OSError | None)
    assert DATA.startswith(read(destination))


async def test_a_cancelled_movement_leaves_a_connection_that_is_over(destination: int) -> None:
    with unix_pair() as (near, far):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(STALL_S):
                await movers.run(Watched(destination), far)
        assert near.recv(1) == b""


async def test_movers_over_the_limit_wait_and_a_waiting_one_can_be_cancelled(destination: int) -> None:
    limiter = anyio.CapacityLimiter(1)
    ran: list[socket.socket] = []
    with unix_pair() as (near, far), unix_pair() as (other, _):
        watched = Watched(destination)
        near.sendall(b"x")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(movers.run, limiter=limiter), watched, far)
            await watched.started.wait()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(STALL_S):
                    await movers.run(ran.append, other, limiter=limiter)
            tasks.cancel_scope.cancel()
    assert ran == []


def options(sock: socket.socket) -> list[int | bytes]:
    plain = not isinstance(sock, ssl.SSLSocket)
    found: list[int | bytes] = [
        sock.getsockopt(socket.SOL_SOCKET, option, movers.TIMEVAL.size)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO)
        if plain
    ]
    if sock.family == socket.AF_INET:
        found.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    return found
