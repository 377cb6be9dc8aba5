"""A bar is drawn for people who look, in the room that there is, and goes when it is over."""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from forged.cli.ckpt.progress_bar import AWAY, FIRST_AFTER_S, INTERVAL_S, Bar, line

Caught = pytest.CaptureFixture[str]


class Hand:
    """A clock that is put forward."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hand() -> Hand:
    return Hand()


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


@contextmanager
def looking(term: str = "xterm") -> Iterator[Screen]:
    """Somebody looks at standard error, for as long as the block lasts."""
    with pytest.MonkeyPatch.context() as patch:
        screen = Screen()
        patch.setattr("sys.stderr", screen)
        patch.setenv("TERM", term)
        patch.setenv("COLUMNS", "100")
        yield screen


def options(*, json: bool = False) -> argparse.Namespace:
    return argparse.Namespace(json=json)


def test_it_says_how_far_how_fast_and_how_long() -> None:
    said = line("step-1", 250_000_000, 1_000_000_000, 2.0, 100)
    assert said == "step-1  [######------------------]   25%  250 MB of 1 GB  125 MB/s  6 s left"


@pytest.mark.parametrize("columns", range(1, 90))
def test_it_is_never_as_wide_as_the_terminal(columns: int) -> None:
    assert len(line("a-checkpoint-of-a-long-name" * 3, 5, 10, 1.0, columns)) < max(columns, 1)


def test_what_is_done_has_nothing_left() -> None:
    assert "left" not in line("step-1", 10, 10, 2.0, 100)


def test_the_share_is_what_stays_where_there_is_no_room() -> None:
    assert line("step-1", 5, 10, 1.0, 10) == " 50%"


@pytest.mark.parametrize(("done", "total", "elapsed_s"), [(0, 0, 0.0), (0, 10, 0.0), (20, 10, 1.0), (10, 10, 1.0)])
def test_odd_amounts_are_no_trouble(done: int, total: int, elapsed_s: float) -> None:
    assert "%" in line("", done, total, elapsed_s, 100)


class TestOnATerminal:
    def test_what_is_over_soon_has_none(self, hand: Hand) -> None:
        with looking() as screen, Bar(options(), "a", hand) as bar:
            hand.now += FIRST_AFTER_S / 2
            bar(1, 2)
        assert screen.getvalue() == ""

    def test_it_is_drawn_in_place_and_taken_away_at_the_end(self, hand: Hand) -> None:
        with looking() as screen, Bar(options(), "a", hand) as bar:
            hand.now += FIRST_AFTER_S
            bar(1, 2)
            bar(2, 2)
            hand.now += INTERVAL_S
            bar(2, 2)
        nothing, first, second, end = screen.getvalue().split(AWAY)
        assert (nothing, end) == ("", "")
        assert " 50%" in first
        assert "100%" in second

    def test_it_is_taken_away_also_when_somebody_interrupts(self, hand: Hand) -> None:
        with looking() as screen, suppress(KeyboardInterrupt), Bar(options(), "a", hand) as bar:
            hand.now += FIRST_AFTER_S
            bar(1, 2)
            raise KeyboardInterrupt
        assert screen.getvalue().endswith(AWAY)

    def test_a_name_brings_nothing_that_a_terminal_would_obey(self, hand: Hand) -> None:
        with looking() as screen, Bar(options(), "a\x1b[2J", hand) as bar:
            hand.now += FIRST_AFTER_S
            bar(1, 2)
        assert "a\\x1b[2J" in screen.getvalue()

    def test_programs_are_not_bothered(self, hand: Hand) -> None:
        with looking() as screen, Bar(options(json=True), "a", hand) as bar:
            hand.now += FIRST_AFTER_S
            bar(1, 2)
        assert screen.getvalue() == ""

    def test_a_terminal_that_knows_nothing_is_left_alone(self, hand: Hand) -> None:
        with looking("dumb") as screen, Bar(options(), "a", hand) as bar:
            hand.now += FIRST_AFTER_S
            bar(1, 2)
        assert screen.getvalue() == ""

    def test_what_is_done_goes_on_when_the_terminal_is_gone(self, hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
        tried: list[str] = []

        def gone(text: str) -> int:
            tried.append(text)
            raise OSError

        monkeypatch.setattr(Screen, "write", lambda self, text: gone(text))
        with looking(), Bar(options(), "a", hand) as bar:
            for _ in range(3):
                hand.now += FIRST_AFTER_S
                bar(1, 2)
        assert len(tried) == 2, "once when it was drawn, and once to take it away"


def test_in_a_pipe_nothing_is_drawn(hand: Hand, capsys: Caught) -> None:
    with Bar(options(), "a", hand) as bar:
        hand.now += FIRST_AFTER_S
        bar(1, 2)
    assert capsys.readouterr() == ("", "")
