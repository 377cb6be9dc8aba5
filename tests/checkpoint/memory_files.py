"""A file system in memory that records its operations, and computes the states that a power cut may leave.

Invariants after a power cut:
- A file has the bytes of its last sync, and any subset of the later sectors, sizes and holes. Bytes of a failed sync
  stay doubtful for good.
- A name refers to its file at the directory's last sync, or to any later one, each name by itself: a rename may be half
  done. After a failed sync a name stays doubtful until it has changed and was synced.
- A directory's contents exist only if its own name does.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, pairwise, product
from math import prod
from random import Random
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from forged.checkpoint.storage.files import CREATE, UNNAMED, DirectoryEntry, directory_of

SECTOR_BYTES = 512
PAGE = 4096
WRITTEN_AT = 4e9
"""When all files were written, by their own account."""
ROOT = "/disk"
"""A directory that is there from the beginning, durably."""

Kind: TypeAlias = Literal[
    "write",
    "resize",
    "sync",
    "failed sync",
    "name",
    "unname",
    "mkdir",
    "rmdir",
    "sync directory",
    "failed sync directory",
    "mark",
]


@dataclass(slots=True, eq=False)
class Node:
    """A file with any number of names, and its durable initial bytes."""

    data: bytearray = field(default_factory=bytearray)
    initial: bytes = b""


class Operation(NamedTuple):
    """One thing asked of the disk; a `mark` is a note of the test's own, which stands in `path`."""

    kind: Kind
    path: str = ""
    node: Node | None = None
    offset: int = 0
    data: bytes = b""


@dataclass(slots=True)
class Handle:
    """A file that is open."""

    node: Node
    is_direct: bool = False
    is_alone: bool = False


@dataclass(frozen=True, slots=True)
class Image:
    """What lies on a disk."""

    files: Mapping[str, bytes]
    directories: frozenset[str]

    @property
    def key(self) -> Any:
        """A key for comparing images."""
        return frozenset(self.files.items()), self.directories


EMPTY = Image({}, frozenset({"/", ROOT}))


