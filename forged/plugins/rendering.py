"""Encodes a fact's record as JSON.

Invariants:
- Every record becomes one line of strict JSON, as `forgectl events --json` prints it: bytes in hex, NaN and infinity as
  null, keys as text. A fact that cannot be decoded is null.
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
    return _encode(_to_plain(fields))


def _to_plain(value: Any) -> Any:
    """The value with text keys and hex for bytes; the encoder replaces NaN and infinity."""
    if isinstance(value, dict):
        return {_key(key): _to_plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_to_plain(one) for one in value]
    return value.hex() if isinstance(value, bytes) else value


def _key(key: Any) -> str:
    return key.hex() if isinstance(key, bytes) else str(key)
