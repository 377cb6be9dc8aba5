from __future__ import annotations

import pickle

import pytest

from forged.errors import RequestRefused
from forged.registry import RegistryRefused, errors
from tests.registry.records import ARCHIVED, CANARY, PRODUCTION, STAGING, V1

REFUSALS = [
    errors.argument_invalid("size_bytes", -1, "an integer >= 0"),
    errors.model_unknown("model"),
    errors.version_unknown("model", V1),
    errors.version_taken("model", V1),
    errors.transition_refused("model", V1, CANARY, ARCHIVED, [STAGING, PRODUCTION]),
]


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: error.code)
def test_refusal_says_what_is_wrong_and_how_to_correct_it(error: RegistryRefused) -> None:
    assert isinstance(error, RequestRefused)
    assert error.code.startswith("model_")
    assert error.message
    assert error.fix


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: error.code)
def test_refusal_is_the_same_in_another_process(error: RegistryRefused) -> None:
    other = pickle.loads(pickle.dumps(error))
    assert type(other) is type(error)
    assert (other.args, vars(other)) == (error.args, vars(error))


def test_each_code_is_of_one_refusal() -> None:
    assert len({error.code for error in REFUSALS}) == len(REFUSALS)


def test_refused_transition_names_the_present_state_and_those_that_may_follow() -> None:
    error = errors.transition_refused("model", V1, CANARY, ARCHIVED, [STAGING, PRODUCTION])
    assert (error.model_id, error.version) == ("model", V1)
    assert error.message == "version 1.0.0 of model 'model' is canary; it cannot become archived"
    assert error.fix == "it can become production or staging"


def test_last_state_is_left_by_a_new_version_only() -> None:
    assert errors.transition_refused("model", V1, ARCHIVED, CANARY, []).fix == "register a new version"


def test_long_name_is_shortened() -> None:
    assert len(errors.model_unknown("m" * 10_000).message) < 300
