"""The same seed gives the same trace in every process, independent of hash seed and heap."""

from __future__ import annotations

import asyncio
import contextlib
from random import Random

import anyio
import pytest

from forged.errors import Unavailable
from forged.kernel.store.port import StoreUnavailable, Transaction
from forged.net.transport.port import Address
from tests.simulation.checks import printed_in_another_process
from tests.simulation.environment.disk import DiskFaults, SimulatedDisk
from tests.simulation.environment.links import Faults
from tests.simulation.environment.loop import run
from tests.simulation.environment.network import HostNetwork, SimulatedNetwork
from tests.simulation.environment.store import LogStore

SERVER = Address.parse("tcp://server:1")
BAD = Faults(latency_s=(0, 0.02), split=0.3, merge=0.3, reset=0.02, drop=0.02, give_up_after_s=(0.1, 0.5))
CLIENTS = 12
ROUNDS = 5


class Line(asyncio.Protocol):
    """A traced connection to an echo server."""

    def __init__(self, name: str, trace: list[str], echo: bool = False) -> None:
        self._name = name
        self._trace = trace
        self._echo = echo

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._trace.append(f"{self._name} hears {data!r}")
        if self._echo:
            self._transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._trace.append(f"{self._name} is lost: {exc}")


class Scenario:
    """A traced scenario with task groups, deadlines, cancellation, and network and disk faults."""

    def __init__(self, seed: int) -> None:
        self.trace: list[str] = []
        self._seed = seed

    async def play(self) -> None:
        loop = asyncio.get_running_loop()
        network = SimulatedNetwork(
            loop, Random(self._seed), BAD, lambda text: self.trace.append(f"{loop.time()} {text}")
        )
        await network.host("server").listen(SERVER, lambda: Line("server", self.trace, echo=True))
        hosts = [network.host(f"host {number}") for number in range(CLIENTS)]
        for _ in range(ROUNDS):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._write_store)
                tasks.start_soon(self._stop_together)
                for host in hosts:
                    tasks.start_soon(self._be_client, host)
                await anyio.sleep(0.3)
                network.partition([host.name for host in hosts[::3]], ["server"])
                await anyio.sleep(0.3)
                tasks.cancel_scope.cancel()
            network.heal()

    async def _be_client(self, host: HostNetwork) -> None:
        try:
            with anyio.move_on_after(1.0):
                transport = await host.connect(SERVER, lambda: Line(host.name, self.trace))
                async with anyio.create_task_group() as tasks:
                    for number in range(3):
                        tasks.start_soon(self._talk, transport, f"{host.name}.{number}")
        except Unavailable as error:
            self.trace.append(f"{host.name}: {error}")

    async def _talk(self, transport: asyncio.Transport, name: str) -> None:
        try:
            for number in range(100):
                transport.write(f"{name}.{number} ".encode())
                await asyncio.sleep(0.05)
        finally:
            self.trace.append(f"{name} stops")
            transport.close()

    async def _stop_together(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.1), asyncio.TaskGroup() as tasks:
                for number in range(6):
                    tasks.create_task(self._rest(number))

    async def _rest(self, number: int) -> None:
        try:
            await asyncio.sleep(1)
        finally:
            self.trace.append(f"rest {number} stops")

    async def _write_store(self) -> None:
        random = Random(self._seed)
        disk = SimulatedDisk(random)
        store = await LogStore.open(disk, random)
        disk.faults = DiskFaults(sync_fails=0.2)
        while True:
            try:
                await store.commit([Transaction(store.revision + 1, {"a": b""})])
            except StoreUnavailable as error:
                self.trace.append(f"store: {error}")
            self.trace.append(f"store at {store.revision}")
            await asyncio.sleep(0.05)


def scenario(seed: int) -> list[str]:
    """The trace of the scenario under a seed."""
    played = Scenario(seed)
    run(played.play, seed)
    return played.trace


@pytest.mark.parametrize("seed", [1, 2])
def test_two_processes_with_other_hash_seeds_and_heaps_give_the_same_trace(seed: int) -> None:
    code = f"from tests.simulation.test_determinism import scenario; print(*scenario({seed}), sep='\\n')"
    first = printed_in_another_process(code, hash_seed=1, ballast=0)
    assert first == printed_in_another_process(code, hash_seed=2, ballast=123_457)
    assert first == scenario(seed)
    assert len(first) > 1000


def test_the_scenario_meets_its_faults_and_another_seed_gives_another_trace() -> None:
    trace = "\n".join(scenario(1))
    for event in ("is reset", "gives up", "is blocked", "brings the end of the stream", "stops", "store: ", "is lost"):
        assert event in trace
    assert trace != "\n".join(scenario(2))
