"""The checkpoint catalogue in a daemon with 100,000 checkpoints in 1,000 jobs, asked over a Unix socket.

The daemon is a process with its store on the disk; the client lives in this one. The daemon touches no files of
checkpoints: there are none. The reference for a save, which is two durable decisions, is two notes to the same daemon;
for a question it is a ping, which is what the way to the daemon and back takes. Before a collection each job gets a new
checkpoint, so that one of each is collected; a collection lasts until all deletions are durable.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.daemon_process import SERVE, daemon_process, serve
from benchmarks.harness import Figure, main
from forged.catalog.messages import (
    AdoptCheckpoints,
    AdoptedCheckpoint,
    CompleteCheckpoint,
    FindRestorePoints,
    GcTick,
    ListCheckpoints,
    StartCheckpoint,
)
from forged.catalog.ports import CheckpointLocation, FoundCheckpoint, Progress
from forged.client import ForgedClient
from forged.jobs.model import AddNote
from forged.kernel.messages import ANY_JOB, Call, Request
from forged.status.model import PingDaemon

if TYPE_CHECKING:
    from forged.daemon import Daemon

JOBS = 1_000
KEPT = 100
QUESTIONS = 5_000
ROUNDS = 3
CONCURRENCY = 64
QUERY_LIMIT_MS = 1.0
TICK_LIMIT_S = 0.3
STEPS = 100
"""Between two checkpoints of a job."""


class CollectAll(Request[float], frozen=True):
    """Let jobs keep `KEPT` checkpoints for the time of a collection; returns the seconds that it took."""

    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = ANY_JOB


class NothingThere:
    """The files of checkpoints that have none."""

    def storage_of(self, path: str) -> str:
        return path

    async def find(self, location: CheckpointLocation) -> FoundCheckpoint | None:
        return None

    async def delete(self, location: CheckpointLocation) -> None:
        return

    async def verify(self, location: CheckpointLocation, bytes_per_s: int, progress: Progress) -> str:
        return ""

    async def repair(self, location: CheckpointLocation) -> bool:
        return False

    async def compact(self, location: CheckpointLocation, progress: Progress) -> int:
        return 0


def _extend(daemon: Daemon) -> None:
    async def collect(request: CollectAll, call: Call) -> float:
        catalog = daemon.catalog
        catalog.book.policies.set_defaults({"checkpoint_keep": KEPT})
        began = perf_counter()
        await catalog._tick(GcTick(), call)
        took_s = perf_counter() - began
        catalog.book.policies.set_defaults({})
        return took_s

    daemon.bus.serve(CollectAll, collect, owner="bench")


class Workload:
    """The checkpoints of all jobs, and questions about them."""

    def __init__(self, client: ForgedClient, jobs: int) -> None:
        self._client = client
        self._jobs = [f"job-{number}" for number in range(jobs)]
        self._random = random.Random(7)
        self._saved = KEPT
        """How many checkpoints each job has had."""

    async def fill(self) -> None:
        """Give each job as many checkpoints as are kept."""
        for job in self._jobs:
            await self._client.create_job(job)
            adopted = [
                AdoptedCheckpoint(f"/ckpt/{job}/{step}", f"{step:08x}", 0, step * STEPS, 1 << 30, float(step))
                for step in range(KEPT)
            ]
            await self._client.request(AdoptCheckpoints(job, f"/ckpt/{job}", adopted))

    async def saves_per_s(self) -> float:
        """Save one checkpoint of each job."""
        number, self._saved = self._saved, self._saved + 1

        async def save(job: str) -> None:
            path, save_id = f"/ckpt/{job}/{number}", f"{number:08x}"
            made = await self._client.request(StartCheckpoint(job, "", b"", 0, number * STEPS, path, save_id))
            await self._client.request(CompleteCheckpoint(job, "", b"", made.checkpoint_id, 1 << 30, 1.0))

        return await self._rate(save)

    async def pairs_of_notes_per_s(self) -> float:
        async def note(job: str) -> None:
            await self._client.request(AddNote(job, "a"))
            await self._client.request(AddNote(job, "b"))

        return await self._rate(note)

    async def _rate(self, act: Callable[[str], Awaitable[None]]) -> float:
        waiting = iter(self._jobs)

        async def work() -> None:
            for job in waiting:
                await act(job)

        began = perf_counter()
        await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
        return len(self._jobs) / (perf_counter() - began)

    async def p99_ms(self, ask: Callable[[], Request[Any]], questions: int) -> float:
        times = []
        for _ in range(questions):
            question = ask()
            began = perf_counter()
            await self._client.request(question)
            times.append(perf_counter() - began)
        return sorted(times)[len(times) * 99 // 100] * 1e3

    def latest(self) -> Request[Any]:
        return ListCheckpoints(self._random.choice(self._jobs), limit=1)

    def restore_point(self) -> Request[Any]:
        max_step = self._random.randrange(self._saved - KEPT // 2, self._saved) * STEPS
        return FindRestorePoints(self._random.choice(self._jobs), max_step=max_step, limit=1)

    async def tick_s(self) -> float:
        """Save one checkpoint of each job, then collect one of each."""
        await self.saves_per_s()
        return await self._client.request(CollectAll(), timeout_s=60.0)


async def _measured(endpoint: str, *, jobs: int, questions: int, rounds: int) -> list[Figure]:
    async with ForgedClient(endpoint) as client:
        workload = Workload(client, jobs)
        await workload.fill()
        found: dict[str, list[float]] = defaultdict(list)
        for _ in range(rounds):
            found["saves"].append(await workload.saves_per_s())
            found["notes"].append(await workload.pairs_of_notes_per_s())
            found["ping"].append(await workload.p99_ms(PingDaemon, questions))
            found["latest"].append(await workload.p99_ms(workload.latest, questions))
            found["restore"].append(await workload.p99_ms(workload.restore_point, questions))
            found["tick"].append(await workload.tick_s())
    medians = {name: statistics.median(values) for name, values in found.items()}
    return _figures(medians, f"{jobs * KEPT:,} checkpoints in {jobs:,} jobs")


def _figures(medians: dict[str, float], size: str) -> list[Figure]:
    name = f"create and complete with {size}, against two notes"
    figures = [Figure(name, "1/s", medians["saves"], medians["notes"], aim=0.5)]
    for key, name in (("latest", "the latest checkpoint"), ("restore", "the restore point up to a step")):
        ours = medians[key]
        figures += [
            Figure(f"{name}, p99, against the limit", "ms", ours, QUERY_LIMIT_MS, aim=1.0, higher_is_better=False),
            Figure(f"{name}, p99, against a ping", "ms", ours, medians["ping"], higher_is_better=False),
        ]
    tick = "GC tick, one checkpoint of each job goes, against the limit"
    return [*figures, Figure(tick, "s", medians["tick"], TICK_LIMIT_S, aim=1.0, higher_is_better=False)]


def _measure(quick: bool) -> Sequence[Figure]:
    jobs, questions, rounds = (20, 100, 1) if quick else (JOBS, QUESTIONS, ROUNDS)
    with (
        tempfile.TemporaryDirectory() as directory,
        daemon_process("benchmarks.catalog_daemon", directory) as endpoint,
    ):
        return asyncio.run(_measured(endpoint, jobs=jobs, questions=questions, rounds=rounds))


if __name__ == "__main__":
    if sys.argv[1:2] == [SERVE]:
        serve(sys.argv[2], extend=_extend, checkpoint_files=NothingThere())
    else:
        main("catalog_daemon", _measure)
