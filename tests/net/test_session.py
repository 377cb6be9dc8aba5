from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forged.auth.model import Principal, Role
from forged.auth.tokens import encode_token
from forged.daemon import Daemon
from forged.errors import ForgedError, RequestRefused, Unavailable
from forged.kernel.messages import Call, Nothing, Request, Signal
from forged.net.protocol.frames import FRAME_BYTES_MAX
from forged.net.protocol.streams import STREAM_TURNS, STREAMS_MAX
from forged.net.session import Session
from tests.net.manual_daemon import (
    BYE,
    CANCEL,
    CLIENT,
    CREDIT,
    ENDED,
    FACTS,
    FAILURE,
    GAP,
    HELLO,
    PING,
    PONG,
    REMOTE,
    REPLY,
    REQUEST,
    SIGNAL,
    SUBSCRIBE,
    UNSUBSCRIBE,
    WELCOME,
    WORKER,
    ManualClient,
    ManualDaemon,
    Message,
    frame,
    manual_daemon,
    until,
)

SECRET = bytes(range(32))
OTHER_CLIENT = bytes(16)


class WaitForGate(Request[Nothing], frozen=True):
    """A request that is answered when the test opens the gate."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = None


class SendBack(Request[dict[str, Any]], frozen=True):
    """A request that is answered with a prepared reply."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = None


class AskClient(Request[Nothing], frozen=True):
    """A request from the daemon to its clients."""

    word: str


class LightBlinked(Signal, frozen=True):
    """A signal that workers may send."""

    external: ClassVar[bool] = True

    job: str
    light: str

    @property
    def key(self) -> str:
        return self.light


class FuseBlown(Signal, frozen=True):
    """A signal that clients may not send."""

    job: str


class Extras:
    """The additional handlers of the test daemon."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.waiting = 0
        self.back: Any = {}
        self.signals: list[Signal] = []
        self.senders: list[Principal] = []
        """Of the signals, in the same order."""

    def extend(self, daemon: Daemon) -> None:
        daemon.bus.serve(WaitForGate, self.wait, owner="test")
        daemon.bus.serve(SendBack, lambda request, call: self.back, owner="test")
        daemon.bus.on_signal(LightBlinked, self.blinked, name="test.light")
        daemon.bus.on_signal(FuseBlown, self.blinked, name="test.light")

    async def wait(self, request: WaitForGate, call: Call) -> Nothing:
        self.waiting += 1
        try:
            await self.gate.wait()
        finally:
            self.waiting -= 1
        return Nothing()

    def blinked(self, signal: Signal, call: Call) -> None:
        self.signals.append(signal)
        self.senders.append(call.principal)


@pytest.fixture
def extras() -> Extras:
    return Extras()


@pytest.fixture
async def here(tmp_path: Path, extras: Extras) -> AsyncIterator[ManualDaemon]:
    async with manual_daemon(tmp_path, extend=extras.extend, in_flight_max=4) as made:
        yield made


async def told(client: ManualClient) -> tuple[str, str]:
    """The kind and code of the failure that ended the connection."""
    message = await client.next(FAILURE)
    assert message[1] == 0
    await client.lost()
    return message[2], message[3]


async def refused(client: ManualClient, method: str, number: int = 1, **fields: Any) -> tuple[str, str]:
    """The kind and code of the failure of a request."""
    client.request(number, method, **fields)
    message = await client.next(FAILURE)
    assert message[1] == number
    return message[2], message[3]


def only_session(here: ManualDaemon) -> Session:
    (session,) = here.server.sessions
    return session


async def token(here: ManualDaemon, role: Role, jobs: list[str] | None = None, ttl_s: float | None = None) -> str:
    """A new token's text."""
    operator = await here.greeted(client=OTHER_CLIENT)
    await here.ask(operator, "CreateToken", name="client", role=role, secret=SECRET, jobs=jobs, ttl_s=ttl_s)
    operator.send(BYE, 1)
    await operator.lost()
    return encode_token(SECRET)[1]


# Hello.


async def test_welcome_has_version_limits_and_history(here: ManualDaemon) -> None:
    client = here.client()
    client.hello()
    welcome = await client.next()
    assert welcome[:6] == [WELCOME, 1, "forged/0.1.0", "unix:0", "operator", "history-1"]
    assert welcome[6:] == [here.daemon.journal.last, 1, FRAME_BYTES_MAX, 4, 0]


@pytest.mark.parametrize(("lowest", "highest"), [(0, 1), (1, 1), (1, 9), (-3, 300)])
async def test_of_the_versions_that_both_speak_one_is_chosen(here: ManualDaemon, lowest: int, highest: int) -> None:
    client = here.client()
    client.send(HELLO, lowest, highest, CLIENT)
    assert (await client.next())[:2] == [WELCOME, 1]


