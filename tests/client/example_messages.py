"""Requests and signals that only the tests know."""

from __future__ import annotations

from typing import ClassVar

from forged.auth.model import Role
from forged.kernel.messages import ANY_JOB, Request, Signal


class ExampleRequest(Request[str], frozen=True):
    """Think about it, perhaps for ever."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = ANY_JOB

    about: str


class ExampleSignal(Signal, frozen=True):
    """Something that need not arrive."""

    needs: ClassVar[Role] = Role.VIEWER
    external: ClassVar[bool] = True
    job_field: ClassVar[str | None] = None

    text: str
