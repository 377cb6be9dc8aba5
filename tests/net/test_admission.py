from __future__ import annotations

import pytest

from forged.errors import ForgedError, Unavailable
from forged.net.admission import OPERATOR_RESERVE, SILENT_MIN_S, ConnectionTable, holder_before_hello
from forged.net.transport.port import Peer
from forged.shares import Holder

A, B = Holder("a", "a"), Holder("b", "b")
ROOT = Holder("unix:0", "unix:0", is_operator=True)


class FakeConnection:
    """Records why it was closed."""

    def __init__(self) -> None:
        self.error: ForgedError | None = None

    def fail(self, error: ForgedError) -> None:
        self.error = error


def opened(table: ConnectionTable, holder: Holder, count: int = 1, now: float = 0.0) -> list[FakeConnection]:
    made = [FakeConnection() for _ in range(count)]
    for connection in made:
        table.open(connection, holder, now)
    return made


def greeted(table: ConnectionTable, holder: Holder, count: int = 1) -> list[FakeConnection]:
    made = []
    for _ in range(count):
        made += opened(table, holder)
        table.greet(made[-1], holder)
    return made


def closed(connections: list[FakeConnection]) -> list[int]:
    return [place for place, connection in enumerate(connections) if connection.error is not None]


@pytest.mark.parametrize(
    ("peer", "name", "is_operator"),
    [
        (Peer("unix", "pid 7", uid=0), "unix:0", True),
        (Peer("unix", "pid 7", uid=5), "unix:5", False),
        (Peer("tcp", "10.0.0.7:4000"), "10.0.0.7", False),
        (Peer("tcp", "127.0.0.1:4000", loopback=True, uid=5), "loopback:5", False),
        (Peer("tcp", "127.0.0.1:4000", loopback=True), "127.0.0.1", False),
        (Peer("tls", "[2001:db8:1:2:3::4]:4000"), "2001:db8:1:2::/64", False),
        (Peer("tcp", "unknown"), "", False),
    ],
)
def test_holder_before_the_hello_is_the_user_or_the_network(peer: Peer, name: str, is_operator: bool) -> None:
    assert holder_before_hello(peer, lambda peer: peer.uid == 0) == Holder(name, name, is_operator)


def test_hello_moves_a_connection_from_its_address_to_its_principal() -> None:
    table = ConnectionTable(1, handshakes_max=2)
    (connection,) = opened(table, A)
    table.greet(connection, B)
    opened(table, A)
    with pytest.raises(Unavailable, match="connections: b uses 1 of 1"):
        greeted(table, B)


def test_closed_connection_returns_its_share_once() -> None:
    table = ConnectionTable(1, handshakes_max=1)
    (connection,) = greeted(table, A)
    for _ in range(2):
        table.close(connection)
    greeted(table, A)
    with pytest.raises(Unavailable):
        greeted(table, A)


def test_connections_without_a_hello_take_no_room_of_greeted_ones() -> None:
    table = ConnectionTable(2, handshakes_max=2)
    opened(table, A, 1)
    greeted(table, B, 2)


def test_displaced_connections_are_the_newest_of_the_largest_principal() -> None:
    table = ConnectionTable(6)
    many = greeted(table, A, 6)
    greeted(table, B, 3)
    assert closed(many) == [3, 4, 5]
    with pytest.raises(Unavailable, match="b uses 3 of 6"):
        greeted(table, B)


def test_operators_have_their_reserve_and_are_never_displaced() -> None:
    table = ConnectionTable(2)
    greeted(table, A, 2)
    operators = greeted(table, ROOT, OPERATOR_RESERVE)
    with pytest.raises(Unavailable, match="limit 18"):
        greeted(table, ROOT)
    greeted(table, B)
    assert closed(operators) == []


def test_new_address_displaces_the_oldest_silent_connection_of_the_largest() -> None:
    table = ConnectionTable(9, handshakes_max=4)
    many = opened(table, A, 4)
    opened(table, B, 2)
    assert closed(many) == [0, 1]


def test_address_over_its_share_is_refused_until_its_oldest_connection_was_silent_for_a_while() -> None:
    table = ConnectionTable(9, handshakes_max=2)
    silent = opened(table, A, 2)
    with pytest.raises(Unavailable, match="connections without a hello: a uses 2 of 2"):
        opened(table, A, now=SILENT_MIN_S / 2)
    opened(table, A, now=SILENT_MIN_S)
    assert closed(silent) == [0]


def test_reserve_before_the_hello_is_for_operators() -> None:
    table = ConnectionTable(9, handshakes_max=1)
    opened(table, A)
    opened(table, ROOT, OPERATOR_RESERVE)
    with pytest.raises(Unavailable):
        opened(table, ROOT)
