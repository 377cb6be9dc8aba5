"""A daemon's store, journal, ledger and bus on virtual time, without network, and one service that owns state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any, ClassVar, ParamSpec

import anyio
from anyio.abc import TaskGroup

from forged.auth.model import Principal, Role
from forged.kernel.bus import Bus
from forged.kernel.journal import Journal
from forged.kernel.ledger import Ledger
from forged.kernel.messages import Call, Decision, Fact, Record, Request, Signal
from forged.kernel.pending import Pending
from forged.kernel.store.port import Store
from tests.faulty_store import FaultyStore
from tests.simulation.environment.loop import VirtualClock, run

P = ParamSpec("P")

WAIT_MAX_S = 3600.0
"""The virtual time limit of a test in seconds."""
TOTAL_KEY = "tally/total"
OPERATOR = Principal("an operator", Role.OPERATOR)
CLIENT = b"c" * 16


class Added(Fact, frozen=True):
    """The tally was increased."""

    amount: int
    total: int


class Echoed(Fact, frozen=True):
    """A handler has reacted to a fact."""

    of: int


class Add(Request[int], frozen=True):
    """Increase the tally; returns the total."""

    job_field: ClassVar[str | None] = None

    amount: int = 1


class ReadTotal(Request[int], frozen=True):
    """Read the durable total."""

    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = None


class Tick(Signal, frozen=True):
    """A periodic signal."""

    external: ClassVar[bool] = True
    job_field: ClassVar[str | None] = None

    at: float


class Level(Signal, frozen=True):
    """A signal with a key."""

    job_field: ClassVar[str | None] = None

    name: str
    height: int = 0

    @property
    def key(self) -> str:
        return self.name


class Tally:
    """A state owner with one number."""

    def __init__(self) -> None:
        self.total = 0
        self.loads = 0

    async def load(self, store: Store) -> None:
        """Reload the number from the store."""
        entry = await store.get(TOTAL_KEY)
        self.total = int(entry.value) if entry else 0
        self.loads += 1

    def add(self, amount: int) -> Decision[int]:
        """Increase the number in memory and return the decision."""
        self.total += amount
        return Decision(self.total, (Added(amount, self.total),), {TOTAL_KEY: b"%d" % self.total})


class Kernel:
    """The parts of a daemon's core. Register handlers in `register` of `running`."""

    def __init__(self, store: Store, *, facts_max: int = 50_000) -> None:
        self.store = store
        self.clock = VirtualClock(asyncio.get_running_loop())
        self.journal = Journal(facts_max)
        self.bus = Bus(self.clock)
        self.ledger = Ledger(store, self.journal, self.clock, self.bus)
        self.tally = Tally()
        self.ledger.register(self.tally)
        self.bus.serve(Add, lambda request, _: self.tally.add(request.amount), owner="tally")
        self.bus.serve(ReadTotal, lambda *_: self.tally.total, owner="tally")

    def submit(self, amount: int = 1) -> Pending:
        """Submit an `Add`."""
        return self.bus.submit(Add(amount), call())

    async def add(self, amount: int = 1) -> int:
        """Increase the tally and wait until that is durable."""
        total: int = await self.submit(amount).wait()
        return total

    async def settle(self) -> None:
        """Wait until all decisions are durable and all facts handled."""
        await self.bus.drain()

    def facts(self, fact_type: type[Fact] | None = None) -> list[Any]:
        """The facts in the journal, oldest first."""
        records = self.journal.after(0, len(self.journal))
        return [record.fact for record in records if fact_type is None or isinstance(record.fact, fact_type)]


@asynccontextmanager
async def task_group() -> AsyncIterator[TaskGroup]:
    """A task group that is cancelled at the end of the block; an earlier cancellation is an error."""
    whole = False
    async with anyio.create_task_group() as tasks:
        yield tasks
        whole = True
        tasks.cancel_scope.cancel()
    assert whole, "a task has cancelled the task group"


@asynccontextmanager
async def running(
    store: Store | None = None,
    register: Callable[[Kernel], object] = lambda kernel: None,
    *,
    requests: Sequence[type[Request[Any]]] = (),
    facts_max: int = 50_000,
) -> AsyncIterator[Kernel]:
    """A kernel that runs inside the block and is killed at its end: nothing is drained."""
    kernel = Kernel(store or FaultyStore(), facts_max=facts_max)
    register(kernel)
    kernel.bus.seal(requests, kernel.ledger)
    async with task_group() as tasks:
        await kernel.ledger.start()
        tasks.start_soon(kernel.ledger.run)
        await tasks.start(kernel.bus.run)
        yield kernel


def call(number: int = 0, acknowledged: int = 0, digest: int = 0, **more: Any) -> Call:
    """A call by an operator's client; with number 0 its reply is not remembered."""
    client = CLIENT if number else b""
    return Call(OPERATOR, "a test", client=client, number=number, acknowledged=acknowledged, digest=digest, **more)


def ids(records: Sequence[Record]) -> list[int]:
    """The ids of the records."""
    return [record.id for record in records]


def on_virtual_time(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run a test on its own virtual loop."""

    @wraps(test)
    def run_it(*args: P.args, **kwargs: P.kwargs) -> None:
        async def within_reason() -> None:
            with anyio.fail_after(WAIT_MAX_S):
                await test(*args, **kwargs)

        run(within_reason, test.__name__)

    return run_it
