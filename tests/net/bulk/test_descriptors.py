from __future__ import annotations

import array
import os
import resource
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from forged.errors import ForgedError, PeerError, RequestRefused, Unavailable
from forged.net.bulk import descriptors
from forged.net.bulk.descriptors import (
    DESCRIPTORS_MAX,
    HEADER,
    MAGIC,
    MARKER,
    receive_descriptors,
    send_descriptors,
)

Pair = tuple[socket.socket, socket.socket]

TIMEOUT_S = 0.05


@pytest.fixture
def pair() -> Iterator[Pair]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    before = open_memory_files()
    yield
    assert open_memory_files() == before


def open_memory_files() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir() if target(entry).startswith("/memfd:")}


def target(entry: Path) -> str:
    try:
        return str(entry.readlink())
    except FileNotFoundError:
        return ""


@contextmanager
def memory_files(count: int) -> Iterator[list[int]]:
    with ExitStack() as stack:
        yield [stack.enter_context(os.fdopen(os.memfd_create(str(n)), "r+b")).fileno() for n in range(count)]


def names(received: Sequence[int]) -> list[str]:
    """The files of the descriptors, which are closed."""
    found = [target(Path(f"/proc/self/fd/{descriptor}")).split()[0] for descriptor in received]
    for descriptor in received:
        os.close(descriptor)
    return found


def attach(sock: socket.socket, data: bytes, sent: Sequence[int]) -> None:
    sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", sent))])


def failure(sock: socket.socket) -> ForgedError:
    with pytest.raises(ForgedError) as raised:
        receive_descriptors(sock)
    return raised.value


@pytest.mark.parametrize("count", [1, 2, DESCRIPTORS_MAX])
def test_descriptors_arrive_in_order(pair: Pair, count: int) -> None:
    near, far = pair
    with memory_files(count) as sent:
        send_descriptors(near, sent)
        assert names(receive_descriptors(far)) == [f"/memfd:{n}" for n in range(count)]


def test_the_senders_descriptors_stay_open(pair: Pair) -> None:
    near, far = pair
    with memory_files(1) as sent:
        send_descriptors(near, sent)
        names(receive_descriptors(far))
        os.fstat(sent[0])


def test_received_descriptors_are_closed_on_exec(pair: Pair) -> None:
    near, far = pair
    with memory_files(2) as sent:
        os.set_inheritable(sent[0], True)
        send_descriptors(near, sent)
        received = receive_descriptors(far)
        assert not any(map(os.get_inheritable, received))
        names(received)


def test_bytes_before_and_after_stay_where_they_belong(pair: Pair) -> None:
    near, far = pair
    with memory_files(1) as sent:
        near.sendall(b"before")
        send_descriptors(near, sent)
        near.sendall(b"after")
        assert far.recv(len(b"before")) == b"before"
        assert names(receive_descriptors(far)) == ["/memfd:0"]
        far.settimeout(None)
        assert far.recv(100) == b"after"


def test_several_handovers_follow_each_other(pair: Pair) -> None:
    near, far = pair
    with memory_files(3) as sent:
        send_descriptors(near, sent[:1])
        send_descriptors(near, sent[1:])
        assert names(receive_descriptors(far)) == ["/memfd:0"]
        assert names(receive_descriptors(far)) == ["/memfd:1", "/memfd:2"]


def test_a_plain_receive_of_the_header_leaves_the_descriptors(pair: Pair) -> None:
    near, far = pair
    with memory_files(1) as sent:
        send_descriptors(near, sent)
        assert HEADER.unpack(far.recv(HEADER.size)) == (MAGIC, 1)
        _, received, _, _ = socket.recv_fds(far, 1, 1)
        assert names(received) == ["/memfd:0"]


def test_receive_waits_for_late_descriptors_and_a_header_in_pieces(pair: Pair) -> None:
    near, far = pair
    with ThreadPoolExecutor(1) as thread, memory_files(1) as sent:
        receiving = thread.submit(receive_descriptors, far)
        for part in struct.unpack("6c", HEADER.pack(MAGIC, 1)):
            near.sendall(part)
        attach(near, MARKER, sent)
        assert names(receiving.result()) == ["/memfd:0"]


def test_a_sender_that_closes_before_the_header_is_truncated(pair: Pair) -> None:
    near, far = pair
    near.close()
    assert failure(far).code == "descriptors_truncated"


def test_a_sender_that_closes_in_the_header_is_truncated(pair: Pair) -> None:
    near, far = pair
    near.sendall(MAGIC)
    near.close()
    assert failure(far).code == "descriptors_truncated"


def test_a_sender_that_closes_after_the_header_is_truncated(pair: Pair) -> None:
    near, far = pair
    near.sendall(HEADER.pack(MAGIC, 1))
    near.close()
    assert failure(far).code == "descriptors_truncated"


def test_stalled_sender_times_out(pair: Pair) -> None:
    near, far = pair
    near.sendall(HEADER.pack(MAGIC, 1))
    far.settimeout(TIMEOUT_S)
    with pytest.raises(Unavailable) as raised:
        receive_descriptors(far)
    assert raised.value.code == "descriptors_stalled"


