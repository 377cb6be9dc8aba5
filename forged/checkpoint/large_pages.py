"""Memory for many bytes, in the system's large pages where it has them.

Law: it begins at a page, is the process's own, and stays where it is until nobody refers to it any more. Of large pages
few cover a block, and a disk that reads or writes past the page cache is told of few pieces instead of thousands.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

LARGE_PAGE_BYTES = 2 << 20


def new_memory(size: int) -> mmap.mmap:
    """Memory for at least so many bytes, none of which was touched."""
    length = max(1, -(-size // LARGE_PAGE_BYTES)) * LARGE_PAGE_BYTES
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        # A kernel without large pages refuses the wish, and the memory serves all the same.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
