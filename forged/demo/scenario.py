"""The scenario of `forged demo`: five events during a training run, the proof of its result, its model in production,
and a lost job restored.

Invariants:
- Every claim is checked, and every figure is measured in this run.
- Whatever ends the scenario, its processes end with it.
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
from forged.demo.checkpoints import FOLDER, SAVE_STEPS, checkpoints, resumed
from forged.demo.dataset import REPLICATION, SHARDS, misplaced
from forged.demo.learning import BATCH, SAMPLES, State, Task
from forged.demo.memory_restore import ALONE_JOB, GPU_BYTES, restore_from_memory
from forged.demo.model_release import release_model
from forged.demo.observer import ClusterObserver
from forged.demo.output import CYAN, DIM, GREEN, RED, Output
from forged.demo.processes import forgectl, nothing_left_behind
from forged.demo.records import Finished, Ready
from forged.demo.train import JOB, PARAMETERS, STOP_FILE
from forged.elastic.messages import (
    JobCompleted,
    ListWorkers,
    RescaleCompleted,
    RescaleStarted,
    WorkerFailed,
    WorkerLeft,
)
from forged.errors import ConfigError, ForgedError
from forged.launch.daemon_process import DaemonProcess
from forged.phrases import counted
from forged.registry.messages import ArtifactState
from forged.registry.model import DeploymentState, ModelVersion

DEADLINE_S = 120.0
"""Long enough for a very busy machine."""
PARTS = 6
ASK_INTERVAL_S = 0.05
FIRST_VERSION = ModelVersion(0, 1, 0)
"""The version that the registry gives to the first one of a model."""
TOLERANCE = 1e-9
"""Another order of summation moves the parameters by about 1e-14."""
PROBLEMS_SHOWN = 5
RUN_SHOWN = 16
STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
SIGNALLED = 128
"""The exit code of a process killed by signal N is 128 + N."""


@dataclass
class Outcome:
    """The measured results."""

    workers: int
    recovery_s: float | None = None
    """Seconds from the kill of a worker until all survivors have committed another step."""
    join_s: float | None = None
    """Seconds from the join of a new worker to its first committed step."""
    outage_s: float | None = None
    """Seconds without a daemon."""
    outage_steps: int | None = None
    """Steps committed during that time."""
    rescales: int = 0
    steps: int = 0
    covered: int = 0
    """Steps proven to have used each sample of their batch exactly once."""
    repeated: int = 0
    """Steps that were aborted and repeated."""
    shards_moved: int = 0
    """Shards transferred from one worker's directory to another's."""
    audit: dict[str, int | bool] = field(default_factory=dict)
    """The daemon's audit: finished epochs, samples per epoch, samples used in all, and whether each sample was
    used exactly once."""
    final_loss: float | None = None
    reference_loss: float | None = None
    parameters_differ_by: float | None = None
    """The largest difference between a parameter and the one of an uninterrupted run."""
    checkpoints: int = 0
    """Checkpoints saved during the training."""
    resumed_from: str = ""
    """The checkpoint from which a single process resumed."""
    resumed_differ_by: float | None = None
    """The largest difference between a parameter of that process and the workers' result."""
    emergency_save_s: float | None = None
    """Seconds from the kill of a job's only worker until its last copied step was durable."""
    emergency_steps_lost: int | None = None
    """The committed steps that this worker had to repeat."""
    gpu_bytes_freed: int | None = None
    """The GPU memory that the death of this worker has freed."""
    model_serving: str = ""
    """The version of the model that serves at the end."""
    canary_rollback_s: float | None = None
    """Seconds from the report about a bad canary until the registry had rolled it back."""
    problems: list[str] = field(default_factory=list)