@pytest.mark.parametrize(("lowest", "highest"), [(0, 0), (2, 3), (9, 1), (1, 0)])
async def test_unsupported_version_is_refused_with_the_supported_range(
    here: ManualDaemon, lowest: int, highest: int
) -> None:
    client = here.client()
    client.send(HELLO, lowest, highest, CLIENT)
    message = await client.next(FAILURE)
    assert message[1:4] == [0, "peer", "version_mismatch"]
    assert "1 to 1" in message[4]
    await client.lost()
    await here.serves_new_clients()


@pytest.mark.parametrize(
    "message",
    [
        [REQUEST, 1, 0, "PingDaemon", {}],
        [PING, 1],
        [PONG, 1],
        [FAILURE, 0, "peer", "x", "x"],
        [SUBSCRIBE, 1, -1, "", [], [], 1],
        [BYE, 0],
        [WELCOME, 1, "a", "p", "r", "h", 1, 1, 1, 1],
    ],
)
async def test_messages_before_the_hello_are_refused(here: ManualDaemon, message: Message) -> None:
    client = here.client()
    client.send(*message)
    assert await told(client) == ("peer", "hello_expected")
    await here.serves_new_clients()


async def test_a_second_hello_is_unexpected(here: ManualDaemon) -> None:
    client = await here.greeted()
    client.hello()
    assert await told(client) == ("peer", "message_unexpected")
    await here.serves_new_clients()


async def test_a_late_hello_is_not_waited_for(here: ManualDaemon) -> None:
    client = here.client()
    here.sweep(5.0)
    assert client.heard() == []
    here.sweep(0.1)
    assert await told(client) == ("peer", "hello_late")
    assert here.server.sessions == {}


@pytest.mark.parametrize("size", [0, 15, 17])
async def test_a_client_s_id_has_sixteen_bytes(here: ManualDaemon, size: int) -> None:
    client = here.client()
    client.hello(bytes(size))
    assert await told(client) == ("peer", "client_invalid")


async def test_a_hello_may_not_be_large(here: ManualDaemon) -> None:
    client = here.client()
    client.send(HELLO, 1, 1, CLIENT, "x" * (16 << 10))
    assert await told(client) == ("peer", "frame_length")


async def test_a_ticket_that_was_not_given_here_is_refused(here: ManualDaemon) -> None:
    client = here.client()
    client.send(HELLO, 1, 1, CLIENT, "", None, b"not a ticket")
    assert await told(client) == ("peer", "ticket_unknown")


