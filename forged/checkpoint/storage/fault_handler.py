"""Retries storage operations, and deletes the files of failed saves.

Invariants:
- Only errors that the storage marks as retryable are retried, within the operation's deadline.
- A retried operation takes effect once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from random import SystemRandom
from typing import TypeVar

from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.ports import (
    ByteSource,
    CancelToken,
    Reader,
    Storage,
    StoredFile,
    bounded,
    hold,
    is_held,
    nonblocking,
)
from forged.checkpoint.storage import listing
from forged.retry import RetryPolicy

T = TypeVar("T")


class FaultToleranceHandler:
    """Retries storage operations, and rolls back saves."""

    def __init__(
        self,
        storage: Storage,
        retry_policy: RetryPolicy | None = None,
        random: Callable[[], float] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.policy = RetryPolicy() if retry_policy is None else retry_policy
        self._storage = storage
        self._random = random or SystemRandom().random
        self._sleep = sleep

    def guard(self, storage: Storage) -> Storage:
        """The storage with retries."""
        return RetryingStorage(storage, self)

    def execute_with_retry(self, act: Callable[[], T], token: CancelToken | None = None) -> T:
        """Call `act`; repeat it after retryable errors, as the policy says."""
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
        """Delete the files of failed saves under a prefix; returns their names. Keeps an existing checkpoint."""
        return listing.delete_unfinished(self._storage, prefix)


class RetryingStorage:
    """A storage with retries; a `ports.Storage`."""

    def __init__(self, storage: Storage, faults: FaultToleranceHandler, token: CancelToken | None = None) -> None:
        self._storage = storage
        self._faults = faults
        self._retried = partial(faults.execute_with_retry, token=token)

    @property
    def url(self) -> str:
        return self._storage.url

    @property
    def gap_bytes_max(self) -> int:
        return self._storage.gap_bytes_max

    def bounded(self, token: CancelToken) -> Storage:
        return RetryingStorage(bounded(self._storage, token), self._faults, token)

    def nonblocking(self) -> Storage:
        """Without retries: before a retry there is a pause."""
        return nonblocking(self._storage)

    def write(self, name: str, source: ByteSource, token: CancelToken) -> None:
        self._faults.execute_with_retry(lambda: self._storage.write(name, source, token), token)

    def sync_names(self, names: Collection[str]) -> None:
        self._retried(lambda: self._storage.sync_names(names))

    def publish(self, name: str, data: bytes) -> None:
        is_first = True

        def publish() -> None:
            nonlocal is_first
            try:
                self._storage.publish(name, data)
            except CheckpointException as error:
                # The previous try may have succeeded although it raised.
                if is_first or error.code != "checkpoint_exists" or not listing.has_content(self._storage, name, data):
                    raise
                self._storage.sync_names([name])
            finally:
                is_first = False

        self._retried(publish)

    @contextmanager
    def open(self, name: str) -> Iterator[Reader]:
        with ExitStack() as stack:
            yield self._retried(lambda: stack.enter_context(self._storage.open(name)))

    def read(self, name: str, bytes_max: int) -> bytes:
        return self._retried(lambda: self._storage.read(name, bytes_max))

    def entries(self, under: str = "") -> Iterator[StoredFile]:
        return iter(self._retried(lambda: list(self._storage.entries(under))))

    def move(self, name: str, to: str) -> None:
        self._retried(lambda: self._storage.move(name, to))

    def delete(self, names: Collection[str]) -> None:
        self._retried(lambda: self._storage.delete(names))

    def hold(self, name: str) -> AbstractContextManager[None]:
        return hold(self._storage, name)

    def is_held(self, name: str) -> bool:
        return is_held(self._storage, name)

    def free_bytes(self) -> int | None:
        return self._retried(self._storage.free_bytes)
