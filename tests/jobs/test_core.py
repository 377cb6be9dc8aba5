from __future__ import annotations

from functools import partial
from math import inf, nan
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from forged.auth.model import Principal, Role
from forged.errors import RequestRefused
from forged.jobs.core import FLOOR_KEY, NOTE_CHARS_MAX, PREFIX, SETTINGS_BYTES_MAX, JobBook
from forged.jobs.model import (
    AddNote,
    ChangeJob,
    CreateJob,
    Job,
    JobChanged,
    JobCreated,
    JobRemoved,
    NoteAdded,
    RemoveJob,
)
from forged.kernel.messages import Decision, Fence, Nothing

TERM = 3
SETTINGS: dict[str, Any] = {"lr": 0.1, "workers": 4, "name": "x", "fast": True, "note": None}


def book_with(*names: str, **settings: Any) -> JobBook:
    book = JobBook()
    for name in names:
        book.create(CreateJob(name, settings), "somebody", 1.0, TERM)
    return book


def refusal(act: Any, *arguments: Any) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        act(*arguments)
    return caught.value


def stored(decision: Decision[Any]) -> Job:
    (value,) = decision.writes.values()
    assert value is not None
    return msgspec.msgpack.decode(value, type=Job)


def test_new_job_is_returned_stored_and_recorded() -> None:
    decision = JobBook().create(CreateJob("a", SETTINGS), "somebody", 7.0, TERM)
    fence = Fence(TERM, 0)
    assert decision.reply == Job(name="a", settings=SETTINGS, created_at=7.0, created_by="somebody", fence=fence)
    assert decision.facts == (JobCreated("a", SETTINGS),)
    assert list(decision.writes) == [PREFIX + "a"]
    assert stored(decision) == decision.reply
    assert decision.job == "a"


@pytest.mark.parametrize("settings", [SETTINGS, {}])
def test_creating_an_existing_job_with_equal_or_any_settings_changes_nothing(
    settings: dict[str, Any],
) -> None:
    book = book_with("a", **SETTINGS)
    assert book.create(CreateJob("a", settings), "another", 9.0, TERM) == Decision(book.get("a"))


def test_creating_an_existing_job_with_other_settings_is_refused_with_the_differing_keys() -> None:
    other = CreateJob("a", SETTINGS | {"lr": 0.2, "more": 1})
    error = refusal(book_with("a", **SETTINGS).create, other, "x", 9.0, TERM)
    assert error.code == "job_differs"
    assert error.message.endswith("lr, more")


@pytest.mark.parametrize("value", [1.0, True, "1", None])
def test_settings_of_different_types_differ_even_if_python_compares_them_equal(value: Any) -> None:
    error = refusal(book_with("a", same=0, lr=1).create, CreateJob("a", {"same": 0, "lr": value}), "x", 9.0, TERM)
    assert error.code == "job_differs"
    assert error.message.endswith(": lr")


def test_missing_setting_differs_from_none() -> None:
    error = refusal(book_with("a", x=None, y=1).create, CreateJob("a", {"y": 1}), "x", 9.0, TERM)
    assert error.message.endswith(": x")


def test_settings_are_the_same_in_any_order() -> None:
    book = book_with("a", lr=0.1, steps=2)
    again: dict[str, Any] = {"steps": 2, "lr": 0.1}
    assert book.create(CreateJob("a", again), "x", 9.0, TERM) == Decision(book.get("a"))


@pytest.mark.parametrize("name", ["", "a/b", "-", "a" * 200])
def test_invalid_job_name_is_refused(name: str) -> None:
    assert refusal(JobBook().create, CreateJob(name), "x", 1.0, TERM).code == "name_invalid"


def test_settings_are_bounded() -> None:
    large: dict[str, Any] = {"x": "y" * SETTINGS_BYTES_MAX}
    book = book_with("a")
    assert refusal(book.create, CreateJob("b", large), "x", 1.0, TERM).code == "settings_too_large"
    assert refusal(book.change, ChangeJob("a", large, 1)).code == "settings_too_large"