def test_other_bytes_in_the_place_of_the_header_are_the_peers_fault(pair: Pair) -> None:
    near, far = pair
    near.sendall(b"hello there")
    error = failure(far)
    assert (type(error), error.code) == (PeerError, "descriptors_header")


@pytest.mark.parametrize("count", [0, DESCRIPTORS_MAX + 1, 0xFFFF])
def test_a_count_out_of_bounds_is_the_peers_fault_and_nothing_is_taken(pair: Pair, count: int) -> None:
    near, far = pair
    with memory_files(3) as sent:
        near.sendall(HEADER.pack(MAGIC, count))
        attach(near, MARKER, sent)
        error = failure(far)
    assert (type(error), error.code) == (PeerError, "descriptors_too_many")


def test_the_receivers_own_limit_holds(pair: Pair) -> None:
    near, far = pair
    with memory_files(3) as sent:
        send_descriptors(near, sent)
        with pytest.raises(PeerError, match=r"allowed are 1\.\.2") as raised:
            receive_descriptors(far, descriptors_max=2)
    assert raised.value.code == "descriptors_too_many"


@pytest.mark.parametrize(("announced", "sent_count"), [(1, 2), (2, 3), (1, 100)])
def test_more_descriptors_than_announced_are_the_peers_fault_and_all_are_closed(
    pair: Pair, announced: int, sent_count: int
) -> None:
    near, far = pair
    with memory_files(sent_count) as sent:
        near.sendall(HEADER.pack(MAGIC, announced))
        attach(near, MARKER, sent)
        error = failure(far)
    assert (type(error), error.code) == (PeerError, "descriptors_too_many")


def test_fewer_descriptors_than_announced_are_the_peers_fault_and_all_are_closed(pair: Pair) -> None:
    near, far = pair
    with memory_files(1) as sent:
        near.sendall(HEADER.pack(MAGIC, 2))
        attach(near, MARKER, sent)
        error = failure(far)
    assert (type(error), error.code) == (PeerError, "descriptors_missing")


def test_descriptors_on_the_header_are_not_taken(pair: Pair) -> None:
    near, far = pair
    with memory_files(1) as sent:
        attach(near, HEADER.pack(MAGIC, 1), sent)
        near.sendall(MARKER)
        error = failure(far)
    assert (type(error), error.code) == (PeerError, "descriptors_missing")


def test_exhausted_descriptors_raise_and_received_ones_are_closed(pair: Pair) -> None:
    near, far = pair
    with memory_files(4) as sent:
        send_descriptors(near, sent)
        with descriptors_left(2):
            error = failure(far)
    assert (type(error), error.code) == (Unavailable, "descriptors_exhausted")
    assert "2 of 4" in str(error)


@pytest.mark.parametrize("count", [0, DESCRIPTORS_MAX + 1])
def test_a_count_that_cannot_travel_is_refused_before_anything_is_sent(pair: Pair, count: int) -> None:
    near, far = pair
    with memory_files(count) as sent, pytest.raises(RequestRefused) as raised:
        send_descriptors(near, sent)
    assert raised.value.code == "descriptors_count"
    assert nothing_came(far)


def test_a_closed_descriptor_is_refused_before_anything_is_sent(pair: Pair) -> None:
    near, far = pair
    with memory_files(1) as sent:
        closed = os.dup(sent[0])
        os.close(closed)
        with pytest.raises(RequestRefused, match=str(closed)) as raised:
            send_descriptors(near, [*sent, closed])
    assert raised.value.code == "descriptor_invalid"
    assert nothing_came(far)


def test_send_to_a_closed_receiver_raises(pair: Pair) -> None:
    near, far = pair
    far.close()
    with memory_files(1) as sent, pytest.raises(Unavailable) as raised:
        send_descriptors(near, sent)
    assert raised.value.code == "descriptors_failed"


def internet() -> socket.socket:
    return socket.socket()


def datagrams() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)


def packets() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@pytest.mark.parametrize("make", [internet, datagrams, packets])
@pytest.mark.parametrize("movement", [partial(send_descriptors, descriptors=[0]), receive_descriptors])
def test_sockets_of_another_kind_are_refused(make: Callable[[], socket.socket], movement: Any) -> None:
    with make() as sock, pytest.raises(RequestRefused) as raised:
        movement(sock)
    assert raised.value.code == "descriptors_socket_invalid"


def test_the_limit_is_one_that_the_kernel_allows() -> None:
    assert descriptors.DESCRIPTORS_MAX <= 253


def nothing_came(sock: socket.socket) -> bool:
    sock.settimeout(0)
    try:
        return not sock.recv(1)
    except BlockingIOError:
        return True


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Limit the number of further descriptors of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.dup(0) for _ in range(64)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 1, hard))
    for descriptor in taken[-count:]:
        os.close(descriptor)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken[:-count]:
            os.close(descriptor)
