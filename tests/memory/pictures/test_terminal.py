from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.memory import MemoryBlock
from forged.memory.pictures import blocks_text, packing_text
from forged.memory.pictures.terminal import WIDTH_MIN
from forged.memory.traces import Buffer, Packing, plan
from tests.memory.pictures.shown import ALLOCATED, BLOCKS, BUFFERS, CACHED, PACKING
from tests.memory.traces.buffers import traces


def test_packing_is_drawn_with_axes_and_the_figures_below() -> None:
    lines = packing_text(BUFFERS, PACKING, 1024, width=51, height=4).splitlines()
    assert [line[:11] for line in lines[:5]] == ["  1.00 KiB│", *["          │"] * 3, "       0 B└"]
    assert lines[3].endswith("█" * 40)
    assert lines[0][11:].startswith(" ")
    assert lines[5].split() == ["time", "0", "100"]
    assert lines[6] == "height 1.00 KiB, 1.000 × peak, peak live 1.00 KiB, capacity 1.00 KiB"


def test_blocks_are_drawn_with_a_mark_for_each_status() -> None:
    lines = blocks_text(BLOCKS, "w0/gpu0", width=43, rows=1).splitlines()
    assert lines[0] == "w0/gpu0: 1.00 KiB, 75% in use, 4 blocks"
    assert lines[1] == f"       0 B│{'█' * 16}{'▓' * 4}{'░' * 4}{'·' * 8}"
    assert "▓ pinned 128 B in 1" in lines[2]


@given(traces(), st.integers(0, 120), st.integers(1, 12))
def test_no_line_of_a_packing_is_wider_than_asked_for(buffers: list[Buffer], width: int, height: int) -> None:
    lines = packing_text(buffers, plan(buffers, nodes_max=100), width=width, height=height).splitlines()
    assert len(lines) == height + 3
    assert max(map(len, lines[:-1])) <= max(width, WIDTH_MIN)


@pytest.mark.parametrize("size", [1, 3, 2**63 - 2])
def test_blocks_of_any_size_fill_the_rows(size: int) -> None:
    blocks = [MemoryBlock("1", 0, size, ALLOCATED), MemoryBlock("2", size, 1, CACHED)]
    lines = blocks_text(blocks, width=50, rows=3).splitlines()
    assert [len(line) for line in lines[1:4]] == [50, 50, 50]
    assert "·" not in "".join(lines[1:4])


def test_nothing_can_be_drawn() -> None:
    assert "0 blocks" in blocks_text([])
    assert "height 0 B" in packing_text([], Packing({}, 0, 0))
