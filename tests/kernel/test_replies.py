from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forged.auth.model import Principal, Role
from forged.errors import ForgedError, RequestRefused, Unavailable
from forged.kernel import replies
from forged.kernel.messages import Call
from forged.kernel.replies import (
    CLIENTS_MAX,
    FLOOR_PREFIX,
    FORGET_PER_TRANSACTION,
    PREFIX,
    REMEMBERED_S,
    SILENT_S,
    UNACKNOWLEDGED_BYTES_MAX,
    UNACKNOWLEDGED_MAX,
    ReplyTable,
)
from forged.kernel.store.port import Entry
from tests.kernel_fixture import OPERATOR, call

EVERYTHING = 1 << 20


def book_with(*numbers: int) -> ReplyTable:
    book = ReplyTable()
    for number in numbers:
        assert book.recall(call(number), 0.0) is None
        book.remember(call(number), f"answer {number}")
    return book


def stored(*numbers: int) -> Iterator[Entry]:
    for number in numbers:
        key, value = ReplyTable().write(call(number, digest=7), msgspec.msgpack.encode(number), 0.0)
        yield Entry(key, value, 1)


def from_client(client: int, number: int = 1, acknowledged: int = 0) -> Call:
    return Call(OPERATOR, "a test", client=client.to_bytes(16, "big"), number=number, acknowledged=acknowledged)


def test_repeated_number_gets_the_remembered_reply() -> None:
    assert book_with(1, 2).recall(call(2), 0.0) == "answer 2"


def test_acknowledged_number_is_refused() -> None:
    book = book_with(1)
    assert book.recall(call(2, acknowledged=1), 0.0) is None
    with pytest.raises(RequestRefused) as caught:
        book.recall(call(1), 0.0)
    assert caught.value.code == "request_stale"


def test_repeated_number_with_another_body_is_refused() -> None:
    with pytest.raises(RequestRefused) as caught:
        book_with(1).recall(call(1, digest=99), 0.0)
    assert caught.value.code == "request_id_reused"


def test_clients_do_not_share_their_numbers() -> None:
    book = book_with(1)
    assert book.recall(from_client(99, 1), 0.0) is None


def test_an_acknowledgement_never_goes_back() -> None:
    book = book_with(1, 2)
    book.recall(call(3, acknowledged=2), 0.0)
    book.recall(call(4, acknowledged=1), 0.0)
    with pytest.raises(RequestRefused):
        book.recall(call(2), 0.0)


def test_acknowledgement_of_an_unknown_client_is_ignored() -> None:
    book = ReplyTable()
    book.acknowledge(b"?" * 16, 5)
    assert len(book) == 0


def test_client_that_never_acknowledges_is_refused_at_the_limit() -> None:
    book = book_with(*range(1, UNACKNOWLEDGED_MAX + 1))
    with pytest.raises(RequestRefused) as caught:
        book.recall(call(UNACKNOWLEDGED_MAX + 1), 0.0)
    assert caught.value.code == "too_many_unacknowledged"
    assert book.recall(call(1), 0.0) == "answer 1"
    assert book.recall(call(UNACKNOWLEDGED_MAX + 1, acknowledged=1), 0.0) is None


def test_keys_of_acknowledged_replies_are_returned_for_deletion_once() -> None:
    book = book_with(1, 2, 3)
    book.acknowledge(call(1).client, 2)
    keys = book.take_forgotten(EVERYTHING)
    assert keys == [book.write(call(number), b"\xc0", 0.0)[0] for number in (1, 2)]
    assert book.take_forgotten(EVERYTHING) == []


def test_returned_keys_are_bounded_by_the_given_limit() -> None:
    book = book_with(*range(1, 101))
    book.acknowledge(call(1).client, 100)
    assert len(book.take_forgotten(5)) == 5
    assert book.take_forgotten(0) == []
    assert len(book.take_forgotten(EVERYTHING)) == FORGET_PER_TRANSACTION


