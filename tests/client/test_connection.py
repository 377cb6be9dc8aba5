"""The client's end of one connection."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme

from forged.client.client import ForgedClient
from forged.errors import PeerError, Unavailable
from forged.jobs.model import Job, JobPage, ListJobs
from forged.net.protocol.messages import Bye, Facts, Failure, Hello, Ping, Pong, ReplyOut, RequestMessage, Welcome
from forged.net.transport import tls
from forged.net.transport.sockets import SystemNetwork
from forged.retry import RetryPolicy
from tests.client.daemon_runner import SOON, DaemonRunner, config_in
from tests.client.fake_daemon import WELCOME, FakeConnection, FakeDaemon
from tests.client.test_client import client_of

TWICE = RetryPolicy(attempts=2, delay_s=0.001)
ONCE = RetryPolicy(attempts=1)


async def refuse_all(connection: FakeConnection, failure: Failure) -> None:
    await connection.receive()
    connection.send(failure)


class TestHello:
    async def test_first_message_is_a_hello_with_the_token(self, tmp_path: Path) -> None:
        heard: list[Hello] = []

        async def treat(connection: FakeConnection) -> None:
            heard.append(await connection.accept_hello())
            await connection.wait_closed()

        async with FakeDaemon(tmp_path / "s", treat) as fake, client_of(fake, token="a token"):
            (hello,) = heard
        assert (hello.version_min, hello.version_max, hello.token) == (1, 1, "a token")

    async def test_all_connections_of_a_client_have_the_same_id(self, tmp_path: Path) -> None:
        heard: list[bytes] = []

        async def treat(connection: FakeConnection) -> None:
            heard.append((await connection.accept_hello()).client)
            if len(heard) == 3:
                await connection.wait_closed()

        async with FakeDaemon(tmp_path / "s", treat) as fake, client_of(fake):
            while len(heard) < 3:
                await asyncio.sleep(0)
        assert len(set(heard)) == 1

    async def test_daemon_without_a_common_version_is_a_final_error(self, tmp_path: Path) -> None:
        strange = msgspec.structs.replace(WELCOME, version=99)
        async with FakeDaemon(tmp_path / "s", lambda connection: _welcome_and_wait(connection, strange)) as fake:
            with pytest.raises(PeerError, match="version 99") as mismatch:
                await client_of(fake, connect_timeout_s=60).__aenter__()
        assert mismatch.value.code == "version_mismatch"

    async def test_daemon_that_refuses_the_version_is_a_final_error(self, tmp_path: Path) -> None:
        failure = Failure(0, "peer", "version_mismatch", "this end speaks versions 7 to 9", "upgrade")
        async with FakeDaemon(tmp_path / "s", lambda connection: refuse_all(connection, failure)) as fake:
            with pytest.raises(PeerError, match="7 to 9"):
                await client_of(fake, connect_timeout_s=60).__aenter__()

    async def test_full_daemon_is_retried_and_then_named_as_the_reason(self, tmp_path: Path) -> None:
        failure = Failure(0, "unavailable", "too_many_connections", "too many connections", "try later")
        async with FakeDaemon(tmp_path / "s", lambda connection: refuse_all(connection, failure)) as fake:
            with pytest.raises(Unavailable, match="too many connections") as refused:
                await client_of(fake, connect_timeout_s=60, reconnect=TWICE).__aenter__()
            assert fake.connections == 2
        assert refused.value.code == "no_daemon"

    @pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0\0\0\3abc", b"\0\0\0\1\xc0"])
    async def test_an_endpoint_that_is_not_a_daemon_is_reported(self, tmp_path: Path, said: bytes) -> None:
        async def treat(connection: FakeConnection) -> None:
            connection.writer.write(said)
            await connection.wait_closed()

        async with FakeDaemon(tmp_path / "s", treat) as fake:
            with pytest.raises(Unavailable, match=r"no daemon on .*(a frame's length|invalid message)"):
                await client_of(fake, connect_timeout_s=60, reconnect=TWICE).__aenter__()


class TestMessages:
    async def test_a_ping_is_answered(self, tmp_path: Path) -> None:
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def treat(connection: FakeConnection) -> None:
            await connection.accept_hello()
            connection.send(Ping(5))
            answered.set_result(await connection.receive())

        async with FakeDaemon(tmp_path / "s", treat) as fake, client_of(fake):
            assert await answered == Pong(5)

    async def test_protocol_violation_is_reported_and_closes_the_connection(self, tmp_path: Path) -> None:
        told: list[Any] = []

        async def treat(connection: FakeConnection) -> None:
            await connection.accept_hello()
            if not told:
                connection.send(Hello(1, 1, b"0" * 16))
                told.append(await connection.receive())
            await connection.wait_closed()

        async with FakeDaemon(tmp_path / "s", treat) as fake, client_of(fake) as client:
            while fake.connections < 2 or not client.connected:
                await asyncio.sleep(0)
        assert [(one.number, one.kind, one.code) for one in told] == [(0, "peer", "message_unexpected")]

    async def test_undecodable_fact_closes_the_connection_and_keeps_the_client(self, tmp_path: Path) -> None:
        async def treat(connection: FakeConnection) -> None:
            await connection.accept_hello()
            subscribed = await connection.receive()
            broken = () if fake.connections > 1 else (msgspec.Raw(b"\xc0"),)
            connection.send(Facts(subscribed.stream, 1, broken))
            await connection.wait_closed()

        async with FakeDaemon(tmp_path / "s", treat) as fake, client_of(fake) as client, client.facts():
            assert fake.connections == 2

    async def test_invalid_reply_fails_only_its_call(self, tmp_path: Path) -> None:
        async def treat(connection: FakeConnection) -> None:
            await connection.accept_hello()
            request = await connection.receive()
            connection.send(ReplyOut(request.number, "not jobs"))
            connection.send(ReplyOut(request.number + 1000, "unexpected"))
            await connection.wait_closed()

        async with FakeDaemon(tmp_path / "s", treat) as fake, client_of(fake) as client:
            with pytest.raises(PeerError, match="ListJobs") as invalid:
                await client.jobs()
            assert client.connected
        assert invalid.value.code == "reply_invalid"

    async def test_frame_limit_is_taken_from_the_daemon(self, tmp_path: Path) -> None:
        job = Job(name="a", settings={"blob": "x" * (5 << 20)}, created_at=0.0, created_by="a test")
        page = JobPage([job], more=False)

        async def treat(connection: FakeConnection) -> None:
            await connection.accept_hello(msgspec.structs.replace(WELCOME, frame_bytes_max=8 << 20))
            request: RequestMessage = await connection.receive()
            connection.send(ReplyOut(request.number, page))
            await connection.wait_closed()

        async with FakeDaemon(tmp_path / "s", treat) as fake, client_of(fake) as client:
            assert await client.request(ListJobs()) == page

    async def test_bye_carries_the_reason(self, tmp_path: Path) -> None:
        async def treat(connection: FakeConnection) -> None:
            await connection.accept_hello()
            await connection.receive()
            connection.send(Bye(0, "gone fishing"))
            await connection.wait_closed()

        async with FakeDaemon(tmp_path / "s", treat) as fake, client_of(fake, reconnect=ONCE) as client:
            with pytest.raises(Unavailable, match="gone fishing"):
                await client.jobs()


class TestTls:
    @pytest.fixture
    def authority(self) -> trustme.CA:
        return trustme.CA()

    @pytest.fixture
    def files(self, authority: trustme.CA, tmp_path: Path) -> dict[str, str]:
        """The paths of an authority, and of a certificate for both ends."""
        issued = authority.issue_cert("127.0.0.1", "localhost", common_name="bot")
        authority.cert_pem.write_to_path(tmp_path / "ca.pem")
        issued.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
        issued.private_key_pem.write_to_path(tmp_path / "key.pem")
        return {name: str(tmp_path / f"{name}.pem") for name in ("ca", "cert", "key")}

    async def test_certificates_are_read_from_the_environment(
        self, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runner = await _secured_daemon(tmp_path, files)
        for name, value in (("CA", "ca"), ("CERTIFICATE", "cert"), ("KEY", "key")):
            monkeypatch.setenv(f"FORGED_{name}", files[value])
        async with ForgedClient(runner.daemon.listening[0], reconnect=SOON) as client:
            assert (await client.create_job("a")).created_by == "certificate:bot"
        await runner.close()

    async def test_rejected_certificate_is_a_final_error(
        self, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runner = await _secured_daemon(tmp_path, files)
        trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
        monkeypatch.setenv("FORGED_CA", str(tmp_path / "other.pem"))
        with pytest.raises(PeerError, match="its certificate is not accepted"):
            await ForgedClient(runner.daemon.listening[0], connect_timeout_s=60).__aenter__()
        await runner.close()

    async def test_missing_client_certificate_is_reported(
        self, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runner = await _secured_daemon(tmp_path, files)
        monkeypatch.setenv("FORGED_CA", files["ca"])
        with pytest.raises(PeerError, match="requires a client certificate"):
            await ForgedClient(runner.daemon.listening[0], connect_timeout_s=60).__aenter__()
        await runner.close()


async def _secured_daemon(directory: Path, files: dict[str, str]) -> DaemonRunner:
    """A daemon that requires a client certificate."""
    network = SystemNetwork(tls_server=tls.server_context(files["cert"], files["key"], files["ca"]))
    config = config_in(directory, listen=("tls://127.0.0.1:0",), certificate_roles={"bot": "worker"})
    runner = DaemonRunner(config, network=network)
    await runner.open()
    return runner


async def _welcome_and_wait(connection: FakeConnection, welcome: Welcome) -> None:
    await connection.accept_hello(welcome)
    await connection.wait_closed()