class MemoryFiles:
    """An operating system's files; `lacking` names what its file system does not have."""

    def __init__(self, image: Image = EMPTY, lacking: Collection[str] = (), room: int = 1 << 40) -> None:
        self.operations: list[Operation] = []
        self.lacking = frozenset(lacking)
        self.room = room
        self.is_warm = True
        """Whether the page cache has what is read."""
        self.initial = {path: Node(bytearray(data), data) for path, data in image.files.items()}
        self.initial_directories = image.directories
        self._nodes = dict(self.initial)
        self._directories = set(image.directories)
        self._handles: dict[int, Handle] = {}
        self._next_fd = 1_000
        self._lock = threading.RLock()

    @property
    def image(self) -> Image:
        """What lies there now."""
        return Image({path: bytes(node.data) for path, node in self._nodes.items()}, frozenset(self._directories))

    @property
    def descriptors(self) -> int:
        """How many are open."""
        return len(self._handles)

    def mark(self, note: str) -> None:
        """Note that something has happened."""
        self.operations.append(Operation("mark", note))

    def open(self, path: str, flags: int) -> int:
        with self._lock:
            if flags == UNNAMED:
                self._require("unnamed")
                self._require_directory(path)
                return self._opened(Node())
            if flags == CREATE:
                self._require_new(path)
                self._name(path, node := Node())
                return self._opened(node)
            if path in self._directories:
                raise _error(errno.EISDIR)
            return self._opened(self._node(path))

    def close(self, fd: int) -> None:
        with self._lock:
            del self._handles[fd]

    def size(self, fd: int) -> int:
        return len(self._handles[fd].node.data)

    def bypass_cache(self, fd: int, *, on: bool) -> None:
        if on:
            self._require("direct")
        self._handles[fd].is_direct = on

    def reserve(self, fd: int, size: int) -> None:
        with self._lock:
            self._require("reserve")
            self._require_room(size)
            if size > self.size(fd):
                self._resize(fd, size)

    def truncate(self, fd: int, size: int) -> None:
        with self._lock:
            self._resize(fd, size)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        with self._lock:
            handle = self._handles[fd]
            self._require_aligned(fd, data, offset)
            self._require_room(offset + len(data) - len(handle.node.data))
            self.operations.append(Operation("write", "", handle.node, offset, bytes(data)))
            _put(handle.node.data, offset, bytes(data))
            return len(data)

    def read(self, fd: int, room: memoryview, offset: int) -> int:
        self._require_aligned(fd, room, offset)
        found = self._handles[fd].node.data[offset : offset + len(room)]
        room[: len(found)] = found
        return len(found)

    def map(self, fd: int, size: int) -> memoryview:
        return memoryview(bytes(self._handles[fd].node.data[:size]))

    def read_ahead(self, fd: int, *, on: bool) -> None:
        self.size(fd)

    def is_cached(self, fd: int, offset: int) -> bool:
        self._require("is_cached")
        return self.is_warm and offset < self.size(fd)

    def lock_alone(self, fd: int) -> bool:
        with self._lock:
            self._require("lock_alone")
            handle = self._handles[fd]
            handle.is_alone = not any(
                other.is_alone for other in self._handles.values() if other.node is handle.node and other is not handle
            )
            return handle.is_alone

    def begin_write_back(self, fd: int, offset: int, size: int) -> None:
        self.size(fd)

    def drop_cache(self, fd: int, offset: int, size: int) -> None:
        self.size(fd)

    def sync(self, fd: int) -> None:
        with self._lock:
            self.operations.append(Operation("sync", "", self._handles[fd].node))

    def fail_to_sync(self, fd: int) -> None:
        """A sync fails: what it was to make durable, no later one will."""
        with self._lock:
            self.operations.append(Operation("failed sync", "", self._handles[fd].node))

    def sync_directory(self, path: str) -> None:
        with self._lock:
            self._require_directory(path)
            self.operations.append(Operation("sync directory", path))

    def fail_to_sync_directory(self, path: str) -> None:
        """A sync fails: the names that it was to make durable, no later one will, unless they change."""
        with self._lock:
            if path in self._directories:
                self.operations.append(Operation("failed sync directory", path))

    def link_open(self, fd: int, path: str) -> None:
        with self._lock:
            self._require("link_open")
            self._require_new(path)
            self._name(path, self._handles[fd].node)

    def link(self, path: str, to: str) -> None:
        with self._lock:
            self._require("link")
            self._require_new(to)
            self._name(to, self._node(path))

    def rename(self, path: str, to: str) -> None:
        with self._lock:
            node = self._node(path)
            self._require_directory(directory_of(to))
            self._name(to, node)
            self._unname(path)

    def rename_new(self, path: str, to: str) -> None:
        with self._lock:
            self._require("rename_new")
            self._require_new(to)
            self.rename(path, to)

    def unlink(self, path: str) -> None:
        with self._lock:
            self._node(path)
            self._unname(path)

    def make_directory(self, path: str) -> None:
        with self._lock:
            self._require_new(path)
            self._directories.add(path)
            self.operations.append(Operation("mkdir", path))

    def remove_directory(self, path: str) -> None:
        with self._lock:
            self._require_directory(path)
            if any(each.startswith(f"{path}/") for each in (*self._nodes, *self._directories)):
                raise _error(errno.ENOTEMPTY)
            self._directories.remove(path)
            self.operations.append(Operation("rmdir", path))

    def scan(self, path: str) -> list[DirectoryEntry]:
        with self._lock:
            self._require_directory(path)
            lead = f"{path}/"
            directories = [
                DirectoryEntry(each.removeprefix(lead), True, 0, WRITTEN_AT)
                for each in self._directories
                if each != "/"
            ]
            files = [
                DirectoryEntry(each.removeprefix(lead), False, len(node.data), WRITTEN_AT)
                for each, node in self._nodes.items()
            ]
            return [found for found in (*directories, *files) if "/" not in found.name]

    def resolve(self, path: str) -> str:
        return path

    def free_bytes(self, path: str) -> int:
        with self._lock:
            self._require_directory(path)
            return self.room - sum(len(node.data) for node in self._nodes.values())

    def _opened(self, node: Node) -> int:
        self._next_fd += 1
        self._handles[self._next_fd] = Handle(node)
        return self._next_fd

    def _name(self, path: str, node: Node) -> None:
        self._nodes[path] = node
        self.operations.append(Operation("name", path, node))

    def _unname(self, path: str) -> None:
        del self._nodes[path]
        self.operations.append(Operation("unname", path))

    def _resize(self, fd: int, size: int) -> None:
        operation = Operation("resize", "", self._handles[fd].node, size)
        self.operations.append(operation)
        apply(self._handles[fd].node.data, operation, lambda: True)

    def _node(self, path: str) -> Node:
        self._require_directory(directory_of(path))
        if path in self._directories:
            raise _error(errno.EISDIR)
        if path not in self._nodes:
            raise _error(errno.ENOENT)
        return self._nodes[path]

    def _require(self, ability: str) -> None:
        if ability in self.lacking:
            raise _error(errno.EOPNOTSUPP)

    def _require_aligned(self, fd: int, data: memoryview, offset: int) -> None:
        if self._handles[fd].is_direct and (_address(data) % PAGE or len(data) % PAGE or offset % PAGE):
            raise _error(errno.EINVAL)

    def _require_room(self, size: int) -> None:
        if size > self.free_bytes("/"):
            raise _error(errno.ENOSPC)

    def _require_new(self, path: str) -> None:
        self._require_directory(directory_of(path))
        if path in self._nodes or path in self._directories:
            raise _error(errno.EEXIST)

    def _require_directory(self, path: str) -> None:
        if path in self._nodes:
            raise _error(errno.ENOTDIR)
        if path not in self._directories:
            raise _error(errno.ENOENT)


