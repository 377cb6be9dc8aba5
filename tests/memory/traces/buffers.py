"""Buffers for tests, the public traces that may stand beside the repository, and what every packing must hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import strategies as st

from forged.memory.traces import Buffer, BufferId

PUBLIC = Path(__file__).parents[4] / "shared" / "data" / "memory_traces"
with_public_traces = pytest.mark.skipif(not PUBLIC.is_dir(), reason="this clone has no public traces beside it")
MINIMALLOC = "ABCDEF"


def minimalloc(name: str) -> Path:
    return PUBLIC / f"minimalloc_{name}.1048576.csv"


@st.composite
def traces(draw: st.DrawFn, most: int = 12, size_max: int = 9) -> list[Buffer]:
    """Few buffers with short lives and small sizes, so that many of them meet."""
    lives = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6), st.integers(1, size_max)), max_size=most))
    return [Buffer(number, lower, lower + life, size) for number, (lower, life, size) in enumerate(lives)]


def check_packing(buffers: Sequence[Buffer], offsets: Mapping[BufferId, int]) -> None:
    """No buffer is below 0, and no two that are alive together share a byte."""
    assert set(offsets) == {buffer.id for buffer in buffers}
    assert all(offset >= 0 for offset in offsets.values())
    for number, one in enumerate(buffers):
        for other in buffers[:number]:
            if one.lower < other.upper and other.lower < one.upper:
                below, above = sorted((one, other), key=lambda buffer: offsets[buffer.id])
                assert offsets[below.id] + below.size <= offsets[above.id], (one, other)


def naive_height(buffers: Sequence[Buffer]) -> int:
    """The lowest height that any packing has, by placing the buffers on top of each other in every order."""
    best = sum(buffer.size for buffer in buffers) + 1

    def place(left: tuple[Buffer, ...], placed: tuple[tuple[Buffer, int], ...], height: int) -> None:
        nonlocal best
        if height >= best:
            return
        if not left:
            best = height
            return
        for number, buffer in enumerate(left):
            offset = 0
            for other, other_offset in placed:
                if buffer.lower < other.upper and other.lower < buffer.upper:
                    offset = max(offset, other_offset + other.size)
            top = max(height, offset + buffer.size)
            place(left[:number] + left[number + 1 :], (*placed, (buffer, offset)), top)

    place(tuple(buffers), (), 0)
    return best
