"""Trying again what may pass, and clearing away what came to nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.ports import CancelToken, Reader, RemoteStorage, Storage
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.fault_handler import FaultToleranceHandler
from forged.retry import RetryPolicy
from tests.checkpoint.fixtures.faulty_storage import Fault, FaultyStorage, broken
from tests.checkpoint.fixtures.memory_storage import MemoryStorage
from tests.checkpoint.fixtures.sources import CopiedSource

NEVER = CancelToken()


def passing() -> BaseException:
    return broken(retryable=True)


def first(times: int, *, after: bool = False, error: Callable[[], BaseException] = passing) -> Fault:
    """So many operations fail."""
    failed = 0

    def fault(number: int, what: str, done: bool) -> None:
        nonlocal failed
        if done == after and failed < times:
            failed += 1
            raise error()

    return fault


def patient(faulty: Storage, attempts: int | None = 3, **policy: Any) -> tuple[Storage, list[float]]:
    """A storage with a handler, and the pauses that it makes."""
    pauses: list[float] = []
    handler = FaultToleranceHandler(faulty, RetryPolicy(attempts, **policy), lambda: 0.5, pauses.append)
    return handler.guard(faulty), pauses


def opened(storage: Storage) -> int:
    with storage.open("there") as reader:
        return reader.size


ACTS: dict[str, Callable[[Storage], Any]] = {
    "sync_names": lambda storage: storage.sync_names(["there"]),
    "publish": lambda storage: storage.publish("new", b"data"),
    "open": lambda storage: opened(storage),
    "free_bytes": lambda storage: storage.free_bytes(),
    "read": lambda storage: storage.read("there", 10),
    "entries": lambda storage: list(storage.entries()),
    "move": lambda storage: storage.move("there", "elsewhere"),
    "delete": lambda storage: storage.delete(["there"]),
}


@pytest.fixture
def memory() -> MemoryStorage:
    memory = MemoryStorage()
    memory.files["there"] = b"data"
    return memory


@pytest.mark.parametrize("act", ACTS)
def test_every_operation_is_tried_again_with_pauses(memory: MemoryStorage, act: str) -> None:
    faulty = FaultyStorage(memory, first(2))
    storage, pauses = patient(faulty, delay_s=1.0, exponential=True, jitter=0.5)
    ACTS[act](storage)
    assert faulty.calls.count(act) == 3
    assert pauses == [0.75, 1.5]


@pytest.mark.parametrize("act", ACTS)
def test_repeated_failure_is_raised_after_the_last_try(memory: MemoryStorage, act: str) -> None:
    faulty = FaultyStorage(memory, first(9))
    storage, pauses = patient(faulty)
    with pytest.raises(CheckpointException, match="broken"):
        ACTS[act](storage)
    assert (faulty.calls.count(act), pauses) == (3, [1.0, 1.0])


@pytest.mark.parametrize("act", ACTS)
def test_permanent_failure_is_raised_at_once(memory: MemoryStorage, act: str) -> None:
    faulty = FaultyStorage(memory, first(9, error=broken))
    storage, pauses = patient(faulty)
    with pytest.raises(CheckpointException, match="broken"):
        ACTS[act](storage)
    assert (len(faulty.calls), pauses) == (1, [])


def test_foreign_errors_are_not_tried_again(memory: MemoryStorage) -> None:
    storage, pauses = patient(FaultyStorage(memory, first(9, error=lambda: OSError(5, "io"))))
    with pytest.raises(OSError, match="io"):
        storage.read("there", 10)
    assert pauses == []


def test_failed_open_is_retried_and_failed_read_is_not(memory: MemoryStorage) -> None:
    class Late(MemoryStorage):
        tries = 0

        @contextmanager
        def open(self, name: str) -> Iterator[Reader]:
            self.tries += 1
            if self.tries < 3:
                raise broken(retryable=True)
            with super().open(name) as reader:
                yield reader

    late = Late()
    late.files = memory.files
    storage, _ = patient(late)
    with pytest.raises(CheckpointException, match="in the block"), storage.open("there"):
        raise CheckpointException("in the block", retryable=True)
    assert late.tries == 3


def test_a_write_is_tried_again_from_its_beginning(memory: MemoryStorage) -> None:
    token = CancelToken(1000.0, monotonic=lambda: 0.0)
    storage, _ = patient(FaultyStorage(memory, first(2)), delay_s=0.001)
    storage.write("new", CopiedSource(b"bytes"), token)
    assert memory.files["new"] == b"bytes"


def test_cancelled_token_ends_retries(memory: MemoryStorage) -> None:
    times = iter([0.0, *[0.4] * 2, *[2.0] * 20])
    storage, _ = patient(FaultyStorage(memory, first(99)), None, delay_s=0.001)
    with pytest.raises(CheckpointException) as caught:
        storage.write("new", CopiedSource(b"bytes"), CancelToken(1.0, monotonic=lambda: next(times)))
    assert caught.value.type is ExceptionType.TIMEOUT


def test_a_storage_that_is_bounded_stops_all_its_operations(memory: MemoryStorage) -> None:
    storage, _ = patient(FaultyStorage(memory, first(99)), None, delay_s=0.001)
    stopped = CancelToken()
    stopped.cancel()
    assert isinstance(storage, RemoteStorage)
    with pytest.raises(CheckpointException, match="cancelled"):
        storage.bounded(stopped).read("there", 10)


def test_a_document_that_got_through_is_not_taken_for_another_ones(memory: MemoryStorage) -> None:
    faulty = FaultyStorage(memory, first(1, after=True))
    storage, _ = patient(faulty)
    storage.publish("new", b"data")
    assert memory.files["new"] == b"data"
    assert faulty.calls == ["publish", "publish", "read", "sync_names"]


def test_file_of_another_save_is_kept(memory: MemoryStorage) -> None:
    storage, _ = patient(FaultyStorage(memory))
    with pytest.raises(CheckpointException) as caught:
        storage.publish("there", b"data")
    assert caught.value.code == "checkpoint_exists"
    memory.files["new"] = b"other"
    storage, _ = patient(FaultyStorage(memory, first(1)))
    with pytest.raises(CheckpointException) as caught:
        storage.publish("new", b"data")
    assert (caught.value.code, memory.files["new"]) == ("checkpoint_exists", b"other")


def test_the_rest_is_as_the_storage_says(memory: MemoryStorage) -> None:
    memory.room = 5
    storage, _ = patient(memory)
    assert (storage.url, storage.free_bytes()) == (memory.url, 5)


def test_rollback_deletes_parts_without_a_manifest(memory: MemoryStorage) -> None:
    part = listing.part_name("run", "0a1b2c3d", 0, 1, is_packed=False)
    memory.files[part] = b"half"
    assert FaultToleranceHandler(memory).rollback("run") == [part]
    assert memory.files == {"there": b"data"}
