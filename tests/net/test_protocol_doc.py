from __future__ import annotations

import ast
import asyncio
import base64
import hashlib
import hmac
import socket
import struct
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, get_type_hints

import msgpack
import msgspec
import pytest

from forged import errors
from forged.auth.tokens import encode_token
from forged.elastic.model import WorkerId
from forged.ids import NAME_LENGTH_MAX
from forged.kernel.messages import Record
from forged.kernel.replies import (
    CLIENTS_MAX,
    CLIENTS_RESERVE,
    REMEMBERED_BYTES_MAX,
    REMEMBERED_S,
    UNACKNOWLEDGED_MAX,
)
from forged.net import admission, server, session, tickets
from forged.net.protocol import messages, streams
from forged.net.protocol.frames import FRAME_BYTES_MAX, FrameDecoder
from forged.net.protocol.messages import (
    AnyMessage,
    Count,
    Credits,
    Facts,
    Message,
    Number,
    Position,
    Seconds,
    decode,
    encode,
    failure,
)
from forged.net.transport import memory
from forged.net.transport.connection import ConnectionLimits
from forged.worker.transport import peer_messages
from tests.elastic.coordinator_playbook import formed
from tests.net import protocol_page as page
from tests.net.protocol_page import ANYTHING, Line, Vector
from tests.net.raw_client import real_daemon

FORGED = Path(errors.__file__).parent
EDGE = [
    *sorted((FORGED / "net" / "protocol").glob("*.py")),
    *(FORGED / "net" / f"{name}.py" for name in ("session", "server", "tickets", "admission")),
    *(FORGED / "net" / "transport" / f"{name}.py" for name in ("connection", "memory")),
    *(FORGED / "auth" / f"{name}.py" for name in ("access", "tokens")),
    FORGED / "kernel" / "bus" / "dispatcher.py",
    *(FORGED / "kernel" / f"{name}.py" for name in ("ledger", "replies")),
]
"""The modules that raise errors of no particular request."""

MESSAGES: dict[int, type[Message]] = {one.__struct_config__.tag: one for one in AnyMessage.__args__}
NAMES = {"RequestMessage": "Request", "GapMessage": "Gap", "SignalMessage": "Signal"}
TYPES: dict[Any, str] = {
    int: "int",
    Number: "number",
    Count: "count",
    Position: "position",
    Position | None: "position or nil",
    Credits: "credit",
    Seconds | None: "seconds or nil",
    msgspec.Raw: "fields",
    tuple[msgspec.Raw, ...]: "list of record",
    tuple[Number, ...] | None: "list of number or nil",
}

VECTORS = list(page.vectors())
PEER_KEY = bytes(range(32))
INCARNATION = bytes(range(0x80, 0x90))


def ids(vector: Vector) -> str:
    return f"{MESSAGES[vector.message[0]].__name__}-{vector.frame.hex()[8:24]}"


# Vectors.


@pytest.mark.parametrize("vector", VECTORS, ids=ids)
def test_a_vector_is_its_message_to_another_library(vector: Vector) -> None:
    (length,) = struct.unpack(">I", vector.frame[:4])
    assert length == len(vector.frame) - 4
    assert msgpack.unpackb(vector.frame[4:]) == vector.message


@pytest.mark.parametrize("vector", VECTORS, ids=ids)
def test_a_vector_is_its_message_to_forged(vector: Vector) -> None:
    inbox = deque[bytes]()
    FrameDecoder().feed(vector.frame, inbox)
    (payload,) = inbox
    message = decode(payload)
    assert type(message) is MESSAGES[vector.message[0]]
    fields = [field.name for field in msgspec.structs.fields(message)]
    for name, written in zip(fields, vector.message[1:], strict=False):
        assert msgpack.unpackb(encode(getattr(message, name))) == written


@pytest.mark.parametrize("vector", [vector for vector in VECTORS if not vector.read_only], ids=ids)
def test_both_write_the_bytes_of_a_vector(vector: Vector) -> None:
    payload = vector.frame[4:]
    assert msgpack.packb(vector.message) == payload
    assert encode(decode(payload)) == payload


def test_there_is_a_vector_for_each_message() -> None:
    assert {vector.message[0] for vector in VECTORS if not vector.read_only} == set(MESSAGES)


def test_refusal_of_an_impossible_step_is_that_of_the_coordinator() -> None:
    book = formed("a", "b")
    book.heartbeat("a", "b", step=5)
    with pytest.raises(errors.RequestRefused) as refused:
        book.leave("a", step=10**6)
    message = failure(9, refused.value)
    (frame,) = [vector.frame for vector in VECTORS if vector.message[0] == 4 and vector.message[3] == message.code]
    assert encode(message) == frame[4:]


# Between workers.


