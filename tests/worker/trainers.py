"""Workers on one event loop that train a state in which every step shows.

The state is one number, a function of the steps that were applied to it and of their order: a step that was lost or
applied twice shows at once, in every worker.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forged.client import ForgedClient
from forged.elastic.config import ElasticTrainingConfig
from forged.kernel.messages import Fact, Record
from forged.worker.errors import StepAborted
from forged.worker.process.worker_process import SharedProcess
from forged.worker.session import WorkerSession
from forged.worker.worker import ElasticWorker

JOB = "run"
PRIME = 2_147_483_647
PATIENCE_S = 30.0
COMPUTING_S = 0.002
"""The duration of a step besides its collective, which leaves the processor to workers that wait."""
_CHAINS = [0]
_GROWING = threading.Lock()


def config(**settings: Any) -> ElasticTrainingConfig:
    """Settings with short windows and a tolerance for every failure."""
    soon = {"stability_window_ms": 0, "failure_window_ms": 5, "failure_tolerance_percentage": 100}
    return ElasticTrainingConfig(**(soon | settings))


def advance(chain: int, step: int) -> int:
    """One step."""
    return (chain * 31 + step + 1) % PRIME


def chain_after(steps: int) -> int:
    """The state after so many steps. Workers in several threads call this before each step."""
    with _GROWING:
        while len(_CHAINS) <= steps:
            _CHAINS.append(advance(_CHAINS[-1], len(_CHAINS) - 1))
    return _CHAINS[steps]


@dataclass(frozen=True)
class CommittedStep:
    """Generation, rank and world size of one step of a worker."""

    generation: int
    rank: int
    world_size: int
    step: int


def shared_worker(name: str, config: ElasticTrainingConfig | None = None, **options: Any) -> ElasticWorker:
    """A worker in a shared process."""
    return ElasticWorker(name, config, process=SharedProcess(), **options)


class Trainer:
    """A training script and its worker."""

    def __init__(self, group: TrainerGroup, name: str, *, job: str = JOB, **options: Any) -> None:
        self.group = group
        self.name = name
        self.state = {"chain": np.zeros(1, np.int64), "ballast": np.zeros(10_000)}
        self.worker = shared_worker(name, group.config, job=job, state=self.state, **options)
        self.committed_steps: list[CommittedStep] = []
        """Where it has done its committed steps."""
        self.rescales: list[Any] = []
        self.worker.rescaling_requested.subscribe(self.rescales.append)
        self.before_step: Callable[[int], Awaitable[None]] | None = None
        self.before_exchange: Callable[[int], Awaitable[None]] | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def chain(self) -> int:
        return int(self.state["chain"][0])

    @property
    def member(self) -> WorkerSession:
        """The worker's session while it is connected."""
        return self.worker._connected

    async def run(self) -> None:
        """Train until there are no more steps."""
        async with self.worker.session(*self.group.endpoints):
            await self.steps()

    async def steps(self) -> None:
        """The training loop inside the session."""
        while (begun := await self.worker.begin_step(self.group.total)) is not None:
            step = int(begun)
            assert self.chain == chain_after(step), f"{self.name} does not have the state after {step} steps"
            committed = CommittedStep(self.worker.generation, self.worker.rank, self.worker.world_size, step)
            if self.before_step is not None:
                await self.before_step(step)
            try:
                await self._exchange(step)
                self.state["chain"][0] = advance(self.chain, step)
            except StepAborted:
                pass
            if await self.worker.finish_step():
                self.committed_steps.append(committed)
                await self.group.moved()
            await asyncio.sleep(COMPUTING_S)

    async def _exchange(self, step: int) -> None:
        if self.before_exchange is not None:
            await self.before_exchange(step)
        count, steps = await self.worker.all_reduce(np.array([1, step]))
        assert (count, steps) == (self.worker.world_size, step * self.worker.world_size)

    def __repr__(self) -> str:
        done = "" if self.task is None or not self.task.done() else f", over: {self.task}"
        return f"{self.name}: step {self.worker.step}, {self.worker._state.view}{done}"


