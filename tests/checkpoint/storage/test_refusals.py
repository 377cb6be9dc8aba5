"""Refusals of any system call, once or for ever: a typed error or success, and no partial checkpoint."""

from __future__ import annotations

import errno
from contextlib import suppress
from functools import partial
from itertools import islice, product
from typing import Any, get_args

import numpy as np
import pytest

from forged.checkpoint import checkpoint
from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.ports import CancelToken
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.local import LocalStorage
from tests.checkpoint.crashes.crash_trials import (
    BEFORE,
    COMPACT,
    CONVERT,
    DELETE,
    SAVE,
    SAVE_INCREMENT,
    SHORT,
    Action,
    Group,
    Lasting,
    after_fault,
    after_power_cuts,
    after_refusals,
    before,
    failing_from,
    operations,
)
from tests.checkpoint.crashes.save_history import AT, Finder, load_all, same, state
from tests.checkpoint.crashes.test_crash_states import WORLDS
from tests.checkpoint.fixtures.faulty_files import Act, Fault, NthFails, with_fault
from tests.checkpoint.fixtures.memory_files import EMPTY, MemoryFiles
from tests.sweeps import share

FOREGROUND = [world for world in WORLDS[:5] if not world.in_background]
DONE = [(world, action) for world in FOREGROUND for action in (SAVE, DELETE)] + [(Group(), CONVERT)]
DONE += [(Group(), SAVE_INCREMENT), (Group(2), SAVE_INCREMENT), (Group(), COMPACT)]
NUMBERS = {
    "short": SHORT,
    "EIO": errno.EIO,
    "ENOSPC": errno.ENOSPC,
    "EINTR": errno.EINTR,
    "ETIMEDOUT": errno.ETIMEDOUT,
}
WAYS = [way for way in product(NUMBERS.values(), get_args(Lasting)) if way[0] != SHORT]
TURNS = 4
"""So each operation is refused once, with all of its kind, and with all behind it, each time with another error."""
PASSING = [errno.EIO, errno.EINTR, errno.ETIMEDOUT]


@pytest.mark.parametrize("lasting", get_args(Lasting))
@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize(("world", "action"), DONE, ids=str)
def test_no_refusal_leaves_a_partial_checkpoint_or_files(
    world: Group, number: int, lasting: Lasting, action: Action
) -> None:
    image = before(world, action)
    names = operations(world, image, action)
    moments = (
        [moment for moment, name in enumerate(names) if name == "write"]
        if number == SHORT
        else share(len(names), WAYS.index((number, lasting)), TURNS)
    )
    assert list(islice(after_refusals(world, image, action, number, lasting, moments=moments), 5)) == []


def test_a_refusal_in_the_background_leaves_nothing_half_there_and_nothing_for_ever() -> None:
    """The ranks may then learn of each other's failure too late or never; the operation ends at its timeout."""
    world = Group(2, in_background=True, timeout_s=0.3)
    assert list(islice(after_refusals(world, before(world), SAVE, errno.EIO, "once"), 5)) == []


@pytest.mark.parametrize("action", [SAVE, DELETE], ids=["save", "delete"])
@pytest.mark.parametrize("number", PASSING, ids=["EIO", "EINTR", "ETIMEDOUT"])
@pytest.mark.parametrize("world", [Group(retries=2), Group(2, in_background=True, retries=2)], ids=str)
def test_temporary_refusal_is_retried(world: Group, number: int, action: Action) -> None:
    image = before(world)
    for first in share(len(operations(world, image, action)), PASSING.index(number), len(PASSING), first=1):
        is_synced = False
        refuse = failing_from(first, number, "once")

        def fault(count: int, name: str, act: Act, first: int = first, refuse: Fault = refuse) -> Any:
            nonlocal is_synced
            is_synced |= count == first and name == "sync_directory"
            return refuse(count, name, act)

        try:
            action.act(world.history(world.disk(image), fault))
        except CheckpointException:
            assert is_synced, "all else is tried again"
            assert number != errno.EINTR


