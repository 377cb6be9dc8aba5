"""Which jobs there are, decided without I/O.

Law: a job is its name; whoever creates one again gets the one that exists, and is refused when they meant another. A
refusal changes nothing. Every change of state is in the decision's writes, and nowhere else. A job that is created
again is another job: it begins above the fence of the one that was removed, so who held that one is fenced off.
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

PREFIX = "job/"
FLOOR_KEY = "jobs/floor"
JOBS_MAX = 10_000
SETTINGS_BYTES_MAX = 64 << 10
NOTE_CHARS_MAX = 4096

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Job).decode
_decode_fence = msgspec.msgpack.Decoder(Fence).decode


class JobBook:
    """All jobs of a daemon, by name."""

    def __init__(self, jobs_max: int = JOBS_MAX) -> None:
        self.jobs_max = jobs_max
        self._jobs: dict[str, Job] = {}
        self._floor = Fence(0, 0)
        """No new job begins below: it lies above all that were removed."""

    def __len__(self) -> int:
        return len(self._jobs)

    def load(self, values: Iterable[bytes], floor: bytes | None) -> None:
        """Become what the store holds."""
        self._floor = Fence(0, 0) if floor is None else _decode_fence(floor)
        jobs = (_decode(value) for value in values)
        self._jobs = {job.name: job for job in jobs}

    def create(self, request: CreateJob, by: str, now: float, term: int) -> Decision[Job]:
        """A new job, or the one that exists; `term` is the present leader's."""
        name = check_name("job", request.job)
        _check_settings(request.settings)
        known = self._jobs.get(name)
        if known is not None:
            return _same_or_refused(known, request.settings)
        if len(self._jobs) >= self.jobs_max:
            raise RequestRefused("jobs_full", f"there are {len(self._jobs)} jobs already", "remove those that are done")
        fence = max(self._floor, Fence(term, 0))
        job = Job(name=name, settings=request.settings, created_at=now, created_by=by, fence=fence)
        return self._put(job, JobCreated(name, job.settings))

    def change(self, request: ChangeJob) -> Decision[Job]:
        """The job with other settings."""
        job = self.get(request.job)
        _check_settings(request.settings)
        if job.version != request.version:
            raise RequestRefused(
                "job_changed",
                f"job {job.name} is at version {job.version}, not {request.version}: somebody changed it in between",
                "look at it again (`forgectl jobs show`) and repeat the change",
            )
        first = job.settings if job.created_with is None else job.created_with
        job = msgspec.structs.replace(job, settings=request.settings, version=job.version + 1, created_with=first)
        return self._put(job, JobChanged(job.name, job.version, job.settings))

    def remove(self, request: RemoveJob, generation: int = 0) -> Decision[Nothing]:
        """The job is gone, after so many rescales."""
        job = self._jobs.pop(request.job, None)
        if job is None:
            return Decision(Nothing())
        writes: dict[str, bytes | None] = {PREFIX + job.name: None}
        above = Fence(job.fence.term, job.fence.generation + generation + 1)
        if above > self._floor:
            self._floor = above
            writes[FLOOR_KEY] = _encode(above)
        return Decision(Nothing(), (JobRemoved(job.name),), writes, job=job.name)

    def note(self, request: AddNote) -> Decision[Nothing]:
        """A remark on an existing job's record."""
        job = self.get(request.job)
        if not 0 < len(request.text) <= NOTE_CHARS_MAX:
            wanted = f"write 1 to {NOTE_CHARS_MAX} characters"
            raise RequestRefused("note_invalid", f"text has {len(request.text)} characters", wanted)
        return Decision(Nothing(), (NoteAdded(request.text),), job=job.name, generation=job.fence.generation)

    def get(self, name: str) -> Job:
        """The job of that name, or a refusal."""
        job = self._jobs.get(name)
        if job is None:
            raise RequestRefused(
                "job_unknown", f"there is no job {name[:80]!r}", "create it: `forgectl jobs create NAME`"
            )
        return job

    def visible(self, principal: Principal, after: str) -> Iterator[Job]:
        """The jobs that somebody may see, by name, behind the name `after`."""
        names = (name for name in self._jobs if principal.may(Role.VIEWER, name))
        return (self._jobs[name] for name in ascending(names, after))

    def fence(self, name: str) -> Fence | None:
        """How far the job is; None for a job that does not exist."""
        job = self._jobs.get(name)
        return None if job is None else job.fence

    def _put(self, job: Job, fact: Fact) -> Decision[Job]:
        self._jobs[job.name] = job
        return Decision(job, (fact,), {PREFIX + job.name: _encode(job)}, job.name, job.fence.generation)


def _same_or_refused(job: Job, settings: dict[str, SettingValue]) -> Decision[Job]:
    different = _different(job.settings, settings) if settings else []
    # A script that has created the job says the same when it is started again, whatever was changed since.
    if different and (job.created_with is None or _different(job.created_with, settings)):
        raise RequestRefused(
            "job_differs",
            f"job {job.name} exists with other settings: {', '.join(different)[:500]}",
            "leave the settings out to use it as it is, change it, or take another name",
        )
    return Decision(job)


def _different(settings: Mapping[str, SettingValue], others: Mapping[str, SettingValue]) -> list[str]:
    """The keys whose values differ as they are stored; to Python, 1 and True would be the same."""
    stored, wanted = ({key: _encode(value) for key, value in one.items()} for one in (settings, others))
    return [key for key in sorted(stored.keys() | wanted.keys()) if stored.get(key) != wanted.get(key)]


def _check_settings(settings: dict[str, SettingValue]) -> None:
    for key, value in settings.items():
        if isinstance(value, float) and not isfinite(value):
            text = f"setting {key[:80]!r} is {value}, which JSON cannot say"
            raise RequestRefused("setting_invalid", text, "give a finite number, a text or none")
    size = len(_encode(settings))
    if size > SETTINGS_BYTES_MAX:
        raise RequestRefused(
            "settings_too_large", f"settings have {size} bytes, over {SETTINGS_BYTES_MAX}", "keep large values in files"
        )
