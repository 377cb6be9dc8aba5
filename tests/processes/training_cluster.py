"""A daemon and workers in real processes, with the reports of the workers."""

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
from forged.demo.processes import nothing_left_behind
from forged.elastic.messages import RescaleCompleted
from forged.elastic.model import ClusterTopology
from forged.kernel.messages import Fact, Record
from forged.launch.daemon_process import LISTEN, last_log_line
from tests.client.daemon_runner import SOON
from tests.processes.fork_server import DAEMON, ForkedProcess, ForkServer, ProcessStarter, forking_from
from tests.processes.worker_script import ARMED, JOB, STOP_FILE

TIMEOUT_S = 60.0
FAST_SETTINGS: dict[str, Any] = {
    "stability_window_ms": 20,
    "failure_window_ms": 20,
    "failure_tolerance_percentage": 100,
    "max_consecutive_failures": 1_000_000,
}
"""Settings with short waits that tolerate any number of deaths."""
SCRIPTS = (
    "tests.processes.worker_script",
    "tests.processes.async_worker_script",
    "tests.processes.data_worker_script",
    "tests.processes.group_worker_script",
    "tests.processes.staging_script",
)
CLUSTER_VARIABLE = "FORGEDS_CLUSTER"
"""Marks all processes of the cluster. It must not begin with FORGED_, because such variables are not passed on."""


@dataclass(frozen=True)
class Step:
    """A committed step, as a worker reported it."""

    step: int
    generation: int
    rank: int
    size: int


@dataclass
class WorkerProcess:
    """A worker process and its reports."""

    name: str
    directory: Path
    steps: list[Step] = field(default_factory=list)
    entered: list[tuple[int, int]] = field(default_factory=list)
    """The generations it has entered, each with its step."""
    held: int = 0
    """How often it has stopped at a point."""
    finished: int | None = None
    standstills: list[tuple[str, float | None]] = field(default_factory=list)
    """The lost peer and the duration of each standstill that its script was told of."""
    child: int | None = None
    """The process that it has forked."""
    process: ForkedProcess | None = None
    output_reader: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def code(self) -> int | None:
        return None if self.process is None else self.process.returncode

    @property
    def output(self) -> str:
        """Its log."""
        return (self.directory / f"{self.name}.log").read_text()

    @property
    def pulse(self) -> int:
        """Its pulse process: its only child besides the one that it has reported."""
        # /proc lists a child under the thread that started it.
        threads = Path(f"/proc/{self.pid}/task").glob("*/children")
        (pulse,) = {int(child) for thread in threads for child in thread.read_text().split()} - {self.child}
        return pulse

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def end_child(self) -> None:
        """End the process that it has forked."""
        assert self.process is not None
        self.process.stdin.close()

    def release(self) -> None:
        """Let it continue from the point where it stopped."""
        assert self.process is not None
        self.process.stdin.write(b"\n")

    def descriptors(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self.pid}/fd").iterdir())

    def take(self, line: bytes) -> None:
        report = json.loads(line)
        if "step" in report:
            self.steps.append(Step(**report))
        elif "entered" in report:
            self.entered.append((report["entered"], report["at"]))
        elif "finished" in report:
            self.finished = report["finished"]
        elif "standstill" in report:
            self.standstills.append((report["standstill"], report["lasted_s"]))
        elif "child" in report:
            self.child = report["child"]
        else:
            self.held += "held" in report

    def __repr__(self) -> str:
        last = self.steps[-1] if self.steps else None
        return f"{self.name}: exit code {self.code}, entered {self.entered[-3:]}, {last}, {self.output[-2000:]}"


