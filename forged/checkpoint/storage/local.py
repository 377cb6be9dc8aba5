"""A directory as a storage.

Invariants:
- A file that `publish` has returned for, or `write` and then `sync_names`, survives a power cut; a deleted file stays
  deleted.
- A failed operation removes what it created, as far as the system lets it.
- A published file gets its name when its bytes are whole and durable.
- A failed directory sync is not repeated: a second one may succeed without having written what the first one lost.
- No name and no symbolic link leads out of the directory.
"""

from __future__ import annotations

import errno
import os
import secrets
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from functools import cached_property
from pathlib import Path

from forged.checkpoint.errors import CheckpointException, storage_error
from forged.checkpoint.format.names import check_name, check_name_prefix
from forged.checkpoint.ports import ByteSource, CancelToken, StoredFile, WouldBlock
from forged.checkpoint.storage.cache_bypass import FileReader
from forged.checkpoint.storage.direct_write import (
    BUFFERS_PER_WRITE,
    BlockBuffers,
    FileWriter,
    retry_interrupted,
    write_whole,
)
from forged.checkpoint.storage.files import (
    CREATE,
    GAP_BYTES_MAX,
    READ,
    UNNAMED,
    CachedFiles,
    DirectoryEntry,
    Files,
    SystemFiles,
    directory_of,
)
from forged.checkpoint.storage.nofollow_files import NoFollowFiles
from forged.checkpoint.storage.os_errors import SyncFailed, disk_full, errors_translated, file_large, file_short
from forged.checkpoint.thread_pool import THREADS

