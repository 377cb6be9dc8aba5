"""The catalogue's settings of a job: which of its checkpoints are kept. The daemon's configuration has the defaults.

Invariants:
- Without `checkpoint_keep` and `checkpoint_max_age_s` nothing is ever collected.
- A stored value that is not valid counts as absent, so that it deletes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from forged.catalog.model import UNLIMITED, GcPolicy, is_integer, is_number
from forged.errors import Problem, RequestRefused
from forged.jobs.model import SettingValue

SECONDS_MAX = 1e10
METRIC_CHARS_MAX = 128
PREFIX = "checkpoint_"
SIMILARITY_MIN = 0.9
"""From this similarity on, an unknown key counts as misspelt."""
PROBLEMS_CHARS_MAX = 2_000


@dataclass(frozen=True, slots=True)
class SettingRule:
    """What a setting must be: as a test, and as text for the error."""

    accepts: Callable[[object], bool]
    wanted: str


def _count(least: int) -> SettingRule:
    return SettingRule(
        lambda value: is_integer(value, least) and value <= UNLIMITED,
        f"a whole number >= {least}",
    )


_SECONDS = SettingRule(
    lambda value: is_number(value) and 0 < value <= SECONDS_MAX,
    f"seconds > 0, at most {SECONDS_MAX:g}",
)
_METRIC = SettingRule(
    lambda value: isinstance(value, str) and 0 < len(value) <= METRIC_CHARS_MAX and value.isprintable(),
    f"a metric's name of 1 to {METRIC_CHARS_MAX} characters",
)
_FLAG = SettingRule(lambda value: isinstance(value, bool), "true or false")

RULES: Mapping[str, SettingRule] = {
    "checkpoint_keep": _count(1),
    "checkpoint_max_age_s": _SECONDS,
    "checkpoint_keep_best": _count(0),
    "checkpoint_metric": _METRIC,
    "checkpoint_metric_ascending": _FLAG,
    "checkpoint_keep_every_steps": _count(1),
    "checkpoint_keep_every_s": _SECONDS,
    "checkpoint_chain_max": _count(1),
}
"""None is allowed for each: no limit, or the daemon's default."""
RULES_OF_KEEPING = tuple(RULES.keys() - {"checkpoint_metric", "checkpoint_metric_ascending", "checkpoint_chain_max"})


@dataclass(frozen=True, slots=True)
class JobRetention:
    """A job's settings of the catalogue."""

    policy: GcPolicy
    chain_max: int | None = None
    """Longer chains are compacted."""

    @property
    def collects(self) -> bool:
        """Whether a collection can delete anything."""
        return self.policy.max_checkpoints_per_run < UNLIMITED or self.policy.max_age_seconds < math.inf


def find_problems(settings: Mapping[str, SettingValue]) -> Iterator[Problem]:
    """The invalid settings, and the keys that are probably misspelt."""
    for key, value in settings.items():
        rule = RULES.get(key)
        if rule is not None:
            if value is not None and not rule.accepts(value):
                yield Problem(key, value, f"{rule.wanted}, or none")
        elif key.startswith(PREFIX) and (near := get_close_matches(key, RULES, 1, SIMILARITY_MIN)):
            yield Problem.unknown(key, value, RULES, near[0])


def require_valid(job: str, settings: Mapping[str, SettingValue]) -> None:
    """Refuse invalid settings of a job."""
    found = "; ".join(map(str, find_problems(settings)))
    if found:
        raise RequestRefused(
            "checkpoint_settings_invalid",
            f"invalid settings for job {job[:80]}: {found}"[:PROBLEMS_CHARS_MAX],
            "see docs/catalog.md for all settings",
        )


def retention_of(
    settings: Mapping[str, SettingValue], defaults: Mapping[str, SettingValue], keep: int | None = None
) -> JobRetention:
    """The retention of a job with these settings; `keep` is what its script keeps if they name no rule."""
    if keep is not None and not any(
        one.get(key) is not None for one in (settings, defaults) for key in RULES_OF_KEEPING
    ):
        settings = {**settings, "checkpoint_keep": keep}

    def get(key: str) -> SettingValue:
        own = settings.get(key)
        if own is not None and RULES[key].accepts(own):
            return own
        default = defaults.get(key)
        return default if default is not None and RULES[key].accepts(default) else None

    def number(key: str) -> float | None:
        value = get(key)
        assert value is None or isinstance(value, (int, float))
        return value

    def whole(key: str) -> int | None:
        value = get(key)
        assert value is None or isinstance(value, int)
        return value

    age, metric, ascending = (
        number("checkpoint_max_age_s"),
        get("checkpoint_metric"),
        get("checkpoint_metric_ascending"),
    )
    policy = GcPolicy(
        max_checkpoints_per_run=whole("checkpoint_keep") or UNLIMITED,
        max_age_seconds=math.inf if age is None else age,
        keep_best_n=whole("checkpoint_keep_best") or 0,
        metric_key="loss" if metric is None else str(metric),
        metric_ascending=ascending is not False,
        keep_every_steps=whole("checkpoint_keep_every_steps"),
        keep_every_seconds=number("checkpoint_keep_every_s"),
    )
    return JobRetention(policy, whole("checkpoint_chain_max"))
