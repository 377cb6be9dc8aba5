"""What every simulated world is made of: a daemon that dies and comes back, a network and a disk that fail.

Law: whatever a killed daemon still does has no effect. Trouble is over when `end_faults` was called; from then on the
network and the disk are good, and the daemon that runs lives on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from random import Random

import anyio
from anyio.abc import TaskGroup

from forged.auth.messages import CreateToken
from forged.auth.model import Role
from forged.auth.tokens import encode_token
from forged.client import ForgedClient
from forged.config import Config
from forged.daemon import Daemon, Ports
from forged.errors import ForgedError, Unavailable
from tests.simulation.disk import DiskFaults, SimulatedDisk
from tests.simulation.links import Faults
from tests.simulation.loop import VirtualClock, VirtualLoop
from tests.simulation.network import SimulatedNetwork
from tests.simulation.store import LogStore

SERVER = "server"
SOCKET = "/run/forged.sock"
PORT = 7433
ENDPOINT = f"tcp://{SERVER}:{PORT}"
FOUND_WITHIN_S = 120.0
DAEMON_LIVES_S = (0.05, 8.0)
RESTARTED_AFTER_S = (0.0, 0.01, 0.5, 3.0)


OpenStore = Callable[[], Awaitable[LogStore]]


class Simulation(ABC):
    """One seed's world, without those who live in it."""

    daemon_lives_s = DAEMON_LIVES_S

    def __init__(self, seed: int, loop: VirtualLoop, random: Random) -> None:
        self.seed = seed
        self.loop = loop
        self.random = random
        self.trace: list[str] = []
        self.faults_active = True
        self.daemon: Daemon | None = None
        self.starts = 0
        self.token = ""
        """That of an operator."""
        self.network = SimulatedNetwork(loop, random, network_faults(random), trace=self.note)
        self.disk = SimulatedDisk(random, _disk_faults(random))
        self.clock = VirtualClock(loop)
        self.server_clock = self.clock
        """That of the daemon."""
        self.prepared = anyio.Event()

    def note(self, text: str) -> None:
        """Write a line of the trace."""
        self.trace.append(f"{self.loop.time():.6f} {text}")

    # What a world says of its daemons.

    @abstractmethod
    def ports(self, clock: VirtualClock, number: int) -> Ports:
        """The outside of the daemon of that number."""

    @abstractmethod
    def config(self) -> Config:
        """The settings of the next daemon."""

    @abstractmethod
    def extend(self, daemon: Daemon) -> None:
        """Put into a daemon what looks on."""

    @abstractmethod
    def daemon_started(self, daemon: Daemon) -> None:
        """It serves."""

    @abstractmethod
    def daemon_stopped(self) -> None:
        """It is about to be killed, or did not start."""

    @abstractmethod
    def daemon_failed_to_start(self, code: str) -> None:
        """A daemon had a reason not to start."""

    # The daemon and what happens to it.

    async def keep_daemon(self, tasks: TaskGroup) -> None:
        """Run daemon after daemon, each until it is killed; the last one lives on."""
        while True:
            killed = anyio.Event()
            tasks.start_soon(self._run_daemon, killed)
            await self.prepared.wait()
            await anyio.sleep(self.random.uniform(*self.daemon_lives_s))
            if not self.faults_active:
                return
            self._kill_daemon()
            killed.set()
            await anyio.sleep(self.random.choice(RESTARTED_AFTER_S))

    def _kill_daemon(self) -> None:
        power_cut = self.random.random() < 0.5
        self.note("power cut" if power_cut else "kill -9")
        self.daemon_stopped()
        self.daemon = None
        self.disk = self.disk.crash() if power_cut else self.disk.kill()
        self.network.crash(SERVER, host_gone=power_cut and self.random.random() < 0.3)

    async def _run_daemon(self, killed: anyio.Event) -> None:
        """One process: when it is killed nothing that it still does has any effect."""
        async with anyio.create_task_group() as process:
            process.start_soon(self._serve)
            await killed.wait()
            process.cancel_scope.cancel()

    async def _serve(self) -> None:
        self.starts += 1
        number = self.starts
        offset_s = self.random.uniform(0, 1e6)
        clock = VirtualClock(self.loop, offset_s=offset_s, skew_s=self.random.uniform(-5, 5))
        self.server_clock = clock
        ports, config = self.ports(clock, number), self.config()
        while True:
            try:
                async with Daemon.running(config, ports, extend=self.extend) as daemon:
                    self.note(f"daemon {number} is ready at {daemon.ledger.durable}")
                    self.daemon = daemon
                    self.daemon_started(daemon)
                    await anyio.sleep_forever()
            except ForgedError as error:
                # As systemd does: what cannot start is started again.
                self.note(f"daemon {number} did not start: {error.code}")
                self.daemon_stopped()
                self.daemon_failed_to_start(error.code)
                await anyio.sleep(0.5)

    async def make_token(self) -> None:
        """Over the Unix socket, as an operator would."""
        async with ForgedClient(
            f"unix://{SOCKET}",
            network=self.network.host(SERVER),
            clock=self.clock,
            source=Random(f"operator {self.seed}"),
            connect_timeout_s=FOUND_WITHIN_S,
        ) as operator:
            while not self.token:
                secret = self.random.randbytes(32)
                try:
                    await operator.request(CreateToken("simulation", Role.OPERATOR, secret))
                except Unavailable as error:
                    self.note(f"the operator was told {error.code}")
                    await anyio.sleep(0.1)
                else:
                    self.token = encode_token(secret)[1]

    def open_store_of(self, disk: SimulatedDisk) -> OpenStore:
        """The way to the store on a disk."""

        async def open_store() -> LogStore:
            return await LogStore.open(disk, self.random)

        return open_store

    # Trouble.

    def fill_disk(self) -> None:
        """Leave next to no room."""
        self.note("the disk is full")
        self.disk.capacity_bytes = self.disk.used_bytes + self.random.randrange(2000)

    def heal(self) -> None:
        """End the partitions, and give the disk room."""
        self.network.heal()
        self.disk.capacity_bytes = None

    def end_faults(self) -> None:
        """From now on the world is good."""
        self.note("the trouble ends")
        self.faults_active = False
        self.network.calm()
        self.disk.capacity_bytes = None
        self.disk.faults = DiskFaults()


def network_faults(random: Random) -> Faults:
    """How bad the network is, in this world."""
    hostile = random.random() < 0.8
    return Faults(
        latency_s=(0.0001, random.choice((0.001, 0.02, 0.2))),
        split=random.choice((0.0, 0.2)),
        merge=random.choice((0.0, 0.2)),
        reset=random.choice((0.0, 0.002, 0.02)) if hostile else 0.0,
        drop=random.choice((0.0, 0.005)) if hostile else 0.0,
        duplicate=random.choice((0.0, 0.0, 0.01)) if hostile else 0.0,
        give_up_after_s=(1.0, 8.0),
        keepalive_s=(1.0, 3.0),
    )


def _disk_faults(random: Random) -> DiskFaults:
    return DiskFaults(
        sync_s=(0.0002, random.choice((0.002, 0.02, 0.2))),
        append_fails=random.choice((0.0, 0.0, 0.01)),
        sync_fails=random.choice((0.0, 0.0, 0.01)),
    )
