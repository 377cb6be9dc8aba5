"""Keeps the workers of a launch running until they have ended.

Invariants:
- After the first signal nothing is started any more. Workers that do not end in time are killed.
- A worker that is given up leaves the others training; it makes the launch fail unless the job is completed.
- No worker outlives `run`.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import anyio
from anyio.abc import TaskGroup

from forged.elastic.messages import ClusterView
from forged.elastic.phases import Phase
from forged.launch.console import Console
from forged.launch.guard import Guard
from forged.launch.job import LaunchedJob
from forged.launch.plan import LaunchPlan, worker_environment
from forged.launch.restarts import Finished, RestartHistory, in_words
from forged.launch.worker_process import WorkerProcess

LOOK_INTERVAL_S = 1.0
LOOK_INTERVAL_JOINING_S = 0.2
"""While workers wait to be taken in."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
SIGNALLED_EXIT = 128
EXIT_FAILED = 1


@dataclass
class Slot:
    """What became of the worker with one local rank."""

    rank: int
    log: Path | None
    restarts: int = 0
    code: int | None = None
    problem: str = ""
    process: WorkerProcess | None = None


@dataclass
class LaunchResult:
    """The end of a launch."""

    exit_code: int
    slots: list[Slot]
    view: ClusterView | None
    seconds: float