@dataclass(slots=True, eq=False)
class FileData:
    """A file as the medium has it."""

    durable: bytes
    pending: list[Operation] = field(default_factory=list)
    is_doubtful: bool = False
    """Whether a sync of it has failed, so that none makes it durable any more."""

    def variants(self, random: Random, torn: int) -> list[bytes]:
        """What may be found of it after a power cut: what is durable, everything, and some in between."""
        if not self.pending:
            return [self.durable]
        found = [self.durable, self._after(lambda: True)]
        for _ in range(torn):
            chance = random.choice((0.1, 0.5, 0.9, 0.99))
            found.append(self._after(lambda chance=chance: random.random() < chance))
        return list(dict.fromkeys(found))

    def settle(self) -> None:
        """It was synced."""
        if not self.is_doubtful:
            self.durable, self.pending = self._after(lambda: True), []

    def _after(self, survives: Any) -> bytes:
        image = bytearray(self.durable)
        for operation in self.pending:
            apply(image, operation, survives)
        return bytes(image)


@dataclass(slots=True, eq=False)
class Directory:
    """A directory as the medium has it: by name, what it stood for at the last sync, and since."""

    slots: dict[str, list[FileData | Directory | None]] = field(default_factory=dict)
    doubtful: set[str] = field(default_factory=set)
    """The names that a sync was to make durable that failed."""

    def now(self, name: str) -> FileData | Directory | None:
        return self.slots[name][-1] if name in self.slots else None

    def turn(self, name: str, into: FileData | Directory | None) -> None:
        self.slots.setdefault(name, [None]).append(into)
        self.doubtful.discard(name)

    def settle(self) -> None:
        """It was synced."""
        for name in self.slots.keys() - self.doubtful:
            history = self.slots.pop(name)
            if history[-1] is not None:
                self.slots[name] = history[-1:]

    def fail_to_settle(self) -> None:
        """It was to be synced, and was not."""
        self.doubtful |= {name for name, history in self.slots.items() if len(history) > 1}


