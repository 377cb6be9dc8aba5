"""The issued tokens: creation, verification, revocation.

Invariants:
- A token's text is never stored, only its digest.
- Only the exact text authenticates: the digest covers all of it.
- A caller without the text cannot learn, by message or by timing, whether an id exists, has expired or was revoked.
- At most `dead_max` revoked and expired tokens are kept.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import math
import re
from collections.abc import Collection, Iterable, Iterator
from heapq import nsmallest
from operator import attrgetter

import msgspec

from forged.auth.model import Principal, Role, Token
from forged.errors import ForgedError, Problem, RequestRefused, Unavailable
from forged.pagination import ascending

TOKENS_MAX = 4096
DEAD_MAX = 1024
"""The maximum number of revoked and expired tokens that are kept."""
FORGOTTEN_MAX = 32
"""The maximum number of them that are deleted in one transaction."""
NAME_CHARS_MAX = 64
JOBS_PER_TOKEN_MAX = 256
JOB_CHARS_MAX = 128
SECRET_BYTES_MIN = 32
SECRET_BYTES_MAX = 64

PREFIX = "forged_"
TOKEN_ID_CHARS = 12
TEXT_CHARS_MAX = len(PREFIX) + TOKEN_ID_CHARS + len("_") + math.ceil(SECRET_BYTES_MAX * 4 / 3)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]*")
_NO_DIGEST = bytes(hashlib.sha256().digest_size)


class TokenRegistry:
    """All tokens of a daemon, by id."""

    def __init__(self, tokens_max: int = TOKENS_MAX, dead_max: int = DEAD_MAX) -> None:
        self.tokens_max = tokens_max
        self.dead_max = dead_max
        self._tokens: dict[str, Token] = {}

    def load(self, tokens: Iterable[Token]) -> None:
        """Replace the tokens with those of the store."""
        self._tokens = {token.token_id: token for token in tokens}

    def get(self, token_id: str) -> Token:
        """The token with that id; raises `RequestRefused` if there is none."""
        token = self._tokens.get(token_id)
        if token is None:
            shown = token_id[:TOKEN_ID_CHARS]
            raise RequestRefused("token_not_found", f"there is no token {shown!r}", "see `forgectl tokens`")
        return token

    def after(self, token_id: str) -> Iterator[Token]:
        """The tokens with greater ids, in id order, including revoked and expired ones."""
        return (self._tokens[following] for following in ascending(self._tokens, token_id))

    def put(self, token: Token) -> None:
        """Add or replace a token."""
        self._tokens[token.token_id] = token

    def forget(self, token_ids: Iterable[str]) -> None:
        """Delete these tokens."""
        for token_id in token_ids:
            self._tokens.pop(token_id, None)

    def forget_dead(self, now: float) -> list[str]:
        """Delete the oldest revoked and expired tokens beyond `dead_max`; returns their ids."""
        dead = [token for token in self._tokens.values() if not token.live(now)]
        surplus = min(len(dead) - self.dead_max, FORGOTTEN_MAX)
        forgotten = [token.token_id for token in nsmallest(surplus, dead, key=attrgetter("ends_at", "token_id"))]
        self.forget(forgotten)
        return forgotten

    def issue(
        self,
        name: str,
        role: Role,
        jobs: Collection[str] | None,
        expires_at: float | None,
        now: float,
        secret: bytes,
    ) -> tuple[Token, str]:
        """Create a token; returns it and its text. `secret` must be 32 to 64 random bytes."""
        self._refuse_invalid(name, jobs, expires_at, now)
        self._refuse_full(now)
        token_id, text = encode_token(secret)
        if token_id in self._tokens:
            raise Unavailable("token_id_taken", f"token id {token_id} exists", "retry with another secret")
        token = Token(
            token_id=token_id,
            name=name,
            role=role,
            jobs=None if jobs is None else tuple(sorted(set(jobs))),
            created_at=now,
            expires_at=expires_at,
            digest=_digest(text),
        )
        self.put(token)
        return token, text

    def authenticate(self, text: str, now: float) -> Principal:
        """The principal of a token's text; the reason of a refusal is given only for the complete text."""
        # Every issued text is ASCII and short. Other texts are replaced by the empty text, which takes the same path as
        # a wrong token without hashing a large input.
        candidate = text if len(text) <= TEXT_CHARS_MAX and text.isascii() else ""
        token = self._tokens.get(candidate[len(PREFIX) : len(PREFIX) + TOKEN_ID_CHARS])
        # An unknown id is compared too, so that it takes the same time as a wrong secret.
        expected = _NO_DIGEST if token is None else token.digest
        matches = hmac.compare_digest(expected, _digest(candidate))
        if token is None or not matches:
            raise RequestRefused(
                "token_unknown",
                "the token is unknown to this daemon",
                "check that it was copied completely and belongs to this daemon, or ask an operator for a new one",
            )
        _refuse_dead(token, now)
        return token.principal

    def revoke(self, token_id: str, now: float) -> Token:
        """Revoke a token; revoking it again changes nothing."""
        token = self.get(token_id)
        if token.revoked_at is None:
            token = msgspec.structs.replace(token, revoked_at=now)
            self.put(token)
        return token

    def _refuse_full(self, now: float) -> None:
        # Only live tokens count, so that revoking makes room.
        live = sum(token.live(now) for token in self._tokens.values())
        if live >= self.tokens_max:
            raise RequestRefused(
                "tokens_full",
                f"there are {live} live tokens; tokens_max is {self.tokens_max}",
                "list tokens with `forgectl tokens`, and revoke unused ones: `forgectl tokens revoke ID`",
            )

    @staticmethod
    def _refuse_invalid(name: str, jobs: Collection[str] | None, expires_at: float | None, now: float) -> None:
        problems = [*_name_problems(name), *_jobs_problems(jobs), *_expiry_problems(expires_at, now)]
        if problems:
            raise RequestRefused("token_invalid", "; ".join(map(str, problems)), "correct the request")


