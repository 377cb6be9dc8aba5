"""What the registry needs to know of jobs, their checkpoints and their data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from forged.catalog.records import CheckpointRecord
from forged.jobs.model import SettingValue


@dataclass(frozen=True, slots=True)
class OriginsPort:
    """Where versions come from."""

    settings: Callable[[str], Mapping[str, SettingValue] | None] = lambda job: None
    """A job's settings; None if there is no such job."""
    checkpoint: Callable[[str, str, str], CheckpointRecord | None] = lambda job, path, save_id: None
    """The checkpoint of a job at a path with a save id, or the newest one at the path if the save id is empty; also a
    deleted one whose files may be there yet."""
    audit: Callable[[str, int], str] = lambda job, epoch: ""
    """What the audit says of an epoch of a job, in words; empty if its data is not audited."""
