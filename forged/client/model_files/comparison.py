"""Compares the files of a registered version with its checksum.

Invariants:
- Files are missing only if their folder is there: one that is not mounted on this host proves nothing.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.format.content_digest import SCHEME
from forged.checkpoint.ports import CancelToken
from forged.checkpoint.progress import Progress
from forged.client.model_files.checkpoint_files import compare_checkpoint
from forged.client.model_files.plain_files import DAMAGED, FilesVerdict, compare_files, is_folder
from forged.errors import ForgedError, RequestRefused, Unavailable
from forged.registry.messages import Artifact
from forged.registry.model import ModelMetadata

URL = "://"
LOCAL_URL = "file://"


def compare(
    metadata: ModelMetadata,
    artifact: Artifact,
    token: CancelToken,
    progress: Progress | None = None,
    location: str = "",
) -> FilesVerdict:
    """Read all files of a version; `location` is where they lie if that is not where the registry says."""
    where = location_of(metadata, artifact, location)
    if is_checkpoint(metadata, artifact):
        return compare_checkpoint(where, metadata.checksum, token, progress)
    return compare_files(artifact, metadata.checksum, where, token, progress)


def is_checkpoint(metadata: ModelMetadata, artifact: Artifact) -> bool:
    """Whether the version is a checkpoint, and not plain files."""
    return bool(artifact.save_id) or metadata.checksum.startswith(SCHEME)


def location_of(metadata: ModelMetadata, artifact: Artifact, otherwise: str = "") -> str:
    """Where the files of a version can be read; refuses a version whose files this host cannot find."""
    where, name = otherwise or artifact.location, named(metadata)
    is_saved = is_checkpoint(metadata, artifact)
    if not where or not (is_saved or artifact.files):
        known = f"; it only knows that they are at {where}" if where else ""
        raise RequestRefused(
            "model_files_unknown",
            f"the registry does not know the files of {name} with their checksums{known}",
            "register a version with its files or its checkpoint",
        )
    if URL in where and not where.startswith(LOCAL_URL):
        if is_saved:
            return where
        raise RequestRefused(
            "model_files_remote",
            f"the files of {name} are at {where}, which forged does not read",
            "fetch them with the tool of that place, and name the copy as the location",
        )
    path = unquote(where.removeprefix(LOCAL_URL)) if where.startswith(LOCAL_URL) else where
    if not is_folder(Path(path).parent):
        raise Unavailable(
            "model_files_unreachable",
            f"{Path(path).parent}, where the files of {name} are, does not exist on this host",
            "mount it, or use a host that has it",
        )
    return where if is_saved else path


def named(metadata: ModelMetadata) -> str:
    """The version in a sentence."""
    return f"{metadata.model_id}@{metadata.version}"


def is_damage(error: ForgedError) -> bool:
    """Whether an error tells that the files of a version are not those that were registered."""
    is_corrupt = isinstance(error, CheckpointException) and error.type is ExceptionType.CORRUPTED_CHECKPOINT
    return is_corrupt or error.code == DAMAGED
