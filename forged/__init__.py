"""The control plane of elastic ML training in one daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forged.errors import ConfigError, ForgedError, NotLeader, PeerError, RequestRefused, Unavailable
from forged.version import VERSION

if TYPE_CHECKING:
    from forged.elastic.model import WorldOver
    from forged.worker.blocking import join
    from forged.worker.errors import JobEnded, StepAborted, WorkerEvicted

__version__ = VERSION
__all__ = [
    "ConfigError",
    "ForgedError",
    "JobEnded",
    "NotLeader",
    "PeerError",
    "RequestRefused",
    "StepAborted",
    "Unavailable",
    "WorkerEvicted",
    "WorldOver",
    "__version__",
    "join",
]


def __getattr__(name: str) -> Any:
    # Imported on demand, so that `forgectl` starts without numpy and asyncio.
    if name == "join":
        from forged.worker.blocking import join

        return join
    if name in ("JobEnded", "StepAborted", "WorkerEvicted"):
        from forged.worker import errors

        return getattr(errors, name)
    if name == "WorldOver":
        from forged.elastic.model import WorldOver

        return WorldOver
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
