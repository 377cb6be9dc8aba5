from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine
from functools import partial
from random import Random
from typing import TypeVar

import pytest

from tests.simulation.environment.disk import GOOD, DiskFaults, SimulatedDisk
from tests.simulation.environment.loop import run

T = TypeVar("T")
OLD, NEW = b"synced", b"not synced, and long enough to be torn"


def outcomes(act: Callable[[SimulatedDisk], Coroutine[object, object, T]], faults: DiskFaults = GOOD) -> list[T]:
    """The results of an action under many seeds."""
    return [run(partial(act, SimulatedDisk(Random(seed), faults)), seed) for seed in range(100)]


async def with_old(disk: SimulatedDisk) -> None:
    disk.append("log", OLD)
    await disk.sync("log")
    await disk.sync_directory()


async def with_failed_sync(disk: SimulatedDisk) -> None:
    """Append to the old bytes new ones, whose sync fails."""
    await with_old(disk)
    disk.append("log", NEW)
    disk.faults = DiskFaults(sync_fails=1)
    with pytest.raises(OSError) as raised:
        await disk.sync("log")
    assert raised.value.errno == errno.EIO
    disk.faults = GOOD


def test_power_cut_keeps_synced_bytes_and_may_tear_others() -> None:
    async def act(disk: SimulatedDisk) -> bytes:
        await with_old(disk)
        disk.append("log", NEW)
        assert disk.read("log") == OLD + NEW
        return disk.crash().read("log")

    found = outcomes(act)
    assert all(content.startswith(OLD) for content in found)
    assert {OLD, OLD + NEW} < set(found)
    torn = set(found) - {OLD, OLD + NEW}
    assert any((OLD + NEW).startswith(content) for content in torn)
    assert any(content.endswith(b"\0") for content in torn)


def test_kill_keeps_all_bytes_and_the_synced_length() -> None:
    async def act(disk: SimulatedDisk) -> bytes:
        await with_old(disk)
        disk.append("log", NEW)
        after = disk.kill()
        assert after.read("log") == OLD + NEW
        return after.crash().read("log")

    assert {OLD, OLD + NEW} < set(outcomes(act))


def test_no_operation_of_a_dead_process_succeeds_or_has_an_effect() -> None:
    async def act(disk: SimulatedDisk) -> None:
        await with_old(disk)
        disk.append("log", NEW)
        sync = asyncio.ensure_future(disk.sync("log"))
        await asyncio.sleep(0)
        after = disk.kill()
        for operation in (
            lambda: disk.append("log", b"x"),
            lambda: disk.truncate("log", 0),
            lambda: disk.replace("log", "other"),
            lambda: disk.read("log"),
            disk.names,
            disk.kill,
            disk.crash,
        ):
            with pytest.raises(OSError, match="killed"):
                operation()
        for waiting in (sync, disk.sync("log"), disk.sync_directory()):
            with pytest.raises(OSError, match="killed"):
                await waiting
        assert after.read("log") == OLD + NEW

    outcomes(act)


def test_sync_takes_time_and_covers_the_bytes_at_its_start() -> None:
    async def act(disk: SimulatedDisk) -> tuple[float, bytes]:
        await with_old(disk)
        began_s = asyncio.get_running_loop().time()
        sync = asyncio.ensure_future(disk.sync("log"))
        await asyncio.sleep(0)
        disk.append("log", NEW)
        await sync
        return asyncio.get_running_loop().time() - began_s, disk.crash().read("log")

    found = outcomes(act)
    assert all(GOOD.sync_s[0] <= took_s <= GOOD.sync_s[1] for took_s, _ in found)
    assert {OLD, OLD + NEW} < {content for _, content in found}


def test_syncs_of_one_file_at_once_are_all_kept() -> None:
    async def act(disk: SimulatedDisk) -> bytes:
        await with_old(disk)
        syncs = []
        for byte in b"abcd":
            disk.append("log", bytes([byte]))
            syncs.append(asyncio.ensure_future(disk.sync("log")))
            await asyncio.sleep(0)
        await asyncio.gather(*syncs)
        return disk.crash().read("log")

    assert set(outcomes(act)) == {OLD + b"abcd"}


def test_a_truncation_that_was_not_synced_may_be_undone_by_a_power_cut() -> None:
    async def act(disk: SimulatedDisk) -> bytes:
        await with_old(disk)
        disk.truncate("log", 2)
        assert disk.read("log") == OLD[:2]
        return disk.crash().read("log")

    assert {OLD[:2], OLD} <= set(outcomes(act))


def test_a_synced_truncation_holds() -> None:
    async def act(disk: SimulatedDisk) -> bytes:
        await with_old(disk)
        disk.append("log", NEW)
        disk.truncate("log", 2)
        disk.append("log", b"!")
        await disk.sync("log")
        return disk.crash().read("log")

    assert set(outcomes(act)) == {OLD[:2] + b"!"}


def test_a_truncation_during_a_sync_is_not_covered_by_it() -> None:
    async def act(disk: SimulatedDisk) -> bytes:
        await with_old(disk)
        sync = asyncio.ensure_future(disk.sync("log"))
        await asyncio.sleep(0)
        disk.truncate("log", 2)
        await sync
        disk.append("log", b"other")
        await disk.sync("log")
        return disk.crash().read("log")

    assert set(outcomes(act)) == {OLD[:2] + b"other"}


