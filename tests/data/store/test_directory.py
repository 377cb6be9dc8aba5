from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import multiprocessing
import os
import shutil
import signal
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged import file_sync
from forged.data.model import Dataset
from forged.data.store import directory
from forged.data.store.directory import DirectoryShardStore, name_of
from forged.data.store.errors import StoreFailed
from forged.data.store.port import PartialShard, Stamp
from forged.errors import ConfigError, ForgedError, RequestRefused
from tests.data.transfer_cluster import open_descriptors
from tests.worker.meshes import PATIENCE_S

DATA = bytes(range(256)) * 20
STAMP = Stamp.of(DATA)


@pytest.fixture
def store(tmp_path: Path) -> DirectoryShardStore:
    return DirectoryShardStore(tmp_path / "shards")


def reopened(store: DirectoryShardStore) -> DirectoryShardStore:
    """The store as another process opens it."""
    return DirectoryShardStore(store.path)


def names(store: DirectoryShardStore) -> list[str]:
    return sorted(path.name for path in store.path.iterdir())


def code_of(action: Callable[[], object]) -> str:
    with pytest.raises(ForgedError) as raised:
        action()
    return raised.value.code


def test_reopened_store_finds_held_and_partial_shards(store: DirectoryShardStore) -> None:
    store.put(7, [DATA])
    with store.receive(8, STAMP) as arriving:
        arriving.write(DATA[:99])
    found = reopened(store)
    assert found.held() == {7: STAMP}
    assert found.partial(8) == PartialShard(STAMP, 99)
    with found.receive(8, STAMP, 99) as arriving:
        arriving.write(DATA[99:])
        arriving.commit()
    assert reopened(store).held() == {7: STAMP, 8: STAMP}


def test_file_name_carries_number_and_stamp(store: DirectoryShardStore) -> None:
    store.put(7, [DATA])
    assert names(store) == [name_of(7, STAMP)]
    assert store.path_of(7) == store.path / name_of(7, STAMP)
    assert store.path_of(7).read_bytes() == DATA


def test_file_without_a_stamp_is_removed_on_open(store: DirectoryShardStore) -> None:
    (store.path / "shard-7.part").write_bytes(DATA)
    found = reopened(store)
    assert names(found) == []


def test_file_being_written_by_a_live_process_is_kept(store: DirectoryShardStore) -> None:
    with store.receive(7, None) as arriving:
        arriving.write(DATA)
        context = multiprocessing.get_context("fork")
        near, far = context.Pipe()
        process = context.Process(target=lambda: far.send(names(reopened(store))))
        process.start()
        assert near.recv() == ["shard-7.part"]
        process.join()
        arriving.commit()
    assert store.holds(7)


def test_second_process_cannot_write_the_same_shard(store: DirectoryShardStore) -> None:
    with store.receive(7, STAMP) as arriving:
        arriving.write(DATA)
        context = multiprocessing.get_context("fork")
        near, far = context.Pipe()
        process = context.Process(target=lambda: far.send(code_of(lambda: reopened(store).receive(7, STAMP))))
        process.start()
        assert near.recv() == "shard_arriving"
        process.join()
        assert arriving.commit() == STAMP


@pytest.mark.parametrize(
    "name",
    [
        "shard-7",
        "shard-7.5120",
        f"shard-7.5120.{STAMP.checksum.hex()}.tmp",
        f"shard-7.5120.{STAMP.checksum.hex().upper()}",
        f"shard-07.5120.{STAMP.checksum.hex()}",
        f"shard--7.5120.{STAMP.checksum.hex()}",
        f"shard-7.5119.{STAMP.checksum.hex()}",
        f"shard-7.5120.{STAMP.checksum.hex()[:-1]}",
        f"shard-7.5120.{STAMP.checksum.hex()}\n",
        "shard-७.5120." + STAMP.checksum.hex(),
        "readme.txt",
    ],
)
def test_files_of_other_names_or_lengths_are_no_shards(store: DirectoryShardStore, name: str) -> None:
    (store.path / name).write_bytes(DATA)
    found = reopened(store)
    assert not found.held()
    assert found.partial(7) is None
    assert names(found) == [name]


