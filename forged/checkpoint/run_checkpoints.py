"""The checkpoints of a training run in one folder: saved when they are due, resumed from, deleted when superseded.

Invariants:
- All ranks make the same calls; rank 0 chooses names, candidates and what is deleted.
- A run resumes from the newest checkpoint that can be restored. Where checkpoints exist and none can be restored, it
  does not start anew without an error.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from itertools import takewhile
from types import MappingProxyType, TracebackType
from typing import Any, Self, SupportsFloat, TypeVar

import msgspec

from forged.catalog.cadence import CadencePolicy, Measured
from forged.checkpoint import rng
from forged.checkpoint.checkpoint import CheckpointLoadResult, DistributedCheckpoint
from forged.checkpoint.errors import CheckpointException, ExceptionType, invalid
from forged.checkpoint.format.tree import LeafType
from forged.checkpoint.model import (
    CHAIN_MAX,
    DEFAULT_TIMEOUT_S,
    CheckpointInfo,
    LoadOptions,
    SaveOptions,
    check_count,
    check_positive,
    check_timeout,
)
from forged.checkpoint.ports import (
    CancelToken,
    CataloguedCheckpoint,
    CheckpointCatalog,
    HostSlots,
    RestoreAdvice,
    Restored,
    Storage,
    bounded,
)
from forged.checkpoint.rank_group import RankGroup, as_coordinator
from forged.checkpoint.run import retention
from forged.checkpoint.run.restorable import (
    SHOWN_MAX,
    first_restorable,
    is_corruption,
    is_damage,
    none_found,
    none_restorable,
)
from forged.checkpoint.run.save_schedule import Look, SaveSchedule
from forged.checkpoint.run.superseded import SupersededCheckpoints
from forged.checkpoint.saving.background import SAVES_MAX, SaveHandle
from forged.checkpoint.saving.incremental import BASE_GONE
from forged.checkpoint.saving.publication import EXISTS
from forged.checkpoint.saving.receipts import RANK_GONE
from forged.checkpoint.stateful import ScriptState
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.fault_handler import FaultToleranceHandler
from forged.checkpoint.storage.locations import root_at
from forged.checkpoint.thread_calls import run_in_thread
from forged.logger_adapter import SCRIPT_LOG, as_log

T = TypeVar("T")

FORCED = "the script asked for it"


class AsyncCheckpoints:
    """The checkpoints of a training run; asynchronous. `Checkpoints` is the same for scripts without an event loop."""

    def __init__(
        self,
        where: str | os.PathLike[str],
        *,
        every: int | None = None,
        every_seconds: float | None = None,
        automatic: bool = False,
        keep: int | None = None,
        ranks: Any = None,
        in_background: bool = False,
        memory_every: int | None = None,
        incremental: bool = False,
        chain_max: int = CHAIN_MAX,
        timeout: float = DEFAULT_TIMEOUT_S,
        leaf_types: Sequence[LeafType] = (),
        generators: rng.Generators | None = None,
        logger: Any = SCRIPT_LOG,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`where` is a directory or the URL of a folder. Every `every`-th step is saved, and after `every_seconds`, and
        with `automatic` at the interval that loses least time; without any of them, every step. The newest `keep`
        checkpoints are kept; None keeps all. With `ranks`, such as a worker of a job, all ranks call this together.

        Every `memory_every`-th step is copied into memory of the host that outlives the workers, as far as the daemon
        has slots for them; the daemon writes the last copy to disk when a worker fails.

        With `incremental`, a checkpoint has only the chunks that the latest one of this process lacks. A restore reads
        from at most `chain_max` checkpoints, and no more are kept for it; one that would need more of them is full.
        """
        check_timeout(timeout)
        self._monotonic = monotonic
        self._schedule = SaveSchedule(_policy(every, every_seconds, automatic), monotonic())
        self._keep = None if keep is None else check_positive("keep", keep)
        self._in_background = in_background
        self._memory_every = None if memory_every is None else check_positive("memory_every", memory_every)
        self._incremental = incremental
        self._chain_max = check_positive("chain_max", chain_max)
        self._timeout_s = timeout
        self._log = as_log(logger)
        storage = root_at(where)
        self._faults = FaultToleranceHandler(storage)
        self._storage = self._faults.guard(storage)
        self._coordinator = as_coordinator(ranks)
        self._is_worker = callable(getattr(ranks, "update_training_state", None))
        self._ranks = ranks
        make = partial(
            DistributedCheckpoint,
            storage=storage,
            fault_handler=self._faults,
            logger=self._log,
            default_timeout=timeout,
            leaf_types=leaf_types,
            generators=generators,
        )
        self._checkpoint, self._alone = make(ranks), make(None)
        self._in_memory = partial(DistributedCheckpoint, None, logger=self._log, leaf_types=leaf_types)
        self._checkpoint.keep = self._keep
        self._superseded = SupersededCheckpoints(self._storage, self._log)
        self._last: tuple[int, str] | None = None
        """The step and the name of the checkpoint that was saved or loaded last."""
        self._base: str | None = None
        """The latest checkpoint that was committed or loaded here, on which incremental ones build."""
        self._handles: list[SaveHandle] = []
        """The saves in the background."""
        self._is_root = False
        """Whether this rank deletes superseded checkpoints."""
        self._advice: RestoreAdvice | None = None
        """What the catalogue has said when this run was resumed, if this rank has asked it."""
        self._missing: dict[str, str] = {}
        """The best restore points, as far as the folder does not have them, with the reason."""

    @property
    def is_single_process(self) -> bool:
        """Whether no other rank takes part."""
        return self._checkpoint.is_single_process

    # Resuming.

    async def resume(self, state: Any) -> int:
        """Load the newest checkpoint that can be restored into `state`; returns its step, 0 if there is none.

        A worker that has not entered a world loads by itself, and continues from that step. `state` is filled in
        place: a dict of arrays, plain values and objects with `state_dict` and `load_state_dict`, or such an object.
        """
        is_alone = self._is_worker and self._coordinator.rank < 0
        checkpoint = self._alone if is_alone else self._checkpoint
        failures: dict[str, CheckpointException] = {}
        self._advice, self._missing = None, {}
        if is_alone and (step := await self._resume_from_memory(state)) is not None:
            return step
        # Listed again after each failure: newer ones may have been saved, and the rest deleted, meanwhile.
        while names := [name for name in await self._names(is_alone, is_first=not failures) if name not in failures]:
            options = LoadOptions(names[0], load_rng_state=not self._is_worker, timeout=self._timeout_s)
            began_at = self._monotonic()
            try:
                async with self._held(names[0]):
                    result = await checkpoint.load(ScriptState(state), options=options)
            except CheckpointException as error:
                if not is_damage(error):
                    raise
                self._note_damage(names[0], error)
                failures[names[0]] = error
            else:
                # A checkpoint that builds on a damaged one would have the damage, too.
                self._base = None if result.repaired else names[0]
                for chunk in result.repaired[:1]:
                    self._log.warning(
                        "the checkpoint has corrupt chunks; healthy copies were loaded instead",
                        prefix=names[0],
                        chunks=len(result.repaired),
                        first=f"chunk {chunk.chunk} of {chunk.tensor} in {chunk.file}",
                    )
                seconds = self._monotonic() - began_at
                return self._resumed(names[0], result, seconds, failures, is_alone=is_alone)
        if failures:
            raise none_restorable(failures, self._storage.url)
        return 0

    async def _resume_from_memory(self, state: Any) -> int | None:
        """Load what the workers of the job have staged last, if it is newer than what is on disk; returns its step."""
        slots: HostSlots | None = getattr(self._ranks, "slots", None)
        if slots is None:
            return None
        began_at, token = self._monotonic(), CancelToken(self._timeout_s)
        with ExitStack() as stack:
            storage = await run_in_thread(lambda: stack.enter_context(slots.staged(self._storage.url, token)), token)
            if storage is None:
                return None
            options = LoadOptions(storage.prefix, load_rng_state=False, timeout=self._timeout_s)
            try:
                result = await self._in_memory(storage).load(ScriptState(state), options=options)
            except CheckpointException as error:
                if not is_damage(error):
                    raise
                self._log.warning("what is in memory cannot be restored", reason=error.message)
                return None
        manifest, seconds = result.metadata, self._monotonic() - began_at
        step = manifest.step or 0
        self._schedule.begin(step, self._monotonic())
        self._ranks.update_training_state(manifest.epoch or 0, step, self._ranks.learning_rate)
        if (catalog := self._catalog) is not None:
            catalog.report_restore(Restored(None, step, seconds, manifest.size_bytes, []))
        self._log.info("resumed from memory", prefix=storage.prefix, step=step)
        return step

    def _note_damage(self, name: str, error: CheckpointException) -> None:
        self._superseded.damaged.add(name)
        self._log.warning("checkpoint skipped: it cannot be restored", prefix=name, reason=error.message)
        point, catalog = self._point(name), self._catalog
        if point is not None and catalog is not None and is_corruption(error):
            catalog.report_corrupt(point.checkpoint_id, error.message)

    def _resumed(
        self,
        name: str,
        result: CheckpointLoadResult,
        seconds: float,
        failures: Mapping[str, CheckpointException],
        *,
        is_alone: bool,
    ) -> int:
        manifest = result.metadata
        step = retention.step_of(name) if manifest.step is None else manifest.step
        self._schedule.begin(step, self._monotonic())
        self._superseded.restorable.add(name)
        self._last = step, name
        point, catalog = self._point(name), self._catalog
        if is_alone:
            self._ranks.update_training_state(manifest.epoch or 0, step, self._ranks.learning_rate)
            if catalog is not None:
                reasons = self._missing | {prefix: error.message for prefix, error in failures.items()}
                skipped = [f"{prefix}: {reason}" for prefix, reason in reasons.items()]
                catalog.report_restore(Restored(point, step, seconds, result.bytes_read, skipped))
        why = {} if point is None else {"reason": point.reason}
        self._log.info("resumed from a checkpoint", prefix=name, step=step, **why)
        return step

    @property
    def _catalog(self) -> CheckpointCatalog | None:
        """The catalogue of this worker's job."""
        catalog: CheckpointCatalog | None = getattr(self._ranks, "checkpoint_catalog", None)
        return catalog

    def _point(self, name: str) -> CataloguedCheckpoint | None:
        """What the catalogue has said of a checkpoint that it offers, to the rank that has asked it."""
        points = () if self._advice is None else self._advice.points
        return next((point for point in points if point.prefix == name), None)

    @asynccontextmanager
    async def _held(self, name: str) -> AsyncIterator[None]:
        """Have the catalogue keep a checkpoint while it is read."""
        point, catalog = self._point(name), self._catalog
        with ExitStack() as stack:
            if point is not None and catalog is not None:
                hold = partial(stack.enter_context, catalog.hold(point.checkpoint_id))
                await run_in_thread(hold, CancelToken(self._timeout_s))
            yield

    async def latest(self) -> CheckpointInfo | None:
        """The newest checkpoint of the run whose files are there with the right sizes; None if there is none."""
        token = CancelToken(self._timeout_s)

        def find() -> CheckpointInfo | None:
            storage = bounded(self._storage, token)
            return first_restorable(storage, token, retention.newest_first(listing.prefixes(storage)))

        return await run_in_thread(find, token)

    async def _names(self, is_alone: bool, *, is_first: bool) -> list[str]:
        """The checkpoints of the run that may be restored, the best first, as rank 0 sees them."""

        def names(storage: Storage, token: CancelToken) -> list[str]:
            found = listing.prefixes(storage)
            if is_first and self._catalog is not None:
                self._advice = self._catalog.find_restore_points(storage.url)
                self._log_left_out(found)
            if self._advice is None:
                return retention.newest_first(found)
            offered = [point.prefix for point in self._advice.points]
            order = retention.restore_order(found, offered, self._advice.excluded)
            if is_first and self._missing and not order:
                # From step 0 on, the job would abandon them all.
                raise none_found(offered[0], storage.url)
            return order

        return await self._decide(names, list[str], ExceptionType.LOAD_FAILED, is_alone=is_alone)

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
            self._log.warning("checkpoint skipped", prefix=name, reason=left_out[name])

    # Saving.

    def is_due(self, step: int) -> bool:
        """Whether `save` saves this step. Where time decides, whether it asks rank 0 after this step."""
        return self._schedule.is_due_by_steps(step) or self._schedule.is_look_due(step, self._generation)

    async def save(
        self,
        step: int,
        state: Any,
        *,
        epoch: int | None = None,
        metrics: Mapping[str, SupportsFloat] = MappingProxyType({}),
        force: bool = False,
    ) -> str | None:
        """Save the state after `step` steps if that step is due, or with `force`; returns the checkpoint's name.

        The checkpoint that this run has just resumed from, or saved, is not saved again. With `in_background` this
        returns when the state is copied.
        """
        step = check_count("step", step)
        is_due = force or self.is_due(step)
        if not is_due and not self._is_copied(step):
            return None
        if self._coordinator.rank < 0:
            raise invalid("the worker is in no world", "save inside a step", code="checkpoint_no_world")
        reason = FORCED if force else await self._reason(step) if is_due else ""
        if not reason:
            await self._copy(step, state, epoch, metrics)
            return None
        began_at = self._monotonic()
        name, is_saved, base = await self._name(step)
        if is_saved:
            return name
        options = SaveOptions(
            name,
            include_rng_state=not self._is_worker,
            timeout=self._timeout_s,
            step=step,
            epoch=epoch,
            metrics=metrics,
            reason=reason,
            base=base,
            chain_max=self._chain_max,
        )
        # In the background, the first calls may raise the failures of earlier saves. A save whose base is deleted
        # meanwhile is repeated, and then full.
        for calls_left in reversed(range(SAVES_MAX + 1 if self._in_background else 2)):
            try:
                await self._saved(ScriptState(state), options)
                break
            except CheckpointException as error:
                is_repeated = error.code == BASE_GONE or (self._in_background and error.code == RANK_GONE)
                if error.code != EXISTS and not (calls_left and is_repeated):
                    raise
                self._log_lost(error)
                if error.code == EXISTS and not self._in_background:
                    break
        self._last = step, name
        ended_at = self._monotonic()
        self._schedule.saved(step, ended_at, ended_at - began_at)
        return name

    def _is_copied(self, step: int) -> bool:
        """Whether a step that is not saved is copied into memory of the host."""
        return self._memory_every is not None and step > 0 and step % self._memory_every == 0

    async def _copy(self, step: int, state: Any, epoch: int | None, metrics: Mapping[str, SupportsFloat]) -> None:
        """Copy a step that is not saved into memory of the host, if it is due and there are slots."""
        if not self._is_copied(step):
            return
        name, is_saved, _ = await self._name(step)
        if is_saved:
            return
        options = SaveOptions(
            name,
            include_rng_state=not self._is_worker,
            timeout=self._timeout_s,
            step=step,
            epoch=epoch,
            metrics=metrics,
        )
        try:
            await self._checkpoint.keep_in_memory(ScriptState(state), options=options)
        except CheckpointException as error:
            # The failure of an earlier save.
            if error.code not in {RANK_GONE, BASE_GONE}:
                raise
            self._log_lost(error)

    @property
    def _generation(self) -> int:
        """The number of the present world; 0 without workers."""
        return int(getattr(self._coordinator, "generation", 0))

    async def _reason(self, step: int) -> str:
        """Why this step is saved, the same at all ranks; empty if it is not."""
        schedule, generation = self._schedule, self._generation
        catalog = self._catalog if self._coordinator.rank == 0 else None
        if schedule.is_due_by_steps(step):
            if catalog is not None:
                catalog.tell_cadence(schedule.steps_reason)
            return schedule.steps_reason
        if not schedule.is_look_due(step, generation):
            return ""
        ranks = RankGroup(self._coordinator, CancelToken(self._timeout_s), ExceptionType.SAVE_FAILED)
        measured = Measured() if catalog is None else catalog.measured()
        found = msgspec.msgpack.encode(schedule.look(step, self._monotonic(), measured)) if ranks.is_root else b""
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
        self._log.warning("a checkpoint was not saved", reason=error.message)

    async def _saved(self, state: ScriptState, options: SaveOptions) -> None:
        name, step = options.checkpoint_prefix, options.step
        assert name is not None
        assert step is not None
        if self._in_background:
            # The earlier background saves that are committed supersede older checkpoints.
            await self._delete_superseded(step)
            handle = await self._checkpoint.save_async(state, options=options)
            self._handles = [*(one for one in self._handles if not one.is_committed), handle]
            return
        await self._checkpoint.save(state, options=options)
        self._superseded.restorable.add(name)
        self._base = name
        await self._delete_superseded(step)

    async def _name(self, step: int) -> tuple[str, bool, str | None]:
        """The name for a step's checkpoint, whether it is saved already, and what it builds on, as rank 0 decides."""
        last = self._last
        for handle in self._handles:
            if handle.is_committed:
                self._base = handle.prefix
        base = self._base if self._incremental else None

        def choose(storage: Storage, token: CancelToken) -> tuple[str, bool, str | None]:
            if last is not None and last[0] == step and not self._has_failed(last[1]):
                return last[1], True, None
            return retention.name_of(step, partial(_is_taken, storage)), False, base

        return await self._decide(choose, tuple[str, bool, str | None], ExceptionType.SAVE_FAILED)

    def _has_failed(self, name: str) -> bool:
        """Whether a save in the background has failed."""
        return any(handle.prefix == name and handle.is_done and not handle.is_committed for handle in self._handles)

    async def _decide(
        self,
        act: Callable[[Storage, CancelToken], T],
        result: Any,
        kind: ExceptionType,
        *,
        is_alone: bool = False,
    ) -> T:
        """What rank 0 finds in the storage, at all ranks."""
        token = CancelToken(self._timeout_s)
        ranks = RankGroup(as_coordinator(None) if is_alone else self._coordinator, token, kind)
        self._is_root = ranks.is_root

        async def nothing() -> bytes:
            return b""

        async def find(replies: list[bytes]) -> bytes:
            storage = bounded(self._storage, token)
            return msgspec.msgpack.encode(await run_in_thread(partial(act, storage, token), token))

        found: T = msgspec.msgpack.decode(await ranks.decide(nothing, find), type=result)
        return found

    async def _delete_superseded(self, step: int) -> None:
        if self._keep is not None and self._is_root:
            await self._superseded.delete(step, self._keep, self._catalog, self._timeout_s)

    # Closing.

    async def close(self) -> None:
        """Wait for background saves, raise their failures, and delete what they supersede."""
        for handle in self._handles:
            try:
                await handle.committed()
            except CheckpointException as error:
                if error.code not in {EXISTS, RANK_GONE, BASE_GONE}:
                    await self._checkpoint.close()
                    raise
                self._log_lost(error)
        self._handles = []
        await self._checkpoint.close()
        if self._in_background and self._last is not None:
            await self._delete_superseded(self._last[0])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _is_taken(storage: Storage, name: str) -> bool:
    return listing.checkpoint_exists(storage, name) or listing.is_being_deleted(storage, name)


def _policy(every: Any, every_seconds: Any, automatic: bool) -> CadencePolicy:
    steps = None if every is None else check_positive("every", every)
    if steps is None and every_seconds is None and not automatic:
        steps = 1
    if every_seconds is not None and not (isinstance(every_seconds, int | float) and 0.0 < every_seconds < math.inf):
        raise invalid(f"every_seconds must be above 0 seconds or None, got {every_seconds!r}")
    return CadencePolicy(every_steps=steps, every_seconds=every_seconds, automatic=automatic)
