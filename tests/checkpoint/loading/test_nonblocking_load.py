"""Loads in the thread of the caller: of small checkpoints that are in memory, and of no others."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest

import forged.checkpoint
from forged.checkpoint import CheckpointValidator, DistributedCheckpoint, LoadOptions, SaveOptions
from forged.checkpoint.format.manifest import SUFFIX
from forged.checkpoint.ports import CancelToken, Storage, WouldBlock, bounded
from forged.checkpoint.storage.files import CACHED_BYTES_MAX, READ, CachedFiles
from forged.checkpoint.storage.local import CACHED_WHOLE_BYTES_MAX, LocalStorage
from forged.checkpoint.thread_calls import run_in_thread
from forged.file_sync import is_cached, open_cached
from tests.checkpoint.fixtures.memory_files import ROOT, MemoryFiles
from tests.checkpoint.fixtures.memory_storage import MemoryStorage

LOADS_MAX = 20
STATE = {"w": np.arange(300_000.0), "b": [np.ones(3), 5]}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint in memory."""
    (tmp_path / "probe").touch()
    try:
        os.close(open_cached(str(tmp_path / "probe"), READ))
    except OSError as error:
        if error.errno in {errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EPERM}:
            pytest.skip(f"{tmp_path} is not on a disk, or the kernel is too old: {error}")
        raise
    forged.checkpoint.save(tmp_path / "a", STATE)
    assert same_state(forged.checkpoint.load(tmp_path / "a"))
    return tmp_path


def same_state(state: Any) -> bool:
    return bool((state["w"] == STATE["w"]).all() and (state["b"][0] == 1).all() and state["b"][1] == 5)


def drop_from_memory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if is_cached(fd, 0):
            pytest.skip(f"the kernel keeps {path} in memory")
    finally:
        os.close(fd)


def part_of(saved: Path) -> Path:
    [part] = (saved / "a").glob("*.safetensors")
    return part


