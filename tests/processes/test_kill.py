"""`kill -9` of the daemon under load loses nothing that was acknowledged and does nothing twice.

`FORGED_KILLS` says how often the daemon dies, `FORGED_SEED` when; both are printed.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from random import Random, SystemRandom

import pytest

from forged.client import EARLIEST, ForgedClient
from forged.kernel.messages import Gap, Record
from forged.status.model import DaemonStarted
from tests.processes.fork_server import DAEMON, ForkServer, ProcessStarter, forking_from
from tests.processes.request_load import SOON, LoadClient, StepRecorder, names

KILLS = int(os.environ.get("FORGED_KILLS", "100"))
SEED = int(os.environ.get("FORGED_SEED") or SystemRandom().getrandbits(32))
KILLS_PER_STORE = 100
STARTING_S_MAX = 0.1
ACKNOWLEDGED_PER_LIFE_MAX = 200
HOST = "127.0.0.2"
"""Not 127.0.0.1, from which the clients connect: one that knocks at a free port would in time connect to itself."""
CLIENTS = (("unix",), ("tcp",), ("unix", "tcp"), ("tcp", "unix"))

SETTINGS = """
journal_facts_max = 1_000_000
"""


class RestartedDaemon:
    """A daemon that is killed and restarted in one directory."""

    def __init__(self, starter: ProcessStarter, directory: Path) -> None:
        self._nursery = starter
        self._log = directory / "log"
        settings = directory / "forged.toml"
        settings.write_text(SETTINGS)
        self._places = [f"--config={settings}", f"--data-dir={directory}", f"--socket={directory / 's'}"]
        self.endpoints = {"unix": f"unix://{directory / 's'}", "tcp": f"{HOST}:0"}

    async def start(self) -> None:
        listen = self.endpoints["tcp"].removeprefix("tcp://")
        words = ("run", *self._places, f"--listen={listen}")
        self._daemon = await self._nursery.start("forged.cli.forged", *words, log=self._log)

    async def record_port(self) -> None:
        """Record the port that the daemon chose, so that restarted daemons listen on it."""
        async with ForgedClient(self.endpoints["unix"], reconnect=SOON) as client:
            (self.endpoints["tcp"],) = (await client.status()).listen

    async def kill(self) -> None:
        os.kill(self._daemon.pid, signal.SIGKILL)
        status = await self._daemon.wait()
        assert status == -signal.SIGKILL, f"it ended by itself, with {status}:\n{self._log.read_text()}"


@pytest.mark.parametrize("number", range(-(-KILLS // KILLS_PER_STORE)))
async def test_kill_9_under_load_loses_and_repeats_no_request(number: int, tmp_path: Path) -> None:
    kills = min(KILLS - number * KILLS_PER_STORE, KILLS_PER_STORE)
    print(f"FORGED_KILLS={kills} FORGED_SEED={SEED + number}")
    recorder = StepRecorder(asyncio.Barrier(len(CLIENTS)))
    with forking_from(*DAEMON) as warm:
        loaders, journal = await _under_load(warm, tmp_path, recorder, Random(SEED + number), kills)
    _check(recorder, loaders, journal, kills)


async def _under_load(
    warm: ForkServer, directory: Path, recorder: StepRecorder, random: Random, kills: int
) -> tuple[list[LoadClient], list[Record | Gap]]:
    """The clients of the load, and the final journal."""
    async with ProcessStarter(warm) as starter:
        victim = RestartedDaemon(starter, directory)
        await victim.start()
        await victim.record_port()
        loaders = [
            LoadClient(f"c{index}", [victim.endpoints[way] for way in ways], recorder)
            for index, ways in enumerate(CLIENTS)
        ]
        async with asyncio.TaskGroup() as tasks:
            for loader in loaders:
                tasks.create_task(loader.run())
            await _kill_often(victim, recorder, random, kills)
            recorder.over = True
        async with ForgedClient(victim.endpoints["unix"]) as client:
            journal = [item async for item in client.past_facts(since=EARLIEST)]
        await victim.kill()
    return loaders, journal


async def _kill_often(victim: RestartedDaemon, recorder: StepRecorder, random: Random, kills: int) -> None:
    """Kill it while it starts, or some time after it has begun to answer, and start it again."""
    for _ in range(kills):
        if random.random() < 0.25:
            await asyncio.sleep(random.uniform(0, STARTING_S_MAX))
        else:
            await recorder.more(random.randrange(ACKNOWLEDGED_PER_LIFE_MAX))
        await victim.kill()
        await victim.start()
    await recorder.more(ACKNOWLEDGED_PER_LIFE_MAX)


def _check(recorder: StepRecorder, loaders: list[LoadClient], journal: list[Record | Gap], kills: int) -> None:
    ids = [_id(item) for item in journal]
    assert ids == sorted(set(ids))
    found = names(journal)
    assert not recorder.asked - found, "lost"
    assert not found - recorder.asked, "done twice"
    assert recorder.acknowledged == recorder.asked.keys(), "never acknowledged"
    for loader in loaders:
        received = [_id(item) for item in loader.received]
        assert received == ids[: len(received)], f"{loader.name} missed or repeated a fact"
        assert names(loader.received) == found, f"{loader.name} did not receive all facts"
    terms = [item.fact.term for item in journal if isinstance(item, Record) and isinstance(item.fact, DaemonStarted)]
    assert terms == sorted(set(terms))
    assert kills // 2 < len(terms) <= kills + 1


def _id(item: Record | Gap) -> int:
    assert isinstance(item, Record), f"{item} though the journal holds everything"
    return item.id
