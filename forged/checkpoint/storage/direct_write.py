"""How a new file gets its bytes, as fast as the disk takes them.

Law: when it ends the file holds exactly what the source has, durably. The bytes go past the page cache where the file
system lets them, a block at a time in several threads, from memory that is used again and again; elsewhere through the
cache, which is made to write them at once and to forget them.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import ParamSpec, TypeVar

import numpy as np

from forged.checkpoint.large_pages import new_memory
from forged.checkpoint.ports import BLOCK_BYTES, CancelToken, Source
from forged.checkpoint.storage.files import Files
from forged.checkpoint.thread_pool import run_all
from forged.file_sync import PAGE

BLOCKS_CACHED_MAX = 8
"""So many blocks may wait in the page cache, where it is used, before one more is written."""
BUFFERS_PER_WRITE = 2
"""One is filled while another one is written, so that the disk never waits."""
INTERRUPTIONS_MAX = 100
NOTHING_TAKEN_MAX = 10
NOT_SUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ESPIPE})

P = ParamSpec("P")
T = TypeVar("T")


class BlockBuffers:
    """Memory for blocks, which is kept: the first touch of new memory costs more than writing it."""

    def __init__(self, kept_max: int) -> None:
        self._kept_max = kept_max
        self._free: list[memoryview] = []
        self._lock = threading.Lock()

    @contextmanager
    def one(self) -> Iterator[memoryview]:
        """A room of `BLOCK_BYTES`, which begins at a page."""
        with self._lock:
            room = self._free.pop() if self._free else None
        room = room or memoryview(new_memory(BLOCK_BYTES))
        try:
            yield room
        finally:
            with self._lock:
                if len(self._free) < self._kept_max:
                    self._free.append(room)


class FileWriter:
    """One file on its way to the disk."""

    def __init__(self, files: Files, fd: int, source: Source, rooms: BlockBuffers) -> None:
        self._files = files
        self._fd = fd
        self._source = source
        self._rooms = rooms
        self._is_direct = self._bypasses_cache()
        self._is_padded = self._is_direct and source.size % PAGE != 0

    def reserve(self, free: int) -> None:
        """Have the room that it needs, before anything is written; ENOSPC otherwise. So many bytes seem to be free."""
        size = self._source.size
        if not size:
            return
        try:
            retry_interrupted(self._files.reserve, self._fd, -(-size // PAGE) * PAGE if self._is_padded else size)
        except OSError as error:
            if error.errno not in NOT_SUPPORTED:
                raise
            if free < size:
                raise OSError(errno.ENOSPC, "there is too little room") from None

    def run(self, token: CancelToken, writes: int) -> None:
        """Write it all, so many blocks at a time, while the next ones are taken from the source."""
        blocks = range(0, self._source.size, BLOCK_BYTES)
        taking, writing = threading.Semaphore(writes), threading.Semaphore(writes)

        def put(offset: int) -> None:
            with self._rooms.one() as room:
                with taking:
                    block = self._take(offset, room)
                with writing:
                    self._put(block, offset, room)

        run_all(put, blocks, token, min(writes * BUFFERS_PER_WRITE, len(blocks)) if writes > 1 else 1)
        token.check()
        if self._is_padded:
            self._files.truncate(self._fd, self._source.size)
        retry_interrupted(self._files.sync, self._fd)

    def _bypasses_cache(self) -> bool:
        try:
            self._files.bypass_cache(self._fd, on=True)
        except OSError as error:
            if error.errno in NOT_SUPPORTED:
                return False
            raise
        return True

    def _take(self, offset: int, room: memoryview) -> memoryview:
        length = min(BLOCK_BYTES, self._source.size - offset)
        block = self._source.block(offset, room[:length])
        assert len(block) == length, "a source gives as much as it is asked for"
        return block

    def _put(self, block: memoryview, offset: int, room: memoryview) -> None:
        if self._is_direct:
            try:
                self._put_directly(block, offset, room)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            # Some file systems say only now that they cannot.
            block = self._take(offset, room)
            self._files.bypass_cache(self._fd, on=False)
            self._is_direct = False
        self._put_through_cache(block, offset)

    def _put_directly(self, block: memoryview, offset: int, room: memoryview) -> None:
        if not _begins_at_page(block):
            copy_bytes(block, room[: len(block)])
            block = room[: len(block)]
        whole = len(block) // PAGE * PAGE
        self._write(block[:whole], offset, PAGE)
        if tail := bytes(block[whole:]):
            room[:PAGE] = tail.ljust(PAGE, b"\0")
            self._write(room[:PAGE], offset + whole, PAGE)

    def _put_through_cache(self, block: memoryview, offset: int) -> None:
        self._write(block, offset, 1)
        try:
            self._files.begin_write_back(self._fd, offset, len(block))
            if offset >= BLOCKS_CACHED_MAX * BLOCK_BYTES:
                self._files.drop_cache(self._fd, offset - BLOCKS_CACHED_MAX * BLOCK_BYTES, BLOCK_BYTES)
        except OSError as error:
            # Any other one tells of bytes that are lost, and the sync at the end would not tell of it again.
            if error.errno not in NOT_SUPPORTED:
                raise

    def _write(self, data: memoryview, offset: int, step: int) -> None:
        _write_all(self._files, self._fd, data, offset, step)


def write_whole(files: Files, fd: int, data: memoryview) -> None:
    """A small file at once, durably."""
    _write_all(files, fd, data, 0, 1)
    retry_interrupted(files.sync, fd)


def retry_interrupted(act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do it again when a signal has interrupted it."""
    for _ in range(INTERRUPTIONS_MAX):
        with suppress(InterruptedError):
            return act(*args, **kwargs)
    return act(*args, **kwargs)


def copy_bytes(source: memoryview, into: memoryview) -> None:
    """Copy as many bytes as there are, and let other threads go on meanwhile, which slices do not."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))


def _write_all(files: Files, fd: int, data: memoryview, offset: int, step: int) -> None:
    """Write all of it, going on behind the last whole step when less was taken."""
    done = idle = 0
    while done < len(data):
        taken = retry_interrupted(files.write, fd, data[done:], offset + done) // step * step
        idle = 0 if taken else idle + 1
        if idle > NOTHING_TAKEN_MAX:
            raise OSError(errno.EIO, "the file system takes nothing more")
        done += taken


def _begins_at_page(block: memoryview) -> bool:
    address: int = np.frombuffer(block, np.uint8).__array_interface__["data"][0] if len(block) else 0
    return address % PAGE == 0
