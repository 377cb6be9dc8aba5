"""Resumes a run: finds the newest checkpoint that can be restored, and loads it.

Invariants:
- Where checkpoints exist and none can be restored, a run does not start anew without an error.
- Each candidate that is passed over is logged with the reason.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

from forged.checkpoint.checkpoint import CheckpointLoadResult, DistributedCheckpoint
from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.loading.loader import PARTLY_OVERWRITTEN
from forged.checkpoint.model import LoadOptions
from forged.checkpoint.ports import (
    CancelToken,
    CataloguedCheckpoint,
    HostSlots,
    RestoreAdvice,
    Restored,
    Storage,
)
from forged.checkpoint.run import retention
from forged.checkpoint.run.context import RunContext
from forged.checkpoint.run.restorable import SHOWN_MAX, is_corruption, is_damage, none_found, none_restorable
from forged.checkpoint.run.superseded import SupersededCheckpoints
from forged.checkpoint.stateful import ScriptState
from forged.checkpoint.storage import listing
from forged.checkpoint.thread_calls import run_in_thread


class Resumed(NamedTuple):
    """What a run continues from."""

    step: int
    prefix: str | None = None
    """The checkpoint; None if it was in memory."""
    base: str | None = None
    """The checkpoint, if incremental ones may build on it."""


class RunResumption:
    """The resumption of one run at one rank."""

    def __init__(
        self,
        context: RunContext,
        checkpoint: DistributedCheckpoint,
        alone: DistributedCheckpoint,
        in_memory: Callable[[Storage], DistributedCheckpoint],
        superseded: SupersededCheckpoints,
    ) -> None:
        """`alone` loads without the other ranks, and `in_memory` from slots."""
        self._context = context
        self._checkpoint = checkpoint
        self._alone = alone
        self._in_memory = in_memory
        self._superseded = superseded
        self._advice: RestoreAdvice | None = None
        """What the catalogue has said when this run was resumed, if this rank has asked it."""
        self._missing: dict[str, str] = {}
        """The best restore points, as far as the folder does not have them, with the reason."""

    async def resume(self, state: Any) -> Resumed | None:
        """Load the newest checkpoint that can be restored into `state`; None if there is none."""
        is_alone = self._context.is_worker and self._context.coordinator.rank < 0
        checkpoint = self._alone if is_alone else self._checkpoint
        failures: dict[str, CheckpointException] = {}
        self._advice, self._missing = None, {}
        if is_alone and (resumed := await self._resume_from_memory(state)) is not None:
            return resumed
        # Listed again after each failure: newer ones may have been saved, and the rest deleted, meanwhile.
        while names := [name for name in await self._names(is_alone, is_first=not failures) if name not in failures]:
            options = LoadOptions(names[0], load_rng_state=not self._context.is_worker, timeout=self._context.timeout_s)
            began_at = self._context.monotonic()
            try:
                async with self._held(names[0]):
                    result = await checkpoint.load(ScriptState(state), options=options)
            except CheckpointException as error:
                if not is_damage(error):
                    raise
                self._note_damage(names[0], error)
                failures[names[0]] = error
            else:
                for chunk in result.repaired[:1]:
                    self._context.log.warning(
                        "the checkpoint has missing or corrupt chunks; healthy copies were loaded instead",
                        prefix=names[0],
                        chunks=len(result.repaired),
                        first=f"chunk {chunk.chunk} of {chunk.tensor} in {chunk.file}",
                    )
                seconds = self._context.monotonic() - began_at
                return self._resumed(names[0], result, seconds, failures, is_alone=is_alone)
        if failures:
            raise none_restorable(failures, self._context.storage.url)
        return None

    async def _resume_from_memory(self, state: Any) -> Resumed | None:
        """Load what the workers of the job have staged last, if it is newer than what is on disk."""
        slots: HostSlots | None = getattr(self._context.ranks, "slots", None)
        if slots is None:
            return None
        began_at, token = self._context.monotonic(), CancelToken(self._context.timeout_s)
        with ExitStack() as stack:
            storage = await run_in_thread(
                lambda: stack.enter_context(slots.staged(self._context.storage.url, token)), token
            )
            if storage is None:
                return None
            options = LoadOptions(storage.prefix, load_rng_state=False, timeout=self._context.timeout_s)
            try:
                result = await self._in_memory(storage).load(ScriptState(state), options=options)
            except CheckpointException as error:
                if not is_damage(error):
                    raise
                self._context.log.warning("what is in memory cannot be restored", reason=error.message)
                return None
        manifest, seconds = result.metadata, self._context.monotonic() - began_at
        step, worker = manifest.step or 0, self._context.ranks
        worker.update_training_state(manifest.epoch or 0, step, worker.learning_rate)
        if (catalog := self._context.catalog) is not None:
            catalog.report_restore(Restored(None, step, seconds, manifest.size_bytes, []))
        self._context.log.info("resumed from memory", prefix=storage.prefix, step=step)
        return Resumed(step)

    def _note_damage(self, name: str, error: CheckpointException) -> None:
        self._superseded.damaged.add(name)
        reason = _reason(error)
        self._context.log.warning("checkpoint skipped: it cannot be restored", prefix=name, reason=reason)
        point, catalog = self._point(name), self._context.catalog
        if point is not None and catalog is not None and is_corruption(error):
            catalog.report_corrupt(point.checkpoint_id, reason)

    def _resumed(
        self,
        name: str,
        result: CheckpointLoadResult,
        seconds: float,
        failures: Mapping[str, CheckpointException],
        *,
        is_alone: bool,
    ) -> Resumed:
        manifest = result.metadata
        step = retention.step_of(name) if manifest.step is None else manifest.step
        self._superseded.restorable.add(name)
        point, catalog = self._point(name), self._context.catalog
        if is_alone:
            worker = self._context.ranks
            worker.update_training_state(manifest.epoch or 0, step, worker.learning_rate)
            if catalog is not None:
                reasons = self._missing | {prefix: _reason(error) for prefix, error in failures.items()}
                skipped = [f"{prefix}: {reason}" for prefix, reason in reasons.items()]
                catalog.report_restore(
                    Restored(
                        point,
                        step,
                        seconds,
                        result.bytes_read,
                        skipped,
                        storage_path=f"{self._context.storage.url}/{name}",
                        save_id=manifest.save_id,
                        repaired_chunks=len(result.repaired),
                    )
                )
        why = {} if point is None else {"reason": point.reason}
        if failures:
            why["skipped"] = ", ".join(failures)
        self._context.log.info("resumed from a checkpoint", prefix=name, step=step, **why)
        # A checkpoint that builds on a damaged one would have the damage, too.
        return Resumed(step, name, None if result.repaired else name)

    def _point(self, name: str) -> CataloguedCheckpoint | None:
        """What the catalogue has said of a checkpoint that it offers, to the rank that has asked it."""
        points = () if self._advice is None else self._advice.points
        return next((point for point in points if point.prefix == name), None)

    @asynccontextmanager
    async def _held(self, name: str) -> AsyncIterator[None]:
        """Have the catalogue keep a checkpoint while it is read."""
        point, catalog = self._point(name), self._context.catalog
        with ExitStack() as stack:
            if point is not None and catalog is not None:
                hold = partial(stack.enter_context, catalog.hold(point.checkpoint_id))
                await run_in_thread(hold, CancelToken(self._context.timeout_s))
            yield

    async def _names(self, is_alone: bool, *, is_first: bool) -> list[str]:
        """The checkpoints of the run that may be restored, the best first, as rank 0 sees them."""

        def names(storage: Storage, token: CancelToken) -> list[str]:
            found = listing.prefixes(storage)
            if is_first and self._context.catalog is not None:
                self._advice = self._context.catalog.find_restore_points(storage.url)
                self._log_left_out(found)
            if self._advice is None:
                return retention.newest_first(found)
            offered = [point.prefix for point in self._advice.points]
            order = retention.restore_order(found, offered, self._advice.excluded)
            if is_first and self._missing and not order:
                # From step 0 on, the job would abandon them all.
                raise none_found(offered[0], storage.url)
            return order

        return await self._context.decide(names, list[str], ExceptionType.LOAD_FAILED, is_alone=is_alone)

    def _log_left_out(self, found: Collection[str]) -> None:
        """Log the checkpoints that are not tried, although they are in the folder or in the catalogue."""
        if self._advice is None:
            return
        offered = [point.prefix for point in self._advice.points]
        # Those after the first that is there are no better.
        missing = takewhile(lambda name: name not in found, offered)
        self._missing = dict.fromkeys(missing, "the catalogue has it, and the folder does not")
        left_out = {name: reason for name, reason in self._advice.excluded.items() if name in found} | self._missing
        for name in retention.newest_first(left_out)[:SHOWN_MAX]:
            self._context.log.warning("checkpoint skipped", prefix=name, reason=left_out[name])


def _reason(error: CheckpointException) -> str:
    """Why a checkpoint is skipped. The next one is loaded over what it has left in the arrays of the state."""
    return error.message.removesuffix(PARTLY_OVERWRITTEN)
