"""What is saved in benchmarks, and where."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest

from benchmarks import ckpt_workload
from benchmarks.ckpt_workload import (
    Workload,
    drop_page_cache,
    files_in,
    fill_page_cache,
    large,
    rows_of,
    temporary_directory,
    workload_from,
)

LOAD = Workload(3, (64, 1024))


def resident_pages(path: Path) -> int:
    """How many pages of a file are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        pages = -(-len(memory) // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * pages)()
        place = ctypes.c_char.from_buffer(memory)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(place)), ctypes.c_size_t(len(memory)), found)
        del place
        assert not failed
        return sum(one & 1 for one in found)


def test_every_process_makes_the_same_arrays() -> None:
    once, again = LOAD.state(), workload_from(LOAD.arguments).state()
    assert list(once) == list(again) == LOAD.names()
    assert all((once[name].view("u4") == again[name].view("u4")).all() for name in once)


def test_a_load_is_as_large_as_it_says() -> None:
    assert sum(array.nbytes for array in LOAD.arrays()) == LOAD.nbytes
    assert large(16, 4).nbytes == 16 << 20


@pytest.mark.parametrize("world", range(1, 6))
@pytest.mark.parametrize("rows", [1, 4, 7, 2621])
def test_ranks_have_all_rows_among_them_and_none_twice(rows: int, world: int) -> None:
    dealt = [row for rank in range(world) for row in range(rows)[rows_of(rows, rank, world)]]
    assert dealt == list(range(rows))


def test_dropped_files_leave_the_page_cache_and_filled_ones_are_in_it() -> None:
    with temporary_directory() as path:
        (path / "deep").mkdir()
        file = path / "deep" / "file"
        file.write_bytes(bytes(1 << 20))
        drop_page_cache(path)
        if resident_pages(file):
            pytest.skip(f"the file system of {ckpt_workload.DISK} has nothing but its page cache")
        fill_page_cache(path)
        assert resident_pages(file) == (1 << 20) // mmap.PAGESIZE


def test_files_are_found_at_any_depth(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name in ("b/deep", "a"):
        (tmp_path / name).write_bytes(b"")
    assert files_in(tmp_path) == [tmp_path / "a", tmp_path / "b" / "deep"]
    assert files_in(tmp_path / "a") == [tmp_path / "a"]
