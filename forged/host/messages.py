"""What workers and operators ask about slots."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from forged.auth.model import Role
from forged.kernel.messages import ANY_JOB, Nothing, Request, Ticket
from forged.pagination import PAGE_ENTRIES_MAX


class OpenedSlots(msgspec.Struct, frozen=True):
    """Two slots of a worker."""

    paths: list[str]
    size_bytes: int
    """Of each."""
    persists: bool
    """Whether the daemon writes to the directory that the slots are for."""


class SlotSave(msgspec.Struct, frozen=True):
    """How far a save from slots is."""

    is_saved: bool
    """Whether the checkpoint exists; if not, it is still being written."""
    size_bytes: int = 0


class StagedSlots(msgspec.Struct, frozen=True):
    """The newest save that is in memory and newer than what is on disk; without paths there is none."""

    paths: list[str] = []
    """Of the slots, by rank; on the daemon's host."""
    step: int = 0


class SlotView(msgspec.Struct, frozen=True, kw_only=True):
    """A slot as operators see it."""

    slot_id: str
    job: str
    worker_id: str
    size_bytes: int
    storage_path: str
    owner: str
    """Whether the worker is present, has failed or left."""
    save_id: str = ""
    """Of the save that it holds; empty if it holds none that is whole."""
    step: int | None = None
    rank: int | None = None
    world_size: int | None = None


class SlotPage(msgspec.Struct, frozen=True):
    """Some slots, by id; `more` says that further ones follow."""

    slots: list[SlotView]
    more: bool
    used_bytes: int
    """Of all slots of the daemon."""
    limit_bytes: int


class OpenSlots(Request[OpenedSlots], frozen=True):
    """Open two slots of at least so many bytes each; those that the worker has for this directory, if they suffice."""

    needs: ClassVar[Role] = Role.WORKER

    job: str
    worker_id: str
    incarnation: bytes
    size_bytes: int
    storage_path: str
    """The directory that the saves are for; absolute."""


class CloseSlots(Request[Nothing], frozen=True):
    """Free the slots of a worker, which does not use them."""

    needs: ClassVar[Role] = Role.WORKER

    job: str
    worker_id: str
    incarnation: bytes


class ShareSlots(Request[Ticket], frozen=True):
    """Pass the slots of a worker as file descriptors over a side connection, which must be a Unix socket."""

    needs: ClassVar[Role] = Role.WORKER
    decides: ClassVar[bool] = False

    job: str
    worker_id: str
    incarnation: bytes
    storage_path: str


class SaveSlots(Request[SlotSave], frozen=True):
    """Save the checkpoint that all ranks have staged into slots. Repeat it until it is saved or refused.

    Rank 0 begins the save. The other ranks ask how it goes.
    """

    needs: ClassVar[Role] = Role.WORKER
    decides: ClassVar[bool] = False

    job: str
    worker_id: str
    incarnation: bytes
    save_id: str
    begins: bool = True
    """Whether the save is begun if it does not run, and again after a refusal was told."""


class FindStagedSlots(Request[StagedSlots], frozen=True):
    """Find what a job can be restored from in memory; also before the job exists (none)."""

    needs: ClassVar[Role] = Role.WORKER
    decides: ClassVar[bool] = False

    job: str
    storage_path: str
    """The directory that the save is for."""


class ListSlots(Request[SlotPage], frozen=True):
    """List the slots of a job, or of all visible jobs, after the one with the id `after`."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = ANY_JOB

    job: str = ""
    after: str = ""
    limit: int = PAGE_ENTRIES_MAX


REQUESTS = (OpenSlots, CloseSlots, ShareSlots, SaveSlots, FindStagedSlots, ListSlots)
