"""A job, its facts and its requests."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from forged.auth.model import Role
from forged.kernel.messages import ANY_JOB, Fact, Fence, Nothing, Request
from forged.pagination import PAGE_ENTRIES_MAX

SettingValue = str | int | float | bool | None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One training job. `version` grows with every change; `fence` is where its generations are counted from.

    A new job's fence has the term in which it was created and lies above those of all jobs removed before.
    """

    name: str
    settings: dict[str, SettingValue]
    version: int = 1
    created_at: float
    created_by: str
    fence: Fence = Fence(0, 0)
    created_with: dict[str, SettingValue] | None = None
    """The job's first settings; None if they never changed. A caller that creates the job with these gets the current
    ones, without a refusal."""


class JobCreated(Fact, frozen=True):
    """A job exists from now on."""

    name: str
    settings: dict[str, SettingValue]


class JobChanged(Fact, frozen=True):
    """A job's settings have changed."""

    name: str
    version: int
    settings: dict[str, SettingValue]


class JobRemoved(Fact, frozen=True):
    """A job was removed."""

    name: str


class NoteAdded(Fact, frozen=True):
    """A caller has added a note to the job's history."""

    text: str


class CreateJob(Request[Job], frozen=True):
    """Create a job. One that exists with these settings, or had them before a change, is returned as it is."""

    needs: ClassVar[Role] = Role.WORKER

    job: str
    settings: dict[str, SettingValue] = msgspec.field(default_factory=dict)


class ChangeJob(Request[Job], frozen=True):
    """Replace a job's settings, if it is still at the version that the caller has read."""

    job: str
    settings: dict[str, SettingValue]
    version: int


class ShowJob(Request[Job], frozen=True):
    """Show one job."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False

    job: str


class JobPage(msgspec.Struct, frozen=True):
    """Some jobs; `more` says that further ones follow."""

    jobs: list[Job]
    more: bool


class ListJobs(Request[JobPage], frozen=True):
    """List the jobs that the caller may see by name, after the name `after`: at most `limit`, and no more than fit."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = ANY_JOB

    after: str = ""
    limit: int = PAGE_ENTRIES_MAX


class RemoveJob(Request[Nothing], frozen=True):
    """Remove a job. An unknown job is no error; a job with workers is refused without `force`."""

    job: str
    force: bool = False


class AddNote(Request[Nothing], frozen=True):
    """Add a note to a job's history."""

    needs: ClassVar[Role] = Role.WORKER

    job: str
    text: str


REQUESTS = (CreateJob, ChangeJob, ShowJob, ListJobs, RemoveJob, AddNote)
