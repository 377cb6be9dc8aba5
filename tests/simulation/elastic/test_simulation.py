"""Training in the simulation: it keeps its promises, is reproducible, and finds bugs."""

from __future__ import annotations

import pytest

from tests.simulation.checks import require_broken, trace_hashes, trace_hashes_elsewhere
from tests.simulation.elastic import group_mutants
from tests.simulation.elastic.mutants import BREAKS, MUTANTS
from tests.simulation.elastic.truth import Promise
from tests.simulation.runner import Kind, simulate_seed

SEEDS = range(4)
"""`make test` lives through many more, and sees that they meet all that is meant to happen."""
SEEDS_TO_CATCH = 200
LIKELY = {
    "believe_every_heartbeat": 164,
    "complete_when_all_have_reached_the_step": 118,
    "fail_whoever_has_not_answered": 167,
    "forget_the_vote": 166,
    "take_everybody_for_a_holder_of_the_state": 106,
    "tell_the_end_of_a_world_late": 171,
}
"""Where to look first for bugs that show seldom; they may be elsewhere when worlds have changed."""


@pytest.mark.parametrize("seed", SEEDS)
def test_every_job_keeps_its_promises(seed: int) -> None:
    outcome = simulate_seed(seed, None, Kind.ELASTIC)
    assert not outcome.error, outcome.error
    assert outcome.facts


@pytest.mark.parametrize("mutant", sorted(MUTANTS))
def test_a_planted_bug_breaks_the_promise_that_is_named_for_it(mutant: str) -> None:
    require_broken(mutant, BREAKS[mutant], [LIKELY.get(mutant, 0), *range(SEEDS_TO_CATCH)])


def test_there_is_a_bug_for_every_promise_that_training_makes() -> None:
    kept_by_others = {Promise.HISTORY, Promise.ONE_OWNER, Promise.ANSWERS, Promise.REPLICAS}
    assert {*BREAKS.values(), *group_mutants.BREAKS.values()} | kept_by_others == set(Promise)
    assert BREAKS.keys() == MUTANTS.keys()


def test_the_same_seeds_give_the_same_traces_byte_for_byte_in_every_process() -> None:
    here = trace_hashes(SEEDS, Kind.ELASTIC)
    assert trace_hashes_elsewhere(SEEDS, Kind.ELASTIC, hash_seed=1, ballast=0) == here
    assert trace_hashes_elsewhere(SEEDS, Kind.ELASTIC, hash_seed=4242, ballast=123_457) == here
