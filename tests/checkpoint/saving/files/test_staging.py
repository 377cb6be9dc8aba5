"""A state in memory of its own, while the arrays that it came from change."""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.large_pages import new_memory
from forged.checkpoint.ports import BLOCK_BYTES, CancelToken
from forged.checkpoint.saving.files.image import ArrayImage
from forged.checkpoint.saving.files.staging import StagedPart, StagingMemory
from tests.checkpoint.saving.files.test_image import Array, arrays, digests, image, written

NEVER = CancelToken()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How large each memory was that was made."""
    sizes: list[int] = []

    def making(size: int) -> mmap.mmap:
        memory = new_memory(size)
        sizes.append(len(memory))
        return memory

    monkeypatch.setattr("forged.checkpoint.saving.files.staging.new_memory", making)
    return sizes


@settings(deadline=None, max_examples=30)
@given(st.lists(arrays(), max_size=4))
def test_staged_bytes_equal_written_bytes(some: list[Array]) -> None:
    one, another = image(*some), image(*some)
    staged = StagingMemory().stage(one, NEVER)
    assert staged.view() == written(another)
    assert one.digests == another.digests


def test_staged_bytes_do_not_change_with_their_arrays() -> None:
    array = np.arange(BLOCK_BYTES // 4, dtype=np.int64)
    one = image(array, array[::2], np.zeros(3))
    before, sums = written(one), digests([array, array[::2], np.zeros(3)])
    staged = StagingMemory().stage(one, NEVER)
    array[:] = -1
    room = memoryview(bytearray(BLOCK_BYTES))
    blocks = [
        bytes(staged.block(offset, room[: staged.size - offset])) for offset in range(0, staged.size, BLOCK_BYTES)
    ]
    assert b"".join(blocks) == before
    assert bytes(one.digests) == sums


def test_blocks_lie_at_a_page_and_are_not_copied() -> None:
    staged = StagingMemory().stage(image(np.zeros(2 * BLOCK_BYTES, np.uint8)), NEVER)
    room = memoryview(bytearray(b"\xaa" * BLOCK_BYTES))
    for offset in range(0, staged.size, BLOCK_BYTES):
        block = np.frombuffer(staged.block(offset, room[: staged.size - offset]), np.uint8)
        assert block.ctypes.data % mmap.PAGESIZE == 0
    assert set(room) == {0xAA}


def test_memory_is_used_again(made: list[int]) -> None:
    kept, one = StagingMemory(), image(np.zeros(3 << 20, np.uint8))
    for _ in range(5):
        kept.unstage(kept.stage(one, NEVER))
    assert len(made) == 1


def test_two_at_once_have_two_and_there_are_no_more(made: list[int]) -> None:
    kept, one = StagingMemory(), image(np.zeros(3 << 20, np.uint8))
    first = kept.stage(one, NEVER)
    for _ in range(4):
        second = kept.stage(one, NEVER)
        assert first.view() == second.view()
        kept.unstage(first)
        first = second
    assert len(made) == 2


def test_a_smaller_state_takes_the_memory_of_a_larger_one(made: list[int]) -> None:
    kept = StagingMemory()
    kept.unstage(kept.stage(image(np.zeros(9 << 20, np.uint8)), NEVER))
    small = kept.stage(image(np.ones(5)), NEVER)
    assert small.view() == written(image(np.ones(5)))
    assert len(made) == 1


def test_memory_that_is_too_small_makes_room_for_larger(made: list[int]) -> None:
    kept = StagingMemory()
    small = kept.stage(image(np.ones(5)), NEVER)
    memory = weakref.ref(small.memory)
    kept.unstage(small)
    del small
    kept.stage(image(np.zeros(9 << 20, np.uint8)), NEVER)
    assert (len(made), memory()) == (2, None)


def test_staging_uses_prepared_memory(made: list[int]) -> None:
    kept, one = StagingMemory(), image(np.zeros(3 << 20, np.uint8))
    kept.prepare(one.size, NEVER)
    kept.stage(one, NEVER)
    assert len(made) == 1


def test_nothing_is_prepared_while_all_that_there_may_be_is_in_use(made: list[int]) -> None:
    kept, one = StagingMemory(), image(np.zeros(3 << 20, np.uint8))
    both = [kept.stage(one, NEVER) for _ in range(2)]
    kept.prepare(one.size, NEVER)
    assert len(made) == 2
    kept.unstage(both.pop())
    kept.prepare(9 << 20, NEVER)
    assert len(made) == 3


def test_small_buffer_is_released_while_a_view_of_it_exists() -> None:
    """As does the traceback of a write that failed."""
    kept = StagingMemory()
    staged = kept.stage(image(np.ones(5)), NEVER)
    looking = staged.block(0, memoryview(bytearray(100)))
    kept.unstage(staged)
    kept.close()
    assert len(looking) == 100
    kept.stage(image(np.zeros(9 << 20, np.uint8)), NEVER)


def test_cancelled_staging_returns_its_buffer(made: list[int]) -> None:
    kept, one, stopped = StagingMemory(), image(np.zeros(3 * BLOCK_BYTES, np.uint8)), CancelToken()
    kept.prepare(one.size, NEVER)
    stopped.cancel()
    with pytest.raises(CheckpointException, match="cancelled"):
        kept.stage(one, stopped)
    kept.stage(one, NEVER)
    assert len(made) == 1


def test_time_that_is_over_stops_the_touching() -> None:
    with pytest.raises(CheckpointException) as caught:
        StagingMemory().prepare(3 * BLOCK_BYTES, CancelToken(1.0, monotonic=iter([0.0, *[5.0] * 20]).__next__))
    assert caught.value.type is ExceptionType.TIMEOUT


def test_failed_staging_returns_the_memory(made: list[int]) -> None:
    class Broken(ArrayImage):
        def block(self, offset: int, room: memoryview) -> memoryview:
            raise MemoryError

    one = image(np.zeros(3 << 20, np.uint8))
    broken: Any = Broken(one.layout, [np.zeros(3 << 20, np.uint8)])
    kept = StagingMemory()
    with pytest.raises(MemoryError):
        kept.stage(broken, NEVER)
    assert isinstance(kept.stage(one, NEVER), StagedPart)
    assert len(made) == 1
