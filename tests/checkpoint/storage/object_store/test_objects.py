"""Object stores, at a real S3 server."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from obstore.store import LocalStore, MemoryStore

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.ports import BLOCK_BYTES, CancelToken, RemoteStorage, bounded
from forged.checkpoint.storage.fault_handler import FaultToleranceHandler
from forged.checkpoint.storage.object_store.async_calls import ASYNC_CALLS
from forged.checkpoint.storage.object_store.objects import (
    IN_FLIGHT_BYTES_MAX,
    LISTED_AT_ONCE,
    PARTS_MAX,
    ObjectStorage,
    part_bytes,
)
from tests.checkpoint.fixtures.memory_storage import MemoryStorage
from tests.checkpoint.fixtures.s3_server import S3Server
from tests.checkpoint.fixtures.sources import CopiedSource, FailingSource, MemorySource, pattern
from tests.checkpoint.fixtures.tcp_proxy import TcpProxy

WAITS_S = 30.0
SOON_S = 0.5
LARGE = 100 << 20


class Counting(CopiedSource):
    """Bytes that count the requested blocks."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.blocks = 0

    def block(self, offset: int, room: memoryview) -> memoryview:
        self.blocks += 1
        return super().block(offset, room)


def through(s3_server: S3Server, bucket: str, proxy: TcpProxy, retries: int = 2) -> ObjectStorage:
    return s3_server.storage(bucket, endpoint=proxy.endpoint, retries=retries)


def error_of(act: Callable[[], object]) -> CheckpointException:
    with pytest.raises(CheckpointException) as caught:
        act()
    return caught.value


def names(storage: ObjectStorage) -> list[str]:
    return sorted(entry.name for entry in storage.entries())


@pytest.mark.parametrize("size", [1, BLOCK_BYTES * PARTS_MAX, BLOCK_BYTES * PARTS_MAX + 1, 640 << 30, 5 << 40])
def test_no_file_has_more_parts_than_a_store_takes(size: int) -> None:
    part = part_bytes(size)
    assert part % BLOCK_BYTES == 0
    assert size <= PARTS_MAX * part
    assert part == BLOCK_BYTES or PARTS_MAX * (part - BLOCK_BYTES) < size, "larger than they have to be"


def test_a_large_file_goes_and_comes_in_parts_at_the_same_time(s3_server: S3Server) -> None:
    bucket, data = s3_server.bucket(), pattern(LARGE)
    with TcpProxy(s3_server.ports["s3.port"]) as going:
        through(s3_server, bucket, going).write("run/part", MemorySource(data), CancelToken())
        assert going.connections > 1
    assert s3_server.unfinished_uploads(bucket) == []
    with TcpProxy(s3_server.ports["s3.port"]) as coming, through(s3_server, bucket, coming).open("run/part") as reader:
        room = bytearray(LARGE)
        reader.read_into(0, memoryview(room))
        assert coming.connections > 1
    assert room == data


def test_a_range_is_read_and_not_the_file(s3_server: S3Server) -> None:
    storage, data = s3_server.folder(), pattern(3 * BLOCK_BYTES)
    storage.write("a", CopiedSource(data), CancelToken())
    with storage.open("a") as reader:
        room = bytearray(1_000)
        reader.read_into(2 * BLOCK_BYTES + 77, memoryview(room))
    assert room == data[2 * BLOCK_BYTES + 77 :][:1_000]


def test_a_list_longer_than_a_page_is_whole(s3_server: S3Server) -> None:
    storage, count = s3_server.folder(), 3 * LISTED_AT_ONCE + 1
    wanted = [f"run/step-{number}/a" for number in range(count)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: storage.publish(name, b"x"), wanted))
    assert names(storage) == sorted(wanted)
    storage.delete(wanted)
    assert names(storage) == []


