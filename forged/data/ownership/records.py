"""How a job's dataset, assignments and suspect copies are stored.

Invariants:
- A column is stored in pieces that fit into the store. The record that names them is written with or after the last
  piece, and deleted before the first. Pieces that no record names are deleted.
- The plan of an attempt that was not committed has no effect.
- An incomplete column is an error, and nothing of it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec
import numpy as np

from forged.data.columns import NOBODY, Column
from forged.data.messages import DatasetSpec
from forged.data.ownership.attempt import Assignment
from forged.data.ownership.ownership import ShardOwnership
from forged.data.ownership.suspect_copies import SuspectCopies
from forged.elastic.model import WorkerId
from forged.errors import PeerError, RequestRefused, describe

PREFIX = "data/"
DATASET, HOLDERS, PIECE, SUSPECT = "dataset", "holders", "piece", "suspect"
PIECE_SHARDS = 100_000
WORKERS_NARROW_MAX = 1 << 15


class HoldersRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The holders of the shards in the world of a generation; 0 while the attempt is not committed."""

    attempt: int
    generation: int
    workers: tuple[WorkerId, ...]
    shards: int
    rows: int
    """One for the owners, and one for each replica."""
    weights: tuple[float, ...] = ()
    """The share of the data that each worker should hold; empty if all should hold the same."""


_encode = msgspec.msgpack.Encoder().encode
_decode_dataset = msgspec.msgpack.Decoder(DatasetSpec).decode
_decode_holders = msgspec.msgpack.Decoder(HoldersRecord).decode


def job_of(key: str) -> str:
    """The job that a key belongs to."""
    return key.removeprefix(PREFIX).partition("/")[0]


def dataset_write(job: str, dataset: DatasetSpec) -> dict[str, bytes | None]:
    """Stores a job's dataset."""
    return {f"{PREFIX}{job}/{DATASET}": _encode(dataset)}


def holders_write(job: str, attempt: int, assignment: Assignment) -> dict[str, bytes | None]:
    """Stores the record of an assignment, without its pieces."""
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
    """The pieces of an assignment's columns."""
    kind = "<i2" if len(assignment.workers) < WORKERS_NARROW_MAX else "<i4"
    for row, column in enumerate((assignment.owners, *assignment.replicas)):
        for number, start in enumerate(range(0, column.size, PIECE_SHARDS)):
            piece = column[start : start + PIECE_SHARDS].astype(kind).tobytes()
            yield f"{PREFIX}{job}/{PIECE}/{attempt}/{row}/{number}", piece


def keys_of(job: str, attempt: int, shards: int, rows: int) -> list[str]:
    """All keys of an attempt's assignment, the record first."""
    pieces = range(-(-shards // PIECE_SHARDS))
    return [f"{PREFIX}{job}/{HOLDERS}/{attempt}"] + [
        f"{PREFIX}{job}/{PIECE}/{attempt}/{row}/{number}" for row in range(rows) for number in pieces
    ]


def suspect_writes(job: str, changes: Mapping[tuple[str, int], bool]) -> dict[str, bytes | None]:
    """Stores which of these copies are suspect."""
    return {
        f"{PREFIX}{job}/{SUSPECT}/{holder}/{shard}": b"" if is_suspect else None
        for (holder, shard), is_suspect in changes.items()
    }


def _suspect(name: str, dataset: DatasetSpec) -> tuple[str, int] | None:
    """The suspect copy that a key names; None for any other key."""
    kind, _, rest = name.partition("/")
    holder, _, shard = rest.partition("/")
    return (holder, int(shard)) if kind == SUSPECT and int(shard) < dataset.shards else None


class Restored(msgspec.Struct, frozen=True):
    """What the store holds of a job."""

    ownership: ShardOwnership
    attempt: int
    """The attempt whose commit led to the current assignment; 0 before the first."""
    planned: dict[int, Assignment]
    """The assignments of attempts that may or may not have been committed."""
    unused: list[str]
    """Keys that no record names."""


def restored(job: str, entries: Iterable[tuple[str, bytes]]) -> Restored | None:
    """Decode a job's entries; None if they belong to a removed job."""
    try:
        return _restored(job, entries)
    except (msgspec.MsgspecError, KeyError, ValueError, RequestRefused) as error:
        raise PeerError("data_unreadable", f"the stored data of a job cannot be read: {describe(error)}") from error


def _restored(job: str, entries: Iterable[tuple[str, bytes]]) -> Restored | None:
    found = {key.removeprefix(f"{PREFIX}{job}/"): value for key, value in entries}
    if DATASET not in found:
        return None
    ownership = ShardOwnership(job, _decode_dataset(found[DATASET]))
    suspects = {name: copy for name in found if (copy := _suspect(name, ownership.dataset))}
    ownership.suspects = SuspectCopies(suspects.values())
    records = [_decode_holders(value) for key, value in found.items() if key.startswith(f"{HOLDERS}/")]
    held = max((record for record in records if record.generation), key=_generation, default=None)
    if held is not None:
        ownership.assignment = _assignment(held, found)
    planned = {record.attempt: _assignment(record, found) for record in records if not record.generation}
    known = {f"{PREFIX}{job}/{name}" for name in (DATASET, *suspects)}
    for record in records:
        if record is held or not record.generation:
            known.update(keys_of(job, record.attempt, record.shards, record.rows))
    unused = [key for name in found if (key := f"{PREFIX}{job}/{name}") not in known]
    return Restored(ownership, 0 if held is None else held.attempt, planned, unused)


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
        raise ValueError(f"row {row} of attempt {record.attempt} does not name the workers of {record.shards} shards")
    return column
