"""A daemon whose checkpoints are on a full disk: what is kept stays whole, and work goes on when there is room."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forged import checkpoint
from forged.catalog.files import work_queue
from forged.catalog.messages import CheckpointCollected, CheckpointCompacted, CheckpointOperationFailed
from forged.checkpoint import BlockingCheckpoint, DistributedCheckpoint, SaveOptions
from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.local import LocalStorage
from forged.checkpoint.storage.os_errors import translated
from forged.client import ForgedClient
from tests.catalog.files.test_stored_files import chain_of_two, files_in
from tests.catalog.files.test_stored_in_bucket import JOB, adopt, client, configure, until, until_told
from tests.small_disk import fill, small_disk
from tests.worker.trainers import PATIENCE_S, past

__all__ = ["client"]

DISK_MIB = 16
MIB = 1 << 18
"""So many float32 are one MiB."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", DISK_MIB) as disk:
        yield disk


def state_at(step: int) -> dict[str, Any]:
    return {"w": np.full(MIB, step, np.float32), "same": np.arange(MIB, dtype=np.float32)}


def save(folder: Path, step: int, *, in_background: bool = False, **options: Any) -> None:
    with BlockingCheckpoint(DistributedCheckpoint(None, LocalStorage(folder))) as checkpoints:
        chosen = SaveOptions(f"step-{step:08d}", step=step, **options)
        if in_background:
            checkpoints.save_async(state_at(step), options=chosen).result()
        else:
            checkpoints.save(state_at(step), options=chosen)


def require_whole(folder: Path, *steps: int) -> None:
    """Exactly the checkpoints of these steps are there, and all of them are whole."""
    names = [f"step-{step:08d}" for step in steps]
    assert listing.prefixes(LocalStorage(folder)) == names
    for name in names:
        assert checkpoint.verify(str(folder / name)).is_valid


@pytest.mark.parametrize("options", [{}, {"in_background": True}, {"base": "step-00000001"}], ids=str)
def test_save_to_a_full_disk_fails_and_the_next_one_succeeds(disk: Path, options: dict[str, Any]) -> None:
    folder = disk / "checkpoints"
    save(folder, 1)
    before, filler = files_in(folder), fill(disk)
    with pytest.raises(CheckpointException) as caught:
        save(folder, 2, **options)
    assert caught.value.code == "checkpoint_disk_full"
    assert files_in(folder) == before
    require_whole(folder, 1)
    filler.unlink()
    save(folder, 2, **options)
    require_whole(folder, 1, 2)


async def test_collection_on_a_full_disk_makes_room(client: ForgedClient, disk: Path) -> None:
    folder = disk / "checkpoints"
    for step in (1, 2, 3):
        await asyncio.to_thread(save, folder, step)
    await adopt(client, str(folder))
    await asyncio.to_thread(fill, disk)
    await configure(client, checkpoint_keep=1)
    await client.collect_checkpoints(JOB)
    await until(lambda: len(files_in(folder)) == 2)
    require_whole(folder, 3)
    await asyncio.to_thread(save, folder, 4)
    require_whole(folder, 3, 4)


class Full:
    """A file system that needs room to rename or to delete, and has none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *operations: str) -> None:
        self.refused = asyncio.Event()
        self.has_room = False
        loop = asyncio.get_running_loop()
        for name in operations:
            act = getattr(LocalStorage, name)

            def refuse(storage: LocalStorage, *names: Any, act: Any = act) -> None:
                if not self.has_room:
                    loop.call_soon_threadsafe(self.refused.set)
                    raise translated(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), str(names[0]), storage.url)
                act(storage, *names)

            monkeypatch.setattr(LocalStorage, name, refuse)


@pytest.fixture
async def collected(client: ForgedClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with three checkpoints, two of which are to go."""
    monkeypatch.setattr(work_queue, "PAUSE_S_MAX", 0.05)
    folder = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        await asyncio.to_thread(save, folder, step)
    await adopt(client, str(folder))
    await configure(client, checkpoint_keep=1)
    return folder


async def test_checkpoint_whose_tombstone_cannot_be_written_stays_whole_until_there_is_room(
    client: ForgedClient, collected: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Full(monkeypatch, "move")
    await client.collect_checkpoints(JOB)
    await asyncio.wait_for(full.refused.wait(), PATIENCE_S)
    require_whole(collected, 1, 2, 3)
    assert [point.meta.step for point in (await client.restore_points(JOB)).points] == [3]
    full.has_room = True
    await until(lambda: len(files_in(collected)) == 2)
    require_whole(collected, 3)


async def test_deletion_that_finds_no_room_goes_on_when_there_is_some(
    client: ForgedClient, collected: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tombstone is written, and the files stay."""
    full = Full(monkeypatch, "delete")
    await client.collect_checkpoints(JOB)
    await asyncio.wait_for(full.refused.wait(), PATIENCE_S)
    storage = LocalStorage(collected)
    assert listing.tombstones(storage)
    assert "step-00000003" in listing.prefixes(storage)
    assert checkpoint.verify(str(collected / "step-00000003")).is_valid
    full.has_room = True
    await until(lambda: len(files_in(collected)) == 2)
    require_whole(collected, 3)
    assert len(await past(client, CheckpointCollected)) == 2


async def test_compaction_on_a_full_disk_is_given_up_and_can_be_repeated(client: ForgedClient, disk: Path) -> None:
    folder = disk / "checkpoints"
    await asyncio.to_thread(chain_of_two, folder)
    await adopt(client, str(folder))
    newest = (await client.restore_points(JOB)).points[0].meta
    before, filler = files_in(folder), await asyncio.to_thread(fill, disk)
    await client.compact_checkpoint(JOB, newest.checkpoint_id)
    await until_told(client, CheckpointOperationFailed)
    [failed] = await past(client, CheckpointOperationFailed)
    assert (failed.checkpoint_id, failed.operation) == (newest.checkpoint_id, "compacting")
    assert "0 bytes free" in failed.reason
    assert files_in(folder) == before
    require_whole(folder, 1, 2)
    await asyncio.to_thread(filler.unlink)
    await client.compact_checkpoint(JOB, newest.checkpoint_id)
    await until_told(client, CheckpointCompacted)
    require_whole(folder, 1, 2)
