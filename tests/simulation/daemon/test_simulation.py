"""The service simulation passes, is reproducible, and catches mutants."""

from __future__ import annotations

import pytest

from tests.simulation.checks import trace_hashes, trace_hashes_elsewhere
from tests.simulation.daemon.mutants import MUTANTS
from tests.simulation.runner import Kind, simulate_seed

SEEDS = range(12)
SEEDS_TO_CATCH = 150
SEEDS_TO_COMPARE = (4, 6, 7)
LIKELY = {"hide_a_followers_gaps": 17, "hide_gaps": 36, "read_before_durable": 63}
"""Seeds that catch rare mutants, tried first; they may change with the simulation."""
PLUGIN_FAULTS = (
    "all gets the gap",
    "publishing too much: plugin_storm",
    "got error plugin_broken",
    "got error plugin_left_out",
    "took longer than its",
    "has managed",
    "plugin limits change",
)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_violates_no_invariant(seed: int) -> None:
    outcome = simulate_seed(seed)
    assert not outcome.error, outcome.error
    assert outcome.facts
    assert outcome.starts > 1


def test_the_seeds_include_all_plugin_faults() -> None:
    missing = set(PLUGIN_FAULTS)
    for seed in range(SEEDS_TO_CATCH):
        trace = "\n".join(simulate_seed(seed).trace)
        missing = {fault for fault in missing if fault not in trace}
        if not missing:
            break
    assert not missing


@pytest.mark.parametrize("mutant", sorted(MUTANTS))
def test_a_mutant_is_caught(mutant: str) -> None:
    seeds = [LIKELY.get(mutant, 0), *range(SEEDS_TO_CATCH)]
    outcomes = (simulate_seed(seed, mutant) for seed in seeds)
    caught = next((outcome for outcome in outcomes if outcome.error), None)
    assert caught is not None, f"{mutant} was not caught by {SEEDS_TO_CATCH} seeds"
    assert caught.violation, f"{mutant} was noticed by accident, not by an invariant:\n{caught.error}"


def test_the_same_seeds_give_the_same_traces_byte_for_byte_in_every_process() -> None:
    here = trace_hashes(SEEDS_TO_COMPARE, Kind.SERVICE)
    assert trace_hashes_elsewhere(SEEDS_TO_COMPARE, Kind.SERVICE, hash_seed=1, ballast=0) == here
    assert trace_hashes_elsewhere(SEEDS_TO_COMPARE, Kind.SERVICE, hash_seed=4242, ballast=100_000) == here
