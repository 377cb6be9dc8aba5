from __future__ import annotations

import msgspec

from forged.data.messages import MARK_BYTES, DatasetSpec, HeldView, OfferShards, mark_of


def test_missing_weight_is_1() -> None:
    """Messages without weights, as of an earlier version."""
    for said in (
        OfferShards("run", "a", b"i" * 16, 1, DatasetSpec(1_000, 10), weight=3.0),
        HeldView("a", 1, 0, 9, 3.0),
    ):
        fields = msgspec.msgpack.decode(msgspec.msgpack.encode(said))
        assert fields.pop("weight") == 3.0
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=type(said)).weight == 1.0


def test_checksum_mark_has_a_fixed_length() -> None:
    assert mark_of(bytes(range(16))) == bytes(range(8))
    assert mark_of(b"a") == b"a" + bytes(MARK_BYTES - 1)
