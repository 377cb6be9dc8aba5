"""Which checkpoints of a storage use files of which earlier checkpoints.

Invariants:
- Only visible checkpoints count: those with a manifest that can be read, and without a tombstone.
- A name that was deleted and used again is another checkpoint: saves are compared, not names.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.format.manifest import MANIFEST_BYTES_MAX, SUFFIX, TOMBSTONE, Ancestry, decode_ancestry
from forged.checkpoint.ports import Storage, StoredFile

MISSING = "checkpoint_file_missing"
NEEDED = "checkpoint_needed"
NAMED_MAX = 5
_UNREADABLE = frozenset(
    {ExceptionType.CORRUPTED_CHECKPOINT, ExceptionType.INCOMPATIBLE_VERSION, ExceptionType.VALIDATION_FAILED}
)
"""Errors of manifests that no checkpoint can be restored from, and of files with the ending of a manifest."""


class AncestryCache:
    """The ancestries of a storage's checkpoints; each manifest is read once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[StoredFile, Ancestry | None] = {}

    def all(self, storage: Storage) -> dict[str, Ancestry]:
        """Those of all visible checkpoints, by prefix."""
        entries = {entry.name: entry for entry in storage.entries()}
        found: dict[StoredFile, Ancestry | None] = {}
        for name, entry in entries.items():
            if name.endswith(SUFFIX) and name.removesuffix(SUFFIX) + TOMBSTONE not in entries:
                known = self._known.get(entry)
                found[entry] = _read(storage, name) if known is None else known
        with self._lock:
            self._known = found
        return {entry.name.removesuffix(SUFFIX): one for entry, one in found.items() if one is not None}

    def users_of(self, storage: Storage, prefix: str, save_id: str) -> list[str]:
        """The visible checkpoints that use files of a checkpoint; an empty `save_id` stands for any save."""
        return users_among(self.all(storage), prefix, save_id)


def users_among(ancestries: Mapping[str, Ancestry], prefix: str, save_id: str) -> list[str]:
    """Those of some checkpoints that use files of a save; an empty `save_id` stands for any."""

    def uses(ancestry: Ancestry) -> bool:
        return any(link.prefix == prefix and save_id in {"", link.save_id} for link in ancestry.chain)

    return sorted(user for user, ancestry in ancestries.items() if uses(ancestry))


def _read(storage: Storage, path: str) -> Ancestry | None:
    """The ancestry that a manifest states; None if it was deleted meanwhile, or cannot be restored from."""
    try:
        return decode_ancestry(storage.read(path, MANIFEST_BYTES_MAX), path)
    except CheckpointException as error:
        if error.code != MISSING and error.type not in _UNREADABLE:
            raise
        return None


def needed(prefix: str, users: list[str]) -> CheckpointException:
    """The error for a deletion of a checkpoint that other checkpoints need."""
    named = ", ".join(users[:NAMED_MAX])
    if len(users) > NAMED_MAX:
        named += f" and {len(users) - NAMED_MAX} more"
    return CheckpointException(
        f"checkpoint {prefix} is needed by {named}",
        prefix,
        ExceptionType.STORAGE_ERROR,
        code=NEEDED,
        fix="make those full (`forgectl ckpt compact`) or delete them first",
    )
