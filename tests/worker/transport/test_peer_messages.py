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
    PeerHello,
    Purpose,
    Value,
    accepted,
    answered,
    challenge_to,
    decode,
    digest_of,
    encode,
    is_accepted,
    is_challenge_proven,
    is_proven,
    mesh_key,
    nonces_of,
    session_id_of,
)

KEY = b"k" * 32
HELLO = PeerHello(b"n" * 32)
CHALLENGE = challenge_to(HELLO, b"c" * 32, KEY, "run", "w0")
NONCES = nonces_of(HELLO, CHALLENGE)
ANSWER = Answer(1, "run", "w0", "w1", b"i" * 16, Purpose.MEMBER, 3, 1, b"d" * 16)
OTHERS = {
    "version": 2,
    "job": "walk",
    "target": "w2",
    "worker": "w2",
    "session_id": b"j" * 16,
    "purpose": Purpose.STATE,
    "number": 4,
    "rank": 2,
    "world": b"e" * 16,
}


def test_an_answer_made_with_the_key_to_this_challenge_is_proven() -> None:
    assert is_proven(answered(ANSWER, KEY, NONCES), KEY, NONCES)


@pytest.mark.parametrize("field", OTHERS)
def test_an_answer_that_was_changed_anywhere_is_not_proven(field: str) -> None:
    changed = msgspec.structs.replace(answered(ANSWER, KEY, NONCES), **{field: OTHERS[field]})
    assert not is_proven(changed, KEY, NONCES)


def test_every_field_of_an_answer_is_under_the_proof() -> None:
    assert set(Answer.__struct_fields__) == {*OTHERS, "proof"}


def test_another_key_or_another_challenge_proves_nothing() -> None:
    answer = answered(ANSWER, KEY, NONCES)
    assert not is_proven(answer, b"x" * 32, NONCES)
    assert not is_proven(answer, KEY, b"x" * 64)
    assert not is_proven(ANSWER, KEY, NONCES)


def test_accepted_message_authenticates_the_listener() -> None:
    answer = answered(ANSWER, KEY, NONCES)
    message = accepted(answer, KEY, NONCES)
    assert is_accepted(message, answer, KEY, NONCES)
    assert not is_accepted(message, answer, b"x" * 32, NONCES)
    assert not is_accepted(message, answer, KEY, b"x" * 64)
    assert not is_accepted(message, msgspec.structs.replace(answer, number=9), KEY, NONCES)


@pytest.mark.parametrize(
    ("hello", "nonce", "key", "job", "worker"),
    [
        (PeerHello(b"m" * 32), b"c" * 32, KEY, "run", "w0"),
        (HELLO, b"d" * 32, KEY, "run", "w0"),
        (HELLO, b"c" * 32, b"x" * 32, "run", "w0"),
        (HELLO, b"c" * 32, KEY, "walk", "w0"),
        (HELLO, b"c" * 32, KEY, "run", "w1"),
    ],
)
def test_challenge_proves_the_key_for_one_hello_job_and_worker(
    hello: PeerHello, nonce: bytes, key: bytes, job: str, worker: str
) -> None:
    assert is_challenge_proven(CHALLENGE, HELLO, KEY, "run", "w0")
    other = msgspec.structs.replace(challenge_to(hello, nonce, key, job, worker), nonce=CHALLENGE.nonce)
    assert not is_challenge_proven(other, HELLO, KEY, "run", "w0")


@pytest.mark.parametrize("field", ["version_min", "version_max"])
def test_versions_of_a_challenge_are_under_its_proof(field: str) -> None:
    changed = msgspec.structs.replace(CHALLENGE, **{field: 9})
    assert not is_challenge_proven(changed, HELLO, KEY, "run", "w0")


def test_jobs_with_one_secret_have_different_mesh_keys_and_none_is_the_secret() -> None:
    assert len({KEY, mesh_key(KEY, "run"), mesh_key(KEY, "walk")}) == 3


def test_session_id_tells_sessions_apart_and_does_not_contain_the_incarnation() -> None:
    incarnation = bytes(range(16))
    assert session_id_of(incarnation) == session_id_of(incarnation) != session_id_of(bytes(16))
    assert incarnation[:4] not in session_id_of(incarnation)


def test_proof_cannot_be_reflected() -> None:
    answer = answered(ANSWER, KEY, NONCES)
    reflected = accepted(answer, KEY, NONCES)
    assert reflected.proof != answer.proof
    assert not is_accepted(msgspec.structs.replace(reflected, proof=answer.proof), answer, KEY, NONCES)


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
    assert decode(encode((0, 1, 3, b"c" * 32, b"p" * 32, "new"))) == Challenge(1, 3, b"c" * 32, b"p" * 32)


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
