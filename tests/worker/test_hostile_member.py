"""What a worker token can do to the other workers of its job: a raw client on a real socket, beside real workers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from forged.auth.model import Role
from forged.client import EARLIEST, ForgedClient
from forged.elastic.messages import (
    INCARNATION_BYTES,
    JobCompleted,
    ProgressLost,
    RescaleCompleted,
    RescaleJob,
    RescaleStarted,
    WorkerDraining,
    WorkerFailed,
    WorkerLeft,
    WorkerLost,
)
from forged.elastic.phases import Phase
from forged.kernel.messages import Record
from tests.client.daemon_runner import SOON, DaemonRunner, config_in
from tests.net.manual_daemon import SIGNAL
from tests.net.raw_client import RawClient
from tests.worker.trainers import JOB, PATIENCE_S, TrainerGroup, group_at, past

IMPOSSIBLE_STEP = 10**12
VICTIM = "b"
NAMES = ("a", VICTIM, "m")
"""The members of the world; m is hostile."""
HARM = (WorkerFailed, WorkerLeft, WorkerLost, WorkerDraining, JobCompleted, ProgressLost)

REQUESTS: dict[str, tuple[dict[str, Any], Any]] = {
    "LeaveJob": ({"done": True, "step": IMPOSSIBLE_STEP}, {"may_leave": True}),
    "AnnounceLeave": ({}, {"may_leave": True}),
    "ReadLeave": ({}, {"may_leave": True}),
    "ReportDeath": ({"reason": "it is dead"}, {}),
    "ReportUnreachablePeer": ({"generation": 1, "peer": "a"}, {}),
    "ReportStopped": ({"attempt": 1, "step": IMPOSSIBLE_STEP}, "attempt_over"),
    "ReportReady": ({"attempt": 1}, "attempt_over"),
    "ReadAttempt": ({}, "attempt_over"),
    "ConfirmWorker": ({}, "worker_gone"),
    "OfferShards": ({"attempt": 1, "dataset": {"samples": 10, "shards": 1}}, "attempt_over"),
    "ReadTransfers": ({"attempt": 1}, "attempt_over"),
    "ReportShards": ({"attempt": 1}, "attempt_over"),
    "ReportLostShards": ({"attempt": 1, "count": 1, "shards": [0], "reason": "gone"}, "attempt_over"),
    "ReportCorruptShard": ({"source": "a", "shard": 0}, "worker_gone"),
    "StartCheckpoint": ({"epoch": 0, "step": 1, "storage_path": "/c/step-1", "save_id": "0" * 8}, "worker_gone"),
    "CompleteCheckpoint": ({"checkpoint_id": "c", "size_bytes": 1, "seconds": 1.0}, "worker_gone"),
    "FailCheckpoint": ({"checkpoint_id": "c", "reason": "it is bad"}, "worker_gone"),
    "ReportRestore": ({"checkpoint_id": "", "step": 0, "seconds": 1.0, "size_bytes": 1}, "worker_gone"),
    "ConfirmDeleted": ({"checkpoint_ids": ["c"]}, "worker_gone"),
    "ReportUsage": ({"generation": 1, "begins_at": 0, "samples": 10, "runs": []}, "worker_gone"),
}
"""The requests in a worker's name, with their other fields, and the answer if the incarnation is another one."""
SIGNALS: dict[str, dict[str, Any]] = {
    "Heartbeat": {"step": IMPOSSIBLE_STEP, "collective_seq": 1 << 60, "is_done": True},
    "Pulse": {"step": IMPOSSIBLE_STEP, "collective_seq": 1 << 60, "cpu_s": 1.0},
    "AttemptProgress": {"attempt": 1, "state_bytes": 1, "unreachable_peer": "a", "store_failing_s": 1e6},
}


@dataclass
class Attacked:
    """Three workers that train, an operator, and a raw client with a worker token of their job."""

    group: TrainerGroup
    operator: ForgedClient
    attacker: RawClient
    _number: int = 0

    async def ask(self, method: str, worker: str, incarnation: bytes, **fields: Any) -> Any:
        """The reply, or the code of the refusal."""
        self._number += 1
        who = {"job": JOB, "worker_id": worker, "incarnation": incarnation}
        return await self.attacker.request(self._number, method, **who, **fields)

    async def signal(self, name: str, worker: str, incarnation: bytes, **fields: Any) -> None:
        body = {"job": JOB, "worker_id": worker, "incarnation": incarnation, **fields}
        await self.attacker.send(SIGNAL, name, body)

    def incarnation_of(self, name: str) -> bytes:
        return self.group[name].worker.incarnation

    async def trains_on_unharmed(self) -> None:
        """All workers train on in their world, and no fact tells anything else."""
        await self.group.more_steps(*NAMES)
        assert await past(self.operator, *HARM) == []
        assert [fact.delta.generation for fact in await past(self.operator, RescaleCompleted)] == [1]
        view = await self.operator.cluster(JOB)
        assert view.state.current_step < IMPOSSIBLE_STEP / 2
        assert {worker.id for worker in await self.operator.workers(JOB) if worker.rank >= 0} == set(NAMES)
        assert all(worker.step < IMPOSSIBLE_STEP / 2 for worker in await self.operator.workers(JOB))


