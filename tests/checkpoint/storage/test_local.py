"""A directory as a storage: what it promises on a real file system, and what it asks of any."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.ports import BLOCK_BYTES, CancelToken, Storage
from forged.checkpoint.storage.files import UNNAMED, Files, SystemFiles
from forged.checkpoint.storage.local import LocalStorage
from forged.checkpoint.storage.rooms import rooms_between
from tests.checkpoint.fixtures.faulty_files import Act, NthFails, failing, with_fault
from tests.checkpoint.fixtures.memory_files import EMPTY, ROOT, WRITTEN_AT, Image, MemoryFiles
from tests.checkpoint.fixtures.sources import PAGE, CopiedSource, FailingSource, pattern

AT = f"{ROOT}/checkpoints"


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "checkpoints")


@pytest.fixture
def files() -> MemoryFiles:
    return MemoryFiles()


def write(storage: Storage, name: str, data: bytes = b"hello") -> None:
    storage.write(name, CopiedSource(data), CancelToken())
    storage.sync_names([name])


def names(storage: Storage, under: str = "") -> set[str]:
    return {entry.name for entry in storage.entries(under)}


def refusal(act: Callable[[], object]) -> CheckpointException:
    with pytest.raises(CheckpointException) as caught:
        act()
    return caught.value


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_it_is_a_storage(storage: LocalStorage) -> None:
    kept: Storage = storage
    assert kept.url.endswith("/checkpoints")


def test_a_relative_directory_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    storage = LocalStorage("checkpoints")
    monkeypatch.chdir("/")
    write(storage, "a")
    assert (tmp_path / "checkpoints/a").read_bytes() == b"hello"


def test_a_directory_behind_a_link_is_fine(tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    (tmp_path / "checkpoints").symlink_to("big")
    write(LocalStorage(tmp_path / "checkpoints"), "p/a")
    assert (tmp_path / "big/p/a").read_bytes() == b"hello"


# Writing.


@pytest.mark.parametrize("size", [0, 1, PAGE, BLOCK_BYTES + 5])
def test_read_returns_written_bytes(storage: LocalStorage, size: int) -> None:
    write(storage, "run/p/a", pattern(size))
    assert storage.read("run/p/a", size) == pattern(size)


def test_no_file_is_written_over(storage: LocalStorage) -> None:
    write(storage, "a", b"old")
    error = refusal(lambda: write(storage, "a", b"new"))
    assert (error.code, error.checkpoint_path) == ("checkpoint_exists", "a")
    assert storage.read("a", 10) == b"old"


def test_many_files_are_written_at_once(storage: LocalStorage) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: write(storage, f"p{number % 3}/{number}", pattern(number * 1000)), range(24)))
    for number in range(24):
        assert storage.read(f"p{number % 3}/{number}", 1 << 20) == pattern(number * 1000)


def test_a_source_that_fails_leaves_nothing_behind(storage: LocalStorage) -> None:
    write(storage, "q/a")

    def fail() -> None:
        raise ValueError("mine")

    before = open_descriptors()
    with pytest.raises(ValueError, match="mine"):
        storage.write("run/p/a", FailingSource(pattern(2 * BLOCK_BYTES), BLOCK_BYTES, fail), CancelToken())
    assert names(storage) == {"q/a"}
    assert [path.name for path in Path(storage.url).iterdir()] == ["q"]
    assert open_descriptors() == before


def test_cancelled_write_leaves_no_file(storage: LocalStorage) -> None:
    token = CancelToken()
    error = refusal(
        lambda: storage.write("p/a", FailingSource(pattern(3 * BLOCK_BYTES), BLOCK_BYTES, token.cancel), token)
    )
    assert error.code == "checkpoint_cancelled"
    assert list(Path(storage.url).iterdir()) == []


@pytest.mark.parametrize("lacking", [(), ("reserve",)])
def test_a_disk_without_room_says_how_much_is_missing_before_anything_is_written(lacking: tuple[str, ...]) -> None:
    files = MemoryFiles(room=PAGE, lacking=lacking)
    error = refusal(lambda: write(LocalStorage(AT, files=files), "p/a", pattern(PAGE + 100)))
    assert (error.code, error.retryable) == ("checkpoint_disk_full", False)
    assert "100 too few" in error.message
    assert not any(operation.kind == "write" for operation in files.operations)
    assert files.image.files == {}
    assert files.image.directories == {*EMPTY.directories, AT}


@pytest.mark.parametrize("operation", ["open", "reserve", "write", "truncate", "sync", "close"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_refusal_while_it_is_written_is_typed_and_leaves_nothing_behind(operation: str, code: int) -> None:
    files = MemoryFiles()
    storage = LocalStorage(AT, files=with_fault(files, failing(operation, code)))
    error = refusal(lambda: storage.write("p/a", CopiedSource(pattern(PAGE + 1)), CancelToken()))
    assert error.type is ExceptionType.STORAGE_ERROR
    assert files.image.files == {}
    assert f"{AT}/p" not in files.image.directories
    assert files.descriptors == 0


def test_a_sync_that_failed_is_not_tried_again_on_the_same_file(files: MemoryFiles) -> None:
    storage = LocalStorage(AT, files=with_fault(files, failing("sync", errno.EIO, times=1)))
    assert refusal(lambda: write(storage, "p/a")).retryable
    assert files.image.files == {}
    write(storage, "p/a")


@pytest.mark.parametrize("number", [errno.EIO, errno.ETIMEDOUT])
def test_a_sync_of_a_directory_that_failed_is_not_tried_again(files: MemoryFiles, number: int) -> None:
    """It may succeed then without having written what the first one was to write."""
    write(LocalStorage(AT, files=files), "p/a")
    for act in (
        lambda storage: storage.sync_names(["p/a"]),
        lambda storage: storage.publish("p/b", b"x"),
        lambda storage: storage.move("p/a", "p/c"),
        lambda storage: storage.delete(["p/c"]),
    ):
        storage = LocalStorage(AT, files=with_fault(files, failing("sync_directory", number, times=1)))
        assert not refusal(lambda storage=storage, act=act: act(storage)).retryable  # type: ignore[misc]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_a_directory_that_could_not_be_opened_to_be_synced_may_be_synced_later(files: MemoryFiles, number: int) -> None:
    write(LocalStorage(AT, files=files), "p/a")
    storage = LocalStorage(AT, files=with_fault(files, failing("sync_directory", number, times=1)))
    assert refusal(lambda: storage.sync_names(["p/a"])).retryable
    storage.sync_names(["p/a"])


def test_directory_with_a_failed_sync_is_removed(files: MemoryFiles) -> None:
    """A later call that found the directory would not sync its parent."""
    storage = LocalStorage(f"{ROOT}/a/b", files=with_fault(files, NthFails(1, "sync_directory", errno.EIO)))
    assert not refusal(lambda: write(storage, "p")).retryable
    assert files.image.directories == {"/", ROOT, f"{ROOT}/a"}
    files.operations.clear()
    write(storage, "p")
    assert synced(files)[0] == f"{ROOT}/a"


def test_directory_removed_meanwhile_is_made_again(files: MemoryFiles) -> None:
    removals = iter(range(3))

    def fault(number: int, name: str, act: Act) -> Any:
        result = act()
        if name == "make_directory" and f"{AT}/p" in files.image.directories and next(removals, None) is not None:
            files.remove_directory(f"{AT}/p")
        return result

    write(LocalStorage(AT, files=with_fault(files, fault)), "p/a")
    assert files.image.files == {f"{AT}/p/a": b"hello"}


def test_a_directory_that_was_made_for_nothing_goes_again(files: MemoryFiles) -> None:
    def fault(number: int, name: str, act: Act) -> Any:
        if name == "open" and f"{AT}/run/p" in files.image.directories:
            raise OSError(errno.EMFILE, "too many")
        return act()

    storage = LocalStorage(AT, files=with_fault(files, fault))
    assert refusal(lambda: write(storage, "run/p/a")).retryable
    assert files.image.directories == {*EMPTY.directories, AT}


def test_a_file_where_a_directory_is_needed_is_an_obstruction(storage: LocalStorage) -> None:
    write(storage, "p")
    assert refusal(lambda: write(storage, "p/a")).code == "checkpoint_storage_obstructed"
    assert refusal(lambda: storage.publish("p/a", b"")).code == "checkpoint_storage_obstructed"


# Durability: what is synced, and how often.


def synced(files: MemoryFiles) -> list[str]:
    return [operation.path for operation in files.operations if operation.kind == "sync directory"]


def test_settling_syncs_every_directory_once_up_to_the_storage(files: MemoryFiles) -> None:
    storage = LocalStorage(AT, files=files)
    for name in ("run/p/a", "run/p/b", "run/q/a"):
        storage.write(name, CopiedSource(b"x"), CancelToken())
    files.operations.clear()
    storage.sync_names(["run/p/a", "run/p/b", "run/q/a"])
    assert synced(files) == [f"{AT}/run/q", f"{AT}/run/p", f"{AT}/run", AT]


def test_the_storages_own_directory_is_made_durable_when_it_is_made(files: MemoryFiles) -> None:
    LocalStorage(f"{ROOT}/a/b", files=files).write("p", CopiedSource(b""), CancelToken())
    assert synced(files) == [ROOT, f"{ROOT}/a"]


def test_a_commit_costs_two_syncs_of_files_and_three_of_directories(files: MemoryFiles) -> None:
    storage = LocalStorage(AT, files=files)
    write(storage, "other")
    files.operations.clear()
    write(storage, "p/a")
    storage.publish("p.metadata.json", b"{}")
    kinds = Counter(operation.kind for operation in files.operations)
    assert (kinds["sync"], synced(files)) == (2, [f"{AT}/p", AT, AT])


def test_sync_of_a_missing_name_raises(storage: LocalStorage) -> None:
    assert refusal(lambda: storage.sync_names(["p/a"])).code == "checkpoint_file_missing"


def test_a_file_system_that_syncs_no_directories_is_taken_at_its_word(files: MemoryFiles) -> None:
    storage = LocalStorage(AT, files=with_fault(files, failing("sync_directory", errno.EINVAL)))
    write(storage, "p/a")
    storage.delete(["p/a"])
    assert names(storage) == set()


# Publishing.

LACKING = [(), ("unnamed",), ("link_open",), ("unnamed", "link"), ("link_open", "link")]


@pytest.mark.parametrize("lacking", LACKING)
def test_a_published_file_is_whole_and_alone(lacking: tuple[str, ...]) -> None:
    files = MemoryFiles(lacking=lacking)
    LocalStorage(AT, files=files).publish("run/p.metadata.json", b"hello")
    assert files.image.files == {f"{AT}/run/p.metadata.json": b"hello"}
    assert files.descriptors == 0


@pytest.mark.parametrize("lacking", LACKING)
def test_a_published_file_has_no_name_before_its_bytes_are_durable(lacking: tuple[str, ...]) -> None:
    files = MemoryFiles(lacking=lacking)
    LocalStorage(AT, files=files).publish("p", b"hello")
    told = [(operation.kind, operation.path) for operation in files.operations]
    assert ("sync", "") in told[: told.index(("name", f"{AT}/p"))]
    assert ("sync directory", AT) in told[told.index(("name", f"{AT}/p")) :]


@pytest.mark.parametrize("lacking", LACKING)
def test_nothing_is_published_in_place_of_another(lacking: tuple[str, ...]) -> None:
    files = MemoryFiles(Image({f"{AT}/p": b"old"}, EMPTY.directories | {AT}), lacking)
    assert refusal(lambda: LocalStorage(AT, files=files).publish("p", b"new")).code == "checkpoint_exists"
    assert files.image.files == {f"{AT}/p": b"old"}
    assert files.descriptors == 0


@pytest.mark.parametrize("is_hidden", [False, True], ids=["unnamed", "hidden"])
def test_one_of_many_publishers_wins(storage: LocalStorage, is_hidden: bool, tmp_path: Path) -> None:
    if is_hidden:
        storage = LocalStorage(storage.url, files=without_unnamed())
    start, codes = threading.Barrier(8), []

    def publish(number: int) -> None:
        start.wait()
        try:
            storage.publish("p", b"%d" % number * 1000)
            codes.append(f"{number}")
        except CheckpointException as error:
            codes.append(error.code)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(publish, range(8)))
    [winner] = [code for code in codes if code != "checkpoint_exists"]
    assert storage.read("p", 1000) == winner.encode() * 1000
    assert [path.name for path in Path(storage.url).iterdir()] == ["p"]


def without_unnamed() -> Files:
    def fault(number: int, name: str, act: Act) -> Any:
        if name == "open" and act.args[1] == UNNAMED:  # type: ignore[attr-defined]
            raise OSError(errno.EOPNOTSUPP, "no")
        return act()

    return with_fault(SystemFiles(), fault)


@pytest.mark.parametrize("lacking", LACKING)
@pytest.mark.parametrize("operation", ["write", "sync", "close", "link", "rename_new", "link_open"])
def test_a_refusal_while_it_is_published_leaves_nothing_but_perhaps_the_file(
    operation: str, lacking: tuple[str, ...]
) -> None:
    files = MemoryFiles(lacking=lacking)
    storage = LocalStorage(AT, files=with_fault(files, failing(operation, errno.EIO)))
    with suppress(CheckpointException):
        storage.publish("p", b"hello")
        assert files.image.files == {f"{AT}/p": b"hello"}
    storage.delete(["p"])
    assert files.image.files == {}
    assert files.descriptors == 0


@pytest.mark.parametrize(("age_s", "left"), [(3601.0, {"p"}), (3599.0, {"p", ".0123.tmp"})])
def test_old_hidden_temporary_files_are_deleted(age_s: float, left: set[str]) -> None:
    files = MemoryFiles(Image({f"{AT}/.0123.tmp": b"half"}, EMPTY.directories | {AT}), lacking=["unnamed"])
    LocalStorage(AT, files=files, wall=lambda: WRITTEN_AT + age_s).publish("p", b"whole")
    assert set(files.image.files) == {f"{AT}/{name}" for name in left}


def test_publish_succeeds_although_its_temporary_name_stays() -> None:
    files = MemoryFiles(lacking=["unnamed"])
    LocalStorage(AT, files=with_fault(files, failing("unlink", errno.EIO))).publish("p", b"whole")
    assert files.image.files[f"{AT}/p"] == b"whole"
    assert names(LocalStorage(AT, files=files)) == {"p"}


# Reading.


def test_missing_file_is_named_in_the_error(storage: LocalStorage) -> None:
    for name in ("a", "p/a"):
        error = refusal(lambda name=name: storage.read(name, 10))  # type: ignore[misc]
        assert (error.code, error.checkpoint_path) == ("checkpoint_file_missing", name)


def test_a_file_larger_than_expected_is_not_read(storage: LocalStorage) -> None:
    write(storage, "a", b"hello")
    assert storage.read("a", 5) == b"hello"
    assert refusal(lambda: storage.read("a", 4)).code == "checkpoint_file_large"


def test_any_part_of_a_file_is_read(storage: LocalStorage) -> None:
    write(storage, "a", pattern(10_000))
    with storage.open("a") as reader:
        room = memoryview(bytearray(100))
        reader.read_into(5_000, room)
        assert (reader.size, bytes(room)) == (10_000, pattern(10_000)[5_000:5_100])
        reader.read_into(10_000, room[:0])


@pytest.mark.parametrize("offset", [9_950, 10_000, 1 << 40])
def test_a_file_that_ends_too_soon_is_corrupt(storage: LocalStorage, offset: int) -> None:
    write(storage, "a", pattern(10_000))
    with storage.open("a") as reader:
        error = refusal(lambda: reader.read_into(offset, memoryview(bytearray(100))))
    assert (error.code, error.type) == ("checkpoint_file_short", ExceptionType.CORRUPTED_CHECKPOINT)
    assert error.checkpoint_path == "a"


def test_a_file_that_is_cut_off_while_it_is_open_is_corrupt(storage: LocalStorage) -> None:
    write(storage, "a", pattern(10_000))
    with storage.open("a") as reader:
        os.truncate(f"{storage.url}/a", 10)
        error = refusal(lambda: reader.read_into(0, memoryview(bytearray(100))))
    assert error.code == "checkpoint_file_short"


def test_short_and_interrupted_reads_are_gone_on_with(files: MemoryFiles) -> None:
    write(LocalStorage(AT, files=files), "a", pattern(10_000))
    interruptions = iter(range(3))

    def fault(number: int, name: str, act: Act) -> Any:
        if name != "read":
            return act()
        if next(interruptions, None) is not None:
            raise InterruptedError(errno.EINTR, "signal")
        fd, rooms, offset = act.args  # type: ignore[attr-defined]
        return files.read(fd, rooms_between(rooms, 0, 999), offset)

    assert LocalStorage(AT, files=with_fault(files, fault)).read("a", 10_000) == pattern(10_000)


def test_a_read_that_fails_is_typed(files: MemoryFiles) -> None:
    write(LocalStorage(AT, files=files), "a")
    for operation in ("open", "size", "read"):
        storage = LocalStorage(AT, files=with_fault(files, failing(operation, errno.EIO)))
        error = refusal(lambda storage=storage: storage.read("a", 10))  # type: ignore[misc]
        assert (error.code, error.retryable) == ("checkpoint_storage_io", True)
        assert files.descriptors == 0


def test_read_succeeds_although_close_fails(files: MemoryFiles) -> None:
    write(LocalStorage(AT, files=files), "a")
    assert LocalStorage(AT, files=with_fault(files, failing("close", errno.EIO))).read("a", 10) == b"hello"
    assert files.descriptors == 0


def test_a_file_is_memory_that_outlives_the_reader(storage: LocalStorage) -> None:
    write(storage, "a", b"hello")
    with storage.open("a") as reader:
        memory = reader.mapped()
    assert memory is not None
    assert (bytes(memory), memory.readonly) == (b"hello", True)


def test_an_empty_file_is_read_and_mapped(storage: LocalStorage) -> None:
    write(storage, "a", b"")
    with storage.open("a") as reader:
        memory = reader.mapped()
        assert memory is not None
        assert (reader.size, bytes(memory)) == (0, b"")


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), os.mkfifo], ids=["directory", "pipe"])
def test_special_file_is_not_read(storage: LocalStorage, make: Callable[[Path], None]) -> None:
    write(storage, "a")
    make(Path(storage.url, "odd"))
    before = open_descriptors()
    assert refusal(lambda: storage.read("odd", 10)).code == "checkpoint_storage_obstructed"
    assert open_descriptors() == before


# Links.


@pytest.fixture
def outside(tmp_path: Path, storage: LocalStorage) -> Iterator[Path]:
    """A directory beside the storage, with a link to it in the storage, and one to a file in it."""
    write(storage, "a")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a").write_bytes(b"secret")
    Path(storage.url, "out").symlink_to(outside)
    Path(storage.url, "file").symlink_to(outside / "a")
    yield outside
    assert [(path.name, path.read_bytes()) for path in outside.iterdir()] == [("a", b"secret")]


@pytest.mark.parametrize(
    "act",
    [
        lambda storage: storage.write("out/b", CopiedSource(b""), CancelToken()),
        lambda storage: storage.publish("out/b", b""),
        lambda storage: storage.read("out/a", 10),
        lambda storage: storage.read("file", 10),
        lambda storage: storage.move("a", "out/b"),
        lambda storage: storage.move("out/a", "b"),
        lambda storage: storage.delete(["out/a"]),
        lambda storage: storage.sync_names(["out/a"]),
        lambda storage: list(storage.entries("out/")),
    ],
)
def test_no_link_leads_out(storage: LocalStorage, outside: Path, act: Callable[[LocalStorage], object]) -> None:
    assert refusal(lambda: act(storage)).code == "checkpoint_storage_obstructed"


def test_delete_removes_the_link_and_keeps_its_target(storage: LocalStorage, outside: Path) -> None:
    storage.delete(["file"])
    assert not Path(storage.url, "file").is_symlink()


def test_no_link_is_listed_or_followed(storage: LocalStorage, outside: Path) -> None:
    Path(storage.url, "loop").symlink_to(storage.url)
    assert names(storage) == {"a"}


def test_link_within_the_storage_is_followed(storage: LocalStorage) -> None:
    write(storage, "step-1/a")
    Path(storage.url, "latest").symlink_to("step-1")
    assert storage.read("latest/a", 10) == b"hello"


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../a", "p/../a", "p//a", "p/", ".hidden", "a\0b"])
def test_no_name_leads_out(storage: LocalStorage, name: str) -> None:
    write(storage, "a")
    for act in (
        lambda: storage.write(name, CopiedSource(b""), CancelToken()),
        lambda: storage.publish(name, b""),
        lambda: storage.read(name, 10),
        lambda: storage.move("a", name),
        lambda: storage.move(name, "b"),
        lambda: storage.delete([name]),
        lambda: storage.sync_names([name]),
    ):
        assert refusal(act).code == "checkpoint_name_invalid"
    assert names(storage) == {"a"}


def test_a_path_that_the_file_system_finds_too_long_is_refused(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path.joinpath(*["x" * 250] * 15))
    assert refusal(lambda: write(storage, "/".join(["x" * 249] * 4))).code == "checkpoint_name_long"


# Listing.


def test_entries_are_listed_by_prefix(storage: LocalStorage) -> None:
    every = {"run/p-1/a", "run/p-1.metadata.json", "run/p-10/a", "run/q", "p", "other/run"}
    for name in every:
        write(storage, name)
    assert names(storage) == every
    assert names(storage, "run/p-1") == {"run/p-1/a", "run/p-1.metadata.json", "run/p-10/a"}
    assert names(storage, "run/p-1/") == {"run/p-1/a"}
    assert names(storage, "p") == {"p"}
    assert names(storage, "missing/") == names(storage, "p/") == set()


def test_entry_has_size_and_modification_time(storage: LocalStorage) -> None:
    write(storage, "a")
    os.utime(f"{storage.url}/a", (1.0, 1_000.5))
    [entry] = storage.entries()
    assert (entry.name, entry.size, entry.modified_at) == ("a", 5, 1_000.5)


def test_a_storage_that_is_not_there_yet_has_no_files(tmp_path: Path) -> None:
    assert names(LocalStorage(tmp_path / "missing")) == set()
    assert not (tmp_path / "missing").exists()


def test_names_that_begin_with_a_dot_are_not_listed(storage: LocalStorage) -> None:
    write(storage, "a")
    Path(storage.url, ".0123.tmp").touch()
    Path(storage.url, ".snapshot").mkdir()
    Path(storage.url, ".snapshot/a").touch()
    assert names(storage) == {"a"}


def test_files_that_go_while_they_are_listed_are_left_out(storage: LocalStorage) -> None:
    for name in ("p/a", "q/a"):
        write(storage, name)
    found = storage.entries()
    first = next(found).name
    storage.delete(["p/a", "q/a"])
    assert [entry.name for entry in found] == []
    assert first in {"p/a", "q/a"}


def test_inaccessible_directory_is_skipped_unless_it_is_the_root(files: MemoryFiles) -> None:
    storage = LocalStorage(AT, files=files)
    write(storage, "a")
    write(storage, "lost+found/b")

    def closed(directory: str) -> LocalStorage:
        def fault(number: int, name: str, act: Act) -> Any:
            if name == "scan" and act.args == (directory,):  # type: ignore[attr-defined]
                raise PermissionError(errno.EACCES, "no")
            return act()

        return LocalStorage(AT, files=with_fault(files, fault))

    assert names(closed(f"{AT}/lost+found")) == {"a"}
    assert refusal(lambda: names(closed(AT))).code == "checkpoint_storage_denied"


def test_a_listing_that_fails_is_typed(files: MemoryFiles) -> None:
    storage = LocalStorage(AT, files=with_fault(files, failing("scan", errno.EIO)))
    assert refusal(lambda: names(storage)).code == "checkpoint_storage_io"


# Moving.


def test_a_file_moves_in_place_of_another(storage: LocalStorage) -> None:
    write(storage, "a", b"new")
    write(storage, "b", b"old")
    storage.move("a", "b")
    assert (names(storage), storage.read("b", 10)) == ({"b"}, b"new")


def test_a_move_that_was_done_already_is_made_durable(files: MemoryFiles) -> None:
    storage = LocalStorage(AT, files=files)
    write(storage, "b")
    files.operations.clear()
    storage.move("a", "b")
    assert synced(files) == [AT]


def test_move_of_a_missing_file_raises(storage: LocalStorage) -> None:
    assert refusal(lambda: storage.move("a", "b")).code == "checkpoint_file_missing"


def test_a_move_makes_the_directory_that_it_needs_and_both_durable(files: MemoryFiles) -> None:
    storage = LocalStorage(AT, files=files)
    write(storage, "p/a")
    files.operations.clear()
    storage.move("p/a", "new/a")
    assert files.image.files == {f"{AT}/new/a": b"hello"}
    assert synced(files) == [f"{AT}/new", AT, f"{AT}/p"]


# Deleting.


def test_delete_removes_files_and_emptied_directories(storage: LocalStorage) -> None:
    for name in ("run/p/a", "run/p/b", "run/q/a"):
        write(storage, name)
    storage.delete(["run/p/a", "run/p/b", "run/p/missing", "missing/a"])
    assert names(storage) == {"run/q/a"}
    assert not Path(storage.url, "run/p").exists()
    storage.delete(["run/q/a"])
    assert list(Path(storage.url).iterdir()) == []


def test_deletion_by_another_process_is_synced(files: MemoryFiles) -> None:
    storage = LocalStorage(AT, files=files)
    for name in ("p/a", "q/a", "q/b"):
        write(storage, name)
    files.unlink(f"{AT}/p/a")
    files.remove_directory(f"{AT}/p")
    files.unlink(f"{AT}/q/a")
    files.operations.clear()
    storage.delete(["p/a", "q/a"])
    assert set(synced(files)) == {AT, f"{AT}/q"}


def test_file_that_cannot_be_removed_does_not_stop_the_deletion(storage: LocalStorage) -> None:
    write(storage, "p/a")
    write(storage, "p/dir/b")
    write(storage, "q/a")
    assert refusal(lambda: storage.delete(["p/dir", "p/a", "q/a"])).code == "checkpoint_storage_obstructed"
    assert names(storage) == {"p/dir/b"}


def test_a_directory_that_cannot_be_removed_stays(files: MemoryFiles) -> None:
    storage = LocalStorage(AT, files=with_fault(files, failing("remove_directory", errno.EACCES)))
    write(storage, "p/a")
    storage.delete(["p/a"])
    assert (names(storage), f"{AT}/p" in files.image.directories) == (set(), True)


def test_a_deletion_that_cannot_be_made_durable_is_none(files: MemoryFiles) -> None:
    storage = LocalStorage(AT, files=files)
    write(storage, "a")
    storage = LocalStorage(AT, files=with_fault(files, failing("sync_directory", errno.EIO)))
    assert refusal(lambda: storage.delete(["a"])).code == "checkpoint_storage_io"


# Room.


def test_free_bytes_are_known_before_the_directory_exists(tmp_path: Path) -> None:
    free = LocalStorage(tmp_path / "not/yet").free_bytes()
    assert free is not None
    assert free > 0


def test_failed_query_of_free_bytes_raises(files: MemoryFiles) -> None:
    storage = LocalStorage(AT, files=with_fault(files, failing("free_bytes", errno.EIO)))
    assert refusal(storage.free_bytes).code == "checkpoint_storage_io"
