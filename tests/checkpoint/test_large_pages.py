"""Memory for many bytes."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from forged.checkpoint.large_pages import LARGE_PAGE_BYTES, new_memory


@pytest.mark.parametrize("size", [0, 1, LARGE_PAGE_BYTES, LARGE_PAGE_BYTES + 1])
def test_new_memory_is_large_enough_zeroed_and_page_aligned(size: int) -> None:
    memory = new_memory(size)
    assert size <= len(memory) < size + 2 * LARGE_PAGE_BYTES
    assert np.frombuffer(memory, np.uint8).ctypes.data % mmap.PAGESIZE == 0
    assert not any(memory[:100])


def test_it_is_there_where_the_kernel_has_no_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 1 << 20)
    memory = new_memory(1)
    memory[:5] = b"bytes"
    assert memory[:5] == b"bytes"
