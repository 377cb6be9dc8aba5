"""A step as the script sees it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from forged.worker.errors import StepAborted
from forged.worker.step import Step


def numbered(is_void: Callable[[], bool] = lambda: False) -> Step:
    return Step.numbered(3, lambda: None, is_void)


def test_it_is_its_number() -> None:
    step = numbered()
    assert (step, step + 1, f"{step}", [0, 1, 2, 5][step]) == (3, 4, "3", 5)


def test_who_enters_it_is_told() -> None:
    entered: list[str] = []
    with Step.numbered(3, lambda: entered.append("in"), lambda: False) as step:
        assert step == 3
    assert entered == ["in"]


def test_it_swallows_that_it_was_broken_off_and_nothing_else() -> None:
    with numbered():
        raise StepAborted("somebody died")
    with pytest.raises(ValueError, match="mine"), numbered():
        raise ValueError("mine")


def test_it_tells_whether_it_was_broken_off_also_when_another_is_the_present_one() -> None:
    void = [False]
    first, second = (numbered(lambda: void[0]) for _ in range(2))
    assert not first.aborted
    void[0] = True
    assert first.aborted
    first.end()
    void[0] = False
    second.end()
    void[0] = True
    assert (first.aborted, second.aborted) == (True, False)
