"""Requests and signals that only the tests know."""

from __future__ import annotations

from typing import ClassVar

from forged.auth.model import Role
from forged.kernel.messages import ANY_JOB, Request, Signal


class ExampleRequest(Request[str], frozen=True):
    """A request that the daemon never answers."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = ANY_JOB

    about: str


class ExampleSignal(Signal, frozen=True):
    """A signal."""

    needs: ClassVar[Role] = Role.VIEWER
    external: ClassVar[bool] = True
    job_field: ClassVar[str | None] = None

    text: str
