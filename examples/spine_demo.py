"""The spine at work: clients over TCP and Unix, facts as they become true, and a `kill -9` that nobody is told of.

    python -m examples.spine_demo [--quick] [--json]

Exits with 1 when something that was promised did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forged.cli.forgectl.tables import duration
from forged.client import EARLIEST, ForgedClient
from forged.demo.output import GREEN, RED, Stage
from forged.demo.processes import DaemonProcess
from forged.jobs.model import NoteAdded
from forged.kernel.messages import Gap, Record
from forged.status.model import DaemonStarted

DEADLINE_S = 60.0
JOB = "llm-7b"
WRITERS = 8
STEP_PAUSE_S = 0.15
STEPS, STEPS_QUICK = 6, 3
BEFORE_THE_KILL, BEFORE_THE_KILL_QUICK = 2000, 200
"""Notes that are acknowledged before the daemon is killed in mid-traffic; as many are written afterwards."""


@dataclass
class Watcher:
    """Streams every fact from the first one on, and shows it."""

    client: ForgedClient
    stage: Stage
    heard: list[Record | Gap] = field(default_factory=list)
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        async with self.client.facts(since=EARLIEST) as stream:
            async for item in stream:
                self.heard.append(item)
                self._more.set()
                self.stage.fact(item)

    async def hear(self, fact_id: int) -> None:
        """Wait until it has heard that fact."""
        while not self.heard or _id(self.heard[-1]) < fact_id:
            self._more.clear()
            await self._more.wait()


@dataclass
class Trainer:
    """Reports its progress as notes, many at once, and keeps account of what was acknowledged, and when."""

    client: ForgedClient
    acknowledged: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    waiting: int = 0

    async def report(self, text: str) -> None:
        self.waiting += 1
        await self.client.note(JOB, text)
        self.waiting -= 1
        self.acknowledged.append(text)
        self.times.append(asyncio.get_running_loop().time())

    async def hammer(self, name: str, until: int) -> None:
        """Report until so many reports have been acknowledged."""
        number = 0
        while len(self.acknowledged) < until:
            number += 1
            await self.report(f"{name}, report {number}")

    @property
    def longest_silence_s(self) -> float:
        """The longest time between two acknowledgements."""
        return max((after - before for before, after in zip(self.times, self.times[1:], strict=False)), default=0.0)


@dataclass
class Demonstration:
    """One run, from an empty directory to the final account."""

    stage: Stage
    daemon: DaemonProcess
    quick: bool
    figures: dict[str, float] = field(default_factory=dict)

    async def run(self) -> None:
        self.stage.step(
            "Start a daemon",
            "A process of its own, `forged run`, with the embedded SQLite store in an empty directory.",
        )
        self.figures["ready_s"] = await self.daemon.start()
        self.stage.remark(f"ready after {duration(self.figures['ready_s'])}, as process {self.daemon.pid}")
        unix = f"unix://{self.daemon.socket}"
        async with ForgedClient(unix) as first:
            (tcp,) = (await first.status()).listen
        async with ForgedClient(tcp) as trainer, ForgedClient(unix) as watcher:
            await self._work(Trainer(trainer), Watcher(watcher, self.stage), tcp)
        code = await self.daemon.stop()
        self.stage.check("asked to stop, the daemon says goodbye and exits with 0", code == 0)

    async def _work(self, trainer: Trainer, watcher: Watcher, tcp: str) -> None:
        watching = asyncio.create_task(watcher.run())
        try:
            await self._stream(trainer, watcher)
            await self._kill(trainer, watcher, tcp)
            await self._verify(trainer, watcher)
        finally:
            watching.cancel()
            await asyncio.wait([watching])

    async def _stream(self, trainer: Trainer, watcher: Watcher) -> None:
        self.stage.step(
            "Clients over TCP and Unix, and facts as they become true",
            f"A trainer over TCP ({trainer.client.endpoint}) creates a job and reports its progress.",
            "A watcher over the Unix socket streams the facts; each has an id, a time and a cause, and is on disk",
            "before anybody hears of it. This is the timeline as the watcher sees it:",
        )
        await trainer.client.create_job(JOB, {"learning_rate": 0.0003, "batch": 512})
        for number in range(1, 1 + (STEPS_QUICK if self.quick else STEPS)):
            await trainer.report(f"step {number}, loss {2.5 / number:.3f}")
            await asyncio.sleep(STEP_PAUSE_S)

    async def _kill(self, trainer: Trainer, watcher: Watcher, tcp: str) -> None:
        self.stage.step(
            "kill -9 in mid-traffic",
            f"{WRITERS} tasks of the trainer report at once, each again as soon as it is acknowledged. In the midst of",
            "it the daemon is killed, and started anew on the same directory. Neither client is told: both reconnect,",
            "open requests are sent again under their numbers, and the stream goes on where it stood.",
        )
        trainer.times.clear()
        half = len(trainer.acknowledged) + (BEFORE_THE_KILL_QUICK if self.quick else BEFORE_THE_KILL)
        async with asyncio.TaskGroup() as tasks:
            for number in range(WRITERS):
                tasks.create_task(trainer.hammer(f"task {number}", until=2 * half))
            while len(trainer.acknowledged) < half:
                await asyncio.sleep(0.001)
            await self.daemon.kill()
            open_requests = trainer.waiting
            self.stage.remark(f"killed, with {open_requests} requests open", RED)
            self.figures["restart_s"] = await self.daemon.start(tcp)
            self.stage.remark(
                f"another one is ready after {duration(self.figures['restart_s'])}, as process {self.daemon.pid}", GREEN
            )
        self.figures["outage_s"] = trainer.longest_silence_s
        self.stage.remark(f"for the trainer it was a pause of {duration(trainer.longest_silence_s)}, and no error")

    async def _verify(self, trainer: Trainer, watcher: Watcher) -> None:
        last = (await watcher.client.status()).last_fact
        await watcher.hear(last)
        journal = [item async for item in trainer.client.past_facts(since=EARLIEST)]
        self.stage.step(
            "Was anything lost, or done or seen twice?",
            "What the trainer was told, what the watcher heard, and what the new daemon has on record, side by side.",
        )
        records = [item for item in journal if isinstance(item, Record)]
        kept = Counter(fact.text for fact in (record.fact for record in records) if isinstance(fact, NoteAdded))
        told, heard = trainer.acknowledged, watcher.heard
        terms = [record.fact.term for record in records if isinstance(record.fact, DaemonStarted)]
        self.figures |= {"acknowledged": len(told), "facts": len(journal)}
        check = self.stage.check
        check(f"all {len(told):,} acknowledged reports are on record", kept.keys() >= set(told))
        check("none of them is there twice, though some were sent twice", max(kept.values()) == 1)
        check("nothing is there that was not asked for", kept.keys() <= set(told))
        check(
            f"the watcher heard all {len(journal):,} facts, each once, in order and without a gap",
            [_id(item) for item in heard] == [record.id for record in records],
        )
        check("both daemons are in one history, as its first and its second term", terms == [1, 2])


def _id(item: Record | Gap) -> int:
    return item.id if isinstance(item, Record) else -1


async def demonstrate(stage: Stage, quick: bool) -> dict[str, float]:
    """Show it all; returns what was measured."""
    with tempfile.TemporaryDirectory(prefix="forged-demo-") as directory:
        daemon = DaemonProcess(Path(directory))
        demonstration = Demonstration(stage, daemon, quick)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await demonstration.run()
        finally:
            await daemon.stop()
        return demonstration.figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration; returns the exit code."""
    parser = argparse.ArgumentParser(description="The spine of forged at work, in four steps.")
    parser.add_argument("--quick", action="store_true", help="with less traffic")
    parser.add_argument("--json", action="store_true", help="one object at the end, for programs")
    options = parser.parse_args(arguments)
    stage = Stage(quiet=options.json)
    figures = asyncio.run(demonstrate(stage, options.quick))
    held = all(held for _, held in stage.checks)
    if options.json:
        checks = [{"claim": claim, "held": held} for claim, held in stage.checks]
        print(json.dumps({"demo": "spine", "held": held, "seconds": stage.seconds, **figures, "checks": checks}))
    stage.conclude("All of it held." if held else "Something did not hold.", held)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