def test_handshake_of_workers_is_written_as_the_page_says() -> None:
    """With other libraries than forged's: msgpack and the standard library."""
    hello, challenge, answer, accepted = page.peer_vectors()
    for vector in (hello, challenge, answer, accepted):
        assert vector.frame == struct.pack(">I", len(vector.frame) - 4) + msgpack.packb(vector.message)
    key = hmac.digest(PEER_KEY, msgpack.packb(["forged mesh key", "mnist"]), "sha256")
    assert f"`{key.hex()}`" in page.text()

    def proof(*elements: Any) -> bytes:
        return hmac.digest(key, msgpack.packb(elements), "sha256")

    (_, dialler), (_, *versions, listener, shown) = hello.message, challenge.message
    nonces = dialler + listener
    assert shown == proof("challenge", nonces, versions, "mnist", "w0")
    unproven = [*answer.message[:-1], bytes(32)]
    assert answer.message[-1] == proof("answer", nonces, unproven)
    assert accepted.message == [2, proof("accepted", nonces, unproven)]
    session_id = hashlib.blake2b(INCARNATION, digest_size=16, person=b"forged session").digest()
    world = hashlib.blake2b(msgpack.packb(["w0@10.0.0.1:7000", "w1@10.0.0.2:7001"]), digest_size=16).digest()
    assert answer.message[:-1] == [1, versions[1], "mnist", "w0", "w1", session_id, "member", 3, 1, world]


def test_handshake_of_workers_is_proven_to_forged() -> None:
    frames = [vector.frame[4:] for vector in page.peer_vectors()]
    hello, challenge, answer, accepted = map(peer_messages.decode, frames)
    assert [peer_messages.encode(message) for message in (hello, challenge, answer, accepted)] == frames
    assert isinstance(hello, peer_messages.PeerHello)
    assert isinstance(challenge, peer_messages.Challenge)
    assert isinstance(answer, peer_messages.Answer)
    assert isinstance(accepted, peer_messages.Accepted)
    key, nonces = peer_messages.mesh_key(PEER_KEY, "mnist"), peer_messages.nonces_of(hello, challenge)
    assert (challenge.version_min, challenge.version_max) == (peer_messages.VERSION_MIN, peer_messages.VERSION_MAX)
    assert peer_messages.is_challenge_proven(challenge, hello, key, "mnist", "w0")
    assert peer_messages.is_proven(answer, key, nonces)
    assert peer_messages.is_accepted(accepted, answer, key, nonces)
    assert answer.session_id == peer_messages.session_id_of(INCARNATION)
    assert answer.world == peer_messages.digest_of([WorkerId("w0", "10.0.0.1", 7000), WorkerId("w1", "10.0.0.2", 7001)])


def test_the_record_in_a_vector_is_read_as_the_page_says() -> None:
    (raw,) = next(
        message.records
        for message in (decode(vector.frame[4:]) for vector in VECTORS)
        if isinstance(message, Facts) and message.records
    )
    names = [row["element"] for row in page.table("Records")]
    assert [*Record.read(raw).fields()] == [*names[:-1], "fact"]
    assert len(msgpack.unpackb(raw)) == len(names)


# Tables.


def test_the_list_of_messages_is_complete() -> None:
    listed = {int(row["number"]): row["message"].split("]")[0].strip("[") for row in page.table("All messages")}
    assert listed == expected_names()


def expected_names() -> dict[int, str]:
    return {number: NAMES.get(one.__name__, one.__name__) for number, one in MESSAGES.items()}


@pytest.mark.parametrize("number", MESSAGES, ids=lambda number: MESSAGES[number].__name__)
def test_the_fields_of_a_message_are_those_of_the_code(number: int) -> None:
    listed = page.table(f"{number} {expected_names()[number]}")
    assert [(row["field"], row["type"], row["default"]) for row in listed] == list(fields_of(MESSAGES[number]))


def fields_of(message: type[Message]) -> Iterator[tuple[str, str, str]]:
    hints = get_type_hints(message, include_extras=True)
    for field in msgspec.structs.fields(message):
        default = "" if field.required else {"": '""', None: "nil", 0: "0"}[field.default]
        yield field.name, TYPES.get(hints[field.name]) or page.describe(hints[field.name]), default


def test_the_table_of_errors_lists_exactly_the_codes_of_the_edge() -> None:
    listed = [(row["kind"], row["code"]) for row in page.table("Codes")]
    assert len(listed) == len(set(listed))
    assert set(listed) == set(codes_of_the_edge())


def codes_of_the_edge() -> Iterator[tuple[str, str]]:
    for path in EDGE:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                cls = getattr(errors, node.func.id, None)
                if isinstance(cls, type) and issubclass(cls, errors.ForgedError):
                    assert isinstance(node.args[0], ast.Constant), "codes are written where they are raised"
                    yield cls.kind, str(node.args[0].value)


def test_the_kinds_of_errors_are_those_of_the_code() -> None:
    assert {row["kind"] for row in page.table("Errors")} == set(errors.KINDS)


