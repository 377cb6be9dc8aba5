"""Saves a run: the steps that are due, in the foreground or in the background, and what the saves supersede.

Invariants:
- All ranks make the same calls; rank 0 chooses names, and when to save by time.
- A save whose base is deleted meanwhile is repeated, and then full.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, SupportsFloat

import msgspec

from forged.catalog.cadence import Measured
from forged.checkpoint.checkpoint import DistributedCheckpoint
from forged.checkpoint.errors import CheckpointException, ExceptionType, invalid
from forged.checkpoint.model import SaveOptions
from forged.checkpoint.ports import CancelToken, Storage
from forged.checkpoint.rank_group import RankGroup
from forged.checkpoint.run import retention
from forged.checkpoint.run.context import RunContext
from forged.checkpoint.run.resuming import Resumed
from forged.checkpoint.run.save_schedule import Look, SaveSchedule
from forged.checkpoint.run.superseded import SupersededCheckpoints
from forged.checkpoint.saving.background import SAVES_MAX, SaveHandle
from forged.checkpoint.saving.incremental import BASE_GONE
from forged.checkpoint.saving.publication import EXISTS
from forged.checkpoint.saving.receipts import RANK_GONE
from forged.checkpoint.stateful import ScriptState
from forged.checkpoint.storage import listing

FORCED = "the script asked for it"


@dataclass(frozen=True, slots=True)
class SaveSettings:
    """How a run saves, and how many checkpoints it keeps; see `AsyncCheckpoints`."""

    keep: int | None
    in_background: bool
    memory_every: int | None
    incremental: bool
    chain_max: int


class RunSaves:
    """The saves of one run at one rank."""

    def __init__(
        self,
        context: RunContext,
        settings: SaveSettings,
        schedule: SaveSchedule,
        checkpoint: DistributedCheckpoint,
        superseded: SupersededCheckpoints,
    ) -> None:
        self._context = context
        self._settings = settings
        self._schedule = schedule
        self._checkpoint = checkpoint
        self._superseded = superseded
        self._last: tuple[int, str] | None = None
        """The step and the name of the checkpoint that was saved or loaded last."""
        self._base: str | None = None
        """The latest checkpoint that was committed or loaded here, on which incremental ones build."""
        self.handles: list[SaveHandle] = []
        """The saves in the background."""

    def begin(self, resumed: Resumed) -> None:
        """Training continues from there."""
        self._schedule.begin(resumed.step, self._context.monotonic())
        if resumed.prefix is not None:
            self._last, self._base = (resumed.step, resumed.prefix), resumed.base

    def is_due(self, step: int) -> bool:
        return self._schedule.is_due_by_steps(step) or self._schedule.is_look_due(step, self._context.generation)

    async def save(
        self, step: int, state: Any, epoch: int | None, metrics: Mapping[str, SupportsFloat], *, force: bool
    ) -> str | None:
        """Save the state after `step` steps if that step is due, or with `force`; returns the checkpoint's name."""
        is_due = force or self.is_due(step)
        if not is_due and not self._is_copied(step):
            return None
        if self._context.coordinator.rank < 0:
            raise invalid("the worker is in no world", "save inside a step", code="checkpoint_no_world")
        reason = FORCED if force else await self._reason(step) if is_due else ""
        if not reason:
            await self._copy(step, state, epoch, metrics)
            return None
        with self._context.measuring_save():
            return await self._save(step, state, epoch, metrics, reason)

    async def _save(
        self, step: int, state: Any, epoch: int | None, metrics: Mapping[str, SupportsFloat], reason: str
    ) -> str:
        began_at = self._context.monotonic()
        name, is_saved, base = await self._name(step)
        if is_saved:
            return name
        options = self._options(name, step, epoch, metrics, reason, base)
        # In the background, the first calls may raise the failures of earlier saves. A save whose base is deleted
        # meanwhile is repeated, and then full.
        for calls_left in reversed(range(SAVES_MAX + 1 if self._settings.in_background else 2)):
            try:
                await self._saved(ScriptState(state), options)
                break
            except CheckpointException as error:
                is_repeated = error.code == BASE_GONE or (self._settings.in_background and error.code == RANK_GONE)
                if error.code != EXISTS and not (calls_left and is_repeated):
                    raise
                self._log_lost(error)
                if error.code == EXISTS and not self._settings.in_background:
                    break
        self._last = step, name
        ended_at = self._context.monotonic()
        self._schedule.saved(step, ended_at, ended_at - began_at)
        return name

    def _options(
        self,
        name: str,
        step: int,
        epoch: int | None,
        metrics: Mapping[str, SupportsFloat],
        reason: str = "",
        base: str | None = None,
    ) -> SaveOptions:
        return SaveOptions(
            name,
            include_rng_state=not self._context.is_worker,
            timeout=self._context.timeout_s,
            step=step,
            epoch=epoch,
            metrics=metrics,
            reason=reason,
            base=base,
            chain_max=self._settings.chain_max,
        )

    def _is_copied(self, step: int) -> bool:
        """Whether a step that is not saved is copied into memory of the host."""
        return self._settings.memory_every is not None and step > 0 and step % self._settings.memory_every == 0

    async def _copy(self, step: int, state: Any, epoch: int | None, metrics: Mapping[str, SupportsFloat]) -> None:
        """Copy a step that is not saved into memory of the host, if it is due and there are slots."""
        if not self._is_copied(step):
            return
        name, is_saved, _ = await self._name(step)
        if is_saved:
            return
        options = self._options(name, step, epoch, metrics)
        try:
            await self._checkpoint.keep_in_memory(ScriptState(state), options=options)
        except CheckpointException as error:
            # The failure of an earlier save.
            if error.code not in {RANK_GONE, BASE_GONE}:
                raise
            self._log_lost(error)

    async def _reason(self, step: int) -> str:
        """Why this step is saved, the same at all ranks; empty if it is not."""
        schedule, generation = self._schedule, self._context.generation
        catalog = self._context.catalog if self._context.coordinator.rank == 0 else None
        if schedule.is_due_by_steps(step):
            if catalog is not None:
                catalog.tell_cadence(schedule.steps_reason)
            return schedule.steps_reason
        if not schedule.is_look_due(step, generation):
            return ""
        ranks = RankGroup(self._context.coordinator, CancelToken(self._context.timeout_s), ExceptionType.SAVE_FAILED)
        measured = Measured() if catalog is None else catalog.measured()
        now = self._context.monotonic()
        found = msgspec.msgpack.encode(schedule.look(step, now, measured)) if ranks.is_root else b""
        told = await ranks.announce(found)
        if told is None:
            return ""
        look = msgspec.msgpack.decode(told, type=Look)
        schedule.take(look, generation)
        if catalog is not None:
            catalog.tell_cadence(schedule.described(look))
        return look.reason if look.is_due else ""

    def _log_lost(self, error: CheckpointException) -> None:
        """Log a save that is no reason to end the script: another process has the step, or the next save follows."""
        self._context.log.warning("a checkpoint was not saved", reason=error.message)

    async def _saved(self, state: ScriptState, options: SaveOptions) -> None:
        name, step = options.checkpoint_prefix, options.step
        assert name is not None
        assert step is not None
        if self._settings.in_background:
            # The earlier background saves that are committed supersede older checkpoints.
            await self._delete_superseded(step)
            handle = await self._checkpoint.save_async(state, options=options)
            self.handles = [*(one for one in self.handles if not one.is_committed), handle]
            return
        await self._checkpoint.save(state, options=options)
        self._superseded.restorable.add(name)
        self._base = name
        await self._delete_superseded(step)

    async def _name(self, step: int) -> tuple[str, bool, str | None]:
        """The name for a step's checkpoint, whether it is saved already, and what it builds on, as rank 0 decides."""
        last = self._last
        for handle in self.handles:
            if handle.is_committed:
                self._base = handle.prefix
        base = self._base if self._settings.incremental else None

        def choose(storage: Storage, token: CancelToken) -> tuple[str, bool, str | None]:
            if last is not None and last[0] == step and not self._has_failed(last[1]):
                return last[1], True, None
            return retention.name_of(step, partial(_is_taken, storage)), False, base

        return await self._context.decide(choose, tuple[str, bool, str | None], ExceptionType.SAVE_FAILED)

    def _has_failed(self, name: str) -> bool:
        """Whether a save in the background has failed."""
        return any(handle.prefix == name and handle.is_done and not handle.is_committed for handle in self.handles)

    async def _delete_superseded(self, step: int) -> None:
        if self._settings.keep is not None and self._context.is_root:
            await self._superseded.delete(step, self._settings.keep, self._context.catalog, self._context.timeout_s)

    async def close(self) -> None:
        """Wait for background saves, raise their failures, and delete what they supersede."""
        for handle in self.handles:
            try:
                await handle.committed()
            except CheckpointException as error:
                if error.code not in {EXISTS, RANK_GONE, BASE_GONE}:
                    await self._checkpoint.close()
                    raise
                self._log_lost(error)
        self.handles = []
        await self._checkpoint.close()
        if self._settings.in_background and self._last is not None:
            await self._delete_superseded(self._last[0])


def _is_taken(storage: Storage, name: str) -> bool:
    return listing.checkpoint_exists(storage, name) or listing.is_being_deleted(storage, name)
