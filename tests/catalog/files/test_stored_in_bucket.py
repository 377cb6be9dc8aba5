"""The daemon's work on the files of checkpoints in a bucket of a real S3 server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from forged import checkpoint
from forged.catalog.book import saves
from forged.catalog.files import file_work
from forged.catalog.files.stored_files import StoredCheckpointFiles
from forged.catalog.messages import (
    AdoptedCheckpoint,
    CheckpointCollected,
    CheckpointCompacted,
    CheckpointCompleted,
    CheckpointCorrupted,
    CheckpointFailed,
    CheckpointRepaired,
    ReportCorruptCheckpoint,
    StartCheckpoint,
)
from forged.catalog.model import CheckpointState
from forged.catalog.ports import FOLDER_MISSING, CheckpointLocation, FoundCheckpoint
from forged.checkpoint import BlockingCheckpoint, DistributedCheckpoint, SaveOptions
from forged.checkpoint.format.manifest import SUFFIX, TOMBSTONE
from forged.checkpoint.rank_group import SingleProcess
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.locations import root_at, storage_at
from forged.checkpoint.storage.object_store.objects import ObjectStorage
from forged.client import ForgedClient
from tests.catalog.files.test_stored_files import code_of, no_progress, saved
from tests.checkpoint.conftest import s3_server
from tests.checkpoint.fixtures.s3_server import S3Server
from tests.checkpoint.fixtures.tcp_proxy import TcpProxy
from tests.client.daemon_runner import DaemonRunner, config_in
from tests.worker.trainers import PATIENCE_S, past

__all__ = ["s3_server"]

JOB = "run"


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty one, where the environment leads to its server."""
    for key, value in s3_server.environment().items():
        monkeypatch.setenv(key, value)
    return s3_server.bucket()


@pytest.fixture
def folder(bucket: str) -> str:
    return f"s3://{bucket}/run"


@pytest.fixture
def storage(s3_server: S3Server, bucket: str) -> ObjectStorage:
    return s3_server.storage(bucket)


def names(storage: ObjectStorage) -> set[str]:
    return {entry.name for entry in storage.entries()}


def part_of(storage: ObjectStorage, prefix: str) -> str:
    [part] = [name for name in names(storage) if name.startswith(f"{prefix}/")]
    return part


def flip(s3_server: S3Server, bucket: str, name: str) -> None:
    """Damage the last byte of an object."""
    store = s3_server.store(bucket)
    data = bytearray(store.get(name).bytes())
    data[-1] ^= 1
    store.put(name, bytes(data))


def chain_of(folder: str, count: int = 2) -> list[CheckpointLocation]:
    """A full checkpoint, and incremental ones that use its files."""
    rows = np.random.default_rng(7).random((8, 1 << 14))
    with checkpoint.Checkpoints(folder, incremental=True) as saves:
        for step in range(1, count + 1):
            rows[step] = step
            saves.save(step, {"w": rows})
    paths = [f"{folder}/step-{step:08d}" for step in range(1, count + 1)]
    return [CheckpointLocation(path, listing.read_manifest(*storage_at(path)).save_id, None) for path in paths]


# The port.


async def test_whole_checkpoint_is_found_with_its_size(folder: str, storage: ObjectStorage) -> None:
    files, at = StoredCheckpointFiles(), saved(f"{folder}/a")
    size_bytes = listing.read_manifest(*storage_at(at.path)).size_bytes
    assert await files.find(at) == FoundCheckpoint(size_bytes, "")
    assert await files.find(CheckpointLocation(at.path, "00000000", None)) is None
    assert await files.find(CheckpointLocation(at.path, at.save_id, "another job")) is None
    storage.delete([part_of(storage, "run/a")])
    assert await files.find(at) is None


async def test_deleted_checkpoint_leaves_no_object(folder: str, storage: ObjectStorage) -> None:
    files, at = StoredCheckpointFiles(), saved(f"{folder}/a")
    other = saved(f"{folder}/b")
    await files.delete(at)
    await files.delete(at)
    assert names(storage) == {f"run/b{SUFFIX}", part_of(storage, "run/b")}
    assert await files.find(other) is not None


async def test_deletion_that_stopped_between_copy_and_delete_is_finished(
    s3_server: S3Server, bucket: str, folder: str, storage: ObjectStorage
) -> None:
    """A bucket renames by copying: for a moment there are both manifest and tombstone."""
    files, at = StoredCheckpointFiles(), saved(f"{folder}/a")
    s3_server.store(bucket).copy(f"run/a{SUFFIX}", f"run/a{TOMBSTONE}")
    assert await files.find(at) is None
    await files.delete(at)
    assert names(storage) == set()


