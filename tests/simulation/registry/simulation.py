"""The simulation of the model registry: trainers, promoters and readers, against a daemon that is killed at any point.

Metrics that demand a rollback are reported while the daemon dies, the disk is full and the clock jumps.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import anyio

from forged.auth.messages import CreateToken
from forged.auth.model import Role
from forged.auth.tokens import encode_token
from forged.client import ForgedClient
from forged.config import Config
from forged.daemon import Daemon, Ports
from forged.errors import RequestRefused, Unavailable
from forged.jobs.model import CreateJob
from forged.kernel.ledger import FACT_PREFIX, read_all
from forged.kernel.messages import Record, Request
from forged.kernel.store.port import Conflict, Store, Transaction
from forged.net.transport.connection import ConnectionLimits
from forged.registry.messages import (
    SERVING,
    FindModels,
    ImportedVersion,
    ImportModels,
    ListModelVersions,
    ReadModelJournal,
)
from forged.registry.model import DeploymentState, ModelVersion
from tests.registry.registry_fixture import metadata, result
from tests.simulation.base import ENDPOINT, FOUND_WITHIN_S, SERVER, SOCKET, OpenStore, Simulation
from tests.simulation.environment.disk import SimulatedDisk
from tests.simulation.environment.loop import SimulationError, VirtualClock, VirtualLoop, run
from tests.simulation.environment.store import LogStore
from tests.simulation.registry.callers import (
    HOSTILE,
    JOB,
    MODELS,
    Caller,
    HostileTenant,
    Promoter,
    Reader,
    Trainer,
)
from tests.simulation.registry.oracle import PREFIXES, Promise, RegistryOracle

FAULTS_S = 20.0
RECOVERY_MAX_S = 60.0
HOSTILE_SEEDS = 0.4
KILLED_AT_ROLLBACK = 0.5
"""How often the daemon is killed when a bad canary was measured."""
TRAINERS, PROMOTERS, READER, AUDITOR = ("trainer0", "trainer1"), ("promoter0", "promoter1"), "reader", "auditor"
MUST_HAPPEN = (
    "a canary is measured",
    "a canary is rolled back by the daemon",
    "a hostile tenant is refused",
    "a promotion rests on evidence",
    "a reader asks what served",
    "a rollback is advised",
    "evidence is waived",
    "entry: alias_moved",
    "entry: deleted",
    "entry: imported",
    "entry: rolled_back",
    "refused: model_checksum_differs",
    "refused: model_evidence_missing",
    "refused: model_rollback_refused",
    "refused: model_serving",
    "refused: model_state_changed",
    "the clock of the registry jumps",
    "the daemon dies before a canary is rolled back",
)
"""What happens somewhere in the first few dozen seeds."""


class WatchedStore(LogStore):
    """Tells the oracle of each transaction that is durable."""

    simulation: RegistrySimulation

    async def _commit(self, batch: Sequence[Transaction]) -> Sequence[Conflict | None]:
        conflicts = await super()._commit(batch)
        if self._disk is self.simulation.disk:
            for transaction, conflict in zip(batch, conflicts, strict=True):
                if conflict is None:
                    self.simulation.oracle.committed(transaction)
        return conflicts


class Loading:
    """An owner without state: what a new daemon reads from the store is history."""

    def __init__(self, oracle: RegistryOracle) -> None:
        self._oracle = oracle

    async def load(self, store: Store) -> None:
        facts = [Record.read(entry.value) for entry in await read_all(store, FACT_PREFIX)]
        entries = {entry.key: entry.value for prefix in PREFIXES for entry in await read_all(store, prefix)}
        self._oracle.loaded(facts, entries)


class RegistrySimulation(Simulation):
    """One seed of the registry's simulation."""

    daemon_lives_s = (0.2, 6.0)

    def __init__(self, seed: int, loop: VirtualLoop, random: Random) -> None:
        super().__init__(seed, loop, random)
        self.met: Counter[str] = Counter()
        self.oracle = RegistryOracle(self.meet, self._bad_canary)
        self._bad_canary_measured = anyio.Event()
        self._tokens: dict[str, str] = {}
        self.callers: list[Caller] = [Trainer(self, name) for name in TRAINERS]
        self.callers += [Promoter(self, name) for name in PROMOTERS]
        self.callers.append(Reader(self, READER))
        if random.random() < HOSTILE_SEEDS:
            self.callers.append(HostileTenant(self, HOSTILE))

    def meet(self, what: str) -> None:
        """Count an event."""
        self.met[what] += 1

    # From Simulation.

    def open_store_of(self, disk: SimulatedDisk) -> OpenStore:
        async def open_store() -> LogStore:
            store = await WatchedStore.open(disk, self.random)
            assert isinstance(store, WatchedStore)
            store.simulation = self
            return store

        return open_store

    def ports(self, clock: VirtualClock, number: int) -> Ports:
        return Ports(
            clock,
            self.network.host(SERVER),
            number,
            0,
            self.open_store_of(self.disk),
            random=Random(f"daemon {number} {self.seed}"),
        )

    def config(self) -> Config:
        return Config(
            data_dir="/",
            socket=SOCKET,
            listen=(ENDPOINT,),
            anonymous_loopback_role="none",
            unix_other_role="operator",
        )

    def extend(self, daemon: Daemon) -> None:
        daemon.ledger.register(Loading(self.oracle))
        daemon.bus.on_handler_bug = self._tell_broken

    def _tell_broken(self, owner: str, error: BaseException) -> None:
        raise SimulationError(f"{owner} broke") from error

    def daemon_started(self, daemon: Daemon) -> None:
        """It runs until it is killed."""

    def daemon_stopped(self) -> None:
        if self.oracle.unsettled():
            self.meet("the daemon dies before a canary is rolled back")

    def daemon_failed_to_start(self, code: str) -> None:
        """Only a store error may prevent the start."""
        if not code.startswith("store_"):
            self.oracle.violated(Promise.KEPT, f"a daemon failed to start with {code}")

    async def daemon_lives(self) -> None:
        """As others, or until about the moment at which a bad canary is rolled back."""
        self._bad_canary_measured = anyio.Event()
        with anyio.move_on_after(self.random.uniform(*self.daemon_lives_s)):
            await self._bad_canary_measured.wait()
            await anyio.sleep(self.random.choice((0.0, 0.001, 0.01, 0.1)))

    def _bad_canary(self) -> None:
        if self.faults_active and self.random.random() < KILLED_AT_ROLLBACK:
            self._bad_canary_measured.set()

    # Callers.

    def principal(self, name: str) -> str:
        """The principal of a caller."""
        return name if name in self._tokens else "simulation"

    def client(self, name: str) -> ForgedClient:
        """A client with the token of this name, or an operator's."""
        return ForgedClient(
            ENDPOINT,
            token=self._tokens.get(name, self.token),
            timeout_s=20.0,
            connect_timeout_s=FOUND_WITHIN_S,
            network=self.network.host(name),
            clock=VirtualClock(self.loop, offset_s=self.random.uniform(0, 1e6)),
            source=Random(f"{name} {self.loop.time()} {self.seed}"),
            limits=ConnectionLimits(ping_after_s=4.0, silence_max_s=10.0),
        )

    async def _prepare(self) -> None:
        """Create the jobs and the tokens."""
        async with self.client(AUDITOR) as operator:
            for job in (JOB, HOSTILE):
                await self._until_done(operator, CreateJob(job))
            for name in TRAINERS:
                await self._add_token(operator, name, Role.WORKER, (JOB,))
            await self._add_token(operator, HOSTILE, Role.OPERATOR, (HOSTILE,))
            for name in PROMOTERS:
                await self._add_token(operator, name, Role.OPERATOR, None)
            await self._until_done(operator, ImportModels([one for name in MODELS for one in _first(name)], "to begin"))

    async def _add_token(self, operator: ForgedClient, name: str, role: Role, jobs: tuple[str, ...] | None) -> None:
        secret = self.random.randbytes(32)
        await self._until_done(operator, CreateToken(name, role, secret, jobs=jobs))
        self._tokens[name] = encode_token(secret)[1]

    async def _until_done(self, operator: ForgedClient, request: Request[Any]) -> None:
        while True:
            try:
                await operator.request(request)
            except Unavailable:
                await anyio.sleep(0.1)
            else:
                return

    # Faults.

    async def make_faults(self) -> None:
        """Break the network, the disk and the clock until the faults end."""
        faults = (self._partition, self.fill_disk, self.heal, self.heal, self._set_clock)
        ends_at = self.loop.time() + FAULTS_S
        while self.loop.time() < ends_at:
            await anyio.sleep(self.random.uniform(0.1, 2.0))
            self.random.choice(faults)()
        self.end_faults()
        self.network.heal()

    def _partition(self) -> None:
        hosts = [caller.name for caller in self.callers]
        cut_off = self.random.sample(hosts, self.random.randint(1, len(hosts)))
        self.network.partition(cut_off, [SERVER], one_way=self.random.random() < 0.3)

    def _set_clock(self) -> None:
        self.meet("the clock of the registry jumps")
        assert isinstance(self.server_clock, VirtualClock)
        self.server_clock.jump(self.random.choice((-20.0, -3.0, 3.0, 10.0)))

    # The whole.

    async def run(self) -> None:
        """Run the simulation from the first start to the final checks."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.keep_daemon, tasks)
            await self.make_token()
            await self._prepare()
            self.prepared.set()
            tasks.start_soon(self._check)
            async with anyio.create_task_group() as actors:
                actors.start_soon(self.make_faults)
                for caller in self.callers:
                    actors.start_soon(caller.run)
            await self._settle()
            await self._finish()
            self.oracle.check()
            tasks.cancel_scope.cancel()

    async def _check(self) -> None:
        while True:
            await anyio.sleep(1.0)
            self.oracle.check()

    async def _settle(self) -> None:
        """Wait until every bad canary is rolled back."""
        with anyio.move_on_after(RECOVERY_MAX_S):
            while self.oracle.unsettled():
                await anyio.sleep(0.5)
            return
        what = "; ".join(self.oracle.unsettled())
        self.oracle.broken(Promise.ROLLBACK, f"{RECOVERY_MAX_S} s after the faults: {what}")

    async def _finish(self) -> None:
        """Compare all answers with the journals; nobody changes anything any more."""
        async with self.client(AUDITOR) as auditor:
            for model_id in MODELS:
                if self.oracle.entries(model_id):
                    await self._audit(auditor, model_id)
            for state in DeploymentState:
                page = await auditor.request(FindModels(state=state))
                found = [(one.model_id, one.version) for one in page.versions]
                expected = [
                    (model_id, version)
                    for model_id in sorted(MODELS)
                    for version, known in sorted(self.oracle.model(model_id).told.states.items())
                    if known is state
                ]
                if found != expected:
                    self.oracle.broken(Promise.ANSWERS, f"{found} are {state}, and by the journals {expected}")

    async def _audit(self, auditor: ForgedClient, model_id: str) -> None:
        model = self.oracle.model(model_id)
        listed = (await auditor.request(ListModelVersions(model_id))).versions
        if [one.version for one in listed] != sorted(model.told.states, reverse=True):
            self.oracle.broken(Promise.ORDER, f"{model_id} lists {listed}")
        for version in (None, *sorted(model.ever)):
            expected = [one for one in reversed(model.journal) if version in (None, one.version)]
            try:
                page = await auditor.request(ReadModelJournal(model_id, version))
            except RequestRefused as error:
                self.oracle.broken(Promise.ANSWERS, f"the journal of {model_id}@{version} is not told: {error}")
            if page.entries != expected[: len(page.entries)] or page.more != (len(page.entries) < len(expected)):
                self.oracle.broken(Promise.ANSWERS, f"the journal of {model_id}@{version} is told as {page}")


def _first(model_id: str) -> list[ImportedVersion]:
    """The versions that a model begins with: one serves, and one is a canary."""
    serving, canary = ModelVersion(0, 0, 1), ModelVersion(0, 0, 2)
    return [
        ImportedVersion(
            metadata(serving, model_id=model_id, state=DeploymentState.PRODUCTION),
            [SERVING],
            validation=result(serving, model_id=model_id),
        ),
        ImportedVersion(metadata(canary, model_id=model_id, state=DeploymentState.CANARY)),
    ]


def simulate(seed: int, watch: Callable[[RegistrySimulation], None] = lambda simulation: None) -> RegistrySimulation:
    """Run one seed; raises `InvariantViolated`."""

    async def main() -> RegistrySimulation:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        simulation = RegistrySimulation(seed, loop, Random(f"registry {seed}"))
        watch(simulation)
        await simulation.run()
        return simulation

    return run(main, seed)