@dataclass
class Launcher:
    """The workers of one launch, and how they are kept; used once."""

    plan: LaunchPlan
    console: Console
    job: LaunchedJob
    guard: Guard
    endpoint: str
    token: str | None
    log_dir: Path | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def __post_init__(self) -> None:
        self._slots = [Slot(rank, self._log(rank)) for rank in map(self.plan.rank, range(self.plan.workers))]
        self._signal: signal.Signals | None = None
        self._has_to_end = anyio.Event()
        self._tasks: TaskGroup | None = None

    async def run(self) -> LaunchResult:
        """Start the workers, and return when all have ended."""
        began = time.monotonic()
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            tasks.start_soon(self._hear_signals)
            tasks.start_soon(self._look)
            async with anyio.create_task_group() as groups:
                for group in range(self.plan.groups):
                    groups.start_soon(self._keep, group)
            tasks.cancel_scope.cancel()
        self.console.progress("")
        view = await self.job.view()
        return LaunchResult(self._exit_code(view), self._slots, view, time.monotonic() - began)

    def _log(self, rank: int) -> Path | None:
        return None if self.log_dir is None else self.log_dir / f"rank-{rank}.log"

    def _exit_code(self, view: ClusterView | None) -> int:
        if view is not None and view.phase is Phase.COMPLETED:
            return 0
        if self._signal is not None:
            return SIGNALLED_EXIT + self._signal
        return EXIT_FAILED if any(slot.problem for slot in self._slots) else 0

    # Workers.

    async def _keep(self, group: int) -> None:
        """Run the workers of one group, again and again."""
        history = RestartHistory(self.plan.limits)
        slots = [self._slots[local_rank] for local_rank in self.plan.members(group)]
        while True:
            began = time.monotonic()
            code = await self._run_group(group, history.restarts)
            if self._signal is not None:
                return
            decision = history.ended(code, time.monotonic() - began, job_is_over=code != 0 and await self.job.is_over())
            if isinstance(decision, Finished):
                self._give_up(slots, decision.problem)
                return
            self.console.say(
                f"{_names(slots)} {in_words(code)}, and {'starts' if len(slots) == 1 else 'start'} again"
                f"{f' in {decision.after_s:g} s' if decision.after_s else ''}"
            )
            for slot in slots:
                slot.restarts += 1
            with anyio.move_on_after(decision.after_s):
                await self._has_to_end.wait()
            if self._signal is not None:
                return

    async def _run_group(self, group: int, restarts: int) -> int:
        """Run the workers of a group once; returns the first exit code that is not 0."""
        failures: list[int] = []
        async with anyio.create_task_group() as tasks:
            for local_rank in self.plan.members(group):
                process = await self._start(group, local_rank, restarts)
                tasks.start_soon(self._follow, group, self._slots[local_rank], process, failures)
        return failures[0] if failures else 0

    async def _start(self, group: int, local_rank: int, restarts: int) -> WorkerProcess:
        slot = self._slots[local_rank]
        slot.process = await WorkerProcess.start(
            self.plan.command,
            worker_environment(
                self.plan,
                local_rank,
                restarts=restarts,
                endpoint=self.endpoint,
                token=self.token,
                group=f"{socket.gethostname()}-{os.getpid()}-{group}-{restarts}",
                given=self.environment,
            ),
            rank=slot.rank,
            console=self.console,
            log=slot.log,
            guard=self.guard,
        )
        if self._signal is not None:
            slot.process.send(_passed_on(self._signal))
        return slot.process

    async def _follow(self, group: int, slot: Slot, process: WorkerProcess, failures: list[int]) -> None:
        slot.code = await process.run()
        if slot.code == 0:
            return
        failures.append(slot.code)
        if len(failures) == 1 and self._signal is None:
            await self._end_group(group)

    async def _end_group(self, group: int) -> None:
        """End the other workers of a broken group: they cannot train without it."""
        processes = [self._slots[local_rank].process for local_rank in self.plan.members(group)]
        running = [process for process in processes if process is not None and process.code is None]
        for process in running:
            process.send(signal.SIGTERM)
        with anyio.move_on_after(self.plan.drain_timeout_s):
            while any(process.code is None for process in running):
                await anyio.sleep(LOOK_INTERVAL_JOINING_S)
        for process in running:
            process.kill()

    def _give_up(self, slots: list[Slot], problem: str) -> None:
        if not problem:
            return
        first = next(slot for slot in slots if slot.code)
        for slot in slots:
            slot.problem = problem
        lines = first.process.last_lines if first.process is not None else []
        shown = "".join(f"\n    {line}" for line in lines)
        said = f"the last lines of worker {first.rank}:{shown}" if lines else "it has printed nothing"
        self.console.say(f"{_names(slots)} {problem}; {said}")

    # Signals.

    async def _hear_signals(self) -> None:
        with anyio.open_signal_receiver(*SIGNALS) as signals:
            async for number in signals:
                self.stop(signal.Signals(number))

    def stop(self, number: signal.Signals) -> None:
        """Pass a signal on and start nothing more; the second Ctrl-C kills."""
        processes = [slot.process for slot in self._slots if slot.process is not None]
        if self._signal is signal.SIGINT is number:
            self.console.say("interrupted twice: kills the workers")
            for process in processes:
                process.kill()
            return
        is_first, self._signal = self._signal is None, number
        self._has_to_end.set()
        for process in processes:
            process.send(_passed_on(number))
        if is_first and self._tasks is not None:
            doing = "are interrupted" if number is signal.SIGINT else "drain"
            self.console.say(
                f"received {number.name}: the workers {doing}, for at most {self.plan.drain_timeout_s:g} s"
            )
            self._tasks.start_soon(self._kill_late)

    async def _kill_late(self) -> None:
        await anyio.sleep(self.plan.drain_timeout_s)
        late = [slot for slot in self._slots if slot.process is not None and slot.process.code is None]
        if late:
            self.console.say(f"{_names(late)} still ran after {self.plan.drain_timeout_s:g} s: killed")
        for slot in late:
            assert slot.process is not None
            slot.process.kill()

    # Progress.

    async def _look(self) -> None:
        """Follow the job: take joiners in, and show the progress."""
        before: tuple[float, int] | None = None
        while True:
            view = await self.job.view()
            if view is not None:
                await self.job.start_world(self._groups(), self.plan.hosts * self.plan.workers, view)
            now, step = time.monotonic(), 0 if view is None else view.state.current_step
            speed = (step - before[1]) / (now - before[0]) if before is not None and step >= before[1] else 0.0
            before = now, step
            self.console.progress(self._progress(view, speed))
            is_idle = view is not None and view.phase is Phase.RUNNING and not view.joining
            await anyio.sleep(LOOK_INTERVAL_S if is_idle else LOOK_INTERVAL_JOINING_S)

    def _groups(self) -> set[int]:
        """The process groups of the workers that run."""
        return {slot.process.pid for slot in self._slots if slot.process is not None and slot.process.code is None}

    def _progress(self, view: ClusterView | None, speed: float) -> str:
        restarts = sum(slot.restarts for slot in self._slots)
        tail = f", {restarts} restart{'s' if restarts > 1 else ''}" if restarts else ""
        if view is None:
            return f"{self.plan.workers} workers start{tail}"
        if view.phase is Phase.FORMING:
            return f"{view.joining} of {self.plan.hosts * self.plan.workers} workers have joined{tail}"
        phase = "" if view.phase is Phase.RUNNING else f" ({view.phase})"
        return f"step {view.state.current_step}{phase}, {view.world_size} workers, {speed:.1f} steps/s{tail}"


def _passed_on(number: signal.Signals) -> signal.Signals:
    """The signal for the workers: SIGTERM drains them."""
    return number if number is signal.SIGINT else signal.SIGTERM


def _names(slots: list[Slot]) -> str:
    numbers = ", ".join(f"{slot.rank}" for slot in slots)
    return f"worker {numbers}" if len(slots) == 1 else f"workers {numbers}"
