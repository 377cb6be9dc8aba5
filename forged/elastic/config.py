"""The settings of elastic training, and their validation.

Invariants:
- Settings are checked as a whole; the error names every invalid one with what is allowed.
- A job stores only the settings that differ from the defaults, and may have further settings of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from forged.elastic.model import WORLD_SIZE_MAX, AdaptationStrategy, LostDataPolicy, RedistributionType
from forged.errors import ConfigError, Problem, RequestRefused
from forged.jobs.model import SettingValue

WHOLE_NUMBER_MAX = 2**31 - 1
LEARNING_RATE_MAX = 1e100
CONCURRENT_TRANSFERS_MAX = 64
HEARTBEATS_PER_TIMEOUT = 3
PULSE_INTERVAL_S = 0.5
"""How often a worker's pulse is sent, unless a shorter heartbeat timeout requires more."""
PULSE_INTERVAL_S_MIN = 0.05
"""No settings make the pulse more frequent, because it must cost next to nothing."""
PROBLEMS_CHARS_MAX = 2_000
UNITS = ("_ms", "_s", "_seconds", "_percentage", "_percent")
"""Unit suffixes of setting names, and of what users take for setting names."""


class ElasticTrainingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a job's training adapts to joining, leaving and failing workers. Times are whole milliseconds."""

    min_workers: int = 1
    """With fewer workers the job waits."""
    max_workers: int = WORLD_SIZE_MAX
    """With so many workers joiners are taken in at once, and further ones wait."""
    rescale_timeout_ms: int = 30_000
    """How long a rescale may take once training has stopped for it; then the members that have not answered fail. 0: no
    limit."""
    max_consecutive_failures: int = 3
    """So many failures without a committed step in between abort the job."""
    lr_adaptation_strategy: AdaptationStrategy = AdaptationStrategy.LINEAR
    """How the learning rate follows the number of workers, if the batch does."""
    redistribution_type: RedistributionType = RedistributionType.FULL_RESHUFFLE
    """How the training data is redistributed in a rescale."""
    use_synchronous_rescaling: bool = True
    """Whether training stops for a rescale, so that all workers resume after the same step."""
    stability_window_ms: int = 30_000
    """The time without a further join after which joiners are taken in."""
    worker_heartbeat_timeout_ms: int = 10_000
    """How long a worker may be silent before it fails."""
    failure_tolerance_percentage: int = 20
    """The share of the world at the last commit that may fail without an abort; one worker always may."""
    use_parallel_data_transfer: bool = True
    """Whether several shard transfers run at once."""

    rescale_silence_ms: int = 15_000
    """How long a rescale may make no progress before the members that hold it up fail. 0: no limit."""
    failure_window_ms: int = 50
    """The delay between a failure and its rescale, so that simultaneous failures make one rescale."""
    reconnect_grace_ms: int = 15_000
    """How long a lost worker may take to reconnect before it fails."""
    leave_timeout_ms: int | None = 300_000
    """How long a draining worker waits for another worker to take over its state and data; None: no limit."""
    min_workers_timeout_ms: int | None = 600_000
    """How long a job waits for `min_workers` before it is aborted; None: no limit."""
    stall_timeout_ms: int = 60_000
    """How long a live worker may make no progress before it counts as stalled."""
    evict_stalled: bool = False
    """Whether a stalled worker is evicted once other workers wait for it, or only reported."""
    lost_data_policy: LostDataPolicy = LostDataPolicy.WAIT
    """What happens when shards are lost that neither a worker nor the origin has."""
    max_concurrent_transfers: int = 4
    """How many shard transfers run at once."""
    scale_batch_with_world: bool = False
    """Whether the global batch, and with it the learning rate, grows with the number of workers."""
    base_world_size: int | None = None
    """The number of workers that base rate and batch are meant for; None: that of the first commit."""
    base_learning_rate: float | None = None
    """The learning rate for `base_world_size` workers; None: the rate of the first commit."""
    global_batch_size: int | None = None
    """The batch of all `base_world_size` workers together; None: the batch of the first commit."""

    def validate(self) -> None:
        """Raise one `ConfigError` that names every invalid setting."""
        _check(self._values())

    @classmethod
    def from_settings(cls, settings: Mapping[str, SettingValue]) -> ElasticTrainingConfig:
        """The configuration of a job with these settings, with defaults for the rest."""
        values = {key: settings[key] for key in RULES if key in settings}
        _check({**DEFAULTS, **values})
        return msgspec.convert(values, cls)

    def to_settings(self) -> dict[str, SettingValue]:
        """The settings that differ from the defaults."""
        self.validate()
        changed = {key: value for key, value in self._values().items() if value != DEFAULTS[key]}
        if self.base_learning_rate is not None:
            changed["base_learning_rate"] = float(self.base_learning_rate)
        return {key: value.value if isinstance(value, StrEnum) else value for key, value in changed.items()}

    def _values(self) -> dict[str, SettingValue]:
        return {key: getattr(self, key) for key in self.__struct_fields__}

    @property
    def transfers_at_once(self) -> int:
        """How many shard transfers run at once, by both settings."""
        return min(self.max_concurrent_transfers, CONCURRENT_TRANSFERS_MAX) if self.use_parallel_data_transfer else 1

    @property
    def rescale_timeout_s(self) -> float:
        """`rescale_timeout_ms` in seconds."""
        return self.rescale_timeout_ms / 1000

    @property
    def rescale_silence_s(self) -> float:
        """`rescale_silence_ms` in seconds."""
        return self.rescale_silence_ms / 1000

    @property
    def stability_window_s(self) -> float:
        """`stability_window_ms` in seconds."""
        return self.stability_window_ms / 1000

    @property
    def failure_window_s(self) -> float:
        """`failure_window_ms` in seconds."""
        return self.failure_window_ms / 1000

    @property
    def worker_heartbeat_timeout_s(self) -> float:
        """`worker_heartbeat_timeout_ms` in seconds."""
        return self.worker_heartbeat_timeout_ms / 1000

    @property
    def heartbeat_interval_s(self) -> float:
        """Seconds between two heartbeats: two may be lost without a timeout."""
        return self.worker_heartbeat_timeout_s / HEARTBEATS_PER_TIMEOUT

    @property
    def pulse_interval_s(self) -> float:
        """How often a worker's pulse is sent: often enough that two may be lost within the heartbeat timeout."""
        return min(PULSE_INTERVAL_S, max(PULSE_INTERVAL_S_MIN, self.heartbeat_interval_s))

    @property
    def reconnect_grace_s(self) -> float:
        """`reconnect_grace_ms` in seconds."""
        return self.reconnect_grace_ms / 1000

    @property
    def stall_timeout_s(self) -> float:
        """`stall_timeout_ms` in seconds."""
        return self.stall_timeout_ms / 1000

    @property
    def leave_timeout_s(self) -> float:
        """`leave_timeout_ms` in seconds; infinite without a limit."""
        return _seconds(self.leave_timeout_ms)

    @property
    def min_workers_timeout_s(self) -> float:
        """`min_workers_timeout_ms` in seconds; infinite without a limit."""
        return _seconds(self.min_workers_timeout_ms)


