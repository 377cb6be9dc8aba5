from __future__ import annotations

import msgspec
import pytest

from forged.data.store.errors import StoreFailed
from forged.data.transfer.outcome import (
    SHARDS_NAMED_MAX,
    BadCopy,
    MissingShard,
    MovedShard,
    ShardInTransit,
    SourceFailure,
    TransferProgress,
    TransferReport,
)
from forged.data.transfer.schedule import Fault
from forged.errors import Unavailable
from tests.data.topology_changes import at

A = at(0, 0)


def test_a_complete_report_raises_nothing() -> None:
    report = TransferReport(moved=(MovedShard(1, A, 10, 0, 0.5),))
    assert report.is_complete
    report.require_complete()


def test_missing_shards_are_listed_with_all_attempts() -> None:
    missing = MissingShard(7, (SourceFailure(A, "it is gone"), SourceFailure(None, "no such file")))
    with pytest.raises(Unavailable) as raised:
        TransferReport(missing=(missing, MissingShard(9, ()))).require_complete()
    assert raised.value.code == "shards_missing"
    assert raised.value.message == (
        f"cannot fetch shard 7 ({A}: it is gone; the origin: no such file); shard 9 (no worker has it)"
    )


def test_repeated_reason_of_a_source_is_quoted_once() -> None:
    missing = MissingShard(7, (SourceFailure(None, "the bucket is away"),) * 3)
    assert str(missing) == "shard 7 (the origin: the bucket is away)"


def test_the_shard_and_the_origin_are_named_once() -> None:
    missing = MissingShard(3, (SourceFailure(None, "the origin failed over shard 3: ValueError: shard 33 is odd"),))
    assert str(missing) == "shard 3 (the origin failed over it: ValueError: shard 33 is odd)"
    assert missing.reason == "the origin failed over it: ValueError: shard 33 is odd"


def test_reason_shared_by_several_sources_is_quoted_once() -> None:
    full = [
        MissingShard(number, (SourceFailure(A, f"there is no room on the disk for shard {number}", Fault.OWN),))
        for number in (13, 17, 19)
    ]
    with pytest.raises(StoreFailed) as raised:
        TransferReport(missing=(*full, MissingShard(4, (SourceFailure(A, "it hangs", Fault.OWN),)))).require_complete()
    assert raised.value.message == (
        "cannot store 3 shards (there is no room on the disk): 13, 17, 19; shard 4 (it hangs)"
    )


def test_storage_error_of_this_host_blames_no_source() -> None:
    full = MissingShard(7, (SourceFailure(A, "it is gone"), SourceFailure(A, "there is no room", Fault.OWN)))
    assert (full.is_own_fault, full.has_no_holder) == (True, False)
    with pytest.raises(StoreFailed) as raised:
        TransferReport(missing=(MissingShard(3, ()), full)).require_complete()
    assert raised.value.message == "cannot store shard 7 (there is no room)"
    origin = MissingShard(7, (SourceFailure(None, "there is no room", Fault.OWN),))
    assert (origin.is_own_fault, origin.has_no_holder) == (True, False)


def test_shard_without_worker_sources_is_reported_without_a_holder() -> None:
    def verdict(*failures: SourceFailure) -> tuple[bool, bool]:
        missing = MissingShard(7, failures)
        return missing.has_no_holder, missing.is_refused

    refused, broken = SourceFailure(None, "no such file", Fault.REFUSED), SourceFailure(None, "away")
    assert verdict(refused) == (True, True)
    assert verdict(broken, broken) == (True, False)
    assert verdict(broken, SourceFailure(None, "our disk", Fault.OWN), refused) == (True, True)
    assert verdict() == (True, True)
    assert verdict(SourceFailure(A, "away"), refused) == (False, True)
    assert verdict(SourceFailure(A, "not held", Fault.REFUSED)) == (False, True)


def test_many_missing_shards_are_counted() -> None:
    report = TransferReport(missing=tuple(MissingShard(number, ()) for number in range(SHARDS_NAMED_MAX + 3)))
    with pytest.raises(Unavailable, match="and 3 more"):
        report.require_complete()


def test_progress_rate_is_defined_at_time_zero() -> None:
    assert TransferProgress(0, 0, 1, 10, 0.0).bytes_per_s == 0.0
    assert TransferProgress(0, 0, 1, 10, 2.0).bytes_per_s == 5.0


@pytest.mark.parametrize(
    "value",
    [
        TransferReport(
            (MovedShard(1, None, 10, 5, 0.5),), (2,), (MissingShard(3, ()),), (BadCopy(4, A, "shard_corrupt", "why"),)
        ),
        TransferProgress(1, 2, 3, 4, 5.0, (ShardInTransit(1, A, 5, None), ShardInTransit(2, None, 0, 9, 4.5))),
    ],
)
def test_outcomes_are_serializable(value: msgspec.Struct) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value)) == value