async def test_objects_of_an_unfinished_save_are_swept_and_those_of_others_stay(
    s3_server: S3Server, bucket: str, folder: str, storage: ObjectStorage
) -> None:
    files, at = StoredCheckpointFiles(), saved(f"{folder}/a")
    whole, store = names(storage), s3_server.store(bucket)
    store.put("run/a/0123abcd.00000-of-00002.safetensors", b"x")
    store.put("run/a/0123abcd.00001.receipt", b"x")
    store.put("run/a/notes.txt", b"x")
    await files.delete(CheckpointLocation(at.path, "0123abcd", "run"))
    assert names(storage) == whole | {"run/a/notes.txt"}
    assert await files.find(at) is not None


async def test_verification_finds_damage_which_a_copy_repairs(
    s3_server: S3Server, bucket: str, folder: str, storage: ObjectStorage
) -> None:
    files, at = StoredCheckpointFiles(), saved(f"{folder}/a")
    part, seen = part_of(storage, "run/a"), list[int]()
    assert await files.verify(at, 1 << 40, lambda done, total: seen.append(done)) == ""
    assert seen[-1] == 20_000
    flip(s3_server, bucket, part)
    assert "w" in await files.verify(at, 1 << 40, no_progress)
    assert await code_of(files.repair(at)) == "checkpoint_chunk_corrupt"
    saved(f"{folder}/copy")
    assert await files.repair(at)
    assert await files.verify(at, 1 << 40, no_progress) == ""
    assert part_of(storage, "run/a") == part
    storage.delete([part])
    assert await files.verify(at, 1 << 40, no_progress)
    storage.delete([f"run/a{SUFFIX}"])
    assert await files.verify(at, 1 << 40, no_progress) == "its manifest is missing"
    await files.delete(CheckpointLocation(f"{folder}/copy", _save_id(folder, "copy"), None))
    assert await code_of(files.verify(at, 1 << 40, no_progress)) == FOLDER_MISSING


def _save_id(folder: str, prefix: str) -> str:
    return listing.read_manifest(root_at(folder), prefix).save_id


async def test_parent_that_is_used_is_deleted_after_the_compaction(
    s3_server: S3Server, bucket: str, folder: str, storage: ObjectStorage
) -> None:
    files = StoredCheckpointFiles()
    parent, child = chain_of(folder)
    assert await code_of(files.delete(parent)) == "checkpoint_needed"
    found = await files.find(child)
    assert found is not None
    assert found.parent_path == parent.path
    size_bytes = await files.compact(child, no_progress)
    assert await files.find(child) == FoundCheckpoint(size_bytes, "")
    await files.delete(parent)
    assert await files.verify(child, 1 << 40, no_progress) == ""
    assert {name.partition("/")[2].partition("/")[0].removesuffix(SUFFIX) for name in names(storage)} == {
        "step-00000002"
    }
    assert await code_of(files.compact(parent, no_progress)) == "checkpoint_missing"
    assert s3_server.unfinished_uploads(bucket) == []


