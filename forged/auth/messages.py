"""Requests and facts about tokens."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from forged.auth.model import Role
from forged.kernel.messages import Fact, Request
from forged.pagination import PAGE_ENTRIES_MAX


class TokenView(msgspec.Struct, frozen=True):
    """A token without its secret or digest."""

    token_id: str
    name: str
    role: Role
    jobs: tuple[str, ...] | None
    created_at: float
    expires_at: float | None
    revoked_at: float | None


class TokenCreated(Fact, frozen=True):
    """A token was created and is accepted."""

    token_id: str
    name: str
    role: Role
    jobs: tuple[str, ...] | None


class TokenRevoked(Fact, frozen=True):
    """A token was revoked; its connections are closed."""

    token_id: str
    name: str


class CreateToken(Request[TokenView], frozen=True):
    """Create a token. The caller draws the secret (32 to 64 random bytes) and computes the token's text from it.

    `ttl_s` is its lifetime in seconds; None means unlimited.
    """

    job_field: ClassVar[str | None] = None

    name: str
    role: Role
    secret: bytes
    jobs: tuple[str, ...] | None = None
    ttl_s: float | None = None


class TokenPage(msgspec.Struct, frozen=True):
    """A page of tokens; `more` is true if further tokens follow."""

    tokens: list[TokenView]
    more: bool


class ListTokens(Request[TokenPage], frozen=True):
    """List tokens in id order after the id `after`, at most `limit` and at most one page.

    Revoked and expired tokens are included; the oldest of them are deleted beyond a limit.
    """

    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = None

    after: str = ""
    limit: int = PAGE_ENTRIES_MAX


class RevokeToken(Request[TokenView], frozen=True):
    """Revoke a token; revoking it again changes nothing."""

    job_field: ClassVar[str | None] = None

    token_id: str


REQUESTS = (CreateToken, ListTokens, RevokeToken)
