"""States that can no longer be packed, or not be loaded, when another worker takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from forged.client import ForgedClient
from forged.elastic.messages import JobAborted, ProgressLost, WorkerFailed
from forged.errors import RequestRefused
from tests.client.daemon_runner import DaemonRunner
from tests.telemetry.recording_log import RecordingLog
from tests.worker.trainers import TrainerGroup, all_connected, group_at, past


class Handle:
    """A value that no transfer takes."""


class Optimizer:
    """As an optimizer of a framework: empty at first, with values of its own after the first step."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.error: Exception | None = None

    def state_dict(self) -> Mapping[str, Any]:
        if self.error is not None:
            raise self.error
        return self.values

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.values = dict(state)


class Unloadable(Optimizer):
    """An optimizer of another shape than the one whose state it is given."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise KeyError("momentum")


def spoil(group: TrainerGroup, *names: str, error: Exception | None = None) -> None:
    """Make the states of trainers unfit for a transfer."""
    for name in names:
        optimizer = Optimizer()
        optimizer.error = error
        optimizer.values["groups"] = [{"momentum": Handle()}]
        state: dict[str, Any] = group[name].state
        state["optimizer"] = optimizer


@pytest.mark.parametrize("synchronous", [True, False], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("givers", [1, 2])
@pytest.mark.parametrize("raises", [False, True], ids=["unpackable", "raises"])
async def test_state_that_cannot_be_packed_fails_the_joiner_and_the_givers_train_on(
    raises: bool, givers: int, synchronous: bool, runner: DaemonRunner, client: ForgedClient
) -> None:
    names = ["a", "b"][:givers]
    async with group_at(runner.endpoint, use_synchronous_rescaling=synchronous) as group:
        group.start(*names)
        await group.world_of(*names, steps=5)
        spoil(group, *names, error=ValueError("the device is gone") if raises else None)
        group.start("joiner")
        (error,) = await group.over("joiner")
        assert isinstance(error, RequestRefused), error
        assert error.code == "state_unfit"
        assert error.message.startswith("the state of a cannot be transferred: ")
        cause = "ValueError: the device is gone, raised by state_dict() of state['optimizer'] (class Optimizer)"
        assert (cause if raises else "state['optimizer']['groups'][0]['momentum'] is a Handle") in error.message
        await group.world_of(*names)
        await group.more_steps(*names)
        await group.finish(*names)
    assert not {fact.worker_id for fact in await past(client, WorkerFailed)}.intersection(names)
    assert await past(client, JobAborted, ProgressLost) == []


async def test_state_that_the_joiner_cannot_load_fails_the_joiner(
    runner: DaemonRunner, client: ForgedClient, group: TrainerGroup
) -> None:
    state: dict[str, Any] = group.make("a")[0].state
    state["optimizer"] = Optimizer()
    group.start("a")
    await group.world_of("a", steps=5)
    given: dict[str, Any] = group.make("joiner")[0].state
    given["optimizer"] = Unloadable()
    group.start("joiner")
    (error,) = await group.over("joiner")
    assert isinstance(error, RequestRefused), error
    assert error.code == "state_not_loaded"
    await group.world_of("a")
    await group.finish("a")
    assert await past(client, JobAborted, ProgressLost) == []


async def test_missing_memory_at_the_giver_fails_the_joiner_only(client: ForgedClient, group: TrainerGroup) -> None:
    group.start("a")
    await group.world_of("a", steps=5)
    spoil(group, "a", error=MemoryError("unable to allocate 3 GiB"))
    group.start("joiner")
    (error,) = await group.over("joiner")
    assert isinstance(error, RequestRefused), error
    assert error.code == "state_too_large"
    await group.world_of("a")
    await group.finish("a")
    assert await past(client, JobAborted, ProgressLost) == []


async def test_draining_worker_with_an_unfit_state_says_so_and_leaves_after_its_timeout(
    runner: DaemonRunner, client: ForgedClient
) -> None:
    log = RecordingLog()
    async with group_at(runner.endpoint, leave_timeout_ms=2_000, max_workers=1) as group:
        group.start("a", log=log)
        await group.world_of("a", steps=5)
        spoil(group, "a")
        group.start("joiner")
        await all_connected(client, "a", "joiner")
        group["a"].worker.drain("its host is taken away")
        (error,) = await group.over("joiner")
        assert isinstance(error, RequestRefused), error
        assert error.code == "state_unfit"
        assert await group.over("a") == [None]
    (refused, *_) = log.of("this worker's state cannot be given to another worker")
    assert "state['optimizer']['groups'][0]['momentum'] is a Handle" in refused["reason"]
