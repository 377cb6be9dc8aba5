"""Compaction: makes a full checkpoint of an incremental one, under the same name.

Invariants:
- The chunks of earlier checkpoints are verified and durable in new files before the manifest is replaced, which
  happens atomically. So at each moment the checkpoint is the incremental one or the full one.
- Nothing is deleted that either of the two manifests names: a load that has begun goes on.
- Files of an interrupted compaction are named by no manifest; `listing.delete_unfinished` deletes them.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from msgspec import UNSET
from msgspec.structs import replace

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.format.manifest import MANIFEST_BYTES_MAX, SUFFIX, VERSION, Manifest, Part, decode, encode
from forged.checkpoint.model import CheckpointInfo, CompressionLevel
from forged.checkpoint.ports import CancelToken, Storage, bounded
from forged.checkpoint.progress import Progress
from forged.checkpoint.saving.files.assembly import CountedTensors, SavedTensors, bytes_of_share
from forged.checkpoint.saving.files.consolidation import NamedShare, write_share
from forged.checkpoint.saving.files.plan import Share
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.locations import storage_at

UNDONE_WITHIN_S = 10.0


def compact(
    where: str | os.PathLike[str], *, token: CancelToken | None = None, progress: Progress | None = None
) -> CheckpointInfo:
    """Make a full checkpoint of the incremental one at a path or URL; no effect on a full one."""
    storage, prefix = storage_at(where)
    return listing.info_of(make_full(storage, prefix, token or CancelToken(), progress))


def make_full(
    storage: Storage,
    prefix: str,
    token: CancelToken,
    progress: Progress | None = None,
    draw: Callable[[int], bytes] = os.urandom,
) -> Manifest:
    """Make a full checkpoint of an incremental one; returns its manifest."""
    unbounded, storage = storage, bounded(storage, token)
    data = listing.read_manifest_data(storage, prefix)
    manifest = decode(data, prefix + SUFFIX)
    if not manifest.links:
        return manifest
    compaction = _Compaction(storage, manifest, data, draw(listing.SAVE_ID_BYTES).hex())
    try:
        with listing.hold_files(storage, manifest):
            return compaction.run(token, progress)
    except BaseException:
        # A token of its own, because the operation's time may be over.
        compaction.undo(bounded(unbounded, CancelToken(UNDONE_WITHIN_S)))
        raise


class _Compaction:
    """One compaction of one checkpoint."""

    def __init__(self, storage: Storage, manifest: Manifest, data: bytes, compaction_id: str) -> None:
        self._storage = storage
        self._manifest = manifest
        self._data = data
        self._lead = f"{manifest.prefix}/{manifest.save_id}.{compaction_id}"
        self._borrowed = [part for part in manifest.parts if part.is_referenced]
        self._full = b""

    def run(self, token: CancelToken, progress: Progress | None) -> Manifest:
        manifest, storage = self._manifest, self._storage
        shares = [Share(part.tensors, dict(part.partial_boxes)) for part in self._borrowed]
        total = sum(bytes_of_share(manifest.tensors, share) for share in shares)
        origin = CountedTensors(SavedTensors(storage, manifest, token), progress, total)
        written: list[Part] = []
        for number, share in enumerate(shares):
            named = NamedShare(self._file(number), 0, share, None)
            written.append(write_share(storage, named, origin, manifest.compression, token))
        full = replace(manifest, version=VERSION, chain=UNSET, parts=[*manifest.own_parts, *written])
        self._full = encode(full)
        token.check()
        storage.publish(self._document, self._full)
        self._require_unchanged()
        storage.move(self._document, manifest.path)
        self._require_present(full)
        origin.finish()
        return full

    def undo(self, storage: Storage) -> None:
        """Delete what was written, unless the manifest names it."""
        try:
            if self._full and listing.has_content(storage, self._manifest.path, self._full):
                return
            storage.delete([*map(self._file, range(len(self._borrowed))), self._document])
        except CheckpointException:
            # They stay as files of an interrupted compaction.
            return

    @property
    def _document(self) -> str:
        """The new manifest, until it replaces the old one."""
        return f"{self._lead}.manifest"

    def _file(self, number: int) -> str:
        ending = "safetensors" if self._manifest.compression is CompressionLevel.NONE else "packed"
        return f"{self._lead}-{number:05d}-of-{len(self._borrowed):05d}.{ending}"

    def _require_unchanged(self) -> None:
        """Refuse if the checkpoint was deleted, or made full by another process, meanwhile."""
        path = self._manifest.path
        if not listing.checkpoint_exists(self._storage, self._manifest.prefix):
            raise listing.missing_checkpoint(self._storage, self._manifest.prefix)
        if self._storage.read(path, MANIFEST_BYTES_MAX) != self._data:
            raise CheckpointException(
                f"checkpoint {self._manifest.prefix} was changed during its compaction",
                self._manifest.prefix,
                ExceptionType.SAVE_FAILED,
                code="checkpoint_replaced",
                fix="compact it again",
                retryable=True,
            )

    def _require_present(self, full: Manifest) -> None:
        """Withdraw the new manifest if the checkpoint was deleted while it was published."""
        if all(listing.file_exists(self._storage, part.file) for part in full.parts):
            return
        self._storage.delete([full.path])
        raise listing.missing_checkpoint(self._storage, full.prefix)