class Daemon:
    """`forged run` in a directory."""

    def __init__(self, directory: Path, starter: ProcessStarter) -> None:
        self.socket = directory / "forged.sock"
        self._log = directory / "daemon.log"
        settings = directory / "forged.toml"
        settings.write_text(f'slot_dir = "{directory / "slots"}"\n')
        places = ("--data-dir", str(directory), "--socket", str(self.socket), "--listen", LISTEN)
        self._words = ("run", "--config", str(settings), *places, "--log-level", "error")
        self._nursery = starter
        self._process: ForkedProcess | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start it and wait until it is ready."""
        self._process = await self._nursery.start("forged.cli.forged", *self._words, log=self._log)
        assert b"is ready" in await self._process.stdout.readline(), last_log_line(self._log)

    async def kill(self) -> None:
        assert self._process is not None
        os.kill(self.pid, signal.SIGKILL)
        await self._process.wait()


class TrainingCluster:
    """Workers and their daemon."""

    def __init__(self, directory: Path, starter: ProcessStarter, **settings: Any) -> None:
        self.directory = directory
        self.starter = starter
        self.daemon = Daemon(directory, starter)
        self.settings = FAST_SETTINGS | settings
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
        """The facts of the job so far."""
        async with self.client() as client:
            return [item.fact async for item in client.past_facts(*types, jobs=[JOB]) if isinstance(item, Record)]

    # Starting and stopping.

    async def start(
        self,
        *names: str,
        at: str = "",
        action: str = "die",
        nth: int = 1,
        ballast: int = 1000,
        gil_s: int = 0,
        script: str = "worker_script",
    ) -> None:
        """Start workers; they execute the action at the point `at`."""
        points = [(at, action, nth)] if at else []
        options = {"points": points, "ballast": ballast, "gil_s": gil_s, "config": self.settings}
        for name in names:
            words = (self.endpoint, name, str(self.directory), json.dumps(options))
            worker = self.workers[name] = WorkerProcess(name, self.directory)
            await self.start_process(worker, script, *words)

    async def start_process(self, worker: WorkerProcess, script: str, *words: str) -> None:
        """Start the process of a worker."""
        log = self.directory / f"{worker.name}.log"
        log.unlink(missing_ok=True)
        worker.process = await self.starter.start(f"tests.processes.{script}", *words, log=log)
        worker.output_reader = asyncio.create_task(self._read_output(worker))

    async def start_in_order(self, *names: str, victim: str, at: str, **options: Any) -> None:
        """Start workers that get ranks in this order; the victim executes the action at the point `at`."""
        for name in names:
            await self.start(name, at=at if name == victim else "", **options)
            await self.until(lambda name=name: bool(self[name].entered))  # type: ignore[misc]
        await self.wait_for_world(*names)

    def arm(self) -> None:
        """Arm the points: workers execute their actions from now on."""
        (self.directory / ARMED).touch()

    async def start_together(self, *names: str) -> None:
        """Start workers and wait until they train together."""
        await self.start(*names)
        await self.wait_for_world(*names)

    async def _read_output(self, worker: WorkerProcess) -> None:
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
        """Wait until a condition holds; check it at each report and each end of a process."""
        try:
            async with asyncio.timeout(TIMEOUT_S), self._moved:
                while not true():
                    await self._moved.wait()
        except TimeoutError:
            raise AssertionError(await self.describe()) from None

    async def describe(self) -> str:
        """The state of all workers and of the job, for an error message."""
        lines = ["no progress:", *map(repr, self.workers.values())]
        try:
            async with asyncio.timeout(5.0), self.client() as client:
                lines.append(repr(await client.cluster(JOB)))
                lines += map(repr, await client.workers(JOB))
                facts = [item async for item in client.past_facts(jobs=[JOB])]
                lines += [repr(item.fact) for item in facts[-30:] if isinstance(item, Record)]
        except (TimeoutError, OSError) as error:
            lines.append(f"the daemon does not answer: {error!r}")
        return "\n".join(lines)

    async def wait_for_world(self, *names: str, steps: int = 2) -> None:
        """Wait until exactly these workers have made `steps` steps in one world."""

        def start_together() -> bool:
            self._require_alive(*names)
            last = [self[name].steps[-1] if self[name].steps else None for name in names]
            first = last[0]
            if first is None or first.size != len(names):
                return False
            shared = [sum(step.generation == first.generation for step in self[name].steps[-steps:]) for name in names]
            return all(count == steps for count in shared)

        await self.until(start_together)

    async def wait_for_steps(self, *names: str, steps: int = 3) -> None:
        """Wait until these workers have made some more steps."""
        goals = {name: len(self[name].steps) + steps for name in names}

        def made() -> bool:
            self._require_alive(*names)
            return all(len(self[name].steps) >= goal for name, goal in goals.items())

        await self.until(made)

    def _require_alive(self, *names: str) -> None:
        ended = [self[name] for name in names if self[name].code is not None]
        assert ended == [], f"workers have ended: {ended}"

    async def wait_until_killed(self, *names: str) -> None:
        """Wait until these workers have died of SIGKILL."""
        await self.until(lambda: all(self[name].code is not None for name in names))
        codes = {name: self[name].code for name in names}
        assert set(codes.values()) == {-signal.SIGKILL}, await self.describe()

    async def finish(self, *names: str) -> None:
        """Let these workers finish the training, and check the result."""
        (self.directory / STOP_FILE).touch()
        await self.until(lambda: all(self[name].code is not None for name in names))
        ends = {name: (self[name].code, self[name].finished) for name in names}
        behind = max((worker.steps[-1].step for worker in self.workers.values() if worker.steps), default=-1) + 1
        assert ends == dict.fromkeys(names, (0, behind)), await self.describe()
        self.check(await self.facts(RescaleCompleted))

    def check(self, completed: list[RescaleCompleted]) -> None:
        """Check that workers and daemon agree on the worlds, and that each step is committed in exactly one."""
        topology = ClusterTopology()
        names = {}
        for rescale in completed:
            topology = topology.apply(rescale.delta)
            names[topology.epoch] = [worker.id for worker in topology.workers]
        assert list(names) == list(range(1, len(completed) + 1))
        steps = [rescale.step for rescale in completed if rescale.step is not None]
        assert steps == sorted(steps)
        assert [rescale.attempt for rescale in completed] == sorted({rescale.attempt for rescale in completed})
        worlds: dict[int, int] = {}
        for worker in self.workers.values():
            numbers = [step.step for step in worker.steps]
            assert numbers == sorted(set(numbers)), f"{worker.name} did a step twice"
            for step in worker.steps:
                world = names[step.generation]
                assert (world[step.rank], len(world)) == (worker.name, step.size), step
                assert worlds.setdefault(step.step, step.generation) == step.generation, f"{step} counts twice"
        assert sorted(worlds) == list(range(len(worlds))), "a step is missing"

    async def read_remaining_output(self) -> None:
        """Read the remaining reports of ended workers."""
        output_reader = [worker.output_reader for worker in self.workers.values() if worker.output_reader is not None]
        await asyncio.gather(*output_reader)


@contextmanager
def worker_fork_server() -> Iterator[ForkServer]:
    """A fork server for the worker scripts and the daemon; fails if a process is left behind."""
    os.environ[CLUSTER_VARIABLE] = uuid4().hex
    try:
        with nothing_left_behind(), forking_from(*SCRIPTS, *DAEMON) as server:
            yield server
    finally:
        del os.environ[CLUSTER_VARIABLE]


@asynccontextmanager
async def cluster_on(fork_server: ForkServer, directory: Path, **settings: Any) -> AsyncIterator[TrainingCluster]:
    """A cluster; at the end no process may be left, and the pulses of dead workers must have ended by themselves."""
    before, starter = set(_cluster_processes()), ProcessStarter(fork_server)
    cluster = TrainingCluster(directory, starter, **settings)
    try:
        async with starter:
            await cluster.daemon.start()
            yield cluster
            ended = {worker.name for worker in cluster.workers.values() if worker.code is not None}
            await _wait_until_ended(set(_cluster_processes()) - before - _expected_processes(cluster, ended))
    finally:
        await cluster.read_remaining_output()


def _expected_processes(cluster: TrainingCluster, ended: set[str]) -> set[int]:
    """The processes that may exist after these workers have ended."""
    running = {cluster.daemon.pid}
    for worker in cluster.workers.values():
        if worker.name not in ended:
            running |= {worker.pid, worker.pulse, worker.child or worker.pid}
    return running


def _cluster_processes() -> Iterator[int]:
    """The processes with the cluster's variable."""
    mark = f"{CLUSTER_VARIABLE}={os.environ[CLUSTER_VARIABLE]}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes():
                yield int(process.name)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue


async def _wait_until_ended(pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            end = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        poll = select.poll()
        poll.register(end, select.POLLIN)
        try:
            assert await asyncio.to_thread(poll.poll, TIMEOUT_S * 1000), f"process {pid} is left behind"
        finally:
            os.close(end)