@pytest.mark.parametrize("is_new", [True, False])
def test_small_checkpoint_in_memory_is_loaded_without_a_thread(
    saved: Path, is_new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started() -> list[str]:
        names = threads_of_loads(monkeypatch)
        into = None if is_new else {"w": np.zeros(300_000), "b": [np.zeros(3), 0]}
        assert same_state(forged.checkpoint.load(saved / "a", into))
        return names

    # The kernel may drop a file between two loads.
    assert any(not started() for _ in range(LOADS_MAX))


async def test_event_loop_loads_small_checkpoint_without_a_thread(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = DistributedCheckpoint(storage=LocalStorage(saved))
    await one.save(STATE, options=SaveOptions("m"))
    in_thread = AsyncMock(side_effect=run_in_thread)
    monkeypatch.setattr("forged.checkpoint.thread_calls.run_in_thread", in_thread)
    for loads in range(1, LOADS_MAX + 1):
        assert same_state((await one.load(options=LoadOptions("m"))).model_state)
        if in_thread.await_count < loads:
            return
    pytest.fail("every load ran in a thread")


def threads_of_loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that are started from now on."""
    started: list[str] = []
    start = threading.Thread.start

    def record(thread: threading.Thread) -> None:
        started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", record)
    return started


@pytest.mark.parametrize("file", [part_of, lambda saved: saved / f"a{SUFFIX}"], ids=["part", "manifest"])
def test_file_that_is_not_in_memory_is_read_in_a_thread(
    saved: Path, file: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    drop_from_memory(file(saved))
    started = threads_of_loads(monkeypatch)
    assert same_state(forged.checkpoint.load(saved / "a"))
    assert started == ["checkpoint-call"]


def test_copy_of_a_corrupt_chunk_is_searched_in_a_thread(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forged.checkpoint.save(saved / "copy", STATE)
    part = part_of(saved)
    data = bytearray(part.read_bytes())
    data[-1000] ^= 1
    part.write_bytes(data)
    started = threads_of_loads(monkeypatch)
    assert same_state(forged.checkpoint.load(saved / "a"))
    assert started == ["checkpoint-call"]


def test_checkpoint_that_is_large_is_loaded_in_a_thread(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forged.checkpoint.save(saved / "large", {"w": np.zeros(CACHED_BYTES_MAX, np.uint8)})
    forged.checkpoint.save(saved / "many", [np.full(1, number) for number in range(2_000)])
    forged.checkpoint.save(saved / "packed", {"w": np.zeros(CACHED_BYTES_MAX, np.uint8)}, compression_level="fast")
    assert (saved / f"many{SUFFIX}").stat().st_size > CACHED_WHOLE_BYTES_MAX
    for name in ("large", "many", "packed"):
        started = threads_of_loads(monkeypatch)
        forged.checkpoint.load(saved / name)
        assert "checkpoint-call" in started, name


def test_directory_behind_a_link_is_read_in_a_thread(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (saved / "link").symlink_to(".")
    started = threads_of_loads(monkeypatch)
    assert same_state(forged.checkpoint.load(saved / "link" / "a"))
    assert started == ["checkpoint-call"]


def _without_openat2(monkeypatch: pytest.MonkeyPatch) -> None:
    # Linux has no system call of this number.
    monkeypatch.setattr("forged.file_sync._OPENAT2", 100_000)


def _in_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, flags: int) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr("forged.file_sync._open_cached", refuse)


def _without_nonblocking_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    read = os.preadv

    def refuse(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if flags & os.RWF_NOWAIT:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return read(fd, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", refuse)


@pytest.mark.parametrize("limit", [_without_openat2, _in_a_sandbox, _without_nonblocking_reads])
def test_checkpoint_is_loaded_in_a_thread_where_the_kernel_cannot_tell_what_is_in_memory(
    saved: Path, limit: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch)
    started = threads_of_loads(monkeypatch)
    assert same_state(forged.checkpoint.load(saved / "a"))
    assert started == ["checkpoint-call"]


async def test_checker_of_the_caller_runs_in_a_thread(saved: Path) -> None:
    idents: list[int] = []

    class Checker:
        name = "mine"

        def check(self, manifest: object, storage: Storage, token: CancelToken) -> list[Any]:
            idents.append(threading.get_ident())
            return []

    storage = LocalStorage(saved)
    await DistributedCheckpoint(storage=storage).save({"w": np.ones(3)}, options=SaveOptions("m"))
    for _ in range(2):
        one = DistributedCheckpoint(storage=storage, validator=CheckpointValidator(storage, [Checker()]))
        await one.load(options=LoadOptions("m"))
    assert len(idents) == 2
    assert threading.get_ident() not in idents


def test_storages_that_cannot_tell_what_is_in_memory_are_read_in_a_thread() -> None:
    token = CancelToken(60).nonblocking()
    for storage in (MemoryStorage(), LocalStorage(ROOT, files=MemoryFiles())):
        with pytest.raises(WouldBlock):
            bounded(storage, token)


def test_storage_that_may_not_wait_changes_nothing(saved: Path) -> None:
    storage = LocalStorage(saved).nonblocking()
    before = sorted(saved.rglob("*"))
    for act in (
        lambda: storage.publish("b", b"b"),
        lambda: storage.delete([f"a{SUFFIX}"]),
        lambda: storage.move(f"a{SUFFIX}", "b"),
        lambda: storage.sync_names([f"a{SUFFIX}"]),
        lambda: list(storage.entries()),
        storage.free_bytes,
    ):
        with pytest.raises(WouldBlock):
            act()
    assert sorted(saved.rglob("*")) == before


def test_large_file_is_not_opened_without_waiting(saved: Path) -> None:
    (saved / "large").write_bytes(bytes(CACHED_BYTES_MAX + 1))
    fd = open_cached(str(saved / "large"), READ)
    try:
        with pytest.raises(WouldBlock):
            CachedFiles().size(fd)
    finally:
        os.close(fd)