async def test_hello_is_accepted_while_the_daemon_admits_no_requests(
    here: ManualDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(here.daemon.bus.dispatcher, "in_flight", 1_000_000)
    client = await here.greeted(WORKER)
    assert not client.transport.reading
    monkeypatch.setattr(here.daemon.bus.dispatcher, "in_flight", 0)
    await until(lambda: client.transport.reading)
    assert await here.ask(client, "PingDaemon") == {}


# Rights.


async def test_remote_client_without_token_is_refused_with_instructions(here: ManualDaemon) -> None:
    client = here.client(REMOTE)
    client.hello()
    message = await client.next(FAILURE)
    assert message[1:4] == [0, "refused", "token_required"]
    assert "forgectl tokens create" in message[5]
    await here.serves_new_clients()


async def test_remote_client_with_a_token_has_its_principal(here: ManualDaemon) -> None:
    text = await token(here, Role.VIEWER)
    client = here.client(REMOTE)
    client.hello(token=text)
    assert (await client.next(WELCOME))[3:5] == ["client", "viewer"]


async def test_a_token_that_was_never_issued_is_refused_even_to_the_operator(here: ManualDaemon) -> None:
    client = here.client()
    client.hello(token=encode_token(bytes(32))[1])
    assert await told(client) == ("refused", "token_unknown")
    await here.serves_new_clients()


async def test_expired_token_is_refused_when_reused(here: ManualDaemon) -> None:
    text = await token(here, Role.VIEWER, ttl_s=60.0)
    here.clock.now += 60.0
    client = here.client(REMOTE)
    client.hello(token=text)
    assert await told(client) == ("refused", "token_expired")
    await here.serves_new_clients()


async def test_a_token_that_expires_while_its_bearer_is_connected_ends_the_connection(here: ManualDaemon) -> None:
    text = await token(here, Role.VIEWER, ttl_s=3.0)
    client = await here.greeted(REMOTE, token=text)
    here.sweep(2.9)
    assert await here.ask(client, "PingDaemon") == {}
    here.sweep(0.1)
    assert await told(client) == ("refused", "token_expired")
    await here.serves_new_clients()


async def test_a_token_that_is_revoked_while_its_bearer_is_connected_ends_the_connection(here: ManualDaemon) -> None:
    text = await token(here, Role.VIEWER)
    client = await here.greeted(REMOTE, token=text)
    operator = await here.greeted(client=OTHER_CLIENT)
    await here.ask(operator, "RevokeToken", number=2, token_id=encode_token(SECRET)[0])
    assert await told(client) == ("refused", "token_revoked")
    again = here.client(REMOTE)
    again.hello(token=text)
    assert await told(again) == ("refused", "token_revoked")
    await here.serves_new_clients()


async def test_deciding_request_of_a_viewer_is_refused_and_changes_nothing(here: ManualDaemon) -> None:
    client = await here.greeted(REMOTE, token=await token(here, Role.VIEWER))
    before = here.daemon.ledger.revision
    assert await refused(client, "CreateJob", job="a") == ("refused", "forbidden")
    assert await refused(client, "CreateToken", 2, name="x", role="operator", secret=SECRET) == ("refused", "forbidden")
    assert here.daemon.ledger.revision == before
    assert await here.ask(client, "PingDaemon", number=3) == {}
    await here.serves_new_clients()


async def test_request_for_another_job_is_refused(here: ManualDaemon) -> None:
    client = await here.greeted(REMOTE, token=await token(here, Role.OPERATOR, ["a"]))
    assert (await here.ask(client, "CreateJob", job="a"))["name"] == "a"
    assert await refused(client, "CreateJob", 2, job="b") == ("refused", "forbidden")


# Requests.


async def test_a_request_is_answered_under_its_number(here: ManualDaemon) -> None:
    client = await here.greeted()
    assert (await here.ask(client, "CreateJob", number=41, job="a"))["name"] == "a"


async def test_replies_are_sent_in_order_of_completion(here: ManualDaemon, extras: Extras) -> None:
    client = await here.greeted()
    client.request(1, "WaitForGate")
    client.request(2, "PingDaemon")
    assert (await client.next(REPLY))[1] == 2
    extras.gate.set()
    assert (await client.next(REPLY))[1] == 1


async def test_an_unknown_method_is_refused_and_named(here: ManualDaemon) -> None:
    client = await here.greeted()
    client.request(1, "DestroyWorld" * 100)
    message = await client.next(FAILURE)
    assert message[1:4] == [1, "refused", "request_unknown"]
    assert "DestroyWorld" in message[4]
    assert len(message[4]) < 200
    await here.serves_new_clients()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"job": 5}, "$.job"),
        ({"job": "a", "settings": {"x": [1]}}, "$.settings"),
        ({}, "`job`"),
        ([], "Expected `object`"),
        (None, "Expected `object`"),
    ],
)
async def test_wrong_types_are_refused_by_field(here: ManualDaemon, fields: Any, expected: str) -> None:
    client = await here.greeted()
    client.send(REQUEST, 1, 0, "CreateJob", fields)
    message = await client.next(FAILURE)
    assert message[1:4] == [1, "refused", "request_invalid"]
    assert expected in message[4]
    assert await here.ask(client, "PingDaemon", number=2) == {}


@pytest.mark.parametrize("body", [b"\x81\xa3job\xa1\xff", b"\x81\xa1\xff\xc0"])
async def test_a_body_that_cannot_be_read_is_refused_and_the_connection_lives(here: ManualDaemon, body: bytes) -> None:
    client = await here.greeted()
    payload = b"\x95\x02\x01\x00\xa9CreateJob" + body
    client.send_bytes(len(payload).to_bytes(4, "big") + payload)
    message = await client.next(FAILURE)
    assert message[1:4] == [1, "refused", "request_invalid"]
    assert await here.ask(client, "PingDaemon", number=2) == {}


async def test_a_refusal_does_not_repeat_all_that_was_said(here: ManualDaemon) -> None:
    client = await here.greeted()
    client.request(1, "CreateToken", name="x", role="r" * (3 << 20), secret=SECRET)
    message = await client.next(FAILURE)
    assert message[1:4] == [1, "refused", "request_invalid"]
    assert len(message[4]) <= 4096


async def test_unknown_fields_are_ignored(here: ManualDaemon) -> None:
    client = await here.greeted()
    assert (await here.ask(client, "CreateJob", job="a", colour="red", deep={"x": [1]}))["name"] == "a"


async def test_a_repeated_request_is_answered_and_not_repeated(here: ManualDaemon) -> None:
    client = await here.greeted()
    await here.ask(client, "CreateJob", job="a")
    before = len(here.daemon.journal)
    first = await here.ask(client, "AddNote", number=2, job="a", text="once")
    second = await here.ask(client, "AddNote", number=2, job="a", text="once")
    assert first == second == {}
    assert len(here.daemon.journal) == before + 1


