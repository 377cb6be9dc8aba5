from __future__ import annotations

import msgspec
import pytest

from forged.data.outcome import (
    SHARDS_NAMED_MAX,
    BadCopy,
    MissingShard,
    MovedShard,
    SourceFailure,
    TransferProgress,
    TransferReport,
    UnderWay,
)
from forged.errors import Unavailable
from tests.data.values import at

A = at(0, 0)


def test_a_complete_report_raises_nothing() -> None:
    report = TransferReport(moved=(MovedShard(1, A, 10, 0, 0.5),))
    assert report.is_complete
    report.require_complete()


def test_missing_shards_are_named_with_all_that_was_tried() -> None:
    missing = MissingShard(7, (SourceFailure(A, "it is gone"), SourceFailure(None, "no such file")))
    with pytest.raises(Unavailable) as raised:
        TransferReport(missing=(missing, MissingShard(9, ()))).require_complete()
    assert raised.value.code == "shards_missing"
    assert raised.value.message.startswith(
        f"shard 7 ({A}: it is gone; the origin: no such file), shard 9 (nobody has it)"
    )


def test_many_missing_shards_are_counted() -> None:
    report = TransferReport(missing=tuple(MissingShard(number, ()) for number in range(SHARDS_NAMED_MAX + 3)))
    with pytest.raises(Unavailable, match="and 3 more"):
        report.require_complete()


def test_progress_has_a_rate_also_before_time_has_passed() -> None:
    assert TransferProgress(0, 0, 1, 10, 0.0).bytes_per_s == 0.0
    assert TransferProgress(0, 0, 1, 10, 2.0).bytes_per_s == 5.0


@pytest.mark.parametrize(
    "value",
    [
        TransferReport(
            (MovedShard(1, None, 10, 5, 0.5),), (2,), (MissingShard(3, ()),), (BadCopy(4, A, "shard_corrupt", "why"),)
        ),
        TransferProgress(1, 2, 3, 4, 5.0, (UnderWay(1, A, 5, None),)),
    ],
)
def test_outcomes_can_be_told_to_others(value: msgspec.Struct) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value)) == value
