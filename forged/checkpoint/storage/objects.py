"""Checkpoints in an object store: S3, Google Cloud Storage, Azure, or the memory of this process.

Law: a file is created once, by one writer. A large one is reserved by an empty object first, which only one can create,
and its parts replace that as a whole; what could not be finished is taken back. What a writer creates carries its mark,
so that it knows its own file when the reply was lost. Every request ends when its halt says so.
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

from forged.checkpoint.async_calls import ASYNC_CALLS, wait_for, wait_or_cancel
from forged.checkpoint.errors import CheckpointException, ExceptionType, storage_error
from forged.checkpoint.format.names import check_name, check_name_prefix
from forged.checkpoint.ports import BLOCK_BYTES, CancelToken, Entry, Reader, Source
from forged.checkpoint.storage.object_errors import translated
from forged.checkpoint.storage.os_errors import file_large, file_short

if TYPE_CHECKING:
    from obstore import AsyncWritableFile, Bytes, ListStream, ObjectMeta
    from obstore.store import ObjectStore

T = TypeVar("T")

PARTS_MAX = 10_000
"""What S3 takes of one file."""
IN_FLIGHT_BYTES_MAX = 64 << 20
"""So much of one file is on its way at a time, and at least one part."""
RANGE_BYTES = 4 << 20
RANGES_IN_FLIGHT = 8
LISTED_AT_ONCE = 1_000
TAKING_BACK_S = 2.0
"""So long a writer waits for what it takes back; what takes longer goes on without it."""
MISSING = "checkpoint_file_missing"
EXISTS = "checkpoint_exists"
MARK = "forgedwriter"
"""Without a hyphen, because Azure takes only what could be the name of a variable."""
MARK_BYTES = 8


def part_bytes(size: int) -> int:
    """How large the parts of a file are."""
    return max(1, -(-size // (PARTS_MAX * BLOCK_BYTES))) * BLOCK_BYTES


class Requests(NamedTuple):
    """How requests are made and waited for."""

    url: str
    token: CancelToken | None

    def ask(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        """What comes of a request."""
        return self.answer(name, self.begin(call))

    def begin(self, call: Callable[[], Awaitable[T]]) -> Future[T]:
        """Make a request."""
        return ASYNC_CALLS.begin(call)

    def answer(self, name: str, asked: Future[T], *, gives_up: bool = True) -> T:
        """Wait for a request that was made."""
        try:
            return (wait_or_cancel if gives_up else wait_for)(asked, self.token)
        except CheckpointException:
            raise
        except Exception as error:  # noqa: BLE001 - where foreign errors are translated
            raise translated(error, self.url, name) from None


class ObjectStorage:
    """A bucket, or a folder of one."""

    def __init__(self, store: ObjectStore, url: str, token: CancelToken | None = None) -> None:
        self._store = store
        self._asking = Requests(url, token)

    @property
    def url(self) -> str:
        return self._asking.url

    def bounded(self, token: CancelToken) -> ObjectStorage:
        """The same storage, whose requests end when the halt says so."""
        return ObjectStorage(self._store, self.url, token)

    def write(self, name: str, source: Source, token: CancelToken) -> None:
        check_name(name)
        storage = self.bounded(token)
        mark, is_small = _new_mark(), source.size <= BLOCK_BYTES
        data = b"".join(map(bytes, _blocks(name, source, token))) if is_small else b""
        # What was asked for and given up may yet be done, when nobody looks any more.
        token.check()
        try:
            storage._create(name, data, mark)
        except CheckpointException as error:
            if not _is_refusal(error):
                storage._take_back(name, mark)
            raise
        if not is_small:
            storage._upload(name, source, token, mark)

    def sync_names(self, names: Collection[str]) -> None:
        """Nothing is left to do: a name lasts as its bytes do."""

    def publish(self, name: str, data: bytes) -> None:
        self._create(check_name(name), data, _new_mark())

    def open(self, name: str) -> AbstractContextManager[Reader]:
        meta = self._asking.ask(check_name(name), partial(self._store.head_async, name))
        return nullcontext(ObjectReader(self._store, self._asking, name, meta["size"]))

    def read(self, name: str, bytes_max: int) -> bytes:
        found = self._asking.ask(check_name(name), partial(self._store.get_async, name))
        size = found.meta["size"]
        if size > bytes_max:
            raise file_large(name, size, bytes_max)
        data = bytes(self._asking.ask(name, found.bytes_async))
        if len(data) != size:
            raise file_short(name, size, len(data))
        return data

    def entries(self, under: str = "") -> Iterator[Entry]:
        folder = check_name_prefix(under).rpartition("/")[0]
        stream = self._store.list(folder or None, chunk_size=LISTED_AT_ONCE)
        while (found := self._asking.ask(under, partial(_next, stream))) is not None:
            for meta in found:
                if meta["path"].startswith(under) and "/." not in f"/{meta['path']}":
                    yield Entry(meta["path"], meta["size"], meta["last_modified"].timestamp())

    def move(self, name: str, to: str) -> None:
        try:
            self._asking.ask(check_name(name), partial(self._store.copy_async, name, check_name(to)))
        except CheckpointException as error:
            if error.code != MISSING or not self._is_there(to):
                raise
        else:
            self.delete([name])

    def delete(self, names: Collection[str]) -> None:
        paths = [check_name(name) for name in names]
        if not paths:
            return
        try:
            self._asking.ask(paths[0], partial(self._store.delete_async, paths))
        except CheckpointException as error:
            if error.code != MISSING:
                raise
            # Some stores take it amiss, and may have left the others where they were.
            self._delete_each(paths)

    def free_bytes(self) -> int | None:
        return None

    def _is_there(self, name: str) -> bool:
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
            self._asking.ask(name, put)
        except CheckpointException as error:
            # It may have been done, and the answer lost.
            is_doubtful = error.code == EXISTS or not _is_refusal(error)
            if not is_doubtful or self._mark_of(name) != mark:
                raise

    def _mark_of(self, name: str) -> str | None:
        """Who has created a file; None where that cannot be found out."""
        try:
            found = self._asking.ask(name, partial(self._store.get_async, name, options={"head": True}))
        except CheckpointException:
            return None
        return found.attributes.get(MARK)

    def _upload(self, name: str, source: Source, token: CancelToken, mark: str) -> None:
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
                last = self._asking.begin(partial(upload.write, block))
                self._asking.answer(name, last, gives_up=False)
            last = self._asking.begin(upload.close)
            self._asking.answer(name, last, gives_up=False)
        except BaseException:
            self._take_back(name, mark, None if last is None else partial(_end, upload, last))
            raise

    def _take_back(self, name: str, mark: str, first: Callable[[], Awaitable[None]] | None = None) -> None:
        """Have no file of this mark: wait a while for that, and let it go on."""

        async def take_back() -> None:
            if first is not None:
                await first()
            found = await self._store.get_async(name, options={"head": True})
            if found.attributes.get(MARK) == mark:
                await self._store.delete_async([name])

        with suppress(Exception):
            ASYNC_CALLS.begin_cleanup(take_back).result(TAKING_BACK_S)

    def _delete_each(self, paths: list[str]) -> None:
        for path in paths:
            try:
                self._asking.ask(path, partial(self._store.delete_async, path))
            except CheckpointException as error:
                if error.code != MISSING:
                    raise


class ObjectReader:
    """A file of an object store."""

    def __init__(self, store: ObjectStore, asking: Requests, name: str, size: int) -> None:
        self._store = store
        self._asking = asking
        self._name = name
        self._size = size

    @property
    def size(self) -> int:
        return self._size

    def read_into(self, offset: int, room: memoryview) -> None:
        if offset < 0 or offset + len(room) > self._size:
            raise file_short(self._name, offset + len(room), self._size)
        asked: deque[tuple[memoryview, Future[Bytes]]] = deque()
        try:
            for start in range(0, len(room), RANGE_BYTES):
                if len(asked) == RANGES_IN_FLIGHT:
                    self._take(*asked.popleft())
                place = room[start : start + RANGE_BYTES]
                asked.append((place, self._asked(offset + start, len(place))))
            while asked:
                self._take(*asked.popleft())
        finally:
            for _, future in asked:
                future.cancel()

    def mapped(self) -> memoryview | None:
        return None

    def _asked(self, start: int, length: int) -> Future[Bytes]:
        return self._asking.begin(partial(self._store.get_range_async, self._name, start=start, length=length))

    def _take(self, place: memoryview, asked: Future[Bytes]) -> None:
        data = memoryview(self._asking.answer(self._name, asked))
        if len(data) != len(place):
            raise file_short(self._name, self._size, self._size - len(place) + len(data))
        place[:] = data


def _blocks(name: str, source: Source, token: CancelToken) -> Iterator[memoryview]:
    """The bytes of a file, each block in memory of its own: a request may look there even when it was given up."""
    for offset in range(0, source.size, BLOCK_BYTES):
        token.check()
        length = min(BLOCK_BYTES, source.size - offset)
        room = memoryview(bytearray(length))
        block = source.block(offset, room)
        if len(block) != length:
            raise storage_error(f"{name}: {len(block)} bytes were given for {length} at {offset}", name)
        yield block if block.obj is room.obj else memoryview(bytes(block))


async def _next(stream: ListStream[Sequence[ObjectMeta]]) -> Sequence[ObjectMeta] | None:
    """What comes next in a list; None at its end."""
    return await anext(stream, None)


async def _end(upload: AsyncWritableFile, last: Future[Any]) -> None:
    """End an upload when its last request has ended and no part is under way."""
    with suppress(Exception):
        await asyncio.wrap_future(last)
    with suppress(Exception):
        # An upload that was closed before refuses it; one that cannot be completed is aborted by obstore.
        await upload.close()


def _is_refusal(error: CheckpointException) -> bool:
    """Whether what was asked for was not done for certain."""
    return error.type is ExceptionType.STORAGE_ERROR and not error.retryable


def _new_mark() -> str:
    return secrets.token_hex(MARK_BYTES)
