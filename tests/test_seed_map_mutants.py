"""Each row that the seed map shows has a test that fails when the row's code is broken."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.seed_map import ROOT, Row, keys, node_ids
from tests.seed_map_mutants.catalog import CATALOG, mutants, shown_rows
from tests.seed_map_mutants.mutation import Constant, Edit, Mutation, MutationError
from tests.seed_map_mutants.runs import Outcome, TreeCopy, tree_copy
from tests.sweeps import share

WAYS = 30
"""A normal run breaks the code of one in so many rows."""
MUTANTS = mutants()
EMPTY = Edit("forged/version.py", "VERSION =", "VERSION  =")


@pytest.fixture(scope="module")
def copy() -> Iterator[TreeCopy]:
    with tree_copy() as made:
        yield made


def test_each_shown_row_has_a_mutant_or_a_reason_for_none() -> None:
    shown = {(row.seed, keys()[row]) for row in shown_rows()}
    assert shown == {(seed, key) for seed, mutants in CATALOG.items() for key in mutants}


def test_each_mutation_fits_its_file_and_leaves_it_readable() -> None:
    for _, mutation in MUTANTS:
        source = (ROOT / mutation.path).read_text()
        broken = mutation.applied(source)
        assert broken != source, mutation
        compile(broken, mutation.path, "exec")


UNFIT = [Edit("a.py", "x = 1", "x = 2"), Edit("a.py", "y", "z"), Constant("a.py", "C.x", "0")]


@pytest.mark.parametrize("mutation", UNFIT, ids=["missing", "twice", "member"])
def test_mutation_that_does_not_fit_is_refused(mutation: Mutation) -> None:
    with pytest.raises(MutationError):
        mutation.applied("class C:\n    y: int = 1\n    z: y\n")


def test_constant_replaces_any_assigned_value() -> None:
    names: dict[str, type] = {}
    exec(Constant("a.py", "C.x", "7").applied("class C:\n    x: int\n    def __init__(self): self.x = 1\n"), names)
    assert names["C"]().x == 7


def test_unbroken_code_passes_and_the_tree_stays_as_it_is(copy: TreeCopy) -> None:
    before = (ROOT / EMPTY.path).read_bytes()
    verdict = copy.judge(EMPTY, ["tests/test_retry.py::test_one_attempt_has_no_pause"])
    assert verdict.outcome is Outcome.SURVIVED, verdict.output
    assert (ROOT / EMPTY.path).read_bytes() == before


def test_test_that_cannot_run_is_not_counted_as_a_failure(copy: TreeCopy) -> None:
    assert copy.judge(EMPTY, ["tests/test_retry.py::test_that_is_not_there"]).outcome is Outcome.INVALID


SAMPLE = [MUTANTS[at] for at in share(len(MUTANTS), 0, WAYS)]


@pytest.mark.parametrize(("row", "mutation"), SAMPLE, ids=[row.declared for row, _ in SAMPLE])
def test_test_of_a_row_fails_when_its_code_is_broken(copy: TreeCopy, row: Row, mutation: Mutation) -> None:
    verdict = copy.judge(mutation, node_ids(row.test))
    assert verdict.outcome is Outcome.CAUGHT, f"{mutation} of {row.test}: {verdict.outcome}\n{verdict.output[-4000:]}"
