from __future__ import annotations

import struct
from contextlib import suppress
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from forged.errors import ForgedError, PeerError, RequestRefused
from forged.jobs.model import CreateJob
from forged.kernel.messages import Fence
from forged.net.protocol.messages import (
    INTEGER_MAX,
    TEXT_CHARS_MAX,
    AnyMessage,
    Bye,
    Cancel,
    Credit,
    Ended,
    Facts,
    Failure,
    GapMessage,
    Hello,
    Message,
    Ping,
    Pong,
    Reply,
    ReplyOut,
    RequestMessage,
    SignalMessage,
    Subscribe,
    Unsubscribe,
    Welcome,
    decode,
    decode_body,
    encode,
    ending,
    failure,
)

RECORD = Raw(msgpack.packb([5, 1.5, "NoteAdded", "a", 0, 0, "test", {"text": "hi"}]))
BODY = Raw(msgpack.packb({"job": "a"}))

EVERY_MESSAGE: list[Message] = [
    Hello(1, 2, bytes(16), "agent", "token", b"ticket", 7),
    Welcome(1, "forged/1", "unix:0", "operator", "h", 9, 1, 1024, 16, 3),
    RequestMessage(3, 2, "CreateJob", BODY, 1.5, Fence(1, 2)),
    Reply(3, BODY),
    Failure(3, "refused", "code", "text", "fix"),
    Cancel(3),
    Subscribe(1, -1, "h", ("NoteAdded",), ("a",), 16),
    Facts(1, 5, (RECORD,)),
    GapMessage(1, 1, 4, "forgotten"),
    Credit(1, 8),
    Unsubscribe(1),
    Ended(1, "refused", "code", "text", "fix"),
    Ping(1),
    Pong(1),
    Bye(3, "done"),
    SignalMessage("Heartbeat", BODY),
]


def plain(message: Message) -> Any:
    """The message decoded by the msgpack library."""
    return msgpack.unpackb(encode(message))


def body(fields: bytes, wanted: Any = CreateJob) -> Any:
    return decode_body(Raw(fields), wanted)


