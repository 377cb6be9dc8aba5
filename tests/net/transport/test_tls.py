from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from trustme import KeyType

from forged.errors import ConfigError, PeerError
from forged.net.transport import tls
from forged.net.transport.port import Address, Listener
from forged.net.transport.sockets import SystemNetwork
from tests.net.recording_connections import Certificates, RecordingConnections, RecordingProtocol

LOCALHOST = Address("tls", host="127.0.0.1")
ALERT_RECORD = 21
BAD_HANDSHAKE = b"\x16\x03\x01\x00\x04\x02\x00\x00\x00"
"""A TLS record with a server hello where a client hello is expected."""


@pytest.fixture
def strangers(tmp_path: Path) -> Certificates:
    """An untrusted authority."""
    return Certificates(tmp_path)


@pytest.fixture
def mutual(certificates: Certificates) -> ssl.SSLContext:
    return tls.server_context(*certificates.issue("localhost", "127.0.0.1"), certificates.ca)


async def connection(
    connections: RecordingConnections, server: ssl.SSLContext, client: ssl.SSLContext
) -> tuple[SystemNetwork, RecordingProtocol, RecordingProtocol]:
    network = SystemNetwork(tls_server=server, tls_client=client)
    listener = await connections.listen(network, LOCALHOST)
    return network, *await connections.connect(network, listener.address)


async def refused(connections: RecordingConnections, server: ssl.SSLContext, client: ssl.SSLContext) -> PeerError:
    """The error of a failed connection."""
    network = SystemNetwork(tls_server=server, tls_client=client)
    listener = await connections.listen(network, LOCALHOST)
    with pytest.raises(PeerError, match=str(listener.address)) as raised:
        await network.connect(listener.address, connections.near)
    assert raised.value.code == "tls_failed"
    return raised.value


async def serves(connections: RecordingConnections, network: SystemNetwork, listener: Listener) -> bool:
    near, far = await connections.connect(network, listener.address)
    near.open_transport.write(b"hello")
    await far.hear(b"hello")
    return True


async def test_tls_1_3_is_spoken_by_default(certificates: Certificates, connections: RecordingConnections) -> None:
    _, near, _ = await connection(connections, certificates.server(), certificates.client())
    assert near.open_transport.get_extra_info("ssl_object").version() == "TLSv1.3"


async def test_tls_1_2_is_spoken_where_both_allow_it(
    certificates: Certificates, connections: RecordingConnections
) -> None:
    server = tls.server_context(*certificates.issue("127.0.0.1"), minimum="1.2")
    client = tls.client_context(certificates.ca, minimum="1.2")
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    _, near, _ = await connection(connections, server, client)
    assert near.open_transport.get_extra_info("ssl_object").version() == "TLSv1.2"


async def test_an_old_client_is_refused_by_default(
    certificates: Certificates, connections: RecordingConnections
) -> None:
    client = tls.client_context(certificates.ca, minimum="1.2")
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    assert "no TLS version that we accept" in str(await refused(connections, certificates.server(), client))


@pytest.mark.parametrize("make", ["server", "client"])
def test_a_version_below_1_2_is_a_config_error_that_names_the_setting(certificates: Certificates, make: str) -> None:
    arguments = certificates.issue("localhost") if make == "server" else ()
    with pytest.raises(ConfigError, match="minimum") as raised:
        getattr(tls, f"{make}_context")(*arguments, minimum="1.1")
    assert raised.value.code == "tls_version_invalid"


async def test_server_certificate_of_an_unknown_ca_is_refused(
    certificates: Certificates, strangers: Certificates, connections: RecordingConnections
) -> None:
    reason = str(await refused(connections, strangers.server(), certificates.client()))
    assert "its certificate is not accepted: unable to get local issuer certificate" in reason


async def test_a_server_with_another_name_is_not_accepted(
    certificates: Certificates, connections: RecordingConnections
) -> None:
    server = tls.server_context(*certificates.issue("elsewhere.example"))
    assert "IP address mismatch" in str(await refused(connections, server, certificates.client()))


async def test_the_system_authorities_are_trusted_without_a_ca_and_ours_is_not_among_them(
    certificates: Certificates, connections: RecordingConnections
) -> None:
    reason = str(await refused(connections, certificates.server(), tls.client_context()))
    assert "its certificate is not accepted" in reason


async def test_server_without_tls_is_named_in_the_error(
    certificates: Certificates, connections: RecordingConnections
) -> None:
    network = SystemNetwork(tls_client=certificates.client())
    plain = await connections.listen(network, Address("tcp", host="127.0.0.1"))

    async def answer_in_plain_text() -> None:
        far = await connections.accepted.get()
        await far.made.wait()
        far.open_transport.write(b"what do you want?")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(answer_in_plain_text())
        with pytest.raises(PeerError, match="it does not speak TLS") as raised:
            await network.connect(Address("tls", host="127.0.0.1", port=plain.address.port), connections.near)
    assert raised.value.code == "tls_failed"


