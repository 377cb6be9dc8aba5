"""The token service: creates, lists and revokes tokens, and identifies peers.

Invariants:
- Peers are identified by durable tokens only. A creation or revocation that is not durable yet counts for the next
  decision but not for connections; it takes effect when it is acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from forged.auth.access import AccessPolicy, identify
from forged.auth.messages import (
    CreateToken,
    ListTokens,
    RevokeToken,
    TokenCreated,
    TokenPage,
    TokenRevoked,
    TokenView,
)
from forged.auth.model import Principal, Token
from forged.auth.tokens import SECRET_BYTES_MAX, SECRET_BYTES_MIN, TokenRegistry
from forged.clock import Clock
from forged.errors import RequestRefused
from forged.kernel.bus import Bus
from forged.kernel.ledger import read_all
from forged.kernel.messages import Call, Decision, Record
from forged.kernel.store.port import Store
from forged.net.transport.port import Peer
from forged.pagination import take_page

PREFIX = "token/"
OWNER = "auth"

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Token).decode
_Change = tuple[Token, list[str]]
_CHANGES = frozenset(fact.__name__ for fact in (TokenCreated, TokenRevoked))


class TokenService:
    """Owns the tokens."""

    def __init__(self, bus: Bus, clock: Clock, policy: AccessPolicy, rights_changed: Callable[[], None]) -> None:
        self.tokens = TokenRegistry()
        """The tokens including decisions that are not durable yet; the basis of new decisions."""
        self._durable = TokenRegistry()
        self._undurable: dict[tuple[str, str], _Change] = {}
        """The changes that apply to the durable tokens when these facts are published, by fact type and token id."""
        self._clock = clock
        self._policy = policy
        self._rights_changed = rights_changed
        bus.serve(CreateToken, self._create, owner=OWNER)
        bus.serve(RevokeToken, self._revoke, owner=OWNER)
        bus.serve(ListTokens, self._list, owner=OWNER)
        # Not a mailbox: the change must apply before its reply is released.
        bus.on_publish.append(self._advance)
        bus.on(TokenRevoked, self._revoked, name="auth.revocation")

    def set_policy(self, policy: AccessPolicy) -> None:
        """Apply a new policy, also to existing connections."""
        self._policy = policy
        self._rights_changed()

    async def load(self, store: Store) -> None:
        """Reload the tokens from the store."""
        tokens = [_decode(entry.value) for entry in await read_all(store, PREFIX)]
        self._undurable.clear()
        self.tokens.load(tokens)
        self._durable.load(tokens)

    def identify(self, peer: Peer, token: str | None) -> Principal:
        """The peer's principal; raises `RequestRefused` if it has none."""
        return identify(peer, token, self._durable, self._policy, self._clock.wall())

    def _create(self, request: CreateToken, call: Call) -> Decision[TokenView]:
        _check_secret(request.secret)
        now = self._clock.wall()
        expires_at = None if request.ttl_s is None else now + request.ttl_s
        token, _ = self.tokens.issue(request.name, request.role, request.jobs, expires_at, now, request.secret)
        fact = TokenCreated(token.token_id, token.name, token.role, token.jobs)
        return self._decide(token, fact, self.tokens.forget_dead(now))

    def _revoke(self, request: RevokeToken, call: Call) -> Decision[TokenView]:
        known = self.tokens.get(request.token_id)
        if known.revoked_at is not None:
            return Decision(_view(known))
        token = self.tokens.revoke(known.token_id, self._clock.wall())
        return self._decide(token, TokenRevoked(token.token_id, token.name), [])

    def _list(self, request: ListTokens, call: Call) -> TokenPage:
        return TokenPage(*take_page(map(_view, self.tokens.after(request.after)), request.limit))

    def _decide(self, token: Token, fact: TokenCreated | TokenRevoked, forgotten: list[str]) -> Decision[TokenView]:
        self._undurable[type(fact).__name__, token.token_id] = token, forgotten
        writes: dict[str, bytes | None] = {PREFIX + token_id: None for token_id in forgotten}
        return Decision(_view(token), (fact,), writes | {PREFIX + token.token_id: _encode(token)})

    def _advance(self, records: Sequence[Record]) -> None:
        if not self._undurable:
            return
        for record in records:
            fact: Any = record.fact if record.type in _CHANGES else None
            # After a reload nothing is waiting: the tokens that were read include the change.
            change = self._undurable.pop((record.type, fact.token_id), None) if fact else None
            if change is not None:
                token, forgotten = change
                self._durable.put(token)
                self._durable.forget(forgotten)

    def _revoked(self, record: Record) -> None:
        self._rights_changed()


def _check_secret(secret: bytes) -> None:
    if not SECRET_BYTES_MIN <= len(secret) <= SECRET_BYTES_MAX:
        raise RequestRefused(
            "token_secret_size",
            f"secret must have {SECRET_BYTES_MIN}..{SECRET_BYTES_MAX} bytes, got {len(secret)}",
            f"draw {SECRET_BYTES_MIN} random bytes",
        )


def _view(token: Token) -> TokenView:
    return TokenView(
        token.token_id, token.name, token.role, token.jobs, token.created_at, token.expires_at, token.revoked_at
    )