def test_a_new_file_is_there_after_a_power_cut_only_if_its_directory_was_synced() -> None:
    async def act(disk: SimulatedDisk) -> tuple[str, ...]:
        disk.append("log", NEW)
        await disk.sync("log")
        return disk.crash().names()

    assert set(outcomes(act)) == {(), ("log",)}


def test_a_kill_does_not_make_a_new_name_durable() -> None:
    async def act(disk: SimulatedDisk) -> tuple[str, ...]:
        disk.append("log", NEW)
        return disk.kill().crash().names()

    assert set(outcomes(act)) == {(), ("log",)}


def test_a_sync_of_the_directory_covers_the_names_there_were_when_it_began() -> None:
    async def act(disk: SimulatedDisk) -> tuple[str, ...]:
        disk.append("before", OLD)
        sync = asyncio.ensure_future(disk.sync_directory())
        await asyncio.sleep(0)
        disk.append("meanwhile", OLD)
        await sync
        return disk.crash().names()

    assert set(outcomes(act)) == {("before",), ("before", "meanwhile")}


def test_a_replacement_is_all_or_nothing_and_durable_by_the_sync_of_the_directory() -> None:
    async def act(disk: SimulatedDisk) -> bytes:
        await with_old(disk)
        disk.append("new", NEW)
        await disk.sync("new")
        disk.replace("new", "log")
        assert disk.read("log") == NEW
        return disk.crash().read("log")

    async def act_and_sync(disk: SimulatedDisk) -> bytes:
        await with_old(disk)
        disk.append("new", NEW)
        await disk.sync("new")
        disk.replace("new", "log")
        await disk.sync_directory()
        after = disk.crash()
        assert after.names() == ("log",)
        return after.read("log")

    assert set(outcomes(act)) == {OLD, NEW}
    assert set(outcomes(act_and_sync)) == {NEW}


def test_a_replacement_by_a_file_that_was_not_synced_may_lose_both() -> None:
    async def act(disk: SimulatedDisk) -> bytes:
        await with_old(disk)
        disk.append("new", NEW)
        disk.replace("new", "log")
        return disk.crash().read("log")

    assert {OLD, NEW, b""} < set(outcomes(act))


def test_full_disk_writes_the_fitting_part_and_raises() -> None:
    async def act(disk: SimulatedDisk) -> None:
        await with_old(disk)
        disk.capacity_bytes = len(OLD) + 3
        with pytest.raises(OSError) as raised:
            disk.append("log", NEW)
        assert raised.value.errno == errno.ENOSPC
        assert disk.read("log") == OLD + NEW[:3]
        disk.truncate("log", len(OLD))
        disk.append("log", b"abc")

    outcomes(act)


def test_a_failing_append_writes_some_part() -> None:
    async def act(disk: SimulatedDisk) -> bytes:
        with pytest.raises(OSError) as raised:
            disk.append("log", NEW)
        assert raised.value.errno == errno.EIO
        return disk.read("log")

    found = set(outcomes(act, DiskFaults(append_fails=1)))
    assert len(found) > 10
    assert all(NEW.startswith(content) for content in found)


def test_after_a_failed_sync_another_one_succeeds_without_making_it_durable() -> None:
    async def act(disk: SimulatedDisk) -> bytes:
        await with_failed_sync(disk)
        await disk.sync("log")
        assert disk.read("log") == OLD + NEW
        return disk.crash().read("log")

    found = set(outcomes(act))
    assert len(found) > 10
    assert all(content.startswith(OLD) for content in found)


def test_bytes_synced_after_a_failed_sync_are_durable_after_a_gap() -> None:
    async def act(disk: SimulatedDisk) -> bytes:
        await with_failed_sync(disk)
        disk.append("log", b"later")
        await disk.sync("log")
        return disk.crash().read("log")

    found = set(outcomes(act))
    assert all(len(content) == len(OLD + NEW + b"later") for content in found)
    assert all(content.startswith(OLD) and content.endswith(b"later") for content in found)
    assert OLD + bytes(len(NEW)) + b"later" in found


def test_bytes_appended_after_a_failed_sync_and_truncate_become_durable() -> None:
    async def act(disk: SimulatedDisk) -> bytes:
        await with_failed_sync(disk)
        disk.truncate("log", len(OLD))
        disk.append("log", b"again")
        await disk.sync("log")
        return disk.crash().read("log")

    assert set(outcomes(act)) == {OLD + b"again"}


def test_a_failed_sync_of_the_directory_leaves_the_names_in_doubt() -> None:
    async def act(disk: SimulatedDisk) -> tuple[str, ...]:
        disk.append("log", OLD)
        with pytest.raises(OSError):
            await disk.sync_directory()
        return disk.crash().names()

    assert set(outcomes(act, DiskFaults(directory_sync_fails=1))) == {(), ("log",)}


def test_operations_on_a_missing_file_raise() -> None:
    async def act(disk: SimulatedDisk) -> None:
        for operation in (
            lambda: disk.read("absent"),
            lambda: disk.truncate("absent", 0),
            lambda: disk.replace("absent", "log"),
        ):
            with pytest.raises(FileNotFoundError):
                operation()
        with pytest.raises(FileNotFoundError):
            await disk.sync("absent")

    outcomes(act)
