"""What holds for every storage."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.ports import BLOCK_BYTES, ByteSource, CancelToken, Storage
from forged.checkpoint.storage.local import LocalStorage
from forged.checkpoint.storage.object_store.objects import ObjectStorage
from tests.checkpoint.fixtures.memory_storage import MemoryStorage
from tests.checkpoint.fixtures.sources import SIZES, CopiedSource, FailingSource, MemorySource, pattern

LARGE = 2 * BLOCK_BYTES + 4_097
HOSTILE = ["", "/a", "a/", "a//b", "../a", "a/../b", "a/./b", ".a", "a/.b", "a\0b", "a\nb", "a\\b", "x" * 300, "\ud800"]
CLOCKS_DIFFER_BY_S = 60.0

MAKERS: dict[str, Callable[[pytest.FixtureRequest, Path], Storage]] = {
    "memory": lambda _, __: MemoryStorage(),
    "local": lambda _, path: LocalStorage(path / "here"),
    "objects": lambda _, __: ObjectStorage(MemoryStore(), "memory://test"),
    "s3": lambda request, _: request.getfixturevalue("s3_server").folder(),
}


@pytest.fixture(params=MAKERS)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return MAKERS[request.param](request, tmp_path)


def names(storage: Storage, under: str = "") -> list[str]:
    return sorted(entry.name for entry in storage.entries(under))


def content(storage: Storage, name: str) -> bytes:
    with storage.open(name) as reader:
        room = bytearray(reader.size)
        reader.read_into(0, memoryview(room))
        return bytes(room)


def code_of(act: Callable[[], object]) -> str:
    with pytest.raises(CheckpointException) as caught:
        act()
    return caught.value.code


@pytest.mark.parametrize("make", [CopiedSource, MemorySource])
@pytest.mark.parametrize("size", SIZES)
def test_read_returns_written_bytes(storage: Storage, size: int, make: Callable[[bytes], ByteSource]) -> None:
    data = pattern(size)
    storage.write("run/step/part", make(data), CancelToken())
    storage.sync_names(["run/step/part"])
    assert content(storage, "run/step/part") == data
    assert [entry.size for entry in storage.entries()] == [size]


def test_any_part_of_a_file_can_be_read(storage: Storage) -> None:
    data = pattern(LARGE)
    storage.write("a", CopiedSource(data), CancelToken())
    with storage.open("a") as reader:
        assert reader.size == LARGE
        for offset, length in [(0, 1), (LARGE - 1, 1), (5, BLOCK_BYTES), (BLOCK_BYTES - 3, BLOCK_BYTES + 6), (7, 0)]:
            room = bytearray(length)
            reader.read_into(offset, memoryview(room))
            assert room == data[offset : offset + length]


@pytest.mark.parametrize("lengths", [[5, 0, 70_000, 1], [1] * 3_000, [BLOCK_BYTES + 1, 3, BLOCK_BYTES - 9], []])
def test_one_read_fills_several_rooms(storage: Storage, lengths: list[int]) -> None:
    data = pattern(LARGE)
    storage.write("a", CopiedSource(data), CancelToken())
    with storage.open("a") as reader:
        rooms = [memoryview(bytearray(length)) for length in lengths]
        reader.read_into(7, *rooms)
    assert b"".join(rooms) == data[7 : 7 + sum(lengths)]


def test_a_reader_serves_several_threads(storage: Storage) -> None:
    data = pattern(LARGE)
    storage.write("a", CopiedSource(data), CancelToken())
    pieces = [(start, data[start : start + 65_537]) for start in range(0, LARGE - 65_537, BLOCK_BYTES // 3)]
    with storage.open("a") as reader, ThreadPoolExecutor(4) as pool:

        def read(piece: tuple[int, bytes]) -> bool:
            room = bytearray(len(piece[1]))
            reader.read_into(piece[0], memoryview(room))
            return room == piece[1]

        assert all(pool.map(read, pieces))


def test_mapped_bytes_equal_the_file(storage: Storage) -> None:
    data = pattern(5_000)
    storage.write("a", CopiedSource(data), CancelToken())
    with storage.open("a") as reader:
        mapped = reader.mapped()
        assert mapped is None or (mapped == data and mapped.readonly)


def test_reading_beyond_the_end_is_an_error(storage: Storage) -> None:
    storage.publish("a", b"12345")
    with storage.open("a") as reader:
        assert code_of(lambda: reader.read_into(3, memoryview(bytearray(3)))) == "checkpoint_file_short"
        assert code_of(lambda: reader.read_into(9, memoryview(bytearray(1)))) == "checkpoint_file_short"
        rooms = [memoryview(bytearray(2)) for _ in range(3)]
        assert code_of(lambda: reader.read_into(0, *rooms)) == "checkpoint_file_short"


@pytest.mark.parametrize("size", [10, LARGE])
def test_a_file_is_written_once(storage: Storage, size: int) -> None:
    storage.write("a", CopiedSource(b"first"), CancelToken())
    assert code_of(lambda: storage.write("a", CopiedSource(pattern(size)), CancelToken())) == "checkpoint_exists"
    assert content(storage, "a") == b"first"


def test_a_file_is_published_once(storage: Storage) -> None:
    storage.publish("a", b"first")
    assert code_of(lambda: storage.publish("a", b"first")) == "checkpoint_exists"
    assert code_of(lambda: storage.publish("a", b"second")) == "checkpoint_exists"
    assert storage.read("a", 100) == b"first"


def race(acts: list[Callable[[], object]]) -> list[str]:
    """Does all at the same time; returns what came of each."""
    start = threading.Barrier(len(acts))

    def run(act: Callable[[], object]) -> str:
        start.wait()
        try:
            act()
        except CheckpointException as error:
            return error.code
        return "done"

    with ThreadPoolExecutor(len(acts)) as pool:
        return list(pool.map(run, acts))


def test_one_of_several_publishers_wins(storage: Storage) -> None:
    for turn in range(5):
        name = f"step-{turn}.metadata.json"
        said = [f"{turn}: {number}".encode() * 99 for number in range(4)]
        results = race([lambda data=data, name=name: storage.publish(name, data) for data in said])  # type: ignore[misc]
        assert sorted(results) == ["checkpoint_exists"] * 3 + ["done"]
        assert storage.read(name, 10_000) == said[results.index("done")]


def test_one_of_several_writers_wins(storage: Storage) -> None:
    said = [bytes([number]) * LARGE for number in range(2)]
    results = race([lambda data=data: storage.write("a", CopiedSource(data), CancelToken()) for data in said])  # type: ignore[misc]
    assert sorted(results) == ["checkpoint_exists", "done"]
    assert content(storage, "a") == said[results.index("done")]


def test_missing_file_raises_file_missing(storage: Storage) -> None:
    storage.publish("a", b"")

    def opened() -> None:
        with storage.open("b"):
            raise AssertionError

    for act in (opened, lambda: storage.read("b", 10), lambda: storage.move("b", "c"), lambda: storage.read("d/b", 10)):
        assert code_of(act) == "checkpoint_file_missing"
    assert names(storage) == ["a"]


def test_a_file_that_is_larger_than_wanted_is_not_read(storage: Storage) -> None:
    storage.publish("a", b"12345")
    assert storage.read("a", 5) == b"12345"
    assert code_of(lambda: storage.read("a", 4)) == "checkpoint_file_large"


def test_names_are_found_by_their_beginning(storage: Storage) -> None:
    here = ["run/step-1.metadata.json", "run/step-1/a", "run/step-1/b", "run/step-10/a", "run-2/step-1/a", "other"]
    for name in here:
        storage.publish(name, b"x")
    assert names(storage) == sorted(here)
    for under in ["run", "run/", "run/step-1", "run/step-1/", "run/step-1/a", "run/step-10/", "o", "nowhere", "run/x/"]:
        assert names(storage, under) == sorted(name for name in here if name.startswith(under))


def test_an_empty_storage_has_no_names(storage: Storage) -> None:
    assert names(storage) == []
    assert names(storage, "run/") == []


def test_an_entry_tells_when_it_was_written(storage: Storage) -> None:
    storage.publish("a", b"")
    written_at = next(iter(storage.entries())).modified_at
    assert isinstance(storage, MemoryStorage) or abs(written_at - time.time()) < CLOCKS_DIFFER_BY_S


def test_moved_file_has_only_its_new_name(storage: Storage) -> None:
    storage.publish("a.metadata.json", b"1")
    storage.move("a.metadata.json", "elsewhere/a.deleted.json")
    assert names(storage) == ["elsewhere/a.deleted.json"]
    assert storage.read("elsewhere/a.deleted.json", 10) == b"1"


def test_moving_replaces(storage: Storage) -> None:
    storage.publish("a", b"1")
    storage.publish("b", b"2")
    storage.move("a", "b")
    assert names(storage) == ["b"]
    assert storage.read("b", 10) == b"1"


def test_moving_twice_is_no_error(storage: Storage) -> None:
    storage.publish("a", b"1")
    storage.move("a", "b")
    storage.move("a", "b")
    assert storage.read("b", 10) == b"1"


def test_a_name_that_was_moved_away_can_be_given_anew(storage: Storage) -> None:
    storage.publish("a", b"1")
    storage.move("a", "b")
    storage.publish("a", b"2")
    assert names(storage) == ["a", "b"]


def test_delete_removes_files_and_ignores_missing_ones(storage: Storage) -> None:
    for number in range(12):
        storage.publish(f"run/{number}/a", b"")
    storage.delete([f"run/{number}/a" for number in range(1, 20)])
    assert names(storage) == ["run/0/a"]
    storage.delete([])
    storage.delete({"nothing"})
    storage.delete(["run/0/a"])
    assert names(storage) == []


def test_deleted_names_can_be_given_anew(storage: Storage) -> None:
    storage.write("run/a", CopiedSource(b"1"), CancelToken())
    storage.delete(["run/a"])
    storage.write("run/a", CopiedSource(b"2"), CancelToken())
    assert content(storage, "run/a") == b"2"


def test_cancelled_operation_leaves_no_file(storage: Storage) -> None:
    token = CancelToken()
    source = FailingSource(pattern(LARGE), BLOCK_BYTES, token.cancel)
    assert code_of(lambda: storage.write("run/a", source, token)) == "checkpoint_cancelled"
    assert names(storage) == []


def test_timed_out_operation_leaves_no_file(storage: Storage) -> None:
    token = CancelToken(1.0, iter([0.0, *[2.0] * 99]).__next__)
    with pytest.raises(CheckpointException) as caught:
        storage.write("run/a", CopiedSource(pattern(LARGE)), token)
    assert caught.value.type is ExceptionType.TIMEOUT
    assert names(storage) == []


@pytest.mark.parametrize("size", [10, LARGE])
def test_a_source_that_fails_leaves_nothing(storage: Storage, size: int) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        storage.write("run/a", FailingSource(pattern(size), size // BLOCK_BYTES * BLOCK_BYTES, fail), CancelToken())
    assert names(storage) == []


def test_a_write_that_failed_can_be_done_again(storage: Storage) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        storage.write("run/a", FailingSource(pattern(LARGE), BLOCK_BYTES, fail), CancelToken())
    storage.write("run/a", CopiedSource(pattern(LARGE)), CancelToken())
    assert content(storage, "run/a") == pattern(LARGE)


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_leads_elsewhere(storage: Storage, name: str) -> None:
    storage.publish("a", b"")

    def opened() -> None:
        with storage.open(name):
            raise AssertionError

    acts: list[Callable[[], object]] = [
        lambda: storage.write(name, CopiedSource(b"x"), CancelToken()),
        lambda: storage.publish(name, b"x"),
        opened,
        lambda: storage.read(name, 10),
        lambda: storage.move(name, "b"),
        lambda: storage.move("a", name),
        lambda: storage.delete([name]),
    ]
    assert {code_of(act) for act in acts} == {"checkpoint_name_invalid"}
    assert names(storage) == ["a"]


def test_free_bytes_are_positive_or_unknown(storage: Storage) -> None:
    free = storage.free_bytes()
    assert free is None or free > 0
    assert storage.url