def test_a_stored_answer_is_read_back_as_its_bytes() -> None:
    book = ReplyTable()
    book.load(stored(1), (), 0.0)
    assert book.recall(call(1, digest=7), 0.0) == msgspec.msgpack.encode(1)


def test_acknowledgements_survive_a_reload_from_the_store() -> None:
    book = book_with(1, 2)
    book.acknowledge(call(1).client, 1)
    book.load(stored(1, 2), (), 0.0)
    with pytest.raises(RequestRefused):
        book.recall(call(1), 0.0)
    assert book.take_forgotten(EVERYTHING) == [entry.key for entry in stored(1)]
    assert len(book) == 1


def test_reply_to_a_forgotten_client_is_not_kept() -> None:
    book = ReplyTable()
    book.remember(call(1), "answer")
    assert len(book) == 0


def test_silent_client_is_forgotten_with_its_replies() -> None:
    book = book_with(1)
    book.recall(from_client(2), REMEMBERED_S + 1)
    assert len(book) == 0
    assert len(book.take_forgotten(EVERYTHING)) == 1


def test_active_client_is_remembered() -> None:
    book = book_with(1)
    for hour in range(1, 100):
        assert book.recall(call(1), hour * 3600.0) == "answer 1"
        book.recall(from_client(hour), hour * 3600.0)
    assert book.recall(call(1), 100 * 3600.0) == "answer 1"


@given(gaps_s=st.lists(st.floats(0, REMEMBERED_S / 10), min_size=1, max_size=300))
def test_number_of_known_clients_is_bounded_by_recent_clients(gaps_s: list[float]) -> None:
    book = ReplyTable()
    came_at: list[float] = []
    now = 0.0
    for index, gap_s in enumerate(gaps_s):
        now += gap_s
        came_at.append(now)
        book.recall(from_client(index), now)
        book.remember(from_client(index), "answer")
        recent = sum(now - then <= REMEMBERED_S for then in came_at)
        assert recent <= len(book) <= 2 * recent + 2


@dataclass
class ModelClient:
    acknowledged: int = 0
    answers: dict[int, int] = field(default_factory=dict)


class Books(RuleBasedStateMachine):
    """A reply table with its stored keys, and two dicts as its model. The clock stands still."""

    def __init__(self) -> None:
        super().__init__()
        self.book = ReplyTable()
        self.disk: dict[str, bytes] = {}
        self.model = {client: ModelClient() for client in range(3)}

    @rule(
        client=st.integers(0, 2), number=st.integers(1, 12), acknowledged=st.integers(0, 12), digest=st.integers(0, 1)
    )
    def ask(self, client: int, number: int, acknowledged: int, digest: int) -> None:
        model = self.model[client]
        asked = from_client(client, number, acknowledged)
        asked.digest = digest
        model.acknowledged = max(model.acknowledged, acknowledged)
        model.answers = {key: value for key, value in model.answers.items() if key > model.acknowledged}
        if number <= model.acknowledged:
            expected: object = "request_stale"
        elif number in model.answers and model.answers[number] != digest:
            expected = "request_id_reused"
        else:
            expected = number if number in model.answers else None
        try:
            answer = self.book.recall(asked, 0.0)
        except RequestRefused as error:
            answer = error.code
        assert (msgspec.msgpack.decode(answer) if isinstance(answer, bytes) else answer) == expected
        if expected is None:
            self.decide(asked, model)

    def decide(self, asked: Call, model: ModelClient) -> None:
        self.book.remember(asked, asked.number)
        key, value = self.book.write(asked, msgspec.msgpack.encode(asked.number), 0.0)
        self.disk[key] = value
        self.tidy()
        model.answers[asked.number] = asked.digest

    @rule()
    def tidy(self) -> None:
        for key in self.book.take_forgotten(EVERYTHING):
            del self.disk[key]

    @rule(client=st.integers(0, 2), number=st.integers(1, 12))
    def leave(self, client: int, number: int) -> None:
        model = self.model[client]
        asked = from_client(client)
        known = bool(model.answers or model.acknowledged)
        self.book.acknowledge(asked.client, number)
        if known:
            model.acknowledged = max(model.acknowledged, number)
            model.answers = {key: value for key, value in model.answers.items() if key > model.acknowledged}

    @rule()
    def read_anew(self) -> None:
        self.book.load([Entry(key, value, 1) for key, value in sorted(self.disk.items())], (), 0.0)

    @precondition(lambda self: len(self.disk) == len(self.book))
    @rule()
    def restart(self) -> None:
        self.book = ReplyTable()
        self.read_anew()
        for model in self.model.values():
            model.acknowledged = 0

    @invariant()
    def the_book_holds_what_the_model_holds(self) -> None:
        assert len(self.book) == sum(len(model.answers) for model in self.model.values())

    @invariant()
    def the_disk_holds_what_the_book_holds(self) -> None:
        assert len(self.disk) >= len(self.book)

    def teardown(self) -> None:
        for _ in range(20):
            self.tidy()
        assert len(self.disk) == len(self.book)


