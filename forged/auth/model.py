"""Roles, principals and tokens.

Law: a right is a role × a set of jobs, and both are checked together. Whoever is bound to jobs has no say about the
daemon as a whole, whatever the role: otherwise the operator of one job could issue a token for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum

import msgspec


class Role(StrEnum):
    """What somebody may do within their jobs."""

    VIEWER = "viewer"
    """Reads."""
    WORKER = "worker"
    """Reads, and does what a worker does: registers, sends notes, looks after its own job."""
    OPERATOR = "operator"
    """Everything."""

    def covers(self, needed: Role) -> bool:
        """Whether this role may do what asks for the role `needed`."""
        return needed in COVERED[self]


COVERED: Mapping[Role, frozenset[Role]] = {
    Role.VIEWER: frozenset({Role.VIEWER}),
    Role.WORKER: frozenset({Role.VIEWER, Role.WORKER}),
    Role.OPERATOR: frozenset({Role.VIEWER, Role.WORKER, Role.OPERATOR}),
}


class Principal(msgspec.Struct, frozen=True):
    """Somebody identified: `jobs` is None for all jobs, those of the future included.

    A name with a colon (`unix:0`, `certificate:host-a`) was given by the daemon; a token's name cannot contain one.
    """

    name: str
    role: Role
    jobs: frozenset[str] | None = None

    def may(self, role_needed: Role, job: str | None) -> bool:
        """Whether this principal may do what needs that role in that job; None is the daemon as a whole."""
        return self.role.covers(role_needed) and (self.jobs is None or job in self.jobs)


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """A token as it is stored: enough to recognise the text that was handed out, not enough to write it again."""

    token_id: str
    name: str
    role: Role
    jobs: tuple[str, ...] | None
    created_at: float
    expires_at: float | None = None
    """The first moment at which it is no longer accepted."""
    revoked_at: float | None = None
    digest: bytes

    @property
    def principal(self) -> Principal:
        """Who presents this token."""
        return Principal(self.name, self.role, None if self.jobs is None else frozenset(self.jobs))

    def expired(self, now: float) -> bool:
        """Whether its time is over."""
        return self.expires_at is not None and now >= self.expires_at

    def live(self, now: float) -> bool:
        """Whether it is accepted."""
        return self.revoked_at is None and not self.expired(now)

    @property
    def ends_at(self) -> float:
        """From when on it is not accepted any more, as far as that is known."""
        return min(math.inf if end is None else end for end in (self.revoked_at, self.expires_at))
