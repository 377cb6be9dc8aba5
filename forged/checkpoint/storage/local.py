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
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from forged.checkpoint.errors import CheckpointException, storage_error
from forged.checkpoint.format.names import check_name, check_name_prefix
from forged.checkpoint.ports import CancelToken, Entry, Source
from forged.checkpoint.storage.cache_bypass import FileReader
from forged.checkpoint.storage.direct_write import (
    BUFFERS_PER_WRITE,
    BlockBuffers,
    FileWriter,
    retry_interrupted,
    write_whole,
)
from forged.checkpoint.storage.files import CREATE, READ, UNNAMED, DirectoryEntry, Files, SystemFiles, directory_of
from forged.checkpoint.storage.os_errors import SyncFailed, disk_full, errors_translated, file_large, file_short
from forged.checkpoint.thread_pool import THREADS

OPENINGS_MAX = 10
"""How often a directory is made anew that others remove meanwhile, being empty."""
HIDDEN_SUFFIX = ".tmp"
HIDDEN_S_MAX = 3600.0
"""So long nobody takes to publish what is hidden."""
NOT_UNNAMED = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS})
"""What file systems say that have no files without a name."""
NOT_LINKED = frozenset({errno.ENOENT, errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
"""What is said where such a file cannot be given one: the file system, or there is no /proc."""
NOT_BEGUN = frozenset({errno.ENOENT, errno.EMFILE, errno.ENFILE})
"""What is said before a directory is synced: that it cannot even be opened."""


class LocalReader:
    """A file that is read."""

    def __init__(self, files: Files, fd: int, draining: FileReader, name: str, url: str) -> None:
        self._files = files
        self._fd = fd
        self._draining = draining
        self._name = name
        self._url = url
        self.size = draining.size

    def read_into(self, offset: int, room: memoryview) -> None:
        """Fill the room with the bytes from `offset` on."""
        with errors_translated(self._name, self._url):
            count = self._draining.read(offset, room)
        if count < len(room):
            raise file_short(self._name, offset + len(room), offset + count)

    def mapped(self) -> memoryview | None:
        """The file as memory. Whoever truncates it kills those who look there (SIGBUS)."""
        with errors_translated(self._name, self._url):
            return self._files.map(self._fd, self.size)


class LocalStorage:
    """The checkpoints in a directory, which is made when it is first written to."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        files: Files | None = None,
        threads: int = THREADS,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._files = files or SystemFiles()
        absolute = str(Path(path).absolute())
        with errors_translated("", absolute):
            self._root = self._files.resolve(absolute)
        self._threads = threads
        self._wall = wall
        self._rooms = BlockBuffers(threads * BUFFERS_PER_WRITE)

    @property
    def url(self) -> str:
        """The directory."""
        return self._root

    def write(self, name: str, source: Source, token: CancelToken) -> None:
        """A new file, whose bytes are durable then."""
        with errors_translated(name, self.url):
            path = self._place(name)
            free = self._free_bytes()
            fd = self._open_new(path, CREATE)
            try:
                self._fill(fd, name, source, token, free)
            except BaseException:
                self._take_back(path)
                raise

    def sync_names(self, names: Collection[str]) -> None:
        """Make the names of new files durable, and those of the directories that lead to them."""
        with errors_translated(next(iter(names), ""), self.url):
            self._sync_up({directory_of(self._place(name)) for name in names})

    def publish(self, name: str, data: bytes) -> None:
        """A new small file, durable when this returns. When it fails the file may be there: `delete` it then."""
        with errors_translated(name, self.url):
            path = self._place(name)
            if not self._publish_unnamed(path, memoryview(data)):
                self._publish_hidden(path, memoryview(data))
            self._sync_up({directory_of(path)})

    @contextmanager
    def open(self, name: str) -> Iterator[LocalReader]:
        """Read a file."""
        with ExitStack() as stack:
            with errors_translated(name, self.url):
                path = self._within(self._place(name))
                fd = self._files.open(path, READ)
                stack.callback(self._let_go, fd)
                draining = FileReader(self._files, fd, path, self._rooms)
                stack.callback(draining.close)
            yield LocalReader(self._files, fd, draining, name, self.url)

    def _let_go(self, fd: int) -> None:
        # What was read was read, whatever is said now.
        with suppress(OSError):
            self._files.close(fd)

    def read(self, name: str, bytes_max: int) -> bytes:
        """A small file."""
        with self.open(name) as reader:
            if reader.size > bytes_max:
                raise file_large(name, reader.size, bytes_max)
            data = bytearray(reader.size)
            reader.read_into(0, memoryview(data))
            return bytes(data)

    def entries(self, under: str = "") -> Iterator[Entry]:
        """The files whose names begin so; symbolic links are none, and a directory that nobody may enter has none."""
        check_name_prefix(under)
        directory, slash, _ = under.rpartition("/")
        for name, found in self._walk(directory + slash, under):
            yield Entry(name, found.size, found.modified_at)

    def move(self, name: str, to: str) -> None:
        """Give a small file another name, durably; if that was done already, see that it is durable."""
        with errors_translated(name, self.url):
            path, target = self._place(name), self._place(to)
            self._rename(path, target)
            self._sync_up({directory_of(target)})
            if directory_of(path) != directory_of(target):
                self._sync_nearest(directory_of(path))

    def delete(self, names: Collection[str]) -> None:
        """Have these no more, durably. One that cannot be removed does not keep the others."""
        failures: list[CheckpointException] = []
        touched: dict[str, str] = {}
        for name in names:
            try:
                with errors_translated(name, self.url):
                    path = self._place(name)
                    touched[directory_of(path)] = name
                    with suppress(FileNotFoundError):
                        self._files.unlink(path)
            except CheckpointException as error:
                failures.append(error)
        for directory in sorted(touched, key=len, reverse=True):
            try:
                with errors_translated(touched[directory], self.url):
                    # Also where nothing was removed: who died before us may have removed it, and not synced.
                    self._sync_nearest(self._prune(directory))
            except CheckpointException as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def free_bytes(self) -> int | None:
        """How much can still be written."""
        with errors_translated("", self.url):
            return self._free_bytes()

    # Where names lead.

    def _place(self, name: str) -> str:
        """The path of a file, whose directory is in the storage."""
        directory, _, base = f"{self._root}/{check_name(name)}".rpartition("/")
        return f"{self._within(directory)}/{base}"

    def _within(self, path: str) -> str:
        """Where a path leads, if that is in the storage."""
        if path == self._root:
            return path
        found = self._files.resolve(path)
        if os.path.commonpath((self._root, found)) != self._root:
            raise storage_error(
                f"{path} leads out of {self.url}",
                path,
                "remove the symbolic link",
                code="checkpoint_storage_obstructed",
            )
        return found

    def _upwards(self, directory: str) -> Iterator[str]:
        """A directory and those that it lies in, up to the storage's."""
        while directory != self._root:
            yield directory
            directory = directory_of(directory)
        yield self._root

    def _walk(self, start: str, under: str) -> Iterator[tuple[str, DirectoryEntry]]:
        """All files below a directory whose names begin so."""
        waiting = [start]
        while waiting:
            lead = waiting.pop()
            for found in self._look_into(lead):
                name = lead + found.name
                if found.name.startswith(".") or not name.startswith(under):
                    continue
                if found.is_directory:
                    waiting.append(f"{name}/")
                else:
                    yield name, found

    def _look_into(self, lead: str) -> list[DirectoryEntry]:
        with errors_translated(lead, self.url):
            try:
                return self._files.scan(self._within(f"{self._root}/{lead}".rstrip("/")))
            except (FileNotFoundError, NotADirectoryError):
                return []
            except PermissionError:
                # Such as `lost+found`. But of its own directory a storage must not say that it is empty.
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

    # How files come.

    def _open_new(self, path: str, flags: int) -> int:
        """Open what is to be a new file, or the directory of one; its directory is made."""
        directory = path if flags == UNNAMED else directory_of(path)
        try:
            for _ in range(OPENINGS_MAX):
                with suppress(FileNotFoundError):
                    return self._files.open(path, flags)
                self._make_directories(directory)
            return self._files.open(path, flags)
        except OSError:
            # The directory may have been made for nothing.
            self._prune(directory)
            raise

    def _make_directories(self, path: str) -> None:
        """Make a directory, and those that it lies in. Those above the storage nobody else makes durable."""
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
                    # Whoever found it there would take it for durable.
                    with suppress(OSError):
                        self._files.remove_directory(path)
                    raise

    def _fill(self, fd: int, name: str, source: Source, token: CancelToken, free: int) -> None:
        try:
            filling = FileWriter(self._files, fd, source, self._rooms)
            try:
                filling.reserve(free)
            except OSError as error:
                if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                    raise
                raise disk_full(name, self.url, source.size, free) from error
            filling.run(token, self._threads)
        finally:
            self._files.close(fd)

    def _take_back(self, path: str) -> None:
        """Remove what was not finished, as far as that can be done."""
        with suppress(OSError):
            self._files.unlink(path)
            self._prune(directory_of(path))

    def _publish_unnamed(self, path: str, data: memoryview) -> bool:
        """Write a file without a name, then give it one; False where that cannot be. A crash leaves nothing of it."""
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
        """Write a file under a name of the storage's own, then give it the other one. A crash may leave the former."""
        hidden = f"{directory_of(path)}/.{secrets.token_hex(8)}{HIDDEN_SUFFIX}"
        self._sweep(directory_of(path))
        fd = self._open_new(hidden, CREATE)
        try:
            try:
                write_whole(self._files, fd, data)
            finally:
                self._files.close(fd)
            self._name_new(hidden, path)
        finally:
            # It may have been renamed; and one that cannot be removed now is swept away some day.
            with suppress(OSError):
                self._files.unlink(hidden)

    def _sweep(self, directory: str) -> None:
        """Remove what those who have died here have left hidden."""
        old = self._wall() - HIDDEN_S_MAX
        with suppress(OSError):
            for found in self._files.scan(directory):
                if found.name.startswith(".") and found.name.endswith(HIDDEN_SUFFIX) and found.modified_at < old:
                    self._files.unlink(f"{directory}/{found.name}")

    def _name_new(self, path: str, to: str) -> None:
        try:
            self._files.link(path, to)
        except OSError as error:
            if error.errno not in NOT_LINKED:
                raise
            self._files.rename_new(path, to)

    # How names change, and go.

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
        """Remove a directory that is empty, then those above it that are; returns the first one that stays."""
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
        """Make the names in these durable, and theirs."""
        for directory in sorted({above for each in directories for above in self._upwards(each)}, reverse=True):
            self._sync_directory(directory)

    def _sync_nearest(self, directory: str) -> None:
        """Make durable what is, and is no more, in a directory; or that it is no more itself."""
        for above in self._upwards(directory):
            with suppress(FileNotFoundError):
                self._sync_directory(above)
                return

    def _sync_directory(self, path: str) -> None:
        try:
            retry_interrupted(self._files.sync_directory, path)
        except OSError as error:
            # A file system that syncs no directories keeps their names by itself.
            if error.errno == errno.EINVAL:
                return
            if error.errno in NOT_BEGUN:
                raise
            raise SyncFailed(error.errno, error.strerror) from error
