"""Workers that speak TLS to each other, with real certificates."""

from __future__ import annotations

import datetime as dt
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from forged.client import ForgedClient
from forged.elastic.messages import WorkerFailed
from forged.elastic.model import WorkerId
from forged.errors import ConfigError, ForgedError, PeerError
from forged.kernel.messages import Record
from forged.net.transport import tls
from forged.net.transport.sockets import SystemNetwork
from forged.worker.blocking import join
from forged.worker.mesh import Mesh
from forged.worker.transport.peer_tls import PeerTls
from forged.worker.worker import ElasticWorker
from tests.client.daemon_runner import DaemonRunner, config_in
from tests.net.recording_connections import Certificates
from tests.worker.meshes import JOB, KEY, PATIENCE_S, Meshes, buffers, each, failures, incarnation, random_parts
from tests.worker.trainers import JOB as CREWS_JOB
from tests.worker.trainers import group_at

HOST = "127.0.0.1"
YESTERDAY = dt.datetime.now(dt.UTC) - dt.timedelta(days=1)
LARGE = 1 << 17
SIZES = (7, 2_000_000)
NAMES = ("FORGED_CA", "FORGED_CERTIFICATE", "FORGED_KEY")


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return made_in(tmp_path / "ours")


@pytest.fixture
def strangers(tmp_path: Path) -> Certificates:
    """Certificates of another authority."""
    return made_in(tmp_path / "theirs")


@pytest.fixture
async def runner(tmp_path: Path) -> AsyncIterator[DaemonRunner]:
    """A running daemon."""
    runner = DaemonRunner(config_in(tmp_path / "runner"))
    await runner.open()
    yield runner
    await runner.close()


def made_in(directory: Path) -> Certificates:
    directory.mkdir()
    return Certificates(directory)


def identity(certificates: Certificates, name: str = HOST) -> PeerTls:
    return PeerTls(certificates.ca, *certificates.issue(name))


def expired(certificates: Certificates) -> PeerTls:
    """A certificate that was good until yesterday."""
    issued = certificates.authority.issue_cert(HOST, not_after=YESTERDAY)
    certificate, key = certificates.directory / "expired.pem", certificates.directory / "expired.key"
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    return PeerTls(certificates.ca, certificate, key)


def shown_by(shows: PeerTls, trusts: Certificates) -> PeerTls:
    """TLS files with a certificate of one authority and the trust of another."""
    return PeerTls(trusts.ca, shows.certificate, shows.key)


def show(worker: ElasticWorker, identity: PeerTls) -> None:
    """Have its door show another certificate from now on."""
    assert worker._session is not None
    network = worker._session._mesh._network
    assert isinstance(network, SystemNetwork)
    assert network._tls_server is not None
    tls.renew(network._tls_server, identity.certificate, identity.key, identity.authority)


@asynccontextmanager
async def secured(*identities: PeerTls) -> AsyncIterator[Meshes]:
    """A mesh for each."""
    async with AsyncExitStack() as stack:
        made = Meshes([], [])
        for number, one in enumerate(identities):
            mesh = Mesh(f"w{number}", incarnation(number), JOB, one.network(), key=KEY, scheme="tls")
            address = await stack.enter_async_context(mesh.open(HOST))
            assert address.scheme == "tls"
            made.meshes.append(mesh)
            made.workers.append(WorkerId(f"w{number}", address.host, address.port))
        yield made


async def refusal(*identities: PeerTls) -> ForgedError:
    """Why the second does not come into a world with the first."""
    async with secured(*identities) as made:
        (error,) = await failures(made.meshes[1].enter(1, made.topology, PATIENCE_S))
        assert isinstance(error, ForgedError)
        assert made.meshes[0].counts.accepted == 0
        return error


@pytest.mark.parametrize("elements", [3, LARGE], ids=["small", "large"])
async def test_arrays_are_summed_over_tls(certificates: Certificates, elements: int) -> None:
    async with secured(*[identity(certificates)] * 3) as made:
        worlds = await made.enter(1)
        for reduced in await each(worlds, lambda world: world.all_reduce(np.full(elements, world.rank + 1.0))):
            np.testing.assert_array_equal(reduced, np.full(elements, 6.0))
        await each(worlds, lambda world: world.leave())


