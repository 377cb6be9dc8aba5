"""Shards as files in a directory.

Law: the name of a file says which shard it is, how long it is and what its checksum must be, and it gets that name in
one step, when its bytes are verified and durable. So there is no index that could disagree, and nothing half-written
is ever believed. A name is made of numbers only, so it stays in the directory; links are not followed.

    shard-7.67108864.6c78e0e3bd51d358d01e758642b85fb8         held
    shard-7.67108864.6c78e0e3bd51d358d01e758642b85fb8.part    arriving; another process may go on with it
    shard-7.part                                              arriving, to become what it becomes; ends with its writer

What is hashed is the memory that is handed to the kernel, while it is in the processor's cache; what was here before
is read back. Whole pages of a large shard go to the disk past the page cache, whose memory is the training's; of what
goes through it, the disk writes early, so that little is left to wait for at the end. An arriving file is locked
against other processes by a lock that no forked child keeps.

A child that is forked while another thread is at work here, to load data say, reads what is held: no reading waits for
a lock, and the locks that the child has copies of are renewed in it, because nobody is left there to open them.
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
from forged.data.dataset import Dataset
from forged.data.store.directory_identity import FILE_MODE, dedicate, usable
from forged.data.store.port import (
    CHECKSUM_BYTES,
    ArrivingShard,
    Begun,
    OpenShard,
    ShardCorrupt,
    ShardStore,
    Stamp,
    StoreFailed,
    already_arriving,
    already_held,
    check_shard,
    damaged,
    no_longer_arriving,
    not_held,
)
from forged.errors import RequestRefused
from forged.file_sync import PAGE, sync_directory

READ_BYTES = 1 << 20
WRITE_BACK_BYTES = 4 << 20
"""When so many more are in the page cache, the disk begins to write them."""
PAST_CACHE_BYTES_MIN = 16 << 20
"""Smaller shards go through the page cache: there is little to win, and they will be read soon."""
PART = ".part"

_SIZE_DIGITS_MAX = 19
_NAME = re.compile(
    rf"shard-(0|[1-9][0-9]{{0,18}})\.(0|[1-9][0-9]{{0,{_SIZE_DIGITS_MAX - 1}}})\.([0-9a-f]{{{2 * CHECKSUM_BYTES}}})"
    rf"({re.escape(PART)})?\Z"
)
_UNSTAMPED = re.compile(rf"shard-(0|[1-9][0-9]{{0,18}}){re.escape(PART)}\Z")
_SAFELY = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Not to block makes no difference to files, and a pipe that lies in the place of one holds up nobody."""


