"""A step as the script sees it."""

from __future__ import annotations

import pytest

from forged.worker.errors import StepAborted
from forged.worker.step import Step


def test_it_is_its_number() -> None:
    step = Step.numbered(3, lambda: None)
    assert (step, step + 1, f"{step}", [0, 1, 2, 5][step]) == (3, 4, "3", 5)


def test_who_enters_it_is_told() -> None:
    entered: list[str] = []
    with Step.numbered(3, lambda: entered.append("in")) as step:
        assert step == 3
    assert entered == ["in"]


def test_it_swallows_that_it_was_broken_off_and_nothing_else() -> None:
    with Step.numbered(3, lambda: None):
        raise StepAborted("somebody died")
    with pytest.raises(ValueError, match="mine"), Step.numbered(3, lambda: None):
        raise ValueError("mine")
