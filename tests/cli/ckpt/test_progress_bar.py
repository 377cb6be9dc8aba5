"""The progress bar fits the terminal and is erased at the end."""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from forged.cli.ckpt.progress_bar import CLEAR_LINE, FIRST_AFTER_S, INTERVAL_S, ProgressBar, progress_line

Caught = pytest.CaptureFixture[str]


class ManualClock:
    """A clock that tests advance."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


class Terminal(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


@contextmanager
def looking(term: str = "xterm") -> Iterator[Terminal]:
    """Make standard error a terminal for the block."""
    with pytest.MonkeyPatch.context() as patch:
        screen = Terminal()
        patch.setattr("sys.stderr", screen)
        patch.setenv("TERM", term)
        patch.setenv("COLUMNS", "100")
        yield screen


def options(*, json: bool = False) -> argparse.Namespace:
    return argparse.Namespace(json=json)


def test_the_line_has_share_amount_rate_and_time_left() -> None:
    output = progress_line("step-1", 250_000_000, 1_000_000_000, 2.0, 100)
    assert output == "step-1  [######------------------]   25%  250 MB of 1 GB  125 MB/s  6 s left"


@pytest.mark.parametrize("columns", range(1, 90))
def test_the_line_is_narrower_than_the_terminal(columns: int) -> None:
    assert len(progress_line("a-checkpoint-of-a-long-name" * 3, 5, 10, 1.0, columns)) < max(columns, 1)


def test_a_finished_operation_has_no_time_left() -> None:
    assert "left" not in progress_line("step-1", 10, 10, 2.0, 100)


def test_a_narrow_terminal_shows_only_the_share() -> None:
    assert progress_line("step-1", 5, 10, 1.0, 10) == " 50%"


@pytest.mark.parametrize(("done", "total", "elapsed_s"), [(0, 0, 0.0), (0, 10, 0.0), (20, 10, 1.0), (10, 10, 1.0)])
def test_any_amounts_give_a_line(done: int, total: int, elapsed_s: float) -> None:
    assert "%" in progress_line("", done, total, elapsed_s, 100)


class TestOnTerminal:
    def test_a_short_operation_shows_no_bar(self, clock: ManualClock) -> None:
        with looking() as screen, ProgressBar(options(), "a", clock) as bar:
            clock.now += FIRST_AFTER_S / 2
            bar(1, 2)
        assert screen.getvalue() == ""

    def test_the_bar_is_redrawn_in_place_and_erased_at_the_end(self, clock: ManualClock) -> None:
        with looking() as screen, ProgressBar(options(), "a", clock) as bar:
            clock.now += FIRST_AFTER_S
            bar(1, 2)
            bar(2, 2)
            clock.now += INTERVAL_S
            bar(2, 2)
        nothing, first, second, end = screen.getvalue().split(CLEAR_LINE)
        assert (nothing, end) == ("", "")
        assert " 50%" in first
        assert "100%" in second

    def test_the_bar_is_erased_after_an_interrupt(self, clock: ManualClock) -> None:
        with looking() as screen, suppress(KeyboardInterrupt), ProgressBar(options(), "a", clock) as bar:
            clock.now += FIRST_AFTER_S
            bar(1, 2)
            raise KeyboardInterrupt
        assert screen.getvalue().endswith(CLEAR_LINE)

    def test_control_characters_in_the_name_are_escaped(self, clock: ManualClock) -> None:
        with looking() as screen, ProgressBar(options(), "a\x1b[2J", clock) as bar:
            clock.now += FIRST_AFTER_S
            bar(1, 2)
        assert "a\\x1b[2J" in screen.getvalue()

    def test_json_shows_no_bar(self, clock: ManualClock) -> None:
        with looking() as screen, ProgressBar(options(json=True), "a", clock) as bar:
            clock.now += FIRST_AFTER_S
            bar(1, 2)
        assert screen.getvalue() == ""

    def test_a_dumb_terminal_shows_no_bar(self, clock: ManualClock) -> None:
        with looking("dumb") as screen, ProgressBar(options(), "a", clock) as bar:
            clock.now += FIRST_AFTER_S
            bar(1, 2)
        assert screen.getvalue() == ""

    def test_the_operation_continues_when_the_terminal_is_gone(
        self, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tried: list[str] = []

        def gone(text: str) -> int:
            tried.append(text)
            raise OSError

        monkeypatch.setattr(Terminal, "write", lambda self, text: gone(text))
        with looking(), ProgressBar(options(), "a", clock) as bar:
            for _ in range(3):
                clock.now += FIRST_AFTER_S
                bar(1, 2)
        assert len(tried) == 2, "once when it was drawn, and once to take it away"


def test_a_pipe_shows_no_bar(clock: ManualClock, capsys: Caught) -> None:
    with ProgressBar(options(), "a", clock) as bar:
        clock.now += FIRST_AFTER_S
        bar(1, 2)
    assert capsys.readouterr() == ("", "")