class DirectoryShardStore(ShardStore):
    """A directory of one worker, which nobody else writes to."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        """For who changes something; a look into one of the tables is one step by itself."""
        self._names = _Names(self.path)
        self._held: dict[int, Stamp] = {}
        self._begun: dict[int, Stamp] = {}
        self._arriving: set[int] = set()
        with usable(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            for entry in sorted(path.name for path in self.path.iterdir()):
                self._recognise(entry)
        _open_here.add(self)

    def renew_locks(self) -> None:
        """In a forked child: what another thread of the parent has locked would stay so for ever."""
        self._lock = threading.Lock()
        self._names.renew_lock()

    def _recognise(self, entry: str) -> None:
        if _UNSTAMPED.match(entry):
            self._forget_unstamped(entry)
        elif (found := _NAME.match(entry)) is not None:
            shard, stamp = int(found[1]), Stamp(int(found[2]), bytes.fromhex(found[3]))
            about = os.lstat(self.path / entry)
            if not stat.S_ISREG(about.st_mode):
                return
            if found[4]:
                self._begun[shard] = stamp
            elif about.st_size == stamp.size:
                self._held[shard] = stamp

    def _forget_unstamped(self, entry: str) -> None:
        """Nobody goes on with it, unless a process that lives is still at it."""
        with suppress(OSError):
            fd = os.open(self.path / entry, os.O_RDWR | _SAFELY)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (self.path / entry).unlink()
            finally:
                os.close(fd)

    def dedicate(self, dataset: Dataset) -> None:
        """Hold shards of this dataset, for this process."""
        is_empty = not (self._held or self._begun)
        dedicate(self.path, dataset, is_empty=is_empty)

    def held(self) -> Mapping[int, Stamp]:
        """All shards that are held, at this moment: not those whose files somebody has taken away or cut off."""
        known = self._held.copy()
        found = {shard: stamp for shard, stamp in known.items() if self._lies_there(shard, stamp)}
        for shard in known.keys() - found.keys():
            self._disown_if_gone(shard)
        return found

    def _disown_if_gone(self, shard: int) -> None:
        """Another thread may have put it again meanwhile: it counts behind the moment when it has its name."""
        with self._lock:
            stamp = self._held.get(shard)
            if stamp is not None and not self._lies_there(shard, stamp):
                del self._held[shard]

    def _lies_there(self, shard: int, stamp: Stamp) -> bool:
        try:
            about = os.lstat(self.path / name_of(shard, stamp))
        except FileNotFoundError:
            return False
        except OSError as error:
            raise _failed(shard, error) from error
        return stat.S_ISREG(about.st_mode) and about.st_size == stamp.size

    def holds(self, shard: int) -> bool:
        """Whether this one is."""
        return shard in self._held

    def path_of(self, shard: int) -> Path:
        """The file of a shard that is held, to be read."""
        stamp = self._held.get(shard)
        if stamp is None:
            raise not_held(shard)
        return self.path / name_of(shard, stamp)

    def open(self, shard: int) -> _OpenFile:
        """Read a shard. One that is not as long as it was is damaged, and no longer held."""
        path, stamp = self.path_of(shard), self._held.get(shard)
        if stamp is None:
            raise not_held(shard)
        try:
            fd = os.open(path, os.O_RDONLY | _SAFELY)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP):
                raise _failed(shard, error) from error
            self._disown(shard)
            raise damaged(shard, "its file is gone" if error.errno == errno.ENOENT else "a link lies there") from error
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or about.st_size != stamp.size:
            os.close(fd)
            self._disown(shard)
            raise damaged(shard, f"there are {about.st_size} bytes of {stamp.size}")
        return _OpenFile(path, fd, stamp, about)

    def _disown(self, shard: int) -> None:
        with self._lock:
            self._held.pop(shard, None)

    def begun(self, shard: int) -> Begun | None:
        """How far a shard is that somebody began to write and did not finish."""
        stamp = self._begun.get(shard)
        if stamp is None:
            return None
        try:
            about = os.lstat(self._part_of(shard, stamp))
        except OSError:
            return None
        return Begun(stamp, about.st_size) if about.st_size <= stamp.size and stat.S_ISREG(about.st_mode) else None

    def receive(self, shard: int, stamp: Stamp | None, offset: int = 0) -> ArrivingShard:
        """Write a shard that is to be what the stamp says, or whatever it becomes."""
        shard = check_shard(shard)
        self._occupy(shard)
        try:
            self._leave_only(shard, stamp)
            return _ArrivingFile(self, shard, stamp, self._part_of(shard, stamp), offset)
        except BaseException:
            self._free(shard)
            raise

    def _occupy(self, shard: int) -> None:
        with self._lock:
            if shard in self._held:
                raise already_held(shard)
            if shard in self._arriving:
                raise already_arriving(shard)
            self._arriving.add(shard)

    def _leave_only(self, shard: int, stamp: Stamp | None) -> None:
        """What was begun with another stamp is of no more use."""
        with self._lock:
            before = self._begun.pop(shard, None)
            if stamp is not None:
                self._begun[shard] = stamp
        if before is not None and before != stamp:
            with _translated(shard):
                self._part_of(shard, before).unlink(missing_ok=True)

    def _free(self, shard: int) -> None:
        with self._lock:
            self._arriving.discard(shard)

    def _settle(self, shard: int, part: Path, stamp: Stamp) -> None:
        """Give a whole file its name."""
        path = self.path / name_of(shard, stamp)
        part.replace(path)
        try:
            self._names.sync()
        except OSError:
            path.unlink(missing_ok=True)
            raise
        with self._lock:
            self._held[shard] = stamp
            self._begun.pop(shard, None)

    def _forget(self, shard: int, part: Path) -> None:
        with self._lock:
            self._begun.pop(shard, None)
        with suppress(OSError):
            part.unlink(missing_ok=True)

    def drop(self, shard: int) -> None:
        """Hold a shard no more, and forget what was begun of it; readers who have it open finish."""
        with self._lock:
            if shard in self._arriving:
                raise already_arriving(shard)
            stamp, begun = self._held.pop(shard, None), self._begun.pop(shard, None)
        with _translated(shard):
            if stamp is not None:
                (self.path / name_of(shard, stamp)).unlink(missing_ok=True)
            if begun is not None:
                self._part_of(shard, begun).unlink(missing_ok=True)

    def _part_of(self, shard: int, stamp: Stamp | None) -> Path:
        return self.path / ((f"shard-{shard}" if stamp is None else name_of(shard, stamp)) + PART)


class _Names:
    """Those in a directory, made durable for several at once: each sync makes the file system wait for all it has."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._begun = 0
        self._done = 0

    def renew_lock(self) -> None:
        """In a forked child."""
        self._lock = threading.Lock()

    def sync(self) -> None:
        """Return when a sync has succeeded that began after this call."""
        enough = self._begun + 1
        with self._lock:
            if self._done >= enough:
                return
            self._begun += 1
            number = self._begun
            sync_directory(self._path)
            self._done = number


