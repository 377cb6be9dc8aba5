"""Checkpoints in a bucket of a real S3 server, from beginning to end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

import forged.checkpoint
from forged.checkpoint import (
    BlockingCheckpoint,
    CheckpointException,
    CheckpointFormat,
    CheckpointOptions,
    CompressionLevel,
    DistributedCheckpoint,
    ExceptionType,
    LoadOptions,
    RetryPolicy,
    SaveOptions,
    StorageOptions,
    create_checkpoint,
)
from forged.checkpoint.loading.fetching import fetch
from forged.checkpoint.loading.manifest_index import Index
from forged.checkpoint.loading.read_plan import READ_BYTES_MAX
from forged.checkpoint.ports import CancelToken
from forged.checkpoint.storage.listing import read_manifest
from forged.checkpoint.storage.object_store.objects import RANGE_BYTES
from tests.checkpoint.fixtures.s3_server import S3Server
from tests.checkpoint.fixtures.tcp_proxy import TcpProxy

SOON_S = 1.0


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty one, where the environment leads to its server."""
    for key, value in s3_server.environment().items():
        monkeypatch.setenv(key, value)
    return s3_server.bucket()


def model(seed: int = 0, rows: int = 3_000_000) -> dict[str, Any]:
    """Some 24 MB."""
    random = np.random.default_rng(seed)
    return {"w": random.random((rows, 2), np.float32), "b": np.arange(7), "step": seed}


def names(s3_server: S3Server, bucket: str) -> list[str]:
    return sorted(entry.name for entry in s3_server.storage(bucket).entries())


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


def opened(s3_server: S3Server, bucket: str, **settings: str) -> BlockingCheckpoint:
    storage = StorageOptions("s3", {**s3_server.settings(bucket), "prefix": "run", **settings})
    return BlockingCheckpoint(create_checkpoint(None, CheckpointOptions(storage, RetryPolicy(attempts=1))))


def test_a_state_comes_back_from_a_url(s3_server: S3Server, bucket: str) -> None:
    state = model()
    where = f"s3://{bucket}/run/step-1"
    forged.checkpoint.save(where, state)
    assert same(forged.checkpoint.load(where), state)
    assert forged.checkpoint.verify(where).is_valid
    assert "run/step-1.metadata.json" in names(s3_server, bucket)
    assert s3_server.unfinished_uploads(bucket) == []


@pytest.mark.parametrize("layout", CheckpointFormat)
@pytest.mark.parametrize("compression", [CompressionLevel.NONE, CompressionLevel.FAST])
def test_every_layout_can_lie_in_a_bucket(bucket: str, layout: CheckpointFormat, compression: CompressionLevel) -> None:
    state = model(rows=1_500_000)
    where = f"s3://{bucket}/step-1"
    forged.checkpoint.save(where, state, format=layout, compression_level=compression)
    assert same(forged.checkpoint.load(where), state)


def test_chain_of_checkpoints_is_read_in_about_as_few_requests_as_its_bytes_need(s3_server: S3Server) -> None:
    bucket = s3_server.bucket()
    w = np.zeros((127, 1 << 14))
    with BlockingCheckpoint(DistributedCheckpoint(None, s3_server.storage(bucket))) as checkpoint:
        for number, base in enumerate([None, "c0", "c1"]):
            w[3 * number :: 9] += 1
            checkpoint.save({"w": w}, options=SaveOptions(f"c{number}", base=base, include_rng_state=False))
    with TcpProxy(s3_server.ports["s3.port"]) as proxy:
        storage = s3_server.storage(bucket, endpoint=proxy.endpoint)
        manifest = read_manifest(storage, "c2")
        assert len(manifest.parts) == 3
        before = len(proxy.requests)
        fetched = fetch(storage, Index(manifest), [0], CancelToken())
        requests = Counter(line.partition(b" ")[0] for line in proxy.requests[before:])
    assert np.array_equal(fetched.arrays[0], w)
    assert requests[b"HEAD"] <= 3
    assert requests[b"GET"] <= 3 + fetched.bytes_read // RANGE_BYTES + fetched.bytes_read // READ_BYTES_MAX
    assert fetched.bytes_read < 1.5 * w.nbytes


def test_arrays_are_filled_from_a_bucket(bucket: str) -> None:
    state, room = model(1), model(2)
    forged.checkpoint.save(f"s3://{bucket}/step-1", state)
    w = room["w"]
    forged.checkpoint.load(f"s3://{bucket}/step-1", into=room)
    assert np.array_equal(w, state["w"])


def test_a_run_saves_lists_and_deletes_in_a_bucket(s3_server: S3Server, bucket: str) -> None:
    with opened(s3_server, bucket) as checkpoints:
        for step in range(3):
            checkpoints.save(model(step), options=SaveOptions(f"step-{step}"))
        assert [info.prefix for info in checkpoints.list_checkpoints()] == ["step-0", "step-1", "step-2"]
        checkpoints.delete_checkpoint("step-1")
        assert [info.prefix for info in checkpoints.list_checkpoints()] == ["step-0", "step-2"]
        loaded = checkpoints.load(model(9), options=LoadOptions("step-2"))
        assert same(loaded.model_state, model(2))
        for step in (0, 2):
            checkpoints.delete_checkpoint(f"step-{step}")
    assert names(s3_server, bucket) == []


