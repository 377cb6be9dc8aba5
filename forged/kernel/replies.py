"""Remembered replies: make requests that change state idempotent.

A client numbers its requests and acknowledges received replies with each request. A reply is remembered until it is
acknowledged, or until the client has been silent for `REMEMBERED_S`.

Invariants:
- A request that changes state is executed at most once per client and number.
- A repeated number gets the remembered reply; an acknowledged number, or a number with another body, is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec

from forged.errors import RequestRefused, Unavailable
from forged.kernel.messages import Call
from forged.kernel.store.port import Entry

PREFIX = "reply/"
UNACKNOWLEDGED_MAX = 4096
UNACKNOWLEDGED_BYTES_MAX = 64 << 20
CLIENTS_MAX = 16_384
REMEMBERED_BYTES_MAX = 256 << 20
SILENT_S = 60.0
"""When the table is full, a client that was silent for this long is dropped for a new client. Longer than a request's
default timeout."""
FORGET_PER_TRANSACTION = 16
REMEMBERED_S = 7200.0
"""How long the replies to a silent client are kept at least. Longer than the maximum timeout of a request."""


class RememberedReply(msgspec.Struct, frozen=True, array_like=True):
    """A reply as stored, with the digest of its request."""

    digest: int
    at: float
    reply: msgspec.Raw


_decode = msgspec.msgpack.Decoder(RememberedReply).decode
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class _Answer:
    digest: int
    answer: Any
    bytes: int


@dataclass(slots=True)
class _Client:
    acknowledged: int = 0
    seen_at: float = 0.0
    listed_at: int = 0
    """The request number with which the client last sent a list of the numbers that still wait: `waiting`."""
    waiting: frozenset[int] = frozenset()
    answers: dict[int, _Answer] = field(default_factory=dict)
    bytes: int = 0

    def done_with(self, number: int) -> bool:
        """Whether the client has acknowledged this reply or does not want it."""
        return number <= self.acknowledged or (number < self.listed_at and number not in self.waiting)


def _key(client: bytes, number: int) -> str:
    return f"{PREFIX}{client.hex()}/{number:016x}"


def reused(number: int) -> RequestRefused:
    """The refusal of a request whose number was used before with another body."""
    return RequestRefused(
        "request_id_reused",
        f"request number {number} was used before with another body",
        "give a new request a new number",
    )


class ReplyTable:
    """The remembered replies of all clients: a `Pending` until it is durable, encoded bytes after a restart."""

    def __init__(self) -> None:
        self._clients: dict[bytes, _Client] = {}
        self._forgotten: deque[str] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return sum(len(client.answers) for client in self._clients.values())

    def recall(self, call: Call, now: float) -> Any | None:
        """The remembered reply to this request, or None if the request is new."""
        self.note(call.client, call.acknowledged, call.number, None)
        client = self._clients.pop(call.client, None)
        if client is None:
            self._forget_silent(now)
            client = _Client(acknowledged=call.acknowledged)
        self._clients[call.client] = client  # dicts keep insertion order: most recently seen client last
        client.seen_at = now
        if client.done_with(call.number):
            raise RequestRefused(
                "request_stale",
                f"request {call.number} was answered and its reply acknowledged",
                "give a new request a new number",
            )
        known = client.answers.get(call.number)
        if known is None:
            _require_room(client)
            return None
        if known.digest != call.digest:
            raise reused(call.number)
        return known.answer

    def remember(self, call: Call, answer: Any, size: int = 0) -> None:
        """Keep the reply to a request until its client acknowledges it."""
        client = self._clients.get(call.client)
        if client is not None:
            self._keep(client, call.number, _Answer(call.digest, answer, size))

    def note(self, client_id: bytes, acknowledged: int, number: int, waiting: Iterable[int] | None) -> None:
        """Apply the acknowledgements that arrive with request `number`; `waiting` lists earlier numbers still open."""
        client = self._clients.get(client_id)
        if client is None:
            return
        if acknowledged > client.acknowledged:
            self._acknowledge(client_id, client, acknowledged)
        if waiting is not None and number > client.listed_at:
            client.listed_at, client.waiting = number, frozenset(waiting)
            for answered in [answered for answered in client.answers if client.done_with(answered)]:
                self._drop(client_id, client, answered)

    def acknowledge(self, client_id: bytes, number: int) -> None:
        """Drop the client's replies up to `number`."""
        self.note(client_id, number, 0, None)

    def write(self, call: Call, reply: bytes, at: float) -> tuple[str, bytes]:
        """The key and value that store the reply."""
        return _key(call.client, call.number), _encode(RememberedReply(call.digest, at, msgspec.Raw(reply)))

    def take_forgotten(self, keys_max: int) -> list[str]:
        """A few keys of dropped replies, for the next transaction to delete."""
        forgotten = self._forgotten
        return [forgotten.popleft() for _ in range(min(len(forgotten), FORGET_PER_TRANSACTION, keys_max))]

    def load(self, entries: Iterable[Entry], now: float) -> None:
        """Replace the replies with those of the store. Acknowledgements received by this process stay known."""
        self._forgotten.clear()
        self._bytes = 0
        for client in self._clients.values():
            client.answers.clear()
            client.bytes = 0
        for entry in entries:
            client_hex, number_hex = entry.key.removeprefix(PREFIX).split("/")
            client = self._clients.setdefault(bytes.fromhex(client_hex), _Client(seen_at=now))
            number = int(number_hex, 16)
            if client.done_with(number):
                self._forgotten.append(entry.key)
            else:
                stored = _decode(entry.value)
                self._keep(client, number, _Answer(stored.digest, bytes(stored.reply), len(entry.value)))

    def _forget_silent(self, now: float) -> None:
        """Make room for a new client: drop up to two of the least recently seen clients that are silent.

        When the table is full, `SILENT_S` counts as silence instead of `REMEMBERED_S`; if no client was silent for
        that long, the new client is refused. The cost is constant.
        """
        crowded = len(self._clients) >= CLIENTS_MAX or self._bytes >= REMEMBERED_BYTES_MAX
        silence_min_s = SILENT_S if crowded else REMEMBERED_S
        for client_id in list(islice(self._clients, 2)):
            if now - self._clients[client_id].seen_at <= silence_min_s:
                break
            client = self._clients[client_id]
            for number in list(client.answers):
                self._drop(client_id, client, number)
            del self._clients[client_id]
            crowded = False
        if crowded:
            known = f"the replies to {len(self._clients)} clients fill the table ({self._bytes} bytes)"
            raise Unavailable("reply_memory_full", known, "try again later")

    def _keep(self, client: _Client, number: int, answer: _Answer) -> None:
        client.answers[number] = answer
        client.bytes += answer.bytes
        self._bytes += answer.bytes

    def _drop(self, client_id: bytes, client: _Client, number: int) -> None:
        dropped = client.answers.pop(number).bytes
        client.bytes -= dropped
        self._bytes -= dropped
        self._forgotten.append(_key(client_id, number))

    def _acknowledge(self, client_id: bytes, client: _Client, number: int) -> None:
        client.acknowledged = number
        for answered in [answered for answered in client.answers if answered <= number]:
            self._drop(client_id, client, answered)


def _require_room(client: _Client) -> None:
    if len(client.answers) >= UNACKNOWLEDGED_MAX or client.bytes >= UNACKNOWLEDGED_BYTES_MAX:
        raise RequestRefused(
            "too_many_unacknowledged",
            f"this client has {len(client.answers)} unacknowledged replies ({client.bytes} bytes); limit"
            f" {UNACKNOWLEDGED_MAX} replies or {UNACKNOWLEDGED_BYTES_MAX} bytes",
            "acknowledge replies with each request",
        )
