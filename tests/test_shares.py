from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from forged.shares import Holder, Shares

A, B, C = (Holder(name, name) for name in "abc")
OPERATOR = Holder("root", "root", is_operator=True)
A1, A2, A3 = (Holder("job a", f"token {number}") for number in (1, 2, 3))


def shares(limit: int = 10, reserve: int = 2, each_max: int | None = None, **used: int) -> Shares:
    made = Shares("connections", limit, reserve, each_max)
    for name, amount in used.items():
        made.charge(OPERATOR if name == "operator" else Holder(name, name), amount)
    return made


@pytest.mark.parametrize(
    ("used", "holder", "amount", "fits"),
    [
        ({}, A, 8, True),
        ({}, A, 9, False),
        ({"a": 7}, A, 1, True),
        ({"a": 8}, A, 1, False),
        ({"a": 8}, B, 1, False),
        ({"a": 8}, OPERATOR, 2, True),
        ({"a": 8}, OPERATOR, 3, False),
        ({"a": 8, "operator": 2}, OPERATOR, 1, False),
        ({}, OPERATOR, 10, True),
        ({"operator": 10}, A, 1, False),
        ({"operator": 9}, A, 1, True),
    ],
)
def test_take_leaves_the_reserve_to_operators(used: dict[str, int], holder: Holder, amount: int, fits: bool) -> None:
    book = shares(**used)
    before = book.used
    assert book.fits(holder, amount) is book.take(holder, amount) is fits
    assert book.used == before + amount * fits


def test_limit_of_one_holder_counts_its_whole_group() -> None:
    book = shares(limit=100, each_max=5)
    assert book.take(A1, 3)
    assert book.take(A2, 2)
    assert not book.take(A3, 1)
    assert book.take(B, 5)
    assert book.take(OPERATOR, 50)


@pytest.mark.parametrize(
    ("used", "holder", "amount", "displaced"),
    [
        ({"a": 8}, B, 1, A),
        ({"a": 8}, B, 4, A),
        ({"a": 8}, B, 5, None),
        ({"a": 8}, A, 1, None),
        ({"a": 4, "b": 4}, B, 1, None),
        ({"a": 5, "b": 3}, B, 1, A),
        ({"a": 4, "b": 4}, C, 1, A),
        ({"a": 3, "b": 5}, C, 1, B),
        ({"a": 8}, OPERATOR, 3, None),
        ({"operator": 10}, A, 1, None),
        ({"operator": 8, "b": 2}, A, 1, None),
    ],
)
def test_holder_below_its_fair_share_displaces_the_largest(
    used: dict[str, int], holder: Holder, amount: int, displaced: Holder | None
) -> None:
    assert shares(**used).to_displace(holder, amount) == displaced


def test_job_with_many_tokens_has_the_share_of_one_group() -> None:
    book = shares(limit=9, reserve=0)
    for token in (A1, A2, A3):
        book.charge(token, 3)
    assert book.to_displace(B) == A1
    book.give_back(A1, 3)
    book.charge(B, 3)
    assert book.to_displace(A1) in (A2, A3)
    book.charge(B, 2)
    book.give_back(A2, 2)
    assert book.to_displace(B) is None


def test_principals_of_one_group_share_it_evenly() -> None:
    book = shares(limit=8, reserve=0)
    book.charge(A1, 8)
    assert book.to_displace(A2) == A1
    book.give_back(A1, 4)
    book.charge(A2, 4)
    assert book.to_displace(A2) is None


@pytest.mark.parametrize(
    ("used", "each_max", "holder", "text"),
    [
        ({"a": 8}, None, B, "connections: b uses 0 of 8 in use; limit 8, and 2 for operators"),
        ({"a": 5}, 5, A, "connections: a uses 5; limit of one principal or job 5"),
        ({"a": 8, "operator": 2}, None, OPERATOR, "connections: 10 in use; limit 10"),
    ],
)
def test_shortage_names_the_limit_and_whose_share_it_is(
    used: dict[str, int], each_max: int | None, holder: Holder, text: str
) -> None:
    assert shares(each_max=each_max, **used).shortage(holder) == text