TestBooks = Books.TestCase


def told(book: ReplyTable, number: int, *waiting: int) -> None:
    book.note(call(number).client, 0, number, waiting)


def test_finished_request_is_forgotten_while_an_older_one_waits() -> None:
    book = book_with(2, 3)
    told(book, 4, 1)
    assert len(book) == 0
    assert len(book.take_forgotten(EVERYTHING)) == 2


def test_finished_request_is_refused_when_repeated() -> None:
    book = book_with(2)
    told(book, 4, 1)
    with pytest.raises(RequestRefused) as caught:
        book.recall(call(2), 0.0)
    assert caught.value.code == "request_stale"


def test_waiting_request_may_be_repeated() -> None:
    book = book_with(2, 3)
    told(book, 5, 1, 3)
    assert book.recall(call(3), 0.0) == "answer 3"
    assert book.recall(call(1), 0.0) is None


def test_late_acknowledgement_does_not_undo_a_newer_one() -> None:
    book = book_with(2, 3)
    told(book, 5, 1, 2)
    told(book, 4, 1, 2, 3)
    with pytest.raises(RequestRefused):
        book.recall(call(3), 0.0)


def test_replies_behind_a_slow_request_can_be_acknowledged() -> None:
    book = book_with()
    for number in range(2, 3 * UNACKNOWLEDGED_MAX):
        if number % 256 == 0:
            told(book, number, 1)
        assert book.recall(call(number), 0.0) is None
        book.remember(call(number), "answer")
    assert len(book) <= 256


def test_answers_to_one_client_are_bounded_in_bytes() -> None:
    book = ReplyTable()
    assert book.recall(call(1), 0.0) is None
    book.remember(call(1), "answer", UNACKNOWLEDGED_BYTES_MAX)
    with pytest.raises(RequestRefused) as caught:
        book.recall(call(2), 0.0)
    assert caught.value.code == "too_many_unacknowledged"


def test_client_over_the_limit_replaces_the_longest_silent_one() -> None:
    book = ReplyTable()
    for client in range(CLIENTS_MAX):
        assert book.recall(from_client(client), 0.0) is None
    with pytest.raises(Unavailable) as caught:
        book.recall(from_client(CLIENTS_MAX), 1.0)
    assert caught.value.code == "reply_memory_full"
    assert book.recall(from_client(CLIENTS_MAX), 1.0 + SILENT_S) is None


# Shares.


def as_principal(name: str, role: Role = Role.WORKER, jobs: frozenset[str] | None = None) -> Principal:
    return Principal(name, role, jobs)


A, B = as_principal("a"), as_principal("b")


def of(principal: Principal, client: int, number: int = 1) -> Call:
    return Call(principal, "a test", client=client.to_bytes(16, "big"), number=number)


def decided(book: ReplyTable, call: Call, now: float = 0.0, size: int = 0) -> None:
    assert book.recall(call, now) is None
    book.remember(call, f"answer {call.number}", size)