async def test_a_request_is_sent_again_over_another_connection_of_the_same_client(here: ManualDaemon) -> None:
    client = await here.greeted()
    before = here.daemon.ledger.decisions
    job = await here.ask(client, "CreateJob", job="a")
    client.transport.abort()
    await client.lost()
    assert await here.ask(await here.greeted(), "CreateJob", job="a") == job
    assert here.daemon.ledger.decisions == before + 1


async def test_another_client_s_numbers_are_its_own(here: ManualDaemon) -> None:
    await here.ask(await here.greeted(), "CreateJob", job="a")
    other = await here.greeted(client=OTHER_CLIENT)
    assert (await here.ask(other, "CreateJob", job="b"))["name"] == "b"


async def test_a_number_that_comes_back_with_another_body_is_refused(here: ManualDaemon) -> None:
    client = await here.greeted()
    await here.ask(client, "CreateJob", job="a")
    assert await refused(client, "CreateJob", job="b") == ("refused", "request_id_reused")


async def test_acknowledged_number_is_stale(here: ManualDaemon) -> None:
    client = await here.greeted()
    await here.ask(client, "CreateJob", job="a")
    client.request(2, "CreateJob", acknowledged=1, job="b")
    await client.next(REPLY)
    assert await refused(client, "CreateJob", job="a") == ("refused", "request_stale")


async def test_a_number_that_acknowledges_itself_is_stale(here: ManualDaemon) -> None:
    client = await here.greeted()
    client.request(1, "CreateJob", acknowledged=1, job="a")
    assert (await client.next(FAILURE))[3] == "request_stale"


async def test_request_is_cancelled_at_its_deadline(here: ManualDaemon, extras: Extras) -> None:
    client = await here.greeted()
    client.send(REQUEST, 1, 0, "WaitForGate", {}, 0.001)
    assert (await client.next(FAILURE))[1:4] == [1, "unavailable", "deadline_exceeded"]
    assert extras.waiting == 0


@pytest.mark.parametrize("timeout_s", [float("nan"), -1.0, "soon"])
async def test_invalid_deadline_is_a_protocol_error(here: ManualDaemon, timeout_s: object) -> None:
    client = await here.greeted()
    client.send(REQUEST, 1, 0, "WaitForGate", {}, timeout_s)
    assert await told(client) == ("peer", "message_invalid")
    await here.serves_new_clients()


async def test_cancelled_request_is_stopped_and_answered(here: ManualDaemon, extras: Extras) -> None:
    client = await here.greeted()
    client.request(1, "WaitForGate")
    await until(lambda: extras.waiting == 1)
    client.send(CANCEL, 1)
    assert (await client.next(FAILURE))[1:4] == [1, "unavailable", "cancelled"]
    assert extras.waiting == 0


async def test_cancelling_an_unknown_request_is_ignored(here: ManualDaemon) -> None:
    client = await here.greeted()
    client.send(CANCEL, 17)
    assert await here.ask(client, "PingDaemon") == {}


async def test_another_client_cannot_cancel_it(here: ManualDaemon, extras: Extras) -> None:
    client = await here.greeted()
    client.request(1, "WaitForGate")
    await until(lambda: extras.waiting == 1)
    other = await here.greeted(client=OTHER_CLIENT)
    other.send(CANCEL, 1)
    assert await here.ask(other, "PingDaemon", number=2) == {}
    assert extras.waiting == 1


async def test_more_in_flight_than_allowed_waits_and_none_is_lost(here: ManualDaemon, extras: Extras) -> None:
    client = await here.greeted()
    client.send_bytes(b"".join(frame([REQUEST, number, 0, "WaitForGate", {}]) for number in range(1, 11)))
    await until(lambda: extras.waiting == 4)
    assert not client.transport.reading
    await here.serves_new_clients()
    assert extras.waiting == 4
    extras.gate.set()
    assert sorted([(await client.next(REPLY))[1] for _ in range(10)]) == list(range(1, 11))
    assert client.transport.reading


async def test_reply_to_a_disconnected_client_is_dropped(here: ManualDaemon, extras: Extras) -> None:
    client = await here.greeted()
    client.request(1, "WaitForGate")
    await until(lambda: extras.waiting == 1)
    client.transport.abort()
    await client.lost()
    extras.gate.set()
    await until(lambda: extras.waiting == 0)
    await here.serves_new_clients()


@pytest.mark.parametrize("back", [object(), {"x": 1 << 70}, {object(): 1}])
async def test_an_answer_that_cannot_be_sent_is_the_handler_s_failure(
    here: ManualDaemon, extras: Extras, back: object
) -> None:
    extras.back = back
    client = await here.greeted()
    assert await refused(client, "SendBack") == ("internal", "handler_broken")
    assert await here.ask(client, "PingDaemon", number=2) == {}