def test_number_of_jobs_is_bounded_and_existing_jobs_stay_usable() -> None:
    book = JobBook(jobs_max=2)
    for name in ("a", "b"):
        book.create(CreateJob(name), "x", 1.0, TERM)
    assert refusal(book.create, CreateJob("c"), "x", 1.0, TERM).code == "jobs_full"
    assert book.create(CreateJob("a"), "x", 1.0, TERM).reply.name == "a"
    book.remove(RemoveJob("a"))
    assert book.create(CreateJob("c"), "x", 1.0, TERM).reply.name == "c"


def test_jobs_are_shared_by_their_creators_with_a_reserve_for_operators() -> None:
    book = JobBook(jobs_max=32)
    for number in range(24):
        book.create(CreateJob(f"a{number}"), "a", 1.0, TERM)
    assert refusal(book.create, CreateJob("a24"), "a", 1.0, TERM).code == "jobs_full"
    for number in range(6):
        book.create(CreateJob(f"b{number}"), "b", 1.0, TERM)
    assert refusal(book.create, CreateJob("b6"), "b", 1.0, TERM).code == "jobs_full"
    for number in range(2):
        book.create(CreateJob(f"root{number}"), "unix:0", 1.0, TERM, is_operator=True)
    assert refusal(partial(book.create, is_operator=True), CreateJob("root2"), "unix:0", 1.0, TERM).code == "jobs_full"
    book.remove(RemoveJob("a0"))
    book.create(CreateJob("root2"), "unix:0", 1.0, TERM, is_operator=True)


def test_change_replaces_the_settings_and_increments_the_version() -> None:
    book = book_with("a", **SETTINGS)
    decision = book.change(ChangeJob("a", {"lr": 0.2}, 1))
    assert decision.reply == book.get("a") == stored(decision)
    assert (decision.reply.version, decision.reply.settings) == (2, {"lr": 0.2})
    assert decision.facts == (JobChanged("a", 2, {"lr": 0.2}),)


def test_creating_a_changed_job_accepts_its_first_settings_and_refuses_intermediate_ones() -> None:
    book = book_with("a", **SETTINGS)
    book.change(ChangeJob("a", {"lr": 0.2}, 1))
    book.change(ChangeJob("a", {"lr": 0.3}, 2))
    other = JobBook()
    other.load([msgspec.msgpack.encode(book.get("a"))], None)
    for one in (book, other):
        present: dict[str, Any] = {"lr": 0.3}
        for settings in (SETTINGS, present):
            assert one.create(CreateJob("a", settings), "x", 9.0, TERM).reply.settings == present
        assert refusal(one.create, CreateJob("a", {"lr": 0.2}), "x", 9.0, TERM).code == "job_differs"


@pytest.mark.parametrize("version", [0, 2])
def test_a_change_of_an_outdated_version_is_refused(version: int) -> None:
    book = book_with("a", **SETTINGS)
    assert refusal(book.change, ChangeJob("a", {}, version)).code == "job_changed"
    assert book.get("a").settings == SETTINGS


def test_removed_job_is_deleted_and_recorded() -> None:
    book = book_with("a")
    writes = {PREFIX + "a": None, FLOOR_KEY: msgspec.msgpack.encode(Fence(TERM, 1))}
    assert book.remove(RemoveJob("a")) == Decision(Nothing(), (JobRemoved("a"),), writes, job="a")
    assert len(book) == 0


def test_removing_a_missing_job_is_no_error() -> None:
    assert JobBook().remove(RemoveJob("a")) == Decision(Nothing())


def test_a_note_is_a_fact_of_its_job_and_writes_nothing() -> None:
    assert book_with("a").note(AddNote("a", "hi")) == Decision(Nothing(), (NoteAdded("hi"),), job="a")


@pytest.mark.parametrize("text", ["", "x" * (NOTE_CHARS_MAX + 1)])
def test_note_length_is_bounded(text: str) -> None:
    assert refusal(book_with("a").note, AddNote("a", text)).code == "note_invalid"


@pytest.mark.parametrize(
    ("act", "request_"), [("change", ChangeJob("b", {}, 1)), ("note", AddNote("b", "hi")), ("get", "b")]
)
def test_a_job_that_does_not_exist_is_refused(act: str, request_: Any) -> None:
    assert refusal(getattr(book_with("a"), act), request_).code == "job_unknown"