async def attempt_after(operator: ForgedClient, number: int) -> int:
    """The number of the first attempt after this one, once it has started."""
    async with asyncio.timeout(PATIENCE_S), operator.facts(RescaleStarted, since=EARLIEST, jobs=[JOB]) as facts:
        async for item in facts:
            if isinstance(item, Record) and isinstance(item.fact, RescaleStarted) and item.fact.attempt > number:
                return item.fact.attempt
    raise AssertionError("the stream of facts has ended")


@pytest.fixture
async def attacked(tmp_path: Path) -> AsyncIterator[Attacked]:
    runner = DaemonRunner(config_in(tmp_path, listen=("tcp://127.0.0.1:0",)))
    daemon = await runner.open()
    (endpoint,) = daemon.listening
    try:
        async with ForgedClient(runner.endpoint, reconnect=SOON) as operator:
            token = await operator.create_token("workers", Role.WORKER, jobs=[JOB])
            async with group_at(endpoint, min_workers=2, stability_window_ms=500) as group:
                group.start(*NAMES, token=token)
                await group.world_of(*NAMES)
                async with RawClient.greeted(endpoint, token) as attacker:
                    yield Attacked(group, operator, attacker)
    finally:
        await runner.close()


async def test_messages_in_another_workers_name_change_nothing_without_its_incarnation(attacked: Attacked) -> None:
    false_incarnations = (attacked.incarnation_of("m"), os.urandom(INCARNATION_BYTES), b"")
    for incarnation in false_incarnations:
        for method, (fields, answer) in REQUESTS.items():
            assert await attacked.ask(method, VICTIM, incarnation, **fields) == answer, method
        for name, fields in SIGNALS.items():
            await attacked.signal(name, VICTIM, incarnation, **fields)
    await attacked.trains_on_unharmed()
    await attacked.group.finish(*NAMES)


async def test_living_workers_name_cannot_be_taken(attacked: Attacked) -> None:
    who = {"id": VICTIM, "hostname": "127.0.0.1", "port": 1}
    incarnation = os.urandom(INCARNATION_BYTES)
    for number, (rejoin, code) in enumerate([(False, "worker_exists"), (True, "worker_gone")], start=1):
        fields = {"job": JOB, "worker": who, "incarnation": incarnation, "rejoin": rejoin}
        assert await attacked.attacker.request(number, "JoinJob", **fields) == code
    await attacked.trains_on_unharmed()


async def test_impossible_steps_of_a_member_change_nothing(attacked: Attacked) -> None:
    own = "m", attacked.incarnation_of("m")
    for done in (True, False):
        assert await attacked.ask("LeaveJob", *own, done=done, step=IMPOSSIBLE_STEP) == "step_impossible"
    for name in ("Heartbeat", "Pulse"):
        await attacked.signal(name, *own, step=IMPOSSIBLE_STEP)
    await attacked.trains_on_unharmed()
    await attacked.group.finish(*NAMES)


async def test_member_that_stops_after_an_impossible_step_does_not_become_the_state_source(attacked: Attacked) -> None:
    group, release = attacked.group, asyncio.Event()
    held = asyncio.Event()

    async def hold(step: int) -> None:
        held.set()
        await release.wait()

    group["m"].before_step = hold
    await held.wait()
    async with group.rescaled(*NAMES):
        await attacked.operator.request(RescaleJob(JOB))
        report = {"attempt": await attempt_after(attacked.operator, 1), "step": IMPOSSIBLE_STEP}
        assert await attacked.ask("ReportStopped", "m", attacked.incarnation_of("m"), **report) == "step_impossible"
        assert await attacked.ask("ReportStopped", VICTIM, attacked.incarnation_of("m"), **report) == "attempt_over"
        release.set()
    (_, completed) = await past(attacked.operator, RescaleCompleted)
    assert completed.step <= group["a"].worker.step
    assert await past(attacked.operator, *HARM) == []
    await group.finish(*NAMES)


@pytest.mark.parametrize("ahead", [0, 1, 50])
async def test_training_goes_on_without_a_member_that_says_it_is_complete(attacked: Attacked, ahead: int) -> None:
    group = attacked.group
    step = group["m"].worker.step + ahead
    assert await attacked.ask("LeaveJob", "m", attacked.incarnation_of("m"), done=True, step=step) == {
        "may_leave": True
    }
    await group.world_of("a", VICTIM)
    assert (await attacked.operator.cluster(JOB)).phase is Phase.RUNNING
    await group.finish("a", VICTIM)
    assert (await attacked.operator.cluster(JOB)).phase is Phase.COMPLETED
    assert [fact.worker_id for fact in await past(attacked.operator, WorkerFailed, WorkerLost)] == []


async def test_worker_that_a_member_reports_unreachable_stays_while_the_daemon_reaches_it(attacked: Attacked) -> None:
    async with attacked.group.rescaled(*NAMES):
        report = {"generation": 1, "peer": VICTIM, "reason": "it does not answer"}
        assert await attacked.ask("ReportUnreachablePeer", "m", attacked.incarnation_of("m"), **report) == {}
    await attacked.group.world_of(*NAMES)
    assert await past(attacked.operator, *HARM) == []
    await attacked.group.finish(*NAMES)
