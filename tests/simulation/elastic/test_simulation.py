"""Training in the simulation: it keeps its promises, is reproducible, and finds bugs."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.elastic.mutants import BREAKS, MUTANTS
from tests.simulation.elastic.truth import Promise
from tests.simulation.runner import Kind, Outcome, simulate_seed

SEEDS = range(4)
"""`make test` lives through many more, and sees that they meet all that is meant to happen."""
SEEDS_TO_CATCH = 200
LIKELY = {
    "count_evictions": 35,
    "fail_whoever_has_not_answered": 453,
    "keep_nobody_for_the_state": 89,
    "take_everybody_for_a_holder_of_the_state": 27,
}
"""Where to look first for bugs that show seldom; they may be elsewhere when worlds have changed."""
ROOT = Path(__file__).parents[3]

TRACES_OF = """
import hashlib, sys
from tests.simulation.runner import Kind, simulate_seed
ballast = [object() for _ in range(int(sys.argv[2]))]
del ballast[::3]
for seed in range(int(sys.argv[1])):
    print(hashlib.sha256("\\n".join(simulate_seed(seed, None, Kind.ELASTIC).trace).encode()).hexdigest())
"""


def live(seed: int, mutant: str | None = None) -> Outcome:
    return simulate_seed(seed, mutant, Kind.ELASTIC)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_job_keeps_its_promises(seed: int) -> None:
    outcome = live(seed)
    assert not outcome.error, outcome.error
    assert outcome.facts


@pytest.mark.parametrize("mutant", sorted(MUTANTS))
def test_a_planted_bug_breaks_the_promise_that_is_named_for_it(mutant: str) -> None:
    """What is broken in a world may be another promise: a bug has more than one consequence."""
    named, others = BREAKS[mutant].name.lower(), set[str]()
    for seed in [LIKELY.get(mutant, 0), *range(SEEDS_TO_CATCH)]:
        outcome = live(seed, mutant)
        promise = outcome.violation.partition(":")[0]
        if promise == named:
            return
        assert promise or not outcome.error, f"{mutant} was noticed by accident:\n{outcome.error}"
        others.add(promise)
    pytest.fail(f"{mutant} has broken {sorted(filter(None, others))} in {SEEDS_TO_CATCH} seeds, and not {named}")


def test_there_is_a_bug_for_every_promise_that_training_makes() -> None:
    kept_by_others = {Promise.HISTORY, Promise.MEMBERS, Promise.ONE_OWNER, Promise.ANSWERS}
    assert set(BREAKS.values()) | kept_by_others == set(Promise)
    assert BREAKS.keys() == MUTANTS.keys()


def _traces_in_another_process(seeds: int, hash_seed: int, ballast: int) -> list[str]:
    environment = os.environ | {"PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", TRACES_OF, str(seeds), str(ballast)]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.split()


def test_the_same_seeds_give_the_same_traces_byte_for_byte_in_every_process() -> None:
    here = [hashlib.sha256("\n".join(live(seed).trace).encode()).hexdigest() for seed in SEEDS]
    assert _traces_in_another_process(len(SEEDS), 1, 0) == here
    assert _traces_in_another_process(len(SEEDS), 4242, 123_457) == here
