"""The daemon's replies, read so that an older or newer daemon can be used.

Missing fields are missing and unknown fields are passed on. Only a reply of the wrong kind, such as a number in place
of a map, is an error; it names both versions.
"""

from __future__ import annotations

from typing import Any

from forged.errors import PeerError, RequestRefused
from forged.plain_client.connection import PlainConnection, as_event
from forged.version import VERSION

Row = dict[str, Any]

RANK_NONE = -1
UNTRAINED = frozenset({"job_untrained", "job_unknown"})
"""Refusals that mean: no worker has joined the job."""
UNTOLD = UNTRAINED | {"request_unknown"}
"""Those, and that the daemon is too old to know the request."""
_UNKNOWN_AT_0 = frozenset({"learning_rate", "global_batch_size", "state_timestamp"})


def one(daemon: PlainConnection, method: str, **fields: Any) -> Row:
    """Send a request whose reply is a map."""
    reply = daemon.request(method, **fields)
    if not isinstance(reply, dict):
        raise _malformed(daemon, method)
    return reply


def one_unless(daemon: PlainConnection, codes: frozenset[str], method: str, **fields: Any) -> Row:
    """Like `one`, but empty if the request is refused with one of these codes."""
    try:
        return one(daemon, method, **fields)
    except RequestRefused as refusal:
        if refusal.code not in codes:
            raise
        return {}


def several(daemon: PlainConnection, method: str, *, field: str, key: str) -> list[Row]:
    """Send a request whose reply is a list, or a map with the list in `field`; other entries than maps get `key`."""
    return _rows(daemon, method, daemon.request(method), field, key)


def pages(daemon: PlainConnection, method: str, *, field: str, key: str, **fields: Any) -> list[Row]:
    """The entries of a long list."""
    return rows_in(whole(daemon, method, field=field, key=key, **fields), field)


def whole(
    daemon: PlainConnection,
    method: str,
    *,
    field: str,
    key: str,
    after: str = "",
    pages_max: int | None = None,
    **fields: Any,
) -> Row:
    """The first page of a long list, with the entries of all pages.

    Each page starts after the last entry of the previous one.
    """
    entries: list[Row] = []
    first: Row = {}
    asked = {after}
    taken = 0
    while True:
        page = one(daemon, method, after=after, **fields)
        first = first or page
        entries += _rows(daemon, method, page, field, key)
        taken += 1
        if not page.get("more") or taken == pages_max:
            return first | {field: entries, "more": bool(page.get("more"))}
        last = entries[-1].get(key) if entries else None
        if not isinstance(last, str) or last in asked:
            raise _malformed(daemon, method)
        asked.add(last)
        after = last


def pages_unless(
    daemon: PlainConnection, codes: frozenset[str], method: str, *, field: str, key: str, after: str = "", **fields: Any
) -> list[Row]:
    """Like `pages`, but empty if the request is refused with one of these codes."""
    try:
        return pages(daemon, method, field=field, key=key, after=after, **fields)
    except RequestRefused as refusal:
        if refusal.code not in codes:
            raise
        return []


def list_in(value: Row, key: str) -> list[Any]:
    """The list in a field; empty if there is none."""
    listed = value.get(key)
    return listed if isinstance(listed, list) else []


def rows_in(value: Row, key: str) -> list[Row]:
    """The maps in a list in a field."""
    return [one for one in list_in(value, key) if isinstance(one, dict)]


def map_in(value: Row, key: str) -> Row:
    """The map in a field; empty if there is none."""
    found = value.get(key)
    return found if isinstance(found, dict) else {}


def count_in(value: Row, key: str) -> int:
    """The integer in a field; 0 if there is none."""
    number = value.get(key)
    return number if isinstance(number, int) else 0


def rank(value: Any) -> Any:
    """A rank to show; None for a worker without one."""
    return None if value == RANK_NONE else value


def known(key: str, value: Any) -> Any:
    """A field's value; None for a field in which 0 means unknown."""
    return None if key in _UNKNOWN_AT_0 and not value else value


def story(daemon: PlainConnection, fact_id: int) -> list[Row]:
    """The causes and consequences of a fact."""
    reply = daemon.request("TellStory", fact_id=fact_id)
    if not isinstance(reply, list):
        raise _malformed(daemon, "TellStory")
    return [as_event(record) for record in reply]


def backup(daemon: PlainConnection) -> tuple[bytes, int]:
    """The ticket for a copy of the daemon's state, and its size in bytes."""
    reply = one(daemon, "BackUp")
    ticket, size = reply.get("ticket"), reply.get("size")
    if not isinstance(ticket, bytes) or not isinstance(size, int) or size < 0:
        raise _malformed(daemon, "BackUp")
    return ticket, size


def _rows(daemon: PlainConnection, method: str, reply: Any, field: str, key: str) -> list[Row]:
    listed = reply.get(field) if isinstance(reply, dict) else reply
    if not isinstance(listed, list):
        raise _malformed(daemon, method)
    return [entry if isinstance(entry, dict) else {key: entry} for entry in listed]


def _malformed(daemon: PlainConnection, method: str) -> PeerError:
    return PeerError(
        "answer_strange",
        f"forgectl {VERSION} cannot read the daemon's reply to {method} (daemon: {daemon.agent})",
        "install the same version of both",
    )