@pytest.mark.parametrize("text", [b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x05hello", bytes(64)])
async def test_plain_text_to_a_tls_port_is_hung_up_on_and_the_port_goes_on_serving(
    certificates: Certificates, connections: RecordingConnections, text: bytes
) -> None:
    network = SystemNetwork(tls_server=certificates.server(), tls_client=certificates.client())
    listener = await connections.listen(network, LOCALHOST)
    near = connections.near()
    transport = await network.connect(Address("tcp", host="127.0.0.1", port=listener.address.port), lambda: near)
    transport.write(text)
    await asyncio.shield(near.lost)
    assert not connections.accepted.get_nowait().made.is_set()
    assert await serves(connections, network, listener)


async def test_peer_that_continues_after_an_alert_is_disconnected(
    certificates: Certificates, connections: RecordingConnections
) -> None:
    network = SystemNetwork(tls_server=certificates.server())
    listener = await connections.listen(network, LOCALHOST)
    near = connections.near()
    transport = await network.connect(Address("tcp", host="127.0.0.1", port=listener.address.port), lambda: near)
    transport.write(BAD_HANDSHAKE)
    await near.heard.wait()
    assert near.received[0] == ALERT_RECORD
    transport.write(BAD_HANDSHAKE)
    await asyncio.shield(near.lost)
    assert not connections.accepted.get_nowait().made.is_set()


async def test_a_client_that_never_ends_its_handshake_is_hung_up_on(
    certificates: Certificates, connections: RecordingConnections
) -> None:
    network = SystemNetwork(tls_server=certificates.server(), tls_handshake_timeout_s=0.05)
    listener = await connections.listen(network, LOCALHOST)
    near = connections.near()
    await network.connect(Address("tcp", host="127.0.0.1", port=listener.address.port), lambda: near)
    await asyncio.shield(near.lost)
    assert not connections.accepted.get_nowait().made.is_set()


async def test_a_client_with_a_certificate_is_let_in_and_known_by_its_common_name(
    certificates: Certificates, mutual: ssl.SSLContext, connections: RecordingConnections
) -> None:
    identity = certificates.issue("worker.example", common_name="worker 7")
    network, _, far = await connection(connections, mutual, tls.client_context(certificates.ca, *identity))
    peer = network.peer(far.open_transport)
    assert (peer.scheme, peer.loopback, peer.certificate_name) == ("tls", True, "worker 7")


async def test_a_certificate_without_a_common_name_is_known_by_its_first_dns_name(
    certificates: Certificates, mutual: ssl.SSLContext, connections: RecordingConnections
) -> None:
    identity = certificates.issue("192.0.2.1", "worker.example", "also.example")
    network, _, far = await connection(connections, mutual, tls.client_context(certificates.ca, *identity))
    assert network.peer(far.open_transport).certificate_name == "worker.example"


async def test_a_certificate_without_a_name_is_not_taken_for_none(
    certificates: Certificates, mutual: ssl.SSLContext, connections: RecordingConnections
) -> None:
    network, _, far = await connection(
        connections, mutual, tls.client_context(certificates.ca, *certificates.issue("192.0.2.1"))
    )
    assert network.peer(far.open_transport).certificate_name == ""


async def test_client_without_requested_certificate_has_no_name(
    certificates: Certificates, connections: RecordingConnections
) -> None:
    identity = certificates.issue("worker.example", common_name="worker 7")
    client = tls.client_context(certificates.ca, *identity)
    network, _, far = await connection(connections, certificates.server(), client)
    assert network.peer(far.open_transport).certificate_name is None


async def test_a_client_knows_the_server_by_its_certificate(
    certificates: Certificates, connections: RecordingConnections
) -> None:
    server = tls.server_context(*certificates.issue("127.0.0.1", "daemon.example"))
    network, near, _ = await connection(connections, server, certificates.client())
    assert network.peer(near.open_transport).certificate_name == "daemon.example"


async def test_client_without_a_certificate_is_refused_with_a_reason(
    certificates: Certificates, mutual: ssl.SSLContext, connections: RecordingConnections
) -> None:
    error = await thrown_out(connections, mutual, certificates.client())
    assert "it requires a client certificate" in str(tls.refusal("the daemon", error))


async def test_client_certificate_of_an_unknown_ca_is_refused_with_a_reason(
    certificates: Certificates, strangers: Certificates, mutual: ssl.SSLContext, connections: RecordingConnections
) -> None:
    client = tls.client_context(certificates.ca, *strangers.issue("worker.example"))
    error = await thrown_out(connections, mutual, client)
    assert "it does not trust the authority that signed our certificate" in str(tls.refusal("the daemon", error))


async def thrown_out(connections: RecordingConnections, server: ssl.SSLContext, client: ssl.SSLContext) -> ssl.SSLError:
    """The error with which a TLS 1.3 client loses a connection that the server refused."""
    network = SystemNetwork(tls_server=server, tls_client=client)
    listener = await connections.listen(network, LOCALHOST)
    near = connections.near()
    await network.connect(listener.address, lambda: near)
    error = await asyncio.shield(near.lost)
    assert not connections.accepted.get_nowait().made.is_set()
    assert isinstance(error, ssl.SSLError)
    return error


async def test_with_tls_1_2_a_client_without_a_certificate_is_refused_at_once(
    certificates: Certificates, connections: RecordingConnections
) -> None:
    server = tls.server_context(*certificates.issue("127.0.0.1"), certificates.ca, minimum="1.2")
    server.maximum_version = ssl.TLSVersion.TLSv1_2
    client = tls.client_context(certificates.ca, minimum="1.2")
    assert "it does not accept our certificate, or requires one" in str(await refused(connections, server, client))


# Renewal.


@pytest.mark.parametrize("after", KeyType)
@pytest.mark.parametrize("before", KeyType)
@pytest.mark.parametrize("version", tls.VERSIONS)
async def test_connections_after_a_renewal_get_the_new_certificate_with_any_key_type(
    certificates: Certificates, connections: RecordingConnections, version: tls.Version, before: KeyType, after: KeyType
) -> None:
    server = tls.server_context(*issue_daemon(certificates, "old.example", before), minimum=version)
    client = tls.client_context(certificates.ca, minimum=version)
    client.maximum_version = tls.VERSIONS[version]
    network, near, _ = await connection(connections, server, client)
    tls.renew(server, *issue_daemon(certificates, "new.example", after))
    assert network.peer(near.open_transport).certificate_name == "old.example"
    again, _ = await connections.connect(network, connections.listeners[-1].address)
    assert network.peer(again.open_transport).certificate_name == "new.example"


async def test_connections_made_before_a_renewal_go_on(
    certificates: Certificates, connections: RecordingConnections
) -> None:
    server = tls.server_context(*issue_daemon(certificates, "old.example"))
    _, near, far = await connection(connections, server, certificates.client())
    tls.renew(server, *issue_daemon(certificates, "new.example"))
    near.open_transport.write(b"still here")
    await far.hear(b"still here")


async def test_of_many_renewals_the_last_holds(certificates: Certificates, connections: RecordingConnections) -> None:
    server = certificates.server()
    for name in ("one.example", "two.example", "three.example"):
        tls.renew(server, *issue_daemon(certificates, name))
    network, near, _ = await connection(connections, server, certificates.client())
    assert network.peer(near.open_transport).certificate_name == "three.example"


async def test_renewed_authority_applies_to_new_connections(
    certificates: Certificates, strangers: Certificates, mutual: ssl.SSLContext, connections: RecordingConnections
) -> None:
    ours = tls.client_context(certificates.ca, *certificates.issue("worker.example"))
    theirs = tls.client_context(certificates.ca, *strangers.issue("stranger.example"))
    tls.renew(mutual, *certificates.issue("127.0.0.1"), strangers.ca)
    network, _, far = await connection(connections, mutual, theirs)
    assert network.peer(far.open_transport).certificate_name == "stranger.example"
    assert "does not trust the authority" in str(tls.refusal("the daemon", await thrown_out(connections, mutual, ours)))


async def test_session_resumption_ends_with_its_authority(
    certificates: Certificates, strangers: Certificates, mutual: ssl.SSLContext, connections: RecordingConnections
) -> None:
    listener = connections.keep(await SystemNetwork(tls_server=mutual).listen(LOCALHOST, Greeter))
    client = tls.client_context(certificates.ca, *certificates.issue("worker.example"))
    session = await asyncio.to_thread(visit, client, listener.address)
    tls.renew(mutual, *certificates.issue("127.0.0.1"), strangers.ca)
    with pytest.raises(ssl.SSLError, match="UNKNOWN_CA"):
        await asyncio.to_thread(visit, client, listener.address, session)


def visit(client: ssl.SSLContext, address: Address, session: ssl.SSLSession | None = None) -> ssl.SSLSession | None:
    """Connect with session resumption; returns the session."""
    with (
        socket.create_connection((address.host, address.port)) as plain,
        client.wrap_socket(plain, server_hostname=address.host, session=session) as secured,
    ):
        # A session ticket or alert after the handshake is processed by reading only.
        assert secured.recv(1)
        return secured.session


class Greeter(asyncio.Protocol):
    """Sends a byte string to every client and closes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b".")
        transport.close()


async def test_after_a_renewal_a_client_still_needs_a_certificate_and_learns_so(
    certificates: Certificates, mutual: ssl.SSLContext, connections: RecordingConnections
) -> None:
    tls.renew(mutual, *certificates.issue("127.0.0.1"), certificates.ca)
    error = await thrown_out(connections, mutual, certificates.client())
    assert "it requires a client certificate" in str(tls.refusal("the daemon", error))


@pytest.mark.parametrize("broken", ["half a certificate", "another key", "no certificate", "no authority"])
async def test_files_that_do_not_fit_change_nothing(
    certificates: Certificates, mutual: ssl.SSLContext, connections: RecordingConnections, broken: str
) -> None:
    certificate, key = certificates.issue("new.example", "127.0.0.1")
    authority = certificates.ca
    if broken == "half a certificate":
        certificate.write_bytes(certificate.read_bytes()[:400])
    elif broken == "another key":
        _, key = certificates.issue("other.example")
    elif broken == "no certificate":
        certificate.unlink()
    else:
        authority = certificates.directory / "none.pem"
    with pytest.raises(ConfigError) as refused:
        tls.renew(mutual, certificate, key, authority)
    assert refused.value.code == "tls_files"
    client = tls.client_context(certificates.ca, *certificates.issue("worker.example"))
    network, near, _ = await connection(connections, mutual, client)
    assert network.peer(near.open_transport).certificate_name == "localhost"


def issue_daemon(certificates: Certificates, name: str, kind: KeyType = KeyType.ECDSA) -> tuple[Path, Path]:
    """Issue a certificate with a key of this kind."""
    issued = certificates.authority.issue_cert("127.0.0.1", name, common_name=name, key_type=kind)
    certificate, key = certificates.directory / f"{name}.pem", certificates.directory / f"{name}.key"
    certificate.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(key)
    return certificate, key


def test_every_missing_file_is_named_with_its_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        tls.server_context(tmp_path / "a.pem", tmp_path / "b.key", tmp_path / "c.pem")
    assert raised.value.code == "tls_files"
    assert [(problem.key, problem.value) for problem in raised.value.problems] == [
        ("tls_certificate", str(tmp_path / "a.pem")),
        ("tls_key", str(tmp_path / "b.key")),
        ("tls_client_ca", str(tmp_path / "c.pem")),
    ]
    assert "No such file" in str(raised.value)


def test_a_missing_ca_of_a_client_is_named_with_its_setting(tmp_path: Path) -> None:
    assert_problems(lambda: tls.client_context(tmp_path / "ca.pem"), "FORGED_CA")


def test_swapped_certificate_and_key_are_both_named(certificates: Certificates) -> None:
    certificate, key = certificates.issue("localhost")
    assert_problems(lambda: tls.server_context(key, certificate), "tls_certificate", "tls_key")


def test_the_key_of_another_certificate_is_named(certificates: Certificates) -> None:
    certificate, _ = certificates.issue("one.example")
    _, key = certificates.issue("two.example")
    assert_problems(lambda: tls.server_context(certificate, key), "tls_key")


def test_a_key_with_a_passphrase_is_an_error_and_asks_for_nothing(certificates: Certificates, tmp_path: Path) -> None:
    certificate, key = certificates.issue("localhost")
    locked = tmp_path / "locked.key"
    locked.write_bytes(with_passphrase(key.read_bytes()))
    assert_problems(lambda: tls.server_context(certificate, locked), "tls_certificate", "tls_key")


def test_invalid_pem_content_is_named(certificates: Certificates, tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    certificate, key = certificates.issue("localhost")
    assert_problems(lambda: tls.server_context(certificate, key, garbage), "tls_client_ca")


def test_a_client_certificate_without_its_key_is_an_error(certificates: Certificates) -> None:
    certificate, _ = certificates.issue("localhost")
    assert_problems(lambda: tls.client_context(certificates.ca, certificate), "FORGED_KEY")


def test_a_client_key_without_its_certificate_is_an_error(certificates: Certificates) -> None:
    _, key = certificates.issue("localhost")
    assert_problems(lambda: tls.client_context(certificates.ca, key=key), "FORGED_CERTIFICATE")


def test_unknown_tls_error_uses_the_text_of_openssl() -> None:
    error = ssl.SSLError(1, "[SSL: DATA_LENGTH_TOO_LONG] data length too long")
    error.reason = "DATA_LENGTH_TOO_LONG"
    assert "TLS with the moon failed: data length too long" in str(tls.refusal("the moon", error))


def assert_problems(make: Callable[[], ssl.SSLContext], *settings: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make()
    assert [problem.key for problem in raised.value.problems] == list(settings)


def with_passphrase(key: bytes) -> bytes:
    return serialization.load_pem_private_key(key, None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"open sesame"),
    )
