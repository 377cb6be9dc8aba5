"""Which requests were answered already, and how.

Law: a request that changes state happens once. Its client numbers its requests and tells with each how far it has all
answers; an answer is remembered until then, or until its client has been silent for hours. A number that is repeated
gets the answer that was given, a number that the client has done with is refused, and a number that comes back with
another body is refused.
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
"""How long a client must have said nothing before another may take its place when there is no room: longer than a
request takes unless it asks for more."""
FORGET_PER_TRANSACTION = 16
REMEMBERED_S = 7200.0
"""How long the answers to a client that fell silent are kept at least: longer than a request may take."""


class Remembered(msgspec.Struct, frozen=True, array_like=True):
    """An answer as it is stored."""

    digest: int
    at: float
    reply: msgspec.Raw


_decode = msgspec.msgpack.Decoder(Remembered).decode
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
    told: int = 0
    """Of the numbers before this one only those in `waiting` still wait."""
    waiting: frozenset[int] = frozenset()
    answers: dict[int, _Answer] = field(default_factory=dict)
    bytes: int = 0

    def done_with(self, number: int) -> bool:
        """Whether the client has said that it has this answer, or does not want it."""
        return number <= self.acknowledged or (number < self.told and number not in self.waiting)


def _key(client: bytes, number: int) -> str:
    return f"{PREFIX}{client.hex()}/{number:016x}"


def reused(number: int) -> RequestRefused:
    """What is said to a request that comes under the number of another."""
    return RequestRefused(
        "request_id_reused", f"request {number} came before with another body", "give a new request a new number"
    )


class ReplyTable:
    """The answers of all clients that may still ask again. An answer is whatever the owner keeps for it."""

    def __init__(self) -> None:
        self._clients: dict[bytes, _Client] = {}
        self._forgotten: deque[str] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return sum(len(client.answers) for client in self._clients.values())

    def recall(self, call: Call, now: float) -> Any | None:
        """The answer to this very request if it was given before; None when it is to be done."""
        self.note(call.client, call.acknowledged, call.number, None)
        client = self._clients.pop(call.client, None)
        if client is None:
            self._forget_silent(now)
            client = _Client(acknowledged=call.acknowledged)
        self._clients[call.client] = client  # behind all that were heard of before
        client.seen_at = now
        if client.done_with(call.number):
            raise RequestRefused(
                "request_stale",
                f"request {call.number} was answered, and its client has done with it",
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
        """Keep the answer to a request until its client has done with it."""
        client = self._clients.get(call.client)
        if client is not None:
            self._keep(client, call.number, _Answer(call.digest, answer, size))

    def note(self, client_id: bytes, acknowledged: int, number: int, waiting: Iterable[int] | None) -> None:
        """What a client says with a request of the answers to earlier ones."""
        client = self._clients.get(client_id)
        if client is None:
            return
        if acknowledged > client.acknowledged:
            self._acknowledge(client_id, client, acknowledged)
        if waiting is not None and number > client.told:
            client.told, client.waiting = number, frozenset(waiting)
            for answered in [answered for answered in client.answers if client.done_with(answered)]:
                self._drop(client_id, client, answered)

    def acknowledge(self, client_id: bytes, number: int) -> None:
        """The client has all its answers up to `number`."""
        self.note(client_id, number, 0, None)

    def write(self, call: Call, reply: bytes, at: float) -> tuple[str, bytes]:
        """The key and value under which the answer is stored."""
        return _key(call.client, call.number), _encode(Remembered(call.digest, at, msgspec.Raw(reply)))

    def take_forgotten(self, keys_max: int) -> list[str]:
        """Keys of answers that nobody will ask for again, a few at a time, for the next transaction to delete."""
        forgotten = self._forgotten
        return [forgotten.popleft() for _ in range(min(len(forgotten), FORGET_PER_TRANSACTION, keys_max))]

    def load(self, entries: Iterable[Entry], now: float) -> None:
        """Become what the store holds. What clients have acknowledged to this process stays known."""
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
        """Let one more client in: of those that were heard of longest ago, two go if they have fallen silent.

        So as many are known as come in that time, at no cost to those that stay. When there is no room left, one goes
        that has been silent for a shorter time, or nobody is let in.
        """
        crowded = len(self._clients) >= CLIENTS_MAX or self._bytes >= REMEMBERED_BYTES_MAX
        patience_s = SILENT_S if crowded else REMEMBERED_S
        for client_id in list(islice(self._clients, 2)):
            if now - self._clients[client_id].seen_at <= patience_s:
                break
            client = self._clients[client_id]
            for number in list(client.answers):
                self._drop(client_id, client, number)
            del self._clients[client_id]
            crowded = False
        if crowded:
            known = f"{len(self._clients)} clients have answers that they may ask for again"
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
            f"{len(client.answers)} answers ({client.bytes} bytes) to this client wait for its acknowledgement",
            "acknowledge answers with each request",
        )
