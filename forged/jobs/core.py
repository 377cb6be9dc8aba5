"""All jobs of a daemon: create, change, remove; decided without I/O.

Invariants:
- A job is identified by its name. Creating an existing job returns it, or is refused if the settings differ.
- A refusal changes nothing; every change of state is in the decision's writes.
- A job that is created again after its removal starts above the removed job's fence, so old workers are fenced off.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import isfinite

import msgspec

from forged.auth.model import Principal, Role
from forged.errors import RequestRefused
from forged.ids import check_name
from forged.jobs.model import (
    AddNote,
    ChangeJob,
    CreateJob,
    Job,
    JobChanged,
    JobCreated,
    JobRemoved,
    NoteAdded,
    RemoveJob,
    SettingValue,
)
from forged.kernel.messages import Decision, Fact, Fence, Nothing
from forged.pagination import ascending
from forged.shares import Holder, Shares

PREFIX = "job/"
FLOOR_KEY = "jobs/floor"
JOBS_MAX = 10_000
PARTS = 16
"""One part of the jobs is left to operators, and four to principals other than the largest."""
SETTINGS_BYTES_MAX = 64 << 10
NOTE_CHARS_MAX = 4096

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Job).decode
_decode_fence = msgspec.msgpack.Decoder(Fence).decode


class JobBook:
    """All jobs of a daemon, by name."""

    def __init__(self, jobs_max: int = JOBS_MAX) -> None:
        self._jobs: dict[str, Job] = {}
        part = jobs_max // PARTS
        self._shares = Shares("jobs", jobs_max, part, jobs_max - 4 * part)
        self._floor = Fence(0, 0)
        """Above the fences of all removed jobs; new jobs start here."""

    def __len__(self) -> int:
        return len(self._jobs)

    def load(self, values: Iterable[bytes], floor: bytes | None) -> None:
        """Replace all jobs by those in the store."""
        self._floor = Fence(0, 0) if floor is None else _decode_fence(floor)
        jobs = (_decode(value) for value in values)
        for job in self._jobs.values():
            self._shares.give_back(_creator(job.created_by))
        self._jobs = {job.name: job for job in jobs}
        for job in self._jobs.values():
            self._shares.charge(_creator(job.created_by), 1)

    def create(self, request: CreateJob, by: str, now: float, term: int, *, is_operator: bool = False) -> Decision[Job]:
        """A new job, or the existing one; `term` is the daemon's. Some jobs are left to operators."""
        name = check_name("job", request.job)
        _check_settings(request.settings)
        known = self._jobs.get(name)
        if known is not None:
            return _same_or_refused(known, request.settings)
        if not self._shares.fits(Holder(by, by, is_operator)):
            raise RequestRefused("jobs_full", self._shares.shortage(_creator(by)), "remove jobs that are over")
        self._shares.charge(_creator(by), 1)
        fence = max(self._floor, Fence(term, 0))
        job = Job(name=name, settings=request.settings, created_at=now, created_by=by, fence=fence)
        return self._put(job, JobCreated(name, job.settings))

    def change(self, request: ChangeJob) -> Decision[Job]:
        """Replace the job's settings."""
        job = self.get(request.job)
        _check_settings(request.settings)
        if job.version != request.version:
            raise RequestRefused(
                "job_changed",
                f"job {job.name} is at version {job.version}, not {request.version}: it was changed meanwhile",
                "read it again (`forgectl jobs show`) and repeat the change",
            )
        first = job.settings if job.created_with is None else job.created_with
        job = msgspec.structs.replace(job, settings=request.settings, version=job.version + 1, created_with=first)
        return self._put(job, JobChanged(job.name, job.version, job.settings))

    def remove(self, request: RemoveJob, generation: int = 0) -> Decision[Nothing]:
        """Remove the job, whose generation is given."""
        job = self._jobs.pop(request.job, None)
        if job is None:
            return Decision(Nothing())
        self._shares.give_back(_creator(job.created_by))
        writes: dict[str, bytes | None] = {PREFIX + job.name: None}
        above = Fence(job.fence.term, job.fence.generation + generation + 1)
        if above > self._floor:
            self._floor = above
            writes[FLOOR_KEY] = _encode(above)
        return Decision(Nothing(), (JobRemoved(job.name),), writes, job=job.name)

    def note(self, request: AddNote) -> Decision[Nothing]:
        """Add a note to a job's history."""
        job = self.get(request.job)
        if not 0 < len(request.text) <= NOTE_CHARS_MAX:
            text = f"text must have 1 to {NOTE_CHARS_MAX} characters, got {len(request.text)}"
            raise RequestRefused("note_invalid", text, "shorten the note")
        return Decision(Nothing(), (NoteAdded(request.text),), job=job.name, generation=job.fence.generation)

    def get(self, name: str) -> Job:
        """The job of that name, or a refusal."""
        job = self._jobs.get(name)
        if job is None:
            raise RequestRefused(
                "job_unknown",
                f"there is no job {name[:80]!r}",
                "list jobs with `forgectl jobs`, or create it with `forgectl jobs create NAME`",
            )
        return job

    def visible(self, principal: Principal, after: str) -> Iterator[Job]:
        """The jobs that the principal may see, by name, after the name `after`."""
        names = (name for name in self._jobs if principal.may(Role.VIEWER, name))
        return (self._jobs[name] for name in ascending(names, after))

    def fence(self, name: str) -> Fence | None:
        """The fence from which the job's generations are counted; None for an unknown job."""
        job = self._jobs.get(name)
        return None if job is None else job.fence

    def settings(self, name: str) -> Mapping[str, SettingValue] | None:
        """A job's settings; None for an unknown job."""
        job = self._jobs.get(name)
        return None if job is None else job.settings

    def _put(self, job: Job, fact: Fact) -> Decision[Job]:
        self._jobs[job.name] = job
        return Decision(job, (fact,), {PREFIX + job.name: _encode(job)}, job.name, job.fence.generation)


def _creator(name: str) -> Holder:
    """The holder of a job; whether it was an operator is not stored."""
    return Holder(name, name)


def _same_or_refused(job: Job, settings: dict[str, SettingValue]) -> Decision[Job]:
    different = _different(job.settings, settings) if settings else []
    # A script that created the job brings the same settings when it restarts, also after an operator changed them.
    if different and (job.created_with is None or _different(job.created_with, settings)):
        raise RequestRefused(
            "job_differs",
            f"job {job.name} exists with other settings: {', '.join(different)[:500]}",
            "omit the settings to use the job as it is, change it, or use another name",
        )
    return Decision(job)


def _different(settings: Mapping[str, SettingValue], others: Mapping[str, SettingValue]) -> list[str]:
    """The keys whose stored values differ; compared as encoded, because 1 == True in Python."""
    stored, wanted = ({key: _encode(value) for key, value in one.items()} for one in (settings, others))
    return [key for key in sorted(stored.keys() | wanted.keys()) if stored.get(key) != wanted.get(key)]


def _check_settings(settings: dict[str, SettingValue]) -> None:
    for key, value in settings.items():
        if isinstance(value, float) and not isfinite(value):
            text = f"setting {key[:80]!r} must be finite, got {value}"
            raise RequestRefused("setting_invalid", text, "give a finite number, a text or none")
    size = len(_encode(settings))
    if size > SETTINGS_BYTES_MAX:
        raise RequestRefused(
            "settings_too_large",
            f"settings must have at most {SETTINGS_BYTES_MAX} bytes, got {size}",
            "keep large values in files",
        )
