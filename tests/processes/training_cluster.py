"""Training scripts in real processes around a daemon in another, and what they have told of themselves."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from forged.client import ForgedClient
from forged.demo.processes import LISTEN, last_log_line, nothing_left_behind
from forged.elastic.messages import RescaleCompleted
from forged.elastic.model import ClusterTopology
from forged.kernel.messages import Fact, Record
from tests.client.daemon_runner import SOON
from tests.processes.fork_server import DAEMON, Child, ForkServer, ProcessStarter, forking_from
from tests.processes.worker_script import ARMED, ENOUGH, JOB

PATIENCE_S = 60.0
SOON_ENDING: dict[str, Any] = {
    "stability_window_ms": 20,
    "failure_window_ms": 20,
    "failure_tolerance_percentage": 100,
    "max_consecutive_failures": 1_000_000,
}
"""Settings under which nobody waits for what does not come, and no number of deaths is too large."""
SCRIPTS = ("tests.processes.worker_script", "tests.processes.async_worker_script", "tests.processes.data_worker_script")
MARK = "FORGEDS_TROUPE"
"""Told to all processes; not with an underscore behind FORGED, as what begins so is kept from them."""


@dataclass(frozen=True)
class Step:
    """One that counts, as a worker told of it."""

    step: int
    generation: int
    rank: int
    size: int


@dataclass
class WorkerProcess:
    """A worker's process, and what it has told."""

    name: str
    directory: Path
    steps: list[Step] = field(default_factory=list)
    entered: list[tuple[int, int]] = field(default_factory=list)
    """The worlds it has come into, and at which step."""
    held: int = 0
    """How often it was caught, to be let go."""
    finished: int | None = None
    child: int | None = None
    """The process that it has forked, if it has."""
    process: Child | None = None
    hearing: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def code(self) -> int | None:
        return None if self.process is None else self.process.returncode

    @property
    def said(self) -> str:
        """What it has complained of."""
        return (self.directory / f"{self.name}.log").read_text()

    @property
    def pulse(self) -> int:
        """The process that speaks for it: its only child, but for one that it has told of."""
        # A child is shown with the thread that has started it.
        threads = Path(f"/proc/{self.pid}/task").glob("*/children")
        (pulse,) = {int(child) for thread in threads for child in thread.read_text().split()} - {self.child}
        return pulse

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def let_child_go(self) -> None:
        """The process that it has forked ends."""
        assert self.process is not None
        self.process.stdin.close()

    def let_go(self) -> None:
        """It goes on from where it was caught."""
        assert self.process is not None
        self.process.stdin.write(b"\n")

    def descriptors(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self.pid}/fd").iterdir())

    def take(self, line: bytes) -> None:
        told = json.loads(line)
        if "step" in told:
            self.steps.append(Step(**told))
        elif "entered" in told:
            self.entered.append((told["entered"], told["at"]))
        elif "finished" in told:
            self.finished = told["finished"]
        elif "child" in told:
            self.child = told["child"]
        else:
            self.held += "held" in told

    def __repr__(self) -> str:
        last = self.steps[-1] if self.steps else None
        return f"{self.name}: exit code {self.code}, entered {self.entered[-3:]}, {last}, {self.said[-2000:]}"


