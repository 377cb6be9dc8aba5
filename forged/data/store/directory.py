"""A shard store that keeps each shard as a file in one directory.

    shard-7.67108864.6c78e0e3bd51d358d01e758642b85fb8         held
    shard-7.67108864.6c78e0e3bd51d358d01e758642b85fb8.part    arriving; another process may resume it
    shard-7.part                                              arriving without a stamp; ends with its writer

Invariants:
- A file's name states its shard, size and checksum. The file gets that name by one rename, when its bytes are verified
  and durable. So there is no index that could disagree, and no half-written file counts as held.
- Names contain only numbers, so they cannot leave the directory. Links are not followed.
- The bytes that are hashed are those handed to the kernel, hashed while in the CPU cache; resumed bytes are read back.
- Whole pages of a large shard bypass the page cache, so that training keeps it. For the rest, write-back starts
  early, so that little is left for the final fsync.
- A directory that is deleted is made again, and locked again, for the next shard that is written.
- An arriving file is locked against other processes with a lock that forked children do not inherit.
- A child that is forked while another thread writes here can read held shards: reading takes no lock, and the child
  gets new locks, because the thread that would release its copies does not exist there.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from weakref import WeakSet

import numpy as np
import xxhash

from forged import file_sync
from forged.data.model import Dataset, check_shard
from forged.data.store.directory_lock import FILE_MODE, is_locked, lock_directory, usable
from forged.data.store.errors import (
    ShardCorrupt,
    StoreFailed,
    already_arriving,
    already_held,
    damaged,
    no_longer_arriving,
    not_held,
    store_failed,
)
from forged.data.store.port import CHECKSUM_BYTES, ArrivingShard, OpenShard, PartialShard, ShardStore, Stamp
from forged.errors import ConfigError, RequestRefused
from forged.file_sync import PAGE, sync_directory

READ_BYTES = 1 << 20
WRITE_BACK_BYTES = 4 << 20
"""Write-back starts whenever so many more bytes are in the page cache."""
BYPASS_CACHE_BYTES_MIN = 16 << 20
"""Smaller shards go through the page cache: bypassing it gains little, and they are read soon."""
PART = ".part"

_SIZE_DIGITS_MAX = 19
_NAME = re.compile(
    rf"shard-(0|[1-9][0-9]{{0,18}})\.(0|[1-9][0-9]{{0,{_SIZE_DIGITS_MAX - 1}}})\.([0-9a-f]{{{2 * CHECKSUM_BYTES}}})"
    rf"({re.escape(PART)})?\Z"
)
_UNSTAMPED = re.compile(rf"shard-(0|[1-9][0-9]{{0,18}}){re.escape(PART)}\Z")
_SAFELY = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""O_NONBLOCK does not affect files, and opening a pipe in place of a file does not block."""


