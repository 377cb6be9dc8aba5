"""What the files of a model are: their artifact, as the registry records it, with checksum and size."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from forged.checkpoint.ports import CancelToken
from forged.checkpoint.progress import Progress
from forged.errors import RequestRefused
from forged.registry.messages import Artifact, Lineage

Where = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model, described."""

    artifact: Artifact
    checksum: str
    size_bytes: int
    lineage: Lineage | None = None
    """What the manifest of a checkpoint tells."""

    def of_job(self, job: str) -> ModelFiles:
        """The same, of a checkpoint in the catalogue of this job; empty: of the job that saved it."""
        return replace(self, artifact=msgspec.structs.replace(self.artifact, job=job)) if job else self


Describe = Callable[[CancelToken, Progress | None], ModelFiles]
"""Reads the files and describes them."""


def describing(files: Where | None, checkpoint: Where | None, *, verify: bool) -> Describe | None:
    """How to describe what the caller has named; None if it is neither files nor a checkpoint."""
    if files is not None and checkpoint is not None:
        raise RequestRefused(
            "model_files_ambiguous", f"both files ({files}) and a checkpoint ({checkpoint}) are given", "give one"
        )
    if files is not None:
        from forged.client.model_files.plain_files import describe_files

        return lambda token, progress: describe_files(files, token, progress)
    if checkpoint is not None:
        from forged.client.model_files.checkpoint_files import describe_checkpoint

        return lambda token, progress: describe_checkpoint(checkpoint, token, progress, verify=verify)
    return None
