"""What a launch prints."""

from __future__ import annotations

from io import BytesIO

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


def test_output_without_a_reader_is_ignored() -> None:
    errors = BytesIO()
    console = Console(Closed(), errors, is_terminal=False)
    console.lines(0, [b"a"], is_error=False)
    console.lines(0, [b"b"], is_error=True)
    assert errors.getvalue() == b"[0]: b\n"
