"""The simulation of the model registry: trainers, promoters and readers, against a daemon that is killed at any point.

Metrics that demand a rollback are reported while the daemon dies, the disk is full and the clock jumps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

import anyio
from anyio.abc import TaskGroup

from forged.auth.model import Role
from forged.client import ForgedClient
from forged.errors import RequestRefused
from forged.jobs.model import CreateJob
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
from tests.simulation.base import simulated, until_done
from tests.simulation.environment.loop import VirtualClock, VirtualLoop
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
from tests.simulation.registry.oracle import Promise, RegistryOracle
from tests.simulation.watched import WatchedSimulation

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


class RegistrySimulation(WatchedSimulation):
    """One seed of the registry's simulation."""

    oracle: RegistryOracle
    kept, settled = Promise.KEPT, Promise.ROLLBACK
    recovery_max_s = RECOVERY_MAX_S
    daemon_lives_s = (0.2, 6.0)

    def __init__(self, seed: int, loop: VirtualLoop, random: Random) -> None:
        super().__init__(seed, loop, random)
        self.oracle = RegistryOracle(self.meet, self._bad_canary)
        self._bad_canary_measured = anyio.Event()
        self.callers: list[Caller] = [Trainer(self, name) for name in TRAINERS]
        self.callers += [Promoter(self, name) for name in PROMOTERS]
        self.callers.append(Reader(self, READER))
        if random.random() < HOSTILE_SEEDS:
            self.callers.append(HostileTenant(self, HOSTILE))

    # From Simulation.

    def daemon_stopped(self) -> None:
        if self.oracle.unsettled():
            self.meet("the daemon dies before a canary is rolled back")

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
        return name if name in self.tokens else "simulation"

    async def prepare(self) -> None:
        async with self.client(AUDITOR) as operator:
            for job in (JOB, HOSTILE):
                await until_done(operator, CreateJob(job))
            for name in TRAINERS:
                await self.add_token(operator, name, Role.WORKER, (JOB,))
            await self.add_token(operator, HOSTILE, Role.OPERATOR, (HOSTILE,))
            for name in PROMOTERS:
                await self.add_token(operator, name, Role.OPERATOR, None)
            await until_done(operator, ImportModels([one for name in MODELS for one in _first(name)], "to begin"))

    # Faults.

    async def make_faults(self) -> None:
        """Break the network, the disk and the clock until the faults end."""
        partition = partial(self.partition, [caller.name for caller in self.callers])
        faults = (partition, self.fill_disk, self.heal, self.heal, self._set_clock)
        await self.cause_faults(faults, FAULTS_S, pause_s_max=2.0)
        self.end_faults()
        self.network.heal()

    def _set_clock(self) -> None:
        self.meet("the clock of the registry jumps")
        assert isinstance(self.server_clock, VirtualClock)
        self.server_clock.jump(self.random.choice((-20.0, -3.0, 3.0, 10.0)))

    # The whole.

    def start_actors(self, actors: TaskGroup) -> None:
        for caller in self.callers:
            actors.start_soon(caller.run)

    async def finish(self) -> None:
        """Compare all answers with the journals."""
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
    return simulated(RegistrySimulation, "registry", seed, watch)
