"""Hostile clients on real sockets; after each the daemon must serve a new client."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import pytest

from forged.auth.tokens import encode_token
from forged.kernel.replies import ReplyTable
from forged.net import admission, server
from forged.net.transport.memory import SMALL_BYTES
from forged.net.transport.port import Address
from tests import kernel_fixture
from tests.net.manual_daemon import (
    BYE,
    CLIENT,
    CREDIT,
    ENDED,
    FACTS,
    FAILURE,
    GAP,
    HELLO,
    PING,
    REPLY,
    REQUEST,
    SIGNAL,
    SUBSCRIBE,
    UNSUBSCRIBE,
    WELCOME,
    frame,
    until,
)
from tests.net.raw_client import RawClient, RealDaemon, real_daemon
from tests.net.recording_connections import Certificates

SECRET = bytes(range(32))
POLITE = frame([HELLO, 1, 1, CLIENT])
CONNECTIONS_MAX = 200
CROWD_MAX = 10_000
BATCH = 500
DESCRIPTORS_SPARED = 200
UNHURRIED: dict[str, Any] = {"hello_timeout_s": 3600.0, "frame_timeout_s": 3600.0, "silence_max_s": 86_400.0}
"""Timeouts for a crowd in the daemon's own process: on a busy machine it is later with its hellos than real clients."""


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[RealDaemon]:
    async with real_daemon(tmp_path) as made:
        yield made


