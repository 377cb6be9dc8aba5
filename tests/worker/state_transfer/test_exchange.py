"""State transfers between real meshes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, cast

import anyio
import numpy as np
import pytest

from forged.elastic.messages import RescaleSynchronising
from forged.elastic.model import WorkerId
from forged.errors import ForgedError, RequestRefused, Unavailable
from forged.log import SILENT
from forged.net.transport.tls import TLS_FAILED
from forged.retry import RetryPolicy
from forged.worker.registration import Registration
from forged.worker.state_transfer import transfer
from forged.worker.state_transfer.transfer import StateExchange, StateFetch
from forged.worker.transport.peer_messages import HEAD_BYTES_MAX
from forged.worker.worker_state.progress import TrainingProgress
from tests.kernel_fixture import task_group
from tests.worker.meshes import PATIENCE_S, Meshes, open_meshes

SIZE = 1000


class RecordingRegistration:
    """Records the reports about a transfer."""

    def __init__(self) -> None:
        self.worker = WorkerId("w0", "127.0.0.1", 0)
        self.said: list[tuple[int, int, str, str]] = []
        self.heard = asyncio.Event()

    def receiving(self, attempt: int, received: int, *, problem: str, unreachable_peer: str) -> None:
        self.said.append((attempt, received, problem, unreachable_peer))
        self.heard.set()


class Pair:
    """A state source and a taker."""

    def __init__(self, made: Meshes, tasks: Any) -> None:
        self.made = made
        self.registration = RecordingRegistration()
        self.given: dict[str, Any] = {"w": np.arange(SIZE, dtype=np.float64), "step": 7}
        self.taken: dict[str, Any] = {"w": np.zeros(SIZE), "step": 0}
        given, taken = (TrainingProgress(0.0, 0, script_state=state) for state in (self.given, self.taken))
        registration = cast("Registration", self.registration)
        self.giver, self.taker = (
            StateExchange(mesh.state_server, mesh.state_fetch, registration, progress, tasks, SILENT)
            for mesh, progress in zip(made.meshes, (given, taken), strict=True)
        )

    def settled(self, source: WorkerId | None = None) -> RescaleSynchronising:
        return RescaleSynchronising(3, source or self.made.workers[0], 7, 1)

    @property
    def has_arrived(self) -> bool:
        return bool((self.taken["w"] == self.given["w"]).all()) and self.taken["step"] == 7


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PAUSE_S", 0.0)
    monkeypatch.setattr(transfer, "TELLING_INTERVAL_S", 0.01)
    monkeypatch.setattr(transfer, "FETCHING", RetryPolicy(attempts=2, delay_s=0.0, jitter=0.0))


pytestmark = pytest.mark.usefixtures("_impatient")


@asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    async with open_meshes(2) as made, task_group() as tasks, asyncio.timeout(PATIENCE_S):
        yield Pair(made, tasks)


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, *errors: ForgedError) -> Iterator[list[ForgedError]]:
    """The next fetches fail with these."""
    left, fetch = list(errors), StateFetch.fetch

    async def fail(self: StateFetch, source: WorkerId, attempt: int, into: Any) -> None:
        if left:
            raise left.pop(0)
        await fetch(self, source, attempt, into)

    with monkeypatch.context() as patch:
        patch.setattr(StateFetch, "fetch", fail)
        yield left


async def test_taker_receives_the_state_of_the_source() -> None:
    async with pair() as both:
        with both.giver.offering(3):
            await both.taker.take(both.settled())
        assert both.has_arrived


async def test_bytes_longer_than_a_head_are_transferred() -> None:
    async with pair() as both:
        both.given["optimizer"] = np.random.default_rng(1).bytes(HEAD_BYTES_MAX + 1)
        with both.giver.offering(3):
            await both.taker.take(both.settled())
        assert both.has_arrived
        assert both.taken["optimizer"] == both.given["optimizer"]


async def test_changes_after_the_offer_are_not_transferred() -> None:
    async with pair() as both:
        offering = both.giver.offering(3)
        both.given["step"] = 8
        with offering:
            await both.taker.take(both.settled())
        assert both.taken["step"] == 7


async def test_unreachable_source_is_reported_until_it_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair() as both:
        nobody = WorkerId("w9", "127.0.0.1", 1)
        async with task_group() as tasks:
            tasks.start_soon(both.taker.take, both.settled(nobody))
            while not (both.registration.said and both.registration.said[-1][3]):
                both.registration.heard.clear()
                await both.registration.heard.wait()
            tasks.cancel_scope.cancel()
        attempt, received, problem, unreachable_peer = both.registration.said[-1]
        assert (attempt, received, unreachable_peer) == (3, 0, "w9")
        assert "127.0.0.1:1" in problem
        with both.giver.offering(4):
            await both.taker.take(RescaleSynchronising(4, both.made.workers[0], 7, 1))
        assert both.made.meshes[1].state_fetch.unreached is None
        said = len(both.registration.said)
        await anyio.sleep(0.05)
        assert len(both.registration.said) == said, "a worker that has the state reports nothing more"


async def test_temporary_error_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair() as both:
        with failing(monkeypatch, Unavailable("away", "not now"), Unavailable("away", "not yet")) as left:
            with both.giver.offering(3):
                await both.taker.take(both.settled())
            assert left == []
        assert both.has_arrived


@pytest.mark.parametrize("code", [TLS_FAILED, "state_room_unfit"])
async def test_permanent_error_is_raised(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error = Unavailable(code, "no") if code == TLS_FAILED else RequestRefused(code, "no")
    async with pair() as both:
        with failing(monkeypatch, error), pytest.raises(ForgedError) as raised:
            await both.taker.take(both.settled())
        assert raised.value.code == code
        said = len(both.registration.said)
        await anyio.sleep(0.05)
        assert len(both.registration.said) == said
