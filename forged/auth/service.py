"""Tokens on the bus."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from forged.auth.access import AccessPolicy, identify
from forged.auth.messages import CreateToken, ListTokens, RevokeToken, TokenCreated, TokenRevoked, TokenView
from forged.auth.model import Principal, Token
from forged.auth.tokens import SECRET_BYTES_MAX, SECRET_BYTES_MIN, TokenBook
from forged.bus import Bus
from forged.clock import Clock
from forged.errors import RequestRefused
from forged.ledger import read_all
from forged.messages import Call, Decision, Record
from forged.net.network import Peer
from forged.store.port import Store

PREFIX = "token/"
OWNER = "auth"

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Token).decode


class TokenService:
    """Owns the tokens; tells who is at the other end of a connection."""

    def __init__(self, bus: Bus, clock: Clock, policy: AccessPolicy, rights_changed: Callable[[], None]) -> None:
        self.book = TokenBook()
        self._clock = clock
        self._policy = policy
        self._rights_changed = rights_changed
        bus.serve(CreateToken, self._create, owner=OWNER)
        bus.serve(RevokeToken, self._revoke, owner=OWNER)
        bus.serve(ListTokens, lambda *_: [_view(token) for token in self.book.list()], owner=OWNER)
        bus.on(TokenRevoked, self._revoked, name="auth.revocation")

    async def load(self, store: Store) -> None:
        """Become what the store holds."""
        self.book.load(_decode(entry.value) for entry in await read_all(store, PREFIX))

    def identify(self, peer: Peer, token: str | None) -> Principal:
        """Who the peer is, or `RequestRefused`."""
        return identify(peer, token, self.book, self._policy, self._clock.wall())

    def _create(self, request: CreateToken, call: Call) -> Decision[TokenView]:
        _check_secret(request.secret)
        now = self._clock.wall()
        expires_at = None if request.ttl_s is None else now + request.ttl_s
        token, _ = self.book.issue(request.name, request.role, request.jobs, expires_at, now, request.secret)
        fact = TokenCreated(token.token_id, token.name, token.role, token.jobs)
        return Decision(_view(token), (fact,), {PREFIX + token.token_id: _encode(token)})

    def _revoke(self, request: RevokeToken, call: Call) -> Decision[TokenView]:
        unrevoked = {token.token_id for token in self.book.list() if token.revoked_at is None}
        token = self.book.revoke(request.token_id, self._clock.wall())
        if token.token_id not in unrevoked:
            return Decision(_view(token))
        fact = TokenRevoked(token.token_id, token.name)
        return Decision(_view(token), (fact,), {PREFIX + token.token_id: _encode(token)})

    def _revoked(self, record: Record) -> None:
        self._rights_changed()


def _check_secret(secret: bytes) -> None:
    if not SECRET_BYTES_MIN <= len(secret) <= SECRET_BYTES_MAX:
        raise RequestRefused(
            "token_secret_size",
            f"a secret of {len(secret)} bytes is outside {SECRET_BYTES_MIN}..{SECRET_BYTES_MAX}",
            f"draw {SECRET_BYTES_MIN} random bytes",
        )


def _view(token: Token) -> TokenView:
    return TokenView(
        token.token_id, token.name, token.role, token.jobs, token.created_at, token.expires_at, token.revoked_at
    )