async def test_an_answer_that_cannot_be_sent_does_not_stop_those_behind_it(here: ManualDaemon, extras: Extras) -> None:
    extras.back = object()
    client = await here.greeted()
    # A decision first, so that all replies wait until it is durable.
    client.request(1, "CreateJob", job="a")
    client.request(2, "SendBack")
    client.request(3, "PingDaemon")
    answers = [await client.next(REPLY, FAILURE) for _ in range(3)]
    assert [answer[:2] for answer in answers] == [[REPLY, 1], [FAILURE, 2], [REPLY, 3]]
    await here.serves_new_clients()


async def test_an_answer_over_the_frame_limit_is_refused_under_its_number(here: ManualDaemon, extras: Extras) -> None:
    extras.back = {"x": "x" * FRAME_BYTES_MAX}
    client = await here.greeted()
    assert await refused(client, "SendBack") == ("refused", "message_too_large")
    assert await here.ask(client, "PingDaemon", number=2) == {}


async def test_replies_to_a_client_that_does_not_read_wait_unencoded_and_arrive_later(
    here: ManualDaemon, extras: Extras
) -> None:
    extras.back = {"x": "x" * (3 << 20)}
    client = await here.greeted()
    client.transport.stop_reading()
    client.request(1, "CreateJob", job="a")
    client.send_bytes(b"".join(frame([REQUEST, number, 0, "SendBack", {}]) for number in (2, 3, 4)))
    await until(lambda: client.transport.unread > 0)
    await here.serves_new_clients()
    assert client.transport.unread < 4 << 20, "one large answer is written, two wait"
    client.transport.resume_peer_reading()
    assert sorted([(await client.next(REPLY))[1] for _ in range(4)]) == [1, 2, 3, 4]


async def test_a_flood_of_cheap_requests_with_large_answers_is_taken_as_fast_as_it_is_read(
    here: ManualDaemon, extras: Extras
) -> None:
    extras.back = {"x": "x" * (1 << 20)}
    client = await here.greeted()
    client.transport.stop_reading()
    client.send_bytes(b"".join(frame([REQUEST, number, 0, "SendBack", {}]) for number in range(1, 41)))
    await here.serves_new_clients()
    assert client.transport.unread < 4 << 20
    assert not client.transport.reading
    for _ in range(40):
        client.transport.resume_peer_reading()
        client.transport.stop_reading()
        await asyncio.sleep(0)
    client.transport.resume_peer_reading()
    assert sum(message[0] == REPLY for message in client.heard()) == 40


# Streams.


def subscribe(
    client: ManualClient, stream: int = 1, since: int | None = -1, credit: int = 100, types: Any = (), jobs: Any = ()
) -> None:
    client.send(SUBSCRIBE, stream, since, "", types, jobs, credit)


async def facts_of(client: ManualClient, stream: int = 1) -> list[Message]:
    """The records of the next facts message with records."""
    while True:
        message = await client.next(FACTS)
        if message[1] == stream and message[3]:
            records: list[Message] = message[3]
            return records


async def test_a_stream_says_where_it_begins_and_then_sends_facts(here: ManualDaemon) -> None:
    client = await here.greeted()
    subscribe(client)
    assert await client.next() == [FACTS, 1, 0, []]
    (record,) = await facts_of(client)
    assert (record[2], record[7]["version"]) == ("DaemonStarted", "0.1.0")


async def test_a_fact_is_streamed_when_it_has_become_durable(here: ManualDaemon) -> None:
    client = await here.greeted()
    subscribe(client, since=None)
    await client.next(FACTS)
    await here.ask(client, "CreateJob", job="a")
    ((fact_id, at, kind, job, generation, cause, origin, body),) = await facts_of(client)
    assert (fact_id, at, kind) == (here.daemon.journal.last, here.clock.now, "JobCreated")
    assert (job, generation, cause, origin) == ("a", 0, 0, "unix:0 at pid 1")
    assert body == {"name": "a", "settings": {}}


async def test_two_streams_of_a_connection_do_not_know_of_each_other(here: ManualDaemon) -> None:
    client = await here.greeted()
    await here.ask(client, "CreateJob", job="a")
    subscribe(client, 1, types=["DaemonStarted"])
    subscribe(client, 2, jobs=["a"])
    assert [record[2] for record in await facts_of(client, 1)] == ["DaemonStarted"]
    assert [record[2] for record in await facts_of(client, 2)] == ["JobCreated"]


async def test_a_stream_with_a_number_that_is_taken_breaks_the_protocol(here: ManualDaemon) -> None:
    client = await here.greeted()
    subscribe(client)
    subscribe(client)
    assert await told(client) == ("peer", "stream_taken")
    await here.serves_new_clients()


