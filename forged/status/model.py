"""Requests and facts about the daemon itself."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from forged.auth.model import Role
from forged.kernel.messages import ANY_JOB, Fact, Nothing, Request, Ticket


class DaemonStarted(Fact, frozen=True):
    """A daemon has started on this data directory."""

    version: str
    pid: int
    term: int


class DaemonStopping(Fact, frozen=True):
    """A daemon stops in an orderly way."""

    pid: int
    reason: str


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon's status. `write_error` is the reason why it refuses decisions now; None if it accepts them."""

    version: str
    pid: int
    uptime_s: float
    listen: list[str]
    http: str | None
    socket: str | None
    data_dir: str
    jobs: int
    workers: int
    checkpoints: int
    plugins: list[str]
    connections: int
    facts: int
    last_fact: int
    revision: int
    term: int
    history: str
    decisions: int
    batches: int
    write_error: str | None


class HandlerView(msgspec.Struct, frozen=True, kw_only=True):
    """The statistics of one handler; durations are upper bounds of buckets that double."""

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
    """Return an empty reply, which shows that the bus works."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = ANY_JOB


class ReadStatus(Request[Status], frozen=True):
    """Read the daemon's status."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = ANY_JOB


class TellStory(Request[list[msgspec.Raw]], frozen=True):
    """Return a fact with its chain of causes and its consequences."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = ANY_JOB

    fact_id: int


class ListHandlers(Request[list[HandlerView]], frozen=True):
    """List the handlers on the bus."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = ANY_JOB


class ReadmitHandler(Request[Nothing], frozen=True):
    """Re-enable a quarantined handler."""

    job_field: ClassVar[str | None] = None

    handler: str


class BackUp(Request[Ticket], frozen=True):
    """Make a consistent copy of the store; the reply is a ticket to fetch it as a database file."""

    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = None


REQUESTS = (PingDaemon, ReadStatus, TellStory, ListHandlers, ReadmitHandler, BackUp)
