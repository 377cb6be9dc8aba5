"""The port to a host of workers: its memory for slots, and what is saved from there.

The daemon embeds the agent of its own host; an agent on another host could serve the same port later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from forged.errors import RequestRefused
from forged.host.model import SavedSlots, SlotContents, StagedCheckpoint


class HeldSlots(Protocol):
    """The slots of all ranks of a save, which their workers do not overwrite until they are released."""

    @property
    def prefix(self) -> str:
        """The checkpoint's name in its directory."""
        ...

    async def save(self, storage_path: str, *, is_damaged: bool) -> SavedSlots:
        """Save the checkpoint in a directory, in place of one that `is_damaged`. Raises `CheckpointException`."""
        ...

    def release(self) -> None: ...


class HostAgent(Protocol):
    """A host. Slots are named by their ids."""

    async def begin(self, history: str) -> Mapping[str, int]:
        """Serve the daemon with this store; the slots that are there already, with their sizes."""
        ...

    def end(self) -> None:
        """Serve no daemon any more; the slots stay."""
        ...

    async def make(self, slot_ids: Sequence[str], size_bytes: int) -> list[str]:
        """Make slots, all or none; their paths. The memory is reserved when this returns."""
        ...

    async def delete(self, slot_ids: Sequence[str]) -> None:
        """Delete slots; ignores missing ones. Their memory is free when no process maps it."""
        ...

    async def paths(self, slot_ids: Sequence[str]) -> list[str]:
        """The paths of slots."""
        ...

    async def descriptors(self, slot_ids: Sequence[str]) -> list[int]:
        """Slots as open file descriptors, which the caller closes."""
        ...

    async def read(self, slot_ids: Sequence[str]) -> list[SlotContents]:
        """What the whole ones of these slots hold."""
        ...

    async def hold(self, staged: StagedCheckpoint, *, is_trusted: bool) -> HeldSlots | None:
        """Hold the slots of a save; None if one of them holds something else by now.

        With `is_trusted` their writers could end the agent anyway, so that it may map the slots.
        """
        ...


class NoHost:
    """A daemon without an agent: there are no slots."""

    async def begin(self, history: str) -> Mapping[str, int]:
        return {}

    def end(self) -> None:
        """Do nothing: there are no slots."""

    async def make(self, slot_ids: Sequence[str], size_bytes: int) -> list[str]:
        raise RequestRefused(
            "slots_unavailable", "this daemon has no slots", "use a daemon that runs as a process of its own"
        )

    async def delete(self, slot_ids: Sequence[str]) -> None:
        """Do nothing: there are none."""

    async def paths(self, slot_ids: Sequence[str]) -> list[str]:
        return []

    async def descriptors(self, slot_ids: Sequence[str]) -> list[int]:
        return []

    async def read(self, slot_ids: Sequence[str]) -> list[SlotContents]:
        return []

    async def hold(self, staged: StagedCheckpoint, *, is_trusted: bool) -> HeldSlots | None:
        return None