@pytest.mark.parametrize("is_new", [True, False], ids=["new", "used"])
@pytest.mark.parametrize(
    "world", [Group(retries=2), Group(2, retries=2), Group(retries=2, lacking=("unnamed",))], ids=str
)
def test_save_fails_on_a_failed_directory_sync_and_the_next_is_durable(world: Group, is_new: bool) -> None:
    """A second sync may succeed, and tells nothing of what the first one was to write."""
    image = EMPTY if is_new else before(world)
    again = world._replace(options=(("seed", 1),))
    for nth in range(100):
        memory = world.disk(image)
        fault = NthFails(nth, "sync_directory", errno.EIO)
        with suppress(CheckpointException):
            world.history(memory, fault).save("new", 2)
            assert not fault.has_come
        if not fault.has_come:
            break
        assert memory.image.files == image.files
        again.history(memory).save("new", 2)
        assert list(islice(after_power_cuts(memory, Finder(world.size), {} if is_new else BEFORE), 5)) == []
    assert 2 < nth < 99


class Clock:
    """A clock that jumps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("world", "action"), DONE[:4], ids=str)
def test_an_operation_that_takes_too_long_ends_it_in_time(
    world: Group, action: Action, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = before(world)
    found: list[str] = []
    for first in range(len(operations(world, image, action))):
        clock = Clock()
        monkeypatch.setattr(checkpoint, "CancelToken", partial(CancelToken, monotonic=clock))

        def slow(number: int, name: str, act: Act, first: int = first, clock: Clock = clock) -> Any:
            result = act()
            if number == first:
                clock.now += 1e6
            return result

        found += after_fault(world, image, action, slow)
    assert found == []


def test_a_save_that_takes_too_long_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, memory = Clock(), MemoryFiles()
    monkeypatch.setattr(checkpoint, "CancelToken", partial(CancelToken, monotonic=clock))

    def slow(number: int, name: str, act: Act) -> Any:
        clock.now += 1e6 if name == "reserve" else 0
        return act()

    with pytest.raises(CheckpointException) as caught:
        Group().history(memory, slow).save("new", 1)
    assert caught.value.type is ExceptionType.TIMEOUT
    assert memory.image.files == {}


@pytest.mark.parametrize("lasting", get_args(Lasting))
@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
def test_load_under_faults_is_correct_or_raises(number: int, lasting: Lasting) -> None:
    image = before(Group(2))
    outcomes: list[bool | str] = []
    wanted = [state(1, rank, 2) for rank in range(2)]
    for first in range(1, 100):
        memory = MemoryFiles(image)
        storage = LocalStorage(AT, files=with_fault(memory, failing_from(first, number, lasting)))
        try:
            outcomes.append(all(map(same, load_all(storage, "old"), wanted)))
        except CheckpointException as error:
            outcomes.append(error.code)
        assert memory.descriptors == 0
    assert outcomes[-1] is True, "no load takes so many operations"
    assert False not in outcomes


def test_a_read_that_gives_less_is_gone_on_with() -> None:
    memory = MemoryFiles(before(Group()))

    def fault(number: int, name: str, act: Act) -> Any:
        if name != "read":
            return act()
        assert isinstance(act, partial)
        fd, room, offset = act.args
        return act.func(fd, room[: max(1, len(room) // 3)], offset)

    [found] = load_all(LocalStorage(AT, files=with_fault(memory, fault)), "old")
    assert same(found, state(1))


def test_a_list_that_cannot_be_read_is_an_error_and_not_empty() -> None:
    memory = MemoryFiles(before(Group()))
    for first in range(1, 3):
        storage = LocalStorage(AT, files=with_fault(memory, failing_from(first, errno.EIO, "once")))
        with pytest.raises(CheckpointException):
            listing.prefixes(storage)


def test_write_failure_of_one_rank_fails_the_save_at_all_ranks() -> None:
    """Only one of two disks is full, and both ranks are told."""
    memory = MemoryFiles()

    def fault(number: int, name: str, act: Act) -> Any:
        if name == "reserve":
            raise OSError(errno.ENOSPC, "full")
        return act()

    with pytest.raises(CheckpointException) as caught:
        Group(2).history(memory, fault).save("new", 1)
    assert caught.value.code == "checkpoint_disk_full"
    assert memory.image.files == {}


def test_states_of_different_ranks_and_versions_differ() -> None:
    """Else the trials could not tell one from the other."""
    states = [state(version, rank, 2) for version in (1, 2) for rank in (0, 1)]
    assert len({one["rows"].local.tobytes() for one in states}) == len(states)
    assert len({one["own"].value["numbers"].tobytes() for one in states}) == 4
    assert not np.array_equal(states[0]["w"], states[2]["w"])
