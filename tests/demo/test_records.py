from __future__ import annotations

import msgspec
import pytest

from forged.demo.records import Committed, Entered, Entry, Finished, Ready, Used, line_of, read

ENTRIES: list[Entry] = [
    Ready(1.0),
    Entered(1.5, 1, 0, 1, ["w0", "w1"], 0.05),
    Used(2.0, 1, 0, 120, 240),
    Committed(2.5, 1, 0, 0.75),
    Committed(2.5, 1, 1, None),
    Finished(3.0, 2, "00ff"),
]


def test_read_returns_the_written_records() -> None:
    assert read(b"".join(map(line_of, ENTRIES))) == (ENTRIES, b"")


def test_nothing_written_is_nothing_read() -> None:
    assert read(b"") == ([], b"")


@pytest.mark.parametrize("cut", range(1, len(line_of(ENTRIES[2]))))
def test_an_incomplete_line_does_not_count(cut: int) -> None:
    first, second = line_of(ENTRIES[0]), line_of(ENTRIES[2])
    assert read(first + second[:-cut]) == ([ENTRIES[0]], second[:-cut])


def test_incomplete_record_is_completed_by_the_next_read() -> None:
    data = b"".join(map(line_of, ENTRIES))
    for cut in range(len(data)):
        before, rest = read(data[:cut])
        after, nothing = read(rest + data[cut:])
        assert (before + after, nothing) == (ENTRIES, b"")


@pytest.mark.parametrize("line", [b"{}\n", b"nonsense\n", b'{"type":"used","at":"x"}\n', b"\n"])
def test_a_whole_line_that_is_none_is_an_error(line: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        read(line)
