"""What a daemon answers, which may be an older or a newer one than this.

Law: a map stays a map and a list a list of maps, whatever else is in them: what is missing is missing, what is unknown
is handed on. Only what is neither is an error, and it names both versions.
"""

from __future__ import annotations

from typing import Any

from forged.errors import PeerError
from forged.plain_client.connection import Wire, as_event
from forged.version import VERSION

Row = dict[str, Any]


def one(wire: Wire, method: str, **fields: Any) -> Row:
    """The map that a request is answered with."""
    answered = wire.request(method, **fields)
    if not isinstance(answered, dict):
        raise _strange(wire, method)
    return answered


def several(wire: Wire, method: str, *, field: str, key: str) -> list[Row]:
    """The list that a request is answered with, bare or in a field; what is no map in it is named by its key."""
    return _rows(wire, method, wire.request(method), field, key)


def pages(
    wire: Wire, method: str, *, field: str, key: str, after: str = "", pages_max: int | None = None, **fields: Any
) -> list[Row]:
    """A long list; each page begins behind the last entry of the one before."""
    entries: list[Row] = []
    taken = 0
    while True:
        page = one(wire, method, after=after, **fields)
        entries += _rows(wire, method, page, field, key)
        taken += 1
        last = entries[-1].get(key) if entries else None
        if not page.get("more") or taken == pages_max:
            return entries
        if not isinstance(last, str) or last <= after:
            raise _strange(wire, method)
        after = last


def list_in(value: Row, key: str) -> list[Any]:
    """A list in an answer; an empty one where there is none."""
    listed = value.get(key)
    return listed if isinstance(listed, list) else []


def rows_in(value: Row, key: str) -> list[Row]:
    """A list of maps in an answer, and nothing else that may be in it."""
    return [one for one in list_in(value, key) if isinstance(one, dict)]


def count_in(value: Row, key: str) -> int:
    """A whole number in an answer; 0 where there is none."""
    number = value.get(key)
    return number if isinstance(number, int) else 0


def story(wire: Wire, fact_id: int) -> list[Row]:
    """The records around a fact."""
    told = wire.request("TellStory", fact_id=fact_id)
    if not isinstance(told, list):
        raise _strange(wire, "TellStory")
    return [as_event(record) for record in told]


def backup(wire: Wire) -> tuple[bytes, int]:
    """The ticket for a copy of the daemon's state, and how large that is."""
    said = one(wire, "BackUp")
    ticket, size = said.get("ticket"), said.get("size")
    if not isinstance(ticket, bytes) or not isinstance(size, int) or size < 0:
        raise _strange(wire, "BackUp")
    return ticket, size


def _rows(wire: Wire, method: str, answered: Any, field: str, key: str) -> list[Row]:
    listed = answered.get(field) if isinstance(answered, dict) else answered
    if not isinstance(listed, list):
        raise _strange(wire, method)
    return [entry if isinstance(entry, dict) else {key: entry} for entry in listed]


def _strange(wire: Wire, method: str) -> PeerError:
    return PeerError(
        "answer_strange",
        f"the daemon ({wire.agent}) answers {method} in a way that forgectl {VERSION} does not know",
        "install the same version of both",
    )
