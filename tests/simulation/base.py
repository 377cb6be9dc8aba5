"""The base of all simulations: a daemon that is killed and restarted, and a network and disk with faults.

Invariants:
- Nothing that a killed daemon's tasks still do has an effect.
- After `end_faults` the network and the disk have no faults, and the running daemon is not killed.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Any, NoReturn, TypeVar

import anyio
from anyio.abc import TaskGroup

from forged.auth.messages import CreateToken
from forged.auth.model import Role
from forged.auth.tokens import encode_token
from forged.client import ForgedClient
from forged.config import Config
from forged.daemon import Daemon, Ports
from forged.errors import ForgedError, Unavailable
from forged.kernel.messages import Request
from tests.simulation.environment.disk import DiskFaults, SimulatedDisk
from tests.simulation.environment.links import Faults
from tests.simulation.environment.loop import SimulationError, VirtualClock, VirtualLoop, run
from tests.simulation.environment.network import SimulatedNetwork
from tests.simulation.environment.store import LogStore

SERVER = "server"
SOCKET = "/run/forged.sock"
PORT = 7433
ENDPOINT = f"tcp://{SERVER}:{PORT}"
FOUND_WITHIN_S = 120.0
DAEMON_LIVES_S = (0.05, 8.0)
RESTARTED_AFTER_S = (0.0, 0.01, 0.5, 3.0)


OpenStore = Callable[[], Awaitable[LogStore]]
S = TypeVar("S", bound="Simulation")


class Simulation(ABC):
    """The daemon, network and disk of one seed; subclasses add clients or workers."""

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
        """An operator's token."""
        self.network = SimulatedNetwork(loop, random, network_faults(random), trace=self.note)
        self.disk = SimulatedDisk(random, _disk_faults(random))
        self.clock = VirtualClock(loop)
        self.server_clock = self.clock
        """The daemon's clock."""
        self.prepared = anyio.Event()

    def note(self, text: str) -> None:
        """Append a line to the trace."""
        self.trace.append(f"{self.loop.time():.6f} {text}")

    # For subclasses.

    @abstractmethod
    async def run(self) -> None:
        """Run the simulation from the first start to the final checks."""

    def ports(self, clock: VirtualClock, number: int) -> Ports:
        """The ports of the daemon with that number."""
        return Ports(
            clock,
            self.network.host(SERVER),
            number,
            0,
            self.open_store_of(self.disk),
            random=Random(f"daemon {number} {self.seed}"),
        )

    def config(self) -> Config:
        """The settings of the next daemon."""
        return Config(
            data_dir="/",
            socket=SOCKET,
            listen=(ENDPOINT,),
            anonymous_loopback_role="none",
            unix_other_role="operator",
        )

    @abstractmethod
    def extend(self, daemon: Daemon) -> None:
        """Register observers in a new daemon."""

    def handler_failed(self, owner: str, error: BaseException) -> NoReturn:
        """A built-in handler of the daemon has raised, which is a mistake in the code."""
        raise SimulationError(f"{owner} broke") from error

    def daemon_started(self, daemon: Daemon) -> None:
        """The daemon is ready."""
        self.daemon = daemon

    @abstractmethod
    def daemon_stopped(self) -> None:
        """The daemon is about to be killed, or failed to start."""

    @abstractmethod
    def daemon_failed_to_start(self, code: str) -> None:
        """A daemon failed to start, and not by an error of its store."""

    # The daemon.

    async def keep_daemon(self, tasks: TaskGroup) -> None:
        """Run daemons one after the other, each until it is killed; the last one stays."""
        while True:
            killed = anyio.Event()
            tasks.start_soon(self._run_daemon, killed)
            await self.prepared.wait()
            await self.daemon_lives()
            if not self.faults_active:
                return
            self._kill_daemon()
            killed.set()
            await anyio.sleep(self.random.choice(RESTARTED_AFTER_S))

    async def daemon_lives(self) -> None:
        """Wait until the daemon is to be killed."""
        await anyio.sleep(self.random.uniform(*self.daemon_lives_s))

    def _kill_daemon(self) -> None:
        power_cut = self.random.random() < 0.5
        self.note("power cut" if power_cut else "kill -9")
        self.daemon_stopped()
        self.daemon = None
        self.disk = self.disk.crash() if power_cut else self.disk.kill()
        self.network.crash(SERVER, host_gone=power_cut and self.random.random() < 0.3)

    async def _run_daemon(self, killed: anyio.Event) -> None:
        """Run one daemon until it is killed."""
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
                    self.note(f"daemon {number} is ready at revision {daemon.ledger.durable}")
                    self.daemon_started(daemon)
                    await anyio.sleep_forever()
            except ForgedError as error:
                # Like systemd: a daemon that fails to start is started again.
                self.note(f"daemon {number} failed to start: {error.code}")
                self.daemon_stopped()
                if not error.code.startswith("store_"):
                    self.daemon_failed_to_start(error.code)
                await anyio.sleep(0.5)

    async def make_token(self) -> None:
        """Create an operator's token over the Unix socket."""
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
                    self.note(f"the operator got error {error.code}")
                    await anyio.sleep(0.1)
                else:
                    self.token = encode_token(secret)[1]

    def open_store_of(self, disk: SimulatedDisk) -> OpenStore:
        """The function that opens the store on this disk."""

        async def open_store() -> LogStore:
            return await LogStore.open(disk, self.random)

        return open_store

    # Faults.

    async def cause_faults(self, faults: Sequence[Callable[[], None]], for_s: float, pause_s_max: float) -> None:
        """Cause one fault after the other, with pauses, for so long."""
        ends_at = self.loop.time() + for_s
        while self.loop.time() < ends_at:
            await anyio.sleep(self.random.uniform(0.1, pause_s_max))
            self.random.choice(faults)()

    def partition(self, hosts: Sequence[str]) -> None:
        """Cut some of the hosts off from the daemon."""
        cut_off = self.random.sample(hosts, self.random.randint(1, len(hosts)))
        self.network.partition(cut_off, [SERVER], one_way=self.random.random() < 0.3)

    def fill_disk(self) -> None:
        """Reduce the disk's capacity to almost its used space."""
        self.note("the disk is full")
        self.disk.capacity_bytes = self.disk.used_bytes + self.random.randrange(2000)

    def heal(self) -> None:
        """End partitions and make room on the disk."""
        self.network.heal()
        self.disk.capacity_bytes = None

    def end_faults(self) -> None:
        """No more faults from now on."""
        self.note("faults end")
        self.faults_active = False
        self.network.calm()
        self.disk.capacity_bytes = None
        self.disk.faults = DiskFaults()


def simulated(
    simulation: Callable[[int, VirtualLoop, Random], S], source: str, seed: int, watch: Callable[[S], None]
) -> S:
    """Run one seed with the random source of this name; `watch` is called before."""

    async def main() -> S:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        made = simulation(seed, loop, Random(f"{source} {seed}"))
        watch(made)
        await made.run()
        return made

    return run(main, seed)


async def until_done(operator: ForgedClient, request: Request[Any]) -> None:
    """Repeat a request until it is answered."""
    while True:
        try:
            await operator.request(request)
        except Unavailable:
            await anyio.sleep(0.1)
        else:
            return


def network_faults(random: Random) -> Faults:
    """Draw the network faults of this seed."""
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