def code_of(book: ReplyTable, call: Call, now: float = 0.0) -> str:
    with pytest.raises(ForgedError) as caught:
        book.recall(call, now)
    return caught.value.code


def test_principal_with_all_clients_is_refused_and_loses_one_to_another_principal() -> None:
    book = ReplyTable(clients_max=10)
    for client in range(10):
        decided(book, of(A, client))
    assert code_of(book, of(A, 10)) == "reply_memory_full"
    decided(book, of(B, 11))
    assert book.recall(of(A, 1), 0.0) == "answer 1"
    assert code_of(book, of(A, 0)) == "reply_memory_full"


def test_request_of_a_displaced_client_is_refused_and_a_new_one_is_executed() -> None:
    book = ReplyTable(clients_max=2)
    for client in range(2):
        decided(book, of(A, client))
    decided(book, of(B, 3))
    decided(book, of(A, 1, 2), SILENT_S + 1)
    assert code_of(book, of(A, 0), SILENT_S + 1) == "reply_memory_full"
    assert code_of(book, of(A, 0), 2 * SILENT_S + 2) == "reply_forgotten"
    assert book.recall(of(A, 0, 2), 2 * SILENT_S + 2) is None


def test_operators_have_a_reserve_of_clients_and_are_not_displaced() -> None:
    book = ReplyTable(clients_max=32)
    for client in range(30):
        decided(book, of(A, client))
    assert code_of(book, of(A, 30)) == "reply_memory_full"
    for client in range(100, 102):
        decided(book, of(OPERATOR, client))
    for client in range(200, 215):
        decided(book, of(B, client))
    assert code_of(book, of(B, 215)) == "reply_memory_full"
    assert book.recall(of(OPERATOR, 100), 0.0) == "answer 1"


def test_tokens_of_one_job_share_one_part_of_the_table() -> None:
    book = ReplyTable(clients_max=12)
    tokens = [as_principal(f"token-{number}", jobs=frozenset({"a"})) for number in range(4)]
    for client in range(12):
        decided(book, of(tokens[client % 4], client))
    for client in range(100, 106):
        decided(book, of(B, client))
    assert code_of(book, of(B, 106)) == "reply_memory_full"


def test_bytes_of_replies_are_shared_like_clients() -> None:
    book = ReplyTable(bytes_max=1000)
    decided(book, of(A, 1), size=1000)
    assert code_of(book, of(A, 2)) == "reply_memory_full"
    decided(book, of(B, 3), size=10)
    assert code_of(book, of(A, 1)) == "reply_forgotten"
    decided(book, of(A, 2))


def test_floor_of_a_displaced_client_is_stored_before_its_replies_are_deleted() -> None:
    book = ReplyTable(clients_max=1)
    decided(book, of(A, 1))
    decided(book, of(A, 2), SILENT_S + 1)
    assert book.take_floors(0) == {}
    assert book.take_forgotten(EVERYTHING) == []
    assert list(book.take_floors(EVERYTHING)) == [f"{FLOOR_PREFIX}{of(A, 1).client.hex()}"]
    assert book.take_forgotten(EVERYTHING) == [ReplyTable().write(of(A, 1), b"\xc0", 0.0)[0]]


def test_floor_survives_a_restart() -> None:
    before = ReplyTable(clients_max=1)
    decided(before, of(A, 1, 7))
    decided(before, of(A, 2), SILENT_S + 1)
    stored = [Entry(key, value, 1) for key, value in before.take_floors(EVERYTHING).items()]
    book = ReplyTable()
    book.load((), stored, 0.0)
    assert code_of(book, of(A, 1, 7)) == "reply_forgotten"
    assert book.recall(of(A, 1, 8), 0.0) is None


def test_floor_whose_commit_failed_is_stored_again() -> None:
    book = ReplyTable(clients_max=1)
    decided(book, of(A, 1))
    decided(book, of(A, 2), SILENT_S + 1)
    lost = book.take_floors(EVERYTHING)
    book.load((), (), SILENT_S + 1)
    assert book.take_floors(EVERYTHING) == lost