async def test_silent_server_is_given_up_and_changes_nothing(
    s3_server: S3Server, folder: str, storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, before = saved(f"{folder}/a"), names(storage)
    with TcpProxy(s3_server.ports["s3.port"]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        proxy.stall()
        for kind in ("find", "delete"):
            files = StoredCheckpointFiles(timeout_s=0.3)
            assert await code_of(getattr(files, kind)(at)) == "checkpoint_storage_hangs"
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    assert names(storage) == before
    assert await StoredCheckpointFiles().find(at) is not None


# A daemon.


@pytest.fixture
async def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ForgedClient]:
    """A client of a daemon whose times are short, with one job."""
    monkeypatch.setattr(file_work, "TICK_S", 0.05)
    runner = DaemonRunner(config_in(tmp_path))
    await runner.open()
    async with ForgedClient(runner.endpoint) as client:
        await client.create_job(JOB)
        yield client
    await runner.close()


async def adopt(client: ForgedClient, folder: str) -> None:
    """Add all checkpoints of a folder."""
    found = [manifest for _, manifest in await asyncio.to_thread(lambda: list(listing.manifests(root_at(folder))))]
    adopted = [
        AdoptedCheckpoint(
            f"{folder}/{one.prefix}",
            one.save_id,
            0,
            int(one.prefix.removeprefix("step-")),
            one.size_bytes,
            one.created_at,
            f"{folder}/{one.links[-1].prefix}" if one.links else "",
        )
        for one in found
        if not isinstance(one, Exception)
    ]
    assert len((await client.adopt_checkpoints(JOB, folder, adopted)).adopted) == len(found)


class OfJob(SingleProcess):
    """One rank that saves for the job."""

    job = JOB


def save_as_job(folder: str, prefix: str) -> None:
    with BlockingCheckpoint(DistributedCheckpoint(OfJob(), root_at(folder))) as checkpoints:
        checkpoints.save({"w": np.zeros(5000)}, options=SaveOptions(prefix))


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await asyncio.to_thread(true):
            await asyncio.sleep(0.02)


async def until_told(client: ForgedClient, fact: type, count: int = 1) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while len(await past(client, fact)) < count:
            await asyncio.sleep(0.02)


async def configure(client: ForgedClient, **settings: int) -> None:
    await client.change_job(JOB, settings, (await client.job(JOB)).version)


async def test_collected_checkpoints_leave_the_bucket(
    client: ForgedClient, folder: str, storage: ObjectStorage
) -> None:
    for step in range(1, 6):
        await asyncio.to_thread(saved, f"{folder}/step-{step:08d}", step)
    await adopt(client, folder)
    await configure(client, checkpoint_keep=2)
    await client.collect_checkpoints(JOB)
    await until(lambda: listing.prefixes(root_at(folder)) == ["step-00000004", "step-00000005"])
    await until(lambda: len(names(storage)) == 4)
    assert len(await past(client, CheckpointCollected)) == 3
    for point in (await client.restore_points(JOB)).points:
        assert (await asyncio.to_thread(checkpoint.verify, point.meta.storage_path)).is_valid


async def test_long_chain_is_compacted_and_its_parents_leave_the_bucket(client: ForgedClient, folder: str) -> None:
    await asyncio.to_thread(chain_of, folder, 3)
    await adopt(client, folder)
    newest = (await client.restore_points(JOB)).points[0]
    assert len(newest.chain) == 3
    await client.compact_checkpoint(JOB, newest.meta.checkpoint_id)
    await until_told(client, CheckpointCompacted)
    await configure(client, checkpoint_keep=1)
    await client.collect_checkpoints(JOB)
    await until(lambda: listing.prefixes(root_at(folder)) == ["step-00000003"])
    assert (await asyncio.to_thread(checkpoint.verify, newest.meta.storage_path)).is_valid


async def test_saves_whose_end_was_not_reported_are_found_or_swept(
    client: ForgedClient,
    s3_server: S3Server,
    bucket: str,
    folder: str,
    storage: ObjectStorage,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await asyncio.to_thread(save_as_job, folder, "whole")
    whole, left = f"{folder}/whole", f"{folder}/left"
    s3_server.store(bucket).put("run/left/0123abcd.00000-of-00001.safetensors", b"x")
    for step, (path, save_id) in enumerate([(whole, _save_id(folder, "whole")), (left, "0123abcd")], 1):
        await client.request(StartCheckpoint(JOB, "", b"", 0, step, path, save_id))
    monkeypatch.setattr(saves, "WRITING_S_MAX", 0.0)
    monkeypatch.setattr(saves, "FAILED_KEPT_S", 0.0)
    await until_told(client, CheckpointCompleted)
    await until_told(client, CheckpointFailed)
    await until(lambda: names(storage) == {f"run/whole{SUFFIX}", part_of(storage, "run/whole")})
    assert [meta.step for meta in await client.checkpoints(JOB) if meta.state is CheckpointState.COMPLETE] == [1]


async def test_damaged_checkpoint_in_a_bucket_is_repaired_and_offered_again(
    client: ForgedClient, s3_server: S3Server, bucket: str, folder: str, storage: ObjectStorage
) -> None:
    for step in (1, 2):
        await asyncio.to_thread(saved, f"{folder}/step-{step:08d}")
    await adopt(client, folder)
    newest = (await client.restore_points(JOB)).points[0].meta
    await asyncio.to_thread(flip, s3_server, bucket, part_of(storage, "run/step-00000002"))
    await client.request(ReportCorruptCheckpoint(JOB, newest.checkpoint_id, "for the test"))
    await until_told(client, CheckpointCorrupted)
    await until_told(client, CheckpointRepaired)
    assert (await client.restore_points(JOB)).points[0].meta.checkpoint_id == newest.checkpoint_id
    assert (await asyncio.to_thread(checkpoint.verify, newest.storage_path)).is_valid
