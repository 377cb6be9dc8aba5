"""Replica groups in the simulation: jobs in groups keep their promises, and planted bugs are found."""

from __future__ import annotations

import pytest

from tests.simulation.checks import require_broken, trace_hashes, trace_hashes_elsewhere
from tests.simulation.elastic.group_mutants import BREAKS, MUTANTS
from tests.simulation.runner import Kind, simulate_seed

SEEDS = range(4)
SEEDS_TO_CATCH = 200
LIKELY = {
    "admit_half_groups": 40,
    "count_every_process_of_a_group": 13,
    "drain_one_process_of_a_group": 4,
    "forget_the_group_size_at_restart": 41,
    "keep_members_of_broken_groups": 13,
}
"""Where to look first for bugs that show seldom; they may be elsewhere when worlds have changed."""


@pytest.mark.parametrize("seed", SEEDS)
def test_every_job_in_groups_keeps_its_promises(seed: int) -> None:
    outcome = simulate_seed(seed, None, Kind.GROUPS)
    assert not outcome.error, outcome.error
    assert outcome.facts


@pytest.mark.parametrize("mutant", sorted(MUTANTS))
def test_a_planted_bug_breaks_the_promise_that_is_named_for_it(mutant: str) -> None:
    require_broken(mutant, BREAKS[mutant], [LIKELY.get(mutant, 0), *range(SEEDS_TO_CATCH)], Kind.GROUPS)


def test_the_same_seeds_give_the_same_traces_byte_for_byte_in_every_process() -> None:
    here = trace_hashes(SEEDS, Kind.GROUPS)
    assert trace_hashes_elsewhere(SEEDS, Kind.GROUPS, hash_seed=4242, ballast=123_457) == here