async def test_a_number_is_free_again_when_its_stream_has_ended(here: ManualDaemon) -> None:
    client = await here.greeted()
    subscribe(client)
    client.send(UNSUBSCRIBE, 1)
    subscribe(client)
    assert (await facts_of(client))[0][2] == "DaemonStarted"


async def test_there_is_an_end_to_the_streams_of_a_connection(here: ManualDaemon) -> None:
    client = await here.greeted()
    for number in range(1, STREAMS_MAX + 2):
        subscribe(client, number)
    message = await client.next(ENDED)
    assert message[1:4] == [STREAMS_MAX + 1, "refused", "too_many_streams"]
    assert await here.ask(client, "PingDaemon") == {}


async def test_stream_of_a_forbidden_job_ends_at_once(here: ManualDaemon) -> None:
    client = await here.greeted(REMOTE, token=await token(here, Role.VIEWER, ["a"]))
    subscribe(client, jobs=["a", "b"])
    assert (await client.next(ENDED))[1:4] == [1, "refused", "forbidden"]


async def test_principal_bound_to_a_job_gets_facts_of_that_job_only(here: ManualDaemon) -> None:
    client = await here.greeted(REMOTE, token=await token(here, Role.WORKER, ["a"]))
    subscribe(client)
    operator = await here.greeted(client=OTHER_CLIENT)
    for number, job in ((2, "b"), (3, "a")):
        await here.ask(operator, "CreateJob", number=number, job=job)
    assert [record[3] for record in await facts_of(client)] == ["a"]


async def test_a_filter_that_costs_too_much_ends_the_stream_at_once(here: ManualDaemon) -> None:
    client = await here.greeted()
    subscribe(client, types=["T"] * 257)
    assert (await client.next(ENDED))[1:4] == [1, "refused", "filter_too_large"]


async def test_credit_that_overflows_breaks_the_protocol(here: ManualDaemon) -> None:
    client = await here.greeted()
    subscribe(client, since=None, credit=65_536)
    client.send(CREDIT, 1, 1)
    assert await told(client) == ("peer", "credit_overflow")
    await here.serves_new_clients()


async def test_credit_for_a_stream_that_is_not_there_says_nothing(here: ManualDaemon) -> None:
    client = await here.greeted()
    client.send(CREDIT, 9, 5)
    client.send(UNSUBSCRIBE, 9)
    assert await here.ask(client, "PingDaemon") == {}


async def test_a_stream_goes_on_when_credit_comes(here: ManualDaemon) -> None:
    client = await here.greeted()
    await here.ask(client, "CreateJob", job="a")
    subscribe(client, credit=1)
    assert [record[2] for record in await facts_of(client)] == ["DaemonStarted"]
    assert await here.ask(client, "PingDaemon", number=2) == {}
    client.send(CREDIT, 1, 1)
    assert [record[2] for record in await facts_of(client)] == ["JobCreated"]


async def test_nothing_comes_of_a_stream_that_was_unsubscribed(here: ManualDaemon) -> None:
    client = await here.greeted()
    subscribe(client, since=None)
    client.send(UNSUBSCRIBE, 1)
    await here.ask(client, "CreateJob", job="a")
    await here.ask(client, "PingDaemon", number=2)
    assert client.heard() == []


async def test_streams_take_turns_so_that_none_is_kept_waiting(here: ManualDaemon) -> None:
    client = await here.greeted()
    for number in range(1, 301):
        await here.ask(client, "CreateJob", number=number, acknowledged=number - 1, job=f"job-{number}")
    numbers = list(range(1, 2 * STREAM_TURNS + 1))
    for number in numbers:
        subscribe(client, number, credit=1000)
    served: list[int] = []
    while len(served) < len(numbers):
        message = await client.next(FACTS)
        served += [message[1]] if message[3] else []
    assert served == numbers, "no second turn before everyone's first, though there was more to send"


async def test_stream_to_a_client_that_does_not_read_uses_bounded_memory_and_sends_a_gap_later(
    tmp_path: Path,
) -> None:
    async with manual_daemon(tmp_path, journal_facts_max=100) as here:
        reader, writer = await here.greeted(), await here.greeted(client=OTHER_CLIENT)
        await here.ask(writer, "CreateJob", job="a")
        subscribe(reader, since=None, credit=60_000)
        await reader.next(FACTS)
        published: list[int] = []
        here.daemon.bus.on_publish.append(lambda records: published.extend(record.id for record in records))
        reader.transport.stop_reading()
        for number in range(2, 1002):
            await here.ask(writer, "AddNote", number=number, acknowledged=number - 1, job="a", text="x" * 4000)
        assert reader.transport.unread < (1 << 20) + (1 << 19)
        await here.serves_new_clients()
        reader.transport.resume_peer_reading()
        seen, missed = await _until_fact(reader, here.daemon.journal.last)
        # Positions of handlers that are stored meanwhile use ids, too.
        [(first, last)] = missed
        assert seen == [fact_id for fact_id in published if not first <= fact_id <= last]


