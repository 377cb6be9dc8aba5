"""The base of simulations whose oracle sees every durable transaction, and whose callers have tokens of their own."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from random import Random

import anyio
from anyio.abc import TaskGroup

from forged.auth.messages import CreateToken
from forged.auth.model import Role
from forged.auth.tokens import encode_token
from forged.client import ForgedClient
from forged.daemon import Daemon
from forged.kernel.store.port import Conflict, Transaction
from forged.net.transport.connection import ConnectionLimits
from tests.simulation.base import ENDPOINT, FOUND_WITHIN_S, OpenStore, Simulation, until_done
from tests.simulation.environment.disk import SimulatedDisk
from tests.simulation.environment.loop import VirtualClock, VirtualLoop
from tests.simulation.environment.store import LogStore
from tests.simulation.oracle import StoreOracle


class WatchedStore(LogStore):
    """Calls `committed` with each transaction that is durable."""

    committed: Callable[[Transaction], None]

    async def _commit(self, batch: Sequence[Transaction]) -> Sequence[Conflict | None]:
        conflicts = await super()._commit(batch)
        for transaction, conflict in zip(batch, conflicts, strict=True):
            if conflict is None:
                self.committed(transaction)
        return conflicts


class WatchedSimulation(Simulation):
    """One seed; subclasses have the oracle, the actors and the faults."""

    oracle: StoreOracle
    kept: Enum
    """The promise that what is durable is not lost."""
    settled: Enum
    """The promise that the oracle finds everything settled within `recovery_max_s` after the faults."""
    recovery_max_s: float

    def __init__(self, seed: int, loop: VirtualLoop, random: Random) -> None:
        super().__init__(seed, loop, random)
        self.met: Counter[str] = Counter()
        self.tokens: dict[str, str] = {}
        """The tokens of callers that are not the simulation's operator, by name."""

    def meet(self, what: str) -> None:
        """Count an event."""
        self.met[what] += 1

    # For subclasses.

    @abstractmethod
    async def prepare(self) -> None:
        """Create jobs and tokens; the daemon is not killed yet."""

    @abstractmethod
    async def make_faults(self) -> None:
        """Cause faults, and end them."""

    @abstractmethod
    def start_actors(self, actors: TaskGroup) -> None:
        """Start what runs during the faults and ends after them."""

    @abstractmethod
    async def finish(self) -> None:
        """The final checks: the daemon runs, and no actor changes anything any more."""

    # From Simulation.

    def open_store_of(self, disk: SimulatedDisk) -> OpenStore:
        def committed(transaction: Transaction) -> None:
            # The store of a killed daemon may still write to the disk that it had.
            if disk is self.disk:
                self.oracle.committed(transaction)

        async def open_store() -> LogStore:
            store = await WatchedStore.open(disk, self.random)
            store.committed = committed
            return store

        return open_store

    def extend(self, daemon: Daemon) -> None:
        daemon.ledger.register(self.oracle)
        daemon.bus.on_handler_bug = self.handler_failed

    def daemon_failed_to_start(self, code: str) -> None:
        self.oracle.violated(self.kept, f"a daemon failed to start with {code}")

    # Callers.

    def client(self, host: str, caller: str | None = None) -> ForgedClient:
        """A client on this host with the token of a caller, by default of the host's name; without one an operator."""
        return ForgedClient(
            ENDPOINT,
            token=self.tokens.get(host if caller is None else caller, self.token),
            timeout_s=20.0,
            connect_timeout_s=FOUND_WITHIN_S,
            network=self.network.host(host),
            clock=VirtualClock(self.loop, offset_s=self.random.uniform(0, 1e6)),
            source=Random(f"{host} {self.loop.time()} {self.seed}"),
            limits=ConnectionLimits(ping_after_s=4.0, silence_max_s=10.0),
        )

    async def add_token(self, operator: ForgedClient, name: str, role: Role, jobs: tuple[str, ...] | None) -> None:
        """Create the token of a caller."""
        secret = self.random.randbytes(32)
        await until_done(operator, CreateToken(name, role, secret, jobs=jobs))
        self.tokens[name] = encode_token(secret)[1]

    # The whole.

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.keep_daemon, tasks)
            await self.make_token()
            await self.prepare()
            self.prepared.set()
            tasks.start_soon(self._check)
            async with anyio.create_task_group() as actors:
                actors.start_soon(self.make_faults)
                self.start_actors(actors)
            await self.settle()
            await self.finish()
            self.oracle.check()
            tasks.cancel_scope.cancel()

    async def _check(self) -> None:
        while True:
            await anyio.sleep(1.0)
            self.oracle.check()

    async def settle(self) -> None:
        """Wait until the daemon has nothing left to do."""
        with anyio.move_on_after(self.recovery_max_s):
            while self.oracle.unsettled():
                await anyio.sleep(0.5)
            return
        what = "; ".join(self.oracle.unsettled())
        self.oracle.broken(self.settled, f"{self.recovery_max_s} s after the faults: {what}")
