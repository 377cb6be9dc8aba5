"""What is done when a storage fails: try again where that may help, and clear away what came to nothing.

Law: only what the storage itself calls passing is tried again, by the project's one policy, and never beyond the time
that the operation has. What was done already is not done twice.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeVar

from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.ports import CancelToken, Entry, Reader, Source, Storage, bounded
from forged.checkpoint.storage import listing
from forged.retry import RetryPolicy

T = TypeVar("T")


class FaultToleranceHandler:
    """Tries again, and rolls back."""

    def __init__(
        self,
        storage: Storage,
        retry_policy: RetryPolicy | None = None,
        random: Callable[[], float] = random.random,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.policy = RetryPolicy() if retry_policy is None else retry_policy
        self._storage = storage
        self._random = random
        self._sleep = sleep

    def guard(self, storage: Storage) -> Storage:
        """The storage, with every operation tried again that may pass."""
        return RetryingStorage(storage, self)

    def execute_with_retry(self, act: Callable[[], T], token: CancelToken | None = None) -> T:
        """Do something; again, if it fails in a way that may pass."""
        for pause_s in self.policy.delays(self._random):
            try:
                return act()
            except CheckpointException as error:
                if not error.retryable:
                    raise
            if token is None:
                self._sleep(pause_s)
            else:
                token.wait(pause_s)
        return act()

    def rollback(self, prefix: str) -> list[str]:
        """Delete what a save that came to nothing has left; returns the names. What is there stays."""
        return listing.delete_unfinished(self._storage, prefix)


class RetryingStorage:
    """A storage whose passing failures are waited out; a `ports.Storage`."""

    def __init__(self, storage: Storage, faults: FaultToleranceHandler, token: CancelToken | None = None) -> None:
        self._storage = storage
        self._faults = faults
        self._again = partial(faults.execute_with_retry, token=token)

    @property
    def url(self) -> str:
        return self._storage.url

    def bounded(self, token: CancelToken) -> Storage:
        return RetryingStorage(bounded(self._storage, token), self._faults, token)

    def write(self, name: str, source: Source, token: CancelToken) -> None:
        self._faults.execute_with_retry(lambda: self._storage.write(name, source, token), token)

    def sync_names(self, names: Collection[str]) -> None:
        self._again(lambda: self._storage.sync_names(names))

    def publish(self, name: str, data: bytes) -> None:
        is_first = True

        def publish() -> None:
            nonlocal is_first
            try:
                self._storage.publish(name, data)
            except CheckpointException as error:
                # The try before this one may have got through all the same.
                if is_first or error.code != "checkpoint_exists" or not listing.has_content(self._storage, name, data):
                    raise
                self._storage.sync_names([name])
            finally:
                is_first = False

        self._again(publish)

    @contextmanager
    def open(self, name: str) -> Iterator[Reader]:
        with ExitStack() as stack:
            yield self._again(lambda: stack.enter_context(self._storage.open(name)))

    def read(self, name: str, bytes_max: int) -> bytes:
        return self._again(lambda: self._storage.read(name, bytes_max))

    def entries(self, under: str = "") -> Iterator[Entry]:
        return iter(self._again(lambda: list(self._storage.entries(under))))

    def move(self, name: str, to: str) -> None:
        self._again(lambda: self._storage.move(name, to))

    def delete(self, names: Collection[str]) -> None:
        self._again(lambda: self._storage.delete(names))

    def free_bytes(self) -> int | None:
        return self._again(self._storage.free_bytes)
