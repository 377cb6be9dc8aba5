"""The facts that the bus itself publishes about handlers."""

from __future__ import annotations

from typing import ClassVar

from forged.kernel.messages import Fact


class HandlerFailed(Fact, frozen=True):
    """A handler raised an error or exceeded its deadline on one fact; other handlers are not affected."""

    level: ClassVar[str] = "warning"

    handler: str
    fact_id: int
    reason: str


class HandlerQuarantined(Fact, frozen=True):
    """A plugin's handler failed too often in a row and receives no facts until it is readmitted."""

    level: ClassVar[str] = "warning"

    handler: str
    failures: int
    reason: str


class HandlerReadmitted(Fact, frozen=True):
    """A quarantined handler receives facts again."""

    handler: str
