from __future__ import annotations

import pickle

import pytest

from forged.catalog import CatalogRefused, ChainBroken, ChainCyclic, CheckpointInUse, errors
from forged.errors import Problem, RequestRefused

REFUSALS = [
    errors.argument_invalid("step", -1, "an integer >= 0"),
    errors.record_invalid("a", [Problem("step", -1, "an integer >= 0")]),
    errors.unknown("a"),
    errors.transition_refused("a", "deleted", "change", "save another one"),
    errors.chain_broken("c", "a", "missing"),
    errors.chain_cyclic("c", "a"),
    errors.parent_missing("run"),
    errors.parent_needed("a", ["b", "c"]),
    errors.pinned("a"),
    errors.held("a", ["reader"]),
]


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: error.code)
def test_refusal_says_what_is_wrong_and_how_to_correct_it(error: CatalogRefused) -> None:
    assert isinstance(error, RequestRefused)
    assert error.code.startswith("checkpoint_")
    assert error.message
    assert error.fix


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: error.code)
def test_refusal_is_the_same_in_another_process(error: CatalogRefused) -> None:
    other = pickle.loads(pickle.dumps(error))
    assert type(other) is type(error)
    assert (other.args, vars(other)) == (error.args, vars(error))


def test_each_code_is_of_one_refusal() -> None:
    assert len({error.code for error in REFUSALS}) == len(REFUSALS)


def test_cycle_is_a_broken_chain() -> None:
    assert issubclass(ChainCyclic, ChainBroken)


def test_needed_parent_names_all_children() -> None:
    children = [f"child-{number}" for number in range(20)]
    error = errors.parent_needed("a", children)
    assert isinstance(error, CheckpointInUse)
    assert error.children == tuple(children)
    assert "child-7 and 12 more" in error.message
