"""An object store as a storage: S3, Google Cloud Storage, Azure, or the memory of this process.

Invariants:
- A name is created once, by one writer. A large file is first reserved by an empty object, which only one writer can
  create, and then replaced atomically by a multipart upload.
- An unfinished file is deleted, and its upload is ended.
- Every object has an attribute with its writer's mark, so that a writer recognizes its own object after a lost reply.
- Every request ends with its token, except the requests of a multipart upload (see `_upload`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from forged.checkpoint.errors import CheckpointException, ExceptionType, storage_error
from forged.checkpoint.format.names import check_name, check_name_prefix
from forged.checkpoint.ports import BLOCK_BYTES, ByteSource, CancelToken, Reader, StoredFile
from forged.checkpoint.storage.object_store.async_calls import ASYNC_CALLS, wait_for, wait_or_cancel
from forged.checkpoint.storage.object_store.object_errors import translated
from forged.checkpoint.storage.os_errors import file_large, file_short
from forged.checkpoint.storage.rooms import fill, rooms_between

if TYPE_CHECKING:
    from obstore import AsyncWritableFile, Bytes, ListStream, ObjectMeta
    from obstore.store import ObjectStore

T = TypeVar("T")

PARTS_MAX = 10_000
"""The limit of S3."""
IN_FLIGHT_BYTES_MAX = 64 << 20
"""Bytes of one file in flight; at least one part."""
RANGE_BYTES = 4 << 20
GAP_BYTES_MAX = 1 << 18
"""To receive so many bytes takes less than a tenth of the time until the reply to another request begins."""
RANGES_IN_FLIGHT = 8
LISTED_AT_ONCE = 1_000
CLEANUP_WAIT_S = 2.0
"""How long a failed write waits for its cleanup, which continues in the background."""
MISSING = "checkpoint_file_missing"
EXISTS = "checkpoint_exists"
MARK = "forgedwriter"
"""The attribute's name. Azure accepts only names that are valid identifiers, so it has no hyphen."""
MARK_BYTES = 8


