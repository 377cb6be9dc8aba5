"""What the daemon tells about itself."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from forged.auth.model import Role
from forged.kernel.messages import ANY_JOB, Fact, Nothing, Request, Ticket


class DaemonStarted(Fact, frozen=True):
    """A daemon has taken over the data directory."""

    version: str
    pid: int
    term: int


class DaemonStopping(Fact, frozen=True):
    """A daemon lets go of the data directory in good order."""

    pid: int
    reason: str


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon in one look. `trouble` says why it cannot write now; None while all is well."""

    version: str
    pid: int
    uptime_s: float
    listen: list[str]
    http: str | None
    socket: str | None
    data_dir: str
    jobs: int
    workers: int
    plugins: list[str]
    connections: int
    facts: int
    last_fact: int
    revision: int
    term: int
    history: str
    decisions: int
    batches: int
    trouble: str | None


class HandlerView(msgspec.Struct, frozen=True, kw_only=True):
    """One handler of facts, signals or a request, in numbers; durations are upper bounds of doubling buckets."""

    name: str
    kind: str
    messages: list[str]
    queued: int
    handled: int
    failed: int
    dropped: int
    quarantined: bool
    p50_s: float
    p99_s: float


class PingDaemon(Request[Nothing], frozen=True):
    """Answer, to show that the bus is alive."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = ANY_JOB


class ReadStatus(Request[Status], frozen=True):
    """How the daemon is."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = ANY_JOB


class TellStory(Request[list[msgspec.Raw]], frozen=True):
    """The record of a fact, between the chain of its causes and all that followed from it."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = ANY_JOB

    fact_id: int


class ListHandlers(Request[list[HandlerView]], frozen=True):
    """Every handler on the bus."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = ANY_JOB


class ReadmitHandler(Request[Nothing], frozen=True):
    """Give a quarantined handler facts again."""

    job_field: ClassVar[str | None] = None

    handler: str


class BackUp(Request[Ticket], frozen=True):
    """Make a consistent copy of all state; the ticket is for fetching it, as a database file, on a side connection."""

    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = None


REQUESTS = (PingDaemon, ReadStatus, TellStory, ListHandlers, ReadmitHandler, BackUp)
