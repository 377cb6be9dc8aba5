"""The memory simulation passes, is reproducible, and catches mutants."""

from __future__ import annotations

import pytest

from tests.simulation.checks import require_broken, trace_hashes, trace_hashes_elsewhere
from tests.simulation.memory.mutants import BREAKS, MUTANTS
from tests.simulation.memory.promises import Promise
from tests.simulation.runner import Kind, simulate_seed

SEEDS = range(12)
SEEDS_TO_CATCH = range(300)
SEEDS_TO_COMPARE = (2, 6, 7)
LIKELY = {
    "assert_all_blocks_or_none": 42,
    "commit_moves_in_any_order": 31,
    "evict_blocks_that_move": 32,
    "forget_to_serve": 56,
    "never_end_a_plan": 31,
    "serve_in_the_order_of_arrival": 19,
    "tell_a_batch_where_its_blocks_were": 65,
}
"""Seeds that catch rare mutants, tried first; they may change with the simulation."""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_violates_no_invariant(seed: int) -> None:
    outcome = simulate_seed(seed, None, Kind.MEMORY)
    assert not outcome.error, outcome.error
    assert outcome.facts
    assert outcome.starts > 1


@pytest.mark.parametrize("mutant", sorted(MUTANTS))
def test_a_mutant_breaks_the_promise_that_is_named_for_it(mutant: str) -> None:
    require_broken(mutant, BREAKS[mutant], [LIKELY.get(mutant, 0), *SEEDS_TO_CATCH], Kind.MEMORY)


def test_there_is_a_mutant_for_every_promise() -> None:
    assert set(BREAKS.values()) == set(Promise)
    assert BREAKS.keys() == MUTANTS.keys()


def test_the_same_seeds_give_the_same_traces_byte_for_byte_in_every_process() -> None:
    here = trace_hashes(SEEDS_TO_COMPARE, Kind.MEMORY)
    assert trace_hashes_elsewhere(SEEDS_TO_COMPARE, Kind.MEMORY, hash_seed=1, ballast=0) == here
    assert trace_hashes_elsewhere(SEEDS_TO_COMPARE, Kind.MEMORY, hash_seed=4242, ballast=100_000) == here
