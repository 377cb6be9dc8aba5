"""The catalogue's simulation passes, is reproducible, and catches mutants."""

from __future__ import annotations

import pytest

from tests.simulation.catalog.mutants import BREAKS, MUTANTS
from tests.simulation.catalog.oracle import Promise
from tests.simulation.checks import require_broken, trace_hashes, trace_hashes_elsewhere
from tests.simulation.runner import Kind, simulate_seed

SEEDS = range(12)
SEEDS_TO_CATCH = range(300)
SEEDS_TO_COMPARE = (2, 6, 7)
LIKELY = {
    "abandon_by_the_clock": 62,
    "compact_what_is_deleted": 37,
    "delete_what_is_being_written": 243,
    "forget_holds_at_restart": 1,
    "ignore_models": 6,
    "look_for_slots_in_another_directory": 28,
    "release_for_all_readers": 95,
    "save_the_same_slots_at_once": 13,
}
"""Seeds that catch rare mutants, tried first; they may change with the simulation."""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_violates_no_invariant(seed: int) -> None:
    outcome = simulate_seed(seed, None, Kind.CATALOG)
    assert not outcome.error, outcome.error
    assert outcome.facts
    assert outcome.starts > 1


@pytest.mark.parametrize("mutant", sorted(MUTANTS))
def test_a_mutant_breaks_the_promise_that_is_named_for_it(mutant: str) -> None:
    require_broken(mutant, BREAKS[mutant], [LIKELY.get(mutant, 0), *SEEDS_TO_CATCH], Kind.CATALOG)


def test_there_is_a_mutant_for_every_promise() -> None:
    assert set(BREAKS.values()) == set(Promise)
    assert BREAKS.keys() == MUTANTS.keys()


def test_the_same_seeds_give_the_same_traces_byte_for_byte_in_every_process() -> None:
    here = trace_hashes(SEEDS_TO_COMPARE, Kind.CATALOG)
    assert trace_hashes_elsewhere(SEEDS_TO_COMPARE, Kind.CATALOG, hash_seed=1, ballast=0) == here
    assert trace_hashes_elsewhere(SEEDS_TO_COMPARE, Kind.CATALOG, hash_seed=4242, ballast=100_000) == here
