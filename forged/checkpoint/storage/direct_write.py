"""Writes a new file at the speed of the disk: direct I/O in several threads, or else a page cache that is kept short.

Invariants:
- When `FileWriter.run` returns, the file has exactly the bytes of the source, durably.
- Blocks are written from reused memory that begins at a page.
- Without direct I/O, write-back starts after each block, and written blocks leave the cache.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import ParamSpec, TypeVar

import numpy as np

from forged.checkpoint.large_pages import new_memory
from forged.checkpoint.ports import BLOCK_BYTES, ByteSource, CancelToken
from forged.checkpoint.storage.files import Files
from forged.checkpoint.storage.rooms import copy_bytes
from forged.checkpoint.thread_pool import run_all
from forged.file_sync import PAGE

BLOCKS_CACHED_MAX = 8
"""Blocks in the page cache before the oldest one is written back and dropped."""
BUFFERS_PER_WRITE = 2
"""One is filled while another is written, so that the disk never waits."""
INTERRUPTIONS_MAX = 100
EMPTY_WRITES_MAX = 10
NOT_SUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ESPIPE})

P = ParamSpec("P")
T = TypeVar("T")


class BlockBuffers:
    """Reusable block buffers: the first touch of new memory costs more than writing it to disk."""

    def __init__(self, kept_max: int) -> None:
        self._kept_max = kept_max
        self._free: list[memoryview] = []
        self._lock = threading.Lock()

    @contextmanager
    def buffer(self) -> Iterator[memoryview]:
        """A buffer of `BLOCK_BYTES` that begins at a page."""
        with self._lock:
            buffer = self._free.pop() if self._free else None
        buffer = buffer or memoryview(new_memory(BLOCK_BYTES))
        try:
            yield buffer
        finally:
            with self._lock:
                if len(self._free) < self._kept_max:
                    self._free.append(buffer)


class FileWriter:
    """Writes the blocks of one source to one new file."""

    def __init__(self, files: Files, fd: int, source: ByteSource, buffers: BlockBuffers) -> None:
        self._files = files
        self._fd = fd
        self._source = source
        self._buffers = buffers
        self._is_direct = self._bypasses_cache()
        self._is_padded = self._is_direct and source.size % PAGE != 0

    def reserve(self, free: int) -> None:
        """Reserve the space before anything is written; ENOSPC if there is too little. `free`: free bytes before."""
        size = self._source.size
        if not size:
            return
        try:
            retry_interrupted(self._files.reserve, self._fd, -(-size // PAGE) * PAGE if self._is_padded else size)
        except OSError as error:
            if error.errno not in NOT_SUPPORTED:
                raise
            if free < size:
                raise OSError(errno.ENOSPC, "too little free space") from None

    def run(self, token: CancelToken, writes: int) -> None:
        """Write all blocks, `writes` at a time, while the next ones are taken from the source."""
        blocks = range(0, self._source.size, BLOCK_BYTES)
        taking, writing = threading.Semaphore(writes), threading.Semaphore(writes)

        def put(offset: int) -> None:
            with self._buffers.buffer() as buffer:
                with taking:
                    block = self._take(offset, buffer)
                with writing:
                    self._put(block, offset, buffer)

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

    def _take(self, offset: int, buffer: memoryview) -> memoryview:
        length = min(BLOCK_BYTES, self._source.size - offset)
        block = self._source.block(offset, buffer[:length])
        assert len(block) == length, "a source returns blocks of the requested length"
        return block

    def _put(self, block: memoryview, offset: int, buffer: memoryview) -> None:
        if self._is_direct:
            try:
                self._put_directly(block, offset, buffer)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            # Some file systems refuse direct I/O only at the first write.
            block = self._take(offset, buffer)
            self._files.bypass_cache(self._fd, on=False)
            self._is_direct = False
        self._put_through_cache(block, offset)

    def _put_directly(self, block: memoryview, offset: int, buffer: memoryview) -> None:
        if not _begins_at_page(block):
            copy_bytes(block, buffer[: len(block)])
            block = buffer[: len(block)]
        whole = len(block) // PAGE * PAGE
        self._write(block[:whole], offset, PAGE)
        if tail := bytes(block[whole:]):
            buffer[:PAGE] = tail.ljust(PAGE, b"\0")
            self._write(buffer[:PAGE], offset + whole, PAGE)

    def _put_through_cache(self, block: memoryview, offset: int) -> None:
        self._write(block, offset, 1)
        try:
            self._files.begin_write_back(self._fd, offset, len(block))
            if offset >= BLOCKS_CACHED_MAX * BLOCK_BYTES:
                self._files.drop_cache(self._fd, offset - BLOCKS_CACHED_MAX * BLOCK_BYTES, BLOCK_BYTES)
        except OSError as error:
            # Any other error means lost bytes, and the sync at the end would not report it again.
            if error.errno not in NOT_SUPPORTED:
                raise

    def _write(self, data: memoryview, offset: int, step: int) -> None:
        _write_all(self._files, self._fd, data, offset, step)


def write_whole(files: Files, fd: int, data: memoryview) -> None:
    """Write a small file durably."""
    _write_all(files, fd, data, 0, 1)
    retry_interrupted(files.sync, fd)


def retry_interrupted(act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Repeat a system call that a signal has interrupted."""
    for _ in range(INTERRUPTIONS_MAX):
        with suppress(InterruptedError):
            return act(*args, **kwargs)
    return act(*args, **kwargs)


def _write_all(files: Files, fd: int, data: memoryview, offset: int, step: int) -> None:
    """Write all bytes; after a short write continue at the last multiple of `step`."""
    done = idle = 0
    while done < len(data):
        taken = retry_interrupted(files.write, fd, data[done:], offset + done) // step * step
        idle = 0 if taken else idle + 1
        if idle > EMPTY_WRITES_MAX:
            raise OSError(errno.EIO, "the file system accepts no more bytes")
        done += taken


def _begins_at_page(block: memoryview) -> bool:
    address: int = np.frombuffer(block, np.uint8).__array_interface__["data"][0] if len(block) else 0
    return address % PAGE == 0