async def test_a_state_is_moved_over_tls(certificates: Certificates) -> None:
    parts, got = random_parts(*SIZES), buffers(*SIZES)
    async with secured(*[identity(certificates)] * 2) as made:
        with made.meshes[0].state_server.offering(1, b"head", parts):
            await made.meshes[1].state_fetch.fetch(made.workers[0], 1, lambda _: got)
    assert got == parts


async def test_peer_of_another_authority_is_rejected(certificates: Certificates, strangers: Certificates) -> None:
    error = await refusal(identity(strangers), identity(certificates))
    assert error.code == "tls_failed"
    assert "its certificate is not accepted" in error.message


async def test_rejected_peer_learns_that_its_authority_is_not_trusted(
    certificates: Certificates, strangers: Certificates
) -> None:
    error = await refusal(identity(certificates), shown_by(identity(strangers), certificates))
    assert error.code == "tls_failed"
    assert "it does not trust the authority that signed our certificate" in error.message


async def test_expired_certificate_is_refused_at_either_end_with_the_reason(certificates: Certificates) -> None:
    theirs = await refusal(expired(certificates), identity(certificates))
    assert "its certificate is not accepted: certificate has expired" in theirs.message
    ours = await refusal(identity(certificates), expired(certificates))
    assert "it reports that our certificate has expired" in ours.message


async def test_a_certificate_for_another_host_is_refused(certificates: Certificates) -> None:
    error = await refusal(identity(certificates, "elsewhere.example"), identity(certificates))
    assert "mismatch" in error.message


async def test_workers_train_over_tls_and_a_joiner_receives_the_state(
    runner: DaemonRunner, certificates: Certificates
) -> None:
    async with group_at(runner.endpoint) as group:
        group.start("a", "b", peer_tls=identity(certificates))
        await group.world_of("a", "b")
        group.start("c", peer_tls=identity(certificates))
        await group.world_of("a", "b", "c")
        await group.finish("a", "b", "c")


async def test_refused_joiner_raises_the_reason_and_the_world_trains_on(
    runner: DaemonRunner, certificates: Certificates, strangers: Certificates
) -> None:
    async with group_at(runner.endpoint) as group:
        group.start("a", "b", peer_tls=identity(certificates))
        await group.world_of("a", "b")
        group.start("c", peer_tls=identity(strangers))
        (error,) = await group.over("c")
        assert isinstance(error, PeerError)
        assert error.code == "tls_failed"
        await group.world_of("a", "b")
        await group.finish("a", "b")


async def test_worker_whose_token_is_revoked_leaves_and_the_world_trains_on(
    runner: DaemonRunner, certificates: Certificates
) -> None:
    """Its certificate is not renewed in time, and the world changes."""
    async with group_at(runner.endpoint, max_consecutive_failures=100) as group:
        group.start("a", "b", "c", peer_tls=identity(certificates))
        await group.world_of("a", "b", "c")
        (hub,) = [name for name in "abc" if group[name].worker.rank == 0]
        others = sorted({"a", "b", "c"} - {hub})
        show(group[hub].worker, expired(certificates))
        async with ForgedClient(runner.endpoint) as client:
            await client.rescale_job(CREWS_JOB)
            await group.world_of(*others)
            failed = [item.fact async for item in client.past_facts(WorkerFailed) if isinstance(item, Record)]
        assert [fact.worker_id for fact in failed if isinstance(fact, WorkerFailed)] == [hub]
        await group.finish(*others)


def test_missing_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FORGED_CERTIFICATE", "/somewhere.pem")
    with pytest.raises(ConfigError) as raised, join("tcp://127.0.0.1:1", peer_tls=True):
        pass
    assert raised.value.code == "peer_tls_incomplete"
    assert [problem.key for problem in raised.value.problems] == ["FORGED_CA", "FORGED_KEY"]


def test_files_named_by_the_variables_are_used(certificates: Certificates) -> None:
    ours = identity(certificates)
    environment = dict(zip(NAMES, map(str, (ours.authority, ours.certificate, ours.key)), strict=True))
    assert PeerTls.from_environment(environment) == PeerTls(*environment.values())


def test_missing_file_is_named_with_its_variable(certificates: Certificates, tmp_path: Path) -> None:
    ours = identity(certificates)
    with pytest.raises(ConfigError) as raised:
        PeerTls(ours.authority, ours.certificate, tmp_path / "none.key").network()
    assert [problem.key for problem in raised.value.problems] == ["FORGED_KEY"]
