"""Remembered replies: make requests that change state idempotent.

A client numbers its requests and acknowledges received replies with each request. A reply is remembered until it is
acknowledged, or until the client has been silent for `REMEMBERED_S`. Clients and bytes are shared out by principal; a
principal over its share loses the replies to its least recently seen client.

Invariants:
- A request that changes state is executed at most once per client and number.
- A repeated number gets the remembered reply; an acknowledged number, or a number with another body, is refused.
- Of a client that was displaced the highest number is kept, durably before its replies are deleted: a request up to it
  is refused with `reply_forgotten`, because it may have been executed.
- The replies to an operator's clients are never displaced by other principals.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec

from forged.errors import RequestRefused, Unavailable
from forged.kernel.messages import Call
from forged.kernel.store.port import Entry
from forged.shares import Holder, Shares

PREFIX = "reply/"
FLOOR_PREFIX = "reply-floor/"
UNACKNOWLEDGED_MAX = 4096
UNACKNOWLEDGED_BYTES_MAX = 64 << 20
CLIENTS_MAX = 16_384
CLIENTS_RESERVE = 1024
"""How many of these clients only operators may be."""
REMEMBERED_BYTES_MAX = 256 << 20
REMEMBERED_BYTES_RESERVE = 16 << 20
FLOORS_MAX = 65_536
"""The number of displaced clients of which the highest number is kept."""
DISPLACED_MAX = 8
"""How many clients one request displaces at most."""
SILENT_S = 60.0
"""A principal that has its share replaces a client of its own that was silent for this long. Longer than a request's
default timeout."""
FORGET_PER_TRANSACTION = 16
REMEMBERED_S = 7200.0
"""How long the replies to a silent client are kept, unless its principal uses more than its share. Longer than the
maximum timeout of a request."""

UNKNOWN = Holder("", "")
"""The holder of replies that a version before shares has stored."""


class RememberedReply(msgspec.Struct, frozen=True, array_like=True):
    """A reply as stored, with the digest of its request."""

    digest: int
    at: float
    reply: msgspec.Raw
    holder: Holder = UNKNOWN


class Floor(msgspec.Struct, frozen=True, array_like=True):
    """The highest number that a displaced client has used."""

    number: int
    holder: Holder


_decode = msgspec.msgpack.Decoder(RememberedReply).decode
_decode_floor = msgspec.msgpack.Decoder(Floor).decode
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class _Answer:
    digest: int
    answer: Any
    bytes: int


@dataclass(slots=True)
class _Client:
    holder: Holder
    acknowledged: int = 0
    seen_at: float = 0.0
    highest: int = 0
    """The highest number that was used."""
    floor: int = 0
    """Up to this number the replies were displaced."""
    listed_at: int = 0
    """The request number with which the client last sent a list of the numbers that still wait: `waiting`."""
    waiting: frozenset[int] = frozenset()
    answers: dict[int, _Answer] = field(default_factory=dict)
    bytes: int = 0

    def done_with(self, number: int) -> bool:
        """Whether the client has acknowledged this reply or does not want it."""
        return number <= self.acknowledged or (number < self.listed_at and number not in self.waiting)


class _ByHolder:
    """The clients of each holder, the least recently seen first."""

    def __init__(self) -> None:
        self._clients: dict[Holder, dict[bytes, None]] = {}

    def put_last(self, holder: Holder, client_id: bytes) -> None:
        clients = self._clients.setdefault(holder, {})
        clients.pop(client_id, None)
        clients[client_id] = None

    def remove(self, holder: Holder, client_id: bytes) -> None:
        clients = self._clients[holder]
        del clients[client_id]
        if not clients:
            del self._clients[holder]

    def first(self, holder: Holder) -> bytes | None:
        return next(iter(self._clients.get(holder, ())), None)


def _key(client: bytes, number: int) -> str:
    return f"{PREFIX}{client.hex()}/{number:016x}"


def reused(number: int) -> RequestRefused:
    """The refusal of a request whose number was used before with another body."""
    return RequestRefused(
        "request_id_reused",
        f"request number {number} was used before with another body",
        "give a new request a new number",
    )


def _floor_key(client: bytes) -> str:
    return f"{FLOOR_PREFIX}{client.hex()}"


class ReplyTable:
    """The remembered replies of all clients: a `Pending` until it is durable, encoded bytes after a restart."""

    def __init__(self, clients_max: int = CLIENTS_MAX, bytes_max: int = REMEMBERED_BYTES_MAX) -> None:
        self._clients: dict[bytes, _Client] = {}
        """The least recently seen first."""
        self._by_holder = _ByHolder()
        self._floors: dict[bytes, tuple[Floor, float]] = {}
        """Of displaced clients, with the time of the displacement, oldest first."""
        self._floors_by_holder = _ByHolder()
        self._new_floors: dict[bytes, None] = {}
        """Those that are not stored yet."""
        self._forgotten: dict[str, None] = {}
        """Keys to delete, in order."""
        reserve = min(CLIENTS_RESERVE, clients_max // 16)
        self._client_shares = Shares("clients with remembered replies", clients_max, reserve)
        byte_reserve = min(REMEMBERED_BYTES_RESERVE, bytes_max // 16)
        self._byte_shares = Shares("bytes of remembered replies", bytes_max, byte_reserve)
        self._floor_shares = Shares("displaced clients", FLOORS_MAX)

    def __len__(self) -> int:
        return sum(len(client.answers) for client in self._clients.values())

    def recall(self, call: Call, now: float) -> Any | None:
        """The remembered reply to this request, or None if the request is new."""
        self.note(call.client, call.acknowledged, call.number, None)
        client = self._clients.get(call.client)
        if client is None:
            client = self._admit(call, now)
        else:
            # Dicts keep the order of insertion.
            self._clients[call.client] = self._clients.pop(call.client)
            self._by_holder.put_last(client.holder, call.client)
        client.seen_at = now
        if client.done_with(call.number):
            raise RequestRefused(
                "request_stale",
                f"request {call.number} was answered and its reply acknowledged",
                "give a new request a new number",
            )
        known = client.answers.get(call.number)
        if known is None:
            self._require_new(client, call.number, now)
            return None
        if known.digest != call.digest:
            raise reused(call.number)
        return known.answer

    def remember(self, call: Call, answer: Any, size: int = 0) -> None:
        """Keep the reply to a request until its client acknowledges it."""
        client = self._clients.get(call.client)
        if client is None:
            # It was displaced while its request was being executed.
            self._forgotten[_key(call.client, call.number)] = None
        else:
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
        key = _key(call.client, call.number)
        self._forgotten.pop(key, None)
        return key, _encode(RememberedReply(call.digest, at, msgspec.Raw(reply), call.principal.holder))

    def take_floors(self, keys_max: int) -> dict[str, bytes]:
        """Keys and values of new floors, for the next transaction to store."""
        floors: dict[str, bytes] = {}
        while self._new_floors and len(floors) < min(FORGET_PER_TRANSACTION, keys_max):
            client_id = next(iter(self._new_floors))
            del self._new_floors[client_id]
            floors[_floor_key(client_id)] = _encode(self._floors[client_id][0])
        return floors

    def take_forgotten(self, keys_max: int) -> list[str]:
        """A few keys of dropped replies, for the next transaction to delete; none before all floors are stored."""
        wanted = 0 if self._new_floors else min(FORGET_PER_TRANSACTION, keys_max)
        keys = list(islice(self._forgotten, max(0, wanted)))
        for key in keys:
            del self._forgotten[key]
        return keys

    def load(self, replies: Iterable[Entry], floors: Iterable[Entry], now: float) -> None:
        """Replace the replies with those of the store. Acknowledgements and floors of this process stay known."""
        self._forgotten.clear()
        for client in self._clients.values():
            self._byte_shares.give_back(client.holder, client.bytes)
            client.answers.clear()
            client.bytes = 0
        self._load_floors(floors, now)
        for entry in replies:
            client_hex, number_hex = entry.key.removeprefix(PREFIX).split("/")
            client_id, number = bytes.fromhex(client_hex), int(number_hex, 16)
            known = self._clients.get(client_id)
            if known is not None and known.done_with(number):
                self._forgotten[entry.key] = None
                continue
            stored = _decode(entry.value)
            client = known or self._add(client_id, stored.holder, 0, now)
            self._keep(client, number, _Answer(stored.digest, bytes(stored.reply), len(entry.value)))

    def _load_floors(self, floors: Iterable[Entry], now: float) -> None:
        stored: dict[bytes, int] = {}
        for entry in floors:
            client_id, floor = bytes.fromhex(entry.key.removeprefix(FLOOR_PREFIX)), _decode_floor(entry.value)
            stored[client_id] = floor.number
            known = self._floors.get(client_id)
            if known is None:
                self._set_floor(client_id, floor, now)
            client = self._clients.get(client_id)
            if client is not None:
                client.floor = max(client.floor, floor.number)
        # Those that the store lacks were part of a commit that failed.
        self._new_floors = {
            client_id: None for client_id, (floor, _) in self._floors.items() if stored.get(client_id) != floor.number
        }

    def _admit(self, call: Call, now: float) -> _Client:
        """Add a new client, or raise `Unavailable` if its principal has its share. The cost is constant."""
        self._forget_silent(now)
        holder = call.principal.holder
        self._make_room(self._client_shares, holder, now)
        return self._add(call.client, holder, call.acknowledged, now)

    def _add(self, client_id: bytes, holder: Holder, acknowledged: int, now: float) -> _Client:
        floor = self._floors[client_id][0].number if client_id in self._floors else 0
        client = self._clients[client_id] = _Client(holder, acknowledged, now, highest=floor, floor=floor)
        self._client_shares.charge(holder, 1)
        self._by_holder.put_last(holder, client_id)
        return client

    def _require_new(self, client: _Client, number: int, now: float) -> None:
        """Raise unless a request with this number may be executed."""
        if number <= client.floor:
            raise RequestRefused(
                "reply_forgotten",
                f"request {number} may have been executed, and its reply was forgotten: {client.holder} has used"
                f" more than its share of the {self._client_shares.resource}",
                "check `forgectl events`; acknowledge replies, and use one client id for one process",
            )
        _require_room(client)
        client.highest = max(client.highest, number)
        if not self._byte_shares.fits(client.holder):
            self._make_room(self._byte_shares, client.holder, now)

    def _make_room(self, shares: Shares, holder: Holder, now: float) -> None:
        """Displace clients of a holder above its share, or silent ones of this holder; raise if there are none."""
        for _ in range(DISPLACED_MAX):
            if shares.fits(holder):
                return
            displaced = shares.to_displace(holder) or holder
            oldest = self._by_holder.first(displaced)
            if oldest is None or (displaced == holder and now - self._clients[oldest].seen_at <= SILENT_S):
                break
            self._displace(oldest, now)
        if not shares.fits(holder):
            raise Unavailable(
                "reply_memory_full",
                shares.shortage(holder),
                f"acknowledge replies and use fewer client ids, or try again in {SILENT_S:g} s",
            )

    def _displace(self, client_id: bytes, now: float) -> None:
        """Forget a client and its replies, except for the highest number that it has used."""
        client = self._clients[client_id]
        known = self._floors.get(client_id)
        if known is not None:
            self._drop_floor(client_id)
        self._set_floor(client_id, Floor(max(client.highest, client.acknowledged), client.holder), now)
        self._new_floors[client_id] = None
        self._forgotten.pop(_floor_key(client_id), None)
        self._forget(client_id)

    def _set_floor(self, client_id: bytes, floor: Floor, now: float) -> None:
        if not self._floor_shares.fits(floor.holder):
            crowded = self._floor_shares.to_displace(floor.holder) or floor.holder
            oldest = self._floors_by_holder.first(crowded) or next(iter(self._floors))
            self._forget_floor(oldest)
        self._floor_shares.charge(floor.holder, 1)
        self._floors_by_holder.put_last(floor.holder, client_id)
        self._floors[client_id] = floor, now

    def _drop_floor(self, client_id: bytes) -> None:
        floor, _ = self._floors.pop(client_id)
        self._floors_by_holder.remove(floor.holder, client_id)
        self._floor_shares.give_back(floor.holder)
        self._new_floors.pop(client_id, None)

    def _forget_floor(self, client_id: bytes) -> None:
        self._drop_floor(client_id)
        self._forgotten[_floor_key(client_id)] = None

    def _forget_silent(self, now: float) -> None:
        """Forget up to two clients and two floors that were kept for `REMEMBERED_S`."""
        for client_id in list(islice(self._clients, 2)):
            if now - self._clients[client_id].seen_at > REMEMBERED_S:
                self._forget(client_id)
        for client_id in list(islice(self._floors, 2)):
            if now - self._floors[client_id][1] > REMEMBERED_S:
                self._forget_floor(client_id)

    def _forget(self, client_id: bytes) -> None:
        client = self._clients[client_id]
        for number in list(client.answers):
            self._drop(client_id, client, number)
        del self._clients[client_id]
        self._by_holder.remove(client.holder, client_id)
        self._client_shares.give_back(client.holder)

    def _keep(self, client: _Client, number: int, answer: _Answer) -> None:
        client.answers[number] = answer
        client.bytes += answer.bytes
        client.highest = max(client.highest, number)
        self._byte_shares.charge(client.holder, answer.bytes)

    def _drop(self, client_id: bytes, client: _Client, number: int) -> None:
        dropped = client.answers.pop(number).bytes
        client.bytes -= dropped
        self._byte_shares.give_back(client.holder, dropped)
        self._forgotten[_key(client_id, number)] = None

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
            "acknowledge received replies with each request (docs/protocol.md)",
        )