def test_each_principal_sees_its_jobs_by_name() -> None:
    book = book_with("b", "c", "a")
    bound = Principal("x", Role.VIEWER, frozenset({"a", "c", "z"}))
    assert [job.name for job in book.visible(bound, "")] == ["a", "c"]
    assert [job.name for job in book.visible(bound, "a")] == ["c"]
    assert [job.name for job in book.visible(Principal("x", Role.VIEWER), "")] == ["a", "b", "c"]


# Fences.


def test_new_job_is_fenced_by_the_term_and_a_missing_job_has_no_fence() -> None:
    book = book_with("a")
    assert (book.fence("a"), book.fence("b")) == (Fence(TERM, 0), None)


def removed_at(fence: Fence) -> tuple[JobBook, bytes | None]:
    """A job book after removal of its job at this generation, and its stored keys."""
    book = JobBook()
    book.load([msgspec.msgpack.encode(Job(name="a", settings={}, created_at=1.0, created_by="x", fence=fence))], None)
    return book, book.remove(RemoveJob("a")).writes.get(FLOOR_KEY)


@pytest.mark.parametrize(
    ("old", "new"),
    [(Fence(TERM, 5), Fence(TERM, 6)), (Fence(TERM, 0), Fence(TERM, 1)), (Fence(TERM - 1, 5), Fence(TERM, 0))],
)
def test_a_job_created_again_begins_above_its_predecessor_also_after_a_restart(old: Fence, new: Fence) -> None:
    book, floor = removed_at(old)
    again = JobBook()
    again.load([], floor)
    for one in (book, again):
        assert one.create(CreateJob("a"), "x", 2.0, TERM).reply.fence == new


def test_removing_a_job_of_lower_generation_keeps_the_first_generation_of_new_jobs() -> None:
    _, floor = removed_at(Fence(TERM, 5))
    book = JobBook()
    book.load([msgspec.msgpack.encode(Job(name="b", settings={}, created_at=1.0, created_by="x"))], floor)
    assert book.remove(RemoveJob("b")).writes == {PREFIX + "b": None}
    assert book.create(CreateJob("c"), "x", 2.0, TERM).reply.fence == Fence(TERM, 6)


class JobBooks(RuleBasedStateMachine):
    """A book, and the store that its decisions write."""

    def __init__(self) -> None:
        super().__init__()
        self.book = JobBook(jobs_max=2)
        self.store: dict[str, bytes] = {}

    @rule(name=st.sampled_from("abc-"), lr=st.none() | st.integers(0, 1))
    def create(self, name: str, lr: int | None) -> None:
        self.decide(self.book.create, CreateJob(name, {} if lr is None else {"lr": lr}), "somebody", 1.0, TERM)

    @rule(name=st.sampled_from("abc"), lr=st.integers(0, 1), version=st.integers(1, 3))
    def change(self, name: str, lr: int, version: int) -> None:
        self.decide(self.book.change, ChangeJob(name, {"lr": lr}, version))

    @rule(name=st.sampled_from("abc"))
    def remove(self, name: str) -> None:
        self.decide(self.book.remove, RemoveJob(name))

    def decide(self, act: Any, *arguments: Any) -> None:
        try:
            decision = act(*arguments)
        except RequestRefused:
            return
        assert bool(decision.facts) == bool(decision.writes)
        for key, value in decision.writes.items():
            if value is None:
                del self.store[key]
            else:
                self.store[key] = value

    @invariant()
    def the_book_is_what_the_store_holds(self) -> None:
        loaded = JobBook()
        jobs = [value for key, value in self.store.items() if key.startswith(PREFIX)]
        loaded.load(jobs, self.store.get(FLOOR_KEY))
        assert (loaded._jobs, loaded._floor) == (self.book._jobs, self.book._floor)


TestJobBooks = JobBooks.TestCase


@pytest.mark.parametrize("value", [inf, -inf, nan])
def test_setting_that_json_cannot_represent_is_refused_by_key(value: float) -> None:
    book = book_with("a")
    settings: dict[str, Any] = {"nodes": 4, "lr": value}
    for error in (
        refusal(book.create, CreateJob("b", settings), "x", 1.0, TERM),
        refusal(book.change, ChangeJob("a", settings, 1)),
    ):
        assert error.code == "setting_invalid"
        assert "'lr'" in error.message
    assert len(book) == 1