async def _until_fact(reader: ManualClient, last: int) -> tuple[list[int], list[tuple[int, int]]]:
    seen: list[int] = []
    missed: list[tuple[int, int]] = []
    while not seen or seen[-1] < last:
        message = await reader.next(FACTS, GAP)
        if message[0] == GAP:
            missed.append((message[2], message[3]))
        else:
            seen += [record[0] for record in message[3]]
    return seen, missed


# Requests from the daemon.


async def test_the_daemon_asks_a_client_and_is_answered(here: ManualDaemon) -> None:
    client = await here.greeted()
    asked = asyncio.ensure_future(only_session(here).request(AskClient("hi"), 5.0))
    message = await client.next(REQUEST)
    assert message[:5] == [REQUEST, 1, 0, "AskClient", {"word": "hi"}]
    assert message[5] == 5.0
    client.send(REPLY, 1, {})
    assert await asked == Nothing()


async def test_a_client_may_refuse(here: ManualDaemon) -> None:
    client = await here.greeted()
    asked = asyncio.ensure_future(only_session(here).request(AskClient("hi")))
    await client.next(REQUEST)
    client.send(FAILURE, 1, "refused", "request_unknown", "not here")
    with pytest.raises(RequestRefused, match="not here"):
        await asked


async def test_a_client_that_answers_something_else_is_known_by_it(here: ManualDaemon) -> None:
    client = await here.greeted()
    asked = asyncio.ensure_future(only_session(here).request(AskClient("hi")))
    await client.next(REQUEST)
    client.send(REPLY, 1, [1, 2])
    with pytest.raises(ForgedError) as caught:
        await asked
    assert caught.value.code == "reply_invalid"


async def test_a_client_that_says_nothing_is_not_waited_for_longer_than_asked(here: ManualDaemon) -> None:
    await here.greeted()
    session = only_session(here)
    asked = asyncio.ensure_future(session.request(AskClient("hi"), 0.001))
    await asyncio.sleep(0)
    here.clock.now += 1
    with pytest.raises(Unavailable) as caught:
        await asked
    assert caught.value.code == "deadline_exceeded"
    assert len(session.calls) == 0


async def test_a_client_that_leaves_does_not_answer(here: ManualDaemon) -> None:
    client = await here.greeted()
    session = only_session(here)
    asked = asyncio.ensure_future(session.request(AskClient("hi")))
    await client.next(REQUEST)
    client.send(BYE, 0)
    with pytest.raises(Unavailable) as caught:
        await asked
    assert caught.value.code == "connection_lost"
    with pytest.raises(Unavailable):
        await session.request(AskClient("hi"))


async def test_a_caller_that_is_cancelled_forgets_its_question_and_says_so(here: ManualDaemon) -> None:
    client = await here.greeted()
    session = only_session(here)
    asked = asyncio.ensure_future(session.request(AskClient("hi")))
    await client.next(REQUEST)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert len(session.calls) == 0
    assert await client.next() == [CANCEL, 1]
    client.send(REPLY, 1, {})
    assert await here.ask(client, "PingDaemon") == {}