class Daemon:
    """`forged run` in a directory."""

    def __init__(self, directory: Path, starter: ProcessStarter) -> None:
        self.socket = directory / "forged.sock"
        self._log = directory / "daemon.log"
        places = ("--data-dir", str(directory), "--socket", str(self.socket), "--listen", LISTEN)
        self._words = ("run", *places, "--log-level", "error")
        self._nursery = starter
        self._process: Child | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Have it begin, and wait until it is ready."""
        self._process = await self._nursery.start("forged.cli.forged", *self._words, log=self._log)
        assert b"is ready" in await self._process.stdout.readline(), last_log_line(self._log)

    async def kill(self) -> None:
        assert self._process is not None
        os.kill(self.pid, signal.SIGKILL)
        await self._process.wait()


class TrainingCluster:
    """All of them, and their daemon."""

    def __init__(self, directory: Path, starter: ProcessStarter, **settings: Any) -> None:
        self.directory = directory
        self.starter = starter
        self.daemon = Daemon(directory, starter)
        self.settings = SOON_ENDING | settings
        self.workers: dict[str, WorkerProcess] = {}
        self._moved = asyncio.Condition()

    def __getitem__(self, name: str) -> WorkerProcess:
        return self.workers[name]

    @property
    def endpoint(self) -> str:
        return f"unix://{self.daemon.socket}"

    def client(self) -> ForgedClient:
        return ForgedClient(self.endpoint, reconnect=SOON)

    async def facts(self, *types: type[Fact]) -> list[Any]:
        """What the daemon has told of the job so far."""
        async with self.client() as client:
            return [item.fact async for item in client.past_facts(*types, jobs=[JOB]) if isinstance(item, Record)]

    # Coming and going.

    async def start(
        self,
        *names: str,
        at: str = "",
        act: str = "die",
        nth: int = 1,
        ballast: int = 1000,
        gil_s: int = 0,
        script: str = "worker_script",
    ) -> None:
        """Have some begin; `at` is where they are caught."""
        points = [(at, act, nth)] if at else []
        options = {"points": points, "ballast": ballast, "gil_s": gil_s, "config": self.settings}
        for name in names:
            words = (self.endpoint, name, str(self.directory), json.dumps(options))
            worker = self.workers[name] = WorkerProcess(name, self.directory)
            await self.bear(worker, script, *words)

    async def bear(self, worker: WorkerProcess, script: str, *words: str) -> None:
        """Have its process begin."""
        log = self.directory / f"{worker.name}.log"
        log.unlink(missing_ok=True)
        worker.process = await self.starter.start(f"tests.processes.{script}", *words, log=log)
        worker.hearing = asyncio.create_task(self._hear(worker))

    async def one_after_the_other(self, *names: str, victim: str, at: str, **options: Any) -> None:
        """Have some train together, ranked as they stand here; the victim will be caught."""
        for name in names:
            await self.start(name, at=at if name == victim else "", **options)
            await self.until(lambda name=name: bool(self[name].entered))  # type: ignore[misc]
        await self.world_of(*names)

    def arm(self) -> None:
        """From now on the points count at which workers are caught."""
        (self.directory / ARMED).touch()

    async def together(self, *names: str) -> None:
        """Have some begin, and wait until they train together."""
        await self.start(*names)
        await self.world_of(*names)

    async def _hear(self, worker: WorkerProcess) -> None:
        assert worker.process is not None
        async for line in worker.process.stdout:
            worker.take(line)
            await self._notify()
        await worker.process.wait()
        await self._notify()

    async def _notify(self) -> None:
        async with self._moved:
            self._moved.notify_all()

    # Waiting.

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until something holds; looks whenever somebody has told something or has ended."""
        try:
            async with asyncio.timeout(PATIENCE_S), self._moved:
                while not true():
                    await self._moved.wait()
        except TimeoutError:
            raise AssertionError(await self.standing()) from None

    async def standing(self) -> str:
        """Where everybody is, as far as that can be found out."""
        lines = ["nothing moves:", *map(repr, self.workers.values())]
        try:
            async with asyncio.timeout(5.0), self.client() as client:
                lines.append(repr(await client.cluster(JOB)))
                lines += map(repr, await client.workers(JOB))
                facts = [item async for item in client.past_facts(jobs=[JOB])]
                lines += [repr(item.fact) for item in facts[-30:] if isinstance(item, Record)]
        except (TimeoutError, OSError) as error:
            lines.append(f"the daemon does not answer: {error!r}")
        return "\n".join(lines)

    async def world_of(self, *names: str, steps: int = 2) -> None:
        """Wait until these, and nobody else, have done so many steps together in one world."""

        def together() -> bool:
            self._require_alive(*names)
            last = [self[name].steps[-1] if self[name].steps else None for name in names]
            first = last[0]
            if first is None or first.size != len(names):
                return False
            shared = [sum(step.generation == first.generation for step in self[name].steps[-steps:]) for name in names]
            return all(count == steps for count in shared)

        await self.until(together)

    async def more_steps(self, *names: str, steps: int = 3) -> None:
        """Wait until these have made some more."""
        goals = {name: len(self[name].steps) + steps for name in names}

        def made() -> bool:
            self._require_alive(*names)
            return all(len(self[name].steps) >= goal for name, goal in goals.items())

        await self.until(made)

    def _require_alive(self, *names: str) -> None:
        ended = [self[name] for name in names if self[name].code is not None]
        assert ended == [], f"these have ended: {ended}"

    async def dead(self, *names: str) -> None:
        """Wait until these have been killed."""
        await self.until(lambda: all(self[name].code is not None for name in names))
        codes = {name: self[name].code for name in names}
        assert set(codes.values()) == {-signal.SIGKILL}, await self.standing()

    async def finish(self, *names: str) -> None:
        """Let these come to the end of the training, and see that all was right."""
        (self.directory / ENOUGH).touch()
        await self.until(lambda: all(self[name].code is not None for name in names))
        ends = {name: (self[name].code, self[name].finished) for name in names}
        behind = max((worker.steps[-1].step for worker in self.workers.values() if worker.steps), default=-1) + 1
        assert ends == dict.fromkeys(names, (0, behind)), await self.standing()
        self.check(await self.facts(RescaleCompleted))

    def check(self, told: list[RescaleCompleted]) -> None:
        """The worlds are those that the daemon has told of, and every step counts in one of them."""
        topology = ClusterTopology()
        names = {}
        for rescale in told:
            topology = topology.apply(rescale.delta)
            names[topology.epoch] = [worker.id for worker in topology.workers]
        assert list(names) == list(range(1, len(told) + 1))
        steps = [rescale.step for rescale in told if rescale.step is not None]
        assert steps == sorted(steps)
        assert [rescale.attempt for rescale in told] == sorted({rescale.attempt for rescale in told})
        worlds: dict[int, int] = {}
        for worker in self.workers.values():
            numbers = [step.step for step in worker.steps]
            assert numbers == sorted(set(numbers)), f"{worker.name} did a step twice"
            for step in worker.steps:
                world = names[step.generation]
                assert (world[step.rank], len(world)) == (worker.name, step.size), step
                assert worlds.setdefault(step.step, step.generation) == step.generation, f"{step} counts twice"
        assert sorted(worlds) == list(range(len(worlds))), "a step is missing"

    async def send_home(self) -> None:
        """Whoever is there still ends with the nursery; what they said before is heard."""
        hearing = [worker.hearing for worker in self.workers.values() if worker.hearing is not None]
        await asyncio.gather(*hearing)