class DirectoryShardStore(ShardStore):
    """A directory that only one worker writes to."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        """Guards changes; a single lookup in one of the tables is atomic."""
        self._directory_sync = _DirectorySync(self.path)
        self._held: dict[int, Stamp] = {}
        self._partial: dict[int, Stamp] = {}
        self._arriving: set[int] = set()
        self._dataset: Dataset | None = None
        with usable(self.path):
            file_sync.make_directory(self.path)
            for entry in sorted(path.name for path in self.path.iterdir()):
                self._recognise(entry)
        _stores.add(self)

    def renew_locks(self) -> None:
        """In a forked child: a lock held by another thread of the parent would never be released."""
        self._lock = threading.Lock()
        self._directory_sync.renew_lock()

    def _recognise(self, entry: str) -> None:
        if _UNSTAMPED.match(entry):
            self._delete_unstamped(entry)
        elif (found := _NAME.match(entry)) is not None:
            shard, stamp = int(found[1]), Stamp(int(found[2]), bytes.fromhex(found[3]))
            about = os.lstat(self.path / entry)
            if not stat.S_ISREG(about.st_mode):
                return
            if found[4]:
                self._partial[shard] = stamp
            elif about.st_size == stamp.size:
                self._held[shard] = stamp

    def _delete_unstamped(self, entry: str) -> None:
        """Delete a part without a stamp, unless a live writer holds its lock: it cannot be resumed."""
        with suppress(OSError):
            fd = os.open(self.path / entry, os.O_RDWR | _SAFELY)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (self.path / entry).unlink()
            finally:
                os.close(fd)

    def dedicate(self, dataset: Dataset) -> None:
        """Lock the directory to this process and dataset until the process ends."""
        lock_directory(self.path, dataset, is_empty=not (self._held or self._partial))
        self._dataset = dataset

    def _restore_directory(self, shard: int) -> None:
        """Make the directory again if it was deleted, and lock it again if its lock file was."""
        if self._is_usable():
            return
        is_empty = not self.held()
        with self._lock:
            if self._is_usable():
                return
            try:
                with usable(self.path):
                    file_sync.make_directory(self.path)
                if self._dataset is not None:
                    lock_directory(self.path, self._dataset, is_empty=is_empty)
            except ConfigError as error:
                raise store_failed(shard, error.message, error.fix) from error

    def _is_usable(self) -> bool:
        return self.path.is_dir() if self._dataset is None else is_locked(self.path)

    def held(self) -> Mapping[int, Stamp]:
        """All shards that are held now; files that were deleted or truncated do not count."""
        known = self._held.copy()
        found = {shard: stamp for shard, stamp in known.items() if self._file_exists(shard, stamp)}
        for shard in known.keys() - found.keys():
            self._drop_if_gone(shard)
        return found

    def _drop_if_gone(self, shard: int) -> None:
        """Stop counting a shard whose file is gone, unless another thread has stored the shard again meanwhile."""
        with self._lock:
            stamp = self._held.get(shard)
            if stamp is not None and not self._file_exists(shard, stamp):
                del self._held[shard]

    def _file_exists(self, shard: int, stamp: Stamp) -> bool:
        try:
            about = os.lstat(self.path / name_of(shard, stamp))
        except FileNotFoundError:
            return False
        except OSError as error:
            raise _failed(shard, error) from error
        return stat.S_ISREG(about.st_mode) and about.st_size == stamp.size

    def holds(self, shard: int) -> bool:
        """Whether the shard is held."""
        return shard in self._held

    def path_of(self, shard: int) -> Path:
        """The file of a held shard, for reading only."""
        stamp = self._held.get(shard)
        if stamp is None:
            raise not_held(shard)
        return self.path / name_of(shard, stamp)

    def open(self, shard: int) -> _OpenFile:
        """Open a held shard for reading. One whose file has another size is damaged, and no longer held."""
        path, stamp = self.path_of(shard), self._held.get(shard)
        if stamp is None:
            raise not_held(shard)
        try:
            fd = os.open(path, os.O_RDONLY | _SAFELY)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP):
                raise _failed(shard, error) from error
            self._no_longer_held(shard)
            raise damaged(shard, "its file is gone" if error.errno == errno.ENOENT else "its file is a link") from error
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or about.st_size != stamp.size:
            os.close(fd)
            self._no_longer_held(shard)
            raise damaged(shard, f"its file has {about.st_size} of {stamp.size} bytes")
        return _OpenFile(path, fd, stamp, about)

    def _no_longer_held(self, shard: int) -> None:
        with self._lock:
            self._held.pop(shard, None)

    def partial(self, shard: int) -> PartialShard | None:
        """What is stored of a shard whose writer closed it before the end."""
        stamp = self._partial.get(shard)
        if stamp is None:
            return None
        try:
            about = os.lstat(self._part_of(shard, stamp))
        except OSError:
            return None
        is_usable = about.st_size <= stamp.size and stat.S_ISREG(about.st_mode)
        return PartialShard(stamp, about.st_size) if is_usable else None

    def receive(self, shard: int, stamp: Stamp | None, offset: int = 0) -> ArrivingShard:
        """Write a shard; without a `stamp` it takes its stamp from the bytes written."""
        shard = check_shard(shard)
        self._restore_directory(shard)
        self._begin_writing(shard)
        try:
            self._delete_other_part(shard, stamp)
            return _ArrivingFile(self, shard, stamp, self._part_of(shard, stamp), offset)
        except BaseException:
            self._end_writing(shard)
            raise

    def _begin_writing(self, shard: int) -> None:
        with self._lock:
            if shard in self._held:
                raise already_held(shard)
            if shard in self._arriving:
                raise already_arriving(shard)
            self._arriving.add(shard)

    def _delete_other_part(self, shard: int, stamp: Stamp | None) -> None:
        """Delete what was received under another stamp."""
        with self._lock:
            before = self._partial.pop(shard, None)
            if stamp is not None:
                self._partial[shard] = stamp
        if before is not None and before != stamp:
            with _translated(shard):
                self._part_of(shard, before).unlink(missing_ok=True)

    def _end_writing(self, shard: int) -> None:
        with self._lock:
            self._arriving.discard(shard)

    def _hold(self, shard: int, part: Path, stamp: Stamp) -> None:
        """Rename a complete file to its final name, durably."""
        path = self.path / name_of(shard, stamp)
        part.replace(path)
        try:
            self._directory_sync.run()
        except OSError:
            path.unlink(missing_ok=True)
            raise
        with self._lock:
            self._held[shard] = stamp
            self._partial.pop(shard, None)

    def _delete_part(self, shard: int, part: Path) -> None:
        with self._lock:
            self._partial.pop(shard, None)
        with suppress(OSError):
            part.unlink(missing_ok=True)

    def drop(self, shard: int) -> None:
        """Delete a shard, or what was received of it; open readers may finish."""
        with self._lock:
            if shard in self._arriving:
                raise already_arriving(shard)
            stamp, partial = self._held.pop(shard, None), self._partial.pop(shard, None)
        with _translated(shard):
            if stamp is not None:
                (self.path / name_of(shard, stamp)).unlink(missing_ok=True)
            if partial is not None:
                self._part_of(shard, partial).unlink(missing_ok=True)

    def _part_of(self, shard: int, stamp: Stamp | None) -> Path:
        return self.path / ((f"shard-{shard}" if stamp is None else name_of(shard, stamp)) + PART)


class _DirectorySync:
    """Syncs a directory; callers that wait at the same time share one sync."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._started = 0
        self._done = 0

    def renew_lock(self) -> None:
        """In a forked child."""
        self._lock = threading.Lock()

    def run(self) -> None:
        """Return when a sync has succeeded that began after this call."""
        enough = self._started + 1
        with self._lock:
            if self._done >= enough:
                return
            self._started += 1
            number = self._started
            sync_directory(self._path)
            self._done = number