def _name_problems(name: str) -> Iterator[Problem]:
    if len(name) > NAME_CHARS_MAX or not _NAME.fullmatch(name):
        wanted = f"1 to {NAME_CHARS_MAX} letters, digits and . _ @ -, a letter or digit first"
        yield Problem("name", name[: NAME_CHARS_MAX + 1], wanted)


def _jobs_problems(jobs: Collection[str] | None) -> Iterator[Problem]:
    if jobs is None:
        return
    # An empty list is more likely meant as "all jobs" than as "no rights".
    if not 1 <= len(jobs) <= JOBS_PER_TOKEN_MAX:
        yield Problem("jobs", len(jobs), f"1 to {JOBS_PER_TOKEN_MAX} jobs, or none given for all jobs")
        return
    for index, job in enumerate(jobs):
        if not 1 <= len(job) <= JOB_CHARS_MAX:
            yield Problem(f"jobs[{index}]", job[: JOB_CHARS_MAX + 1], f"a name of 1 to {JOB_CHARS_MAX} characters")


def _expiry_problems(expires_at: float | None, now: float) -> Iterator[Problem]:
    if expires_at is not None and not now < expires_at < math.inf:
        yield Problem("expires_at", expires_at, f"a time after now, which is {now}")


def encode_token(secret: bytes) -> tuple[str, str]:
    """The public id and the text of the token with this secret.

    The client that draws the secret computes the text itself, so the daemon never sends, remembers or journals it.
    """
    if not SECRET_BYTES_MIN <= len(secret) <= SECRET_BYTES_MAX:
        raise ForgedError(
            "token_secret_size",
            f"secret must have {SECRET_BYTES_MIN}..{SECRET_BYTES_MAX} bytes, got {len(secret)}",
            "report this bug",
        )
    # The id is derived from the secret with a separate hash prefix; 48 bits of a hash reveal nothing about 256 random
    # bits.
    token_id = hashlib.sha256(b"forged token id\0" + secret).hexdigest()[:TOKEN_ID_CHARS]
    encoded = base64.urlsafe_b64encode(secret).rstrip(b"=").decode()
    return token_id, f"{PREFIX}{token_id}_{encoded}"


def _digest(text: str) -> bytes:
    """The stored digest of a token's text.

    SHA-256 instead of a password hash: the secret has 256 random bits and cannot be guessed, and a slow hash would let
    unauthenticated peers use up the daemon's CPU. The text is hashed, not the decoded secret, because several base64
    texts decode to the same bytes.
    """
    return hashlib.sha256(text.encode("ascii")).digest()


def _refuse_dead(token: Token, now: float) -> None:
    fix = "ask an operator for a new one"
    if token.revoked_at is not None:
        raise RequestRefused("token_revoked", f"token {token.token_id} ({token.name}) was revoked", fix)
    if token.expired(now):
        raise RequestRefused("token_expired", f"token {token.token_id} ({token.name}) has expired", fix)