def test_stored_replies_keep_their_holder_after_a_restart() -> None:
    book = ReplyTable(clients_max=2)
    book.load([Entry(*ReplyTable().write(of(A, client), b"\xc0", 0.0), 1) for client in (1, 2)], (), 0.0)
    decided(book, of(B, 3))
    assert code_of(book, of(A, 4)) == "reply_memory_full"


def test_reply_of_a_client_that_was_displaced_meanwhile_is_deleted() -> None:
    book = ReplyTable(clients_max=1)
    running = of(A, 1)
    assert book.recall(running, 0.0) is None
    decided(book, of(A, 2), SILENT_S + 1)
    key, _ = book.write(running, b"\xc0", 0.0)
    book.remember(running, "answer")
    book.take_floors(EVERYTHING)
    assert book.take_forgotten(EVERYTHING) == [key]


def test_floors_are_bounded_and_the_largest_principal_loses_its_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "FLOORS_MAX", 4)
    book, now = ReplyTable(clients_max=2), 0.0
    for principal, client in [(B, 100), (B, 101), *((A, client) for client in range(10))]:
        now += SILENT_S + 1
        decided(book, of(principal, client), now)
    now += SILENT_S + 1
    assert code_of(book, of(B, 100), now) == "reply_forgotten"
    assert len(book.take_floors(EVERYTHING)) == 4


class Displacements(RuleBasedStateMachine):
    """A small table, its store, and principals with more clients than fit. No request is executed twice."""

    PRINCIPALS = (A, B, OPERATOR)

    def __init__(self) -> None:
        super().__init__()
        self.book = ReplyTable(clients_max=3, bytes_max=40)
        self.stored: dict[str, bytes] = {}
        self.executed: set[tuple[bytes, int]] = set()
        self.now = 0.0

    @rule(who=st.integers(0, 2), client=st.integers(0, 1), number=st.integers(1, 3), fate=st.integers(0, 4))
    def ask(self, who: int, client: int, number: int, fate: int) -> None:
        asked = of(self.PRINCIPALS[who], 10 * who + client, number)
        try:
            known = self.book.recall(asked, self.now)
        except ForgedError as error:
            if error.code not in ("reply_forgotten", "reply_memory_full"):
                raise
            return
        if known is not None:
            assert (asked.client, number) in self.executed
            return
        assert (asked.client, number) not in self.executed, "it would be executed twice"
        self.commit(asked, fails=fate == 0)

    def commit(self, asked: Call, *, fails: bool) -> None:
        key, value = self.book.write(asked, msgspec.msgpack.encode(asked.number), 0.0)
        puts, deletes = {key: value} | self.book.take_floors(2), self.book.take_forgotten(2)
        assert not puts.keys() & set(deletes)
        self.book.remember(asked, asked.number, len(value))
        if fails:
            self.load()
            return
        self.executed.add((asked.client, asked.number))
        self.stored |= puts
        for deleted in deletes:
            self.stored.pop(deleted, None)

    def load(self) -> None:
        entries = [Entry(key, value, 1) for key, value in sorted(self.stored.items())]
        replies = [entry for entry in entries if entry.key.startswith(PREFIX)]
        self.book.load(replies, [entry for entry in entries if entry not in replies], self.now)

    @rule()
    def restart(self) -> None:
        self.book = ReplyTable(clients_max=3, bytes_max=40)
        self.load()

    @rule(seconds=st.sampled_from([1.0, SILENT_S + 1]))
    def wait(self, seconds: float) -> None:
        self.now = min(self.now + seconds, REMEMBERED_S)

    @invariant()
    def table_is_bounded(self) -> None:
        known = {key for key in self.stored if key.startswith(PREFIX)}
        assert len(self.book) <= len(self.executed)
        assert len(known) >= len(self.book)


TestDisplacements = Displacements.TestCase
TestDisplacements.settings = settings(max_examples=30, stateful_step_count=100)
