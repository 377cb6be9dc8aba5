"""The files of checkpoints in directories and object stores, by `forged.checkpoint`, in threads.

Invariants:
- Nothing of `forged.checkpoint` is imported before the first call, so that the daemon starts fast.
- Of one folder at most one call of a kind runs at once. A call whose thread is not seen at work for a time is given up,
  and its thread left alone; until that returns, further calls of the kind for the folder are refused, and so is the
  deletion of the checkpoint. Of one storage at most `HUNG_MAX` threads are left alone.
- The manifest is read first, and its save id and job compared, in the same thread as what follows.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import anyio
from anyio import CapacityLimiter, to_thread

from forged.catalog.ports import FOLDER_MISSING, STORAGE_HANGS, CheckpointLocation, FoundCheckpoint, Progress
from forged.catalog.records import LOCAL, folder_of, storage_kind
from forged.errors import ForgedError, RequestRefused, Unavailable, describe
from forged.file_sync import Mounts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forged.checkpoint.format.manifest import Manifest
    from forged.checkpoint.ports import CancelToken, Reader, Storage
    from forged.checkpoint.storage.ancestry import AncestryCache
    from forged.checkpoint.watched_token import WatchedToken

T = TypeVar("T")

THREADS_MAX = 64
"""Threads that wait for storages; those that were left alone count."""
HUNG_MAX = 4
"""Threads of one storage that were left alone."""
CALL_TIMEOUT_S = 300.0
"""So long the thread of a call may do nothing; the requests of a remote storage have their own, shorter limits."""
FOLDERS_KNOWN_MAX = 100
SHOWN_MAX = 3
"""So many findings of a verification are named."""


@dataclass(slots=True)
class _Call:
    """A call whose thread has not returned."""

    path: str
    storage: str
    is_given_up: bool = False


class StoredCheckpointFiles:
    """The files of checkpoints; a `ports.CheckpointFiles`."""

    def __init__(self, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._calls: dict[tuple[str, str], _Call] = {}
        """By folder and purpose; scrubs and compactions take long and delay no other call."""
        self._threads = CapacityLimiter(THREADS_MAX)
        self._known: dict[str, AncestryCache] = {}
        """By folder, the one that was used last is the last one."""
        self._lock = threading.Lock()
        self._mounts = Mounts()

    def storage_of(self, path: str) -> str:
        is_local = storage_kind(path) == LOCAL
        return self._mounts.of(path.removeprefix("file://")) if is_local else "/".join(path.split("/")[:3])

    async def find(self, location: CheckpointLocation) -> FoundCheckpoint | None:
        return await self._run(location, lambda token: _find(location, token))

    async def delete(self, location: CheckpointLocation) -> None:
        if any(call.is_given_up and call.path == location.path for call in self._calls.values()):
            # Its thread may write files behind the deletion.
            raise Unavailable("checkpoint_in_use", f"an earlier call for {location.path} has not returned", "wait")
        await self._run(location, lambda token: _delete(location, self._ancestries(location), token))

    async def verify(self, location: CheckpointLocation, bytes_per_s: int, progress: Progress) -> str:
        report = _in_loop(progress)
        return await self._run(location, lambda token: _verify(location, bytes_per_s, report, token), "scrub")

    async def repair(self, location: CheckpointLocation) -> bool:
        return await self._run(location, lambda token: _repair(location, token), "scrub")

    async def compact(self, location: CheckpointLocation, progress: Progress) -> int:
        report = _in_loop(progress)
        return await self._run(location, lambda token: _compact(location, report, token), "compaction")

    def _ancestries(self, location: CheckpointLocation) -> AncestryCache:
        """What is known of the manifests of the folder, which many deletions read."""
        from forged.checkpoint.storage.ancestry import AncestryCache

        storage = location.root or folder_of(location.path)
        with self._lock:
            known = self._known.pop(storage, None) or AncestryCache()
            self._known[storage] = known
            if len(self._known) > FOLDERS_KNOWN_MAX:
                del self._known[next(iter(self._known))]
        return known

    async def _run(self, location: CheckpointLocation, act: Callable[[CancelToken], T], purpose: str = "") -> T:
        line = folder_of(location.path), purpose
        call = self._begin(line, location.path)
        began, loop = threading.Event(), asyncio.get_running_loop()

        def run() -> T:
            began.set()
            try:
                return act(token)
            except ForgedError:
                raise
            except Exception as error:
                raise Unavailable("checkpoint_storage_failed", describe(error), "see the daemon's log") from error
            finally:
                with suppress(RuntimeError):  # the event loop is closed
                    loop.call_soon_threadsafe(self._end, line, call)

        try:
            token_type = await to_thread.run_sync(_load_library, limiter=self._threads)
            token = token_type(self._timeout_s)
            with anyio.CancelScope() as scope:
                token.watch(scope)
                try:
                    return await to_thread.run_sync(run, abandon_on_cancel=True, limiter=self._threads)
                finally:
                    token.cancel()
        finally:
            call.is_given_up = True
            if not began.is_set():
                self._end(line, call)
        raise Unavailable(
            STORAGE_HANGS, f"the storage of {location.path} did not answer within {self._timeout_s:g} s", "check it"
        )

    def _begin(self, line: tuple[str, str], path: str) -> _Call:
        """Count a call, unless too many have not returned."""
        storage = self.storage_of(path)
        hung = sum(call.is_given_up and call.storage == storage for call in self._calls.values())
        if line in self._calls or hung >= HUNG_MAX:
            raise Unavailable(STORAGE_HANGS, f"the storage of {path} has not answered earlier calls yet", "check it")
        if self._threads.available_tokens < 1:
            raise Unavailable("checkpoint_storages_busy", f"{THREADS_MAX} storages have not answered yet", "check them")
        call = self._calls[line] = _Call(path, storage)
        return call

    def _end(self, line: tuple[str, str], call: _Call) -> None:
        """The thread of a call has returned."""
        if self._calls.get(line) is call:
            del self._calls[line]


def _in_loop(progress: Progress) -> Progress:
    """Reports progress from other threads to this event loop."""
    loop = asyncio.get_running_loop()

    def report(done_bytes: int, total_bytes: int) -> None:
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(progress, done_bytes, total_bytes)

    return report


def _load_library() -> type[WatchedToken]:
    # In a thread: the import takes a while.
    from forged.checkpoint.watched_token import WatchedToken

    return WatchedToken


@contextmanager
def _opened(location: CheckpointLocation, token: CancelToken) -> Iterator[tuple[Storage, str]]:
    """The storage and the prefix of the checkpoint there."""
    from forged.checkpoint.ports import bounded
    from forged.checkpoint.storage.fault_handler import FaultToleranceHandler
    from forged.checkpoint.storage.local import LocalStorage
    from forged.checkpoint.storage.locations import root_at

    where = folder_of(location.path) if location.root is None else location.root
    prefix = location.path[len(where.rstrip("/")) + 1 :]
    _require_folder(where)
    storage = root_at(where)
    if location.root is not None and isinstance(storage, LocalStorage):
        # A tenant could replace a directory beneath the root by a link at any moment.
        storage = storage.without_links()
    yield bounded(FaultToleranceHandler(storage).guard(storage), token), prefix


def _require_folder(where: str) -> None:
    """A directory that is missing is not taken for one without the checkpoint: it may not be mounted."""
    directory = where.removeprefix("file://")
    if storage_kind(where) == LOCAL and not Path(directory).is_dir():
        raise Unavailable(FOLDER_MISSING, f"{directory} is not a directory", "mount it, or delete the checkpoints")


def _is_meant(location: CheckpointLocation, manifest: Manifest) -> bool:
    return manifest.save_id == location.save_id and location.job in (None, manifest.job)


def _find(location: CheckpointLocation, token: CancelToken) -> FoundCheckpoint | None:
    from forged.checkpoint.format.manifest import SUFFIX, TOMBSTONE
    from forged.checkpoint.storage.listing import manifest_in
    from forged.checkpoint.verification.validator import CheckpointValidator

    with _opened(location, token) as (storage, prefix):
        manifest = manifest_in(storage, prefix + SUFFIX)
        if manifest is None or not _is_meant(location, manifest):
            return None
        if manifest_in(storage, prefix + TOMBSTONE) is not None:
            return None
        found = CheckpointValidator(storage).validate_checkpoint(prefix, token, deep=False)
        if not found.is_valid:
            return None
        folder = location.path.removesuffix(prefix)
        parent_path = f"{folder}{manifest.links[-1].prefix}" if manifest.links else ""
        return FoundCheckpoint(manifest.size_bytes, parent_path)


def _delete(location: CheckpointLocation, ancestries: AncestryCache, token: CancelToken) -> None:
    from forged.checkpoint.storage.listing import delete_save

    with _opened(location, token) as (storage, prefix):
        if not delete_save(storage, prefix, location.save_id, ancestries, job=location.job):
            raise Unavailable("checkpoint_being_read", f"a process reads {location.path}", "wait")


def _compact(location: CheckpointLocation, progress: Progress, token: CancelToken) -> int:
    from forged.checkpoint.saving.compaction import make_full

    with _opened(location, token) as (storage, prefix):
        _require_meant(location, storage, prefix)
        return make_full(storage, prefix, token, progress).size_bytes


def _repair(location: CheckpointLocation, token: CancelToken) -> bool:
    from forged.checkpoint.verification.repairing import repair

    with _opened(location, token) as (storage, prefix):
        _require_meant(location, storage, prefix)
        return bool(repair(storage, prefix, token))


def _require_meant(location: CheckpointLocation, storage: Storage, prefix: str) -> None:
    from forged.checkpoint.format.manifest import SUFFIX
    from forged.checkpoint.storage.listing import manifest_in

    manifest = manifest_in(storage, prefix + SUFFIX)
    if manifest is None or not _is_meant(location, manifest):
        raise RequestRefused(
            "checkpoint_missing", f"{location.path} is not there, or is another save", "verify the checkpoint"
        )


def _verify(location: CheckpointLocation, bytes_per_s: int, progress: Progress, token: CancelToken) -> str:
    from forged.checkpoint.format.manifest import SUFFIX
    from forged.checkpoint.storage.listing import manifest_in
    from forged.checkpoint.verification.validator import CheckpointValidator

    with _opened(location, token) as (storage, prefix):
        manifest = manifest_in(storage, prefix + SUFFIX)
        if manifest is None:
            if next(iter(storage.entries()), None) is None:
                raise Unavailable(FOLDER_MISSING, f"{storage.url} is empty; it may not be mounted", "mount it")
            return "its manifest is missing"
        if not _is_meant(location, manifest):
            return "its manifest is that of another save"
        slow = cast("Storage", _Throttled(storage, bytes_per_s, token))
        found = CheckpointValidator(slow, threads=1).validate_checkpoint(prefix, token, progress=progress)
        return "" if found.is_valid else "; ".join(finding.message for finding in found.errors[:SHOWN_MAX])


class _Throttled:
    """A storage whose files are read at a bounded rate; it can only be read."""

    def __init__(self, storage: Storage, bytes_per_s: int, token: CancelToken) -> None:
        self._storage = storage
        self._bytes_per_s = bytes_per_s
        self._token = token
        self.url = storage.url
        self.read = storage.read
        self.entries = storage.entries

    def open(self, name: str) -> AbstractContextManager[Reader]:
        return self._opened(name)

    @contextmanager
    def _opened(self, name: str) -> Iterator[Any]:
        with self._storage.open(name) as reader:
            yield _ThrottledReader(reader, self._bytes_per_s, self._token)


class _ThrottledReader:
    """A reader that pauses after each read for as long as the bytes may take."""

    def __init__(self, reader: Reader, bytes_per_s: int, token: CancelToken) -> None:
        self._reader = reader
        self._bytes_per_s = bytes_per_s
        self._token = token
        self.size = reader.size

    def read_into(self, offset: int, *rooms: memoryview) -> None:
        self._token.check()
        self._reader.read_into(offset, *rooms)
        self._token.wait(sum(map(len, rooms)) / self._bytes_per_s)

    def mapped(self) -> memoryview | None:
        return None