@pytest.fixture
def room_for_a_crowd() -> Iterator[None]:
    """Raise the limit of open files for the crowd; both ends of each connection are in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CROWD_MAX + 2 * CONNECTIONS_MAX + BATCH + DESCRIPTORS_SPARED
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"a crowd of {CROWD_MAX} takes {wanted} open files, and this process may have {hard} at most")
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def swift_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SWEEP_INTERVAL_S", 0.02)


@pytest.fixture(params=["unix", "tcp"])
def endpoint(here: RealDaemon, request: pytest.FixtureRequest) -> str:
    return here.unix if request.param == "unix" else here.tcp


def header(length: int) -> bytes:
    return struct.pack(">I", length)


def framed(payload: bytes) -> bytes:
    return header(len(payload)) + payload


BAD_BYTES = {
    "HTTP": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "frame_length"),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(512), "frame_length"),
    "a length of zero": (header(0), "frame_length"),
    "a length over the limit": (header(4 << 20) + bytes(100), "frame_length"),
    "the greatest length": (header(2**32 - 1), "frame_length"),
    "no msgpack": (framed(b"\xc1\xc1\xc1"), "message_invalid"),
    "a map": (frame({"hello": 1}), "message_invalid"),
    "an unknown message": (frame([77, 1, 2]), "message_invalid"),
    "deep nesting": (framed(b"\x91" * 10_000), "message_invalid"),
    "deep nesting behind what is known": (framed(b"\x93\x0c\x01" + b"\x91" * 10_000), "message_invalid"),
    "an array of four billion": (framed(b"\xdd\xff\xff\xff\xff\x00"), "message_invalid"),
    "too few elements": (frame([HELLO, 1]), "message_invalid"),
    "wrong types": (frame([HELLO, "1", 1, CLIENT]), "message_invalid"),
}
BEFORE_HELLO = BAD_BYTES | {
    "a request": (frame([REQUEST, 1, 0, "PingDaemon", {}]), "hello_expected"),
    "a ping": (frame([PING, 1]), "hello_expected"),
    "a version that is too old": (frame([HELLO, 0, 0, CLIENT]), "version_mismatch"),
    "a version that is too new": (frame([HELLO, 2, 9, CLIENT]), "version_mismatch"),
    "a short id": (frame([HELLO, 1, 1, b"me"]), "client_invalid"),
    "a token that never was": (frame([HELLO, 1, 1, CLIENT, "", encode_token(bytes(32))[1]]), "token_unknown"),
    "a ticket that never was": (frame([HELLO, 1, 1, CLIENT, "", None, bytes(16)]), "ticket_unknown"),
    "a hello that is too large": (frame([HELLO, 1, 1, CLIENT, "x" * 20_000]), "frame_length"),
}
AFTER_HELLO = BAD_BYTES | {
    "a length over the limit": (header((4 << 20) + 1), "frame_length"),
    "another hello": (POLITE, "message_unexpected"),
    "a welcome": (frame([WELCOME, 1, "a", "p", "r", "h", 1, 1, 1, 1]), "message_unexpected"),
    "facts": (frame([FACTS, 1, 1, []]), "message_unexpected"),
    "a request without a number": (frame([REQUEST, 0, 0, "PingDaemon", {}]), "message_invalid"),
    "a time that is none": (frame([REQUEST, 1, 0, "PingDaemon", {}, float("nan")]), "message_invalid"),
    "streams numbered twice": (frame([SUBSCRIBE, 1, None, "", [], [], 1]) * 2, "stream_taken"),
    "credit that overflows": (
        frame([SUBSCRIBE, 1, None, "", [], [], 65_536]) + frame([CREDIT, 1, 65_536]),
        "credit_overflow",
    ),
    "credit that is none": (frame([CREDIT, 1, -5]), "message_invalid"),
    "a signal of another shape": (frame([SIGNAL, kernel_fixture.Tick.__name__, {"at": "noon"}]), "signal_invalid"),
}


@pytest.mark.parametrize(("data", "code"), BEFORE_HELLO.values(), ids=BEFORE_HELLO.keys())
async def test_bad_bytes_before_the_hello_are_refused_and_new_clients_are_served(
    here: RealDaemon, endpoint: str, data: bytes, code: str
) -> None:
    async with RawClient.connected(endpoint) as client:
        client.write(data)
        assert await client.final_error_code() == code
    await here.serves_new_clients()


@pytest.mark.parametrize(("data", "code"), AFTER_HELLO.values(), ids=AFTER_HELLO.keys())
async def test_bad_bytes_after_the_hello_are_refused_and_new_clients_are_served(
    here: RealDaemon, endpoint: str, data: bytes, code: str
) -> None:
    async with RawClient.greeted(endpoint) as client:
        client.write(data)
        assert await client.final_error_code() == code
    await here.serves_new_clients()


REFUSED: dict[str, tuple[list[Any], str]] = {
    "an unknown method": ([REQUEST, 1, 0, "DestroyWorld", {}], "request_unknown"),
    "wrong types": ([REQUEST, 1, 0, "CreateJob", {"job": 5}], "request_invalid"),
    "a list of fields": ([REQUEST, 1, 0, "CreateJob", ["a"]], "request_invalid"),
    "a name that is none": ([REQUEST, 1, 0, "CreateJob", {"job": "../../etc/passwd"}], "name_invalid"),
}


@pytest.mark.parametrize(("message", "code"), REFUSED.values(), ids=REFUSED.keys())
async def test_a_bad_request_is_refused_and_its_connection_lives(
    here: RealDaemon, endpoint: str, message: list[Any], code: str
) -> None:
    async with RawClient.greeted(endpoint) as client:
        await client.send(*message)
        assert (await client.receive())[1:4] == [1, "refused", code]
        assert await client.request(2, "PingDaemon") == {}


@pytest.mark.parametrize("data", [b"", b"\x00", header(100) + b"half a frame", POLITE[:9]])
async def test_disconnect_within_a_message_leaves_no_session(here: RealDaemon, endpoint: str, data: bytes) -> None:
    async with RawClient.connected(endpoint) as client:
        client.write(data)
        await until(lambda: here.sessions == 1)
    await until(lambda: here.sessions == 0)
    await here.serves_new_clients()


async def test_hello_sent_byte_by_byte_is_accepted(here: RealDaemon, endpoint: str) -> None:
    async with RawClient.connected(endpoint) as client:
        for index in range(len(POLITE)):
            await client.send_bytes(POLITE[index : index + 1])
        assert (await client.receive())[0] == WELCOME


@pytest.mark.usefixtures("swift_sweeps")
async def test_client_that_stops_within_a_frame_is_disconnected(tmp_path: Path) -> None:
    async with real_daemon(tmp_path, frame_timeout_s=0.1) as here, RawClient.greeted(here.tcp) as client:
        client.write(header(1000) + b"the beginning")
        await here.serves_new_clients()
        assert await client.final_error_code() == "frame_slow"


@pytest.mark.usefixtures("swift_sweeps")
async def test_client_without_hello_is_disconnected(tmp_path: Path) -> None:
    async with real_daemon(tmp_path, hello_timeout_s=0.1) as here, RawClient.connected(here.tcp) as client:
        assert await client.final_error_code() == "hello_late"
        await here.serves_new_clients()


@pytest.mark.usefixtures("swift_sweeps")
async def test_silent_client_is_disconnected(tmp_path: Path) -> None:
    async with real_daemon(tmp_path, silence_max_s=0.1) as here, RawClient.greeted(here.tcp) as client:
        assert await client.final_error_code() == "silent"
        await here.serves_new_clients()


@pytest.mark.usefixtures("swift_sweeps")
@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\n\r\n", POLITE, b"\x16\x03\x01"])
async def test_plain_text_client_on_a_tls_port_leaves_no_session(
    tmp_path: Path, certificates: Certificates, data: bytes
) -> None:
    async with real_daemon(tmp_path, tls=certificates.server(), connections_max=5, hello_timeout_s=1.0) as here:
        for _ in range(20):
            with await _dial(here.tcp) as plain:
                await asyncio.get_running_loop().sock_sendall(plain, data)
        await until(lambda: here.sessions == 0)
        async with RawClient.greeted(here.unix) as client:
            assert await client.request(1, "PingDaemon") == {}


async def test_revoked_token_ends_its_connections_and_cannot_be_reused(here: RealDaemon) -> None:
    async with RawClient.greeted(here.unix) as operator:
        await operator.request(1, "CreateToken", name="guest", role="viewer", secret=SECRET)
        token_id, text = encode_token(SECRET)
        async with RawClient.greeted(here.tcp, text) as guest:
            assert await guest.request(1, "PingDaemon") == {}
            assert await guest.request(2, "CreateJob", job="a") == "forbidden"
            await operator.request(2, "RevokeToken", token_id=token_id)
            assert await guest.final_error_code() == "token_revoked"
        async with RawClient.connected(here.tcp) as again:
            await again.hello(text)
            assert await again.final_error_code() == "token_revoked"
    await here.serves_new_clients()


@pytest.mark.usefixtures("swift_sweeps")
async def test_expired_token_ends_its_connections_and_cannot_be_reused(tmp_path: Path) -> None:
    async with real_daemon(tmp_path) as here:
        async with RawClient.greeted(here.unix) as operator:
            await operator.request(1, "CreateToken", name="guest", role="viewer", secret=SECRET, ttl_s=60.0)
        text = encode_token(SECRET)[1]
        async with RawClient.greeted(here.tcp, text) as guest:
            here.clock.ahead_s = 60.0
            assert await guest.final_error_code() == "token_expired"
        async with RawClient.connected(here.tcp) as again:
            await again.hello(text)
            assert await again.final_error_code() == "token_expired"
        await here.serves_new_clients()


@pytest.mark.usefixtures("room_for_a_crowd")
async def test_thousands_of_connections_over_the_limit_are_refused_and_existing_clients_are_served(
    tmp_path: Path,
) -> None:
    async with real_daemon(tmp_path, connections_max=CONNECTIONS_MAX, handshakes_max=2 * BATCH, **UNHURRIED) as here:
        async with RawClient.greeted(here.tcp) as inside:
            with ExitStack() as crowd:
                for _ in range(CONNECTIONS_MAX - 1):
                    crowd.enter_context(await _dial_politely(here.tcp))
                await until(lambda: here.sessions == CONNECTIONS_MAX)
                for _ in range(CROWD_MAX // BATCH):
                    batch = [crowd.enter_context(await _dial_politely(here.tcp)) for _ in range(BATCH)]
                    assert await inside.request(1, "PingDaemon") == {}
                    refusals = await asyncio.gather(*map(_rest_of, batch))
                    assert [refusal for refusal in refusals if b"too_many_connections" not in refusal] == []
                await until(lambda: here.sessions == CONNECTIONS_MAX)
                async with RawClient.greeted(here.unix) as operator:
                    assert (await operator.request(1, "ReadStatus"))["connections"] == CONNECTIONS_MAX + 1
            await until(lambda: here.sessions == 1)
            assert await inside.request(1, "PingDaemon") == {}
        await here.serves_new_clients()
        await until(lambda: here.sessions == 0)


async def test_silent_connections_keep_out_neither_operators_nor_new_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "SILENT_MIN_S", 0.0)
    async with real_daemon(tmp_path, handshakes_max=20, hello_timeout_s=60.0) as here:
        with ExitStack() as crowd:
            for _ in range(100):
                crowd.enter_context(await _dial(here.tcp))
            await until(lambda: here.sessions == 20)
            await here.serves_new_clients()
            await until(lambda: here.sessions == 19)


async def test_job_with_all_connections_gives_way_to_another_job_and_not_to_its_own_tokens(tmp_path: Path) -> None:
    async with real_daemon(tmp_path, connections_max=20) as here, AsyncExitStack() as crowd:
        async with RawClient.greeted(here.unix) as operator:
            tokens = [await create_token(operator, number, job) for number, job in enumerate("aaab", start=1)]
        hogs = [await crowd.enter_async_context(RawClient.greeted(here.tcp, tokens[0])) for _ in range(20)]
        for text in tokens[1:]:
            async with RawClient.greeted(here.tcp, text) as client:
                assert await client.request(1, "PingDaemon") == {}
        assert await hogs[0].request(1, "PingDaemon") == {}
        assert await hogs[-1].final_error_code() == "too_many_connections"
        others = [await crowd.enter_async_context(RawClient.greeted(here.tcp, tokens[3])) for _ in range(10)]
        async with RawClient.connected(here.tcp) as client:
            await client.hello(tokens[3])
            assert await client.final_error_code() == "too_many_connections"
        await here.serves_new_clients()
        assert await others[0].request(1, "PingDaemon") == {}


async def test_job_that_fills_the_table_of_replies_locks_out_neither_operators_nor_other_jobs(tmp_path: Path) -> None:
    async with real_daemon(tmp_path) as here:
        here.daemon.ledger.replies = ReplyTable(clients_max=64)
        async with RawClient.greeted(here.unix) as operator:
            hostile, other = [await create_token(operator, number, job) for number, job in enumerate("ab", start=1)]
            for number, job in enumerate("ab", start=3):
                await operator.request(number, "CreateJob", job=job)
        codes = []
        for _ in range(70):
            async with RawClient.greeted(here.tcp, hostile) as client:
                codes.append(await client.request(1, "AddNote", job="a", text="x"))
        assert codes == [{}] * 60 + ["reply_memory_full"] * 10
        async with RawClient.greeted(here.tcp, other) as client:
            assert await client.request(1, "AddNote", job="b", text="x") == {}
        async with RawClient.greeted(here.unix) as operator:
            revoked = await operator.request(1, "RevokeToken", token_id=encode_token(bytes([1]) * 32)[0])
            assert revoked["revoked_at"] is not None


SMALL_MEMORY: dict[str, Any] = {
    "frame_bytes_max": 256 << 10,
    "connection_bytes_max": 512 << 10,
    "principal_bytes_max": 1 << 20,
    "daemon_bytes_max": 4 << 20,
}
HOGS = 40


async def test_unfinished_frames_of_one_job_hold_its_share_and_other_clients_send_large_frames(tmp_path: Path) -> None:
    async with real_daemon(tmp_path, **SMALL_MEMORY) as here, AsyncExitStack() as crowd:
        async with RawClient.greeted(here.unix) as operator:
            hostile, other = [await create_token(operator, number, job) for number, job in enumerate("ab", start=1)]
        for _ in range(HOGS):
            hog = await crowd.enter_async_context(RawClient.greeted(here.tcp, hostile))
            hog.write(header(256 << 10) + bytes(250 << 10))
        await until(lambda: sum(session._waits_for_memory for session in here.daemon.server.sessions) == HOGS - 3)
        held = sum(len(session._decoder._rest) for session in here.daemon.server.sessions)
        assert held <= (1 << 20) + HOGS * SMALL_BYTES
        large = {"job": "b", "settings": {"x": "x" * (200 << 10)}}
        for endpoint, token in ((here.tcp, other), (here.unix, None)):
            async with RawClient.greeted(endpoint, token) as client:
                assert await client.request(1, "CreateJob", **large) == "settings_too_large"
        await here.serves_new_clients()


async def test_large_frames_of_one_principal_take_turns_and_all_are_answered(tmp_path: Path) -> None:
    async with real_daemon(tmp_path, **SMALL_MEMORY) as here, AsyncExitStack() as crowd:
        clients = [await crowd.enter_async_context(RawClient.greeted(here.tcp)) for _ in range(HOGS)]
        large = {"job": "a", "settings": {"x": "x" * (200 << 10)}}
        answers = await asyncio.gather(*(client.request(1, "CreateJob", **large) for client in clients))
        assert answers == ["settings_too_large"] * HOGS
        assert here.daemon.server.memory.used == 0


@pytest.mark.usefixtures("swift_sweeps")
async def test_unfinished_frame_returns_its_memory_after_the_timeout(tmp_path: Path) -> None:
    async with real_daemon(tmp_path, **SMALL_MEMORY, frame_timeout_s=0.2) as here, AsyncExitStack() as crowd:
        hogs = [await crowd.enter_async_context(RawClient.greeted(here.tcp)) for _ in range(6)]
        for hog in hogs:
            hog.write(header(256 << 10) + bytes(250 << 10))
        assert await asyncio.gather(*(hog.final_error_code() for hog in hogs)) == ["frame_slow"] * 6
        await until(lambda: here.daemon.server.memory.used == 0)


async def test_unread_streams_of_one_job_hold_its_share_and_other_jobs_read_theirs(tmp_path: Path) -> None:
    async with real_daemon(tmp_path, **SMALL_MEMORY) as here, AsyncExitStack() as crowd:
        async with RawClient.greeted(here.unix) as operator:
            hostile, other = [await create_token(operator, number, job) for number, job in enumerate("ab", start=1)]
            for number, job in enumerate("ab", start=3):
                await operator.request(number, "CreateJob", job=job)
            for number in range(5, 705):
                await operator.request(number, "AddNote", job="a", text="x" * 4000)
            await operator.request(705, "AddNote", job="b", text="x")
            for _ in range(HOGS):
                hog = await crowd.enter_async_context(RawClient.greeted(here.unix, hostile))
                hog.stop_reading()
                for stream in range(1, 65):
                    hog.write(frame([SUBSCRIBE, stream, -1, "", [], [], 65_536]))
            sessions = here.daemon.server.sessions
            await until(lambda: not any(session.greeted and not session.write_paused for session in list(sessions)[1:]))
            transports = [session._transport for session in sessions if session._transport is not None]
            unread = sum(transport.get_write_buffer_size() for transport in transports)
            assert unread <= (1 << 20) + (1 << 19)
            assert here.daemon.server.memory.used <= (1 << 20) + (1 << 19)
            assert (await operator.request(706, "ReadStatus"))["jobs"] == 2
        async with RawClient.greeted(here.tcp, other) as client:
            await client.send(SUBSCRIBE, 1, -1, "", ["NoteAdded"], [], 16)
            assert (await _read_until_note(client))[3] == "b"


async def _read_until_note(reader: RawClient) -> list[Any]:
    while True:
        message = await reader.receive()
        if message[0] == FACTS and message[3]:
            record: list[Any] = message[3][0]
            return record


async def test_filters_of_streams_count_as_memory_of_their_connection(tmp_path: Path) -> None:
    async with real_daemon(tmp_path, **SMALL_MEMORY) as here, RawClient.greeted(here.tcp) as client:
        names = ["x" * 120] * 256
        for stream in range(1, 10):
            await client.send(SUBSCRIBE, stream, None, "", names, [], 1)
        answers = [await client.receive() for _ in range(9)]
        assert sorted(message[0] for message in answers) == [FACTS] * 8 + [ENDED]
        assert [message[1:4:2] for message in answers if message[0] == ENDED] == [[9, "too_many_streams"]]
        await client.send(UNSUBSCRIBE, 1)
        await client.send(SUBSCRIBE, 11, None, "", names, [], 1)
        assert (await client.receive())[0] == FACTS


async def create_token(operator: RawClient, number: int, job: str, role: str = "worker") -> str:
    """The text of a new token for one job."""
    secret = bytes([number]) * 32
    await operator.request(number, "CreateToken", name=f"token-{number}", role=role, secret=secret, jobs=[job])
    return encode_token(secret)[1]


async def _dial_politely(endpoint: str) -> socket.socket:
    dialled = await _dial(endpoint)
    await asyncio.get_running_loop().sock_sendall(dialled, frame([HELLO, 1, 1, os.urandom(16)]))
    return dialled


async def _dial(endpoint: str) -> socket.socket:
    address = Address.parse(endpoint)
    dialled = socket.socket()
    dialled.setblocking(False)
    await asyncio.get_running_loop().sock_connect(dialled, (address.host, address.port))
    return dialled


async def _rest_of(one: socket.socket) -> bytes:
    """Everything that the daemon sends until it closes the connection."""
    received = b""
    while data := await asyncio.get_running_loop().sock_recv(one, 1000):
        received += data
    return received


async def test_subscriber_that_never_reads_uses_bounded_memory_and_gets_a_gap(tmp_path: Path) -> None:
    async with real_daemon(tmp_path, journal_facts_max=200) as here:
        async with RawClient.greeted(here.unix) as reader, RawClient.greeted(here.unix) as writer:
            await writer.request(1, "CreateJob", job="a")
            await reader.send(SUBSCRIBE, 1, None, "", [], [], 65_536)
            assert (await reader.receive())[0] == FACTS
            published: list[int] = []
            here.daemon.bus.on_publish.append(lambda records: published.extend(record.id for record in records))
            session = next(iter(here.daemon.server.streaming))
            reader.stop_reading()
            for number in range(2, 2000):
                await writer.request(number, "AddNote", job="a", text="x" * 4000)
            assert session.write_paused
            assert session._transport is not None
            assert session._transport.get_write_buffer_size() < 2 << 20
            await here.serves_new_clients()
            reader.read_again()
            newest = here.daemon.journal.last
            seen, missed = await _read_until(reader, newest)
        assert missed
        ids = set(seen) | {fact_id for first, last in missed for fact_id in range(first, last + 1)}
        # Positions of handlers that are stored meanwhile use ids, too, and a fact may be published meanwhile.
        assert {fact_id for fact_id in published if fact_id <= max(ids)} <= ids
        assert max(ids) >= newest


async def _read_until(reader: RawClient, last: int) -> tuple[list[int], list[tuple[int, int]]]:
    seen: list[int] = []
    missed: list[tuple[int, int]] = []
    while not seen or seen[-1] < last:
        message = await reader.receive()
        if message[0] == GAP:
            missed.append((message[2], message[3]))
        else:
            seen += [record[0] for record in message[3]]
    return seen, missed


async def test_client_that_never_reads_replies_is_no_longer_read(here: RealDaemon) -> None:
    async with RawClient.greeted(here.unix) as client:
        await client.request(1, "CreateJob", job="a", settings={"x": "x" * 60_000})
        (session,) = here.daemon.server.sessions
        for number in range(2, 2002):
            client.write(frame([REQUEST, number, 1, "ShowJob", {"job": "a"}]))
        await until(lambda: session.write_paused)
        await here.serves_new_clients()
        assert session._transport is not None
        assert session._transport.get_write_buffer_size() < 3 << 20
        answered = [(await client.receive())[:2] for _ in range(2000)]
        assert answered == [[REPLY, number] for number in range(2, 2002)]


async def test_requests_over_the_in_flight_limit_wait_and_none_is_lost(tmp_path: Path) -> None:
    async with real_daemon(tmp_path, in_flight_max=8) as here, RawClient.greeted(here.tcp) as client:
        client.write(frame([REQUEST, 1, 0, "CreateJob", {"job": "a"}]))
        for number in range(2, 3002):
            client.write(frame([REQUEST, number, 0, "AddNote", {"job": "a", "text": "x"}]))
        await here.serves_new_clients()
        answered = [(await client.receive())[:2] for _ in range(3001)]
        assert sorted(answered) == [[REPLY, number] for number in range(1, 3002)]
        assert here.daemon.journal.last >= 3001


async def test_repeated_request_frame_is_executed_once(here: RealDaemon, endpoint: str) -> None:
    async with RawClient.greeted(endpoint) as client:
        await client.request(1, "CreateJob", job="a")
        note = frame([REQUEST, 2, 1, "AddNote", {"job": "a", "text": "once"}])
        before = len(here.daemon.journal)
        client.write(note + note)
        assert [await client.receive() for _ in range(2)] == [[REPLY, 2, {}]] * 2
        assert len(here.daemon.journal) == before + 1


async def test_replies_to_unknown_calls_are_ignored(here: RealDaemon, endpoint: str) -> None:
    async with RawClient.greeted(endpoint) as client:
        client.write(frame([REPLY, 1, {}]) + frame([FAILURE, 2, "refused", "c", "t"]))
        assert await client.request(1, "PingDaemon") == {}
    await here.serves_new_clients()


async def test_messages_after_bye_are_ignored(here: RealDaemon, endpoint: str) -> None:
    async with RawClient.greeted(endpoint) as client:
        client.write(frame([BYE, 0]) + frame([REQUEST, 1, 0, "CreateJob", {"job": "a"}]))
        assert await client.final_error_code() == ""
    assert len(here.daemon.jobs.book) == 0
    await here.serves_new_clients()


async def test_connection_reset_during_a_flood_of_replies_leaves_no_session(here: RealDaemon) -> None:
    async with RawClient.greeted(here.tcp) as client:
        for number in range(1, 500):
            client.write(frame([REQUEST, number, 0, "ListHandlers", {}]))
        await client.receive()
    await until(lambda: here.sessions == 0)
    await here.serves_new_clients()


async def test_new_clients_are_served_during_simultaneous_attacks(here: RealDaemon) -> None:
    async def harm(data: bytes, polite: bool) -> None:
        meet = RawClient.greeted if polite else RawClient.connected
        async with meet(here.tcp) as client:
            client.write(data)
            await client.final_error_code()

    harmful = [harm(data, False) for data, _ in BEFORE_HELLO.values()]
    harmful += [harm(data, True) for data, _ in AFTER_HELLO.values()]
    await asyncio.gather(*harmful, *(here.serves_new_clients() for _ in range(10)))
    await until(lambda: here.sessions == 0)
