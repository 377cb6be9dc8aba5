"""A training script in a process of its own, which dies, or waits, at a point that a test has named.

The state is a function of how many steps were applied to it, and of their order; it is looked at before every step, and
every step compares it with everybody else's. What is committed is told on standard output, a line of JSON each.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forged.elastic.config import ElasticTrainingConfig
from forged.net.bulk import movers
from forged.worker.blocking import Training, join
from forged.worker.collectives.endpoints import HubEndpoint
from forged.worker.collectives.hub import Collected
from forged.worker.collectives.world import World
from forged.worker.daemon.registration import Registration
from forged.worker.mesh import Mesh
from forged.worker.transport.peer_link import frame_of
from forged.worker.transport.peer_messages import Call, Kind, Result
from forged.worker.worker import ElasticWorker
from tests.worker.crew import advance

JOB = "run"
COMPUTING_S = 0.002
"""What a step takes besides its collective."""
FOREVER = -1
ENOUGH, ARMED = "enough", "armed"
"""Files whose presence asks for the end of the training, and lets the points count."""

Act = Callable[[], Awaitable[None]]
Applies = Callable[..., bool]


def _always(*arguments: Any) -> bool:
    return True


def _calls(kind: Kind) -> Applies:
    def applies(world: World, call: Call, *others: Any) -> bool:
        return call.kind is kind

    return applies


@dataclass(frozen=True)
class Point:
    """Where a worker can be caught: at the beginning of a method, or behind it."""

    owner: type[Any]
    method: str
    behind: bool = False
    applies: Applies = _always


POINTS = {
    "joining": Point(Registration, "join"),
    "joined": Point(Registration, "join", behind=True),
    "stopping": Point(Registration, "stopped"),
    "stopped": Point(Registration, "stopped", behind=True),
    "having the state": Point(Registration, "ready"),
    "ready": Point(Registration, "ready", behind=True),
    "entering": Point(Mesh, "enter"),
    "entered": Point(Mesh, "enter", behind=True),
    "in all_reduce": Point(World, "_answered", applies=_calls(Kind.ALL_REDUCE)),
    "in end_step": Point(World, "_answered", applies=_calls(Kind.END_STEP)),
}


def say(**what: Any) -> None:
    """One line, at once."""
    os.write(sys.stdout.fileno(), json.dumps(what).encode() + b"\n")


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def die() -> None:
    """What the kernel does when memory is short."""
    _die()


async def hold() -> None:
    """Wait until the test says a word."""
    say(held=True)
    await asyncio.to_thread(sys.stdin.readline)


ACTS: dict[str, Act] = {"die": die, "hold": hold}


class Due:
    """Whether the time has come: behind so many hits, counted from when a file is there."""

    def __init__(self, nth: int, armed: Path) -> None:
        self._left = nth
        self._armed = armed

    def hit(self, applies: bool = True) -> bool:
        """Count, if it applies; tells whether this is the one."""
        self._left -= applies and self._armed.exists()
        return applies and self._left == 0 and self._armed.exists()


def catch(point: Point, act: Act, due: Due) -> None:
    """Act at the point when it is time."""
    original = getattr(point.owner, point.method)

    async def caught(*arguments: Any, **options: Any) -> Any:
        is_due = due.hit(point.applies(*arguments))
        if is_due and not point.behind:
            await act()
        outcome = await original(*arguments, **options)
        if is_due and point.behind:
            await act()
        return outcome

    setattr(point.owner, point.method, caught)


def die_having_told_some(due: Due) -> None:
    """The hub says to one member alone that a step is committed."""
    tell = HubEndpoint._tell

    def tell_some(side: HubEndpoint, collected: Collected, full: Result) -> None:
        if due.hit(collected.call.kind is Kind.END_STEP):
            next(iter(side._links.values())).write(frame_of(full))
            _die()
        tell(side, collected, full)

    setattr(HubEndpoint, "_tell", tell_some)  # noqa: B010 - mypy has methods for constants


def die_giving(due: Due) -> None:
    """The source dies in the middle of the large part of its state."""
    send = movers.send_buffer

    def send_half(sock: socket.socket, buffer: memoryview, **options: Any) -> None:
        if due.hit():
            send(sock, buffer[: len(buffer) // 2], **options)
            _die()
        send(sock, buffer, **options)

    setattr(movers, "send_buffer", send_half)  # noqa: B010


def die_taking(due: Due) -> None:
    """The receiver dies in the middle of the large part of the state."""
    receive = movers.receive_into_buffer

    def receive_half(sock: socket.socket, buffer: memoryview, **options: Any) -> None:
        if due.hit():
            receive(sock, buffer[: len(buffer) // 2], **options)
            _die()
        receive(sock, buffer, **options)

    setattr(movers, "receive_into_buffer", receive_half)  # noqa: B010


SPECIAL = {"having told some": die_having_told_some, "giving": die_giving, "taking": die_taking}


def hold_the_gil(seconds: int) -> None:
    """What a library in C may do: nothing else of this process runs meanwhile."""
    ctypes.PyDLL(None).sleep(seconds)


class Account:
    """What this worker knows of what it has done."""

    def __init__(self, worker: Training | ElasticWorker) -> None:
        self._worker = worker
        self._chains = [0]
        self._place: tuple[int, int, int, int] | None = None

    def begin(self, step: int) -> None:
        """Tell of the last step if it counts, and see that this one begins where it should."""
        self.settle()
        chain = int(self._worker.state["chain"][0])
        assert chain == self.chain_behind(step), f"{chain} is not where {step} steps lead"
        self._place = (step, self._worker.generation, self._worker.rank, self._worker.world_size)

    def settle(self) -> None:
        """Tell of the last step, if it counts."""
        place, self._place = self._place, None
        if place is not None and self._worker.step > place[0]:
            say(step=place[0], generation=place[1], rank=place[2], size=place[3])

    def chain_behind(self, steps: int) -> int:
        while len(self._chains) <= steps:
            self._chains.append(advance(self._chains[-1], len(self._chains) - 1))
        return self._chains[steps]


def train(worker: Training, enough: Path, gil_s: int, due: Due) -> None:
    """Train until somebody says that it is enough."""
    state, account = worker.state, Account(worker)
    for step in worker.steps():
        if step == int(state["ends_at"][0]):
            break
        account.begin(step)
        if gil_s and due.hit():
            hold_the_gil(gil_s)
        with step:
            time.sleep(COMPUTING_S)
            chain = int(state["chain"][0])
            mine = np.array([1, step, chain, enough.exists()], np.int64)
            count, steps, chains, ending = worker.all_reduce(mine)
            assert (count, steps, chains) == (worker.world_size, step * count, chain * count), "the states differ"
            state["chain"][0] = advance(chain, step)
            state["ballast"] += 1
            state["ends_at"][0] = step + 1 if ending else FOREVER
    account.settle()
    for _ in worker.steps(worker.step):
        raise AssertionError("no step is left")
    assert state["chain"][0] == account.chain_behind(worker.step)
    assert (state["ballast"] == worker.step).all()
    say(finished=worker.step)


def main() -> None:
    """Be a worker."""
    endpoint, name, directory, options = sys.argv[1], sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4])
    for point, act, nth in options["points"]:
        due = Due(nth, directory / ARMED)
        if point in SPECIAL:
            SPECIAL[point](due)
        else:
            catch(POINTS[point], ACTS[act], due)
    state = {
        "chain": np.zeros(1, np.int64),
        "ends_at": np.full(1, FOREVER, np.int64),
        "ballast": np.zeros(options["ballast"], np.int64),
    }
    config = ElasticTrainingConfig(**options["config"])
    with join(endpoint, job=JOB, state=state, worker_id=name, config=config) as worker:
        worker.worker.state_synchronized.subscribe(lambda told: say(entered=worker.generation, at=told.current_step))
        train(worker, directory / ENOUGH, options["gil_s"], Due(1, directory / ARMED))
