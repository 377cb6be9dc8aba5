"""A storage in memory that records reads."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext

from forged.checkpoint.errors import CheckpointException, ExceptionType, corrupted, storage_error
from forged.checkpoint.format.names import check_name
from forged.checkpoint.ports import BLOCK_BYTES, ByteSource, CancelToken, Reader, StoredFile


class MemoryReader:
    """A file in memory."""

    def __init__(self, storage: MemoryStorage, name: str, data: bytes) -> None:
        self._storage = storage
        self.name = name
        self._data = memoryview(data)

    @property
    def size(self) -> int:
        return len(self._data)

    def read_into(self, offset: int, room: memoryview) -> None:
        end = offset + len(room)
        if offset < 0 or end > len(self._data):
            raise corrupted(
                f"{self.name} has {len(self._data)} bytes, and not those from {offset} to {end}",
                self.name,
                "use another checkpoint",
                code="checkpoint_file_short",
            )
        self._storage.told(self.name, offset, len(room))
        room[:] = self._data[offset:end]

    def mapped(self) -> memoryview | None:
        return self._data if self._storage.maps else None


class MemoryStorage:
    """A dict of files; safe between threads."""

    def __init__(self, url: str = "memory://test", *, maps: bool = True) -> None:
        self.files: dict[str, bytes] = {}
        self.reads: list[tuple[str, int, int]] = []
        """Of every read through a `Reader`: file, offset, length."""
        self.maps = maps
        self.room: int | None = None
        """What `free_bytes` says."""
        self._url = url
        self._lock = threading.Lock()
        self._written: dict[str, int] = {}
        """When each file was, by counting."""

    @property
    def url(self) -> str:
        return self._url

    @property
    def bytes_read(self) -> int:
        """How much was read through readers."""
        return sum(length for _, _, length in self.reads)

    def told(self, name: str, offset: int, length: int) -> None:
        """A reader has read."""
        with self._lock:
            self.reads.append((name, offset, length))

    def damage(self, name: str, offset: int, mask: int = 1) -> None:
        """Flip bits of a byte."""
        data = bytearray(self.files[name])
        data[offset] ^= mask
        self.files[name] = bytes(data)

    def write(self, name: str, source: ByteSource, token: CancelToken) -> None:
        check_name(name)
        self._require_free(name)
        data = bytearray(source.size)
        room = memoryview(bytearray(BLOCK_BYTES))
        for offset in range(0, source.size, BLOCK_BYTES):
            token.check()
            block = source.block(offset, room[: source.size - offset])
            data[offset : offset + len(block)] = block
        if len(data) != source.size:
            raise storage_error(f"{name}: the blocks are not as large as they have to be", name)
        self.publish(name, bytes(data))

    def sync_names(self, names: Collection[str]) -> None:
        for name in names:
            self._file(name)

    def publish(self, name: str, data: bytes) -> None:
        check_name(name)
        with self._lock:
            self._require_free(name)
            self.files[name] = bytes(data)
            self._written[name] = len(self._written) + 1

    def open(self, name: str) -> AbstractContextManager[Reader]:
        return nullcontext(MemoryReader(self, name, self._file(name)))

    def read(self, name: str, bytes_max: int) -> bytes:
        data = self._file(name)
        if len(data) > bytes_max:
            raise storage_error(
                f"{name} has {len(data)} bytes, more than {bytes_max}", name, code="checkpoint_file_large"
            )
        return data

    def entries(self, under: str = "") -> Iterator[StoredFile]:
        with self._lock:
            names = [name for name in self.files if name.startswith(under)]
            found = [StoredFile(name, len(self.files[name]), float(self._written.get(name, 0))) for name in names]
        return iter(found)

    def move(self, name: str, to: str) -> None:
        check_name(to)
        if name not in self.files and to in self.files:
            return
        data = self._file(name)
        with self._lock:
            self.files[to] = data
            del self.files[name]

    def delete(self, names: Collection[str]) -> None:
        with self._lock:
            for name in names:
                check_name(name)
                self.files.pop(name, None)

    def free_bytes(self) -> int | None:
        return self.room

    def _require_free(self, name: str) -> None:
        if name in self.files:
            raise storage_error(f"there is {name} already", name, "choose another name", code="checkpoint_exists")

    def _file(self, name: str) -> bytes:
        check_name(name)
        with self._lock:
            data = self.files.get(name)
        if data is None:
            raise CheckpointException(
                f"there is no {name}", name, ExceptionType.STORAGE_ERROR, code="checkpoint_file_missing"
            )
        return data
