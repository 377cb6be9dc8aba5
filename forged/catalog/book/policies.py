"""Which retention policy each job has.

Invariants:
- The settings of the job come before what its script says, and that before the daemon's defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from forged.catalog.catalog_index import CatalogIndex
from forged.catalog.records import CheckpointRecord
from forged.catalog.settings import JobRetention, retention_of
from forged.jobs.model import SettingValue

NO_SETTINGS: Mapping[str, SettingValue] = {}


class RetentionPolicies:
    """The retention of each job that has checkpoints, as its settings, its script or the daemon say."""

    def __init__(
        self,
        index: CatalogIndex,
        settings_of: Callable[[str], Mapping[str, SettingValue] | None],
        defaults: Mapping[str, SettingValue],
    ) -> None:
        self._index = index
        self._settings_of = settings_of
        self._defaults = defaults
        self._retention: dict[str, JobRetention] = {}
        self._kept_by_script: dict[str, int] = {}

    def load(self, records: Collection[CheckpointRecord]) -> None:
        """Take the policies of these checkpoints' jobs."""
        self._retention.clear()
        self._kept_by_script.clear()
        for record in sorted(records, key=lambda one: one.meta.created_at):
            self._kept_by_script |= {} if record.keep is None else {record.job: record.keep}
        for job in {record.job for record in records}:
            self._set_policy(job)

    def of(self, job: str) -> JobRetention:
        known = self._retention.get(job)
        return self._set_policy(job) if known is None else known

    def set_defaults(self, defaults: Mapping[str, SettingValue]) -> None:
        """Replace the daemon's default settings."""
        if defaults != self._defaults:
            self._defaults = defaults
            for job in list(self._retention):
                self._set_policy(job)

    def settings_changed(self, job: str) -> None:
        """Judge the job's checkpoints by its present settings from now on."""
        if job in self._retention:
            self._set_policy(job)

    def keep_as_script_does(self, record: CheckpointRecord) -> None:
        """A script says with each checkpoint how many it keeps."""
        if record.keep and record.keep != self._kept_by_script.get(record.job):
            self._kept_by_script[record.job] = record.keep
            self._set_policy(record.job)
        else:
            self.of(record.job)

    def forget(self, job: str) -> None:
        """The job is removed. What is left of its checkpoints is an operator's."""
        self._retention.pop(job, None)
        self._kept_by_script.pop(job, None)
        self._index.set_policy(job, None)
        if self._index.run(job) is not None:
            self._set_policy(job)

    def _set_policy(self, job: str) -> JobRetention:
        own = self._settings_of(job)
        # Of a removed job nothing is collected: its pinned checkpoints are an operator's.
        keep = self._kept_by_script.get(job)
        found = retention_of(NO_SETTINGS, NO_SETTINGS) if own is None else retention_of(own, self._defaults, keep)
        self._retention[job] = found
        self._index.set_policy(job, found.policy)
        return found
