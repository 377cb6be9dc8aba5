"""The tokens that were issued.

Law: the text of a token is told once, when it is issued, and kept nowhere; only its digest is. Exactly the text that
was issued authenticates: the digest covers all of it, so no second spelling of an id or a secret stands for the
first. Somebody without the text learns nothing here, by message or by timing: not whether an id exists, nor whether
it expired or was revoked. Of the tokens that are dead only so many are kept, for people to look at.
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
"""How many tokens are kept that were revoked or have expired."""
FORGOTTEN_MAX = 32
"""How many of those beyond that are let go of at once: each is a delete in a transaction."""
NAME_CHARS_MAX = 64
JOBS_PER_TOKEN_MAX = 256
JOB_CHARS_MAX = 128
SECRET_BYTES_MIN = 32
SECRET_BYTES_MAX = 64

PREFIX = "forged_"
TOKEN_ID_CHARS = 12
TEXT_CHARS_MAX = len(PREFIX) + TOKEN_ID_CHARS + len("_") + math.ceil(SECRET_BYTES_MAX * 4 / 3)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]*")
_DIGEST_OF_NONE = bytes(hashlib.sha256().digest_size)


class TokenRegistry:
    """All tokens of a daemon, by id: a plain synchronous class with one owner."""

    def __init__(self, tokens_max: int = TOKENS_MAX, dead_max: int = DEAD_MAX) -> None:
        self.tokens_max = tokens_max
        self.dead_max = dead_max
        self._tokens: dict[str, Token] = {}

    def load(self, tokens: Iterable[Token]) -> None:
        """Forget what is here and take what the store holds."""
        self._tokens = {token.token_id: token for token in tokens}

    def get(self, token_id: str) -> Token:
        """The token of that id, or a refusal."""
        token = self._tokens.get(token_id)
        if token is None:
            shown = token_id[:TOKEN_ID_CHARS]
            raise RequestRefused("token_not_found", f"there is no token {shown!r}", "see `forgectl tokens list`")
        return token

    def behind(self, after: str) -> Iterator[Token]:
        """The tokens whose ids come behind `after`, by id, revoked and expired ones included."""
        return (self._tokens[token_id] for token_id in ascending(self._tokens, after))

    def put(self, token: Token) -> None:
        """Take over what another book has decided."""
        self._tokens[token.token_id] = token

    def forget(self, token_ids: Iterable[str]) -> None:
        """Let go of these tokens."""
        for token_id in token_ids:
            self._tokens.pop(token_id, None)

    def forget_dead(self, now: float) -> list[str]:
        """Let go of some of the dead, those that died first, as far as there are too many; returns their ids."""
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
        """Make a token and the text to hand out; `secret` is fresh randomness of 32 bytes or more."""
        self._refuse_invalid(name, jobs, expires_at, now)
        self._refuse_full(now)
        token_id, text = encode_token(secret)
        if token_id in self._tokens:
            raise Unavailable("token_id_taken", f"the token id {token_id} is taken", "send the request again")
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
        """Who presents this text; what is wrong with a token is told to those alone who have all of it."""
        # Every issued text is ASCII and short. Anything else becomes the empty text, which was never issued, so that
        # it takes the same path as a wrong one and a large one is not hashed.
        candidate = text if len(text) <= TEXT_CHARS_MAX and text.isascii() else ""
        token = self._tokens.get(candidate[len(PREFIX) : len(PREFIX) + TOKEN_ID_CHARS])
        # An unknown id is compared too, so that it takes as long as a wrong secret.
        expected = _DIGEST_OF_NONE if token is None else token.digest
        matches = hmac.compare_digest(expected, _digest(candidate))
        if token is None or not matches:
            raise RequestRefused(
                "token_unknown",
                "the token is not known here",
                "check that all of it was copied and that it belongs to this daemon, or ask an operator for a new one",
            )
        _refuse_dead(token, now)
        return token.principal

    def revoke(self, token_id: str, now: float) -> Token:
        """Accept the token no more; one that was revoked stays as it was."""
        token = self.get(token_id)
        if token.revoked_at is None:
            token = msgspec.structs.replace(token, revoked_at=now)
            self.put(token)
        return token

    def _refuse_full(self, now: float) -> None:
        # Only live tokens count: revoking must make room.
        live = sum(token.live(now) for token in self._tokens.values())
        if live >= self.tokens_max:
            raise RequestRefused(
                "tokens_full",
                f"there are {live} live tokens, and tokens_max is {self.tokens_max}",
                "revoke those no longer needed: `forgectl tokens list`, `forgectl tokens revoke ID`",
            )

    @staticmethod
    def _refuse_invalid(name: str, jobs: Collection[str] | None, expires_at: float | None, now: float) -> None:
        problems = [*_name_problems(name), *_jobs_problems(jobs), *_expiry_problems(expires_at, now)]
        if problems:
            raise RequestRefused("token_invalid", "; ".join(map(str, problems)), "mend these and send it again")


def _name_problems(name: str) -> Iterator[Problem]:
    if len(name) > NAME_CHARS_MAX or not _NAME.fullmatch(name):
        wanted = f"1 to {NAME_CHARS_MAX} letters, digits and . _ @ -, a letter or digit first"
        yield Problem("name", name[: NAME_CHARS_MAX + 1], wanted)


def _jobs_problems(jobs: Collection[str] | None) -> Iterator[Problem]:
    if jobs is None:
        return
    # An empty list is more likely a mistake for "all" than a token that may do nothing.
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
    """The public id that belongs to a secret, and the text that carries both.

    Whoever draws the secret can write the text, so it need not travel back, be remembered or be journalled.
    """
    if not SECRET_BYTES_MIN <= len(secret) <= SECRET_BYTES_MAX:
        raise ForgedError(
            "token_secret_size",
            f"a token's secret was made of {len(secret)} bytes, outside {SECRET_BYTES_MIN}..{SECRET_BYTES_MAX}",
            "this is a mistake in forged: report it",
        )
    # The id is derived, so that one random argument is enough. It has its own hash input, and 48 bits of a hash say
    # nothing about a secret of 256.
    token_id = hashlib.sha256(b"forged token id\0" + secret).hexdigest()[:TOKEN_ID_CHARS]
    spelled = base64.urlsafe_b64encode(secret).rstrip(b"=").decode()
    return token_id, f"{PREFIX}{token_id}_{spelled}"


def _digest(text: str) -> bytes:
    """What is kept of a text.

    SHA-256 and no slow password hash: those make guessing dear where a person chose the secret. This one is 256 random
    bits, out of reach of any guessing, and a slow hash would only let strangers burn the daemon's CPU. The text is
    hashed as it is spelled, because several spellings in base64 decode to the same secret.
    """
    return hashlib.sha256(text.encode("ascii")).digest()


def _refuse_dead(token: Token, now: float) -> None:
    fix = "ask an operator for a new one"
    if token.revoked_at is not None:
        raise RequestRefused("token_revoked", f"the token {token.token_id} ({token.name}) was revoked", fix)
    if token.expired(now):
        raise RequestRefused("token_expired", f"the token {token.token_id} ({token.name}) has expired", fix)