class _OpenFile(OpenShard):
    """A held shard's file, open for reading."""

    def __init__(self, path: Path, fd: int, stamp: Stamp, about: os.stat_result) -> None:
        self.fd = fd
        self.stamp = stamp
        self._path = path
        self._identity = _identity(about)

    def has_changed(self) -> bool:
        """Whether the file was replaced or written to; a dropped file has not changed."""
        if _identity(os.fstat(self.fd)) != self._identity:
            return True
        try:
            return _identity(os.lstat(self._path)) != self._identity
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Release it; a second call does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class _ArrivingFile(ArrivingShard):
    """An arriving shard's file."""

    def __init__(self, store: DirectoryShardStore, shard: int, stamp: Stamp | None, part: Path, offset: int) -> None:
        self._store = store
        self._shard = shard
        self._stamp = stamp
        self._part = part
        self._offset = 0
        self._written_back = offset
        self._may_bypass_cache = stamp is not None and stamp.size >= BYPASS_CACHE_BYTES_MIN
        self._bypasses_cache = False
        self._is_resumed = offset > 0
        self._hash = xxhash.xxh3_128()
        with _translated(shard):
            self._fd = _locked(shard, part)
        try:
            with _translated(shard):
                self._read_back(offset)
                os.ftruncate(self._fd, offset)
        except BaseException:
            os.close(self._fd)
            raise

    def _read_back(self, offset: int) -> None:
        buffer = memoryview(bytearray(min(offset, READ_BYTES)))
        while self._offset < offset:
            size = os.preadv(self._fd, [buffer[: offset - self._offset]], self._offset)
            if not size:
                raise RequestRefused(
                    "shard_offset_invalid",
                    f"offset must be at most {self._offset}, the stored bytes of shard {self._shard}, got {offset}",
                    "resume where the last attempt stopped",
                )
            self._hash.update(buffer[:size])
            self._offset += size

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes. When the disk is full, all bytes of the shard are dropped to free space."""
        self._require_open()
        view = memoryview(data)
        self._hash.update(view)
        with self._dropped_on_failure():
            while view:
                size = self._put(view)
                self._offset += size
                view = view[size:]
        if self._bypasses_cache:
            self._written_back = self._offset
        elif self._offset - self._written_back >= WRITE_BACK_BYTES:
            self._begin_write_back()

    def _put(self, view: memoryview) -> int:
        """Write a prefix of the view; returns its size."""
        self._bypass_cache(on=self._may_bypass_cache and _is_whole_pages(view, self._offset))
        try:
            return os.pwrite(self._fd, view, self._offset)
        except OSError as error:
            if not self._bypasses_cache or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        # Some file systems accept O_DIRECT on the descriptor and refuse it only here.
        self._may_bypass_cache = False
        self._bypass_cache(on=False)
        return os.pwrite(self._fd, view, self._offset)

    def _bypass_cache(self, *, on: bool) -> None:
        if on == self._bypasses_cache:
            return
        try:
            file_sync.bypass_cache(self._fd, on=on)
            self._bypasses_cache = on
        except OSError:
            if not on:
                raise
            self._may_bypass_cache = False

    def _begin_write_back(self) -> None:
        """Start writing the stored bytes to disk; errors surface at the final fsync."""
        with suppress(OSError):
            file_sync.begin_write_back(self._fd, self._written_back, self._offset - self._written_back)
        self._written_back = self._offset

    def commit(self) -> Stamp:
        """Hold the shard durably; or drop its bytes and raise `ShardCorrupt`."""
        self._require_open()
        found = Stamp(self._offset, self._hash.digest())
        with self._dropped_on_failure():
            if found != (self._stamp or found) or os.fstat(self._fd).st_size != found.size:
                raise ShardCorrupt(self._shard, is_whole=not self._is_resumed)
            os.fchmod(self._fd, FILE_MODE)
            os.fsync(self._fd)
            self._store._hold(self._shard, self._part, found)
        self.close()
        return found

    @contextmanager
    def _dropped_on_failure(self) -> Iterator[None]:
        try:
            with _translated(self._shard):
                yield
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """Delete the received bytes."""
        if self._fd >= 0:
            self._store._delete_part(self._shard, self._part)
            self.close()

    def close(self) -> None:
        """Keep the received bytes for a later attempt; without a stamp, delete them."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        if self._stamp is None:
            with suppress(OSError):
                self._part.unlink(missing_ok=True)
        os.close(fd)
        self._store._end_writing(self._shard)

    def _require_open(self) -> None:
        if self._fd < 0:
            raise no_longer_arriving(self._shard)


