"""A storage with an operation that fails, before or after it takes effect."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.ports import ByteSource, CancelToken, Reader, Storage, StoredFile

T = TypeVar("T")

Fault = Callable[[int, str, bool], None]
"""Called with the number of an operation, what it is, and whether it is done; may raise."""


class FaultyStorage:
    """Another storage, with a fault; a `ports.Storage`."""

    def __init__(self, storage: Storage, fault: Fault = lambda number, what, done: None) -> None:
        self._storage = storage
        self._fault = fault
        self._lock = threading.Lock()
        self.calls: list[str] = []
        """What was asked, in order."""

    @property
    def url(self) -> str:
        return self._storage.url

    def write(self, name: str, source: ByteSource, token: CancelToken) -> None:
        self._do("write", lambda: self._storage.write(name, source, token))

    def sync_names(self, names: Collection[str]) -> None:
        self._do("sync_names", lambda: self._storage.sync_names(names))

    def publish(self, name: str, data: bytes) -> None:
        self._do("publish", lambda: self._storage.publish(name, data))

    def open(self, name: str) -> AbstractContextManager[Reader]:
        return self._do("open", lambda: self._storage.open(name))

    def read(self, name: str, bytes_max: int) -> bytes:
        return self._do("read", lambda: self._storage.read(name, bytes_max))

    def entries(self, under: str = "") -> Iterator[StoredFile]:
        return self._do("entries", lambda: self._storage.entries(under))

    def move(self, name: str, to: str) -> None:
        self._do("move", lambda: self._storage.move(name, to))

    def delete(self, names: Collection[str]) -> None:
        self._do("delete", lambda: self._storage.delete(names))

    def free_bytes(self) -> int | None:
        return self._do("free_bytes", self._storage.free_bytes)

    def _do(self, what: str, act: Callable[[], T]) -> T:
        with self._lock:
            number = len(self.calls)
            self.calls.append(what)
        self._fault(number, what, False)
        done = act()
        self._fault(number, what, True)
        return done


def broken(retryable: bool = False) -> CheckpointException:
    """What a storage raises that does not do what it should."""
    return CheckpointException("it is broken", "", ExceptionType.STORAGE_ERROR, code="broken", retryable=retryable)


def at(number: int, *, after: bool = False, error: Callable[[], BaseException] = broken) -> Fault:
    """The n-th operation fails, before or after it is done."""

    def fault(current: int, what: str, done: bool) -> None:
        if current == number and done == after:
            raise error()

    return fault


def on(*names: str, after: bool = False, error: Callable[[], BaseException] = broken) -> Fault:
    """All operations of these kinds fail."""

    def fault(current: int, what: str, done: bool) -> None:
        if what in names and done == after:
            raise error()

    return fault
