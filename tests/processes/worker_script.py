"""A training script that dies or waits at a point that the test names.

The state is a function of the applied steps and their order. It is checked before every step, and every step compares
it across all workers. Committed steps are reported on standard output, one line of JSON each.
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
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.model import Standstill
from forged.net.bulk import movers
from forged.worker.blocking import Training, join
from forged.worker.collectives.endpoints import Endpoint, HubEndpoint
from forged.worker.collectives.hub import Collected
from forged.worker.mesh import Mesh
from forged.worker.registration import Registration
from forged.worker.steps.step_loop import Step
from forged.worker.transport.peer_link import frame_of
from forged.worker.transport.peer_messages import CollectiveCall, Kind, Result
from forged.worker.worker import ElasticWorker
from tests.worker.trainers import advance

JOB = "run"
COMPUTING_S = 0.002
"""The duration of a step without its collective."""
FOREVER = -1
STOP_FILE, ARMED = "stop", "armed"
"""The files that ask for the end of the training, and arm the points."""

Action = Callable[[], Awaitable[None]]
Applies = Callable[..., bool]


def _always(*arguments: Any) -> bool:
    return True


def _calls(kind: Kind) -> Applies:
    def applies(endpoint: Endpoint, call: CollectiveCall, *others: Any) -> bool:
        return call.kind is kind

    return applies


@dataclass(frozen=True)
class Point:
    """A point where a worker executes an action: before or after a call of a method."""

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
    "in all_reduce": Point(Endpoint, "_answered", applies=_calls(Kind.ALL_REDUCE)),
    "in end_step": Point(Endpoint, "_answered", applies=_calls(Kind.END_STEP)),
}


def report(**what: Any) -> None:
    """Write a report at once."""
    os.write(sys.stdout.fileno(), json.dumps(what).encode() + b"\n")


def report_standstill(standstill: Standstill) -> None:
    report(standstill=standstill.peer, lasted_s=standstill.lasted_s)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def die() -> None:
    """Die of SIGKILL."""
    _die()


async def hold() -> None:
    """Wait until the test releases the worker."""
    report(held=True)
    await asyncio.to_thread(sys.stdin.readline)


ACTIONS: dict[str, Action] = {"die": die, "hold": hold}


class Countdown:
    """Counts hits from the time that the arming file exists."""

    def __init__(self, nth: int, armed: Path) -> None:
        self._left = nth
        self._armed = armed

    def hit(self, applies: bool = True) -> bool:
        """Count a hit if it applies; returns whether it is the last one."""
        self._left -= applies and self._armed.exists()
        return applies and self._left == 0 and self._armed.exists()


def stop_at(point: Point, action: Action, countdown: Countdown) -> None:
    """Execute the action at the point when the countdown ends."""
    original = getattr(point.owner, point.method)

    async def caught(*arguments: Any, **options: Any) -> Any:
        is_due = countdown.hit(point.applies(*arguments))
        if is_due and not point.behind:
            await action()
        outcome = await original(*arguments, **options)
        if is_due and point.behind:
            await action()
        return outcome

    setattr(point.owner, point.method, caught)


def die_after_partial_commit(countdown: Countdown) -> None:
    """The hub dies after it has sent the commit of a step to one member only."""
    tell = HubEndpoint._tell

    def tell_some(side: HubEndpoint, collected: Collected, full: Result) -> None:
        if countdown.hit(collected.call.kind is Kind.END_STEP):
            next(iter(side._links.values())).write(frame_of(full))
            _die()
        tell(side, collected, full)

    setattr(HubEndpoint, "_tell", tell_some)  # noqa: B010 - mypy has methods for constants


def die_while_sending(countdown: Countdown) -> None:
    """The state source dies in the middle of its state."""
    send = movers.send_buffer

    def send_half(sock: socket.socket, buffer: memoryview, **options: Any) -> None:
        if countdown.hit():
            send(sock, buffer[: len(buffer) // 2], **options)
            _die()
        send(sock, buffer, **options)

    setattr(movers, "send_buffer", send_half)  # noqa: B010


def die_while_receiving(countdown: Countdown) -> None:
    """The receiver dies in the middle of the state."""
    receive = movers.receive_into_buffer

    def receive_half(sock: socket.socket, buffer: memoryview, **options: Any) -> None:
        if countdown.hit():
            receive(sock, buffer[: len(buffer) // 2], **options)
            _die()
        receive(sock, buffer, **options)

    setattr(movers, "receive_into_buffer", receive_half)  # noqa: B010


SPECIAL = {
    "after a partial commit": die_after_partial_commit,
    "sending the state": die_while_sending,
    "receiving the state": die_while_receiving,
}


def hold_gil(seconds: int) -> None:
    """Hold the GIL, as a C library may: no other thread of the process runs."""
    ctypes.PyDLL(None).sleep(seconds)


class StepRecorder:
    """Checks the state before each step, and reports committed steps."""

    def __init__(self, worker: Training | ElasticWorker) -> None:
        self._worker = worker
        self._chains = [0]
        self._place: tuple[int, int, int, int] | None = None

    def begin(self, step: int) -> None:
        """Report the last step if it is committed, and check the state for the next one."""
        self.record_commit()
        chain = int(self._worker.state["chain"][0])
        assert chain == self.chain_after(step), f"the state {chain} does not result from {step} steps"
        self._place = (step, self._worker.generation, self._worker.rank, self._worker.world_size)

    def record_commit(self) -> None:
        """Report the last step if it is committed."""
        place, self._place = self._place, None
        if place is not None and self._worker.step > place[0]:
            report(step=place[0], generation=place[1], rank=place[2], size=place[3])

    def chain_after(self, steps: int) -> int:
        while len(self._chains) <= steps:
            self._chains.append(advance(self._chains[-1], len(self._chains) - 1))
        return self._chains[steps]


def steps(worker: Training) -> Iterator[Step]:
    """The steps to the end that the workers agree on, which each of them knows before it makes the last one."""
    for step in worker.steps():
        if worker.state["ends_at"][0] != FOREVER:
            break
        yield step
    else:
        return
    yield from worker.steps(int(worker.state["ends_at"][0]))


def agree_on_end(state: dict[str, Any], step: int, ending: int) -> None:
    """End after the next step, if a worker wants to end and no end is known."""
    if ending and state["ends_at"][0] == FOREVER:
        state["ends_at"][0] = step + 2


def train(worker: Training, stop_file: Path, gil_s: int, countdown: Countdown) -> None:
    """Train until the stop file exists."""
    state, recorder = worker.state, StepRecorder(worker)
    for step in steps(worker):
        recorder.begin(step)
        if gil_s and countdown.hit():
            hold_gil(gil_s)
        with step:
            time.sleep(COMPUTING_S)
            chain = int(state["chain"][0])
            mine = np.array([1, step, chain, stop_file.exists()], np.int64)
            count, places, chains, ending = worker.all_reduce(mine)
            assert (count, places, chains) == (worker.world_size, step * count, chain * count), "the states differ"
            state["chain"][0] = advance(chain, step)
            state["ballast"] += 1
            agree_on_end(state, step, ending)
    recorder.record_commit()
    assert state["chain"][0] == recorder.chain_after(worker.step)
    assert (state["ballast"] == worker.step).all()
    report(finished=worker.step)


def main() -> None:
    """Run a worker."""
    endpoint, name, directory, options = sys.argv[1], sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4])
    for point, action, nth in options["points"]:
        countdown = Countdown(nth, directory / ARMED)
        if point in SPECIAL:
            SPECIAL[point](countdown)
        else:
            stop_at(POINTS[point], ACTIONS[action], countdown)
    state = {
        "chain": np.zeros(1, np.int64),
        "ends_at": np.full(1, FOREVER, np.int64),
        "ballast": np.zeros(options["ballast"], np.int64),
    }
    config = ElasticTrainingConfig(**options["config"])
    with join(endpoint, job=JOB, state=state, worker_id=name, config=config) as worker:
        worker.worker.state_synchronized.subscribe(
            lambda event: report(entered=worker.generation, at=event.current_step)
        )
        worker.standstill.subscribe(report_standstill)
        train(worker, directory / STOP_FILE, options["gil_s"], Countdown(1, directory / ARMED))
