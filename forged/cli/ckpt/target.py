"""The storage and the checkpoint that a command's arguments name."""

from __future__ import annotations

from typing import NamedTuple

from forged.checkpoint.format.manifest import Manifest
from forged.checkpoint.ports import CancelToken, Storage, bounded
from forged.checkpoint.storage.listing import read_manifest
from forged.checkpoint.storage.locations import root_at, storage_at


class OpenedCheckpoint(NamedTuple):
    """An existing checkpoint."""

    storage: Storage
    manifest: Manifest


def storage_of(where: str, token: CancelToken) -> Storage:
    """The storage at a path or URL."""
    return bounded(root_at(where), token)


def storage_and_prefix(where: str, token: CancelToken) -> tuple[Storage, str]:
    """The storage in which a checkpoint would lie, and its name there."""
    storage, prefix = storage_at(where)
    return bounded(storage, token), prefix


def open_checkpoint(where: str, token: CancelToken) -> OpenedCheckpoint:
    """The checkpoint at a path or URL."""
    storage, prefix = storage_and_prefix(where, token)
    return OpenedCheckpoint(storage, read_manifest(storage, prefix))
