"""What the memory service needs of the other services."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from forged.jobs.model import SettingValue


@dataclass(frozen=True, slots=True)
class WorkersPort:
    """What is known of the workers of jobs."""

    is_registered: Callable[[str, str, bytes], bool]
    """Whether a worker is registered with a job as this process."""
    registered: Callable[[], Mapping[str, Iterable[tuple[str, bytes]]]]
    """By job: the ids and incarnations of all registered workers."""
    generation: Callable[[str], int] = lambda job: 0


@dataclass(frozen=True, slots=True)
class EvictionPort:
    """What is known of the worth of cached blocks."""

    settings: Callable[[str], Mapping[str, SettingValue] | None] = lambda job: None
    """The settings of a job; None: there is no such job."""
    is_saved: Callable[[str, str], bool] = lambda job, content: False
    """Whether a job has a complete checkpoint of this id or storage path."""
