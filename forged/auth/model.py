"""Roles, principals and tokens.

Invariants:
- A right is a role and a set of jobs; both are checked together.
- A principal with a list of jobs has no rights on the daemon as a whole, not even as operator: otherwise the operator
  of one job could create a token for all jobs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from forged.shares import Holder


class Role(StrEnum):
    """What a principal may do within its jobs."""

    VIEWER = "viewer"
    """May read."""
    WORKER = "worker"
    """May read and do what workers do: register, write notes, create its own job."""
    OPERATOR = "operator"
    """May do everything."""

    def covers(self, needed: Role) -> bool:
        """Whether this role includes the role `needed`."""
        return needed in COVERED[self]


COVERED: Mapping[Role, frozenset[Role]] = {
    Role.VIEWER: frozenset({Role.VIEWER}),
    Role.WORKER: frozenset({Role.VIEWER, Role.WORKER}),
    Role.OPERATOR: frozenset({Role.VIEWER, Role.WORKER, Role.OPERATOR}),
}


class Principal(msgspec.Struct, frozen=True):
    """An identity with its role; `jobs` None means all present and future jobs.

    Names with a colon (`unix:0`, `certificate:host-a`) are made by the daemon; token names cannot contain one.
    """

    name: str
    role: Role
    jobs: frozenset[str] | None = None

    def may(self, role_needed: Role, job: str | None) -> bool:
        """Whether this principal has the role for the job; None means the whole daemon."""
        return self.role.covers(role_needed) and (self.jobs is None or job in self.jobs)

    @property
    def holder(self) -> Holder:
        """Whose share of the daemon's resources this principal uses; principals of the same jobs share one."""
        group = self.name if not self.jobs else f"job {', '.join(sorted(self.jobs))}"
        return Holder(group, self.name, is_operator=self.may(Role.OPERATOR, None))


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """A stored token: its digest verifies the token's text, which cannot be recovered from it."""

    token_id: str
    name: str
    role: Role
    jobs: tuple[str, ...] | None
    created_at: float
    expires_at: float | None = None
    """The first moment at which the token is not accepted."""
    revoked_at: float | None = None
    digest: bytes

    @property
    def principal(self) -> Principal:
        """The principal of this token."""
        return Principal(self.name, self.role, None if self.jobs is None else frozenset(self.jobs))

    def expired(self, now: float) -> bool:
        """Whether the token has expired."""
        return self.expires_at is not None and now >= self.expires_at

    def live(self, now: float) -> bool:
        """Whether the token is accepted."""
        return self.revoked_at is None and not self.expired(now)

    @property
    def ends_at(self) -> float:
        """When the token was revoked or expires, whichever is earlier."""
        return min(math.inf if end is None else end for end in (self.revoked_at, self.expires_at))
