"""What is kept of a job's data in the store: the dataset, who holds it, what was planned for an attempt, and doubts.

Law: a column is cut into pieces that fit into the store, and what names them is written with or after the last of them
and deleted before the first. A plan whose attempt was not committed is nothing. A piece that nothing names is deleted.
What does not say of each shard who has it is an error, and not believed in part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec
import numpy as np

from forged.data.columns import NOBODY, Column
from forged.data.messages import DatasetSpec
from forged.data.ownership.gathering import Assignment
from forged.data.ownership.ownership import ShardOwnership
from forged.data.ownership.suspect_copies import SuspectCopies
from forged.elastic.model import WorkerId
from forged.errors import PeerError, RequestRefused, describe

PREFIX = "data/"
DATASET, HOLDERS, PIECE, DOUBTED = "dataset", "holders", "piece", "doubted"
PIECE_SHARDS = 100_000
WORKERS_NARROW_MAX = 1 << 15


class HoldersRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds the shards in the world of a generation; 0 while the attempt is not committed."""

    attempt: int
    generation: int
    workers: tuple[WorkerId, ...]
    shards: int
    rows: int
    """The owners, and each further copy."""
    weights: tuple[float, ...] = ()
    """How much of the data each of the workers should hold, in proportion; empty where all should hold the same."""


_encode = msgspec.msgpack.Encoder().encode
_decode_dataset = msgspec.msgpack.Decoder(DatasetSpec).decode
_decode_holders = msgspec.msgpack.Decoder(HoldersRecord).decode


def job_of(key: str) -> str:
    """The job that a key is about."""
    return key.removeprefix(PREFIX).partition("/")[0]


def dataset_write(job: str, dataset: DatasetSpec) -> dict[str, bytes | None]:
    """What is written when a job's dataset is known."""
    return {f"{PREFIX}{job}/{DATASET}": _encode(dataset)}


def holders_write(job: str, attempt: int, assignment: Assignment) -> dict[str, bytes | None]:
    """What is written of who holds what, without the pieces."""
    workers = assignment.workers
    record = HoldersRecord(
        attempt=attempt,
        generation=assignment.generation,
        workers=workers,
        shards=assignment.owners.size,
        rows=1 + len(assignment.replicas),
        weights=tuple(assignment.weights.get(worker, 1.0) for worker in workers) if assignment.weights else (),
    )
    return {f"{PREFIX}{job}/{HOLDERS}/{attempt}": _encode(record)}


def piece_writes(job: str, attempt: int, assignment: Assignment) -> Iterator[tuple[str, bytes]]:
    """The pieces of the columns."""
    kind = "<i2" if len(assignment.workers) < WORKERS_NARROW_MAX else "<i4"
    for row, column in enumerate((assignment.owners, *assignment.replicas)):
        for number, start in enumerate(range(0, column.size, PIECE_SHARDS)):
            piece = column[start : start + PIECE_SHARDS].astype(kind).tobytes()
            yield f"{PREFIX}{job}/{PIECE}/{attempt}/{row}/{number}", piece


def keys_of(job: str, attempt: int, shards: int, rows: int) -> list[str]:
    """All keys of what was planned for an attempt, what names the others first."""
    pieces = range(-(-shards // PIECE_SHARDS))
    return [f"{PREFIX}{job}/{HOLDERS}/{attempt}"] + [
        f"{PREFIX}{job}/{PIECE}/{attempt}/{row}/{number}" for row in range(rows) for number in pieces
    ]


def doubt_writes(job: str, changes: Mapping[tuple[str, int], bool]) -> dict[str, bytes | None]:
    """What is written of whether these copies are in doubt."""
    return {
        f"{PREFIX}{job}/{DOUBTED}/{holder}/{shard}": b"" if is_doubted else None
        for (holder, shard), is_doubted in changes.items()
    }


def _doubted(name: str, dataset: DatasetSpec) -> tuple[str, int] | None:
    """The copy that a key says to be in doubt; None if it is about something else."""
    kind, _, rest = name.partition("/")
    holder, _, shard = rest.partition("/")
    return (holder, int(shard)) if kind == DOUBTED and int(shard) < dataset.shards else None


class Restored(msgspec.Struct, frozen=True):
    """What comes back of a job."""

    custody: ShardOwnership
    attempt: int
    """The one that led to what is held now; 0 before the first."""
    planned: dict[int, Assignment]
    """What was planned for attempts of which nobody knows yet whether they were committed."""
    remains: list[str]
    """Keys that nothing names any more, or never did."""


def restored(job: str, entries: Iterable[tuple[str, bytes]]) -> Restored | None:
    """What these entries were written for; None where they are left of a job that is no more."""
    try:
        return _restored(job, entries)
    except (msgspec.MsgspecError, KeyError, ValueError, RequestRefused) as error:
        raise PeerError("data_unreadable", f"what is kept of a job's data cannot be read: {describe(error)}") from error


def _restored(job: str, entries: Iterable[tuple[str, bytes]]) -> Restored | None:
    found = {key.removeprefix(f"{PREFIX}{job}/"): value for key, value in entries}
    if DATASET not in found:
        return None
    custody = ShardOwnership(job, _decode_dataset(found[DATASET]))
    doubted = {name: copy for name in found if (copy := _doubted(name, custody.dataset))}
    custody.doubts = SuspectCopies(doubted.values())
    records = [_decode_holders(value) for key, value in found.items() if key.startswith(f"{HOLDERS}/")]
    held = max((record for record in records if record.generation), key=_generation, default=None)
    if held is not None:
        custody.assignment = _assignment(held, found)
    planned = {record.attempt: _assignment(record, found) for record in records if not record.generation}
    known = {f"{PREFIX}{job}/{name}" for name in (DATASET, *doubted)}
    for record in records:
        if record is held or not record.generation:
            known.update(keys_of(job, record.attempt, record.shards, record.rows))
    remains = [key for name in found if (key := f"{PREFIX}{job}/{name}") not in known]
    return Restored(custody, 0 if held is None else held.attempt, planned, remains)


def _generation(record: HoldersRecord) -> int:
    return record.generation


def _assignment(record: HoldersRecord, found: Mapping[str, bytes]) -> Assignment:
    kind = "<i2" if len(record.workers) < WORKERS_NARROW_MAX else "<i4"
    rows = [_column(record, row, kind, found) for row in range(record.rows)]
    replicas = np.stack(rows[1:]) if rows[1:] else np.empty((0, record.shards), np.int32)
    weights = dict(zip(record.workers, record.weights, strict=False))
    return Assignment(record.generation, record.workers, rows[0], replicas, weights)


def _column(record: HoldersRecord, row: int, kind: str, found: Mapping[str, bytes]) -> Column:
    pieces = range(-(-record.shards // PIECE_SHARDS))
    parts = [np.frombuffer(found[f"{PIECE}/{record.attempt}/{row}/{number}"], kind) for number in pieces]
    column = np.concatenate(parts).astype(np.int32) if parts else np.empty(0, np.int32)
    if column.size != record.shards or not ((column >= NOBODY) & (column < len(record.workers))).all():
        raise ValueError(f"row {row} of attempt {record.attempt} does not say who has each of {record.shards} shards")
    return column
