"""Publishes manifests, and finds out whether one exists after its publication has failed."""

from __future__ import annotations

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.format.manifest import Manifest, encode
from forged.checkpoint.ports import Storage
from forged.checkpoint.rank_group import OutcomeUnknown
from forged.checkpoint.saving.incremental import require_links
from forged.checkpoint.storage import listing
from forged.errors import describe

EXISTS = "checkpoint_exists"
UNREACHABLE = "checkpoint_storage_unreachable"


def publish_manifest(storage: Storage, manifest: Manifest) -> None:
    """Publish a manifest. After an error there is no checkpoint, unless the error is `OutcomeUnknown`."""
    data = encode(manifest)
    try:
        storage.publish(manifest.path, data)
    except Exception as error:
        if not _exists_after(error, storage, manifest, data):
            raise
    try:
        require_links(storage, manifest)
    except CheckpointException as error:
        try:
            storage.delete([manifest.path])
        except CheckpointException as second_error:
            raise outcome_unknown(manifest.prefix, second_error) from error
        raise


def _exists_after(error: Exception, storage: Storage, manifest: Manifest, data: bytes) -> bool:
    """Whether the manifest exists durably although publishing it failed; if not for certain, remove it."""
    path = manifest.path
    try:
        if not listing.has_content(storage, path, data):
            if _may_still_happen(error):
                raise outcome_unknown(manifest.prefix, error)
            return False
        if isinstance(error, CheckpointException) and error.code == EXISTS:
            # An earlier try of this save published it, and its reply was lost.
            storage.sync_names([path])
            return True
        # The manifest may not be durable. It must not come back after the files that it names are deleted.
        storage.delete([path])
    except OutcomeUnknown:
        raise
    except Exception as second_error:
        raise outcome_unknown(manifest.prefix, second_error) from second_error
    return False


def outcome_unknown(prefix: str, error: Exception) -> OutcomeUnknown:
    """The manifest may exist, now or later."""
    return OutcomeUnknown(
        f"it is unknown whether the checkpoint was saved: {describe(error)}",
        prefix,
        ExceptionType.STORAGE_ERROR,
        code="checkpoint_undecided",
        fix="`forgectl ckpt verify` shows whether the checkpoint exists and is whole",
    )


def _may_still_happen(error: Exception) -> bool:
    """Whether the storage may still do what it was asked for, because it has not answered."""
    is_late = isinstance(error, CheckpointException) and error.type is ExceptionType.TIMEOUT
    return is_late or (isinstance(error, CheckpointException) and error.code == UNREACHABLE)
