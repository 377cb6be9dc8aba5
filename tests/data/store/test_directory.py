from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import multiprocessing
import os
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
from forged.data.store import directory
from forged.data.store.directory import DirectoryShardStore, name_of
from forged.data.store.port import PartialShard, Stamp, StoreFailed
from forged.errors import ConfigError, ForgedError, RequestRefused
from tests.data.transfer_cluster import open_descriptors
from tests.worker.meshes import PATIENCE_S

DATA = bytes(range(256)) * 20
STAMP = Stamp.of(DATA)


@pytest.fixture
def store(tmp_path: Path) -> DirectoryShardStore:
    return DirectoryShardStore(tmp_path / "shards")


def again(store: DirectoryShardStore) -> DirectoryShardStore:
    """What another process would find."""
    return DirectoryShardStore(store.path)


def names(store: DirectoryShardStore) -> list[str]:
    return sorted(path.name for path in store.path.iterdir())


def code_of(action: Callable[[], object]) -> str:
    with pytest.raises(ForgedError) as raised:
        action()
    return raised.value.code


def test_another_process_finds_what_is_held_and_what_was_begun(store: DirectoryShardStore) -> None:
    store.put(7, [DATA])
    with store.receive(8, STAMP) as arriving:
        arriving.write(DATA[:99])
    found = again(store)
    assert found.held() == {7: STAMP}
    assert found.partial(8) == PartialShard(STAMP, 99)
    with found.receive(8, STAMP, 99) as arriving:
        arriving.write(DATA[99:])
        arriving.commit()
    assert again(store).held() == {7: STAMP, 8: STAMP}


def test_the_name_of_a_file_says_all_there_is_to_say(store: DirectoryShardStore) -> None:
    store.put(7, [DATA])
    assert names(store) == [name_of(7, STAMP)]
    assert store.path_of(7) == store.path / name_of(7, STAMP)
    assert store.path_of(7).read_bytes() == DATA


def test_what_has_no_stamp_does_not_outlive_its_writer(store: DirectoryShardStore) -> None:
    (store.path / "shard-7.part").write_bytes(DATA)
    found = again(store)
    assert names(found) == []


def test_what_a_living_process_is_writing_is_left_alone(store: DirectoryShardStore) -> None:
    with store.receive(7, None) as arriving:
        arriving.write(DATA)
        context = multiprocessing.get_context("fork")
        near, far = context.Pipe()
        process = context.Process(target=lambda: far.send(names(again(store))))
        process.start()
        assert near.recv() == ["shard-7.part"]
        process.join()
        arriving.commit()
    assert store.holds(7)


def test_two_processes_do_not_write_the_same_shard(store: DirectoryShardStore) -> None:
    with store.receive(7, STAMP) as arriving:
        arriving.write(DATA)
        context = multiprocessing.get_context("fork")
        near, far = context.Pipe()
        process = context.Process(target=lambda: far.send(code_of(lambda: again(store).receive(7, STAMP))))
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
def test_files_of_other_directory_sync_or_lengths_are_no_shards(store: DirectoryShardStore, name: str) -> None:
    (store.path / name).write_bytes(DATA)
    found = again(store)
    assert not found.held()
    assert found.partial(7) is None
    assert names(found) == [name]


@given(st.text(max_size=40))
def test_no_name_is_believed_that_was_not_made_here(text: str) -> None:
    found = directory._NAME.match(text)
    if found is not None:
        stamp = Stamp(int(found[2]), bytes.fromhex(found[3]))
        assert name_of(int(found[1]), stamp) + (found[4] or "") == text