@pytest.mark.parametrize("message", EVERY_MESSAGE, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_went(message: Message) -> None:
    assert encode(decode(encode(message))) == encode(message)
    assert type(decode(encode(message))) is type(message)


@pytest.mark.parametrize("message", EVERY_MESSAGE, ids=lambda message: type(message).__name__)
def test_elements_of_a_later_version_are_ignored(message: Message) -> None:
    longer = msgpack.packb([*plain(message), "new", {"deep": [1, None]}, msgpack.ExtType(1, b"x")])
    assert encode(decode(longer)) == encode(message)


@pytest.mark.parametrize("message", EVERY_MESSAGE, ids=lambda message: type(message).__name__)
def test_elements_that_are_missing_have_their_defaults(message: Message) -> None:
    fields = msgspec.structs.fields(type(message))
    needed = [field for field in fields if field.required]
    shortest = decode(msgpack.packb(plain(message)[: 1 + len(needed)]))
    for field in fields[len(needed) :]:
        assert getattr(shortest, field.name) == field.default


@pytest.mark.parametrize("message", EVERY_MESSAGE, ids=lambda message: type(message).__name__)
def test_a_message_without_all_it_needs_is_refused(message: Message) -> None:
    needed = [field for field in msgspec.structs.fields(type(message)) if field.required]
    with pytest.raises(PeerError, match="invalid message"):
        decode(msgpack.packb(plain(message)[: len(needed)]))


def test_the_numbers_of_the_messages_are_theirs_for_ever() -> None:
    numbers = {type(message).__name__: plain(message)[0] for message in EVERY_MESSAGE}
    assert list(numbers.values()) == list(range(16))
    assert len(EVERY_MESSAGE) == len(AnyMessage.__args__)


def test_a_reply_is_sent_as_it_is_read() -> None:
    assert encode(ReplyOut(3, {"job": "a"})) == encode(Reply(3, BODY))


def test_a_whole_number_may_stand_for_seconds() -> None:
    assert decode(msgpack.packb([2, 1, 0, "m", {}, 30])).timeout_s == 30.0


@pytest.mark.parametrize(
    "message",
    [
        [2, 0, 0, "m", {}],
        [2, -1, 0, "m", {}],
        [2, INTEGER_MAX + 1, 0, "m", {}],
        [2, 1, -1, "m", {}],
        [2, 1, 0, "m", {}, -0.5],
        [2, 1, 0, "m", {}, float("nan")],
        [2, 1.0, 0, "m", {}],
        [2, "1", 0, "m", {}],
        [2, 1, 0, b"m", {}],
        [2, 1, 0, "m", {}, None, [1]],
        [0, 1, 1, "client"],
        [0, 1, 1, b"client", "agent", b"token"],
        [5, 0],
        [6, 0, None, "", [], [], 1],
        [6, 1, -2, "", [], [], 1],
        [6, 1, None, "", "all", [], 1],
        [6, 1, None, "", [], [], -1],
        [6, 1, None, "", [], [], 65_537],
        [9, 1, -1],
        [9, 1, 65_537],
        [14, -1],
        [16],
        [-1],
        [None],
        ["0"],
        [],
        {},
        {"0": 1},
        "hello",
        b"hello",
        None,
        12,
        True,
    ],
)
def test_invalid_message_is_a_peer_error(message: Any) -> None:
    with pytest.raises(PeerError) as caught:
        decode(msgpack.packb(message))
    assert caught.value.code == "message_invalid"


NESTED = 1_000_000
"""Deeper than the stack of any supported interpreter; Python 3.14 skips 100,000 levels."""
NO_MESSAGES = {
    "empty": b"",
    "a byte that msgpack never uses": b"\xc1",
    "truncated": b"\x92\x0c",
    "more behind it": b"\x92\x0c\x01\x00",
    "an array of four billion": b"\xdd\xff\xff\xff\xff\x0c\x01",
    "an array of four billion inside": b"\x97\x06\x01\xc0\xa0\xdd\xff\xff\xff\xff",
    "nested deeply": b"\x91" * NESTED,
    "nested deeply in the body": b"\x96\x02\x01\x00\xa1m" + b"\x91" * NESTED + b"\xc0\xc0",
    "nested deeply behind what is known": b"\x93\x0c\x01" + b"\x81\x01" * NESTED + b"\xc0",
    "text that is not UTF-8": b"\x95\x04\x01\xa1k\xa1c\xa1\xff",
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
}


@pytest.mark.parametrize("payload", NO_MESSAGES.values(), ids=NO_MESSAGES.keys())
def test_bytes_that_are_no_message_are_a_peer_error(payload: bytes) -> None:
    with pytest.raises(PeerError):
        decode(payload)


@given(st.binary(max_size=300))
def test_any_payload_is_a_message_or_a_peer_error(payload: bytes) -> None:
    try:
        message = decode(payload)
    except PeerError:
        return
    assert isinstance(message, Message)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(st.integers(0, 15), st.lists(values, max_size=8))
def test_any_array_is_a_message_or_a_peer_error(number: int, elements: list[Any]) -> None:
    try:
        message = decode(msgpack.packb([number, *elements]))
    except PeerError:
        return
    assert plain(message)[0] == number


def test_a_body_is_read_as_the_type_it_must_have() -> None:
    assert body(msgpack.packb({"job": "a", "settings": {"x": 1}})) == CreateJob("a", {"x": 1})


def test_fields_of_a_later_version_are_ignored() -> None:
    assert body(msgpack.packb({"job": "a", "colour": {"deep": [1]}})) == CreateJob("a")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (msgpack.packb({}), "missing required field `job`"),
        (msgpack.packb({"job": 5}), r"Expected `str`, got `int` - at `\$.job`"),
        (msgpack.packb({"job": "a", "settings": [1]}), r"at `\$.settings`"),
        (msgpack.packb([]), "Expected `object`"),
        (b"\x81\xa3job\xa1\xff", "utf-8"),
        (b"\x82\xa3job\xa1a\xa1x" + b"\x91" * NESTED, "recursion|Stack overflow"),
        (b"\x82\xa3job\xa1a\xa8settings\xdf\xff\xff\xff\xff", "truncated"),
        (b"\x81", "truncated"),
    ],
)
def test_a_body_of_another_type_is_refused_by_field(fields: bytes, expected: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=expected):
        body(fields)


@given(st.binary(max_size=200))
def test_any_body_is_of_its_type_or_refused(fields: bytes) -> None:
    with suppress(msgspec.ValidationError):
        assert isinstance(body(fields), CreateJob)


def test_an_error_travels_with_its_kind_code_text_and_fix() -> None:
    assert failure(4, RequestRefused("c", "t", "f")) == Failure(4, "refused", "c", "t", "f")
    assert failure(0, ForgedError("c", "t")) == Failure(0, "internal", "c", "t", "")


def test_error_text_is_bounded_even_if_it_quotes_a_peer() -> None:
    wordy = RequestRefused("c", "t" * 10_000, "f" * 10_000)
    assert failure(4, wordy) == Failure(4, "refused", "c", "t" * TEXT_CHARS_MAX, "f" * TEXT_CHARS_MAX)
    assert ending(4, wordy) == Ended(4, "refused", "c", "t" * TEXT_CHARS_MAX, "f" * TEXT_CHARS_MAX)


def test_floats_and_integers_are_written_as_every_library_writes_them() -> None:
    request = RequestMessage(1 << 40, 0, "m", Raw(b"\x80"), 0.5)
    assert encode(request) == msgpack.packb([2, 1 << 40, 0, "m", {}, 0.5, None, None])
    assert struct.pack(">d", 0.5) in encode(request)
