"""Measure what a hostile tenant does to another job, to an operator and to the daemon's memory."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forged.auth.model import Role
from forged.client import ForgedClient
from forged.elastic.messages import WorkerFailed, WorkerLost
from forged.jobs.model import NoteAdded
from forged.kernel.messages import Record
from forged.launch.daemon_process import DaemonProcess, command, environment

VICTIM, HOSTILE = "victim", "hostile"
WORKERS = 2
VICTIM_NOTES = 50
SETTINGS: dict[str, Any] = {"stability_window_ms": 500, "min_workers": WORKERS}
FAILURES = (WorkerFailed.__name__, WorkerLost.__name__)
READ_BYTES = 1 << 16
OPERATOR_PAUSE_S = 0.5
NICE = 10
"""The attacker gives way to the trainers on a machine with few cores: its harm is to come through the daemon."""


@dataclass
class Figures:
    """What was measured."""

    seconds: float
    steps_per_s_before: float = 0.0
    steps_per_s_during: float = 0.0
    forgectl_s: list[float] = field(default_factory=list)
    forgectl_failures: int = 0
    daemon_peak_bytes: int = 0
    victim_notes_kept: int = 0
    victim_failures: int = 0
    """How often a worker of the other job was lost or failed."""
    attacks: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> str:
        ratio = self.steps_per_s_during / self.steps_per_s_before if self.steps_per_s_before else 0.0
        latencies = sorted(self.forgectl_s)
        shown = {
            "seconds": self.seconds,
            "steps_per_s_before": round(self.steps_per_s_before, 2),
            "steps_per_s_during": round(self.steps_per_s_during, 2),
            "step_rate_ratio": round(ratio, 4),
            "forgectl_median_s": round(statistics.median(latencies), 3),
            "forgectl_max_s": round(latencies[-1], 3),
            "forgectl_calls": len(latencies),
            "forgectl_failures": self.forgectl_failures,
            "daemon_peak_mib": self.daemon_peak_bytes >> 20,
            "victim_notes_kept": self.victim_notes_kept,
            "victim_notes_written": VICTIM_NOTES,
            "victim_failures": self.victim_failures,
            "attacks": self.attacks,
        }
        return json.dumps(shown, indent=2)


class Trainers:
    """The workers of the other job; counts their steps."""

    def __init__(self) -> None:
        self.steps = 0
        self._stepped = asyncio.Event()

    async def count(self, output: asyncio.StreamReader) -> None:
        while data := await output.read(READ_BYTES):
            self.steps += len(data)
            self._stepped.set()

    async def more(self, steps: int) -> None:
        """Wait until all workers together have done so many more steps."""
        goal = self.steps + steps
        while self.steps < goal:
            self._stepped.clear()
            await self._stepped.wait()

    async def rate(self, seconds: float) -> float:
        """Steps of one worker per second."""
        loop = asyncio.get_running_loop()
        began, before = loop.time(), self.steps
        await asyncio.sleep(seconds)
        return (self.steps - before) / (loop.time() - began) / WORKERS


async def measure(directory: Path, seconds: float) -> Figures:
    """Train for a while, and then for as long under attack."""
    figures = Figures(seconds)
    daemon = DaemonProcess(directory, log=directory / "daemon.log")
    await daemon.start()
    try:
        async with ForgedClient(f"unix://{daemon.socket}") as operator:
            (endpoint,) = (await operator.status()).listen
            await operator.create_job(VICTIM, SETTINGS)
            for number in range(VICTIM_NOTES):
                await operator.note(VICTIM, f"{number}")
            tokens = {job: await operator.create_token(job, Role.WORKER, jobs=[job]) for job in (VICTIM, HOSTILE)}
        async with _trainers(endpoint, tokens[VICTIM]) as trainers:
            await trainers.more(10 * WORKERS)
            figures.steps_per_s_before = await trainers.rate(seconds)
            async with ForgedClient(f"unix://{daemon.socket}") as operator:
                before_attack = (await operator.status()).last_fact
            async with _attacker(endpoint, tokens[HOSTILE], figures), asyncio.TaskGroup() as tasks:
                working = tasks.create_task(_operate(daemon.socket, figures))
                before = trainers.steps
                figures.steps_per_s_during = await trainers.rate(seconds)
                if trainers.steps == before:
                    await trainers.more(1)
                working.cancel()
                figures.daemon_peak_bytes = _peak_bytes(daemon.pid)
            # While the trainers still run: their end is no failure.
            async with ForgedClient(f"unix://{daemon.socket}") as operator:
                facts = [item async for item in operator.past_facts(jobs=[VICTIM]) if isinstance(item, Record)]
        figures.victim_notes_kept = sum(record.type == NoteAdded.__name__ for record in facts)
        during = [record for record in facts if record.id > before_attack]
        figures.victim_failures = sum(record.type in FAILURES for record in during)
        return figures
    finally:
        await daemon.stop()


@asynccontextmanager
async def _trainers(endpoint: str, token: str) -> AsyncIterator[Trainers]:
    trainers = Trainers()
    started = [
        await asyncio.create_subprocess_exec(
            *command("tests.hostile_tenant.trainer", endpoint, VICTIM),
            stdout=asyncio.subprocess.PIPE,
            env=environment() | {"FORGED_TOKEN": token},
        )
        for _ in range(WORKERS)
    ]
    async with asyncio.TaskGroup() as tasks:
        for one in started:
            assert one.stdout is not None
            tasks.create_task(trainers.count(one.stdout))
        try:
            yield trainers
        finally:
            for one in started:
                one.kill()
            for one in started:
                await one.wait()


@asynccontextmanager
async def _attacker(endpoint: str, token: str, figures: Figures) -> AsyncIterator[None]:
    attacker = await asyncio.create_subprocess_exec(
        *command("tests.hostile_tenant.attacks", endpoint, HOSTILE),
        stdout=asyncio.subprocess.PIPE,
        env=environment() | {"FORGED_TOKEN": token},
        preexec_fn=lambda: os.nice(NICE) and None,
    )
    assert attacker.stdout is not None
    assert await attacker.stdout.readline() == b"attacking\n"
    try:
        yield
    finally:
        attacker.terminate()
        written, _ = await attacker.communicate()
        figures.attacks = json.loads(written.splitlines()[-1])


async def _operate(socket: Path, figures: Figures) -> None:
    """Run `forgectl` commands in turn until cancelled."""
    loop = asyncio.get_running_loop()
    words = (
        ("status",),
        ("tokens", "ls"),
        ("note", VICTIM, "the operator was here"),
        ("workers", "ls", "--job", VICTIM),
    )
    number = 0
    while True:
        began = loop.time()
        forgectl = await asyncio.create_subprocess_exec(
            *command("forged.cli.forgectl.main", "--socket", str(socket), *words[number % len(words)], "--json"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env=environment(),
        )
        figures.forgectl_failures += await forgectl.wait() != 0
        figures.forgectl_s.append(loop.time() - began)
        number += 1
        await asyncio.sleep(OPERATOR_PAUSE_S)


def _peak_bytes(pid: int) -> int:
    """The largest resident memory that the process has had."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024