def part_bytes(size: int) -> int:
    """The part size for a file."""
    return max(1, -(-size // (PARTS_MAX * BLOCK_BYTES))) * BLOCK_BYTES


class Requests(NamedTuple):
    """Starts requests, waits for them, and translates their errors."""

    url: str
    token: CancelToken | None

    def run(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        return self.wait(name, self.start(call))

    def start(self, call: Callable[[], Awaitable[T]]) -> Future[T]:
        return ASYNC_CALLS.start(call)

    def wait(self, name: str, request: Future[T], *, cancels: bool = True) -> T:
        """Wait for a request; `cancels`: cancel it when the token stops the wait."""
        try:
            return (wait_or_cancel if cancels else wait_for)(request, self.token)
        except CheckpointException:
            raise
        except Exception as error:  # noqa: BLE001 - every error of obstore is translated here
            raise translated(error, self.url, name) from None


class ObjectStorage:
    """A bucket, or a folder in it."""

    gap_bytes_max = GAP_BYTES_MAX

    def __init__(self, store: ObjectStore, url: str, token: CancelToken | None = None) -> None:
        self._store = store
        self._requests = Requests(url, token)

    @property
    def url(self) -> str:
        return self._requests.url

    def bounded(self, token: CancelToken) -> ObjectStorage:
        """The same storage with requests that end with the token."""
        return ObjectStorage(self._store, self.url, token)

    def write(self, name: str, source: ByteSource, token: CancelToken) -> None:
        check_name(name)
        storage = self.bounded(token)
        mark, is_small = _new_mark(), source.size <= BLOCK_BYTES
        data = b"".join(map(bytes, _blocks(name, source, token))) if is_small else b""
        # A cancelled create request may still take effect, so check before it is sent.
        token.check()
        try:
            storage._create(name, data, mark)
        except CheckpointException as error:
            if not _is_refusal(error):
                storage._clean_up(name, mark)
            raise
        if not is_small:
            storage._upload(name, source, token, mark)

    def sync_names(self, names: Collection[str]) -> None:
        """Nothing to do: an object's name is as durable as its bytes."""

    def publish(self, name: str, data: bytes) -> None:
        self._create(check_name(name), data, _new_mark())

    def open(self, name: str) -> AbstractContextManager[Reader]:
        meta = self._requests.run(check_name(name), partial(self._store.head_async, name))
        return nullcontext(ObjectReader(self._store, self._requests, name, meta["size"]))

    def read(self, name: str, bytes_max: int) -> bytes:
        found = self._requests.run(check_name(name), partial(self._store.get_async, name))
        size = found.meta["size"]
        if size > bytes_max:
            raise file_large(name, size, bytes_max)
        data = bytes(self._requests.run(name, found.bytes_async))
        if len(data) != size:
            raise file_short(name, size, len(data))
        return data

    def entries(self, under: str = "") -> Iterator[StoredFile]:
        folder = check_name_prefix(under).rpartition("/")[0]
        stream = self._store.list(folder or None, chunk_size=LISTED_AT_ONCE)
        while (found := self._requests.run(under, partial(_next, stream))) is not None:
            for meta in found:
                if meta["path"].startswith(under) and "/." not in f"/{meta['path']}":
                    yield StoredFile(meta["path"], meta["size"], meta["last_modified"].timestamp())

    def move(self, name: str, to: str) -> None:
        try:
            self._requests.run(check_name(name), partial(self._store.copy_async, name, check_name(to)))
        except CheckpointException as error:
            if error.code != MISSING or not self._exists(to):
                raise
        else:
            self.delete([name])

    def delete(self, names: Collection[str]) -> None:
        paths = [check_name(name) for name in names]
        if not paths:
            return
        try:
            self._requests.run(paths[0], partial(self._store.delete_async, paths))
        except CheckpointException as error:
            if error.code != MISSING:
                raise
            # Some stores fail on a missing name, and may not have deleted the rest.
            self._delete_each(paths)

    def free_bytes(self) -> int | None:
        return None

    def _exists(self, name: str) -> bool:
        try:
            self.open(name)
        except CheckpointException as error:
            if error.code != MISSING:
                raise
            return False
        return True

    def _create(self, name: str, data: bytes, mark: str) -> None:
        put = partial(self._store.put_async, name, data, mode="create", use_multipart=False, attributes={MARK: mark})
        try:
            self._requests.run(name, put)
        except CheckpointException as error:
            # The request may have succeeded, and its reply been lost.
            may_have_succeeded = error.code == EXISTS or not _is_refusal(error)
            if not may_have_succeeded or self._mark_of(name) != mark:
                raise

    def _mark_of(self, name: str) -> str | None:
        """The mark of an object's writer; None if it cannot be read."""
        try:
            found = self._requests.run(name, partial(self._store.get_async, name, options={"head": True}))
        except CheckpointException:
            return None
        return found.attributes.get(MARK)

    def _upload(self, name: str, source: ByteSource, token: CancelToken, mark: str) -> None:
        """Replace the reservation of a name by the file, in parts.

        A part that reaches the store after its upload was aborted may stay there for ever, and an upload whose creation
        was cancelled cannot be aborted. So no request of an upload is cancelled: a write that fails lets its requests
        end, completes the upload with the parts that there are, and deletes the object.
        """
        from obstore import open_writer_async

        part = part_bytes(source.size)
        at_once = max(1, IN_FLIGHT_BYTES_MAX // part)
        upload = open_writer_async(
            self._store, name, buffer_size=part, max_concurrency=at_once, attributes={MARK: mark}
        )
        last: Future[Any] | None = None
        try:
            for block in _blocks(name, source, token):
                last = self._requests.start(partial(upload.write, block))
                self._requests.wait(name, last, cancels=False)
            last = self._requests.start(upload.close)
            self._requests.wait(name, last, cancels=False)
        except BaseException:
            self._clean_up(name, mark, None if last is None else partial(_end, upload, last))
            raise

    def _clean_up(self, name: str, mark: str, first: Callable[[], Awaitable[None]] | None = None) -> None:
        """Delete the object if it has this mark. Waits `CLEANUP_WAIT_S`; the cleanup continues in the background."""

        async def clean_up() -> None:
            if first is not None:
                await first()
            found = await self._store.get_async(name, options={"head": True})
            if found.attributes.get(MARK) == mark:
                await self._store.delete_async([name])

        with suppress(Exception):
            ASYNC_CALLS.start_cleanup(clean_up).result(CLEANUP_WAIT_S)

    def _delete_each(self, paths: list[str]) -> None:
        for path in paths:
            try:
                self._requests.run(path, partial(self._store.delete_async, path))
            except CheckpointException as error:
                if error.code != MISSING:
                    raise


class ObjectReader:
    """An object that is read; a `ports.Reader`."""

    def __init__(self, store: ObjectStore, requests: Requests, name: str, size: int) -> None:
        self._store = store
        self._requests = requests
        self._name = name
        self._size = size

    @property
    def size(self) -> int:
        return self._size

    def read_into(self, offset: int, *rooms: memoryview) -> None:
        size = sum(map(len, rooms))
        if offset < 0 or offset + size > self._size:
            raise file_short(self._name, offset + size, self._size)
        pending: deque[tuple[list[memoryview], int, Future[Bytes]]] = deque()
        try:
            for start in range(0, size, RANGE_BYTES):
                if len(pending) == RANGES_IN_FLIGHT:
                    self._receive(*pending.popleft())
                end = min(start + RANGE_BYTES, size)
                request = self._request_range(offset + start, end - start)
                pending.append((rooms_between(rooms, start, end), end - start, request))
            while pending:
                self._receive(*pending.popleft())
        finally:
            for *_, request in pending:
                request.cancel()

    def mapped(self) -> memoryview | None:
        return None

    def _request_range(self, start: int, length: int) -> Future[Bytes]:
        return self._requests.start(partial(self._store.get_range_async, self._name, start=start, length=length))

    def _receive(self, rooms: list[memoryview], length: int, request: Future[Bytes]) -> None:
        data = memoryview(self._requests.wait(self._name, request))
        if len(data) != length:
            raise file_short(self._name, self._size, self._size - length + len(data))
        fill(rooms, data)


def _blocks(name: str, source: ByteSource, token: CancelToken) -> Iterator[memoryview]:
    """The blocks of a file, each in new memory, because a cancelled request may still read it."""
    for offset in range(0, source.size, BLOCK_BYTES):
        token.check()
        length = min(BLOCK_BYTES, source.size - offset)
        buffer = memoryview(bytearray(length))
        block = source.block(offset, buffer)
        if len(block) != length:
            raise storage_error(f"{name}: the source returned {len(block)} bytes at {offset}, expected {length}", name)
        yield block if block.obj is buffer.obj else memoryview(bytes(block))


async def _next(stream: ListStream[Sequence[ObjectMeta]]) -> Sequence[ObjectMeta] | None:
    """The next page of a listing; None at its end."""
    return await anext(stream, None)


async def _end(upload: AsyncWritableFile, last: Future[Any]) -> None:
    """End an upload when its last request has ended and no part is under way."""
    with suppress(Exception):
        await asyncio.wrap_future(last)
    with suppress(Exception):
        # An upload that was closed before refuses it; one that cannot be completed is aborted by obstore.
        await upload.close()


def _is_refusal(error: CheckpointException) -> bool:
    """Whether the request certainly had no effect."""
    return error.type is ExceptionType.STORAGE_ERROR and not error.retryable


def _new_mark() -> str:
    return secrets.token_hex(MARK_BYTES)
