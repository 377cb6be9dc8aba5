"""What all workers of a job have in common."""

from __future__ import annotations

import pytest

from forged.elastic.compatibility import (
    CHARS_MAX,
    FIX,
    PARTS_MAX,
    VALUES_MAX,
    SharedConfig,
    check_shared_config,
    require_compatible,
)
from forged.errors import RequestRefused

DATASET: SharedConfig = {"dataset": {"samples": 100, "shards": 10}}
SAMPLER: SharedConfig = {"sampler": {"seed": 7, "drop_last": False}}


def refusal(known: SharedConfig, given: SharedConfig) -> RequestRefused:
    with pytest.raises(RequestRefused) as error:
        require_compatible("run", known, given)
    return error.value


@pytest.mark.parametrize("common", [{}, DATASET, SAMPLER, DATASET | SAMPLER])
def test_worker_that_has_the_same_is_welcome(common: SharedConfig) -> None:
    require_compatible("run", common, common)


def test_refusal_names_the_part_that_the_worker_lacks() -> None:
    error = refusal(DATASET | SAMPLER, SAMPLER)
    assert error.code == "dataset_missing"
    assert error.message == "job run trains with a dataset (samples = 100, shards = 10), this worker has none"
    assert error.fix == "give this worker the same dataset"


def test_worker_that_has_a_part_that_other_workers_lack_is_refused_likewise() -> None:
    error = refusal(SAMPLER, DATASET | SAMPLER)
    assert error.code == "dataset_differs"
    assert error.message == ("job run trains without a dataset, this worker has one (samples = 100, shards = 10)")
    assert error.fix == FIX


def test_difference_is_named_with_both_values() -> None:
    error = refusal(SAMPLER, {"sampler": {"seed": 8, "drop_last": True}})
    assert error.code == "sampler_differs"
    assert error.message == (
        "job run trains with another sampler: drop_last is False in the job, True in this worker;"
        " seed is 7 in the job, 8 in this worker"
    )


def test_a_value_that_only_one_of_them_has_differs() -> None:
    error = refusal(SAMPLER, {"sampler": {"seed": 7}})
    assert error.message == "job run trains with another sampler: drop_last is False in the job, None in this worker"


LARGEST: SharedConfig = {
    f"{number}".ljust(CHARS_MAX, "x"): {
        f"{value}".ljust(CHARS_MAX, "x"): "x" * CHARS_MAX for value in range(VALUES_MAX)
    }
    for number in range(PARTS_MAX)
}


@pytest.mark.parametrize("common", [None, {}, DATASET | SAMPLER, LARGEST])
def test_valid_shared_config_is_accepted(common: SharedConfig | None) -> None:
    check_shared_config(common)


@pytest.mark.parametrize(
    "common",
    [
        {f"part{number}": {} for number in range(PARTS_MAX + 1)},
        {"dataset": {f"value{number}": 0 for number in range(VALUES_MAX + 1)}},
        {"dataset": {"name": "x" * (CHARS_MAX + 1)}},
        {"dataset": {"x" * (CHARS_MAX + 1): 1}},
        {"x" * (CHARS_MAX + 1): {}},
    ],
    ids=["parts", "values", "a text", "a name", "the name of a part"],
)
def test_more_than_that_is_refused(common: SharedConfig) -> None:
    with pytest.raises(RequestRefused) as error:
        check_shared_config(common)
    assert error.value.code == "shared_config_invalid"
