"""The learning rate follows the world from the base, exactly and without drift."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.elastic.learning_rate import FACTORS, adapt_learning_rate
from forged.elastic.model import WORLD_SIZE_MAX, AdaptationStrategy
from forged.errors import RequestRefused
from tests.elastic.values import HUGE

RATES = st.floats(1e-12, 1e3)
WORLDS = st.integers(1, 100_000)
STRATEGIES = st.sampled_from(AdaptationStrategy)


@pytest.mark.parametrize(
    ("strategy", "base_world", "world", "rate"),
    [
        (AdaptationStrategy.LINEAR, 4, 8, 0.2),
        (AdaptationStrategy.LINEAR, 4, 1, 0.025),
        (AdaptationStrategy.LINEAR, 3, 5, 0.1 * 5 / 3),
        (AdaptationStrategy.SQUARE_ROOT, 4, 16, 0.2),
        (AdaptationStrategy.SQUARE_ROOT, 4, 1, 0.05),
        (AdaptationStrategy.SQUARE_ROOT, 1, 2, 0.1 * math.sqrt(2)),
        (AdaptationStrategy.NONE, 4, 8, 0.1),
        (AdaptationStrategy.NONE, 4, 1, 0.1),
    ],
)
def test_the_rate_follows_the_strategy(strategy: AdaptationStrategy, base_world: int, world: int, rate: float) -> None:
    assert adapt_learning_rate(0.1, base_world, world, strategy) == pytest.approx(rate, rel=1e-15)


def test_every_strategy_has_its_factor() -> None:
    assert list(FACTORS) == list(AdaptationStrategy)


@given(RATES, WORLDS, STRATEGIES)
def test_with_the_bases_number_of_workers_the_rate_is_the_base_exactly(
    base: float, world: int, strategy: AdaptationStrategy
) -> None:
    assert adapt_learning_rate(base, world, world, strategy) == base


@given(RATES, st.lists(WORLDS, min_size=2, max_size=30), STRATEGIES, st.randoms())
def test_the_order_of_rescales_does_not_matter(
    base: float, worlds: list[int], strategy: AdaptationStrategy, random: Any
) -> None:
    """Each world size has one rate, whatever was in between, and at the first size it is the base rate."""
    first = worlds[0]
    rates = {world: adapt_learning_rate(base, first, world, strategy) for world in worlds}
    random.shuffle(worlds)
    for world in (*worlds, first):
        assert adapt_learning_rate(base, first, world, strategy) == rates[world]
    assert rates[first] == base


@given(RATES, WORLDS, WORLDS, WORLDS, STRATEGIES)
def test_a_base_that_was_adapted_is_as_good_a_base(
    base: float, base_world: int, between: int, world: int, strategy: AdaptationStrategy
) -> None:
    other = adapt_learning_rate(base, base_world, between, strategy)
    direct = adapt_learning_rate(base, base_world, world, strategy)
    assert adapt_learning_rate(other, between, world, strategy) == pytest.approx(direct, rel=1e-12)


@given(RATES, WORLDS, WORLDS)
def test_the_square_root_lies_between_none_and_linear(base: float, base_world: int, world: int) -> None:
    linear, root, none = (adapt_learning_rate(base, base_world, world, strategy) for strategy in AdaptationStrategy)
    assert min(linear, none) <= root <= max(linear, none)


@given(RATES, WORLDS, WORLDS, STRATEGIES)
def test_more_workers_never_have_a_lower_rate(
    base: float, base_world: int, world: int, strategy: AdaptationStrategy
) -> None:
    fewer, more = (adapt_learning_rate(base, base_world, size, strategy) for size in (world, world + 1))
    assert fewer <= more


def test_a_rate_of_nothing_stays() -> None:
    assert adapt_learning_rate(0, 1, 8, AdaptationStrategy.LINEAR) == 0.0


def test_a_rate_may_be_any_real_number_and_comes_back_as_a_float() -> None:
    """A training script's rate is often a scalar of an array library."""
    tenth: Any = Fraction(1, 10)
    rate = adapt_learning_rate(tenth, 1, 1, AdaptationStrategy.LINEAR)
    assert (rate, type(rate)) == (0.1, float)


def test_a_strategy_may_be_given_by_its_name() -> None:
    named: Any = "square_root"
    assert adapt_learning_rate(0.1, 1, 4, named) == 0.2


@pytest.mark.parametrize("base", [-0.1, math.nan, math.inf, -math.inf, True, "0.1", None, *HUGE, 1j])
def test_invalid_base_rate_is_refused(base: Any) -> None:
    with pytest.raises(RequestRefused, match="base_lr") as caught:
        adapt_learning_rate(base, 1, 2, AdaptationStrategy.LINEAR)
    assert caught.value.code == "learning_rate_invalid"


@pytest.mark.parametrize("world", [0, -1, True, 2.0, "2", None, WORLD_SIZE_MAX + 1, *HUGE])
def test_invalid_world_size_is_refused(world: Any) -> None:
    with pytest.raises(RequestRefused, match="base_world must be "):
        adapt_learning_rate(0.1, world, 2, AdaptationStrategy.LINEAR)
    with pytest.raises(RequestRefused, match=r"^world must be "):
        adapt_learning_rate(0.1, 2, world, AdaptationStrategy.LINEAR)


@pytest.mark.parametrize("strategy", ["quadratic", "LINEAR", None, [], 1])
def test_unknown_strategy_is_refused(strategy: Any) -> None:
    with pytest.raises(RequestRefused, match="one of linear, square_root, none"):
        adapt_learning_rate(0.1, 1, 2, strategy)


def test_everything_that_is_wrong_is_named_at_once() -> None:
    wrong: Any = None
    with pytest.raises(RequestRefused) as caught:
        adapt_learning_rate(-1.0, 0, 0, wrong)
    assert [name in caught.value.message for name in ("base_lr", "base_world", "; world", "strategy")] == [True] * 4


def test_a_rate_beyond_all_numbers_is_refused() -> None:
    with pytest.raises(RequestRefused, match="must be finite, got inf"):
        adapt_learning_rate(1e308, 1, 100, AdaptationStrategy.LINEAR)
