"""Baselines that need no process of their own: what the machine can do at most, and safetensors.

A ceiling only moves bytes: it writes one block repeatedly, or reads into one block, and verifies nothing. What it
writes is durable when its clock stops, as with forged.
"""

from __future__ import annotations

import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from benchmarks.ckpt_workload import Arrays, Workload

BLOCK_BYTES = 8 << 20
CACHED_BYTES = 1 << 20
"""The block size at which the kernel's read-ahead is fastest."""
THREADS = 2


def write_direct(path: Path, nbytes: int) -> float:
    """Seconds for so many bytes with O_DIRECT, by two threads, into a file that is allocated as a whole first."""
    return _write(path, nbytes, os.O_DIRECT, THREADS)


def write_buffered(path: Path, nbytes: int) -> float:
    """Seconds for so many bytes through the page cache, and fsync."""
    return _write(path, nbytes, 0, 1)


def _write(path: Path, nbytes: int, flags: int, threads: int) -> float:
    size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    with _blocks(threads) as rooms:
        start = time.perf_counter()
        with _opened(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | flags) as fd:
            os.posix_fallocate(fd, 0, size)

            def work(number: int) -> None:
                for offset in range(number * BLOCK_BYTES, size, threads * BLOCK_BYTES):
                    _all_of(os.pwrite, fd, rooms[number][: size - offset], offset)

            _together(work, threads)
            os.fsync(fd)
        with _opened(path.parent, os.O_RDONLY) as directory:
            os.fsync(directory)
        return time.perf_counter() - start


def read_direct(path: Path) -> float:
    """Seconds for all bytes of a file with O_DIRECT, by two threads."""
    return _read(path, os.O_DIRECT, BLOCK_BYTES)


def read_buffered(path: Path) -> float:
    """Seconds for all bytes of a file through the page cache, by two threads, with the kernel reading ahead."""
    return _read(path, 0, CACHED_BYTES)


def _read(path: Path, flags: int, step: int) -> float:
    size = path.stat().st_size
    with _blocks(THREADS) as rooms, _opened(path, os.O_RDONLY | flags) as fd:
        start = time.perf_counter()
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

        def work(number: int) -> None:
            for offset in range(number * step, size, THREADS * step):
                os.preadv(fd, [rooms[number][:step]], offset)

        _together(work, THREADS)
        return time.perf_counter() - start


def _all_of(write: Callable[[int, memoryview, int], int], fd: int, data: memoryview, offset: int) -> None:
    while data:
        done = write(fd, data, offset)
        data, offset = data[done:], offset + done


def _together(work: Callable[[int], None], threads: int) -> None:
    helpers = [threading.Thread(target=work, args=(number,)) for number in range(1, threads)]
    for helper in helpers:
        helper.start()
    work(0)
    for helper in helpers:
        helper.join()


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _blocks(count: int) -> Iterator[list[memoryview]]:
    """A block of random bytes per thread, in large pages, which disks write fastest."""
    maps = [mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(count)]
    for one in maps:
        one.madvise(mmap.MADV_HUGEPAGE)
        one.write(os.urandom(BLOCK_BYTES))
    yield [memoryview(one) for one in maps]


class Baseline:
    """The arrays in this process, warm memory of the same size, and the baseline operations."""

    def __init__(self, load: Workload) -> None:
        self._state = load.state()
        self._copy: Arrays = {name: array.copy() for name, array in self._state.items()}

    def copy(self) -> float:
        """Seconds for a memcpy of the arrays into warm memory."""
        start = time.perf_counter()
        for name, array in self._state.items():
            np.copyto(self._copy[name], array)
        return time.perf_counter() - start

    def save_safetensors(self, path: Path) -> float:
        """Seconds for a durable safetensors file with a durable name."""
        start = time.perf_counter()
        save_file(self._state, path)
        for synced in (path, path.parent):
            with _opened(synced, os.O_RDONLY) as fd:
                os.fsync(fd)
        return time.perf_counter() - start

    def load_safetensors(self, path: Path) -> float:
        """Seconds to load the file into existing arrays."""
        start = time.perf_counter()
        with safe_open(path, "numpy") as file:
            for name, array in self._copy.items():
                np.copyto(array, file.get_tensor(name))
        return time.perf_counter() - start

    @staticmethod
    def read_safetensors(path: Path) -> float:
        """Seconds to load the file into new arrays."""
        start = time.perf_counter()
        load_file(path)
        return time.perf_counter() - start


def removed(path: Path, act: Callable[[Path], float]) -> float:
    """The result of `act`; afterwards all files named like the path are removed and the disk is synced."""
    try:
        return act(path)
    finally:
        for one in path.parent.glob(f"{path.name}*"):
            if one.is_dir():
                shutil.rmtree(one)
            else:
                one.unlink()
        with _opened(path.parent, os.O_RDONLY) as directory:
            os.fsync(directory)
