"""Elastic training that survives kill -9, as a story in six acts, of which the last one is the proof.

Law: what is claimed is checked, and told with the figures that were measured in this very run. Whatever ends the story,
its processes end with it.
"""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from forged.cli.forgectl.tables import duration
from forged.client import ForgedClient
from forged.data.messages import TransfersCompleted, TransfersPlanned, TransferTotals
from forged.demo import audit
from forged.demo import checkpoints as keeping
from forged.demo.dataset import REPLICATION, SHARDS, misplaced
from forged.demo.learning import BATCH, SAMPLES, State, Task
from forged.demo.output import CYAN, DIM, GREEN, RED, Stage
from forged.demo.processes import DaemonProcess, forgectl, nothing_left_behind
from forged.demo.records import Finished, Ready
from forged.demo.run import Scene
from forged.demo.train import ENOUGH, JOB, PARAMETERS
from forged.elastic.messages import (
    JobCompleted,
    ListWorkers,
    RescaleCompleted,
    RescaleStarted,
    WorkerFailed,
    WorkerLeft,
)
from forged.errors import ConfigError, ForgedError
from forged.phrases import counted

DEADLINE_S = 120.0
"""On a machine that is very busy."""
ACTS = 6
ASK_INTERVAL_S = 0.05
TOLERANCE = 1e-9
"""Adding up in another order moves the parameters by some 1e-14."""
PROBLEMS_SHOWN = 5
RUN_SHOWN = 16
STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
SIGNALLED = 128
"""What a shell adds to a signal's number."""


@dataclass
class Outcome:
    """What came of it."""

    workers: int
    recovery_s: float | None = None
    """From the kill of a worker until a step counts again for all others."""
    join_s: float | None = None
    """From the moment in which a new worker asks for a place until its first step counts."""
    outage_s: float | None = None
    """How long there was no daemon."""
    outage_steps: int | None = None
    """How many steps have come to count meanwhile."""
    rescales: int = 0
    steps: int = 0
    covered: int = 0
    """Steps that were proven to have used their whole batch once."""
    repeated: int = 0
    """Steps that were broken off and done again."""
    shards_moved: int = 0
    """Shards that went from the directory of one worker to that of another."""
    audit: dict[str, int | bool] = field(default_factory=dict)
    """What the daemon has proven: how many epochs are over, of how many samples, how many were used in all, and whether
    each sample of each epoch was used once."""
    final_loss: float | None = None
    reference_loss: float | None = None
    parameters_differ_by: float | None = None
    """By how much the farthest parameter is from that of a run that nobody interrupts."""
    checkpoints: int = 0
    """How many were saved while training went on."""
    resumed_from: str = ""
    """The checkpoint from which one process has gone on alone."""
    resumed_differ_by: float | None = None
    """By how much the farthest parameter of that process is from what the workers have learnt."""
    problems: list[str] = field(default_factory=list)


