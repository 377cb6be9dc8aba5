"""What is said of tokens."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from forged.auth.model import Role
from forged.kernel.messages import Fact, Request
from forged.pagination import PAGE_ENTRIES_MAX


class TokenView(msgspec.Struct, frozen=True):
    """A token as it is shown: all but what would let somebody use it."""

    token_id: str
    name: str
    role: Role
    jobs: tuple[str, ...] | None
    created_at: float
    expires_at: float | None
    revoked_at: float | None


class TokenCreated(Fact, frozen=True):
    """A token is accepted from now on."""

    token_id: str
    name: str
    role: Role
    jobs: tuple[str, ...] | None


class TokenRevoked(Fact, frozen=True):
    """A token is no longer accepted, and the connections that came with it are closed."""

    token_id: str
    name: str


class CreateToken(Request[TokenView], frozen=True):
    """Accept a token. The caller draws the secret, 32 random bytes or more, and so knows the text without being told.

    `ttl_s` is how long it lives; None for ever.
    """

    job_field: ClassVar[str | None] = None

    name: str
    role: Role
    secret: bytes
    jobs: tuple[str, ...] | None = None
    ttl_s: float | None = None


class TokenPage(msgspec.Struct, frozen=True):
    """Some tokens; `more` tells that there are others behind the last of them."""

    tokens: list[TokenView]
    more: bool


class ListTokens(Request[TokenPage], frozen=True):
    """The tokens, by id, behind the id `after`: `limit` at most, and no more than fit.

    Those that were revoked or have expired are included, until there are so many that the oldest are let go of.
    """

    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = None

    after: str = ""
    limit: int = PAGE_ENTRIES_MAX


class RevokeToken(Request[TokenView], frozen=True):
    """Accept a token no more. One that was revoked before stays as it was."""

    job_field: ClassVar[str | None] = None

    token_id: str


REQUESTS = (CreateToken, ListTokens, RevokeToken)
