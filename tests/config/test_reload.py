from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.config.model import CHOICES, RANGES, Config
from forged.config.reload import LIVE, plan_reload
from tests.config.files import read

NAMES = [setting.name for setting in fields(Config)]
RUNNING = Config(data_dir="/d", socket="/s")


def other(key: str, number: int) -> Any:
    """A value for a key that differs from its default."""
    if key in CHOICES:
        return next(choice for choice in CHOICES[key] if choice != getattr(Config(), key))
    if key in RANGES:
        return RANGES[key][0] if number % 2 else RANGES[key][1]
    if key in ("plugins", "certificate_roles"):
        return {f"a{number}": {"x": number} if key == "plugins" else "viewer"}
    return (f"127.0.0.1:{number}",) if key == "listen" else f"/{number}"


CHANGES = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 5)).map(
    lambda numbers: {key: other(key, number) for key, number in numbers.items()}
)


def test_reloadable_keys_are_settings() -> None:
    assert set(NAMES) > LIVE


@pytest.mark.parametrize("key", NAMES)
def test_each_setting_is_applied_or_needs_a_restart(key: str) -> None:
    wanted = replace(RUNNING, **{key: other(key, 0)})
    plan = plan_reload(RUNNING, wanted)
    if key in LIVE:
        assert (plan.config, plan.changed, plan.needs_restart) == (wanted, (key,), ())
    else:
        assert (plan.config, plan.changed, plan.needs_restart) == (RUNNING, (), (key,))


@pytest.mark.parametrize("key", ["log_format", "plugins", "plugin_dir", "plugin_load_timeout_s", "listen", "http"])
def test_settings_used_at_the_start_need_a_restart(key: str) -> None:
    assert key not in LIVE


@given(running=CHANGES, wanted=CHANGES)
def test_each_difference_is_reported_once_and_only_reloadable_settings_change(
    running: dict[str, Any], wanted: dict[str, Any]
) -> None:
    before, after = Config(**running), Config(**wanted)
    plan = plan_reload(before, after)
    different = [key for key in NAMES if getattr(before, key) != getattr(after, key)]
    assert sorted([*plan.changed, *plan.needs_restart], key=NAMES.index) == different
    for key in NAMES:
        assert getattr(plan.config, key) == getattr(after if key in plan.changed else before, key)


@given(running=CHANGES, wanted=CHANGES)
def test_second_reload_changes_nothing_and_reports_pending_settings_again(
    running: dict[str, Any], wanted: dict[str, Any]
) -> None:
    plan = plan_reload(Config(**running), Config(**wanted))
    again = plan_reload(plan.config, Config(**wanted))
    assert (again.config, again.changed, again.needs_restart) == (plan.config, (), plan.needs_restart)


def test_reload_of_the_same_file_changes_nothing(tmp_path: Path) -> None:
    text = 'data_dir = "state"\nlisten = ["tcp://127.0.0.1:1"]\ndrain_timeout_s = 3\n[plugins.a]\nx = [1, {y = 2}]\n'
    running, wanted = read(tmp_path, text), read(tmp_path, text.replace("= 3", "= 3.0"))
    assert plan_reload(running, wanted) == plan_reload(running, running)
    assert plan_reload(running, wanted).needs_restart == ()