def test_shortage_of_a_token_names_its_job() -> None:
    assert "token 1 (job a) uses 0" in shares().shortage(A1)


def test_unused_holders_are_forgotten() -> None:
    book = shares()
    for number in range(1000):
        holder = Holder(str(number), str(number))
        assert book.take(holder)
        book.give_back(holder)
    assert book.holders == book.used == 0


def test_resize_keeps_shares_in_use() -> None:
    book = shares(a=8)
    book.resize(4, 1)
    assert book.of(A) == 8
    assert not book.take(A)
    book.give_back(A, 7)
    assert book.take(A)


AMOUNTS = st.integers(1, 5)


class SharesMachine(RuleBasedStateMachine):
    """Random takes, returns and displacements against sums kept by hand."""

    LIMIT, RESERVE = 24, 4
    HOLDERS = (A, B, C, A1, A2, A3, OPERATOR)

    def __init__(self) -> None:
        super().__init__()
        self.book = Shares("slots", self.LIMIT, self.RESERVE)
        self.held = dict.fromkeys(self.HOLDERS, 0)

    def group(self, name: str) -> int:
        return sum(amount for holder, amount in self.held.items() if holder.group == name)

    @rule(holder=st.sampled_from(HOLDERS), amount=AMOUNTS)
    def take(self, holder: Holder, amount: int) -> None:
        if self.book.take(holder, amount):
            self.held[holder] += amount

    @rule(holder=st.sampled_from(HOLDERS), amount=AMOUNTS)
    def give_back(self, holder: Holder, amount: int) -> None:
        amount = min(amount, self.held[holder])
        self.book.give_back(holder, amount)
        self.held[holder] -= amount

    @rule(holder=st.sampled_from(HOLDERS))
    def displace(self, holder: Holder) -> None:
        rival = self.book.to_displace(holder)
        if rival is None:
            return
        assert rival != holder
        assert not rival.is_operator
        groups = {one.group for one, amount in self.held.items() if amount and not one.is_operator} | {holder.group}
        if rival.group != holder.group:
            fair = (self.LIMIT - self.RESERVE) / len(groups)
            assert self.group(rival.group) > fair >= self.group(holder.group) + 1
        else:
            assert self.held[rival] > self.held[holder]
        self.book.give_back(rival)
        self.held[rival] -= 1

    @rule(holder=st.sampled_from(HOLDERS))
    def every_group_gets_its_fair_share(self, holder: Holder) -> None:
        if holder.is_operator or self.held[OPERATOR] > self.RESERVE:
            return
        groups = {one.group for one, amount in self.held.items() if amount and not one.is_operator} | {holder.group}
        if self.group(holder.group) + 1 > (self.LIMIT - self.RESERVE) / len(groups):
            return
        assert self.book.fits(holder) or self.book.to_displace(holder) is not None

    @invariant()
    def limits_hold(self) -> None:
        tenants = sum(amount for holder, amount in self.held.items() if not holder.is_operator)
        assert self.book.used == sum(self.held.values()) <= self.LIMIT
        assert tenants <= self.LIMIT - self.RESERVE
        assert all(self.book.of(holder) == amount for holder, amount in self.held.items())

    @invariant()
    def operators_always_have_the_reserve(self) -> None:
        left = self.RESERVE - self.held[OPERATOR]
        assert left <= 0 or self.book.fits(OPERATOR, left)


TestSharesMachine = SharesMachine.TestCase


@given(st.lists(st.tuples(st.sampled_from((A, B, A1, A2)), st.booleans()), max_size=60))
def test_same_calls_displace_the_same_holders(calls: list[tuple[Holder, bool]]) -> None:
    def run() -> list[Holder | None]:
        book, chosen = Shares("slots", 6), []
        for holder, wanted in calls:
            if wanted and not book.take(holder):
                rival = book.to_displace(holder)
                chosen.append(rival)
                if rival is not None:
                    book.give_back(rival)
            elif not wanted and book.of(holder):
                book.give_back(holder)
        return chosen

    assert run() == run()
