"""What goes on in the demonstration: its processes, the facts that the daemon tells, the records of the workers.

Law: nothing is taken to have happened before a fact or a record says so; time is only what ends a wait. A process that
ends when the story did not say so ends the demonstration.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from forged.client import EARLIEST, ForgedClient
from forged.demo.audit import Logs
from forged.demo.output import Stage
from forged.demo.processes import DaemonProcess, WorkerProcess
from forged.demo.records import Committed, Entered, Entry, read
from forged.elastic.messages import RescaleCompleted
from forged.elastic.model import ClusterTopology
from forged.errors import ForgedError
from forged.kernel.messages import Fact, Gap, Record

R = TypeVar("R")

LOOK_INTERVAL_S = 0.01
CONNECT_TIMEOUT_S = 30.0


class Scene:
    """Everybody who takes part, and what is known of them."""

    def __init__(self, stage: Stage, daemon: DaemonProcess, directory: Path, milestone: int) -> None:
        self.daemon = daemon
        self.directory = directory
        self.workers: dict[str, WorkerProcess] = {}
        self.facts: list[Record] = []
        self.topology = ClusterTopology()
        """The world that the daemon has committed last."""
        self.worlds: dict[int, Sequence[str]] = {}
        """The members of each generation, by rank, as the daemon has them on record."""
        self.waits_for = "the beginning"
        self._stage = stage
        self._milestone = milestone
        self._milestones = 0
        self._logs: dict[str, list[Entry]] = {}
        self._read: dict[str, tuple[int, bytes]] = {}
        self._heard: list[Record | Gap] = []
        self._listening: asyncio.Task[None] | None = None

    @property
    def logs(self) -> Logs:
        """What each worker has written so far."""
        return self._logs

    @property
    def members(self) -> list[str]:
        """Who is in the world, by rank."""
        return [worker.id for worker in self.topology.workers]

    def said(self, kind: type[Fact], worker: str = "") -> Record | None:
        """The last fact of a kind, about a worker if one is named."""
        told = (one for one in reversed(self.facts) if isinstance(one.fact, kind))
        return next((one for one in told if not worker or getattr(one.fact, "worker_id", "") == worker), None)

    @property
    def steps(self) -> int:
        """How many steps count for all members."""
        return min(map(self._steps_of, self.members), default=0)

    def _steps_of(self, worker: str) -> int:
        log = self._logs.get(worker, [])
        return next((entry.step + 1 for entry in reversed(log) if isinstance(entry, Committed)), 0)

    async def enter(self, name: str, endpoint: str, workers: int) -> WorkerProcess:
        """Start a worker."""
        worker = self.workers[name] = WorkerProcess(name, self.directory)
        await worker.start(endpoint, workers)
        return worker

    async def until(self, happened: Callable[[], bool], what: str) -> None:
        """Look on until it has happened."""
        self.waits_for = what
        self.look()
        while not happened():
            await asyncio.sleep(LOOK_INTERVAL_S)
            self.look()

    async def meanwhile(self, doing: Coroutine[Any, Any, R], what: str) -> R:
        """Look on until it is done; returns what came of it."""
        task = asyncio.create_task(doing)
        try:
            await self.until(task.done, what)
        finally:
            task.cancel()
            await asyncio.wait([task])
        return task.result()

    @contextlib.asynccontextmanager
    async def watched(self, endpoint: str) -> AsyncIterator[ForgedClient]:
        """Hear all facts inside the block, over restarts of the daemon."""
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
                self._heard.append(item)

    def look(self) -> None:
        """Take in what is new, show it, and see whether all are well."""
        heard, self._heard = self._heard, []
        for item in heard:
            self._stage.fact(item)
            if isinstance(item, Record):
                self._take(item)
        for name, worker in self.workers.items():
            self._read_records(name, worker.records)
        if self._listening is not None and self._listening.done():
            self._listening.result()
        for name, worker in self.workers.items():
            if worker.code is not None and not worker.may_end:
                raise ForgedError("worker_ended", f"{name} has ended with {worker.code}: {worker.last_words}")

    def _take(self, record: Record) -> None:
        self.facts.append(record)
        if isinstance(record.fact, RescaleCompleted):
            self.topology = self.topology.apply(record.fact.delta)
            self.worlds[self.topology.epoch] = self.members
            ranks = ", ".join(f"{worker} {rank}" for rank, worker in enumerate(self.members))
            self._stage.progress(f"generation {self.topology.epoch}, ranks: {ranks}")

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
        """Show how far training is, now and then."""
        if not isinstance(entry, Committed) or entry.loss is None:
            return
        reached, rest = divmod(entry.step + 1, self._milestone)
        if rest or reached <= self._milestones:
            return
        self._milestones = reached
        world = next(one for one in reversed(self._logs[name]) if isinstance(one, Entered))
        self._stage.progress(
            f"step {entry.step + 1}: loss {entry.loss:.4f}, learning rate {world.learning_rate:g},"
            f" {len(world.workers)} workers{'' if self.daemon.serves else ', no daemon'}"
        )
