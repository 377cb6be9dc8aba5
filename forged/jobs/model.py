"""A job, and what is said of one."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from forged.auth.model import Role
from forged.kernel.messages import ANY_JOB, Fact, Fence, Nothing, Request
from forged.pagination import PAGE_ENTRIES_MAX

SettingValue = str | int | float | bool | None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One training job. `version` grows with every change; `fence` is where its generations are counted from.

    A new job begins with the term in which it was created, above all that jobs removed before have reached.
    """

    name: str
    settings: dict[str, SettingValue]
    version: int = 1
    created_at: float
    created_by: str
    fence: Fence = Fence(0, 0)
    created_with: dict[str, SettingValue] | None = None
    """The settings that it had at first; None where they are the present ones. Who asks for them is not refused: what
    has changed them since holds for that one, too."""


class JobCreated(Fact, frozen=True):
    """A job is served from now on."""

    name: str
    settings: dict[str, SettingValue]


class JobChanged(Fact, frozen=True):
    """A job has other settings now."""

    name: str
    version: int
    settings: dict[str, SettingValue]


class JobRemoved(Fact, frozen=True):
    """A job is no longer served."""

    name: str


class NoteAdded(Fact, frozen=True):
    """Somebody put a remark on the record: what they did, saw or are about to do."""

    text: str


class CreateJob(Request[Job], frozen=True):
    """Serve a job. One that exists with these settings, or had them before it was changed, is returned as it is."""

    needs: ClassVar[Role] = Role.WORKER

    job: str
    settings: dict[str, SettingValue] = msgspec.field(default_factory=dict)


class ChangeJob(Request[Job], frozen=True):
    """Replace a job's settings, if it is still at the version that the caller saw."""

    job: str
    settings: dict[str, SettingValue]
    version: int


class ShowJob(Request[Job], frozen=True):
    """One job."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False

    job: str


class JobPage(msgspec.Struct, frozen=True):
    """Some jobs; `more` tells that there are others behind the last of them."""

    jobs: list[Job]
    more: bool


class ListJobs(Request[JobPage], frozen=True):
    """The jobs that the caller may see, by name, behind the name `after`: `limit` at most, and no more than fit."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = ANY_JOB

    after: str = ""
    limit: int = PAGE_ENTRIES_MAX


class RemoveJob(Request[Nothing], frozen=True):
    """Serve a job no longer. One that does not exist is no error; one that has workers is refused without `force`."""

    job: str
    force: bool = False


class AddNote(Request[Nothing], frozen=True):
    """Put a remark on a job's record."""

    needs: ClassVar[Role] = Role.WORKER

    job: str
    text: str


REQUESTS = (CreateJob, ChangeJob, ShowJob, ListJobs, RemoveJob, AddNote)
