"""Where a command is sent: the checkpoint, or the folder of checkpoints, that somebody has named.

Law: nothing that is waited for there outlasts the halt.
"""

from __future__ import annotations

from typing import NamedTuple

from forged.checkpoint.format.manifest import Manifest
from forged.checkpoint.ports import CancelToken, Storage, bounded
from forged.checkpoint.storage.listing import read_manifest
from forged.checkpoint.storage.locations import root_at, storage_at


class Named(NamedTuple):
    """A checkpoint that is there."""

    storage: Storage
    manifest: Manifest


def folder(where: str, token: CancelToken) -> Storage:
    """The storage that is named."""
    return bounded(root_at(where), token)


def place(where: str, token: CancelToken) -> tuple[Storage, str]:
    """The storage in which a checkpoint would lie, and its name there."""
    storage, prefix = storage_at(where)
    return bounded(storage, token), prefix


def named(where: str, token: CancelToken) -> Named:
    """The checkpoint that is named."""
    storage, prefix = place(where, token)
    return Named(storage, read_manifest(storage, prefix))
