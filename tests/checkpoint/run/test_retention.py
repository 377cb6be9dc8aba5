"""Names, order and retention of the checkpoints of a run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forged.checkpoint.model import COUNT_MAX, is_prefix
from forged.checkpoint.run.retention import name_of, newest_first, step_of, superseded

STEPS = st.integers(0, COUNT_MAX)


def names(*steps: int) -> list[str]:
    """The names of checkpoints saved in this order."""
    made: list[str] = []
    for step in steps:
        made.append(name_of(step, made.__contains__))
    return made


def test_name_of_a_step_is_free_and_valid() -> None:
    assert names(500, 500, 500, 1_000) == ["step-00000500", "step-00000500-2", "step-00000500-3", "step-00001000"]


@given(STEPS)
def test_step_is_read_from_its_name(step: int) -> None:
    for name in names(step, step):
        assert is_prefix(name)
        assert step_of(name) == step


@given(st.lists(st.integers(0, 10_000_000_000), max_size=20))
def test_newest_first_orders_by_step_and_then_by_number(steps: list[int]) -> None:
    made = names(*steps)
    assert [step_of(name) for name in newest_first(made)] == sorted(steps, reverse=True)
    assert newest_first(names(7, 7, 7)) == ["step-00000007-3", "step-00000007-2", "step-00000007"]


def test_other_names_are_left_out() -> None:
    others = [
        "best",
        "step-100",
        "run/step-00000100",
        "step-00000100-",
        "step-00000100-x",
        "checkpoint_20260101_000000",
    ]
    assert newest_first([*others, "step-00000100"]) == ["step-00000100"]


def test_older_ones_than_the_newest_kept_are_superseded() -> None:
    made = names(100, 200, 300, 400)
    assert superseded(made, 400, 2, lambda name: True) == newest_first(names(100, 200))
    assert superseded(made, 400, 4, lambda name: True) == []


def test_later_steps_than_the_current_one_are_not_superseded_and_do_not_count() -> None:
    made = names(100, 200, 300, 400)
    assert superseded(made, 200, 1, lambda name: True) == names(100)


def test_damaged_ones_do_not_count_among_the_kept() -> None:
    made = names(100, 200, 300, 400)
    damaged = set(names(300, 400))
    assert superseded(made, 400, 1, lambda name: name not in damaged) == names(100)
    assert superseded(made, 400, 2, lambda name: name not in damaged) == []


@given(st.lists(st.integers(0, 40), max_size=20), st.integers(0, 40), st.integers(1, 5), st.sets(st.integers(0, 40)))
def test_last_restorable_ones_are_never_superseded(steps: list[int], step: int, keep: int, damaged: set[int]) -> None:
    made = names(*steps)

    def is_restorable(name: str) -> bool:
        return step_of(name) not in damaged

    gone = superseded(made, step, keep, is_restorable)
    past = [name for name in newest_first(made) if step_of(name) <= step and is_restorable(name)]
    assert not set(past[:keep]) & set(gone)
    assert set(past[keep:]) <= set(gone)
    assert all(step_of(name) <= step for name in gone)