def test_saves_in_the_background_reach_a_bucket(s3_server: S3Server, bucket: str) -> None:
    with opened(s3_server, bucket) as checkpoints:
        handles = [checkpoints.save_async(model(step), options=SaveOptions(f"step-{step}")) for step in range(3)]
        assert [handle.result() for handle in handles] == ["step-0", "step-1", "step-2"]
        for step in range(3):
            assert same(checkpoints.load(options=LoadOptions(f"step-{step}")).model_state, model(step))


async def test_saves_of_an_event_loop_reach_a_bucket(s3_server: S3Server, bucket: str) -> None:
    async with create_checkpoint(
        None, CheckpointOptions(StorageOptions("s3", s3_server.settings(bucket)))
    ) as checkpoint:
        handle = await checkpoint.save_async(model(), options=SaveOptions("step-1"))
        assert await handle.committed() == "step-1"
        loaded = await checkpoint.load(options=LoadOptions("step-1"))
        assert same(loaded.model_state, model())
        await checkpoint.delete_checkpoint("step-1")
    assert names(s3_server, bucket) == []


def test_one_of_two_saves_under_one_name_exists(s3_server: S3Server, bucket: str) -> None:
    def save(seed: int) -> str:
        try:
            return forged.checkpoint.save(f"s3://{bucket}/step-1", model(seed))
        except CheckpointException as error:
            return error.code

    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(save, range(2)))
    assert sorted(said) == ["checkpoint_exists", "step-1"]
    assert same(forged.checkpoint.load(f"s3://{bucket}/step-1"), model(said.index("step-1")))
    assert len(names(s3_server, bucket)) == 2


def test_incremental_checkpoints_lie_in_a_bucket_and_become_full(s3_server: S3Server, bucket: str) -> None:
    state = model()
    with opened(s3_server, bucket) as checkpoints:
        for step in range(3):
            state["w"][step * 100_000] = step + 7
            base = f"step-{step - 1}" if step else None
            checkpoints.save(state, options=SaveOptions(f"step-{step}", base=base))
        infos = checkpoints.list_checkpoints()
        assert [info.chain for info in infos][-1] == ("step-0", "step-1", "step-2")
        assert infos[-1].size_bytes < infos[0].size_bytes / 10
        assert same(checkpoints.load(options=LoadOptions("step-2")).model_state, state)
        with pytest.raises(CheckpointException, match="step-0 is needed by step-1, step-2"):
            checkpoints.delete_checkpoint("step-0")
        full = forged.checkpoint.compact(f"s3://{bucket}/run/step-2")
        assert full.parent is None
        for step in (1, 0):
            checkpoints.delete_checkpoint(f"step-{step}")
        assert same(checkpoints.load(options=LoadOptions("step-2")).model_state, state)
        checkpoints.delete_checkpoint("step-2")
    assert names(s3_server, bucket) == []
    assert s3_server.unfinished_uploads(bucket) == []


def test_a_deletion_that_stopped_between_copy_and_delete_is_one(s3_server: S3Server, bucket: str) -> None:
    where = f"s3://{bucket}/step-1"
    forged.checkpoint.save(where, model())
    s3_server.store(bucket).copy("step-1.metadata.json", "step-1.deleted.json")
    with pytest.raises(CheckpointException) as caught:
        forged.checkpoint.load(where)
    assert caught.value.code == "checkpoint_missing"
    checkpoint = DistributedCheckpoint(None, s3_server.storage(bucket))
    blocking = BlockingCheckpoint(checkpoint)
    assert blocking.list_checkpoints() == []
    blocking.delete_checkpoint("step-1")
    assert names(s3_server, bucket) == []


def test_a_save_to_a_silent_server_ends_in_time(s3_server: S3Server, bucket: str) -> None:
    with TcpProxy(s3_server.ports["s3.port"]) as proxy, opened(s3_server, bucket, endpoint=proxy.endpoint) as silent:
        proxy.stall()
        with pytest.raises(CheckpointException) as caught:
            silent.save(model(), options=SaveOptions("step-1", timeout=SOON_S))
    assert caught.value.type is ExceptionType.TIMEOUT
    assert names(s3_server, bucket) == []


SILENT: dict[str, Callable[[BlockingCheckpoint], object]] = {
    "load": lambda silent: silent.load(options=LoadOptions("step-1", timeout=SOON_S)),
    "load unvalidated": lambda silent: silent.load(options=LoadOptions("step-1", timeout=SOON_S, skip_validation=True)),
}


@pytest.mark.parametrize("act", SILENT)
def test_a_load_from_a_silent_server_ends_in_time(s3_server: S3Server, bucket: str, act: str) -> None:
    with opened(s3_server, bucket) as checkpoints:
        checkpoints.save(model(), options=SaveOptions("step-1"))
    with TcpProxy(s3_server.ports["s3.port"]) as proxy, opened(s3_server, bucket, endpoint=proxy.endpoint) as silent:
        proxy.stall()
        with pytest.raises(CheckpointException) as caught:
            SILENT[act](silent)
    assert caught.value.type is ExceptionType.TIMEOUT


def test_every_call_raises_on_wrong_credentials(s3_server: S3Server, bucket: str) -> None:
    with opened(s3_server, bucket, secret_access_key="a-wrong-one") as denied:
        acts: list[Callable[[], object]] = [
            partial(denied.save, {"w": np.zeros(3)}),
            partial(denied.load, options=LoadOptions("step-1")),
            denied.list_checkpoints,
            partial(denied.delete_checkpoint, "step-1"),
        ]
        for act in acts:
            with pytest.raises(CheckpointException) as caught:
                act()
            assert caught.value.code == "checkpoint_storage_denied"
