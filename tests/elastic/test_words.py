from __future__ import annotations

import pytest

from forged.elastic.words import NAMES_MAX, counted, is_or_are, named


@pytest.mark.parametrize(
    ("number", "said"), [(0, "no worker is left"), (1, "1 worker is left"), (2, "2 workers are left")]
)
def test_every_number_makes_a_sentence(number: int, said: str) -> None:
    assert f"{counted(number, 'worker')} {is_or_are(number)} left" == said


def test_the_first_of_many_names_stand_for_them() -> None:
    names = [f"w{number}" for number in range(NAMES_MAX + 2)]
    assert (named([]), named(names[:2])) == ("", "w0, w1")
    assert named(names) == f"{', '.join(names[:NAMES_MAX])} and 2 more"
