"""Anonymous memory in large pages where the kernel has them.

The memory begins at a page and is private to the process. A block covers a few large pages, so direct I/O passes the
disk a few segments instead of thousands.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

LARGE_PAGE_BYTES = 2 << 20


def new_memory(size: int) -> mmap.mmap:
    """Untouched memory for at least `size` bytes."""
    length = max(1, -(-size // LARGE_PAGE_BYTES)) * LARGE_PAGE_BYTES
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        # A kernel without large pages refuses the advice; the memory works without it.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
