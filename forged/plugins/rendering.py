"""A fact's record as JSON, for those who hand it on.

Law: whatever a fact holds, its record is one line of strict JSON, as `forgectl events --json` prints it: bytes in hex,
null for a number that is none, keys as text. A fact that cannot be read is null; its place in history still counts.
"""

from __future__ import annotations

from typing import Any

import msgspec

from forged.errors import PeerError
from forged.kernel.messages import Record

_encode = msgspec.json.Encoder(enc_hook=str).encode


def to_json(record: Record) -> bytes:
    """One JSON object, without a newline."""
    try:
        fields = record.fields()
    except PeerError:
        names = ("id", "at", "type", "job", "generation", "cause", "origin")
        fields = {name: getattr(record, name) for name in names} | {"fact": None}
    return _encode(_sayable(fields))


def _sayable(value: Any) -> Any:
    """What JSON can say of it; numbers that are none are the encoder's to mend."""
    if isinstance(value, dict):
        return {_key(key): _sayable(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_sayable(one) for one in value]
    return value.hex() if isinstance(value, bytes) else value


def _key(key: Any) -> str:
    return key.hex() if isinstance(key, bytes) else str(key)