class Story:
    """One run, from an empty directory to the proof."""

    def __init__(self, stage: Stage, directory: Path, socket: Path, workers: int, steps: int) -> None:
        self.outcome = Outcome(workers)
        self._stage = stage
        self._directory = directory
        self._size = workers
        self._steps = steps
        self._some = max(1, steps // ACTS)
        """How many steps an act takes at least."""
        self._daemon = DaemonProcess(directory / "daemon", socket, directory / "daemon.log")
        self._scene = Scene(stage, self._daemon, directory, self._some)

    async def run(self) -> None:
        """Tell it to its end, or to where it cannot go on; what was not right is in the outcome."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                await self._tell()
        except TimeoutError:
            self._fail(f"gave up after {DEADLINE_S:g} s, waiting for {self._scene.waits_for}")
        except ForgedError as error:
            self._fail(error.message)
        finally:
            await self._end()

    def _fail(self, why: str) -> None:
        self._check("the story came to its end", [why])

    async def _end(self) -> None:
        workers = self._scene.workers.values()
        for worker in workers:
            worker.kill()
        for worker in workers:
            await worker.wait()
        await self._daemon.stop()

    async def _tell(self) -> None:
        await self._begin()
        unix = f"unix://{self._daemon.socket}"
        async with self._scene.watched(unix) as client:
            (tcp,) = (await client.status()).listen
            await self._gather(tcp)
            await self._lose_worker()
            await self._gain_worker(tcp)
            await self._lose_daemon(client, tcp)
            await self._drain_worker()
            await self._prove(client)
        self._check("asked to stop, the daemon exits with 0", [] if await self._daemon.stop() == 0 else ["it does not"])

    # The acts.

    async def _begin(self) -> None:
        self._stage.step(
            f"A daemon, and {self._size} workers who learn together",
            "All are processes of their own. The daemon keeps its state in an embedded SQLite file; the workers run a",
            f"script of numpy code that joins. Each step has {BATCH} samples, dealt out among whoever is there. Of the",
            f"{SHARDS} shards of the data each worker keeps its part in a directory of its own, and each lies in",
            f"{1 + REPLICATION} directories; at first they come from where the data is made, later from each other.",
        )
        ready_s = await self._daemon.start()
        self._stage.remark(f"the daemon is ready after {duration(ready_s)}, as process {self._daemon.pid}")

    async def _gather(self, endpoint: str) -> None:
        for number in range(self._size):
            await self._scene.enter(f"w{number}", endpoint, self._size)
        await self._scene.until(lambda: len(self._scene.members) == self._size, "a world of all workers")
        await self._train("the first steps")

    async def _lose_worker(self) -> None:
        scene = self._scene
        hub, generation = scene.members[0], scene.topology.epoch
        self._stage.step(
            "kill -9 a worker in the middle of a step",
            f"{hub} has rank 0: the others exchange their gradients over it. Nobody is told. Survivors are not",
            "restarted; the step that was under way is done again, with the samples of the dead one dealt out anew.",
            "Its shards are taken over by those who have the other copies, and new copies are made of them.",
        )
        survivors = scene.members[1:]
        victim = scene.workers[hub]
        victim.may_end = True
        killed_at = time.monotonic()
        victim.kill()
        self._stage.remark(f"kill -9 {victim.pid} ({hub})", RED)
        await scene.until(lambda: self._back(survivors, generation) is not None, "the survivors' next step")
        back_at = self._back(survivors, generation)
        assert back_at is not None
        self.outcome.recovery_s = round(back_at - killed_at, 4)
        self._stage.remark(
            f"{duration(back_at - killed_at)} from the kill until a step counts again for all survivors", GREEN
        )
        await scene.until(lambda: scene.said(WorkerFailed, hub) is not None, "the daemon to tell of the death")
        self._tell_moved()
        await self._train("steps without the dead worker")

    async def _gain_worker(self, endpoint: str) -> None:
        scene, name = self._scene, f"w{self._size}"
        generation = scene.topology.epoch
        self._stage.step(
            "A new worker joins",
            "It takes the parameters and the momentum from a worker that has them, from process to process. The others",
            "go on with their steps until it is there, and stop between two of them to take it in. It gets its share",
            "of the shards, and no other shard moves.",
        )
        await scene.enter(name, endpoint, self._size)
        await scene.until(lambda: self._back([name], generation) is not None, "the new worker's first step")
        started_at = next(entry.at for entry in scene.logs[name] if isinstance(entry, Ready))
        first_at = self._back([name], generation)
        assert first_at is not None
        self.outcome.join_s = round(first_at - started_at, 4)
        self._stage.remark(f"{duration(first_at - started_at)} from its asking until its first step counts", GREEN)
        self._tell_moved()
        await self._train("steps with the new worker")

    async def _lose_daemon(self, client: ForgedClient, endpoint: str) -> None:
        scene, before = self._scene, self._scene.members
        rescales = self._rescales_begun()
        self._stage.step(
            "kill -9 the daemon, and start it again",
            "Workers talk to each other, and need the daemon when the world has to change and at no other time. The",
            "new daemon reads where the job is from its file; the workers come back by themselves, with their ranks.",
        )
        killed_at = time.monotonic()
        await self._daemon.kill()
        self._stage.remark("kill -9 of the daemon", RED)
        await self._train("steps without a daemon")
        ready_s = await scene.meanwhile(self._daemon.start(endpoint), "another daemon")
        back_at = time.monotonic()
        scene.look()
        self.outcome.outage_s = round(back_at - killed_at, 4)
        self.outcome.outage_steps = min(audit.commits_between(scene.logs[name], killed_at, back_at) for name in before)
        self._stage.remark(
            f"another daemon is ready after {duration(ready_s)}, as process {self._daemon.pid};"
            f" {self.outcome.outage_steps} steps were made without one",
            GREEN,
        )
        ranks = await self._all_back(client, before)
        self._stage.remark("all workers are back at the daemon")
        await self._train("steps with the new daemon")
        changed = [] if ranks == before and scene.members == before else [f"ranks were {before}, and are {ranks}"]
        if self._rescales_begun() != rescales:
            changed.append("the world was rescaled")
        self._check("the workers kept their ranks and went on without a rescale", changed)

    async def _drain_worker(self) -> None:
        scene = self._scene
        leaver = scene.members[-1]
        self._stage.step(
            "Drain a worker",
            "An operator wants its machine back. It finishes its step, hands over its shards, and goes; nothing is",
            "lost or done twice.",
        )
        worker = scene.workers[leaver]
        worker.may_end = True
        self._stage.remark(f"$ forgectl workers drain {leaver} --reason maintenance", CYAN)
        words = ("workers", "drain", leaver, "--reason", "maintenance")
        self._stage.quote(await scene.meanwhile(forgectl(self._daemon.socket, *words), "forgectl"))
        await scene.until(lambda: scene.said(WorkerLeft, leaver) is not None, f"{leaver} to leave")
        await scene.until(lambda: leaver not in scene.members, f"a world without {leaver}")
        await scene.until(lambda: worker.code is not None, f"the end of {leaver}")
        self._check(
            f"{leaver} ended by itself, with 0", [] if worker.code == 0 else [f"{worker.code}: {worker.last_words}"]
        )
        await self._train("steps without the drained worker")
        await scene.until(lambda: scene.steps >= self._steps, f"step {self._steps}")

    async def _prove(self, client: ForgedClient) -> None:
        scene, finishers = self._scene, self._scene.members
        self._stage.step(
            "Was it right?",
            "Each worker wrote down what it was about to use before it used it. All of that is put together now, next",
            "to what the daemon has on record, and to a run in one process that nobody interrupts.",
        )
        for name in finishers:
            scene.workers[name].may_end = True
        (self._directory / ENOUGH).touch()
        await scene.until(
            lambda: all(scene.workers[name].code is not None for name in finishers), "the workers to come to their end"
        )
        await scene.until(lambda: scene.said(JobCompleted) is not None, "the job to be completed")
        failed = scene.said(WorkerFailed)
        assert failed is not None, "it was waited for"
        self._stage.remark(f"$ forgectl story {failed.id}", CYAN)
        asking = forgectl(self._daemon.socket, "story", f"{failed.id}")
        self._stage.quote(await scene.meanwhile(asking, "the story"))
        self._audit(finishers)
        await self._audit_data(client, finishers)
        self._compare(finishers)
        await self._resume(finishers)

    def _audit(self, finishers: Sequence[str]) -> None:
        logs, decided = self._scene.logs, self._scene.worlds
        codes = [f"{name} exited with {code}" for name in finishers if (code := self._scene.workers[name].code)]
        self._check("all workers that were left exited with 0", codes)
        told, problems = audit.worlds_of(logs)
        self._check(
            f"nobody was told two worlds for one of the {len(decided)} generations",
            problems + audit.disagreements(told, decided),
        )
        covered = audit.coverage(logs, told, BATCH)
        self.outcome.steps, self.outcome.covered = covered.steps, covered.covered
        self.outcome.repeated = covered.repeated
        self.outcome.rescales = sum(isinstance(one.fact, RescaleCompleted) for one in self._scene.facts)
        self._check(
            f"each of the {covered.steps:,} steps used its {BATCH} samples once"
            f" ({covered.repeated} had to be begun again)",
            covered.problems,
        )
        self._check("each step counts once for each worker, in order", audit.order(logs))
        self._check(
            f"{', '.join(finishers)} ended with the same parameters, bit for bit",
            audit.endings(logs, finishers, covered.steps),
        )

    async def _audit_data(self, client: ForgedClient, finishers: Sequence[str]) -> None:
        """What the daemon can prove of the samples, and what lies in the directories."""
        self._stage.remark(f"$ forgectl data audit --job {JOB}", CYAN)
        asking = forgectl(self._daemon.socket, "data", "audit", "--job", JOB)
        self._stage.quote(await self._scene.meanwhile(asking, "the audit"))
        last = await client.audit_data(JOB)
        audits = [await client.audit_data(JOB, epoch) for epoch in range(last.epoch)] + [last]
        problems = audit.misuses(audits, self.outcome.steps * BATCH)
        self.outcome.audit = {
            "epochs": last.epoch,
            "samples": last.samples,
            "used": sum(one.used for one in audits),
            "complete": not problems,
        }
        self._check(
            f"in each of the {last.epoch:,} epochs that are over each of {SAMPLES:,} samples was used once", problems
        )
        self.outcome.shards_moved = sum(map(_moved, self._transfers().values()))
        moved = [] if self.outcome.shards_moved else ["none has moved"]
        self._check(f"shards went from one worker's directory to another's, {self.outcome.shards_moved} in all", moved)
        owners = await client.shard_owners(JOB)
        self._check(
            f"each of the {SHARDS} shards lies with its owner, with all of its copies, byte for byte as it was made",
            misplaced(self._directory, owners, finishers, Task().samples),
        )
        ends = [entry for name in finishers for entry in self._scene.logs[name] if isinstance(entry, Finished)]
        here, total = sum(end.read_here for end in ends), sum(end.read_here + end.read_at_origin for end in ends)
        self._stage.remark(f"{', '.join(finishers)} read {here / max(1, total):.0%} of their samples from there", DIM)

    def _compare(self, finishers: Sequence[str]) -> None:
        task, steps = Task(), self.outcome.steps
        learnt: State = {"parameters": np.load(self._directory / f"{finishers[0]}{PARAMETERS}")}
        reference = task.alone(steps)
        self.outcome.final_loss, self.outcome.reference_loss = task.loss(learnt), task.loss(reference)
        distance = float(np.abs(learnt["parameters"] - reference["parameters"]).max())
        self.outcome.parameters_differ_by = distance
        too_far = [] if distance <= TOLERANCE else [f"a parameter differs by {distance:g}"]
        self._check(f"they are those of an uninterrupted run: none differs by more than {distance:.1e}", too_far)
        self._stage.remark(
            f"loss {self.outcome.final_loss:.12f}, uninterrupted {self.outcome.reference_loss:.12f};"
            f" {task.hits(learnt):.1%} of the points are put on their spiral",
            DIM,
        )

    async def _resume(self, finishers: Sequence[str]) -> None:
        """Go on from the last checkpoint in this process, as if all workers had died behind it."""
        found = keeping.checkpoints(self._directory)
        self.outcome.checkpoints = len(found)
        self._check("the workers saved checkpoints while they trained", [] if found else ["there is none"])
        if not found:
            return
        last = found[-1]
        place = f"{keeping.FOLDER}/{last.prefix}"
        self._stage.remark(f"$ forgectl ckpt verify {place}", CYAN)
        verifying = forgectl(self._daemon.socket, "ckpt", "verify", str(self._directory / place))
        self._stage.quote(await self._scene.meanwhile(verifying, "the checkpoint to be verified"))
        state, steps = keeping.resumed(self._directory, last.prefix, Task(), self.outcome.steps)
        learnt = np.load(self._directory / f"{finishers[0]}{PARAMETERS}")
        distance = float(np.abs(state["parameters"] - learnt).max())
        self.outcome.resumed_from, self.outcome.resumed_differ_by = last.prefix, distance
        self._check(
            f"one process that resumes from {last.prefix}, saved by {counted(last.world_size, 'rank')}, comes to the"
            f" same in {counted(steps, 'step')}: no parameter differs by more than {distance:.1e}",
            [] if distance <= TOLERANCE else [f"a parameter differs by {distance:g}"],
        )

    # What they are made of.

    async def _train(self, what: str) -> None:
        """Let some more steps count for all."""
        goal = self._scene.steps + self._some
        await self._scene.until(lambda: self._scene.steps >= goal, what)

    def _transfers(self) -> dict[int, TransferTotals]:
        """What has travelled, by attempt."""
        facts = [one.fact for one in self._scene.facts]
        done = {fact.attempt for fact in facts if isinstance(fact, TransfersCompleted)}
        planned = (fact for fact in facts if isinstance(fact, TransfersPlanned))
        return {fact.attempt: fact.totals for fact in planned if fact.attempt in done}

    def _tell_moved(self) -> None:
        """Say which shards have travelled for the world that has just begun."""
        completed = self._scene.said(RescaleCompleted)
        assert completed is not None
        assert isinstance(completed.fact, RescaleCompleted)
        totals = self._transfers().get(completed.fact.attempt)
        if totals is not None:
            self._stage.remark(
                f"{_moved(totals)} shards went from worker to worker, {totals.from_origin} came from the origin", GREEN
            )

    def _back(self, workers: Sequence[str], generation: int) -> float | None:
        """When a step counts for all of these that was done in a later generation; None while there is none."""
        times = [audit.first_commit(self._scene.logs.get(worker, []), above=generation) for worker in workers]
        known = [at for at in times if at is not None]
        return max(known) if len(known) == len(workers) else None

    def _rescales_begun(self) -> int:
        return sum(isinstance(one.fact, RescaleStarted) for one in self._scene.facts)

    async def _all_back(self, client: ForgedClient, workers: Sequence[str]) -> list[str]:
        """Wait until these workers have a connection to the daemon; returns them by rank."""
        self._scene.waits_for = "the workers to come back to the daemon"
        while True:
            page = await client.request(ListWorkers(JOB))
            there = [one for one in page.workers if one.connected]
            if {one.id for one in there} >= set(workers):
                return [one.id for one in sorted(there, key=lambda one: one.rank)]
            await asyncio.sleep(ASK_INTERVAL_S)
            self._scene.look()

    def _check(self, claim: str, problems: Sequence[str]) -> None:
        self._stage.check(claim, not problems)
        for problem in problems[:PROBLEMS_SHOWN]:
            self._stage.remark(problem, RED)
        if len(problems) > PROBLEMS_SHOWN:
            self._stage.remark(f"... and {len(problems) - PROBLEMS_SHOWN:,} more", RED)
        self.outcome.problems += problems


def _moved(totals: TransferTotals) -> int:
    """How many shards went from worker to worker."""
    return totals.from_owners + totals.from_replicas


def perform(workers: int, steps: int, keep: Path | None, *, as_json: bool) -> bool:
    """Show it all; returns whether all of it was right."""
    stage = Stage(quiet=as_json, run_shown=RUN_SHOWN)
    with tempfile.TemporaryDirectory(prefix="forged-demo-") as temporary:
        directory = _place(keep, Path(temporary) / "kept")
        story = Story(stage, directory, Path(temporary) / "forged.sock", workers, steps)
        with nothing_left_behind():
            _run(story)
    if keep is not None:
        stage.remark(f"all records are in {directory}")
    return _conclude(stage, story.outcome, as_json=as_json)


def _run(story: Story) -> None:
    heard: list[signal.Signals] = []
    try:
        asyncio.run(_until_told(story, heard))
    except asyncio.CancelledError:
        # As a shell tells of a process that the signal has ended.
        raise SystemExit(SIGNALLED + heard[0]) from None


async def _until_told(story: Story, heard: list[signal.Signals]) -> None:
    """Tell the story, unless a signal says to stop."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def stop(number: signal.Signals) -> None:
        heard.append(number)
        task.cancel()

    for number in STOP_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            loop.add_signal_handler(number, stop, number)
    await story.run()


def _place(keep: Path | None, otherwise: Path) -> Path:
    """An empty directory for all that is written."""
    directory = keep or otherwise
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        is_empty = not any(directory.iterdir())
    except OSError as error:
        raise ConfigError(
            "keep_unusable", f"{directory}: {error.strerror}", "give --keep a directory of yours"
        ) from error
    if not is_empty:
        raise ConfigError("keep_in_use", f"{directory} is not empty", "give --keep a new directory")
    return directory.resolve()


def _conclude(stage: Stage, outcome: Outcome, *, as_json: bool) -> bool:
    ok = not outcome.problems and all(held for _, held in stage.checks)
    if as_json:
        checks = [{"claim": claim, "held": held} for claim, held in stage.checks]
        told = {"ok": ok, **vars(outcome), "seconds": round(stage.seconds, 3), "checks": checks}
        print(json.dumps(told), flush=True)
    stage.conclude("All of it was right." if ok else "Something was not right.", ok)
    return ok
