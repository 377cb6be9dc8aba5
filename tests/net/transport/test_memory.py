from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from forged.errors import ForgedError
from forged.net.transport.memory import Memory, MemoryLimits
from forged.shares import Holder

A, B = Holder("a", "a"), Holder("b", "b")
ROOT = Holder("root", "root", is_operator=True)
LIMITS = MemoryLimits(daemon_bytes_max=160, principal_bytes_max=100, connection_bytes_max=60)


class FakeConnection:
    """Records grants and its end; like a connection it leaves when it is closed."""

    def __init__(self, memory: Memory, holder: Holder) -> None:
        self.holder = holder
        self.grants: list[int] = []
        self.error: ForgedError | None = None
        self._memory = memory

    def granted(self, size: int) -> None:
        self.grants.append(size)

    def fail(self, error: ForgedError) -> None:
        self.error = error
        self._memory.leave(self)


@pytest.fixture
def memory() -> Memory:
    return Memory(LIMITS)


def test_grant_beyond_the_share_of_the_principal_waits_until_bytes_are_returned(memory: Memory) -> None:
    first, second = FakeConnection(memory, A), FakeConnection(memory, A)
    assert memory.grant(first, 60)
    assert not memory.grant(second, 60)
    assert memory.grant(FakeConnection(memory, B), 50)
    memory.give_back(first, 60)
    assert second.grants == [60]
    assert memory.used == 110


def test_waiting_grants_of_one_principal_are_served_in_order(memory: Memory) -> None:
    users = [FakeConnection(memory, A) for _ in range(3)]
    assert memory.grant(users[0], 90)
    assert not memory.grant(users[1], 50)
    assert not memory.grant(users[2], 5), "it would fit, and would overtake"
    memory.give_back(users[0], 50)
    assert [user.grants for user in users] == [[], [50], [5]]


def test_grant_within_the_fair_share_displaces_the_largest_connection_of_the_largest_principal(memory: Memory) -> None:
    small, large = FakeConnection(memory, A), FakeConnection(memory, A)
    assert memory.grant(small, 30)
    assert memory.grant(large, 50)
    assert memory.grant(FakeConnection(memory, B), 60)
    newcomer = FakeConnection(memory, Holder("c", "c"))
    assert memory.grant(newcomer, 40)
    assert small.error is None
    assert large.error is not None
    assert large.error.code == "memory_displaced"
    assert memory.used == 130


def test_operators_have_a_reserve(memory: Memory) -> None:
    for holder, size in ((A, 90), (B, 60)):
        assert memory.grant(FakeConnection(memory, holder), size)
    assert memory.grant(FakeConnection(memory, ROOT), 10)


def test_connection_that_ends_returns_its_bytes_and_its_place(memory: Memory) -> None:
    holding, waiting, last = (FakeConnection(memory, A) for _ in range(3))
    assert memory.grant(holding, 60)
    assert not memory.grant(waiting, 60)
    assert not memory.grant(last, 60)
    memory.leave(waiting)
    memory.leave(holding)
    assert (waiting.grants, last.grants) == ([], [60])
    assert memory.used == 60


@pytest.mark.parametrize(
    ("held", "others", "text"),
    [
        (60, 0, "this connection holds 60 bytes; limit 60"),
        (50, 50, "a uses 100; limit of one principal or job 100"),
    ],
)
def test_shortage_names_the_limit_of_the_connection_or_the_principal(
    memory: Memory, held: int, others: int, text: str
) -> None:
    user = FakeConnection(memory, A)
    assert memory.has_room(user)
    memory.charge(user, held)
    memory.charge(FakeConnection(memory, A), others)
    assert not memory.has_room(user)
    assert text in memory.shortage(user)


class Grants(RuleBasedStateMachine):
    """Connections of three holders ask for frames, receive them, and end."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory(LIMITS)
        self.users = [FakeConnection(self.memory, holder) for holder in (A, A, B, B, ROOT)]
        self.waiting: dict[int, int] = {}

    @rule(place=st.integers(0, 4), size=st.integers(1, 60))
    def ask(self, place: int, size: int) -> None:
        user = self.users[place]
        if place not in self.waiting and not self.memory.held_by(user) and not self.memory.grant(user, size):
            self.waiting[place] = size

    @rule(place=st.integers(0, 4))
    def finish(self, place: int) -> None:
        self.memory.give_back(self.users[place], self.memory.held_by(self.users[place]))

    @rule(place=st.integers(0, 4))
    def end(self, place: int) -> None:
        self.waiting.pop(place, None)
        self.memory.leave(self.users[place])

    @invariant()
    def limits_hold_and_no_grant_is_lost(self) -> None:
        for place in [place for place in self.waiting if self.users[place].grants]:
            assert self.users[place].grants.pop() == self.waiting.pop(place)
        held = [self.memory.held_by(user) for user in self.users]
        assert self.memory.used == sum(held) <= LIMITS.daemon_bytes_max
        assert max(sum(held[:2]), sum(held[2:4])) <= LIMITS.principal_bytes_max
        assert sum(held[:4]) <= LIMITS.daemon_bytes_max - LIMITS.daemon_bytes_max // 16

    def teardown(self) -> None:
        for _ in range(len(self.users)):
            for user in self.users:
                self.memory.give_back(user, self.memory.held_by(user))
        self.limits_hold_and_no_grant_is_lost()
        assert not self.waiting


TestGrants = Grants.TestCase
TestGrants.settings = settings(max_examples=60)
