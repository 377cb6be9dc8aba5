"""What a launch prints."""

from __future__ import annotations

from io import BytesIO

import pytest

from forged.launch.console import ERASE, Console


class Closed(BytesIO):
    """A stream whose reader is gone."""

    def write(self, data: object) -> int:
        raise BrokenPipeError


def test_lines_are_printed_after_the_rank_of_their_worker() -> None:
    output, errors = BytesIO(), BytesIO()
    console = Console(output, errors, is_terminal=False)
    console.lines(2, [b"a", b"b"], is_error=False)
    console.lines(0, [b"c"], is_error=True)
    console.say("worker 2 failed")
    console.progress("step 1")
    assert output.getvalue() == b"[2]: a\n[2]: b\n"
    assert errors.getvalue() == b"[0]: c\nforged launch: worker 2 failed\n"


def test_progress_is_erased_before_lines_and_drawn_again_after_them() -> None:
    output, errors = BytesIO(), BytesIO()
    console = Console(output, errors, is_terminal=True)
    console.progress("step 1")
    console.lines(0, [b"a"], is_error=True)
    console.progress("")
    assert errors.getvalue() == ERASE + b"step 1" + ERASE + b"[0]: a\nstep 1" + ERASE
    assert output.getvalue() == b""


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (b"\xc3\xa9\ta", b"\xc3\xa9\ta"),
        (b"\x1b[31mred\x1b[0m", b"\x1b[31mred\x1b[0m\x1b[0m"),
        (b"\x1b[1;4", b"1;4"),
        (b"\x1b[2J\x1b[1Aa\x1b[?25l\x1bc\x1b(0b", b"ab"),
        (b"\x1b]52;c;cm0gLXJm\x07a\x1b]0;title\x1b\\b\x1bP1$r0m\x1b\\c\x1b]0;open", b"abc"),
        (b"\x1b\x1b[31[2Ja", b"2Ja"),
        (b"\x1b\x1b]0;x\x07[2Ja", b"[2Ja"),
        (b"\xc2\x07\x9b2J", b"\\xc2\\x9b2J"),
        (b"a\x08\x07\x0bb\x7f\x00\xc2\x9b2J", b"ab2J"),
    ],
)
def test_worker_gives_no_orders_to_the_terminal(line: bytes, wanted: bytes) -> None:
    output, errors = BytesIO(), BytesIO()
    console = Console(output, errors, is_terminal=False)
    console.lines(0, [line], is_error=False)
    console.say(f"its last lines:\n    {line.decode(errors='backslashreplace')}")
    assert output.getvalue() == b"[0]: " + wanted + b"\n"
    assert errors.getvalue() == b"forged launch: its last lines:\n    " + wanted + b"\n"


def test_output_without_a_reader_is_ignored() -> None:
    errors = BytesIO()
    console = Console(Closed(), errors, is_terminal=False)
    console.lines(0, [b"a"], is_error=False)
    console.lines(0, [b"b"], is_error=True)
    assert errors.getvalue() == b"[0]: b\n"