OPENINGS_MAX = 10
"""How often a directory is made again after another process has removed it because it was empty."""
CACHED_WHOLE_BYTES_MAX = 1 << 16
"""Larger files are not read as a whole without waiting, because to decode them takes longer than to start a thread."""
HIDDEN_SUFFIX = ".tmp"
HIDDEN_S_MAX = 3600.0
"""A hidden file older than this belongs to a process that has died."""
NOT_UNNAMED = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS})
"""Errors of file systems without unnamed files (O_TMPFILE)."""
NOT_LINKED = frozenset({errno.ENOENT, errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
"""Errors where an unnamed file cannot be linked: by the file system, or because /proc is missing."""
NOT_BEGUN = frozenset({errno.ENOENT, errno.EMFILE, errno.ENFILE})
"""Errors from opening a directory, before its sync has begun."""


class LocalReader:
    """An open file; a `ports.Reader`."""

    def __init__(self, files: Files, fd: int, reader: FileReader, name: str, url: str) -> None:
        self._files = files
        self._fd = fd
        self._reader = reader
        self._name = name
        self._url = url
        self.size = reader.size

    def read_into(self, offset: int, *rooms: memoryview) -> None:
        with errors_translated(self._name, self._url):
            count = self._reader.read(offset, rooms)
        size = sum(map(len, rooms))
        if count < size:
            raise file_short(self._name, offset + size, offset + count)

    def mapped(self) -> memoryview | None:
        """The file as memory. Access after a truncation raises SIGBUS."""
        with errors_translated(self._name, self._url):
            return self._files.map(self._fd, self.size)


class LocalStorage:
    """A directory as a `ports.Storage`. The directory is made at the first write."""

    gap_bytes_max = GAP_BYTES_MAX

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        files: Files | None = None,
        threads: int = THREADS,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._files = files or SystemFiles()
        self._given = str(Path(path).absolute())
        self._threads = threads
        self._wall = wall
        self._whole_bytes_max = sys.maxsize
        self._buffers = BlockBuffers(threads * BUFFERS_PER_WRITE)

    @property
    def url(self) -> str:
        return self._root

    @cached_property
    def _root(self) -> str:
        """The directory, links followed. Not resolved before it is used, because a network file system may hang."""
        with errors_translated("", self._given):
            return self._files.resolve(self._given)

    def without_links(self) -> LocalStorage:
        """The same directory, in which no symbolic link is followed, nor on the way to it."""
        return LocalStorage(self._given, files=NoFollowFiles(), threads=self._threads, wall=self._wall)

    def nonblocking(self) -> LocalStorage:
        if type(self._files) is not SystemFiles:
            raise WouldBlock
        other = copy(self)
        other._files, other._whole_bytes_max = CachedFiles(), CACHED_WHOLE_BYTES_MAX
        return other

    def write(self, name: str, source: ByteSource, token: CancelToken) -> None:
        with errors_translated(name, self.url):
            path = self._path(name)
            free = self._free_bytes()
            fd = self._open_new(path, CREATE)
            try:
                self._fill(fd, name, source, token, free)
            except BaseException:
                self._remove_unfinished(path)
                raise

    def sync_names(self, names: Collection[str]) -> None:
        """Sync the directories of new files, and the directories above them."""
        with errors_translated(next(iter(names), ""), self.url):
            self._sync_up({directory_of(self._path(name)) for name in names})

    def publish(self, name: str, data: bytes) -> None:
        """Create a small file atomically and durably. After an error the file may exist: `delete` it."""
        with errors_translated(name, self.url):
            path = self._path(name)
            if not self._publish_unnamed(path, memoryview(data)):
                self._publish_hidden(path, memoryview(data))
            self._sync_up({directory_of(path)})

    @contextmanager
    def open(self, name: str) -> Iterator[LocalReader]:
        with ExitStack() as stack:
            with errors_translated(name, self.url):
                path, fd = self._opened(name)
                stack.callback(self._close, fd)
                reader = FileReader(self._files, fd, path, self._buffers)
                stack.callback(reader.close)
            yield LocalReader(self._files, fd, reader, name, self.url)

    def _opened(self, name: str) -> tuple[str, int]:
        """Open a file for reading; its path and its descriptor."""
        path = self._path(name)
        try:
            return path, self._files.open(path, READ)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
        # It is a link, which is not followed by opening it. Few files are, and resolving a path takes a while.
        path = self._within(path)
        return path, self._files.open(path, READ)

    def _close(self, fd: int) -> None:
        # The bytes were read; an error of close changes nothing.
        with suppress(OSError):
            self._files.close(fd)

    def read(self, name: str, bytes_max: int) -> bytes:
        with self.open(name) as reader:
            if reader.size > bytes_max:
                raise file_large(name, reader.size, bytes_max)
            if reader.size > self._whole_bytes_max:
                raise WouldBlock
            data = bytearray(reader.size)
            reader.read_into(0, memoryview(data))
            return bytes(data)

    def entries(self, under: str = "") -> Iterator[StoredFile]:
        """The files whose names begin with `under`. Symbolic links and inaccessible directories are skipped."""
        check_name_prefix(under)
        directory, slash, _ = under.rpartition("/")
        for name, found in self._walk(directory + slash, under):
            yield StoredFile(name, found.size, found.modified_at)

    def move(self, name: str, to: str) -> None:
        """Rename a small file durably; if that was done already, sync it again."""
        with errors_translated(name, self.url):
            path, target = self._path(name), self._path(to)
            self._rename(path, target)
            self._sync_up({directory_of(target)})
            if directory_of(path) != directory_of(target):
                self._sync_nearest(directory_of(path))

    def delete(self, names: Collection[str]) -> None:
        """Delete durably. A file that cannot be removed does not stop the deletion of the rest."""
        failures: list[CheckpointException] = []
        touched: dict[str, str] = {}
        for name in names:
            try:
                with errors_translated(name, self.url):
                    path = self._path(name)
                    touched[directory_of(path)] = name
                    with suppress(FileNotFoundError):
                        self._files.unlink(path)
            except CheckpointException as error:
                failures.append(error)
        for directory in sorted(touched, key=len, reverse=True):
            try:
                with errors_translated(touched[directory], self.url):
                    # Also if nothing was removed: a process that has died may have removed it without a sync.
                    self._sync_nearest(self._prune(directory))
            except CheckpointException as error:
                failures.append(error)
        if failures:
            raise failures[0]

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """Lock a file for reading during the block, so that other processes of this host see that it is used."""
        with ExitStack() as stack:
            with suppress(OSError, CheckpointException):
                _, fd = self._opened(name)
                stack.callback(self._close, fd)
                self._files.lock_shared(fd)
            yield

    def is_held(self, name: str) -> bool:
        try:
            _, fd = self._opened(name)
        except (OSError, CheckpointException):
            return False
        try:
            return not self._files.lock_alone(fd)
        except OSError:
            return False
        finally:
            self._close(fd)

    def free_bytes(self) -> int | None:
        with errors_translated("", self.url):
            return self._free_bytes()

    # Paths.

    def _path(self, name: str) -> str:
        """The path of a file. Its directory lies in the storage, links followed."""
        directory, _, base = f"{self._root}/{check_name(name)}".rpartition("/")
        return f"{self._within(directory)}/{base}"

    def _within(self, path: str) -> str:
        """The path with links followed; an error if it leaves the storage."""
        if path == self._root:
            return path
        found = self._files.resolve(path)
        if os.path.commonpath((self._root, found)) != self._root:
            raise storage_error(
                f"{path} is a link that leaves {self.url}",
                path,
                "remove the symbolic link",
                code="checkpoint_storage_obstructed",
            )
        return found

    def _upwards(self, directory: str) -> Iterator[str]:
        """A directory and its parents, up to the storage's root."""
        while directory != self._root:
            yield directory
            directory = directory_of(directory)
        yield self._root

    def _walk(self, start: str, under: str) -> Iterator[tuple[str, DirectoryEntry]]:
        """All files below a directory whose names begin with `under`."""
        waiting = [start]
        while waiting:
            lead = waiting.pop()
            for found in self._scan(lead):
                name = lead + found.name
                if found.name.startswith(".") or not name.startswith(under):
                    continue
                if found.is_directory:
                    waiting.append(f"{name}/")
                else:
                    yield name, found

    def _scan(self, lead: str) -> list[DirectoryEntry]:
        with errors_translated(lead, self.url):
            try:
                return self._files.scan(self._within(f"{self._root}/{lead}".rstrip("/")))
            except (FileNotFoundError, NotADirectoryError):
                return []
            except PermissionError:
                # Such as `lost+found`. But an inaccessible root must not look empty.
                if not lead:
                    raise
                return []

    def _free_bytes(self) -> int:
        path = self._root
        while True:
            try:
                return self._files.free_bytes(path)
            except FileNotFoundError:
                if path == directory_of(path):
                    raise
                path = directory_of(path)

    # New files.

    def _open_new(self, path: str, flags: int) -> int:
        """Open a new file (or, for an unnamed file, its directory); make its directory if needed."""
        directory = path if flags == UNNAMED else directory_of(path)
        try:
            for _ in range(OPENINGS_MAX):
                with suppress(FileNotFoundError):
                    return self._files.open(path, flags)
                self._make_directories(directory)
            return self._files.open(path, flags)
        except OSError:
            # The directory may be empty now.
            self._prune(directory)
            raise

    def _make_directories(self, path: str) -> None:
        """Make a directory and its parents. Sync those above the root here, because `_sync_up` ends at the root."""
        with suppress(FileExistsError):
            try:
                self._files.make_directory(path)
            except FileNotFoundError:
                self._make_directories(directory_of(path))
                self._files.make_directory(path)
            if len(path) <= len(self._root):
                try:
                    self._sync_directory(directory_of(path))
                except OSError:
                    # A later call that finds the directory would take it for durable.
                    with suppress(OSError):
                        self._files.remove_directory(path)
                    raise

    def _fill(self, fd: int, name: str, source: ByteSource, token: CancelToken, free: int) -> None:
        try:
            writer = FileWriter(self._files, fd, source, self._buffers)
            try:
                writer.reserve(free)
            except OSError as error:
                if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                    raise
                raise disk_full(name, self.url, source.size, free) from error
            writer.run(token, self._threads)
        finally:
            self._files.close(fd)

    def _remove_unfinished(self, path: str) -> None:
        """Remove an unfinished file, ignoring errors."""
        with suppress(OSError):
            self._files.unlink(path)
            self._prune(directory_of(path))

    def _publish_unnamed(self, path: str, data: memoryview) -> bool:
        """Write an unnamed file and link it; False where the system cannot. A crash leaves no file."""
        try:
            fd = self._open_new(directory_of(path), UNNAMED)
        except OSError as error:
            if error.errno in NOT_UNNAMED:
                return False
            raise
        try:
            write_whole(self._files, fd, data)
            try:
                self._files.link_open(fd, path)
            except OSError as error:
                if error.errno in NOT_LINKED:
                    return False
                raise
        finally:
            self._files.close(fd)
        return True

    def _publish_hidden(self, path: str, data: memoryview) -> None:
        """Write a hidden file and rename it. A crash may leave the hidden file."""
        hidden = f"{directory_of(path)}/.{secrets.token_hex(8)}{HIDDEN_SUFFIX}"
        self._sweep(directory_of(path))
        fd = self._open_new(hidden, CREATE)
        try:
            try:
                write_whole(self._files, fd, data)
            finally:
                self._files.close(fd)
            self._rename_new(hidden, path)
        finally:
            # It may have been renamed. If it cannot be removed, `_sweep` removes it later.
            with suppress(OSError):
                self._files.unlink(hidden)

    def _sweep(self, directory: str) -> None:
        """Remove hidden files of processes that have died."""
        old = self._wall() - HIDDEN_S_MAX
        with suppress(OSError):
            for found in self._files.scan(directory):
                if found.name.startswith(".") and found.name.endswith(HIDDEN_SUFFIX) and found.modified_at < old:
                    self._files.unlink(f"{directory}/{found.name}")

    def _rename_new(self, path: str, to: str) -> None:
        try:
            self._files.link(path, to)
        except OSError as error:
            if error.errno not in NOT_LINKED:
                raise
            self._files.rename_new(path, to)

    # Renaming, deleting, syncing.

    def _rename(self, path: str, to: str) -> None:
        with suppress(FileNotFoundError):
            self._files.rename(path, to)
            return
        if self._is_there(path):
            self._make_directories(directory_of(to))
            self._files.rename(path, to)
        elif not self._is_there(to):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    def _is_there(self, path: str) -> bool:
        try:
            self._files.close(self._files.open(path, READ))
        except FileNotFoundError:
            return False
        return True

    def _prune(self, directory: str) -> str:
        """Remove a directory and its parents while they are empty; returns the first that stays."""
        for above in self._upwards(directory):
            if above == self._root:
                break
            try:
                self._files.remove_directory(above)
            except FileNotFoundError:
                continue
            except OSError:
                return above
        return self._root

    def _sync_up(self, directories: Collection[str]) -> None:
        """Sync directories and their parents up to the root."""
        for directory in sorted({above for each in directories for above in self._upwards(each)}, reverse=True):
            self._sync_directory(directory)

    def _sync_nearest(self, directory: str) -> None:
        """Sync a directory, or its nearest parent that exists."""
        for above in self._upwards(directory):
            with suppress(FileNotFoundError):
                self._sync_directory(above)
                return

    def _sync_directory(self, path: str) -> None:
        try:
            retry_interrupted(self._files.sync_directory, path)
        except OSError as error:
            # A file system that cannot sync directories makes names durable by itself.
            if error.errno == errno.EINVAL:
                return
            if error.errno in NOT_BEGUN:
                raise
            raise SyncFailed(error.errno, error.strerror) from error
