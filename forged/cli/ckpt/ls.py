"""`forgectl ckpt ls`: the checkpoints of a folder, and files of unfinished saves and deletions.

Invariants:
- Nothing is changed.
- A checkpoint that cannot be read is listed with the reason.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.format.manifest import Manifest
from forged.checkpoint.model import is_prefix
from forged.checkpoint.ports import CancelToken, Storage, StoredFile
from forged.checkpoint.storage import listing
from forged.cli.ckpt.command import checkpoint_command
from forged.cli.ckpt.target import storage_of
from forged.cli.forgectl import tables
from forged.cli.forgectl.output import answer
from forged.cli.forgectl.parser import Options
from forged.cli.process import EXIT_FAILED, EXIT_OK

COLUMNS = ("prefix", "created_at", "age_s", "step", "ranks", "layout", "compression", "size", "parent", "job")
_OF_A_SAVE = re.compile(r"[0-9a-f]{8}\.[^/]+")
"""File names that only saves create; other names may belong to a downloaded model."""

Row = dict[str, Any]


@checkpoint_command
def show_list(options: Options, token: CancelToken) -> int:
    storage = storage_of(options.where, token)
    checkpoints, broken = _checkpoints(storage)
    unfinished = [leftover_row(prefix, entries) for prefix, entries in listing.unfinished_saves(storage).items()]
    half_deleted = [{"prefix": prefix} for prefix in listing.tombstones(storage)]
    whole = {
        "url": storage.url,
        "checkpoints": checkpoints,
        "broken": broken,
        "unfinished": unfinished,
        "half_deleted": half_deleted,
    }
    answer(options, whole, lambda: _show(whole, time.time()))
    return EXIT_FAILED if broken else EXIT_OK


def checkpoint_row(manifest: Manifest) -> Row:
    """A checkpoint as a row."""
    fence = manifest.fence
    return {
        "prefix": manifest.prefix,
        "created_at": manifest.created_at,
        "step": manifest.step,
        "epoch": manifest.epoch,
        "job": manifest.job or None,
        "world_size": manifest.world_size,
        "layout": manifest.layout.value,
        "compression": manifest.compression.value,
        "size_bytes": manifest.size_bytes,
        "tensors": len(manifest.tensors.names),
        "version": manifest.version,
        "parent": manifest.links[-1].prefix if manifest.links else None,
        "chain": [*(link.prefix for link in manifest.links), manifest.prefix],
        "fence": None if fence is None else {"term": fence.term, "generation": fence.generation},
    }


def leftover_row(prefix: str, entries: Sequence[StoredFile]) -> Row:
    """Files without a manifest as a row."""
    return {
        "prefix": prefix,
        "files": len(entries),
        "size_bytes": sum(entry.size for entry in entries),
        "written_at": max(entry.modified_at for entry in entries),
        "written_by_save": is_prefix(prefix) and all(map(_is_written_by_save, entries)),
    }


def _is_written_by_save(entry: StoredFile) -> bool:
    return _OF_A_SAVE.fullmatch(entry.name.rpartition("/")[2]) is not None


def leftover_text(row: Row, now: float) -> str:
    """Number, size and age of the files."""
    age = tables.duration(now - row["written_at"]) if now - row["written_at"] > 1 else "moments"
    return f"{tables.counted(row['files'], 'file')}, {tables.size(row['size_bytes'])}, written {age} ago"


def _checkpoints(storage: Storage) -> tuple[list[Row], list[Row]]:
    """Readable checkpoints, and those that cannot be read."""
    found: list[Row] = []
    broken: list[Row] = []
    for prefix, manifest in listing.manifests(storage):
        if isinstance(manifest, Manifest):
            found.append(checkpoint_row(manifest))
        elif manifest.retryable or manifest.type is ExceptionType.TIMEOUT:
            raise manifest
        else:
            broken.append(_broken(prefix, manifest))
    return sorted(found, key=lambda row: (row["created_at"], row["prefix"])), broken


def _broken(prefix: str, error: CheckpointException) -> Row:
    return {"prefix": prefix, "code": error.code, "message": error.message}


def _show(whole: Row, now: float) -> None:
    rows = [
        row | {"age_s": now - row["created_at"], "ranks": row["world_size"], "size": tables.size(row["size_bytes"])}
        for row in whole["checkpoints"]
    ]
    columns = COLUMNS if any(row["parent"] for row in rows) else tuple(name for name in COLUMNS if name != "parent")
    tables.table(rows, columns, f"no checkpoints in {tables.field('', whole['url'])}")
    remarks = list(_remarks(whole, now))
    if remarks:
        print()
    for remark in remarks:
        print(tables.field("", remark))


def _remarks(whole: Row, now: float) -> Iterator[str]:
    """Lines about everything that is not a readable checkpoint, with what to do."""
    for row in whole["broken"]:
        yield f"{row['prefix']} cannot be read: {row['message']}"
    for row in whole["half_deleted"]:
        yield f"{row['prefix']} is partly deleted: `forgectl ckpt rm` finishes the deletion"
    visible = {row["prefix"] for row in whole["checkpoints"]}
    for row in whole["unfinished"]:
        if row["prefix"] in visible:
            text = leftover_text(row, now)
            yield (
                f"{row['prefix']} has files that its manifest does not name ({text}): a running or an interrupted "
                f"compaction; `forgectl ckpt rm --unfinished` removes them"
            )
            continue
        what = "is not a checkpoint" if row["written_by_save"] else "has no manifest"
        why = "a running or a failed save"
        if not row["written_by_save"]:
            why += ", or a model of another tool"
        text = leftover_text(row, now)
        yield f"{row['prefix']} {what} ({text}): {why}; `forgectl ckpt rm --unfinished` removes it"