def test_delete_with_a_missing_name_deletes_the_rest(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for name in "abc":
        store.put(name, b"")
    storage = ObjectStorage(store, "test")
    storage.delete(["a", "no", "b", "nor", "c"])
    assert names(storage) == []


@pytest.mark.parametrize("at", [0, BLOCK_BYTES, 3 * BLOCK_BYTES])
def test_failed_write_leaves_no_object_and_no_upload(s3_server: S3Server, at: int) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    bucket = s3_server.bucket()
    storage = s3_server.storage(bucket)
    with pytest.raises(ZeroDivisionError):
        storage.write("a", FailingSource(pattern(4 * BLOCK_BYTES), at, fail), CancelToken())
    ASYNC_CALLS.wait_for_cleanups(WAITS_S)
    assert names(storage) == []
    assert s3_server.unfinished_uploads(bucket) == []


def ends_upload(requests: list[bytes]) -> bool:
    """Whether one of the requests aborts or completes a multipart upload."""
    return any(line.startswith((b"DELETE ", b"POST ")) and b"uploadId=" in line for line in requests)


def test_upload_is_not_ended_while_a_part_is_in_flight(s3_server: S3Server) -> None:
    """A store may keep a part for ever that arrives after its upload was aborted."""
    bucket = s3_server.bucket()
    with TcpProxy(s3_server.ports["s3.port"]) as proxy:
        proxy.delay_end(b"partNumber=1&")

        def fail() -> None:
            assert proxy.held_back.wait(WAITS_S)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            through(s3_server, bucket, proxy).write(
                "a", FailingSource(pattern(4 * BLOCK_BYTES), 3 * BLOCK_BYTES, fail), CancelToken()
            )
        before = list(proxy.requests)
        proxy.release()
        ASYNC_CALLS.wait_for_cleanups(WAITS_S)
    assert not ends_upload(before)
    assert names(s3_server.storage(bucket)) == []
    assert s3_server.unfinished_uploads(bucket) == []


def test_upload_being_created_when_its_write_is_cancelled_is_ended(s3_server: S3Server) -> None:
    bucket, token = s3_server.bucket(), CancelToken()
    with TcpProxy(s3_server.ports["s3.port"]) as proxy:
        proxy.delay_end(b"uploads=")

        def cancel() -> None:
            proxy.held_back.wait(WAITS_S)
            token.cancel()

        thread = threading.Thread(target=cancel)
        thread.start()
        error = error_of(
            lambda: through(s3_server, bucket, proxy).write("a", CopiedSource(pattern(2 * BLOCK_BYTES)), token)
        )
        thread.join()
        assert error.code == "checkpoint_cancelled"
        proxy.release()
        ASYNC_CALLS.wait_for_cleanups(WAITS_S)
        assert ends_upload(proxy.requests)
    assert names(s3_server.storage(bucket)) == []
    assert s3_server.unfinished_uploads(bucket) == []


def test_a_source_of_another_size_than_it_says_is_an_error(s3_server: S3Server) -> None:
    class Short(CopiedSource):
        def block(self, offset: int, room: memoryview) -> memoryview:
            return super().block(offset, room)[:-1]

    storage = s3_server.folder()
    for size in (10, 2 * BLOCK_BYTES):
        source = Short(pattern(size))
        error = error_of(partial(storage.write, "a", source, CancelToken()))
        assert error.type is ExceptionType.STORAGE_ERROR
    assert names(storage) == []


def test_publisher_recognizes_its_own_object_after_a_lost_reply(s3_server: S3Server) -> None:
    bucket = s3_server.bucket()
    with TcpProxy(s3_server.ports["s3.port"]) as proxy:
        storage = through(s3_server, bucket, proxy)
        proxy.swallow(b"PUT ")
        storage.publish("a.metadata.json", b"mine")
    assert s3_server.storage(bucket).read("a.metadata.json", 10) == b"mine"


def test_publisher_is_refused_by_a_foreign_object_after_a_lost_reply(s3_server: S3Server) -> None:
    bucket = s3_server.bucket()
    s3_server.storage(bucket).publish("a.metadata.json", b"another's")
    with TcpProxy(s3_server.ports["s3.port"]) as proxy:
        storage = through(s3_server, bucket, proxy)
        proxy.swallow(b"PUT ")
        assert error_of(lambda: storage.publish("a.metadata.json", b"mine")).code == "checkpoint_exists"
    assert s3_server.storage(bucket).read("a.metadata.json", 10) == b"another's"


def test_reading_goes_on_when_a_connection_is_lost(s3_server: S3Server) -> None:
    bucket = s3_server.bucket()
    s3_server.storage(bucket).publish("a", b"1")
    with TcpProxy(s3_server.ports["s3.port"]) as proxy:
        storage = through(s3_server, bucket, proxy)
        proxy.swallow(b"GET ")
        assert storage.read("a", 10) == b"1"


def stalled(
    s3_server: S3Server, act: Callable[[ObjectStorage, TcpProxy, CancelToken], object], *, hangs_up: bool = True
) -> CheckpointException:
    """The error of an operation at a server that falls silent.

    `hangs_up`: the client must also close its connection. An upload keeps it until its requests end.
    """
    bucket = s3_server.bucket()
    s3_server.storage(bucket).write("there", CopiedSource(pattern(3 * BLOCK_BYTES)), CancelToken())
    with TcpProxy(s3_server.ports["s3.port"]) as proxy:
        token = CancelToken(WAITS_S)
        storage = through(s3_server, bucket, proxy).bounded(token)

        def cancel() -> None:
            proxy.held_back.wait(WAITS_S)
            token.cancel()

        thread = threading.Thread(target=cancel)
        thread.start()
        error = error_of(lambda: act(storage, proxy, token)).with_traceback(None)
        thread.join()
        # A listing is released with the last reference to the frames of the error.
        gc.collect()
        assert not hangs_up or proxy.hung_up.wait(WAITS_S), "the request was not given up"
    return error


def silence(act: Callable[[ObjectStorage], object]) -> Callable[[ObjectStorage, TcpProxy, CancelToken], object]:
    def silenced(storage: ObjectStorage, proxy: TcpProxy, token: CancelToken) -> None:
        proxy.stall()
        act(storage)

    return silenced


@pytest.mark.parametrize(
    "act",
    [
        lambda storage: storage.read("there", 100),
        lambda storage: storage.open("there"),
        lambda storage: list(storage.entries()),
        lambda storage: storage.move("there", "elsewhere"),
        lambda storage: storage.delete(["there"]),
        lambda storage: storage.publish("a", b"x"),
        lambda storage: storage.write("a", CopiedSource(b"x"), storage._requests.token),
    ],
    ids=["read", "open", "list", "move", "delete", "publish", "write"],
)
def test_request_to_silent_server_ends_when_cancelled(
    s3_server: S3Server, act: Callable[[ObjectStorage], object]
) -> None:
    assert stalled(s3_server, silence(act)).code == "checkpoint_cancelled"


def test_read_from_a_silent_server_ends_when_cancelled(s3_server: S3Server) -> None:
    def read(storage: ObjectStorage, proxy: TcpProxy, token: CancelToken) -> None:
        with storage.open("there") as reader:
            proxy.stall()
            reader.read_into(0, memoryview(bytearray(reader.size)))

    assert stalled(s3_server, read).code == "checkpoint_cancelled"


def test_upload_to_a_silent_server_ends_when_cancelled(s3_server: S3Server) -> None:
    def write(storage: ObjectStorage, proxy: TcpProxy, token: CancelToken) -> None:
        storage.write("a", FailingSource(pattern(4 * BLOCK_BYTES), 2 * BLOCK_BYTES, proxy.stall), token)

    assert stalled(s3_server, write, hangs_up=False).code == "checkpoint_cancelled"


def test_a_silent_server_is_an_error_when_the_time_is_over(s3_server: S3Server) -> None:
    with TcpProxy(s3_server.ports["s3.port"]) as proxy:
        proxy.stall()
        storage = through(s3_server, s3_server.bucket(), proxy)
        error = error_of(lambda: storage.write("a", CopiedSource(b"x"), CancelToken(SOON_S)))
    assert error.type is ExceptionType.TIMEOUT


def test_uploads_to_a_stalled_server_use_bounded_memory(s3_server: S3Server) -> None:
    with TcpProxy(s3_server.ports["s3.port"]) as proxy:
        storage = through(s3_server, s3_server.bucket(), proxy)

        class Stalling(Counting):
            def block(self, offset: int, room: memoryview) -> memoryview:
                proxy.stall()
                return super().block(offset, room)

        source = Stalling(bytes(3 * IN_FLIGHT_BYTES_MAX))
        assert error_of(lambda: storage.write("a", source, CancelToken(6 * SOON_S))).type is ExceptionType.TIMEOUT
    assert 1 <= source.blocks <= IN_FLIGHT_BYTES_MAX // BLOCK_BYTES + 2


def test_a_server_that_dies_is_an_error_that_may_pass(tmp_path: Path) -> None:
    with S3Server(tmp_path) as own:
        bucket = own.bucket()
        storage = own.storage(bucket)
        storage.publish("step-1.metadata.json", b"kept")
        source = FailingSource(pattern(6 * BLOCK_BYTES), 3 * BLOCK_BYTES, own.kill)
        error = error_of(lambda: storage.write("step-2/part", source, CancelToken()))
        assert (error.code, error.retryable) == ("checkpoint_storage_unreachable", True)
        assert error_of(lambda: storage.read("step-1.metadata.json", 100)).retryable
        assert error_of(lambda: list(storage.entries())).retryable
        own.start()
        storage = own.storage(bucket)
        assert storage.read("step-1.metadata.json", 100) == b"kept"
        storage.delete(["step-2/part"])
        storage.write("step-2/part", CopiedSource(pattern(6 * BLOCK_BYTES)), CancelToken())
        with storage.open("step-2/part") as reader:
            assert reader.size == 6 * BLOCK_BYTES


ACTS: dict[str, Callable[[ObjectStorage], object]] = {
    "publish": lambda storage: storage.publish("a", b"x"),
    "write": lambda storage: storage.write("a", CopiedSource(pattern(2 * BLOCK_BYTES)), CancelToken()),
    "read": lambda storage: storage.read("a", 10),
    "list": lambda storage: list(storage.entries("run/")),
    "delete": lambda storage: storage.delete(["a"]),
}


@pytest.mark.parametrize("act", ACTS)
def test_error_of_wrong_credentials_does_not_show_them(s3_server: S3Server, act: str) -> None:
    storage = s3_server.storage(s3_server.bucket(), secret="a-wrong-secret")
    error = error_of(lambda: ACTS[act](storage))
    assert (error.code, error.retryable) == ("checkpoint_storage_denied", False)
    assert "wrong-secret" not in str(error)
    assert "credentials" in error.fix


@pytest.mark.parametrize("act", ["publish", "write", "read", "list"])
def test_missing_bucket_is_named_in_the_error(s3_server: S3Server, act: str) -> None:
    error = error_of(lambda: ACTS[act](s3_server.storage("no-such-bucket")))
    assert (error.code, error.retryable) == ("checkpoint_bucket_missing", False)
    assert "no-such-bucket" in error.message


def test_only_remote_storages_are_bounded() -> None:
    token, local, remote = CancelToken(), MemoryStorage(), ObjectStorage(MemoryStore(), "memory://test")
    assert bounded(local, token) is local
    assert isinstance(remote, RemoteStorage)
    token.cancel()
    assert error_of(lambda: bounded(remote, token).read("a", 1)).code == "checkpoint_cancelled"
    assert error_of(lambda: remote.read("a", 1)).code == "checkpoint_file_missing"


def test_retries_stop_when_cancelled() -> None:
    remote, token = ObjectStorage(MemoryStore(), "memory://test"), CancelToken()
    patient = FaultToleranceHandler(remote).guard(remote)
    token.cancel()
    assert error_of(lambda: bounded(patient, token).read("a", 1)).code == "checkpoint_cancelled"
    assert error_of(lambda: patient.read("a", 1)).code == "checkpoint_file_missing"


def test_read_of_a_shortened_file_raises(s3_server: S3Server) -> None:
    storage = s3_server.folder()
    storage.publish("a", b"0123456789")
    with storage.open("a") as reader:
        storage.delete(["a"])
        storage.publish("a", b"012345")
        assert error_of(lambda: reader.read_into(4, memoryview(bytearray(6)))).code == "checkpoint_file_short"