class _OpenFile(OpenShard):
    """A file that is being read."""

    def __init__(self, path: Path, fd: int, stamp: Stamp, about: os.stat_result) -> None:
        self.fd = fd
        self.stamp = stamp
        self._path = path
        self._identity = _identity(about)

    def has_changed(self) -> bool:
        """Whether the file is another one, or was written to. One that was dropped has not changed."""
        if _identity(os.fstat(self.fd)) != self._identity:
            return True
        try:
            return _identity(os.lstat(self._path)) != self._identity
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Be done with it."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class _ArrivingFile(ArrivingShard):
    """A file that is being written."""

    def __init__(self, store: DirectoryShardStore, shard: int, stamp: Stamp | None, part: Path, offset: int) -> None:
        self._store = store
        self._shard = shard
        self._stamp = stamp
        self._part = part
        self._offset = 0
        self._written_back = offset
        self._may_pass_cache = stamp is not None and stamp.size >= PAST_CACHE_BYTES_MIN
        self._passes_cache = False
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
                    f"only {self._offset} bytes of shard {self._shard} are here, not {offset}",
                    "go on from where it stopped",
                )
            self._hash.update(buffer[:size])
            self._offset += size

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes. When the disk is full, all of them are dropped, so that others find room."""
        self._require_open()
        view = memoryview(data)
        self._hash.update(view)
        with self._dropped_on_failure():
            while view:
                size = self._put(view)
                self._offset += size
                view = view[size:]
        if self._passes_cache:
            self._written_back = self._offset
        elif self._offset - self._written_back >= WRITE_BACK_BYTES:
            self._begin_write_back()

    def _put(self, view: memoryview) -> int:
        """Write some of it; returns how much."""
        self._pass_cache(on=self._may_pass_cache and _is_whole_pages(view, self._offset))
        try:
            return os.pwrite(self._fd, view, self._offset)
        except OSError as error:
            if not self._passes_cache or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        # Some file systems say only now that they cannot.
        self._may_pass_cache = False
        self._pass_cache(on=False)
        return os.pwrite(self._fd, view, self._offset)

    def _pass_cache(self, *, on: bool) -> None:
        if on == self._passes_cache:
            return
        try:
            file_sync.bypass_cache(self._fd, on=on)
            self._passes_cache = on
        except OSError:
            if not on:
                raise
            self._may_pass_cache = False

    def _begin_write_back(self) -> None:
        """Let the disk begin with what is here. Whether it succeeds, or could begin at all, the final sync tells."""
        with suppress(OSError):
            file_sync.begin_write_back(self._fd, self._written_back, self._offset - self._written_back)
        self._written_back = self._offset

    def commit(self) -> Stamp:
        """Hold the shard from now on, durably; or drop all, and raise `ShardCorrupt`."""
        self._require_open()
        found = Stamp(self._offset, self._hash.digest())
        with self._dropped_on_failure():
            if found != (self._stamp or found) or os.fstat(self._fd).st_size != found.size:
                raise ShardCorrupt(self._shard, is_whole=not self._is_resumed)
            os.fchmod(self._fd, FILE_MODE)
            os.fsync(self._fd)
            self._store._settle(self._shard, self._part, found)
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
        """Forget all that is here."""
        if self._fd >= 0:
            self._store._forget(self._shard, self._part)
            self.close()

    def close(self) -> None:
        """Let the file be, for whoever goes on with it; without a stamp nobody can."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        if self._stamp is None:
            with suppress(OSError):
                self._part.unlink(missing_ok=True)
        os.close(fd)
        self._store._free(self._shard)

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
            raise OSError(errno.EINVAL, "what lies there is no file", str(part))
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise already_arriving(shard) from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _is_whole_pages(view: memoryview, offset: int) -> bool:
    """Whether the disk can take it from where it lies."""
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
        return StoreFailed("disk_full", f"there is no room on the disk for shard {shard}", "make room")
    return StoreFailed("shard_store_failed", f"shard {shard} cannot be kept: {error.strerror or error}", "see the disk")


_open_here: WeakSet[DirectoryShardStore] = WeakSet()
"""All stores of this process."""


def _renew_all_locks() -> None:
    """Called in every forked child, by its only thread, before it goes on."""
    for store in list(_open_here):
        store.renew_locks()


os.register_at_fork(after_in_child=_renew_all_locks)
