"""A save in slots as a storage from which it can be loaded, and nothing else.

Invariants:
- What is read is verified against the digests in the slots, as it is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import NoReturn

from forged.checkpoint.errors import storage_error
from forged.checkpoint.ports import ByteSource, CancelToken, Reader, StoredFile
from forged.checkpoint.storage.files import GAP_BYTES_MAX
from forged.checkpoint.storage.listing import MISSING
from forged.checkpoint.storage.os_errors import file_large, file_short
from forged.checkpoint.storage.rooms import fill
from forged.checkpoint.storage.slot_files import SlotSet


class BytesReader:
    """Bytes in memory as a `ports.Reader`."""

    def __init__(self, name: str, data: bytes) -> None:
        self.size = len(data)
        self._name = name
        self._data = data

    def read_into(self, offset: int, *rooms: memoryview) -> None:
        size = sum(map(len, rooms))
        found = memoryview(self._data)[offset : offset + size]
        if len(found) < size:
            raise file_short(self._name, offset + size, offset + len(found))
        fill(rooms, found)

    def mapped(self) -> memoryview | None:
        return None


class SlotStorage:
    """The checkpoint that slots hold, as a read-only `ports.Storage`."""

    gap_bytes_max = GAP_BYTES_MAX

    def __init__(self, slots: SlotSet, url: str) -> None:
        self._slots = slots
        self.prefix = slots.manifest.prefix
        self.url = url

    @contextmanager
    def open(self, name: str) -> Iterator[Reader]:
        part = self._slots.parts.get(name)
        if part is not None:
            yield part
        elif name == self._slots.manifest.path:
            yield BytesReader(name, self._slots.data)
        else:
            raise storage_error(f"{name} is not in {self.url}", name, code=MISSING)

    def read(self, name: str, bytes_max: int) -> bytes:
        with self.open(name) as reader:
            if reader.size > bytes_max:
                raise file_large(name, reader.size, bytes_max)
            data = bytearray(reader.size)
            reader.read_into(0, memoryview(data))
            return bytes(data)

    def entries(self, under: str = "") -> Iterator[StoredFile]:
        created_at = self._slots.manifest.created_at
        sizes = {name: part.size for name, part in self._slots.parts.items()}
        sizes[self._slots.manifest.path] = len(self._slots.data)
        for name, size in sizes.items():
            if name.startswith(under):
                yield StoredFile(name, size, created_at)

    def free_bytes(self) -> int | None:
        return None

    def write(self, name: str, source: ByteSource, token: CancelToken) -> None:
        self._refuse(name)

    def sync_names(self, names: Collection[str]) -> None:
        self._refuse(next(iter(names), ""))

    def publish(self, name: str, data: bytes) -> None:
        self._refuse(name)

    def move(self, name: str, to: str) -> None:
        self._refuse(name)

    def delete(self, names: Collection[str]) -> None:
        self._refuse(next(iter(names), ""))

    def _refuse(self, name: str) -> NoReturn:
        raise storage_error(
            f"{self.url} is only read", name, "save to a directory", code="checkpoint_storage_read_only"
        )