@given(st.text(max_size=40))
def test_only_names_made_by_name_of_are_parsed(text: str) -> None:
    found = directory._NAME.match(text)
    if found is not None:
        stamp = Stamp(int(found[2]), bytes.fromhex(found[3]))
        assert name_of(int(found[1]), stamp) + (found[4] or "") == text


def test_links_and_directories_are_no_shards(store: DirectoryShardStore, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(DATA)
    (store.path / name_of(1, STAMP)).symlink_to(secret)
    (store.path / name_of(2, STAMP)).mkdir()
    (store.path / (name_of(3, STAMP) + ".part")).symlink_to(secret)
    found = reopened(store)
    assert not found.held()
    assert found.partial(3) is None
    assert code_of(lambda: found.receive(3, STAMP)) == "shard_store_failed"
    assert secret.read_bytes() == DATA


def test_link_in_place_of_a_shard_is_not_followed(store: DirectoryShardStore, tmp_path: Path) -> None:
    store.put(7, [DATA])
    secret = tmp_path / "secret"
    secret.write_bytes(DATA)
    store.path_of(7).unlink()
    (store.path / name_of(7, STAMP)).symlink_to(secret)
    assert code_of(lambda: store.open(7)) == "shard_damaged"
    assert not store.holds(7)


@pytest.mark.parametrize("change", [lambda path: os.truncate(path, 10), lambda path: path.unlink()])
def test_truncated_or_deleted_file_is_not_listed_as_held(
    store: DirectoryShardStore, change: Callable[[Path], None]
) -> None:
    for shard in (6, 7):
        store.put(shard, [DATA])
    change(store.path_of(7))
    assert store.held() == {6: STAMP}
    assert not store.holds(7)
    store.put(7, [DATA])
    assert store.held() == {6: STAMP, 7: STAMP}


def test_pipe_in_place_of_a_shard_does_not_block(store: DirectoryShardStore) -> None:
    store.put(7, [DATA])
    path = store.path_of(7)
    path.unlink()
    os.mkfifo(path)
    assert code_of(lambda: store.open(7)) == "shard_damaged"
    assert not store.holds(7)
    os.mkfifo(store.path / (name_of(8, STAMP) + ".part"))
    assert code_of(lambda: store.receive(8, STAMP)) == "shard_store_failed"


@pytest.mark.parametrize("change", [lambda path: os.truncate(path, 10), lambda path: path.unlink()])
def test_opening_a_truncated_or_deleted_file_raises_shard_damaged(
    store: DirectoryShardStore, change: Callable[[Path], None]
) -> None:
    store.put(7, [DATA])
    change(store.path_of(7))
    with pytest.raises(RequestRefused) as raised:
        store.open(7)
    assert raised.value.code == "shard_damaged"
    assert "shard 7" in raised.value.message
    assert not store.held()


def rewrite(path: Path) -> None:
    before = path.stat()
    path.write_bytes(DATA[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


def replace(path: Path) -> None:
    before = path.stat()
    other = path.with_name("other")
    other.write_bytes(DATA)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize("change", [rewrite, replace, lambda path: os.truncate(path, 0)])
def test_modified_or_replaced_file_has_changed(store: DirectoryShardStore, change: Callable[[Path], None]) -> None:
    store.put(7, [DATA])
    with store.open(7) as opened:
        assert not opened.has_changed()
        change(store.path_of(7))
        assert opened.has_changed()


def test_file_is_synced_before_its_rename_and_the_directory_before_the_shard_is_held(
    store: DirectoryShardStore,
) -> None:
    events: list[str] = []

    def fsync(fd: int) -> None:
        events.append(f"sync {Path(f'/proc/self/fd/{fd}').readlink().name} held {store.holds(7)}")

    with patch("os.fsync", fsync):
        store.put(7, [DATA])
    assert events == ["sync shard-7.part held False", "sync shards held False"]


def test_write_back_starts_while_bytes_arrive(store: DirectoryShardStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "WRITE_BACK_BYTES", 2000)
    begun: list[tuple[str, int, int]] = []

    def begin_write_back(fd: int, offset: int, count: int) -> None:
        begun.append((Path(f"/proc/self/fd/{fd}").readlink().name, offset, count))

    with patch("forged.file_sync.begin_write_back", begin_write_back), store.receive(7, None) as arriving:
        for start in range(0, len(DATA), 1500):
            arriving.write(DATA[start : start + 1500])
        assert begun == [("shard-7.part", 0, 3000), ("shard-7.part", 3000, len(DATA) - 3000)]
        arriving.commit()


def test_failed_write_back_is_left_to_the_final_sync(
    store: DirectoryShardStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "WRITE_BACK_BYTES", 1)
    with patch("forged.file_sync.begin_write_back", side_effect=OSError(errno.EIO, "it cannot")) as refused:
        store.put(7, [DATA])
    assert refused.called
    assert store.path_of(7).read_bytes() == DATA
    with patch("os.fsync", side_effect=OSError(28, "full")), pytest.raises(StoreFailed) as raised:
        store.put(8, [DATA])
    assert raised.value.code == "disk_full"
    assert store.held() == {7: STAMP}


@pytest.fixture
def page_aligned() -> memoryview:
    """Two pages and 100 bytes, aligned to a page."""
    memory = memoryview(mmap.mmap(-1, 3 * file_sync.PAGE))[: 2 * file_sync.PAGE + 100]
    memory[:] = os.urandom(len(memory))
    return memory


class RecordedWrites:
    """Records each write, and whether it bypasses the page cache."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, refused: int | None = None) -> None:
        self.seen: list[tuple[int, int, bool]] = []
        self._refused = refused
        self._write = os.pwrite
        monkeypatch.setattr(directory, "BYPASS_CACHE_BYTES_MIN", 2 * file_sync.PAGE)
        monkeypatch.setattr(os, "pwrite", self.write)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        is_past_cache = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        self.seen.append((offset, len(data), is_past_cache))
        if is_past_cache and self._refused is not None:
            raise OSError(self._refused, os.strerror(self._refused))
        return self._write(fd, data, offset)


def test_whole_pages_of_a_large_shard_bypass_the_page_cache(
    store: DirectoryShardStore, page_aligned: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, size = RecordedWrites(monkeypatch), len(page_aligned)
    with store.receive(7, Stamp.of(bytes(page_aligned))) as arriving:
        arriving.write(page_aligned[: file_sync.PAGE])
        arriving.write(page_aligned[file_sync.PAGE : 2 * file_sync.PAGE])
        arriving.write(page_aligned[2 * file_sync.PAGE :])
        arriving.commit()
    assert writes.seen == [
        (0, file_sync.PAGE, True),
        (file_sync.PAGE, file_sync.PAGE, True),
        (2 * file_sync.PAGE, 100, False),
    ]
    assert store.path_of(7).read_bytes() == bytes(page_aligned)
    assert store.held()[7].size == size


def test_unaligned_writes_use_the_page_cache(
    store: DirectoryShardStore, page_aligned: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(page_aligned)
    writes = RecordedWrites(monkeypatch)
    with store.receive(7, Stamp.of(data)) as arriving:
        arriving.write(page_aligned[:10])
        arriving.write(page_aligned[10 : 10 + file_sync.PAGE])
        arriving.write(data[10 + file_sync.PAGE :])
        arriving.commit()
    assert [is_past_cache for _, _, is_past_cache in writes.seen] == [False, False, False]
    assert store.path_of(7).read_bytes() == data


def test_small_and_unsized_shards_use_the_page_cache(
    store: DirectoryShardStore, page_aligned: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, page = RecordedWrites(monkeypatch), page_aligned[: file_sync.PAGE]
    store.put(7, [page_aligned])
    with store.receive(8, Stamp.of(bytes(page))) as arriving:
        arriving.write(page)
        arriving.commit()
    assert [is_past_cache for _, _, is_past_cache in writes.seen] == [False, False]


@pytest.mark.parametrize("refused", [errno.EINVAL, errno.EOPNOTSUPP])
def test_file_system_without_direct_io_uses_the_page_cache(
    store: DirectoryShardStore, page_aligned: memoryview, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    writes = RecordedWrites(monkeypatch, refused=refused)
    with store.receive(7, Stamp.of(bytes(page_aligned))) as arriving:
        arriving.write(page_aligned[: file_sync.PAGE])
        arriving.write(page_aligned[file_sync.PAGE : 2 * file_sync.PAGE])
        arriving.write(page_aligned[2 * file_sync.PAGE :])
        arriving.commit()
    assert [is_past_cache for _, _, is_past_cache in writes.seen] == [True, False, False, False]
    assert store.path_of(7).read_bytes() == bytes(page_aligned)


def test_file_that_refuses_direct_io_uses_the_page_cache(
    store: DirectoryShardStore, page_aligned: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = RecordedWrites(monkeypatch)
    with (
        patch("forged.file_sync.bypass_cache", side_effect=OSError(errno.EINVAL, "it cannot")),
        store.receive(7, Stamp.of(bytes(page_aligned))) as arriving,
    ):
        arriving.write(page_aligned)
        arriving.commit()
    assert writes.seen == [(0, len(page_aligned), False)]


def test_full_disk_is_reported_with_direct_io(
    store: DirectoryShardStore, page_aligned: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    RecordedWrites(monkeypatch, refused=errno.ENOSPC)
    with store.receive(7, Stamp.of(bytes(page_aligned))) as arriving:
        assert code_of(lambda: arriving.write(page_aligned[: file_sync.PAGE])) == "disk_full"
    assert names(store) == []


def test_concurrent_commits_share_a_directory_sync_that_began_after_them(store: DirectoryShardStore) -> None:
    gate, syncing, renamed = threading.Event(), threading.Event(), threading.Barrier(4)
    syncs: list[set[str]] = []

    def sync(path: Path) -> None:
        syncs.append({one.name.split(".")[0] for one in path.iterdir()})
        syncing.set()
        assert gate.wait(PATIENCE_S)

    def put(shard: int) -> None:
        with store.receive(shard, STAMP) as arriving:
            arriving.write(DATA)
            if shard:
                renamed.wait(PATIENCE_S)
            arriving.commit()

    with patch("forged.data.store.directory.sync_directory", sync):
        threads = [threading.Thread(target=put, args=(shard,)) for shard in range(4)]
        threads[0].start()
        assert syncing.wait(PATIENCE_S)
        for thread in threads[1:]:
            thread.start()
        renamed.wait(PATIENCE_S)
        while len(list(store.path.glob("*.part"))):
            pass
        assert not store.held()
        gate.set()
        for thread in threads:
            thread.join()
    assert set(store.held()) == {0, 1, 2, 3}
    assert 2 <= len(syncs) <= 4
    assert {f"shard-{shard}" for shard in range(4)} <= syncs[-1]


@pytest.mark.parametrize("call", ["os.fsync", "pathlib.Path.replace", "forged.data.store.directory.sync_directory"])
def test_shard_that_could_not_be_synced_is_not_held(store: DirectoryShardStore, call: str) -> None:
    with patch(call, side_effect=OSError(5, "the disk is broken")), pytest.raises(StoreFailed) as raised:
        store.put(7, [DATA])
    assert raised.value.code == "shard_store_failed"
    assert names(store) == []
    assert not store.held()
    store.put(7, [DATA])


def test_shard_that_does_not_fit_is_dropped_to_free_its_space(small_disk: Path) -> None:
    store = DirectoryShardStore(small_disk)
    big = bytes(600 << 10)
    store.put(1, [big])
    with store.receive(2, Stamp.of(big)) as arriving, pytest.raises(StoreFailed) as raised:
        arriving.write(big)
    assert raised.value.code == "disk_full"
    assert "shard 2" in raised.value.message
    assert store.partial(2) is None
    store.put(3, [bytes(300 << 10)])
    store.drop(1)
    store.put(2, [big])
    assert set(store.held()) == {2, 3}


def test_unusable_directory_raises_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError):
        DirectoryShardStore(tmp_path / "file")


def test_store_leaks_no_descriptors(store: DirectoryShardStore) -> None:
    before = open_descriptors()
    store.put(1, [DATA])
    with store.open(1):
        pass
    with store.receive(2, STAMP) as arriving:
        arriving.write(DATA[:5])
    code_of(lambda: store.receive(2, STAMP, 4000))
    with store.receive(2, STAMP, 5) as arriving:
        arriving.write(b"x")
        code_of(arriving.commit)
    os.truncate(store.path_of(1), 1)
    code_of(lambda: store.open(1))
    assert open_descriptors() == before


def test_offset_beyond_the_partial_bytes_is_refused(store: DirectoryShardStore) -> None:
    assert code_of(lambda: store.receive(7, STAMP, 1)) == "shard_offset_invalid"
    store.put(7, [DATA])


class BusyThread:
    """A thread that holds the store's locks inside the block."""

    def __init__(self, store: DirectoryShardStore) -> None:
        self._store = store
        self._holds, self._leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold)

    def _hold(self) -> None:
        with self._store._lock, self._store._directory_sync._lock:
            self._holds.set()
            self._leave.wait()

    def __enter__(self) -> None:
        self._thread.start()
        self._holds.wait()

    def __exit__(self, *error: object) -> None:
        self._leave.set()
        self._thread.join()


def exit_code_of_child(act: Callable[[], object]) -> int:
    """The exit code of a forked child that runs `act`; a signal ends a hanging child."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(int(PATIENCE_S))
            act()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_child_forked_during_store_work_can_read_and_write(store: DirectoryShardStore) -> None:
    store.put(7, [DATA])

    def use() -> None:
        assert store.path_of(7).read_bytes() == DATA
        assert store.held() == {7: STAMP}
        store.put(8, [DATA])
        store.drop(7)

    with BusyThread(store):
        assert exit_code_of_child(use) == 0
    assert reopened(store).held() == {8: STAMP}


def test_readers_do_not_wait_for_writers(store: DirectoryShardStore) -> None:
    store.put(7, [DATA])
    with store.receive(8, STAMP) as arriving:
        arriving.write(DATA[:99])
    with BusyThread(store):
        assert store.holds(7)
        assert store.path_of(7).read_bytes() == DATA
        assert store.held() == {7: STAMP}
        assert store.partial(8) == PartialShard(STAMP, 99)
        store.open(7).close()


def test_unreferenced_store_is_garbage_collected(tmp_path: Path) -> None:
    store = DirectoryShardStore(tmp_path)
    known = weakref.ref(store)
    del store
    gc.collect()
    assert known() is None


# A directory that disappears.


@pytest.mark.parametrize("is_dedicated", [True, False])
def test_deleted_directory_is_made_again_for_the_next_shard(store: DirectoryShardStore, is_dedicated: bool) -> None:
    if is_dedicated:
        store.dedicate(Dataset(100, 10))
    store.put(7, [DATA])
    with store.receive(8, STAMP) as arriving:
        arriving.write(DATA[:99])
    before = names(store)
    shutil.rmtree(store.path)
    assert store.held() == {}
    assert store.partial(8) is None
    for shard in (7, 8):
        store.put(shard, [DATA])
    assert store.held() == {7: STAMP, 8: STAMP}
    assert [name for name in names(store) if "shard" not in name] == [name for name in before if "shard" not in name]


def test_directory_that_is_deleted_while_a_shard_arrives_fails_that_shard_only(store: DirectoryShardStore) -> None:
    arriving = store.receive(7, STAMP)
    arriving.write(DATA)
    shutil.rmtree(store.path)
    assert code_of(arriving.commit) == "shard_store_failed"
    assert store.held() == {}
    store.put(7, [DATA])
    assert store.held() == {7: STAMP}


def test_directory_that_was_deleted_and_made_again_is_locked_again(store: DirectoryShardStore) -> None:
    store.dedicate(Dataset(100, 10))
    shutil.rmtree(store.path)
    store.path.mkdir()
    store.put(7, [DATA])
    assert names(store)[:2] == ["dataset-100.10", "lock"]


def test_directories_made_again_leave_one_lock_open(store: DirectoryShardStore) -> None:
    store.dedicate(Dataset(100, 10))
    before = open_descriptors()
    for _ in range(3):
        shutil.rmtree(store.path)
        store.put(7, [DATA])
        assert store.held() == {7: STAMP}
    assert open_descriptors() == before


def test_directory_that_cannot_be_made_again_says_why(store: DirectoryShardStore) -> None:
    store.dedicate(Dataset(100, 10))
    shutil.rmtree(store.path)
    store.path.touch()
    with pytest.raises(StoreFailed) as raised:
        store.put(7, [DATA])
    assert raised.value.code == "shard_store_failed"
    assert f"shard 7 cannot be stored: shard directory {store.path} is not usable" in raised.value.message


def test_parts_of_the_path_to_a_directory_are_made_durable(tmp_path: Path) -> None:
    synced: list[Path] = []
    with patch.object(file_sync, "sync_directory", synced.append):
        DirectoryShardStore(tmp_path / "a" / "b")
    assert set(synced) >= {tmp_path, tmp_path / "a"}
