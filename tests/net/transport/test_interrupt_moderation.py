from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from selectors import EVENT_READ, EVENT_WRITE

import pytest

from forged.net.transport.interrupt_moderation import (
    IDLE_MIN_S,
    POLL_INTERVAL_S,
    WAKES_MAX,
    WAKES_WITHIN_S,
    ModeratingSelector,
)
from forged.net.transport.port import Address, Scheme
from forged.net.transport.sockets import SystemNetwork
from tests.net.recording_connections import Certificates, RecordingConnections

A_WHILE_S = 1.01 * IDLE_MIN_S
AT_LAST_S = 1.01 * POLL_INTERVAL_S


class Time:
    """A clock that stands still."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def go_on(self, seconds: float) -> None:
        self.now += seconds


class Pair:
    """A connection with both connections."""

    def __init__(self, there: socket.socket, here: socket.socket) -> None:
        self.there, self.here = there, here

    @property
    def fd(self) -> int:
        return self.here.fileno()

    def say(self) -> None:
        self.there.send(b"x")

    def listen(self) -> None:
        assert self.here.recv(1) == b"x"


class Connections:
    """Connections registered with a selector that uses a test clock."""

    def __init__(self, stack: ExitStack) -> None:
        self.time = Time()
        self.selector = ModeratingSelector(self.time)
        self._stack = stack
        stack.callback(self.selector.close)
        self.door = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

    def line(self) -> Pair:
        """A registered TCP connection without data."""
        line = self.unwatched()
        self.selector.register(line.fd, EVENT_READ)
        return line

    def unwatched(self) -> Pair:
        there = self._stack.enter_context(socket.create_connection(self.door.getsockname()))
        here = self._stack.enter_context(self.door.accept()[0])
        return Pair(there, here)

    def pair(self) -> Pair:
        """A registered socket pair."""
        there, here = (self._stack.enter_context(end) for end in socket.socketpair())
        self.selector.register(here.fileno(), EVENT_READ)
        return Pair(there, here)

    def heard(self) -> set[int]:
        """The ready connections, without waiting."""
        return {key.fd for key, _ in self.selector.select(0)}

    def hears(self, line: Pair) -> bool:
        """Send on a connection; returns whether the selector reports it at once."""
        line.say()
        if self.heard() != {line.fd}:
            return False
        line.listen()
        return True

    def resting(self, count: int) -> list[Pair]:
        """Idle connections."""
        lines = [self.line() for _ in range(count)]
        self.time.go_on(A_WHILE_S)
        assert all(self.hears(line) for line in lines)
        self.time.go_on(A_WHILE_S)
        return lines

    def exhaust(self, lines: list[Pair]) -> None:
        """Cause the allowed number of wake-ups in the shortest time."""
        self.time.go_on(WAKES_WITHIN_S)
        assert self.heard() == set()
        for wake in range(WAKES_MAX):
            assert self.hears(lines[wake % len(lines)])
            self.time.go_on(A_WHILE_S / len(lines))


@pytest.fixture
def board() -> Iterator[Connections]:
    with ExitStack() as stack:
        yield Connections(stack)


MANY = 8
"""Enough idle connections to exceed the wake-up limit together."""
assert WAKES_MAX * A_WHILE_S / (MANY - 1) < WAKES_WITHIN_S


def test_idle_connection_is_reported_at_once_while_wake_ups_are_rare(board: Connections) -> None:
    (one,) = board.resting(1)
    for _ in range(3 * WAKES_MAX):
        assert board.hears(one)
        board.time.go_on(A_WHILE_S)


def test_idle_connections_are_delayed_after_too_many_wake_ups(board: Connections) -> None:
    lines = board.resting(MANY)
    board.exhaust(lines)
    assert not board.hears(lines[0])


def test_delayed_connections_are_reported_together(board: Connections) -> None:
    lines = board.resting(MANY)
    board.exhaust(lines)
    for line in lines:
        line.say()
    assert board.heard() == set()
    board.time.go_on(AT_LAST_S)
    assert board.heard() == {line.fd for line in lines}


def test_delay_is_bounded_even_if_the_loop_would_sleep(board: Connections) -> None:
    board.exhaust(board.resting(MANY))
    assert board.selector.select(None) == []


def test_delay_continues_when_several_connections_were_ready(board: Connections) -> None:
    lines = board.resting(MANY)
    board.exhaust(lines)
    board.time.go_on(A_WHILE_S)
    for line in lines[1:]:
        line.say()
    for line in lines[1:] if board.heard() else ():
        line.listen()
    assert not board.hears(lines[0])


def test_delay_ends_when_few_connections_were_ready(board: Connections) -> None:
    one, other, *more = board.resting(MANY)
    board.exhaust([one, other, *more])
    board.time.go_on(A_WHILE_S)
    assert board.hears(one)
    assert board.hears(other)


def test_busy_connection_is_not_delayed(board: Connections) -> None:
    talker, *lines = board.resting(MANY)
    for _ in range(3):
        assert board.hears(talker)
    board.exhaust(lines)
    assert board.hears(talker)


def test_busy_connection_becomes_idle_after_a_while(board: Connections) -> None:
    talker, *lines = board.resting(MANY)
    for silence_s in (0, 0, A_WHILE_S):
        board.time.go_on(silence_s)
        assert board.hears(talker)
    board.exhaust(lines)
    assert not board.hears(talker)


def test_new_connection_is_not_delayed(board: Connections) -> None:
    lines = board.resting(MANY)
    board.exhaust(lines)
    assert board.hears(board.line())


def test_local_descriptor_is_never_delayed(board: Connections) -> None:
    """Like the self-pipe of an event loop."""
    pair = board.pair()
    lines = board.resting(MANY)
    assert board.hears(pair)
    board.exhaust(lines)
    assert board.hears(pair)


def test_listening_socket_is_never_delayed(board: Connections) -> None:
    lines = board.resting(MANY)
    board.selector.register(board.door.fileno(), EVENT_READ)
    for _ in range(2):
        board.exhaust(lines)
        with socket.create_connection(board.door.getsockname()):
            assert board.heard() == {board.door.fileno()}
        board.door.accept()[0].close()


def test_connection_waiting_to_write_is_not_idle(board: Connections) -> None:
    one, *lines = board.resting(MANY)
    board.exhaust(lines)
    board.selector.modify(one.fd, EVENT_READ | EVENT_WRITE)
    for line in lines:
        line.say()
    board.time.go_on(A_WHILE_S)
    assert one.fd in board.heard()
    assert board.heard() == {one.fd}


def test_modified_registration_returns_its_latest_data(board: Connections) -> None:
    (one,) = board.resting(1)
    board.selector.modify(one.fd, EVENT_READ, "new")
    one.say()
    assert [key.data for key, _ in board.selector.select(0)] == ["new"]


def test_end_of_an_idle_connection_is_reported(board: Connections) -> None:
    (one,) = board.resting(1)
    one.there.close()
    assert board.heard() == {one.fd}


def test_unregistered_connection_is_not_reported(board: Connections) -> None:
    (one,) = board.resting(1)
    assert one.fd in board.selector.get_map()
    board.selector.unregister(one.fd)
    one.say()
    assert board.heard() == set()
    assert one.fd not in board.selector.get_map()
    with pytest.raises(KeyError):
        board.selector.unregister(one.fd)


def test_reused_descriptor_is_a_new_connection(board: Connections) -> None:
    lines = board.resting(MANY)
    gone, other = lines[0], board.unwatched()
    board.exhaust(lines[1:])
    board.selector.unregister(gone.fd)
    os.dup2(other.fd, gone.fd)
    board.selector.register(gone.fd, EVENT_READ)
    other.say()
    assert board.heard() == {gone.fd}


def test_a_number_that_was_left_behind_is_refused_as_by_other_selectors(board: Connections) -> None:
    one, other = *board.resting(1), board.unwatched()
    os.dup2(other.fd, one.fd)
    with pytest.raises(KeyError, match="already registered"):
        board.selector.register(one.fd, EVENT_READ)


@pytest.mark.parametrize("scheme", ["tcp", "tls", "unix"])
def test_event_loop_with_idle_connections_loses_no_data(
    scheme: Scheme, certificates: Certificates, tmp_path: Path
) -> None:
    hours = itertools.count(step=3600)
    network = SystemNetwork(tls_server=certificates.server(), tls_client=certificates.client())
    address = Address("unix", path=str(tmp_path / "s")) if scheme == "unix" else Address(scheme, host="127.0.0.1")

    async def talk() -> None:
        connections = RecordingConnections()
        listener = await connections.listen(network, address)
        near, far = await connections.connect(network, listener.address)
        words = b""
        for number in range(50):
            words += b"%d " % number
            near.open_transport.write(b"%d " % number)
            await far.hear(words)
            far.open_transport.write(b"%d " % number)
            await near.hear(words)
        assert await asyncio.to_thread(lambda: "from a thread") == "from a thread"
        await connections.close()

    # For this selector an hour passes between reads.
    selector = ModeratingSelector(lambda: float(next(hours)))
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        runner.run(talk())
