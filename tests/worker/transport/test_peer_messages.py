from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.elastic.model import WorkerId
from forged.errors import PeerError
from forged.worker.transport import peer_messages
from forged.worker.transport.peer_messages import (
    Answer,
    Challenge,
    CollectiveCall,
    Contribution,
    Form,
    Kind,
    Operation,
    Purpose,
    Value,
    accepted,
    answered,
    decode,
    digest_of,
    encode,
    is_accepted,
    is_proven,
)

KEY = b"k" * 32
CHALLENGE = b"c" * 32
ANSWER = Answer(1, "run", "w0", "w1", b"i" * 16, Purpose.MEMBER, 3, b"n" * 32, 1, b"d" * 16)
OTHERS = {
    "version": 2,
    "job": "walk",
    "target": "w2",
    "worker": "w2",
    "incarnation": b"j" * 16,
    "purpose": Purpose.STATE,
    "number": 4,
    "nonce": b"m" * 32,
    "rank": 2,
    "world": b"e" * 16,
}


def test_an_answer_made_with_the_key_to_this_challenge_is_proven() -> None:
    assert is_proven(answered(ANSWER, KEY, CHALLENGE), KEY, CHALLENGE)


@pytest.mark.parametrize("field", OTHERS)
def test_an_answer_that_was_changed_anywhere_is_not_proven(field: str) -> None:
    changed = msgspec.structs.replace(answered(ANSWER, KEY, CHALLENGE), **{field: OTHERS[field]})
    assert not is_proven(changed, KEY, CHALLENGE)


def test_every_field_of_an_answer_is_under_the_proof() -> None:
    assert set(Answer.__struct_fields__) == {*OTHERS, "proof"}


def test_another_key_or_another_challenge_proves_nothing() -> None:
    answer = answered(ANSWER, KEY, CHALLENGE)
    assert not is_proven(answer, b"x" * 32, CHALLENGE)
    assert not is_proven(answer, KEY, b"x" * 32)
    assert not is_proven(ANSWER, KEY, CHALLENGE)


def test_accepted_message_authenticates_the_listener() -> None:
    answer = answered(ANSWER, KEY, CHALLENGE)
    message = accepted(answer, KEY, CHALLENGE, b"h" * 16)
    assert is_accepted(message, answer, KEY, CHALLENGE)
    assert not is_accepted(message, answer, b"x" * 32, CHALLENGE)
    assert not is_accepted(message, msgspec.structs.replace(answer, nonce=b"m" * 32), KEY, CHALLENGE)
    assert not is_accepted(msgspec.structs.replace(message, incarnation=b"g" * 16), answer, KEY, CHALLENGE)


def test_proof_cannot_be_reflected() -> None:
    answer = answered(ANSWER, KEY, CHALLENGE)
    reflected = accepted(answer, KEY, CHALLENGE, b"")
    assert reflected.proof != answer.proof
    assert not is_accepted(msgspec.structs.replace(reflected, proof=answer.proof), answer, KEY, CHALLENGE)


def test_a_value_comes_back_without_a_copy_of_its_own() -> None:
    value = Value(Form.ARRAY, memoryview(b"12345678"), "<f8", ())
    call = CollectiveCall(Kind.ALL_REDUCE, operation=Operation.SUM, dtype="<f8", shape=())
    payload = encode(Contribution(1, call, value))
    came = decode(payload)
    assert isinstance(came, Contribution)
    assert came.value is not None
    assert came.value.data.obj is payload
    assert came == Contribution(1, call, value)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        encode(("no", "message")),
        encode((99, 1)),
        encode((0, 1, 1, b"short")),
        encode((5, -1, ("barrier",))),
        encode((5, 1, ("dance",))),
        encode((5, 1, ("gather", 0), ("array", b"", "<f8", [0] * 65))),
        b"\x91" * 2000,
    ],
)
def test_undecodable_message_is_a_peer_error(payload: bytes) -> None:
    with pytest.raises(PeerError) as raised:
        decode(payload)
    assert raised.value.code == "message_invalid"


@given(st.binary(max_size=200))
def test_garbage_is_never_more_than_the_peers_fault(payload: bytes) -> None:
    with suppress(PeerError):
        decode(payload)


def test_fields_appended_by_later_versions_are_ignored() -> None:
    assert decode(encode((0, 1, 3, CHALLENGE, "new"))) == Challenge(1, 3, CHALLENGE)


@pytest.mark.parametrize(
    ("call", "brings", "values"),
    [
        (CollectiveCall(Kind.BARRIER), (False, False), (0, 0)),
        (CollectiveCall(Kind.END_STEP, step=7), (False, False), (0, 0)),
        (CollectiveCall(Kind.GATHER, 1), (True, True), (0, 3)),
        (CollectiveCall(Kind.BROADCAST, 1), (False, True), (1, 0)),
        (CollectiveCall(Kind.ALL_GATHER), (True, True), (3, 3)),
        (CollectiveCall(Kind.ALL_REDUCE), (True, True), (1, 1)),
    ],
    ids=lambda one: one.kind if isinstance(one, CollectiveCall) else "",
)
def test_kind_and_root_decide_the_values_of_each_rank(
    call: CollectiveCall, brings: tuple[bool, bool], values: tuple[int, int]
) -> None:
    """Ranks 0 and 1 of three."""
    assert (call.brings(0), call.brings(1)) == brings
    assert (call.values_due(0, 3), call.values_due(1, 3)) == values


def test_collective_calls_are_named_with_their_arguments() -> None:
    assert str(CollectiveCall(Kind.BARRIER)) == "barrier()"
    assert str(CollectiveCall(Kind.END_STEP, step=7)) == "end_step(step=7)"
    reduction = CollectiveCall(Kind.ALL_REDUCE, operation=Operation.SUM, dtype="<f4", shape=(2, 3))
    assert str(reduction) == "all_reduce(sum, dtype=<f4, shape=(2, 3))"


def test_a_digest_tells_worlds_apart_by_members_and_order() -> None:
    a, b = WorkerId("a", "h", 1), WorkerId("b", "h", 2)
    assert digest_of([a, b]) == digest_of((a, b))
    assert len({digest_of([a, b]), digest_of([b, a]), digest_of([a]), digest_of([])}) == 4
    assert len(digest_of([a])) == peer_messages.WORLD_DIGEST_BYTES
