from __future__ import annotations

import math
from typing import Any

import pytest

from forged.catalog.model import UNLIMITED
from forged.catalog.settings import require_valid, retention_of
from forged.errors import RequestRefused
from forged.jobs.model import SettingValue


def test_without_settings_nothing_is_collected() -> None:
    for settings in (
        {},
        {"checkpoint_keep_best": 3},
        {"checkpoint_keep_every_steps": 10},
        {"checkpoint_metric": "acc"},
    ):
        assert not retention_of(settings, {}).collects
    assert retention_of({"checkpoint_keep": 1}, {}).collects
    assert retention_of({}, {"checkpoint_max_age_s": 1.0}).collects


def test_settings_of_the_job_come_before_the_defaults() -> None:
    defaults: dict[str, SettingValue] = {
        "checkpoint_keep": 5,
        "checkpoint_metric": "acc",
        "checkpoint_metric_ascending": False,
    }
    found = retention_of({"checkpoint_keep": 2, "checkpoint_metric": None}, defaults)
    assert found.policy.max_checkpoints_per_run == 2
    assert (found.policy.metric_key, found.policy.metric_ascending) == ("acc", False)
    assert retention_of({}, {}).policy.max_checkpoints_per_run == UNLIMITED
    assert retention_of({}, {}).policy.max_age_seconds == math.inf


def test_number_of_the_script_holds_only_without_a_rule() -> None:
    assert retention_of({}, {}, 3).policy.max_checkpoints_per_run == 3
    assert retention_of({"checkpoint_metric": "acc"}, {}, 3).policy.max_checkpoints_per_run == 3
    assert retention_of({"checkpoint_max_age_s": 9.0}, {}, 3).policy.max_checkpoints_per_run == UNLIMITED
    assert retention_of({}, {"checkpoint_keep": 7}, 3).policy.max_checkpoints_per_run == 7


def test_stored_value_that_is_invalid_counts_as_absent() -> None:
    assert not retention_of({"checkpoint_keep": 0}, {}).collects
    assert not retention_of({"checkpoint_keep": "2"}, {"checkpoint_max_age_s": -1.0}).collects


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"checkpoint_keep": 0}, "checkpoint_keep must be a whole number >= 1, or none, got 0"),
        ({"checkpoint_keep": True}, "checkpoint_keep must be"),
        ({"checkpoint_keep": 2.0}, "checkpoint_keep must be"),
        ({"checkpoint_keep": 2**63}, "checkpoint_keep must be"),
        ({"checkpoint_max_age_s": 0}, "checkpoint_max_age_s must be seconds > 0"),
        ({"checkpoint_max_age_s": math.nan}, "got nan"),
        ({"checkpoint_keep_best": -1}, "got -1"),
        ({"checkpoint_metric": ""}, "a metric's name"),
        ({"checkpoint_metric": "a\0"}, "a metric's name"),
        ({"checkpoint_metric_ascending": "yes"}, "true or false"),
        ({"checkpoint_keep_every_s": math.inf}, "got inf"),
        ({"checkpoint_keep_bests": 1}, "did you mean `checkpoint_keep_best`?"),
        ({"checkpoint_max_age": 1}, "did you mean `checkpoint_max_age_s`?"),
    ],
)
def test_invalid_settings_are_refused_with_key_value_and_what_is_allowed(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestRefused) as error:
        require_valid("run", settings)
    assert error.value.code == "checkpoint_settings_invalid"
    assert told in error.value.message


def test_settings_of_scripts_are_accepted() -> None:
    require_valid("run", {"checkpoint_dir": "/x", "checkpoint_every": 5, "lr": 0.1, "checkpoint_keep": None})
