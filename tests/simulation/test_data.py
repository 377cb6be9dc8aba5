"""Training data in the simulation: it keeps its promises, meets its troubles, is reproducible, and finds bugs."""

from __future__ import annotations

from collections import Counter
from itertools import count, islice

import pytest

from tests.simulation.data import MUST_HAPPEN, has_data
from tests.simulation.data_mutants import BREAKS, MUTANTS
from tests.simulation.data_oracle import DataPromise
from tests.simulation.runner import Kind, Outcome, live_through

SEEDS = list(islice(filter(has_data, count()), 4))
"""`make test` lives through many more."""
SEEDS_TO_CATCH = list(islice(filter(has_data, count()), 300))
LIKELY = {
    "commit_when_the_first_has_its_data": 32,
    "draw_as_in_the_world_before": 46,
    "keep_what_was_found_to_be_bad": 65,
    "leave_the_sampler_behind": 30,
    "shuffle_anew_in_each_world": 71,
    "stop_while_data_moves": 92,
}
"""Where to look first for bugs that show seldom; they may be elsewhere when worlds have changed."""
SEEDS_TO_MEET = [157, *islice(filter(has_data, count()), 200)]
"""First where doubts come up while data is about to move, which is seldom."""


def live(seed: int, mutant: str | None = None) -> Outcome:
    return live_through(seed, mutant, Kind.ELASTIC)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_data_of_every_job_keeps_its_promises(seed: int) -> None:
    outcome = live(seed)
    assert not outcome.error, outcome.error
    assert outcome.facts


def test_the_worlds_meet_every_trouble_that_is_meant_to_happen_to_data() -> None:
    met: Counter[str] = Counter()
    for seed in SEEDS_TO_MEET:
        met.update(live(seed).met)
        if all(met[what] for what in MUST_HAPPEN):
            break
    assert [what for what in MUST_HAPPEN if not met[what]] == []


@pytest.mark.parametrize("mutant", sorted(MUTANTS))
def test_a_planted_bug_breaks_the_promise_that_is_named_for_it(mutant: str) -> None:
    """What is broken in a world may be another promise: a bug has more than one consequence."""
    named, others = BREAKS[mutant].name.lower(), set[str]()
    for seed in [LIKELY.get(mutant, SEEDS_TO_CATCH[0]), *SEEDS_TO_CATCH]:
        outcome = live(seed, mutant)
        promise = outcome.broken.partition(":")[0]
        if promise == named:
            return
        assert promise or not outcome.error, f"{mutant} was noticed by accident:\n{outcome.error}"
        others.add(promise)
    pytest.fail(f"{mutant} has broken {sorted(filter(None, others))}, and not {named}")


def test_there_is_a_bug_for_every_promise_about_data() -> None:
    assert set(BREAKS.values()) == set(DataPromise)
    assert BREAKS.keys() == MUTANTS.keys()
