"""The blocking connection, against daemons, silent peers and invalid data."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
import trustme

from forged.client import BlockingClient
from forged.errors import ConfigError, ForgedError, PeerError, RequestRefused, Unavailable
from forged.net.protocol.messages import Bye, Failure, Ping, Pong, ReplyOut, Subscribe
from forged.net.transport import tls
from forged.net.transport.sockets import SystemNetwork
from forged.plain_client import connection
from forged.plain_client.connection import PlainConnection
from forged.version import VERSION
from tests.cli.scripted_daemon import Refusal, scripted_daemon, trickle
from tests.client.daemon_runner import DaemonRunner, config_in
from tests.client.fake_daemon import WELCOME, FakeConnection, FakeDaemon
from tests.client.threaded_daemon import EventLoopThread, ThreadedDaemon

SHORT_S = 0.25
LONG_S = 60.0
HEAVY = {"anyio", "asyncio", "json", "logging", "msgspec", "ssl", "subprocess", "tomllib"}


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    loop = EventLoopThread()
    yield loop
    loop.end()


@contextmanager
def connected(
    loop: EventLoopThread,
    directory: Path,
    treat: Callable[[FakeConnection], Awaitable[None]],
    timeout_s: float = LONG_S,
) -> Iterator[PlainConnection]:
    """A wire to a fake daemon."""
    fake = FakeDaemon(directory / "s", treat)
    loop.call(fake.__aenter__)
    try:
        with closing(PlainConnection(fake.endpoint, None, timeout_s)) as line:
            yield line
    finally:
        loop.call(fake.__aexit__)


class TestHello:
    @pytest.mark.parametrize(
        ("said", "why"),
        [
            (b"HTTP/1.1 400 Bad Request\r\n\r\n", "it speaks HTTP"),
            (b"<!DOCTYPE HTML>\n<html>", "it speaks HTTP"),
            (b"\x15\x03\x01\0\2\2\x46", "it speaks TLS"),
            (b"SSH-2.0-OpenSSH_9.2\r\n", "announces"),
            (b"\0\0\0\3\x81\x90\x01", "not msgpack"),
            (b"\0\0\0\2\x91\x90", "not a message"),
            (b"\0\0\0\0", "announces 0 bytes"),
            (b"\0\0\0\1\xc1", "not msgpack"),
            (b"\0\0\0\1\x80", "not a message"),
            (b"\0\0\0\2\x91\x01", "its welcome is malformed"),
            (b"\0\0\0\4\x93\x01\x01\xc0", "its welcome is malformed"),
        ],
    )
    def test_an_endpoint_that_is_not_a_daemon_is_reported(
        self, loop: EventLoopThread, tmp_path: Path, said: bytes, why: str
    ) -> None:
        async def treat(connection: FakeConnection) -> None:
            connection.writer.write(said)
            await connection.wait_closed()

        with pytest.raises(PeerError, match=why) as strange, connected(loop, tmp_path, treat):
            pass
        assert strange.value.code == "not_a_daemon"

    def test_daemon_of_another_version_is_reported(self, loop: EventLoopThread, tmp_path: Path) -> None:
        async def treat(connection: FakeConnection) -> None:
            await connection.accept_hello(msgspec.structs.replace(WELCOME, version=9))
            await connection.wait_closed()

        with (
            pytest.raises(PeerError, match=r"\(a fake\) speaks version 9") as mismatch,
            connected(loop, tmp_path, treat),
        ):
            pass
        assert (mismatch.value.code, mismatch.value.fix) == ("version_mismatch", "upgrade forgectl")

    def test_additional_welcome_fields_are_ignored(self, loop: EventLoopThread, tmp_path: Path) -> None:
        async def treat(connection: FakeConnection) -> None:
            await connection.receive()
            fields = [1, *msgspec.to_builtins(WELCOME)[1:], "news", {}]
            payload = msgspec.msgpack.encode(fields)
            connection.writer.write(len(payload).to_bytes(4, "big") + payload)
            await connection.wait_closed()

        with connected(loop, tmp_path, treat) as line:
            assert line.history == WELCOME.history

    def test_daemon_with_only_an_older_version_is_reported(self, tmp_path: Path) -> None:
        older = [1, 0, "forged/0.0.9", "unix:0", "operator", "", 0, 1, 4 << 20, 1024, 0]
        with (
            scripted_daemon(tmp_path, welcome=older) as daemon,
            pytest.raises(PeerError, match=r"forged/0\.0\.9") as mismatch,
        ):
            PlainConnection(f"unix://{daemon.path}", None, LONG_S)
        assert mismatch.value.fix == "upgrade the daemon"

    def test_version_refusal_is_quoted(self, loop: EventLoopThread, tmp_path: Path) -> None:
        async def treat(connection: FakeConnection) -> None:
            await connection.receive()
            connection.send(Failure(0, "peer", "version_mismatch", "this end speaks 2 to 3", "upgrade the older"))
            await connection.wait_closed()

        said = "no common protocol version: this end speaks 2 to 3"
        with pytest.raises(PeerError, match=said) as mismatch, connected(loop, tmp_path, treat):
            pass
        assert mismatch.value.code == "version_mismatch"

    def test_failure_sent_before_the_hello_is_quoted(self, tmp_path: Path) -> None:
        said = msgpack.packb([4, 0, "unavailable", "too_many_connections", "there are 7 already", "try again"])
        path = tmp_path / "s"
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            server.listen()
            turned_away = threading.Thread(target=lambda: _turn_away(server, said))
            turned_away.start()
            with pytest.raises(Unavailable, match="there are 7 already"):
                PlainConnection(f"unix://{path}", None, LONG_S)
            turned_away.join()

    def test_closed_connection_is_unavailable(self, loop: EventLoopThread, tmp_path: Path) -> None:
        async def treat(connection: FakeConnection) -> None:
            await connection.receive()

        with pytest.raises(Unavailable, match="closed the connection"), connected(loop, tmp_path, treat):
            pass


class TestAnswers:
    def test_pings_are_answered_and_do_not_count_as_an_answer(self, loop: EventLoopThread, tmp_path: Path) -> None:
        heard: list[Any] = []

        async def treat(connection: FakeConnection) -> None:
            await connection.accept_hello()
            await connection.receive()
            for nonce in range(1000):
                connection.send(Ping(nonce))
                heard.append(await connection.receive())
                await asyncio.sleep(SHORT_S / 20)

        with (
            pytest.raises(Unavailable, match=f"did not answer within {SHORT_S} s"),
            connected(loop, tmp_path, treat, SHORT_S) as line,
        ):
            line.request("ReadStatus")
        assert heard[0] == Pong(0)

    def test_failure_is_raised_as_its_own_error_type(self, loop: EventLoopThread, tmp_path: Path) -> None:
        async def treat(connection: FakeConnection) -> None:
            await connection.accept_hello()
            await connection.receive()
            connection.send(Failure(1, "refused", "no_way", "that will not do", "do something else"))
            await connection.receive()
            payload = b"\x95\x04\x02\xa8internal\xa1x\xa3why"
            connection.writer.write(len(payload).to_bytes(4, "big") + payload)
            await connection.wait_closed()

        with connected(loop, tmp_path, treat) as line:
            with pytest.raises(RequestRefused, match="will not do") as refused:
                line.request("Anything")
            with pytest.raises(ForgedError, match="why"):
                line.request("Anything")
        assert (refused.value.code, refused.value.fix) == ("no_way", "do something else")

    def test_frame_limit_is_taken_from_the_daemon(self, loop: EventLoopThread, tmp_path: Path) -> None:
        async def treat(connection: FakeConnection) -> None:
            await connection.accept_hello()
            connection.send(ReplyOut((await connection.receive()).number, "x" * 1_000_000))
            connection.send(ReplyOut((await connection.receive()).number, "x" * 5_000_000))
            await connection.wait_closed()

        with connected(loop, tmp_path, treat) as line:
            assert len(line.request("Anything")) == 1_000_000
            with pytest.raises(PeerError, match="announces 5000"):
                line.request("Anything")

    def test_bye_is_unavailable_with_its_reason(self, loop: EventLoopThread, tmp_path: Path) -> None:
        async def treat(connection: FakeConnection) -> None:
            await connection.accept_hello()
            connection.send(Bye(0, "gone fishing"))
            await connection.wait_closed()

        with pytest.raises(Unavailable, match="is stopping"), connected(loop, tmp_path, treat) as line:
            line.request("Anything")

    @pytest.mark.parametrize(
        ("agent", "fix"),
        [
            ("forged/0.0.9", "upgrade the daemon"),
            ("forged/0.0", "upgrade the daemon"),
            ("forged/99.0.0", "upgrade forgectl"),
            (f"forged/{VERSION}", "install the same build of both"),
            ("something else", "install the same build of both"),
        ],
    )
    def test_unknown_request_names_both_versions(self, tmp_path: Path, agent: str, fix: str) -> None:
        with (
            scripted_daemon(tmp_path, agent=agent) as daemon,
            closing(PlainConnection(f"unix://{daemon.path}", None, LONG_S)) as line,
            pytest.raises(RequestRefused, match=f"the daemon is {agent}, this is forgectl {VERSION}") as refused,
        ):
            line.request("ListPlugins")
        assert (refused.value.code, refused.value.fix) == ("request_unknown", fix)

    @pytest.mark.parametrize(
        ("agent", "fix"), [("forged/99.0", "upgrade forgectl"), (f"forged/{VERSION}", "see the fields")]
    )
    def test_refused_fields_name_both_versions_if_they_differ(self, tmp_path: Path, agent: str, fix: str) -> None:
        answers = {"CreateJob": Refusal("refused", "request_invalid", "field missing", "see the fields")}
        with (
            scripted_daemon(tmp_path, answers, agent=agent) as daemon,
            closing(PlainConnection(f"unix://{daemon.path}", None, LONG_S)) as line,
            pytest.raises(RequestRefused) as refused,
        ):
            line.request("CreateJob")
        assert refused.value.fix == fix

    @pytest.mark.parametrize(
        "message", [[3, 1], [3], [3, "x", {}], [7, 1, 2], [7, 1, 2, "x"], [8, 1, 1, 2], [4], [11, 1, {}]]
    )
    def test_reply_of_a_wrong_shape_is_an_error(
        self, loop: EventLoopThread, tmp_path: Path, message: list[Any]
    ) -> None:
        async def treat(connection: FakeConnection) -> None:
            await connection.accept_hello()
            await connection.receive()
            payload = msgpack.packb(message)
            connection.writer.write(len(payload).to_bytes(4, "big") + payload)
            await connection.wait_closed()

        with pytest.raises(ForgedError), connected(loop, tmp_path, treat) as line:
            line.request("Anything") if message[0] == 3 else next(line.facts(None, [], []))

    @pytest.mark.parametrize("given", ["\udcff", 1 << 64])
    def test_unencodable_request_is_refused(self, tmp_path: Path, given: Any) -> None:
        with (
            scripted_daemon(tmp_path) as daemon,
            closing(PlainConnection(f"unix://{daemon.path}", None, LONG_S)) as line,
            pytest.raises(ConfigError, match="cannot be sent"),
        ):
            line.request("AddNote", text=given)
        assert daemon.requests == []


class TestSendingAndReceiving:
    def test_signal_is_sent_unchanged(self, loop: EventLoopThread, tmp_path: Path) -> None:
        async def treat(connection: FakeConnection) -> None:
            await connection.accept_hello()
            signal = await connection.receive()
            connection.send(ReplyOut((await connection.receive()).number, [signal.name, bytes(signal.body)]))
            await connection.wait_closed()

        with connected(loop, tmp_path, treat) as line:
            line.signal("Pulse", job="run", step=3)
            name, body = line.request("Anything")
        assert (name, msgpack.unpackb(body)) == ("Pulse", {"job": "run", "step": 3})

    def test_process_incoming_answers_a_ping(self, loop: EventLoopThread, tmp_path: Path) -> None:
        async def treat(connection: FakeConnection) -> None:
            await connection.accept_hello()
            await connection.receive()
            connection.send(Ping(7))
            pong = await connection.receive()
            connection.send(ReplyOut((await connection.receive()).number, pong.nonce))
            await connection.wait_closed()

        with connected(loop, tmp_path, treat) as line:
            line.signal("Begin")
            select.select([line], [], [], LONG_S)
            line.process_incoming()
            assert line.request("Anything") == 7

    def test_messages_received_with_the_welcome_are_processed(self, loop: EventLoopThread, tmp_path: Path) -> None:
        async def treat(connection: FakeConnection) -> None:
            await connection.receive()
            payloads = [msgspec.msgpack.encode(message) for message in (WELCOME, Ping(7))]
            connection.writer.write(b"".join(len(payload).to_bytes(4, "big") + payload for payload in payloads))
            pong = await connection.receive()
            connection.send(ReplyOut((await connection.receive()).number, pong.nonce))
            await connection.wait_closed()

        with connected(loop, tmp_path, treat) as line:
            line.process_incoming()
            assert line.request("Anything") == 7

    def test_process_incoming_does_not_wait(self, loop: EventLoopThread, tmp_path: Path) -> None:
        """It waits neither for a first byte nor for the rest of a message."""

        async def treat(connection: FakeConnection) -> None:
            await connection.accept_hello()
            await connection.receive()
            connection.writer.write(b"\0\0\0\3\x92\x0d")
            await connection.receive()
            connection.writer.write(b"\0")
            connection.send(ReplyOut((await connection.receive()).number, "well"))
            await connection.wait_closed()

        with connected(loop, tmp_path, treat) as line:
            line.process_incoming()
            line.signal("Begin")
            select.select([line], [], [], LONG_S)
            line.process_incoming()
            line.signal("End")
            select.select([line], [], [], LONG_S)
            line.process_incoming()
            assert line.request("Anything") == "well"

    @pytest.mark.parametrize(
        ("said", "error"),
        [
            (b"", Unavailable),
            (b"\0\0\0\2\x91\x0e", Unavailable),
            (b"\0\0\0\x0f\x96\x04\0\xa7refused\xa1x\xa0\xa0", RequestRefused),
            (b"\xff\xff\xff\xff", PeerError),
            (b"\0\0\0\0", PeerError),
            (b"\0\0\0\1\xc1", PeerError),
        ],
        ids=["gone", "bye", "failure", "endless", "empty", "nonsense"],
    )
    def test_process_incoming_raises_when_the_connection_has_ended(
        self, loop: EventLoopThread, tmp_path: Path, said: bytes, error: type[ForgedError]
    ) -> None:
        async def treat(connection: FakeConnection) -> None:
            await connection.accept_hello()
            await connection.receive()
            connection.writer.write(said)
            if said:
                await connection.wait_closed()

        with connected(loop, tmp_path, treat) as line:
            line.signal("Begin")
            select.select([line], [], [], LONG_S)
            with pytest.raises(error):
                line.process_incoming()

    def test_kernel_times_out_a_host_that_acknowledges_nothing(self, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            welcome = msgspec.msgpack.encode(WELCOME)
            turned = threading.Thread(target=lambda: _turn_away(server, welcome))
            turned.start()
            line = PlainConnection(f"tcp://127.0.0.1:{server.getsockname()[1]}", None, LONG_S)
            line.set_user_timeout(1.5)
            with socket.socket(fileno=os.dup(line.fileno())) as same:
                assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1500
            turned.join()
            line.drop()


class TestFacts:
    def test_incomplete_message_times_out(self, loop: EventLoopThread, tmp_path: Path) -> None:
        async def treat(connection: FakeConnection) -> None:
            await connection.accept_hello()
            await connection.receive()
            await trickle(connection)

        with (
            pytest.raises(Unavailable, match="did not answer within"),
            connected(loop, tmp_path, treat, SHORT_S) as line,
        ):
            next(line.facts(None, [], []))

    def test_records_of_any_version_are_read(self, tmp_path: Path) -> None:
        records = [
            [1, 0.0, "JobCreated", "a", 0, 0, "me", {}, "news"],
            [2, 0.0],
            {"id": 3, "type": "NoteAdded"},
            [],
            7,
        ]
        with (
            scripted_daemon(tmp_path, facts=records) as daemon,
            closing(PlainConnection(f"unix://{daemon.path}", None, LONG_S)) as line,
        ):
            read = [event for _, event in line.facts(-1, [], [], until=5) if event]
        assert [event["id"] for event in read] == [1, 2, 3]
        assert read[0].keys() == set(connection.RECORD_FIELDS)

    def test_while_quiet_is_called_while_waiting(
        self, loop: EventLoopThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(connection, "PING_AFTER_S", SHORT_S)

        async def treat(connection: FakeConnection) -> None:
            await connection.accept_hello()
            await connection.wait_closed()

        def stop() -> None:
            raise BrokenPipeError

        with connected(loop, tmp_path, treat) as line:
            line.while_quiet = stop
            with pytest.raises(BrokenPipeError):
                next(line.facts(None, [], []))

    def test_silent_daemon_is_pinged_and_then_given_up(
        self, loop: EventLoopThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(connection, "PING_AFTER_S", SHORT_S)
        heard: list[Any] = []

        async def treat(connection: FakeConnection) -> None:
            await connection.accept_hello()
            heard.append(await connection.receive())
            for _ in range(3):
                heard.append(await connection.receive())
                connection.send(Pong(0))
            await connection.wait_closed()

        with (
            pytest.raises(Unavailable, match="did not answer within"),
            connected(loop, tmp_path, treat) as line,
        ):
            next(line.facts(None, [], []))
        assert [type(one) for one in heard] == [Subscribe, Ping, Ping, Ping]

    def test_gap_is_returned_with_the_position_after_it(self, threaded_daemon: ThreadedDaemon) -> None:
        with threaded_daemon.client() as client:
            client.create_job("a")
            line = PlainConnection(threaded_daemon.runner.endpoint, None, LONG_S)
            position, gap = next(line.facts(1, [], [], history="another history"))
            line.close()
        assert gap is not None
        assert gap["gap"]["last"] == position

    def test_credit_is_granted_after_a_window_was_read(
        self, threaded_daemon: ThreadedDaemon, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(connection, "WINDOW_FACTS", 10)
        with threaded_daemon.client() as client:
            client.create_job("a")
            for number in range(95):
                client.note("a", f"{number}")
            last = client.status().last_fact
            line = PlainConnection(threaded_daemon.runner.endpoint, None, LONG_S)
            texts = [event["fact"].get("text") for _, event in line.facts(-1, [], [], until=last) if event]
            line.close()
        assert texts[2:] == [f"{number}" for number in range(95)]


class TestTls:
    @pytest.fixture
    def secured(self, tmp_path: Path, loop: EventLoopThread, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
        """The endpoint of a daemon that requires client certificates; those of the test are in the environment."""
        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1", common_name="bot")
        files = {name: str(tmp_path / f"{name}.pem") for name in ("CA", "CERTIFICATE", "KEY")}
        authority.cert_pem.write_to_path(files["CA"])
        issued.cert_chain_pems[0].write_to_path(files["CERTIFICATE"])
        issued.private_key_pem.write_to_path(files["KEY"])
        for name, path in files.items():
            monkeypatch.setenv(f"FORGED_{name}", path)
        context = tls.server_context(files["CERTIFICATE"], files["KEY"], files["CA"])
        config = config_in(tmp_path, listen=("tls://127.0.0.1:0",), certificate_roles={"bot": "viewer"})

        async def open_secured() -> DaemonRunner:
            runner = DaemonRunner(config, network=SystemNetwork(tls_server=context))
            await runner.open()
            return runner

        runner = loop.call(open_secured)
        yield runner.daemon.listening[0]
        loop.call(runner.close)

    def test_request_over_tls_is_answered(self, secured: str) -> None:
        line = PlainConnection(secured, None, LONG_S)
        assert line.request("ReadStatus")["listen"] == [secured]
        line.close()

    def test_process_incoming_does_not_wait_with_tls(self, secured: str) -> None:
        line = PlainConnection(secured, None, LONG_S)
        line.process_incoming()
        line.set_user_timeout(1.5)
        assert line.request("ReadStatus")["listen"] == [secured]
        line.close()

    def test_rejected_certificate_is_named(self, secured: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
        monkeypatch.setenv("FORGED_CA", str(tmp_path / "other.pem"))
        with pytest.raises(PeerError, match="its certificate is not accepted"):
            PlainConnection(secured, None, LONG_S)

    def test_missing_certificate_is_named(self, secured: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("FORGED_CERTIFICATE")
        monkeypatch.delenv("FORGED_KEY")
        with pytest.raises(PeerError, match="requires a client certificate"):
            PlainConnection(secured, None, LONG_S)


def _turn_away(server: socket.socket, said: bytes) -> None:
    connection, _ = server.accept()
    connection.sendall(len(said).to_bytes(4, "big") + said)
    connection.close()


def test_import_loads_no_heavy_modules() -> None:
    program = "import sys, forged.cli.forgectl.main; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert not HEAVY & set(loaded.split())


def test_protocol_constants_match_the_daemons() -> None:
    tags = {kind.__struct_config__.tag: kind.__name__.upper().removesuffix("MESSAGE") for kind in msgspec_messages()}
    ours = {
        "SUBSCRIBE",
        "FACTS",
        "CREDIT",
        "ENDED",
        "PING",
        "PONG",
        "BYE",
        "SIGNAL",
        "HELLO",
        "WELCOME",
        "REPLY",
        "FAILURE",
    }
    assert {name: getattr(connection, name) for name in ours} == {
        name: tag for tag, name in tags.items() if name in ours
    }


def msgspec_messages() -> list[Any]:
    from forged.net.protocol.messages import AnyMessage

    return list(AnyMessage.__args__)


def test_plain_and_full_client_return_the_same(threaded_daemon: ThreadedDaemon) -> None:
    with BlockingClient(threaded_daemon.runner.endpoint) as client:
        line = PlainConnection(threaded_daemon.runner.endpoint, None, LONG_S)
        theirs = msgspec.to_builtins(client.status())
        ours = line.request("ReadStatus")
        line.close()
    assert ours.keys() == theirs.keys()
    assert ours["history"] == theirs["history"]