@contextmanager
def worker_fork_server() -> Iterator[ForkServer]:
    """A fork server for the worker scripts and the daemon; fails if a process is left behind."""
    os.environ[MARK] = uuid4().hex
    try:
        with nothing_left_behind(), forking_from(*SCRIPTS, *DAEMON) as server:
            yield server
    finally:
        del os.environ[MARK]


@asynccontextmanager
async def cluster_on(fork_server: ForkServer, directory: Path, **settings: Any) -> AsyncIterator[TrainingCluster]:
    """A troupe, of which nobody is left in the end: the pulses of the dead go by themselves."""
    before, starter = set(_marked()), ProcessStarter(fork_server)
    cluster = TrainingCluster(directory, starter, **settings)
    try:
        async with starter:
            await cluster.daemon.start()
            yield cluster
            ended = {worker.name for worker in cluster.workers.values() if worker.code is not None}
            await _all_over(set(_marked()) - before - _living(cluster, ended))
    finally:
        await cluster.send_home()


def _living(cluster: TrainingCluster, ended: set[str]) -> set[int]:
    """The processes that may be there while these have ended."""
    living = {cluster.daemon.pid}
    for worker in cluster.workers.values():
        if worker.name not in ended:
            living |= {worker.pid, worker.pulse, worker.child or worker.pid}
    return living


def _marked() -> Iterator[int]:
    """The processes on this stage."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes():
                yield int(process.name)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue


async def _all_over(pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            end = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        poll = select.poll()
        poll.register(end, select.POLLIN)
        try:
            assert await asyncio.to_thread(poll.poll, PATIENCE_S * 1000), f"process {pid} is left behind"
        finally:
            os.close(end)