async def test_a_client_is_not_asked_more_at_once_than_a_connection_may_take(here: ManualDaemon) -> None:
    await here.greeted()
    session = only_session(here)
    asked = [asyncio.ensure_future(session.request(AskClient("hi"))) for _ in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(Unavailable) as caught:
        await session.request(AskClient("hi"))
    assert caught.value.code == "client_busy"
    session.abort()
    assert {type(one) for one in await asyncio.gather(*asked, return_exceptions=True)} == {Unavailable}


@pytest.mark.parametrize("message", [[REPLY, 5, {}], [FAILURE, 5, "refused", "no", "no"]])
async def test_replies_to_unknown_calls_are_dropped(here: ManualDaemon, message: Message) -> None:
    client = await here.greeted()
    client.send(*message)
    assert await here.ask(client, "PingDaemon") == {}
    await here.serves_new_clients()


@pytest.mark.parametrize(
    "message",
    [
        [WELCOME, 1, "a", "p", "r", "h", 1, 1, 1, 1],
        [FACTS, 1, 1, []],
        [GAP, 1, 1, 2, "why"],
        [ENDED, 1, "refused", "c", "t"],
    ],
)
async def test_daemon_messages_from_a_client_end_the_session(here: ManualDaemon, message: Message) -> None:
    client = await here.greeted()
    client.send(*message)
    assert await told(client) == ("peer", "message_unexpected")
    await here.serves_new_clients()


# Signals.


async def test_a_signal_reaches_its_handler(here: ManualDaemon, extras: Extras) -> None:
    client = await here.greeted(WORKER)
    client.send(SIGNAL, "LightBlinked", {"job": "a", "light": "green"})
    await until(lambda: extras.signals == [LightBlinked("a", "green")])


async def test_signal_has_the_principal_of_the_latest_check_of_rights(
    here: ManualDaemon, extras: Extras, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await here.greeted(WORKER)
    client.send(SIGNAL, "LightBlinked", {"job": "a", "light": "green"})
    await until(lambda: len(extras.senders) == 1)
    [session] = here.server.sessions
    other = Principal("another", Role.WORKER)
    monkeypatch.setattr(session.host, "identify", lambda peer, token: other)
    here.server.check_rights()
    client.send(SIGNAL, "LightBlinked", {"job": "a", "light": "red"})
    await until(lambda: len(extras.senders) == 2)
    assert extras.senders[0] != extras.senders[1] == other


async def test_unknown_signal_is_ignored(here: ManualDaemon) -> None:
    client = await here.greeted(WORKER)
    client.send(SIGNAL, "SomethingNew", {"x": 1})
    assert await here.ask(client, "PingDaemon") == {}


async def test_signal_without_the_needed_role_is_ignored(here: ManualDaemon, extras: Extras) -> None:
    client = await here.greeted(REMOTE, token=await token(here, Role.VIEWER))
    client.send(SIGNAL, "LightBlinked", {"job": "a", "light": "green"})
    assert await here.ask(client, "PingDaemon") == {}
    assert extras.signals == []


async def test_signal_about_a_forbidden_job_is_ignored(here: ManualDaemon, extras: Extras) -> None:
    client = await here.greeted(REMOTE, token=await token(here, Role.WORKER, jobs=["a"]))
    client.send(SIGNAL, "LightBlinked", {"job": "b", "light": "red"})
    client.send(SIGNAL, "LightBlinked", {"job": "a", "light": "green"})
    await until(lambda: extras.signals == [LightBlinked("a", "green")])


async def test_a_signal_of_the_daemons_own_parts_is_not_taken_from_outside(here: ManualDaemon, extras: Extras) -> None:
    client = await here.greeted(WORKER)
    client.send(SIGNAL, "FuseBlown", {"job": "a"})
    client.send(SIGNAL, "LightBlinked", {"job": "a", "light": "green"})
    await until(lambda: extras.signals != [])
    assert extras.signals == [LightBlinked("a", "green")]


@pytest.mark.parametrize("body", [msgpack.packb({"job": "a", "light": 5}), b"\x81\xa5light\xa1\xff", b"\x90"])
async def test_a_signal_of_another_shape_breaks_the_protocol(here: ManualDaemon, body: bytes) -> None:
    client = await here.greeted(WORKER)
    payload = b"\x93\x0f\xacLightBlinked" + body
    client.send_bytes(len(payload).to_bytes(4, "big") + payload)
    assert await told(client) == ("peer", "signal_invalid")
    await here.serves_new_clients()


# Bye.


async def test_messages_after_bye_are_ignored(here: ManualDaemon) -> None:
    client = await here.greeted()
    client.send_bytes(frame([BYE, 0]) + frame([REQUEST, 1, 0, "CreateJob", {"job": "a"}]))
    await client.lost()
    assert len(here.daemon.jobs.book) == 0


async def test_bye_acknowledges(here: ManualDaemon) -> None:
    client = await here.greeted()
    await here.ask(client, "CreateJob", job="a")
    assert len(here.daemon.ledger.replies) == 1
    client.send(BYE, 1)
    await client.lost()
    assert len(here.daemon.ledger.replies) == 0


# Arbitrary input.

scalars = (
    st.none() | st.booleans() | st.integers(-2, 70_000) | st.floats() | st.text(max_size=6) | st.binary(max_size=6)
)
anything = st.recursive(
    scalars | st.sampled_from(["PingDaemon", "CreateJob", "AddNote", "LightBlinked", CLIENT]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["job", "text", "settings", "name"]), inner, max_size=3)
    ),
    max_leaves=8,
)
messages = st.tuples(st.integers(0, 16), st.lists(anything, max_size=7)).map(lambda one: frame([one[0], *one[1]]))


@given(st.booleans(), st.lists(messages, max_size=12))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_invalid_messages_do_not_disturb_other_clients(tmp_path: Path, polite: bool, data: list[bytes]) -> None:
    async def play() -> None:
        async with manual_daemon(tmp_path) as here:
            mistakes: list[dict[str, Any]] = []
            asyncio.get_running_loop().set_exception_handler(lambda loop, context: mistakes.append(context))
            client = await here.greeted() if polite else here.client()
            for piece in data:
                if client.transport.reading:
                    client.send_bytes(piece)
                await asyncio.sleep(0)
            await here.serves_new_clients()
            assert mistakes == []

    asyncio.run(play())