def name_of(shard: int, stamp: Stamp) -> str:
    """The name of a shard's file."""
    return f"shard-{shard}.{stamp.size}.{stamp.checksum.hex()}"


def _locked(shard: int, part: Path) -> int:
    fd = os.open(part, os.O_RDWR | os.O_CREAT | _SAFELY, FILE_MODE)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(part))
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise already_arriving(shard) from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _is_whole_pages(view: memoryview, offset: int) -> bool:
    """Whether O_DIRECT can write it: offset, size and address are multiples of a page."""
    if offset % PAGE or len(view) % PAGE:
        return False
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address % PAGE == 0


def _identity(about: os.stat_result) -> tuple[int, int, int, int]:
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns


@contextmanager
def _translated(shard: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _failed(shard, error) from error


def _failed(shard: int, error: OSError) -> StoreFailed:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFailed("disk_full", f"no space on the disk for shard {shard}", "free some space")
    return store_failed(shard, error.strerror or str(error), "check the disk")


_stores: WeakSet[DirectoryShardStore] = WeakSet()
"""All stores of this process."""


def _renew_all_locks() -> None:
    """Runs in each forked child before any other code."""
    for store in list(_stores):
        store.renew_locks()


os.register_at_fork(after_in_child=_renew_all_locks)
