"""What the bus itself says and is told."""

from __future__ import annotations

from typing import ClassVar

from forged.kernel.messages import Fact


class HandlerFailed(Fact, frozen=True):
    """A handler raised, or took too long, over one fact; the others have it all the same."""

    level: ClassVar[str] = "warning"

    handler: str
    fact_id: int
    reason: str


class HandlerQuarantined(Fact, frozen=True):
    """A plugin's handler failed too many times in a row and is given nothing more until it is readmitted."""

    level: ClassVar[str] = "warning"

    handler: str
    failures: int
    reason: str


class HandlerReadmitted(Fact, frozen=True):
    """A quarantined handler takes facts again."""

    handler: str
