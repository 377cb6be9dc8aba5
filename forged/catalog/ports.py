"""What the catalogue's service needs of the other services."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from forged.jobs.model import SettingValue


@dataclass(frozen=True, slots=True)
class JobsPort:
    """What the catalogue needs to know of the jobs and their training."""

    settings: Callable[[str], Mapping[str, SettingValue] | None] = lambda job: {}
    """A job's settings; None if there is no such job."""
    step: Callable[[str], int | None] = lambda job: None
    """The step that a job has committed; None before its first world."""
    generation: Callable[[str], int] = lambda job: 0
    is_registered: Callable[[str, str], bool] = lambda job, worker_id: True
    """Whether a worker of this name is registered with a job."""
