"""Training data in the simulation: it keeps its promises, and finds bugs."""

from __future__ import annotations

from itertools import count, islice

import pytest

from tests.simulation.checks import require_broken
from tests.simulation.data.mutants import BREAKS, MUTANTS
from tests.simulation.data.oracle import DataPromise
from tests.simulation.data.simulation import has_data
from tests.simulation.runner import Kind, simulate_seed

SEEDS = list(islice(filter(has_data, count()), 4))
"""`make test` lives through many more, and sees that they meet all that is meant to happen."""
SEEDS_TO_CATCH = list(islice(filter(has_data, count()), 300))
LIKELY = {
    "believe_what_was_held_once": 44,
    "call_lost_what_nobody_owns": 18,
    "commit_when_the_first_has_its_data": 28,
    "draw_as_in_the_world_before": 64,
    "keep_what_was_found_to_be_bad": 58,
    "leave_the_sampler_behind": 23,
    "shuffle_anew_in_each_world": 71,
    "stop_while_data_moves": 64,
    "weigh_all_alike": 30,
}
"""Where to look first for bugs that show seldom; they may be elsewhere when worlds have changed."""


@pytest.mark.parametrize("seed", SEEDS)
def test_the_data_of_every_job_keeps_its_promises(seed: int) -> None:
    outcome = simulate_seed(seed, None, Kind.ELASTIC)
    assert not outcome.error, outcome.error
    assert outcome.facts


@pytest.mark.parametrize("mutant", sorted(MUTANTS))
def test_a_planted_bug_breaks_the_promise_that_is_named_for_it(mutant: str) -> None:
    require_broken(mutant, BREAKS[mutant], [LIKELY.get(mutant, SEEDS_TO_CATCH[0]), *SEEDS_TO_CATCH])


def test_there_is_a_bug_for_every_promise_about_data() -> None:
    assert set(BREAKS.values()) == set(DataPromise)
    assert BREAKS.keys() == MUTANTS.keys()