def _seconds(milliseconds: int | None) -> float:
    return math.inf if milliseconds is None else milliseconds / 1000


DEFAULTS: Mapping[str, SettingValue] = msgspec.structs.asdict(ElasticTrainingConfig())


@dataclass(frozen=True, slots=True)
class Rule:
    """What a setting must be: as a test, and as text for the error."""

    accepts: Callable[[object], bool]
    wanted: str


def _whole(low: int, high: int = WHOLE_NUMBER_MAX) -> Rule:
    def accepts(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high

    return Rule(accepts, f"a whole number from {low} to {high}")


def _rate() -> Rule:
    def accepts(value: object) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and 0.0 < value <= LEARNING_RATE_MAX

    return Rule(accepts, f"a number > 0 and <= {LEARNING_RATE_MAX:g}")


def _flag() -> Rule:
    return Rule(lambda value: isinstance(value, bool), "true or false")


def _one_of(choices: type[StrEnum]) -> Rule:
    names = tuple(choice.value for choice in choices)
    return Rule(lambda value: isinstance(value, str) and value in names, f"one of {', '.join(names)}")


def _or_none(rule: Rule, meaning: str) -> Rule:
    return Rule(lambda value: value is None or rule.accepts(value), f"{rule.wanted}, or none for {meaning}")


RULES: Mapping[str, Rule] = {
    "min_workers": _whole(1, WORLD_SIZE_MAX),
    "max_workers": _whole(1, WORLD_SIZE_MAX),
    "rescale_timeout_ms": _whole(0),
    "rescale_silence_ms": _whole(0),
    "max_consecutive_failures": _whole(0),
    "lr_adaptation_strategy": _one_of(AdaptationStrategy),
    "redistribution_type": _one_of(RedistributionType),
    "lost_data_policy": _one_of(LostDataPolicy),
    "use_synchronous_rescaling": _flag(),
    "stability_window_ms": _whole(0),
    "worker_heartbeat_timeout_ms": _whole(1),
    "failure_tolerance_percentage": _whole(0, 100),
    "use_parallel_data_transfer": _flag(),
    "failure_window_ms": _whole(0),
    "reconnect_grace_ms": _whole(0),
    "leave_timeout_ms": _or_none(_whole(0), "no end"),
    "min_workers_timeout_ms": _or_none(_whole(0), "no end"),
    "stall_timeout_ms": _whole(1),
    "evict_stalled": _flag(),
    "max_concurrent_transfers": _whole(1),
    "scale_batch_with_world": _flag(),
    "base_world_size": _or_none(_whole(1, WORLD_SIZE_MAX), "that of the first commit"),
    "base_learning_rate": _or_none(_rate(), "that of the first commit"),
    "global_batch_size": _or_none(_whole(1), "that of the first commit"),
}


def find_problems(values: Mapping[str, SettingValue]) -> Iterator[Problem]:
    """All that is invalid in a complete set of settings."""
    for key, rule in RULES.items():
        value = values[key]
        if not rule.accepts(value):
            yield Problem(key, value, rule.wanted)
        elif key == "max_workers" and _falls_short(value, values["min_workers"]):
            yield Problem(key, value, f"at least min_workers, which is {values['min_workers']}")


def find_slips(settings: Mapping[str, SettingValue]) -> Iterator[Problem]:
    """The unknown keys that are probably misspelt settings."""
    for key in sorted(settings.keys() - RULES.keys()):
        meant = next((name for name in RULES if _is_near(_stem(key), _stem(name))), None)
        if meant is not None:
            yield Problem.unknown(key, settings[key], RULES, meant)


def _stem(key: str) -> str:
    """A name without its unit suffix, in snake case."""
    name = key.lower().replace("-", "_")
    return name.removesuffix(next((unit for unit in UNITS if name.endswith(unit)), ""))


def _is_near(one: str, other: str) -> bool:
    """Whether the names differ by at most one letter left out, added, replaced or swapped with the next."""
    same = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    one, other = (one[same:], other[same:]) if same is not None else (one[len(other) :], other[len(one) :])
    swapped = one[1::-1] + one[2:]
    return one[1:] == other[1:] or one[1:] == other or one == other[1:] or swapped == other


def _falls_short(most: object, least: object) -> bool:
    """Whether `most` is below `least`, if `least` is valid; an invalid one has its own problem."""
    is_right = RULES["min_workers"].accepts(least)
    return is_right and isinstance(most, int) and isinstance(least, int) and most < least


def _check(values: Mapping[str, SettingValue]) -> None:
    problems = tuple(find_problems(values))
    if problems:
        keys = ", ".join(problem.key for problem in problems)
        raise ConfigError("elastic_config_invalid", f"invalid settings of elastic training: {keys}", problems=problems)


def require_trainable(job: str, settings: Mapping[str, SettingValue]) -> None:
    """Refuse invalid settings."""
    _refuse(job, find_problems({**DEFAULTS, **settings}))


def require_meant(job: str, settings: Mapping[str, SettingValue]) -> None:
    """Refuse invalid settings, and unknown keys that are probably misspelt ones."""
    _refuse(job, [*find_problems({**DEFAULTS, **settings}), *find_slips(settings)])


def _refuse(job: str, problems: Iterable[Problem]) -> None:
    found = "; ".join(map(str, problems))
    if found:
        raise RequestRefused(
            "elastic_config_invalid",
            f"invalid settings for job {job[:80]}: {found}"[:PROBLEMS_CHARS_MAX],
            "see docs/elastic.md for all settings",
        )


def tolerated_failures(world: int, percentage: int) -> int:
    """How many of `world` workers may fail without an abort: the percentage, rounded down, and at least one."""
    return max(1, world * percentage // 100)
