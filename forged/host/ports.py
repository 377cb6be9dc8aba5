"""What slots need of the other services."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forged.auth.model import Principal
from forged.catalog.model import CheckpointMeta


@dataclass(frozen=True, slots=True)
class SlotsPort:
    """What slots need to know of the other services."""

    is_registered: Callable[[str, str, bytes], bool]
    """Whether this process is a worker of the job."""
    is_trusted: Callable[[Principal], bool]
    """Whether the daemon may write to any directory for this principal."""
    is_managed: Callable[[str, str], bool]
    """Whether the daemon may write to this path for any principal of this job."""
    checkpoint_at: Callable[[str, str, str], CheckpointMeta | None]
    """What the catalogue has of the checkpoint of a job with this path and save id."""
    verify_again: Callable[[str], None]
    """Have the catalogue verify a corrupted checkpoint, which is offered again if it is whole."""
