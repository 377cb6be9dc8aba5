from __future__ import annotations

from collections.abc import Callable

import pytest

from forged.net.transport.connection import MESSAGES_PER_TURN
from forged.net.turns import MESSAGES_AT_ONCE, Turns
from forged.shares import Holder


class Loop:
    """Runs scheduled calls, one turn at a time."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def turn(self) -> None:
        calls, self.calls = self.calls, []
        for call in calls:
            call()


class FakeConnection:
    """Processes messages as far as its quota goes, like a session."""

    def __init__(self, turns: Turns, name: str, messages: int, *, group: str = "", is_operator: bool = False) -> None:
        self.holder = Holder(group or name, name, is_operator)
        self.left = messages
        self.processed: list[int] = []
        self._turns = turns

    def work(self) -> None:
        quota = self._turns.quota(self) if self.left else 0
        done = min(quota, self.left)
        self.left -= done
        self._turns.spend(self, done)
        if done:
            self.processed.append(done)
        if self.left and 0 < quota == done:
            self._turns.wait(self)


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def turns(loop: Loop) -> Turns:
    return Turns(loop.calls.append)


def test_connection_alone_uses_the_whole_turn(turns: Turns, loop: Loop) -> None:
    alone = FakeConnection(turns, "a", 2 * MESSAGES_PER_TURN)
    alone.work()
    assert sum(alone.processed) == MESSAGES_PER_TURN
    loop.turn()
    assert alone.left == 0


def test_connections_of_one_job_share_its_turn_and_take_turns(turns: Turns, loop: Loop) -> None:
    many = [FakeConnection(turns, f"token {number % 3}", 10_000, group="job a") for number in range(20)]
    other = FakeConnection(turns, "b", MESSAGES_PER_TURN)
    for connection in (*many, other):
        connection.work()
    assert sum(sum(connection.processed) for connection in many) == MESSAGES_PER_TURN
    assert other.left == 0
    before = [connection.left for connection in many]
    for _ in range(20 * MESSAGES_AT_ONCE // MESSAGES_PER_TURN + 1):
        loop.turn()
    assert all(connection.left < left for connection, left in zip(many, before, strict=True))


def test_operators_are_not_limited_by_other_operators(turns: Turns) -> None:
    operators = [FakeConnection(turns, "root", MESSAGES_PER_TURN, is_operator=True) for _ in range(3)]
    for connection in operators:
        connection.work()
    assert [connection.left for connection in operators] == [0, 0, 0]


def test_everything_is_processed_in_the_end_and_nothing_stays_scheduled(turns: Turns, loop: Loop) -> None:
    many = [FakeConnection(turns, str(number % 4), 100 * number) for number in range(12)]
    for connection in many:
        connection.work()
    for _ in range(100):
        loop.turn()
    assert not any(connection.left for connection in many)
    assert loop.calls == []
