from __future__ import annotations

import pytest

from forged.phrases import NAMES_MAX, REASON_CHARS_MAX, counted, in_words, is_or_are, joined, named, too_few


@pytest.mark.parametrize(
    ("number", "said"), [(0, "no worker is left"), (1, "1 worker is left"), (2, "2 workers are left")]
)
def test_every_number_makes_a_sentence(number: int, said: str) -> None:
    assert f"{counted(number, 'worker')} {is_or_are(number)} left" == said


def test_long_list_of_names_is_abbreviated() -> None:
    names = [f"w{number}" for number in range(NAMES_MAX + 2)]
    assert (named([]), named(names[:2])) == ("", "w0, w1")
    assert named(names) == f"{', '.join(names[:NAMES_MAX])} and 2 more"


def test_reason_is_the_bounded_text_or_the_default() -> None:
    assert in_words(" the night\n", "none") == "the night"
    assert in_words(" \n", "none") == "none"
    assert in_words("x" * (REASON_CHARS_MAX + 1), "none") == "x" * REASON_CHARS_MAX


def test_sentence_mentions_joins_only_if_workers_joined() -> None:
    assert (list(joined([])), list(joined(["a", "b"]))) == ([], ["a, b joined"])


@pytest.mark.parametrize(
    ("there", "needed", "said"),
    [
        (0, 1, "no worker left; min_workers is 1"),
        (1, 2, "1 worker left; min_workers is 2"),
        (2, 3, "2 workers left; min_workers is 3"),
    ],
)
def test_sentence_about_too_few_workers_fits_every_number(there: int, needed: int, said: str) -> None:
    assert too_few(there, needed) == said
