"""Output of workers is divided into lines."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.launch.lines import LAST_LINES, LINE_BYTES_MAX, Lines, last_lines

TEXT = b"one\ntwo\r\nthree\rfour\n\nlast"
LINES = [b"one", b"two", b"three", b"four", b"last"]


@given(cuts=st.sets(st.integers(0, len(TEXT))))
def test_lines_are_the_same_however_the_output_arrives(cuts: set[int]) -> None:
    lines, found = Lines(last_lines()), []
    for begin, end in pairwise(sorted({0, len(TEXT)} | cuts)):
        found += lines.feed(TEXT[begin:end])
    assert found + lines.end() == LINES


def test_line_without_end_is_divided() -> None:
    lines = Lines(last_lines())
    assert [len(line) for line in lines.feed(b"x" * (2 * LINE_BYTES_MAX + 1))] == [LINE_BYTES_MAX, LINE_BYTES_MAX]
    assert lines.end() == [b"x"]


@pytest.mark.parametrize("count", [3, LAST_LINES + 5])
def test_last_lines_of_several_streams_are_kept(count: int) -> None:
    last = last_lines()
    streams = [Lines(last), Lines(last)]
    for number in range(count):
        streams[number % 2].feed(b"%d\n" % number)
    assert list(last) == [b"%d" % number for number in range(count)][-LAST_LINES:]
