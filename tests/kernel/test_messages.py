from __future__ import annotations

from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.errors import PeerError
from forged.jobs.model import NoteAdded
from forged.kernel.messages import FACTS, REQUESTS, SIGNALS, Fact, Fence, Nothing, Record, Request, Signal, UnknownFact
from tests.kernel_fixture import Add, Added, Level, ReadTotal

IDS = st.integers(0, 2**63 - 1)


def record(**more: Any) -> Record:
    return Record.of(Added(1, 2), fact_id=7, at=1.5, **more)


def stored(*parts: Any) -> bytes:
    return msgspec.msgpack.encode(parts)


# Names.


def test_messages_are_found_by_the_names_of_their_classes() -> None:
    assert FACTS["Added"] is Added
    assert REQUESTS["Add"] is Add
    assert SIGNALS["Level"] is Level


@pytest.mark.parametrize(("base", "name"), [(Fact, "Added"), (Request, "Add"), (Signal, "Level")])
def test_a_name_that_is_taken_by_another_module_is_refused(base: type[Any], name: str) -> None:
    with pytest.raises(TypeError, match="another name"):
        msgspec.defstruct(name, (), bases=(base,), module="elsewhere")


def test_reloaded_module_may_redefine_its_messages() -> None:
    again = msgspec.defstruct("Added", (), bases=(Fact,), module=Added.__module__, frozen=True)
    try:
        assert FACTS["Added"] is again
    finally:
        FACTS["Added"] = Added


def test_request_declares_its_reply_type() -> None:
    assert ReadTotal.reply_type() is int


def test_request_without_reply_type_is_an_error() -> None:
    vague: Any = msgspec.defstruct("Vague", (), bases=(Request,), frozen=True)
    del REQUESTS["Vague"]
    with pytest.raises(TypeError, match="Vague must name its reply type"):
        vague.reply_type()


def test_request_subclass_inherits_the_reply_type() -> None:
    longer: Any = msgspec.defstruct("AddTwice", (), bases=(Add,), frozen=True)
    del REQUESTS["AddTwice"]
    assert longer.reply_type() is int


def test_messages_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Added(1, 2).amount = 3  # type: ignore[misc]  # that it is one is the claim


def test_signal_without_a_key_has_one_slot() -> None:
    class Plain(Signal, frozen=True):
        job_field: ClassVar[str | None] = None

    assert (Plain().key, Plain().about) == ("", None)


def test_a_signal_is_about_the_job_that_its_field_names_and_stays_inside_unless_it_says_otherwise() -> None:
    class Beat(Signal, frozen=True):
        job: str

    assert (Beat("a").about, Beat.external) == ("a", False)


@pytest.mark.parametrize(
    ("lesser", "greater"), [(Fence(1, 9), Fence(2, 0)), (Fence(1, 1), Fence(1, 2)), (Fence(0, 0), Fence(0, 1))]
)
def test_a_fence_is_behind_by_its_term_first_and_its_generation_then(lesser: Fence, greater: Fence) -> None:
    assert lesser < greater
    assert not greater < lesser


# Records.


def test_record_shows_all_fields() -> None:
    it = record(job="a", generation=3, cause=5, origin="test")
    assert (it.id, it.at, it.type, it.job, it.generation, it.cause, it.origin, it.fact) == (
        *(7, 1.5, "Added", "a", 3, 5, "test"),
        Added(1, 2),
    )


def test_a_record_is_an_array_with_its_body_last() -> None:
    it = record(job="a", generation=3, cause=5, origin="test")
    assert it.data == stored(7, 1.5, "Added", "a", 3, 5, "test", {"amount": 1, "total": 2})


def test_fields_are_plain_values() -> None:
    it = record()
    plain = {"id": 7, "at": 1.5, "type": "Added", "job": "", "generation": 0, "cause": 0, "origin": ""}
    assert it.fields() == plain | {"fact": {"amount": 1, "total": 2}}


@given(
    amount=st.integers(-(2**63), 2**64 - 1),
    fact_id=IDS,
    cause=IDS,
    generation=IDS,
    at=st.floats(allow_nan=False),
    job=st.text(),
    origin=st.text(),
)
def test_record_survives_encoding(
    amount: int, fact_id: int, cause: int, generation: int, at: float, job: str, origin: str
) -> None:
    it = Record.of(Added(amount, 0), fact_id=fact_id, at=at, job=job, generation=generation, cause=cause, origin=origin)
    again = Record.read(it.data)
    assert again.fields() == it.fields()
    assert again.fact == it.fact
    assert again.data == it.data


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, msgspec.Raw])
def test_a_record_is_read_from_anything_that_holds_bytes(kind: Any) -> None:
    assert Record.read(kind(record().data)).fact == Added(1, 2)


def test_elements_of_a_later_version_are_ignored_and_kept() -> None:
    data = stored(7, 1.5, "Added", "", 0, 0, "", {"amount": 1, "total": 2}, "something new")
    assert Record.read(data).fact == Added(1, 2)
    assert Record.read(data).data == data


def test_a_field_that_is_not_known_is_ignored() -> None:
    body = {"amount": 1, "total": 2, "colour": "red"}
    assert Record.read(stored(7, 1.5, "Added", "", 0, 0, "", body)).fact == Added(1, 2)


def test_fact_of_an_unknown_type_keeps_its_fields() -> None:
    fact = Record.read(stored(7, 1.5, "Landed", "", 0, 0, "", {"where": "moon"})).fact
    assert fact == UnknownFact("Landed", {"where": "moon"})


@pytest.mark.parametrize("body", [{}, {"amount": "one", "total": 2}])
def test_a_fact_of_a_known_name_with_other_fields_is_shown_as_it_is(body: dict[str, Any]) -> None:
    assert Record.read(stored(7, 1.5, "Added", "", 0, 0, "", body)).fact == UnknownFact("Added", body)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        stored(7),
        stored("seven", 1.5, "Added", "", 0, 0, "", {}),
        stored({"id": 7}),
        record().data[:-1],
        b"\x91" * 100_000,
        stored(7, 1.5, "Added", "", 0, 0, "", ["no", "map"]),
        stored(7, 1.5, "Landed", "", 0, 0, "", ["no", "map"]),
        stored(7, 1.5, "Added", "", 0, 0, "", msgspec.Raw(b"\x81\xa6amount\xa1\xff")),
        stored(7, 1.5, NoteAdded.__name__, "", 0, 0, "", msgspec.Raw(b"\x81\xa4text\xa1\xff")),
        stored(7, 1.5, "Landed", "", 0, 0, "", msgspec.Raw(b"\x81\xa1a\xa1\xff")),
        stored(7, 1.5, "Landed", "", 0, 0, "", msgspec.Raw(b"\x81\xa1a" + b"\x91" * 100_000 + b"\x90")),
    ],
)
def test_invalid_record_is_a_peer_error(data: bytes) -> None:
    with pytest.raises(PeerError) as caught:
        Record.read(data).fact  # noqa: B018 - it is decoded no sooner than it is looked at
    assert caught.value.code == "record_invalid"


@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_are_a_peer_error_or_a_record(data: bytes) -> None:
    try:
        it = Record.read(data)
        assert it.fact is not None
    except PeerError:
        return
    assert it.fields()["id"] == it.id


def test_none_is_encoded_as_an_empty_map() -> None:
    assert msgspec.msgpack.encode(Nothing()) == b"\x80"
