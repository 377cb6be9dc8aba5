"""Observation of the demo: its processes, the daemon's facts and the workers' records.

Invariants:
- An event has happened when a fact or a record says so; time only limits a wait.
- A process that ends unexpectedly ends the demo.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from forged.client import EARLIEST, ForgedClient
from forged.demo.audit import Logs
from forged.demo.output import Output
from forged.demo.processes import DemoWorker
from forged.demo.records import Committed, Entered, Entry, read
from forged.demo.train import JOB
from forged.elastic.messages import RescaleCompleted
from forged.elastic.model import ClusterTopology
from forged.errors import ForgedError
from forged.kernel.messages import Fact, Gap, Record
from forged.launch.daemon_process import DaemonProcess

R = TypeVar("R")

LOOK_INTERVAL_S = 0.01
CONNECT_TIMEOUT_S = 30.0


class ClusterObserver:
    """The processes of the demo and their state, as facts and records show it."""

    def __init__(self, output: Output, daemon: DaemonProcess, directory: Path, milestone: int) -> None:
        self.daemon = daemon
        self.directory = directory
        self.workers: dict[str, DemoWorker] = {}
        self.facts: list[Record] = []
        self.topology = ClusterTopology()
        """The latest committed world."""
        self.worlds: dict[int, Sequence[str]] = {}
        """The members of each generation by rank, according to the daemon."""
        self.waiting_for = "the start"
        self._output = output
        self._milestone = milestone
        self._milestones = 0
        self._logs: dict[str, list[Entry]] = {}
        self._read: dict[str, tuple[int, bytes]] = {}
        self._received: list[Record | Gap] = []
        self._listening: asyncio.Task[None] | None = None

    @property
    def logs(self) -> Logs:
        """The records of each worker so far."""
        return self._logs

    @property
    def members(self) -> list[str]:
        """The members of the latest world, by rank."""
        return [worker.id for worker in self.topology.workers]

    def last_fact(self, kind: type[Fact], worker: str = "") -> Record | None:
        """The last fact of a type, about a worker if one is named."""
        found = (one for one in reversed(self.facts) if isinstance(one.fact, kind))
        return next((one for one in found if not worker or getattr(one.fact, "worker_id", "") == worker), None)

    @property
    def steps(self) -> int:
        """The number of steps that all members have committed."""
        return min(map(self._steps_of, self.members), default=0)

    def _steps_of(self, worker: str) -> int:
        log = self._logs.get(worker, [])
        return next((entry.step + 1 for entry in reversed(log) if isinstance(entry, Committed)), 0)

    async def enter(
        self, name: str, endpoint: str, workers: int, directory: Path | None = None, words: Sequence[str] = ()
    ) -> DemoWorker:
        """Start a worker; `words` are further arguments of its script."""
        worker = self.workers[name] = DemoWorker(name, directory or self.directory)
        await worker.start(endpoint, workers, words)
        return worker

    async def until(self, happened: Callable[[], bool], what: str) -> None:
        """Update until a condition holds; `what` names it in a timeout error."""
        self.waiting_for = what
        self.update()
        while not happened():
            await asyncio.sleep(LOOK_INTERVAL_S)
            self.update()

    async def observe_during(self, doing: Coroutine[Any, Any, R], what: str) -> R:
        """Update until a coroutine is done; returns its result."""
        task = asyncio.create_task(doing)
        try:
            await self.until(task.done, what)
        finally:
            task.cancel()
            await asyncio.wait([task])
        return task.result()

    @contextlib.asynccontextmanager
    async def subscribed(self, endpoint: str) -> AsyncIterator[ForgedClient]:
        """Receive all facts inside the block, across restarts of the daemon."""
        async with ForgedClient(endpoint, token="", connect_timeout_s=CONNECT_TIMEOUT_S) as client:
            self._listening = listening = asyncio.create_task(self._listen(client))
            try:
                yield client
            finally:
                listening.cancel()
                await asyncio.wait([listening])
                self._listening = None

    async def _listen(self, client: ForgedClient) -> None:
        async with client.facts(since=EARLIEST) as stream:
            async for item in stream:
                self._received.append(item)

    def update(self) -> None:
        """Read and print new facts and records; raise if a process has ended unexpectedly."""
        received, self._received = self._received, []
        for item in received:
            self._output.fact(item)
            if isinstance(item, Record):
                self._take(item)
        for name, worker in self.workers.items():
            self._read_records(name, worker.records)
        if self._listening is not None and self._listening.done():
            self._listening.result()
        for name, worker in self.workers.items():
            if worker.code is not None and not worker.may_end:
                raise ForgedError("worker_ended", f"{name} ended with exit code {worker.code}: {worker.last_log_line}")

    def _take(self, record: Record) -> None:
        self.facts.append(record)
        if isinstance(record.fact, RescaleCompleted) and record.job == JOB:
            self.topology = self.topology.apply(record.fact.delta)
            self.worlds[self.topology.epoch] = self.members
            ranks = ", ".join(f"rank {rank} = {worker}" for rank, worker in enumerate(self.members))
            self._output.progress(f"generation {self.topology.epoch}: {ranks}")

    def _read_records(self, name: str, path: Path) -> None:
        if not path.exists():
            return
        offset, rest = self._read.get(name, (0, b""))
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
        if data:
            entries, rest = read(rest + data)
            self._read[name] = (offset + len(data), rest)
            self._logs.setdefault(name, []).extend(entries)
            for entry in entries:
                self._mark(name, entry)

    def _mark(self, name: str, entry: Entry) -> None:
        """Print the progress of the training every few steps."""
        if not isinstance(entry, Committed) or entry.loss is None:
            return
        reached, rest = divmod(entry.step + 1, self._milestone)
        if rest or reached <= self._milestones:
            return
        self._milestones = reached
        world = next(one for one in reversed(self._logs[name]) if isinstance(one, Entered))
        self._output.progress(
            f"step {entry.step + 1}: loss {entry.loss:.4f}, learning rate {world.learning_rate:g},"
            f" {len(world.workers)} workers{'' if self.daemon.serves else ', no daemon'}"
        )