class Scenario:
    """One run of the demo."""

    def __init__(self, output: Output, directory: Path, socket: Path, workers: int, steps: int) -> None:
        self.outcome = Outcome(workers)
        self._output = output
        self._directory = directory
        self._size = workers
        self._steps = steps
        self._some = max(1, steps // PARTS)
        """The minimum number of steps per part."""
        self._daemon = DaemonProcess(directory / "daemon", socket, directory / "daemon.log")
        self._observer = ClusterObserver(output, self._daemon, directory, self._some)

    async def run(self) -> None:
        """Run the scenario; failures are recorded in the outcome."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                await self._run_parts()
        except TimeoutError:
            self._fail(f"timed out after {DEADLINE_S:g} s while waiting for {self._observer.waiting_for}")
        except ForgedError as error:
            self._fail(error.message)
        finally:
            await self._end()

    def _fail(self, why: str) -> None:
        self._check("the demo ran to its end", [why])

    async def _end(self) -> None:
        workers = self._observer.workers.values()
        for worker in workers:
            worker.kill()
        for worker in workers:
            await worker.wait()
        await self._daemon.stop()

    async def _run_parts(self) -> None:
        await self._begin()
        unix = f"unix://{self._daemon.socket}"
        async with self._observer.subscribed(unix) as client:
            (tcp,) = (await client.status()).listen
            await self._gather(tcp)
            await self._lose_worker()
            await self._gain_worker(tcp)
            await self._lose_daemon(client, tcp)
            await self._drain_worker()
            await self._prove(client)
            await self._release(client)
            await self._restore_from_memory(tcp)
        code = await self._daemon.stop()
        self._check("the daemon stops on request with exit code 0", [] if code == 0 else [f"its exit code is {code}"])

    # The parts.

    async def _begin(self) -> None:
        self._output.step(
            f"Start a daemon and {self._size} workers",
            "Each is a process of its own. The daemon keeps its state in an SQLite file. The workers train a small",
            f"network with numpy; each step divides {BATCH} samples among them. The dataset has {SHARDS} shards. The",
            f"workers store {1 + REPLICATION} copies of each in their own directories: at first from the origin of the",
            "data, later from each other.",
        )
        ready_s = await self._daemon.start()
        self._output.note(f"the daemon (pid {self._daemon.pid}) is ready after {duration(ready_s)}")

    async def _gather(self, endpoint: str) -> None:
        for number in range(self._size):
            await self._observer.enter(f"w{number}", endpoint, self._size)
        await self._observer.until(lambda: len(self._observer.members) == self._size, "a world of all workers")
        await self._train("the first steps")

    async def _lose_worker(self) -> None:
        observer = self._observer
        hub, generation = observer.members[0], observer.topology.epoch
        self._output.step(
            "Kill a worker in the middle of a step",
            f"{hub} has rank 0, the hub that adds up the gradients. It gets kill -9 without any warning. The",
            "survivors keep running: they repeat the interrupted step and divide its samples among themselves. Workers",
            "with the second copies of its shards take them over, and new second copies are made.",
        )
        survivors = observer.members[1:]
        victim = observer.workers[hub]
        victim.may_end = True
        killed_at = time.monotonic()
        victim.kill()
        self._output.note(f"kill -9 {victim.pid} ({hub})", RED)
        await observer.until(lambda: self._back(survivors, generation) is not None, "the survivors' next step")
        back_at = self._back(survivors, generation)
        assert back_at is not None
        self.outcome.recovery_s = round(back_at - killed_at, 4)
        self._output.note(
            f"{duration(back_at - killed_at)} from the kill to the next committed step of all survivors", GREEN
        )
        await observer.until(lambda: observer.last_fact(WorkerFailed, hub) is not None, "WorkerFailed from the daemon")
        self._report_moved_shards()
        await self._train("steps without the killed worker")

    async def _gain_worker(self, endpoint: str) -> None:
        observer, name = self._observer, f"w{self._size}"
        generation = observer.topology.epoch
        self._output.step(
            "Add a worker",
            "The other workers train until it has joined, and stop between two steps to admit it. It receives the",
            "parameters and the momentum directly from another worker. It gets its share of the shards; no other shard",
            "moves.",
        )
        await observer.enter(name, endpoint, self._size)
        await observer.until(lambda: self._back([name], generation) is not None, "the new worker's first step")
        started_at = next(entry.at for entry in observer.logs[name] if isinstance(entry, Ready))
        first_at = self._back([name], generation)
        assert first_at is not None
        self.outcome.join_s = round(first_at - started_at, 4)
        self._output.note(f"{duration(first_at - started_at)} from its join request to its first committed step", GREEN)
        self._report_moved_shards()
        await self._train("steps with the new worker")

    async def _lose_daemon(self, client: ForgedClient, endpoint: str) -> None:
        observer, before = self._observer, self._observer.members
        rescales = self._rescales_begun()
        self._output.step(
            "Kill the daemon and restart it",
            "Workers exchange gradients directly and need the daemon only to change the world, so training continues",
            "without it. The new daemon reads the state of the job from its file; the workers reconnect by themselves",
            "and keep their ranks.",
        )
        killed_at = time.monotonic()
        await self._daemon.kill()
        self._output.note(f"kill -9 {self._daemon.pid} (the daemon)", RED)
        await self._train("steps without a daemon")
        ready_s = await observer.observe_during(self._daemon.start(endpoint), "a new daemon")
        back_at = time.monotonic()
        observer.update()
        self.outcome.outage_s = round(back_at - killed_at, 4)
        self.outcome.outage_steps = min(
            audit.commits_between(observer.logs[name], killed_at, back_at) for name in before
        )
        self._output.note(
            f"a new daemon (pid {self._daemon.pid}) is ready after {duration(ready_s)};"
            f" {self.outcome.outage_steps} steps were committed without a daemon",
            GREEN,
        )
        ranks = await self._all_back(client, before)
        self._output.note("all workers have reconnected")
        await self._train("steps with the new daemon")
        changed = [] if ranks == before and observer.members == before else [f"the ranks were {before} and are {ranks}"]
        if self._rescales_begun() != rescales:
            changed.append("the world was rescaled")
        self._check("the workers kept their ranks, without a rescale", changed)

    async def _drain_worker(self) -> None:
        observer = self._observer
        drained = observer.members[-1]
        self._output.step(
            "Drain a worker",
            "An operator needs its machine. The worker finishes its step, hands over its shards and leaves; no step is",
            "lost or repeated.",
        )
        worker = observer.workers[drained]
        worker.may_end = True
        self._output.note(f"$ forgectl workers drain {drained} --reason maintenance", CYAN)
        words = ("workers", "drain", drained, "--reason", "maintenance")
        self._output.quote(await observer.observe_during(forgectl(self._daemon.socket, *words), "forgectl"))
        await observer.until(lambda: observer.last_fact(WorkerLeft, drained) is not None, f"{drained} to leave")
        await observer.until(lambda: drained not in observer.members, f"a world without {drained}")
        await observer.until(lambda: worker.code is not None, f"the end of {drained}")
        self._check(
            f"{drained} left by itself with exit code 0",
            [] if worker.code == 0 else [f"{worker.code}: {worker.last_log_line}"],
        )
        await self._train("steps without the drained worker")
        await observer.until(lambda: observer.steps >= self._steps, f"step {self._steps}")

    async def _prove(self, client: ForgedClient) -> None:
        observer, finishers = self._observer, self._observer.members
        self._output.step(
            "Prove the result",
            "Each worker recorded the samples of a step before it used them. These records are now compared with each",
            "other, with the daemon's journal, and with an uninterrupted training run in one process.",
        )
        for name in finishers:
            observer.workers[name].may_end = True
        (self._directory / STOP_FILE).touch()
        await observer.until(
            lambda: all(observer.workers[name].code is not None for name in finishers), "the workers to finish"
        )
        await observer.until(lambda: observer.last_fact(JobCompleted) is not None, "the job to be completed")
        failed = observer.last_fact(WorkerFailed)
        assert failed is not None, "an earlier part waited for it"
        self._output.note(f"$ forgectl story {failed.id}", CYAN)
        asking = forgectl(self._daemon.socket, "story", f"{failed.id}")
        self._output.quote(await observer.observe_during(asking, "forgectl story"))
        self._audit(finishers)
        await self._audit_data(client, finishers)
        self._compare(finishers)
        await self._resume(finishers)

    def _audit(self, finishers: Sequence[str]) -> None:
        logs, decided = self._observer.logs, self._observer.worlds
        codes = [f"{name} exited with {code}" for name in finishers if (code := self._observer.workers[name].code)]
        self._check("all remaining workers exited with code 0", codes)
        told, problems = audit.worlds_of(logs)
        self._check(
            f"all workers and the daemon agree on the worlds of all {len(decided)} generations",
            problems + audit.world_mismatches(told, decided),
        )
        covered = audit.coverage(logs, told, BATCH)
        self.outcome.steps, self.outcome.covered = covered.steps, covered.covered
        self.outcome.repeated = covered.repeated
        self.outcome.rescales = sum(isinstance(one.fact, RescaleCompleted) for one in self._observer.facts)
        self._check(
            f"each of the {covered.steps:,} steps used each of its {BATCH} samples exactly once"
            f" ({counted(covered.repeated, 'step')} repeated)",
            covered.problems,
        )
        self._check("each worker committed its steps in order, each step once", audit.order_problems(logs))
        self._check(
            f"{', '.join(finishers)} have the same parameters, bit for bit",
            audit.end_problems(logs, finishers, covered.steps),
        )

    async def _audit_data(self, client: ForgedClient, finishers: Sequence[str]) -> None:
        """Check the daemon's audit of the samples, and the shards in the directories."""
        self._output.note(f"$ forgectl data audit --job {JOB}", CYAN)
        asking = forgectl(self._daemon.socket, "data", "audit", "--job", JOB)
        self._output.quote(await self._observer.observe_during(asking, "the audit"))
        last = await client.audit_data(JOB)
        audits = [await client.audit_data(JOB, epoch) for epoch in range(last.epoch)] + [last]
        problems = audit.audit_problems(audits, self.outcome.steps * BATCH)
        self.outcome.audit = {
            "epochs": last.epoch,
            "samples": last.samples,
            "used": sum(one.used for one in audits),
            "complete": not problems,
        }
        self._check(
            f"each of the {last.epoch:,} finished epochs used each of its {SAMPLES:,} samples exactly once", problems
        )
        self.outcome.shards_moved = sum(map(_moved, self._transfers().values()))
        moved = [] if self.outcome.shards_moved else ["no shard was transferred"]
        self._check(f"the workers transferred {self.outcome.shards_moved} shards to each other", moved)
        owners = await client.shard_owners(JOB)
        self._check(
            f"each of the {SHARDS} shards is with its owner and has all copies, byte for byte as at the origin",
            misplaced(self._directory, owners, finishers, Task().samples),
        )
        ends = [entry for name in finishers for entry in self._observer.logs[name] if isinstance(entry, Finished)]
        here, total = sum(end.read_here for end in ends), sum(end.read_here + end.read_at_origin for end in ends)
        self._output.note(
            f"{', '.join(finishers)} read {here / max(1, total):.0%} of their samples from their own directories", DIM
        )

    def _compare(self, finishers: Sequence[str]) -> None:
        task, steps = Task(), self.outcome.steps
        learnt: State = {"parameters": np.load(self._directory / f"{finishers[0]}{PARAMETERS}")}
        reference = task.train_alone(steps)
        self.outcome.final_loss, self.outcome.reference_loss = task.loss(learnt), task.loss(reference)
        distance = float(np.abs(learnt["parameters"] - reference["parameters"]).max())
        self.outcome.parameters_differ_by = distance
        too_far = [] if distance <= TOLERANCE else [f"a parameter differs by {distance:g}"]
        self._check(f"the parameters equal those of an uninterrupted run (largest difference {distance:.1e})", too_far)
        self._output.note(
            f"loss {self.outcome.final_loss:.12f}, uninterrupted {self.outcome.reference_loss:.12f};"
            f" {task.accuracy(learnt):.1%} of the points are classified correctly",
            DIM,
        )

    async def _resume(self, finishers: Sequence[str]) -> None:
        """Resume from the last checkpoint in this process."""
        found = checkpoints(self._directory)
        self.outcome.checkpoints = len(found)
        self._check("the workers saved checkpoints during the training", [] if found else ["there is no checkpoint"])
        if not found:
            return
        last = found[-1]
        place = f"{FOLDER}/{last.prefix}"
        self._output.note(f"$ forgectl ckpt verify {place}", CYAN)
        verifying = forgectl(self._daemon.socket, "ckpt", "verify", str(self._directory / place))
        self._output.quote(await self._observer.observe_during(verifying, "forgectl ckpt verify"))
        state, steps = resumed(self._directory, last.prefix, Task(), self.outcome.steps)
        learnt = np.load(self._directory / f"{finishers[0]}{PARAMETERS}")
        distance = float(np.abs(state["parameters"] - learnt).max())
        self.outcome.resumed_from, self.outcome.resumed_differ_by = last.prefix, distance
        self._check(
            f"one process that resumes from {last.prefix} (saved by {counted(last.world_size, 'rank')}) gets the same"
            f" result after {counted(steps, 'step')} (largest difference {distance:.1e})",
            [] if distance <= TOLERANCE else [f"a parameter differs by {distance:g}"],
        )

    async def _release(self, client: ForgedClient) -> None:
        if not self.outcome.checkpoints:
            return
        found = await release_model(client, self._observer, self._output, self._directory)
        serving, canary = found.serving.metadata, found.canary.metadata
        self.outcome.model_serving, self.outcome.canary_rollback_s = f"{serving.version}", round(found.rollback_s, 4)
        kept = [] if canary.state is DeploymentState.STAGING else [f"{canary.version} is {canary.state}"]
        if serving.version != FIRST_VERSION:
            kept.append(f"{serving.version} serves")
        self._check(f"the registry itself rolled {canary.version} back, and {FIRST_VERSION} serves", kept)
        lineage = found.serving.lineage
        step = int(self.outcome.resumed_from.removeprefix("step-"))
        is_known = lineage is not None and (lineage.job, lineage.step) == (JOB, step)
        self._check(
            f"its lineage leads to {self.outcome.resumed_from} of job {JOB}",
            [] if is_known else [f"it is {lineage}"],
        )
        damaged = [] if found.files.state is ArtifactState.SOUND else [found.files.problem]
        self._check(f"every byte of {FIRST_VERSION} is what was registered", damaged)

    async def _restore_from_memory(self, endpoint: str) -> None:
        found = await restore_from_memory(self._observer, self._output, self._directory / ALONE_JOB, endpoint)
        self.outcome.emergency_save_s = round(found.saved_s, 4)
        self.outcome.emergency_steps_lost = max(0, found.committed - found.restored)
        self.outcome.gpu_bytes_freed = found.freed_bytes
        newer = [] if found.restored > SAVE_STEPS else [f"it continued after step {found.restored}"]
        lost = [] if self.outcome.emergency_steps_lost <= 1 else [f"it continued after step {found.restored}"]
        self._check(
            f"it continued after step {found.restored} of {found.committed}; on disk was step {SAVE_STEPS}",
            newer + lost,
        )
        held = [] if found.freed_bytes == GPU_BYTES else [f"{found.freed_bytes} bytes are free, not {GPU_BYTES}"]
        self._check("its death freed the GPU memory that it held", held)
        self._check(
            f"its parameters equal those of an uninterrupted run (largest difference {found.differ_by:.1e})",
            [] if found.differ_by <= TOLERANCE else [f"a parameter differs by {found.differ_by:g}"],
        )

    # Helpers.

    async def _train(self, what: str) -> None:
        """Wait until all members have committed some more steps."""
        goal = self._observer.steps + self._some
        await self._observer.until(lambda: self._observer.steps >= goal, what)

    def _transfers(self) -> dict[int, TransferTotals]:
        """The completed transfers, by attempt."""
        facts = [one.fact for one in self._observer.facts]
        done = {fact.attempt for fact in facts if isinstance(fact, TransfersCompleted)}
        planned = (fact for fact in facts if isinstance(fact, TransfersPlanned))
        return {fact.attempt: fact.totals for fact in planned if fact.attempt in done}

    def _report_moved_shards(self) -> None:
        """Print the transfers for the latest world."""
        completed = self._observer.last_fact(RescaleCompleted)
        assert completed is not None
        assert isinstance(completed.fact, RescaleCompleted)
        totals = self._transfers().get(completed.fact.attempt)
        if totals is not None:
            self._output.note(
                f"{_moved(totals)} shards came from other workers, {totals.from_origin} from the origin", GREEN
            )

    def _back(self, workers: Sequence[str], generation: int) -> float | None:
        """When all these workers had committed a step in a later generation; None before that."""
        times = [audit.first_commit(self._observer.logs.get(worker, []), above=generation) for worker in workers]
        known = [at for at in times if at is not None]
        return max(known) if len(known) == len(workers) else None

    def _rescales_begun(self) -> int:
        return sum(isinstance(one.fact, RescaleStarted) for one in self._observer.facts)

    async def _all_back(self, client: ForgedClient, workers: Sequence[str]) -> list[str]:
        """Wait until these workers have reconnected to the daemon; returns them by rank."""
        self._observer.waiting_for = "the workers to reconnect"
        while True:
            page = await client.request(ListWorkers(JOB))
            there = [one for one in page.workers if one.connected]
            if {one.id for one in there} >= set(workers):
                return [one.id for one in sorted(there, key=lambda one: one.rank)]
            await asyncio.sleep(ASK_INTERVAL_S)
            self._observer.update()

    def _check(self, claim: str, problems: Sequence[str]) -> None:
        self._output.check(claim, not problems)
        for problem in problems[:PROBLEMS_SHOWN]:
            self._output.note(problem, RED)
        if len(problems) > PROBLEMS_SHOWN:
            self._output.note(f"... and {len(problems) - PROBLEMS_SHOWN:,} more", RED)
        self.outcome.problems += problems


def _moved(totals: TransferTotals) -> int:
    """The number of transfers from worker to worker."""
    return totals.from_owners + totals.from_replicas


def run_demo(workers: int, steps: int, keep: Path | None, *, as_json: bool) -> bool:
    """Run the demo; returns whether all checks passed."""
    output = Output(quiet=as_json, run_shown=RUN_SHOWN)
    with tempfile.TemporaryDirectory(prefix="forged-demo-") as temporary:
        directory = _new_directory(keep, Path(temporary) / "kept")
        scenario = Scenario(output, directory, Path(temporary) / "forged.sock", workers, steps)
        with nothing_left_behind():
            _run(scenario)
    if keep is not None:
        output.note(f"records, logs and state are in {directory}")
    return _finish(output, scenario.outcome, as_json=as_json)


def _run(scenario: Scenario) -> None:
    received: list[signal.Signals] = []
    try:
        asyncio.run(_run_until_signal(scenario, received))
    except asyncio.CancelledError:
        # The exit code of a process that the signal has killed.
        raise SystemExit(SIGNALLED + received[0]) from None


async def _run_until_signal(scenario: Scenario, received: list[signal.Signals]) -> None:
    """Run the scenario until it ends or a signal stops it."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def stop(number: signal.Signals) -> None:
        received.append(number)
        task.cancel()

    for number in STOP_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            loop.add_signal_handler(number, stop, number)
    await scenario.run()


def _new_directory(keep: Path | None, otherwise: Path) -> Path:
    """An empty directory for the files of the demo."""
    directory = keep or otherwise
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        is_empty = not any(directory.iterdir())
    except OSError as error:
        raise ConfigError(
            "keep_unusable", f"{directory}: {error.strerror}", "set --keep to a directory that you own"
        ) from error
    if not is_empty:
        raise ConfigError("keep_in_use", f"{directory} is not empty", "set --keep to a new directory")
    return directory.resolve()


def _finish(output: Output, outcome: Outcome, *, as_json: bool) -> bool:
    ok = not outcome.problems and all(held for _, held in output.checks)
    if as_json:
        checks = [{"claim": claim, "held": held} for claim, held in output.checks]
        told = {"ok": ok, **vars(outcome), "seconds": round(output.seconds, 3), "checks": checks}
        print(json.dumps(told), flush=True)
    output.finish_output("All checks passed." if ok else "Some checks failed.", ok)
    return ok