@dataclass
class TrainerGroup:
    """Trainers of one job."""

    endpoints: list[str]
    config: ElasticTrainingConfig | None
    total: int = 1_000_000_000
    trainers: dict[str, Trainer] = field(default_factory=dict)
    _moved: asyncio.Condition = field(default_factory=asyncio.Condition)

    def __getitem__(self, name: str) -> Trainer:
        return self.trainers[name]

    def make(self, *names: str, **options: Any) -> list[Trainer]:
        """Make trainers without starting them."""
        made = [Trainer(self, name, **options) for name in names]
        self.trainers |= {trainer.name: trainer for trainer in made}
        return made

    def start(self, *names: str, **options: Any) -> list[Trainer]:
        """Start trainers."""
        made = [self.trainers.get(name) or self.make(name, **options)[0] for name in names]
        for trainer in made:
            trainer.task = asyncio.create_task(trainer.run())
            trainer.task.add_done_callback(lambda _: asyncio.ensure_future(self.moved()))
        return made

    async def moved(self) -> None:
        """A trainer has done a step or ended."""
        async with self._moved:
            self._moved.notify_all()

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until a condition holds, which is checked whenever a trainer has done a step or ended."""
        try:
            async with asyncio.timeout(PATIENCE_S), self._moved:
                while not true():
                    self._check()
                    await self._moved.wait()
        except TimeoutError:
            raise AssertionError("\n".join(["nothing moves:", *map(repr, self.trainers.values())])) from None

    def _check(self) -> None:
        for trainer in self.trainers.values():
            if trainer.task is not None and trainer.task.done() and not trainer.task.cancelled():
                error = trainer.task.exception()
                if isinstance(error, AssertionError):
                    raise error

    def is_stopped(self) -> bool:
        """Whether the world of every trainer has stopped."""
        return all(trainer.worker._state.current_world.is_stopped for trainer in self.trainers.values())

    async def world_of(self, *names: str, steps: int = 2) -> None:
        """Wait until exactly these workers train together."""

        def together() -> bool:
            topologies = [self[name].worker.current_topology for name in names]
            ids = None if topologies[0] is None else {worker.id for worker in topologies[0].workers}
            if ids != set(names) or any(other != topologies[0] for other in topologies):
                return False
            generation = self[names[0]].worker.generation
            last = [[committed.generation for committed in self[name].committed_steps[-steps:]] for name in names]
            return all(generations == [generation] * steps for generations in last)

        await self.until(together)

    async def more_steps(self, *names: str, steps: int = 3) -> None:
        """Wait until these workers have done more steps."""
        goals = {name: self[name].worker.step + steps for name in names}
        await self.until(lambda: all(self[name].worker.step >= goal for name, goal in goals.items()))

    @asynccontextmanager
    async def rescaled(self, *names: str) -> AsyncIterator[None]:
        """Wait until the block has brought these workers into another world."""
        before = {name: self[name].worker.generation for name in names}
        yield
        await self.until(lambda: all(self[name].worker.generation > before[name] for name in names))

    async def over(self, *names: str) -> list[BaseException | None]:
        """Wait until these trainers have ended; returns what they raised."""
        tasks = [task for name in names if (task := self[name].task) is not None]
        await self.until(lambda: all(task.done() for task in tasks))
        return [task.exception() for task in tasks]

    async def finish(self, *names: str, steps: int = 3) -> None:
        """Let these workers complete the training together, and check the result."""
        self.total = max(trainer.worker.step for trainer in self.trainers.values()) + steps
        assert await self.over(*names) == [None] * len(names)
        for name in names:
            assert (self[name].worker.step, self[name].chain) == (self.total, chain_after(self.total)), self[name]
        self.check()

    def check(self) -> None:
        """Check that each rank of a world had one worker, and that no step was applied twice."""
        owners: dict[tuple[int, int], str] = {}
        sizes: dict[int, int] = {}
        for trainer in self.trainers.values():
            steps = [committed.step for committed in trainer.committed_steps]
            assert steps == sorted(set(steps)), f"{trainer.name} did a step twice"
            for committed in trainer.committed_steps:
                owner = owners.setdefault((committed.generation, committed.rank), trainer.name)
                assert owner == trainer.name, f"{owner} and {trainer.name} both had rank {committed.rank} of one world"
                assert sizes.setdefault(committed.generation, committed.world_size) == committed.world_size


@asynccontextmanager
async def group_at(*endpoints: str, **settings: Any) -> AsyncIterator[TrainerGroup]:
    """Trainers of one job, which are cancelled at the end of the block."""
    group = TrainerGroup(list(endpoints), config(**settings))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_cancel_all, group)
        yield group


async def _cancel_all(group: TrainerGroup) -> None:
    tasks = [trainer.task for trainer in group.trainers.values() if trainer.task is not None]
    for task in tasks:
        task.cancel()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*tasks, return_exceptions=True)


async def past(client: ForgedClient, *types: type[Fact]) -> list[Any]:
    """The facts of the job so far, the oldest first."""
    return [item.fact async for item in client.past_facts(*types, jobs=[JOB]) if isinstance(item, Record)]


async def all_connected(client: ForgedClient, *names: str) -> None:
    """Wait until the daemon is connected to exactly these workers."""
    async with asyncio.timeout(PATIENCE_S):
        while {view.id for view in await client.workers(JOB) if view.connected} != set(names):
            await asyncio.sleep(0.005)