def test_the_limits_are_those_of_the_code() -> None:
    limits = ConnectionLimits()
    expected = {
        "payload before the welcome": limits.hello_bytes_max,
        "payload": FRAME_BYTES_MAX,
        "bytes held by a connection": memory.CONNECTION_BYTES_MAX,
        "bytes held by the connections of a principal or job": memory.PRINCIPAL_BYTES_MAX,
        "bytes held by all connections": memory.DAEMON_BYTES_MAX,
        "requests in flight on a connection": limits.in_flight_max,
        "requests in flight of a principal or job": server.REQUESTS_EACH_MAX,
        "requests in flight of all connections": server.REQUESTS_MAX,
        "a request's time": session.TIMEOUT_MAX_S,
        "unacknowledged replies of a client": UNACKNOWLEDGED_MAX,
        "replies are remembered": REMEMBERED_S,
        "clients with remembered replies": CLIENTS_MAX,
        "of these, for operators only": CLIENTS_RESERVE,
        "bytes of remembered replies": REMEMBERED_BYTES_MAX,
        "streams on a connection": streams.STREAMS_MAX,
        "credit of a stream": messages.CREDIT_MAX,
        "names in a filter": streams.FILTER_NAMES_MAX,
        "characters of a name in a filter": NAME_LENGTH_MAX,
        "facts in a message": streams.BATCH_FACTS_MAX,
        "time for a hello": limits.hello_timeout_s,
        "time for a frame": limits.frame_timeout_s,
        "silence before a ping": limits.ping_after_s,
        "silence": limits.silence_max_s,
        "connections": server.CONNECTIONS_MAX,
        "connections whose hello has not arrived": admission.HANDSHAKES_MAX,
        "connections beyond both for operators": admission.OPERATOR_RESERVE,
        "lifetime of a ticket": tickets.TICKET_TTL_S,
    }
    assert {row["limit"]: float(row["value"].split()[0]) for row in page.table("Limits")} == expected


def test_the_versions_are_those_of_the_code() -> None:
    assert messages.VERSION_MIN == messages.VERSION_MAX == 1
    assert "\nVersion 1. " in page.text()


@pytest.mark.parametrize("part", ["requests", "replies"])
def test_the_tables_of_requests_are_those_of_the_code(part: str) -> None:
    assert page.generated()[part] == page.generate()[part], "run `python -m tests.net.protocol_page`"


def test_the_text_of_a_token_is_written_as_the_page_says() -> None:
    secret = bytes(range(32))
    token_id = hashlib.sha256(b"forged token id\0" + secret).hexdigest()[:12]
    text = f"forged_{token_id}_{base64.urlsafe_b64encode(secret).decode().rstrip('=')}"
    assert encode_token(secret) == (token_id, text)
    assert f"`{secret.hex()}` gives the text\n`{text}`" in page.text()


# The session.


def test_example_session_of_the_page_matches_a_real_daemon(tmp_path: Path) -> None:
    async def play() -> None:
        async with real_daemon(tmp_path) as here:
            with SocketClient(here.unix.removeprefix("unix://")) as client:
                await asyncio.to_thread(client.play, page.session())

    asyncio.run(play())


class SocketClient:
    """A client made of a socket and msgpack."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket = self._connect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def play(self, lines: list[Line]) -> None:
        """Send and expect the messages of the page."""
        expected: list[Any] = []
        for line in lines:
            if line.sender == "<":
                expected.append(line.message)
                continue
            self._hear(expected)
            expected = []
            if line.sender == "reconnect":
                self._socket.close()
                self._socket = self._connect()
            else:
                payload = msgpack.packb(line.message)
                self._socket.sendall(struct.pack(">I", len(payload)) + payload)
        assert self._socket.recv(1) == b"", "after bye the daemon closes"

    def _connect(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(20)
        made.connect(self._path)
        return made

    def _hear(self, expected: list[Any]) -> None:
        heard = [self._receive() for _ in expected]
        for message in heard:
            (found, *_) = [one for one in expected if fits(message, one)] or [None]
            assert found is not None, f"{message} is none of {expected}"
            expected.remove(found)

    def _receive(self) -> Any:
        (length,) = struct.unpack(">I", self._read(4))
        message = msgpack.unpackb(self._read(length))
        return self._receive() if message[0] == 12 else message

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self._socket.recv(count - len(data))
            assert piece, "the daemon closed"
            data += piece
        return data


def fits(found: Any, expected: Any) -> bool:
    """Whether a value matches; `ANY` matches everything."""
    if expected == ANYTHING:
        return True
    if isinstance(expected, list) and isinstance(found, list):
        return len(found) == len(expected) and all(map(fits, found, expected))
    if isinstance(expected, dict) and isinstance(found, dict):
        return found.keys() == expected.keys() and all(fits(found[key], expected[key]) for key in expected)
    return bool(found == expected) and type(found) is type(expected)


def test_fits_matches_placeholders_and_exact_values() -> None:
    assert fits([1, {"a": [2]}], [ANYTHING, {"a": [2]}])
    assert not fits([1, 2], [1])
    assert not fits([1.0], [1])
    assert not fits({"a": 1}, {"b": 1})