class CrashImages:
    """What is durable of some files, and what is not yet, followed through the operations on them."""

    def __init__(self, files: MemoryFiles) -> None:
        self._root = Directory()
        self._media: dict[Node, FileData] = {}
        for path in sorted(files.initial_directories - {"/"}):
            self._folder(directory_of(path)).slots[_base(path)] = [Directory()]
        for path, node in files.initial.items():
            self._folder(directory_of(path)).slots[_base(path)] = [self._medium(node)]

    def follow(self, operation: Operation) -> None:
        """Take note of one operation."""
        kind, path, node = operation.kind, operation.path, operation.node
        match kind:
            case "mark":
                return
            case "sync directory":
                self._folder(path).settle()
            case "failed sync directory":
                self._folder(path).fail_to_settle()
            case "mkdir":
                self._folder(directory_of(path)).turn(_base(path), Directory())
            case "unname" | "rmdir":
                self._folder(directory_of(path)).turn(_base(path), None)
            case _:
                assert node is not None
                self._touch(operation, node)

    def crashes(self, random: Random, count_max: int, torn: int) -> Iterator[Image]:
        """What a power cut at this moment may leave: all there is, or so many of it by chance."""
        slots = [(folder, name, history) for folder in self._folders() for name, history in folder.slots.items()]
        media = {medium: medium.variants(random, torn) for medium in self._reachable()}
        choices = [history for _, _, history in slots] + list(media.values())
        every: Iterable[tuple[Any, ...]] = product(*choices)
        if prod(map(len, choices)) > count_max:
            every = (tuple(random.choice(choice) for choice in choices) for _ in range(count_max))
        for chosen in islice(every, count_max):
            names: dict[Directory, dict[str, FileData | Directory]] = {}
            for (folder, name, _), found in zip(slots, chosen, strict=False):
                if found is not None:
                    names.setdefault(folder, {})[name] = found
            yield _image(self._root, names, dict(zip(media, chosen[len(slots) :], strict=True)))

    def _touch(self, operation: Operation, node: Node) -> None:
        medium = self._medium(node)
        match operation.kind:
            case "name":
                self._folder(directory_of(operation.path)).turn(_base(operation.path), medium)
            case "sync":
                medium.settle()
            case "failed sync":
                medium.is_doubtful = True
            case _:
                medium.pending.append(operation)

    def _medium(self, node: Node) -> FileData:
        if node not in self._media:
            self._media[node] = FileData(node.initial)
        return self._media[node]

    def _folder(self, path: str) -> Directory:
        folder = self._root
        for part in filter(None, path.split("/")):
            found = folder.now(part)
            assert isinstance(found, Directory)
            folder = found
        return folder

    def _folders(self) -> list[Directory]:
        """All that may be found after a power cut."""
        found = [self._root]
        for folder in found:
            found += [each for history in folder.slots.values() for each in history if isinstance(each, Directory)]
        return found

    def _reachable(self) -> list[FileData]:
        every = (each for folder in self._folders() for history in folder.slots.values() for each in history)
        return list(dict.fromkeys(each for each in every if isinstance(each, FileData)))


def _image(
    root: Directory, names: Mapping[Directory, Mapping[str, FileData | Directory]], data: Mapping[FileData, bytes]
) -> Image:
    files: dict[str, bytes] = {}
    directories = {"/"}
    waiting = [("", root)]
    while waiting:
        lead, folder = waiting.pop()
        for name, found in names.get(folder, {}).items():
            if isinstance(found, Directory):
                directories.add(f"{lead}/{name}")
                waiting.append((f"{lead}/{name}", found))
            else:
                files[f"{lead}/{name}"] = data[found]
    return Image(files, frozenset(directories))


def apply(image: bytearray, operation: Operation, survives: Any) -> None:
    """Do to a file those parts of an operation that survive."""
    if operation.kind == "resize":
        if survives():
            del image[operation.offset :]
            image.extend(bytes(operation.offset - len(image)))
        return
    for offset, piece in sectors(operation):
        if survives():
            _put(image, offset, piece)


def _put(image: bytearray, offset: int, data: bytes) -> None:
    image.extend(bytes(max(0, offset - len(image))))
    image[offset : offset + len(data)] = data


def sectors(operation: Operation) -> Iterator[tuple[int, bytes]]:
    """A write in pieces that do not cross a sector's border."""
    first = -operation.offset % SECTOR_BYTES or SECTOR_BYTES
    cuts = [0, *range(first, len(operation.data), SECTOR_BYTES), len(operation.data)]
    for start, end in pairwise(cuts):
        yield operation.offset + start, operation.data[start:end]


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0]) if len(data) else 0


def _base(path: str) -> str:
    return path.rpartition("/")[2]


def _error(code: int) -> OSError:
    return OSError(code, os.strerror(code))
