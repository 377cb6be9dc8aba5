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

from forged.errors import RequestRefused
from forged.messages import Call
from forged.store.port import Entry

PREFIX = "reply/"
UNACKNOWLEDGED_MAX = 4096
DONE_MAX = 1 << 16
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


@dataclass(slots=True)
class _Client:
    acknowledged: int = 0
    seen_at: float = 0.0
    done: set[int] = field(default_factory=set)
    """Numbers behind `acknowledged` that the client has done with as well."""
    answers: dict[int, tuple[int, Any]] = field(default_factory=dict)


def _key(client: bytes, number: int) -> str:
    return f"{PREFIX}{client.hex()}/{number:016x}"


def reused(number: int) -> RequestRefused:
    """What is said to a request that comes under the number of another."""
    return RequestRefused(
        "request_id_reused", f"request {number} came before with another body", "give a new request a new number"
    )


class ReplyBook:
    """The answers of all clients that may still ask again. An answer is whatever the owner keeps for it."""

    def __init__(self) -> None:
        self._clients: dict[bytes, _Client] = {}
        self._forgotten: deque[str] = deque()

    def __len__(self) -> int:
        return sum(len(client.answers) for client in self._clients.values())

    def recall(self, call: Call, now: float) -> Any | None:
        """The answer to this very request if it was given before; notes what the client has done with."""
        client = self._clients.get(call.client)
        if client is None:
            self._forget_silent(now)
            client = self._clients[call.client] = _Client()
        client.seen_at = now
        if call.acknowledged > client.acknowledged:
            self._acknowledge(call.client, client, call.acknowledged)
        for number in call.done:
            self._forget_one(call.client, client, number)
        if call.number <= client.acknowledged or call.number in client.done:
            raise RequestRefused(
                "request_stale",
                f"request {call.number} was answered, and its client has done with it",
                "give a new request a new number",
            )
        known = client.answers.get(call.number)
        if known is None:
            if len(client.answers) >= UNACKNOWLEDGED_MAX or len(client.done) >= DONE_MAX:
                raise RequestRefused(
                    "too_many_unacknowledged",
                    f"{len(client.answers)} answers to this client wait for its acknowledgement",
                    "acknowledge answers with each request",
                )
            return None
        digest, answer = known
        if digest != call.digest:
            raise reused(call.number)
        return answer

    def remember(self, call: Call, answer: Any) -> None:
        """Keep the answer to a request until its client has done with it."""
        client = self._clients.get(call.client)
        if client is not None:
            client.answers[call.number] = (call.digest, answer)

    def acknowledge(self, client_id: bytes, number: int) -> None:
        """The client has all its answers up to `number`."""
        client = self._clients.get(client_id)
        if client is not None and number > client.acknowledged:
            self._acknowledge(client_id, client, number)

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
        for client in self._clients.values():
            client.answers.clear()
        for entry in entries:
            client_hex, number_hex = entry.key.removeprefix(PREFIX).split("/")
            client = self._clients.setdefault(bytes.fromhex(client_hex), _Client(seen_at=now))
            number = int(number_hex, 16)
            if number <= client.acknowledged:
                self._forgotten.append(entry.key)
            else:
                stored = _decode(entry.value)
                client.answers[number] = (stored.digest, bytes(stored.reply))

    def _forget_silent(self, now: float) -> None:
        """Of the two clients that were looked at longest ago, forget those that fell silent.

        Called for every new client, this bounds how many are known by how many come, at no cost to those that stay.
        """
        for client_id in list(islice(self._clients, 2)):
            client = self._clients.pop(client_id)
            if now - client.seen_at <= REMEMBERED_S:
                self._clients[client_id] = client
            else:
                self._forgotten.extend(_key(client_id, number) for number in client.answers)

    def _forget_one(self, client_id: bytes, client: _Client, number: int) -> None:
        if number > client.acknowledged and len(client.done) < DONE_MAX:
            client.done.add(number)
        if client.answers.pop(number, None) is not None:
            self._forgotten.append(_key(client_id, number))

    def _acknowledge(self, client_id: bytes, client: _Client, number: int) -> None:
        client.acknowledged = number
        client.done = {done for done in client.done if done > number}
        # Oldest first, as they came; one that came late goes when those before it do.
        while client.answers and (oldest := next(iter(client.answers))) <= number:
            del client.answers[oldest]
            self._forgotten.append(_key(client_id, oldest))