def test_links_and_other_things_are_no_shards(store: DirectoryShardStore, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(DATA)
    (store.path / name_of(1, STAMP)).symlink_to(secret)
    (store.path / name_of(2, STAMP)).mkdir()
    (store.path / (name_of(3, STAMP) + ".part")).symlink_to(secret)
    found = again(store)
    assert not found.held()
    assert found.partial(3) is None
    assert code_of(lambda: found.receive(3, STAMP)) == "shard_store_failed"
    assert secret.read_bytes() == DATA


def test_a_link_that_takes_the_place_of_a_shard_is_not_followed(store: DirectoryShardStore, tmp_path: Path) -> None:
    store.put(7, [DATA])
    secret = tmp_path / "secret"
    secret.write_bytes(DATA)
    store.path_of(7).unlink()
    (store.path / name_of(7, STAMP)).symlink_to(secret)
    assert code_of(lambda: store.open(7)) == "shard_damaged"
    assert not store.holds(7)


@pytest.mark.parametrize("change", [lambda path: os.truncate(path, 10), lambda path: path.unlink()])
def test_a_file_that_somebody_has_cut_off_or_taken_away_is_not_said_to_be_held(
    store: DirectoryShardStore, change: Callable[[Path], None]
) -> None:
    for shard in (6, 7):
        store.put(shard, [DATA])
    change(store.path_of(7))
    assert store.held() == {6: STAMP}
    assert not store.holds(7)
    store.put(7, [DATA])
    assert store.held() == {6: STAMP, 7: STAMP}


def test_a_pipe_that_takes_the_place_of_a_shard_holds_up_nobody(store: DirectoryShardStore) -> None:
    store.put(7, [DATA])
    path = store.path_of(7)
    path.unlink()
    os.mkfifo(path)
    assert code_of(lambda: store.open(7)) == "shard_damaged"
    assert not store.holds(7)
    os.mkfifo(store.path / (name_of(8, STAMP) + ".part"))
    assert code_of(lambda: store.receive(8, STAMP)) == "shard_store_failed"


@pytest.mark.parametrize("change", [lambda path: os.truncate(path, 10), lambda path: path.unlink()])
def test_a_truncated_or_missing_file_is_damaged_and_no_longer_held(
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
def test_a_file_that_is_written_to_or_replaced_has_changed(
    store: DirectoryShardStore, change: Callable[[Path], None]
) -> None:
    store.put(7, [DATA])
    with store.open(7) as opened:
        assert not opened.has_changed()
        change(store.path_of(7))
        assert opened.has_changed()


def test_the_bytes_are_durable_before_they_have_their_name_and_the_name_before_they_count(
    store: DirectoryShardStore,
) -> None:
    story: list[str] = []

    def fsync(fd: int) -> None:
        story.append(f"sync {Path(f'/proc/self/fd/{fd}').readlink().name} held {store.holds(7)}")

    with patch("os.fsync", fsync):
        store.put(7, [DATA])
    assert story == ["sync shard-7.part held False", "sync shards held False"]


def test_the_disk_begins_to_write_while_more_arrives(
    store: DirectoryShardStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "WRITE_BACK_BYTES", 2000)
    begun: list[tuple[str, int, int]] = []

    def begin_write_back(fd: int, offset: int, count: int) -> None:
        begun.append((Path(f"/proc/self/fd/{fd}").readlink().name, offset, count))

    with patch("forged.file_sync.begin_write_back", begin_write_back), store.receive(7, None) as arriving:
        for start in range(0, len(DATA), 1500):
            arriving.write(DATA[start : start + 1500])
        assert begun == [("shard-7.part", 0, 3000), ("shard-7.part", 3000, len(DATA) - 3000)]
        arriving.commit()


def test_what_the_disk_could_not_begin_with_is_left_to_the_final_sync(
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
def in_pages() -> memoryview:
    """Two pages and a bit, which begin at a page."""
    memory = memoryview(mmap.mmap(-1, 3 * file_sync.PAGE))[: 2 * file_sync.PAGE + 100]
    memory[:] = os.urandom(len(memory))
    return memory


class Writes:
    """What is written, and whether it goes past the page cache."""

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


def test_whole_pages_of_a_large_shard_go_past_the_page_cache(
    store: DirectoryShardStore, in_pages: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, size = Writes(monkeypatch), len(in_pages)
    with store.receive(7, Stamp.of(bytes(in_pages))) as arriving:
        arriving.write(in_pages[: file_sync.PAGE])
        arriving.write(in_pages[file_sync.PAGE : 2 * file_sync.PAGE])
        arriving.write(in_pages[2 * file_sync.PAGE :])
        arriving.commit()
    assert writes.seen == [
        (0, file_sync.PAGE, True),
        (file_sync.PAGE, file_sync.PAGE, True),
        (2 * file_sync.PAGE, 100, False),
    ]
    assert store.path_of(7).read_bytes() == bytes(in_pages)
    assert store.held()[7].size == size


def test_what_begins_inside_a_page_goes_through_the_cache(
    store: DirectoryShardStore, in_pages: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(in_pages)
    writes = Writes(monkeypatch)
    with store.receive(7, Stamp.of(data)) as arriving:
        arriving.write(in_pages[:10])
        arriving.write(in_pages[10 : 10 + file_sync.PAGE])
        arriving.write(data[10 + file_sync.PAGE :])
        arriving.commit()
    assert [is_past_cache for _, _, is_past_cache in writes.seen] == [False, False, False]
    assert store.path_of(7).read_bytes() == data


def test_small_shards_and_those_of_unknown_size_go_through_the_cache(
    store: DirectoryShardStore, in_pages: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, page = Writes(monkeypatch), in_pages[: file_sync.PAGE]
    store.put(7, [in_pages])
    with store.receive(8, Stamp.of(bytes(page))) as arriving:
        arriving.write(page)
        arriving.commit()
    assert [is_past_cache for _, _, is_past_cache in writes.seen] == [False, False]


@pytest.mark.parametrize("refused", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_only_knows_the_cache_gets_all_through_it(
    store: DirectoryShardStore, in_pages: memoryview, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    writes = Writes(monkeypatch, refused=refused)
    with store.receive(7, Stamp.of(bytes(in_pages))) as arriving:
        arriving.write(in_pages[: file_sync.PAGE])
        arriving.write(in_pages[file_sync.PAGE : 2 * file_sync.PAGE])
        arriving.write(in_pages[2 * file_sync.PAGE :])
        arriving.commit()
    assert [is_past_cache for _, _, is_past_cache in writes.seen] == [True, False, False, False]
    assert store.path_of(7).read_bytes() == bytes(in_pages)


def test_a_file_that_cannot_be_written_past_the_cache_is_written_through_it(
    store: DirectoryShardStore, in_pages: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = Writes(monkeypatch)
    with (
        patch("forged.file_sync.bypass_cache", side_effect=OSError(errno.EINVAL, "it cannot")),
        store.receive(7, Stamp.of(bytes(in_pages))) as arriving,
    ):
        arriving.write(in_pages)
        arriving.commit()
    assert writes.seen == [(0, len(in_pages), False)]


def test_a_full_disk_is_told_of_past_the_cache_too(
    store: DirectoryShardStore, in_pages: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    Writes(monkeypatch, refused=errno.ENOSPC)
    with store.receive(7, Stamp.of(bytes(in_pages))) as arriving:
        assert code_of(lambda: arriving.write(in_pages[: file_sync.PAGE])) == "disk_full"
    assert names(store) == []


def test_those_who_wait_for_their_directory_sync_share_a_sync_that_began_after_them(store: DirectoryShardStore) -> None:
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
def test_a_shard_that_could_not_be_made_durable_does_not_count(store: DirectoryShardStore, call: str) -> None:
    with patch(call, side_effect=OSError(5, "the disk is broken")), pytest.raises(StoreFailed) as raised:
        store.put(7, [DATA])
    assert raised.value.code == "shard_store_failed"
    assert names(store) == []
    assert not store.held()
    store.put(7, [DATA])


def test_what_does_not_fit_on_the_disk_is_dropped_so_that_others_do(small_disk: Path) -> None:
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


def test_a_directory_that_cannot_be_used_is_the_operators(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError):
        DirectoryShardStore(tmp_path / "file")


def test_no_descriptor_is_left_behind(store: DirectoryShardStore) -> None:
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


def test_more_than_what_is_here_cannot_be_gone_on_from(store: DirectoryShardStore) -> None:
    assert code_of(lambda: store.receive(7, STAMP, 1)) == "shard_offset_invalid"
    store.put(7, [DATA])


class Busy:
    """A thread that is at work in a store: it holds the store's locks inside the block."""

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
    """How a forked child ends that does something; one that hangs is ended by a signal."""
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


def test_a_child_that_is_forked_while_another_thread_is_at_work_can_read_and_write(store: DirectoryShardStore) -> None:
    store.put(7, [DATA])

    def use() -> None:
        assert store.path_of(7).read_bytes() == DATA
        assert store.held() == {7: STAMP}
        store.put(8, [DATA])
        store.drop(7)

    with Busy(store):
        assert exit_code_of_child(use) == 0
    assert again(store).held() == {8: STAMP}


def test_who_reads_waits_for_nobody_who_writes(store: DirectoryShardStore) -> None:
    store.put(7, [DATA])
    with store.receive(8, STAMP) as arriving:
        arriving.write(DATA[:99])
    with Busy(store):
        assert store.holds(7)
        assert store.path_of(7).read_bytes() == DATA
        assert store.held() == {7: STAMP}
        assert store.partial(8) == PartialShard(STAMP, 99)
        store.open(7).close()


def test_a_store_that_nobody_uses_any_more_is_let_go(tmp_path: Path) -> None:
    store = DirectoryShardStore(tmp_path)
    known = weakref.ref(store)
    del store
    gc.collect()
    assert known() is None
