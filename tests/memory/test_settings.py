from __future__ import annotations

from typing import Any

import pytest

from forged.config.model import CHOICES
from forged.errors import RequestRefused
from forged.memory.pool.eviction import POLICIES
from forged.memory.settings import eviction_of, require_valid


def test_the_policy_of_the_job_comes_before_the_default() -> None:
    assert eviction_of({"memory_eviction": "cost"}, "lru") == "cost"
    assert eviction_of({"memory_eviction": "lru"}, "cost") == "lru"
    for settings in (None, {}, {"memory_eviction": None}, {"memory_eviction": "random"}, {"memory_eviction": 1}):
        assert eviction_of(settings, "cost") == "cost"


@pytest.mark.parametrize("settings", [{}, {"memory_eviction": "cost"}, {"memory_eviction": None}, {"memory_x": 1}])
def test_valid_settings_are_accepted(settings: dict[str, Any]) -> None:
    require_valid("run", settings)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"memory_eviction": "fifo"}, "lru or cost, or none"),
        ({"memory_eviction": 1}, "lru or cost, or none"),
        ({"memory_evicton": "cost"}, "memory_eviction"),
    ],
)
def test_invalid_settings_are_refused_by_name(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(RequestRefused, match=problem) as caught:
        require_valid("run", settings)
    assert caught.value.code == "memory_settings_invalid"


def test_the_daemon_has_the_policies_of_the_pool() -> None:
    assert CHOICES["memory_eviction"] == POLICIES
